"""A technique that acts at every seam is called wherever Lightning comes to it, beside each of our techniques.

The probe stands in for a technique of somebody else's. It acts first or last, in both homes, and its calls are counted
against those of a run in which it is alone. Where it can't act, the run is refused when it starts, with both names.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_solo.cards.card import Card
from lightning_solo.cards.catalogue import built_in_cards, load_class
from lightning_solo.cards.phase import Phase
from lightning_solo.errors import ConflictError
from lightning_solo.presets.compose import compose
from lightning_solo.seams.technique import Technique
from tests.contract.runs import BATCHES, ON_CPU, batches_of, fields, module_of, trainer_of, weighed
from tests.probes import Probe, SteppingProbe

pytestmark = [
    pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU"),
    pytest.mark.filterwarnings("ignore:activation checkpointing saves nothing"),
    pytest.mark.filterwarnings("ignore:activation offloading. mode=all moves"),
    pytest.mark.filterwarnings("ignore:callback.curriculum.duration"),
    # the rest of a window, whose first gradients DeepSpeed hasn't saved
    pytest.mark.filterwarnings("ignore:callback.accumulation_schedule. a window of 3 batches"),
    pytest.mark.filterwarnings("ignore:regional compilation did nothing"),
    pytest.mark.filterwarnings("ignore:tiled MLP saves nothing"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]


OTHER = {"phase", "ctx", "joins_evaluation", "overrides", "setup", "teardown"}
SEAMS = [name for name in vars(Technique) if not name.startswith("_") and name not in OTHER]


def test_probe_acts_at_every_seam() -> None:
    assert all(SteppingProbe.overrides(name) for name in SEAMS)


def test_page_names_each_seam_with_one_user() -> None:
    users = {
        seam: [
            name
            for name, card in built_in_cards().items()
            if issubclass(cls := load_class(card), Technique) and cls.overrides(seam)
        ]
        for seam in SEAMS
    }
    assert all(users.values())
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| \w", page, re.MULTILINE)
    assert dict(rows) == {seam: names[0] for seam, names in users.items() if len(names) == 1}
    assert f"its {len(SEAMS)} seams" in page


def train(home: ModuleType, folder: Path, phase: Phase, *cards: Card) -> Counter[str]:
    """Train, save within the epoch, and resume, under techniques and a probe; return how often it was called."""
    notes: list[str] = []
    probe = (Probe if has_engine(*cards) else SteppingProbe)(notes, phase)

    class Count(home.Callback):  # type: ignore[name-defined,misc]
        """Counts the places that Lightning comes to, by its own hooks."""

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            notes.append("batches")
            if batch_idx == 0 and not path.exists():
                trainer.save_checkpoint(path)

        def on_before_optimizer_step(self, *_: Any) -> None:
            notes.append("steps")

    path = folder / "one.ckpt"
    clipping: dict[str, Any] = {"gradient_clip_val": 0.5}
    if {"fsdp", "gradient_release"} <= {card.name for card in cards}:  # shards step before the norm is known
        clipping["gradient_clip_algorithm"] = "value"
    for ckpt_path in (None, path):
        batches = batches_of(*cards)
        preset = weighed(fields(*cards), batches)
        trainer = trainer_of(home, folder, preset, callbacks=[probe, Count()], max_epochs=1, **clipping)
        module = module_of(home)
        module.configure_model = lambda: None  # else Lightning doesn't come to `building`
        trainer.fit(module, batches, ckpt_path=ckpt_path, weights_only=ckpt_path and True)
    return Counter(notes)


def has_engine(*cards: Card) -> bool:
    return any(card.group == "strategy" for card in cards)


def require_called(calls: Counter[str], steps: bool) -> None:
    assert calls["batches"] > 0
    assert calls["steps"] > 0
    once_in_a_fit = ["building", "transform", "loader", "leaving"]
    once_in_both = ["loading_weights", "load_states", "saved_weights", "saved_states", "saved"]
    assert {name: calls[name] for name in once_in_a_fit} == dict.fromkeys(once_in_a_fit, 2)
    assert {name: calls[name] for name in once_in_both} == dict.fromkeys(once_in_both, 1)
    assert calls["clip"] == calls["steps"]
    for name in ("loss", "training_step", "backward"):  # more where a batch is trained in parts
        assert calls[name] >= calls["batches"], name
    if steps:
        assert calls["optimizers"] == 2
        assert calls["step"] == calls["steps"]


PHASES = pytest.mark.parametrize("phase", [Phase.BATCHES, Phase.OBSERVE], ids=["first", "last"])


@PHASES
@pytest.mark.parametrize("card", ON_CPU, ids=lambda card: card.name)
def test_probe_is_called_beside_each_technique(card: Card, phase: Phase, home: ModuleType, tmp_path: Path) -> None:
    require_called(train(home, tmp_path, phase, card), not has_engine(card))


@PHASES
def test_probe_alone_is_called_as_often_as_lightning_comes_there(
    phase: Phase, home: ModuleType, tmp_path: Path
) -> None:
    calls = train(home, tmp_path, phase)
    assert calls["batches"] == calls["steps"] == calls["step"] == calls["loss"] == 2 * BATCHES - 1
    assert calls["training_step"] == calls["backward"] == calls["clip"] == 2 * BATCHES - 1
    assert calls["rewind"] == 0  # of micro-batches that run again


@pytest.mark.parametrize("card", [card for card in ON_CPU if card.name == "zero_offload"], ids=lambda card: card.name)
def test_probe_that_steps_is_refused_by_an_engine(card: Card, home: ModuleType, tmp_path: Path) -> None:
    trainer = trainer_of(home, tmp_path, fields(card), callbacks=[SteppingProbe([])])
    with pytest.raises(ConflictError, match=r"SteppingProbe and ZeroOffloadStrategy.*write"):
        trainer.fit(module_of(home), batches_of(card))


def composes(one: Card, other: Card) -> bool:
    try:
        compose(fields(one, other))
    except ConflictError:
        return False
    return not one.group == other.group == "strategy"


@pytest.mark.long
@pytest.mark.parametrize(("one", "other"), list(combinations(ON_CPU, 2)), ids=lambda card: card.name)
def test_probe_is_called_beside_each_pair(one: Card, other: Card, tmp_path: Path) -> None:
    if not composes(one, other):
        return  # refused, as test_pairs.py asserts
    for phase in (Phase.BATCHES, Phase.OBSERVE):
        for name in ("lightning.pytorch", "pytorch_lightning"):
            folder = tmp_path / f"{phase.name}-{name}"
            folder.mkdir()
            calls = train(importlib.import_module(name), folder, phase, one, other)
            require_called(calls, not has_engine(one, other))
