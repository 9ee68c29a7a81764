"""Activation checkpointing acts, changes no number, saves the bytes it claims and leaves no trace."""

from __future__ import annotations

import copy
import gc
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import lightning.pytorch as lightning_pytorch
import numpy
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BatchSizeFinder, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_solo.errors import ConflictError, NothingToDoError, PresetError
from lightning_solo.memory.ledger import Ledger, saved_for_backward
from lightning_solo.nn import recomputation
from lightning_solo.nn.forwards import restore_forwards
from lightning_solo.nn.recomputation import (
    PRODUCTS,
    Kept,
    Wrap,
    checkpoint_blocks,
    has_recomputed,
    weights_gathered_on_use,
)
from lightning_solo.planner.device import device as device_of
from lightning_solo.planner.planner import Planner
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing, choose_blocks
from lightning_solo.techniques.activation_offloading.technique import ActivationOffloading
from lightning_solo.units import GiB
from tests.messages import mentions, nearest
from tests.models import small_batch, small_model
from tests.modules import Block, Held, Stack, loader, regression
from tests.training import equal

pytestmark = pytest.mark.any_device


def wrap(module: nn.Module, verify: bool = False, **kwargs: Any) -> nn.Module:
    checkpoint_blocks(choose_blocks(module, **kwargs), verify=verify)
    return module


def gradients(module: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    """Return the gradients of the sum of the module's output, with the same random numbers each time."""
    module.zero_grad()
    torch.manual_seed(3)
    random.seed(3)
    module(*args, **kwargs).float().sum().backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def fitted(home: ModuleType, make_trainer: Any, make: Callable[[], Any], callbacks: Any = (), **kwargs: Any) -> Any:
    """Return a module made and fitted with the same seeds, and the weights it began with."""
    torch.manual_seed(0)
    module = make()
    data = kwargs.pop("data", None) or loader()
    trainer = make_trainer(home, callbacks=list(callbacks), **{"max_steps": 5, **kwargs})
    torch.manual_seed(1)
    random.seed(1)
    trainer.fit(module, data)
    return module


def same_weights(home: ModuleType, make_trainer: Any, make: Callable[[], Any], names: int, **kwargs: Any) -> None:
    """Assert that fits with and without end with the same tensors, that both trained, and that blocks were wrapped."""
    torch.manual_seed(0)
    module = make()
    start = {} if not list(module.parameters()) else copy.deepcopy(module.state_dict())
    plain = fitted(home, make_trainer, make, **kwargs).state_dict()
    seen = Seen(ActivationCheckpointing())
    acted = fitted(home, make_trainer, make, seen.callbacks(), **kwargs).state_dict()
    assert len(seen.wrapped) == names
    assert seen.ran
    assert equal(plain, acted)
    assert any(not torch.equal(start[key], plain[key]) for key in start if start[key].is_floating_point()) or not start


class Seen(lightning_pytorch.Callback):
    """Notes during the fit what a callback had wrapped."""

    def __init__(self, callback: ActivationCheckpointing) -> None:
        self.callback, self.wrapped, self.ran = callback, (), False

    def callbacks(self) -> list[Any]:
        return [self.callback, self]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.wrapped = self.callback.wrapped
        self.ran = has_recomputed(dict(pl_module.named_modules())[name] for name in self.wrapped)


class Matmuls(torch.utils._python_dispatch.TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


# Acted


def matmuls_in_backward(module: nn.Module) -> int:
    loss = module(torch.randn(4, 8)).sum()
    with Matmuls() as matmuls:
        loss.backward()
    return matmuls.count


class Trunk(nn.Module):
    """Three equal blocks of three linear layers and a linear layer after them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_backward_runs_the_blocks_again_and_stops_early():
    stem = nn.Linear(8, 8)
    plain = nn.Sequential(stem, Trunk(), nn.Linear(8, 1))
    # each linear layer has two matmuls in backward, for input and weight; the stem has no input to differentiate:
    # stem 1 + blocks 3 x 2 x 2 + head 2 = 15
    assert matmuls_in_backward(plain) == 1 + 3 * 2 * 2 + 2
    # again the first matmul of each block, not the second: nothing that comes after it is saved (early stop)
    assert matmuls_in_backward(wrap(plain)) == 15 + 3 * 1
    restore_forwards(plain.modules(), Wrap)
    # the forward that is verified runs to its end: 3 x 2
    assert matmuls_in_backward(wrap(plain, verify=True)) == 15 + 3 * 2
    assert matmuls_in_backward(plain) == 15 + 3 * 1


def test_blocks_whose_weights_are_gathered_on_use_are_not_run_to_their_end():
    model = nn.Sequential(nn.Linear(8, 8), Trunk(), nn.Linear(8, 1))
    with weights_gathered_on_use(model):
        assert matmuls_in_backward(wrap(model, verify=True)) == 15 + 3 * 1
    restore_forwards(model.modules(), Wrap)
    assert matmuls_in_backward(wrap(model, verify=True)) == 15 + 3 * 2


@pytest.mark.parametrize(("every_k", "again"), [(1, 3), (2, 2), (3, 1), (4, 1)])
def test_every_kth_block_is_wrapped(every_k, again):
    module = nn.Sequential(nn.Linear(8, 8), Trunk(), nn.Linear(8, 1))
    assert list(choose_blocks(module, every_k=every_k)) == [f"1.blocks.{i}" for i in range(0, 3, every_k)]
    assert matmuls_in_backward(wrap(module, every_k=every_k)) == 15 + again


@pytest.mark.filterwarnings("ignore:activation checkpointing saves nothing")
def test_blocks_that_never_run_are_reported(home, make_trainer):
    class Around(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block.down(block.up(x))
            return self.head(x)

    with pytest.warns(UserWarning, match=mentions("net.blocks.0")):
        fitted(home, make_trainer, lambda: regression(home, Around()), [ActivationCheckpointing()])


def test_a_name_that_matches_nothing_lists_close_names(home, make_trainer):
    with pytest.raises(NothingToDoError, match=mentions("'Blok'", nearest("Block"), "LayerNorm")):
        fitted(home, make_trainer, lambda: regression(home), [ActivationCheckpointing(blocks="Blok")])


def test_nothing_repeated_lists_what_there_is(home, make_trainer):
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    with pytest.raises(
        NothingToDoError,
        match=mentions("net.0: Linear (72 parameters)", "callback.activation_checkpointing.blocks=[ClassName]"),
    ):
        fitted(home, make_trainer, lambda: regression(home, net), [ActivationCheckpointing()])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"blocks": []}, ["blocks=[]"]),
        ({"blocks": [1]}, ["blocks=[1]"]),
        ({"blocks": {"A": 1}}, ["blocks="]),
        ({"blocks": ""}, ["blocks=''"]),
        ({"blocks": ["auto", "Block"]}, ["'auto' alone"]),
        ({"keep": "all"}, ("keep='all'", "'products'")),
        ({"keep": ["mm"]}, ("keep=['mm']", "[aten.mm]")),
    ],
)
def test_wrong_arguments_are_refused_when_constructed(arguments, message):
    with pytest.raises(PresetError, match=mentions(*message)):
        ActivationCheckpointing(**arguments)


# Keeping the results of operators


def keeping(module: nn.Module, names: Any = PRODUCTS, verify: bool = False) -> nn.Module:
    checkpoint_blocks(choose_blocks(module), verify, Kept(names))
    return module


@pytest.mark.parametrize("verify", [False, True])
def test_products_are_computed_once_and_kept(verify: bool) -> None:
    module = nn.Sequential(nn.Linear(8, 8), Trunk(), nn.Linear(8, 1))
    assert matmuls_in_backward(keeping(module, verify=verify)) == 15  # as without: see above
    restore_forwards(module.modules(), Wrap)
    assert matmuls_in_backward(keeping(module, ["aten.relu"], verify)) > 15
    trunk = Trunk()
    # of each block the results of its two products, 4 x 32 and 4 x 8, and its output, in 4-byte floats
    assert saved_for_backward(keeping(trunk), torch.randn(4, 8, requires_grad=True))[1] == 3 * 4 * 4 * (32 + 8 + 8)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("names", [PRODUCTS, ["aten.relu", "aten.addmm"]])
def test_keeping_changes_no_gradient(names: Any, verify: bool) -> None:
    module = nn.Sequential(*[Block(8, 0.5) for _ in range(3)], Normed(), Normed())
    plain = gradients(module, x := torch.randn(4, 8))
    assert equal(plain, gradients(keeping(module, names, verify), x))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_keeping_gives_the_same_weights(home: ModuleType, make_trainer: Any, precision: str) -> None:
    def make() -> Any:
        return regression(home, Stack(dropout=0.5))

    plain = fitted(home, make_trainer, make, precision=precision).state_dict()
    callback = ActivationCheckpointing(keep="products")
    assert equal(plain, fitted(home, make_trainer, make, [callback], precision=precision).state_dict())


def test_an_operator_that_torch_lacks_and_one_that_never_runs(home: ModuleType, make_trainer: Any) -> None:
    with pytest.raises(PresetError, match=r"no operator 'aten\.matrix_product'"):
        fitted(home, make_trainer, lambda: regression(home), [ActivationCheckpointing(keep=["aten.matrix_product"])])
    with pytest.raises(NothingToDoError, match=r"keep=\['aten\.gelu'\].*aten\.addmm.*aten\.relu"):
        fitted(home, make_trainer, lambda: regression(home), [ActivationCheckpointing(keep=["aten.gelu"])])


def test_a_kept_result_that_is_changed_in_place_is_refused_by_name(home: ModuleType, make_trainer: Any) -> None:
    class InPlaceRelu(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.relu_(self.up(self.norm(x))))

    net = nn.Sequential(*[InPlaceRelu(8) for _ in range(3)], nn.Linear(8, 1))
    with pytest.raises(
        ConflictError, match=mentions("'net.", "InPlaceRelu", "callback.activation_checkpointing.keep=nothing")
    ):
        fitted(home, make_trainer, lambda: regression(home, net), [ActivationCheckpointing(keep="products")])


class Adds(Block):
    """Adds up over calls, in a metric, in its list or in a tensor; and keeps a term of the loss, which doesn't."""

    def __init__(self, kind: str) -> None:
        super().__init__(8)
        self.kind, self.seen, self.term = kind, torch.zeros(()), torch.zeros(())
        self.sum, self.rows = torchmetrics.SumMetric(), torchmetrics.CatMetric()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "sum_value":
            self.sum.update(len(x))
        elif self.kind == "value":
            self.rows.update(x.detach())
        elif self.kind == "seen":
            self.seen = self.seen + len(x)
        self.term = x.square().mean()
        return super().forward(x)


@pytest.mark.parametrize("kind", ["sum_value", "value", "seen"])
def test_state_that_adds_up_over_calls_is_refused_by_name(make_trainer: Any, kind: str) -> None:
    net = nn.Sequential(*[Adds(kind) for _ in range(3)], nn.Linear(8, 1))
    with pytest.raises(ConflictError, match=mentions(f".{kind}", "happen twice", "blocks=[")):
        fitted(lightning_pytorch, make_trainer, lambda: regression(lightning_pytorch, net), [ActivationCheckpointing()])
    net = nn.Sequential(*[Adds("") for _ in range(3)], nn.Linear(8, 1))
    fitted(lightning_pytorch, make_trainer, lambda: regression(lightning_pytorch, net), [ActivationCheckpointing()])


def test_lists_and_numbers_of_a_block_change_once() -> None:
    class Collects(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.rows, self.total = [0], 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.rows.append(len(x))
            self.sizes = [*getattr(self, "sizes", []), len(x)]
            self.total += 0.5 * len(x)
            return super().forward(x * len(self.rows) * len(self.sizes) * self.total)

    results = []
    for wrapped in (False, True):
        torch.manual_seed(1)
        module = nn.Sequential(*[Collects(8) for _ in range(2)])
        rows = [block.rows for block in module]
        module = wrap(module, verify=True) if wrapped else module
        results.append([gradients(module, torch.ones(4, 8)) for _ in range(3)])
        states = [[block.rows, block.sizes, block.total] for block in module]
        assert states == [[[0, 4, 4, 4], [4, 4, 4], 6.0]] * 2
        assert all(block.rows is row for block, row in zip(module, rows, strict=True))
    assert all(equal(*pair) for pair in zip(*results, strict=True))


def test_a_second_backward_over_kept_results_is_refused() -> None:
    loss = keeping(nn.Sequential(*[Block(8) for _ in range(2)]))(torch.ones(2, 8)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ConflictError, match=mentions("second backward", "activation_checkpointing.keep=nothing")):
        loss.backward()


@pytest.mark.cpu_only("it is the CPU that a plan knows to the byte")
def test_kept_bytes_are_planned_exactly(home: ModuleType, make_trainer: Any) -> None:
    batches = DataLoader(list(loader(1)) * 6, batch_size=None)  # from before, counted nowhere
    watch = Held()
    arguments = {"callbacks": [watch, ActivationCheckpointing(keep="products")], "accelerator": "cpu"}
    make_trainer(home, **arguments).fit(regression(home), batches)
    planner = Planner(lambda: regression(home), next(iter(loader(1))), {}, device_of("cpu"), GiB)
    config = compose({"precision": "32-true", "callback": {"activation_checkpointing": {"keep": "products"}}})
    assert planner.plan("tried", config).peak_bytes == watch.peak_bytes


# Parity: fault 77


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.row(77)
def test_dropout_gives_the_same_weights(home, make_trainer, precision):
    same_weights(home, make_trainer, lambda: regression(home, Stack(dropout=0.5)), 3, precision=precision)


def test_accumulation_and_clipping_give_the_same_weights(home, make_trainer):
    extra = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    same_weights(home, make_trainer, lambda: regression(home, Stack(dropout=0.5)), 3, **extra)


class MakesTensors(Block):
    """Creates tensors without a dtype, as positions and masks often are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.linspace(0.5, 1.5, x.shape[-1], device=x.device) + torch.rand(
            1, device=x.device
        )


def test_bf16_true_with_tensors_made_without_a_dtype(home, make_trainer):
    def make() -> Any:
        net = Stack()
        net.blocks = nn.Sequential(*[MakesTensors(8) for _ in range(3)])
        return regression(home, net)

    same_weights(home, make_trainer, make, 3, precision="bf16-true")


class Normed(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d, **kwargs: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = norm(8, **kwargs)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.relu(self.norm(self.linear(x))))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.row(77)
def test_batch_norm_statistics_are_updated_once(home, make_trainer, momentum):
    def make() -> Any:
        return regression(home, nn.Sequential(*[Normed(momentum=momentum) for _ in range(3)], nn.Linear(8, 1)))

    same_weights(home, make_trainer, make, 3)
    seen = Seen(ActivationCheckpointing())
    module = fitted(home, make_trainer, make, seen.callbacks())
    assert [block.norm.num_batches_tracked.item() for block in list(module.net)[:3]] == [5, 5, 5]


def test_batch_norm_in_evaluation_mode_and_originals_after_an_exception():
    class Fails(Normed):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Fails.calls += 1  # on the class, where it is not replayed
            out = super().forward(x)
            if Fails.calls == 2:
                raise RuntimeError("in the recomputation")
            return out

    block = Fails()
    buffers = [id(b) for b in block.buffers()]
    checkpoint_blocks({"b": block}, verify=True)
    dtype = torch.get_default_dtype()
    with pytest.raises(RuntimeError, match="recomputation"):
        block(torch.randn(4, 8)).sum().backward()
    assert [id(b) for b in block.buffers()] == buffers
    assert torch.get_default_dtype() == dtype
    assert block.norm.num_batches_tracked == 1


class Nested(nn.Module):
    """A block that takes its tensors in a tuple, in a dict and by keyword, and hands one of them on in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})

    def forward(self, pair: tuple[Tensor, Tensor], *, options: dict[str, Any], collected: list[Tensor]) -> Any:
        x, y = pair
        h = nn.functional.dropout(torch.tanh(self.layers["a"](x) * options["scale"]), options["p"])
        collected.append(h)
        return x + self.layers["b"](h), {"y": y + h}


class NestedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Nested() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        collected: list[Tensor] = []
        for block in self.blocks:
            x, rest = block((x, y), options={"scale": scale, "p": 0.5}, collected=collected)
            y = rest["y"]
        assert len(collected) == 3
        return x + y + sum(collected)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.row(77)
def test_nested_and_keyword_arguments_and_containers_that_grow(verify):
    module = NestedStack()
    x, y, scale = (torch.randn(4, 8, requires_grad=True) for _ in range(3))
    plain = gradients(module, x, y, scale)
    inputs = [t.grad.clone() for t in (x, y, scale)]
    for t in (x, y, scale):
        t.grad = None
    assert equal(plain, gradients(wrap(module, verify), x, y, scale))
    assert equal(inputs, [t.grad for t in (x, y, scale)])


def test_python_random_numbers_are_replayed():
    class LayerDrop(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x * random.random() + torch.tanh(super().forward(x) * random.random())

    for verify in (True, False):
        module = nn.Sequential(*[LayerDrop(8) for _ in range(3)])
        plain = gradients(module, x := torch.randn(4, 8))
        after = random.getstate()
        assert equal(plain, gradients(wrap(module, verify), x))
        assert random.getstate() == after
        assert equal(plain, gradients(module, x))


def test_numpy_random_numbers_are_replayed():
    class LayerDrop(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x if numpy.random.rand() < 0.5 else super().forward(x)

    for seed in range(4):
        module = nn.Sequential(*[LayerDrop(8) for _ in range(6)])
        numpy.random.seed(seed)
        plain = gradients(module, x := torch.randn(4, 8))
        after = numpy.random.rand()
        numpy.random.seed(seed)
        assert equal(plain, gradients(wrap(module, verify=True), x))
        assert numpy.random.rand() == after


@pytest.mark.parametrize("verify", [True, False])
def test_numbers_that_a_block_keeps_are_replayed_and_advance_once(verify):
    class Warming(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.tanh(super().forward(x) * self.calls)

    module = nn.Sequential(*[Warming(8) for _ in range(3)])
    results = []
    for wrapped in (False, True):
        for block in module:
            block.calls = 0
        if wrapped:
            wrap(module, verify)
        results.append([gradients(module, torch.ones(4, 8)) for _ in range(3)])
        assert [block.calls for block in module] == [3, 3, 3]
    assert all(equal(plain, checkpointed) for plain, checkpointed in zip(*results, strict=True))


@pytest.mark.row(92)
def test_two_of_them_are_one_too_many(home, make_trainer):
    two = [ActivationCheckpointing(), ActivationCheckpointing()]
    with pytest.raises(ConflictError, match="wrapped already"):
        make_trainer(home, callbacks=two).fit(regression(home), loader())


@pytest.mark.row(77)
def test_tied_weights_frozen_blocks_and_inputs_without_gradient():
    module = nn.Sequential(*[Block(8, 0.5) for _ in range(4)])
    module[2].up.weight = module[0].up.weight
    module[1].requires_grad_(False)
    module[0].norm.requires_grad_(False)
    plain = gradients(module, x := torch.randn(4, 8))
    assert equal(plain, gradients(wrap(module, verify=True), x))
    assert module[2].up.weight is module[0].up.weight


def test_one_block_called_many_times():
    block = Block(8, 0.5)
    module = nn.Sequential(*[block] * 4)
    plain = gradients(module, x := torch.randn(4, 8))
    assert list(choose_blocks(module)) == ["0"]
    assert equal(plain, gradients(wrap(module, verify=True), x))


def test_a_graph_kept_for_a_second_backward():
    module = nn.Sequential(*[Block(8, 0.5) for _ in range(3)])
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        loss = module(torch.ones(2, 8)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([p.grad.clone() for p in module.parameters()])
        module.zero_grad()
        wrap(module, verify=True)
    assert equal(*results)


@pytest.mark.parametrize("place", ["setup", "configure_model"])
def test_modules_built_late(home, make_trainer, place):
    def make() -> Any:
        module = regression(home, nn.Identity())

        def build(self: Any, **_: Any) -> None:
            if isinstance(self.net, nn.Identity):
                self.net = Stack(dropout=0.5)

        setattr(type(module), place, build)
        return module

    same_weights(home, make_trainer, make, 3)


class Updates(Block):
    """Keeps state in a buffer that its output doesn't show."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return super().forward(x)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1.0))


class Branches(Block):
    """Takes another way, of the same shapes, at every second call; keeps what can't be replayed, a tuple."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = (*getattr(self, "calls", ()), len(x))
        return super().forward(x if len(self.calls) % 2 else -x)


class SavesMore(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = (*getattr(self, "calls", ()), len(x))
        out = super().forward(x)
        return out if len(self.calls) % 2 else out.exp().exp().log().log()


class Spectral(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        nn.utils.parametrizations.spectral_norm(self.up)


@pytest.mark.parametrize("kind", [Updates, InPlace, Branches, SavesMore, Spectral])
@pytest.mark.row(77)
def test_a_block_that_cannot_be_repeated_is_refused_by_name(home, make_trainer, kind):
    def make() -> Any:
        return regression(home, nn.Sequential(nn.Linear(8, 8), *[kind(8) for _ in range(3)], nn.Linear(8, 1)))

    with pytest.raises(ConflictError, match=rf"block 'net\.\d' \({kind.__name__}\).*blocks="):
        fitted(home, make_trainer, make, [ActivationCheckpointing()])


def test_without_verification_wrong_gradients_would_be_silent():
    module = nn.Sequential(*[Branches(8) for _ in range(2)])
    plain = gradients(module, x := torch.randn(4, 8))
    for block in module:
        block.calls = ()
    assert not equal(plain, gradients(wrap(module, verify=False), x))


def test_nondeterminism_within_rounding_is_not_refused():
    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + 1e-5 * random.SystemRandom().random())

    gradients(wrap(nn.Sequential(Noisy(8), Noisy(8)), verify=True), torch.randn(4, 8))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at the .grad of activations
def test_under_compile_the_gradients_are_the_same():
    module = nn.Sequential(*[Block(8) for _ in range(2)])
    plain = gradients(module, x := torch.randn(4, 8))
    compiled = torch.compile(wrap(module, verify=True), backend="eager")
    assert equal(plain, gradients(compiled, x))


# Parity of models that others wrote


BLOCKS = {"GPT2": 3, "Llama": 3, "Bert": 3, "T5": 4, "ViT": 3, "Albert": 1}


def hugging_face(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a small random model, and a batch with labels."""
    batch = small_batch()
    if kind == "ViT":
        pixels = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        batch = {"pixel_values": pixels, "labels": batch["labels"][:, 0] % 2}
    tasks = {"Bert": "ForMaskedLM", "Albert": "ForMaskedLM", "T5": "ForConditionalGeneration"}
    options = {
        "T5": {"num_layers": 2},
        "Llama": {"attention_dropout": 0.1},
        "Albert": {"embedding_size": 8, "hidden_dropout_prob": 0.1},
    }
    task = tasks.get(kind, "ForImageClassification" if kind == "ViT" else "ForCausalLM")
    return small_model(kind, task, **options.get(kind, {})), batch


def fine_tuning(home: ModuleType, name: str) -> Any:
    class FineTuning(home.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, _ = hugging_face(name)
            self.model.train()

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return FineTuning()


@pytest.mark.parametrize("name", BLOCKS)
def test_hugging_face_models_with_their_defaults(home, make_trainer, name):
    _, batch = hugging_face(name)
    rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    data = DataLoader(rows, batch_size=4)
    make = lambda: fine_tuning(home, name)  # noqa: E731
    same_weights(home, make_trainer, make, BLOCKS[name], data=data, max_steps=3, max_epochs=2)


def test_a_cache_that_already_holds_keys_is_refused():
    transformers = pytest.importorskip("transformers")
    model, batch = hugging_face("GPT2")
    cache = model(batch["input_ids"], use_cache=True).past_key_values
    assert isinstance(cache, transformers.Cache)
    wrap(model, verify=True)
    with pytest.raises(ConflictError, match=mentions("'transformer.h.0'", "key-value cache")):
        model(batch["input_ids"], past_key_values=cache)


@pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_enable` is deprecated"
)  # the older name works in more versions
def test_the_models_own_checkpointing_is_refused(home, make_trainer):
    def make() -> Any:
        module = fine_tuning(home, "GPT2")
        module.model.gradient_checkpointing_enable()
        return module

    with pytest.raises(ConflictError, match=mentions("gradient_checkpointing=True", "gradient_checkpointing_disable")):
        fitted(home, make_trainer, make, [ActivationCheckpointing()])


# Memory


def test_bytes_saved_for_backward_are_the_blocks_inputs():
    trunk = Trunk()
    x = torch.randn(4, 8, requires_grad=True)
    _, plain = saved_for_backward(trunk, x)
    # A block of width 8 on 4 rows saves, in 4-byte floats:
    # norm output 4 x 8 + norm mean and inverse deviation 2 x 4 + relu output 4 x 32, and 4 x 8 of block output, which
    # the next block's norm saves as its input (or which is the output); dropout with p = 0 in training saves nothing
    assert plain == 3 * 4 * (4 * 8 + 2 * 4 + 4 * 32 + 4 * 8)
    _, wrapped = saved_for_backward(wrap(trunk), x)
    # only the block outputs are left: inputs of blocks 1 and 2, and the output; x itself lived before
    assert wrapped == 3 * 4 * (4 * 8)


def test_inputs_passed_by_keyword_and_nested_are_counted_and_freed():
    module = NestedStack()
    x, y, scale = (torch.randn(4, 8, requires_grad=True) for _ in range(3))
    _, plain = saved_for_backward(module, x, y, scale)
    with Ledger() as ledger:
        loss = wrap(module)(x, y, scale).sum()
        assert ledger.live()["activations"] < plain
        loss.backward()
        del loss
        # the gradients of x, y and scale were born in backward: nothing that a forward made is left
        assert ledger.live()["activations"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("keyword", [False, True])
def test_bf16_and_dropout_on_a_gpu_are_bit_exact_and_the_peak_is_lower(keyword):
    class Keyword(Block):
        def forward(self, x: Tensor | None = None, *, hidden: Tensor | None = None) -> Tensor:
            return super().forward(x if hidden is None else hidden)

    class Calls(Trunk):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(hidden=x) if keyword else block(x)
            return x

    module = Calls()
    module.blocks = nn.ModuleList(Keyword(128, 0.1) for _ in range(8))
    module.cuda()
    x = torch.randn(2048, 128, device="cuda")
    results, peaks = [], []
    for verify in (None, True, False):
        if verify is not None:
            restore_forwards(module.modules(), Wrap)
            wrap(module, verify)
        with torch.autocast("cuda", torch.bfloat16):
            gradients(module, x)  # kernels' workspaces are taken once
            if verify:
                restore_forwards(module.modules(), Wrap)
                wrap(module, verify)
            module.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            results.append(gradients(module, x))
        peaks.append(torch.cuda.max_memory_allocated() - start)
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])
    assert peaks[2] < 0.6 * peaks[0]


@pytest.mark.gpu
def test_a_fit_on_a_gpu_returns_its_memory_and_the_same_weights(home, make_trainer):
    extra = {"accelerator": "gpu", "precision": "bf16-mixed"}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    same_weights(home, make_trainer, lambda: regression(home, Stack(dropout=0.5)), 3, **extra)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**25  # the kernels' workspaces stay


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")
@pytest.mark.parametrize("kind", ["swa", "weight_averaging"])
@pytest.mark.parametrize("order", [1, -1])
def test_weight_averaging_gives_the_same_weights(make_trainer, kind, order):
    home = lightning_pytorch

    def averaged(*callbacks: Any) -> Any:
        averaging = StochasticWeightAveraging(swa_lrs=1e-2) if kind == "swa" else WeightAveraging()
        both = [*callbacks, averaging][::order]
        extra = {"max_epochs": 4, "max_steps": -1, "limit_train_batches": 3}
        return fitted(home, make_trainer, lambda: regression(home), both, **extra)

    plain, seen = averaged(), Seen(ActivationCheckpointing())
    acted = averaged(*seen.callbacks())
    assert len(seen.wrapped) == 3
    assert equal(list(plain.parameters()), list(acted.parameters()))
    assert not equal(list(plain.parameters()), list(fitted(home, make_trainer, lambda: regression(home)).parameters()))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_batch_size_finder_measures_wrapped_blocks(make_trainer, monkeypatch):
    home, calls = lightning_pytorch, []
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    run = recomputation.run_recomputed

    def counted(block: nn.Module, wrap: Wrap, function: Any, args: Any, *rest: Any) -> Any:
        calls.append(len(args[0]))
        return run(block, wrap, function, args, *rest)

    monkeypatch.setattr(recomputation, "run_recomputed", counted)
    module = regression(home, batch_size=2)
    type(module).train_dataloader = lambda self: DataLoader(data, batch_size=self.batch_size)
    type(module).val_dataloader = type(module).train_dataloader
    finder = BatchSizeFinder(mode="power", steps_per_trial=1, init_val=2, max_trials=2)
    make_trainer(home, callbacks=[ActivationCheckpointing(), finder], max_steps=1).fit(module)
    assert set(calls) == {2, 4, module.batch_size}


# --- modes of single blocks ---

MODES = {"keep": ["blocks.0"], "products": ["blocks.1"]}


def stack(home: ModuleType) -> Any:
    return regression(home, Stack(4))


@pytest.mark.parametrize("host_input", [False, True])
def test_modes_decide_what_single_blocks_keep(home: ModuleType, make_trainer: Any, host_input: bool) -> None:
    last = "host_input" if host_input else "recompute"
    modes = {"keep": ["net.blocks.0"], "products": ["net.blocks.1"], last: ["net.blocks.2"]}
    modes["offload"] = ["net.blocks.3"]
    runs: Counter[str] = Counter()

    def counted() -> Any:
        module = stack(home)
        for name, block in module.net.blocks.named_children():
            block.up.register_forward_hook(lambda *_, name=name: runs.update([name]))
        return module

    offloading = ActivationOffloading(min_offload_bytes=1, allow_cpu=True)
    plain = fitted(home, make_trainer, partial(stack, home))
    technique = ActivationCheckpointing(modes=modes, verify_recomputation=False)
    acted = fitted(home, make_trainer, counted, [technique, offloading])
    assert [runs[name] for name in "0123"] == [5, 10, 10, 5], "those of products and recompute run again in each step"
    assert offloading.moved_bytes > 0
    assert equal(plain.state_dict(), acted.state_dict())


def test_offloading_moves_only_listed_blocks(home: ModuleType, make_trainer: Any) -> None:
    moved = []
    first, second = "net.blocks.0", "net.blocks.1"
    for modes in ({"host_input": [first]}, {"host_input": [first, second]}, {"offload": [first]}):
        offloading = ActivationOffloading(min_offload_bytes=1, allow_cpu=True)
        technique = ActivationCheckpointing(modes=modes, verify_recomputation=False)
        fitted(home, make_trainer, partial(stack, home), [technique, offloading])
        moved.append(offloading.moved_bytes)
    assert moved[1] == 2 * moved[0] > 0
    assert moved[2] > moved[1]


@pytest.mark.parametrize(
    ("modes", "says"),
    [
        ({"kept": ["blocks.0"]}, ["no mode 'kept'", "keep, products, recompute, host_input, offload"]),
        ({"keep": ["a"], "recompute": ["a"]}, ["a is listed 2 times", "list each block once"]),
        ({}, ["at least one block"]),
    ],
)
def test_invalid_modes_are_refused(modes: Any, says: list[str]) -> None:
    with pytest.raises(PresetError, match=mentions("modes=", *says)):
        ActivationCheckpointing(modes=modes)


def test_modes_and_other_choices_for_all_blocks_are_refused() -> None:
    for other in ({"budget": "1GiB"}, {"keep": "products"}, {"every_k": 2}):
        with pytest.raises(ConflictError, match=mentions("modes", "callback.activation_checkpointing.modes=null")):
            ActivationCheckpointing(modes=MODES, **other)


def test_modes_that_move_need_offloading() -> None:
    fields = {"callback": {"activation_checkpointing": {"modes": {"offload": ["blocks.0"]}}}}
    with pytest.raises(ConflictError, match=mentions("blocks.0", "+callback=activation_offloading")):
        compose(fields)
    compose(fields, ["+callback=activation_offloading"])


def test_unknown_blocks_in_modes_are_refused(home: ModuleType, make_trainer: Any) -> None:
    technique = ActivationCheckpointing(modes={"keep": ["net.block.0"]})
    says = mentions("no block 'net.block.0'", nearest("net.blocks.0"), "solo=auto")
    with pytest.raises(PresetError, match=says):
        fitted(home, make_trainer, partial(stack, home), [technique])
    technique = ActivationCheckpointing(modes={"keep": [f"net.blocks.{number}" for number in range(4)]})
    with pytest.raises(NothingToDoError, match=mentions("keeps", "~callback.activation_checkpointing")):
        fitted(home, make_trainer, partial(stack, home), [technique])
