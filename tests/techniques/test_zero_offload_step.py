"""What modules do around a step under ZeRO-Offload: skip it, take it by hand, clip; and what is refused, and when."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_solo.errors import (
    BudgetError,
    CapabilityError,
    ConflictError,
    NothingToDoError,
    PresetError,
    RefusedStepError,
)
from lightning_solo.optim.schedule_free import ScheduleFreeAdamW
from lightning_solo.seams.homes import for_home
from lightning_solo.techniques.finite_guard.technique import FiniteGuard
from lightning_solo.techniques.zero_offload import technique as zero_offload
from lightning_solo.techniques.zero_offload.technique import ZeroOffloadStrategy
from tests.messages import mentions, nearest
from tests.modules import Stack, loader, regression

pytest.importorskip("deepspeed", reason="listed on Linux only")
pytestmark = [
    pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU"),
]
STAGES = pytest.mark.parametrize("stage", [2, 3])


def strategy(home: ModuleType, **arguments: Any) -> Any:
    return for_home(ZeroOffloadStrategy, home.__name__)(**{"allow_cpu": True, "host_optimizer": "torch", **arguments})


def module(home: ModuleType, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> Any:
    torch.manual_seed(0)
    made = regression(home, Stack(blocks=2))
    made.configure_optimizers = lambda: optimizer(made.parameters(), lr=1e-2)
    return made


@torch.no_grad()
def largest_difference(a: nn.Module, b: nn.Module) -> float:
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True))


# --- a step that is left out, or taken by hand ---


@STAGES
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")  # once per process
@pytest.mark.parametrize(
    ("accumulation", "without_loss"),
    # whole steps, half a window, a window, the first of one, a short last one
    [(1, {0, 3}), (2, {3}), (2, {2, 3}), (4, {0}), (4, {8, 9})],
)
def test_a_micro_batch_without_loss_is_left_out_as_in_a_plain_run(
    home: ModuleType, make_trainer: Any, stage: int, accumulation: int, without_loss: set[int]
) -> None:
    def skipping() -> Any:
        made = module(home)
        whole = made.training_step
        made.training_step = lambda batch, batch_idx: None if batch_idx in without_loss else whole(batch, batch_idx)
        return made

    plain, offloaded = skipping(), skipping()
    make_trainer(home, accumulate_grad_batches=accumulation).fit(plain, loader())
    trainer = make_trainer(home, strategy=strategy(home, stage=stage), accumulate_grad_batches=accumulation)
    trainer.fit(offloaded, loader())
    assert largest_difference(plain, offloaded) == 0
    assert largest_difference(plain, module(home)) > 0


@STAGES
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_the_guard_stops_before_a_step_that_is_not_finite(
    home: ModuleType, make_trainer: Any, stage: int, precision: str, accumulation: int, fault: str
) -> None:
    """The loss before the engine steps; of a gradient the engine's own check, which it passes over in silence."""

    def failing(batches: int) -> Any:
        made = module(home)

        def training_step(batch: Any, batch_idx: int) -> Any:
            loss, wrong = made.step(batch), (made.net(batch[0]) * 0).square().sum()
            if batch_idx != 4:
                return loss
            return loss * float("nan") if fault == "loss" else loss + wrong.sqrt()

        made.training_step = training_step
        arguments = {"strategy": strategy(home, stage=stage), "precision": precision}
        arguments |= {"accumulate_grad_batches": accumulation, "limit_train_batches": batches}
        trainer = make_trainer(home, callbacks=[FiniteGuard()], **arguments)
        return made, trainer

    stopped, trainer = failing(10)
    with pytest.raises(RefusedStepError, match=mentions(fault, "batch", "of epoch 0")) as raised:
        trainer.fit(stopped, loader())
    assert raised.value.step == 4 // accumulation
    expected, trainer = failing(4)
    trainer.fit(expected, loader())
    assert largest_difference(stopped, expected) == 0
    assert largest_difference(stopped, module(home)) > 0


def by_hand(made: Any, every: int = 1, clip: float | None = None) -> Any:
    """Return the module with a training step that steps by itself."""
    made.automatic_optimization = False

    def training_step(batch: Any, batch_idx: int) -> None:
        optimizer = made.optimizers()
        made.manual_backward(made.step(batch) / every)
        if (batch_idx + 1) % every == 0:
            if clip is not None and batch_idx % 2:
                made.clip_gradients(optimizer, gradient_clip_val=clip, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    made.training_step = training_step
    return made


@STAGES
@pytest.mark.parametrize("every", [1, 3])
def test_steps_by_hand_are_those_of_a_plain_run(home: ModuleType, make_trainer: Any, stage: int, every: int) -> None:
    plain, offloaded = by_hand(module(home), every), by_hand(module(home), every)
    make_trainer(home).fit(plain, loader())
    trainer = make_trainer(home, strategy=strategy(home, stage=stage))
    trainer.fit(offloaded, loader())
    assert trainer.global_step == 10 // every
    assert largest_difference(plain, offloaded) == 0


# --- clipping ---


@STAGES
def test_clipping_by_hand_clips_that_step_and_no_other(home: ModuleType, make_trainer: Any, stage: int) -> None:
    plain, offloaded, unclipped = (by_hand(module(home, torch.optim.SGD), clip=clip) for clip in (0.1, 0.1, None))
    make_trainer(home).fit(plain, loader())
    make_trainer(home).fit(unclipped, loader())
    make_trainer(home, strategy=strategy(home, stage=stage)).fit(offloaded, loader())
    assert largest_difference(plain, offloaded) < 1e-6  # the norm is summed in another order
    assert largest_difference(unclipped, offloaded) > 1e-3


@STAGES
def test_a_modules_own_clipping_clips(home: ModuleType, make_trainer: Any, stage: int) -> None:
    def clipping(clips: bool) -> Any:
        made = module(home, torch.optim.SGD)

        def configure(optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
            norm = 0.1 if clips and made.trainer.global_step % 2 else 0.0
            made.clip_gradients(optimizer, gradient_clip_val=norm, gradient_clip_algorithm="norm")

        made.configure_gradient_clipping = configure
        return made

    plain, offloaded, unclipped = clipping(True), clipping(True), clipping(False)
    make_trainer(home).fit(plain, loader())
    make_trainer(home).fit(unclipped, loader())
    trainer = make_trainer(home, strategy=strategy(home, stage=stage))
    trainer.fit(offloaded, loader())
    assert largest_difference(plain, offloaded) < 1e-6
    assert largest_difference(unclipped, offloaded) > 1e-3
    assert "clip_gradients" not in vars(trainer.precision_plugin)


def test_clipping_that_finds_no_gradient_is_told(home: ModuleType, make_trainer: Any) -> None:
    made = module(home)
    made.configure_gradient_clipping = lambda *_, **__: nn.utils.clip_grad_norm_(made.parameters(), 0.1)
    with pytest.warns(UserWarning, match=mentions("self.clip_gradients", ".grad")):
        make_trainer(home, strategy=strategy(home)).fit(made, loader())


# --- refused ---


def without_optimizer(made: Any) -> None:
    made.configure_optimizers = lambda: None


def frozen(made: Any) -> None:
    made.requires_grad_(False)


def two_optimizers(made: Any) -> None:
    parts = (made.net.blocks, made.net.head)
    made.configure_optimizers = lambda: [torch.optim.AdamW(part.parameters()) for part in parts]


def two_by_hand(made: Any) -> None:
    made.automatic_optimization = False
    two_optimizers(made)


def lbfgs(made: Any) -> None:
    made.configure_optimizers = lambda: torch.optim.LBFGS(made.parameters())


def schedule_free(made: Any) -> None:
    made.configure_optimizers = lambda: ScheduleFreeAdamW(made.parameters())


def frozen_group(made: Any) -> None:
    made.net.blocks.requires_grad_(False)
    groups = [{"params": [*part.parameters()]} for part in (made.net.blocks, made.net.head)]
    made.configure_optimizers = lambda: torch.optim.AdamW(groups)


def empty_group(made: Any, schedule: bool = True) -> None:
    optimizer = torch.optim.AdamW([{"params": []}, {"params": [*made.parameters()]}])
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0] * 2)] if schedule else []
    made.configure_optimizers = lambda: ([optimizer], schedules)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (without_optimizer, NothingToDoError, ["configure_optimizers returned None"]),
        (frozen, NothingToDoError, ["requires_grad"]),
        (two_optimizers, ConflictError, ["one optimizer", "several parameter groups"]),
        (two_by_hand, ConflictError, ["configure_optimizers returned 2", "several parameter groups"]),
        (lbfgs, ConflictError, ["LBFGS", "AdamW"]),
        (schedule_free, ConflictError, ["ScheduleFreeAdamW", "AdamW", "baseline"]),
        (frozen_group, ConflictError, ["group 0 of AdamW", "frozen", "leave such groups out"]),
        (empty_group, ConflictError, ["group 0 of AdamW", "no parameters", "leave such groups out"]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*configure_optimizers.* returned .None:UserWarning")
def test_module_that_the_engine_cannot_step_is_refused_without_a_trace(
    home: ModuleType, make_trainer: Any, change: Any, error: type[Exception], message: list[str]
) -> None:
    made = module(home)
    change(made)
    with pytest.raises(error, match=mentions(*message)):
        make_trainer(home, strategy=strategy(home)).fit(made, loader())
    assert not torch.distributed.is_initialized()
    assert largest_difference(made, module(home)) == 0


def test_groups_that_are_left_out_as_the_message_says_lose_no_parameter(home: ModuleType, make_trainer: Any) -> None:
    made, messages = module(home), []
    made.net.blocks.requires_grad_(False)

    def configured() -> Any:
        groups = [{"params": []}, *({"params": part.parameters()} for part in (made.net.blocks, made.net.head))]
        optimizer = torch.optim.AdamW(groups)
        for message in messages:
            optimizer.param_groups = eval(message.split("optimizer.param_groups = ")[1], {"optimizer": optimizer})
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]

    made.configure_optimizers = configured
    with pytest.raises(ConflictError) as refusal:
        make_trainer(home, strategy=strategy(home)).fit(made, loader())
    messages.append(str(refusal.value))
    make_trainer(home, strategy=strategy(home)).fit(made, loader())
    before = dict(module(home).named_parameters())
    changed = {name for name, p in made.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if name.startswith("net.head.")}


def test_a_group_without_parameters_is_trained_without_a_schedule(home: ModuleType, make_trainer: Any) -> None:
    made = module(home)
    empty_group(made, schedule=False)
    make_trainer(home, strategy=strategy(home)).fit(made, loader())
    assert largest_difference(made, module(home)) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "gradient_clip_algorithm='norm'"),
        ({"devices": 2}, "has 2; write devices=1"),
    ],
)
def test_a_trainer_that_it_cannot_follow_is_refused_before_the_model_is_built(
    home: ModuleType, make_trainer: Any, arguments: Any, message: str
) -> None:
    made = module(home)
    made.configure_model = lambda: pytest.fail("the model was built")
    with pytest.raises(ConflictError, match=message):
        make_trainer(home, strategy=strategy(home), **arguments).fit(made, loader())


@pytest.mark.parametrize(
    ("callback", "remedy"),
    [
        ("StochasticWeightAveraging", "checkpoints"),
        ("EMAWeightAveraging", "checkpoints"),
        ("LearningRateFinder", "without ZeRO"),
        ("BatchSizeFinder", "limit_train_batches"),
        ("GradientAccumulationScheduler", "AccumulationSchedule"),
        ("BackboneFinetuning", "requires_grad_"),
    ],
)
def test_a_callback_that_works_on_what_the_engine_holds_is_refused(
    home: ModuleType, make_trainer: Any, callback: str, remedy: str
) -> None:
    arguments = {"StochasticWeightAveraging": [1e-3], "GradientAccumulationScheduler": [{0: 2}]}
    made = getattr(home.callbacks, callback)(*arguments.get(callback, []))
    with pytest.raises(ConflictError, match=f"{callback}.*{remedy}"):
        make_trainer(home, strategy=strategy(home), callbacks=[made]).fit(module(home), loader())
    assert not torch.distributed.is_initialized()


# Dynamo's look at DeepSpeed's hooks
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_part_in_torchs_wrapper_is_refused_at_stage_3_and_trains_in_place(
    home: ModuleType, make_trainer: Any
) -> None:
    wrapped, plain, in_place = module(home), module(home), module(home)
    wrapped.net = torch.compile(wrapped.net, backend="eager")
    with pytest.raises(ConflictError, match=mentions("torch.compile(net)", "net.compile()")):
        make_trainer(home, strategy=strategy(home, stage=3)).fit(wrapped, loader())
    in_place.net.compile(backend="eager")
    make_trainer(home).fit(plain, loader())
    make_trainer(home, strategy=strategy(home, stage=3)).fit(in_place, loader())
    make_trainer(home, strategy=strategy(home, stage=2)).fit(wrapped, loader())
    assert largest_difference(plain, in_place) == largest_difference(plain, wrapped) == 0


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"zero_optimization": {"reduce_bucket_sise": 1}}, PresetError, ["refuses reduce_bucket_sise"]),
        ({"zero_optimization": {"reduce_bucket_size": "many"}}, PresetError, ["refuses reduce_bucket_size", "'many'"]),
        ({"zero_optimisation": {"stage": 3}}, PresetError, [nearest("zero_optimization")]),
        ({"zero_optimization": None}, ConflictError, ["config.zero_optimization"]),
        (
            {"zero_optimization": {"offload_optimizer": None}},
            ConflictError,
            ["config.zero_optimization.offload_optimizer"],
        ),
        ({"zero_force_ds_cpu_optimizer": True}, ConflictError, ["write strategy.host_optimizer=deepspeed"]),
    ],
)
def test_a_configuration_that_deepspeed_would_misread_is_refused_at_once(
    home: ModuleType, config: Any, error: type[Exception], message: list[str]
) -> None:
    with pytest.raises(error, match=mentions(*message)):
        strategy(home, config=config)


def test_a_folder_that_cannot_be_made_is_refused(home: ModuleType, make_trainer: Any) -> None:
    made = module(home)
    with pytest.raises(CapabilityError, match=r"nvme_path='/proc/no.*local SSD|async_io"):
        make_trainer(home, strategy=strategy(home, stage=3, nvme_path="/proc/no")).fit(made, loader())
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("offload_parameters", [False, True])
def test_a_disk_without_room_is_refused_before_anything_is_written(
    home: ModuleType, make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload_parameters: bool
) -> None:
    monkeypatch.setattr(zero_offload, "load_extension", lambda name: None)  # refused before it would be used
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096))
    made = regression(home, Stack(blocks=1, width=256))
    nvme = strategy(home, stage=3, nvme_path=str(tmp_path / "swap"), offload_parameters=offload_parameters)
    with pytest.raises(BudgetError, match=mentions("disk", "4.00 KiB", "missing")) as caught:
        make_trainer(home, strategy=nvme).fit(made, loader(width=256))
    elements = sum(p.numel() for p in made.parameters())  # 2 MiB in fp32; below 1 MiB they stay in memory
    assert caught.value.needed >= 3 * 4 * elements  # master weights and two moments
    assert caught.value.available == 4096
    assert not (tmp_path / "swap").exists() or not any((tmp_path / "swap").iterdir())
    assert not torch.distributed.is_initialized()
