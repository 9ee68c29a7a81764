"""The bytes that torch's CPU allocator gives to a process of two, counted by torch's profiler."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_solo.memory.sharded_tensors import local
from lightning_solo.reference.byte_gpt import ByteGPT
from tests.engines.processes import ENGINES, texts, trained

BATCH = 2
STEPS = 5
MARK = "mark of a step's end"


def model(depth: int) -> ByteGPT:
    """Return a byte GPT whose states take more than its activations."""
    torch.manual_seed(3)
    return ByteGPT(width=256, depth=depth, heads=4, context=16, warmup_steps=1)


class Ends(L.Callback):
    """Marks the end of each step in a profile, and counts the bytes of the states that this process has then."""

    states = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        held = (local(p) for p in pl_module.parameters())
        self.states = sum(4 * p.element_size() * p.numel() for p in held)  # with a gradient and two moments
        with record_function(MARK):
            pass


def flat(events: Any) -> Iterator[Any]:
    """Yield the events of a profile's tree."""
    for event in events:
        yield event
        yield from flat(event.children)


def is_gloos(event: Any, thread: int) -> bool:
    """Return whether gloo makes a copy of a tensor, in a call or in a thread of its own; NCCL makes none."""
    if event.start_tid != thread or event.name.startswith("c10d::"):
        return True
    return event.parent is not None and is_gloos(event.parent, thread)


def peak(engine: str, precision: str, folder: Path, depth: int) -> int:
    """Return the peak of the bytes of the second optimizer step, or a later one, without the copies that gloo makes.

    Threads of gloo free some tensors unseen by the profiler, unless their address comes again. So what is left at the
    start of a step, besides what stays, doesn't count, and the least of several steps is the right one. `ddp` makes its
    buckets anew in the second step alone.
    """
    gc.collect()
    ends = Ends()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trained(
            {"precision": precision, "strategy": ENGINES[engine]}, folder, module=model(depth),
            batches=texts(BATCH, rows=8 * BATCH), callbacks=[ends], max_steps=2 if engine == "ddp" else STEPS,
        )  # fmt: skip
    events = list(flat(profiler.profiler.kineto_results.experimental_event_tree()))
    thread = next(event.start_tid for event in events if event.name == MARK)
    sizes: dict[int, int] = {}  # of what lives, by address; 0 for gloo's
    now = most = 0
    starts, peaks = [], []
    for event in sorted(events, key=lambda event: event.start_time_ns):
        if event.name == MARK:
            starts.append(now)
            peaks.append(most)
            most = now
        elif event.tag == _EventType.Allocation:
            address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
            now -= sizes.pop(address, 0)
            if size > 0:
                sizes[address] = 0 if is_gloos(event, thread) else size
                now += sizes[address]
                most = max(most, now)
    stays = min(starts) if engine.startswith("zero") else ends.states  # DeepSpeed keeps buffers
    return min(highest - start for start, highest in zip(starts, peaks[1:], strict=False)) + stays


def counted(folder: Path, *cases: str) -> dict[str, int]:
    """Return the peak under each engine and precision, as ``"zero3 bf16-true"``, of modules of 4 and 8 blocks."""
    return {f"{case} {depth}": peak(*case.split(), folder, depth) for case in cases for depth in (4, 8)}
