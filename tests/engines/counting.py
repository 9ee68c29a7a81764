"""The bytes that torch's CPU allocator gives to a process of two, counted by torch's profiler."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_solo.memory.sharded_tensors import local
from lightning_solo.reference.byte_gpt import ByteGPT
from tests.engines.processes import ENGINES, texts, trained

BATCH = 2
MARK = "mark of a step's end"


def model(depth: int) -> ByteGPT:
    """Return a byte GPT whose states take more than its activations."""
    torch.manual_seed(3)
    return ByteGPT(width=256, depth=depth, heads=4, context=16, warmup_steps=1)


class Ends(L.Callback):
    """Marks the end of each step in a profile, and counts the bytes of the states that this process has then."""

    states = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.states = sum(16 * local(p).numel() for p in pl_module.parameters())  # with a gradient and two moments
        with record_function(MARK):
            pass


def peak(engine: str, folder: Path, depth: int) -> int:
    """Return the peak of the bytes of the second optimizer step.

    gloo's threads free some buffers unseen by the profiler. So what is left at the end of the step, besides the states,
    doesn't count; `zero3` keeps buffers that do.
    """
    gc.collect()
    ends = Ends()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trained(
            {"strategy": ENGINES[engine]}, folder, module=model(depth), batches=texts(BATCH, rows=8 * BATCH),
            callbacks=[ends], max_steps=2,
        )  # fmt: skip
    now = most = steps = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
        elif event.name() == MARK:
            steps += 1
            if steps == 2:
                return most if engine == "zero3" else most - now + ends.states
            most = now
    raise AssertionError("training didn't end")


def counted(folder: Path, *engines: str) -> dict[str, int]:
    """Return the peak under each engine, of modules of 4 and 8 blocks."""
    return {f"{engine} {depth}": peak(engine, folder, depth) for engine in engines for depth in (4, 8)}
