"""Every card says how its technique runs under each engine; a refusal comes at once, with a remedy that works."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from lightning_solo.cards.card import Card
from lightning_solo.cards.catalogue import built_in_cards
from lightning_solo.cards.configuration import Chosen, Configuration
from lightning_solo.cards.engines import ENGINES, EXACT, ROUNDING, answer_of
from lightning_solo.errors import ConflictError
from lightning_solo.presets.compose import compose
from lightning_solo.presets.parse import parse_configuration
from tests.messages import mentions

CARDS = [card for card in built_in_cards().values() if card.group == "callback"]
every_card = pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
every_engine = pytest.mark.parametrize("engine", ENGINES)


def fields(card: Card, engine: str) -> dict[str, Any]:
    return {"strategy": {"name": engine}, "callback": {card.name: dict(card.on_cpu or {})}}


def remedies(message: str) -> list[list[str]]:
    """Return the alternatives that a message offers, each as a list of overrides."""
    advice = message.partition("; write ")[2]
    parts = [re.sub(r"\([^)]*\)", "", part).strip() for part in advice.split(" or ")]
    return [part.split() for part in parts if part != "the preset ddp in its place"]


@every_card
def test_it_says_something_of_each_engine(card: Card) -> None:
    assert set(card.engines) == set(ENGINES)


@every_engine
@every_card
def test_it_runs_or_is_refused_with_a_remedy_that_works(card: Card, engine: str) -> None:
    preset = fields(card, engine)
    chosen = Chosen(card, card.check(dict(card.on_cpu or {})), f"callback.{card.name}")
    answer = answer_of(chosen, engine, Configuration(techniques=(chosen,)))
    if answer in (EXACT, ROUNDING):
        assert (answer == EXACT) <= card.exact  # what changes no bit on one device alone
        parse_configuration(preset)
        return
    with pytest.raises(ConflictError) as refusal:
        parse_configuration(preset)
    assert f"callback.{card.name} and strategy={engine}" in str(refusal.value)
    offered = remedies(str(refusal.value))
    assert offered
    for overrides in offered:
        assert compose(preset, overrides).engine == engine
    if "the preset ddp" in str(refusal.value):
        parse_configuration(fields(card, "ddp"))


@every_engine
def test_a_card_of_somebody_elses_that_says_nothing_is_refused_with_what_to_add(engine: str) -> None:
    silent = replace(built_in_cards()["throughput"], engines={})
    techniques = tuple(
        Chosen(card, card.check({}), option)
        for card, option in ((built_in_cards()[engine], "strategy"), (silent, "callback.throughput"))
    )
    with pytest.raises(ConflictError, match=mentions("engines={", engine, "~callback.throughput")):
        Configuration(techniques=techniques).check()


@pytest.mark.parametrize("preset", ["bf16", "compact", "zero_offload"])
def test_several_devices_need_an_engine(preset: str) -> None:
    with pytest.raises(ConflictError, match=mentions("devices=2", "devices=1", "['ddp', 'bf16']")):
        compose(preset, ["devices=2"])
    assert compose(preset, ["devices=1"]).devices == 1


@every_engine
def test_an_engine_takes_any_number_of_devices(engine: str) -> None:
    assert compose([engine, "bf16"], ["devices=3"]).devices == 3
    assert compose([engine, "bf16"]).devices is None


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_compact_states_on_the_host_are_for_one_device(engine: str) -> None:
    preset = {"strategy": {"name": engine}, "callback": {"compact_states": {"state_budget": "1GiB"}}}
    with pytest.raises(ConflictError) as refusal:
        parse_configuration(preset)
    for overrides in remedies(str(refusal.value)):
        assert compose(preset, overrides).engine == engine


@pytest.mark.parametrize(
    ("sharded", "words"),
    [
        ({"precision": "bf16-mixed"}, ("bf16-mixed", "precision=bf16-true")),
        ({"strategy": {"name": "fsdp", "checkpoint": "folder"}}, ("folder of shards", "strategy.checkpoint=file")),
    ],
    ids=["bf16-mixed", "folder"],
)
def test_compact_states_under_fsdp_refuse_mixed_precision_and_a_folder(
    sharded: dict[str, Any], words: tuple[str, ...]
) -> None:
    preset = {"strategy": {"name": "fsdp"}, "callback": {"compact_states": {}}, **sharded}
    with pytest.raises(ConflictError, match=mentions("callback.compact_states", "strategy=fsdp", *words)) as refusal:
        parse_configuration(preset)
    offered = remedies(str(refusal.value))
    assert len(offered) == 2
    for overrides in offered:
        assert compose(preset, overrides).engine == "fsdp"


@pytest.mark.parametrize("optimizer", ["adafactor", "schedule_free_adamw"])
def test_an_optimizer_of_whole_weights_replaces_none_under_fsdp(optimizer: str) -> None:
    replaced = {"callback": {"optimizer_replacement": {"optimizer": optimizer, "lr": 0.01}}}
    assert parse_configuration({"strategy": {"name": "ddp"}, **replaced}).engine == "ddp"
    with pytest.raises(ConflictError, match=mentions(optimizer, "strategy=fsdp")) as refusal:
        parse_configuration({"strategy": {"name": "fsdp"}, **replaced})
    for overrides in remedies(str(refusal.value)):
        assert compose({"strategy": {"name": "fsdp"}, **replaced}, overrides).engine == "fsdp"
