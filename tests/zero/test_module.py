"""A module after the engine: hooks, attributes, dtypes and weights, of its owner's and of nobody else's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from torch import Tensor, nn

from lightning_solo.processes import environment
from lightning_solo.seams.homes import for_home
from lightning_solo.techniques.zero_offload.technique import ZeroOffloadStrategy
from lightning_solo.zero.config import zero_config
from lightning_solo.zero.deepspeed_internals import leave_forward
from lightning_solo.zero.engine import make_engine, weights_of
from lightning_solo.zero.module import OriginalModule
from lightning_solo.zero.process import (
    ONE_PROCESS,
    close_process_group,
    open_process_group,
    without_deprecations,
)
from tests.modules import loader, regression
from tests.zero.engines import PLACES, arguments, batch, engine_of, weights_now

pytest.importorskip("deepspeed", reason="listed on Linux only")
pytestmark = pytest.mark.timeout(600)  # the first test of a machine's life builds async_io
WITH_KWARGS = "_forward_pre_hooks_with_kwargs"


class Net(nn.Module):
    """Trained and frozen weights, tied ones, and buffers of three dtypes, which are used in none of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(7, 520)
        self.norm = nn.LayerNorm(520)
        self.first = nn.Linear(520, 520, bias=False)
        self.second = nn.Linear(520, 520, bias=False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.randn(520), requires_grad=False)
        self.register_buffer("thirds", torch.full((2,), 1 / 3))
        self.register_buffer("exact", torch.full((2,), 1 / 3, dtype=torch.float64))
        self.register_buffer("count", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(self.norm(self.up(x))))) * self.scale


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)


def step(engine: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
    engine.backward(engine(batch(seed).to(dtype)).float().square().mean())
    engine.step()


@contextmanager
def engine_around(module: nn.Module, *, bf16: bool = False, **place: Any) -> Iterator[Any]:
    """The engine, and afterwards the module as it was found but for its training."""
    original = OriginalModule(module, torch.bfloat16 if bf16 else torch.float32)
    with engine_of(module, sgd(module), bf16=bf16, **place) as engine:
        yield engine
        leave_forward(engine)
        weights = weights_now(engine, module, original.weights)
    original.restore(weights)


def marks(module: nn.Module) -> dict[Any, Any]:
    """Return all that can be told apart on parameters, buffers and parts of a module, values left out."""
    seen: dict[Any, Any] = {}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            keys = list(value) if isinstance(value, (dict, set)) else None
            # A mapping that holds nothing but what hooks were registered with is compared in a test of its own.
            seen[name, key] = (type(value), keys if key != WITH_KWARGS else None)
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
        hooks = [len(hooks or ()) for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)]
        seen[name] = (type(tensor), vars(tensor), tensor.dtype, tensor.shape, tensor.requires_grad, tensor.grad, hooks)
    return seen


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Stage 2, stage 3, and stage 3 with states on disk."""
    return arguments(request.param, tmp_path)


# --- nothing of the engine's stays ---


@pytest.mark.parametrize("bf16", [False, True])
def test_hooks_attributes_and_dtypes_are_as_before(place: dict[str, Any], bf16: bool) -> None:
    module = Net()
    before = marks(module)
    with engine_around(module, bf16=bf16, **place) as engine:
        step(engine, dtype=torch.bfloat16 if bf16 else torch.float32)
        during = marks(module)
    assert during != before
    assert marks(module) == before
    assert module.second.weight is module.first.weight
    assert b"deepspeed" not in pickle.dumps(module)
    # It is an ordinary module again: trained by hand it goes where a copy of its values goes.
    twin = Net()
    twin.load_state_dict(module.state_dict())
    for net in (module, copy.deepcopy(module), twin):
        net(batch(1)).square().mean().backward()
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == (not p.requires_grad)
        assert p.grad is None or torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_is_left_of_what_hooks_were_registered_with(stage: int) -> None:
    """Another process that loads the module would apply a left mark to its own first hook of the same number."""
    module = Net()
    with engine_around(module, stage=stage):
        pass
    assert not vars(module)[WITH_KWARGS]


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("stage 2", True),
        ("stage 3", False),
        ("nvme", False),
        ("stage 3", True),
        ("nvme", True),
    ],
)
def test_an_exception_in_a_forward_pass_changes_nothing(name: str, frozen: bool, tmp_path: Path) -> None:
    """At stage 3 some weights are gathered then, and the mappings that hold them are as in a forward pass."""
    module, untouched = Net(), Net()
    module.scale.requires_grad_(not frozen)

    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    hook = module.norm.register_forward_hook(fail)
    before = marks(module)
    with engine_around(module, **arguments(name, tmp_path)) as engine:
        with pytest.raises(ArithmeticError, match="on purpose"):
            engine(batch(0))
    assert marks(module) == before
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), untouched.parameters(), strict=True))
    hook.remove()
    assert torch.equal(module(batch(0)), untouched(batch(0)))


@pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU")
@pytest.mark.parametrize("stage", [2, 3])
def test_an_exception_while_validating_changes_nothing(make_trainer: Any, stage: int) -> None:
    """An engine that doesn't train has no masters at all; an interrupt is such an exception."""
    module, untouched = regression(lightning.pytorch), regression(lightning.pytorch)
    untouched.load_state_dict(module.state_dict())

    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    module.net.blocks[0].norm.register_forward_hook(fail)
    trainer = make_trainer(lightning.pytorch, strategy=for_home(ZeroOffloadStrategy)(stage=stage, allow_cpu=True))
    with pytest.raises(ArithmeticError, match="on purpose"):
        trainer.validate(module, loader(2), verbose=False)
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), untouched.parameters(), strict=True))


def test_a_users_attributes_are_kept(place: dict[str, Any]) -> None:
    """Also those whose names are DeepSpeed's or Lightning's, where they were there before."""
    module = Net()
    inner = module.up.forward
    module.up.forward = inner
    module.up.weight.ds_of_mine = "mine"
    module.grad_accum = "mine"
    with engine_around(module, **place) as engine:
        step(engine)
        module.up.noted = engine.global_steps
        module.up.bias.noted = engine.global_steps
    assert module.up.forward is inner
    assert (module.up.weight.ds_of_mine, module.grad_accum) == ("mine", "mine")
    assert (module.up.noted, module.up.bias.noted) == (1, 1)


def register(module: Net, seen: list[str]) -> list[Any]:
    """Register a hook of each kind, which notes its kind when it is called; return their handles."""

    def note(kind: str) -> Callable[..., None]:
        return lambda *_, **__: seen.append(kind)

    norm = module.norm
    return [
        norm.register_forward_hook(note("forward")),
        norm.register_forward_hook(note("forward, kwargs"), with_kwargs=True, always_call=True),
        norm.register_forward_pre_hook(note("before")),
        norm.register_forward_pre_hook(note("before, kwargs"), with_kwargs=True),
        norm.register_full_backward_hook(note("backward")),
        norm.register_full_backward_pre_hook(note("before backward")),
        norm.register_state_dict_post_hook(note("state dict")),
        norm.register_state_dict_pre_hook(note("before state dict")),
        norm.register_load_state_dict_pre_hook(note("before load")),
        norm.register_load_state_dict_post_hook(note("load")),
        norm.weight.register_hook(note("gradient")),
        norm.weight.register_post_accumulate_grad_hook(note("accumulated")),
    ]


def use(module: Net) -> None:
    module(batch(0)).square().mean().backward()
    module.load_state_dict(module.state_dict())


def test_a_users_hooks_are_kept_in_their_order(place: dict[str, Any]) -> None:
    untouched, module, expected, seen = Net(), Net(), [], []
    register(untouched, expected)
    use(untouched)
    handles = register(module, seen)
    before = marks(module)
    with engine_around(module, **place) as engine:
        step(engine)
        during = list(seen)
        late = module.up.register_forward_hook(lambda *_: seen.append("late"))
        seen.clear()
    assert {"forward", "forward, kwargs", "before", "before, kwargs", "backward", "gradient"} <= set(during)
    use(module)
    assert [kind for kind in seen if kind != "late"] == expected
    assert len(set(expected)) == len(handles)
    assert "late" in seen  # one that was registered while the engine was there
    late.remove()
    module.zero_grad()
    assert marks(module) == before
    seen.clear()
    for handle in handles:
        handle.remove()
    use(module)
    assert seen == []


# --- the weights ---


def test_the_weights_are_the_trained_ones(place: dict[str, Any]) -> None:
    module, plain = Net(), Net()
    with engine_around(module, **place) as engine:
        step(engine)
    plain(batch(0)).square().mean().backward()
    sgd(plain).step()
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), plain.parameters(), strict=True))
    assert not torch.equal(module.first.weight, Net().first.weight)
    assert all(torch.equal(b, c) for b, c in zip(module.buffers(), plain.buffers(), strict=True))


def test_of_bf16_the_masters_come_back_and_what_is_frozen_as_it_was(place: dict[str, Any]) -> None:
    module, untrained = Net(), Net()
    with engine_around(module, bf16=True, **place) as engine:
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
        step(engine, dtype=torch.bfloat16)
    assert torch.equal(module.scale, untrained.scale)
    assert not torch.equal(module.scale, untrained.scale.bfloat16())
    assert not torch.equal(module.first.weight, module.first.weight.bfloat16().float())
    assert [b.dtype for b in module.buffers()] == [torch.float32, torch.float64, torch.int64]
    assert all(torch.equal(b, c) for b, c in zip(module.buffers(), untrained.buffers(), strict=True))


def test_they_outlive_the_engine_in_memory_of_their_own(place: dict[str, Any]) -> None:
    """A view of a flat master would keep all of it, and would be saved with all of it."""
    module = Net()
    with engine_around(module, **place) as engine:
        step(engine)
    assert [p.untyped_storage().nbytes() for p in module.parameters()] == [4 * p.numel() for p in module.parameters()]


def test_weights_of_the_engines_own_dtype_are_not_kept_twice() -> None:
    module = Net()
    module.first.bfloat16()
    weights = OriginalModule(module, torch.bfloat16).weights
    assert weights.keys() == set(module.parameters()) - {module.first.weight}
    assert list(OriginalModule(module, torch.float32).weights) == [module.first.weight]


def test_what_has_no_value_given_keeps_its_own() -> None:
    module, untouched = Net(), Net()
    original = OriginalModule(module, torch.float32)
    for p in module.parameters():
        p.data = p.data.bfloat16()
    original.restore({module.up.bias: torch.ones(520)})
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert torch.equal(module.up.bias, torch.ones(520))
    assert torch.equal(module.up.weight, untouched.up.weight.bfloat16().float())
    assert module.up.bias.requires_grad
    assert not module.scale.requires_grad


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_that_fails_while_it_is_made_leaves_the_weights(stage: int, bf16: bool) -> None:
    """At stage 3 the parameters are empty by then: their values are in DeepSpeed's partitions."""
    module, untouched = Net(), Net()
    before = marks(module)
    dtype = torch.bfloat16 if bf16 else torch.float32
    original = OriginalModule(module, dtype)
    no_optimizer: Any = "refused by deepspeed.initialize, which comes after the partitioning"
    config = {**zero_config(stage), **({"bf16": {"enabled": True}} if bf16 else {})}
    with environment(ONE_PROCESS), without_deprecations():
        open_process_group("gloo")
        try:
            with pytest.raises(AssertionError, match="Optimizer"):
                make_engine(module, config, no_optimizer, dtype, torch.device("cpu", 0))
            assert (module.up.weight.numel() == 0) == (stage == 3)
            original.restore(weights_of(None, module, original.weights))
        finally:
            close_process_group()
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), untouched.parameters(), strict=True))
    assert marks(module) == before
