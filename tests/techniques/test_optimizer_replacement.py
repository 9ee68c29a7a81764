"""OptimizerReplacement trains by the optimizer asked for, keeps groups, and resumes, validates and saves right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR

from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError, PresetError
from lightning_solo.nn.parameter_groups import parameter_groups
from lightning_solo.optim.master_weights import MasterWeights
from lightning_solo.optim.muon import MuonAdamW
from lightning_solo.optim.one_by_one import Lion
from lightning_solo.optim.schedule_free import TRAINED, ScheduleFreeAdamW
from lightning_solo.optim.schedules import factor_at
from lightning_solo.presets.compose import compose
from lightning_solo.presets.registry import NAMES
from lightning_solo.techniques.accumulation_schedule.technique import AccumulationSchedule
from lightning_solo.techniques.compact_states.technique import CompactStates
from lightning_solo.techniques.exact_resume.technique import ExactResume
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from lightning_solo.techniques.micro_batching.technique import MicroBatching
from lightning_solo.techniques.optimizer_replacement.card import STATE_BYTES
from lightning_solo.techniques.optimizer_replacement.technique import OptimizerReplacement
from tests.conftest import long
from tests.messages import mentions
from tests.modules import Stack, loader, regression

Make = Callable[..., Any]
WIDTH = 64
BATCHES = 6
pytestmark = [
    pytest.mark.any_device,
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint"),
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path."),
]
ALL = ["adamw", "sgd", "adafactor", "lion", "muon", "adamw_8bit", "schedule_free_adamw"]
every = pytest.mark.parametrize(
    "name", [each if each in ("muon", "schedule_free_adamw") else long(each) for each in ALL]
)


def module_of(configure: Callable[[Any], Any] | None = None) -> Any:
    torch.manual_seed(0)
    module = regression(L, Stack(blocks=2, width=WIDTH), lr=1e-3)
    if configure is not None:
        module.configure_optimizers = lambda: configure(module)
    return module


class Watch(L.Callback):
    """Notes the learning rates of each optimizer step."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rates.append([float(group["lr"]) for group in optimizer.param_groups])


class Save(L.Callback):
    """Saves after each batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(self.folder / f"{batch_idx + 1}.ckpt")


def fit(make_trainer: Make, *callbacks: Any, module: Any = None, validate: bool = False, **arguments: Any) -> Any:
    module = module or module_of()
    options = {name: arguments.pop(name) for name in ("ckpt_path", "weights_only") if name in arguments}
    trainer = make_trainer(L, callbacks=list(callbacks), **arguments)
    torch.manual_seed(2)
    trainer.fit(module, loader(BATCHES, width=WIDTH), loader(2, width=WIDTH) if validate else None, **options)
    return module


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def replacement(name: str | None, **options: Any) -> OptimizerReplacement:
    rates = {"sgd": 1e-3, "adafactor": 1e-2, "lion": 1e-3}
    return OptimizerReplacement(optimizer=name, **{"lr": rates.get(str(name)), **options})


# --- acted, with parity ---


def test_names_are_those_of_the_command_line() -> None:
    assert STATE_BYTES.keys() == NAMES["optimizer"].keys()


BY_HAND: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3),
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.01),
    "adafactor": lambda module: torch.optim.Adafactor(module.parameters(), lr=1e-2, weight_decay=0.01),
    "lion": lambda module: Lion(module.parameters(), lr=1e-3, weight_decay=0.01),
}


@pytest.mark.parametrize("name", [each if each == "lion" else long(each) for each in BY_HAND])
def test_run_equals_one_with_the_optimizer_in_the_module(name: str, make_trainer: Make) -> None:
    ours = fit(make_trainer, replacement(name))
    by_hand = fit(make_trainer, module=module_of(BY_HAND[name]))
    assert type(ours.trainer.optimizers[0]) is type(by_hand.trainer.optimizers[0])
    assert equal(ours, by_hand)
    assert equal(ours, fit(make_trainer)) == (name == "adamw")


def test_muon_steps_the_matrices_of_blocks_at_the_rate_of_adamw(make_trainer: Make) -> None:
    ours = fit(make_trainer, replacement("muon", weight_decay=0.1))
    by_hand = module_of(
        lambda module: MuonAdamW(parameter_groups(module, MuonAdamW), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.999))
    )
    assert equal(ours, fit(make_trainer, module=by_hand))
    groups = ours.trainer.optimizers[0].param_groups
    assert {(group["matrices"], group["weight_decay"], len(group["params"])) for group in groups} == {
        (True, 0.1, 4),
        (False, 0.1, 1),  # the head
        (False, 0.0, 9),
    }


def test_groups_keep_their_ratios_and_their_own_decay(make_trainer: Make) -> None:
    def configure(module: Any) -> Any:
        groups = [
            {"params": module.net.head.parameters(), "lr": 1e-2, "weight_decay": 0.5},
            {"params": module.net.blocks.parameters()},
        ]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.9))

    module = fit(make_trainer, replacement("lion", lr=1e-4), module=module_of(configure))
    groups = module.trainer.optimizers[0].param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(pytest.approx(1e-3), 0.5), (1e-4, 0.01)]
    assert [group["betas"] for group in groups] == [(0.9, 0.99)] * 2  # of another kind than AdamW's
    module = fit(make_trainer, replacement("adamw_8bit"), module=module_of(configure))
    groups = module.trainer.optimizers[0].param_groups
    assert [(group["lr"], tuple(group["betas"])) for group in groups] == [(1e-2, (0.8, 0.9)), (1e-3, (0.8, 0.9))]


class Tied(nn.Module):
    """An embedding with a tied head around two blocks."""

    def __init__(self) -> None:
        super().__init__()
        inner = Stack(blocks=2, width=WIDTH)
        self.embedding = nn.Embedding(32, WIDTH)
        self.blocks = inner.blocks
        self.norm = nn.LayerNorm([2, WIDTH // 2])  # its weight is a matrix
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x[:, 0].abs().long()) + x
        return self.head(self.norm(self.blocks(x).view(-1, 2, WIDTH // 2)).view_as(x))[:, :1]


@pytest.mark.parametrize("decay_embeddings", [long(True), False])
def test_decay_spares_vectors_norms_and_embeddings_by_choice(decay_embeddings: bool, make_trainer: Make) -> None:
    torch.manual_seed(0)
    module = regression(L, Tied())
    technique = replacement("muon", weight_decay=0.2, decay_embeddings=decay_embeddings)
    fit(make_trainer, technique, module=module)
    names = {p: name for name, p in module.net.named_parameters()}
    groups = module.trainer.optimizers[0].param_groups
    counted = [p for group in groups for p in group["params"]]
    assert len(counted) == len(set(counted)) == len(names)  # the tied weight once
    decayed = {names[p] for group in groups if group["weight_decay"] for p in group["params"]}
    matrices = {names[p] for group in groups if group["matrices"] for p in group["params"]}
    hidden = {f"blocks.{block}.{half}.weight" for block in (0, 1) for half in ("up", "down")}
    assert matrices == hidden
    assert decayed == hidden | ({"embedding.weight"} if decay_embeddings else set())


# --- schedules ---


@pytest.mark.parametrize("schedule", [long("constant"), long("linear"), long("cosine"), "wsd"])
def test_schedule_counts_optimizer_steps_to_the_end_of_the_run(schedule: str, make_trainer: Make) -> None:
    watch = Watch()
    share = {"decay_share": 0.5} if schedule == "wsd" else {}
    technique = replacement(None, lr=0.5, schedule=schedule, warmup_steps=1, **share)
    fit(make_trainer, technique, watch, accumulate_grad_batches=2, max_epochs=2)
    expected = [factor_at(step, schedule, warmup_steps=1, total_steps=6, decay_share=0.5) for step in range(6)]
    assert [rate for (rate,) in watch.rates] == pytest.approx([0.5 * factor for factor in expected])


def test_schedule_follows_a_changing_accumulation(make_trainer: Make) -> None:
    watch = Watch()
    accumulation = AccumulationSchedule(milestones=[[0, 1], [1, 3]])
    fit(make_trainer, replacement("lion", schedule="linear"), accumulation, watch, max_epochs=2)
    assert [rate for (rate,) in watch.rates] == pytest.approx([1e-3 * (1 - step / 8) for step in range(6 + 2)])
    watch = Watch()
    micro = MicroBatching(micro_batch=2)
    fit(make_trainer, replacement("lion", schedule="linear"), micro, watch)
    assert len(watch.rates) == BATCHES
    assert watch.rates[-1] == [pytest.approx(1e-3 / BATCHES)]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 6),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, 1.0, 3), CosineAnnealingLR(optimizer, 3)], [3]
    ),
    "one_cycle": lambda optimizer: OneCycleLR(optimizer, 1e-2, total_steps=7, cycle_momentum=False),
}


def with_scheduler(make: Callable[[Any], Any]) -> Any:
    def configure(module: Any) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), "interval": "step"}}

    return module_of(configure)


@pytest.mark.parametrize("name", [each if each == "sequential" else long(each) for each in SCHEDULERS])
def test_schedulers_of_the_module_act_on_the_divided_groups(name: str, make_trainer: Make) -> None:
    plain, ours = Watch(), Watch()
    fit(make_trainer, plain, module=with_scheduler(SCHEDULERS[name]))
    module = fit(
        make_trainer, replacement("lion", lr=1e-4, weight_decay=0.1), ours, module=with_scheduler(SCHEDULERS[name])
    )
    assert len(module.trainer.optimizers[0].param_groups) == 2
    # one_cycle sets its own rates, not the optimizer's; their ratio to the optimizer's is kept
    assert ours.rates == [pytest.approx([rate / 10] * 2) for (rate,) in plain.rates]


@pytest.mark.parametrize("name", ["sequential", "one_cycle"])  # one begins with a tenth, one overwrites the rate
def test_schedule_replaces_the_schedulers_of_the_module(name: str, make_trainer: Make) -> None:
    watch = Watch()
    technique = replacement("adamw", lr=1e-4, schedule="constant", warmup_steps=1)
    fit(make_trainer, technique, watch, module=with_scheduler(SCHEDULERS[name]))
    assert watch.rates == [pytest.approx([5e-5]), *[pytest.approx([1e-4])] * 5]


def test_betas_that_one_cycle_has_changed_are_restored(make_trainer: Make) -> None:
    module = with_scheduler(lambda optimizer: OneCycleLR(optimizer, 1e-2, total_steps=BATCHES))
    module = fit(make_trainer, replacement("adamw", schedule="constant"), module=module)
    assert [group["betas"] for group in module.trainer.optimizers[0].param_groups] == [(0.9, 0.999)]


def test_rate_that_groups_alone_have_becomes_lr(make_trainer: Make) -> None:
    def configure(module: Any) -> Any:
        return torch.optim.AdamW([{"params": module.parameters(), "lr": 1e-2}])  # whose own is 1e-3

    module = fit(make_trainer, replacement("lion", lr=1e-4), module=module_of(configure))
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-4)


# --- combined ---


@every
def test_gradient_release_changes_no_bit(name: str, make_trainer: Make) -> None:
    plain = fit(make_trainer, replacement(name))
    assert equal(plain, fit(make_trainer, replacement(name), GradientRelease()))


@pytest.mark.parametrize("name", [long("adamw"), long("sgd"), long("adafactor"), "lion"])
def test_compact_states_keep_the_masters(name: str, make_trainer: Make) -> None:
    module = fit(make_trainer, replacement(name), CompactStates(), precision="bf16-true")
    (optimizer,) = module.trainer.optimizers
    assert isinstance(optimizer, MasterWeights) == (name != "adamw")
    assert all(p.dtype is torch.bfloat16 for p in module.parameters())


# --- resumed ---


@every
def test_resumed_run_equals_the_undisturbed_one(name: str, make_trainer: Make, tmp_path: Path) -> None:
    def run(*callbacks: Any, **arguments: Any) -> Any:
        technique = replacement(name, schedule="constant" if name == "schedule_free_adamw" else "wsd", warmup_steps=2)
        options = {"val_check_interval": 2, "validate": True, **arguments}
        return fit(make_trainer, technique, ExactResume(), *callbacks, **options)

    whole = run(Save(tmp_path))
    assert equal(whole, run())  # saving changes nothing
    assert equal(whole, run(val_check_interval=3))  # nor validation
    for place in (2, 3):
        assert equal(whole, run(ckpt_path=tmp_path / f"{place}.ckpt", weights_only=True))


def test_states_of_another_optimizer_are_refused_by_name(make_trainer: Make, tmp_path: Path) -> None:
    fit(make_trainer, replacement("lion"), Save(tmp_path / "lion"))
    fit(make_trainer, Save(tmp_path / "own"))
    lion, own = ({"ckpt_path": tmp_path / name / "2.ckpt", "weights_only": True} for name in ("lion", "own"))
    with pytest.raises(CheckpointError, match=mentions("Lion", "SGD", "callback.optimizer_replacement.optimizer=lion")):
        fit(make_trainer, replacement("sgd"), **lion)
    with pytest.raises(CheckpointError, match=mentions("Lion", "~callback.optimizer_replacement")):
        fit(make_trainer, replacement("lion"), **own)
    fit(make_trainer, replacement("adamw"), **own)  # of the same class
    with pytest.raises(CheckpointError, match=mentions("momentum", "AdamW", "load_from_checkpoint")):
        fit(make_trainer, ExactResume(), **lion)


def test_schedule_of_a_resumed_run_goes_to_its_new_end_and_no_other_takes_its_place(
    make_trainer: Make, tmp_path: Path
) -> None:
    technique = partial(replacement, "lion", schedule="linear")
    fit(make_trainer, technique(), ExactResume(), Save(tmp_path))
    resumed = {"ckpt_path": tmp_path / "3.ckpt", "weights_only": True}
    watch = Watch()
    fit(make_trainer, technique(), ExactResume(), watch, max_epochs=2, **resumed)
    assert [rate for (rate,) in watch.rates] == pytest.approx([1e-3 * (1 - step / 12) for step in range(3, 12)])
    with pytest.raises(CheckpointError, match=mentions("linear", "callback.optimizer_replacement.schedule=linear")):
        fit(make_trainer, replacement("lion"), ExactResume(), **resumed)


# --- averages ---


def test_average_is_validated_saved_and_left(make_trainer: Make, tmp_path: Path) -> None:
    class Weights(L.Callback):
        """Notes the head's weight where each hook runs."""

        def __init__(self) -> None:
            self.at: dict[str, list[torch.Tensor]] = {"train": [], "validate": []}

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.at["train"].append(pl_module.net.head.weight.detach().cpu().clone())

        def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.at["validate"].append(pl_module.net.head.weight.detach().cpu().clone())

    weights = Weights()
    best = ModelCheckpoint(tmp_path, monitor="validation/loss", save_last=True, filename="best")
    module = fit(
        make_trainer, replacement("schedule_free_adamw"), weights, best, validate=True, enable_checkpointing=True
    )
    trainer = module.trainer
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, ScheduleFreeAdamW)
    head = module.net.head.weight
    last, average = weights.at["train"][-1], weights.at["validate"][-1]
    assert not torch.equal(last, average)
    assert torch.equal(head.detach(), average)  # what was validated is left
    torch.testing.assert_close(average, last.lerp(optimizer.state[head]["z"], 1 - 1 / 0.9))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    for path in ("best.ckpt", "last.ckpt", "after.ckpt"):
        saved = torch.load(tmp_path / path, map_location="cpu", weights_only=True)
        assert torch.equal(saved["state_dict"]["net.head.weight"], average), path
        number = [name for name, _ in module.named_parameters()].index("net.head.weight")
        assert torch.equal(saved["optimizer_states"][0]["state"][number][TRAINED], last), path
    (result,) = trainer.validate(module, loader(2, width=WIDTH), verbose=False)
    assert result["validation/loss"] == pytest.approx(float(best.best_model_score))


def test_average_is_left_by_a_run_that_fails(make_trainer: Make) -> None:
    module = module_of()
    step = module.training_step

    def failing(batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4:
            raise ZeroDivisionError
        return step(batch, batch_idx)

    module.training_step = failing
    with pytest.raises(ZeroDivisionError):
        fit(make_trainer, replacement("schedule_free_adamw"), module=module)
    assert equal(module, fit(make_trainer, replacement("schedule_free_adamw"), max_steps=4))


# --- refused ---


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None")
def test_what_the_module_does_is_refused_with_a_remedy(make_trainer: Make) -> None:
    with pytest.raises(ConflictError, match=mentions("AdamW", "callback.optimizer_replacement.lr=0.0001")):
        fit(make_trainer, OptimizerReplacement(optimizer="lion"))
    cycle = with_scheduler(lambda optimizer: OneCycleLR(optimizer, 1e-2, total_steps=7))
    with pytest.raises(ConflictError, match=mentions("OneCycleLR", "schedule=constant")):
        fit(make_trainer, replacement("lion"), module=cycle)
    with pytest.raises(ConflictError, match=mentions("CosineAnnealingLR", "schedule=constant")):
        fit(make_trainer, replacement("schedule_free_adamw"), module=with_scheduler(SCHEDULERS["cosine"]))
    with pytest.raises(NothingToDoError, match=mentions("callback.optimizer_replacement.blocks")):
        fit(make_trainer, replacement("muon"), module=regression(L, nn.Sequential(nn.Linear(WIDTH, 1))))
    with pytest.raises(NothingToDoError, match=mentions("configure_optimizers")):
        fit(make_trainer, replacement("lion"), module=module_of(lambda module: None))
    with pytest.raises(PresetError, match=mentions("options", "no argument 'nesterov'", "there are betas")):
        fit(make_trainer, replacement("lion", options={"nesterov": True}))
    with pytest.raises(PresetError, match=mentions("warmup_steps=6", "at most 5")):
        fit(make_trainer, replacement("lion", schedule="linear", warmup_steps=6))
    with pytest.raises(ConflictError, match=mentions("max_steps", "schedule=constant")):
        fit(make_trainer, replacement("lion", schedule="linear"), max_epochs=-1)


def test_manual_optimization_is_refused(make_trainer: Make) -> None:
    module = module_of()
    module.automatic_optimization = False
    with pytest.raises(ConflictError, match=mentions("manual", "~callback.optimizer_replacement")):
        fit(make_trainer, replacement("lion"), module=module)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(PresetError, match=mentions("warmup_steps=10", "schedule=constant")):
        OptimizerReplacement(warmup_steps=10)
    with pytest.raises(PresetError, match=mentions("options", "optimizer")):
        OptimizerReplacement(optimizer=None, options={"betas": [0.9, 0.95]})
    with pytest.raises(PresetError, match=mentions("options has lr", "optimizer_replacement.lr=0.1")):
        OptimizerReplacement(options={"lr": 0.1})
    with pytest.raises(PresetError, match=mentions("decay_share=0.5", "schedule=wsd")):
        OptimizerReplacement(schedule="linear", decay_share=0.5)
    with pytest.raises(ConflictError, match=mentions("schedule_free_adamw", "schedule=constant")):
        OptimizerReplacement(optimizer="schedule_free_adamw", schedule="cosine")


COMBINED = [
    ("zero_offload", "adamw", "~strategy"),
    ("compact", "muon", "callback.compact_states"),
    ("compact", "adamw_8bit", "optimizer=adamw"),
    ("bf16_true", "schedule_free_adamw", "precision=bf16-mixed"),
]


@pytest.mark.parametrize(("preset", "name", "remedy"), COMBINED)
def test_presets_that_it_does_not_suit_are_refused(preset: str, name: str, remedy: str) -> None:
    overrides = ["+callback=optimizer_replacement", f"callback.optimizer_replacement.optimizer={name}"]
    with pytest.raises(ConflictError, match=mentions("callback.optimizer_replacement", remedy)):
        compose(preset, overrides)
