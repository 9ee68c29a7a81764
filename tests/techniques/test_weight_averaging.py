"""WeightAverage averages in fp32 to the bit, is validated and left in the module, and never in the way of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import lightning_solo as solo
from lightning_solo.cards.footprint import Request, Sizes, plain_footprint
from lightning_solo.cli import export
from lightning_solo.errors import CheckpointError, ConflictError, PresetError
from lightning_solo.export.members import load_members
from lightning_solo.memory.ledger import Ledger
from lightning_solo.optim.averages import Average
from lightning_solo.optim.schedule_free import ScheduleFreeAdamW
from lightning_solo.optim.split_weights import join
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.adapters.technique import Adapters
from lightning_solo.techniques.compact_states.technique import CompactStates
from lightning_solo.techniques.exact_resume.technique import ExactResume
from lightning_solo.techniques.finite_guard.technique import FiniteGuard
from lightning_solo.techniques.gradient_norm.technique import GradientNorm
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from lightning_solo.techniques.layer_freezing.technique import LayerFreezing
from lightning_solo.techniques.micro_batching.technique import MicroBatching
from lightning_solo.techniques.pruning.technique import Pruning
from lightning_solo.techniques.safe_checkpoint.technique import SafeCheckpoint
from lightning_solo.techniques.weight_averaging.card import Settings, footprint
from lightning_solo.techniques.weight_averaging.technique import WeightAverage
from tests.messages import lines_with, mentions
from tests.modules import Stack, loader, regression
from tests.training import equal, fit

Make = Callable[..., Any]
pytestmark = [
    pytest.mark.any_device,
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint"),
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path."),
]
FUNCTIONS = {"ema": get_ema_multi_avg_fn(0.9), "swa": get_swa_multi_avg_fn()}


class Reference(L.Callback):
    """torch's own average, of fp32 copies of the weights after each step."""

    def __init__(self, method: str = "ema", weights: Callable[[Any], dict[str, Tensor]] | None = None) -> None:
        self.function = FUNCTIONS[method]
        self.weights = weights or (lambda module: {name: p.detach() for name, p in module.named_parameters()})
        self.average: Any = None
        self.live: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        now = {name.replace(".", "/"): value.float().cpu().clone() for name, value in self.weights(pl_module).items()}
        model = nn.Module()
        for name, value in now.items():
            model.register_parameter(name, nn.Parameter(value.clone()))
        self.average = self.average or AveragedModel(model, multi_avg_fn=self.function)
        self.average.update_parameters(model)
        self.live.append({name.replace("/", "."): value for name, value in now.items()})

    @property
    def values(self) -> dict[str, Tensor]:
        return {name.replace("/", "."): p.detach() for name, p in self.average.module.named_parameters()}


def values_of(module: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone().cpu() for name, p in module.named_parameters()}


# --- the average ---


@pytest.mark.parametrize("method", FUNCTIONS)
def test_average_equals_that_of_torch_to_the_bit(method: str) -> None:
    weight = nn.Parameter(torch.randn(7, 5).t())
    reference = AveragedModel(nn.ParameterList([weight]), multi_avg_fn=FUNCTIONS[method])
    average = Average(method, 0.9, on_host=True)
    for _ in range(20):
        with torch.no_grad():
            weight.add_(torch.randn(5, 7))
        average.update({"weight": weight})
        reference.update_parameters(nn.ParameterList([weight]))
    assert torch.equal(average.values["weight"], reference.module[0])
    assert average.updates == 20


def test_bf16_average_moves_as_one_in_fp32() -> None:
    weight, start, end = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64), torch.ones(64)
    average = Average("ema", 0.999, on_host=True)
    average.update({"weight": weight})
    for _ in range(2000):
        average.update({"weight": weight.copy_(end)})
        start.lerp_(end, 1 - 0.999)
    assert torch.equal(average.values["weight"], start)
    assert start[0] == pytest.approx(1 - 0.999**2000, abs=1e-4)  # 86.5 %; in bf16 it would stop at 0.7 %


# --- acted, and the numbers ---


@pytest.mark.parametrize("method", FUNCTIONS)
@pytest.mark.parametrize("device", ["host", "module"])
def test_module_ends_with_the_average_and_trains_as_without(make_trainer: Make, method: str, device: str) -> None:
    reference = Reference(method)
    technique = WeightAverage(method=method, decay=0.9, device=device)
    module = fit(make_trainer, technique, reference)
    plain = fit(make_trainer)
    assert technique.average.updates == 10
    assert equal(values_of(module), reference.values)
    assert equal(reference.live[-1], values_of(plain))
    assert not equal(values_of(module), values_of(plain))


def test_start_and_interval_choose_the_updates(make_trainer: Make) -> None:
    reference, technique = Reference(), WeightAverage(method="swa", start_step=3, every_n_steps=3)
    module = fit(make_trainer, technique, reference)
    chosen = [reference.live[step] for step in (3, 6, 9)]  # after steps 4, 7 and 10
    assert technique.average.updates == 3
    for name, value in values_of(module).items():
        assert torch.allclose(value, torch.stack([live[name] for live in chosen]).mean(0), atol=1e-6)


def test_live_weights_stay_where_they_are_asked_for(make_trainer: Make) -> None:
    module = fit(make_trainer, technique := WeightAverage(at_end="live", evaluate="live"))
    assert technique.average.updates == 10
    assert equal(values_of(module), values_of(fit(make_trainer)))


@pytest.mark.parametrize("bits", [32, 24, "16-stochastic"])
@pytest.mark.parametrize("releases", [False, True])
def test_masters_of_compact_states_are_averaged(make_trainer: Make, bits: Any, releases: bool) -> None:
    def masters(module: Any) -> dict[str, Tensor]:
        (optimizer,) = module.trainer.strategy.optimizers
        return {name: optimizer.master_weight(p) for name, p in module.named_parameters()}

    def run(*callbacks: Any) -> Any:
        others = [CompactStates(master_bits=bits), *([GradientRelease()] if releases else [])]
        return fit(make_trainer, *others, *callbacks, precision="bf16-true")

    reference = Reference(weights=masters)
    module = run(WeightAverage(decay=0.9), reference)
    for name, p in module.named_parameters():
        assert torch.equal(p, reference.values[name].bfloat16())
    assert equal(solo.export_weights(module), reference.values)
    if bits != "16-stochastic":
        assert equal(solo.export_weights(module, live=True), reference.live[-1])
        assert equal(reference.live[-1], solo.export_weights(run()))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_average_is_of_fp32_or_wider_under_each_precision(make_trainer: Make, precision: str) -> None:
    technique = WeightAverage(decay=0.9)
    module = fit(make_trainer, technique, reference := Reference(), precision=precision)
    values = technique.averaged_weights
    assert {value.dtype for value in values.values()} == {torch.float64 if precision == "64-true" else torch.float32}
    if precision != "64-true":
        assert equal(values, reference.values)
    assert all(torch.equal(p, values[name].to(p.dtype)) for name, p in module.named_parameters())


def test_buffers_and_frozen_weights_are_not_averaged_and_tied_weights_once(make_trainer: Make) -> None:
    class Net(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("causal_mask", torch.zeros(2, dtype=torch.bool))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.blocks[1].up.weight = self.blocks[0].up.weight
            self.blocks[2].up.weight.requires_grad_(False)
            self.norm = nn.BatchNorm1d(1)

        def forward(self, x: Tensor) -> Tensor:
            self.causal_mask.fill_(True)
            self.count += 1
            return self.norm(super().forward(x))

    module = fit(make_trainer, technique := WeightAverage(), module=regression(L, Net()))
    assert "net.blocks.2.up.weight" not in technique.averaged_weights
    assert len(technique.averaged_weights) == len(list(module.parameters())) - 1  # each tied one once
    assert module.net.causal_mask.all()
    assert module.net.count == module.net.norm.num_batches_tracked == 10
    assert module.net.blocks[1].up.weight is module.net.blocks[0].up.weight
    exported = solo.export_weights(module)
    assert exported["net.blocks.1.up.weight"] is exported["net.blocks.0.up.weight"]
    assert exported["net.count"] == 10


def test_blocks_that_are_unfrozen_later_join_with_what_they_were(make_trainer: Make) -> None:
    class Unfreezes(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            pl_module.net.head.weight.requires_grad_(batch_idx >= 4)

    net = Stack()
    net.head.weight.requires_grad_(False)
    reference = Reference("swa")
    module = fit(make_trainer, Unfreezes(), WeightAverage(method="swa"), reference, module=regression(L, net))
    assert equal(values_of(module), reference.values, 1e-6)
    assert not torch.equal(reference.live[3]["net.head.weight"], reference.live[-1]["net.head.weight"])


@pytest.mark.parametrize(
    "other",
    [
        lambda: LayerFreezing(milestones=[[0, 0], [5, 1]], unit="steps"),
        lambda: MicroBatching(micro_batch=2),
        GradientRelease,
        pytest.param(lambda: Adapters(r=2), marks=pytest.mark.long),
    ],
)
def test_average_beside_other_techniques_is_of_what_they_train(make_trainer: Make, other: Any) -> None:
    reference = Reference()
    module = fit(make_trainer, other(), technique := WeightAverage(decay=0.9), reference)
    average = technique.averaged_weights
    assert average
    assert all(torch.equal(p, reference.values[name]) for name, p in module.named_parameters() if name in average)
    trained = [name for name, value in reference.live[0].items() if not torch.equal(value, reference.live[-1][name])]
    assert set(trained) <= average.keys()


# --- validation and checkpoints ---


class Sees(L.Callback):
    """Saves in the middle of a validation, and notes the weights there."""

    def __init__(self, path: Path) -> None:
        self.path, self.weights = path, {}

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.weights = values_of(pl_module)
        trainer.save_checkpoint(self.path)


def test_validation_and_the_best_model_are_of_the_average(make_trainer: Make, tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = regression(L, Stack())
    best = ModelCheckpoint(tmp_path / "best", monitor="validation/loss")
    callbacks = [best, technique := WeightAverage(decay=0.9, at_end="live")]
    trainer = make_trainer(L, callbacks=callbacks, max_epochs=2, enable_checkpointing=True)
    trainer.fit(module, loader(), loader(3, seed=2))
    logged = trainer.callback_metrics["validation/loss"]
    live = values_of(module)
    (tested,) = trainer.validate(
        module, loader(3, seed=2), ckpt_path=best.best_model_path, weights_only=True, verbose=False
    )
    assert best.best_model_score == pytest.approx(tested["validation/loss"])
    assert equal(values_of(module), technique.averaged_weights) == (best.best_model_score == logged)
    (other,) = make_trainer(L).validate(
        module, loader(3, seed=2), best.best_model_path, weights_only=True, verbose=False
    )
    assert other["validation/loss"] != tested["validation/loss"]  # the checkpoint's weights are the live ones
    assert not equal(values_of(module), technique.averaged_weights)
    exported = solo.export_weights(best.best_model_path)
    module.load_state_dict(exported)
    (of_export,) = make_trainer(L).validate(module, loader(3, seed=2), verbose=False)
    assert of_export["validation/loss"] == tested["validation/loss"]
    assert equal(live, values_of(fit(make_trainer, module=regression(L, stack()), max_epochs=2)))


def stack() -> Stack:
    torch.manual_seed(1)
    return Stack()


@pytest.mark.parametrize("compact", [False, True])
def test_checkpoints_have_the_live_weights_also_within_a_validation_and_after_the_fit(
    make_trainer: Make, tmp_path: Path, compact: bool
) -> None:
    def run(*callbacks: Any) -> tuple[Any, Any]:
        module = regression(L, stack())
        callbacks = (*callbacks, *([CompactStates(checkpoint_weights="fp32")] if compact else []))
        trainer = make_trainer(L, callbacks=[*callbacks], precision="bf16-true" if compact else "32-true")
        trainer.fit(module, loader(), loader(1))
        trainer.save_checkpoint(tmp_path / "after.ckpt")
        trainer.save_checkpoint(tmp_path / "alone.ckpt", weights_only=True)
        return module, trainer

    plain, _ = run()
    expected = torch.load(tmp_path / "after.ckpt", map_location="cpu")
    module, _ = run(technique := WeightAverage(decay=0.9), sees := Sees(tmp_path / "within.ckpt"))
    average = technique.averaged_weights
    assert equal(sees.weights, {name: value.to(next(plain.parameters()).dtype) for name, value in average.items()})
    for name in ("within", "after"):
        saved = torch.load(tmp_path / f"{name}.ckpt", map_location="cpu")
        assert equal(saved["state_dict"], expected["state_dict"])
        assert equal(saved["optimizer_states"], expected["optimizer_states"])
        assert equal(saved["callbacks"]["WeightAverage"]["averaged_weights"], average)
    assert equal(torch.load(tmp_path / "alone.ckpt", map_location="cpu")["state_dict"], average)
    with torch.no_grad():
        module.net.head.weight.fill_(7)  # by the user, after the fit
    assert (solo.export_weights(module)["net.head.weight"] - 7).abs().max() < 0.1


def test_before_the_first_update_everything_is_of_the_live_weights(make_trainer: Make, tmp_path: Path) -> None:
    class Stops(L.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = True

    module = regression(L, stack())
    trainer = make_trainer(
        L,
        callbacks=[technique := WeightAverage(start_step=15), Stops(), sees := Sees(tmp_path / "x.ckpt")],
        max_epochs=2,
    )
    with pytest.warns(UserWarning, match=mentions("weight_averaging", "start_step=15", "10")):
        trainer.fit(module, loader(), loader(1))
    assert technique.averaged_weights == {}
    assert equal(sees.weights, values_of(module))
    assert equal(values_of(module), values_of(fit(make_trainer, module=regression(L, stack()))))
    assert equal(solo.export_weights(tmp_path / "x.ckpt"), module.state_dict())


@pytest.mark.parametrize("others", [[], [ExactResume, SafeCheckpoint, FiniteGuard]])
def test_resumed_run_equals_the_undisturbed_one(make_trainer: Make, tmp_path: Path, others: list[Any]) -> None:
    def run(epochs: int, path: Path | None = None) -> tuple[Any, Any]:
        module, technique = regression(L, stack()), WeightAverage(method="swa", start_step=7, every_n_steps=2)
        trainer = make_trainer(L, callbacks=[*(each() for each in others), technique], max_epochs=epochs)
        trainer.fit(module, loader(), loader(1), ckpt_path=path, weights_only=True)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module, technique

    whole, first = run(2)
    run(1)
    resumed, second = run(2, tmp_path / "1.ckpt")
    assert equal(values_of(resumed), values_of(whole))
    assert equal(second.state_dict(), first.state_dict())
    with pytest.raises(CheckpointError, match=mentions("method=swa")):
        make_trainer(L, callbacks=[WeightAverage()], max_epochs=3).fit(
            whole, loader(), ckpt_path=tmp_path / "2.ckpt", weights_only=True
        )


def test_checkpoint_of_a_step_that_is_not_yet_in_the_average_resumes_with_it(
    make_trainer: Make, tmp_path: Path
) -> None:
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(tmp_path / "5.ckpt")

    def run(path: Path | None) -> Any:
        callbacks = [Saves(), technique := WeightAverage(decay=0.9)]
        make_trainer(L, callbacks=callbacks).fit(regression(L, stack()), loader(), ckpt_path=path, weights_only=True)
        return technique

    whole = run(None)
    assert torch.load(tmp_path / "5.ckpt", map_location="cpu")["callbacks"]["WeightAverage"]["updates"] == 4
    rest = run(tmp_path / "5.ckpt")
    assert rest.average.updates == whole.average.updates == 10
    assert rest.averaged_weights.keys() == whole.averaged_weights.keys()


def test_run_without_the_technique_continues_the_live_weights_and_says_so(
    make_trainer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "half.ckpt"
    module = fit(make_trainer, WeightAverage(), module=regression(L, stack()))
    module.trainer.save_checkpoint(path)
    rest = regression(L, stack())
    caplog.clear()
    make_trainer(L, callbacks=[GradientNorm()], max_epochs=2).fit(rest, loader(), ckpt_path=path, weights_only=True)
    assert lines_with(caplog.text, "live weights", "+callback=weight_averaging")
    assert equal(values_of(rest), values_of(fit(make_trainer, module=regression(L, stack()), max_epochs=2)))


def test_step_that_is_refused_is_no_update(make_trainer: Make) -> None:
    class Spoils(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 4:
                pl_module.net.head.weight.grad.fill_(torch.nan)

    technique = WeightAverage(method="swa")
    module = fit(make_trainer, Spoils(), FiniteGuard(policy="skip_window"), technique, reference := Reference("swa"))
    assert technique.average.updates == module.trainer.global_step == 9
    assert len(reference.live) == 10


def test_run_that_goes_back_takes_its_average_back(make_trainer: Make, tmp_path: Path) -> None:
    class Spoils(L.Callback):
        calls = 0

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.calls += 1
            if self.calls == 7:
                pl_module.net.head.weight.grad.fill_(torch.nan)

    saves = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=4)
    reference, technique = Reference("swa"), WeightAverage(method="swa")
    callbacks = [Spoils(), FiniteGuard(policy="rewind"), technique, reference, saves]
    fit(make_trainer, *callbacks, enable_checkpointing=True)
    kept = [*reference.live[:4], *reference.live[7:]]  # steps 5 and 6 are taken back, and 7 is not taken
    assert technique.average.updates == len(kept) == 7
    for name, value in technique.averaged_weights.items():
        assert torch.allclose(value, torch.stack([live[name] for live in kept]).mean(0), atol=1e-6)


def test_failure_within_a_validation_leaves_the_live_weights(make_trainer: Make) -> None:
    class Fails(L.Callback):
        def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            raise ZeroDivisionError

    module = regression(L, stack())
    with pytest.raises(ZeroDivisionError):
        make_trainer(L, callbacks=[WeightAverage(decay=0.5), Fails()]).fit(module, loader(), loader(1))
    assert equal(values_of(module), values_of(fit(make_trainer, module=regression(L, stack()))))


def test_command_exports_the_average_or_the_live_weights(
    make_trainer: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = fit(make_trainer, technique := WeightAverage(at_end="live"), CompactStates(), precision="bf16-true")
    module.trainer.save_checkpoint(tmp_path / "run.ckpt")
    written = {}
    for name, options in (("average", []), ("live", ["--live"])):
        assert export.run([str(tmp_path / "run.ckpt"), "--output", str(tmp_path / f"{name}.pt"), *options]) == 0
        written[name] = torch.load(tmp_path / f"{name}.pt")
        assert bool(lines_with(capsys.readouterr().out, "averages", "--live")) == (name == "average")
    assert equal(written["average"], technique.averaged_weights)
    assert equal(written["live"], solo.export_weights(module))  # 24 bits of each
    assert not equal(written["live"], written["average"])


def test_average_in_the_other_home_resumes(make_trainer: Make, tmp_path: Path) -> None:
    import pytorch_lightning

    modules = []
    for path in (None, tmp_path / "x.ckpt"):
        torch.manual_seed(1)
        module = regression(pytorch_lightning, Stack())
        callbacks = [technique := WeightAverage(decay=0.9), Sees(tmp_path / "y.ckpt")]
        trainer = make_trainer(pytorch_lightning, callbacks=callbacks, max_epochs=2 if path else 1)
        trainer.fit(module, loader(), loader(1), ckpt_path=path, weights_only=True)
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        modules.append(technique.average.updates)
        assert equal(values_of(module), {name: each.cpu() for name, each in technique.averaged_weights.items()})
    assert modules == [10, 20]


# --- memory ---


def test_average_on_the_host_takes_no_device_memory(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("on a GPU, or the simulated one")
    weight, correction = torch.ones(2**16, dtype=torch.bfloat16, device=device), torch.ones(2**16, dtype=torch.int8)
    average = Average("ema", 0.9, on_host=True)
    corrections = {weight: correction.to(device)}
    average.update({"weight": weight}, corrections)
    average.settle()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(3):
        average.wait_for_copies()
        weight += 1
        average.update({"weight": weight}, corrections)
    assert average._stream is not None
    average.settle()
    assert torch.cuda.max_memory_allocated(device) == before
    expected = torch.zeros(2**16)
    for step, value in enumerate(range(1, 5)):
        master = join(torch.full((2**16,), value, dtype=torch.bfloat16), correction)
        expected = master if step == 0 else expected.lerp_(master, 1 - 0.9)
    assert torch.equal(average.values["weight"], expected)


@pytest.mark.parametrize(("device", "expected"), [("host", 0), ("module", 4)])
def test_bytes_on_device_and_host(device: str, expected: int) -> None:
    settings, request = Settings(device=device), Request(Sizes((1000,), (500,), 0), "bf16-true", 1, cuda=True)
    plain = plain_footprint(request)
    averaged = footprint(settings, request, plain)
    assert averaged.device == plain.device + expected * 1000
    assert averaged.host == (1000 * (4 + 2) if device == "host" else 0)  # average, pinned copy of bf16
    weight = torch.zeros(1000, dtype=torch.bfloat16)
    average = Average("ema", 0.9, on_host=device == "host")
    with Ledger(nn.Module()) as ledger:
        for _ in range(3):
            average.update({"weight": weight})
    assert sum(ledger.live().values()) == 4 * 1000
    assert ledger.peak_bytes <= 3 * 4 * 1000  # beside the average one weight in fp32


# --- snapshots of a cyclic schedule ---


class Cyclic(L.LightningModule):
    """A regression with three cosines of four steps."""

    def __init__(self, interval: str = "step") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.interval = Stack(), interval

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.003)
        cosine = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4 if self.interval == "step" else 1)
        return [optimizer], [{"scheduler": cosine, "interval": self.interval}]


def cyclic(make_trainer: Make, *callbacks: Any, path: Path | None = None, **options: Any) -> Any:
    module = Cyclic()
    trainer = make_trainer(L, callbacks=[*callbacks], max_epochs=3, **options)
    trainer.fit(module, loader(4), ckpt_path=path, weights_only=path and True)
    return module


def test_snapshots_are_the_weights_at_the_ends_of_cycles_and_are_averaged(make_trainer: Make, tmp_path: Path) -> None:
    reference, average = Reference(), WeightAverage(method="swa", cycles=True, members=2)
    module = cyclic(make_trainer, reference, average)
    ends = [reference.live[step] for step in (3, 7, 11)]
    assert average.average.updates == 3
    assert equal(average.average.members, ends[1:])
    for name, value in average.averaged_weights.items():
        assert torch.allclose(value, torch.stack([end[name] for end in ends]).mean(0))
    assert equal(values_of(module), average.averaged_weights)
    module.trainer.save_checkpoint(tmp_path / "last.ckpt")
    members = load_members(Cyclic(), tmp_path / "last.ckpt")
    assert [values_of(member).keys() for member in members] == [ends[0].keys()] * 2
    assert equal([values_of(member) for member in members], ends[1:])
    assert not members[0].training
    with pytest.raises(CheckpointError, match=mentions("last.ckpt", "Regression", "head")):
        load_members(regression(L, Stack(outputs=2)), tmp_path / "last.ckpt")


def test_resumed_run_continues_its_cycle(make_trainer: Make, tmp_path: Path) -> None:
    class Save(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    def make() -> WeightAverage:
        return WeightAverage(cycles=True, decay=0.5, members=3, start_step=2)

    whole, rest = make(), make()
    module = cyclic(make_trainer, whole, ExactResume(), Save())
    resumed = cyclic(make_trainer, rest, ExactResume(), path=tmp_path / "7.ckpt")
    assert equal(module, resumed)
    assert whole.average.updates == rest.average.updates == 3
    assert equal(whole.average.members, rest.average.members)
    with pytest.raises(CheckpointError, match=mentions("3.ckpt", "members=4")):
        load_members(Cyclic(), tmp_path / "3.ckpt")


@pytest.mark.long
def test_schedule_of_epochs_has_cycles_too(make_trainer: Make) -> None:
    class Bent(Cyclic):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.003)
            bent = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: (1.0, 0.1)[epoch % 2])
            return [optimizer], [bent]

    reference, average = Reference(), WeightAverage(method="swa", cycles=True, members=9)
    make_trainer(L, callbacks=[reference, average], max_epochs=5).fit(Bent(), loader(4))
    assert equal(average.average.members, [reference.live[step] for step in (7, 15)])


def test_cycles_without_a_schedule_or_with_an_interval_are_refused(make_trainer: Make) -> None:
    with pytest.raises(PresetError, match=mentions("cycles=true", "CosineAnnealingWarmRestarts", "cycles=false")):
        fit(make_trainer, WeightAverage(cycles=True))
    with pytest.raises(ConflictError, match=mentions("every_n_steps=1", "cycles=false")):
        WeightAverage(cycles=True, every_n_steps=3)


# --- refused ---


@pytest.mark.parametrize("other", [EMAWeightAveraging, lambda: StochasticWeightAveraging(swa_lrs=1e-3), WeightAverage])
def test_two_averages_are_refused(make_trainer: Make, other: Any) -> None:
    callbacks = [WeightAverage(), other()]
    with pytest.raises((ConflictError, RuntimeError), match=r"(?i)average"):
        make_trainer(L, callbacks=callbacks).fit(regression(L, stack()), loader())


def test_an_optimizer_that_averages_is_refused(make_trainer: Make) -> None:
    module = regression(L, stack())
    module.configure_optimizers = lambda: ScheduleFreeAdamW(module.parameters(), lr=1e-3)
    with pytest.raises(ConflictError, match=mentions("ScheduleFreeAdamW", "~callback.weight_averaging", "adamw")):
        make_trainer(L, callbacks=[WeightAverage()]).fit(module, loader())


def test_start_after_the_end_and_untrained_modules_are_refused(make_trainer: Make) -> None:
    with pytest.raises(PresetError, match=mentions("start_step=10", "after 10", "start_step=7")):
        fit(make_trainer, WeightAverage(start_step=10))
    for decay in (0, 1, 1.5, -0.1):
        with pytest.raises(PresetError, match=mentions("decay", "0.999")):
            WeightAverage(decay=decay)
    with pytest.raises(ConflictError, match=mentions("weight_averaging", "zero_offload", "~strategy")):
        compose({"precision": "bf16-true", "strategy": {"name": "zero_offload"}, "callback": {"weight_averaging": {}}})


def test_state_of_another_class_is_refused_by_name() -> None:
    state = WeightAverage().state_dict()
    WeightAverage().load_state_dict(state)
    for foreign in ({}, {"average_model_state": {}}, {**state} | {"steps": 1, "seen": 1}):
        foreign.pop("averaged_weights", None)
        with pytest.raises(CheckpointError, match=mentions("callback.weight_averaging", "averaged_weights")):
            WeightAverage().load_state_dict(foreign)


def test_average_of_pruned_weights_is_as_sparse_and_begins_after_the_last_change(make_trainer: Make) -> None:
    pruning: dict[str, Any] = {"amount": 0.5, "schedule": "cubic", "begin": 1, "end": 5, "every_n_steps": 1}
    preset = {"callback": {"pruning": pruning, "weight_averaging": {"start_step": 4}}}
    with pytest.raises(ConflictError, match=mentions("start_step=4", "callback.pruning", "start_step=5")):
        compose(preset)
    technique = WeightAverage(decay=0.5, start_step=5)
    module = fit(
        make_trainer, Pruning(**pruning), technique, module=regression(L, Stack(width=32)), data=loader(width=32)
    )
    assert technique.average.updates == 5
    for values in (dict(module.named_parameters()), technique.averaged_weights):
        weight = values["net.blocks.0.up.weight"]
        assert (weight == 0).sum() == weight.numel() // 2
