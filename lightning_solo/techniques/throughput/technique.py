"""Samples and tokens per second, seconds per step, and the share of the device's arithmetic that training uses.

Saves:      nothing; it observes
Costs:      a few integers each batch; the first batch's forward runs under a FLOP counter (some milliseconds, and
            without torch.compile); never synchronises; measured by examples/measure_callbacks.py
Numerics:   bit-exact
Conflicts:  none; ``count_flops`` where a forward cannot run under a TorchDispatchMode: write ``count_flops: false``
Reference:  model FLOP utilisation: Chowdhery et al., "PaLM", https://arxiv.org/abs/2204.02311, appendix B
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.throughput import Throughput as FabricThroughput
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.flop_counter import FlopCounterMode

from lightning_solo.errors import PresetError
from lightning_solo.presets.devices import find


@dataclass(frozen=True)
class Totals:
    """What was processed since the start of the fit; ``seconds`` without validation."""

    seconds: float
    batches: int
    samples: int
    tokens: int | None
    flops: int | None


def first_tensor(batch: object) -> torch.Tensor | None:
    """Return the first tensor with a batch dimension inside mappings and sequences, or None."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.ndim else None
    items: Sequence[object] = ()
    if isinstance(batch, Mapping):
        items = list(batch.values())
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        items = batch
    return next((found for item in items if (found := first_tensor(item)) is not None), None)


def size_of(batch: object) -> tuple[int | None, int | None]:
    """Return the samples in a batch, and its tokens where its first tensor holds token ids as (batch, sequence).

    >>> size_of({"input_ids": torch.zeros(4, 128, dtype=torch.long)}), size_of([torch.zeros(4, 128)])
    ((4, 512), (4, None))
    """
    tensor = first_tensor(batch)
    if tensor is None:
        return None, None
    integer = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool
    return tensor.shape[0], tensor.numel() if tensor.ndim == 2 and integer else None


def figures_of(totals: Sequence[Totals], available_flops: float | None) -> dict[str, float]:
    """Return the figures over a stretch of training, by logged key; none for fewer than two totals.

    The first total is only the start of the stretch, so a slow first batch does not count.
    """
    if len(totals) < 2:
        return {}
    window = FabricThroughput(available_flops=available_flops, window_size=len(totals))
    flops_before = totals[0].flops
    for total in totals:
        flops = None if total.flops is None or flops_before is None else total.flops - flops_before
        flops_before = total.flops
        window.update(
            time=total.seconds, batches=total.batches, samples=total.samples, lengths=total.tokens, flops=flops
        )
    found = window.compute()
    figures = {
        "throughput/samples_per_s": found.get("device/samples_per_sec"),
        "throughput/tokens_per_s": found.get("device/items_per_sec"),
        "throughput/model_tflops_per_s": found.get("device/flops_per_sec"),
        "throughput/mfu": found.get("device/mfu"),
    }
    if figures["throughput/model_tflops_per_s"] is not None:
        figures["throughput/model_tflops_per_s"] /= 1e12
    return {key: float(value) for key, value in figures.items() if value is not None}


@contextlib.contextmanager
def eager_flop_counter() -> Iterator[FlopCounterMode]:
    """Count FLOPs in this context.

    Dynamo marks a function that it first meets under a dispatch mode as not to be compiled, for good; so compiled
    functions run as written here. Dynamo is loaded (seconds) only if the program did so already.
    """
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield stack.enter_context(FlopCounterMode(display=False))


class CountedOnce:
    """Replaces an object's method until its next call, whose FLOPs it counts; no mode stays on, even if that raises."""

    def __init__(self, owner: Any, name: str, counted: Callable[[int], None]) -> None:
        self.owner, self.name, self.counted = owner, name, counted
        self.own = owner.__dict__.get(name)  # what another technique put on the object itself
        self.method = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method under the counter, and be gone."""
        self.remove()
        if self.counted is _ignored:
            return self.method(*args, **kwargs)
        counted, self.counted = self.counted, _ignored
        with eager_flop_counter() as counter:
            result = self.method(*args, **kwargs)
        counted(int(counter.get_total_flops()))
        return result

    def remove(self) -> None:
        """Put back what was there, unless someone has replaced it since."""
        if self.owner.__dict__.get(self.name) is not self:
            return
        if self.own is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.own)


def _ignored(flops: int) -> None:
    """Stand in for the receiver of a count once it has been given."""


class Throughput(Callback):
    """Logs samples/s, tokens/s, model TFLOP/s and model FLOP utilisation, over the last batches, and seconds per step.

    ``throughput/step_s`` is the mean over the optimizer steps since the log before, the first step of the fit aside.

    Model FLOPs are those of the first batch's forward, times 3 for forward and backward, scaled by tokens (else
    samples) for other batches: what activation checkpointing computes again is not counted. Under manual optimization
    ``training_step`` holds the backward too, and is counted as it is, recomputation included. Validation, and what
    follows it until the next batch, is not training time; waiting for data is.

    Args:
        every_n_steps: optimizer steps (``global_step``) between two logs.
        window_size: batches that a figure is averaged over, at least 2; shorter runs use what there is.
        samples_per_batch: samples in a batch; by default the first dimension of its first tensor.
        tokens_per_batch: tokens in a batch; by default counted where the first tensor is (batch, sequence) of integers.
        count_flops: count the model's FLOPs.
        device_tflops: the device's peak TFLOP/s at the precision used, for devices that Lightning does not know.

    Raises:
        PresetError: an argument is out of range.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        window_size: int = 100,
        samples_per_batch: int | None = None,
        tokens_per_batch: int | None = None,
        count_flops: bool = True,
        device_tflops: float | None = None,
    ) -> None:
        super().__init__()
        self.every_n_steps = _checked("every_n_steps", every_n_steps, 1)
        self.window_size = _checked("window_size", window_size, 2)
        self.samples_per_batch = None if samples_per_batch is None else _checked("samples_per_batch", samples_per_batch)
        self.tokens_per_batch = None if tokens_per_batch is None else _checked("tokens_per_batch", tokens_per_batch)
        if not isinstance(count_flops, bool):
            raise PresetError(f"throughput.count_flops={count_flops!r}: allowed are true and false")
        self.count_flops = count_flops
        self.device_tflops = _checked_tflops(device_tflops)
        self._start()

    def __repr__(self) -> str:
        """The call that builds this callback again."""
        names = (
            "every_n_steps",
            "window_size",
            "samples_per_batch",
            "tokens_per_batch",
            "count_flops",
            "device_tflops",
        )
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def figures(self) -> dict[str, float]:
        """The figures over the last ``window_size`` batches, by logged key; empty before the second batch."""
        return figures_of(self._totals, self._available_flops)

    def _start(self) -> None:
        self._totals: deque[Totals] = deque(maxlen=self.window_size)
        self._seconds, self._batches, self._samples = 0.0, 0, 0
        self._tokens: int | None = 0
        self._flops = 0.0
        self._flops_per_unit: float | None = None
        self._counted_flops: int | None = None
        self._passes = 3
        self._available_flops: float | None = None
        self._mark: float | None = None  # since when training runs; None while it does not
        self._step = 0
        self._since: tuple[int, float] | None = None  # optimizer step and training seconds where `step_s` counts from
        self._counter: CountedOnce | None = None
        self._warned = False

    # --- when: Lightning's hooks ---

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start afresh for this fit, and count the first forward."""
        self._remove_counter()
        self._start()
        self._step = trainer.global_step
        if self.count_flops:
            self._available_flops = self._peak_flops(trainer)
            # 3 = forward 1 + backward 2: gradients of inputs and of weights cost a forward each
            self._passes = 3 if pl_module.automatic_optimization else 1
            self._counter = CountedOnce(trainer.strategy, "training_step", self._receive_flops)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Let the clock run on after validation."""
        if self._mark is None:
            self._mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the batch, and log where it is an optimizer step's turn."""
        self._add(batch)
        step = trainer.global_step
        if self._since is None and step != self._step:
            self._since = step, self._seconds
        if step != self._step and step % self.every_n_steps == 0:
            self._log(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock: it goes on at the next training batch."""
        self._mark = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last steps."""
        if trainer.global_step != self._step:
            self._log(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the counter away."""
        self._remove_counter()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the counter away; Lightning calls no teardown after an exception."""
        self._remove_counter()

    # --- what ---

    def _add(self, batch: object) -> None:
        now = time.perf_counter()
        self._seconds += now - (now if self._mark is None else self._mark)
        self._mark = now
        samples, tokens = self._size(batch)
        if not samples:
            return
        self._batches += 1
        self._samples += samples
        self._tokens = None if tokens is None or self._tokens is None else self._tokens + tokens
        units = samples if tokens is None else tokens
        if self._counted_flops is not None and units:
            self._flops_per_unit, self._counted_flops = self._passes * self._counted_flops / units, None
        self._flops += (self._flops_per_unit or 0.0) * units
        flops = None if self._flops_per_unit is None else round(self._flops)
        self._totals.append(Totals(self._seconds, self._batches, self._samples, self._tokens, flops))

    def _size(self, batch: object) -> tuple[int | None, int | None]:
        samples, tokens = self.samples_per_batch, self.tokens_per_batch
        if samples is None or tokens is None:
            found_samples, found_tokens = size_of(batch)
            samples = found_samples if samples is None else samples
            tokens = found_tokens if tokens is None else tokens
        if samples is None and not self._warned:
            self._warned = True
            warnings.warn(
                f"Throughput: no tensor found in a batch of type {type(batch).__name__}, so there is step_s alone; "
                "write throughput.samples_per_batch=...",
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
        figures = {**self.figures, **self._step_time()} if trainer.loggers else {}
        self._since = self._step, self._seconds
        for logger in trainer.loggers if figures else ():
            # straight to the logger: the module's own keys and aggregation are left alone; the axis is self.log()'s
            logger.log_metrics(figures, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _step_time(self) -> dict[str, float]:
        step, seconds = self._since or (self._step, self._seconds)
        steps = self._step - step
        return {"throughput/step_s": (self._seconds - seconds) / steps} if steps > 0 else {}

    def _receive_flops(self, flops: int) -> None:
        self._counted_flops = flops or None

    def _remove_counter(self) -> None:
        if self._counter is not None:
            self._counter.remove()
            self._counter = None

    def _peak_flops(self, trainer: Trainer) -> float | None:
        if self.device_tflops is not None:
            return self.device_tflops * 1e12
        return peak_flops(trainer.strategy.root_device, compute_dtype(str(trainer.precision)))


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return a device's dense operations per second by our own table, else by Lightning's; None if unknown.

    Args:
        device: where the products run.
        dtype: of the products; those of fp32 are TF32's where torch may use it.
    """
    known = find(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    kind = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}.get(dtype)
    if known is None or kind is None:
        return get_available_flops(device, dtype)
    if kind == "fp32" and torch.get_float32_matmul_precision() != "highest" and known.flops["tf32"]:
        kind = "tf32"
    return known.flops[kind]


def compute_dtype(precision: str) -> torch.dtype:
    """Return the type that matrix products run in under one of Lightning's precision names.

    >>> compute_dtype("bf16-mixed"), compute_dtype("16-true"), compute_dtype("32-true")
    (torch.bfloat16, torch.float16, torch.float32)
    """
    if precision.startswith("transformer-engine"):
        return torch.int8  # FP8 runs at the rate of int8, which is what Lightning's table lists
    return {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}.get(
        precision.split("-")[0], torch.float32
    )


def _checked(name: str, value: object, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PresetError(f"throughput.{name}={value!r}: allowed is an integer >= {least}")
    return value


def _checked_tflops(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise PresetError(f"throughput.device_tflops={value!r}: allowed is a number above 0, such as 82.6, or null")
    return value
