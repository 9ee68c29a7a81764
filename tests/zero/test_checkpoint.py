"""Entries of a checkpoint from the real engine, beside those of a plain run; and plain ones taken into the engine."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, NAdam, Optimizer, RMSprop

from lightning_solo.zero.checkpoint import (
    COUNTERS,
    counters,
    frozen_names,
    groups_of,
    load_optimizer,
    load_weights,
    optimizer_state_dict,
    plain_state_dict,
    set_counters,
)
from lightning_solo.zero.extension import what_is_missing
from lightning_solo.zero.host_optimizer import host_optimizer
from lightning_solo.zero.module import OriginalModule
from lightning_solo.zero.states import read, write
from tests.messages import mentions
from tests.zero.engines import PLACES, arguments, batch, engine_of, net, step_engine, step_plain, trained, weights_now

pytest.importorskip("deepspeed", reason="listed on Linux only")
pytestmark = pytest.mark.timeout(600)  # the first test of a machine's life builds async_io


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Stage 2, stage 3, and stage 3 with states on disk."""
    return arguments(request.param, tmp_path)


def two_groups(module: nn.Module, kind: Callable[..., Optimizer] = AdamW, **options: Any) -> Optimizer:
    """Two groups with names and other decay, the second one with the frozen layer's parameters among its own."""
    named = list(module.named_parameters())
    return kind([{"params": named[:2]}, {"params": named[2:], "weight_decay": 0.2}], **{"lr": 1e-2, **options})


def assert_same(ours: Any, theirs: Any, **tolerance: float) -> None:
    """Compare nested entries; tensors bit by bit, or by the tolerance given."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_same(ours[key], theirs[key], **tolerance)
    elif torch.is_tensor(theirs):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        torch.testing.assert_close(ours, theirs, **(tolerance or {"rtol": 0, "atol": 0}))
    else:
        assert ours == theirs


# --- the module's ---


class Tied(nn.Module):
    """Tied weights, a state of its own, and hooks that rename and add: what checkpoint wrappers and adapters do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(7, 9, bias=False)
        self.head = nn.Linear(7, 9, bias=False)
        self.head.weight = self.embed.weight
        self.out = nn.Linear(9, 4)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.tensor(4.0), persistent=False)
        self.out.register_state_dict_post_hook(self.rename)

    @staticmethod
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}renamed"] = state.pop(f"{prefix}bias")

    def get_extra_state(self) -> Any:
        return {"sum": float(self.out.weight.detach().sum())}

    def set_extra_state(self, state: Any) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x) + self.head(x)) + self.frozen


def sgd(module: nn.Module) -> Optimizer:
    return SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)


def test_the_state_dict_is_that_of_a_plain_run(place: dict[str, Any]) -> None:
    module, plain = Tied(), Tied()
    with engine_of(module, sgd(module), **place) as engine:
        step_engine(engine, 0)
        step_plain(plain, sgd(plain), 0)
        found = plain_state_dict(module, weights_now(engine, module))
        assert_same(dict(found), dict(plain.state_dict()))
        assert list(found) == list(plain.state_dict())
        assert "out.renamed" in found
        assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()  # in a file, once
        # Nothing has moved: the engine goes on.
        step_engine(engine, 1)
        step_plain(plain, sgd(plain), 1)
        assert_same(dict(plain_state_dict(module, weights_now(engine, module))), dict(plain.state_dict()))
        del found


@pytest.mark.parametrize("stage", [2, 3])
def test_of_bf16_it_has_the_masters_and_the_frozen_as_they_were(stage: int) -> None:
    module, untrained = Tied(), Tied()
    original = OriginalModule(module, torch.bfloat16)
    with engine_of(module, sgd(module), bf16=True, stage=stage) as engine:
        engine.backward(engine(batch(0).bfloat16()).float().square().mean())
        engine.step()
        state = plain_state_dict(module, weights_now(engine, module, original.weights))
        assert {name: state[name].dtype for name in ("embed.weight", "out.renamed", "frozen")} == dict.fromkeys(
            ("embed.weight", "out.renamed", "frozen"), torch.float32
        )
        assert torch.equal(state["frozen"], untrained.frozen)
        master = read(engine.optimizer)[module.embed.weight].master
        assert torch.equal(state["embed.weight"], master)
        assert not torch.equal(master, master.bfloat16().float())
        # The sum over 36 weights that the module took itself is over the masters' too, and not over the bf16 weights.
        assert state["_extra_state"]["sum"] == float(read(engine.optimizer)[module.out.weight].master.sum())
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
        del state, master


def test_the_parameters_come_back_from_a_state_dict_that_fails() -> None:
    module = nn.Linear(2, 2)
    before = module.weight.data_ptr()

    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    module.register_state_dict_pre_hook(fail)
    with pytest.raises(ArithmeticError, match="on purpose"):
        plain_state_dict(module, {module.weight: torch.zeros(5)})
    assert (module.weight.shape, module.weight.data_ptr()) == ((2, 2), before)


def test_the_names_of_what_is_frozen_with_each_alias() -> None:
    module = Tied()
    assert frozen_names(module) == ["frozen"]
    module.embed.weight.requires_grad_(False)
    assert frozen_names(module) == ["frozen", "embed.weight", "head.weight"]


def test_weights_are_loaded_strictly_but_for_what_was_left_out() -> None:
    saved, module = (
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict(),
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
    )
    own = module[1].bias.detach().clone()
    load_weights(module, saved, left_out=[], strict=True)
    assert_same(dict(module.state_dict()), dict(saved))
    short = {name: value + 1 for name, value in saved.items() if name != "1.bias"}
    with torch.no_grad():
        module[1].bias.copy_(own)
    load_weights(module, short, left_out=["1.bias"], strict=True)
    assert torch.equal(module[1].bias, own)
    assert torch.equal(module[1].weight, saved["1.weight"] + 1)
    load_weights(module, short, left_out=["1.bias", "of another module"], strict=True)
    with pytest.raises(RuntimeError, match=mentions("Missing key(s)", "1.bias")):
        load_weights(module, short, left_out=["0.bias"], strict=True)
    load_weights(module, short, left_out=[], strict=False)
    more = {**saved, "unknown": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=mentions("Unexpected key(s)", "unknown")):
        load_weights(module, more, left_out=["unknown"], strict=True)
    load_weights(module, more, left_out=[], strict=False)
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_weights(module, {"0.bias": torch.zeros(9)}, left_out=[], strict=False)


# --- the optimizer's ---

KINDS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "AdamW": (AdamW, {}),
    "AdamW, rate in a tensor": (AdamW, {"lr": torch.tensor(1e-2)}),
    "SGD with momentum": (SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD": (SGD, {}),
    "RMSprop": (RMSprop, {"momentum": 0.5}),
    "NAdam, which keeps a product": (NAdam, {}),
}


def made(module: nn.Module, name: str) -> Optimizer:
    kind, options = KINDS[name]
    return two_groups(module, kind, **options)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("stage", [2, 3])
def test_the_optimizers_state_dict_is_that_of_a_plain_run(name: str, stage: int) -> None:
    """Groups, their options and names, numbers of parameters, frozen ones among them, states and counts."""
    module, plain = net(), net()
    user, optimizer = made(module, name), made(plain, name)
    groups, host = groups_of(user), host_optimizer(user, kind="torch")
    with engine_of(module, host.optimizer, stage=stage) as engine:
        for seed in range(3):
            step_engine(engine, seed)
            step_plain(plain, optimizer, seed)
        found, expected = optimizer_state_dict(host, groups, read(engine.optimizer)), optimizer.state_dict()
        assert_same(found, expected)
        assert len(found["state"]) == (0 if name == "SGD" else 8)
        assert [group["params"] for group in found["param_groups"]] == [[0, 1], [2, 3, 4, 5, 6, 7, 8, 9]]
        # Plain entries: a file of them is read by torch alone, without its pickled classes.
        file = io.BytesIO()
        torch.save(found, file)
        file.seek(0)
        made(net(), name).load_state_dict(torch.load(file, weights_only=True))
        del found


@pytest.mark.long  # builds DeepSpeed's extension
def test_of_deepspeeds_version_it_is_that_of_torchs(place: dict[str, Any]) -> None:
    """Same entries, of values that differ by rounding: DeepSpeed multiplies and adds in one.

    The states are means of gradients of up to 1, taken at weights that differ in their last bits.
    """
    if missing := what_is_missing("cpu_adam"):
        pytest.skip(f"no DeepSpeedCPUAdam: {missing}")
    module, plain = net(), net()
    user, optimizer = two_groups(module), two_groups(plain)
    groups, host = groups_of(user), host_optimizer(user, kind="deepspeed")
    assert type(host.optimizer).__name__ == "DeepSpeedCPUAdam"
    with engine_of(module, host.optimizer, **place) as engine:
        for seed in range(3):
            step_engine(engine, seed)
            step_plain(plain, optimizer, seed)
        found = optimizer_state_dict(host, groups, read(engine.optimizer))
        assert found["param_groups"] == optimizer.state_dict()["param_groups"]
        assert_same(found["state"], optimizer.state_dict()["state"], rtol=1e-3, atol=1e-5)
        del found


# --- taken in ---


@pytest.mark.parametrize("name", [name for name in KINDS if name != "SGD"])
def test_a_plain_state_continues_in_the_engine(place: dict[str, Any], name: str) -> None:
    """Saved with other rates than the engine's optimizer was made with: the saved ones count, as in torch."""
    plain = net()
    optimizer = made(plain, name)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] / 4
    for seed in range(2):
        step_plain(plain, optimizer, seed)
    saved = copy.deepcopy(optimizer.state_dict())
    module = copy.deepcopy(plain)
    user = made(module, name)
    groups, host = groups_of(user), host_optimizer(user, kind="torch")
    with engine_of(module, host.optimizer, **place) as engine:
        masters = {p: states.master for p, states in read(engine.optimizer).items()}
        states = load_optimizer(host, groups, saved, masters)
        assert set(states) == set(trained(module))
        write(engine.optimizer, states)
        assert_same(optimizer_state_dict(host, groups, read(engine.optimizer)), saved)
        for seed in range(2, 4):
            step_engine(engine, seed)
            step_plain(plain, optimizer, seed)
        assert_same(optimizer_state_dict(host, groups, read(engine.optimizer)), optimizer.state_dict())
        masters = {p: states.master for p, states in read(engine.optimizer).items()}
        assert all(torch.equal(masters[p], q) for p, q in zip(trained(module), trained(plain), strict=True))
        del masters, states


@pytest.mark.long  # builds DeepSpeed's extension
def test_a_plain_state_continues_in_deepspeeds_version() -> None:
    """Which counts its steps in a plain integer."""
    if missing := what_is_missing("cpu_adam"):
        pytest.skip(f"no DeepSpeedCPUAdam: {missing}")
    plain = net()
    optimizer = two_groups(plain)
    for seed in range(2):
        step_plain(plain, optimizer, seed)
    saved, module = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(plain)
    user = two_groups(module)
    groups, host = groups_of(user), host_optimizer(user, kind="deepspeed")
    with engine_of(module, host.optimizer) as engine:
        masters = {p: states.master for p, states in read(engine.optimizer).items()}
        states = load_optimizer(host, groups, saved, masters)
        assert {type(found.scalars["step"]) for found in states.values()} == {int}
        write(engine.optimizer, states)
        assert_same(optimizer_state_dict(host, groups, read(engine.optimizer)), saved)
        step_engine(engine, 2)
        step_plain(plain, optimizer, 2)
        found = optimizer_state_dict(host, groups, read(engine.optimizer))
        assert_same(found["state"], optimizer.state_dict()["state"], rtol=1e-3, atol=1e-5)


# --- what the engine counts ---


def test_counts_continue() -> None:
    module, fresh = net(), net()
    with engine_of(module, sgd(module)) as engine:
        for seed in range(2):
            step_engine(engine, seed)
        saved = counters(engine)
    assert saved["engine"] == {"global_steps": 2, "global_samples": 2, "micro_steps": 2, "skipped_steps": 0}
    assert all(isinstance(value, int | float) for value in saved["loss_scaler"].values())
    with engine_of(fresh, sgd(fresh)) as engine:
        assert counters(engine)["engine"] == dict.fromkeys(COUNTERS, 0)
        set_counters(engine, saved)
        assert counters(engine) == saved
        set_counters(engine, {})  # of a plain run
        assert counters(engine) == saved
