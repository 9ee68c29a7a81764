"""Plain weights of a module or a checkpoint: split weights with their corrections, in fp32 or bf16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.errors import CapabilityError, CheckpointError, PresetError, listed
from lightning_solo.export.engine_folder import engine_weights
from lightning_solo.export.formats import DTYPES
from lightning_solo.export.sources import checkpoint_of, engine_folder, new_file, read, refuse_existing
from lightning_solo.machine import is_installed
from lightning_solo.nn.factorizing import RECORD as FACTORS
from lightning_solo.nn.factorizing import factorized, record_of, with_products
from lightning_solo.nn.quantized import quantized_weights_of, with_plain_weights
from lightning_solo.optim.averages import AVERAGE, averaged_weights
from lightning_solo.optim.checkpoint_masters import RECORD, bits_of, masters_of, place, with_masters
from lightning_solo.optim.param_groups import parameters_of
from lightning_solo.optim.split_optimizer import SplitOptimizer
from lightning_solo.optim.split_weights import joined
from lightning_solo.units import format_bytes

TYPES = dict(zip(DTYPES, (torch.float32, torch.bfloat16, torch.float16), strict=True))
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


@dataclass(frozen=True)
class Source:
    """The weights of a module or a checkpoint."""

    name: str  # for messages
    weights: Mapping[str, Any]  # the state dict
    # name -> function that returns the fp32 master weight, where the weight itself has fewer bits
    masters: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)
    trained: Mapping[str, int] | None = None  # name -> bits of each trained parameter; None where they are unknown
    averaged: int = 0  # number of weights that are averages
    # the record of factorized layers; empty where there is none
    factors: Mapping[str, Any] = field(default_factory=dict)


def export_weights(
    source: nn.Module | str | Path,
    dtype: str = "fp32",
    output: str | Path | None = None,
    *,
    live: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Return the weights of a module or a checkpoint as one plain state dict on the host; write it, too.

    Weights that ``compact`` splits are joined with their corrections, and those of ``zero_offload`` are its fp32 master
    weights. Weights in 4 or 8 bits are dequantized. Where a checkpoint has an average of the weights, or a module has
    it in their place, the average is returned. Factorized layers get their products as weights. Tied weights stay tied.
    Integers and float64 are copied as they are.

    Args:
        source: a LightningModule during or after its fit, any other module, the path of a checkpoint, a folder that
            DeepSpeed's engine saved in one process, or the folder of a run, of which the last checkpoint is taken.
        dtype: "fp32", "bf16", as the forward of ``compact`` uses them, or "fp16".
        output: a file to write: ``.safetensors``, or ``.pt`` by ``torch.save``. Of tied weights safetensors stores the
            first, and the names of the others in its metadata.
        live: whether the trained weights themselves are returned where there is an average of them.
        overwrite: whether an existing file is replaced.

    Raises:
        CheckpointError: the trained weights have 16 bits and ``dtype`` is "fp32"; the file is damaged or has no
            weights; the output exists or can't be written.
        CapabilityError: the package safetensors is missing.
        PresetError: an unknown ``dtype`` or suffix.

    >>> solo_weights = export_weights(nn.Linear(2, 1), "bf16")
    >>> {name: value.dtype for name, value in solo_weights.items()}
    {'weight': torch.bfloat16, 'bias': torch.bfloat16}
    """
    if dtype not in DTYPES:
        raise PresetError(f"dtype={dtype!r}: write {' or '.join(DTYPES)}")
    path = None if output is None else Path(output)
    if path is not None:
        _require_writable(path, overwrite=overwrite)
    weights = _plain(source_of(source, live=live), dtype)
    if path is not None:
        _write(weights, path)
    return weights


def write_weights(
    source: Path,
    output: Path | None = None,
    format: str = "weights",
    *,
    dtype: str = "fp32",
    live: bool = False,
    overwrite: bool = False,
) -> list[str]:
    """Write the weights of a checkpoint, by default next to it; return a line with file, type and size."""
    checkpoint = checkpoint_of(source)
    output = output or checkpoint.with_name(f"{checkpoint.stem}-{dtype}.safetensors")
    _require_writable(output, overwrite=overwrite)
    read_source = source_of(checkpoint, live=live)
    weights = _plain(read_source, dtype)
    _write(weights, output)
    tensors = [value for value in weights.values() if isinstance(value, Tensor)]
    size = format_bytes(output.stat().st_size)
    line = f"{format}: {output}, {size}: {len(tensors)} tensors of {checkpoint} in {dtype}"
    note = f"{read_source.averaged} of them are averages; --live writes the weights that were averaged"
    return [line, note] if read_source.averaged else [line]


# --- sources ---


def source_of(source: nn.Module | str | Path, *, live: bool = False, factors: bool = False) -> Source:
    """Return the weights of a module, with the master weights of its optimizers, or of a checkpoint.

    An average takes the place of the weights, unless they are asked for by ``live``; and products that of factors,
    unless these are asked for.
    """
    found, average = _of_module(source) if isinstance(source, nn.Module) else _of_file(Path(source))
    found = found if live else _with_average(found, average)
    return found if factors or not found.factors else _with_products(found)


def _with_products(source: Source) -> Source:
    """Return a source with the weights that its factorized layers have in place of factors."""
    layers, trained = source.factors["layers"], None if source.trained is None else dict(source.trained)
    makes = {place(source.weights[name]): make for name, make in source.masters.items() if name in source.weights}
    masters: dict[str, Any] = dict(source.masters)

    def product(name: str) -> Tensor:
        parts = {f"{name}.{number}.weight": source.weights[f"{name}.{number}.weight"] for number in (0, 1)}
        wide = {part: makes.get(place(value), value.float)() for part, value in parts.items()}
        made: Tensor = with_products(wide, {"layers": {name: layers[name]}, "tied": {}})[f"{name}.weight"]
        return made

    for name in layers:
        parts = [f"{name}.{number}.weight" for number in (0, 1)]
        for part in parts:
            masters.pop(part, None)
        if any(place(source.weights[part]) in makes for part in parts):
            masters[f"{name}.weight"] = partial(product, name)
        if trained is not None and (bits := [trained.pop(part) for part in parts if part in trained]):
            trained[f"{name}.weight"] = min(bits)
        for entries in (masters, trained or {}):
            if (bias := f"{name}.1.bias") in entries:
                entries[f"{name}.bias"] = entries.pop(bias)
    return replace(
        source, weights=with_products(source.weights, source.factors), masters=masters, trained=trained, factors={}
    )


def _with_average(source: Source, average: Mapping[str, Tensor]) -> Source:
    """Return a source with the average of its weights, under all their names."""
    values = {place(source.weights[name]): value for name, value in average.items() if name in source.weights}

    def of(value: Any) -> Tensor | None:
        return values.get(place(value)) if isinstance(value, Tensor) else None

    averaged = {name: mean for name, value in source.weights.items() if (mean := of(value)) is not None}
    masters = {name: make for name, make in source.masters.items() if name not in averaged}
    trained = source.trained
    if trained is not None:
        trained = {name: 32 if name in averaged else bits for name, bits in trained.items()}
    weights = {**source.weights, **averaged}
    return replace(source, weights=weights, masters=masters, trained=trained, averaged=len(averaged))


def widest_weights(source: Source) -> dict[str, Tensor]:
    """Return the tensors of a source on the host: master weights in fp32 where there are some, the others as they are.

    Tensors that are on the host already aren't copied, and tied ones stay tied.
    """
    tensors = {name: value for name, value in source.weights.items() if isinstance(value, Tensor)}
    widest = with_masters(tensors, source.masters)
    return {name: value.detach().to("cpu") for name, value in widest.items()}


def _of_module(module: nn.Module) -> tuple[Source, dict[str, Tensor]]:
    """Return the weights of a module, with the master weights of its optimizers, and those that are averages."""
    try:
        trainer: Any = module.trainer
        strategy = trainer.strategy if trainer.lightning_module is module else None
    except (AttributeError, RuntimeError):  # no LightningModule, or none that a Trainer has
        strategy = None
    factors = record_of(layers) if (layers := factorized(module)) else {}
    if strategy is None:
        weights = with_plain_weights(module.state_dict(), quantized_weights_of(module))
        return Source(type(module).__name__, weights, factors=factors), {}
    weights = strategy.lightning_module_state_dict()  # under zero_offload the master weights
    quantized = quantized_weights_of(module)
    if not weights.keys() <= {*module.state_dict(), *quantized}:  # of adapters, which have been merged since
        weights = module.state_dict()
    weights = with_plain_weights(weights, quantized)
    optimizers = strategy.optimizers
    held = {p: each for each in optimizers for p in parameters_of(each) if p.requires_grad}
    trained = {}
    for name, p in module.named_parameters():
        if p in held and name in weights:
            split = isinstance(held[p], SplitOptimizer)
            trained[name] = bits_of(held[p], p) if split else 8 * weights[name].element_size()
    average: dict[str, Tensor] = {}
    for callback in trainer.callbacks:
        average |= getattr(callback, AVERAGE, {})
    put = {name: average[name] for name, p in module.named_parameters() if name in average and _is(p, average[name])}
    masters = masters_of(module, optimizers)
    return Source(type(module).__name__, weights, masters, trained or None, factors=factors), put


def _is(p: Tensor, average: Tensor) -> bool:
    """Return whether a parameter has the values of an average."""
    return p.shape == average.shape and torch.equal(p.detach().cpu(), average.to("cpu", p.dtype))


def _of_file(path: Path) -> tuple[Source, Mapping[str, Tensor]]:
    path = checkpoint_of(path)
    if (folder := engine_folder(path)) is not None:
        return Source(str(path), engine_weights(folder)), {}
    checkpoint = read(path, inert=True)
    weights = checkpoint.get("state_dict", checkpoint)
    if not any(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(f"{path} has no weights; there are {', '.join(map(str, checkpoint)) or 'no entries'}")
    average, factors = averaged_weights(checkpoint), checkpoint.get(FACTORS, {})
    if RECORD not in checkpoint:
        states = [state for each in checkpoint.get("optimizer_states", ()) for state in each.get("state", {}).values()]
        if any("correction" in state for state in states):
            raise CheckpointError(unnamed(path))
        return Source(str(path), weights, factors=factors), average
    masters, trained = {}, {}
    optimizers = checkpoint.get("optimizer_states", [{"state": {}} for _ in checkpoint[RECORD]])
    for parameters, saved in zip(checkpoint[RECORD], optimizers, strict=True):
        for number, parameter in enumerate(parameters):
            name, correction = parameter["name"], saved["state"].get(number, {}).get("correction")
            if name not in weights:
                continue
            if parameter["trained"]:
                narrow = correction is None and _is_narrow(weights[name])  # saved without its states
                trained[name] = 16 if narrow else parameter["bits"]
            if correction is not None:
                masters[name] = partial(joined, weights[name], correction)
    return Source(str(path), weights, masters, trained or None, factors=factors), average


def unnamed(path: Path) -> str:
    """Return the message for a file whose corrections can't be assigned to weights."""
    return (
        f"{path} doesn't record the weight of each correction, since it was saved by an earlier version, or without a"
        " preset: resume it once under the preset, trainer.fit(module, ckpt_path=...), and save again,"
        " trainer.save_checkpoint(...)"
    )


# --- one state dict ---


def _plain(source: Source, dtype: str) -> dict[str, Any]:
    """Return a source's weights in one type."""
    if dtype == "fp32":
        _require_full(source)
    masters = {place(source.weights[name]): make for name, make in source.masters.items() if name in source.weights}
    converted: dict[Any, Any] = {}
    plain = {}
    for name, value in source.weights.items():
        key = place(value) if isinstance(value, Tensor) else name
        if key not in converted:
            converted[key] = _converted(value, masters.get(key), TYPES[dtype])
        plain[name] = converted[key]
    return plain


def _converted(value: Any, master: Callable[[], Tensor] | None, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if value.is_floating_point() and value.element_size() in (2, 4) and value.dtype != dtype:
        return (value if master is None else master()).to("cpu", dtype, copy=True)
    return value.to("cpu", copy=True)


def _require_full(source: Source) -> None:
    if source.trained is not None:
        names = [name for name, bits in source.trained.items() if bits <= 16]
    else:  # whether they were trained is unknown: a frozen part may be narrow
        floating = [name for name, value in source.weights.items() if _is_floating(value)]
        names = floating if all(_is_narrow(source.weights[name]) for name in floating) else []
    if names:
        raise CheckpointError(
            f"{source.name}: dtype=fp32, but {listed(names)} have 16 bits, and no corrections; write dtype=bf16"
            " (--dtype bf16), or export from a checkpoint of compact that has its optimizer states"
        )


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_narrow(value: Any) -> bool:
    return _is_floating(value) and value.element_size() == 2


# --- files ---


def _require_writable(path: Path, *, overwrite: bool) -> None:
    if path.suffix not in SUFFIXES:
        raise PresetError(f"output={path}: write a file that ends in {', '.join(SUFFIXES)}")
    if path.suffix == SUFFIXES[0] and not is_installed("safetensors"):
        raise CapabilityError(
            f"{path}: the package safetensors is not installed; write pip install lightning-solo[safetensors], or"
            f" --output {path.with_suffix('.pt')}"
        )
    refuse_existing(path, overwrite=overwrite)


def _write(weights: Mapping[str, Any], path: Path) -> None:
    if path.suffix != SUFFIXES[0]:
        with new_file(path) as new, new.open("wb") as file:
            torch.save(dict(weights), file)
        return
    if others := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(
            f"{path}: safetensors stores tensors alone, not {listed(others)}; write {path.with_suffix('.pt')}"
        )
    from safetensors.torch import save_file

    first: dict[int, str] = {}
    for name, value in weights.items():
        first.setdefault(id(value), name)
    tied = {name: first[id(value)] for name, value in weights.items() if first[id(value)] != name}
    stored = {name: value.contiguous() for name, value in weights.items() if name not in tied}
    with new_file(path) as new:
        new.touch()
        mode = new.stat().st_mode
        save_file(stored, new, metadata={"format": "pt", **tied})
        new.chmod(mode)  # safetensors lets nobody else read
