"""The card of `memory_snapshot`."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_solo.cards.card import Card, Requirement
from lightning_solo.cards.engines import EVERYWHERE
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.memory.log_files import not_below_a_folder


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of MemorySnapshot."""

    folder: str = setting(
        "memory_snapshots",
        "where the files are written, below the first logger's directory, else ``default_root_dir``",
        check=not_below_a_folder,
    )
    max_entries: int = setting(
        100_000,
        "allocations and frees in the history of one batch; older ones are dropped, and a peak before them is not seen",
        at_least=1,
    )
    native_frames: bool = setting(
        False, "also record C++ frames, which name the operators of backward; reading the history then takes minutes"
    )


CARD = Card(
    name="memory_snapshot",
    target="lightning_solo.techniques.memory_snapshot.technique:MemorySnapshot",
    phase=Phase.OBSERVE,
    settings=Settings,
    saves="nothing; it observes",
    costs="a Python traceback at every allocation and free (2 µs each, by torch's documentation); the history is"
    " written at each new peak, usually in the first two steps; up to ``max_entries`` entries of host memory",
    numerics="bit-exact",
    conflicts="``memory_logger`` with ``per_phase``, which resets the counters that show a new peak; runs without CUDA",
    reference="https://docs.pytorch.org/docs/stable/torch_cuda_memory.html",
    exact=True,
    reads=frozenset({"device_peak"}),
    owns=frozenset({"allocator_history"}),
    requires=(
        Requirement(
            "cuda",
            "callback.memory_snapshot needs a CUDA device: it reads the CUDA allocator's history; without one write"
            " ++callback.memory_logger.category_steps=2, which logs what the peak of a step consists of",
        ),
    ),
    on_cpu=None,
    planned="left out",
    engines=EVERYWHERE,
)
