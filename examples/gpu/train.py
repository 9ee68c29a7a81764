"""Trains a byte GPT for a few steps under a preset on the GPU, and prints figures as JSON: one run of parts d and f.

python examples/gpu/train.py compact --model 1b --context 2048 --batch 4 --plan
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import fcntl
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

import lightning_solo as solo
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.units import parse_budget

LLAMA = "llama-"
"""Begins the names of `plan_fine_tuning.py`'s models: llama-8B."""
MODELS = {  # width, depth, heads
    "tiny": (128, 2, 2),
    "124m": (768, 12, 12),
    "1b": (2048, 20, 16),
    "7b": (4096, 35, 32),
}

PLAN_LIMIT_S = 60
COPIES = {"HtoD": "to_device", "DtoH": "to_host"}
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMalloc", "cudaFree",
         "cudaHostAlloc", "cudaHostRegister", "cudaMemcpy")  # fmt: skip


class Clock(L.Callback):
    """Takes the time of each optimizer step, the device waited for, and a profile of one of them.

    Args:
        profiled: the step that is profiled, and not timed.
    """

    def __init__(self, profiled: int) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.kernels: dict[str, float] = {}
        self._profiled = profiled
        self._profiler: Any = None
        self._begun = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Start the clock with a device that has nothing to do."""
        torch.cuda.synchronize()
        if not self.losses:
            torch.cuda.reset_peak_memory_stats()  # what building the module on the device took isn't training
        if trainer.global_step == self._profiled and self._profiler is None:
            cuda = {torch.profiler.ProfilerActivity.CUDA} & torch.profiler.supported_activities()
            self._profiler = torch.profiler.profile(activities=cuda or {torch.profiler.ProfilerActivity.CPU})
            self._profiler.__enter__()
        self._begun = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Stop it when the device is done."""
        torch.cuda.synchronize()
        taken = time.perf_counter() - self._begun
        if self._profiler is None or self.kernels:
            self.seconds.append(taken)
        else:
            self._profiler.__exit__(None, None, None)
            self.kernels = kernels(self._profiler, taken)
        self.losses.append(float(outputs["loss"]))


def kernels(profiler: Any, taken: float) -> dict[str, float]:
    """Return launches, the idle share of a step, the busy seconds by kind of work, and the host's waits for CUDA."""
    spans: dict[str, list[tuple[float, float]]] = {"compute": [], "to_device": [], "to_host": []}
    waits = []
    for event in profiler.events():
        span = event.time_range.start, event.time_range.end
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = next((kind for name, kind in COPIES.items() if name in event.name), "compute")
            spans[kind].append(span)
        elif event.name in WAITS:
            waits.append(span[1] - span[0])
    every = [span for each in spans.values() for span in each]
    return {
        "launches": len(every),
        "idle_share": 1 - busy_s(every) / taken,
        **{f"{kind}_s": busy_s(each) for kind, each in spans.items()},
        "waits": len(waits),
        "waits_s": sum(waits) / 1e6,
    }


def busy_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that are in at least one of the spans, which are in microseconds."""
    at, busy = 0.0, 0.0
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, at))
        at = max(at, end)
    return busy / 1e6


class Built(L.LightningModule):
    """A module that is built on the device, where random numbers of billions of weights take no time."""

    def __init__(self, make: Any, saved_in: Any = contextlib.nullcontext) -> None:
        super().__init__()
        self.make, self.saved_in = make, saved_in
        self.net: Any = None

    def configure_model(self) -> None:
        """Build it."""
        if self.net is None:
            with torch.device("cuda"):
                self.net = self.make()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of the net."""
        with self.saved_in():
            if not isinstance(self.net, ByteGPT):
                return self.net.training_step(batch, batch_idx)
            logits = self.net(batch[:, :-1].long())
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten().long())

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-4)


@contextlib.contextmanager
def device_alone() -> Iterator[None]:
    """Wait until no other run trains on the device: processes import and plan side by side, and train in turn.

    A run that has the device for longer than the limit ends, and prints where it is.
    """
    if not os.environ.get("GPU_LOCK"):
        yield
        return
    with open(os.environ["GPU_LOCK"], "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        faulthandler.dump_traceback_later(float(os.environ["GPU_LIMIT_S"]), exit=True)
        yield
        faulthandler.cancel_dump_traceback_later()


def main() -> int:
    """Plan if asked, train, print."""
    print(json.dumps(run(parsed(sys.argv[1:]))))
    return 0


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset")
    parser.add_argument("--model", default="1b", help=f"{', '.join(MODELS)}, or {LLAMA}8B of plan_fine_tuning.py")
    parser.add_argument("--fp32", action="store_true", help="a Llama's weights, instead of bf16")
    parser.add_argument("--budget", help="memory of the device that may be taken, such as 24GiB")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--save-on-cpu", action="store_true", help="all saved tensors, by torch's own context")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args(words)
    if given.model not in MODELS and not given.model.startswith(LLAMA):
        parser.error(f"--model {given.model}: write {', '.join(MODELS)}, or {LLAMA}8B")
    return given


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a run."""
    make, tokens = made(given)
    figures: dict[str, Any] = {}
    if given.plan:
        figures |= planned(given, make, tokens)
    L.seed_everything(1, verbose=False)
    clock = Clock(profiled=2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    arguments = solo.trainer_kwargs(given.preset, given.overrides, callbacks=[clock])
    trainer = L.Trainer(
        **{"accelerator": "gpu", **arguments}, **quiet, enable_model_summary=False, max_steps=given.steps, max_epochs=-1
    )
    saved_in = (
        partial(torch.autograd.graph.save_on_cpu, pin_memory=True) if given.save_on_cpu else contextlib.nullcontext
    )
    with device_alone():
        if given.budget:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(parse_budget(given.budget) / total)
        trainer.fit(Built(make, saved_in), DataLoader(tokens, batch_size=given.batch))
        torch.cuda.empty_cache()
    timed = clock.seconds[1:]  # the first compiles
    taken = statistics.median(timed)
    accumulation = trainer.accumulate_grad_batches
    optimizers = [optimizer for optimizer in trainer.optimizers if hasattr(optimizer, "host_bytes")]
    return figures | {
        "parameters": sum(p.numel() for p in trainer.lightning_module.parameters()),
        "micro_batch_s": taken,
        "accumulation": accumulation,
        "tokens_per_s": given.batch * given.context / taken,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "host_bytes": sum(optimizer.host_bytes for optimizer in optimizers),
        **clock.kernels,
        "first_loss": clock.losses[0],
        "last_loss": clock.losses[-1],
    }


def planned(
    given: argparse.Namespace, make: Any, tokens: torch.Tensor, device: Any = None, timeout_s: float = PLAN_LIMIT_S
) -> dict[str, Any]:
    """Return the figures of the plan, or why there is none.

    The module is planned with its own AdamW, whose states are as large as those of `Built`.
    """
    try:
        plan = solo.plan(
            make,
            tokens,
            preset=given.preset,
            overrides=given.overrides,
            budget=given.budget,
            device=device,
            timeout_s=timeout_s,
        )
    except solo.SoloError as error:
        return {"plan_failed": str(error)[:300]}
    return {
        "planned_bytes": plan.peak_bytes,
        "planned_host_bytes": plan.host_bytes,
        "planned_s": plan.seconds_per_step,
        "planned_on": plan.device,
    }


def made(given: argparse.Namespace) -> tuple[Any, torch.Tensor]:
    """Return a function that builds the module, and a batch of tokens."""
    torch.manual_seed(0)
    if given.model.startswith(LLAMA):
        from plan_fine_tuning import SHAPES, LanguageModel

        name = given.model.removeprefix(LLAMA)
        make = partial(LanguageModel, name, torch.float32 if given.fp32 else torch.bfloat16)
        return make, torch.randint(SHAPES[name][0], (given.batch, given.context))
    width, depth, heads = MODELS[given.model]
    make = partial(ByteGPT, width=width, depth=depth, heads=heads, context=given.context)
    return make, torch.randint(256, (given.batch, given.context + 1), dtype=torch.uint8)


if __name__ == "__main__":
    sys.exit(main())
