"""The chunked loss has the numbers and gradients of the plain one, holds one chunk's logits, and names bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_solo.errors import CapabilityError, GradientError
from lightning_solo.memory.ledger import Ledger
from lightning_solo.nn import chunked_cross_entropy, liger
from lightning_solo.nn import quantized as quantized_file
from lightning_solo.nn.cross_entropy import Loss, Pointwise, chunked_argmax, linear_cross_entropy
from tests.messages import mentions

TOKENS, WIDTH, WORDS = 90, 16, 257


def case(dtype: torch.dtype = torch.float32, ignored: int = 7, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden, weight, bias and labels, of which every so many are ignored."""
    draw = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(*size, generator=draw) for size in ((TOKENS, WIDTH), (WORDS, WIDTH), (WORDS,)))
    labels = torch.randint(0, WORDS, (TOKENS,), generator=draw)
    labels[::ignored] = -100
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), labels


def plain(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, label_smoothing: float = 0.0,
    softcap: float | None = None, z_loss: float = 0.0, ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Return the loss by way of all logits."""
    logits = F.linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing, ignore_index=ignore_index)
    return loss + z_loss * logits[labels != ignore_index].logsumexp(1).square().mean()


def with_gradients(loss: Callable[..., Tensor], *tensors: Tensor, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Return a loss of (hidden, weight, bias), and its gradients."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    hidden, weight, bias = leaves
    value = loss(hidden, weight, options.pop("labels"), bias=bias, **options)
    value.backward()
    return value.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).double().norm() / other.double().norm())


OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"softcap": 3.0},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.2, "softcap": 5.0, "z_loss": 1e-3},
    {"ignore_index": 5},
]


@pytest.mark.parametrize("chunk_tokens", [1, 32, 1024])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss_and_gradients_are_those_of_the_plain_one(options: dict[str, Any], chunk_tokens: int) -> None:
    *tensors, labels = case()
    labels = labels.where(labels >= 0, options.get("ignore_index", -100))
    expected, gradients = with_gradients(plain, *tensors, labels=labels, **options)
    loss, ours = with_gradients(chunked_cross_entropy, *tensors, labels=labels, chunk_tokens=chunk_tokens, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert len(ours) == 3
    for one, other in zip(ours, gradients, strict=True):
        assert distance(one, other) <= 1e-6


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_are_those_of_finite_differences(options: dict[str, Any]) -> None:
    """Along random directions: torch's gradcheck runs backward several times."""
    *tensors, labels = (part[:11] for part in case(torch.float64))
    labels = labels.where(labels < 0, labels % 11).where(labels >= 0, options.get("ignore_index", -100))

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
        return chunked_cross_entropy(hidden, weight, labels, chunk_tokens=4, **options)

    _, gradients = with_gradients(loss, *tensors, labels=labels, **options)
    for number, gradient in enumerate(gradients):
        direction = torch.randn_like(gradient)
        ends = []
        for sign in (1, -1):
            hidden, weight, bias = (t + (sign * 1e-6 * direction if n == number else 0) for n, t in enumerate(tensors))
            ends.append(loss(hidden, weight, labels, bias=bias, **options))
        torch.testing.assert_close((ends[0] - ends[1]) / 2e-6, (gradient * direction).sum(), rtol=1e-6, atol=1e-8)


@given(
    st.integers(1, 12), st.integers(1, 5), st.integers(1, 40), st.integers(1, 15),
    st.integers(0, 2**16), st.sampled_from([0.0, 0.3, 1.0]),
)  # fmt: skip
def test_any_size(tokens: int, width: int, words: int, chunk_tokens: int, seed: int, ignored: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(*size, generator=draw) for size in ((tokens, width), (words, width), (words,))]
    labels = torch.randint(0, words, (tokens,), generator=draw)
    labels[torch.rand(tokens, generator=draw) < ignored] = -100
    expected, gradients = with_gradients(plain, *tensors, labels=labels)
    loss, ours = with_gradients(chunked_cross_entropy, *tensors, labels=labels, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    for one, other in zip(ours, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)


def exact_gradients(*tensors: Tensor, labels: Tensor) -> list[Tensor]:
    return with_gradients(plain, *(tensor.double() for tensor in tensors), labels=labels)[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_within_their_rounding(dtype: torch.dtype) -> None:
    *tensors, labels = case(dtype)
    loss, ours = with_gradients(chunked_cross_entropy, *tensors, labels=labels, chunk_tokens=2)  # 38 chunks
    assert loss.dtype is torch.float32
    for one, other in zip(ours, exact_gradients(*tensors, labels=labels), strict=True):
        assert one.dtype is dtype
        assert distance(one, other) <= 2 * torch.finfo(dtype).eps / 2  # probabilities and products are rounded, too


def test_16_bit_gradients_of_many_chunks_are_rounded_once() -> None:
    *tensors, labels = case(torch.bfloat16)
    tensors[0], labels = tensors[0].repeat(10, 1), labels.repeat(10)
    *_, of_weight, _ = with_gradients(chunked_cross_entropy, *tensors, labels=labels, chunk_tokens=2)[1]
    assert distance(of_weight, exact_gradients(*tensors, labels=labels)[1]) <= torch.finfo(torch.bfloat16).eps


def test_under_autocast_as_the_plain_loss() -> None:
    *tensors, labels = case()
    with torch.autocast("cpu", torch.bfloat16):
        expected, gradients = with_gradients(plain, *tensors, labels=labels)
        loss, ours = with_gradients(chunked_cross_entropy, *tensors, labels=labels, chunk_tokens=32)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)  # the products are rounded alike
    for one, other in zip(ours, gradients, strict=True):
        assert one.dtype is torch.float32
        assert distance(one, other) <= torch.finfo(torch.bfloat16).eps


def test_a_scaled_loss_has_scaled_gradients() -> None:
    *tensors, labels = case(torch.float16)
    scale = 2.0**16

    def scaled(*args: Any, **kwargs: Any) -> Tensor:
        return chunked_cross_entropy(*args, **kwargs) * scale

    _, ours = with_gradients(scaled, *tensors, labels=labels, chunk_tokens=16)
    for one, other in zip(ours, exact_gradients(*tensors, labels=labels), strict=True):
        assert distance(one.double() / scale, other) <= 2e-3


def test_a_tied_weight_gets_both_gradients() -> None:
    _, weight, _, labels = case()
    sums = []
    for loss in (plain, chunked_cross_entropy):
        tied = weight.clone().requires_grad_()
        loss(F.embedding(labels.clamp(min=0), tied).tanh(), tied, labels).backward()
        assert tied.grad is not None
        sums.append(tied.grad)
    assert distance(*sums) <= 1e-6


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_needs_a_gradient_gets_one(needed: tuple[bool, ...]) -> None:
    *tensors, labels = case()
    _, expected = with_gradients(plain, *tensors, labels=labels)
    hidden, weight, bias = leaves = [t.requires_grad_(n) for t, n in zip(tensors, needed, strict=True)]
    with Ledger() as ledger:
        loss = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=8)
        kept = ledger.live_bytes
    loss.backward()
    assert kept < 4 * TOKENS * WIDTH + 8 * TOKENS if not needed[1] else True  # no sum of the weight's size
    for leaf, needs, gradient in zip(leaves, needed, expected, strict=True):
        assert (leaf.grad is not None) == needs
        assert leaf.grad is None or distance(leaf.grad, gradient) <= 1e-6


def test_without_gradients_nothing_is_kept() -> None:
    hidden, weight, bias, labels = case()
    weight.requires_grad_()
    with torch.no_grad(), Ledger() as ledger:
        loss = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=8)
        assert ledger.live_bytes == loss.nbytes
        assert ledger.peak_bytes < 4 * weight.nbytes  # 8 x 257 logits; never a gradient of 257 x 16
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(hidden, weight, labels, bias=bias))


def test_the_peak_is_that_of_a_chunk() -> None:
    tokens, words, width, chunk = 512, 4096, 8, 32
    hidden, weight = torch.randn(tokens, width), torch.randn(words, width)
    labels = torch.randint(0, words, (tokens,))
    peaks = []
    for loss in (plain, lambda *a: chunked_cross_entropy(*a, chunk_tokens=chunk)):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with Ledger() as ledger:
            loss(h, w, labels).backward()
            peaks.append(ledger.peak_bytes)
    logits = 4 * tokens * words
    assert peaks[0] >= 3 * logits  # log-probabilities, their gradient, and that of the logits
    # of a chunk the logits, of hidden and weight the gradients, 4 tensors of a number per token, and some of a chunk's
    assert peaks[1] <= logits * chunk // tokens + hidden.nbytes + weight.nbytes + 8 * 4 * tokens + 4 * 4 * chunk * width


def test_ignored_tokens_take_no_product() -> None:
    hidden, weight, _, labels = case(ignored=1)
    labels[:10] = 3
    with FlopCounterMode(display=False) as counter:
        chunked_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), labels).backward()
    assert counter.get_total_flops() == 3 * 2 * 10 * WIDTH * WORDS  # logits, and the gradients of hidden and weight


def test_where_all_labels_are_ignored_the_loss_is_nan_and_gradients_are_zero_as_torchs() -> None:
    *tensors, labels = case(ignored=1)
    for loss in (plain, chunked_cross_entropy):
        value, gradients = with_gradients(loss, *tensors, labels=labels)
        assert math.isnan(value)
        assert len(gradients) == 3
        assert not any(gradient.any() for gradient in gradients)


def test_a_second_backward_is_refused() -> None:
    hidden, weight, _, labels = case()
    loss = chunked_cross_entropy(hidden.requires_grad_(), weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(GradientError, match="drop retain_graph=True"):
        loss.backward()


def test_a_derivative_of_its_gradients_is_refused() -> None:
    hidden, weight, _, labels = case()
    loss = chunked_cross_entropy(hidden.requires_grad_(), weight, labels)
    with pytest.raises(GradientError, match=r"drop .*create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("label", [WORDS, -1, -101])
def test_a_label_outside_the_vocabulary_is_named(label: int) -> None:
    hidden, weight, _, labels = case()
    labels[3] = label
    with pytest.raises(IndexError, match=mentions(f"labels: {label}", f"0 to {WORDS - 1}", "ignore_index")):
        chunked_cross_entropy(hidden, weight, labels)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"labels \(4,\)"),
        ({"weight": torch.zeros(WORDS, WIDTH + 1)}, rf"weight \({WORDS}, {WIDTH + 1}\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_arguments_are_named(options: dict[str, Any], named: str) -> None:
    hidden, weight, _, labels = case()
    with pytest.raises(ValueError, match=named):
        chunked_cross_entropy(**{"hidden": hidden, "weight": weight, "labels": labels, **options})


def test_liger_is_refused_where_it_is_missing_or_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2])
    monkeypatch.setattr(liger, "is_installed", lambda name: False)
    with pytest.raises(CapabilityError, match=mentions("liger-kernel", "backend='torch'")):
        chunked_cross_entropy(*arguments, backend="liger")
    monkeypatch.setattr(liger, "is_installed", lambda name: name == "liger_kernel")
    with pytest.raises(CapabilityError, match=mentions("CUDA", "cpu", "backend='torch'")):
        chunked_cross_entropy(*arguments, backend="liger")
    with pytest.raises(ValueError, match="liger"):
        chunked_cross_entropy(*arguments, backend="triton")


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("format", ["int8", "host"])
def test_a_quantized_weight_gives_the_loss_of_the_rounded_one_and_is_dequantized_in_parts(
    format: str, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_file, "_ROWS", 50)
    hidden, numbers, bias, labels = case()
    weight, sizes = quantized_file.quantized(numbers, format), list[int]()
    loss = Loss(chunk_tokens=32, label_smoothing=0.1, pointwise=Pointwise(1 / 5, True, 5))
    factors = torch.rand(TOKENS) if reduction == "none" else torch.ones(())

    def run(weight: Any) -> list[Tensor]:
        leaves = [hidden.clone().requires_grad_(), bias.clone().requires_grad_()]
        value = linear_cross_entropy(leaves[0], weight, leaves[1], labels, loss, torch.float32, reduction)
        (factors * value).sum().backward()
        return [value.detach(), *(leaf.grad for leaf in leaves)]

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.is_floating_point() and result.dim() == 2:
                sizes.append(len(result) if result.shape[1] == WIDTH else 0)
            return result

    with Sizes():
        mine = run(weight)
    assert 50 in sizes
    assert max(sizes) < WORDS
    for one, other in zip(mine, run(weight.dequantized()), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    found = chunked_argmax(hidden, weight, bias, loss, torch.float32)
    assert torch.equal(found, chunked_argmax(hidden, weight.dequantized(), bias, loss, torch.float32))
