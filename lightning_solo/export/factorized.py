"""Folders with factorized layers, which a module loads by a file of plain torch that is written with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_solo.errors import NothingToDoError
from lightning_solo.export.pretrained import new_folder, require_tensors, write_with_loader
from lightning_solo.export.weights import Source, source_of, widest_weights
from lightning_solo.nn import factorized_layers
from lightning_solo.optim.checkpoint_masters import place
from lightning_solo.units import format_bytes


def export_factorized(
    source: nn.Module | str | Path, output: str | Path | None = None, *, live: bool = False, overwrite: bool = False
) -> list[str]:
    """Write a module or a checkpoint with factorized layers as a folder; return lines about it.

    The folder has ``model.safetensors``, ``config.json`` and ``load.py``, which needs torch and safetensors alone:
    ``load(MyModule(), "folder")`` returns the module with factorized layers, which compute as in training.

    Args:
        source: a module that has factors since its fit; or a checkpoint or run of one.
        output: the folder to write; by default beside the checkpoint.
        live: whether the trained weights themselves are written where there is an average of them.
        overwrite: whether an earlier export is replaced.

    Raises:
        NothingToDoError: it has no factorized layer.
        CheckpointError: the folder exists or can't be written; then nothing is left.
        CapabilityError: the package safetensors is missing.
        BudgetError: the disk has too little space.
        PresetError: no ``output`` for a module.
    """
    folder = new_folder(source, output, "factorized", overwrite=overwrite)
    found = source_of(source, live=live, factors=True)
    if not found.factors:
        raise NothingToDoError(
            f"{found.name} has no factorized layers; train with +callback=low_rank callback.low_rank.rank=64, or write"
            " --rank 64 (in Python lightning_solo.nn.factorizing.factorize_linear(module, 64) before)"
        )
    require_tensors(folder, found.weights)
    stored, tied, before = _stored(found)
    forms = {name: each["form"] for name, each in found.factors["layers"].items()}
    config = {"format": "lightning-solo factorized 1", "layers": forms, "tied": tied}
    after = write_with_loader(folder, stored, config, factorized_layers)
    ranks = sorted({form["rank"] for form in forms.values()})
    return [
        f"factorized: {folder}, {len(forms)} layers of rank {ranks[0]}{f' to {ranks[-1]}' if len(ranks) > 1 else ''}",
        f"bytes: {format_bytes(before)} before, {format_bytes(after)} after ({after / max(1, before):.2f} x)",
    ]


def _stored(source: Source) -> tuple[dict[str, Tensor], dict[str, str], int]:
    """Return the tensors to store, each once; the names that share one of them; and the bytes of dense weights."""
    weights: dict[str, Any] = widest_weights(source)
    first: dict[Any, str] = {}
    names = {name: first.setdefault(place(value), name) for name, value in weights.items()}
    tied = {name: one for name, one in names.items() if one != name}
    stored = {}
    for name in first.values():
        whole = weights[name].untyped_storage().nbytes() == weights[name].nbytes  # else a part of another tensor
        stored[name] = (weights[name] if whole else weights[name].clone()).contiguous()
    before = sum(value.nbytes for value in stored.values())
    for name, each in source.factors["layers"].items():
        form = each["form"]
        of_rows = f"{name}.{factorized_layers.KINDS[form['kind']].rows_at}.weight"
        rows, columns = (form["outputs"], form["inputs"]) if form["kind"] == "linear" else (form["rows"], form["width"])
        if of_rows in stored:  # not the second layer that has these factors
            before += (rows * columns - form["rank"] * (rows + columns)) * stored[of_rows].itemsize
    return stored, tied, before
