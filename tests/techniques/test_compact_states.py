"""CompactStates alone and with released gradients: it acts, trains as AdamW does, and its files hold plain tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import torch
from torch import Tensor, nn

import lightning_solo as solo
from lightning_solo.errors import BudgetError, CapabilityError, ConflictError, GradientError, PresetError
from lightning_solo.machine import is_installed
from lightning_solo.memory.ledger import Ledger
from lightning_solo.optim import CompactAdamW, MasterWeights, back_end_facts, back_ends
from lightning_solo.optim.adamw_states import bytes_of, state_layout
from lightning_solo.techniques.compact_states import states
from lightning_solo.techniques.compact_states.technique import CompactStates
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from lightning_solo.units import format_bytes
from tests.messages import lines_with, mentions
from tests.modules import Stack, loader, regression
from tests.training import equal

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
    pytest.param(name, marks=[pytest.mark.skipif(not is_installed(package), reason=f"needs {package}"), *marks])
    for name, package, marks in (
        ("torchao_8bit", "torchao", []),
        ("torchao_4bit", "torchao", []),
        (
            "bitsandbytes_8bit",
            "bitsandbytes",
            [pytest.mark.not_simulated("bitsandbytes loads CUDA's libraries for the simulated device")],
        ),
    )
]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run torchao's step uncompiled: the same operators, without the seconds that each shape takes to compile."""
    monkeypatch.setattr(back_ends, "can_compile", lambda device: True)
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def net(blocks: int = 2) -> Stack:
    torch.manual_seed(1)
    return Stack(blocks=blocks, width=WIDTH)


def with_optimizer(home: ModuleType, name: str, **options: Any) -> Any:
    """Return a regression with one of torch's optimizers."""
    module = regression(home, net())
    module.configure_optimizers = lambda: getattr(torch.optim, name)(module.parameters(), **options)
    return module


def fit(
    make_trainer: Make,
    *callbacks: Any,
    module: Any = None,
    home: ModuleType = lightning.pytorch,
    path: Path | None = None,
    **arguments: Any,
) -> Any:
    """Return the Trainer after the fit of a regression on ten batches, in bf16 by default."""
    trainer = make_trainer(home, callbacks=list(callbacks), **{"precision": "bf16-true", **arguments})
    trainer.fit(module or regression(home, net()), loader(10, 8, WIDTH), **({"ckpt_path": path} if path else {}))
    return trainer


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.lightning_module.named_parameters()}


def masters(trainer: Any) -> dict[str, Tensor]:
    (optimizer,) = trainer.optimizers
    return {name: optimizer.master_weight(p).cpu() for name, p in trainer.lightning_module.named_parameters()}


def states_of(trainer: Any) -> list[dict[str, Tensor]]:
    (optimizer,) = trainer.optimizers
    return [dict(sorted(optimizer.state[p].items())) for p in trainer.lightning_module.parameters()]


def assert_same_run(left: Any, right: Any) -> None:
    """Compare weights and states bit for bit."""
    assert equal(weights(left), weights(right))
    assert equal(states_of(left), states_of(right))


def assert_moved(trainer: Any) -> None:
    assert not torch.equal(trainer.lightning_module.net.head.weight.cpu().float(), net().head.weight.bfloat16().float())


def own_strategy(home: ModuleType, device: torch.device) -> Any:
    class Mine(home.strategies.SingleDeviceStrategy):  # type: ignore[name-defined,misc]
        """A strategy of a user's own."""

    return Mine(device)


# --- acted ---


@pytest.mark.every_change
def test_acted_on_weights_and_states(home: ModuleType, make_trainer: Make, device: torch.device) -> None:
    gradients = []

    class Watch(home.Callback):  # type: ignore[name-defined,misc]
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            gradients.append(sum(p.grad is not None for p in pl_module.parameters()))

    trainer = fit(make_trainer, CompactStates(), Watch(), home=home, strategy=own_strategy(home, device))
    (optimizer,) = trainer.optimizers
    weight = trainer.lightning_module.net.blocks[0].up.weight
    kinds = {name: value.dtype for name, value in optimizer.state[weight].items()}
    assert type(optimizer) is CompactAdamW
    assert {p.dtype for p in trainer.lightning_module.parameters()} == {torch.bfloat16}
    assert kinds["exp_avg"] == kinds["correction"] == torch.int8
    assert kinds["exp_avg_sq"] == torch.uint8
    assert gradients == [len(list(trainer.lightning_module.parameters()))] * 10  # kept until the step


@pytest.mark.parametrize(
    ("precision", "bits", "name"),
    [
        ("bf16-true", (24, 8), "AdamW"),
        ("bf16-mixed", (32, 8), "AdamW"),  # vectors stay in fp32
        ("32-true", (32, 8), "AdamW"),
        ("bf16-true", (24, 8), "Adafactor"),
        ("32-true", (32, 8), "SGD"),
    ],
)
def test_logged_bytes_are_those_of_the_tensors(
    make_trainer: Make, caplog: pytest.LogCaptureFixture, precision: str, bits: Any, name: str
) -> None:
    with caplog.at_level("INFO"):
        module = with_optimizer(lightning.pytorch, name, **OTHERS.get(name, {}))
        trainer = fit(make_trainer, CompactStates(*bits), module=module, precision=precision)
    parameters = list(module.parameters())
    count, stored = sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters)
    (optimizer,) = trainer.optimizers
    tensors = [x for p in parameters for x in optimizer.state[p].values() if isinstance(x, Tensor) and x.dim()]
    each = {"weights": stored, "optimizer states": sum(x.nbytes for x in tensors)}  # without counts of steps
    for what, size in each.items():
        words = f"{size / count:.2f} bytes per parameter: {format_bytes(size)} on the device"
        assert lines_with(caplog.text, f"compact_states: {what}", words)
    if name == "AdamW":
        assert "net.blocks.0.norm.weight" in caplog.text  # small: its moments are in fp32


def test_log_says_where_states_are_stored(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(make_trainer, CompactStates(state_budget=0))
    assert lines_with(caplog.text, "compact_states: optimizer states", "KiB on the device, 1", "KiB on the host")
    assert not lines_with(caplog.text, "compact_states: optimizer states", "first step")
    caplog.clear()
    with caplog.at_level("INFO"):
        fit(make_trainer, CompactStates(state_budget="auto"))
    assert len(lines_with(caplog.text, "compact_states: optimizer states", "on the host", "first step")) == 1
    assert len(lines_with(caplog.text, "compact_states: optimizer states")) == 2  # the second time it is known


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_acted_with_another_librarys_optimizer(
    home: ModuleType, make_trainer: Make, caplog: pytest.LogCaptureFixture, back_end: str
) -> None:
    precision = back_end_facts.BACK_ENDS[back_end].precisions[0]
    module = with_optimizer(home, "AdamW", lr=1e-2, eps=1e-6)
    with caplog.at_level("INFO"):
        trainer = fit(make_trainer, CompactStates(back_end=back_end), home=home, module=module, precision=precision)
    weight = module.net.blocks[0].up.weight
    assert vars(trainer.optimizers[0])["back_end"] == back_end
    assert weight.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    assert_moved(trainer)
    each = {"torchao_8bit": "2.1", "torchao_4bit": "1.1", "bitsandbytes_8bit": "2.1"}[back_end]
    assert lines_with(caplog.text, "compact_states: optimizer states", f"{back_end}: {each}")
    assert "net.blocks.0.norm.weight" in caplog.text


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_vectors_stay_in_fp32_under_autocast(make_trainer: Make, precision: str) -> None:
    module = regression(lightning.pytorch, nn.Sequential(nn.BatchNorm1d(WIDTH), net(1)))
    fit(make_trainer, CompactStates(), module=module, precision=precision)
    assert module.net[1].blocks[0].up.weight.dtype == torch.bfloat16
    assert module.net[0].weight.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)


@pytest.mark.parametrize("form", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_weights_with_spectral_norm_stay_in_fp32_under_autocast(make_trainer: Make, form: Any) -> None:
    module = regression(lightning.pytorch, nn.Sequential(nn.Linear(WIDTH, 8), form(nn.Linear(8, 8)), nn.Linear(8, 1)))
    fit(make_trainer, CompactStates(), module=module, precision="bf16-mixed", max_steps=2)
    kinds = [p.dtype for p in module.parameters() if p.dim() > 1]
    assert kinds == [torch.bfloat16, torch.float32, torch.bfloat16]


# --- parity ---


@pytest.mark.parametrize("accumulate", [1, 4])
def test_parity_in_either_order_with_released_gradients(home: ModuleType, make_trainer: Make, accumulate: int) -> None:
    def run(*callbacks: Any) -> Any:
        return fit(make_trainer, *callbacks, home=home, accumulate_grad_batches=accumulate)

    one = run(CompactStates(), GradientRelease())
    assert_same_run(run(GradientRelease(), CompactStates()), one)
    assert_moved(one)


def test_parity_with_a_plain_run_in_fp32(home: ModuleType, make_trainer: Make) -> None:
    plain, ours = (
        fit(make_trainer, *callbacks, home=home, precision="32-true", gradient_clip_val=0.05)
        for callbacks in ((), (CompactStates(32, 32),))
    )
    assert equal(weights(ours), weights(plain))


@pytest.mark.parametrize("name", ["SGD", "Adafactor"])
def test_parity_of_other_optimizers_in_fp32(make_trainer: Make, name: str) -> None:
    plain, ours = (
        fit(
            *(make_trainer, *callbacks),
            module=with_optimizer(lightning.pytorch, name, **OTHERS[name]),
            precision="32-true",
            accumulate_grad_batches=4,
            gradient_clip_val=0.05,
        )
        for callbacks in ((), (CompactStates(32), GradientRelease()))
    )
    assert type(ours.optimizers[0]) is MasterWeights
    assert equal(weights(ours), weights(plain))
    assert_moved(ours)


@pytest.mark.every_change
@pytest.mark.parametrize("name", ["AdamW", *OTHERS])
def test_parity_of_split_weights_with_fp32_masters_by_hand(make_trainer: Make, name: str) -> None:
    """fp32 masters, rounded to bf16 for each forward, stepped by torch's own: the same bits, released or not."""
    options = {"lr": 1e-2, "foreach": False} if name == "AdamW" else OTHERS[name]
    runs = [
        fit(
            *(make_trainer, CompactStates(32, 32 if name == "AdamW" else 8), *callbacks),
            module=with_optimizer(lightning.pytorch, name, **options),
        )
        for callbacks in ((), (GradientRelease(),))
    ]
    device = runs[0].strategy.root_device  # on a GPU torch steps many tensors at once, which rounds otherwise
    module = net().to(device)
    by_hand = {key: p.detach().clone() for key, p in module.named_parameters()}
    optimizer = getattr(torch.optim, name)(by_hand.values(), **options)
    module.to(torch.bfloat16)
    for x, y in ([each.to(device) for each in batch] for batch in loader(10, 8, WIDTH)):
        for key, p in module.named_parameters():
            raw = by_hand[key].view(torch.int32)  # to the nearest, ties away from zero
            p.data = ((raw + 0x8000) & -0x10000).view(torch.float32).to(torch.bfloat16)
        module.zero_grad()
        nn.functional.mse_loss(module(x.bfloat16()).float(), y.bfloat16().float()).backward()
        for key, p in module.named_parameters():
            assert p.grad is not None
            by_hand[key].grad = p.grad.float()
        optimizer.step()
    for trainer in runs:
        assert type(trainer.optimizers[0]) is (CompactAdamW if name == "AdamW" else MasterWeights)
        assert equal(masters(trainer), {f"net.{key}": master.cpu() for key, master in by_hand.items()})


@pytest.mark.long
@pytest.mark.every_change
def test_parity_of_compressed_states_in_the_loss(make_trainer: Make) -> None:
    data = loader(40, 8, WIDTH)

    def last_loss(*callbacks: Any, **arguments: Any) -> float:
        module = regression(lightning.pytorch, net(), lr=1e-3)
        trainer = make_trainer(lightning.pytorch, callbacks=list(callbacks), max_epochs=3, **arguments)
        trainer.fit(module, data)
        trainer.validate(module, data, verbose=False)
        return float(trainer.callback_metrics["validation/loss"])

    plain = last_loss()
    assert last_loss(CompactStates(), precision="bf16-true") == pytest.approx(plain, rel=0.05)  # mostly bf16's forward
    assert plain < 0.6 * WIDTH  # from WIDTH, the variance of a sum of as many normal numbers


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05}], ids=str)
def test_parity_of_another_librarys_optimizer_released(
    make_trainer: Make, back_end: str, arguments: dict[str, Any]
) -> None:
    """In fp32, where nothing is rounded at random: the bits of the same optimizer stepped at once, with a schedule."""

    def run(*callbacks: Any) -> Any:
        module = regression(lightning.pytorch, net())
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-6)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        module.configure_optimizers = lambda: ([optimizer], [{"scheduler": scheduler, "interval": "step"}])
        technique = CompactStates(back_end=back_end)
        return fit(make_trainer, technique, *callbacks, module=module, precision="32-true", **arguments)

    released = run(GradientRelease())
    assert equal(weights(released), weights(run()))
    assert_moved(released)
    steps = 3 if arguments else 10
    assert float(released.optimizers[0].param_groups[0]["lr"]) == pytest.approx(1e-2 / (1 + steps))


@pytest.mark.every_change
@pytest.mark.parametrize("budget", [0, "60KiB", "auto"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_parity_of_states_on_the_host(make_trainer: Make, budget: Any, accumulate: int) -> None:
    def run(budget: Any, buffer: str) -> Any:
        callbacks = CompactStates(state_budget=budget), GradientRelease(buffer)
        return fit(make_trainer, *callbacks, accumulate_grad_batches=accumulate)

    resident, ours = run(None, "device"), run(budget, "host")
    (optimizer,) = ours.optimizers
    fits = budget == "auto" and ours.strategy.root_device.type == "cuda"
    # the matrices, or all but the first; none where the device has room
    assert len(optimizer.host_states) == (0 if fits else 3 if budget == "60KiB" else 4)
    assert resident.optimizers[0].host_bytes == 0
    assert_same_run(ours, resident)


def test_weights_that_others_set_to_zero_stay_finite(make_trainer: Make) -> None:
    class Prune(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            with torch.no_grad():
                pl_module.net.blocks[0].up.weight[:128] = 0

    trainer = fit(make_trainer, CompactStates(), Prune())
    assert all(p.isfinite().all() for p in trainer.lightning_module.parameters())


# --- the user's optimizers ---


def test_schedulers_and_groups_act_on_the_converted_optimizer(make_trainer: Make) -> None:
    module = regression(lightning.pytorch, net())
    groups = [
        {"params": module.net.blocks.parameters(), "weight_decay": 0.1},
        {"params": module.net.head.parameters()},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    module.configure_optimizers = lambda: ([optimizer], [{"scheduler": scheduler, "interval": "step"}])
    trainer = fit(make_trainer, CompactStates(), module=module)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 11)
    assert [group["weight_decay"] for group in trainer.optimizers[0].param_groups] == [0.1, 0.01]


def test_compact_optimizer_of_the_user_gets_the_corrections(make_trainer: Make) -> None:
    module = regression(lightning.pytorch, net())
    module.configure_optimizers = lambda: CompactAdamW(module.parameters(), lr=0.0, weight_decay=0.0)
    trainer = fit(make_trainer, CompactStates(), module=module, max_steps=1)
    weight, start = module.net.blocks[0].up.weight, net().blocks[0].up.weight
    assert not torch.equal(weight.float(), start)  # the correction is not nothing
    torch.testing.assert_close(trainer.optimizers[0].master_weight(weight), start, rtol=2**-15, atol=0)


def test_one_budget_is_for_all_optimizers(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    module = regression(lightning.pytorch, net())
    module.automatic_optimization = False
    parts = [list(block.parameters()) for block in module.net.blocks]
    module.configure_optimizers = lambda: [torch.optim.AdamW(part) for part in parts]

    def step(batch: Any, batch_idx: int) -> None:
        module.manual_backward(module.net(batch[0]).float().square().mean())
        for optimizer in module.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    module.training_step = step
    with caplog.at_level("INFO"):
        trainer = fit(make_trainer, CompactStates(state_budget="60KiB"), module=module, max_steps=2)
    for number in range(len(parts)):
        assert lines_with(caplog.text, "compact_states", f"optimizer {number},")
    assert sum(optimizer.state_bytes - optimizer.host_bytes for optimizer in trainer.optimizers) <= 60 * 1024
    assert [len(optimizer.host_states) for optimizer in trainer.optimizers] == [1, 2]


def test_layers_that_are_unfrozen_later_are_split(home: ModuleType, make_trainer: Make) -> None:
    class Unfreeze(home.callbacks.BaseFinetuning):  # type: ignore[name-defined,misc]
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net.blocks)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net.blocks, optimizer, lr=1e-2, initial_denom_lr=1)

    module = regression(home, net())
    module.configure_optimizers = lambda: torch.optim.AdamW(module.net.head.parameters(), lr=1e-2)
    trainer = fit(make_trainer, CompactStates(), Unfreeze(), home=home, module=module, max_epochs=3)
    assert trainer.optimizers[0].state[module.net.blocks[0].up.weight]["step"] == 20


@pytest.mark.parametrize("optimizers", [["AdamW"], ["Adam"], ["SGD"], ["Adam", "AdamW"], ["AdamW", "AdamW"]], ids=str)
@pytest.mark.parametrize("schedule", ["none", "plain", "named"])
def test_learning_rate_monitors_name_the_users_optimizers(
    home: ModuleType, make_trainer: Make, optimizers: list[str], schedule: str
) -> None:
    def keys(*callbacks: Any) -> list[str]:
        torch.manual_seed(1)
        module = regression(home, Stack(blocks=2))
        if len(optimizers) == 2:
            module.automatic_optimization = False
        parts = [module.net.blocks, module.net.head][: len(optimizers)]
        groups = [[{"params": [p]} for p in [*part.parameters()][:2]] for part in parts]
        created = [getattr(torch.optim, n)(g, lr=1e-3) for n, g in zip(optimizers, groups, strict=True)]
        config: dict[str, Any] = {"name": "mine"} if schedule == "named" else {}
        schedulers = [
            {"scheduler": torch.optim.lr_scheduler.ConstantLR(each), **config} for each in created if schedule != "none"
        ]
        module.configure_optimizers = lambda: (created, schedulers)
        logger = home.loggers.logger.DummyLogger()
        monitor = home.callbacks.LearningRateMonitor("step")
        arguments = {"precision": "bf16-true", "max_steps": 2, "log_every_n_steps": 1}
        trainer = make_trainer(home, logger=logger, callbacks=[monitor, *callbacks], **arguments)
        trainer.fit(module, loader(2))
        assert "_check_duplicates_and_update_name" not in vars(monitor)
        return sorted(monitor.lrs)

    plain = keys()
    assert keys(CompactStates()) == plain
    assert all(("mine" if schedule == "named" else optimizers[0]) in key for key in plain[:1])


# --- memory ---


@pytest.mark.parametrize(
    ("master_bits", "moment_bits"), [(24, 8), (32, 8), (32, 32), ("16-stochastic", 8), ("16-stochastic", 4)]
)
def test_memory_of_weights_and_states(make_trainer: Make, master_bits: Any, moment_bits: int) -> None:
    if moment_bits == 4:
        pytest.importorskip("torchao", reason="4-bit codes are torchao's")
    trainer = fit(make_trainer, CompactStates(master_bits, moment_bits))
    parameters = list(trainer.lightning_module.parameters())
    live = Ledger(trainer.lightning_module, trainer.optimizers).live()
    assert live["weights"] == sum(2 * p.numel() for p in parameters)
    stored = sum(bytes_of(state_layout(p, master_bits, moment_bits)) for p in parameters)
    assert live["optimizer_states"] == stored + 4 * len(parameters)  # and a count of steps each


# --- trace ---


@pytest.mark.parametrize("moment", ["configure_optimizers", "training_step"])
def test_trace_of_a_failing_fit(home: ModuleType, make_trainer: Make, moment: str) -> None:
    module = regression(home, net())
    technique = CompactStates(32)
    trainer = make_trainer(home, precision="bf16-true", callbacks=[technique])
    strategy = type(trainer.strategy)

    def fail(*args: Any) -> None:
        raise KeyError("mine")

    setattr(module, moment, fail)
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(module, loader(2, 8, WIDTH))
    assert type(trainer.strategy) is strategy
    assert technique.ctx is None
    assert "module_init_context" not in vars(trainer.precision_plugin)
    if moment == "configure_optimizers":  # never set up: all bits are there again
        assert equal(module.net, net())


@pytest.mark.long
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_trace_another_librarys_optimizer_resumes(make_trainer: Make, tmp_path: Path, back_end: str) -> None:
    def run(**arguments: Any) -> Any:
        module = with_optimizer(lightning.pytorch, "AdamW", lr=1e-2, eps=1e-6)
        callbacks = CompactStates(back_end=back_end), GradientRelease()
        return fit(make_trainer, *callbacks, module=module, precision="32-true", **arguments)

    whole, half = run(max_epochs=3), run(max_epochs=2)
    half.save_checkpoint(tmp_path / "half.ckpt", weights_only=False)
    assert equal(weights(run(max_epochs=3, path=tmp_path / "half.ckpt")), weights(whole))
    torch.load(tmp_path / "half.ckpt", weights_only=True)  # plain tensors, without the library's classes


def test_trace_validation_is_left_alone(home: ModuleType, make_trainer: Make) -> None:
    module = regression(home, net())
    trainer = make_trainer(home, callbacks=[CompactStates()])  # a precision that a fit refuses
    trainer.validate(module, loader(2, 8, WIDTH), verbose=False)
    assert {p.dtype for p in module.parameters()} == {torch.float32}


# --- refusals ---


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 bytes are free on host and device."""
    monkeypatch.setattr(states, "host_memory", lambda: (2**30, 1000))
    monkeypatch.setattr(states, "free_device_bytes", lambda module: 1000)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"master_bits": 16}, PresetError, ["compact_states.master_bits=16: write 32, 24 or '16-stochastic'"]),
        ({"state_budget": "much"}, PresetError, ["compact_states.state_budget='much'", "B, KiB"]),
        ({"back_end": "bnb"}, PresetError, ["compact_states.back_end='bnb': write 'own', 'torchao_8bit'"]),
        (
            {"master_bits": 32, "back_end": "torchao_8bit"},
            ConflictError,
            ["callback.compact_states.back_end=torchao_8bit", "drop", "write callback.compact_states.back_end=own"],
        ),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error, match=mentions(*words)):
        CompactStates(**settings)


def test_precisions_that_are_refused(home: ModuleType, make_trainer: Make) -> None:
    words = "callback.compact_states.master_bits=24 and precision=32-true", "compact_states.master_bits=32"
    with pytest.raises(ConflictError, match=mentions(*words, "write precision=bf16-true")):
        fit(make_trainer, CompactStates(), home=home, precision="32-true")
    with pytest.raises(ConflictError, match="two CompactStates"):
        fit(make_trainer, CompactStates(), CompactStates(32), home=home)


class Mine(torch.optim.SGD):
    """An optimizer of a user's own."""


@pytest.mark.parametrize(
    ("kind", "options", "settings", "words"),
    [
        (Mine, {}, {}, ["torch's SGD", ".Mine", "~callback.compact_states precision=32-true"]),
        (torch.optim.LBFGS, {}, {}, ["torch's SGD", ".LBFGS"]),
        (torch.optim.SparseAdam, {}, {}, ["torch's SGD", ".SparseAdam"]),
        (torch.optim.AdamW, {"amsgrad": True}, {}, ["callback.compact_states", "write amsgrad=False"]),
        (torch.optim.SGD, {}, {"state_budget": 0}, ["write callback.compact_states.state_budget=null", "AdamW"]),
        (CompactAdamW, {}, {"state_budget": 0}, ["write CompactAdamW(..., state_budget=0)", "state_budget=null"]),
    ],
)
def test_optimizers_that_are_refused(
    make_trainer: Make, kind: Any, options: dict[str, Any], settings: dict[str, Any], words: list[str]
) -> None:
    module = regression(lightning.pytorch, net())
    module.configure_optimizers = lambda: kind(list(module.parameters()), lr=1e-4, **options)
    with pytest.raises(ConflictError, match=mentions(*words)):
        fit(make_trainer, CompactStates(**settings), module=module)


def test_any_optimizer_is_left_alone_where_nothing_is_compressed(make_trainer: Make) -> None:
    module = with_optimizer(lightning.pytorch, "SGD", lr=1e-4)
    trainer = fit(make_trainer, CompactStates(32, 32), module=module, precision="32-true")
    assert type(trainer.optimizers[0]) is torch.optim.SGD


def test_back_ends_that_are_refused(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = "back_end=bitsandbytes_8bit and precision=bf16-true, whose bf16 weights .*write precision=bf16-mixed or"
    with pytest.raises(ConflictError, match=refused):
        fit(make_trainer, CompactStates(back_end="bitsandbytes_8bit"))
    with pytest.raises(ConflictError, match=refused):
        solo.trainer_kwargs("compact", overrides=["callback.compact_states.back_end=bitsandbytes_8bit"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CapabilityError, match=mentions("back_end=flashoptim", "CUDA")):
        solo.trainer_kwargs("compact", overrides=["callback.compact_states.back_end=flashoptim"])
    monkeypatch.setattr(back_ends, "is_installed", lambda package: False)
    with pytest.raises(CapabilityError, match=mentions("torchao", "pip install lightning-solo[compact]")):
        fit(make_trainer, CompactStates(back_end="torchao_8bit"))


@pytest.mark.usefixtures("no_room")
@pytest.mark.parametrize("back_end", ["own", "torchao_8bit"])
def test_states_without_room_are_refused(make_trainer: Make, back_end: str) -> None:
    words = ["optimizer states", "write callback.compact_states.", "moment_bits=4"]
    words += ["callback.compact_states.back_end=own"] * (back_end != "own")
    with pytest.raises(BudgetError, match=mentions(*words)):
        fit(make_trainer, CompactStates(back_end=back_end))


def test_gradient_that_is_not_finite_is_named_and_nothing_is_touched(make_trainer: Make) -> None:
    module = regression(lightning.pytorch, net())
    module.step = lambda batch: (module.net(batch[0]) * float("nan")).float().mean()
    with pytest.raises(GradientError, match=mentions("net.", "not finite")):
        fit(make_trainer, CompactStates(), module=module)
    assert equal(module.net, net().bfloat16())


def test_a_copy_is_built_from_its_words() -> None:
    technique = CompactStates("16-stochastic", 8, "2GiB", "fp32")
    assert repr(eval(repr(technique))) == repr(technique)
    assert technique.state_budget == "2GiB"


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [0, "60KiB", "auto"])
@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05}], ids=str)
def test_gpu_states_on_the_host(make_trainer: Make, budget: Any, arguments: dict[str, Any]) -> None:
    resident, ours = (
        fit(
            *(make_trainer, CompactStates(state_budget=each), GradientRelease("host")),
            accelerator="gpu", max_epochs=2, **arguments,
        )
        for each in (None, budget)
    )  # fmt: skip
    assert equal(weights(ours), weights(resident))
    (optimizer,) = ours.optimizers
    assert (optimizer.host_bytes > 0) == (budget != "auto")  # all of it fits
    for tensors in optimizer.host_states.values():
        assert all(tensor.is_pinned() for tensor in tensors.values())


@pytest.mark.parametrize("moves", [True, False])
def test_average_of_weights_in_bf16_is_warned_of(
    home: ModuleType, make_trainer: Callable[..., Any], moves: bool
) -> None:
    module = regression(home)
    module.average = torch.nn.Linear(4, 4).requires_grad_(False)

    def update(*_: Any) -> None:
        if moves:
            with torch.no_grad():
                module.average.weight.mul_(0.5)

    module.on_train_batch_end = update
    trainer = make_trainer(home, callbacks=[CompactStates()], precision="bf16-true")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(4))
    said = [str(each.message) for each in caught if "average.weight" in str(each.message)]
    assert len(said) == moves
    assert all("precision=bf16-mixed" in text for text in said)


def test_states_of_frozen_parameters_are_not_counted(
    home: ModuleType, make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """They don't exist, though the parameters are in the optimizer, as with ``AdamW(self.parameters())``."""

    def said(frozen: bool) -> list[str]:
        module = regression(home)
        if frozen:
            module.base = torch.nn.Linear(256, 256).requires_grad_(False)
        caplog.clear()
        with caplog.at_level("INFO"):
            make_trainer(home, callbacks=[CompactStates()], precision="bf16-true").fit(module, loader(1))
        return lines_with(caplog.text, "optimizer states")

    without, frozen = (said(each)[0].partition("optimizer states")[2] for each in (False, True))
    assert without == frozen
