"""AccumulationSchedule: gradients of a hand-written loop, right step counts, nothing left on the Trainer."""

from __future__ import annotations

import copy
import itertools
import math
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_solo.errors import CheckpointError, ConflictError, PresetError
from lightning_solo.techniques.accumulation_schedule.milestones import (
    Epoch,
    count_optimizer_steps,
    factor_at,
)
from lightning_solo.techniques.accumulation_schedule.technique import AccumulationSchedule
from tests.messages import lines_with, mentions
from tests.modules import Resumable, Stack, loader, regression

pytestmark = pytest.mark.any_device

# The loader of the tests that resume inside an epoch counts batches only; Lightning warns by the constant factor.
RESUME_WARNING = "ignore:You're resuming from a checkpoint that ended before the epoch ended"


def windows_by_hand(milestones: Any, by: str, batches: int, epochs: int) -> list[list[int]]:
    """Return the batch indices of every window: each has the factor of the place at which it begins."""
    windows: list[list[int]] = []
    for epoch in range(epochs):
        batch_idx = 0
        while batch_idx < batches:
            seen = 4 * (epoch * batches + batch_idx)  # samples: `loader` has four in a batch
            factor = factor_at(milestones, {"epoch": epoch, "step": len(windows), "samples": seen}[by])
            windows.append(list(range(batch_idx, min(batch_idx + factor, batches))))
            batch_idx += factor
    return windows


def train_by_hand(net: nn.Module, windows: list[list[int]], batches: list[Any], clip: float | None = None) -> None:
    """Train ``net`` by plain torch: the gradient of a step is the mean over its window of the batches' losses."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for window in windows:
        optimizer.zero_grad()
        torch.stack([nn.functional.mse_loss(net(x), y) for x, y in (batches[i] for i in window)]).mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()


def double(net: nn.Module, home: Any, **attributes: Any) -> Any:
    """Return a module of float64 that trains ``net`` with SGD, whose size of step shows a wrong gradient."""
    module = regression(home, net)

    def step(batch: Any, batch_idx: int = 0) -> torch.Tensor:
        return nn.functional.mse_loss(net(batch[0]), batch[1])

    module.training_step = step
    module.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.1)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def data(batches: int) -> DataLoader[Any]:
    pairs = [(x.double(), y.double()) for x, y in loader(batches)]
    return DataLoader(pairs, batch_size=None)


class Windows:
    """A callback's worth of notes: which batches each optimizer step was made of, and the factors seen."""

    def __init__(self, home: Any) -> None:
        self.sizes: list[int] = []
        self.factors: list[int] = []
        notes = self

        class Notes(home.Callback):  # type: ignore[name-defined,misc]
            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                notes.before = trainer.global_step

            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                notes.open += 1
                notes.factors.append(trainer.accumulate_grad_batches)
                if trainer.global_step != notes.before:
                    notes.sizes.append(notes.open)
                    notes.open = 0

        self.before = self.open = 0
        self.callback = Notes()


# --- acted ---


@pytest.mark.parametrize(
    ("milestones", "by", "sizes"),
    [
        ([[0, 4]], "epoch", [4, 4, 2]),
        ([[0, 2], [2, 3]], "step", [2, 2, 3, 3]),  # Lightning alone would begin one of three at 0, 3, 6, 9
        ([[0, 4], [1, 8]], "step", [4, 6]),
        ([[0, 4], [1, 2]], "step", [4, 2, 2, 2]),
        ([[1, 2]], "step", [1, 2, 2, 2, 2, 1]),  # 1 before the first milestone
        ([[0, 3], [1, 1], [2, 5]], "step", [3, 1, 5, 1]),
        ([[0, 3], [20, 2]], "samples", [3, 3, 2, 2]),  # four in a batch: 24 at batch 6
    ],
)
def test_windows_of_ten_batches(home: Any, make_trainer: Any, milestones: Any, by: Any, sizes: list[int]) -> None:
    notes = Windows(home)
    trainer = make_trainer(home, callbacks=[AccumulationSchedule(milestones, by), notes.callback])
    trainer.fit(regression(home), loader(10))
    assert notes.sizes == sizes
    assert [len(w) for w in windows_by_hand(milestones, by, 10, 1)] == sizes


def test_changes_are_logged(home: Any, make_trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Logger(home.loggers.logger.DummyLogger):  # type: ignore[name-defined,misc]
        seen: list[Any] = []  # noqa: RUF012

        def log_metrics(self, metrics: Any = None, step: Any = None) -> None:
            self.seen += [(step, metrics)] if "accumulation/factor" in metrics else []

    schedule = AccumulationSchedule([[0, 2], [2, 3]], by="step")
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        make_trainer(home, logger=Logger(), log_every_n_steps=1, callbacks=[schedule]).fit(regression(home), loader(10))
    assert Logger.seen == [(0, {"accumulation/factor": 2}), (2, {"accumulation/factor": 3})]
    assert lines_with(caplog.text, "2 -> 3", "epoch 0, batch 4, optimizer step 2")


@pytest.mark.parametrize(
    "milestones",
    [[], [[0]], [[0, 0]], [[-1, 2]], [[0, 2], [0, 4]], [[4, 2], [1, 4]]],
)
def test_impossible_milestones_name_the_option_and_the_value(milestones: Any) -> None:
    with pytest.raises(PresetError, match=mentions("accumulation_schedule.milestones", "allowed")):
        AccumulationSchedule(milestones)


@pytest.mark.parametrize("milestones", ["44", [[0, 2.5]], [[0, True]], 3, [3]])
def test_milestones_of_another_type_name_the_option_and_what_is_expected(milestones: Any) -> None:
    expected = "accumulation_schedule.milestones={!r}: expected a list of lists of integers"
    with pytest.raises(PresetError, match=re.escape(expected.format(milestones))):
        AccumulationSchedule(milestones)


def test_two_that_set_the_accumulation_factor_are_refused(home: Any, make_trainer: Any) -> None:
    trainer = make_trainer(home, accumulate_grad_batches=4, callbacks=[AccumulationSchedule()])
    with pytest.raises(ConflictError, match=mentions("accumulate_grad_batches=4", "milestones=[[0,4]]")):
        trainer.fit(regression(home), loader(2))
    assert trainer.accumulate_grad_batches == 4
    with pytest.raises(ConflictError):  # as early as setup: before the model is moved or built
        trainer.callbacks[0].setup(trainer, regression(home), "fit")


@pytest.mark.parametrize("where", ["init", "configure_model"])
def test_manual_optimization_is_refused(home: Any, make_trainer: Any, where: str) -> None:
    module = regression(home)
    if where == "init":
        module.automatic_optimization = False
    else:
        module.configure_model = lambda: setattr(module, "automatic_optimization", False)
    with pytest.raises(ConflictError, match="automatic_optimization=False"):
        make_trainer(home, callbacks=[AccumulationSchedule()]).fit(module, loader(2))


def test_a_strategy_that_accumulates_itself_is_refused(home: Any, make_trainer: Any, device: torch.device) -> None:
    class Accumulating(home.strategies.SingleDeviceStrategy):  # type: ignore[name-defined,misc]
        handles_gradient_accumulation = True

    trainer = make_trainer(home, strategy=Accumulating(device), callbacks=[AccumulationSchedule()])
    with pytest.raises(ConflictError, match="Accumulating"):
        trainer.fit(regression(home), loader(2))


def test_other_callbacks_that_set_the_factor(home: Any, make_trainer: Any) -> None:
    factor = r"{}: only one .* own accumulation_factor .*{}"
    rivals = [
        (
            home.callbacks.GradientAccumulationScheduler({0: 2}),
            factor.format("GradientAccumulationScheduler", "milestones"),
        ),
        (
            home.callbacks.StochasticWeightAveraging(1e-3),
            factor.format("StochasticWeightAveraging", "WeightAveraging, which"),
        ),
        (AccumulationSchedule([[5, 2]]), r"both set the factor|more than one stateful callback"),
    ]
    for rival, message in rivals:
        with pytest.raises((ConflictError, RuntimeError), match=message):
            make_trainer(home, callbacks=[AccumulationSchedule(), rival]).fit(regression(home), loader(2))


# --- parity ---


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    ("milestones", "by", "epochs"),
    [
        ([[0, 2], [2, 3]], "step", 2),
        ([[0, 2], [1, 3]], "epoch", 3),
        ([[0, 4]], "epoch", 1),
        ([[0, 16]], "epoch", 2),  # an epoch shorter than the factor
    ],
)
def test_equal_to_a_hand_written_loop(
    home: Any, make_trainer: Any, milestones: Any, by: Any, epochs: int, clip: float | None
) -> None:
    net = Stack(1).double()
    start, by_hand = copy.deepcopy(net), copy.deepcopy(net)
    train_by_hand(by_hand, windows_by_hand(milestones, by, 10, epochs), list(data(10)), clip)
    trainer = make_trainer(
        home, max_epochs=epochs, gradient_clip_val=clip, callbacks=[AccumulationSchedule(milestones, by)]
    )
    trainer.fit(double(net, home), data(10))
    for first, expected, parameter in zip(start.parameters(), by_hand.parameters(), net.parameters(), strict=True):
        # float64; the mean over a window is summed in another order, hence not bit-equal
        torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-12)
        assert not torch.equal(first, parameter)


schedules = {
    "milestones": st.dictionaries(st.integers(0, 6), st.integers(1, 6), min_size=1, max_size=4),
    "by": st.sampled_from(["epoch", "step", "samples"]),
    "batches": st.integers(1, 13),
}


@given(**schedules, max_steps=st.sampled_from([-1, -1, 4]), validated=st.integers(1, 3))
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_schedule_equals_a_hand_written_loop(
    make_trainer: Any, milestones: Any, by: Any, batches: int, max_steps: int, validated: int
) -> None:
    """Whatever the factors and the length of an epoch, with validation amid windows and clipping."""
    import lightning.pytorch as home

    pairs = [[7 * first if by == "samples" else first, factor] for first, factor in sorted(milestones.items())]
    windows = windows_by_hand(pairs, by, batches, 3)
    net, notes = Stack(1).double(), Windows(home)
    by_hand = copy.deepcopy(net)
    train_by_hand(by_hand, windows[:max_steps] if max_steps > 0 else windows, list(data(batches)), 0.5)
    module = double(net, home)
    module.validation_step = lambda batch, batch_idx: module.log("seen", float(batch_idx))
    trainer = make_trainer(
        home,
        max_epochs=3,
        max_steps=max_steps,
        gradient_clip_val=0.5,
        val_check_interval=min(validated, batches),
        callbacks=[AccumulationSchedule(pairs, by), notes.callback],
    )
    trainer.fit(module, data(batches), data(2))
    assert notes.sizes == [len(window) for window in windows][: trainer.global_step]
    assert trainer.global_step == min(len(windows), max_steps if max_steps > 0 else math.inf)
    for expected, parameter in zip(by_hand.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(parameter.cpu(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*training_step` returned `None`")  # said once per process
@pytest.mark.row(75)
def test_the_gradient_of_a_short_window_is_the_mean_of_its_batches(home: Any, make_trainer: Any) -> None:
    seen: list[float] = []

    class One(home.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else self.weight * 1.0  # gradient 1 for each batch

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
            seen.append(self.weight.grad.item())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    make_trainer(home, callbacks=[AccumulationSchedule([[0, 4]])]).fit(One(), loader(9))
    assert seen == [pytest.approx(1.0), 1.0, 1.0]  # three of four batches; four; one of four: 1.0, not 0.25


@pytest.mark.filterwarnings("ignore:.*train_dataloader yielded None")
def test_a_window_begins_with_the_first_batch_that_is_one(home: Any, make_trainer: Any) -> None:
    """Where a loader gives None Lightning runs no hook, and zeroes no gradients."""
    net = Stack(1).double()
    by_hand, batches = copy.deepcopy(net), list(data(10))
    train_by_hand(by_hand, 2 * [[1, 2, 3, 4], [6, 7, 8, 9]], batches)
    batches[0] = batches[5] = None
    trainer = make_trainer(home, max_epochs=2, callbacks=[AccumulationSchedule([[0, 4]])])
    trainer.fit(double(net, home), DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch))
    for expected, parameter in zip(by_hand.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(parameter.cpu(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
def test_a_window_that_none_of_the_epochs_last_batches_ended_is_zeroed_in_the_next(
    home: Any, make_trainer: Any
) -> None:
    batches = iter([*([torch.ones(1), None, None]), *([None, torch.full((1,), 20.0), torch.full((1,), 40.0)])])
    module = regression(home, nn.Linear(1, 1, bias=False))
    module.training_step = lambda batch, batch_idx: (module.net.weight * batch).sum()
    seen: list[float] = []
    module.on_before_optimizer_step = lambda optimizer: seen.append(module.net.weight.grad.item())
    data = DataLoader([0, 1, 2], batch_size=None, collate_fn=lambda _: next(batches))
    make_trainer(home, max_epochs=2, callbacks=[AccumulationSchedule([[0, 4]])]).fit(module, data)
    assert seen == [30.0]  # the mean of the second epoch's


def test_other_callbacks_see_the_schedules_factor_before_the_first_batch(home: Any, make_trainer: Any) -> None:
    seen: list[int] = []
    other = home.callbacks.LambdaCallback(
        on_train_start=lambda trainer, _: seen.append(trainer.accumulate_grad_batches)
    )
    make_trainer(home, callbacks=[AccumulationSchedule([[0, 4]]), other]).fit(regression(home), loader(4))
    assert seen == [4]


def test_a_batch_whose_backward_runs_twice_counts_once(home: Any, make_trainer: Any) -> None:
    """As under LBFGS, which evaluates a batch several times in a step; each time the gradient is 1."""
    seen: list[float] = []

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for _ in range(2):
                loss = closure()
                seen.extend(p.grad.item() for group in self.param_groups for p in group["params"])
            super().step()
            return loss

    module = regression(home, nn.Linear(1, 1, bias=False))
    module.training_step = lambda batch, batch_idx: module.net.weight.sum()
    module.configure_optimizers = lambda: Twice(module.parameters(), lr=0.1)
    make_trainer(home, callbacks=[AccumulationSchedule([[0, 4]])]).fit(module, loader(1))
    assert seen == [1.0, 1.0]  # of a window of one batch of four; counted as two it were 0.5 the second time


def test_no_gradients_left_to_correct_is_reported_once(home: Any, make_trainer: Any, device: torch.device) -> None:
    class Released(home.strategies.SingleDeviceStrategy):  # type: ignore[name-defined,misc]
        """Frees every gradient at the end of the backward pass, as optimizers that step inside it do."""

        def backward(self, *args: Any, **kwargs: Any) -> Any:
            result = super().backward(*args, **kwargs)
            self.lightning_module.zero_grad()
            return result

    trainer = make_trainer(home, max_epochs=2, strategy=Released(device), callbacks=[AccumulationSchedule([[0, 4]])])
    with pytest.warns(UserWarning, match=mentions("2 batches", "divided by 4")) as caught:
        trainer.fit(regression(home), loader(10))
    assert len([w for w in caught if "divided by 4" in str(w.message)]) == 1


@pytest.mark.gpu
def test_equal_to_full_precision_under_16_mixed(home: Any, make_trainer: Any) -> None:
    before, after = Stack(1), {}
    precisions = home.plugins.precision
    for precision in ("32-true", "16-mixed"):
        # a scale at which no step of this model is skipped: its gradients times the default 65536 overflow fp16
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
        mixed = {"plugins": [precisions.MixedPrecision("16-mixed", "cuda", scaler=scaler)]}
        choice = {"precision": precision} if precision == "32-true" else mixed
        net = copy.deepcopy(before)
        module = regression(home, net)
        module.configure_optimizers = lambda net=net: torch.optim.SGD(net.parameters(), lr=0.05)
        callbacks = [AccumulationSchedule([[0, 2], [2, 3]], by="step")]
        make_trainer(home, accelerator="gpu", gradient_clip_val=1.0, callbacks=callbacks, **choice).fit(
            module, loader(10)
        )
        after[precision] = torch.cat([p.detach().cpu().flatten() for p in net.parameters()])
    # half precision's 11 bits of mantissa, over five steps of at most 0.05
    torch.testing.assert_close(after["16-mixed"], after["32-true"], rtol=1e-2, atol=5e-3)
    assert not torch.equal(after["32-true"], torch.cat([p.detach().flatten() for p in before.parameters()]))


# --- memory: it holds one micro-batch, and the count of its steps is exact ---


def test_saved_bytes_are_those_of_one_micro_batch(home: Any, make_trainer: Any) -> None:
    peaks = {}
    for factor in (1, 4):
        live = peak = 0

        def pack(tensor: torch.Tensor) -> Any:
            nonlocal live, peak
            size = tensor.numel() * tensor.element_size()
            live += size
            peak = max(peak, live)
            return size, tensor

        def unpack(packed: Any) -> torch.Tensor:
            nonlocal live
            live -= packed[0]
            return packed[1]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            make_trainer(home, callbacks=[AccumulationSchedule([[0, factor]])]).fit(regression(home), loader(8))
        peaks[factor] = peak
    assert peaks[4] == peaks[1] > 0


@given(
    milestones=st.dictionaries(st.integers(0, 12), st.integers(1, 9), min_size=1, max_size=4),
    by=st.sampled_from(["epoch", "step"]),
    batches=st.integers(0, 25),
    epochs=st.integers(0, 9),
    max_steps=st.one_of(st.just(-1), st.integers(0, 40)),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_closed_form_equals_the_walk(milestones: Any, by: Any, batches: int, epochs: int, max_steps: int) -> None:
    pairs = sorted(milestones.items())
    expected = len(windows_by_hand(pairs, by, batches, epochs))
    if max_steps != -1:
        expected = min(expected, max_steps)
    assert count_optimizer_steps(pairs, by, Epoch(batches), epochs, max_steps) == expected


def test_a_long_run_is_counted_at_once() -> None:
    assert count_optimizer_steps([[0, 2], [10**9, 4]], "step", Epoch(10**4), 10**6) == 10**9 + (10**10 - 2 * 10**9) // 4


def one_cycle(home: Any, estimates: list[Any]) -> Any:
    module = regression(home, nn.Linear(8, 1))

    def configure_optimizers() -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        estimates.append(module.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=int(estimates[-1]) + 1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module.configure_optimizers = configure_optimizers
    return module


@pytest.mark.parametrize(
    ("milestones", "by", "limits"),
    [
        (milestones, by, limits)
        for (milestones, by), limits in itertools.product(
            [([[0, 4]], "epoch"), ([[0, 2], [1, 3]], "epoch"), ([[0, 2], [2, 3], [5, 8]], "step"), ([[7, 4]], "step")],
            [{"max_epochs": 3}, {"max_epochs": 3, "max_steps": 4}, {"max_epochs": 2, "limit_train_batches": 7},
             {"max_epochs": None, "max_steps": 9}],
        )
    ],
)  # fmt: skip
def test_estimate_equals_the_steps_taken(home: Any, make_trainer: Any, milestones: Any, by: Any, limits: Any) -> None:
    estimates: list[Any] = []
    module = one_cycle(home, estimates)
    trainer = make_trainer(home, callbacks=[AccumulationSchedule(milestones, by)], **limits)
    trainer.fit(module, loader(10))
    assert estimates == [trainer.global_step]
    assert trainer.global_step > 0


def test_one_cycle_and_cosine_end_where_they_should(home: Any, make_trainer: Any) -> None:
    estimates: list[Any] = []
    module = one_cycle(home, estimates)
    trainer = make_trainer(home, max_epochs=3, callbacks=[AccumulationSchedule([[0, 2], [2, 3], [5, 8]], "step")])
    trainer.fit(module, loader(10))
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    # total_steps = steps + 1, so that the last value is reached, not passed
    assert scheduler.last_epoch == scheduler.total_steps - 1
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 / 25 / 1e4)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(x[0], y[0]) for x, y in loader(12, 1)])


@pytest.mark.parametrize(
    "limits", [{"max_steps": 3, "max_epochs": 5}, {"max_epochs": 2}, {"max_epochs": -1, "max_steps": 2}]
)
def test_loaders_of_unknown_length_are_answered_as_stock(home: Any, make_trainer: Any, limits: Any) -> None:
    answers: list[Any] = []
    for callbacks in ([], [AccumulationSchedule([[0, 2]])]):
        module = regression(home)
        stock = module.configure_optimizers

        def note(module: Any = module, stock: Any = stock) -> Any:
            answers.append(module.trainer.estimated_stepping_batches)
            return stock()

        module.configure_optimizers = note
        make_trainer(home, callbacks=callbacks, **limits).fit(module, DataLoader(Endless(), batch_size=4))
    assert answers[0] == answers[1] == limits.get("max_steps", -1)


def test_an_endless_run_has_an_endless_estimate(home: Any, make_trainer: Any) -> None:
    trainer, schedule = make_trainer(home, max_epochs=-1), AccumulationSchedule()
    schedule.setup(trainer, regression(home), "fit")
    assert trainer.estimated_stepping_batches == math.inf
    schedule.teardown(trainer, None, "fit")  # type: ignore[arg-type]


# --- resuming ---


@pytest.mark.filterwarnings(RESUME_WARNING)
@pytest.mark.parametrize(
    ("milestones", "by", "after"),
    [
        ([[0, 2], [1, 3]], "epoch", 9),  # the edge of an epoch
        ([[0, 2], [2, 3]], "step", 3),  # the next window is the first of three
        ([[0, 2], [2, 3]], "step", 6),
        ([[0, 2], [4, 4]], "step", 9),
    ],
)
def test_resumed_at_a_window_edge_equals_undisturbed(
    home: Any, make_trainer: Any, tmp_path: Any, milestones: Any, by: Any, after: int
) -> None:
    path = str(tmp_path / "edge.ckpt")

    class Save(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.current_epoch == 0 and batch_idx == after:
                trainer.save_checkpoint(path)

    first, second = Stack(1).double(), Stack(1).double()
    notes, resumed_notes = Windows(home), Windows(home)
    undisturbed = make_trainer(
        home, max_epochs=2, callbacks=[AccumulationSchedule(milestones, by), notes.callback, Save()]
    )
    undisturbed.fit(double(first, home), Resumable(list(data(10))))
    resumed = make_trainer(home, max_epochs=2, callbacks=[AccumulationSchedule(milestones, by), resumed_notes.callback])
    resumed.fit(double(second, home), Resumable(list(data(10))), ckpt_path=path, weights_only=True)
    assert notes.factors[after + 1 :] == resumed_notes.factors
    assert resumed.global_step == undisturbed.global_step == len(windows_by_hand(milestones, by, 10, 2))
    for expected, parameter in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(parameter, expected)


@pytest.mark.filterwarnings(RESUME_WARNING)
def test_a_resumed_run_logs_changes_alone(make_trainer: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    import lightning.pytorch as home

    class Logger(home.loggers.logger.DummyLogger):
        seen: list[Any] = []  # noqa: RUF012

        def log_metrics(self, metrics: Any = None, step: Any = None) -> None:
            self.seen += [metrics["accumulation/factor"]] if "accumulation/factor" in metrics else []

    path = str(tmp_path / "amid.ckpt")

    class Save(home.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                trainer.save_checkpoint(path)

    for more, options in (([Save()], {}), ([], {"ckpt_path": path, "weights_only": True})):
        caplog.clear()
        Logger.seen.clear()
        callbacks = [AccumulationSchedule([[0, 4], [2, 2]], by="step"), *more]
        trainer = make_trainer(home, logger=Logger(), log_every_n_steps=1, callbacks=callbacks)
        with caplog.at_level("INFO", logger="lightning.pytorch"):
            trainer.fit(regression(home), Resumable(list(loader(12))), **options)
    (line,) = lines_with(caplog.text, "->")
    assert lines_with(line, "4 -> 2", "batch 8", "optimizer step 2")
    assert Logger.seen == [4, 2]  # a new logger has what is in effect, too


@pytest.mark.filterwarnings(RESUME_WARNING)
@pytest.mark.row(50)
def test_a_run_resumed_with_another_schedule(home: Any, make_trainer: Any, tmp_path: Any) -> None:
    path = str(tmp_path / "edge.ckpt")
    trainer = make_trainer(home, callbacks=[AccumulationSchedule([[0, 2]])])
    trainer.fit(regression(home), loader(10))
    trainer.save_checkpoint(path)
    estimates: list[Any] = []
    notes = Windows(home)
    module = regression(home)
    stock = module.configure_optimizers

    def note() -> Any:
        estimates.append(module.trainer.estimated_stepping_batches)
        return stock()

    module.configure_optimizers = note
    trainer = make_trainer(home, max_epochs=3, callbacks=[AccumulationSchedule([[0, 2], [1, 3]]), notes.callback])
    trainer.fit(module, loader(10), ckpt_path=path, weights_only=True)
    assert notes.sizes == [3, 3, 3, 1] * 2
    assert estimates == [trainer.global_step] == [5 + 4 + 4]


def test_state_is_plain_and_closed() -> None:
    schedule = AccumulationSchedule()
    assert schedule.state_dict() == {}
    schedule.load_state_dict({"factor": 3, "start": 7})
    assert schedule.state_dict() == {"factor": 3, "start": 7}
    schedule.load_state_dict({"factor": 3})  # of a version whose windows began where the factor divides the index
    assert schedule.state_dict() == {"factor": 3, "start": 0}
    with pytest.raises(CheckpointError, match=mentions("lacks ['factor']", "['factors']")):
        schedule.load_state_dict({"factors": 3})
    with pytest.raises(CheckpointError, match="factor=0"):
        schedule.load_state_dict({"factor": 0})


@pytest.mark.parametrize(
    ("milestones", "by", "late"),
    [
        ([[0, 1], [2, 2]], "epoch", "[[2, 2]]"),
        ([[0, 1], [7, 2], [8, 4]], "step", "[[8, 4]]"),
        ([[0, 1], [1, 2]], "epoch", None),
        ([[0, 2], [3, 1]], "step", None),
    ],
)
def test_milestones_after_the_end_of_the_run_are_warned_of(
    make_trainer: Any, home: Any, milestones: Any, by: str, late: str | None
) -> None:
    trainer = make_trainer(home, callbacks=[AccumulationSchedule(milestones, by=by)], max_epochs=2)
    if late is None:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*milestones=")
            trainer.fit(regression(home), loader(4))
    else:
        with pytest.warns(UserWarning, match=mentions(f"milestones={late}", f"{by} ", "write earlier")):
            trainer.fit(regression(home), loader(4))
    assert trainer.current_epoch == 2
