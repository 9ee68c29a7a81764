"""Recomputed tensors are those of one forward, to the bit and the byte, whatever a graph is used for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_solo.errors import ConflictError
from lightning_solo.memory.ledger import Ledger
from lightning_solo.nn.forwards import restore_forwards
from lightning_solo.nn.recomputation import Wrap, checkpoint_blocks
from tests.messages import mentions
from tests.modules import Block
from tests.training import equal

pytestmark = pytest.mark.any_device


def wrapped(module: nn.Module, *, verify: bool = False) -> nn.Module:
    checkpoint_blocks({"block": module}, verify=verify)
    return module


def runs_of(module: nn.Module) -> list[int]:
    """Return a list that grows at each forward of the module's first linear layer."""
    runs: list[int] = []
    module.up.register_forward_pre_hook(lambda *_: runs.append(1))
    return runs


class Slope(nn.Module):
    """Returns a derivative of its output too, as models of forces do."""

    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        self.up, self.create_graph = nn.Linear(8, 8), create_graph

    def forward(self, x: Tensor) -> Tensor:
        energy = torch.tanh(self.up(x)).pow(2).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=self.create_graph)
        return torch.sin(x) * slope + torch.cos(x) * energy.detach()


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.side = nn.Linear(8, 8), nn.Linear(8, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.up(x)), torch.sigmoid(self.side(x)).exp()


class TakesTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (ctx.saved_tensors[0] + ctx.saved_tensors[0]).mul(0.5).exp()


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return TakesTwice.apply(super().forward(x))


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()


def backward(module: nn.Module) -> list[Tensor]:
    module(x := inputs()).sum().backward()
    return [x.grad]


def two_passes(module: nn.Module) -> list[Tensor]:
    output = module(x := inputs()).sum()
    output.backward(retain_graph=True)
    output.backward()
    return [x.grad]


def second_derivative(module: nn.Module) -> list[Tensor]:
    (first,) = torch.autograd.grad(module(x := inputs()).exp().sum(), x, create_graph=True)
    first.pow(2).sum().backward()
    return [x.grad]


def one_output_at_a_time(module: nn.Module) -> list[Tensor]:
    first, second = module(x := inputs())
    first.sum().backward(retain_graph=True)
    second.sum().backward()
    return [x.grad]


def saved_tensors_looked_at(module: nn.Module) -> list[Tensor]:
    output = module(x := inputs()).tanh()
    node = output.grad_fn.next_functions[0][0].next_functions[1][0]  # what the block's last product saved
    looked_at = [getattr(node, name).clone() for name in ("_saved_mat1", "_saved_mat2")]
    output.sum().backward()
    return [x.grad, *looked_at]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda: Block(8), backward),
        (lambda: Block(8, 0.5), two_passes),
        (lambda: Block(8), second_derivative),
        (lambda: Block(8), saved_tensors_looked_at),
        (lambda: Twice(8), backward),
        (lambda: Slope(create_graph=False), backward),
        (lambda: Slope(create_graph=True), backward),
        (lambda: Slope(create_graph=True), two_passes),
        (TwoOutputs, one_output_at_a_time),
    ],
)
def test_graphs_give_the_same_numbers(make: Any, use: Callable[[nn.Module], list[Tensor]], verify: bool) -> None:
    module, results = make(), []
    runs = runs_of(module)
    for prepare in (lambda module: module, lambda module: wrapped(module, verify=verify)):
        module.zero_grad()
        torch.manual_seed(3)
        prepare(module)
        runs.clear()
        results.append([*use(module), *(p.grad for p in module.parameters() if p.grad is not None), torch.rand(2)])
        results[-1] = [tensor.clone() for tensor in results[-1]]
    assert len(runs) > 1
    assert equal(*results)


@pytest.mark.parametrize("outer", [False, True])
def test_blocks_in_a_block(outer: bool) -> None:
    module = nn.Sequential(*[Block(8, 0.5) for _ in range(3)])
    results = []
    for names in ([], ["0", "1", "2"]):
        checkpoint_blocks({name: module.get_submodule(name) for name in names}, verify=True)
        if names and outer:
            wrapped(module, verify=True)
        for _ in range(2):  # the second time not verified
            module.zero_grad()
            torch.manual_seed(3)
            [gradient] = backward(module)
            results.append([gradient, *(p.grad.clone() for p in module.parameters())])
    assert all(equal(results[0], other) for other in results[1:])


class Other(Block):
    """Does something else in its second forward."""

    def __init__(self, change: Callable[[Tensor], Tensor], first: Callable[[Tensor], Tensor]) -> None:
        super().__init__(8)
        self.ways = first, change

    def forward(self, x: Tensor) -> Tensor:
        self.ways = self.ways[::-1]  # a tuple, which isn't replayed
        return super().forward(self.ways[1](x))


SAME: Callable[[Tensor], Tensor] = lambda x: x  # noqa: E731
MORE: Callable[[Tensor], Tensor] = lambda x: x.sin().cos()  # noqa: E731
OTHER_DTYPE: Callable[[Tensor], Tensor] = lambda x: x.double().sin().float().cos()  # noqa: E731


@pytest.mark.parametrize(("first", "second"), [(MORE, SAME), (SAME, MORE), (MORE, OTHER_DTYPE)])
@pytest.mark.parametrize("verify", [False, True])
def test_other_tensors_are_refused_by_the_blocks_name(first: Any, second: Any, verify: bool) -> None:
    with pytest.raises(ConflictError, match=mentions("'block' (Other)", "blocks=[ClassName]")):
        backward(wrapped(Other(second, first), verify=verify))


class ShorterTail(Block):
    """Saves fewer tensors at the end of its second forward, which backward doesn't ask for."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.runs = (*getattr(self, "runs", ()), 1)
        x = super().forward(x).tanh()
        return x, MORE(x) if len(self.runs) == 1 else x


def test_fewer_tensors_are_refused_though_backward_needs_none_of_those_missing() -> None:
    output, _tail = wrapped(ShorterTail(8))(inputs())
    with pytest.raises(ConflictError, match=mentions("'block' (ShorterTail)")):
        output.sum().backward()


def test_an_input_that_changes_after_forward_is_an_error() -> None:
    x = inputs().detach()
    output = wrapped(Block(8))(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match=mentions("inplace operation")):
        output.sum().backward()


class Fails(Block):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x * torch.rand(1, device=x.device))
        if Fails.fails:
            raise OSError("in the block")
        return x.tanh()


@pytest.mark.parametrize("in_forward", [True, False])
def test_a_block_that_fails_leaves_nothing(in_forward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def outside() -> list[Any]:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return [hooks, torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()]

    module, before = wrapped(Fails(8)), outside()
    with torch.autocast("cpu", torch.bfloat16):
        output = module(inputs()).sum()
    state = torch.get_rng_state()
    monkeypatch.setattr(Fails, "fails", True)
    run = (lambda: module(inputs())) if in_forward else output.backward
    with pytest.raises(OSError, match="in the block"):
        run()
    assert outside() == before
    assert torch.equal(torch.get_rng_state(), state) or in_forward
    monkeypatch.undo()
    assert backward(module)[0].abs().sum() > 0


# Memory


class Way(nn.Module):
    """Runs a block by torch's checkpoint."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


def counted_bytes(modules: list[nn.Module], use: Callable[[Any], Tensor], retain_graph: bool) -> list[int]:
    """Return the bytes of activations after forward, the peak of backward, and what is left then and in the end."""
    outputs: Any = inputs()
    with Ledger(nn.ModuleList(modules)) as ledger:
        for module in modules:
            outputs = module(use(outputs))
        kept = [ledger.live()["activations"]]
        ledger.reset_peak()
        use(outputs).sum().backward(retain_graph=retain_graph)
        kept += [ledger.peak_bytes, ledger.live()["activations"]]
        del outputs
        return [*kept, ledger.live()["activations"]]


@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda: Block(8), SAME),
        (TwoOutputs, lambda x: x[0] if isinstance(x, tuple) else x),  # the other output is kept, and not used
        (lambda: nn.Sequential(TwoOutputs(), First(), Block(8)), SAME),  # the other output is dropped
    ],
)
def test_no_byte_more_than_by_torch(make: Any, use: Any, retain_graph: bool) -> None:
    blocks = [make() for _ in range(3)]
    plain = counted_bytes(blocks, use, retain_graph)
    expected = counted_bytes([Way(block) for block in blocks], use, retain_graph)
    checkpoint_blocks({str(number): block for number, block in enumerate(blocks)}, verify=False)
    own = counted_bytes(blocks, use, retain_graph)
    restore_forwards(blocks, Wrap)
    assert own[0] < plain[0]
    assert own == expected


class First(nn.Module):
    def forward(self, outputs: tuple[Tensor, ...]) -> Tensor:
        return outputs[0]
