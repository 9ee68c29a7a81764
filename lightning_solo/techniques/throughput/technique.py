"""Samples and tokens per second, seconds per step, and the model FLOP utilisation."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_solo.data.batch_size import size_of
from lightning_solo.errors import PresetError
from lightning_solo.seams import patches
from lightning_solo.techniques.throughput.card import Settings
from lightning_solo.techniques.throughput.flops import CountedOnce, compute_dtype, peak_flops
from lightning_solo.techniques.throughput.nvml import GpuState
from lightning_solo.techniques.throughput.rates import SAMPLES, TOKENS, Rates


class Throughput(Callback, Settings):
    """Logs samples/s, tokens/s, model TFLOP/s and model FLOP utilisation, over the last batches, and seconds per step.

    ``throughput/step_s`` is the mean over the optimizer steps since the last log, without the first step of the fit.

    Model FLOPs are those of the first batch's forward, times 3 for forward and backward, scaled by tokens (else
    samples) for other batches. The recomputation of activation checkpointing is not counted. Under manual optimization
    ``training_step`` includes backward, so all of its FLOPs are counted once, with recomputation.

    On a GPU, where nvidia-ml-py is installed, ``throughput/utilization`` is the share of NVML's last sample in which a
    kernel ran, and ``throughput/throttled``, ``throttled_by_power`` and ``throttled_by_heat`` are 1 if the GPU lowers
    its clocks at that moment.

    Time spent waiting for data is training time. Validation, and the time until the next batch, is not.
    """

    def _init_state(self) -> None:
        self._start()

    @property
    def figures(self) -> dict[str, float]:
        """The figures over the last ``window_size`` batches, by logged key; empty before the second batch.

        Samples and tokens are those of this process, times the number of processes.
        """
        return {
            name: value * self._processes if name in (SAMPLES, TOKENS) else value
            for name, value in self._rates.figures.items()
        }

    def _start(self, available_flops: float | None = None, device: torch.device | None = None) -> None:
        self._gpu = GpuState(device or torch.device("cpu"))
        self._rates = Rates(self.window_size, available_flops)
        self._processes = 1
        self._step = 0  # of the last log
        self._since: tuple[int, float] | None = None  # optimizer step and training seconds at the start of `step_s`
        self._counter: CountedOnce | None = None
        self._warned = False

    # --- when: Lightning's hooks ---

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the counts for this fit, and count the first forward."""
        self._remove_counter()
        self._start(self._peak_flops(trainer) if self.count_flops else None, trainer.strategy.root_device)
        self._step, self._processes = trainer.global_step, trainer.world_size
        if self.count_flops:
            # 3 = forward 1 + backward 2: gradients of inputs and of weights cost a forward each
            passes = 3 if pl_module.automatic_optimization else 1

            def receive(flops: int, batch: Any = None, *_: Any) -> None:
                self._rates.flops_of_batch = passes * flops
                if self.samples_per_batch is None and self.tokens_per_batch is None:
                    self._rates.counted = size_of(batch)  # of a part, if a technique splits batches

            self._counter = CountedOnce(trainer.strategy, "training_step", receive)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Resume the clock after validation."""
        self._rates.resume()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the batch, and log if this optimizer step is due."""
        self._rates.add(*self._size(batch))
        step = trainer.global_step
        if self._since is None and step != self._step:
            self._since = step, self._rates.seconds
        if step != self._step and step % self.every_n_steps == 0:
            self._log(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pause the clock until the next training batch."""
        self._rates.pause()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last steps."""
        if trainer.global_step != self._step:
            self._log(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the counter."""
        self._remove_counter()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the counter, since Lightning calls no teardown after an exception."""
        self._remove_counter()

    # --- what ---

    def _size(self, batch: object) -> tuple[int | None, int | None]:
        samples, tokens = self.samples_per_batch, self.tokens_per_batch
        if samples is None or tokens is None:
            counted_samples, counted_tokens = size_of(batch)
            samples = counted_samples if samples is None else samples
            tokens = counted_tokens if tokens is None else tokens
        if samples is None and not self._warned:
            self._warned = True
            warnings.warn(
                f"Throughput: a batch of type {type(batch).__name__} has no tensor, so only step_s is logged; "
                "write callback.throughput.samples_per_batch=<samples>",
                stacklevel=2,
            )
        if samples is not None and tokens is not None and tokens < samples:
            raise PresetError(
                f"throughput.tokens_per_batch={tokens}: fewer than the {samples} samples of a batch; allowed is at "
                "least one token per sample"
            )
        return samples, tokens

    def _log(self, trainer: Trainer) -> None:
        self._step = trainer.global_step
        figures = {**self.figures, **self._step_time(), **self._gpu.figures()} if trainer.loggers else {}
        self._since = self._step, self._rates.seconds
        if figures:
            patches.log_metrics(trainer, figures)

    def _step_time(self) -> dict[str, float]:
        step, seconds = self._since or (self._step, self._rates.seconds)
        steps = self._step - step
        return {"throughput/step_s": (self._rates.seconds - seconds) / steps} if steps > 0 else {}

    def _remove_counter(self) -> None:
        if self._counter is not None:
            self._counter.remove()
            self._counter = None

    def _peak_flops(self, trainer: Trainer) -> float | None:
        if self.device_tflops is not None:
            return self.device_tflops * 1e12
        return peak_flops(trainer.strategy.root_device, compute_dtype(str(trainer.precision)))
