"""CompactStates alone, beside a user's own strategy: it acts, trains as a plain run does, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from lightning_solo.errors import ConflictError, PresetError
from lightning_solo.memory.ledger import Ledger
from lightning_solo.optim.adamw_states import bytes_of, state_layout
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.techniques.compact_states.technique import CompactStates
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from tests.messages import lines_with, mentions
from tests.modules import Stack, loader, regression

pytestmark = pytest.mark.any_device

Make = Callable[..., Any]
WIDTH = 64  # blocks of two matrices of 16,384 elements, which are compressed


def net() -> Stack:
    torch.manual_seed(1)
    return Stack(blocks=2, width=WIDTH)


def fit(home: ModuleType, make_trainer: Make, module: Any = None, **kwargs: Any) -> Any:
    trainer = make_trainer(home, **{"precision": "bf16-true", **kwargs})
    trainer.fit(module or regression(home, net()), loader(10, 8, WIDTH))
    return trainer


def assert_same_run(left: Any, right: Any) -> None:
    """Compare weights and states bit for bit."""
    (ours,), (theirs,) = left.optimizers, right.optimizers
    for p, q in zip(left.lightning_module.parameters(), right.lightning_module.parameters(), strict=True):
        assert torch.equal(p, q)
        assert ours.state[p].keys() == theirs.state[q].keys()
        assert all(torch.equal(value, theirs.state[q][name]) for name, value in ours.state[p].items())


def own_strategy(home: ModuleType, device: torch.device) -> Any:
    class Mine(home.strategies.SingleDeviceStrategy):  # type: ignore[name-defined,misc]
        """A strategy of a user's own."""

    return Mine(device)


# --- acted ---


@pytest.mark.every_change
def test_acted_on_weights_and_states(
    home: ModuleType, make_trainer: Make, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    gradients = []

    class Watch(home.Callback):  # type: ignore[name-defined,misc]
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            gradients.append(sum(p.grad is not None for p in pl_module.parameters()))

    with caplog.at_level("INFO"):
        trainer = fit(home, make_trainer, strategy=own_strategy(home, device), callbacks=[CompactStates(), Watch()])
    (optimizer,) = trainer.optimizers
    weight = trainer.lightning_module.net.blocks[0].up.weight
    assert type(optimizer) is CompactAdamW
    assert weight.dtype == torch.bfloat16
    assert optimizer.state[weight]["exp_avg"].dtype == optimizer.state[weight]["correction"].dtype == torch.int8
    assert gradients == [len(list(trainer.lightning_module.parameters()))] * 10  # they stay, until the step
    assert lines_with(caplog.text, "compact_states: weights", "2.00 bytes")
    assert lines_with(caplog.text, "compact_states: optimizer states", " 3.")


# --- parity ---


@pytest.mark.parametrize("accumulate", [1, 4])
def test_parity_in_either_order_with_released_gradients(home: ModuleType, make_trainer: Make, accumulate: int) -> None:
    def run(*callbacks: Any) -> Any:
        return fit(home, make_trainer, callbacks=[*callbacks], accumulate_grad_batches=accumulate)

    one = run(CompactStates(), GradientRelease())
    assert_same_run(run(GradientRelease(), CompactStates()), one)
    assert not torch.equal(one.lightning_module.net.head.weight.cpu().float(), net().head.weight.bfloat16().float())


def test_parity_with_a_plain_run_in_fp32(home: ModuleType, make_trainer: Make) -> None:
    plain = fit(home, make_trainer, precision="32-true", gradient_clip_val=0.05)
    callbacks = [CompactStates(32, 32)]
    ours = fit(home, make_trainer, precision="32-true", gradient_clip_val=0.05, callbacks=callbacks)
    for p, q in zip(ours.lightning_module.parameters(), plain.lightning_module.parameters(), strict=True):
        assert torch.equal(p, q)


def test_built_in_configure_model_as_in_the_constructor(
    home: ModuleType, make_trainer: Make, device: torch.device
) -> None:
    def in_configure_model() -> Any:
        module = regression(home, nn.Identity())

        def configure_model() -> None:
            if isinstance(module.net, nn.Identity):
                module.net = net()

        module.configure_model = configure_model
        return module

    runs = [
        fit(home, make_trainer, module, strategy=own_strategy(home, device), callbacks=[CompactStates()])
        for module in (in_configure_model(), regression(home, net()))
    ]
    assert_same_run(*runs)


# --- memory ---


def test_memory_of_weights_and_states(make_trainer: Make) -> None:
    import lightning.pytorch as home

    trainer = fit(home, make_trainer, callbacks=[CompactStates()])
    parameters = list(trainer.lightning_module.parameters())
    live = Ledger(trainer.lightning_module, trainer.optimizers).live()
    assert live["weights"] == sum(2 * p.numel() for p in parameters)
    states = sum(bytes_of(state_layout(p, 24, 8)) for p in parameters)
    assert live["optimizer_states"] == states + 4 * len(parameters)  # and a count of steps each


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
    assert not technique._weights.corrections
    assert "module_init_context" not in vars(trainer.precision_plugin)
    if moment == "configure_optimizers":  # never set up: all bits are there again
        for p, q in zip(module.net.parameters(), net().parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
@pytest.mark.parametrize("budget", [None, 0])
def test_trace_a_resumed_run_is_the_undisturbed_one(
    home: ModuleType, make_trainer: Make, device: torch.device, tmp_path: Path, kind: str, budget: int | None
) -> None:
    def run(**kwargs: Any) -> Any:
        path = kwargs.pop("ckpt_path", None)
        callbacks = [CompactStates(checkpoint_weights=kind, state_budget=budget)]
        trainer = make_trainer(
            home, strategy=own_strategy(home, device), precision="bf16-true", callbacks=callbacks, **kwargs
        )
        trainer.fit(regression(home, net()), loader(10, 8, WIDTH), **({"ckpt_path": path} if path else {}))
        return trainer

    whole, half = run(max_epochs=3), run(max_epochs=2)
    half.save_checkpoint(tmp_path / "half.ckpt", weights_only=False)  # behind the fit
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    assert {value.dtype for value in saved["state_dict"].values()} == {dtype}
    assert any("correction" in state for state in saved["optimizer_states"][0]["state"].values()) == (kind == "bf16")
    assert_same_run(run(max_epochs=3, ckpt_path=tmp_path / "half.ckpt"), whole)


def test_trace_validation_is_left_alone(home: ModuleType, make_trainer: Make) -> None:
    module = regression(home, net())
    trainer = make_trainer(home, callbacks=[CompactStates()])  # a precision that a fit refuses
    trainer.validate(module, loader(2, 8, WIDTH), verbose=False)
    assert {p.dtype for p in module.parameters()} == {torch.float32}


# --- refusals ---


def test_refusals_name_what_to_write(home: ModuleType, make_trainer: Make) -> None:
    with pytest.raises(PresetError, match=mentions("compact_states.master_bits=16: write 32, 24, '16-stochastic'")):
        CompactStates(master_bits=16)
    with pytest.raises(PresetError, match=mentions("compact_states.state_budget='much'")):
        CompactStates(state_budget="much")
    with pytest.raises(ConflictError, match=mentions("compact_states.back_end=torchao_8bit", "bits")):
        CompactStates(32, back_end="torchao_8bit")
    with pytest.raises(
        ConflictError, match=mentions("compact_states, ", "precision=32-true", "compact_states.master_bits=32")
    ):
        fit(home, make_trainer, precision="32-true", callbacks=[CompactStates()])
    with pytest.raises(ConflictError, match="two CompactStates"):
        fit(home, make_trainer, callbacks=[CompactStates(), CompactStates(32)])


def test_a_copy_is_built_from_its_words() -> None:
    states = CompactStates("16-stochastic", 8, "2GiB", "fp32")
    assert repr(eval(repr(states))) == repr(states)
    assert states.state_budget == "2GiB"
