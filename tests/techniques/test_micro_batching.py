"""MicroBatching splits batches without changing the step, and runs them again after an out-of-memory error."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import lightning.pytorch as L
import numpy
import pytest
import torch
import torchmetrics
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_solo.errors import BudgetError, CheckpointError, ConflictError
from lightning_solo.memory.ledger import Ledger
from lightning_solo.memory.limit import MemoryLimit
from lightning_solo.planner.device import device as device_of
from lightning_solo.planner.planner import Planner
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.accumulation_schedule.technique import AccumulationSchedule
from lightning_solo.techniques.compact_states.technique import CompactStates
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from lightning_solo.techniques.layer_drop.technique import LayerDrop
from lightning_solo.techniques.micro_batching.technique import MicroBatching
from lightning_solo.units import GiB
from tests.conftest import long
from tests.messages import mentions
from tests.modules import Stack, loader, regression

pytestmark = pytest.mark.any_device

Make = Callable[..., Any]
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB"


class Limited(nn.Module):
    """A stack with dropout and a running mean, which fails as a device does with too many rows, in forward or backward.

    Args:
        most: rows that fit.
        where: "forward" or "backward".
    """

    def __init__(self, most: int = 10**9, where: str = "forward", dropout: float = 0.3) -> None:
        super().__init__()
        self.net, self.most, self.where = Stack(2, dropout=dropout), most, where
        self.register_buffer("seen", torch.zeros(()))
        self.sizes: list[int] = []
        self.failures = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.abs().sum()
        x = (x * (1 + random.random() + numpy.random.rand())).requires_grad_()
        y = self.net(x)
        self.sizes.append(len(x))
        if len(x) > self.most:
            if self.where == "forward":
                self.fail()
            x.register_hook(lambda gradient: self.fail())  # behind the gradients of all layers
        return y

    def fail(self) -> None:
        self.failures += 1
        raise torch.OutOfMemoryError(OOM)


def mean_of_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets.to(outputs.dtype))


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)


def trained(
    make_trainer: Make, net: nn.Module, *callbacks: Any, home: ModuleType = L, data: Any = None, **arguments: Any
) -> tuple[Any, Any]:
    """Return a module after a fit in float64, and its Trainer."""
    module = regression(home, net, loss=mean_of_squares).double()
    own = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        loss = own([each.double() for each in batch], batch_idx)
        module.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    module.training_step = training_step
    trainer = make_trainer(home, callbacks=list(callbacks), **arguments)
    seed()
    trainer.fit(module, loader(4, 8) if data is None else data)
    return module, trainer


def plain(seed: int = 7) -> Stack:
    torch.manual_seed(seed)
    return Stack(2)


def limited(*args: Any, **kwargs: Any) -> Limited:
    torch.manual_seed(7)
    return Limited(*args, **kwargs)


def difference(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference between parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


# --- acted ---


@pytest.mark.every_change
def test_a_batch_is_run_in_even_parts(home: ModuleType, make_trainer: Make) -> None:
    net = limited()
    _, trainer = trained(make_trainer, net, MicroBatching(3), home=home)
    assert net.sizes == [3, 3, 2] * 4
    assert trainer.global_step == 4


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_halves_until_it_fits(make_trainer: Make, where: str) -> None:
    technique, net = MicroBatching(), limited(2, where)
    _, trainer = trained(make_trainer, net, technique)
    assert (technique.retries, technique.fits, net.failures) == (2, 2, 2)
    assert net.sizes == [8, 4, *[2, 2, 2, 2] * 4]
    assert trainer.global_step == 4


def test_several_batches_make_a_step(make_trainer: Make) -> None:
    estimates: list[Any] = []
    net = limited()
    note = L.Callback()
    note.on_train_start = lambda trainer, module: estimates.append(trainer.estimated_stepping_batches)
    _, trainer = trained(make_trainer, net, MicroBatching(5, global_batch=24), note)
    assert estimates == [trainer.global_step] == [2]
    assert net.sizes == [4, 4] * 4
    assert trainer.accumulate_grad_batches == 1  # as before


# --- parity ---


@pytest.mark.parametrize("most", [1, 3, 8])
def test_weights_and_logged_loss_are_those_of_the_undivided_batch(make_trainer: Make, most: int) -> None:
    whole, trainer = trained(make_trainer, plain())
    split, other = trained(make_trainer, plain(), MicroBatching(most))
    assert difference(whole, split) <= (0 if most == 8 else 1e-10)
    assert difference(whole.net, plain().double().to(whole.device)) > 1e-3
    for name in ("loss_step", "loss_epoch"):
        torch.testing.assert_close(other.callback_metrics[name], trainer.callback_metrics[name])


@pytest.mark.parametrize("accumulating", [{"accumulate_grad_batches": 3}, {"schedule": [[0, 3]]}, {"global_batch": 24}])
@pytest.mark.parametrize("release", [False, True])
def test_windows_of_batches_equal_one_large_batch(make_trainer: Make, accumulating: Any, release: bool) -> None:
    """Of 4 batches of 8 the windows are 24 and 8 samples: the last one is short."""
    arguments = dict(accumulating)
    callbacks: list[Any] = [MicroBatching(3, global_batch=arguments.pop("global_batch", None))]
    callbacks += [AccumulationSchedule(arguments.pop("schedule"))] if "schedule" in arguments else []
    callbacks += [GradientRelease()] if release else []
    split, trainer = trained(make_trainer, plain(), *callbacks, **arguments)
    whole, _ = trained(make_trainer, plain(), data=DataLoader(loader(4, 8).dataset, batch_size=24))
    assert trainer.global_step == 2
    assert difference(whole, split) < 1e-10


@pytest.mark.long
@pytest.mark.parametrize("where", [long("forward"), "backward"])
@pytest.mark.parametrize(
    "others", [(), long((GradientRelease,)), long((LayerDrop,))], ids=["plain", "released", "drawn"]
)
@pytest.mark.row(60)
def test_after_ten_failures_the_weights_are_those_of_an_undisturbed_run(
    make_trainer: Make, where: str, others: Any
) -> None:
    """Both runs end at micro-batches of one sample; one of them is disturbed ten times on its way there."""
    calm, disturbed = limited(), limited(1, where)
    one, _ = trained(make_trainer, calm, MicroBatching(1), *[other() for other in others])
    technique = MicroBatching()

    class Forgetful(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            technique._size.current = None  # as if nothing had been learned: each batch fails at 8, 4 and 2

    other, _ = trained(make_trainer, disturbed, technique, *[other() for other in others], Forgetful())
    assert technique.retries == 12 == disturbed.failures
    assert difference(one, other) == 0
    assert torch.equal(calm.seen, disturbed.seen)


def test_blocks_are_drawn_again_after_running_out_of_memory(make_trainer: Make) -> None:
    runs = []
    for net, technique in ((limited(), MicroBatching(4)), (limited(4, "backward"), MicroBatching())):
        module, _ = trained(make_trainer, net, technique, drop := LayerDrop())
        runs.append((module, technique.retries, drop.state_dict()["draws"]))
    (calm, none, draws), (disturbed, one, again) = runs
    assert (none, one) == (0, 1)
    assert draws == again == 4 * 2
    assert difference(calm, disturbed) == 0


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_part_without_loss_counts_as_zero(make_trainer: Make) -> None:
    """Of parts of 3, 3 and 2 samples the second has no loss: those of the others are weighted 3/8 and 2/8."""
    module, losses, outputs = regression(L, plain()), [], []
    own = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        losses.append(own(batch, batch_idx))
        return None if len(losses) == 2 else losses[-1]

    module.training_step = training_step
    module.on_train_batch_end = lambda returned, *_: outputs.append(returned["loss"])
    trainer = make_trainer(L, callbacks=[MicroBatching(3, check=False)])
    trainer.fit(module, loader(1, 8))
    assert len(losses) == 3
    torch.testing.assert_close(outputs[0], (losses[0] * 3 / 8 + losses[2] * 2 / 8).detach())


def test_gradients_released_in_backward_step_nothing_before_it_has_ended(make_trainer: Make) -> None:
    def fit(net: Limited, size: Any) -> Any:
        module = regression(L, net)
        seed()
        make_trainer(L, callbacks=[MicroBatching(size), CompactStates(32, 32), GradientRelease()]).fit(
            module, loader(4, 8)
        )
        return module

    calm, disturbed = fit(limited(), 2), fit(limited(2, "backward"), "auto")
    assert disturbed.net.failures == 2
    assert difference(calm, disturbed) == 0


class FailsOnce(TorchDispatchMode):
    """Runs out of memory at one operator of forward or backward, of all those of a fit.

    Args:
        module: whose training steps are counted, each until its backward has ended.
        position: of the operator; None for none.
    """

    def __init__(self, module: Any, position: int | None) -> None:
        super().__init__()
        self.position, self.count, self.counts = position, 0, False
        own = module.training_step

        def training_step(batch: Any, batch_idx: int) -> Tensor:
            self.counts = True
            return own(batch, batch_idx)

        module.training_step = training_step
        self.watch = L.Callback()
        self.watch.on_after_backward = lambda trainer, module: setattr(self, "counts", False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.counts
        if self.counts and self.count - 1 == self.position:
            self.counts = False
            raise torch.OutOfMemoryError(OOM)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("others", [(), long((GradientRelease,))], ids=["plain", "released"])
@pytest.mark.row(60)
def test_wherever_it_runs_out_of_memory_the_weights_are_those_of_an_undisturbed_run(
    make_trainer: Make, accelerator: str, others: Any
) -> None:
    if accelerator != "cpu":
        pytest.skip("a mode that fails, on the CPU")

    def fit(position: int | None) -> tuple[Any, int, int]:
        module = regression(L, plain(), loss=mean_of_squares).double()
        own, metric = module.training_step, torchmetrics.MeanSquaredError()
        module.metric = metric

        def training_step(batch: Any, batch_idx: int) -> Tensor:
            x, y = (each.double() for each in batch)
            metric(module.net(x).detach(), y)
            module.log("metric", metric, on_step=False, on_epoch=True)
            return own((x, y), batch_idx)

        module.training_step = training_step
        technique = MicroBatching(check=False)
        operators = FailsOnce(module, position)
        trainer = make_trainer(L, callbacks=[technique, *[other() for other in others], operators.watch])
        with operators:
            trainer.fit(module, loader(2, 4))
        error = float(trainer.callback_metrics["metric"])
        return module, technique.retries, operators.count if position is None else error

    calm, retries, count = fit(None)
    assert retries == 0
    error = float(calm.trainer.callback_metrics["metric"])
    for position in (0, *random.Random(3).sample(range(1, count - 1), 4), count - 1):
        disturbed, retries, other = fit(position)
        assert retries == 1, position
        assert difference(calm, disturbed) < 1e-10, position
        assert other == pytest.approx(error, rel=1e-6), position


class Tokens(L.LightningModule):
    """A language model without context: (batch, sequence) of token ids, whose labels are partly -100."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11, dtype=torch.float64)
        self.gradients: list[Tensor] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.table(batch["ids"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(self.table.weight.grad.clone())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]) if outputs else 0.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:GPU available but not used")
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=7).filter(any),
    size=st.integers(1, 7),
    by=st.sampled_from(["tokens", "counts"]),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_token_losses_equal_those_of_the_undivided_batch(lengths: list[int], size: int, by: str) -> None:
    """Rows of any number of valid tokens, none among them; by labels, and by a key of the batch."""
    ids = torch.arange(len(lengths) * 5).view(len(lengths), 5) % 11
    labels = (ids + 1) % 11
    for row, length in zip(labels, lengths, strict=True):
        row[length:] = -100
    batch = {"ids": ids, "labels": labels, "counts": torch.tensor(lengths)}
    ran = []
    for callbacks in ([], [MicroBatching(size, weight_by=by)]):
        torch.manual_seed(1)
        module = Tokens()
        trainer = L.Trainer(
            accelerator="cpu", callbacks=callbacks, max_steps=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader([batch], batch_size=None))
        ran.append(module)
    plain, split = ran
    assert (plain.gradients[0] - split.gradients[0]).abs().max() < 1e-10
    assert plain.losses == pytest.approx(split.losses, abs=1e-10)


class Measured(L.LightningModule):
    """A classifier with cloned collections of metrics, of training, validation and test."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(8, 3)
        kinds = torchmetrics.classification.MulticlassAccuracy, torchmetrics.classification.MulticlassF1Score
        metrics = torchmetrics.MetricCollection([kind(num_classes=3, average=None) for kind in kinds])
        self.train_metrics, self.val_metrics, self.test_metrics = (
            metrics.clone(f"{name}/") for name in ("train", "val", "test")
        )
        self.seen: list[dict[str, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.measured(batch, self.train_metrics)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.measured(batch, self.val_metrics)

    def measured(self, batch: Any, metrics: Any) -> Tensor:
        logits, targets = self.layer(batch[0]), batch[1][:, 0].long().clamp(-1, 1) + 1
        metrics.update(logits, targets)
        return nn.functional.cross_entropy(logits, targets)

    def on_validation_epoch_end(self) -> None:
        self.seen.append({**self.train_metrics.compute(), **self.val_metrics.compute()})
        self.val_metrics.reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_cloned_metrics_are_those_of_the_undivided_batch(make_trainer: Make) -> None:
    runs = []
    for techniques in ([], [MicroBatching(3)]):
        module = Measured()
        trainer = make_trainer(L, callbacks=techniques, max_epochs=2, val_check_interval=2)
        trainer.fit(module, loader(6, 8), loader(2, 8, seed=2))
        runs.append(module.seen)
    whole, split = runs
    assert len(whole) == len(split) == 6
    assert not torch.equal(whole[0]["val/MulticlassAccuracy"], whole[-1]["val/MulticlassAccuracy"])
    torch.testing.assert_close(split, whole)


# --- memory ---


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.row(65)
def test_failed_attempt_leaves_no_tensor_alive(make_trainer: Make, accelerator: str, where: str) -> None:
    """Counted are the bytes of what forward made, whether Python or a graph holds it."""
    alive: list[int] = []

    class Counting(Limited):
        def forward(self, x: Tensor) -> Tensor:
            alive.append(ledger.live()["activations"])
            return super().forward(x)

    torch.manual_seed(7)
    net = Counting(4, where)
    if accelerator != "cpu":
        pytest.skip("a mode that counts, and a device that counts as well")
    with Ledger() as ledger:
        trained(make_trainer, net, MicroBatching(check=False), data=DataLoader([*loader(4, 8)], batch_size=None))
    assert net.sizes[:3] == [8, 4, 4]
    # but for the part of the batch, in float64 8 + 1 numbers a sample, as much as before: of 8 samples, then of 4
    assert alive[0] - alive[1] == 8 * 9 * (8 - 4)


@pytest.mark.row(67)
def test_a_limit_of_memory_is_kept(make_trainer: Make, accelerator: str) -> None:
    if accelerator != "cpu":
        pytest.skip("counts on the CPU")
    module = regression(L, Stack(3, width=16))
    technique = MicroBatching(check=False)
    trainer = make_trainer(L, callbacks=[technique], max_epochs=2)
    weights = sum(p.nbytes for p in module.parameters())
    batches = DataLoader([*loader(2, 512, 16)], batch_size=None)
    with MemoryLimit(10 * weights, module) as limit:
        trainer.fit(module, batches)
    assert technique.retries == limit.raised > 0
    assert trainer.global_step == 4


@pytest.mark.long
def test_a_plan_has_the_largest_micro_batch_that_fits() -> None:
    batch = torch.randn(64, 16), torch.randn(64, 1)
    planner = Planner(lambda: regression(L, Stack(1, width=16)), batch, {}, device_of("cpu"), 16 * GiB)
    config = compose("baseline", ["+callback=micro_batching"])
    whole = planner.plan("tried", config)
    assert (whole.micro_batch, whole.accumulation, whole.verdict) == (64, 1, "fits")
    planner.budget = whole.needed_bytes * 3 // 4
    split = planner.plan("tried", config)
    assert split.verdict == "fits"
    assert 0 < split.micro_batch < 64
    assert split.accumulation == -(-64 // split.micro_batch)
    assert split.peak_bytes < whole.peak_bytes


# --- no trace ---


def test_checkpoint_has_the_size_that_fits(make_trainer: Make) -> None:
    technique = MicroBatching()
    trained(make_trainer, limited(2), technique)
    again, net = MicroBatching(), limited(2)
    again.load_state_dict(technique.state_dict())
    trained(make_trainer, net, again)
    assert (net.failures, net.sizes) == (0, [2, 2, 2, 2] * 4)
    with pytest.raises(CheckpointError, match=mentions("micro_batch", "wait")):
        again.load_state_dict({"micro_batch": 2})


def test_loop_is_restored_after_a_failure(make_trainer: Make) -> None:
    module = regression(L)
    technique = MicroBatching(2, global_batch=8)

    def fails(*args: Any) -> None:
        raise RuntimeError("failed")

    module.training_step = fails
    trainer = make_trainer(L, callbacks=[technique])
    with pytest.raises(RuntimeError, match="failed"):
        trainer.fit(module, loader(2))
    loop = trainer.fit_loop.epoch_loop
    assert "_make_closure" not in vars(loop.automatic_optimization)
    assert "log" not in vars(loop._results)
    assert trainer.accumulate_grad_batches == 1
    assert not technique._window


# --- what is refused ---


@pytest.mark.row(63)
def test_a_single_sample_that_does_not_fit(make_trainer: Make) -> None:
    with pytest.raises(BudgetError, match=mentions("micro_batch=1", "checkpointing", "CUDA out of memory")):
        trained(make_trainer, limited(0), MicroBatching())


@pytest.mark.row(62)
def test_too_little_memory_in_validation_leaves_the_training_batch(make_trainer: Make) -> None:
    technique, net = MicroBatching(check=False), plain()
    module = regression(L, net, loss=mean_of_squares)

    def validation_step(batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        if (batch_idx, dataloader_idx) == (2, 1):
            raise torch.OutOfMemoryError(OOM)

    module.validation_step = validation_step
    before = technique.state_dict()
    with pytest.raises(torch.OutOfMemoryError, match=mentions(OOM, "validation batch 2 of loader 1", "val_dataloader")):
        make_trainer(L, callbacks=[technique], limit_val_batches=4).fit(
            module, loader(4, 8), [loader(3, 8), loader(3, 8)]
        )
    assert technique.retries == 0
    assert technique.state_dict() == before


@pytest.mark.row(61)
def test_an_error_in_the_optimizers_step_is_not_retried(make_trainer: Make) -> None:
    net = limited()
    module = regression(L, net)

    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            raise torch.OutOfMemoryError(OOM)

    module.configure_optimizers = lambda: Fails(module.parameters(), lr=0.1)
    with pytest.raises(torch.OutOfMemoryError):
        make_trainer(L, callbacks=[MicroBatching()]).fit(module, loader(2))
    assert net.sizes == [4]


def test_manual_optimization_is_refused(make_trainer: Make) -> None:
    module = regression(L)
    module.automatic_optimization = False
    with pytest.raises(ConflictError, match=mentions("automatic_optimization", "~callback.micro_batching")):
        make_trainer(L, callbacks=[MicroBatching()]).fit(module, loader(2))


@pytest.mark.row(60)
def test_batch_norm_is_refused_by_name_or_allowed(make_trainer: Make) -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with pytest.raises(ConflictError, match=mentions("net.1", "batch_norm=ghost", "GroupNorm")):
        trained(make_trainer, net, MicroBatching(2))
    many = nn.Sequential(nn.Linear(8, 4), *(nn.BatchNorm1d(4) for _ in range(5)), nn.Linear(4, 1))
    with pytest.raises(ConflictError, match=mentions("net.3", "2 more")):
        trained(make_trainer, many, MicroBatching(2))
    trained(make_trainer, net, MicroBatching(2, batch_norm="ghost"))


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
@pytest.mark.parametrize("form", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norm_is_refused_by_name_or_allowed(make_trainer: Make, form: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 4), form(nn.Linear(4, 4)), nn.Linear(4, 1))
    with pytest.raises(ConflictError, match=mentions("spectral_norm (net.1)", "check=false")):
        trained(make_trainer, net, MicroBatching(2))
    trained(make_trainer, net, MicroBatching(2, check=False))
    net[1].eval()
    trained(make_trainer, net, MicroBatching(2))


@pytest.mark.parametrize("accumulating", [{}, {"accumulate_grad_batches": 2}])
@pytest.mark.parametrize("owner", ["module", "callback"])
def test_hooks_that_change_gradients_run_once_per_batch(make_trainer: Make, owner: str, accumulating: Any) -> None:
    def halve(module: nn.Module) -> None:
        for p in module.parameters():
            p.grad.mul_(0.5)
        calls.append(1)

    class Halves(L.Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            halve(pl_module)

    runs = []
    for technique in ([], [MicroBatching(3)]):
        calls: list[int] = []
        module = regression(L, plain(), loss=mean_of_squares)
        if owner == "module":
            module.on_after_backward = partial(halve, module)
        hooks = [Halves()] if owner == "callback" else []
        make_trainer(L, callbacks=[*hooks, *technique], **accumulating).fit(module, loader(4, 8))
        assert len(calls) == 4
        runs.append(module)
    assert difference(*runs) < 1e-6


def test_backward_that_changes_gradients_is_refused(make_trainer: Make) -> None:
    module = regression(L, plain(), loss=mean_of_squares)

    class Halves(type(module)):  # type: ignore[misc]
        def backward(self, loss: Tensor) -> None:
            loss.backward()
            for p in self.parameters():
                p.grad.mul_(0.5)

    class Plain(type(module)):  # type: ignore[misc]
        def backward(self, loss: Tensor) -> None:
            with torch.autograd.set_grad_enabled(True):
                loss.backward()

    module.__class__ = Halves
    with pytest.raises(ConflictError, match=mentions("Halves.backward", "on_after_backward", "~callback")):
        make_trainer(L, callbacks=[MicroBatching(3)]).fit(module, loader(4, 8))
    module.__class__ = Plain
    make_trainer(L, callbacks=[MicroBatching(3)]).fit(module, loader(4, 8))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_named(make_trainer: Make, kind: str) -> None:
    net = plain()
    getattr(net.head.weight, kind)(lambda gradient: None)
    with pytest.warns(UserWarning, match=mentions("net.head.weight", "once per micro-batch", "on_after_backward")):
        trained(make_trainer, net, MicroBatching(3))


def test_outputs_of_a_batch_that_waits_are_empty_and_name_the_remedy(make_trainer: Make) -> None:
    class Reads(L.Callback):
        def __init__(self, read: Any) -> None:
            self.read, self.losses = read, []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            self.losses.append(self.read(outputs))

    with pytest.raises(ConflictError, match=re.escape("write outputs.get('loss')")):
        trained(make_trainer, plain(), MicroBatching(global_batch=16), Reads(lambda outputs: outputs["loss"]))
    reads = Reads(lambda outputs: outputs.get("loss"))
    trained(make_trainer, plain(), MicroBatching(global_batch=16), reads)
    assert [loss is None for loss in reads.losses] == [True, False, True, False]


@pytest.mark.parametrize(("wanted", "remedy"), [(20, "16 or 24"), (4, "8")])
def test_global_batch_that_is_no_multiple_is_refused(make_trainer: Make, wanted: int, remedy: str) -> None:
    with pytest.raises(ConflictError, match=mentions("global_batch", remedy)):
        trained(make_trainer, plain(), MicroBatching(global_batch=wanted))


def test_two_that_say_how_many_batches_make_a_step(make_trainer: Make) -> None:
    with pytest.raises(ConflictError, match=mentions("accumulate_grad_batches=2", "global_batch=16")):
        trained(make_trainer, plain(), MicroBatching(global_batch=16), accumulate_grad_batches=2)


def test_an_engine_that_cannot_repeat_a_backward_takes_a_fixed_size() -> None:
    with pytest.raises(ConflictError, match=mentions("repeated_backward", "micro_batch=8")):
        compose("zero_offload", ["+callback=micro_batching"])
    compose("zero_offload", ["+callback=micro_batching", "callback.micro_batching.micro_batch=8"])


def test_split_function(make_trainer: Make) -> None:
    def rows(batch: Any, size: int) -> list[Any]:
        x, y = batch
        return [([x[i : i + size], y[i : i + size]], len(x[i : i + size])) for i in range(0, len(x), size)]

    net = limited()
    trained(make_trainer, net, MicroBatching(3, split=rows))
    assert net.sizes == [3, 3, 2] * 4
    with pytest.raises(ConflictError, match=mentions("split", "8 samples")):
        trained(make_trainer, limited(), MicroBatching(3, split=lambda batch, size: [(batch, 8)]))


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (lambda batch, size: [([each[:size] for each in batch], size)], ("4 samples", "of 8")),
        (lambda batch, size: [batch], ("pairs",)),
    ],
)
def test_a_split_that_loses_samples_or_returns_something_else(make_trainer: Make, split: Any, words: Any) -> None:
    def some(batch: Any, size: int) -> Any:
        return [(batch, 8)] if size > 8 else split(batch, size)

    with pytest.raises(ConflictError, match=mentions("split", *words)):
        trained(make_trainer, limited(), MicroBatching(3, split=some))


def test_a_split_that_ignores_the_size_is_refused_before_it_is_needed(make_trainer: Make) -> None:
    with pytest.raises(ConflictError, match=mentions("split", "3 samples")):
        trained(make_trainer, limited(), MicroBatching(4, split=lambda batch, size: [(batch, 3)]))


def test_a_weight_that_the_batch_does_not_have_is_refused_before_it_is_needed(make_trainer: Make) -> None:
    technique = MicroBatching(weight_by="tokenz")
    with pytest.raises(ConflictError, match=mentions("tokenz", "tokens")):
        trained(make_trainer, limited(), technique)
    assert technique.retries == 0


def test_batches_of_several_sizes_make_no_global_batch(make_trainer: Make) -> None:
    whole = list(loader(3, width=8))
    data = [[each[:size] for each in batch] for batch, size in zip(whole, (2, 4, 4), strict=True)]
    module = regression(L, plain())
    with pytest.raises(ConflictError, match=mentions("global_batch=4", "4 samples", "global_batch=null")):
        make_trainer(L, callbacks=[MicroBatching(global_batch=4)]).fit(module, DataLoader(data, batch_size=None))
