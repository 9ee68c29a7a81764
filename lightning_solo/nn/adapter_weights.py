"""The weights of adapters in checkpoints, and what identifies the base to which they belong."""

from __future__ import annotations

import math
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
from lightning_solo.nn.quantized import quantized, weights_in

RECORD = "adapter"
"""Key of a checkpoint under which the adapter's configuration and what identifies its base are stored."""
SAMPLES = 16
"""Values of each weight that are recorded of a base."""
BOUNDS = {None: 0.0, "int8": 0.03, "nf4": 0.5}
"""Format of a weight -> bound of the relative difference between its samples before and after rounding.

Rounding changes them by about 0.009 and 0.09, and on another processor by much less than that; another base by more
than 1.
"""
Record = dict[str, dict[str, Any]]


def trained_keys(module: nn.Module, config: AdapterConfig, keys: Iterable[str]) -> list[str]:
    """Return those keys of a state dict that belong to an adapter or to modules that are trained whole."""
    adapter = adapter_parameters(module, config.name)
    shared = {id(p) for p in adapter.values()}
    every = {key for key, p in module.named_parameters(remove_duplicate=False) if id(p) in shared}
    whole = whole_parameters(module, config.modules_to_save)
    return [key for key in keys if key in every or plain_key(key) in whole]


def require_modules(module: nn.Module, config: AdapterConfig) -> None:
    """Refuse a module without the layers of an adapter."""
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


def refuse_other_base(base: Record | None, saved: Record | None) -> None:
    """Refuse an adapter of other weights than the module has.

    Weights in 4 or 8 bits, here or when the adapter was trained, may differ by as much as rounding changes them, since
    processors round a little differently.
    """
    if base is None or saved is None:
        return
    none: dict[str, Any] = {"shape": None}
    other = [key for key in {**base, **saved} if base.get(key, none)["shape"] != saved.get(key, none)["shape"]]
    kind = "weights: "
    if not other:
        other, kind = [key for key in base if _differ(base[key], saved[key])], "values in "
    if other:
        raise CheckpointError(
            f"the adapter was trained on a module with other {kind}{listed(other)}; load the same base into the module"
            " before its adapter (on the command line, put the former files back into the base's folder, or export with"
            " --base-folder FOLDER, where they are). A module into which adapters were merged is no longer that base:"
            " build it anew"
        )


def _differ(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    bound = max(BOUNDS[each["format"]] for each in (ours, theirs))
    return bool(ours["values"] and theirs["values"]) and _distance(ours["values"], theirs["values"]) > bound


def base_record(module: nn.Module, config: AdapterConfig) -> Record | None:
    """Return what identifies the frozen weights; None for a module without values.

    Returns:
        Qualified name without adapters -> ``shape``; ``format``, "nf4" or "int8" if the weight is in 4 or 8 bits, else
        None; and ``values``, some of its numbers, or none if the weight is trained or changed by PiSSA.
    """
    tensors = base_tensors(module)
    if any(p.is_meta or isinstance(p, FakeTensor) for p in tensors.values()):
        return None
    changed = {f"{name}.weight" for name in config.layers} if config.method == "pissa" else set()
    changed |= whole_parameters(module, config.modules_to_save).keys()
    record: Record = {
        key: {"shape": list(p.shape), "format": None, "values": _samples(p)} for key, p in tensors.items()
    }
    record |= quantized_record(module)
    return {key: {**each, "values": [] if key in changed else each["values"]} for key, each in record.items()}


def quantized_record(module: nn.Module) -> Record:
    """Return the entries of `base_record` for weights in 4 or 8 bits, with their rounded values."""
    return {
        f"{name}.{own}" if name else own: {
            "shape": list(weight.shape), "format": weight.rounding, "values": _samples(weight.saved())
        }
        for name, part in plain_modules(module)
        for own, weight in weights_in(part).items()
    }  # fmt: skip


def unrounded(module: nn.Module, saved: Record | None) -> dict[str, str]:
    """Return name -> format of each weight that an adapter was trained on in 4 or 8 bits, and that isn't rounded here.

    Args:
        module: possibly with the adapter.
        saved: of the adapter's base, from `base_record`.
    """
    tensors = base_tensors(module)
    return {
        key: each["format"]
        for key, each in (saved or {}).items()
        if each["format"] is not None
        and key in tensors
        and _distance(_samples(tensors[key]), each["values"]) > BOUNDS[each["format"]] / 16
    }


@torch.no_grad()
def round_base(module: nn.Module, saved: Record | None) -> str | None:
    """Round weights as they were while an adapter was trained; return a line about it, None if none was to round."""
    formats, tensors = unrounded(module, saved), base_tensors(module)
    for key, form in formats.items():
        tensors[key].data = quantized(tensors[key].detach(), form).dequantized()
    if not formats:
        return None
    return f"adapters: {len(formats)} weights are rounded as in the run that trained the adapter: {listed(formats)}"


def _samples(weight: Tensor) -> list[float]:
    """Return values at equal distances, rounded to bf16: a base in bf16 is the one in fp32 that it was rounded from."""
    flat = weight.detach().reshape(-1)
    count = min(SAMPLES, flat.numel())
    places = torch.arange(count, device=flat.device) * (flat.numel() - 1) // max(1, count - 1)
    return flat[places].to(torch.bfloat16).tolist()


def _distance(values: Sequence[float], reference: Sequence[float]) -> float:
    """Return the norm of a difference relative to that of the reference."""
    change = math.dist(values, reference)
    return change and change / max(math.hypot(*reference), 1e-30)
