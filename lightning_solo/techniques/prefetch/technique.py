"""Prefetching: the next batches are loaded, and copied to the device, during the current step."""

from __future__ import annotations

import warnings
import weakref
from functools import partial
from typing import Any

import torch

from lightning_solo.data.prefetch import Prefetcher, Upload, prefetched
from lightning_solo.errors import ConflictError, NothingToDoError
from lightning_solo.seams.homes import fabric_part, part
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.prefetch.card import CARD, Settings

_HOST_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device")


class Prefetch(Technique, Settings):
    """Loads training batches ahead of their step, and copies them to the device on a separate stream.

    Batches, their order and the trained weights are the same as without it. A thread iterates over the loader. Batches
    that are loaded but not yet trained on don't count in a stateful loader's checkpoint, so a resumed run trains on
    them. If a module or data module overrides ``on_before_batch_transfer`` or ``transfer_batch_to_device``, batches are
    loaded ahead on the host, and transferred when they are due. ``on_after_batch_transfer`` always runs when a batch is
    due.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._acts = False

    def loader(self, ctx: Run, loader: Any) -> Any:
        """Wrap the loader in a `Prefetcher`."""
        while isinstance(loader, Prefetcher):  # from an earlier fit, in a user's CombinedLoader
            loader = loader.loader
        has_workers = getattr(loader, "num_workers", 0) > 0
        if has_workers and ctx.device.type != "cuda":
            return loader
        if not has_workers and _changes_default_dtype(ctx):
            raise ConflictError(
                f"callback.prefetch and DataLoader(num_workers=0) with precision={ctx.precision}: tensors that the data"
                " set makes during a step would have the step's dtype; write DataLoader(num_workers=1), or"
                " precision=bf16-mixed"
            )
        self._acts = True
        ahead = prefetched(loader, self.depth, self._upload(ctx), _limit(ctx, loader), _warn_of_draws)
        ctx.undo.callback(_close, weakref.ref(ahead))  # keep no loader alive: each epoch may create one
        return ahead

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that a loader is prefetched."""
        acts, self._acts = self._acts, False
        if not acts:
            raise NothingToDoError(
                "callback.prefetch on a CPU has nothing to do, since the loader's workers load ahead; write"
                " ~callback.prefetch, or raise DataLoader(prefetch_factor=...)"
            )

    def _upload(self, ctx: Run) -> Upload | None:
        """Return the copy to the device ahead of a step; None on a CPU, or if hooks do the copy."""
        if ctx.device.type != "cuda":
            return None
        is_overridden = part(ctx.home, "utilities.model_helpers").is_overridden
        for owner in (ctx.module, ctx.trainer.datamodule):
            for hook in _HOST_HOOKS:
                if is_overridden(hook, owner):
                    ctx.info(f"prefetch: batches are copied when they are due, by {type(owner).__name__}.{hook}")
                    return None
        move = fabric_part(ctx.home, "utilities.apply_func").move_data_to_device
        return Upload(ctx.device, partial(move, device=ctx.device))


def _close(ahead: weakref.ref[Prefetcher]) -> None:
    if (prefetcher := ahead()) is not None:
        prefetcher.close()


def _limit(ctx: Run, loader: Any) -> float | None:
    """Return the number of batches of an epoch, from length and ``limit_train_batches``; None if unknown."""
    limit = ctx.trainer.limit_train_batches
    length = part(ctx.home, "utilities.combined_loader").sized_len(loader)
    if length is None:
        return limit if isinstance(limit, int) else None
    return min(length, limit) if isinstance(limit, int) else int(length * limit)


def _changes_default_dtype(ctx: Run) -> bool:
    """Return whether the precision sets torch's default dtype, which threads share, during a step."""
    before = torch.get_default_dtype()
    with ctx.strategy.precision_plugin.train_step_context():
        return torch.get_default_dtype() != before


def _warn_of_draws() -> None:
    warnings.warn(
        "callback.prefetch: no batch is loaded ahead, since batches draw from the global random numbers of Python,"
        " NumPy or torch, which training also uses, and would differ from run to run; write DataLoader(num_workers=1),"
        " whose worker has its own random numbers",
        stacklevel=2,
    )
