"""Every pair of techniques is either refused at composition, or trained with parity against each of the two alone."""

from __future__ import annotations

import functools
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch

from lightning_solo.cards.card import Card
from lightning_solo.cards.catalogue import built_in_cards
from lightning_solo.cards.phase import Phase
from lightning_solo.errors import ConflictError
from lightning_solo.presets.compose import compose
from tests.conftest import long
from tests.contract.runs import ON_CPU, PRECISION, Fit, fields, fit
from tests.modules import OF_DOCUMENTS, documents

# pairs in which what is skipped steps otherwise than under either alone: several draws in a step; draws and
# windows over other batches
WITHOUT_REFERENCE = (
    {"accumulation_schedule", "layer_drop"},
    {"length_bucketing", "layer_drop"},
    {"length_bucketing", "accumulation_schedule"},
    {"packing", "layer_drop"},
    {"packing", "accumulation_schedule"},
    {"curriculum", "layer_drop"},
    {"curriculum", "adapters"},
    {"layer_drop", "adapters"},
    {"accumulation_schedule", "adapters"},
    {"length_bucketing", "adapters"},
    {"packing", "adapters"},
    {"curriculum", "layer_freezing"},
    {"length_bucketing", "layer_freezing"},
    {"packing", "layer_freezing"},
    {"layer_drop", "layer_freezing"},
    {"accumulation_schedule", "layer_freezing"},  # whose milestones are of other batches
    {"quantized_base", "layer_freezing"},
    {"accumulation_schedule", "weight_averaging"},  # an average of few updates
    {"quantized_base", "adapters"},  # rounding of what is frozen is more beside adapters
    {"accumulation_schedule", "pruning"},  # of fewer steps, which change far less than pruning
    {"layer_freezing", "pruning"},  # what stays frozen isn't pruned
    {"shared_blocks", "curriculum"},  # what blocks of their own give changes more than steps
    {"shared_blocks", "factorized_embedding"},
    {"shared_blocks", "low_rank"},
    {"shared_blocks", "pruning"},
    {"shared_blocks", "accumulation_schedule"},
    {"factorized_embedding", "pruning"},  # of other weights
    {"factorized_embedding", "accumulation_schedule"},
    {"factorized_embedding", "low_rank"},  # of ranks that change more than steps
    {"low_rank", "pruning"},  # of other weights
    {"low_rank", "accumulation_schedule"},  # of fewer steps, which change less than a lower rank
)
# pairs in which DeepSpeed rounds what is frozen to bf16, which is more beside adapters than what these learn
IN_FP32 = ({"zero_offload", "adapters"}, {"zero3", "adapters"})
CARDS = sorted(built_in_cards().values(), key=lambda card: (card.phase, card.name))
PAIRS = list(combinations(CARDS, 2))
# The pairs grow with the square of the cards: those that act one after the other stand for all in `make test`.
NEIGHBOURS = {(one.name, other.name) for one, other in pairwise(CARDS)}
pytestmark = [
    pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU"),
    pytest.mark.filterwarnings("ignore:activation checkpointing saves nothing"),
    pytest.mark.filterwarnings("ignore:activation offloading. mode=all moves"),
    pytest.mark.filterwarnings("ignore:callback.curriculum.duration"),
    pytest.mark.filterwarnings("ignore:regional compilation did nothing"),  # where tiles are all there is in a block
    pytest.mark.filterwarnings("ignore:tiled MLP saves nothing"),  # where blocks get one sample at a time
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> functools.partial[Fit]:
    """Train under one technique, once for all its pairs."""

    def run(card: Card, precision: str, of_documents: bool) -> Fit:
        batches = documents() if of_documents else None
        return fit(tmp_path_factory.mktemp(card.name), card, precision=precision, batches=batches)

    return functools.cache(run)  # type: ignore[return-value]


def refusal(one: Card, other: Card) -> str | None:
    if one.group == other.group == "strategy":
        return "a run has one strategy"  # the field holds one: a list of presets with two is refused by name
    try:
        compose(fields(one, other))
    except ConflictError as error:
        return str(error)
    return None


def named(card: Card) -> str:
    return f"strategy={card.name}" if card.group == "strategy" else f"callback.{card.name}"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pytest.param if (one.name, other.name) in NEIGHBOURS else long)(one, other, id=f"{one.name}-{other.name}")
        for one, other in PAIRS
    ],
)
@pytest.mark.row(79)
def test_refused_or_trained_with_parity(one: Card, other: Card, alone: functools.partial[Fit], tmp_path: Path) -> None:
    message = refusal(one, other)
    if message is not None:
        if one.group != other.group or one.group != "strategy":
            assert named(one) in message
            assert named(other) in message
            assert "; write " in message
        return
    if one not in ON_CPU or other not in ON_CPU:
        pytest.skip("one of them runs on CUDA devices alone")
    # what observers run uncompiled rounds elsewhere under autocast than what is compiled
    compiled = Phase.COMPILE in (one.phase, other.phase) and (one.exact or other.exact)
    precision = "32-true" if compiled or {one.name, other.name} in IN_FP32 else PRECISION
    of_documents = not OF_DOCUMENTS.isdisjoint({one.name, other.name})
    together = fit(tmp_path, one, other, precision=precision)
    assert together.trainer.global_step > 0
    assert together.updates.abs().max() > 0
    for exact, its_rival in ((one, other), (other, one)):
        if exact.exact:  # it changes no bit of what the other gives
            assert torch.equal(together.updates, alone(its_rival, precision, of_documents).updates)
            assert together.trainer.global_step == alone(its_rival, precision, of_documents).trainer.global_step
    if not one.exact and not other.exact:
        # both change numbers: as many steps as under the one that accumulates, and most of each update the same as
        # under the one of them that changes more (six steps of compact states alone change 0.24 of the updates)
        steps = {card: alone(card, precision, of_documents).trainer.global_step for card in (one, other)}
        assert together.trainer.global_step == min(steps.values())
        rivals = [alone(card, precision, of_documents).updates for card in steps if steps[card] == min(steps.values())]
        changes = [float((together.updates - each).abs().mean() / each.abs().mean()) for each in rivals]
        assert min(changes) < 0.25 or {one.name, other.name} in WITHOUT_REFERENCE


@pytest.mark.long
def test_two_are_refused_that_own_one_thing() -> None:
    refused = [{one.name, other.name} for one, other in PAIRS if refusal(one, other)]
    assert {"compact_states", "zero_offload"} in refused
    assert len(refused) < len(PAIRS) / 2
