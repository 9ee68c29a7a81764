"""A run under every technique, and every pair of them, that is resumed within an epoch equals the undisturbed one."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor

from lightning_solo.cards.card import Card
from lightning_solo.cards.catalogue import built_in_cards
from lightning_solo.cards.phase import Phase
from lightning_solo.errors import CheckpointError, ConflictError
from lightning_solo.presets.compose import compose
from tests.conftest import long
from tests.contract.runs import ON_CPU, PRECISION, batches_of, fields, module_of, trainer_of, weighed, weights_of
from tests.messages import mentions

EXACT = built_in_cards()["exact_resume"]
OTHERS = [card for card in ON_CPU if card is not EXACT]
PAIRS = [pair for pair in combinations(OTHERS, 2) if {card.group for card in pair} != {"strategy"}]
DEEPSPEED = {"zero_offload": "ZeroOffloadStrategy", "zero3": "ZeroStageStrategy"}
"""Engines that save no gradients of an open window."""
QUICK_PAIRS = {("distillation", "fsdp"), ("fsdp", "layer_drop")}  # FSDP loads states after the techniques' transform
QUICK = {"compact_states", "gradient_release", "micro_batching", "length_bucketing"}
pytestmark = [
    pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU"),
    pytest.mark.filterwarnings("ignore:tiled MLP saves nothing"),  # where blocks get one sample at a time
    pytest.mark.filterwarnings("ignore:activation checkpointing saves nothing"),  # in blocks that are frozen
    pytest.mark.filterwarnings("ignore:activation offloading. mode=all moves"),
    pytest.mark.filterwarnings("ignore:callback.curriculum.duration"),
    pytest.mark.filterwarnings("ignore:regional compilation did nothing"),
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path."),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint"),
]


class Saves(L.Callback):
    """Saves after each batch, and notes the losses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss", torch.zeros(())) if isinstance(outputs, dict) else torch.zeros(())
        self.losses.append(loss.detach().clone())
        trainer.save_checkpoint(self.folder / f"{len(self.losses)}.ckpt")


def check(folder: Path, cards: list[Card], accumulate: int, places: list[int]) -> None:
    # the first batch, which observers and `attention` run uncompiled, rounds elsewhere under autocast
    compiled = any(card.phase is Phase.COMPILE for card in cards)
    preset = fields(EXACT, *cards, precision="32-true" if compiled else PRECISION)
    if accumulate > 1:
        preset["accumulate_grad_batches"] = accumulate
    try:
        compose(preset)
    except ConflictError as error:
        pytest.skip(str(error))
    weighed(preset, batches_of(*cards))

    def run(name: str, path: Path | None = None) -> tuple[Any, Saves]:
        module, saves = module_of(L), Saves(folder / name)
        trainer = trainer_of(L, folder, preset, max_epochs=2, callbacks=[saves])
        torch.manual_seed(4 if path is None else 5)
        trainer.fit(module, batches_of(*cards), ckpt_path=path, weights_only=path and True)
        return weights_of(module), saves

    whole, saved = run("whole")
    engine = next((DEEPSPEED[card.name] for card in cards if card.name in DEEPSPEED), None)
    for place in places:
        if accumulate > 1 and place % 2 and engine is not None:
            with pytest.raises(CheckpointError, match=mentions(engine, "every_n_train_steps")):
                run("rest", folder / "whole" / f"{place}.ckpt")
            continue
        rest, after = run("rest", folder / "whole" / f"{place}.ckpt")
        assert [*map(float, after.losses)] == [*map(float, saved.losses[place:])], place
        for name, weight in whole.items():
            assert torch.equal(rest[name], weight), (place, name)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "card", [card if card.name in QUICK else pytest.param(card, marks=pytest.mark.long) for card in OTHERS],
    ids=[card.name for card in OTHERS],
)  # fmt: skip
def test_every_card(card: Card, accumulate: int, tmp_path: Path) -> None:
    check(tmp_path, [card], accumulate, [3, 6] if card.name in QUICK else [1, 2, 3, 5, 6, 7])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pytest.param if (one.name, other.name) in QUICK_PAIRS else long)(one, other, id=f"{one.name}-{other.name}")
        for one, other in PAIRS
    ],
)
def test_every_pair(one: Card, other: Card, tmp_path: Path) -> None:
    check(tmp_path, [one, other], 2, [3, 4] if {one.name, other.name} & {*DEEPSPEED} else [3])
