"""The card of `compact_states`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_solo.cards.card import Card, Requirement
from lightning_solo.cards.phase import Phase
from lightning_solo.optim.state_settings import StateSettings, cuda_remedy, refuse_precision


@dataclass(frozen=True)
class Settings(StateSettings):
    """Arguments of CompactStates."""

    choice: ClassVar[str] = "compact_states"
    option: ClassVar[str] = "compact_states"


CARD = Card(
    name="compact_states",
    target="lightning_solo.techniques.compact_states.technique:CompactStates",
    phase=Phase.STATES,
    settings=Settings,
    saves="of AdamW's 16 bytes per parameter (weight 4, gradient 4, moments 8) all but 7.06: bf16 weight 2, correction"
    " 1, moments 1 + 1, scales 0.0625, gradient 2",
    costs="unpacking and packing in the step. States on the host (``state_budget``) pass through the device, 3 bytes"
    " per parameter each way, in every step",
    numerics="``master_bits=32, moment_bits=32``: fp32 AdamW with a bf16 forward, on a CPU bit for bit. 24 bits drop"
    " updates below 2**-17 of a weight; 8-bit moments move an update by some 4 % (`examples/measure_moments.py`)",
    conflicts="optimizers that are not torch's, LBFGS, SparseAdam, Muon; fp16; strategies with an engine of their own",
    reference="FlashOptim 2026, arXiv 2602.23349; Dettmers et al. 2021, arXiv 2110.02861",
    owns=frozenset({"optimizer_states", "weights"}),
    rules=(refuse_precision,),
    requires=(Requirement("cuda", cuda_remedy("callback.compact_states"), when=lambda settings: settings.needs_cuda),),
    planned="lightning_solo.optim.state_settings:planned",
    footprint="lightning_solo.optim.state_settings:footprint",
)
