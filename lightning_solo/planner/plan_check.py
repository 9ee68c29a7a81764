"""Compares a plan with the first optimizer steps of its run: a receipt of planned and measured figures."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info

from lightning_solo.memory.category_peaks import CategoryPeaks, compiled_parts
from lightning_solo.memory.ledger import Ledger
from lightning_solo.memory.reading import read
from lightning_solo.planner.device import CPU
from lightning_solo.planner.plan import MEASURED, PLANNED, Plan
from lightning_solo.seams.patches import log_metrics
from lightning_solo.units import GiB, format_bytes

DIFFERENCE = 0.10  # largest relative difference of peak and plan without a message
STEPS = 2  # optimizer steps whose peak is compared; an optimizer has its states from the second on


class PlanCheck(Callback):
    """Compares the plan with the peak of the first two optimizer steps of a fit, and with the seconds of the third.

    On a GPU the peak is that of its counter, which is reset when training starts. On a CPU a ledger counts it. Nothing
    is compared if the plan is for the other kind of device, if another callback resets the counter several times per
    step (``resets_peak_counters``), or if the module is compiled and no counter sees its memory.
    """

    _first: int | None  # global_step at the start, above 0 in a resumed run; None if nothing is compared
    _counts: CategoryPeaks | None  # on a CPU
    _peak: int  # 0 until it is measured
    _begin: float
    _seconds: float

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._stop()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the comparison."""
        self._stop()
        device = trainer.strategy.root_device
        has_counter = read(device).peak_allocated is not None
        resets = (getattr(callback, "resets_peak_counters", False) for callback in trainer.callbacks)
        if has_counter == (self.plan.device == CPU) or (any(resets) if has_counter else compiled_parts(pl_module)):
            return
        self._first = trainer.global_step
        if has_counter:
            torch.cuda.reset_peak_memory_stats(device)
        else:
            self._counts = CategoryPeaks(STEPS)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin to count bytes or seconds of the batch."""
        if self._first is None:
            return
        if self._counts is not None:
            self._counts.enter(pl_module, trainer.optimizers, trainer.strategy.root_device, trainer.global_step)
        self._begin = _now(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Compare the peak after the second optimizer step, and the seconds after the third."""
        if self._first is None:
            return
        step, seconds = trainer.global_step, _now(trainer) - self._begin
        if self._counts is not None:
            self._counts.leave()
            if step != self._counts.first_step:
                self._counts.take(step)
        if self._peak:
            self._seconds += seconds
        elif step >= self._first + STEPS:
            self._compare_peak(trainer, pl_module)
        if step > self._first + STEPS:
            self._tell(trainer, "step_s", self.plan.seconds_per_step, self._seconds)
            self._stop()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop counting: if ``training_step`` skipped the rest of the epoch, no hook ended its last batch."""
        if self._counts is not None:
            self._counts.leave()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop the comparison."""
        self._stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop the comparison."""
        self._stop()

    def _compare_peak(self, trainer: Any, pl_module: Any) -> None:
        if self._counts is None:
            self._peak = read(trainer.strategy.root_device).peak_allocated or 0
        elif self._counts.largest is not None:
            self._peak = self._counts.largest[0].bytes
        self._tell(trainer, "peak_gib", self.plan.peak_bytes / GiB, self._peak / GiB)
        optimizers = [one for one in trainer.optimizers if isinstance(one, torch.optim.Optimizer)]
        if message := difference(self.plan, self._peak, Ledger(pl_module, optimizers).live()):
            warnings.warn(message, stacklevel=2)

    def _tell(self, trainer: Any, name: str, planned: float, measured: float) -> None:
        """Log a planned and a measured figure, and print them."""
        rank_zero_info(receipt(self.plan, name, planned, measured))
        log_metrics(trainer, {f"{PLANNED}{name}": planned, f"{MEASURED}{name}": measured})

    def _stop(self) -> None:
        self._first = self._counts = None
        self._peak = 0
        self._begin = self._seconds = 0.0


def _now(trainer: Any) -> float:
    """Return the seconds of a clock, after the device has done its work."""
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize(trainer.strategy.root_device)
    return time.perf_counter()


def receipt(plan: Plan, name: str, planned: float, measured: float) -> str:
    """Return the line that compares a planned figure with the measured one."""
    if name == "step_s":
        return f"auto: {plan.preset}: planned {planned:.3g} s a step, measured {measured:.3g} s"
    sizes = f"planned peak {format_bytes(round(planned * GiB))}, measured {format_bytes(round(measured * GiB))}"
    return f"auto: {plan.preset}: {sizes} ({measured / planned - 1:+.1%})"


def difference(plan: Plan, peak: int, states: Mapping[str, int]) -> str | None:
    """Return a message with both breakdowns if the peak is more than 10 % off the plan, else None."""
    if abs(peak - plan.peak_bytes) <= DIFFERENCE * plan.peak_bytes:
        return None
    held = {name: states[name] for name in ("weights", "gradients", "optimizer_states")}
    read_ = {**held, "activations and temporaries": peak - sum(held.values())}
    return (
        f"auto planned a peak of {format_bytes(plan.peak_bytes)} for {plan.preset}, the first steps took"
        f" {format_bytes(peak)}; planned: {_words(plan.breakdown)}; read: {_words(read_)}"
    )


def _words(breakdown: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in breakdown.items() if size)
