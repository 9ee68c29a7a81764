"""Techniques act at their seams, by phase, under any strategy of either home, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_solo.cards.phase import Phase
from lightning_solo.errors import ConflictError
from lightning_solo.seams.homes import part
from lightning_solo.seams.strategy import SAVING, run_of
from lightning_solo.seams.technique import Checkpoint, Technique
from tests.messages import mentions
from tests.modules import Stack, loader, regression
from tests.probes import SteppingProbe

Make = Callable[..., Any]


class Marks(Technique):
    """Changes the module in its phase, and says so."""

    def __init__(self, phase: Phase, notes: list[str]) -> None:
        self.phase, self.notes = phase, notes  # type: ignore[misc]

    def transform(self, ctx: Any) -> None:
        self.notes.append(self.phase.name)
        ctx.undo.callback(self.notes.append, f"{self.phase.name} undone")

    def backward(self, ctx: Any, proceed: Any, loss: Tensor) -> Any:
        self.notes.append(f"before {self.phase.name}")
        made = proceed(loss)
        self.notes.append(f"after {self.phase.name}")
        return made


def own_strategy(home: ModuleType, device: torch.device) -> Any:
    class Mine(home.strategies.SingleDeviceStrategy):  # type: ignore[name-defined,misc]
        """A strategy of a user's own."""

        def setup(self, trainer: Any) -> None:
            super().setup(trainer)
            self.mine = True

    return Mine(device)


def strategies(home: ModuleType, device: torch.device) -> dict[str, Any]:
    return {"none": "auto", "own": own_strategy(home, device)}


@pytest.mark.parametrize("kind", ["none", "own"])
def test_every_seam_is_called_in_order(
    home: ModuleType, make_trainer: Make, device: torch.device, tmp_path: Path, kind: str
) -> None:
    notes: list[str] = []
    module = regression(home)
    module.configure_model = lambda: notes.append("configure_model")
    stock = module.configure_optimizers
    module.configure_optimizers = lambda: notes.append("configure_optimizers") or stock()

    class Save(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "one.ckpt")

    trainer = make_trainer(
        home,
        strategy=strategies(home, device)[kind],
        callbacks=[SteppingProbe(notes), Save()],
        gradient_clip_val=0.5,
    )
    trainer.fit(module, loader(1))
    set_up = ["building", "configure_model", "built", "transform", "configure_optimizers", "optimizers"]
    batch = ["step", "loss", "training_step", "backward", "clip", "saved_weights", "saved_states", "saved"]
    assert notes == [*set_up, "loader", *batch, "leaving", "undone"]
    assert kind != "own" or trainer.strategy.mine
    notes.clear()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(1), ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    assert notes[:8] == [*set_up[:3], "loading_weights", *set_up[3:], "load_states"]
    assert notes[-2:] == ["leaving", "undone"]


def test_phases_decide_the_order(home: ModuleType, make_trainer: Make) -> None:
    phases = [Phase.STATES, Phase.DATA, Phase.COMPILE, Phase.SAVED_TENSORS]
    notes: list[str] = []
    trainer = make_trainer(home, callbacks=[Marks(phase, notes) for phase in phases], max_steps=1)
    trainer.fit(regression(home), loader(1))
    ordered = [phase.name for phase in sorted(phases)]
    assert notes == [
        *ordered,
        *[f"before {name}" for name in ordered],
        *[f"after {name}" for name in reversed(ordered)],
        *[f"{name} undone" for name in reversed(ordered)],
    ]


@pytest.mark.row(92)
def test_within_a_phase_the_order_of_the_list_decides(make_trainer: Make) -> None:
    import lightning.pytorch as home

    notes: list[str] = []
    techniques = [SteppingProbe(notes, name=name) for name in ("b", "a")]
    for technique in techniques:
        vars(technique)["overrides"] = lambda seam: seam == "transform"
    make_trainer(home, callbacks=techniques, max_steps=1).fit(regression(home), loader(1))
    assert notes == ["btransform", "atransform", "aundone", "bundone"]


MOMENTS = ("setup", "configure_model", "configure_optimizers", "training_step", "on_after_backward", "on_train_end")


@pytest.mark.parametrize("kind", ["none", "own"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_every_change_is_undone_after_a_failure(
    home: ModuleType, make_trainer: Make, device: torch.device, kind: str, moment: str
) -> None:
    notes: list[str] = []
    technique = SteppingProbe(notes)
    trainer = make_trainer(home, strategy=strategies(home, device)[kind], callbacks=[technique], gradient_clip_val=0.5)
    before = picture(trainer)
    for fails in (True, False):
        module = regression(home)
        if fails:

            def fail(*args: Any, **kwargs: Any) -> None:
                raise KeyError("mine")

            setattr(module, moment, fail)
            with pytest.raises(KeyError, match="mine"):
                trainer.fit(module, loader(2))
        else:
            trainer.fit(module, loader(2))
        assert picture(trainer) == before
        assert technique.ctx is None
        assert notes.count("undone") == notes.count("transform") == (0 if moment in MOMENTS[:2] else 1) + (not fails)


def picture(trainer: Any) -> list[Any]:
    """Return what patches change: classes, and functions of Lightning's objects except those that save."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    owners = (trainer.strategy, trainer.precision_plugin, loop)
    saving = {*SAVING, "__getstate__"}  # they stay after a fit
    replaced = [{name for name in vars(owner) if callable(getattr(type(owner), name, None))} for owner in owners]
    functions = [sorted(names - saving) for names in replaced]
    return [type(trainer), type(trainer.strategy), trainer._accelerator_connector.use_distributed_sampler, functions]


def test_one_strategy_for_two_trainers_and_several_fits(
    home: ModuleType, make_trainer: Make, device: torch.device
) -> None:
    strategy, notes = own_strategy(home, device), []
    for _ in range(2):
        trainer = make_trainer(
            home, strategy=strategy, callbacks=[SteppingProbe(notes)], accelerator="auto", gradient_clip_val=0.5
        )
        for fits in (1, 2):
            notes.clear()
            trainer.fit_loop.max_epochs = fits
            trainer.fit(regression(home), loader(1))
            assert notes.count("transform") == notes.count("optimizers") == 1
            assert notes.count("loader") == 1
            assert notes.count("step") == 1
            assert notes[-1] == "undone"


def test_validation_test_and_prediction_are_left_alone(home: ModuleType, make_trainer: Make) -> None:
    notes: list[str] = []
    trainer, module = make_trainer(home, callbacks=[SteppingProbe(notes)]), regression(home)
    trainer.validate(module, loader(1), verbose=False)
    trainer.test(module, loader(1), verbose=False)
    trainer.predict(module, loader(1))
    assert notes == []


def test_loader_of_validation_is_left_alone(home: ModuleType, make_trainer: Make) -> None:
    class Halved(Technique):
        phase = Phase.DATA

        def loader(self, ctx: Any, loader: Any) -> Any:
            return list(loader)[::2]

    module, seen = regression(home), {"training": 0, "validation": 0}
    for kind in seen:
        stock = getattr(module, f"{kind}_step")

        def counted(batch: Any, batch_idx: int, kind: str = kind, stock: Any = stock) -> Any:
            seen[kind] += 1
            return stock(batch, batch_idx)

        setattr(module, f"{kind}_step", counted)
    make_trainer(home, callbacks=[Halved()]).fit(module, loader(10), loader(10))
    assert seen == {"training": 5, "validation": 10}


class Halves(Technique):
    """Runs each micro-batch in two pieces, whose losses count by their share."""

    phase = Phase.STEP

    def loss(self, ctx: Any, proceed: Any) -> Any:
        batch = next(self.batches)
        count = len(batch[0])
        pieces = ([each[: count // 4] for each in batch], [each[count // 4 :] for each in batch])
        for piece in pieces:
            made = proceed(batch=piece, weight=len(piece[0]) / count)
        return made

    def on_train_epoch_start(self, *_: Any) -> None:
        self.batches = iter(loader(6).__iter__())


@pytest.mark.parametrize("factor", [1, 3])
def test_a_micro_batch_in_pieces_has_the_gradients_of_the_whole(
    home: ModuleType, make_trainer: Make, factor: int
) -> None:
    def run(callbacks: list[Any]) -> Any:
        torch.manual_seed(2)
        module = regression(home, Stack(1))
        make_trainer(home, callbacks=callbacks, accumulate_grad_batches=factor).fit(module, loader(6))
        return module

    start = Stack(1)
    torch.manual_seed(2)
    start = Stack(1)
    for expected, ours, first in zip(
        run([]).parameters(), run([Halves()]).parameters(), start.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
        assert not torch.equal(ours, first)


def test_a_weighted_window_counts_more(home: ModuleType, make_trainer: Make) -> None:
    gradients: dict[float, Tensor] = {}

    class Weigh(Technique):
        phase = Phase.STEP

        def __init__(self, weight: float) -> None:
            self.weight = weight

        def transform(self, ctx: Any) -> None:
            ctx.window.weight = self.weight

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            gradients[self.weight] = pl_module.net.head.weight.grad.clone()

    for weight in (1.0, 4.0):
        torch.manual_seed(2)
        make_trainer(home, callbacks=[Weigh(weight)], max_steps=1).fit(regression(home, Stack(1)), loader(1))
    assert torch.equal(gradients[4.0], 4 * gradients[1.0])


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_the_window_counts_and_knows_its_last(home: ModuleType, make_trainer: Make) -> None:
    seen = []

    class Look(Technique):
        phase = Phase.OBSERVE

        def backward(self, ctx: Any, proceed: Any, loss: Tensor) -> Any:
            made = proceed(loss)
            proceed(loss * 0) if ctx.window.held == 2 else None  # twice: one micro-batch all the same
            seen.append((ctx.window.factor, ctx.window.held, ctx.window.is_last))
            return made

    module = regression(home)
    stock = module.training_step
    module.training_step = lambda batch, batch_idx: None if batch_idx == 4 else stock(batch, batch_idx)
    module.backward = lambda loss, *args, **kwargs: loss.backward(retain_graph=True)
    make_trainer(home, callbacks=[Look()], accumulate_grad_batches=3).fit(module, loader(8))
    part(home.__name__, "loops.optimization.automatic").Closure.warning_cache.clear()  # it warns once in a process
    # batches 0 1 2 | 3 (4 has no loss) 5 | 6 7, the epoch's last
    assert seen == [
        (3, 1, False),
        (3, 2, False),
        (3, 3, True),
        (3, 1, False),
        (3, 2, True),
        (3, 1, False),
        (3, 2, True),
    ]


@pytest.mark.parametrize("weights_only", [False, True])
def test_checkpoints_are_saved_after_a_fit_as_during_it(
    home: ModuleType, make_trainer: Make, tmp_path: Path, weights_only: bool
) -> None:
    class Double(Checkpoint):
        def saved_weights(self, weights: dict[str, Any]) -> dict[str, Any]:
            return {name: value.double() for name, value in weights.items()}

        def saved_states(self, optimizer: Any, states: dict[str, Any]) -> dict[str, Any]:
            return {**states, "marked": states.get("marked", 0) + 1}

        def saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
            return {**checkpoint, "saved": checkpoint.get("saved", 0) + 1}

    class InDouble(Technique):
        phase = Phase.STATES

        def checkpoint(self, ctx: Any) -> Checkpoint:
            assert ctx.module is not None
            return Double()

    trainer = make_trainer(home, callbacks=[InDouble()], max_steps=1)
    for _ in range(2):  # a second fit replaces the methods of the first
        trainer.fit(regression(home), loader(1))
        trainer.save_checkpoint(tmp_path / "after.ckpt", weights_only=weights_only)
        saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
        assert {value.dtype for value in saved["state_dict"].values()} == {torch.float64}
        assert weights_only or saved["optimizer_states"][0]["marked"] == 1
        assert saved["saved"] == 1


def test_two_techniques_that_replace_optimizers_are_refused(home: ModuleType, make_trainer: Make) -> None:
    class Mine(Technique):
        phase = Phase.STATES

        def optimizers(self, ctx: Any, optimizers: list[Any], schedulers: Any) -> list[Any]:
            return optimizers

    trainer = make_trainer(home, callbacks=[Mine(), Mine()])
    with pytest.raises(ConflictError, match=mentions("two Mine", "drop one")):
        trainer.fit(regression(home), loader(1))
    assert run_of(trainer.strategy) is None
    trainer = make_trainer(home, strategy="fsdp" if torch.cuda.is_available() else "ddp", callbacks=[Mine()])
    with pytest.raises(ConflictError, match=r"Mine and \w+Strategy.*write Trainer\(strategy='auto'"):
        trainer.callbacks[0].setup(trainer, regression(home), "fit")
    assert run_of(trainer.strategy) is None


def test_backward_of_a_strategys_class_may_be_replaced(home: ModuleType, make_trainer: Make) -> None:
    notes: list[str] = []
    trainer = make_trainer(home, callbacks=[Marks(Phase.STEP, notes)])
    with patch.object(home.strategies.Strategy, "backward", wraps=trainer.strategy.backward) as replaced:
        trainer.fit(regression(home), loader(3))
    assert replaced.call_count == 3
    assert notes.count("before STEP") == notes.count("after STEP") == 3
