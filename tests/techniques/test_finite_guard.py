"""FiniteGuard keeps what is infinite or NaN from the weights: nothing of the step is left, and its module is named."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import torch
import torchmetrics
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_solo as solo
from lightning_solo.errors import CheckpointError, ConflictError, PresetError, RefusedStepError
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.finite_guard.spikes import LEAST, Spikes
from lightning_solo.techniques.finite_guard.technique import FiniteGuard
from lightning_solo.techniques.safe_checkpoint.technique import SafeCheckpoint
from tests.conftest import long
from tests.messages import mentions
from tests.modules import Block, squares
from tests.training import equal

pytestmark = pytest.mark.any_device

Make = Callable[..., Any]
BATCHES, WIDTH = 12, 64


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


class Faulty(nn.Module):
    """A network with a part that fails on some batches; columns 0 to 2 of the input say on which, and how."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.block = Block(WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.Identity()
        self.logarithm, self.root = Logarithm(), Root()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.block(x))
        hidden = hidden + 0.1 * self.logarithm(x[:, :1]) + 0.1 * self.root(x[:, 1:2])
        return self.head(hidden) + 0.1 * self.root(hidden[:, :1].square() * x[:, 2:3])


FAULTS: dict[str, Any] = {
    "an infinite loss": ({0: 0.0}, "aten.log in net.logarithm"),
    "a NaN loss": ({1: -1.0}, "aten.sqrt in net.root"),
    "a NaN in the batch": ({4: math.nan}, "the batch itself holds nan in 0"),
    "an infinity in the batch": ({4: math.inf}, "the batch itself holds inf in 0"),
    "an infinite gradient": ({2: 0.0}, "backward of aten.div in net.root"),
}
"""Name -> what the columns of a batch hold, and words of the message."""


def data(
    *bad: int,
    fault: Mapping[int, float] = FAULTS["an infinite loss"][0],
    row: int | slice = slice(None),
    without: Any = (),
) -> Any:
    """Return a loader of batches of 4 rows, of which some batches are bad, in one row or all, and some left out."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(BATCHES, 4, WIDTH, generator=generator) + 0.5
    y = x.sum(2, keepdim=True) / WIDTH
    for batch in bad:
        for column, value in fault.items():
            x[batch, row, column] = value
    kept = [batch for batch in range(BATCHES) if batch not in without]
    return DataLoader(TensorDataset(x[kept].flatten(0, 1), y[kept].flatten(0, 1)), batch_size=4)


def module_of(home: ModuleType, batch_norm: bool = True, scale: float = 1.0, **methods: Any) -> Any:
    class Regression(home.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Faulty(batch_norm)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = squares(self.net(batch[0]), batch[1]) * scale
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    torch.manual_seed(1)
    module = Regression()
    for name, method in methods.items():
        setattr(type(module), name, method)
    return module


def fit(make_trainer: Make, *callbacks: Any, batches: Any = None, module: Any = None, **arguments: Any) -> Any:
    """Fit and return the module; its Trainer is `trainer`."""
    home = arguments.pop("home", lightning.pytorch)
    if "preset" in arguments:
        arguments |= solo.trainer_kwargs(
            arguments.pop("preset"), arguments.pop("overrides", ()), callbacks=callbacks, lightning=home.__name__
        )
        callbacks = arguments.pop("callbacks")
    batch_norm = arguments.pop("batch_norm", True)
    module = module_of(home, batch_norm) if module is None else module
    trainer = make_trainer(home, callbacks=list(callbacks), **arguments)
    trainer.fit(module, data() if batches is None else batches)
    return module


def state_of(module: Any) -> dict[str, Any]:
    """Return copies of weights, buffers, states of optimizers and schedulers, and the number of steps."""
    trainer = module.trainer
    return {
        "module": {name: value.clone() for name, value in module.state_dict().items()},
        "optimizers": [
            {number: sorted(state.items()) for number, state in optimizer.state_dict()["state"].items()}
            for optimizer in trainer.optimizers
        ],
        "rates": [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "steps": trainer.global_step,
    }


def is_finite(module: Any) -> bool:
    return all(bool(p.isfinite().all()) for p in module.parameters())


def no_parameter_is_finite(module: Any) -> bool:
    return not any(bool(p.isfinite().any()) for p in module.parameters())


# --- acted, and right ---


@pytest.mark.parametrize("fault", FAULTS)
def test_stock_lightning_goes_on_with_nan_weights(make_trainer: Make, fault: str) -> None:
    """These are faults; without the guard the fit ends without an error."""
    module = fit(make_trainer, batches=data(4, fault=FAULTS[fault][0]))
    assert not is_finite(module)
    if fault != "an infinite gradient":  # which reaches no parameter of the head
        assert no_parameter_is_finite(module)
    assert module.trainer.global_step == BATCHES


WAYS: dict[str, Any] = {
    "plain": {},
    "clipped by norm": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "compact states": {"preset": "compact_states", "overrides": ["precision=bf16-true"], "batch_norm": False},
    "released, clipped": {"preset": "gradient_release", "gradient_clip_val": 0.1},
    "compact, clipped": {
        "preset": "compact",
        "overrides": ["precision=bf16-true"],
        "gradient_clip_val": 0.1,
        "batch_norm": False,
    },
    "micro-batches": {"preset": "micro_batching", "overrides": ["callback.micro_batching.micro_batch=2"]},
    "early zero grad": {"preset": "bf16", "overrides": ["+callback=early_zero_grad"]},
    "GradientNorm": {
        "preset": "bf16",
        "overrides": ["+callback=gradient_norm", "callback.gradient_norm.every_n_steps=1"],
    },
}


def windows(factor: int) -> list[range]:
    return [range(start, min(start + factor, BATCHES)) for start in range(0, BATCHES, factor)]


@pytest.mark.filterwarnings("ignore:GradientNorm. in the first step")
@pytest.mark.parametrize("fault", ["an infinite loss", "an infinite gradient"])
@pytest.mark.parametrize(
    ("way", "factor", "bad"),
    [
        (pytest.param if way == "plain" or (factor, bad) == (3, 4) else long)(way, factor, bad)
        for way in WAYS
        for factor, bad in [(1, 5), (3, 3), (3, 4), (3, 5), (3, 0), (3, 11)]
    ],
)
@pytest.mark.row(70, 71)
def test_a_skipped_window_leaves_nothing(make_trainer: Make, way: str, factor: int, bad: int, fault: str) -> None:
    """The run ends as one whose loader lacks the batches of that window."""
    arguments = {**WAYS[way], "accumulate_grad_batches": factor}
    window = next(window for window in windows(factor) if bad in window)
    if way == "micro-batches":
        arguments = {**arguments, "batch_norm": False}
    expected = fit(make_trainer, batches=data(without=window), **arguments)
    guard = FiniteGuard(policy="skip_window")
    module = fit(make_trainer, guard, batches=data(bad, fault=FAULTS[fault][0]), **arguments)
    assert guard.skipped_windows == 1
    assert module.trainer.global_step == BATCHES // factor - 1
    assert is_finite(module)
    assert equal(state_of(module), state_of(expected))


def logging(home: ModuleType, batch_norm: bool = True) -> Any:
    """Return a module that logs a mean, a sum, a maximum and a metric."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = squares(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        self.log("sum", loss, on_epoch=True, on_step=False, reduce_fx="sum", batch_size=4)
        self.log("largest", loss, on_epoch=True, on_step=False, reduce_fx="max", batch_size=4)
        if not loss.isfinite():
            self.log("of this batch", loss, on_epoch=True, on_step=False, batch_size=4)
        self.metric(loss)
        self.log("metric", self.metric, on_epoch=True, on_step=False, batch_size=4)
        return loss

    module = module_of(home, batch_norm, training_step=training_step)
    module.metric = torchmetrics.MeanMetric(nan_strategy="disable")
    return module


class Notes(lightning.pytorch.Callback):
    """Notes the metrics of each epoch."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        self.epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    on_train_end = on_train_epoch_start


@pytest.mark.parametrize(("factor", "bad"), [(1, 0), (1, 5), (1, 11), (3, 0), (3, 4)])
def test_a_skipped_window_leaves_nothing_in_logged_means(make_trainer: Make, factor: int, bad: int) -> None:
    window = next(window for window in windows(factor) if bad in window)
    arguments = {"accumulate_grad_batches": factor, "max_epochs": 2}
    expected, notes = Notes(), Notes()
    stops = lightning.pytorch.callbacks.EarlyStopping("loss", patience=9)
    home = lightning.pytorch
    fit(make_trainer, expected, module=logging(home), batches=data(without=window), **arguments)
    guard = FiniteGuard(policy="skip_window")
    module = fit(make_trainer, guard, notes, stops, module=logging(home), batches=data(bad), **arguments)
    assert (guard.skipped_windows, module.trainer.current_epoch) == (2, 2)
    assert len(notes.epochs) == 3
    for epoch, other in zip(notes.epochs, expected.epochs, strict=True):
        assert {name: value for name, value in epoch.items() if name != "loss_step"} == {
            name: value for name, value in other.items() if name != "loss_step"
        }


@pytest.mark.filterwarnings("ignore:callback.micro_batching. training_step")
@pytest.mark.parametrize("way", ["rewind", "micro-batches"])
def test_logged_means_stay_finite(make_trainer: Make, way: str, tmp_path: Path) -> None:
    guard = FiniteGuard(policy="rewind" if way == "rewind" else "skip_window")
    saves = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2)
    stops, notes = lightning.pytorch.callbacks.EarlyStopping("loss", patience=9), Notes()
    arguments = {**WAYS.get(way, {}), "max_epochs": 2, "enable_checkpointing": True}
    module = logging(lightning.pytorch, batch_norm=way == "rewind")
    fit(make_trainer, guard, notes, stops, saves, module=module, batches=data(5), **arguments)
    assert (guard.rewinds or guard.skipped_windows, module.trainer.current_epoch) == (2, 2)
    epoch = notes.epochs[-1]
    assert {"loss", "sum", "largest", "metric"} <= {*epoch}
    assert all(map(math.isfinite, epoch.values()))


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    factor=st.integers(1, 5),
    bad=st.sets(st.integers(0, BATCHES - 1), min_size=1, max_size=4),
    row=st.integers(0, 3),
    fault=st.sampled_from(sorted(FAULTS)),
    way=st.sampled_from(["plain", "clipped by norm", "released, clipped", "compact, clipped"]),
)
def test_no_window_with_a_fault_leaves_anything(
    make_trainer: Make, factor: int, bad: set[int], row: int, fault: str, way: str
) -> None:
    """In any row of any batches, of windows of any length: a short last one too."""
    arguments = {**WAYS[way], "accumulate_grad_batches": factor}
    dropped = [window for window in windows(factor) if bad & set(window)]
    guard = FiniteGuard(policy="skip_window")
    module = fit(make_trainer, guard, batches=data(*bad, fault=FAULTS[fault][0], row=row), **arguments)
    assert guard.skipped_windows == len(dropped)
    if len(dropped) == len(windows(factor)):
        assert module.trainer.global_step == 0
        return
    expected = fit(make_trainer, batches=data(without=[each for window in dropped for each in window]), **arguments)
    assert equal(state_of(module), state_of(expected))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("factor", "bad"), [(1, 4), (4, 6)])
@pytest.mark.parametrize("way", ["plain", "clipped by norm", long("released, clipped"), long("bf16-mixed")])
@pytest.mark.row(70, 71)
def test_stop_leaves_everything_as_before_the_window(
    home: ModuleType, make_trainer: Make, way: str, factor: int, bad: int, fault: str
) -> None:
    arguments = {**WAYS[way], "accumulate_grad_batches": factor, "home": home}
    expected = fit(make_trainer, max_steps=bad // factor, **arguments)
    values, words = FAULTS[fault]
    module = module_of(home)
    with pytest.raises(RefusedStepError, match=mentions(words, "callback.finite_guard.policy=skip_window")) as raised:
        fit(make_trainer, FiniteGuard(), batches=data(bad, fault=values), module=module, **arguments)
    assert equal(state_of(module), state_of(expected))
    assert all(p.grad is None for p in module.parameters())  # a checkpoint that is saved now has no window
    assert not raised.value.touched
    assert raised.value.step == bad // factor
    assert raised.value.batch_idx == bad
    assert (f"in micro-batch {bad % factor + 1} of {factor}" in str(raised.value)) == (factor > 1)
    with pytest.raises(RefusedStepError, match=mentions("batch 0", "skip_window")):  # and nothing of the guard stays
        fit(make_trainer, FiniteGuard(), batches=data(0, fault=values), module=module, **arguments)


def test_a_parameter_that_is_nan_is_named(make_trainer: Make) -> None:
    module = module_of(lightning.pytorch)
    with torch.no_grad():
        module.net.block.up.bias[3] = math.nan
    with pytest.raises(RefusedStepError, match=mentions("net.block.up.bias", "parameter")):
        fit(make_trainer, FiniteGuard(), module=module)


def test_large_batches_are_not_kept(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    class Held(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            held.append(sum(bool(call.arguments) for call in guard._calls))

    for most, numbers, words in ((10**6, [1, 2, 3], "aten.log"), (10, [1, 1, 1], "of more than")):
        monkeypatch.setattr("lightning_solo.techniques.finite_guard.technique.KEPT_BYTES", most)
        guard = FiniteGuard()
        held.clear()
        with pytest.raises(RefusedStepError, match=mentions(words, "micro-batch 2 of 4", "batch 1 of epoch 0")):
            fit(make_trainer, guard, Held(), batches=data(1), accumulate_grad_batches=4)
        assert held == numbers


def test_released_gradients_without_clipping(make_trainer: Make, tmp_path: Path) -> None:
    """A loss is looked at before backward; a gradient is known too late, and then nothing is saved."""
    with pytest.raises(
        ConflictError, match=mentions("policy=skip_window", "gradient_release", "gradient_clip_val=1.0")
    ):
        fit(make_trainer, FiniteGuard(policy="skip_window"), preset="gradient_release")
    expected = fit(make_trainer, preset="gradient_release", max_steps=4)
    module = module_of(lightning.pytorch)
    with pytest.raises(RefusedStepError, match=mentions("aten.log in net.logarithm")):
        fit(make_trainer, FiniteGuard(), batches=data(4), module=module, preset="gradient_release")
    assert equal(state_of(module), state_of(expected))
    saves = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path / "saved", save_on_exception=True)
    batches = data(4, fault=FAULTS["an infinite gradient"][0])
    module = module_of(lightning.pytorch)
    module.net.head = nn.Sequential(nn.Linear(WIDTH, 1024), nn.Linear(1024, 1))  # large enough to step at once
    with (
        pytest.warns(UserWarning, match=mentions("FiniteGuard", "checkpoint")),
        pytest.raises(RefusedStepError) as raised,
    ):
        fit(
            make_trainer, FiniteGuard(), saves, batches=batches, module=module, preset="gradient_release",
            enable_checkpointing=True,
        )  # fmt: skip
    assert raised.value.touched
    assert not list((tmp_path / "saved").glob("*exception*"))
    with pytest.raises(CheckpointError, match="last checkpoint"):
        module.trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert not (tmp_path / "later.ckpt").exists()


# --- rewind ---


@pytest.mark.parametrize("fault", ["an infinite loss", "an infinite gradient"])
@pytest.mark.parametrize(
    "way",
    [
        "plain",
        long("clipped by norm"),
        "compact states",
        long("compact, clipped"),
        "released",
        long("released, clipped"),
    ],
)
@pytest.mark.row(72)
def test_a_rewound_run_goes_on_with_the_next_batches(make_trainer: Make, way: str, fault: str, tmp_path: Path) -> None:
    """It ends as one that has its steps up to the checkpoint, then the batches after the bad one."""
    arguments = {**WAYS, "released": {"preset": "gradient_release"}}[way]
    saves = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    guard = FiniteGuard(policy="rewind")
    module = module_of(lightning.pytorch, arguments.get("batch_norm", True))
    module.net.head = wide = nn.Sequential(nn.Linear(WIDTH, 1024), nn.Linear(1024, 1))  # stepped at once if released
    again = module_of(lightning.pytorch, arguments.get("batch_norm", True))
    again.net.head = copy.deepcopy(wide)
    batches = data(6, fault=FAULTS[fault][0])
    fit(make_trainer, guard, saves, batches=batches, module=module, enable_checkpointing=True, **arguments)
    expected = fit(make_trainer, batches=data(without=(4, 5, 6)), module=again, **arguments)
    assert guard.rewinds == 1
    assert module.trainer.global_step == BATCHES - 3
    assert equal(state_of(module), state_of(expected))


def test_a_run_goes_back_to_one_checkpoint_a_limited_number_of_times(make_trainer: Make, tmp_path: Path) -> None:
    guard = FiniteGuard(policy="rewind", max_skips=2)
    saves = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    with pytest.raises(RefusedStepError, match=mentions("2 times", "every_n_train_steps")) as raised:
        fit(make_trainer, guard, saves, batches=data(5, 7, 8), enable_checkpointing=True)
    assert guard.rewinds == 2
    assert raised.value.batch_idx == 8
    weights = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path / "weights", every_n_train_steps=1, save_weights_only=True
    )
    with pytest.raises(RefusedStepError, match=mentions("no checkpoint", "every_n_train_steps")):
        fit(make_trainer, FiniteGuard(policy="rewind"), weights, batches=data(5), enable_checkpointing=True)
    with pytest.raises(RefusedStepError, match=mentions("no checkpoint", "every_n_train_steps")):
        fit(make_trainer, FiniteGuard(policy="rewind"), batches=data(1), enable_checkpointing=True)
    with pytest.raises(ConflictError, match=mentions("policy=rewind", "enable_checkpointing", "policy=stop")):
        fit(make_trainer, FiniteGuard(policy="rewind"))


def test_a_checkpoint_that_is_damaged_or_removed_is_passed_over(make_trainer: Make, tmp_path: Path) -> None:
    class Damage(lightning.pytorch.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 7:
                (tmp_path / "epoch=0-step=4.ckpt").write_bytes(b"PK damaged")
                (tmp_path / "epoch=0-step=6.ckpt").unlink()

    saves = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    guard = FiniteGuard(policy="rewind")
    with pytest.warns(UserWarning, match=mentions("FiniteGuard", "step=")):
        module = fit(make_trainer, guard, saves, Damage(), batches=data(7), enable_checkpointing=True)
    assert module.trainer.global_step == 2 + BATCHES - 8
    assert equal(state_of(module), state_of(fit(make_trainer, batches=data(without=range(2, 8)))))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_with_safe_checkpoints_goes_back(make_trainer: Make, tmp_path: Path, asynchronous: bool) -> None:
    """Also to one that is still being written."""
    saves = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    guard, safe = FiniteGuard(policy="rewind"), SafeCheckpoint(asynchronous=asynchronous)
    module = fit(make_trainer, guard, safe, saves, batches=data(3, 7), enable_checkpointing=True)
    assert guard.rewinds == 2
    assert equal(state_of(module), state_of(fit(make_trainer, batches=data(without=(3, 7)))))


def test_schedulers_by_epoch_go_on(make_trainer: Make, tmp_path: Path) -> None:
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    class Later(lightning.pytorch.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.current_epoch == 2 and batch_idx == 3:
                batch[0].zero_()

    saves = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    guard = FiniteGuard(policy="rewind")
    module = module_of(lightning.pytorch, configure_optimizers=configure_optimizers)
    fit(make_trainer, guard, saves, Later(), module=module, max_epochs=4, enable_checkpointing=True)
    assert guard.rewinds == 1
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5**4)
    assert module.trainer.global_step == 4 * BATCHES - 3  # back from 27 to 25, and without batch 27


def test_an_optimizer_that_evaluates_several_times(make_trainer: Make) -> None:
    """The first evaluation comes before any change; after it weights have changed."""

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    def made(**methods: Any) -> Any:
        return module_of(lightning.pytorch, False, configure_optimizers=configure_optimizers, **methods)

    guard = FiniteGuard(policy="skip_window")
    module = fit(make_trainer, guard, batches=data(4), module=made())
    expected = fit(make_trainer, batches=data(without=(4,)), module=made())
    assert guard.skipped_windows == 1
    assert equal(module.state_dict(), expected.state_dict())
    calls: list[int] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        calls.append(batch_idx)
        loss: Tensor = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        return loss * math.nan if batch_idx == 4 and calls.count(4) == 2 else loss

    with pytest.raises(RefusedStepError) as raised:
        fit(make_trainer, FiniteGuard(policy="skip_window"), module=made(training_step=training_step))
    assert raised.value.touched
    assert "micro-batch" not in str(raised.value)


# --- several skips ---


@pytest.mark.row(70)
def test_a_limit_of_skipped_steps_in_a_row(make_trainer: Make) -> None:
    guard = FiniteGuard(policy="skip_window", max_skips=2)
    assert is_finite(fit(make_trainer, guard, batches=data(1, 2, 4, 5)))
    assert guard.skipped_windows == 4
    with pytest.raises(RefusedStepError, match=mentions("3 in a row", "max_skips=2")):
        fit(make_trainer, FiniteGuard(policy="skip_window", max_skips=2), batches=data(1, 2, 3))


def test_skipped_steps_do_not_count(make_trainer: Make) -> None:
    module = fit(make_trainer, FiniteGuard(policy="skip_window"), batches=data(2, 3), max_steps=8)
    assert module.trainer.global_step == 8
    assert equal(state_of(module), state_of(fit(make_trainer, batches=data(without=(2, 3)), max_steps=8)))


# --- spikes ---


def spiking(home: ModuleType, at: int, factor: float) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        return loss * factor if batch_idx == at else loss

    return module_of(home, training_step=training_step)


def many() -> Any:
    x = torch.rand(400, WIDTH, generator=torch.Generator().manual_seed(2)) + 0.5
    return DataLoader(TensorDataset(x, x.mean(1, keepdim=True) + torch.randn(400, 1)), batch_size=4)


@pytest.mark.row(72)
def test_a_spike_warns_stops_or_is_skipped(make_trainer: Make) -> None:
    run = partial(fit, make_trainer, batches=many())
    with pytest.warns(UserWarning, match="FiniteGuard: the loss .* 6 sigma .*optimizer step 80"):
        run(FiniteGuard(), module=spiking(lightning.pytorch, 80, 1e4))
    with pytest.raises(RefusedStepError, match="spike=skip_window"):
        run(FiniteGuard(spike="stop"), module=spiking(lightning.pytorch, 80, 1e4))
    guard = FiniteGuard(spike="skip_window")
    module = run(guard, module=spiking(lightning.pytorch, 80, 1e4))
    assert guard.skipped_windows == 1
    assert int(module.net.norm.num_batches_tracked) == module.trainer.global_step == 99
    run(FiniteGuard(spike="stop"), module=spiking(lightning.pytorch, LEAST - 1, 1e4))  # too early to know
    run(FiniteGuard(spike="ignore"), module=spiking(lightning.pytorch, 80, 1e4))


def test_the_bound_is_that_of_the_last_128_losses() -> None:
    losses = torch.rand(400, dtype=torch.float64).tolist()
    losses[150] = 1e9  # a spike that was passed over leaves the sums as it leaves the window
    spikes = Spikes()
    for number, loss in enumerate(losses):
        last = torch.tensor(losses[max(0, number - 128) : number], dtype=torch.float64)
        expected = last.mean() + 6 * last.std(correction=0) if number >= 64 else math.inf
        assert spikes.bound() == pytest.approx(float(expected))
        spikes.add(loss)


def test_losses_of_the_last_steps_are_resumed(make_trainer: Make, tmp_path: Path) -> None:
    guard = FiniteGuard()
    module = fit(make_trainer, guard, batches=many(), max_steps=70)
    module.trainer.save_checkpoint(tmp_path / "saved.ckpt")
    module = spiking(lightning.pytorch, 72, 1e4)
    trainer = make_trainer(lightning.pytorch, callbacks=[FiniteGuard(spike="stop")], max_epochs=2)
    with pytest.raises(RefusedStepError, match="sigma"):
        trainer.fit(module, many(), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    with pytest.raises(CheckpointError, match=mentions("wrong", "losses")):
        FiniteGuard().load_state_dict({"wrong": 1})


def test_the_mean_loss_of_a_window_is_compared(make_trainer: Make) -> None:
    """Lightning divides each loss by the factor, also in the short last window."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = 0 * self.net(batch[0]).sum() + batch_idx
        return loss

    guard = FiniteGuard()
    module = module_of(lightning.pytorch, training_step=training_step)
    fit(make_trainer, guard, module=module, accumulate_grad_batches=5)
    assert guard.state_dict()["losses"] == pytest.approx([2.0, 7.0, 10.5])  # of batches 0 to 4, 5 to 9, 10 and 11


def test_a_batch_that_runs_again_in_smaller_parts_counts_once(make_trainer: Make) -> None:
    tried: list[int] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        tried.append(batch_idx)
        if batch_idx == 4 and (len(batch[0]) > 2 or tried.count(4) == 3):  # the second part of the second try
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    losses = []
    for methods in ({}, {"training_step": training_step}):
        guard = FiniteGuard()
        module = module_of(lightning.pytorch, False, **methods)
        fit(make_trainer, guard, module=module, preset="micro_batching", overrides=["precision=32-true"])
        losses.append(guard.state_dict()["losses"])
    assert tried.count(4) == 1 + 2 + 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


# --- 16-mixed ---


def in_fp16(accelerator: str) -> dict[str, Any]:
    """Return the argument for 16-mixed, which Lightning replaces by bf16-mixed on a CPU if it is named."""
    device = "cuda" if accelerator == "gpu" else "cpu"
    return {"plugins": [lightning.pytorch.plugins.MixedPrecision("16-mixed", device)]}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_the_scaler_skips_are_counted_and_no_error(
    make_trainer: Make, accelerator: str, fused: bool
) -> None:
    """The first loss scale, 65,536, overflows with this loss."""

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=fused)

    guard = FiniteGuard()
    module = module_of(lightning.pytorch, scale=100.0, configure_optimizers=configure_optimizers)
    fit(make_trainer, guard, **in_fp16(accelerator), module=module)
    scale = module.trainer.precision_plugin.scaler.get_scale()
    assert guard.skipped_by_scaler == math.log2(65536 / scale) > 0
    assert is_finite(module)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@pytest.mark.row(73)
def test_a_loss_scale_at_its_floor_stops(make_trainer: Make, accelerator: str) -> None:
    with pytest.raises(RefusedStepError, match=mentions("loss scale", "min_loss_scale=65536", "precision=bf16-mixed")):
        fit(
            make_trainer, FiniteGuard(min_loss_scale=65536.0), **in_fp16(accelerator),
            module=module_of(lightning.pytorch, scale=1e4),
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_a_nan_loss_under_16_mixed_is_skipped_with_its_scale(make_trainer: Make, accelerator: str) -> None:
    guard = FiniteGuard(policy="skip_window")
    module = fit(make_trainer, guard, batches=data(4), **in_fp16(accelerator))
    expected = fit(make_trainer, batches=data(without=(4,)), **in_fp16(accelerator))
    assert guard.skipped_windows == 1
    assert equal(state_of(module), state_of(expected))
    scales = [each.trainer.precision_plugin.scaler.state_dict() for each in (module, expected)]
    assert equal(*scales)


# --- manual optimization ---


@pytest.mark.parametrize("fault", ["an infinite loss", "an infinite gradient"])
def test_each_of_two_optimizers_is_guarded(make_trainer: Make, fault: str) -> None:
    class Pair(lightning.pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(1)
            self.one, self.other = Faulty(False), Faulty(False)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for part, optimizer, bad in zip((self.one, self.other), self.optimizers(), (2, 5), strict=True):
                x = batch[0] if batch_idx in (bad, 8) else batch[0].clamp(min=0.5)
                optimizer.zero_grad()
                self.manual_backward(nn.functional.mse_loss(part(x), batch[1]))
                before = [p.clone() for p in part.parameters()]
                optimizer.step()
                self.unchanged.append(equal(before, [p.clone() for p in part.parameters()]))

        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.one, self.other)]

    module = Pair()
    module.unchanged = []
    guard = FiniteGuard(policy="skip_window")
    fit(make_trainer, guard, batches=data(2, 5, 8, fault=FAULTS[fault][0]), module=module)
    assert guard.skipped_windows == 4
    assert [place for place, same in enumerate(module.unchanged) if same] == [2 * 2, 2 * 5 + 1, 2 * 8, 2 * 8 + 1]
    assert is_finite(module)
    with pytest.raises(RefusedStepError, match=mentions("skip_window")):
        fit(make_trainer, FiniteGuard(), batches=data(2, fault=FAULTS[fault][0]), module=module)


# --- refused ---


def test_impossible_values_are_refused() -> None:
    for values in ({"policy": "go on"}, {"spike": "maybe"}, {"max_skips": 0}, {"min_loss_scale": -1.0}):
        with pytest.raises(PresetError, match=next(iter(values))):
            FiniteGuard(**values)  # type: ignore[arg-type]
    with pytest.raises(ConflictError, match=mentions("zero_offload", "finite_guard.policy=stop")):
        compose("zero_offload", ["+callback=finite_guard", "callback.finite_guard.policy=skip_window"])
