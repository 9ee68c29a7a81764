"""MicroBatching resumed within a step of several batches: fault rows 45 and 46, and gradients that a checkpoint has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_solo.errors import CheckpointError
from lightning_solo.techniques.accumulation_schedule.technique import AccumulationSchedule
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from lightning_solo.techniques.length_bucketing.technique import LengthBucketing
from lightning_solo.techniques.micro_batching.technique import MicroBatching
from tests.messages import mentions
from tests.modules import Resumable, Stack, loader, regression
from tests.training import equal

pytestmark = pytest.mark.any_device

Make = Callable[..., Any]


class Pair(NamedTuple):
    """A batch of a type of its own."""

    x: Tensor
    y: Tensor


class Fails(Stack):
    """Runs out of memory in the backward of so many rows."""

    def __init__(self, rows: int) -> None:
        super().__init__(2)
        self.rows, self.failures = rows, 0

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        if len(x) >= self.rows:
            x.register_hook(self.fail)
        return super().forward(x)

    def fail(self, gradient: Tensor) -> None:
        self.failures += 1
        raise torch.OutOfMemoryError


class Save(L.Callback):
    """Saves a checkpoint after each batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, batch_idx: int) -> str:
        return str(self.folder / f"{batch_idx}.ckpt")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path(batch_idx))


def fit(make: Make, net: nn.Module, callbacks: list[Any], batches: list[Any] | None = None, **options: Any) -> Any:
    """Train on 7 batches of 4 rows, twice, and return the module; steps are of 3 batches, 3 and 1."""
    torch.manual_seed(3)
    fresh = Stack(2)
    net.load_state_dict(fresh.state_dict())
    indices: list[int] = []
    module = regression(L, net, loss=lambda out, y: nn.functional.mse_loss(out, y.to(out.dtype))).double()
    module.training_step = lambda batch, batch_idx: (
        indices.append(batch_idx),
        module.step([*map(Tensor.double, batch)]),
    )[1]
    module.indices = indices
    arguments = {key: options.pop(key) for key in ("accumulate_grad_batches",) if key in options}
    trainer = make(L, max_epochs=2, callbacks=callbacks, **arguments)
    trainer.fit(module, Resumable(batches or [*loader(7)]), **options)
    return module


@pytest.mark.parametrize("way", ["global_batch", "accumulation", "schedule", "released"])
@pytest.mark.row(46)
def test_a_run_resumed_within_a_step_is_the_undisturbed_one(make_trainer: Make, tmp_path: Path, way: str) -> None:
    def run(*others: Any, **options: Any) -> Any:
        technique = MicroBatching(3, global_batch=12 if way == "global_batch" else None)
        schedule = AccumulationSchedule([[0, 2], [1, 4]], by="step")
        more: dict[str, list[Any]] = {"schedule": [schedule], "released": [GradientRelease()]}
        if way in ("accumulation", "released"):
            options["accumulate_grad_batches"] = 3
        return fit(make_trainer, Stack(2), [technique, *more.get(way, []), *others], **options)

    save = Save(tmp_path)
    undisturbed = run(save)
    torch.manual_seed(3)
    assert not equal(undisturbed.net.cpu(), Stack(2).double(), 1e-3)
    starts = [0, 2, 6] if way == "schedule" else [0, 3, 6]
    for after in range(7):
        resumed = run(ckpt_path=save.path(after), weights_only=True)
        assert equal(resumed.net.cpu(), undisturbed.net), after
        first = 0 if after == 6 else max(start for start in starts if start <= after + 1)  # of the step or the next
        ran = resumed.indices[: resumed.indices.index(6)]
        assert sorted({*ran}) == [*range(first, 6)], after


@pytest.mark.parametrize("buffer", ["device", "host"])
@pytest.mark.parametrize("schedule", [False, True])
def test_a_window_whose_gradients_are_released_is_resumed(
    make_trainer: Make, tmp_path: Path, buffer: str, schedule: bool
) -> None:
    """Of 4 batches, or of the last 3 of an epoch, which a schedule weighs by what they are."""

    def run(*others: Any, **options: Any) -> Any:
        more = [AccumulationSchedule([[0, 4]])] if schedule else []
        factor = {} if schedule else {"accumulate_grad_batches": 4}
        return fit(make_trainer, Stack(2), [GradientRelease(buffer=buffer), *more, *others], **factor, **options)

    undisturbed = run(save := Save(tmp_path))
    for after in (1, 3, 5):
        resumed = run(ckpt_path=save.path(after), weights_only=True)
        assert equal(resumed.net.cpu(), undisturbed.net.cpu()), after


@pytest.mark.parametrize("make", [lambda: MicroBatching(2, global_batch=12), lambda: AccumulationSchedule([[0, 3]])])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_backward"])
def test_a_run_stopped_within_a_batch_has_those_that_came_before_it(
    make_trainer: Make, tmp_path: Path, hook: str, make: Callable[[], Any]
) -> None:
    """The batch itself comes again from a loader that keeps its place by what was trained on."""

    class Within(L.Callback):
        def save(self, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(str(tmp_path / f"{trainer.fit_loop.batch_idx}.ckpt"))

    setattr(Within, hook, Within.save)

    ((x, y),) = loader(1, 26)
    items = [torch.cat([x[row], torch.zeros(row % 5)]) for row in range(26)]  # of 5 lengths

    def collate(rows: list[Tensor]) -> list[Tensor]:
        together = torch.stack([row[: x.shape[1]] for row in rows])
        return [together.double(), together[:, : y.shape[1]].double()]

    def run(*others: Any, **options: Any) -> Any:
        torch.manual_seed(3)
        module = regression(L, Stack(2)).double()
        callbacks = [LengthBucketing(length=len), make(), *others]
        trainer = make_trainer(L, max_epochs=2, callbacks=callbacks)
        trainer.fit(module, DataLoader(items, batch_size=4, collate_fn=collate), **options)
        return module.cpu()

    undisturbed = run(Within())
    assert len([*tmp_path.glob("*.ckpt")]) >= 3  # of 7 batches in steps of 3, 3 and 1
    for stopped in [int(path.stem) for path in tmp_path.glob("*.ckpt")]:
        resumed = run(ckpt_path=str(tmp_path / f"{stopped}.ckpt"), weights_only=True)
        assert equal(resumed.net, undisturbed.net), stopped


def test_gradients_that_a_checkpoint_has_outlast_a_retry(make_trainer: Make, tmp_path: Path) -> None:
    """The run that is saved adds them up as the batches come, the one that is resumed has the others wait."""
    save = Save(tmp_path)
    undisturbed = fit(make_trainer, Stack(2), [AccumulationSchedule([[0, 3]]), save])
    for after in (0, 1, 3, 4):
        net = Fails(rows=3)
        resumed = fit(
            make_trainer, net, [AccumulationSchedule([[0, 3]]), MicroBatching()], ckpt_path=save.path(after),
            weights_only=True,
        )  # fmt: skip
        assert net.failures == 1
        assert equal(resumed.net.cpu(), undisturbed.net.cpu(), 1e-10), after


def test_batches_of_types_that_checkpoints_do_not_have(make_trainer: Make, tmp_path: Path) -> None:
    batches = [Pair(*batch) for batch in loader(7)]
    save = Save(tmp_path)
    fit(make_trainer, Stack(2), [MicroBatching(global_batch=12), save], batches)
    with pytest.raises(CheckpointError, match=mentions("Pair", "end of a step", "dicts")):
        fit(make_trainer, Stack(2), [MicroBatching(global_batch=12)], batches, ckpt_path=save.path(3))
    fit(make_trainer, Stack(2), [MicroBatching(global_batch=12)], batches, ckpt_path=save.path(2))


def test_a_step_of_another_length_is_refused(make_trainer: Make, tmp_path: Path) -> None:
    save = Save(tmp_path)
    fit(make_trainer, Stack(2), [MicroBatching(global_batch=12), save])
    for other in (4, 16):
        with pytest.raises(CheckpointError, match=mentions("2 batches", "global_batch", "accumulate_grad_batches")):
            fit(make_trainer, Stack(2), [MicroBatching(global_batch=other)], ckpt_path=save.path(4))


def test_batches_that_a_checkpoint_lacks_are_named(make_trainer: Make, tmp_path: Path) -> None:
    save = Save(tmp_path)
    fit(make_trainer, Stack(2), [save], accumulate_grad_batches=3)
    with pytest.warns(UserWarning, match=mentions("first 2", "3 batches")):
        fit(make_trainer, Stack(2), [MicroBatching()], accumulate_grad_batches=3, ckpt_path=save.path(4))


def test_batches_wait_in_checkpoints_within_a_step_alone(make_trainer: Make) -> None:
    technique, waiting = MicroBatching(global_batch=12), []

    class Look(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            waiting.append(len(technique.state_dict().get("waiting", ())))

    make_trainer(L, callbacks=[Look(), technique]).fit(regression(L), DataLoader(loader(7).dataset, batch_size=4))
    assert waiting == [1, 2, 0, 1, 2, 0, 0]
