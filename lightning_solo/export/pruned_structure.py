"""The sizes of a module from which channels or heads were removed, in its checkpoints and in its exports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from lightning_solo.errors import CheckpointError
from lightning_solo.export.sources import checkpoint_of, engine_folder, read
from lightning_solo.export.weights import source_of, widest_weights
from lightning_solo.nn.pruned_layers import shrink

RECORD = "pruned_structure"
"""Attribute of a smaller module, and entry of its checkpoint: sizes before and after, and the changed attributes."""
Module = TypeVar("Module", bound=nn.Module)


def structure_of(source: nn.Module | str | Path) -> dict[str, Any] | None:
    """Return the record of a module or a checkpoint; None if nothing was removed."""
    if isinstance(source, nn.Module):
        return getattr(source, RECORD, None)
    path = checkpoint_of(Path(source))
    return None if engine_folder(path) is not None else read(path, inert=True).get(RECORD)


def loaded_structure(record: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the part of a record that `shrink` takes, as an entry of an export's configuration; empty without one."""
    return {} if record is None else {"structure": {name: record[name] for name in ("sizes", "numbers")}}


def load_sizes(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Make a module as small as a checkpoint says.

    Raises:
        CheckpointError: the module is another one, or is smaller than the checkpoint's.
    """
    record, present = checkpoint.get(RECORD), getattr(module, RECORD, None)
    if record is None:
        if present is not None:
            raise CheckpointError(
                "the module has fewer channels or heads than the checkpoint's, since it was pruned; load the checkpoint"
                " into a new module"
            )
        return
    try:
        shrink(module, record)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint is of a module without some channels or heads: {error}") from None
    setattr(module, RECORD, record)


def load_pruned(module: Module, checkpoint: str | Path) -> Module:
    """Return a new module with the weights of a checkpoint, from which channels or heads may have been removed.

    Args:
        module: made as for training; it becomes smaller.
        checkpoint: a file, or the folder of a run.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another module.
    """
    path = checkpoint_of(Path(checkpoint))
    load_sizes(module, {RECORD: structure_of(path)})
    try:
        module.load_state_dict(widest_weights(source_of(path)))
    except RuntimeError as error:
        raise CheckpointError(f"{path} is of another module than {type(module).__name__}: {error}") from error
    return module
