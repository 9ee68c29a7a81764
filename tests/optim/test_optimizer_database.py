"""`CompactAdamW` on torch's own database of optimizer tests: inputs, schedulers, errors, groups, states and hooks.

At 32 + 32 bits it is torch's loop over parameters, bit for bit; at 24 + 8 it follows. What differs is named here:

- ``amsgrad``, ``maximize`` and ``differentiable`` have no compact form, and are refused;
- ``foreach`` isn't an argument, for steps of many parameters share launches anyway; of another optimizer it is ignored;
- a beta is read as a number, so that one may be a tensor and the other not;
- parameters are fp32 or bf16, and dense: torch's also take complex numbers, fp16 and fp64, and gaps in memory.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.testing import assert_close

from lightning_solo.errors import ConflictError, GradientError, PresetError
from lightning_solo.optim.adamw_state_dict import UNSUPPORTED
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.conversion import compacted

with pytest.MonkeyPatch.context() as patch:  # the import would freeze the flags of torch.backends for all other tests
    patch.setattr(torch.backends, "disable_global_flags", lambda: None)
    database: Any = pytest.importorskip("torch.testing._internal.common_optimizers", reason="it needs expecttest")

KINDS: dict[type[Optimizer], Any] = {
    each.optim_cls: each for each in database.optim_db if each.optim_cls in (AdamW, Adam)
}
EXACT, COMPACT = (32, 32), (24, 8)
FOLLOWS = {32: 0.03, 8: 0.1}
"""How far a master of 24 bits with moments in these bits may be off, of the way that AdamW went.

A step of 0.001 of a weight from 2 to 4 is 16 units of its last bit: 0.5 / 16 = 3 %, at the worst. And a gradient below
half of 1 / 127 of the greatest of its 128 is lost in moments in 8 bits: that is 2.5 / 254 = 0.01 sigma, which 0.8 % of
normal numbers are below: sqrt(0.008) = 9 %.
"""
STEPS = 20
every_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
every_bits = pytest.mark.parametrize("bits", [EXACT, COMPACT], ids=["32 + 32", "24 + 8"])


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float32)) for shape in ((64, 80), (10, 5), (10,), ())]


def loss_of(params: list[nn.Parameter]) -> Tensor:
    return torch.stack([(p.float() - i).square().mean() for i, p in enumerate(params)]).sum()


def backward(params: list[nn.Parameter]) -> Tensor:
    for p in params:
        p.grad = None
    loss = loss_of(params)
    loss.backward()
    return loss


def train(optimizer: Optimizer, params: list[nn.Parameter], steps: int = STEPS) -> None:
    for _ in range(steps):
        backward(params)
        optimizer.step()


def compact(kind: type[Optimizer], params: Any, bits: tuple[int, int], **kwargs: Any) -> CompactAdamW:
    """Return a `CompactAdamW` of the arguments of another optimizer, with its defaults."""
    kwargs = {"weight_decay": 0.01 if kind is AdamW else 0.0, **kwargs}
    decoupled = kind is AdamW
    return CompactAdamW(params, master_bits=bits[0], moment_bits=bits[1], decoupled_weight_decay=decoupled, **kwargs)


def masters(optimizer: CompactAdamW, params: list[nn.Parameter]) -> list[Tensor]:
    return [optimizer.master_weight(p).clone() for p in params]


def assert_equal(ours: CompactAdamW, mine: list[nn.Parameter], theirs: Optimizer, their: list[nn.Parameter]) -> None:
    """Check weights and states against torch's, bit for bit."""
    states, expected = ours.adamw_state_dict()["state"], theirs.state_dict()["state"]
    assert_close([p.detach() for p in mine], [p.detach() for p in their], rtol=0, atol=0)
    assert states.keys() == expected.keys()
    assert expected
    for number, state in expected.items():
        assert_close(states[number], state, rtol=0, atol=0)


def assert_follows(ours: CompactAdamW, mine: list[nn.Parameter], their: list[nn.Parameter]) -> None:
    for q, p, start in zip(mine, their, parameters(), strict=True):
        bits = 8 if "exp_avg_scale" in ours.state[q] else 32
        way, off = (p - start).norm().item(), (ours.master_weight(q) - p).norm().item()
        assert way > 0.01 * start.norm().item()
        assert off <= FOLLOWS[bits] * way


# --- inputs ---


def inputs() -> Iterator[Any]:
    """Yield (class, arguments) of the database: with each implementation, and with tensors, as for GPUs."""
    for kind, info in KINDS.items():
        for each in info.optim_inputs_func("cpu"):
            for switch in (None, *info.supported_impls):
                kwargs = {name: name == switch for name in info.supported_impls}
                yield pytest.param(kind, {**each.kwargs, **kwargs}, id=f"{kind.__name__}: {each.desc}, {switch}")
        for each in [*info.optim_inputs_func("mps"), *info.optim_inputs_func("cuda")]:
            if isinstance(each.kwargs.get("lr"), Tensor):  # capturable is for GPUs; amsgrad is refused above
                kwargs = {name: each.kwargs[name] for name in ("lr", "betas") if name in each.kwargs}
                yield pytest.param(kind, kwargs, id=f"{kind.__name__}: {each.desc}")


def is_refused(kwargs: dict[str, Any]) -> bool:
    return any(kwargs.get(name) for name in UNSUPPORTED)


SERVED = [each for each in inputs() if not is_refused(each.values[1])]
REFUSED = [each for each in inputs() if is_refused(each.values[1])]


def test_the_database_has_inputs_of_each_sort():
    names = {name for each in SERVED for name, value in each.values[1].items() if value is not False}
    assert names >= {"lr", "betas", "weight_decay", "foreach", "fused"}
    assert {name for each in REFUSED for name, value in each.values[1].items() if value is True} >= set(UNSUPPORTED)
    assert not torch.backends.flags_frozen()


@pytest.mark.parametrize(("kind", "kwargs"), SERVED)
def test_32_bits_agree(kind: type[Optimizer], kwargs: dict[str, Any]):
    kwargs = copy.deepcopy(kwargs)
    mine, their = parameters(), parameters()
    theirs = kind(their, **kwargs)  # type: ignore[call-arg]
    converted = kind(mine, **kwargs)  # type: ignore[call-arg]
    ours = compacted(converted, master_bits=32, moment_bits=32)
    assert isinstance(ours, CompactAdamW)
    train(theirs, their)
    train(ours, mine)
    if kwargs.get("fused") or kwargs.get("foreach") or isinstance(kwargs.get("lr"), Tensor):
        # torch's round otherwise: they fuse a product with a sum, or compute with a tensor in fp32, not in fp64
        assert_close([p.detach() for p in mine], [p.detach() for p in their], rtol=1e-5, atol=1e-6)
    else:
        assert_equal(ours, mine, theirs, their)


@pytest.mark.parametrize("fused", [None, False], ids=["fused", "operators"])
@pytest.mark.parametrize(("kind", "kwargs"), SERVED)
def test_24_and_8_bits_follow(kind: type[Optimizer], kwargs: dict[str, Any], fused: bool | None):
    mine, their = parameters(), parameters()
    train(kind(their, **copy.deepcopy(kwargs)), their)  # type: ignore[call-arg]
    kept = {name: value for name, value in copy.deepcopy(kwargs).items() if name in ("lr", "betas", "weight_decay")}
    ours = compact(kind, mine, COMPACT, fused=fused, **kept)
    train(ours, mine)
    assert "exp_avg_scale" in ours.state[mine[0]]
    assert_follows(ours, mine, their)


@pytest.mark.parametrize(("kind", "kwargs"), REFUSED)
def test_rules_without_a_compact_form_are_refused(kind: type[Optimizer], kwargs: dict[str, Any]):
    rule = next(name for name in UNSUPPORTED if kwargs.get(name))
    with pytest.raises(TypeError, match=rule):
        CompactAdamW(parameters(), **{rule: True})
    with pytest.raises(ConflictError, match=f"{rule}=True"):
        compacted(kind(parameters(), **kwargs), master_bits=32, moment_bits=32)  # type: ignore[call-arg]


# --- schedulers ---


def schedules() -> Iterator[Any]:
    for kind, info in KINDS.items():
        for i, constructors in enumerate(info.scheduler_inputs):
            yield pytest.param(kind, constructors, id=f"{kind.__name__} {i}")


def scheduled(optimizer: Optimizer, params: list[nn.Parameter], constructors: list[Callable[..., Any]]) -> list[float]:
    """Train with schedulers; return the learning rate of each step."""
    schedulers, rates = [each(optimizer) for each in constructors], []
    for _ in range(STEPS):
        loss = backward(params)
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step(*[loss.detach()] if isinstance(scheduler, ReduceLROnPlateau) else [])
    return rates


@every_bits
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize(("kind", "constructors"), list(schedules()))
def test_schedulers(kind: type[Optimizer], constructors: Any, tensor_lr: bool, bits: tuple[int, int]):
    lr: Any = [torch.tensor(0.01) if tensor_lr else 0.01 for _ in range(2)]
    mine, their = parameters(), parameters()
    theirs, ours = kind(their, lr=lr[0], foreach=False), compact(kind, mine, bits, lr=lr[1])  # type: ignore[call-arg]
    rates = scheduled(theirs, their, constructors)
    before = loss_of(mine)
    assert scheduled(ours, mine, constructors) == rates
    assert len(set(rates)) > 1
    assert loss_of(mine) < before
    if tensor_lr:
        assert ours.param_groups[0]["lr"] is lr[1]
    if bits == COMPACT:
        assert_follows(ours, mine, their)
    elif tensor_lr:
        assert_close([p.detach() for p in mine], [p.detach() for p in their], rtol=1e-5, atol=1e-6)
    else:
        assert_equal(ours, mine, theirs, their)


# --- groups ---


def groups_of(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[:1], "weight_decay": 0.5},
        {"params": params[1:3], "lr": 0.002, "betas": (0.8, 0.95), "eps": 1e-6},
    ]


@every_bits
@every_kind
def test_groups_of_their_own(kind: type[Optimizer], bits: tuple[int, int]):
    """Each has its own numbers; one is added later; and what a user writes into one counts from the next step on."""
    mine, their = parameters(), parameters()
    theirs, ours = kind(groups_of(their), lr=0.05, foreach=False), compact(kind, groups_of(mine), bits, lr=0.05)  # type: ignore[call-arg]
    for optimizer, params in ((theirs, their), (ours, mine)):
        train(optimizer, params, 10)
        optimizer.add_param_group({"params": params[3], "lr": 0.2})
        optimizer.param_groups[0]["weight_decay"] = 0.1
        optimizer.param_groups[1]["lr"] = 0.01
        train(optimizer, params, 10)
    assert [group["lr"] for group in ours.param_groups] == [0.05, 0.01, 0.2]
    for group, expected in zip(ours.param_groups, theirs.param_groups, strict=True):
        for name in ("betas", "eps", "weight_decay"):
            assert group[name] == expected[name]
    if bits == COMPACT:
        assert_follows(ours, mine, their)
    else:
        assert_equal(ours, mine, theirs, their)
    assert {int(ours.state[p]["step"]) for p in mine} == {10, 20}


@every_bits
@every_kind
@pytest.mark.parametrize("gradients", ["none", "zero"])
def test_without_gradients_nothing_moves(gradients: str, kind: type[Optimizer], bits: tuple[int, int]):
    params = parameters()
    optimizer = compact(kind, params, bits, weight_decay=0.0)
    before = masters(optimizer, params)
    for _ in range(2):
        for p in params:
            p.grad = None if gradients == "none" else torch.zeros_like(p)
        optimizer.step()
    assert_close(masters(optimizer, params), before, rtol=0, atol=0)
    assert [int(optimizer.state[p].get("step", 0)) for p in params] == [0 if gradients == "none" else 2] * 4


@every_bits
@every_kind
def test_a_closure_as_for_torchs(kind: type[Optimizer], bits: tuple[int, int]):
    losses = {}
    for make in (lambda params: kind(params, lr=0.05), lambda params: compact(kind, params, bits, lr=0.05)):  # type: ignore[call-arg]
        params = parameters()
        optimizer = make(params)
        losses[type(optimizer)] = [optimizer.step(lambda params=params: backward(params)).item() for _ in range(5)]
    assert losses[kind] == pytest.approx(losses[CompactAdamW], rel=0.01)
    assert losses[kind] == sorted(losses[kind], reverse=True)


# --- states ---


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    states = optimizer.state_dict()["state"]
    return [value for number in sorted(states) for _, value in sorted(states[number].items())]


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def trained(kind: type[Optimizer], bits: tuple[int, int]) -> tuple[CompactAdamW, list[nn.Parameter]]:
    params = parameters()
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    optimizer = compact(kind, [{"params": named[:2]}, {"params": named[2:], "lr": 0.02}], bits, lr=0.05)
    train(optimizer, params, 5)
    return optimizer, params


def assert_trains_alike(one: CompactAdamW, mine: list[nn.Parameter], other: CompactAdamW, their: Any) -> None:
    train(one, mine, 5)
    assert not torch.equal(mine[0], their[0])  # they share no memory
    train(other, their, 5)
    for p, q in zip(mine, their, strict=True):
        assert torch.equal(p, q)
    assert_close(state_tensors(other), state_tensors(one), rtol=0, atol=0)


@every_bits
@every_kind
@pytest.mark.parametrize("how", ["state_dict", "without names", "deepcopy", "pickle"])
def test_saved_optimizer_continues_as_the_original(how: str, kind: type[Optimizer], bits: tuple[int, int]):
    optimizer, params = trained(kind, bits)
    if how in ("deepcopy", "pickle"):
        both = (optimizer, params)
        again, copied = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
        assert {name for name in vars(optimizer) if not name.startswith("_")} <= set(vars(again))
    else:
        states = optimizer.state_dict()
        if how == "without names":
            for group in states["param_groups"]:
                del group["param_names"]
        states, before = through_a_file(states), copy.deepcopy(states)
        copied = [nn.Parameter(torch.zeros(p.shape, dtype=p.dtype)) for p in params]
        mine = [(f"p{i}", p) for i, p in enumerate(copied)] if how == "without names" else copied
        again = compact(kind, [{"params": mine[:2]}, {"params": mine[2:]}], bits)
        again.load_state_dict(states)
        assert states["param_groups"] == before["param_groups"]  # the file's is as it was
        with torch.no_grad():
            for p, q in zip(copied, params, strict=True):
                p.copy_(q)
    assert [(group["lr"], group["param_names"]) for group in again.param_groups] == [
        (0.05, ["p0", "p1"]),
        (0.02, ["p2", "p3"]),
    ]
    assert repr(again) == repr(optimizer)
    assert_close(state_tensors(again), state_tensors(optimizer), rtol=0, atol=0)
    assert_trains_alike(optimizer, params, again, copied)


@every_bits
@every_kind
def test_state_dicts_of_older_versions(kind: type[Optimizer], bits: tuple[int, int]):
    """Of torch's without the switches that came later, and with steps that are no tensors; and of ours."""
    info, their, mine = KINDS[kind], parameters(), parameters()
    theirs = kind(their, lr=0.05)  # type: ignore[call-arg]
    train(theirs, their, 5)
    ours = compact(kind, mine, bits)
    older = theirs.state_dict()
    for group in older["param_groups"]:
        for name in (*info.not_og_supported_flags, "decoupled_weight_decay"):
            group.pop(name, None)
    for state in older["state"].values():
        state["step"] = float(state["step"])
    ours.load_state_dict(older)
    group = ours.param_groups[0]
    assert group["lr"] == 0.05
    assert group["decoupled_weight_decay"] == (kind is AdamW)
    assert all(int(ours.state[p]["step"]) == 5 for p in mine)
    assert all(isinstance(ours.state[p]["step"], Tensor) for p in mine)
    own = ours.state_dict()
    before = [value.clone() for value in state_tensors(ours)]
    del own["param_groups"][0]["decoupled_weight_decay"]
    ours.load_state_dict(own)
    assert ours.param_groups[0]["decoupled_weight_decay"] == (kind is AdamW)
    assert_close(state_tensors(ours), before, rtol=0, atol=0)
    train(ours, mine, 1)


@every_bits
@every_kind
def test_hooks(kind: type[Optimizer], bits: tuple[int, int]):
    """Around steps, state dicts and their loading: what each sees, and that what it returns counts."""
    optimizer, params = trained(kind, bits)
    was, seen = optimizer.state_dict(), []
    steps = {int(state["step"]) for state in was["state"].values()}
    changed = copy.deepcopy(was)
    for state in changed["state"].values():
        state["step"].fill_(100)

    def loading(owner: Any, state_dict: Any) -> Any:
        assert state_dict["state"].keys() == was["state"].keys()
        return changed

    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, "more": 1})
    optimizer.register_load_state_dict_pre_hook(loading)
    optimizer.register_load_state_dict_post_hook(lambda owner: seen.append(int(owner.state[params[0]]["step"])))
    train(optimizer, params, 1)
    assert optimizer.state_dict()["more"] == 1
    optimizer.load_state_dict(was)
    assert steps == {5}
    assert seen == ["before", "after", "saving", 100]  # loaded by then, as the hook before it said


@every_bits
@every_kind
def test_another_default_type(kind: type[Optimizer], bits: tuple[int, int]):
    expected, params = trained(kind, bits)
    torch.set_default_dtype(torch.float64)
    try:
        again, others = trained(kind, bits)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_close(masters(again, others), masters(expected, params), rtol=0, atol=0)


# --- errors ---


def _errors() -> Iterator[Any]:
    for kind, info in KINDS.items():
        for each in info.optim_error_inputs_func("cpu", torch.float32):
            given = each.optimizer_error_input
            yield pytest.param(kind, given, each.error_type, id=f"{kind.__name__}: {given.desc}")


def _is_mixed(betas: Any) -> bool:
    return betas is not None and len({isinstance(beta, Tensor) for beta in betas}) == 2


@pytest.mark.parametrize(("kind", "given", "error"), list(_errors()))
def test_error_inputs(kind: type[Optimizer], given: Any, error: type[Exception]):
    """Each is an error of the same class as of torch's; of ours the message says what to write."""
    params = given.params if given.params is not None else parameters()
    if "foreach" in given.kwargs:  # refused together with tensors; here there is no such argument
        error = TypeError
    if _is_mixed(given.kwargs.get("betas")):
        mine, their = parameters(), parameters()
        ours = compact(kind, mine, EXACT, **given.kwargs)
        theirs = kind(their, lr=0.01, betas=tuple(map(float, given.kwargs["betas"])), foreach=False)  # type: ignore[call-arg]
        train(ours, mine)
        train(theirs, their)
        assert_equal(ours, mine, theirs, their)
    elif error is UserWarning:
        with pytest.warns(error):
            compact(kind, params, COMPACT, **given.kwargs)
    else:
        with pytest.raises(error) as raised:
            compact(kind, params, COMPACT, **given.kwargs)
        if given.params is None and error is ValueError:
            assert isinstance(raised.value, PresetError)
            assert any(f"{name}=" in str(raised.value) for name in given.kwargs)


@every_bits
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda new: new([]), id="no parameters"),
        pytest.param(lambda new: new(["weight"]), id="no tensor"),
        pytest.param(lambda new: new([torch.ones(2, requires_grad=True) * 2]), id="no leaf"),
        pytest.param(lambda new: new([{"params": set(parameters())}]), id="a set"),
        pytest.param(lambda new: new(parameters(), lr=-1), id="lr below 0"),
        pytest.param(lambda new: new(parameters(), lr=float("nan")), id="lr NaN"),
        pytest.param(lambda new: new(parameters(), lr="1e-3"), id="lr a string"),
        pytest.param(lambda new: new(parameters(), lr=torch.tensor(-1.0)), id="lr a tensor below 0"),
        pytest.param(lambda new: new(parameters(), eps=-1e-8), id="eps below 0"),
        pytest.param(lambda new: new(parameters(), betas=(0.9, 1.0)), id="a beta of 1"),
        pytest.param(lambda new: new(parameters(), betas=None), id="no betas"),
        pytest.param(lambda new: new(parameters()).add_param_group(parameters()), id="a group that is none"),
        pytest.param(lambda new: new(p := parameters()).add_param_group({"params": p[:1]}), id="added twice"),
    ],
)
def test_more_errors_are_of_the_classes_of_torchs(make: Callable[[Any], Any], bits: tuple[int, int]):
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - the class is what is compared
        make(AdamW)
    with pytest.raises(type(theirs.value)):
        make(lambda params, **kwargs: compact(AdamW, params, bits, **kwargs))


@every_kind
def test_sparse_gradients_are_a_runtime_error_as_of_torchs(kind: type[Optimizer]):
    for make in (kind, lambda params: compact(kind, params, COMPACT)):
        p = parameters()[1]
        optimizer: Any = make([p])
        p.grad = torch.zeros_like(p).to_sparse()
        with pytest.raises(RuntimeError, match="sparse") as raised:
            optimizer.step()
    assert isinstance(raised.value, GradientError)
