"""The weights of adapters in checkpoints, and what identifies the base to which they belong."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_solo.errors import CheckpointError, listed
from lightning_solo.nn.adaptation import (
    AdapterConfig,
    adapter_parameters,
    base_tensors,
    plain_key,
    whole_parameters,
)
from lightning_solo.nn.adapted import plain_modules
from lightning_solo.nn.quantized import QuantizedWeight, quantized, weights_in

RECORD = "adapter"
"""Key of a checkpoint under which the adapter's configuration and what identifies its base are stored."""
SAMPLES = 16
"""Values of each weight that the hash of a base covers."""


def trained_keys(module: nn.Module, config: AdapterConfig, keys: Iterable[str]) -> list[str]:
    """Return those keys of a state dict that belong to an adapter or to modules that are trained whole."""
    adapter = adapter_parameters(module, config.name)
    shared = {id(p) for p in adapter.values()}
    every = {key for key, p in module.named_parameters(remove_duplicate=False) if id(p) in shared}
    whole = whole_parameters(module, config.modules_to_save)
    return [key for key in keys if key in every or plain_key(key) in whole]


def require_modules(module: nn.Module, config: AdapterConfig) -> None:
    """Refuse a module without the layers of an adapter.

    Raises:
        CheckpointError: a layer is missing.
    """
    there = {name for name, _ in plain_modules(module)}
    if lacking := [name for name in (*config.layers, *config.modules_to_save, *config.tokens) if name not in there]:
        raise CheckpointError(
            f"{type(module).__name__} has no {listed(lacking)}, of which the checkpoint has adapters: load it into a"
            " module of the class that was trained"
        )


def load_adapter_weights(
    module: nn.Module, config: AdapterConfig, weights: Mapping[str, Any], load: Callable[..., Any] | None = None
) -> list[str]:
    """Load an adapter, modules that are trained whole, and buffers; return the names of the buffers.

    Args:
        module: with the adapter.
        config: of the adapter.
        weights: as `trained_keys` selects them, and buffers.
        load: loads a state dict, with ``strict``; by default the module's ``load_state_dict``.

    Raises:
        CheckpointError: other keys are missing than those of frozen weights and of buffers, or some are unknown.
    """
    own = module.state_dict()
    buffers = {name for name, _ in module.named_buffers()}
    trained = set(trained_keys(module, config, own))
    missing = [key for key in own if key in trained and key not in weights]
    unknown = [key for key in weights if key not in own]
    frozen = [key for key in weights if key in own and key not in buffers and key not in trained]
    for keys, what in ((missing, "lacks"), (unknown, "has unknown"), (frozen, "has the frozen")):
        if keys:
            raise CheckpointError(
                f"the checkpoint of the adapter {config.name!r} {what} weights: {listed(keys)}; it was saved with"
                " another module"
            )
    (load or module.load_state_dict)(weights, strict=False)
    return [key for key in weights if key in buffers]


def refuse_other_base(base: Mapping[str, Any] | None, saved: Mapping[str, Any] | None) -> None:
    """Refuse an adapter of other weights than the module has.

    Weights that were in 4 or 8 bits while the adapter was trained may have their numbers from before, or the rounded.

    Raises:
        CheckpointError: names, shapes or values differ; the message names the first weights that do.
    """
    if base is None or saved is None:
        return
    rounded, checksums = saved.get("rounded", {}), base["checksums"]
    right = {key: {checksum, *rounded.get(key, ())[1:]} for key, checksum in saved["checksums"].items()}
    other = [key for key, checksum in checksums.items() if checksum not in right.get(key, {checksum})]
    other += [key for key, each in base["rounded"].items() if each != rounded.get(key, each)]
    if other or base["names"] != saved["names"]:
        now, before = {*checksums, *base["rounded"]}, {*saved["checksums"], *rounded}
        why = (
            f"other values in {listed(other)}"
            if other
            else f"other weights ({listed(sorted(now ^ before)) or 'shapes'})"
        )
        raise CheckpointError(
            f"the adapter was trained on a module with {why}: load the same base into the module before its adapter."
            " A module into which adapters were merged is no longer that base: build it anew"
        )


def base_samples(module: nn.Module, config: AdapterConfig) -> dict[str, Any] | None:
    """Return what identifies the frozen weights: a hash of names and shapes, and a checksum of values of each weight.

    Values are rounded to bf16 first, so that a base in bf16 is the same as the one in fp32 that it was rounded from.
    Weights that are trained have no checksum, nor those that PiSSA changes.

    Returns:
        ``names``; ``checksums`` of plain weights; ``rounded``, format and checksum of each weight in 4 or 8 bits. None
        for a module without values.
    """
    tensors, rounded = base_tensors(module), _quantized_tensors(module)
    if any(p.is_meta or isinstance(p, FakeTensor) for p in tensors.values()):
        return None
    unknown = {f"{name}.weight" for name in config.layers} if config.method == "pissa" else set()
    unknown |= whole_parameters(module, config.modules_to_save).keys()
    names = {key: tuple(each.shape) for part in (tensors, rounded) for key, each in part.items()}
    text = ";".join(f"{key}{names[key]}" for key in sorted(names))
    return {
        "names": hashlib.sha256(text.encode()).hexdigest(),
        "checksums": {key: _checksum(p) for key, p in sorted(tensors.items()) if key not in unknown},
        "rounded": {key: each for key, each in rounded_samples(module).items() if key not in unknown},
    }


def rounded_samples(module: nn.Module) -> dict[str, list[Any]]:
    """Return qualified name without adapters -> format and checksum of each weight that is in 4 or 8 bits."""
    return {key: [w.format, _checksum(w.dequantized())] for key, w in _quantized_tensors(module).items()}


def plain_that_were_rounded(module: nn.Module, saved: Mapping[str, Any] | None) -> dict[str, str]:
    """Return name -> format of each plain weight that was in 4 or 8 bits while an adapter was trained, unless rounded.

    Args:
        module: possibly with the adapter.
        saved: the base of the adapter, from `base_samples`.
    """
    tensors, rounded = base_tensors(module), (saved or {}).get("rounded", {})
    return {
        key: form for key, (form, checksum) in rounded.items() if key in tensors and _checksum(tensors[key]) != checksum
    }


@torch.no_grad()
def round_base(module: nn.Module, saved: Mapping[str, Any] | None) -> list[str]:
    """Round weights as they were while an adapter was trained; return the names of those that weren't rounded before.

    Raises:
        CheckpointError: a rounded weight isn't the one on which the adapter was trained.
    """
    plain, tensors = plain_that_were_rounded(module, saved), base_tensors(module)
    for key, form in plain.items():
        tensors[key].data = quantized(tensors[key].detach(), form).dequantized()
    if wrong := plain_that_were_rounded(module, saved):
        raise CheckpointError(
            f"the adapter was trained on other values in {listed(wrong)}: load the same base before it"
        )
    return list(plain)


def rounding_summary(names: Sequence[str]) -> str:
    """Return a line about what `round_base` returned."""
    return f"adapters: {len(names)} weights are rounded as in the run that trained the adapter: {listed(names)}"


def _quantized_tensors(module: nn.Module) -> dict[str, QuantizedWeight]:
    return {
        f"{name}.{own}" if name else own: weight
        for name, part in plain_modules(module)
        for own, weight in weights_in(part).items()
    }


def _checksum(weight: Tensor) -> int:
    flat = weight.detach().reshape(-1)
    count = min(SAMPLES, flat.numel())
    if count == 0:
        return 0
    places = torch.arange(count, device=flat.device) * (flat.numel() - 1) // max(1, count - 1)
    values = flat[places].to("cpu", torch.bfloat16).view(torch.int16)
    return zlib.crc32(values.numpy().tobytes())
