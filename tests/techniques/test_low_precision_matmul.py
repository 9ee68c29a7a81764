"""LowPrecisionMatmul rounds both factors of each product, trains within a stated gap, and leaves plain layers."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

from lightning_solo.errors import CapabilityError, NothingToDoError
from lightning_solo.memory.ledger import saved_for_backward
from lightning_solo.nn.compilation import CountingBackend, compile_blocks
from lightning_solo.nn.low_precision import linear_layers, multiply_in_low_precision, product
from lightning_solo.nn.recomputation import PRODUCTS, Kept, checkpoint_blocks
from lightning_solo.nn.rounded_products import fp16_product, int8_product
from lightning_solo.planner.device import CAPABILITIES, device
from lightning_solo.planner.tracer import Tracer
from lightning_solo.techniques.low_precision_matmul.card import FORMATS
from lightning_solo.techniques.low_precision_matmul.technique import LowPrecisionMatmul
from tests.conftest import long
from tests.messages import lines_with, mentions
from tests.modules import Stack, loader, regression
from tests.pages import TABLES

pytest.importorskip("torchao")

Make = Callable[..., Any]
CPU = torch.device("cpu")
WIDTH = 32
# float8 rounds each number by at most 1/16, in e5m2 by 1/8, and evenly; int8 by half of 1/127 of the row's largest;
# nvfp4 by at most 1/4, stochastically 1/2; fp16 by 2 ** -11, each sum too
ERRORS = {
    "float8_tensorwise": 0.08,
    "float8_rowwise": 0.08,
    "float8_rowwise_with_gw_hp": 0.08,
    "mxfp8": 0.08,
    "nvfp4": 0.3,
    "int8": 0.02,
    "fp16_accumulate": 0.01,  # under autocast of results in bf16
}
LEAST = {"fp16_accumulate": 1e-5}  # by which products differ; of the others 1e-4
every_format = pytest.mark.parametrize("kind", FORMATS)


def stack(kind: str | None = None, blocks: int = 2) -> Stack:
    torch.manual_seed(0)
    module = Stack(blocks, width=WIDTH)
    if kind is not None:
        layers, _ = linear_layers(dict(module.blocks.named_children()))
        multiply_in_low_precision(layers.values(), product(kind, CPU))
    return module


def gradients(module: nn.Module, autocast: bool = False, rows: int = 48) -> Tensor:
    module.zero_grad()
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = module(x).float().square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype is p.dtype for p in module.parameters())
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def distance(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


def fit(make_trainer: Make, *callbacks: Any, home: ModuleType = L, net: Any = None, **arguments: Any) -> Any:
    module = regression(home, net or stack(), lr=1e-3)
    torch.manual_seed(2)
    make_trainer(home, callbacks=list(callbacks), **arguments).fit(module, loader(8, width=WIDTH))
    return module


# --- acted ---


@every_format
def test_both_factors_are_rounded(kind: str) -> None:
    multiply = product(kind, CPU)
    generator = torch.Generator().manual_seed(1)
    rows, weight = torch.randn(64, WIDTH, generator=generator), torch.randn(48, WIDTH, generator=generator)
    result = multiply(rows, weight)
    assert LEAST.get(kind, 1e-4) < distance(result, rows @ weight.t()) < ERRORS[kind]
    # a change too small for the format is none, in either factor; of fp32 it is many
    small = rows.clone()
    small[3, 5] = 1 + 1e-5
    again = rows.clone()
    again[3, 5] = 1
    assert torch.equal(multiply(small, weight), multiply(again, weight))
    assert not torch.equal(small @ weight.t(), again @ weight.t())
    assert torch.equal(multiply(weight, small), multiply(weight, again))


def test_int8_multiplies_integers() -> None:
    left = torch.randint(-126, 127, (32, 64)).float()
    right = torch.randint(-126, 127, (48, 64)).float()
    left[:, 0] = right[:, 0] = 127  # a scale of 1 in each row
    assert torch.equal(int8_product(left, right), left @ right.t())


@pytest.mark.parametrize(("frozen", "products"), [(False, 3), (True, 2)])
@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4", "int8", "fp16_accumulate"])
def test_a_frozen_weight_takes_no_product(kind: str, frozen: bool, products: int) -> None:
    rows, weight = torch.randn(64, 32, requires_grad=True), torch.randn(96, 32, requires_grad=not frozen)
    with Tracer(nn.Linear(1, 1), fake=False) as tracer:
        product(kind, CPU)(rows, weight).sum().backward()
    assert sum(cost.flops == 2 * 64 * 32 * 96 for cost in tracer.costs) == products


@pytest.mark.any_device
@pytest.mark.every_change
def test_a_trainer_replaces_the_products_of_the_blocks(
    home: ModuleType, make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    technique, seen = LowPrecisionMatmul("int8", allow_cpu=True), list[tuple[str, ...]]()

    class Watch(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(technique.layers)

    with caplog.at_level("INFO"):
        module = fit(make_trainer, technique, Watch(), home=home)
    assert set(seen) == {tuple(f"net.blocks.{n}.{part}" for n in (0, 1) for part in ("up", "down"))}  # not the head
    assert lines_with(caplog.text, "4 Linear", "int8")
    plain = fit(make_trainer, home=home).state_dict()
    assert any(not torch.equal(weight, plain[name]) for name, weight in module.state_dict().items())


# --- parity ---


@every_format
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("rows", [48, 7])
def test_gradients_are_near_those_of_plain_products(kind: str, autocast: bool, rows: int) -> None:
    gap = distance(gradients(stack(kind), autocast, rows), gradients(stack(), autocast, rows))
    assert LEAST.get(kind, 1e-4) < gap < ERRORS[kind]


@every_format
def test_a_fit_ends_near_a_plain_one(make_trainer: Make, kind: str) -> None:
    start = stack().state_dict()
    plain = fit(make_trainer, precision="bf16-mixed").net.state_dict()
    low = fit(make_trainer, LowPrecisionMatmul(kind, allow_cpu=True), precision="bf16-mixed").net.state_dict()
    moved, apart = (torch.cat([(plain[n] - other[n]).flatten() for n in plain]).norm() for other in (start, low))
    assert 0 < apart < (0.8 if kind == "nvfp4" else 0.4) * moved


def test_validation_multiplies_as_before() -> None:
    module, x = stack("int8"), torch.randn(64, WIDTH)
    assert not torch.equal(module(x), stack()(x))
    assert torch.equal(module.eval()(x), stack()(x))


@pytest.mark.parametrize("kind", [kind if kind == "int8" else long(kind) for kind in FORMATS])
@pytest.mark.parametrize("recomputed", [long(False), True])
def test_compiled_and_recomputed_blocks_multiply_alike(kind: str, recomputed: bool) -> None:
    torch._dynamo.reset()
    module = stack(kind, 3)
    blocks, counting = dict(module.blocks.named_children()), CountingBackend("aot_eager")
    if recomputed:
        checkpoint_blocks(blocks)
    compile_blocks(blocks, counting)
    torch.manual_seed(0)  # nvfp4 rounds by chance
    compiled = gradients(module)
    assert distance(compiled, gradients(stack(kind, 3))) < (1e-5 if kind != "nvfp4" else 0.2)
    assert counting.graphs == 2  # one of the first block, whose input needs no gradient; none is broken


def test_products_that_are_kept_are_not_computed_twice() -> None:
    def products(keep: Kept | None) -> int:
        module = stack("int8")
        checkpoint_blocks(dict(module.blocks.named_children()), verify=False, keep=keep)
        with Tracer(nn.Linear(1, 1), fake=False) as tracer:
            gradients(module)
        per_layer = 2 * 48 * WIDTH * 4 * WIDTH
        return sum(cost.flops == per_layer for cost in tracer.costs)

    layers = 4
    assert (products(None), products(Kept(PRODUCTS))) == (4 * layers, 3 * layers)


# --- memory ---


@every_format
def test_no_copies_of_weights_are_kept_under_autocast(kind: str) -> None:
    def saved(module: nn.Module) -> int:
        with torch.autocast("cpu", torch.bfloat16):
            return saved_for_backward(module, torch.randn(64, WIDTH, requires_grad=True))[1]

    # in bf16, in each of two blocks: of two layers the weights, and the biases
    copies = 2 * 2 * (2 * WIDTH * 4 * WIDTH + 4 * WIDTH + WIDTH)
    assert saved(stack()) - saved(stack(kind)) == copies


# --- what is left out, and refused ---


def test_layers_whose_sizes_don_t_divide_are_named(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    net = stack()
    for block in net.blocks:
        block.up, block.down = nn.Linear(WIDTH, 40), nn.Sequential(nn.Linear(40, 64), nn.Linear(64, WIDTH))
    technique = LowPrecisionMatmul("int8", allow_cpu=True)
    with caplog.at_level("INFO"):
        fit(make_trainer, technique, net=net)
    assert lines_with(caplog.text, "2 Linear", "net.blocks.0.up (32 x 40)", "net.blocks.1.down.0 (40 x 64)")


def test_a_layer_of_another_kind_is_left_alone() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    layers, reasons = linear_layers({"block": nn.Sequential(Scaled(32, 32), nn.Linear(32, 32))})
    assert (list(layers), reasons) == (["block.1"], {})


def test_nothing_to_do_is_refused(make_trainer: Make) -> None:
    torch.manual_seed(0)
    module = regression(L, Stack(2, width=40))
    with pytest.raises(
        NothingToDoError,
        match=mentions("net.blocks.0.up (40 x 160)", "callback.low_precision_matmul.blocks=[ClassName]"),
    ):
        make_trainer(L, callbacks=[LowPrecisionMatmul("int8", allow_cpu=True)]).fit(module, loader(2, width=40))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(32, 32, 1), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.convolution(x.unsqueeze(-1)).squeeze(-1))


def test_blocks_without_a_linear_layer_are_refused(make_trainer: Make) -> None:
    net = nn.Sequential(Convolved(), Convolved(), nn.Linear(32, 1))
    words = ("nn.Linear", "2 Convolved", "Conv1d", "callback.low_precision_matmul.blocks=[ClassName]")
    with pytest.raises(NothingToDoError, match=mentions(*words)) as refused:
        fit(make_trainer, LowPrecisionMatmul("int8", allow_cpu=True), net=net)
    assert "divide" not in str(refused.value)
    assert "LayerNorm" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:Found .* in eval mode at the start of training")
def test_layers_in_eval_mode_are_refused(make_trainer: Make) -> None:
    with pytest.raises(
        NothingToDoError, match=mentions("net.blocks.0.up", ".train()", "~callback.low_precision_matmul")
    ):
        fit(make_trainer, LowPrecisionMatmul("int8", allow_cpu=True), net=stack().eval())


def test_a_cpu_is_refused_unless_it_is_allowed(make_trainer: Make) -> None:
    with pytest.raises(CapabilityError, match=mentions("float8_rowwise", "allow_cpu=true")):
        fit(make_trainer, LowPrecisionMatmul("float8_rowwise"))


def on_device(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], label: str) -> Any:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: label)
    return SimpleNamespace(device=torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("capability", "label", "kind", "words"),
    [
        ((8, 6), "NVIDIA RTX A6000", "float8_rowwise", ("8.6", "8.9", "callback.low_precision_matmul.format=int8")),
        ((9, 0), "NVIDIA H200", "mxfp8", ("9.0", "10.0", "float8_rowwise or")),
        ((7, 5), "Tesla T4", "int8", ("7.5", "8.0")),
        ((9, 0), "NVIDIA H200", "fp16_accumulate", ("GeForce", "fp32", "int8")),
    ],
)
def test_a_device_without_the_format_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], label: str, kind: str, words: tuple[str, ...]
) -> None:
    ctx = on_device(monkeypatch, capability, label)
    with pytest.raises(CapabilityError, match=mentions(label, *words, "~callback.low_precision_matmul")):
        LowPrecisionMatmul(kind).transform(ctx)


def test_the_newest_geforce_multiplies_in_all_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = on_device(monkeypatch, CAPABILITIES["rtx_5090"], device("rtx_5090").label)
    for able in FORMATS:
        LowPrecisionMatmul(able)._check(ctx.device)


def test_the_page_says_what_each_device_can_do() -> None:
    lines = TABLES.formats().splitlines()[2:]
    table = {cells[0].strip(" `"): cells[2:] for cells in (line[2:-2].split(" | ") for line in lines)}
    assert sorted(table) == sorted(CAPABILITIES)
    able = {
        name: {kind for kind, cell in zip(FORMATS, cells, strict=True) if cell == "yes"}
        for name, cells in table.items()
    }
    assert able["rtx_5090"] == set(FORMATS)
    assert able["rtx_3090"] == {"int8", "fp16_accumulate"}
    assert able["h100"] == set(FORMATS) - {"mxfp8", "nvfp4", "fp16_accumulate"}
    assert able["t4"] == set()


# --- planned ---


@pytest.mark.parametrize(("multiply", "dtype"), [(fp16_product, torch.float16), (int8_product, torch.bfloat16)])
def test_products_are_planned_as_products(multiply: Any, dtype: torch.dtype) -> None:
    tracer = Tracer(nn.Linear(1, 1), fake=False)
    with tracer:
        multiply(torch.randn(48, 64), torch.randn(32, 64))
    (cost,) = [cost for cost in tracer.costs if cost.flops]
    assert (cost.flops, cost.dtype) == (2 * 48 * 64 * 32, dtype)
    assert cost.fp16_sums == (multiply is fp16_product)
