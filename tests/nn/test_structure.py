"""Channels and heads are found by a forward alone, and a module without them computes as with zeros in their place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from lightning_solo.nn import structure_search
from lightning_solo.nn.pruned_layers import keep_head_width
from lightning_solo.nn.structure import CHANNELS, HEADS, Structure, remove
from lightning_solo.nn.structure_checks import checked
from lightning_solo.nn.structure_search import find_structures
from lightning_solo.reference.byte_gpt import ByteGPT
from tests.models import small_batch, small_model

WIDTH, ROWS = 8, 6
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


class Images(nn.Module):
    """Convolutions with a batch norm, a depthwise one, a residual, and a linear layer on flattened channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.depthwise, self.second = nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1)
        self.up, self.down = nn.Conv2d(4, 16, 1), nn.Conv2d(16, 4, 1)
        self.hidden, self.head = nn.Linear(4 * 36, 10), nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.depthwise(torch.relu_(self.norm(self.first(x)))))
        x = x + self.down(functional.silu(self.up(x)))
        return self.head(torch.relu(self.hidden(x.flatten(1))))


class Flat(nn.Module):
    """A convolution whose channels a linear layer reads after pooling and flattening."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(2, 6, 3), nn.Linear(6 * 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.adaptive_avg_pool1d(torch.tanh(self.conv(x)), 4).flatten(1))


class Experts(nn.Module):
    """Two experts, of which each row takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        return torch.stack([shares[:, n, None] * expert(x) for n, expert in enumerate(self.experts)]).sum(0)


class Twice(nn.Module):
    """One block that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in "ab":
            gate, value = self.up(x).chunk(2, dim=-1)  # half of the outputs are gates
            x = x + self.down(torch.relu(gate) * value)
        return x


class Multiquery(nn.Module):
    """Attention with one head of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.kv, self.out = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 8), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(ROWS, self.heads, -1).transpose(0, 1)
        k, v = self.kv(x).chunk(2, dim=-1)
        y = functional.scaled_dot_product_attention(q[None], k[None, None], v[None, None])[0]
        return self.out(y.transpose(0, 1).flatten(1))


def of(net: nn.Module, x: Tensor = X) -> tuple[nn.Module, Callable[[], Tensor]]:
    return net, lambda: net(x).square().mean()


def language_model(kind: str, **options: Any) -> tuple[nn.Module, Callable[[], Any]]:
    net = small_model(kind, num_hidden_layers=1, **options)
    return net, lambda: net(**small_batch()).loss


def byte_gpt() -> tuple[nn.Module, Callable[[], Any]]:
    net = ByteGPT(width=16, depth=1, heads=4, context=8)
    return net, lambda: net.loss(torch.arange(36).view(4, 9))


def attention(**options: Any) -> tuple[nn.Module, Callable[[], Any]]:
    net = nn.ModuleDict({"x": nn.Linear(WIDTH, WIDTH), "a": nn.MultiheadAttention(WIDTH, 4, **options)})
    keep_head_width(net, everywhere=True)
    k, v = (X[:, : options.get(name, WIDTH)] for name in ("kdim", "vdim"))
    return net, lambda: net["a"](net["x"](X), k, v)[0].square().mean()


IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
GROUPED = {"head_dim": 8, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2}
MODULES: dict[str, tuple[Callable[[], Any], dict[str, tuple[str, int, dict[str, int]]]]] = {
    "byte GPT": (byte_gpt, {
        "blocks.0.attention.out": (HEADS, 4, {"blocks.0.attention.heads": 2}),
        "blocks.0.mlp.down": (CHANNELS, 64, {}),
    }),
    "grouped keys": (lambda: language_model("Llama", **GROUPED), {
        "model.layers.0.self_attn.o_proj": (HEADS, 2, {}),  # 3 heads of queries each
        "model.layers.0.mlp.down_proj": (CHANNELS, 32, {"model.layers.0.mlp.intermediate_size": 16}),
    }),
    "fused, transposed": (lambda: language_model("GPT2"), {
        "transformer.h.0.attn.c_proj": (HEADS, 2, {
            f"transformer.h.0.attn.{name}": number
            for name, number in (("num_heads", 1), ("split_size", 8), ("embed_dim", 8))
        }),
        "transformer.h.0.mlp.c_proj": (CHANNELS, 64, {}),
    }),
    "images": (lambda: of(Images(), IMAGES), {
        "second": (CHANNELS, 8, {}), "down": (CHANNELS, 16, {}), "head": (CHANNELS, 10, {}),
    }),
    "flattened": (lambda: of(Flat(), torch.randn(4, 2, 10)), {"head": (CHANNELS, 6, {})}),
    "experts": (lambda: of(Experts()), {"experts.0.2": (CHANNELS, 12, {}), "experts.1.2": (CHANNELS, 12, {})}),
    "called twice": (lambda: of(Twice()), {"down": (CHANNELS, 8, {})}),
    "multi-query": (lambda: of(Multiquery()), {"out": (HEADS, 4, {"heads": 2})}),
    "attention of torch": (lambda: attention(), {"a.out_proj": (HEADS, 4, {"a.num_heads": 2})}),
    "its own widths": (lambda: attention(kdim=4, vdim=6, add_bias_kv=True), {
        "a.out_proj": (HEADS, 4, {"a.num_heads": 2}),
    }),
    "encoder layer": (lambda: of(nn.TransformerEncoderLayer(WIDTH, 2, 12)), {"linear2": (CHANNELS, 12, {})}),
}  # fmt: skip


def halves(structures: list[Structure]) -> dict[str, Tensor]:
    """Return a choice of every second unit."""
    return {each.layer: torch.arange(each.units) % 2 == 1 for each in structures}


@pytest.mark.parametrize("name", MODULES)
def test_units_are_found_and_removed_as_if_their_inputs_were_zero(name: str) -> None:
    torch.manual_seed(0)
    make, expected = MODULES[name]
    net, step = make()
    before = copy.deepcopy(net.state_dict())
    found = find_structures(net, step).structures
    assert {each.layer: (each.kind, each.units) for each in found} == {
        layer: values[:2] for layer, values in expected.items()
    }
    kept = halves(found)
    good, reasons = checked(net, step, found, kept)
    assert reasons == {}
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    net.eval()
    zeroed = [(net.get_submodule(each.layer), kept[each.layer][each.slices[0].unit]) for each in good]
    with torch.no_grad():
        for layer, mask in zeroed:
            weight = layer.weight.T if type(layer).__name__ == "Conv1D" else layer.weight
            weight[:, ~mask] = 0
        outputs, sizes = step(), sum(p.numel() for p in net.parameters())
        removal = remove(net, good, kept)
        assert float(step()) == pytest.approx(float(outputs), rel=1e-5)
    assert {each.layer: {path: net_number(net, path) for path in each.numbers} for each in good} == {
        layer: values[2] for layer, values in expected.items()
    }
    assert sum(p.numel() for p in net.parameters()) < 0.95 * sizes
    removal.undo()
    assert [value.shape for value in net.state_dict().values()] == [value.shape for value in before.values()]


def net_number(net: nn.Module, path: str) -> int:
    part, _, name = path.rpartition(".")
    number: int = getattr(net.get_submodule(part), name)
    return number


def test_sizes_of_layers_and_norms_are_changed() -> None:
    net, step = of(Images(), IMAGES)
    found = find_structures(net, step).structures
    remove(net, found, halves(found))
    assert (net.first.out_channels, net.norm.num_features, len(net.norm.running_var)) == (4, 4, 4)
    depthwise, hidden = net.depthwise, net.hidden
    assert (depthwise.groups, depthwise.in_channels, depthwise.out_channels, net.second.in_channels) == (4, 4, 4, 4)
    assert (hidden.in_features, hidden.out_features, net.head.in_features) == (4 * 36, 5, 5)
    net.train()
    step().backward()  # training works too


def hard_coded(x: Tensor, net: Any) -> Tensor:
    q, k, v = net.qkv(x).view(ROWS, 3, 2, 4).permute(1, 2, 0, 3)
    return net.out(functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))


class Written(nn.Module):
    """Layers that a function computes with."""

    def __init__(self, forward: Callable[[Tensor, Any], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self)


def linear(*sizes: int) -> dict[str, nn.Module]:
    return {name: nn.Linear(*shape) for name, shape in zip("abc", pairwise(sizes), strict=False)}


def tied(net: Any) -> Any:
    net.b.weight = net.a.weight
    return net


LEFT_OUT: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "no layer before": (lambda: Written(lambda x, net: net.a(x), **linear(8, 4)), "a", "isn't computed by a layer"),
    "normalized": (
        lambda: Written(lambda x, net: net.b(net.n(net.a(x))), **linear(8, 12, 4), n=nn.LayerNorm(12)),
        "b", "normalization",
    ),
    "read twice": (lambda: Written(lambda x, net: net.b(net.a(x)) + net.c(net.a(x)), **linear(8, 4, 4, 4)), "b", "c"),
    "residual": (lambda: Written(lambda x, net: (y := net.a(x)) + net.b(y), **linear(8, 8, 8)), "b", "the loss"),
    "tied": (lambda: tied(Written(lambda x, net: net.b(net.a(x).relu()), **linear(8, 8, 8))), "b", "is also"),
    "parametrized": (
        lambda: Written(
            lambda x, net: net.b(net.a(x)), a=parametrizations.weight_norm(nn.Linear(8, 4)), b=nn.Linear(4, 2)
        ), "b", "a.weight",
    ),
    "embedding": (
        lambda: Written(lambda x, net: net.a(net.e(x.argmax(1))), e=nn.Embedding(8, 8), a=nn.Linear(8, 4)),
        "a", "embedding",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_OUT)
def test_other_inputs_are_left_out_with_a_reason(name: str) -> None:
    make, layer, word = LEFT_OUT[name]
    findings = find_structures(*of(make()))
    assert findings.structures == []
    assert word in findings.left_out[layer]


def test_readers_of_a_residual_stream_are_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[str] = []
    units = structure_search._Probe.units
    monkeypatch.setattr(structure_search._Probe, "units", lambda p, n: (probed.append(p.call.name), units(p, n))[1])
    net, step = language_model("Llama")  # whose stream begins at a table that each layer's input depends on
    findings = find_structures(net, step)
    layer = "model.layers.0"
    assert {*probed} == {f"{layer}.self_attn.o_proj", f"{layer}.mlp.down_proj"}
    assert "lm_head" in findings.left_out[f"{layer}.mlp.up_proj"]


def test_heads_of_cross_attention_are_found_where_those_of_self_attention_share_positions() -> None:
    net = small_model("T5", "ForConditionalGeneration")
    heads = [each.layer for each in find_structures(net, lambda: net(**small_batch()).loss).structures]
    assert "decoder.block.0.layer.1.EncDecAttention.o" in heads
    assert "decoder.block.0.layer.0.SelfAttention.o" not in heads


def test_a_forward_with_its_own_number_of_heads_is_refused_by_its_error() -> None:
    net, step = of(Written(hard_coded, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8)))
    (structure,) = find_structures(net, step).structures
    assert (structure.kind, structure.units) == (HEADS, 2)
    good, reasons = checked(net, step, [structure], halves([structure]))
    assert good == []
    assert "shape" in reasons["out"]


def test_a_unit_that_is_never_active_belongs_to_its_own_place() -> None:
    net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 2))
    net[0].bias.data[3] = -99
    (structure,) = find_structures(*of(net)).structures
    assert all(torch.equal(each.unit, torch.arange(12)) for each in structure.slices)


def test_inputs_of_a_transposed_convolution_keep_their_number() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 8, 2), nn.ReLU(), nn.Conv2d(8, 2, 1))
    x = torch.randn(2, 3, 4, 4)
    structures = find_structures(net, lambda: net(x)).structures
    remove(net, structures, {each.layer: torch.arange(each.units) > 1 for each in structures})
    assert (net[1].in_channels, net[1].out_channels, net[1].weight.shape[:2]) == (8, 6, (8, 6))
