"""MasterWeights of each of torch's optimizers against an fp32 run of it whose forward takes rounded weights."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_solo.errors import CheckpointError, ConflictError, GradientError, PresetError
from lightning_solo.memory.ledger import Ledger
from lightning_solo.optim import MasterWeights, StepInBackward, adamw_update, split_weights
from lightning_solo.optim.split_weights import STOCHASTIC, split_parameters
from lightning_solo.optim.torch_optimizers import ONE_BY_ONE, SERVED, state_bytes
from tests.messages import mentions
from tests.training import backward, contents, equal, train

RULES: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1},
    "SGD with momentum": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Adamax": {"lr": 0.01, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1},  # which bf16 can't tell
    "Adadelta": {"lr": 1.0},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.01},
    "ASGD": {"lr": 0.1, "t0": 3.0},
    "Adafactor": {"lr": 0.05},
    "Lion": {"lr": 0.01, "weight_decay": 0.1},
}
KINDS = dict(zip(ONE_BY_ONE, SERVED, strict=True))
every_rule = pytest.mark.parametrize("rule", RULES)


def test_every_optimizer_is_here() -> None:
    assert {rule.split()[0] for rule in RULES} == set(ONE_BY_ONE) == {kind.__name__ for kind in SERVED}


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 7)).to(dtype)


def made(rule: str, module: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
    first, *others = module.parameters()
    groups = [{"params": [first], "lr": RULES[rule]["lr"] / 2}, {"params": others}]
    kind: Any = KINDS[rule.split()[0]]
    return kind(groups, **{**RULES[rule], **kwargs})


def split_net(rule: str, master_bits: int | str = 32) -> tuple[nn.Module, MasterWeights]:
    module = net()
    corrections = split_parameters(module.parameters(), master_bits)  # before the optimizer is made, as a strategy does
    return module, MasterWeights(made(rule, module), master_bits=master_bits, corrections=corrections)


def by_hand(rule: str, scheduled: bool = False) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Return fp32 masters after eight steps of torch's optimizer, and it; each forward has them rounded to bf16."""
    module = net()
    masters = [nn.Parameter(p.detach().clone()) for p in module.parameters()]
    holder = nn.Module()
    holder.own = nn.ParameterList(masters)
    optimizer = made(rule, holder)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if scheduled else None
    module.to(torch.bfloat16)
    for step in range(8):
        for p, master in zip(module.parameters(), masters, strict=True):
            raw = master.detach().view(torch.int32)  # to nearest, ties away from zero
            p.data = ((raw + 0x8000) & -0x10000).view(torch.float32).to(torch.bfloat16)
        module.zero_grad()
        backward(module, step)
        for p, master in zip(module.parameters(), masters, strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return masters, optimizer


# --- acted ---


@every_rule
def test_acted_on_weights_and_states(rule: str) -> None:
    module, optimizer = split_net(rule, 24)
    start = [optimizer.master_weight(p) for p in module.parameters()]
    train(module, optimizer)
    for p, before in zip(module.parameters(), start, strict=True):
        state = optimizer.state[p]
        assert p.dtype == torch.bfloat16
        assert state["correction"].dtype == torch.int8
        assert state["correction"].any()
        others = [value for name, value in state.items() if name != "correction" and isinstance(value, Tensor)]
        assert {value.dtype for value in others} <= {torch.float32}
        assert not torch.equal(optimizer.master_weight(p), before)


# --- parity ---


@every_rule
@pytest.mark.parametrize("release", [False, True])
def test_parity_with_fp32_masters_by_hand(rule: str, release: bool) -> None:
    masters, plain = by_hand(rule)
    module, optimizer = split_net(rule)
    if release:
        steps = StepInBackward(optimizer)
        for step in range(8):
            backward(module, step)
            assert all(p.grad is None for p in module.parameters())
            steps.step()
    else:
        train(module, optimizer)
    for p, master in zip(module.parameters(), masters, strict=True):
        assert torch.equal(optimizer.master_weight(p), master)
        own = {name: value for name, value in optimizer.state[p].items() if name != "correction"}
        theirs = plain.state[master]
        assert own.keys() == theirs.keys()
        values = [(torch.as_tensor(own[name]), torch.as_tensor(theirs[name])) for name in own if own[name] is not None]
        assert all(equal(*both) for both in values)


@every_rule
def test_parity_with_a_scheduler(rule: str) -> None:
    masters, _ = by_hand(rule, scheduled=True)
    module, optimizer = split_net(rule)
    train(module, optimizer, range(8), torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
    for p, master in zip(module.parameters(), masters, strict=True):
        assert torch.equal(optimizer.master_weight(p), master)
    assert torch.equal(masters[0], by_hand(rule)[0][0]) == (rule == "Rprop")  # which takes lr for its first step alone


@every_rule
def test_parity_of_fp32_parameters_that_are_not_split(rule: str) -> None:
    plain, ours = net(), net()
    one, other = made(rule, plain), MasterWeights(made(rule, ours), master_bits=32)
    train(plain, one)
    train(ours, other)
    assert equal(plain.parameters(), ours.parameters())


@pytest.mark.parametrize("rule", ["SGD with momentum", "Adafactor", "Adagrad"])
def test_parity_released_with_accumulation_and_clipping(rule: str) -> None:
    one, plain = split_net(rule)
    masters = [nn.Parameter(plain.master_weight(p)) for p in one.parameters()]
    holder = nn.Module()
    holder.own = nn.ParameterList(masters)
    own = made(rule, holder)
    two, optimizer = split_net(rule)
    release = StepInBackward(optimizer, accumulation=3, max_norm=0.05)
    for window in range(4):
        for p, master in zip(one.parameters(), masters, strict=True):
            raw = master.detach().view(torch.int32)
            p.data.copy_(((raw + 0x8000) & -0x10000).view(torch.float32))
            master.grad = torch.zeros_like(master)
        for part in range(3):
            one.zero_grad()
            for module in (one, two):
                backward(module, 3 * window + part)
            for p, master in zip(one.parameters(), masters, strict=True):
                assert p.grad is not None
                assert master.grad is not None
                master.grad += p.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 0.05)
        own.step()
        release.step()
    for p, master in zip(two.parameters(), masters, strict=True):
        torch.testing.assert_close(optimizer.master_weight(p), master, rtol=1e-6, atol=1e-7)  # of sums of another order


def test_a_transposed_weight_is_stepped_in_its_own_order() -> None:
    values = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
    results = []
    for p in (nn.Parameter(values.clone()), nn.Parameter(values.t().contiguous().t())):
        optimizer = MasterWeights(torch.optim.SGD([p], lr=0.1, momentum=0.9))
        for step in range(3):
            p.grad = torch.randn(6, 10, generator=torch.Generator().manual_seed(step)).to(p.dtype)
            optimizer.step()
        results.append(optimizer.master_weight(p))
    assert torch.equal(*results)


@pytest.mark.parametrize("master_bits", [32, 24, STOCHASTIC])
def test_chunks_change_nothing(master_bits: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """240 elements, whole and in two parts, of a block and of a short one."""
    results = []
    for size in (2**18, 128):
        monkeypatch.setitem(adamw_update.CHUNK, "cpu", size)
        monkeypatch.setitem(split_weights.CHUNK, "cpu", size)
        module, optimizer = split_net("NAdam", master_bits)
        train(module, optimizer)
        results.append(contents(optimizer))
    assert equal(*results)


def test_parameters_are_rounded_by_different_random_numbers() -> None:
    """Two equal parameters with equal gradients, both halfway between two bf16 numbers after the step."""
    parameters = [nn.Parameter(torch.ones(512, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = MasterWeights(torch.optim.SGD(parameters, lr=1.0), master_bits=STOCHASTIC)
    for p in parameters:
        p.grad = torch.full_like(p, -(2.0**-8))
    optimizer.step()
    first, second = (p.detach().float() for p in parameters)
    assert {*first.unique().tolist()} == {*second.unique().tolist()} == {1.0, 1.0 + 2.0**-7}
    assert (first != second).float().mean() > 0.1  # quasirandom sequences, of which each has its own start


def test_stochastic_rounding_moves_the_mean() -> None:
    """Updates of a 2,000th of a weight, a quarter of what bf16 can tell: the mean moves as fp32 would."""
    p = nn.Parameter(torch.ones(2**14, dtype=torch.bfloat16))
    optimizer = MasterWeights(torch.optim.SGD([p], lr=2**-11), master_bits=STOCHASTIC)
    for _ in range(8):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert float(p.detach().float().mean()) == pytest.approx(1 - 8 * 2**-11, abs=1e-4)
    # 8 of 8 steps go down by 2**-8, each with probability 1/8, in one of 1.7e7 walks; by the same numbers in one of 8
    assert p.min() > 1 - 8 * 2**-8
    assert "correction" not in optimizer.state[p]


def test_a_weight_that_backward_still_needs_is_known_to_have_changed() -> None:
    for p in (nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=torch.bfloat16))):
        optimizer = MasterWeights(torch.optim.SGD([p], lr=0.1), master_bits=32)
        version = p._version
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert p._version > version


# --- memory ---


@every_rule
def test_memory_is_what_is_said(rule: str) -> None:
    module, optimizer = split_net(rule, 24)
    train(module, optimizer, range(2))
    every = list(module.parameters())
    live = Ledger(module, [optimizer]).live()
    counts = [v for p in every for v in optimizer.state[p].values() if isinstance(v, Tensor) and v.dim() == 0]
    corrections = sum(p.numel() for p in every)
    assert live["weights"] == 2 * corrections
    own = live["optimizer_states"] - corrections - sum(count.nbytes for count in counts)
    assert own == state_bytes(optimizer)
    assert optimizer.bytes_per_parameter == 3 + own / corrections
    assert ("keeps none" in optimizer.summary()) == (own == 0)


def test_bytes_per_parameter_of_large_ones() -> None:
    each = {}
    for rule in RULES:
        p = nn.Parameter(torch.empty(512, 512, dtype=torch.bfloat16, device="meta"))
        kind: Any = KINDS[rule.split()[0]]
        each[rule] = round(MasterWeights(kind([p], **RULES[rule]), corrections={}).bytes_per_parameter, 2)
    assert each == {
        "SGD": 2 + 1,
        "SGD with momentum": 2 + 1 + 4,
        "Adam": 2 + 1 + 8,
        "AdamW": 2 + 1 + 12,  # amsgrad
        "NAdam": 2 + 1 + 8,
        "RAdam": 2 + 1 + 8,
        "Adamax": 2 + 1 + 8,
        "Adagrad": 2 + 1 + 4,
        "Adadelta": 2 + 1 + 8,
        "RMSprop": 2 + 1 + 12,  # centered, with momentum
        "Rprop": 2 + 1 + 8,
        "ASGD": 2 + 1 + 4,
        "Adafactor": 3.02,  # 2 + 1 + 4 * 2 / 512
        "Lion": 2 + 1 + 4,
    }


# --- trace ---


@every_rule
@pytest.mark.parametrize("master_bits", [32, 24, STOCHASTIC])
def test_trace_resumes_bit_for_bit(rule: str, master_bits: int | str, tmp_path: Path) -> None:
    whole, one = split_net(rule, master_bits)
    train(whole, one, range(8))
    half, two = split_net(rule, master_bits)
    train(half, two, range(4))
    torch.save({"module": half.state_dict(), "optimizer": two.state_dict()}, tmp_path / "half.pt")
    file = torch.load(tmp_path / "half.pt", weights_only=True)
    resumed, three = split_net(rule, master_bits)
    resumed.load_state_dict(file["module"])
    three.load_state_dict(file["optimizer"])
    assert equal(contents(three), contents(two))
    train(resumed, three, range(4, 8))
    assert equal(contents(three), contents(one))


@every_rule
def test_trace_continues_from_states_of_torch(rule: str) -> None:
    """An fp32 run goes on as a compact one: states as they were, masters from its weights."""
    plain = net()
    own = made(rule, plain)
    train(plain, own, range(4))
    module, optimizer = split_net(rule)
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        optimizer.set_master_weight(p, q.detach())
        assert torch.equal(optimizer.master_weight(p), q)
    optimizer.load_state_dict(own.state_dict())
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(optimizer.master_weight(p), q)
        assert all(
            torch.equal(torch.as_tensor(optimizer.state[p][n]), torch.as_tensor(v)) for n, v in own.state[q].items()
        )
    train(module, optimizer, range(4, 6))


def test_trace_copies_and_pickles() -> None:
    module, optimizer = split_net("NAdam", 24)
    train(module, optimizer, range(3))
    both = copy.deepcopy((module, optimizer))
    again = pickle.loads(pickle.dumps((module, optimizer)))
    train(module, optimizer, range(3, 6))
    for other in (both, again):
        train(*other, range(3, 6))
        assert equal(contents(other[1]), contents(optimizer))


def test_trace_a_failing_step_leaves_its_states() -> None:
    module, optimizer = split_net("NAdam", 24)
    train(module, optimizer, range(2))
    before = contents(optimizer)
    optimizer._inner.step = lambda: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert equal(contents(optimizer), before)


def test_groups_that_are_added_later() -> None:
    module = net()
    optimizer = MasterWeights(torch.optim.Adagrad(module[0].parameters(), lr=0.1))
    optimizer.add_param_group({"params": list(module[2].parameters()), "lr": 0.2})
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    train(module, optimizer)
    assert all("sum" in optimizer.state[p] for p in module.parameters())


# --- refusals ---


def test_refusals_name_the_remedy() -> None:
    module = net()

    class Mine(torch.optim.SGD):
        pass

    for other in (Mine(module.parameters()), torch.optim.LBFGS(module.parameters())):
        with pytest.raises(ConflictError, match=mentions(type(other).__name__, "torch's SGD")):
            MasterWeights(other)
    with pytest.raises(ConflictError, match=mentions("SGD(differentiable=True): write differentiable=False")):
        MasterWeights(torch.optim.SGD(module.parameters(), differentiable=True))
    with pytest.raises(PresetError, match="master_bits=16: write 32, 24 or '16-stochastic'"):
        MasterWeights(made("SGD", module), master_bits=16)
    with pytest.raises(PresetError, match="parameter 0 is float64; parameters are float32 or bfloat16"):
        MasterWeights(made("SGD", net(torch.float64)))
    corrections = split_parameters(module.parameters(), 32)
    with pytest.raises(PresetError, match=mentions("corrections=split_parameters(parameters, 24)")):
        MasterWeights(made("SGD", module), master_bits=24, corrections=corrections)


def test_files_of_others_are_refused() -> None:
    module, optimizer = split_net("SGD with momentum", 24)
    train(module, optimizer)
    before = contents(optimizer)
    with pytest.raises(CheckpointError, match=mentions("group 0", "momentum", "SGD")):
        optimizer.load_state_dict(made("AdamW", net()).state_dict())
    wide, other = split_net("SGD with momentum", 32)
    train(wide, other)
    with pytest.raises(CheckpointError, match=mentions("240", "2 bytes", "master_bits")):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(CheckpointError, match=mentions("1 parameters", " 4")):
        optimizer.load_state_dict(torch.optim.SGD([nn.Parameter(torch.ones(1))], momentum=0.9).state_dict())
    assert equal(contents(optimizer), before)


def test_hooks_of_loading_see_the_states() -> None:
    module, optimizer = split_net("SGD with momentum", 24)
    train(module, optimizer)
    states, seen = optimizer.state_dict(), []
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: seen.append(len(state_dict["state"])))
    optimizer.register_load_state_dict_post_hook(lambda owner: seen.append(len(owner.state)))
    optimizer.state.clear()
    optimizer.load_state_dict(states)
    assert seen == [4, 4]


def test_a_gradient_that_is_not_finite_touches_nothing():
    layer = nn.Linear(64, 64)
    optimizer = MasterWeights(torch.optim.SGD(layer.parameters(), lr=0.1))
    before = [p.detach().clone() for p in layer.parameters()]
    layer(torch.full((2, 64), float("nan"), dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(GradientError, match="not finite"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(layer.parameters(), before, strict=True))
