"""The card of the strategy `compact`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_solo.cards.arguments import setting
from lightning_solo.cards.card import Card, Requirement, Rung
from lightning_solo.cards.footprint import Footprint, Request, without_gradients
from lightning_solo.cards.phase import Phase
from lightning_solo.optim import state_settings
from lightning_solo.optim.state_settings import StateSettings, cuda_remedy, refuse_precision


@dataclass(frozen=True)
class Settings(StateSettings):
    """Arguments of CompactStrategy: those of compact states and of gradient release."""

    choice: ClassVar[str] = "strategy=compact"
    option: ClassVar[str] = "strategy"

    release_gradients: bool = setting(True, "use and free each gradient in backward")
    gradient_buffer: str = setting(
        "device",
        "where gradients are kept for accumulation or clipping by norm",
        allowed=("device", "host"),
    )


def _gradients(settings: Settings) -> frozenset[str]:
    return frozenset({"gradients"} if settings.release_gradients else ())


def footprint(settings: Settings, request: Request, plain: Footprint) -> Footprint:
    """Return the bytes of compact states, without gradients where they are released."""
    compact = state_settings.footprint(settings, request, plain)
    return without_gradients(compact, request, settings.gradient_buffer) if settings.release_gradients else compact


CARD = Card(
    name="compact",
    target="lightning_solo.techniques.compact.technique:CompactStrategy",
    group="strategy",
    phase=Phase.STATES,
    settings=Settings,
    saves="of AdamW's 16 bytes per parameter (weight 4, gradient 4, moments 8) all but 5.06: bf16 weight 2, correction"
    ' 1, moments 1 + 1, scales 0.0625; with ``master_bits="16-stochastic"`` and ``moment_bits=4`` all but 3.06',
    costs="unpacking and packing in the step. With accumulation the gradients' sum is kept, 4 bytes per parameter; with"
    ' clipping by norm alone the gradients, 2; on the host with ``gradient_buffer="host"``. States on the host'
    " (``state_budget``) pass through the device, 3 bytes per parameter each way, in every step",
    numerics="``master_bits=32, moment_bits=32``: fp32 AdamW with a bf16 forward, on a CPU bit for bit, accumulation"
    " and clipping included. 24 bits drop updates below 2**-17 of a weight; 8-bit moments move an update by some 4 %"
    " (`examples/measure_moments.py`)",
    conflicts="optimizers that are not torch's, LBFGS, SparseAdam, Muon; fp16; release with hooks that read ``.grad``"
    " after backward. By manual optimization nothing is released",
    reference="FlashOptim 2026, arXiv 2602.23349; Dettmers et al. 2021, arXiv 2110.02861; Lv et al. 2023, arXiv"
    " 2306.09782",
    owns=lambda settings: _gradients(settings) | {"optimizer_states", "weights"},
    frees=_gradients,
    instead={"gradients": "strategy.release_gradients=false"},
    rules=(refuse_precision,),
    requires=(Requirement("cuda", cuda_remedy("strategy"), when=lambda settings: settings.needs_cuda),),
    rung=Rung("compact", order=40, overrides=("solo.precision=bf16-mixed",)),
    planned="lightning_solo.optim.state_settings:planned",
    footprint="lightning_solo.techniques.compact.card:footprint",
)
