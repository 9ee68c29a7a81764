"""Folders with pruned weights in fewer bytes, which a module loads by a file of plain torch beside them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.errors import NothingToDoError
from lightning_solo.export import sparse_weights
from lightning_solo.export.pretrained import new_folder, require_tensors, write_with_loader
from lightning_solo.export.pruned_structure import loaded_structure, structure_of
from lightning_solo.export.weights import export_weights
from lightning_solo.units import format_bytes


def export_pruned(
    source: nn.Module | str | Path,
    output: str | Path | None = None,
    dtype: str = "fp32",
    *,
    live: bool = False,
    overwrite: bool = False,
) -> list[str]:
    """Write the weights of a module or a checkpoint without their zeros, as a folder; return lines about it.

    The folder has ``model.safetensors``, ``config.json`` and ``load.py``, which needs torch and safetensors alone:
    ``load(MyModule(), "folder")`` returns the module with the same weights, bit for bit, and ``weights("folder")`` the
    state dict. Where channels or heads were removed, ``load`` makes the module as small as the trained one.

    Args:
        source: as in `export_weights`.
        output: the folder to write; by default beside the checkpoint.
        dtype: "fp32", "bf16" or "fp16".
        live: whether the live weights are taken of a run that averages them.
        overwrite: whether an earlier export is replaced.

    Raises:
        NothingToDoError: no weight has enough zeros to take fewer bytes.
        CheckpointError: as `export_weights`; the folder exists or can't be written; then nothing is left.
        CapabilityError: the package safetensors is missing.
        BudgetError: the disk has too little space.
        PresetError: an unknown ``dtype``, or no ``output`` for a module.
    """
    folder = new_folder(source, output, "pruned", overwrite=overwrite)
    weights = export_weights(source, dtype, live=live)
    require_tensors(folder, weights)
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(value), name) for name, value in weights.items()}
    structure = structure_of(source)
    full = {name: sizes[0] for name, sizes in (structure or {"sizes": {}})["sizes"].items()}
    before = sum(weights[name].itemsize * math.prod(full.get(name, weights[name].shape)) for name in first.values())
    stored, forms = _compressed({name: weights.pop(name) for name in first.values()}, required=structure is None)
    config: dict[str, Any] = {"format": "lightning-solo pruned 1", "weights": forms, "names": names}
    config |= loaded_structure(structure)
    after = write_with_loader(folder, stored, config, sparse_weights)
    count, name = sum(form != "dense" for form, _ in forms.values()), source
    if isinstance(source, nn.Module):
        name = type(source).__name__
    smaller = (
        [] if not full else [f"{len(full)} tensors are smaller than before training: channels or heads were removed"]
    )
    return [
        f"pruned: {folder}, {count} of {len(forms)} tensors of {name} in {dtype} without their zeros",
        f"bytes: {format_bytes(before)} before, {format_bytes(after)} after ({after / max(1, before):.2f} x)",
        *smaller,
    ]


def _compressed(
    weights: dict[str, Tensor], *, required: bool
) -> tuple[dict[str, Tensor], dict[str, tuple[str, list[int]]]]:
    """Return the tensors to store, and name -> form and shape; each weight is freed before the next."""
    stored: dict[str, Tensor] = {}
    forms: dict[str, tuple[str, list[int]]] = {}
    most = 0.0
    for name in list(weights):
        weight = weights.pop(name)
        most = max(most, 1 - int(torch.count_nonzero(weight)) / max(1, weight.numel()))
        form, parts = sparse_weights.compressed(weight)
        forms[name] = form, list(weight.shape)
        stored |= {f"{name}:{part}": value for part, value in parts.items()}
    if required and all(form == "dense" for form, shape in forms.values() if len(shape) > 1):  # biases begin at zero
        raise NothingToDoError(
            f"--format pruned: no weight takes fewer bytes without its zeros; at most {most:.1%} of a weight are zeros;"
            " train with +callback=pruning callback.pruning.amount=0.9, or write --format weights"
        )
    return stored, forms
