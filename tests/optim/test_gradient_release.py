"""Release is exact, and frees: any graph of linear layers, any window, any clip, against plain torch and the ledger."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_solo.errors import CheckpointError, ConflictError, GradientError, PresetError
from lightning_solo.memory.ledger import Ledger
from lightning_solo.optim import CompactAdamW, StepInBackward, adamw_update
from lightning_solo.optim.gradient_checks import found_non_finite
from lightning_solo.optim.gradient_sums import GradientSums
from lightning_solo.optim.immediate_steps import ImmediateSteps
from lightning_solo.optim.kernels import Control
from lightning_solo.optim.operator_kernels import OperatorKernels
from lightning_solo.optim.split_weights import split_parameters
from lightning_solo.optim.staging import Staging
from lightning_solo.optim.torch_optimizers import ONE_BY_ONE, SERVED
from tests.messages import mentions
from tests.training import equal


@dataclass(frozen=True)
class Graph:
    """A net, and how it is trained."""

    widths: list[int] = field(default_factory=lambda: [3, 5, 2])
    tied: bool = False
    unused: bool = False
    now_and_then: bool = False
    groups: int = 1
    windows: list[int] = field(default_factory=lambda: [1, 1, 1])
    max_norm: float | None = None
    max_value: float | None = None
    buffer: str = "device"

    @property
    def accumulation(self) -> int:
        return max(self.windows)

    def release(self, optimizer: torch.optim.Optimizer) -> StepInBackward:
        return StepInBackward(
            optimizer,
            accumulation=self.accumulation,
            max_norm=self.max_norm,
            max_value=self.max_value,
            buffer=self.buffer,
        )

    def net(self) -> Net:
        torch.manual_seed(sum(self.widths))
        return Net(self)

    def batches(self) -> Iterator[list[tuple[Tensor, bool]]]:
        """Yield windows of (micro-batch, whether the layer that is used now and then is)."""
        generator = torch.Generator().manual_seed(7)
        for window in self.windows:
            yield [(torch.randn(4, self.widths[0], generator=generator), i % 2 == 1) for i in range(window)]


class Net(nn.Module):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(graph.widths, graph.widths[1:], strict=False))
        first: dict[Any, nn.Parameter] = {}
        for layer in self.layers if graph.tied else []:
            layer.weight = first.setdefault(layer.weight.shape, layer.weight)
        self.unused = nn.Linear(2, 2) if graph.unused else None
        self.sometimes = nn.Linear(graph.widths[-1], 1) if graph.now_and_then else None

    def loss(self, x: Tensor, sometimes: bool) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 2
        loss = x.square().mean() * 3
        return loss + self.sometimes(x).square().mean() if self.sometimes is not None and sometimes else loss


def groups_of(parameters: list[Any], count: int) -> list[dict[str, Any]]:
    made = [{"params": parameters[i::count], "lr": 0.02 / (1 + i), "weight_decay": 0.1 * i} for i in range(count)]
    return [group for group in made if group["params"]]


windows = st.integers(1, 16).flatmap(
    lambda k: st.tuples(st.just(k), st.just(k), st.integers(1, k)).map(list)  # the last is a short one
)
graphs = st.builds(
    Graph,
    widths=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    tied=st.booleans(),
    unused=st.booleans(),
    now_and_then=st.booleans(),
    groups=st.integers(1, 3),
    windows=windows | st.just([1, 1, 1]),
    max_norm=st.none() | st.sampled_from([1e-3, 0.5, 100.0]),
    max_value=st.none() | st.sampled_from([1e-3, 0.05, 10.0]),
    buffer=st.sampled_from(["device", "host"]),
)


def clip(graph: Graph, parameters: list[Tensor]) -> Tensor:
    """Clip as Lightning and torch do, by value before by norm; return the norm."""
    if graph.max_value is not None:
        torch.nn.utils.clip_grad_value_(parameters, graph.max_value, foreach=False)
    bound = float("inf") if graph.max_norm is None else graph.max_norm
    every = [p for p in parameters if p.grad is not None]
    return torch.nn.utils.clip_grad_norm_(every, bound, foreach=False)


# --- exact ---


@settings(max_examples=60)
@given(graphs, st.booleans())
def test_on_fp32_it_is_plain_adamw_and_clip(graph: Graph, compact: bool):
    plain, ours = graph.net(), graph.net()
    theirs = torch.optim.AdamW(groups_of(list(plain.parameters()), graph.groups), foreach=False)
    groups = groups_of(list(ours.parameters()), graph.groups)
    optimizer: Any = (
        CompactAdamW(groups, master_bits=32, moment_bits=32) if compact else torch.optim.AdamW(groups, foreach=False)
    )
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (theirs, optimizer)]
    in_order = [p for group in theirs.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in ours.parameters()]
    with graph.release(optimizer) as release:
        for window in graph.batches():
            theirs.zero_grad()
            for x, sometimes in window:
                (plain.loss(x, sometimes) / len(window)).backward()
                (ours.loss(x, sometimes) / len(window)).backward()
                assert all(p.grad is None for p in ours.parameters())
            norm = clip(graph, in_order)
            theirs.step()
            got = release.step()
            assert (got is None) if release.immediate else torch.equal(got, norm)  # type: ignore[arg-type]
            for scheduler in schedulers:
                scheduler.step()
    assert release.immediate == (graph.accumulation == 1 and graph.max_norm is None)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    assert any(not torch.equal(p, was) for p, was in zip(ours.parameters(), before, strict=True))


@pytest.mark.parametrize("compact", [False, True])
def test_a_backward_that_only_measures_clips_the_next(compact: bool) -> None:
    graph = Graph(max_norm=0.5)
    nets, norms = [], []
    for measures in (False, True):
        net = graph.net()
        before = [p.detach().clone() for p in net.parameters()]
        optimizer: Any = (
            CompactAdamW(net.parameters(), lr=0.02, master_bits=32)
            if compact
            else torch.optim.SGD(net.parameters(), lr=0.02)
        )
        with graph.release(optimizer) as release:
            release.measures = measures
            for number, window in enumerate(graph.batches()):
                ((x, _),) = window
                size = 10.0**-number  # of gradients; were it always the same, AdamW's steps would be, too
                if measures:
                    with release.measuring():
                        (net.loss(x, False) * size).backward()
                    assert number or equal([*net.parameters()], before)
                (net.loss(x, False) * size).backward()
                norms.append(release.step())
        nets.append(net)
    assert norms[0] > 0.5 > norms[2]
    assert norms[3:] == [None] * 3
    assert equal([*nets[0].parameters()], [*nets[1].parameters()])


def nearest(master: Tensor) -> Tensor:
    """Return the bf16 numbers nearest to fp32 ones, half away from zero, by integers."""
    bits = master.numpy().view(np.uint32).astype(np.int64)
    return torch.from_numpy((((bits + 0x8000) >> 16) << 16).astype(np.uint32).view(np.float32))


@settings(max_examples=30)
@given(graphs)
def test_split_weights_are_a_master_kept_by_hand(graph: Graph):
    by_hand, ours = graph.net(), graph.net()
    masters = [nn.Parameter(p.detach().clone()) for p in by_hand.parameters()]
    reference = torch.optim.AdamW(groups_of(masters, graph.groups), foreach=False)
    in_order = [p for group in reference.param_groups for p in group["params"]]
    by_hand.bfloat16()
    parameters = list(ours.parameters())
    corrections = split_parameters(parameters, 32)
    optimizer = CompactAdamW(
        groups_of(parameters, graph.groups), master_bits=32, moment_bits=32, corrections=corrections
    )
    with graph.release(optimizer) as release:
        for window in graph.batches():
            for master in masters:
                master.grad = None
            for x, sometimes in window:
                for p, master in zip(by_hand.parameters(), masters, strict=True):
                    p.data.copy_(nearest(master.detach()))
                    p.grad = None
                (by_hand.loss(x.bfloat16(), sometimes) / len(window)).backward()
                for p, master in zip(by_hand.parameters(), masters, strict=True):
                    if p.grad is not None:  # summed in fp32
                        master.grad = p.grad.float() if master.grad is None else master.grad + p.grad.float()
                (ours.loss(x.bfloat16(), sometimes) / len(window)).backward()
            clip(graph, in_order)
            reference.step()
            release.step()
    for p, master in zip(parameters, masters, strict=True):
        assert p.dtype == torch.bfloat16
        assert torch.equal(optimizer.master_weight(p), master.detach())


OTHERS = sorted(set(ONE_BY_ONE) - {"Adam", "AdamW"})


@pytest.mark.parametrize("windows", [[1, 1, 1], [3, 3, 2]], ids=["immediate", "kept"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_of_torch(name: str, windows: list[int]):
    graph = Graph([3, 5, 5, 2], windows=windows, max_norm=None if windows == [1, 1, 1] else 0.1)
    plain, ours = graph.net(), graph.net()
    kind: Any = dict(zip(ONE_BY_ONE, SERVED, strict=True))[name]
    kwargs = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    theirs, optimizer = kind(plain.parameters(), **kwargs), kind(ours.parameters(), **kwargs)
    with graph.release(optimizer) as release:
        for window in graph.batches():
            theirs.zero_grad()
            for x, sometimes in window:
                (plain.loss(x, sometimes) / len(window)).backward()
                (ours.loss(x, sometimes) / len(window)).backward()
            clip(graph, list(plain.parameters()))
            theirs.step()
            release.step()
    for p, q, was in zip(ours.parameters(), plain.parameters(), graph.net().parameters(), strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, was)


def test_sums_in_fp32_where_bf16_stops_growing():
    p = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    release = StepInBackward(torch.optim.SGD([p], lr=0.0), accumulation=1000)
    for _ in range(1000):
        p.sum().backward()
    assert release.step() == 1000  # in bf16 256 + 1 is 256


# --- freed ---

DEPTH, WIDTH, CHUNK = 12, 128, 1024
LAYER = WIDTH * WIDTH
PARAMETERS = DEPTH * LAYER


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step the parameters of a small net in backward one by one, as large ones are."""
    monkeypatch.setattr(OperatorKernels, "grouped_below", 1)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("norm", [None, 1.0], ids=["no norm", "norm"])
@pytest.mark.parametrize("value", [None, 0.01], ids=["no value", "value"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_peak_is_a_formula(
    accumulation: int, value: float | None, norm: float | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(adamw_update, "CHUNK", {"cpu": CHUNK, "cuda": CHUNK})
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])
    optimizer = CompactAdamW(module.parameters())
    release = StepInBackward(optimizer, accumulation=accumulation, max_norm=norm, max_value=value)
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)

    def window() -> None:
        for _ in range(accumulation):
            module(x).square().mean().backward()
        release.step()

    window()  # the states exist
    with Ledger(module, [optimizer]) as ledger:
        ledger.reset_peak()
        window()
        peak = ledger.peak_bytes
        assert ledger.live()["gradients"] == 0
    # weight 2 + correction 1 + exp_avg 1 + exp_avg_sq 1 + two scales of 4 bytes in 128, and a step count a tensor
    states = PARAMETERS * (2 + 1 + 1 + 1) + PARAMETERS // 128 * 2 * 4 + 4 * DEPTH
    # nothing in between: one gradient at a time; by norm alone all in bf16; over several micro-batches a sum in fp32
    buffer = 0 if accumulation == 1 and norm is None else PARAMETERS * (2 if accumulation == 1 else 4)
    # beside a whole buffer the next gradient comes in bf16, unless it is itself what is kept
    one = 0 if accumulation == 1 and norm is not None else 2 * LAYER
    one += 4 * LAYER if accumulation == 1 and norm is not None and value is not None else 0  # clamped in fp32
    assert buffer == release.kept_bytes
    # of a chunk at most 24 copies in 4 bytes while it is unpacked; of 4 x 128 activations two of each layer, and a few
    least, extra = states + buffer + one, 24 * 4 * CHUNK + (2 * DEPTH + 8) * 2 * 4 * WIDTH
    assert least <= peak <= least + extra
    assert extra < 2 * PARAMETERS * 0.4  # so that a second buffer, even in bf16, would show
    release.remove()


@pytest.mark.usefixtures("large")
def test_without_release_all_gradients_are_there_at_once():
    """What the formula above would look like if it did nothing."""
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(DEPTH)])
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    peaks = []
    for released in (False, True):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        release = StepInBackward(optimizer) if released else None
        with Ledger(module, [optimizer]) as ledger:
            module(x).square().mean().backward()
            peaks.append(ledger.peak_bytes)
        if release is not None:
            release.remove()
        module.zero_grad()
    # all 12 gradients, and all but the one that lives and its copy, which torch's optimizers get
    assert peaks[0] - peaks[1] >= 2 * LAYER * (DEPTH - 3)


@pytest.mark.parametrize("kind", [CompactAdamW, torch.optim.SGD])
def test_small_gradients_wait_for_one_step_up_to_a_number_of_bytes(kind: Any, monkeypatch: pytest.MonkeyPatch):
    """Of twelve layers four are stepped together, whose gradients are the first above the bound."""
    monkeypatch.setattr(OperatorKernels, "grouped_bytes", 7 * LAYER)  # of three and a half layers
    together, stock = [], ImmediateSteps._step
    monkeypatch.setattr(
        ImmediateSteps, "_step", lambda self, pairs, bound: (together.append(len(pairs)), stock(self, pairs, bound))
    )
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(DEPTH)])
    optimizer = kind(module.parameters(), lr=0.0)
    release = StepInBackward(optimizer)
    with Ledger(module, [optimizer]) as ledger:
        for _ in range(2):  # the states exist
            ledger.reset_peak()
            module(torch.randn(4, WIDTH, dtype=torch.bfloat16)).square().mean().backward()
            release.step()
        gradients = ledger.peak().breakdown["gradients"]
    assert together == 2 * [4, 4, 4]
    assert 4 * 2 * LAYER <= gradients < 7 * 2 * LAYER  # and what autograd holds of the next ones
    release.remove()


# --- no trace ---


@pytest.mark.parametrize("norm", [None, 1.0])
def test_removed_it_leaves_plain_training(norm: float | None):
    net = Graph().net()
    optimizer = CompactAdamW(net.parameters(), master_bits=32)
    release = StepInBackward(optimizer, max_norm=norm)
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in net.parameters())
    net.loss(torch.ones(1, 3), False).backward()
    release.remove()
    release.remove()
    assert all(not p._post_accumulate_grad_hooks for p in net.parameters())
    assert not release.has_kept
    net.loss(torch.ones(1, 3), False).backward()
    assert all(p.grad is not None for p in net.parameters())


def test_a_parameter_unfrozen_later_is_refused_until_it_is_watched():
    net = Graph().net()
    net.layers[0].requires_grad_(False)
    release = StepInBackward(CompactAdamW(net.parameters(), master_bits=32), max_norm=1.0)
    net.layers[0].requires_grad_(True)
    before = [p.detach().clone() for p in net.parameters()]
    net.loss(torch.ones(1, 3), False).backward()
    with pytest.raises(GradientError, match=mentions("parameter 0 was unfrozen", "call watch() before backward")):
        release.step()
    assert all(torch.equal(p, was) for p, was in zip(net.parameters(), before, strict=True))
    net.zero_grad()
    release.watch()
    net.loss(torch.ones(1, 3), False).backward()
    release.step()
    assert all(not torch.equal(p, was) for p, was in zip(net.parameters(), before, strict=True))


# --- bad input ---


def poison(net: Net, bad: float) -> Callable[[], None]:
    """Make the gradient of the first layer's weight not finite."""
    handle = net.layers[0].weight.register_hook(lambda grad: torch.full_like(grad, bad))
    return handle.remove  # type: ignore[no-any-return]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("value", [None, 0.1])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_kept_gradients_that_are_not_finite_touch_nothing(accumulation: int, value: float | None, bad: float):
    net = Graph().net()
    optimizer = CompactAdamW(net.named_parameters())
    release = StepInBackward(optimizer, accumulation=accumulation, max_norm=1.0, max_value=value)

    def run() -> None:
        for _ in range(accumulation):
            net.loss(torch.ones(1, 3, dtype=torch.bfloat16), False).backward()

    run()
    release.step()
    before = [p.detach().clone() for p in net.parameters()]
    states = [t.clone() for state in optimizer.state.values() for t in state.values()]
    cure = poison(net, bad)
    run()
    with pytest.raises(GradientError, match=mentions("layers.0.weight", "not finite", "no weight")):
        release.step()
    assert all(torch.equal(p, was) for p, was in zip(net.parameters(), before, strict=True))
    now = [t for state in optimizer.state.values() for t in state.values()]
    assert all(torch.equal(t, was) for t, was in zip(now, states, strict=True))
    cure()
    assert release.step() is None  # what was kept is dropped
    run()
    assert release.step() is not None
    assert any(not torch.equal(p, was) for p, was in zip(net.parameters(), before, strict=True))


def test_finite_gradients_whose_norm_is_too_large():
    net = Graph().net()
    release = StepInBackward(torch.optim.SGD(net.parameters()), max_norm=1.0)
    poison(net, 1e30)
    net.loss(torch.ones(1, 3), False).backward()
    with pytest.raises(GradientError, match=mentions("fp32", "no weight")):
        release.step()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("compact", [True, False])
def test_small_gradients_are_checked_before_any_of_them_is_used(compact: bool, bad: float):
    net = Graph().net()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = CompactAdamW(net.named_parameters(), master_bits=32) if compact else optimizer
    release = StepInBackward(optimizer)
    before = [p.detach().clone() for p in net.parameters()]
    cure = poison(net, bad)
    net.loss(torch.ones(1, 3), False).backward()
    name = "layers.0.weight" if compact else "parameter 0"
    with pytest.raises(GradientError, match=mentions(name, "not finite", "no weight")):
        release.step()
    assert all(torch.equal(p, was) for p, was in zip(net.parameters(), before, strict=True))
    cure()
    net.loss(torch.ones(1, 3), False).backward()  # another window
    release.step()
    assert all(not torch.equal(p, was) for p, was in zip(net.parameters(), before, strict=True))


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("value", [None, 0.1])
def test_in_backward_the_message_says_what_has_been_touched(value: float | None, bad: float):
    net = Graph().net()
    StepInBackward(CompactAdamW(net.named_parameters(), master_bits=32), max_value=value)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    poison(net, bad)
    with pytest.raises(GradientError, match=mentions("layers.0.weight", "not finite")) as raised:
        net.loss(torch.ones(1, 3), False).backward()
    touched = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    assert f"{len(touched)} parameters before it" in str(raised.value)
    assert "layers.0.weight" not in touched
    assert touched >= {"layers.1.weight", "layers.1.bias"}


@pytest.mark.parametrize("bad", [None, complex(0, math.nan), complex(math.inf, 0)])
def test_complex_gradients_are_checked(bad: complex | None) -> None:
    factor = torch.ones(2**17, dtype=torch.complex64)
    factor[1] = 1 if bad is None else bad
    for gradient in (factor, factor[:4]):
        assert bool(found_non_finite([gradient, torch.ones(2)])) == (bad is not None)
    p = nn.Parameter(torch.ones_like(factor))
    StepInBackward(torch.optim.AdamW([p]))
    with pytest.raises(GradientError, match="not finite") if bad is not None else nullcontext():
        (p * factor).abs().square().sum().backward()
    assert bool((p != 1).all()) == (bad is None)


def test_a_second_gradient_in_one_window():
    net = Graph([3, 3]).net()
    release = StepInBackward(CompactAdamW(net.named_parameters(), master_bits=32))
    net.loss(torch.ones(1, 3), False).backward()
    with pytest.raises(GradientError, match=r"layers\.0\.\w+ .*write accumulation=2"):
        net.loss(torch.ones(1, 3), False).backward()
    release.step()
    net.loss(torch.ones(1, 3), False).backward()  # another window


def test_the_optimizers_own_step_in_place_of_ours():
    net = Graph([3, 3]).net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    release = StepInBackward(optimizer, accumulation=2)
    net.loss(torch.ones(1, 3), False).backward()
    with pytest.raises(GradientError, match=mentions("call release.step()")):
        optimizer.step()
    release.step()
    optimizer.step()  # nothing is kept
    net.loss(torch.ones(1, 3), False).backward()
    release.remove()
    optimizer.step()


def test_a_reentrant_checkpoint_of_a_tied_layer():
    layer = nn.Linear(3, 3)
    optimizer = CompactAdamW(layer.parameters(), master_bits=32)

    def loss() -> Tensor:
        x = torch.ones(1, 3, requires_grad=True)
        x = checkpoint(layer, x, use_reentrant=True)
        return checkpoint(layer, x, use_reentrant=True).sum()

    release = StepInBackward(optimizer)
    with pytest.raises(GradientError, match="use_reentrant=False"):
        loss().backward()
    release.remove()
    loss().backward()
    expected = layer.weight.grad
    assert expected is not None
    layer.zero_grad()
    release = StepInBackward(optimizer, accumulation=2)  # as the message says: their sum is kept
    loss().backward()
    assert torch.equal(release._sums[layer.weight], expected)


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(5, 2, sparse=True)
    StepInBackward(torch.optim.SGD(embedding.parameters()))
    with pytest.raises(GradientError, match=mentions("parameter 0", "write nn.Embedding(..., sparse=False)")):
        embedding(torch.tensor([1])).sum().backward()


class AdamW(torch.optim.AdamW):
    """A subclass of the same name, whose step may be anything."""


@pytest.mark.parametrize("kind", [AdamW, torch.optim.LBFGS, torch.optim.SparseAdam])
def test_unknown_optimizers_are_refused_by_name(kind: Any):
    net = Graph().net()
    with pytest.raises(ConflictError, match=rf"release with {kind.__name__}: .* write ~callback\.gradient_rel"):
        StepInBackward(kind(net.parameters()))
    assert all(not p._post_accumulate_grad_hooks for p in net.parameters())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"accumulation": 0}, ["accumulation=0: ", "at least 1"]),
        ({"accumulation": 1.0}, ["accumulation=1.0"]),
        ({"accumulation": True}, ["accumulation=True"]),
        ({"max_norm": 0.0}, ["max_norm=0.0: ", "above 0, or None"]),
        ({"max_norm": float("nan")}, ["max_norm=nan"]),
        ({"max_value": -1.0}, ["max_value=-1.0"]),
        ({"buffer": "disk"}, ["buffer='disk': write 'device' or 'host'"]),
    ],
)
def test_values_that_are_not_allowed(arguments: dict[str, Any], words: list[str]):
    net = Graph().net()
    with pytest.raises(PresetError, match=mentions(*words)):
        StepInBackward(torch.optim.SGD(net.parameters()), **arguments)


def test_empty_parameters_and_windows():
    empty, full = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(2))
    for arguments in ({}, {"max_norm": 0.5, "max_value": 10.0}):
        release = StepInBackward(CompactAdamW([empty, full], master_bits=32), **arguments)  # type: ignore[arg-type]
        assert release.step() is None
        (empty.sum() + full.sum()).backward()
        norm = release.step()
        assert norm is None or norm == 2**0.5
        release.remove()


def test_a_window_of_another_module_is_refused_before_anything_is_kept() -> None:
    def released(widths: list[int]) -> tuple[nn.Module, torch.optim.Optimizer, StepInBackward]:
        net = nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(widths)])
        optimizer = torch.optim.AdamW(net.parameters())
        return net, optimizer, StepInBackward(optimizer, accumulation=2)

    net, optimizer, _ = released([3, 4, 2])
    net(torch.ones(1, 3)).sum().backward()
    state = optimizer.state_dict()
    assert len(state["window"]) == 4
    for widths in ([3, 4], [3, 5, 2]):
        _, other, release = released(widths)
        with pytest.raises(CheckpointError, match="window"):
            other.load_state_dict(state)
        assert not release.has_kept


# --- a window in the optimizer's state ---


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def add_micro_batch(net: nn.Module, number: int) -> None:
    net(torch.full((1, 3), 1.0 + number)).square().sum().backward()


def gradients(*numbers: int) -> list[Tensor]:
    """Return the gradients of these micro-batches' sum, in a plain run."""
    net = two_layers()
    for number in numbers:
        add_micro_batch(net, number)
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("buffer", ["device", "host"])
@pytest.mark.parametrize("again", [False, True], ids=["another optimizer", "the same again"])
def test_a_saved_window_is_continued(buffer: str, again: bool) -> None:
    net = two_layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    release = StepInBackward(optimizer, accumulation=2, max_norm=100.0, buffer=buffer)
    for number in (0, 1):
        add_micro_batch(net, number)
    state = copy.deepcopy(optimizer.state_dict())
    if again:  # in a window that has come further, whose norms of parts are others
        add_micro_batch(net, 2)
    else:
        net = two_layers()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        release = StepInBackward(optimizer, accumulation=2, max_norm=100.0, buffer=buffer)
    optimizer.load_state_dict(state)
    if not again:
        add_micro_batch(net, 2)
    norm = release.step()
    expected = gradients(0, 1) if again else gradients(0, 1, 2)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(torch.cat([each.flatten() for each in expected])))
    for p, before, gradient in zip(net.parameters(), two_layers().parameters(), expected, strict=True):
        torch.testing.assert_close(p, (before - 0.1 * gradient.clamp(-100, 100) * min(1, 100 / float(norm))).detach())


def test_gradients_kept_for_the_norm_of_one_micro_batch_are_no_open_window() -> None:
    net = two_layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    release = StepInBackward(optimizer, max_norm=1.0)
    add_micro_batch(net, 0)
    assert release.has_kept
    assert "window" not in optimizer.state_dict()


@pytest.mark.parametrize(("accumulation", "max_norm"), [(1, None), (1, 1.0), (3, None)])
def test_a_window_of_another_number_of_micro_batches_is_dropped(accumulation: int, max_norm: float | None) -> None:
    net = two_layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    release = StepInBackward(optimizer, accumulation=2)
    add_micro_batch(net, 0)
    state = optimizer.state_dict()
    release.remove()
    release = StepInBackward(optimizer, accumulation=accumulation, max_norm=max_norm)
    with pytest.warns(UserWarning, match=mentions("gradients", "dropped", "accumulate_grad_batches")):
        optimizer.load_state_dict(state)
    assert not release.has_kept


@pytest.mark.parametrize("buffer", ["device", "host"])
def test_norm_is_measured_again_for_another_bound(buffer: str) -> None:
    parameter = nn.Parameter(torch.zeros(4))
    staging = Staging(torch.device("cpu")) if buffer == "host" else None
    sums = GradientSums(OperatorKernels(torch.device("cpu")), staging, "")
    sums.allocate({parameter: torch.float32})
    zero = torch.zeros(())
    sums.add(parameter, torch.full((4,), 3.0), torch.float32, Control(zero, zero))
    for bound, norm in ((math.inf, 6.0), (0.5, 1.0), (2.0, 4.0), (math.inf, 6.0)):
        assert float(sums.norm([parameter], Control(zero, zero, bound))) == norm
        assert sums.norms([parameter], Control(zero, zero, bound)).tolist() == [norm]
