"""How a preset is traced for its plan; each technique's card may change it in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from lightning_solo.cards.footprint import Sizes


class EngineStates(Protocol):
    """Model states that an engine stores, counted by a formula because a trace can't see them."""

    def buffers(self, sizes: Sizes, precision: str, accumulation: int) -> tuple[list[tuple[str, int]], int]:
        """Return (category, bytes) of each buffer on a GPU, and the bytes on its host."""

    def seconds(self, sizes: Sizes, precision: str, accumulation: int, host_bandwidth: float) -> tuple[float, float]:
        """Return the seconds of copies that may overlap with the micro-batches, and of the update after them."""


@dataclass(frozen=True)
class Tracing:
    """How a preset is traced.

    Attributes:
        precision: of forward and backward, by Lightning's name.
        accumulation: micro-batches per optimizer step.
        attached: settings with which this technique is attached for the trace; None omits it.
        states: how model states are counted where they aren't traced.
        steps: optimizer steps that are traced; an optimizer has its states from the second on.
        splits: whether a batch is run in several micro-batches, as large as fit.
        at_most: examples in one of them; None for what fits.
        scales: whether memory is affine in the micro-batch, so that traces of two sizes give all others.
        ahead: batches of the loader that wait for their step: on a GPU, where a stream of their own copies them.
        assumptions: where the trace differs from the run, in words.
    """

    precision: str
    accumulation: int = 1
    attached: Any = None
    states: EngineStates | None = None
    steps: int = 2
    splits: bool = False
    at_most: int | None = None
    scales: bool = True
    ahead: int = 0
    assumptions: tuple[str, ...] = ()
