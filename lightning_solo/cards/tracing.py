"""Settings of the trace that a plan is made from; each technique's card may change them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from lightning_solo.cards.footprint import Sizes


class EngineStates(Protocol):
    """Model states of an engine, counted by a formula because a trace can't see them."""

    def buffers(self, sizes: Sizes, precision: str, accumulation: int) -> tuple[list[tuple[str, int]], int]:
        """Return (category, bytes) of each buffer on the GPU, and the bytes on the host."""

    def seconds(self, sizes: Sizes, precision: str, accumulation: int, host_bandwidth: float) -> tuple[float, float]:
        """Return the seconds of copies that can overlap with micro-batches, and of the update after them."""


STATES = frozenset({"weights", "gradients", "optimizer_states"})
"""The categories of model states."""


@dataclass(frozen=True)
class Ranks:
    """How an engine for several devices changes the bytes of each of its processes.

    Attributes:
        sharded: categories of model states of which a process has its share.
        gathers: whether a block's weights are gathered for its forward and its backward, and its gradients reduced.
        keeps_blocks: whether blocks stay gathered from their forward to the end of backward.
        blocks: the setting that names the blocks.
        buckets: ``"views"`` or ``"copies"`` of all gradients are held from the start; None for no buckets.
        ahead_bytes: weights that are gathered before their use, besides a block's, and once more as they are sent; 0 if
            each block is gathered alone.
        reduced_bytes: of a fixed buffer for gradients that are sent; then the process's share is also kept flat.
        rebuilds: whether the buckets are made anew in the second step, by the order of the first.
    """

    sharded: frozenset[str] = frozenset()
    gathers: bool = False
    keeps_blocks: bool = False
    blocks: Any = "auto"
    buckets: str | None = None
    ahead_bytes: int = 0
    reduced_bytes: int = 0
    rebuilds: bool = False


@dataclass(frozen=True)
class Tracing:
    """The settings of a trace.

    Attributes:
        precision: Lightning's name of the precision of forward and backward.
        accumulation: micro-batches per optimizer step.
        attached: settings of the technique for the trace; None omits the technique.
        ranks: how an engine changes a process's bytes; None without one.
        states: formula for model states that are not traced; None if they are traced.
        steps: number of traced optimizer steps; optimizer states exist from the second step on.
        splits: whether a batch is split into micro-batches, as large as memory allows.
        at_most: largest number of examples in a micro-batch; None for no limit.
        scales: whether memory is affine in the micro-batch, so that traces of two sizes predict all others.
        ring: blocks that are on the device at a time; blocks at both ends are then treated in another way.
        ahead: batches that a prefetching loader holds on the GPU.
        expandable_segments: whether the CUDA allocator's segments grow where they are, which wastes less memory.
        assumptions: differences between the trace and the run, in words.
    """

    precision: str
    accumulation: int = 1
    attached: Any = None
    states: EngineStates | None = None
    ranks: Ranks | None = None
    steps: int = 2
    splits: bool = False
    at_most: int | None = None
    scales: bool = True
    ring: int = 0
    ahead: int = 0
    expandable_segments: bool = False
    assumptions: tuple[str, ...] = ()
