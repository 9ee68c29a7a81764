"""The fp32 master weights in a folder that DeepSpeed's engine saved, of one process, without DeepSpeed.

Stages 1 and 2 store one flat tensor per parameter group, stage 3 one or more for all groups. The names and shapes of
the parameters in them are listed, in order, with the module's own weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_solo.checkpoint.folders import refuse_changed
from lightning_solo.errors import CheckpointError
from lightning_solo.export.sources import ENGINE_STATES, read
from lightning_solo.zero.deepspeed_internals import SAVED_MASTERS


def engine_weights(folder: Path) -> dict[str, Any]:
    """Return the state dict of the module, with fp32 master weights; other weights as the engine has them.

    Args:
        folder: with the engine's files, as `sources.engine_folder` returns it.

    Raises:
        CheckpointError: several processes saved it, or a file is damaged.
    """
    for listed in (folder, folder.parent):
        refuse_changed(listed)
    files = {pattern: sorted(folder.glob(pattern)) for pattern in (ENGINE_STATES, "*_optim_states.pt")}
    models, optimizers = files.values()
    if len(models) != 1 or len(optimizers) > 1:
        parent = folder.parent
        raise CheckpointError(
            f"{folder} was saved by {max(map(len, files.values()))} processes; join their weights by DeepSpeed's own"
            f" script: python {parent}/zero_to_fp32.py {parent} weights"
        )
    model = read(models[0], inert=True)
    zero = read(optimizers[0], inert=True)["optimizer_state_dict"] if optimizers else {}
    masters = dict(_masters(model, zero)) if zero else {}
    fragments = model.get("frozen_param_fragments") or {}
    frozen = {name: fragments[name].view(shape) for name, shape in (model.get("frozen_param_shapes") or {}).items()}
    shared = {name: masters[other] for name, other in (model.get("shared_params") or {}).items() if other in masters}
    weights = {**model["module"], **frozen, **masters, **shared}
    # the prefix is of Lightning before 2.1
    return {name.removeprefix("_forward_module."): weights[name] for name in model["module"]}


def _masters(model: Mapping[str, Any], zero: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, fp32 master weight), each a view of a flat tensor where possible."""
    shapes: Sequence[Mapping[str, torch.Size]] = model["param_shapes"]
    groups = zero.get(SAVED_MASTERS)
    if groups is None:  # stage 3: its parts end anywhere
        parts = zero["fp32_flat_groups"]
        yield from _split(parts[0] if len(parts) == 1 else torch.cat(parts), chain(*(each.items() for each in shapes)))
        return
    gaps = zero.get("param_alignment_paddings") or [[0] * len(each) for each in shapes]
    for flat, names, after in zip(groups, shapes, gaps, strict=True):
        yield from _split(flat, names.items(), after)


def _split(flat: Tensor, shapes: Any, gaps: Sequence[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    start = 0
    for number, (name, shape) in enumerate(shapes):
        yield name, flat[start : start + shape.numel()].view(shape)
        start += shape.numel() + (gaps[number] if gaps is not None else 0)
