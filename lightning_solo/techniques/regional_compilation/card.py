"""The card of `regional_compilation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_solo.cards.blocks import blocks_setting
from lightning_solo.cards.card import Card, Requirement
from lightning_solo.cards.engines import ROUNDING, alike
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of RegionalCompilation."""

    blocks: str | Sequence[str] = blocks_setting()
    mode: str = setting(
        "default",
        "Inductor's mode; max-autotune-no-cudagraphs tries several kernels of each kind: it compiles for minutes, and "
        "may run faster",
        allowed=("default", "max-autotune-no-cudagraphs"),
    )
    dynamic: bool | None = setting(None, "null: one graph per shape, and one for all shapes once they change")
    backend: str = setting(
        "inductor",
        "torch.compile's back end; aot_eager runs torch's own kernels, which helps to find an error. There is no "
        "eager: with it torch 2.13 recomputes a checkpointed block with other dropout masks",
        allowed=("inductor", "aot_eager"),
    )


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan the blocks uncompiled: the compiler keeps at most as much for backward."""
    assumption = "regional compilation isn't planned: compiled blocks keep less for backward, and are faster"
    return tracing.assuming(assumption, attached=None)


CARD = Card(
    name="regional_compilation",
    target="lightning_solo.techniques.regional_compilation.technique:RegionalCompilation",
    phase=Phase.COMPILE,
    settings=Settings,
    saves="activations that the compiler fuses away or recomputes: results of elementwise operators",
    costs="compilation, once for all equal blocks: seconds to minutes in the first step; again for new shapes, and for"
    " validation",
    numerics="fused operators round less often: differences are within the precision's rounding."
    " Inductor draws other dropout masks than torch from the same seed",
    conflicts="a module that compiles its blocks itself",
    reference="regional compilation: https://docs.pytorch.org/tutorials/recipes/regional_compilation.html",
    requires=(
        Requirement(
            "compiler",
            "regional compilation builds kernels; install one (apt install g++), write"
            " callback.regional_compilation.backend=aot_eager, or ~callback.regional_compilation",
            when=lambda settings: settings.backend == "inductor",
        ),
    ),
    on_cpu={"backend": "aot_eager"},
    planned="lightning_solo.techniques.regional_compilation.card:planned",
    engines=alike(ROUNDING),
)
