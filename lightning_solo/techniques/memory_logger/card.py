"""The card of `memory_logger`."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_solo.cards.card import Card
from lightning_solo.cards.engines import EVERYWHERE
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.memory.log_files import not_below_a_folder


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of MemoryLogger."""

    every_n_steps: int = setting(50, "optimizer steps between two readings", at_least=1)
    per_phase: bool = setting(
        False,
        "also log the peaks of forward, backward and step (on a CPU: resident bytes at the end of each). It resets "
        "the CUDA peak counters between phases, so ``torch.cuda.max_memory_allocated()`` covers the last phase only",
    )
    file: str = setting(
        "memory.csv",
        "CSV file of the readings, below the first logger's directory, else ``default_root_dir``; rows are "
        "appended, and the column ``fit`` tells runs apart",
        check=not_below_a_folder,
    )
    table: bool = setting(True, "print a table at the end of the fit")
    category_steps: int = setting(
        0,
        "first optimizer steps whose peak is logged by category, which makes them slower; the first has no "
        "optimizer states yet",
        at_least=0,
    )


CARD = Card(
    name="memory_logger",
    target="lightning_solo.techniques.memory_logger.technique:MemoryLogger",
    phase=Phase.OBSERVE,
    settings=Settings,
    saves="nothing; it observes",
    costs="one reading every ``every_n_steps`` optimizer steps, with ``per_phase`` one per phase, measured by"
    " examples/measure_callbacks.py; it never synchronises and never empties the cache. In ``category_steps`` a Python"
    " call per operator",
    numerics="bit-exact; compiled parts run uncompiled in the ``category_steps``",
    conflicts="none; ``per_phase`` resets the CUDA peak counters, which others in the process may read",
    reference="https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html",
    exact=True,
    frees=lambda settings: frozenset({"device_peak"} if settings.per_phase else ()),
    instead={"device_peak": "callback.memory_logger.per_phase=false"},
    planned="left out",
    engines=EVERYWHERE,
)
