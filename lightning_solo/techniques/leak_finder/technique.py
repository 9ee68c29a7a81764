"""Warnings about tensors that grow in number from step to step, with their holders."""

from __future__ import annotations

import gc
from collections import deque
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_solo.memory.census import Census, Growth, Kind, growths, take_census
from lightning_solo.memory.holders import Leak, leaks_of
from lightning_solo.seams import patches
from lightning_solo.techniques.leak_finder.card import Settings


class LeakFinder(Callback, Settings):
    """Counts all live tensors every ``every_n_steps`` optimizer steps, and warns of kinds that keep growing.

    A kind is a category, type, dtype and shape. It leaks if it grew in each of the last intervals, and if some of its
    tensors from the first interval are still alive after a garbage collection. The warning names the bytes and the
    holder: a list of a module, a dictionary in a closure, the graph of a loss that was kept. Each kind and each holder
    is named once in a fit, also if it grows on purpose and is emptied later, such as the predictions that a metric
    collects until the end of an epoch.

    It doesn't see a tensor that is replaced by ever larger ones, or memory that no Python object refers to.
    """

    def _init_state(self) -> None:
        self._leaks: list[Leak] = []
        self._start()

    @property
    def leaks(self) -> tuple[Leak, ...]:
        """The leaks of the last fit."""
        return tuple(self._leaks)

    def _start(self) -> None:
        self._known: set[Kind] = set()
        self._looks: deque[tuple[int, Census]] = deque(maxlen=self.consecutive + 1)  # with the step of each

    # --- when: Lightning's hooks ---

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start a new count for this fit."""
        self._start()
        self._leaks = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count if this optimizer step is due."""
        step = trainer.global_step
        # not a multiple: under manual optimization a batch may have several optimizer steps
        if not self._looks or step - self._looks[-1][0] >= self.every_n_steps:
            self._look(trainer, pl_module, step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the counts."""
        self._start()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Forget the counts, since Lightning calls no teardown after an exception."""
        self._start()

    # --- what ---

    def _look(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        if not self._looks:
            gc.collect()  # garbage of earlier fits is not growth
        self._looks.append((step, take_census(pl_module, trainer.optimizers)))
        if len(self._looks) <= self.consecutive or not self._grown():
            return
        gc.collect()  # cycles that wait for a collection are no leak
        self._looks[-1] = step, take_census(pl_module, trainer.optimizers)
        grown = self._grown()
        steps = step - self._looks[0][0]
        if grown:
            self._known |= {growth.kind for growth in grown}
            self._warn(leaks_of(grown, steps, pl_module, ignored={id(patches.fetcher(trainer))}))
        self._looks = deque(list(self._looks)[-1:], self._looks.maxlen)

    def _grown(self) -> list[Growth]:
        grown = growths([census for _, census in self._looks], self.min_bytes * self.every_n_steps)
        return [growth for growth in grown if growth.kind not in self._known]

    def _warn(self, leaks: list[Leak]) -> None:
        known = {leak.holder for leak in self._leaks}
        for leak in leaks:
            if leak.holder not in known:
                self._leaks.append(leak)
                rank_zero_warn(
                    f"LeakFinder: {leak}. If it should not grow: keep numbers (loss.item()) or detached tensors on the "
                    "host, or empty it"
                )
