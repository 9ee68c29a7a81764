"""Measured waits for data, and advice on the loader's options at the end of a fit."""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils.data import DataLoader

from lightning_solo.machine import usable_cores
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.loader_advice.card import CARD, Settings
from lightning_solo.techniques.loader_advice.savings import Loading, Saving, report, savings
from lightning_solo.techniques.loader_advice.times import Times, Watch


class LoaderAdvice(Technique, Settings):
    """Measures how long training waits for batches, and at the end of a fit names the options that would help.

    The figures are upper bounds, each for one option alone, from the seconds that the option could save; no option is
    tried. The first batch and validations are left out. On a GPU the seconds are the device's idle times.

    Attributes:
        times: times of the last fit; None before the first fit, or after one of fewer than two batches.
        savings: savings in the last fit, including those below ``min_share``; the largest first.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._start()

    def _start(self) -> None:
        self.times: Times | None = None
        self.savings: tuple[Saving, ...] = ()
        self._loading: Loading | None = None
        self._watch: Watch | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Reset the measurements for a fit."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._start()

    def loader(self, ctx: Run, loader: Any) -> Any:
        """Record how a loader loads, and time its ``collate_fn`` if it runs between steps."""
        loading = Loading.of(loader)
        self._loading = loading if self._loading is None else self._loading.with_other(loading)
        if isinstance(loader, DataLoader) and not loading.ahead and not isinstance(loader.collate_fn, _Timed):
            loader.collate_fn = timed = _Timed(self, loader.collate_fn)
            ctx.undo.callback(_restore, weakref.ref(loader), timed)  # keep no loader alive: each epoch may create one
        return loader

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to measure."""
        assert self.ctx is not None
        loading = self._loading or Loading()
        self._watch = watch = Watch(
            self.ctx.device, starts_workers=loading.starts_workers, loads_here=not loading.ahead
        )
        self.ctx.undo.callback(setattr, self, "_watch", None)  # after a failed fit
        self.ctx.undo.enter_context(patches.fetches(trainer, watch.begin_wait, watch.end_wait))
        self.ctx.undo.enter_context(patches.batches_through(trainer.strategy, watch.copying))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._watch is not None:
            self._watch.end_batch()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._watch is not None:
            self._watch.begin_validation()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._watch is not None:
            self._watch.end_validation()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._conclude(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Log the advice if a user interrupts the fit."""
        if isinstance(exception, KeyboardInterrupt):
            self._conclude(trainer)

    def _conclude(self, trainer: Any) -> None:
        watch, self._watch = self._watch, None
        if self.ctx is None or watch is None:  # the fit has ended, or never begun
            return
        times = watch.finish()
        if times.batches < 1 or times.total_s <= 0:
            self.ctx.info(
                "loader_advice: no advice, since the first batch isn't measured; train on at least two batches"
            )
            return
        cuda = self.ctx.device.type == "cuda"
        self.times = times
        self.savings = tuple(savings(times, self._loading or Loading(), cores=usable_cores(), cuda=cuda))
        advised = [saving for saving in self.savings if saving.share >= self.min_share]
        self.ctx.info(report(times, advised, self.min_share))
        each = {"wait": times.wait_s, "copy": times.copy_s, "step": times.step_s}
        if times.collate_s:
            each["collate"] = times.collate_s
        figures = {f"loader/{name}_s": seconds / times.batches for name, seconds in each.items()}
        patches.log_metrics(trainer, figures)


class _Timed:
    """A timed ``collate_fn`` with the attributes of the user's function. Copies and pickles are the user's function."""

    def __init__(self, advice: LoaderAdvice, collate_fn: Any) -> None:
        vars(self).update(_advice=advice, _collate_fn=collate_fn)

    def __call__(self, samples: Any) -> Any:
        watch = self._advice._watch
        return self._collate_fn(samples) if watch is None else watch.collating(self._collate_fn, samples)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols of Python, which aren't delegated
            raise AttributeError(name)
        return getattr(self._collate_fn, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._collate_fn, name, value)

    def __reduce__(self) -> Any:
        return _itself, (self._collate_fn,)


def _itself(thing: Any) -> Any:
    return thing


def _restore(loader: weakref.ref[DataLoader[Any]], timed: _Timed) -> None:
    if (known := loader()) is not None and known.collate_fn is timed:
        known.collate_fn = timed._collate_fn
