"""The loss of each item of a loader's data set under the current module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_solo.data.item_lengths import Report, reported
from lightning_solo.errors import ConflictError
from lightning_solo.nn.forwards import evaluating
from lightning_solo.nn.rollback import Rollback
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run

_REMEDY = "write callback.curriculum.by=<a column>, or a function of an item"


def item_losses(ctx: Run, loader: Any, report: Report) -> Tensor:
    """Return the loss of each item, as (items,) in fp32.

    The module's ``training_step`` runs for each item as a batch, without gradients and in eval mode, so without
    dropout. Buffers, metrics and random numbers are restored; nothing is logged.

    Args:
        ctx: a run in training.
        loader: of the items, with their collate function; its workers aren't used.
        report: called with (items done, all items) every 10 seconds.

    Raises:
        ConflictError: manual optimization, or an item without a finite loss; names its index and the cause.
    """
    module, name = ctx.module, type(ctx.module).__name__
    if not module.automatic_optimization:
        raise ConflictError(
            f"callback.curriculum.by=loss and {name}.automatic_optimization=False: its training_step would also train;"
            f" {_REMEDY}"
        )
    count = len(loader.dataset)
    losses = torch.empty(count)
    rollback = Rollback(module, ctx.device)
    rollback.save()
    try:
        with evaluating(module), torch.no_grad():
            for index in reported(count, report):
                losses[index] = _loss(ctx, loader, index)
    finally:
        rollback.restore()
    return losses


def _loss(ctx: Run, loader: Any, index: int) -> float:
    try:
        returned = patches.loss_of(ctx.trainer, loader.collate_fn([loader.dataset[index]]), index)
        loss = returned["loss"] if isinstance(returned, Mapping) else returned
        value = math.nan if loss is None else float(loss)
    except Exception as error:
        raise ConflictError(
            f"callback.curriculum.by=loss: item {index} as a batch raised {type(error).__name__}: {error}; {_REMEDY}"
        ) from error
    if not math.isfinite(value):
        raise ConflictError(
            f"callback.curriculum.by=loss: item {index} has the loss {'None' if loss is None else value}; leave it out"
            f" of the data set, or {_REMEDY}"
        )
    return value
