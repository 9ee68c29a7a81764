"""Clipping by the norm of all gradients, whose update blocks on the host take in the next forward."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn

from lightning_solo.errors import BudgetError, ConflictError, GradientError
from lightning_solo.memory import host_slabs
from lightning_solo.memory.weight_ring import WeightRing
from lightning_solo.planner.device import device
from lightning_solo.planner.planner import Planner
from lightning_solo.planner.rules import arrange
from lightning_solo.planner.timeline import BESIDE, TO_DEVICE, TO_HOST, busy
from lightning_solo.planner.tracer import RING_BUFFERS
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.techniques.compact_states.technique import CompactStates
from lightning_solo.techniques.finite_guard.technique import FiniteGuard
from lightning_solo.techniques.gradient_norm.technique import GradientNorm
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from lightning_solo.techniques.weights_on_host.technique import WeightsOnHost
from lightning_solo.units import GiB
from tests.conftest import long
from tests.messages import mentions
from tests.modules import loader, regression
from tests.techniques.test_weights_on_host import BLOCK, BLOCKS, MATRICES, OUTSIDE, WIDTH, Net, Resident, Watch
from tests.techniques.test_weights_on_host import module_of as plain_module
from tests.training import equal

Make = Callable[..., Any]
CLIP = 0.3
"""Below the norms of most steps and above those of some."""


def module_of(net: nn.Module | None = None, optimizer: Any = None, fails_at: int = -1, **attributes: Any) -> Any:
    """Return a module with a learning rate of its own for each step, whose blocks are called in varying order.

    Its attribute ``waited`` has for each step whether blocks waited for an update as its forward began.
    """
    torch.manual_seed(0)
    made = regression(L, Net() if net is None else net, **attributes)

    class Scheduled(type(made)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            step = self.trainer.global_step
            self.net.order = [[0, 1, 2, 3, 4], [4, 0, 0, 2], [1, 3]][step % 3]
            rings = [each.ring for each in self.trainer.callbacks if isinstance(each, WeightsOnHost)]
            self.waited.append(bool(rings) and rings[0].waits)
            if step == fails_at:
                self.net.order = [0, 2]
                self.step(batch)
                raise KeyboardInterrupt("as a user's, within a forward")
            loss = super().training_step(batch, batch_idx)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            kind = optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.3))
            made = kind(self.parameters())
            schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step % 5))
            return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    made.__class__ = Scheduled
    made.waited, made.losses = [], []
    return made


def fit(make_trainer: Make, *callbacks: Any, module: Any = None, batches: int = 4, **options: Any) -> Any:
    """Train with clipping by norm, and return the module."""
    module = module_of() if module is None else module
    torch.manual_seed(1)
    path = {"ckpt_path": options.pop("ckpt_path")} if "ckpt_path" in options else {}
    make_trainer(L, callbacks=[*callbacks], **{"gradient_clip_val": CLIP, **options}).fit(
        module, loader(batches, width=WIDTH), loader(2, width=WIDTH, seed=2), **path
    )
    return module


def assert_same(one: Any, other: Any) -> None:
    assert one.losses == other.losses
    assert equal(one.cpu(), other.cpu())
    assert len({*one.losses}) == len(one.losses)


TECHNIQUES: dict[str, tuple[str, Callable[[], list[Any]]]] = {
    "alone": ("32-true", list),
    "mixed, recomputed": ("bf16-mixed", lambda: [ActivationCheckpointing()]),
    "products kept": ("32-true", lambda: [ActivationCheckpointing(keep="products")]),
    "states on the host": ("bf16-true", lambda: [CompactStates(state_budget=0), ActivationCheckpointing()]),
    "fp32 states on the host": (
        "32-true",
        lambda: [CompactStates(state_budget=0, master_bits=32, moment_bits=32), GradientNorm()],
    ),
    "stochastic": ("bf16-true", lambda: [CompactStates(state_budget=30_000, master_bits="16-stochastic")]),
}
QUICK = {"alone", "states on the host"}


@pytest.mark.any_device
@pytest.mark.parametrize("others", [name if name in QUICK else long(name) for name in TECHNIQUES])
def test_losses_and_weights_are_those_of_resident_weights(make_trainer: Make, others: str) -> None:
    precision, techniques = TECHNIQUES[others]
    options = {"precision": precision, "max_epochs": 2}
    resident = fit(make_trainer, *techniques(), GradientRelease(), **options)
    technique = WeightsOnHost(window=2)
    on_host = fit(make_trainer, technique, *techniques(), **options)
    # but after validation, which ends each epoch
    assert on_host.waited == [False, True, True, True] * 2
    assert technique.ring is not None
    assert_same(on_host, resident)
    if precision == "32-true" and others == "alone":
        assert_same(on_host, fit(make_trainer, **options))  # and of Lightning's own clipping


@pytest.mark.any_device
@pytest.mark.parametrize("clipping", ["deferred", "second_backward"])
def test_blocks_that_the_budget_keeps_are_updated_at_once_with_the_same_norm(make_trainer: Make, clipping: str) -> None:
    technique = WeightsOnHost(weight_budget=OUTSIDE + 2 * BLOCK + 100, window=2, clipping=clipping)
    found = Resident()
    kept = fit(make_trainer, technique, found)
    assert found.stored == tuple(f"net.blocks.{number}" for number in range(BLOCKS - 2))
    assert_same(kept, fit(make_trainer))


@pytest.mark.any_device
def test_blocks_with_buffers_of_their_own_stay_on_the_device_with_their_gradients(make_trainer: Make) -> None:
    def run(*callbacks: Any) -> Any:
        return fit(make_trainer, *callbacks, CompactStates(state_budget=0), precision="bf16-true", batches=6)

    technique = WeightsOnHost(window=BLOCKS, kept_gradients="device")
    on_host = run(technique)
    assert on_host.waited == [False, *[True] * 5]
    assert_same(on_host, run(GradientRelease()))
    assert technique.ring is not None
    assert technique.ring.stores == BLOCKS  # once, at the end of the epoch


class Normed(Net):
    """Counts its forwards, in an attribute and by a normalisation layer, and draws from Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(self.norm(x * random.uniform(0.9, 1.1)))


@pytest.mark.any_device
@pytest.mark.parametrize("others", [name if name == "mixed, recomputed" else long(name) for name in TECHNIQUES])
def test_a_second_backward_leaves_what_one_does(make_trainer: Make, others: str) -> None:
    precision, techniques = TECHNIQUES[others]

    def run(*callbacks: Any) -> Any:
        random.seed(7)
        torch.manual_seed(0)
        return fit(make_trainer, *callbacks, *techniques(), module=module_of(Normed()), precision=precision)

    technique = WeightsOnHost(clipping="second_backward")
    twice, resident = run(technique), run(GradientRelease())
    assert technique.ring is not None
    assert technique.ring.copies > 4 * 3  # blocks of twice as many passes
    assert not any(twice.waited)
    assert_same(twice, resident)
    assert twice.net.calls == resident.net.calls == 4


@pytest.mark.any_device
def test_a_bound_below_zero_clips_nothing_as_in_lightning(make_trainer: Make) -> None:
    runs = [fit(make_trainer, *each, gradient_clip_val=-CLIP) for each in ([], [WeightsOnHost(), GradientRelease()])]
    twice = fit(make_trainer, WeightsOnHost(clipping="second_backward"), gradient_clip_val=-CLIP)
    assert_same(runs[0], fit(make_trainer, gradient_clip_val=None))
    assert_same(runs[1], runs[0])
    assert_same(twice, runs[0])


@pytest.mark.any_device
def test_the_second_backward_is_chosen_where_the_host_has_no_room(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    plain = fit(make_trainer)
    monkeypatch.setattr(host_slabs, "host_memory", lambda: (2**30, 2 * BLOCK))
    for others in ([], [GradientRelease()]):
        assert_same(fit(make_trainer, WeightsOnHost(), *others), plain)
    assert caplog.text.count("backward twice") == 2
    assert "168.63 KiB" in caplog.text
    module = module_of()
    module.net.blocks[3].first.weight.register_hook(lambda grad: grad * math.nan)
    before = {name: p.clone() for name, p in module.state_dict().items()}
    with pytest.raises(GradientError, match=mentions("net.blocks.3.first.weight", "no weight")):
        fit(make_trainer, WeightsOnHost(), module=module)
    assert equal(dict(module.cpu().state_dict()), before)


@pytest.mark.any_device
@pytest.mark.parametrize("name", ["SGD", long("Adafactor"), long("Adam"), long("RMSprop"), long("ASGD")])
def test_optimizers(make_trainer: Make, name: str) -> None:
    def run(*callbacks: Any) -> Any:
        options = {"momentum": 0.9} if name == "SGD" else {}
        return fit(
            make_trainer,
            *callbacks,
            module=module_of(optimizer=lambda p: getattr(torch.optim, name)(p, lr=0.01, **options)),
        )

    on_host = run(WeightsOnHost())
    assert on_host.waited == [False, True, True, True]
    assert_same(on_host, run())


@pytest.mark.long
@pytest.mark.cpu_only("a GPU's kernels sum in another order")
def test_the_norm_of_large_weights_is_lightnings(make_trainer: Make) -> None:
    def module() -> Any:
        torch.manual_seed(0)
        net = Net()
        for block in net.blocks:
            block.first, block.second = nn.Linear(WIDTH, 9000), nn.Linear(9000, WIDTH)  # in two pieces each
        return module_of(net)

    assert_same(fit(make_trainer, WeightsOnHost(), module=module()), fit(make_trainer, module=module()))


@pytest.mark.any_device
def test_whatever_reads_weights_between_steps_finds_the_latest(
    make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    watches = [Watch(), Watch()]
    assert_same(fit(make_trainer, WeightsOnHost(), watches[0]), fit(make_trainer, watches[1]))
    assert "Watch.on_train_batch_end may read weights" in caplog.text
    assert equal(watches[0].states, watches[1].states)
    assert watches[0].places == watches[1].places

    def clamps(trainer: Any, pl_module: Any, *_: Any) -> None:
        for p in pl_module.parameters():
            p.data.clamp_(-0.05, 0.05)

    def run(*callbacks: Any) -> Any:
        return fit(make_trainer, *callbacks, LambdaCallback(on_train_batch_start=clamps), max_epochs=2)

    on_host = run(WeightsOnHost())
    assert_same(on_host, run())
    module, other = module_of(), module_of()
    for each in (module, other):
        each.optimizer_step = _changing_after.__get__(each)
    assert_same(fit(make_trainer, WeightsOnHost(), module=module), fit(make_trainer, module=other))
    assert not any(module.waited)


def _changing_after(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
    L.LightningModule.optimizer_step(self, epoch, batch_idx, optimizer, closure)
    with torch.no_grad():
        self.net.blocks[1].first.weight.mul_(0.9)


@pytest.mark.any_device
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.parametrize("others", [long("alone"), "states on the host"])
def test_checkpoints_within_an_epoch_and_a_resumed_run_are_exact(
    make_trainer: Make, tmp_path: Path, others: str
) -> None:
    precision, techniques = TECHNIQUES[others]

    def run(name: str, technique: Any, **options: Any) -> Any:
        saves = ModelCheckpoint(tmp_path / name, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        module = module_of()
        for block in module.net.blocks:
            block.drop.p = 0.0  # no random states are saved
        options = {"max_epochs": 2, "enable_checkpointing": True, "precision": precision, **options}
        return fit(make_trainer, technique, *techniques(), saves, module=module, **options)

    plain, whole = run("plain", GradientRelease()), run("on_host", WeightsOnHost())
    assert whole.waited[:4] == [False, True, False, True]  # saved after each second
    assert_same(whole, plain)
    for step in (2, 4):
        paths = [str(tmp_path / name / f"step={step}.ckpt") for name in ("plain", "on_host")]
        files = [torch.load(each, weights_only=True, map_location="cpu") for each in paths]
        assert equal(files[0]["state_dict"], files[1]["state_dict"])
        assert equal(*(dict(sorted(file["optimizer_states"][0]["state"].items())) for file in files))
        resumed = run("resumed", GradientRelease(), ckpt_path=paths[0])
        for path in paths:
            again = run("resumed", WeightsOnHost(), ckpt_path=path)
            assert again.losses == resumed.losses
            assert equal(again.cpu(), resumed.cpu())


@pytest.mark.any_device
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.filterwarnings("ignore:.*was called without a model")
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
@pytest.mark.parametrize("others", ["alone", "states on the host"])
def test_a_run_that_ends_within_a_forward_has_the_whole_step_before(
    make_trainer: Make, tmp_path: Path, others: str
) -> None:
    precision, techniques = TECHNIQUES[others]
    files = []
    for name, technique in (("plain", GradientRelease()), ("on_host", WeightsOnHost(window=2))):
        saves = OnExceptionCheckpoint(tmp_path, filename=name)
        module = module_of(fails_at=2)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit(
                make_trainer,
                technique,
                *techniques(),
                saves,
                module=module,
                precision=precision,
                enable_checkpointing=True,
            )
        files.append(torch.load(tmp_path / f"{name}.ckpt", weights_only=True, map_location="cpu"))
        assert equal(dict(module.cpu().state_dict()), dict(files[-1]["state_dict"]))
    assert module.waited == [False, True, True]
    assert equal(files[0]["state_dict"], files[1]["state_dict"])
    assert equal(*(dict(sorted(file["optimizer_states"][0]["state"].items())) for file in files))


@pytest.mark.any_device
@pytest.mark.parametrize("skips", [False, True])
def test_gradients_that_are_not_finite_change_nothing(make_trainer: Make, skips: bool) -> None:
    def run(*callbacks: Any) -> Any:
        module = module_of(fails_at=-1)
        module.net.blocks[3].first.weight.register_hook(
            lambda grad: grad * (math.nan if module.trainer.fit_loop.batch_idx == 2 else 1)
        )
        if skips:
            return fit(make_trainer, *callbacks, FiniteGuard(policy="skip_window"), module=module)
        with pytest.raises(GradientError, match=mentions("net.blocks.3.first.weight", "no weight")):
            fit(make_trainer, *callbacks, module=module)
        return module

    on_host = run(WeightsOnHost())
    assert on_host.waited == [False, True, True, False][: 4 if skips else 3]
    assert_same(on_host, run(GradientRelease()))


@pytest.mark.any_device
@pytest.mark.parametrize("bound", [None, CLIP])
def test_hooks_within_a_step_read_all_weights(
    make_trainer: Make, caplog: pytest.LogCaptureFixture, bound: float | None
) -> None:
    caplog.set_level(logging.INFO)
    hooks = ["on_before_backward", "on_before_zero_grad"]
    if bound:  # else the step is partly taken there
        hooks.append("on_before_optimizer_step")

    def run(technique: Any) -> tuple[Any, list[dict[str, Tensor]]]:
        read: list[dict[str, Tensor]] = []

        def reads(trainer: Any, pl_module: Any, *_: Any) -> None:
            read.append({name: p.detach().cpu().clone() for name, p in pl_module.named_parameters()})

        callback = LambdaCallback(**dict.fromkeys(hooks, reads))
        return fit(make_trainer, technique, callback, module=module_of(), gradient_clip_val=bound), read

    (on_host, weights), (resident, others) = run(WeightsOnHost(window=2)), run(GradientRelease())
    assert f"before {', '.join(f'LambdaCallback.{hook}' for hook in sorted(hooks))}, which" in caplog.text
    assert_same(on_host, resident)
    assert len(weights) == len(hooks) * 4
    assert equal(weights, others)
    assert not equal(weights[0], weights[-1])


@pytest.mark.any_device
def test_weights_are_read_after_a_step_that_was_refused(make_trainer: Make) -> None:
    def run(*callbacks: Any) -> tuple[Any, list[dict[str, Tensor]]]:
        read: list[dict[str, Tensor]] = []

        def reads(trainer: Any, pl_module: Any, *_: Any) -> None:
            read.append({name: p.detach().cpu().clone() for name, p in pl_module.named_parameters()})

        module = module_of()
        module.net.blocks[3].first.weight.register_hook(
            lambda grad: grad * (math.nan if module.trainer.fit_loop.batch_idx == 2 else 1)
        )
        guard = FiniteGuard(policy="skip_window")
        fit(make_trainer, *callbacks, guard, LambdaCallback(on_train_batch_start=reads), module=module)
        assert guard.skipped_windows == 1
        return module, read

    (on_host, weights), (resident, others) = run(WeightsOnHost()), run(GradientRelease())
    assert_same(on_host, resident)
    assert equal(weights, others)
    assert equal(weights[2], weights[3])  # before and after the refused step


@pytest.mark.any_device
def test_an_optimizer_of_matrix_products_steps_without_autocast(make_trainer: Make) -> None:
    def run(technique: Any) -> Any:
        module = module_of(optimizer=lambda p: torch.optim.Adafactor(p, lr=0.01))
        return fit(make_trainer, technique, module=module, precision="bf16-mixed")

    on_host = run(WeightsOnHost())
    assert on_host.waited == [False, True, True, True]
    assert_same(on_host, run(GradientRelease()))


@pytest.mark.any_device
def test_a_fit_that_fails_within_a_forward_takes_the_whole_step_before(make_trainer: Make) -> None:
    def one_by_one(p: Any) -> Any:  # a list's kernels would take states of another device
        return torch.optim.AdamW(p, lr=1e-2, weight_decay=0.3, foreach=False)

    modules = [module_of(fails_at=2, optimizer=one_by_one) for _ in range(2)]
    for module, technique in zip(modules, (GradientRelease(), WeightsOnHost(window=2)), strict=True):
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit(make_trainer, technique, module=module)
    assert modules[1].waited == [False, True, True]
    assert_same(*modules)


@pytest.mark.cpu_only("a ring of its own")
def test_blocks_take_their_updates_and_go_back_ahead_of_their_use() -> None:
    weights = [nn.Parameter(torch.full((2,), float(n))) for n in range(4)]
    ring = WeightRing([[weight] for weight in weights], torch.device("cpu"), window=2)
    updated: list[list[float]] = []

    def step(parameters: list[Tensor]) -> None:
        for p in parameters:
            p.data.add_(1)  # leaves no trace in its version
            updated.append(p.tolist())

    ring.begin()
    assert ring.postpone(weights, step) == []
    ring.load(0)
    assert (updated, ring.stores) == ([[1, 1], [2, 2]], 2)  # its own, and that of the next one
    assert weights[0].tolist() == [1, 1]
    assert weights[1].isnan().all()  # until it is used
    ring.load(1)
    assert (len(updated), ring.stores) == (3, 3)
    ring.load(3)  # and not 2
    assert (ring.waits, ring.stores, ring.copies) == (False, 4, 4)
    ring.rest()
    assert [weight.tolist() for weight in weights] == [[n + 1.0] * 2 for n in range(4)]


@pytest.mark.any_device
def test_gradients_in_bf16_are_rounded_once(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rounded = module_of()
    for p in rounded.parameters():
        p.register_hook(lambda grad: grad.bfloat16().float())
    assert_same(fit(make_trainer, WeightsOnHost(kept_gradients="bf16")), fit(make_trainer, module=rounded))
    assert "2.00 bytes per parameter" in caplog.text


@pytest.mark.any_device
def test_clipping_by_the_modules_own_hook(make_trainer: Make) -> None:
    class Halved(L.LightningModule):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, CLIP / (1 + self.trainer.global_step), "norm")

    def module() -> Any:
        made = module_of()
        made.__class__ = type(
            "Halving", (type(made),), {"configure_gradient_clipping": Halved.configure_gradient_clipping}
        )
        return made

    options = {"gradient_clip_val": None}
    on_host = fit(make_trainer, WeightsOnHost(), module=module(), **options)
    assert_same(on_host, fit(make_trainer, module=module(), **options))
    assert on_host.waited == [False, True, True, True]


@pytest.mark.cpu_only("it moves nothing")
def test_too_small_a_host_and_a_bound_that_comes_late_are_refused(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of()
    hook = {"configure_gradient_clipping": lambda self, optimizer, *_: self.clip_gradients(optimizer, 0.1, "norm")}
    module.__class__ = type("Halving", (type(module),), hook)
    with pytest.raises(ConflictError, match=mentions("configure_gradient_clipping", "clipping=deferred")):
        fit(make_trainer, WeightsOnHost(clipping="second_backward"), module=module)
    with pytest.raises(ConflictError, match=mentions("skip_window", "clipping=deferred", "=stop")):
        fit(make_trainer, WeightsOnHost(clipping="second_backward"), FiniteGuard(policy="skip_window"))
    monkeypatch.setattr(host_slabs, "host_memory", lambda: (2**30, 2 * BLOCK))
    remedies = ("clipping=second_backward", "kept_gradients=bf16", "gradient_clip_algorithm")
    for others in ([], [GradientRelease()]):
        with pytest.raises(BudgetError, match=mentions("gradients", *remedies)):
            fit(make_trainer, WeightsOnHost(clipping="deferred"), *others)


@pytest.mark.parametrize("kept", ["bf16", "device"])
def test_gradients_to_keep_are_refused_where_none_are_kept(kept: str) -> None:
    remedies = ("kept_gradients=exact", "clipping=deferred")
    with pytest.raises(ConflictError, match=mentions(f"kept_gradients={kept}", "clipping=second_backward", *remedies)):
        WeightsOnHost(clipping="second_backward", kept_gradients=kept)


def test_a_plan_updates_blocks_beside_the_forward_by_gradients_and_states_from_the_host() -> None:
    (batch,) = loader(1, width=WIDTH)
    configuration = compose(
        {"precision": "bf16-true", "callback": {"weights_on_host": {}, "compact_states": {"state_budget": 0}}}
    )
    planner = Planner(plain_module, batch, {"gradient_clip_val": 1.0}, device("rtx-4090"), GiB)
    trace = planner.captured(arrange(configuration, planner.trainer), planner.micro_batch or 0)
    first, last = trace.steps
    costs = trace.costs[first:last]
    turns = [number for number, cost in enumerate(costs) if cost.stream == BESIDE]
    assert len(turns) == 2 * BLOCKS
    for begin, end in zip(turns[::2], turns[1::2], strict=True):
        bytes_of = {
            stream: sum(cost.bytes for cost in costs[begin:end] if cost.stream == stream and cost.slot < RING_BUFFERS)
            for stream in (TO_DEVICE, TO_HOST)
        }
        assert bytes_of[TO_HOST] > 2 * MATRICES // 4  # of states, which come and go; gradients in bf16 come alone
        assert bytes_of[TO_DEVICE] - bytes_of[TO_HOST] == 2 * BLOCK // 4
        assert any(cost.stream == TO_HOST and cost.slot >= RING_BUFFERS for cost in costs[begin:end])


def test_a_plan_runs_batches_twice_where_the_host_has_no_room_for_gradients() -> None:
    (batch,) = loader(1, width=WIDTH)
    weights, gradients = BLOCKS * BLOCK, BLOCKS * BLOCK + OUTSIDE
    least = weights + gradients * 20 // 19  # a run leaves a twentieth of what is available
    configuration = compose({"precision": "32-true", "callback": {"weights_on_host": {}}})
    for host, kept in ((least + 1024, gradients), (least - 1024, 0)):
        planner = Planner(module_of, batch, {"gradient_clip_val": 1.0}, device("rtx-4090"), GiB, host_memory=host)
        trace = planner.captured(arrange(configuration, planner.trainer), planner.micro_batch or 0)
        assert 0 <= trace.host_bytes - weights - kept < 4096  # aligned
        assert ("kept gradients" in "".join(trace.assumptions)) is not bool(kept)


@pytest.mark.long
def test_a_plan_has_the_gradients_on_the_host_and_on_the_bus() -> None:
    (batch,) = loader(1, width=WIDTH)
    plain, clipped, twice = (
        Planner(module_of, batch, {"gradient_clip_val": bound}, device("rtx-4090"), GiB).plan(
            "tried", compose({"precision": "32-true", "callback": {"weights_on_host": {"clipping": clipping}}})
        )
        for bound, clipping in ((None, "auto"), (1.0, "auto"), (1.0, "second_backward"))
    )
    gradients = BLOCKS * BLOCK + OUTSIDE
    assert 0 <= clipped.host_bytes - plain.host_bytes - gradients < 4096  # aligned
    for stream in (TO_DEVICE, TO_HOST):
        assert busy(clipped.timeline, stream) > 1.3 * busy(plain.timeline, stream)
    assert twice.host_bytes == plain.host_bytes
    assert twice.seconds_per_step > 1.3 * plain.seconds_per_step
    assert busy(twice.timeline, TO_HOST) < busy(clipped.timeline, TO_HOST)
