"""A technique that acts at every seam is called wherever Lightning comes to it, beside each of our techniques.

The probe stands in for a technique of somebody else's. It acts first or last, in both homes, and its calls are counted
against those of a run in which it is alone. Where it can't act, the run is refused when it starts, with both names.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_solo.cards.card import Card
from lightning_solo.cards.phase import Phase
from lightning_solo.errors import ConflictError
from lightning_solo.presets.compose import compose
from lightning_solo.seams.technique import Checkpoint, Technique
from tests.contract.runs import BATCHES, ON_CPU, batches_of, fields, module_of, trainer_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU"),
    pytest.mark.filterwarnings("ignore:activation checkpointing saves nothing"),
    pytest.mark.filterwarnings("ignore:activation offloading. mode=all moves"),
    pytest.mark.filterwarnings("ignore:curriculum. training ends"),
    pytest.mark.filterwarnings("ignore:regional compilation did nothing"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]


class CheckpointProbe(Checkpoint):
    """Counts its calls, and does as Lightning."""

    def __init__(self, probe: Any) -> None:
        self._probe = probe

    @contextmanager
    def loading_weights(self) -> Iterator[None]:
        self._probe.calls["loading"] += 1
        yield

    def load_states(self, proceed: Any, checkpoint: Any) -> None:
        self._probe.calls["load_states"] += 1
        proceed(checkpoint)

    def saved_weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        self._probe.calls["saved_weights"] += 1
        return weights

    def saved_states(self, optimizer: Any, states: dict[str, Any]) -> dict[str, Any]:
        self._probe.calls["saved_states"] += 1
        return states


class Probe(Technique):
    """Counts its calls at the seams, and does there what Lightning does."""

    phase = Phase.OBSERVE

    def __init__(self, phase: Phase) -> None:
        self.phase = phase  # type: ignore[misc]
        self.calls: Counter[str] = Counter()

    @contextmanager
    def building(self, ctx: Any) -> Iterator[None]:
        self.calls["building"] += 1
        yield

    def transform(self, ctx: Any) -> None:
        self.calls["transform"] += 1

    def loader(self, ctx: Any, loader: Any) -> Any:
        self.calls["loader"] += 1
        return loader

    def checkpoint(self, ctx: Any) -> Checkpoint:
        return CheckpointProbe(self)

    def loss(self, ctx: Any, proceed: Any) -> Any:
        self.calls["loss"] += 1
        return proceed()

    def rewind(self, ctx: Any) -> Any:
        self.calls["rewind"] += 1
        return super().rewind(ctx)

    def training_step(self, ctx: Any, proceed: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls["training_step"] += 1
        return proceed(*args, **kwargs)

    def backward(self, ctx: Any, proceed: Any, loss: Any) -> Any:
        self.calls["backward"] += 1
        return proceed(loss)

    def clip(self, ctx: Any, proceed: Any, optimizer: Any, bound: float, by: str) -> None:
        assert bound == 0.5
        self.calls["clip"] += 1
        proceed(optimizer, bound, by)

    def leaving(self, ctx: Any, proceed: Any) -> None:
        self.calls["leaving"] += 1
        proceed()


class SteppingProbe(Probe):
    """A probe that also acts where optimizers are made and stepped."""

    def optimizers(self, ctx: Any, optimizers: list[Any], schedulers: Any) -> list[Any]:
        self.calls["optimizers"] += 1
        return optimizers

    def step(self, ctx: Any, proceed: Any, optimizer: Any, closure: Any, **options: Any) -> Any:
        self.calls["step"] += 1
        return proceed(optimizer, closure, **options)


def test_probe_acts_at_every_seam() -> None:
    base = {name for name in vars(Technique) if not name.startswith("_")}
    seams = base & set(vars(Probe)) | base & set(vars(SteppingProbe))
    other = {"phase", "ctx", "overrides", "setup", "teardown", "on_save_checkpoint"}
    assert base - other == seams - {"phase"}


def train(home: ModuleType, folder: Path, phase: Phase, *cards: Card) -> tuple[Probe, Any]:
    """Train, save in the middle of the epoch, and resume, under techniques and a probe; return it and the Trainer."""
    kind = Probe if any(card.group == "strategy" for card in cards) else SteppingProbe
    probe = kind(phase)

    class Count(home.Callback):  # type: ignore[name-defined,misc]
        """Counts the places that Lightning comes to, by its own hooks."""

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            probe.calls["batches"] += 1
            if batch_idx == 0 and not path.exists():
                trainer.save_checkpoint(path)
                probe.calls["saves"] += 1

        def on_before_optimizer_step(self, *_: Any) -> None:
            probe.calls["steps"] += 1

    path = folder / "one.ckpt"
    for ckpt_path in (None, path):
        trainer = trainer_of(
            home, folder, fields(*cards), callbacks=[probe, Count()], gradient_clip_val=0.5, max_epochs=1
        )
        module = module_of(home)
        module.configure_model = lambda: None  # else Lightning doesn't come to `building`
        trainer.fit(module, batches_of(*cards), ckpt_path=ckpt_path, **({} if ckpt_path is None else LOAD))
    return probe, trainer


LOAD = {"weights_only": True}


def require_called(probe: Probe) -> None:
    calls = probe.calls
    assert calls["batches"] > 0
    assert calls["steps"] > 0
    once_in_a_fit = ["building", "transform", "loader", "leaving"]
    once_in_both = ["loading", "load_states", "saved_weights", "saved_states"]
    assert {name: calls[name] for name in once_in_a_fit} == dict.fromkeys(once_in_a_fit, 2)
    assert {name: calls[name] for name in once_in_both} == dict.fromkeys(once_in_both, 1)
    assert calls["clip"] == calls["steps"]
    for name in ("loss", "training_step", "backward"):  # more where a batch is trained in parts
        assert calls[name] >= calls["batches"], name
    if isinstance(probe, SteppingProbe):
        assert calls["optimizers"] == 2
        assert calls["step"] == calls["steps"]


PHASES = pytest.mark.parametrize("phase", [Phase.BATCHES, Phase.OBSERVE], ids=["first", "last"])


@PHASES
@pytest.mark.parametrize("card", ON_CPU, ids=lambda card: card.name)
def test_probe_is_called_beside_each_technique(card: Card, phase: Phase, home: ModuleType, tmp_path: Path) -> None:
    require_called(train(home, tmp_path, phase, card)[0])


@PHASES
def test_probe_alone_is_called_as_often_as_lightning_comes_there(
    phase: Phase, home: ModuleType, tmp_path: Path
) -> None:
    calls = train(home, tmp_path, phase)[0].calls
    assert calls["batches"] == calls["steps"] == calls["step"] == calls["loss"] == 2 * BATCHES - 1
    assert calls["training_step"] == calls["backward"] == calls["clip"] == 2 * BATCHES - 1
    assert calls["rewind"] == 0  # of micro-batches that run again


@pytest.mark.parametrize("card", [card for card in ON_CPU if card.name == "zero_offload"], ids=lambda card: card.name)
def test_probe_that_steps_is_refused_by_an_engine(card: Card, home: ModuleType, tmp_path: Path) -> None:
    trainer = trainer_of(home, tmp_path, fields(card), callbacks=[SteppingProbe(Phase.OBSERVE)])
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
            require_called(train(importlib.import_module(name), folder, phase, one, other)[0])
