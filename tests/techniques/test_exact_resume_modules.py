"""Modules, callbacks and loaders with states of their own are resumed to the bit, or refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_solo.errors import CheckpointError
from lightning_solo.techniques.exact_resume.technique import ExactResume
from tests.conftest import long
from tests.messages import mentions
from tests.techniques.test_exact_resume import Items, Module, Saves, assert_equal, check, fit, shuffled, validation

Make = Callable[..., Any]
PLACES = [1, 4, 6, 8]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path."),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]


class Generators(Module):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(5)
        self.scale: Any = np.random.default_rng(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise = torch.randn(batch.shape, generator=self.noise)
        return super().training_step(batch + self.scale.random() * noise, batch_idx)


class Hidden(Module):
    """Carries a state from batch to batch that its state dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(4, 4)
        self.register_buffer("hidden", torch.zeros(1, 4), persistent=False)
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows, hidden = self.recurrent(batch * self.mask, self.hidden.clone())
        self.hidden.copy_(hidden.detach())
        return super().training_step(rows, batch_idx)


class Metrics(Module):
    """Computes metrics over the epoch from metric objects, of which one has a list as its state."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.rows = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
        self.errors = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.rows.update(loss.detach())
        self.errors.update(batch[:, 0], batch[:, 1])
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.means += [float(self.rows.compute().sum()), float(self.errors.compute()["MeanSquaredError"])]
        self.rows.reset()
        self.errors.reset()


class Adversaries(Module):
    """Trains two networks by manual optimization, one of them with every third batch, and steps a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        critic, generator = self.optimizers()
        fake = self.generator(torch.randn(len(batch), 3))
        self.toggle_optimizer(critic)
        loss = self.net(batch).square().mean() + self.net(fake.detach()).mean().square()
        self.manual_backward(loss)
        if batch_idx % 3 == 0:
            critic.step()
            critic.zero_grad()
        self.untoggle_optimizer(critic)
        self.toggle_optimizer(generator)
        self.manual_backward(self.net(fake).square().mean())
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)
        self.lr_schedulers().step()
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        generator = torch.optim.SGD(self.generator.parameters(), 1e-2, momentum=0.9)
        critic = torch.optim.AdamW(self.net.parameters(), 1e-2)
        return [critic, generator], [torch.optim.lr_scheduler.StepLR(critic, 5)]


class StepScheduler(Module):
    """Changes its learning rate with every second step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2}}


MODULES = [Generators, Hidden, Metrics, Adversaries, StepScheduler]


@pytest.mark.parametrize("hook", ["on_train_batch_end", long("on_train_batch_start"), long("on_train_epoch_end")])
@pytest.mark.parametrize("module", MODULES)
def test_modules(make_trainer: Make, tmp_path: Path, module: type[Module], hook: str) -> None:
    check(make_trainer, tmp_path, shuffled("torch"), hook, module=module, only=PLACES)


def test_a_generator_that_is_made_late_is_refused(make_trainer: Make, tmp_path: Path) -> None:
    class Late(Generators):
        def on_train_epoch_start(self) -> None:
            self.late = np.random.default_rng(3)

    saves = Saves(tmp_path, "on_train_batch_end", only=[2])
    fit(make_trainer, shuffled(), ExactResume(), saves, module=Late)
    with pytest.raises(CheckpointError, match=mentions("module.late", "__init__", "~callback.exact_resume")):
        fit(make_trainer, shuffled(), ExactResume(), path=saves.saved[0][0], module=Late)


def test_float64_weights(make_trainer: Make, tmp_path: Path) -> None:
    check(make_trainer, tmp_path, shuffled("torch"), "on_train_batch_end", only=PLACES, precision="64-true")


def test_a_callback_that_changes_accumulation(make_trainer: Make, tmp_path: Path) -> None:
    def run(*more: Any, **arguments: Any) -> Any:
        schedule = L.callbacks.GradientAccumulationScheduler({0: 1, 1: 3})
        return fit(make_trainer, shuffled("torch"), schedule, ExactResume(), *more, **arguments)

    saves = Saves(tmp_path, "on_train_batch_end", only=[2, 8, 9])
    whole = run(saves)
    for path, losses, _ in saves.saved:
        rest = run(path=path)
        assert rest[0].losses == whole[0].losses[losses:]
        assert_equal(whole, rest)


def test_a_callback_that_draws(make_trainer: Make, tmp_path: Path) -> None:
    class Mixes(L.Callback):
        def __init__(self) -> None:
            self.random = random.Random(4)

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            batch.mul_(self.random.random())

    saves = Saves(tmp_path, "on_train_batch_end", only=PLACES)
    whole = fit(make_trainer, shuffled(), Mixes(), ExactResume(), saves)
    for path, losses, _ in saves.saved:
        rest = fit(make_trainer, shuffled(), Mixes(), ExactResume(), path=path)
        assert rest[0].losses == whole[0].losses[losses:]


class Buffer(IterableDataset[Any]):
    """Shuffles rows in a buffer by a generator of its own, which continues in the next epoch."""

    def __init__(self) -> None:
        self.random = random.Random(1)

    def __iter__(self) -> Iterator[Tensor]:
        rows, items = [], Items(("torch",))
        for index in range(len(items)):
            rows.append(items[index])
            if len(rows) > 5:
                yield rows.pop(self.random.randrange(len(rows)))
        yield from rows


@pytest.mark.parametrize("workers", [0, long(2)])
def test_iterable_data_with_a_generator(make_trainer: Make, tmp_path: Path, workers: int) -> None:
    def data() -> Any:
        return DataLoader(Buffer(), 4, num_workers=workers)

    saves = Saves(tmp_path, "on_train_batch_end", only=PLACES)
    whole = fit(make_trainer, data, ExactResume(fast_forward=True), saves)
    for path, losses, _ in saves.saved:
        rest = fit(make_trainer, data, ExactResume(fast_forward=True), path=path)
        assert rest[0].losses == whole[0].losses[losses:], path.name
        assert_equal(whole, rest)


class StatefulLoader(DataLoader[Any]):
    """Saves its position as torchdata's class does: as a loader."""

    done = 0
    order: list[int] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.order is None:
            self.order = torch.randperm(len(self.dataset)).tolist()  # type: ignore[arg-type]
        while self.done < len(self):
            self.done += 1
            size = self.batch_size or 1
            rows = self.order[(self.done - 1) * size : self.done * size]
            yield self.collate_fn([self.dataset[row] for row in rows])
        self.done, self.order = 0, None

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.order = state["done"], state["order"]


def test_a_loader_that_saves_its_position(make_trainer: Make, tmp_path: Path) -> None:
    def data() -> Any:
        return StatefulLoader(Items(("torch",)), 4)

    check(make_trainer, tmp_path, data, "on_train_batch_end", only=[1, 4, 8])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Consider setting .persistent_workers=True.")
def test_spawned_workers(make_trainer: Make, tmp_path: Path) -> None:
    data = shuffled("python", "numpy", "torch", "own", num_workers=1, multiprocessing_context="spawn")
    check(make_trainer, tmp_path, data, "on_train_batch_end", only=[4])


@pytest.mark.parametrize("hook", ["on_train_start", long("on_train_epoch_start"), "on_train_batch_start"])
def test_workers_that_have_returned_no_batch(make_trainer: Make, tmp_path: Path, hook: str) -> None:
    data = shuffled("python", "numpy", "torch", "own", num_workers=1)
    check(make_trainer, tmp_path, data, hook, only=[0, 6])


def test_persistent_workers_beyond_the_limit_are_refused(make_trainer: Make, tmp_path: Path) -> None:
    data = shuffled("torch", num_workers=1, persistent_workers=True)
    saves = Saves(tmp_path, "on_train_batch_end", only=[3])
    with pytest.warns(
        UserWarning, match=mentions("callback.exact_resume", "limit_train_batches", "persistent_workers=False")
    ):
        fit(make_trainer, data, ExactResume(), saves, limit_train_batches=4)
    with pytest.raises(CheckpointError, match=mentions("persistent_workers=False", "limit_train_batches")):
        fit(make_trainer, data, ExactResume(), path=saves.saved[0][0], limit_train_batches=4)


@pytest.mark.parametrize(
    ("callback", "hook", "name"),
    [
        (lambda: L.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1), "on_train_batch_end", "Stochastic"),
        (lambda: L.callbacks.EMAWeightAveraging(decay=0.9), "on_validation_batch_end", "averages"),
    ],
    ids=["SWA", "EMA"],
)
def test_averaged_weights_are_refused(
    make_trainer: Make, tmp_path: Path, callback: Callable[[], Any], hook: str, name: str
) -> None:
    saves = Saves(tmp_path, hook, only=[6])
    fit(make_trainer, shuffled(), callback(), ExactResume(), saves, validation=validation)
    with pytest.raises(CheckpointError, match=mentions(name, "~callback.exact_resume")):
        fit(make_trainer, shuffled(), callback(), ExactResume(), path=saves.saved[0][0], validation=validation)
