"""Feed-forward parts run in tiles: fewer bytes, the same numbers and gradients, and a refusal of what mixes tokens."""

from __future__ import annotations

import copy
from itertools import permutations
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_solo.errors import ConflictError, NothingToDoError
from lightning_solo.memory.ledger import Ledger, saved_for_backward
from lightning_solo.nn.blocks import feed_forward_parts
from lightning_solo.nn.forwards import restore_forwards
from lightning_solo.nn.recomputation import checkpoint_blocks
from lightning_solo.nn.tiling import Tiling, tile_parts
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.techniques.activation_offloading.technique import ActivationOffloading
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from lightning_solo.techniques.regional_compilation.technique import RegionalCompilation
from lightning_solo.techniques.tiled_mlp.technique import TiledMlp
from tests.messages import mentions
from tests.modules import Block, Stack, loader, regression

pytestmark = pytest.mark.any_device


class Gated(nn.Module):
    """As in Llama: (..., width) -> (..., width)."""

    def __init__(self, width: int = 8, inner: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(x.shape[:-1].numel())
        return self.dropout(self.down(F.silu(self.gate(x)) * self.up(x)))


class Mixed(nn.Module):
    """A block with a feed-forward part and a layer beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.beside, self.mlp = nn.Linear(8, 8), Gated()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(torch.tanh(self.beside(x)))


def both(x: Tensor, part: nn.Module, tile_tokens: int = 3, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Return output, gradient of the input and gradients of the weights: in tiles, and whole in fp64."""
    results = []
    for module, kind in ((part, dtype), (copy.deepcopy(part), torch.float64)):
        module = module.to(kind)
        if kind is dtype:
            tile_parts({"part": module}, tile_tokens)
        given = x.detach().to(dtype).to(kind, copy=True).requires_grad_()
        output = module(given)
        (output * torch.linspace(-1, 1, output.numel(), dtype=kind).view_as(output)).sum().backward()
        results.append([output, given.grad, *(p.grad for p in module.parameters())])
    return results


def fitted(make_trainer: Any, *callbacks: Any, module: Any = None, **arguments: Any) -> Any:
    torch.manual_seed(0)
    module = module or regression(L, nn.Sequential(*[Mixed() for _ in range(3)], nn.Linear(8, 1)))
    make_trainer(L, callbacks=list(callbacks), **{"max_steps": 4, **arguments}).fit(module, loader())
    return module


# --- it acted ---


def test_no_more_tokens_than_a_tile_run_at_a_time():
    part = Gated()
    tile_parts({"part": part}, 4)
    output = part(torch.randn(2, 5, 8, requires_grad=True))
    # the check (a tile, its last row alone), then 10 tokens
    assert part.rows == [4, 1, 4, 4, 2]
    output.sum().backward()
    assert part.rows[5:] == [4, 4, 2]
    with torch.no_grad():
        part(torch.randn(2, 5, 8))
    assert part.rows[8:] == [4, 4, 2]


def test_parts_are_taken_by_how_they_are_built():
    transformers = pytest.importorskip("transformers")
    shape: Any = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = transformers.LlamaModel(transformers.LlamaConfig(**shape, vocab_size=32))
    phi = transformers.Phi3Model(transformers.Phi3Config(**shape, vocab_size=32, pad_token_id=0))
    gpt = transformers.GPT2Model(transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32))
    assert list(feed_forward_parts(llama)) == ["layers.0.mlp", "layers.1.mlp"]
    assert list(feed_forward_parts(phi)) == ["layers.0.mlp", "layers.1.mlp"]
    assert list(feed_forward_parts(gpt)) == ["h.0.mlp", "h.1.mlp"]
    assert list(feed_forward_parts(Stack())) == ["blocks.0", "blocks.1", "blocks.2"]


# --- parity ---


@pytest.mark.parametrize("part", [Gated, lambda: Block(8)], ids=["gated", "with norm"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_output_and_gradients_are_those_of_the_whole(part, dtype, tolerance):
    torch.manual_seed(2)
    tiled, whole = both(torch.randn(2, 5, 8), part(), dtype=dtype)
    for got, expected in zip(tiled, whole, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def test_gradients_of_16_bit_weights_are_summed_in_fp32():
    def error(tile_tokens: int) -> float:
        torch.manual_seed(2)
        tiled, whole = both(torch.randn(1, 2048, 8), Gated(), tile_tokens, torch.bfloat16)
        return float(((tiled[2].double() - whole[2]).norm() / whole[2].norm()).item())

    # 512 tiles: a sum in bf16 loses what is under 1/256 of it
    assert error(4) < 1.5 * error(4096)


def test_dropout_is_repeated_in_backward():
    torch.manual_seed(2)
    part = Gated(dropout=0.5)
    tile_parts({"part": part}, 3)
    x = torch.randn(10, 8, requires_grad=True)
    output = part(x)
    before = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    # the derivative by `down` shows the mask of each row and unit: it is that of the output
    masks = (output != 0).double()
    assert 0 < masks.mean() < 1
    inner = (F.silu(part.gate(x)) * part.up(x)).double()
    expected = 2 * masks.T @ inner
    torch.testing.assert_close(part.down.weight.grad.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "others",
    [
        list,
        lambda: [ActivationCheckpointing()],
        lambda: [ActivationCheckpointing(), ActivationOffloading(min_offload_bytes=16, allow_cpu=True)],
        lambda: [GradientRelease()],
        lambda: [RegionalCompilation(backend="aot_eager")],
    ],
    ids=["alone", "recomputed", "offloaded", "released", "compiled"],
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_fit_ends_with_the_weights_of_a_plain_one(others, precision, make_trainer):
    torch._dynamo.reset()
    plain = fitted(make_trainer, precision=precision).state_dict()
    callback = TiledMlp(tile_tokens=3)
    module = fitted(make_trainer, *others(), callback, precision=precision)
    tolerance = 1e-5 if precision == "32-true" else 2e-3
    torch.testing.assert_close(module.state_dict(), plain, rtol=tolerance, atol=tolerance)


# --- memory ---


@pytest.mark.parametrize("recomputed", [False, True])
def test_bytes_kept_and_the_peak_are_those_of_a_tile(recomputed):
    width, inner, tokens, tile = 8, 128, 512, 32

    def counted(tiled: bool) -> tuple[int, int]:
        torch.manual_seed(2)
        part = nn.Sequential(nn.Linear(width, width), Gated(width, inner))
        if tiled:
            tile_parts(feed_forward_parts(part), tile)
        if recomputed:
            checkpoint_blocks({"part": part}, verify=False)
        x = torch.randn(tokens, width)
        part(x).sum().backward()  # compares rows
        kept = saved_for_backward(lambda: part(x))[1]
        part.zero_grad()
        with Ledger(part, ()) as ledger:
            part(x).sum().backward()
        return kept, ledger.peak_bytes

    (kept, peak), (kept_whole, peak_whole) = counted(True), counted(False)
    one_inner = tokens * inner * 4
    if not recomputed:
        assert kept == tokens * width * 4  # the part's input
        assert kept_whole > 4 * one_inner  # gate, silu of it, up, their product
    assert peak_whole > 4 * one_inner
    assert peak < one_inner


def test_operators_of_forward_and_backward_are_counted_in_tiles_too():
    def flops(tile_tokens: int) -> int:
        part = nn.Sequential(Gated())
        tile_parts(feed_forward_parts(part), tile_tokens)
        with FlopCounterMode(display=False) as counter:
            part(torch.randn(16, 8, requires_grad=True)).sum().backward()
        return counter.get_total_flops()

    product = 2 * 16 * 8 * 32
    # of three layers: forward 1, backward 2; in tiles forward once more, and rows compared (a tile of 4, its last row)
    assert flops(16) == 9 * product
    assert flops(4) == 12 * product + 3 * product * 5 // 16


# --- what is refused, and what is said ---


class Mixing(Gated):
    """One that mixes tokens in a way of its own."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(super().forward(x))


@pytest.mark.parametrize(
    "how",
    [
        lambda y: y + F.pad(y, (0, 0, 1, 0))[..., :-1, :],  # as a convolution
        lambda y: y - y.mean(-2, keepdim=True),
        lambda y: y.cumsum(-2),
        nn.BatchNorm1d(8),
    ],
    ids=["neighbour", "mean", "sum", "batch norm"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_that_mix_tokens_are_refused(how, dtype):
    part = Mixing(how).to(dtype)
    buffers = [buffer.clone() for buffer in part.buffers()]
    tile_parts({"net.mlp": part}, 64)
    with pytest.raises(ConflictError, match=mentions("net.mlp", "Mixing", "callback.tiled_mlp.parts=[ClassName]")):
        part(torch.randn(128, 8, dtype=dtype))
    assert all(map(torch.equal, part.buffers(), buffers))
    assert all(module.training for module in part.modules())


def test_parts_with_parameters_elsewhere_are_refused():
    scale = nn.Parameter(torch.ones(8))
    part = Mixing(lambda y: y * scale)
    tile_parts({"net.mlp": part}, 4)
    with pytest.raises(ConflictError, match=mentions("net.mlp", "parameters", "callback.tiled_mlp.parts=[ClassName]")):
        part(torch.randn(8, 8)).sum().backward()


def test_parts_that_take_or_return_other_things_are_refused():
    part = Gated()
    tile_parts({"net.mlp": part}, 4)
    with pytest.raises(ConflictError, match=mentions("net.mlp", "callback.tiled_mlp.parts=[ClassName]")):
        part(torch.randn(8, 8), torch.randn(3, 8))
    part = Mixing(lambda y: (y, y))
    tile_parts({"net.mlp": part}, 4)
    with pytest.raises(ConflictError, match=mentions("net.mlp", "callback.tiled_mlp.parts=[ClassName]")):
        part(torch.randn(8, 8))


class Res(nn.Module):
    """A residual block of convolutions, (batch, 8, height, width)."""

    def __init__(self, normalised: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if normalised else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolution(self.norm(x))


@pytest.mark.parametrize("normalised", [False, True])  # torch raises a RuntimeError, and a ValueError
@pytest.mark.parametrize("differentiable", [True, False])  # as in the sanity check of validation
def test_parts_of_convolutions_are_refused(normalised, differentiable):
    part = Res(normalised)
    tile_parts({"net.res": part}, 16)
    x = torch.randn(2, 8, 16, 16)
    with (
        torch.set_grad_enabled(differentiable),
        pytest.raises(ConflictError, match=mentions("net.res", "(Res)", "callback.tiled_mlp.parts=[ClassName]")),
    ):
        part(x)
    restore_forwards([part], Tiling)
    assert part(x).shape == x.shape


def test_a_module_without_such_parts_is_refused(make_trainer):
    net = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 1))
    with pytest.raises(
        NothingToDoError, match=mentions("TransformerEncoderLayer", "callback.tiled_mlp.parts=[ClassName]")
    ):
        fitted(make_trainer, TiledMlp(), module=regression(L, net))
    with pytest.raises(NothingToDoError, match=mentions("'Gatd'", "did you mean 'Gated'")):
        fitted(make_trainer, TiledMlp(parts=["Gatd"]))


def test_recomputed_parts_that_would_keep_a_block_from_being_compiled_are_refused(make_trainer):
    names = ("activation_checkpointing", "regional_compilation", "tiled_mlp")
    refusal = mentions(*(f"callback.{name}" for name in names), "~callback.tiled_mlp")
    with pytest.raises(ConflictError, match=refusal):
        compose({"precision": "32-true", "callback": {name: {} for name in names}})
    for by_hand in permutations(
        [ActivationCheckpointing(), RegionalCompilation(backend="aot_eager"), TiledMlp(tile_tokens=2)]
    ):
        with pytest.raises(ConflictError, match=refusal):
            fitted(make_trainer, *by_hand)


def test_a_batch_of_one_tile_is_warned_of(make_trainer):
    with pytest.warns(UserWarning, match=mentions("tile_tokens=4096", "4 tokens", "callback.tiled_mlp")):
        fitted(make_trainer, TiledMlp())
