"""Settings of the trace that a plan is made from; each technique's card may change them."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    """How an engine for several devices changes the bytes of each of its processes."""

    sharded: frozenset[str] = frozenset()  # categories of model states of which a process has its share
    # whether a block's weights are gathered for its forward and its backward, and its gradients reduced
    gathers: bool = False
    keeps_blocks: bool = False  # whether blocks stay gathered from their forward to the end of backward
    blocks: Any = "auto"  # the setting that names the blocks
    # ``"views"`` or ``"copies"`` of all gradients are held from the start; None for no buckets
    buckets: str | None = None
    # bytes of a flat fp32 master, which the engine steps, per byte of a weight: 1 for fp32, 2 for 16 bits; 0 if the
    # optimizer steps the weights themselves
    widening: int = 0
    bucket_bytes: int = 0  # of gradients that are reduced together, under an engine with masters
    kept_bytes: int = 0  # of gathered weights that stay until they are used again, under such an engine
    rebuilds: bool = False  # whether the buckets are made anew in the second step, by the order of the first


@dataclass(frozen=True)
class Tracing:
    """The settings of a trace."""

    precision: str  # Lightning's name of the precision of forward and backward
    accumulation: int = 1  # micro-batches per optimizer step
    attached: Any = None  # settings of the technique for the trace; None omits the technique
    states: EngineStates | None = None  # formula for model states that are not traced; None if they are traced
    ranks: Ranks | None = None  # how an engine changes a process's bytes; None without one
    steps: int = 2  # number of traced optimizer steps; optimizer states exist from the second step on
    splits: bool = False  # whether a batch is split into micro-batches, as large as memory allows
    at_most: int | None = None  # largest number of examples in a micro-batch; None for no limit
    scales: bool = True  # whether memory is affine in the micro-batch, so that traces of two sizes predict all others
    ring: int = 0  # blocks that are on the device at a time; blocks at both ends are then treated in another way
    ahead: int = 0  # batches that a prefetching loader holds on the GPU
    # whether the CUDA allocator's segments grow where they are, which wastes less memory
    expandable_segments: bool = False
    assumptions: tuple[str, ...] = ()  # differences between the trace and the run, in words

    def assuming(self, *assumptions: str, **changes: Any) -> Tracing:
        """Return these settings with some changes and further assumptions."""
        return replace(self, assumptions=(*self.assumptions, *assumptions), **changes)
