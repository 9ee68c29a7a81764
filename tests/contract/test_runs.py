"""Every technique leaves no trace, trains several times, resumes and is as exact as it claims, in both homes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch

from lightning_solo.cards.card import Card
from lightning_solo.errors import ConflictError
from tests.conftest import HOMES
from tests.contract.runs import ON_CPU, WIDTH, batches_of, fields, fit, module_of, trainer_of, weighed, weights_of
from tests.modules import loader

pytestmark = [
    pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU"),
    pytest.mark.filterwarnings("ignore:activation offloading. mode=all moves"),
    pytest.mark.filterwarnings("ignore:callback.curriculum.duration"),
]
every_card = pytest.mark.parametrize("card", ON_CPU, ids=lambda card: card.name)
every_home = pytest.mark.parametrize("home", HOMES)


def traces(module: Any, trainer: Any) -> dict[str, Any]:
    """Return all that a technique may change of a module and of a Trainer's objects."""
    parts = list(module.named_modules())
    hooks = [name for _, part in parts for name in vars(part) if name.startswith("_") and name.endswith("hooks")]
    strategy = trainer.strategy
    return {
        "types": [(name, type(part)) for name, part in parts],
        "attributes": [(name, sorted(vars(part))) for name, part in parts if part is not module],
        "hooks": [len(getattr(part, name)) for _, part in parts for name in set(hooks) if hasattr(part, name)],
        "parameters": [(name, p.requires_grad) for name, p in module.named_parameters()],
        "parameter hooks": [len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()],
        "keys": list(module.state_dict()),
        "trainer": (type(trainer), trainer.accumulate_grad_batches),
        "strategy": (type(strategy), "setup" in vars(strategy)),
        "precision": sorted(vars(strategy.precision_plugin)),
        "loop": sorted(vars(trainer.fit_loop.epoch_loop.automatic_optimization)),
    }


class StepError(Exception):
    """Of a test's own training step."""


@pytest.mark.parametrize("card", [card for card in ON_CPU if card.name != "micro_batching"], ids=lambda card: card.name)
def test_batches_that_wait_for_the_last_of_a_step_are_none_without_effect(card: Card, tmp_path: Path) -> None:
    (waits,) = (other for other in ON_CPU if other.name == "micro_batching")
    batches = batches_of(card)
    preset = {**weighed(fields(waits, card), batches), "accumulate_grad_batches": 2}
    try:
        trainer = trainer_of(lightning.pytorch, tmp_path, preset)
    except ConflictError:
        return  # refused, as test_pairs.py asserts
    trainer.fit(module_of(lightning.pytorch), batches)
    assert trainer.global_step > 0


@every_home
@every_card
def test_no_trace_after_a_fit_nor_after_a_failing_one(card: Card, home: str, tmp_path: Path) -> None:
    package = importlib.import_module(home)
    module = module_of(package)
    trainer = trainer_of(package, tmp_path, fields(card))
    before = traces(module, trainer)
    trainer.fit(module, batches_of(card))
    assert traces(module, trainer) == before
    step = module.training_step

    def failing(batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise StepError
        return step(batch, batch_idx)

    module.training_step = failing
    trainer.fit_loop.max_epochs = 2
    with pytest.raises(StepError):
        trainer.fit(module, batches_of(card))
    module.training_step = step
    del module.training_step
    assert traces(module, trainer) == before


@every_card
def test_exact_technique_changes_no_bit(card: Card, tmp_path: Path) -> None:
    plain, under = fit(tmp_path), fit(tmp_path, card)
    if card.exact:
        assert torch.equal(plain.updates, under.updates)
    assert under.updates.abs().max() > 0


@every_card
def test_a_second_trainer_and_a_second_fit_train_alike(card: Card, tmp_path: Path) -> None:
    first, second = fit(tmp_path, card), fit(tmp_path, card)
    assert torch.equal(first.updates, second.updates)
    trainer = second.trainer
    trainer.fit_loop.max_epochs = 2
    trainer.fit(second.module, batches_of(card))
    again = weights_of(second.module)
    assert any(not torch.equal(again[name], weight) for name, weight in second.after.items())


@every_card
def test_validation_test_and_prediction_run_under_it(card: Card, tmp_path: Path) -> None:
    import lightning.pytorch as package

    module = module_of(package)
    expected = package.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        precision="bf16-mixed", default_root_dir=str(tmp_path),
    )  # fmt: skip
    for function in ("validate", "test"):
        batches = loader(2, width=WIDTH)
        (plain,) = getattr(expected, function)(module, batches, verbose=False)
        (under,) = getattr(trainer_of(package, tmp_path, fields(card)), function)(module, batches, verbose=False)
        assert under == pytest.approx(plain, rel=2e-2)  # an engine runs in bf16 throughout
    made = trainer_of(package, tmp_path, fields(card)).predict(module, loader(2, width=WIDTH))
    assert len(made) == 2


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@every_card
def test_a_run_that_is_resumed_ends_where_the_undisturbed_one_does(card: Card, tmp_path: Path) -> None:
    import lightning.pytorch as package
    from lightning.pytorch.callbacks import ModelCheckpoint

    def epochs(folder: Path, count: int, path: str | None = None) -> Any:
        module = module_of(package)
        module.net.blocks[0].drop.p = module.net.blocks[1].drop.p = 0.0  # the random state is not in a checkpoint
        trainer = trainer_of(
            package, folder, fields(card), max_epochs=count, enable_checkpointing=True,
            callbacks=[ModelCheckpoint(folder.parent / "saved", filename=folder.name, enable_version_counter=False)],
        )  # fmt: skip
        trainer.fit(module, batches_of(card), ckpt_path=path, weights_only=path and True)
        return weights_of(module)

    whole = epochs(tmp_path / "whole", 2)
    epochs(tmp_path / "half", 1)
    resumed = epochs(tmp_path / "rest", 2, str(tmp_path / "saved" / "half.ckpt"))
    for name, weight in whole.items():
        assert torch.equal(resumed[name], weight), name
