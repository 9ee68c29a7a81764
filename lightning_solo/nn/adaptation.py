"""Put adapters of peft into a module, and freeze everything else.

``import peft`` takes ten seconds, so it happens in the functions that need it. None of them asks a hub.
"""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_solo.bitsandbytes_operators import bitsandbytes
from lightning_solo.errors import ConflictError, NothingToDoError, PresetError
from lightning_solo.machine import is_installed
from lightning_solo.nn.adapted import plain, plain_modules
from lightning_solo.nn.adapter_targets import OPTION, owners_of_weights
from lightning_solo.nn.quantized import weights_in

CONFIGS = "solo_configs"
"""The attribute of peft's layers that holds name -> `AdapterConfig`."""
ADAPTER_TABLES = ("lora_", "ia3_", "trainable_tokens_")
"""Starts of the names under which peft's layers hold the weights of adapters."""


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter is; saved with its weights by `asdict`."""

    name: str  # of the adapter
    method: str  # one of `adapter_targets.KINDS`
    r: int  # rank
    alpha: float  # scale; the product of the factors is multiplied by alpha / r, under rslora by alpha / sqrt(r)
    dropout: float  # probability
    layers: tuple[str, ...] = ()  # qualified names of the adapted layers
    feed_forward: tuple[str, ...] = ()  # those whose input IA3 scales
    modules_to_save: tuple[str, ...] = ()  # qualified names of modules that are trained whole
    # qualified name of an embedding -> rows that are trained
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def changed(self, other: AdapterConfig) -> list[str]:
        """Return the values of this configuration that differ from another's, as ``name=value``."""
        ours, theirs = asdict(self), asdict(other)
        return [f"{key}={value!r}" for key, value in ours.items() if value != theirs[key]]


# --- where adapters are ---


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """Return qualified name without adapters -> peft's layer in the place of the module's.

    Embeddings of which rows are trained, and parts of adapted attention modules, are left out.
    """
    layers = {name: part for name, part in adapter_modules(module) if "token_adapter" not in part._modules}
    attention = {f"{name}.out_proj" for name, part in layers.items() if isinstance(plain(part), nn.MultiheadAttention)}
    return {name: part for name, part in layers.items() if name not in attention}


def adapter_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (qualified name, module of peft) for each that stands in the place of a layer, and of each place."""
    for name, child in module._modules.items():
        if child is None:
            continue
        path = f"{prefix}{name}"
        if plain(child) is not child:
            yield path, child
            child = plain(child)
        yield from adapter_modules(child, f"{path}.")


def adapter_names(module: nn.Module) -> list[str]:
    """Return the names of the adapters in a module, in the order in which they were put in."""
    tables = {table for _, layer in adapter_modules(module) for table in getattr(layer, "adapter_layer_names", ())}
    parts = [part for _, layer in adapter_modules(module) for part in layer.modules()]
    every = [getattr(part, table, {}) for part in parts for table in {*tables, "trainable_tokens_delta"}]
    return list(dict.fromkeys(name for names in every for name in names))


def adapter_configs(module: nn.Module) -> dict[str, AdapterConfig]:
    """Return name -> configuration of the adapters that `insert` has put into a module."""
    configs: dict[str, AdapterConfig] = {}
    for _, layer in adapter_modules(module):
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
    """Return the key of an adapter's weight once the adapter has another name.

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
    for parent, key, child in child_places(module):
        places.setdefault(id(plain(child)), []).append((parent, key))
    configs = {**adapter_configs(module), config.name: config}
    _check_shapes(module, config)
    root = nn.Module()  # peft leaves its configuration on the module that it gets
    root.module = module
    parts = [part for _, part in plain_modules(module)]
    before = [(part, dict(part._parameters)) for part in parts if part._parameters]
    flags = {p: p.requires_grad for _, own in before for p in own.values() if p is not None}
    _inject(root, config)
    for part, own in before:
        part._parameters.clear()  # peft makes new ones for attention modules, in another order
        part._parameters.update(own)
    for _, layer in list(adapter_modules(root)):
        for parent, key in places.get(id(plain(layer)), ()):
            parent._modules[key] = layer
    _tie_rows(module, config)
    for _, layer in adapter_modules(module):
        vars(layer)[CONFIGS] = configs
    use_adapter(module, config.name)
    for p, flag in flags.items():
        p.requires_grad_(flag)
    for p in adapter_parameters(module, config.name).values():
        if p.dtype in (torch.bfloat16, torch.float16):
            p.data = p.data.float()
    _call_fast_paths(module)


def child_places(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return (parent, name, child) for each child of the module's own parts."""
    parts = [part for _, part in plain_modules(module)]
    return [(part, key, child) for part in parts for key, child in part._modules.items() if child is not None]


def _check_shapes(module: nn.Module, config: AdapterConfig) -> None:
    """Refuse rows that an embedding doesn't have, and a rank that PiSSA can't have."""
    modules: dict[str, Any] = dict(plain_modules(module))
    for name, rows in config.tokens.items():
        table = modules[name]
        if not isinstance(table, nn.Embedding) and not (isinstance(table, nn.Linear) and table.bias is None):
            raise PresetError(
                f"{OPTION}.trainable_token_indices: {name} is a {type(table).__name__}; allowed are torch's embeddings"
                " and heads without a bias"
            )
        most = len(table.weight)
        if wrong := [row for row in rows if not 0 <= row < most]:
            raise NothingToDoError(
                f"{OPTION}.trainable_token_indices={wrong[0]}: {name} has rows 0 to {most - 1}; enlarge it before the"
                " fit"
            )
    for name in config.layers if config.method == "pissa" else ():
        if config.r > (most := min(modules[name].weight.shape)):
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
    inject = imported("peft.functional").inject_adapter_in_model
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set")  # of each layer peft finds out itself
        inject(peft_config, root, config.name)
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
    wrappers = {id(plain(part)): part for _, part in adapter_modules(module) if "token_adapter" in part._modules}
    for name, rows in config.tokens.items():
        table = modules[name]
        for other in owners[id(table.weight)]:
            if (layer := modules[other]) is table or id(layer) in wrappers:
                continue
            tied = imported("peft.utils.other").TrainableTokensWrapper(
                layer, config.name, list(rows), wrappers[id(table)].token_adapter
            )
            for parent, key, child in child_places(module):
                if child is layer:
                    parent._modules[key] = tied


def _call_fast_paths(module: nn.Module) -> None:
    """Switch off the inference kernel of torch's encoder layers: it reads weights, and would pass adapters by."""
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
        if not own or any(map(weights_in, modules[name].modules())):
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
