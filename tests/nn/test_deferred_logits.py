"""A head's logits wait for their loss: what code does with them before leads to the chunked one, or computes them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_solo.errors import ConflictError, NothingToDoError
from lightning_solo.memory.ledger import Ledger
from lightning_solo.nn.deferred_logits import DeferredLogits, Use, defer_logits, output_heads
from lightning_solo.nn.forwards import restore_forwards
from lightning_solo.nn.quantized import quantize, quantized

BATCH, TOKENS, WIDTH, WORDS = 3, 10, 8, 37
Losses = Callable[[Tensor, Tensor], Tensor]


@contextmanager
def deferred(head: nn.Linear, chunk_tokens: int = 4) -> Iterator[Use]:
    use = defer_logits(head, chunk_tokens)
    try:
        yield use
    finally:
        restore_forwards([head], Use)


def parts(bias: bool = True) -> tuple[nn.Linear, Tensor, Tensor]:
    """Return a head, its input and labels, of which some are ignored."""
    torch.manual_seed(0)
    labels = torch.randint(0, WORDS, (BATCH, TOKENS))
    labels[:, ::4] = -100
    return nn.Linear(WIDTH, WORDS, bias=bias), torch.randn(BATCH, TOKENS, WIDTH), labels


def run(loss: Losses, head: nn.Linear, hidden: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the loss, and the gradients of weight, bias and input."""
    head.zero_grad()
    hidden = hidden.clone().requires_grad_()
    value = loss(head(hidden), labels)
    value.backward()
    gradients = [head.weight.grad, *([] if head.bias is None else [head.bias.grad]), hidden.grad]
    return [value.detach(), *(gradient.clone() for gradient in gradients if gradient is not None)]


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    weights = torch.linspace(0, 1, losses.numel())
    return (losses * weights).sum() / weights.sum()


def gemma(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((torch.tanh(logits / 3.0) * 3.0).view(-1, WORDS), labels.view(-1))


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels >= 0
    return F.cross_entropy(logits[mask], labels[mask])


IN_CHUNKS: dict[str, Losses] = {
    "flat": lambda x, y: F.cross_entropy(x.view(-1, WORDS), y.view(-1)),
    "flat, size by a tuple": lambda x, y: F.cross_entropy(x.reshape((BATCH * TOKENS, -1)), y.view(-1)),
    "float, flattened": lambda x, y: F.cross_entropy(x.float().flatten(0, 1), y.flatten()),
    "to a type": lambda x, y: F.cross_entropy(x.to(torch.float32).to(y.device).flatten(0, 1), y.flatten()),
    "classes second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "classes second, permuted": lambda x, y: F.cross_entropy(x.permute(0, 2, 1).float(), y),
    "a module": lambda x, y: nn.CrossEntropyLoss(label_smoothing=0.1)(x.flatten(0, 1), y.flatten()),
    "sum": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum") / 7,
    "shifted": shifted,
    "last tokens": lambda x, y: F.cross_entropy(x[:, -1], y[:, -1]),
    "one sequence": lambda x, y: F.cross_entropy(x[1], y[1]),
    "masked": masked,
    "weights of tokens": weighted,
    "temperature": lambda x, y: F.cross_entropy(0.5 * x.flatten(0, 1) / 2, y.flatten()),
    "soft cap": gemma,
    "other ignored label": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten().clamp(min=0), ignore_index=0),
    "two losses": lambda x, y: shifted(x, y) + shifted(x[:, :4], y[:, :4]),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", IN_CHUNKS)
def test_code_before_the_loss_keeps_it_chunked(name: str, bias: bool) -> None:
    head, hidden, labels = parts(bias)
    expected = run(IN_CHUNKS[name], head, hidden, labels)
    with deferred(head) as use:
        found = run(IN_CHUNKS[name], head, hidden, labels)
    assert use.losses >= 1
    assert use.computed_for == {}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7)


def banned(logits: Tensor, labels: Tensor) -> Tensor:
    logits[..., 3] = -1e4
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def banned_in_a_view(logits: Tensor, labels: Tensor) -> Tensor:
    flat = logits.view(-1, WORDS)
    flat[:, 3] = -1e4
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def banned_in_a_copy(logits: Tensor, labels: Tensor) -> Tensor:
    half = (logits * 0.5).flatten(0, 1)
    half[:, 3] = -1e4
    return F.cross_entropy(half, labels.flatten()) + logits.mean()


COMPUTED: dict[str, Losses] = {
    "log-probabilities": lambda x, y: F.nll_loss(x.log_softmax(-1).flatten(0, 1), y.flatten()),
    "weights of classes": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), weight=torch.ones(WORDS)),
    "probabilities as labels": lambda x, y: F.cross_entropy(x.flatten(0, 1), torch.full((30, WORDS), 1 / WORDS)),
    "a word banned": banned,
    "a word banned in a view": banned_in_a_view,
    "a word banned in a copy": banned_in_a_copy,
    "in place": lambda x, y: F.cross_entropy(x.mul_(2).flatten(0, 1), y.flatten()),
    "a regularization": lambda x, y: shifted(x, y) + 1e-3 * x.square().mean(),
    "scaled by a parameter": lambda x, y: shifted(x * torch.ones(()), y),
    "divided by no number": lambda x, y: shifted(torch.div(x, 2, rounding_mode="floor") - x, y),
    "over the sequence": lambda x, y: F.cross_entropy(x[..., 0], y.argmax(1)),
    "transposed": lambda x, y: F.cross_entropy(x.mT, y),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_anything_else_computes_the_logits_as_the_head_would(name: str) -> None:
    head, hidden, labels = parts()
    expected = run(COMPUTED[name], head, hidden, labels)
    with deferred(head) as use:
        found = run(COMPUTED[name], head, hidden, labels)
    assert use.computed_for
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7)


def test_a_change_that_earlier_copies_would_miss_is_refused() -> None:
    head, hidden, labels = parts()
    with deferred(head):
        logits = head(hidden)
        half = logits * 0.5
        logits[..., 3] = 0.0
        with pytest.raises(ConflictError, match="changed in place"):
            F.cross_entropy(half.flatten(0, 1), labels.flatten())


def test_logits_look_like_logits() -> None:
    head, hidden, _ = parts()
    with deferred(head) as use:
        logits = head(hidden)
        assert isinstance(logits, DeferredLogits)
        assert isinstance(logits, Tensor)
        assert logits.shape == (BATCH, TOKENS, WORDS)
        assert (logits.ndim, len(logits), logits.numel()) == (3, BATCH, BATCH * TOKENS * WORDS)
        assert (logits.dtype, logits.device, logits.requires_grad) == (torch.float32, hidden.device, False)
        assert logits.transpose(1, 2).shape == (BATCH, WORDS, TOKENS)
        with torch.autocast("cpu", torch.bfloat16):
            assert head(hidden).dtype is torch.bfloat16
        with torch.no_grad():
            assert not head(hidden).requires_grad
        assert use.computed_for == {}
        assert type(logits + 0) is Tensor
        assert use.computed_for == {"add": None}


def test_accuracy_and_perplexity_need_no_logits() -> None:
    head, hidden, labels = parts()
    plain = head(hidden)
    with deferred(head) as use, torch.no_grad(), Ledger() as ledger:
        logits = head(hidden)
        assert torch.equal(logits.argmax(-1), plain.argmax(-1))
        assert torch.equal(torch.argmax(logits.flatten(0, 1), dim=1), plain.argmax(-1).flatten())
        perplexity = shifted(logits, labels).exp()
        assert ledger.peak_bytes < 4 * BATCH * TOKENS * WORDS
    torch.testing.assert_close(perplexity, shifted(plain, labels).exp().detach())
    assert use.losses == 0  # counted where gradients are enabled


def test_a_loss_in_bf16_has_that_type_and_under_autocast_fp32() -> None:
    head, hidden, labels = parts()
    low, bf16 = copy.deepcopy(head).bfloat16(), torch.bfloat16
    for layer, x, autocast in ((low, hidden.bfloat16(), False), (head, hidden, True)):
        with torch.autocast("cpu", bf16, enabled=autocast):
            expected = shifted(layer(x), labels)
            with deferred(layer):
                loss = shifted(layer(x), labels)
        assert loss.dtype is expected.dtype is (torch.float32 if autocast else bf16)
        torch.testing.assert_close(loss, expected)


def test_it_is_kept_only_for_the_loss() -> None:
    """Between forward and backward the gradients are held; logits never are."""
    head, _, _ = parts(bias=False)
    hidden, labels = torch.randn(256, WIDTH, requires_grad=True), torch.randint(0, WORDS, (256,))
    with deferred(head, chunk_tokens=8), Ledger() as ledger:
        logits = head(hidden)
        assert ledger.live_bytes == 0
        loss = F.cross_entropy(logits, labels)
        assert ledger.live_bytes == hidden.nbytes + head.weight.nbytes + loss.nbytes
        loss.backward()
    restored = head(hidden)
    assert type(restored) is Tensor


@pytest.mark.parametrize("format", ["int8", "host"])
def test_a_quantized_head_waits_too_and_computes_as_itself(format: str) -> None:
    head, hidden, labels = parts()
    head.requires_grad_(False)
    quantize(head, {"weight": quantized(head.weight, format)})
    hidden.requires_grad_()
    plain = head(hidden)
    (expected,) = torch.autograd.grad(plain[0].square().sum(), hidden)
    assert output_heads(nn.Sequential(nn.Embedding(WORDS, WIDTH), head)) == {"1": head}
    with deferred(head) as use:
        logits = head(hidden)
        assert isinstance(logits, DeferredLogits)
        torch.testing.assert_close(logits.of_rows(slice(0, TOKENS)), plain[0])
        (gradient,) = torch.autograd.grad(logits.of_rows(slice(0, TOKENS)).square().sum(), hidden)
        torch.testing.assert_close(gradient, expected)
        assert torch.equal(logits.argmax(-1), plain.argmax(-1))
        torch.testing.assert_close(shifted(logits, labels), shifted(plain, labels))
        assert (use.losses, use.computed_for) == (1, {})
        assert torch.equal(head(hidden).exp(), plain.exp())  # all logits are computed
        head.quantized_weights["weight"].codes.mul_(2)
        with pytest.raises(ConflictError, match=r"logits\.clone\(\)"):
            shifted(logits, labels)


class Reversed(torch.autograd.Function):
    """A gradient that forward knows nothing of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Callable[[Tensor], Tensor]) -> Tensor:
        return step(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -gradient, None


@pytest.mark.parametrize("step", [Tensor.clone, lambda x: x * 2, lambda x: x], ids=["computed", "deferred", "as it is"])
def test_a_custom_function_is_refused_where_its_gradient_would_be_lost(step: Callable[[Tensor], Tensor]) -> None:
    head, hidden, _ = parts()
    with deferred(head), pytest.raises(ConflictError, match="cross_entropy"):
        Reversed.apply(head(hidden), step).sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("change", [torch.no_grad()(lambda x: x * 0.5), Tensor.detach], ids=["no_grad", "detach"])
def test_logits_made_without_gradients_have_none(change: Callable[[Tensor], Tensor]) -> None:
    head, hidden, labels = parts()
    with deferred(head) as use:
        logits = head(hidden)
        without = change(logits)
        assert isinstance(without, DeferredLogits)
        assert not without.requires_grad
        assert not shifted(without, labels).requires_grad
        assert not (without + 0).requires_grad
        assert use.losses == 0
        assert (logits + 0).requires_grad


def test_logits_of_before_a_step_are_not_computed_after_it() -> None:
    head, hidden, labels = parts()
    with deferred(head):
        logits = head(hidden)
        shifted(logits, labels).backward()
        torch.optim.SGD(head.parameters(), lr=0.1).step()
        with pytest.raises(ConflictError, match="have changed"):
            logits.sum()
        with pytest.raises(ConflictError, match="have changed"):
            shifted(logits, labels)


def test_a_label_of_a_wrong_shape_is_torchs_error() -> None:
    head, hidden, labels = parts()
    with deferred(head), pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(head(hidden).flatten(0, 1), labels[0])


# --- which head ---


class Named(nn.Module):
    def __init__(self, head: nn.Module | None = None) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 8), nn.Embedding(16, 8)
        self.mix = nn.Linear(8, 16)
        self.out = head or nn.Linear(8, 50)


class HuggingFace(Named):
    def get_output_embeddings(self) -> nn.Module:
        return self.mix


def test_the_head_is_that_of_hugging_face_or_of_the_vocabulary() -> None:
    assert list(output_heads(Named())) == ["out"]
    assert list(output_heads(nn.ModuleDict({"net": HuggingFace()}))) == ["net.mix"]
    assert list(output_heads(Named(), "mix")) == ["mix"]


def test_no_head_lists_what_there_is() -> None:
    with pytest.raises(
        NothingToDoError, match=r"write callback.chunked_cross_entropy.head=.*1 \(8 -> 99\), 0 \(4 -> 8\)"
    ):
        output_heads(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 99)))
    with pytest.raises(
        NothingToDoError, match=r"'lm_head'.*write callback.chunked_cross_entropy.head=.*out \(8 -> 50\)"
    ):
        output_heads(Named(), "lm_head")
    with pytest.raises(NothingToDoError, match="none"):
        output_heads(nn.Conv1d(1, 1, 1))


def test_a_head_that_is_not_linear_is_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    for head, kind in ((Scaled(8, 50), "Scaled"), (nn.Conv1d(8, 50, 1), "Conv1d")):
        with pytest.raises(ConflictError, match=f"'out' is a {kind}.*write callback.chunked_cross_entropy.head="):
            output_heads(Named(head), "out")
    module = Named()
    defer_logits(module.out, 4)  # type: ignore[arg-type]
    with pytest.raises(ConflictError, match="'out' is a Linear"):
        output_heads(module)
