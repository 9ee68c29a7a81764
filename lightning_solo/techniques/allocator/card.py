"""The card of `allocator`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_solo.cards.card import Card, Requirement
from lightning_solo.cards.engines import EVERYWHERE
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of Allocator."""

    every_n_steps: int = setting(50, "optimizer steps between two readings", at_least=1)
    expandable_segments: bool = setting(
        False, "make the allocator's segments grow where they are, for this run; before anything is on the device"
    )


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan the segments, without the readings."""
    expandable = tracing.expandable_segments or settings.expandable_segments
    return replace(tracing, attached=None, expandable_segments=expandable)


CARD = Card(
    name="allocator",
    target="lightning_solo.techniques.allocator.technique:Allocator",
    phase=Phase.OBSERVE,
    settings=Settings,
    saves="nothing by itself; with ``expandable_segments`` memory that ordinary segments leave in gaps",
    costs="every ``every_n_steps`` optimizer steps a list of the allocator's blocks; it never synchronises and never"
    " empties the cache. An expandable segment grows by pages of 20 MiB, and can't be shared with another process",
    numerics="bit-exact",
    conflicts="``memory_logger`` with ``per_phase``, which resets the peak counters; runs without CUDA; with"
    " ``expandable_segments`` a process that has memory on the device already (refused)",
    reference="https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf",
    exact=True,
    reads=frozenset({"device_peak"}),
    requires=(
        Requirement(
            "cuda",
            "callback.allocator needs a CUDA device: it reads the CUDA allocator; without one leave it out, and write"
            " +callback=memory_logger for the memory of the process",
        ),
        Requirement(
            "check",
            "callback.allocator.expandable_segments=true",
            name="lightning_solo.memory.segments:why_not_expandable",
            when=lambda settings: settings.expandable_segments,
        ),
    ),
    on_cpu=None,
    planned="lightning_solo.techniques.allocator.card:planned",
    engines=EVERYWHERE,
)
