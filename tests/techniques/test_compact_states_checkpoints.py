"""CompactStates in files: saved, resumed, and weights that are built and loaded in ``configure_model``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import torch
import torch.nn.modules.module as torch_module
from torch import nn

from lightning_solo.optim import building
from lightning_solo.techniques.compact_states.technique import CompactStates
from tests.conftest import long
from tests.messages import lines_with
from tests.modules import Stack, loader, regression
from tests.techniques.test_compact_states import (
    WIDTH,
    Make,
    assert_same_run,
    fit,
    masters,
    net,
    own_strategy,
    states_of,
    weights,
    with_optimizer,
)
from tests.training import equal

pytestmark = pytest.mark.any_device


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One parameter is open at a time while a module is built."""
    monkeypatch.setattr(building, "WINDOW_BYTES", 0)


# --- saved and resumed ---


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("name", "master_bits", "budget"),
    [
        ("AdamW", 24, None),
        ("AdamW", 24, 0),
        ("NAdam", 24, None),
        long("AdamW", 24, "auto"),
        long("AdamW", "16-stochastic", None),
        long("Adafactor", 24, None),
    ],
)
def test_trace_resumed_run_is_the_undisturbed_one(
    home: ModuleType, make_trainer: Make, device: torch.device, tmp_path: Path,
    kind: str, name: str, master_bits: Any, budget: Any,
) -> None:  # fmt: skip
    def run(**arguments: Any) -> Any:
        technique = CompactStates(master_bits, state_budget=budget, checkpoint_weights=kind)
        module = with_optimizer(home, name, lr=1e-2)
        return fit(make_trainer, technique, home=home, module=module, strategy=own_strategy(home, device), **arguments)

    whole, half = run(max_epochs=3), run(max_epochs=2)
    half.save_checkpoint(path := tmp_path / "half.ckpt", weights_only=False)  # after the fit
    file = torch.load(path, weights_only=True)  # no class of this package
    has_corrections = any("correction" in state for state in file["optimizer_states"][0]["state"].values())
    assert has_corrections == (kind == "bf16" and master_bits == 24 and name == "AdamW")
    in_bf16 = kind == "bf16" and name == "AdamW"  # states of others are torch's own, which need fp32 weights
    expected = {key: value.cpu() for key, value in (weights if in_bf16 else masters)(half).items()}
    assert equal({key: value.cpu() for key, value in file["state_dict"].items()}, expected)
    half.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert equal(torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"], file["state_dict"])
    resumed = run(max_epochs=3, path=path)
    assert_same_run(resumed, whole)
    assert equal(masters(resumed), masters(whole))
    if master_bits == 24:  # a file of fp32 weights has bits that the module's bf16 weights don't hold
        technique = CompactStates(master_bits, state_budget=budget, checkpoint_weights=kind)
        again = fit(make_trainer, technique, home=home, module=half.lightning_module, path=path, max_epochs=3)
        assert equal(masters(again), masters(whole))


@pytest.mark.every_change
def test_trace_plain_file_is_resumed(make_trainer: Make, tmp_path: Path) -> None:
    """fp32 weights and AdamW's moments of a plain run are split and compressed."""
    plain = fit(make_trainer, precision="32-true")
    plain.save_checkpoint(tmp_path / "plain.ckpt", weights_only=False)
    trainer = fit(make_trainer, CompactStates(), path=tmp_path / "plain.ckpt", max_steps=10)  # no step is left
    for name, master in masters(trainer).items():
        torch.testing.assert_close(master, weights(plain)[name].cpu(), rtol=2**-15, atol=0)
    assert all(state["step"] == 10 for state in states_of(trainer))


def test_trace_sizes_of_files(make_trainer: Make, tmp_path: Path) -> None:
    sizes = {}
    for name, callbacks in {
        "plain": [],
        "bf16": [CompactStates()],
        "fp32": [CompactStates(checkpoint_weights="fp32")],
    }.items():
        module = regression(lightning.pytorch, Stack(blocks=2, width=256))  # 4 x 262,144 elements and 0.4 % others
        trainer = make_trainer(
            lightning.pytorch, callbacks=callbacks, precision="bf16-true" if callbacks else "32-true"
        )
        trainer.fit(module, loader(2, width=256))
        trainer.save_checkpoint(tmp_path / name, weights_only=False)
        sizes[name] = (tmp_path / name).stat().st_size
    assert sizes["bf16"] <= 0.45 * sizes["plain"]  # (2 + 3.06) / 12
    assert sizes["fp32"] <= 0.55 * sizes["plain"]  # (4 + 2.06) / 12


def test_trace_states_stay_on_the_host_where_lightning_moves_others(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """On a CPU a tensor that is moved to the device stays the same one; here it becomes another, as on a GPU."""
    import lightning.fabric.utilities.optimizer as moving

    seen: list[int] = []

    class Watch(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            (optimizer,) = trainer.optimizers
            for p, tensors in optimizer.host_states.items():
                assert all(optimizer.state[p][name] is tensor for name, tensor in tensors.items())
            seen.append(len(optimizer.host_states))

    if device.type == "cpu":
        monkeypatch.setattr(moving, "move_data_to_device", lambda tensor, device: tensor.clone())
    for budget in (0, "auto"):
        first = fit(make_trainer, CompactStates(state_budget=budget), Watch())
        first.save_checkpoint(path := tmp_path / "first.ckpt", weights_only=False)
        fit(make_trainer, CompactStates(state_budget=budget), Watch(), path=path, max_epochs=2)
    auto = [4] * 10 if device.type == "cpu" else [4] + [0] * 9  # a GPU takes as many as fit after the first step
    assert seen == [4] * 20 + 2 * auto


# --- built in configure_model ---


def in_configure_model(home: ModuleType, make: Callable[[], nn.Module] = net, meta: bool = True) -> Any:
    """Return a module that calls ``make`` for its network in the first fit."""
    module = regression(home, nn.Identity())

    def configure_model() -> None:
        if isinstance(module.net, nn.Identity):
            with torch.device("meta") if meta else nullcontext():
                module.net = make()

    module.configure_model = configure_model
    return module


def in_constructor(home: ModuleType, device: torch.device, make: Callable[[], nn.Module] = net) -> Any:
    """Return a module whose network ``make`` has built, on the device whose random numbers `configure_model` draws."""
    with device:
        return regression(home, make())


def frozen_net() -> nn.Module:
    """Return a net whose second block is frozen once the whole is built."""
    made = net()
    made.blocks[1].requires_grad_(False)
    return made


def net_and_spare() -> nn.Module:
    """Return a net with a layer that gets no gradient, so that its master is never stepped."""
    made = net()
    made.spare = nn.Linear(WIDTH, WIDTH)
    return made


@pytest.mark.every_change
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("master_bits", [24, long(32), long("16-stochastic")])
def test_built_while_fitting_as_in_the_constructor(
    home: ModuleType, make_trainer: Make, device: torch.device, meta: bool, precision: str, master_bits: Any
) -> None:
    for model in (net, frozen_net):
        ours, plain = (
            fit(make_trainer, CompactStates(master_bits), home=home, module=module, precision=precision)
            for module in (in_configure_model(home, model, meta), in_constructor(home, device, model))
        )
        if precision == "bf16-mixed" and model is frozen_net and master_bits != 32:  # frozen after it was rounded
            blocks = (trainer.lightning_module.net.blocks[1] for trainer in (ours, plain))
            for p, q in zip(*(block.parameters() for block in blocks), strict=True):
                assert p.dtype == q.dtype == torch.float32
                torch.testing.assert_close(p, q, rtol=2**-15, atol=0)
        else:
            assert_same_run(ours, plain)


@pytest.mark.every_change
@pytest.mark.usefixtures("narrow")
def test_weights_are_split_while_the_module_is_built_and_read_as_fp32(home: ModuleType, make_trainer: Make) -> None:
    seen: list[Any] = []

    def watched() -> nn.Module:
        made = net()
        with torch._C.DisableTorchFunction():
            seen.append({str(p.dtype) for p in made.parameters()})
        seen.append({p.dtype for p in made.parameters()})
        return made

    trainer = fit(make_trainer, CompactStates(), home=home, module=in_configure_model(home, watched))
    assert seen == [{"torch.float32", "torch.bfloat16"}, {torch.float32}]  # in memory; to the user's code
    assert "module_init_context" not in vars(trainer.precision_plugin)


@pytest.mark.every_change
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("kind", ["bf16", "fp32"])
@pytest.mark.parametrize("master_bits", [24, long(32)])
@pytest.mark.parametrize("plain_file", [False, True])
def test_built_and_resumed(
    home: ModuleType, make_trainer: Make, tmp_path: Path, kind: str, master_bits: int, plain_file: bool
) -> None:
    """Weights of the file, never with corrections of the initial ones."""

    def run(module: Any, path: Path | None = None, **arguments: Any) -> Any:
        technique = CompactStates(master_bits, checkpoint_weights=kind)
        return fit(make_trainer, technique, home=home, module=module, path=path, **arguments)

    file = tmp_path / "half.ckpt"
    by_hand = regression(home, net_and_spare())
    with torch.no_grad():
        by_hand.net.spare.weight.normal_()  # other than the initial one
    if plain_file:
        half = fit(make_trainer, home=home, module=by_hand, max_epochs=2, precision="32-true")
    else:
        half = run(by_hand, max_epochs=2)
    half.save_checkpoint(file, weights_only=False)
    whole = run(regression(home, net_and_spare()), file, max_epochs=3)
    assert_same_run(run(in_configure_model(home, net_and_spare), file, max_epochs=3), whole)
    loaded = masters(run(in_configure_model(home, net_and_spare), file, max_epochs=2))  # no step is left
    close = 2**-15 if plain_file and master_bits == 24 else 0
    for name, expected in (weights if plain_file else masters)(half).items():
        torch.testing.assert_close(loaded[name], expected.cpu(), rtol=close, atol=0)


@pytest.mark.every_change
@pytest.mark.usefixtures("narrow")
def test_frozen_weights_that_are_built_and_loaded_keep_24_bits(make_trainer: Make, tmp_path: Path) -> None:
    """bf16-mixed leaves frozen weights in fp32."""
    by_hand = regression(lightning.pytorch, frozen_net())
    by_hand.net.blocks[1].up.weight.normal_()
    plain = fit(make_trainer, module=by_hand, precision="32-true")
    plain.save_checkpoint(path := tmp_path / "plain.ckpt", weights_only=False)
    module = in_configure_model(lightning.pytorch, frozen_net)
    fit(make_trainer, CompactStates(), module=module, path=path, precision="bf16-mixed", max_steps=10)
    ours, theirs = (each.net.blocks[1].up.weight for each in (module, by_hand))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=2**-15, atol=0)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("built", [False, True])
def test_log_counts_frozen_weights_that_are_rounded(
    make_trainer: Make, caplog: pytest.LogCaptureFixture, built: bool
) -> None:
    rounded, kept = (
        in_configure_model(lightning.pytorch, frozen_net) if built else regression(lightning.pytorch, frozen_net())
        for _ in range(2)
    )
    frozen = sum(p.numel() for p in frozen_net().parameters() if not p.requires_grad)
    with caplog.at_level("INFO"):
        fit(make_trainer, CompactStates(), module=rounded, precision="bf16-true", max_steps=1)
    assert lines_with(caplog.text, "compact_states", f"{frozen:,} frozen", "rounded to bf16", "precision=bf16-mixed")
    assert rounded.net.blocks[1].up.weight.dtype == torch.bfloat16

    caplog.clear()
    with caplog.at_level("INFO"):
        fit(make_trainer, CompactStates(), module=kept, precision="bf16-mixed", max_steps=1)
        fit(make_trainer, CompactStates(), module=regression(lightning.pytorch, net()), max_steps=1)
    assert not lines_with(caplog.text, "frozen", "rounded")
    up = kept.net.blocks[1].up.weight
    assert up.dtype == torch.float32
    assert (up != up.bfloat16().float()).any()


def break_configure_model(module: Any) -> None:
    def half_built() -> None:
        module.net = net()
        raise KeyError("mine")

    module.configure_model = half_built


def break_loading(module: Any) -> None:
    module.on_load_checkpoint = lambda checkpoint: checkpoint["mine"]


def break_setup(module: Any) -> None:
    module.configure_optimizers = lambda: {}["mine"]


@pytest.mark.every_change
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("break_it", [break_configure_model, break_loading, break_setup])
def test_built_and_failed_is_fp32_again(
    home: ModuleType, make_trainer: Make, device: torch.device, tmp_path: Path, break_it: Callable[[Any], None]
) -> None:
    path = None
    if break_it is break_loading:
        path = tmp_path / "plain.ckpt"
        fit(make_trainer, home=home, precision="32-true").save_checkpoint(path, weights_only=False)
    module = in_configure_model(home)
    whole = module.configure_model
    break_it(module)
    with pytest.raises(KeyError, match="mine"):
        fit(make_trainer, CompactStates(32), home=home, module=module, path=path)
    assert equal(module.net, in_constructor(home, device).net.cpu())
    assert torch.empty(1).dtype == torch.float32
    assert not torch_module._global_parameter_registration_hooks
    assert not torch_module._global_module_registration_hooks
    module.net(torch.ones(2, WIDTH)).sum().backward()
    module.zero_grad()
    module.configure_model = whole  # which finds that there is a net
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=1e-2)
    again = fit(make_trainer, CompactStates(32), home=home, module=module)
    assert_same_run(again, fit(make_trainer, CompactStates(32), home=home, module=in_constructor(home, device)))


@pytest.mark.every_change
@pytest.mark.usefixtures("narrow")
def test_built_once_and_fitted_twice(home: ModuleType, make_trainer: Make, device: torch.device) -> None:
    def twice(module: Any) -> Any:
        return [fit(make_trainer, CompactStates(), home=home, module=module) for _ in range(2)][1]

    assert_same_run(twice(in_configure_model(home)), twice(in_constructor(home, device)))
