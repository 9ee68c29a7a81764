"""The card of `profile`."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_solo.cards.card import Card
from lightning_solo.cards.engines import EVERYWHERE
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.memory.log_files import not_below_a_folder


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of Profile."""

    skip_steps: int = setting(
        10, "optimizer steps of the fit before the traced ones; the profiler warms up in the last of them", at_least=1
    )
    steps: int = setting(3, "optimizer steps in the trace; 0 writes none", at_least=0)
    every_n_steps: int = setting(
        50, "optimizer steps between two logged times of forward, backward and optimizer step", at_least=1
    )
    folder: str = setting(
        "profiles",
        "where the trace is written, below the first logger's directory, else ``default_root_dir``",
        check=not_below_a_folder,
    )


CARD = Card(
    name="profile",
    target="lightning_solo.techniques.profile.technique:Profile",
    phase=Phase.OBSERVE,
    settings=Settings,
    saves="nothing; it observes",
    costs="in the traced steps a record per operator, module and technique, so they are slower; memory for the records"
    " of ``steps``; in all others two clock readings per phase, on a GPU events that are read without waiting",
    numerics="bit-exact",
    conflicts="another torch profiler, such as Lightning's ``PyTorchProfiler`` (refused)",
    reference="https://docs.pytorch.org/docs/stable/profiler.html; trace viewer: https://ui.perfetto.dev",
    exact=True,
    on_cpu={"skip_steps": 1, "steps": 1},
    planned="left out",
    engines=EVERYWHERE,
)
