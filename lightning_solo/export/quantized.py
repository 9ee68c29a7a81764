"""Folders with weights of 2 to 8 bits, which a module loads by a file of plain torch that is written with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.errors import PresetError, listed
from lightning_solo.export.pretrained import new_folder, require_tensors, write_with_loader
from lightning_solo.export.weights import source_of
from lightning_solo.nn import packed_weights
from lightning_solo.nn.blocks import counted
from lightning_solo.nn.fake_quantization import ACTIVATIONS, BITS, LINEAR, Rounding, chosen_layers, levels_and_scales
from lightning_solo.optim.checkpoint_masters import place
from lightning_solo.units import format_bytes


def export_quantized(
    module: nn.Module,
    output: str | Path,
    bits: int = 4,
    group_size: int = 32,
    activations: str = "unchanged",
    layers: str | Sequence[str] = LINEAR,
    *,
    overwrite: bool = False,
) -> list[str]:
    """Write a module with weights of few bits as a folder; return lines about it. The module stays as it is.

    The folder has ``model.safetensors``, ``config.json`` and ``load.py``, which needs torch and safetensors alone:
    ``load(MyModule(), "folder")`` returns the module with quantized layers. A module that was trained with
    fake quantization gives the numbers that it was trained with, if the arguments are the same; of any other it is
    quantization after training.

    Args:
        module: a LightningModule during or after its fit, or any other module.
        output: the folder to write.
        bits: of a weight, 2 to 8.
        group_size: inputs of a layer whose weights share a scale; 0 for a scale per row.
        activations: "int8" if each token of a layer's input is rounded to 8 bits, else "unchanged".
        layers: "linear" for all linear layers but output heads, or patterns of qualified names.
        overwrite: whether an earlier export is replaced.

    Raises:
        NothingToDoError: no layer can be quantized, or a pattern matches none.
        PresetError: an unknown argument, or the size of a group doesn't divide a layer's inputs.
        ConflictError: a weight has few bits already, isn't finite, or is inside an adapter.
        CheckpointError: the folder exists or can't be written; then nothing is left.
        BudgetError: the disk has too little space.
    """
    if not isinstance(module, nn.Module):
        raise PresetError(
            f"solo.export_quantized({str(module)!r}, ...) takes a module; load the weights into one first, or write"
            " lightning-solo export RUN --format quantized"
        )
    if bits not in BITS or group_size < 0 or activations not in ACTIVATIONS:
        raise PresetError(
            f"bits={bits}, group_size={group_size}, activations={activations!r}: write bits={BITS[0]} to {BITS[-1]},"
            f" group_size=0 or more, and activations={' or '.join(map(repr, ACTIVATIONS))}"
        )
    folder = new_folder(module, output, "quantized", overwrite=overwrite)
    rounding = Rounding(bits, group_size, activations)
    choice = chosen_layers(module, rounding, layers)
    weights = dict(source_of(module).weights)
    require_tensors(folder, weights)
    before = sum({place(value): value.nbytes for value in weights.values()}.values())
    chosen = {*choice.layers.values()}
    every = {name: part for name, part in module.named_modules(remove_duplicate=False) if part in chosen}
    after = write_with_loader(folder, *_packed({**choice.layers, **every}, weights, rounding), packed_weights)
    scale = f"in groups of {group_size}" if group_size else "by rows"
    left = listed([f"{name} ({reason})" for name, reason in choice.left_out.items()], 5)
    return [
        f"quantized: {folder}, {counted(choice.layers.values())} with {bits} bits {scale}"
        f"{', inputs with 8 bits' if activations == 'int8' else ''};"
        f" {choice.left_share:.0%} of the numbers are as they were{f': {left}' if left else ''}",
        f"bytes: {format_bytes(before)} before, {format_bytes(after)} after",
    ]


def _packed(
    layers: dict[str, nn.Module], weights: dict[str, Any], rounding: Rounding
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors to store, each once, and what `packed_weights.load` needs to know."""
    options: dict[str, dict[str, Any]] = {}
    tied: dict[str, str] = {}
    stored: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    for name, layer in layers.items():
        weight = weights.pop(f"{name}.weight").detach().to("cpu")
        weight = weight if isinstance(layer, nn.Linear | nn.Embedding) else weight.t()  # transformers' Conv1D
        rows, width = weight.shape
        entry: dict[str, Any] = {"rows": rows, "width": width, "bits": rounding.bits, "group_size": rounding.group_size}
        is_table = isinstance(layer, nn.Embedding)
        if not is_table:
            entry |= {"bias": layer.bias is not None, "activations": rounding.activations}
        options[name] = {"kind": "embedding" if is_table else "linear", **entry}
        if (other := first.setdefault(id(layer.weight), name)) != name:
            options[name]["shares"] = other
            tied |= {f"{name}.{key}": f"{other}.{key}" for key in ("codes", "scales")}
            continue
        levels, scales = levels_and_scales(weight, rounding.bits, rounding.group_size)
        stored[f"{name}.codes"] = packed_weights.pack(levels.to(torch.int8), rounding.bits)
        stored[f"{name}.scales"] = scales.view(torch.int16)
    places: dict[Any, str] = {}
    for name, value in weights.items():
        if (other := places.setdefault(place(value), name)) == name:
            whole = value.untyped_storage().nbytes() == value.nbytes  # else it may be a part of another tensor
            stored[name] = (value if whole else value.clone()).detach().to("cpu").contiguous()
        else:
            tied[name] = other
    return stored, {"format": "lightning-solo quantized 1", "layers": options, "tied": tied}
