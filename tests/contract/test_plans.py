"""What is planned for every technique is what a real fit holds, counted by an independent ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as package
import pytest
from torch.utils.data import DataLoader

from lightning_solo.cards.card import Card, resources
from lightning_solo.cards.phase import Phase
from lightning_solo.nn.prunable import prunable_weights
from lightning_solo.planner.device import device
from lightning_solo.planner.planner import Planner
from lightning_solo.presets.compose import compose
from lightning_solo.units import GiB
from tests.conftest import long
from tests.contract.runs import ON_CPU, PRECISION, WIDTH, fields, module_of, trainer_of
from tests.modules import Held, loader

pytestmark = [
    pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU"),
    pytest.mark.filterwarnings("ignore:activation offloading. mode=all moves"),
    pytest.mark.filterwarnings("ignore:regional compilation did nothing"),  # nothing is compiled under a ledger
]


def preset_of(card: Card) -> dict[str, Any]:
    return fields(card, precision="32-true" if card.engine else PRECISION)  # zero3 is planned for weights in fp32


def held(folder: Path, card: Card) -> int:
    watch = Held()
    batches: Any = DataLoader(list(loader(1, width=WIDTH)) * 6, batch_size=None)  # from before, counted nowhere
    trainer_of(package, folder, preset_of(card), callbacks=[watch]).fit(module_of(package), batches)
    return watch.peak_bytes


def planned(card: Card) -> Any:
    (batch,) = loader(1, width=WIDTH)
    planner = Planner(lambda: module_of(package), batch, {}, device("cpu"), 16 * GiB)
    return planner.plan("tried", compose(preset_of(card)))


# an observer changes no byte of the device: all is planned as without it
# what makes the batches makes none here: both are of the batch that is given
# and one technique of each phase stands for the others, whose own tests plan them too
PHASES = {card.phase: card.name for card in ON_CPU if card.phase != Phase.OBSERVE}
CARDS = [
    (pytest.param if card.name in PHASES.values() else long)(card, id=card.name)
    for card in ON_CPU
    if "batches" not in resources(card.owns, card.settings())
]


@pytest.mark.parametrize("card", CARDS)
def test_planned_bytes_are_those_of_a_real_fit(card: Card, tmp_path: Path) -> None:
    plan, real = planned(card), held(tmp_path, card)
    if card.name == "layer_drop":  # planned with all blocks
        assert 0.8 * plan.peak_bytes < real <= plan.peak_bytes
    elif card.engine in ("fsdp", "zero3"):  # what they gather and reduce is planned, not each moment of it
        assert real < plan.peak_bytes < 1.03 * real
    elif plan.host_bytes:
        assert plan.peak_bytes == pytest.approx(real, rel=0.01)  # an engine's buffers are planned, not its temporaries
    elif card.name == "gradient_norm":  # what it logs waits on the device
        assert 0 < real - plan.peak_bytes <= 16
    elif card.name == "pruning":  # its masks are older than the ledger; a table of 256 numbers too
        bits = sum(p.numel() for p in prunable_weights(module_of(package)).weights.values())
        assert plan.peak_bytes - real == bits // 8 + 256 * 8
    elif card.name == "distillation":  # the teacher is no part of the module, whose bytes the ledger counts
        assert plan.peak_bytes - real == sum(t.nbytes for t in module_of(package).parameters())
    else:
        assert plan.peak_bytes == real
