"""Measurements of a ladder's rung in its own process: bytes counted and read, seconds per step, loss, fingerprint."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_solo.data.batch_size import size_of
from lightning_solo.errors import PresetError
from lightning_solo.memory.category_peaks import CategoryPeaks
from lightning_solo.memory.reading import read
from lightning_solo.seams.homes import home_of, part
from lightning_solo.sweeps.results import loss_of

COUNTED = 2
"""Steps at the start whose bytes are counted, which is slow; the first has no optimizer states yet."""
WARM_UP = 5
"""Steps at the start that aren't timed; of fewer than ten steps, half."""
LAST = 5
"""Steps at the end over which the loss is averaged."""
FEWEST = 4
"""Fewest timed steps with a known spread."""
OWN_ARGUMENTS = {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}
"""Trainer arguments of a rung, which only trains."""


class Clock(L.Callback):
    """Records seconds, loss and samples of each optimizer step, over its micro-batches, without the loader.

    Args:
        counted: optimizer steps at the start whose bytes are counted.
    """

    def __init__(self, counted: int = 0) -> None:
        self.counted = counted
        self.counts = CategoryPeaks(counted)
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.samples: list[int] = []
        self._begin()
        self._started = 0.0
        self._step = 0

    def _begin(self) -> None:
        self._seconds, self._samples = 0.0, 0
        self._losses: list[Tensor] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Start the clock."""
        self.counts.enter(pl_module, trainer.optimizers, trainer.strategy.root_device, trainer.global_step)
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock when the device is done, and end the step if the optimizer has stepped."""
        self.counts.leave()
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize(trainer.strategy.root_device)
        self._seconds += time.perf_counter() - self._started
        self._samples += size_of(batch)[0] or 0
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # under automatic optimization Lightning has divided it by the number of micro-batches
            times = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self._losses.append(loss.detach() * times)
        elif not pl_module.automatic_optimization:  # training_step need not return it
            logged = loss_of({name: float(value) for name, value in trainer.callback_metrics.items()})
            self._losses += [] if logged is None else [torch.tensor(logged)]
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self.seconds.append(self._seconds)
            self.samples.append(self._samples)
            self.losses += [statistics.fmean(map(float, self._losses))] if self._losses else []
            self.counts.take(self._step)
            self._begin()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop counting: if ``training_step`` skipped the rest of the epoch, no hook ended its last batch."""
        self.counts.leave()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop counting."""
        self.counts.discard()


def measure(model: Any, data: Any, trainer: Mapping[str, Any], clock: Clock, steps: int) -> dict[str, Any]:
    """Train with an unused clock, and return the measurements as plain numbers.

    Raises:
        PresetError: the loader has no batch.
    """
    runner = part(home_of(model), "trainer").Trainer(**{**trainer, **OWN_ARGUMENTS, "max_steps": steps})
    device = runner.strategy.root_device
    before = read(device)
    runner.fit(model, data)
    reading = read(device)
    if not clock.seconds:
        raise PresetError(
            f"data: the train_dataloader of {type(data or model).__name__} gave no batch to train on; give one that"
            " does, or check data and trainer.limit_train_batches"
        )
    counted, seconds = clock.counts.largest, timed(clock.seconds, clock.counted)
    return {
        "device": device.type,
        "counted_bytes": counted and counted[0].bytes,
        "breakdown": counted and counted[0].breakdown,
        "steps": runner.global_step,  # two optimizers under manual optimization take two a batch
        "peak_bytes": reading.peak_allocated or reading.peak_resident,
        "before_bytes": before.resident if before.allocated is None else before.allocated,
        "step_s": statistics.median(seconds) if seconds else None,
        "step_quartiles_s": quartiles(seconds),
        "loss": statistics.fmean(clock.losses[-LAST:]) if clock.losses else None,
        "samples_per_step": clock.samples[0] or None,
        "fingerprint": fingerprint(model, clock.losses),
    }


def timed(seconds: Sequence[float], counted: int) -> Sequence[float]:
    """Return the seconds of the steps after the warm-up and after the counted ones; a short run may have none.

    >>> timed([9.0, 9.0, 1.0], 2), timed([9.0] * 5 + [1.0, 2.0, 3.0, 2.0, 2.0], 2), timed([9.0, 9.0], 2)
    ([1.0], [1.0, 2.0, 3.0, 2.0, 2.0], [])
    """
    return seconds[max(min(WARM_UP, len(seconds) // 2), counted) :]


def counted_of(steps: int) -> int:
    """Return the number of a rung's steps that are counted; at least one step is timed.

    >>> [counted_of(steps) for steps in (1, 2, 3, 25)]
    [0, 1, 2, 2]
    """
    return min(COUNTED, steps - 1)


def quartiles(seconds: Sequence[float]) -> tuple[float, float] | None:
    """Return the first and third quartile; None for too few values.

    >>> quartiles([1.0, 2.0, 3.0, 2.0, 2.0, 9.0, 2.0]), quartiles([1.0, 2.0, 3.0])
    ((2.0, 2.5), None)
    """
    if len(seconds) < FEWEST:
        return None
    first, _, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return first, third


def fingerprint(model: torch.nn.Module, losses: Sequence[float]) -> str | None:
    """Return a hash of every bit of parameters, buffers and losses; None if one of them can't be read."""
    digest = hashlib.sha256(repr(list(losses)).encode())
    try:
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(name.encode())
            digest.update(bits.numpy().data)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # never initialized, or a subclass without bytes
        return None
    return digest.hexdigest()
