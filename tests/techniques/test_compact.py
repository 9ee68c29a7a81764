"""The preset compact acts, trains as AdamW does, holds the bytes it claims, and its files need nothing of ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_solo as solo
from lightning_solo.errors import BudgetError, CapabilityError, ConflictError, GradientError, PresetError
from lightning_solo.machine import is_installed
from lightning_solo.memory.ledger import Ledger
from lightning_solo.optim import back_end_facts, back_ends, building
from lightning_solo.optim.adamw_states import bytes_of, state_layout
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.compressed_moments import LEAST
from lightning_solo.optim.master_weights import MasterWeights
from lightning_solo.seams.run import Run
from lightning_solo.techniques.accumulation_schedule.technique import AccumulationSchedule
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.techniques.compact_states import states
from lightning_solo.techniques.compact_states.technique import CompactStates
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from tests.conftest import long
from tests.messages import lines_with, mentions
from tests.modules import Resumable, Stack, loader, regression

pytestmark = pytest.mark.any_device

Make = Callable[..., Any]
WIDTH = 64  # blocks of two matrices of 64 x 256 = 16,384 elements, which are compressed, and small vectors


OTHERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 1e-4, "momentum": 0.9},
    "NAdam": {"lr": 1e-3},
    "RAdam": {"lr": 1e-3},
    "Adamax": {"lr": 1e-3},
    "Adagrad": {"lr": 1e-2},
    "Adadelta": {"lr": 1.0},
    "RMSprop": {"lr": 1e-3},
    "Rprop": {"lr": 1e-3},
    "ASGD": {"lr": 1e-3},
    "Adafactor": {"lr": 1e-2},
}
BACK_ENDS = [
    pytest.param(name, marks=pytest.mark.skipif(not is_installed(package), reason=f"needs {package}"))
    for name, package in (
        ("torchao_8bit", "torchao"),
        ("torchao_4bit", "torchao"),
        ("bitsandbytes_8bit", "bitsandbytes"),
    )
]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave torchao's step uncompiled: the same operators, without a compiler, and seconds of it for each shape."""
    monkeypatch.setattr(back_ends, "can_compile", lambda device: True)
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def compact(
    master_bits: Any = 24, moment_bits: int = 8, *, release: bool = True, buffer: str = "device", **arguments: Any
) -> list[Any]:
    """Return the callbacks of the preset compact, with other settings; without the second one gradients are kept."""
    states = CompactStates(master_bits, moment_bits, **arguments)
    return [states, GradientRelease(buffer)] if release else [states]


def stable(home: ModuleType) -> Any:
    """Return a regression whose AdamW has an eps with which torchao's 8 bits do not diverge."""
    module = regression(home, net())
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-6)
    return module


def other(home: ModuleType, name: str) -> Any:
    """Return a regression with one of torch's other optimizers."""
    module = regression(home, net())
    module.configure_optimizers = lambda: getattr(torch.optim, name)(module.parameters(), **OTHERS[name])
    return module


def net(blocks: int = 2) -> Stack:
    torch.manual_seed(1)
    return Stack(blocks=blocks, width=WIDTH)


def batches(count: int = 10, batch_size: int = 8) -> Any:
    return loader(batches=count, batch_size=batch_size, width=WIDTH)


def fit(
    home: ModuleType,
    make_trainer: Make,
    techniques: Any = (),
    module: Any = None,
    data: Any = None,
    callbacks: Any = (),
    **kwargs: Any,
) -> Any:
    """Return the Trainer after the fit of a regression."""
    trainer = make_trainer(home, callbacks=[*techniques, *callbacks], **kwargs)
    trainer.fit(module or regression(home, net()), data or batches())
    return trainer


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.lightning_module.named_parameters()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


# --- acted ---


@pytest.mark.every_change
def test_acted_on_weights_states_and_gradients(home: ModuleType, make_trainer: Make) -> None:
    seen = []

    class Watch(home.Callback):  # type: ignore[name-defined,misc]
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            seen.append(sum(p.grad is not None for p in pl_module.parameters()))

    before = net().state_dict()
    trainer = fit(home, make_trainer, compact(), precision="bf16-true", callbacks=[Watch()])
    (optimizer,) = trainer.optimizers
    assert type(optimizer) is CompactAdamW
    assert {p.dtype for p in trainer.lightning_module.parameters()} == {torch.bfloat16}
    large = trainer.lightning_module.net.blocks[0].up.weight
    kinds = {name: value.dtype for name, value in optimizer.state[large].items()}
    assert kinds["exp_avg"] == kinds["correction"] == torch.int8
    assert kinds["exp_avg_sq"] == torch.uint8
    assert seen == [0] * 10  # used and freed before backward returned
    assert not torch.equal(large.float(), before["blocks.0.up.weight"].bfloat16().float())


@pytest.mark.every_change
def test_acted_where_accumulation_and_clipping_keep_gradients(home: ModuleType, make_trainer: Make) -> None:
    techniques, kept = compact(), []

    class Watch(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            kept.append({value.dtype for value in techniques[1].release._sums._kept.values()})

    fit(home, make_trainer, techniques, precision="bf16-true", accumulate_grad_batches=4, callbacks=[Watch()])
    assert kept[:4] == [{torch.float32}] * 3 + [set()]  # in a precision that doesn't saturate; none behind the step


@pytest.mark.every_change
@pytest.mark.parametrize("name", OTHERS)
def test_acted_on_torchs_other_optimizers(
    home: ModuleType, make_trainer: Make, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    with caplog.at_level("INFO"):
        trainer = fit(home, make_trainer, compact(), other(home, name), precision="bf16-true")
    (optimizer,) = trainer.optimizers
    assert type(optimizer) is MasterWeights
    weight = trainer.lightning_module.net.blocks[0].up.weight
    assert weight.dtype == torch.bfloat16
    assert optimizer.state[weight]["correction"].dtype == torch.int8
    assert not torch.equal(weight.float(), net().blocks[0].up.weight.bfloat16().float())
    assert lines_with(caplog.text, "compact_states: optimizer states", f"{optimizer.bytes_per_parameter - 2:.2f} bytes")
    assert f"; {name}" in caplog.text


def test_says_what_it_keeps(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    import lightning.pytorch as home

    with caplog.at_level("INFO"):
        fit(home, make_trainer, compact(), precision="bf16-true", gradient_clip_val=1.0)
    assert lines_with(caplog.text, "compact_states: weights", "2.00 bytes")
    assert lines_with(caplog.text, "compact_states: optimizer states", " 3.")
    assert "net.blocks.0.norm.weight" in caplog.text  # small: its moments are in fp32
    assert lines_with(caplog.text, "gradients", "on the device", "2 bytes")


def test_says_where_states_lie(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    import lightning.pytorch as home

    with caplog.at_level("INFO"):
        fit(home, make_trainer, compact(state_budget=0), precision="bf16-true")
    assert lines_with(caplog.text, "compact_states: optimizer states", "KiB on the device, 1", "KiB on the host")
    assert not lines_with(caplog.text, "compact_states: optimizer states", "first step")
    caplog.clear()
    with caplog.at_level("INFO"):
        fit(home, make_trainer, compact(state_budget="auto"), precision="bf16-true")
    assert len(lines_with(caplog.text, "compact_states: optimizer states", "on the host", "first step")) == 1
    assert len(lines_with(caplog.text, "compact_states: optimizer states")) == 2  # the second time it is known


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_acted_with_another_librarys_optimizer(
    home: ModuleType, make_trainer: Make, caplog: pytest.LogCaptureFixture, back_end: str
) -> None:
    precision = back_end_facts.BACK_ENDS[back_end].precisions[0]
    with caplog.at_level("INFO"):
        trainer = fit(home, make_trainer, compact(back_end=back_end), stable(home), precision=precision)
    (optimizer,) = trainer.optimizers
    weight = trainer.lightning_module.net.blocks[0].up.weight
    assert vars(optimizer)["back_end"] == back_end
    assert weight.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    assert not torch.equal(weight.float(), net().blocks[0].up.weight.to(weight.dtype).float())
    assert all(p.grad is None for p in trainer.lightning_module.parameters())
    each = {"torchao_8bit": "2.1", "torchao_4bit": "1.1", "bitsandbytes_8bit": "2.1"}[back_end]
    assert lines_with(caplog.text, "compact_states: optimizer states", f"{back_end}: {each}")
    assert "net.blocks.0.norm.weight" in caplog.text


# --- parity ---


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"accumulate_grad_batches": 4},  # ten batches: the last window has two
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    ],
    ids=str,
)
@pytest.mark.parametrize("buffer", ["device", long("host")])
def test_parity_with_plain_lightning_in_fp32(make_trainer: Make, arguments: dict[str, Any], buffer: str) -> None:
    import lightning.pytorch as home

    plain = fit(home, make_trainer, (), max_epochs=2, **arguments)
    techniques = compact(master_bits=32, moment_bits=32, buffer=buffer)
    ours = fit(home, make_trainer, techniques, max_epochs=2, **arguments)
    assert_same(weights(ours), weights(plain))
    assert not torch.equal(weights(ours)["net.head.weight"], net().head.weight)
    if "gradient_clip_val" in arguments:  # it did clip
        unclipped = fit(home, make_trainer, (), max_epochs=2)
        assert not torch.equal(weights(ours)["net.head.weight"], weights(unclipped)["net.head.weight"])


@pytest.mark.every_change
def test_parity_of_split_weights_with_an_fp32_master_by_hand(make_trainer: Make) -> None:
    """fp32 masters, rounded to bf16 for each forward, stepped by torch's AdamW: the same bits after 20 steps."""
    import lightning.pytorch as home

    ours = fit(home, make_trainer, compact(32, 32), precision="bf16-true", max_epochs=2)
    module = net()
    masters = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2, foreach=False)
    module.to(torch.bfloat16)
    for _ in range(2):
        for x, y in batches():
            for name, p in module.named_parameters():
                raw = masters[name].view(torch.int32)  # to nearest, ties away from zero
                p.data = ((raw + 0x8000) & -0x10000).view(torch.float32).to(torch.bfloat16)
            module.zero_grad()
            nn.functional.mse_loss(module(x.bfloat16()).float(), y.bfloat16().float()).backward()
            for name, p in module.named_parameters():
                assert p.grad is not None
                masters[name].grad = p.grad.float()
            optimizer.step()
    own = ours.optimizers[0]
    for name, p in ours.lightning_module.named_parameters():
        assert torch.equal(own.master_weight(p), masters[name.removeprefix("net.")]), name


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("arguments", [long({}), {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05}], ids=str)
def test_parity_of_torchs_other_optimizers_in_fp32(make_trainer: Make, name: str, arguments: dict[str, Any]) -> None:
    import lightning.pytorch as home

    plain = fit(home, make_trainer, (), other(home, name), **arguments)
    ours = fit(home, make_trainer, compact(master_bits=32), other(home, name), **arguments)
    assert type(ours.optimizers[0]) is MasterWeights
    assert_same(weights(ours), weights(plain))
    assert not torch.equal(weights(ours)["net.head.weight"], net().head.weight)


@pytest.mark.parametrize("name", OTHERS)
def test_parity_of_torchs_other_optimizers_split(make_trainer: Make, name: str) -> None:
    """fp32 masters, rounded to bf16 for each forward, stepped by torch's own: the same bits, released or not."""
    import lightning.pytorch as home

    runs = [
        fit(home, make_trainer, compact(32, release=release), other(home, name), precision="bf16-true")
        for release in (True, False)
    ]
    device = runs[
        0
    ].strategy.root_device  # torch's optimizers round otherwise on a GPU, where they are for many tensors
    module = net().to(device)
    masters = {key: p.detach().clone() for key, p in module.named_parameters()}
    optimizer = getattr(torch.optim, name)(masters.values(), **OTHERS[name])
    module.to(torch.bfloat16)
    for x, y in ([each.to(device) for each in batch] for batch in batches()):
        for key, p in module.named_parameters():
            raw = masters[key].view(torch.int32)
            p.data = ((raw + 0x8000) & -0x10000).view(torch.float32).to(torch.bfloat16)
        module.zero_grad()
        nn.functional.mse_loss(module(x.bfloat16()).float(), y.bfloat16().float()).backward()
        for key, p in module.named_parameters():
            assert p.grad is not None
            masters[key].grad = p.grad.float()
        optimizer.step()
    for trainer in runs:
        for key, p in trainer.lightning_module.named_parameters():
            assert torch.equal(trainer.optimizers[0].master_weight(p), masters[key.removeprefix("net.")].cpu()), key


@pytest.mark.long
@pytest.mark.every_change
@pytest.mark.parametrize("release", [True, False])
def test_parity_of_compressed_states_in_the_loss(make_trainer: Make, release: bool) -> None:
    import lightning.pytorch as home

    data = batches(40)

    def last_loss(techniques: Any, precision: str) -> float:
        module = regression(home, net(), lr=1e-3)
        trainer = fit(home, make_trainer, techniques, module, data, precision=precision, max_epochs=3)
        trainer.validate(module, data, verbose=False)
        return float(trainer.callback_metrics["validation/loss"])

    plain = last_loss((), "32-true")
    ours = last_loss(compact(release=release), "bf16-true")
    assert ours == pytest.approx(plain, rel=0.05)  # bf16's forward is most of it
    assert plain < 0.6 * WIDTH  # from WIDTH, the variance of a sum of so many normal numbers


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05}], ids=str)
def test_parity_of_another_librarys_optimizer_released(
    make_trainer: Make, back_end: str, arguments: dict[str, Any]
) -> None:
    """In fp32, where nothing is rounded by chance: the bits of the same optimizer, stepped at once; with a schedule."""
    import lightning.pytorch as home

    def run(release: bool) -> Any:
        module = stable(home)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-6)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        module.configure_optimizers = lambda: ([optimizer], [{"scheduler": scheduler, "interval": "step"}])
        techniques = compact(back_end=back_end, release=release)
        return fit(home, make_trainer, techniques, module, precision="32-true", **arguments)

    released = run(True)
    assert_same(weights(released), weights(run(False)))
    steps = 3 if arguments else 10
    assert float(released.optimizers[0].param_groups[0]["lr"]) == pytest.approx(1e-2 / (1 + steps))
    assert not torch.equal(weights(released)["net.head.weight"], net().head.weight)


def test_schedulers_act_on_the_converted_optimizer(make_trainer: Make) -> None:
    import lightning.pytorch as home

    module = regression(home, net())
    optimizer = torch.optim.AdamW(
        [{"params": module.net.blocks.parameters(), "weight_decay": 0.1}, {"params": module.net.head.parameters()}],
        lr=0.1,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    module.configure_optimizers = lambda: ([optimizer], [{"scheduler": scheduler, "interval": "step"}])
    trainer = fit(home, make_trainer, compact(), module, precision="bf16-true")
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 11)
    assert [group["weight_decay"] for group in trainer.optimizers[0].param_groups] == [0.1, 0.01]


def test_two_optimizers_by_hand_keep_their_gradients(
    home: ModuleType, make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TwoByHand(home.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.one, self.two = net(1), net(1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for part, optimizer in zip((self.one, self.two), self.optimizers(), strict=True):
                optimizer.zero_grad()
                self.manual_backward(nn.functional.mse_loss(part(batch[0]).float(), batch[1].float()))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.one, self.two)]

    trained, said = [], []
    monkeypatch.setattr(Run, "info", property(lambda run: said.append))
    for release in (True, False):
        torch.manual_seed(0)
        techniques = compact(release=release)
        trainer = fit(home, make_trainer, techniques, made := TwoByHand(), precision="bf16-true")
        assert [type(optimizer) for optimizer in trainer.optimizers] == [CompactAdamW, CompactAdamW]
        trained.append(made)
    assert len([line for line in said if "gradients" in line and "manual" in line]) == 1  # where release was asked for
    assert not torch.equal(trained[0].two.head.weight.float(), net(1).head.weight.bfloat16().float())
    for p, q in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_compact_optimizer_of_the_users_gets_the_corrections(make_trainer: Make) -> None:
    import lightning.pytorch as home

    module = regression(home, net())
    module.configure_optimizers = lambda: CompactAdamW(module.parameters(), lr=0.0, weight_decay=0.0)
    trainer = fit(home, make_trainer, compact(), module, precision="bf16-true", max_steps=1)
    own, weight = trainer.optimizers[0], module.net.blocks[0].up.weight
    start = net().blocks[0].up.weight
    assert not torch.equal(weight.float(), start)  # the correction is not nothing
    torch.testing.assert_close(own.master_weight(weight), start, rtol=2**-15, atol=0)


@pytest.mark.every_change
@pytest.mark.parametrize("budget", [0, "60KiB", "auto"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_parity_of_states_on_the_host(make_trainer: Make, budget: Any, accumulate: int) -> None:
    import lightning.pytorch as home

    more: dict[str, Any] = {"precision": "bf16-true", "accumulate_grad_batches": accumulate}
    resident = fit(home, make_trainer, compact(), **more)
    ours = fit(home, make_trainer, compact(state_budget=budget, buffer="host"), **more)
    (left,), (right,) = ours.optimizers, resident.optimizers
    assert right.host_bytes == 0
    fits = budget == "auto" and ours.strategy.root_device.type == "cuda"
    # the matrices, or all but the first; none where the device has room
    assert len(left.host_states) == (0 if fits else 3 if budget == "60KiB" else 4)
    assert (left.host_bytes == 0) == fits
    assert_same(weights(ours), weights(resident))
    for p, q in zip(ours.lightning_module.parameters(), resident.lightning_module.parameters(), strict=True):
        assert all(torch.equal(value, right.state[q][name]) for name, value in left.state[p].items())


# --- memory ---


@pytest.mark.parametrize(
    ("master_bits", "moment_bits"), [(24, 8), (32, 8), (32, 32), ("16-stochastic", 8), ("16-stochastic", 4)]
)
def test_memory_of_weights_and_states(make_trainer: Make, master_bits: Any, moment_bits: int) -> None:
    import lightning.pytorch as home

    if moment_bits == 4:
        pytest.importorskip("torchao", reason="4-bit codes are torchao's")
    trainer = fit(home, make_trainer, compact(master_bits, moment_bits), precision="bf16-true")
    parameters = list(trainer.lightning_module.parameters())
    live = Ledger(trainer.lightning_module, trainer.optimizers).live()
    assert live["weights"] == sum(2 * p.numel() for p in parameters)
    states = sum(bytes_of(state_layout(p, master_bits, moment_bits)) for p in parameters)
    assert live["optimizer_states"] == states + 4 * len(parameters)  # and a count of steps each
    assert live["gradients"] == 0


def test_memory_in_backward_is_one_gradient_not_all(make_trainer: Make, device: torch.device) -> None:
    """Four blocks of 2 x 16,384 elements: of 132,801 gradients plain training has all, release one."""
    import lightning.pytorch as home

    def gradients_at_peak(techniques: Any) -> int:
        peaks = []

        class Watch(home.Callback):
            def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
                self.ledger = Ledger(pl_module, trainer.optimizers)
                self.ledger.__enter__()

            def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
                self.ledger.__exit__(None, None, None)
                peaks.append(self.ledger.peak().breakdown["gradients"])

        fit(home, make_trainer, techniques, regression(home, net(4)), max_steps=2, callbacks=[Watch()])
        return max(peaks)

    assert gradients_at_peak(compact(32, 32, release=False)) == 4 * 132801
    # a gradient of 16,384 elements, it times its factor, the root of its second moment; on a CPU its update, too
    expected = 16384 * (4 + 4 + 4 + (4 if device.type == "cpu" else 0))
    assert expected <= gradients_at_peak(compact(32, 32)) <= expected + 4 * 256


# --- trace ---


@pytest.mark.every_change
def test_trace_no_hooks_are_left(home: ModuleType, make_trainer: Make) -> None:
    class Broken(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, *args: Any) -> None:
            raise KeyError("mine")

    for callbacks in ([], [Broken()]):
        module = regression(home, net())
        keys = list(module.state_dict())
        trainer = make_trainer(home, callbacks=[*compact(), *callbacks], precision="bf16-true")
        try:
            trainer.fit(module, batches())
        except KeyError:
            assert callbacks
        assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
        assert "clip_gradients" not in vars(trainer.precision_plugin)
        assert list(module.state_dict()) == keys
        nn.functional.mse_loss(module.net(torch.ones(2, WIDTH).bfloat16()), torch.ones(2, 1).bfloat16()).backward()
        assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("buffer", ["device", "host"])
def test_trace_a_run_resumed_amid_a_window_is_the_undisturbed_one(
    home: ModuleType, make_trainer: Make, tmp_path: Path, buffer: str
) -> None:
    class Save(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                trainer.save_checkpoint(tmp_path / "amid.ckpt")

    def run(*callbacks: Any, **options: Any) -> Any:
        techniques = compact(buffer=buffer)
        trainer = make_trainer(
            home, precision="bf16-true", accumulate_grad_batches=3, gradient_clip_val=0.1,
            callbacks=[*techniques, *callbacks],
        )  # fmt: skip
        trainer.fit(regression(home, net()), Resumable(list(batches())[:8]), **options)
        return trainer

    whole = run(Save())
    resumed = run(ckpt_path=tmp_path / "amid.ckpt", weights_only=True)
    assert_same(weights(resumed), weights(whole))
    assert "window" in torch.load(tmp_path / "amid.ckpt")["optimizer_states"][0]


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
@pytest.mark.parametrize("master_bits", [24, long("16-stochastic")])
@pytest.mark.parametrize("budget", [None, 0, long("auto")])
def test_trace_a_resumed_run_is_the_undisturbed_one(
    home: ModuleType, make_trainer: Make, tmp_path: Path, kind: str, master_bits: Any, budget: Any
) -> None:
    def run(**kwargs: Any) -> Any:
        path = kwargs.pop("ckpt_path", None)
        techniques = compact(master_bits, checkpoint_weights=kind, state_budget=budget)
        trainer = make_trainer(home, callbacks=techniques, precision="bf16-true", **kwargs)
        trainer.fit(regression(home, net()), batches(), **({"ckpt_path": path} if path else {}))
        return trainer

    whole = run(max_epochs=3)
    half = run(max_epochs=2)
    half.save_checkpoint(tmp_path / "half.ckpt", weights_only=False)
    resumed = run(max_epochs=3, ckpt_path=tmp_path / "half.ckpt")
    assert_same(weights(resumed), weights(whole))
    (left,), (right,) = resumed.optimizers, whole.optimizers
    for p, q in zip(resumed.lightning_module.parameters(), whole.lightning_module.parameters(), strict=True):
        assert torch.equal(left.master_weight(p), right.master_weight(q))
        assert all(torch.equal(value, right.state[q][name]) for name, value in left.state[p].items())


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_trace_torchs_other_optimizers_resume(make_trainer: Make, tmp_path: Path, name: str, kind: str) -> None:
    import lightning.pytorch as home

    def run(**kwargs: Any) -> Any:
        path = kwargs.pop("ckpt_path", None)
        trainer = make_trainer(home, callbacks=compact(checkpoint_weights=kind), precision="bf16-true", **kwargs)
        trainer.fit(other(home, name), batches(), **({"ckpt_path": path} if path else {}))
        return trainer

    whole, half = run(max_epochs=3), run(max_epochs=2)
    half.save_checkpoint(tmp_path / "half.ckpt", weights_only=False)
    resumed = run(max_epochs=3, ckpt_path=tmp_path / "half.ckpt")
    assert_same(weights(resumed), weights(whole))
    file = torch.load(tmp_path / "half.ckpt", weights_only=True)
    for key, p in half.lightning_module.named_parameters():
        if kind == "fp32":
            assert torch.equal(file["state_dict"][key], half.optimizers[0].master_weight(p))
        else:
            assert file["state_dict"][key].dtype == torch.bfloat16
    assert any("correction" in state for state in file["optimizer_states"][0]["state"].values()) == (kind == "bf16")


@pytest.mark.long
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_trace_another_librarys_optimizer_resumes(make_trainer: Make, tmp_path: Path, back_end: str) -> None:
    import lightning.pytorch as home

    def run(**kwargs: Any) -> Any:
        path = kwargs.pop("ckpt_path", None)
        trainer = make_trainer(home, callbacks=compact(back_end=back_end), precision="32-true", **kwargs)
        trainer.fit(stable(home), batches(), **({"ckpt_path": path} if path else {}))
        return trainer

    whole, half = run(max_epochs=3), run(max_epochs=2)
    half.save_checkpoint(tmp_path / "half.ckpt", weights_only=False)
    assert_same(weights(run(max_epochs=3, ckpt_path=tmp_path / "half.ckpt")), weights(whole))
    torch.load(tmp_path / "half.ckpt", weights_only=True)  # plain tensors, without the library's classes


def test_trace_what_lightning_moves_to_the_device_is_not_what_lies_on_the_host(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """On a CPU a tensor that is moved to the device stays the same one; here it becomes another, as on a GPU."""
    import lightning.fabric.utilities.optimizer as moving
    import lightning.pytorch as home

    seen: list[int] = []

    class Watch(home.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            (optimizer,) = trainer.optimizers
            for p, tensors in optimizer.host_states.items():
                assert all(optimizer.state[p][name] is tensor for name, tensor in tensors.items())
            seen.append(len(optimizer.host_states))

    if device.type == "cpu":
        monkeypatch.setattr(moving, "move_data_to_device", lambda tensor, device: tensor.clone())
    for budget in (0, "auto"):
        techniques = compact(state_budget=budget)
        first = fit(home, make_trainer, techniques, precision="bf16-true", callbacks=[Watch()])
        first.save_checkpoint(tmp_path / "first.ckpt", weights_only=False)
        again = make_trainer(
            home,
            precision="bf16-true",
            max_epochs=2,
            callbacks=[*compact(state_budget=budget), Watch()],
        )
        again.fit(regression(home, net()), batches(), ckpt_path=tmp_path / "first.ckpt")
    auto = [4] * 10 if device.type == "cpu" else [4] + [0] * 9  # a GPU takes what it has room for behind the first step
    assert seen == [4] * 20 + 2 * auto


def test_one_budget_is_for_all_optimizers(make_trainer: Make) -> None:
    import lightning.pytorch as home

    module = regression(home, net())
    module.automatic_optimization = False
    parts = [list(block.parameters()) for block in module.net.blocks]
    module.configure_optimizers = lambda: [torch.optim.AdamW(part) for part in parts]

    def step(batch: Any, batch_idx: int) -> None:
        module.manual_backward(module.net(batch[0]).float().square().mean())
        for optimizer in module.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    module.training_step = step
    techniques = compact(state_budget="60KiB", release=False)
    trainer = fit(home, make_trainer, techniques, module, precision="bf16-true", max_steps=2)
    assert sum(optimizer.state_bytes - optimizer.host_bytes for optimizer in trainer.optimizers) <= 60 * 1024
    assert [len(optimizer.host_states) for optimizer in trainer.optimizers] == [1, 2]


@pytest.mark.every_change
def test_trace_a_file_loads_where_the_library_is_not(make_trainer: Make, tmp_path: Path) -> None:
    import lightning.pytorch as home

    trainer = fit(home, make_trainer, compact(checkpoint_weights="fp32"), precision="bf16-true")
    trainer.save_checkpoint(tmp_path / "ours.ckpt", weights_only=False)
    program = f"""
import sys
sys.modules["lightning_solo"] = None
import torch
file = torch.load({str(tmp_path / "ours.ckpt")!r}, weights_only=True)
module = torch.nn.Linear({WIDTH}, 1)
head = {{key: value for key, value in file["state_dict"].items() if key.startswith("net.head.")}}
module.load_state_dict({{key.removeprefix("net.head."): value for key, value in head.items()}})
assert module.weight.dtype == file["state_dict"]["net.head.weight"].dtype == torch.float32
print(module.weight.sum().item())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    own = trainer.optimizers[0].master_weight(trainer.lightning_module.net.head.weight)
    assert float(done.stdout) == pytest.approx(own.sum().item(), rel=1e-6)


@pytest.mark.every_change
def test_trace_a_plain_file_is_gone_on_with(make_trainer: Make, tmp_path: Path) -> None:
    """fp32 weights and AdamW's moments of a plain run are split and compressed."""
    import lightning.pytorch as home

    plain = fit(home, make_trainer, ())
    plain.save_checkpoint(tmp_path / "plain.ckpt", weights_only=False)
    trainer = make_trainer(home, callbacks=compact(), precision="bf16-true", max_steps=10)  # none to come
    trainer.fit(regression(home, net()), batches(), ckpt_path=tmp_path / "plain.ckpt")
    own = trainer.optimizers[0]
    for p, q in zip(trainer.lightning_module.parameters(), plain.lightning_module.parameters(), strict=True):
        torch.testing.assert_close(own.master_weight(p), q.detach(), rtol=2**-15, atol=0)
        assert own.state[p]["step"] == 10


def test_trace_sizes_of_files(make_trainer: Make, tmp_path: Path) -> None:
    import lightning.pytorch as home

    sizes = {}
    for name, techniques, precision in (
        ("plain", (), "32-true"),
        ("bf16", compact(), "bf16-true"),
        ("fp32", compact(checkpoint_weights="fp32"), "bf16-true"),
    ):
        module = regression(home, Stack(blocks=2, width=256))  # 4 x 262,144 elements; 0.4 % are not compressed
        trainer = fit(home, make_trainer, techniques, module, loader(2, width=256), precision=precision)
        trainer.save_checkpoint(tmp_path / name, weights_only=False)
        sizes[name] = (tmp_path / name).stat().st_size
    assert sizes["bf16"] <= 0.45 * sizes["plain"]  # (2 + 3.06) / 12
    assert sizes["fp32"] <= 0.55 * sizes["plain"]  # (4 + 2.06) / 12


# --- built in configure_model ---


def in_configure_model(home: ModuleType, make: Callable[[], nn.Module] = net, meta: bool = True) -> Any:
    """Return a module that builds what ``make`` returns when it is fitted, once."""
    module = regression(home, nn.Identity())

    def configure_model() -> None:
        if isinstance(module.net, nn.Identity):
            with torch.device("meta") if meta else nullcontext():
                module.net = make()

    module.configure_model = configure_model
    return module


def frozen_net() -> nn.Module:
    """Return a net whose second block is frozen, once there is the whole."""
    made = net()
    made.blocks[1].requires_grad_(False)
    return made


def assert_same_run(left: Any, right: Any) -> None:
    """Compare weights, masters and states bit for bit."""
    assert_same(weights(left), weights(right))
    (ours,), (theirs,) = left.optimizers, right.optimizers
    for p, q in zip(left.lightning_module.parameters(), right.lightning_module.parameters(), strict=True):
        assert p.dtype == q.dtype
        assert ours.state[p].keys() == theirs.state[q].keys()
        assert all(torch.equal(value, theirs.state[q][name]) for name, value in ours.state[p].items())


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One parameter is open at a time."""
    monkeypatch.setattr(building, "WINDOW_BYTES", 0)


@pytest.mark.every_change
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("master_bits", [24, long(32), long("16-stochastic")])
def test_built_while_fitting_as_in_the_constructor(
    home: ModuleType, make_trainer: Make, meta: bool, precision: str, master_bits: Any
) -> None:
    for model in (net, frozen_net):
        plain = fit(home, make_trainer, compact(master_bits), regression(home, model()), precision=precision)
        module = in_configure_model(home, model, meta)
        ours = fit(home, make_trainer, compact(master_bits), module, precision=precision)
        if precision == "bf16-mixed" and model is frozen_net and master_bits != 32:  # frozen after it was rounded
            for p, q in zip(
                module.net.blocks[1].parameters(), plain.lightning_module.net.blocks[1].parameters(), strict=True
            ):
                assert p.dtype == q.dtype == torch.float32
                torch.testing.assert_close(p, q, rtol=2**-15, atol=0)
        else:
            assert_same_run(ours, plain)


@pytest.mark.every_change
@pytest.mark.usefixtures("narrow")
def test_built_in_fp32_by_the_module_and_split_as_it_comes(home: ModuleType, make_trainer: Make) -> None:
    seen: list[Any] = []

    def watched() -> nn.Module:
        made = net()
        if techniques[0]._weights._building is None:  # under the context, which is kept from its end on
            with torch._C.DisableTorchFunction():
                seen.append({str(p.dtype) for p in made.parameters()})
            seen.append({p.dtype for p in made.parameters()})
        return made

    techniques = compact()
    trainer = make_trainer(home, callbacks=techniques, precision="bf16-true")
    trainer.fit(in_configure_model(home, watched), batches())
    assert seen == [{"torch.float32", "torch.bfloat16"}, {torch.float32}]  # what lies there; what user code sees
    assert "module_init_context" not in vars(trainer.precision_plugin)


def net_and_spare() -> nn.Module:
    """Return a net with a layer that gets no gradient, so that its master is all that there is of it."""
    made = net()
    made.spare = nn.Linear(WIDTH, WIDTH)
    return made


@pytest.mark.every_change
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("kind", ["bf16", "fp32"])
@pytest.mark.parametrize("master_bits", [24, long(32)])
@pytest.mark.parametrize("plain_file", [False, True])
def test_built_and_resumed(
    home: ModuleType, make_trainer: Make, tmp_path: Path, kind: str, master_bits: int, plain_file: bool
) -> None:
    """Weights of the file, never with what the initial ones were off by."""

    def run(module: Any, path: Path | None = None, **kwargs: Any) -> Any:
        trainer = make_trainer(
            home, callbacks=compact(master_bits, checkpoint_weights=kind), precision="bf16-true", **kwargs
        )
        trainer.fit(module, batches(), **({"ckpt_path": path} if path else {}))
        return trainer

    def built() -> Any:
        return in_configure_model(home, net_and_spare)

    file = tmp_path / "half.ckpt"
    by_hand = regression(home, net_and_spare())
    with torch.no_grad():
        by_hand.net.spare.weight.normal_()  # other than the initial one
    half = fit(home, make_trainer, (), by_hand, max_epochs=2) if plain_file else run(by_hand, max_epochs=2)
    half.save_checkpoint(file, weights_only=False)
    whole = run(regression(home, net_and_spare()), file, max_epochs=3)
    assert_same_run(run(built(), file, max_epochs=3), whole)
    loaded = run(built(), file, max_epochs=2)  # nothing to do: what has been loaded
    for p, q in zip(loaded.lightning_module.parameters(), half.lightning_module.parameters(), strict=True):
        expected = q.detach() if plain_file else half.optimizers[0].master_weight(q)
        close = 2**-15 if plain_file and master_bits == 24 else 0
        torch.testing.assert_close(loaded.optimizers[0].master_weight(p), expected, rtol=close, atol=0)


@pytest.mark.every_change
@pytest.mark.usefixtures("narrow")
def test_built_and_loaded_in_fp32_where_it_stays_so(make_trainer: Make, tmp_path: Path) -> None:
    """What bf16-mixed leaves in fp32, since it is frozen, has 24 bits of the file's number, not 8."""
    import lightning.pytorch as home

    by_hand = regression(home, frozen_net())
    by_hand.net.blocks[1].up.weight.normal_()
    fit(home, make_trainer, (), by_hand).save_checkpoint(tmp_path / "plain.ckpt", weights_only=False)
    module = in_configure_model(home, frozen_net)
    trainer = make_trainer(home, callbacks=compact(), precision="bf16-mixed", max_steps=10)
    trainer.fit(module, batches(), ckpt_path=tmp_path / "plain.ckpt")
    ours, theirs = (each.net.blocks[1].up.weight for each in (module, by_hand))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=2**-15, atol=0)


@pytest.mark.every_change
@pytest.mark.usefixtures("narrow")
def test_built_and_failed_is_fp32_again(home: ModuleType, make_trainer: Make, tmp_path: Path) -> None:
    fit(home, make_trainer, ()).save_checkpoint(tmp_path / "plain.ckpt", weights_only=False)
    first = net()

    def half_built(module: Any) -> None:
        module.net = net()
        raise KeyError("mine")

    def break_configure_model(module: Any) -> None:
        module.configure_model = lambda: half_built(module)

    def break_loading(module: Any) -> None:
        module.on_load_checkpoint = lambda checkpoint: checkpoint["mine"]

    def break_setup(module: Any) -> None:
        module.configure_optimizers = lambda: {}["mine"]

    for break_it in (break_configure_model, break_loading, break_setup):
        module = in_configure_model(home)
        whole = module.configure_model
        break_it(module)
        trainer = make_trainer(home, callbacks=compact(32), precision="bf16-true")
        with pytest.raises(KeyError, match="mine"):
            trainer.fit(module, batches(), ckpt_path=tmp_path / "plain.ckpt" if break_it is break_loading else None)
        assert_same({name: p.detach() for name, p in module.net.named_parameters()}, dict(first.named_parameters()))
        assert torch.empty(1).dtype == torch.float32
        assert not registration_hooks()
        assert "module_init_context" not in vars(trainer.precision_plugin)
        module.net(torch.ones(2, WIDTH)).sum().backward()
        module.zero_grad()
        module.configure_model = whole  # which finds that there is a net
        module.configure_optimizers = lambda module=module: torch.optim.AdamW(module.parameters(), lr=1e-2)
        again = fit(home, make_trainer, compact(32), module, precision="bf16-true")
        assert_same_run(again, fit(home, make_trainer, compact(32), regression(home, net()), precision="bf16-true"))


def registration_hooks() -> list[Any]:
    import torch.nn.modules.module as own

    return [*own._global_parameter_registration_hooks.values(), *own._global_module_registration_hooks.values()]


@pytest.mark.every_change
@pytest.mark.usefixtures("narrow")
def test_built_once_and_fitted_twice(home: ModuleType, make_trainer: Make) -> None:
    def twice(module: Any) -> Any:
        fit(home, make_trainer, compact(), module, precision="bf16-true")
        return fit(home, make_trainer, compact(), module, precision="bf16-true")

    assert_same_run(twice(in_configure_model(home)), twice(regression(home, net())))


# --- beside what others do ---


def test_weights_made_zero_by_somebody_stay_numbers(make_trainer: Make) -> None:
    import lightning.pytorch as home

    class Prune(home.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            with torch.no_grad():
                pl_module.net.blocks[0].up.weight[:128] = 0

    trainer = fit(home, make_trainer, compact(), precision="bf16-true", callbacks=[Prune()])
    assert all(p.isfinite().all() for p in trainer.lightning_module.parameters())


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_norms_and_autocast(make_trainer: Make, precision: str) -> None:
    import lightning.pytorch as home

    module = regression(home, nn.Sequential(nn.BatchNorm1d(WIDTH), net(1)))
    trainer = fit(home, make_trainer, compact(), module, precision=precision)
    kinds = {name: p.dtype for name, p in trainer.lightning_module.named_parameters()}
    assert kinds["net.1.blocks.0.up.weight"] == torch.bfloat16
    assert kinds["net.0.weight"] == (torch.bfloat16 if precision == "bf16-true" else torch.float32)


def test_lightnings_own_accumulation_scheduler(home: ModuleType, make_trainer: Make) -> None:
    def run(techniques: Any) -> dict[str, Tensor]:
        schedule = home.callbacks.GradientAccumulationScheduler({0: 1, 1: 5})
        return weights(fit(home, make_trainer, techniques, max_epochs=2, callbacks=[schedule]))

    assert_same(run(compact(32, 32)), run(()))


def by_hand(windows: list[list[int]], device: torch.device, clip: float | None) -> tuple[nn.Module, CompactAdamW]:
    """Return module and optimizer after a plain loop, in fp32 with moments in 8 bits: gradients are a window's mean."""
    module = net().to(device)
    optimizer = CompactAdamW(module.parameters(), lr=1e-2, master_bits=32, moment_bits=8)
    given = [[each.to(device) for each in batch] for batch in batches()]
    for window in windows:
        optimizer.zero_grad()
        for x, y in (given[number] for number in window):
            (nn.functional.mse_loss(module(x), y) / len(window)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip, foreach=False)
        optimizer.step()
    return module.cpu(), optimizer


@pytest.mark.parametrize(
    ("milestones", "by", "sizes", "clip"),
    [
        ([[0, 4]], "epoch", [4, 4, 2], None),
        ([[0, 8]], "epoch", [8, 2], 20.0),  # norms are 27 and 51, that of a quarter of the latter 13
        ([[0, 1], [1, 4], [2, 2]], "step", [1, 4, 2, 2, 1], None),
        ([[0, 3]], "epoch", [3, 3, 3, 1], None),
        ([[0, 16]], "epoch", [10], None),
    ],
    ids=str,
)
@pytest.mark.parametrize("release", [True, False])
def test_accumulation_by_a_schedule_is_that_of_a_loop_by_hand(
    make_trainer: Make, milestones: Any, by: Any, sizes: list[int], clip: float | None, release: bool
) -> None:
    import lightning.pytorch as home

    techniques, schedule = compact(32, 8, release=release), AccumulationSchedule(milestones, by)
    trainer = fit(home, make_trainer, techniques, gradient_clip_val=clip, callbacks=[schedule])
    assert trainer.global_step == len(sizes)
    numbers = iter(range(10))
    windows = [[next(numbers) for _ in range(size)] for size in sizes]
    module, optimizer = by_hand(windows, trainer.strategy.root_device, clip)
    exact = {*sizes} <= {1, 2, 4, 8}  # then Lightning's factor and the window's only change exponents
    for (name, p), q in zip(module.named_parameters(), trainer.lightning_module.parameters(), strict=True):
        ours, expected = trainer.optimizers[0].state[q], optimizer.state[p]
        assert ours["step"] == len(sizes)
        assert p.numel() < LEAST or ours["exp_avg"].dtype == torch.int8
        assert torch.equal(p, q) or not exact, name
        # another last bit of a gradient makes another code of a few numbers, one of 127
        off = (ours["exp_avg"].cpu().float() - expected["exp_avg"].cpu().float()).abs().max()
        assert off <= (0 if exact else 1 if p.numel() >= LEAST else 1e-5 * expected["exp_avg"].abs().max()), name
        assert not torch.equal(p, net().get_parameter(name))


def test_a_short_window_counts_as_a_whole_one_of_its_size(home: ModuleType, make_trainer: Make) -> None:
    """In the compact layout, bit for bit: the last two of ten batches, under a factor of 4 and of 2."""

    def run(milestones: Any) -> dict[str, Tensor]:
        schedule, techniques = AccumulationSchedule(milestones, by="step"), compact()
        return weights(fit(home, make_trainer, techniques, precision="bf16-true", callbacks=[schedule]))

    short = run([[0, 4]])
    assert_same(short, run([[0, 4], [2, 2]]))
    assert not torch.equal(short["net.head.weight"].float(), net().head.weight.bfloat16().float())


@pytest.mark.parametrize("accumulate", [1, 4])
def test_activation_checkpointing_changes_no_bit(
    home: ModuleType, make_trainer: Make, device: torch.device, accumulate: int
) -> None:
    """The preset compact_checkpointing: gradients are released while activations are recomputed."""
    runs = []
    for checkpointing in (False, True):
        forwards: list[int] = []
        module = regression(home, Stack(blocks=2, width=WIDTH, dropout=0.1))
        module.load_state_dict({f"net.{name}": value for name, value in net().state_dict().items()})
        module.net.blocks[0].up.register_forward_hook(lambda *_, seen=forwards: seen.append(1))
        techniques = compact()
        callbacks = [ActivationCheckpointing()] if checkpointing else []
        torch.manual_seed(0)  # of the dropout
        trainer = fit(
            *(home, make_trainer, techniques, module),
            precision="bf16-true",
            accumulate_grad_batches=accumulate,
            callbacks=callbacks,
        )
        assert len(forwards) == (20 if checkpointing else 10)
        assert trainer.optimizers[0].state[module.net.blocks[0].up.weight]["exp_avg"].dtype == torch.int8
        assert all(p.grad is None for p in module.parameters())
        runs.append(trainer)
    assert_same_run(*runs)
    assert not torch.equal(weights(runs[1])["net.head.weight"].float(), net().head.weight.bfloat16().float())


def test_a_window_that_is_left_in_the_middle_is_dropped(home: ModuleType, make_trainer: Make) -> None:
    def run(techniques: Any) -> dict[str, Tensor]:
        module = regression(home, net())
        module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 6 else None
        return weights(fit(home, make_trainer, techniques, module, max_epochs=2, accumulate_grad_batches=4))

    assert_same(run(compact(32, 32)), run(()))


def test_layers_that_are_unfrozen_later(home: ModuleType, make_trainer: Make) -> None:
    class Unfreeze(home.callbacks.BaseFinetuning):  # type: ignore[name-defined,misc]
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net.blocks)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net.blocks, optimizer, lr=1e-2, initial_denom_lr=1)

    def module() -> Any:
        made = regression(home, net())
        made.configure_optimizers = lambda: torch.optim.AdamW(made.net.head.parameters(), lr=1e-2)
        return made

    plain = fit(home, make_trainer, (), module(), max_epochs=3, callbacks=[Unfreeze()])
    ours = compact(32, 32)
    assert_same(weights(fit(home, make_trainer, ours, module(), max_epochs=3, callbacks=[Unfreeze()])), weights(plain))
    split = fit(
        home,
        make_trainer,
        compact(),
        module(),
        max_epochs=3,
        precision="bf16-true",
        callbacks=[Unfreeze()],
    )
    assert split.optimizers[0].state[split.lightning_module.net.blocks[0].up.weight]["step"] == 20


def test_clipping_that_bypasses_the_strategy_is_said(make_trainer: Make) -> None:
    import lightning.pytorch as home

    module = regression(home, net())
    cls = type(module)
    cls.configure_gradient_clipping = lambda self, *args, **kwargs: torch.nn.utils.clip_grad_norm_(self.parameters(), 1)
    with pytest.warns(UserWarning, match=mentions("self.clip_gradients")):
        fit(home, make_trainer, compact(), module, precision="bf16-true")
    other = regression(home, net())
    type(other).on_after_backward = lambda self: None
    with pytest.warns(UserWarning, match=mentions("on_after_backward finds no .grad")):
        fit(home, make_trainer, compact(), other, precision="bf16-true")


def test_hooks_of_the_step_run_once_and_behind_it(make_trainer: Make) -> None:
    import lightning.pytorch as home

    seen: list[bool] = []
    module = regression(home, net())
    start = module.net.head.weight.detach().clone()

    def configure() -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        optimizer.register_step_post_hook(lambda *args: seen.append(torch.equal(module.net.head.weight.cpu(), start)))
        return optimizer

    module.configure_optimizers = configure
    fit(home, make_trainer, compact(32, 32), module, gradient_clip_val=1.0, max_steps=3)
    assert seen == [False] * 3


def test_validate_needs_no_optimizer(make_trainer: Make) -> None:
    import lightning.pytorch as home

    trainer = make_trainer(home, callbacks=compact())  # a precision that is refused in a fit
    assert trainer.validate(regression(home, net()), batches(), verbose=False)[0]["validation/loss"] > 0


def test_a_detached_use_of_a_weight_is_an_error_as_in_torch(make_trainer: Make) -> None:
    import lightning.pytorch as home

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.linear(self.first(x), self.last.weight.detach())
            return self.last(x).sum(1, keepdim=True)

    with pytest.raises(RuntimeError, match="inplace"):
        fit(home, make_trainer, compact(32, 32), regression(home, Twice()))


# --- refusals ---


def leave_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "host_memory", lambda: (2**30, 1000))
    monkeypatch.setattr(states, "free_device_bytes", lambda module: 1000)


def test_refusals_name_what_to_write(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning.pytorch as home

    with pytest.raises(PresetError, match="master_bits=16: write 32, 24, '16-stochastic'"):
        compact(master_bits=16)
    with pytest.raises(
        ConflictError,
        match=mentions("precision=32-true: write precision=bf16-true", "compact_states.master_bits=32"),
    ):
        fit(home, make_trainer, compact())
    sgd = regression(home, net())

    class Mine(torch.optim.SGD):
        pass

    for kind in (Mine, torch.optim.LBFGS, torch.optim.SparseAdam):
        sgd.configure_optimizers = lambda kind=kind: kind(list(sgd.parameters()), lr=1e-4)
        with pytest.raises(ConflictError, match=mentions("torch's SGD", f".{kind.__name__}")):
            fit(home, make_trainer, compact(), sgd, precision="bf16-true")
    sgd.configure_optimizers = lambda: torch.optim.SGD(sgd.parameters(), lr=1e-4)
    released = fit(home, make_trainer, compact(32, 32), sgd)  # nothing is compressed: any that can be released
    assert type(released.optimizers[0]) is torch.optim.SGD
    odd = regression(home, net())
    odd.configure_optimizers = lambda: torch.optim.AdamW(odd.parameters(), amsgrad=True)
    with pytest.raises(ConflictError, match="drop amsgrad"):
        fit(home, make_trainer, compact(), odd, precision="bf16-true")
    sgd = regression(home, net())
    sgd.configure_optimizers = lambda: torch.optim.SGD(sgd.parameters(), lr=1e-4)
    with pytest.raises(ConflictError, match=mentions("AdamW", "host")):
        fit(home, make_trainer, compact(state_budget=0), sgd, precision="bf16-true")
    with pytest.raises(PresetError, match=mentions("compact_states.state_budget='much'", "B, KiB")):
        compact(state_budget="much")
    leave_no_room(monkeypatch)
    with pytest.raises(BudgetError, match="optimizer states"):
        fit(home, make_trainer, compact(), precision="bf16-true")


def test_refusals_of_back_ends_name_what_to_write(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning.pytorch as home

    with pytest.raises(PresetError, match="back_end='bnb': write 'own', 'torchao_8bit'"):
        compact(back_end="bnb")
    with pytest.raises(ConflictError, match=mentions("back_end=torchao_8bit", "drop")):
        compact(master_bits=32, back_end="torchao_8bit")
    refused = "back_end=bitsandbytes_8bit and precision=bf16-true, whose bf16 weights .*write precision=bf16-mixed or"
    with pytest.raises(ConflictError, match=refused):
        fit(home, make_trainer, compact(back_end="bitsandbytes_8bit"), precision="bf16-true")
    with pytest.raises(ConflictError, match=refused):
        solo.trainer_kwargs("compact", overrides=["callback.compact_states.back_end=bitsandbytes_8bit"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CapabilityError, match=mentions("back_end=flashoptim", "CUDA")):
        solo.trainer_kwargs("compact", overrides=["callback.compact_states.back_end=flashoptim"])
    monkeypatch.setattr(back_ends, "is_installed", lambda package: False)
    with pytest.raises(CapabilityError, match=mentions("torchao", "pip install lightning-solo[compact]")):
        fit(home, make_trainer, compact(back_end="torchao_8bit"), precision="bf16-true")
    leave_no_room(monkeypatch)
    with pytest.raises(BudgetError, match=mentions("write callback.compact_states.back_end=own", "moment_bits=4")):
        fit(home, make_trainer, compact(back_end="torchao_8bit"), precision="bf16-true")


def test_nan_is_named_and_nothing_is_touched(make_trainer: Make) -> None:
    import lightning.pytorch as home

    module = regression(home, net())
    module.step = lambda batch: (module.net(batch[0]) * float("nan")).float().mean()
    with pytest.raises(GradientError, match=mentions("net.", "not finite")):
        fit(home, make_trainer, compact(), module, precision="bf16-true", gradient_clip_val=1.0)
    before = {name: p.bfloat16() for name, p in regression(home, net()).named_parameters()}
    assert_same(dict(module.named_parameters()), before)


@pytest.mark.every_change
@pytest.mark.parametrize("preset", [name for name in solo.list_presets() if name.startswith("compact")])
def test_presets_train(home: ModuleType, make_trainer: Make, preset: str) -> None:
    arguments = solo.trainer_kwargs(preset, lightning=home.__name__)
    trainer = make_trainer(home, **arguments, max_steps=3)
    trainer.fit(regression(home, net()), batches())
    assert type(trainer.optimizers[0]) is CompactAdamW
    assert trainer.global_step == 3


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [0, "60KiB", "auto"])
@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05}], ids=str)
def test_gpu_states_on_the_host(make_trainer: Make, budget: Any, arguments: dict[str, Any]) -> None:
    import lightning.pytorch as home

    more = {"precision": "bf16-true", "accelerator": "gpu", "max_epochs": 2, **arguments}
    resident = fit(home, make_trainer, compact(buffer="host"), **more)
    ours = fit(home, make_trainer, compact(state_budget=budget, buffer="host"), **more)
    assert_same(weights(ours), weights(resident))
    (optimizer,) = ours.optimizers
    assert (optimizer.host_bytes > 0) == (budget != "auto")  # all of it fits
    for tensors in optimizer.host_states.values():
        assert all(tensor.is_pinned() for tensor in tensors.values())
