"""Put adapters of peft into a module, freeze everything else, merge them and take them out.

``import peft`` takes ten seconds, so it happens in the functions that need it. None of them asks a hub.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_solo.bitsandbytes_operators import bitsandbytes
from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError, PresetError, listed
from lightning_solo.machine import is_installed
from lightning_solo.nn.adapted import plain, plain_modules
from lightning_solo.nn.adapter_targets import owners_of_weights

OPTION = "callback.adapters"
CONFIGS = "solo_configs"
"""The attribute of peft's layers that holds name -> `AdapterConfig`."""
ADAPTER_TABLES = ("lora_", "ia3_", "trainable_tokens_")
"""Starts of the names under which peft's layers hold the weights of adapters."""
SAMPLES = 16
"""Values of each weight that the hash of a base covers."""


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter is; plain data, saved with its weights.

    Attributes:
        name: of the adapter.
        method: one of `adapter_targets.KINDS`.
        r: rank.
        alpha: scale; the product of the factors is multiplied by alpha / r, under rslora by alpha / sqrt(r).
        dropout: probability.
        layers: qualified names of the adapted layers.
        feed_forward: those whose input IA3 scales.
        modules_to_save: qualified names of modules that are trained whole.
        tokens: qualified name of an embedding -> rows that are trained.
    """

    name: str
    method: str
    r: int
    alpha: float
    dropout: float
    layers: tuple[str, ...] = ()
    feed_forward: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return it as lists and dictionaries."""
        record = asdict(self)
        lists = {key: list(value) for key, value in record.items() if isinstance(value, tuple)}
        return {**record, **lists, "tokens": {name: list(rows) for name, rows in self.tokens.items()}}

    def renamed(self, name: str) -> AdapterConfig:
        """Return it with another name."""
        return replace(self, name=name)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> AdapterConfig:
        """Return the configuration of a `record`."""
        values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in record.items()}
        return cls(**{**values, "tokens": {name: tuple(rows) for name, rows in record["tokens"].items()}})


# --- where adapters are ---


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """Return qualified name without adapters -> peft's layer in the place of the module's.

    Embeddings of which rows are trained, and parts of adapted attention modules, are left out.
    """
    layers = {name: part for name, part in _replaced(module) if "token_adapter" not in part._modules}
    attention = {f"{name}.out_proj" for name, part in layers.items() if _is_attention(plain(part))}
    return {name: part for name, part in layers.items() if name not in attention}


def _replaced(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (qualified name, module of peft) for each that stands in the place of a layer, and of each place."""
    for name, child in module._modules.items():
        if child is None:
            continue
        path = f"{prefix}{name}"
        if plain(child) is not child:
            yield path, child
            child = plain(child)
        yield from _replaced(child, f"{path}.")


def adapter_names(module: nn.Module) -> list[str]:
    """Return the names of the adapters in a module, in the order in which they were put in."""
    tables = {table for _, layer in _replaced(module) for table in getattr(layer, "adapter_layer_names", ())}
    parts = [part for _, layer in _replaced(module) for part in layer.modules()]
    every = [getattr(part, table, {}) for part in parts for table in {*tables, "trainable_tokens_delta"}]
    return list(dict.fromkeys(name for names in every for name in names))


def adapter_configs(module: nn.Module) -> dict[str, AdapterConfig]:
    """Return name -> configuration of the adapters that `insert` has put into a module."""
    configs: dict[str, AdapterConfig] = {}
    for _, layer in _replaced(module):
        configs |= vars(layer).get(CONFIGS, {})
    return configs


def adapter_parameters(module: nn.Module, name: str | None = None) -> dict[str, nn.Parameter]:
    """Return qualified name -> parameter of adapters, of all or of one; those of whole modules aren't among them."""
    base = {id(p) for p in base_tensors(module).values()}
    return {key: p for key, p in module.named_parameters() if id(p) not in base and (name is None or _is_of(key, name))}


def _is_of(key: str, name: str) -> bool:
    return name in key.split(".")[-2:]


def base_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return qualified name without adapters -> parameter of the module itself."""
    return {
        f"{name}.{own}" if name else own: p
        for name, part in plain_modules(module)
        for own, p in part._parameters.items()
        if p is not None
    }


def renamed_key(key: str, old: str, new: str) -> str:
    """Return a key of an adapter's weight under another name of the adapter.

    >>> renamed_key("net.up.lora_A.default.weight", "default", "poems")
    'net.up.lora_A.poems.weight'
    """
    parts = key.split(".")
    is_adapters = _is_of(key, old) and any(part.startswith(ADAPTER_TABLES) for part in parts[-3:])
    return ".".join([*parts[:-2], *[new if is_adapters and part == old else part for part in parts[-2:]]])


def plain_key(key: str) -> str:
    """Return a key of a state dict without the names that adapters add.

    >>> plain_key("net.up.base_layer.weight"), plain_key("embed.token_adapter.base_layer.weight")
    ('net.up.weight', 'embed.weight')
    """
    return key.replace(".token_adapter.base_layer.", ".").replace(".base_layer.", ".")


# --- putting in ---


def insert(module: nn.Module, config: AdapterConfig) -> None:
    """Put an adapter into a module, in place, and activate it; random numbers are drawn as peft draws them.

    Each place of a layer that has several gets the adapter. Its weights are fp32. ``requires_grad`` of the base is left
    to `freeze`.

    Raises:
        NothingToDoError: a row doesn't exist.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent, key, child in _places(module):
        places.setdefault(id(plain(child)), []).append((parent, key))
    configs = {**adapter_configs(module), config.name: config}
    _check_rows(module, config)
    _check_rank(module, config)
    root = nn.Module()  # peft leaves its configuration on the module that it gets
    root.module = module
    parts = [part for _, part in plain_modules(module)]
    before = [(part, dict(part._parameters)) for part in parts if part._parameters]
    flags = {p: p.requires_grad for _, own in before for p in own.values() if p is not None}
    _inject(root, config)
    for part, own in before:
        part._parameters.clear()  # peft makes new ones for attention modules, in another order
        part._parameters.update(own)
    for _, layer in list(_replaced(root)):
        for parent, key in places.get(id(plain(layer)), ()):
            parent._modules[key] = layer
    _tie_rows(module, config)
    for _, layer in _replaced(module):
        vars(layer)[CONFIGS] = configs
    use_adapter(module, config.name)
    for p, flag in flags.items():
        p.requires_grad_(flag)
    for p in adapter_parameters(module, config.name).values():
        if p.dtype in (torch.bfloat16, torch.float16):
            p.data = p.data.float()
    _call_fast_paths(module)


def _places(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return (parent, name, child) for each child of the module's own parts."""
    parts = [part for _, part in plain_modules(module)]
    return [(part, key, child) for part in parts for key, child in part._modules.items() if child is not None]


def _check_rows(module: nn.Module, config: AdapterConfig) -> None:
    modules = dict(plain_modules(module))
    for name, rows in config.tokens.items():
        table = modules[name]
        if not isinstance(table, nn.Embedding):
            raise PresetError(
                f"{OPTION}.trainable_token_indices: {name} is a {type(table).__name__}, no embedding of torch"
            )
        if wrong := [row for row in rows if not 0 <= row < table.num_embeddings]:
            raise NothingToDoError(
                f"{OPTION}.trainable_token_indices={wrong[0]}: {name} has rows 0 to {table.num_embeddings - 1}; enlarge"
                " it before the fit"
            )


def _check_rank(module: nn.Module, config: AdapterConfig) -> None:
    modules = dict(plain_modules(module))
    for name in config.layers if config.method == "pissa" else ():
        most = min(modules[name].weight.shape)  # type: ignore[arg-type]
        if config.r > most:
            raise PresetError(
                f"{OPTION}.r={config.r}: {name} has {most} singular values, from which PiSSA starts; write"
                f" {OPTION}.r={most} or less, or method=lora"
            )


def _inject(root: nn.Module, config: AdapterConfig) -> None:
    peft = imported("peft")

    def exactly(names: Sequence[str]) -> str:
        return "|".join(re.escape(f"module.{name}") for name in names) or "(?!)"

    tokens = {f"module.{name}": list(rows) for name, rows in config.tokens.items()}
    if config.method == "ia3":
        feed_forward = exactly(config.feed_forward)
        peft_config: Any = peft.IA3Config(target_modules=exactly(config.layers), feedforward_modules=feed_forward)
    else:
        peft_config = peft.LoraConfig(
            r=config.r,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=exactly(config.layers),
            use_rslora=config.method == "rslora",
            use_dora=config.method == "dora",
            init_lora_weights="pissa" if config.method == "pissa" else True,
            trainable_token_indices=tokens or None,
        )
    imported("peft.functional").inject_adapter_in_model(peft_config, root, config.name)
    for layer in list(root.modules()):
        if type(layer) is imported("peft.tuners.lora.layer").MultiheadAttention:
            layer.__class__ = exact_attention()


@functools.cache
def imported(name: str) -> Any:
    """Return a module of peft, which imports bitsandbytes where that is installed; see `bitsandbytes`."""
    if is_installed("bitsandbytes"):
        bitsandbytes()
    with _disable_current_modes():
        return importlib.import_module(name)


@functools.cache
def exact_attention() -> type[Any]:
    """Return peft's attention layer with a forward of its own.

    peft's changes the weights of the base in each forward and changes them back, which rounds them; it adds the product
    of the output projection's factors twice, of which one has no gradient; and it makes new parameters whenever they
    are listed.
    """

    class ExactAttention(imported("peft.tuners.lora.layer").MultiheadAttention):  # type: ignore[misc]
        def _restore_weights(self) -> None:
            """Leave the weights, which stay registered."""

        def _sums(self, names: Sequence[str]) -> list[tuple[dict[str, Any], str, Tensor]]:
            out = self.base_layer.out_proj
            places = (self, self.base_layer._parameters, "in_proj_weight"), (out, out.base_layer._parameters, "weight")
            return [
                (table, key, table[key] + sum(layer.get_delta_weight(name).to(table[key].dtype) for name in names))
                for layer, table, key in places
            ]

        def merge(self, safe_merge: bool = False, adapter_names: Sequence[str] | None = None) -> None:
            for table, key, weight in self._sums(adapter_names or ()):
                table[key].data = weight.detach()
            self.merged_adapters.extend(adapter_names or ())

        def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            names = [name for name in self.active_adapters if name in self.lora_A]
            if self.disable_adapters or self.merged or not names:
                return self.base_layer(query, *args, **kwargs)
            sums = self._sums(names)
            weights = [table[key] for table, key, _ in sums]
            try:
                for table, key, weight in sums:
                    table[key] = weight
                return self.base_layer(query, *args, **kwargs)
            finally:
                for (table, key, _), weight in zip(sums, weights, strict=True):
                    table[key] = weight

    return ExactAttention


def _tie_rows(module: nn.Module, config: AdapterConfig) -> None:
    """Use the trained rows of an embedding in each layer that shares its weight."""
    if not config.tokens:
        return
    modules = dict(plain_modules(module))
    owners = owners_of_weights(modules)
    wrappers = {id(plain(part)): part for _, part in _replaced(module) if "token_adapter" in part._modules}
    for name, rows in config.tokens.items():
        table = modules[name]
        for other in owners[id(table.weight)]:
            if (layer := modules[other]) is table or id(layer) in wrappers:
                continue
            tied = imported("peft.utils.other").TrainableTokensWrapper(
                layer, config.name, list(rows), wrappers[id(table)].token_adapter
            )
            for parent, key, child in _places(module):
                if child is layer:
                    parent._modules[key] = tied


def _call_fast_paths(module: nn.Module) -> None:
    """Call the layers of torch's encoder layers, whose kernel for inference reads their weights instead."""
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoderLayer) and any(plain(each) is not each for each in part.children()):
            part.activation_relu_or_gelu = 0  # as for any other activation, for which there is no such kernel


def freeze(module: nn.Module, config: AdapterConfig) -> None:
    """Let only one adapter and the modules that are trained whole require gradients."""
    whole = whole_parameters(module, config.modules_to_save)
    for key, p in base_tensors(module).items():
        p.requires_grad_(key in whole)
    for key, p in adapter_parameters(module).items():
        p.requires_grad_(_is_of(key, config.name))


def whole_parameters(module: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """Return qualified name without adapters -> parameter of modules that are trained whole.

    Raises:
        ConflictError: such a module has no weights that can be trained.
    """
    if not names:
        return {}
    modules = dict(plain_modules(module))
    found: set[int] = set()
    for name in names:
        own = [p for p in modules[name].parameters() if p.is_floating_point()]
        if not own or any("quantized_weights" in part._modules for part in modules[name].modules()):
            raise ConflictError(
                f"{OPTION}.modules_to_save={name}: it has no weights that can be trained"
                f"{'' if not own else ', since some are in 4 or 8 bits'}; leave it out of quantized_base.layers, or"
                " write its layers as targets"
            )
        found |= {id(p) for p in own}
    return {key: p for key, p in base_tensors(module).items() if id(p) in found}


def use_adapter(module: nn.Module, name: str) -> None:
    """Activate one of a module's adapters; the others stay in the module and do nothing.

    Raises:
        NothingToDoError: the module has no adapter of that name; the message lists those that it has.
    """
    if name not in (names := adapter_names(module)):
        raise NothingToDoError(f"{type(module).__name__} has no adapter {name!r}; it has {', '.join(names) or 'none'}")
    flags = {id(p): p.requires_grad for p in module.parameters()}
    imported("peft.functional").set_adapter(module, name)
    for p in module.parameters():
        p.requires_grad_(flags[id(p)])


# --- taking out ---


def remove_adapters(module: nn.Module) -> None:
    """Take all adapters out of a module, which then computes as before they were put in; same objects, same keys.

    Raises:
        ConflictError: an adapter was made by PiSSA, which moves a part of each weight into its factors.
        NothingToDoError: there are no adapters.
    """
    _require(module)
    if moved := [name for name, config in adapter_configs(module).items() if config.method == "pissa"]:
        raise ConflictError(
            f"the adapter {moved[0]!r} was made by PiSSA, which has moved a part of each weight into its factors, so"
            " the weights alone are not those of the module; write solo.merge_adapters(module)"
        )
    _take_out(module)


def merge(module: nn.Module) -> dict[str, float]:
    """Add the active adapter to the weights, in fp32 and rounded once to their type, and take all adapters out.

    Returns:
        Qualified name of each layer -> largest difference of its outputs for random inputs, before and after merging,
        relative to the largest output.

    Raises:
        ConflictError: a weight is in 4 or 8 bits, or an adapter isn't finite; nothing is changed then.
        NothingToDoError: there are no adapters.
    """
    _require(module)
    for name, layer in adapted_layers(module).items():
        if "quantized_weights" in plain(layer)._modules:
            raise ConflictError(
                f"{name} has its weight in 4 or 8 bits, which can't hold the sum with an adapter: merging would change"
                " the outputs by as much as the adapter does; merge into a module with plain weights"
            )
    if wrong := [key for key, p in adapter_parameters(module).items() if not bool(torch.isfinite(p).all())]:
        raise ConflictError(f"the adapter has values that aren't finite ({listed(wrong)}); merge another checkpoint")
    differences: dict[str, float] = {}
    for name, layer in {id(layer): (name, layer) for name, layer in adapted_layers(module).items()}.values():
        differences[name] = _merge_layer(layer)
    for _, wrapper in _replaced(module):
        rows: Any = wrapper._modules.get("token_adapter")
        if rows is not None and rows.tied_adapter is None:
            for name in rows.active_adapters:
                weight = rows.base_layer.weight.data
                weight[rows.token_indices[name]] = rows.trainable_tokens_delta[name].data.to(weight)
    _take_out(module)
    return differences


@torch.no_grad()
def _merge_layer(layer: Any) -> float:
    base: Any = plain(layer)
    was_training = layer.training
    layer.eval()
    inputs = _inputs_of(base)
    before = _output(layer(*inputs))
    parts = [(base, "in_proj_weight"), (plain(base.out_proj), "weight")] if _is_attention(base) else [(base, "weight")]
    weights: list[Any] = [part._parameters[key] for part, key in parts]
    types = [p.dtype for p in weights]
    for p in weights:
        p.data = p.data.float()
    layer.merge(adapter_names=[name for name in layer.active_adapters if name in adapter_names_of(layer)])
    for (part, key), p, dtype in zip(parts, weights, types, strict=True):
        merged = getattr(part, key)
        p.data = merged.data.to(dtype)
        vars(part).pop(key, None)
        part._parameters[key] = p
    after = _output(base(*inputs) if not _is_attention(base) else _plain_attention(base)(*inputs))
    layer.train(was_training)
    return float((after.float() - before.float()).abs().max() / before.float().abs().max().clamp(min=1e-30))


def adapter_names_of(layer: nn.Module) -> list[str]:
    """Return the names of the adapters of one layer of peft."""
    return [name for table in getattr(layer, "adapter_layer_names", ()) for name in getattr(layer, table, {})]


def _is_attention(base: nn.Module) -> bool:
    return isinstance(base, nn.MultiheadAttention)


def _plain_attention(base: Any) -> Any:
    base.out_proj = plain(base.out_proj)
    return base


def _output(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _inputs_of(base: Any) -> tuple[Tensor, ...]:
    """Return random inputs of a layer, the same each time."""
    weight = base.in_proj_weight if _is_attention(base) else base.weight
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(weight)

    if isinstance(base, nn.Embedding):
        rows = torch.randint(base.num_embeddings, (64,), generator=generator)
        return (rows.to(weight.device),)
    if isinstance(base, nn.modules.conv._ConvNd):
        size = [(k - 1) * d + 3 for k, d in zip(base.kernel_size, base.dilation, strict=True)]
        return (normal(2, base.in_channels, *size),)
    if _is_attention(base):
        return (normal(2, 4, base.embed_dim),) * 3
    return (normal(16, weight.shape[1] if isinstance(base, nn.Linear) else weight.shape[0]),)


def _require(module: nn.Module) -> None:
    if not adapter_names(module):
        raise NothingToDoError(f"{type(module).__name__} has no adapters")


def _take_out(module: nn.Module) -> None:
    for parent, key, child in _places(module):
        if plain(child) is not child:
            parent._modules[key] = plain(child)
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoderLayer) and part.activation_relu_or_gelu == 0:
            kinds = {nn.functional.relu: 1, nn.functional.gelu: 2}
            part.activation_relu_or_gelu = kinds.get(part.activation, 0)


# --- checkpoints ---


def trained_keys(module: nn.Module, config: AdapterConfig, keys: Iterable[str]) -> list[str]:
    """Return those keys of a state dict that belong to an adapter or to modules that are trained whole."""
    adapter = adapter_parameters(module, config.name)
    shared = {id(p) for p in adapter.values()}
    every = {key for key, p in module.named_parameters(remove_duplicate=False) if id(p) in shared}
    whole = whole_parameters(module, config.modules_to_save)
    return [key for key in keys if key in every or plain_key(key) in whole]


def merge_summary(differences: Mapping[str, float]) -> str:
    """Return a line about what `merge` returned."""
    worst = max(differences, key=differences.__getitem__)
    return (
        f"adapters: merged into the weights of {len(differences)} layers; largest relative difference of a layer's"
        f" outputs {differences[worst]:.1e} ({worst})"
    )


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

    Raises:
        CheckpointError: names, shapes or values differ; the message names the first weights that do.
    """
    if base is None or saved is None:
        return
    checksums = base["checksums"]
    other = [key for key, value in saved["checksums"].items() if key in checksums and checksums[key] != value]
    if other or base["names"] != saved["names"]:
        strange = [
            key for key in {*checksums, *saved["checksums"]} if (key in checksums) != (key in saved["checksums"])
        ]
        why = f"other values in {listed(other)}" if other else f"other weights ({listed(sorted(strange)) or 'shapes'})"
        raise CheckpointError(
            f"the adapter was trained on a module with {why}: load the same base into the module before its adapter."
            " A module into which adapters were merged is no longer that base: build it anew"
        )


def base_samples(module: nn.Module, config: AdapterConfig) -> dict[str, Any] | None:
    """Return what identifies the frozen weights: a hash of names and shapes, and a checksum of values of each weight.

    Values are rounded to bf16 first, so that a base in bf16 is the same as the one in fp32 that it was rounded from.
    The checksum of a weight that is trained, or that PiSSA changes, is 0, as that of one in 4 or 8 bits.

    Returns:
        ``names``, ``checksums``; None for a module without values.
    """
    tensors = base_tensors(module)
    if any(p.is_meta or isinstance(p, FakeTensor) for p in tensors.values()):
        return None
    unknown = {f"{name}.weight" for name in config.layers} if config.method == "pissa" else set()
    unknown |= whole_parameters(module, config.modules_to_save).keys()
    names = {key: tuple(p.shape) for key, p in tensors.items()}
    for name, part in plain_modules(module):
        if "quantized_weights" in part._modules:
            stored = part._modules["quantized_weights"]
            names |= {f"{name}.{own}": tuple(weight.shape) for own, weight in stored._modules.items()}  # type: ignore
    order = sorted(names)
    text = ";".join(f"{key}{names[key]}" for key in order)
    known = {key: p for key, p in tensors.items() if key not in unknown}
    return {
        "names": hashlib.sha256(text.encode()).hexdigest(),
        "checksums": {key: _checksum(known[key]) for key in order if key in known},
    }


def _checksum(weight: Tensor) -> int:
    flat = weight.detach().reshape(-1)
    count = min(SAMPLES, flat.numel())
    if count == 0:
        return 0
    places = torch.arange(count, device=flat.device) * (flat.numel() - 1) // max(1, count - 1)
    values = flat[places].to("cpu", torch.bfloat16).view(torch.int16)
    return zlib.crc32(values.numpy().tobytes())
