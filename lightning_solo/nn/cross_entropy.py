"""Compute an output layer and its cross-entropy in chunks of tokens, with the logits of one chunk at a time.

The gradients of the loss are computed in forward, as Liger does (arXiv 2410.10989): 3 products with the weight, as many
as without chunks. Recomputation in backward would need 4, and would save nothing: the weight's gradient is kept during
the backward of the model either way. Losses per token (``reduction="none"``) are recomputed, since the factor of each
is known in backward only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_solo.errors import CapabilityError, GradientError
from lightning_solo.nn import liger
from lightning_solo.nn.quantized import QuantizedWeight, product_dtype

_ROWS = 8192
"""Rows of the weight whose gradient is added at a time, if the sum has a wider type than the product."""
_REMEDY = "drop retain_graph=True and create_graph=True, or use torch.nn.functional.cross_entropy on logits"


class Pointwise(NamedTuple):
    """The function of each logit: ``outer * tanh(inner * x)`` where ``capped``, else ``inner * x``."""

    inner: float = 1.0
    capped: bool = False
    outer: float = 1.0

    def scaled(self, factor: float) -> Pointwise:
        """Return this function, followed by a multiplication."""
        if self.capped:
            return self._replace(outer=self.outer * factor)
        return self._replace(inner=self.inner * factor)


AS_COMPUTED = Pointwise()


@dataclass(frozen=True)
class Loss:
    """Options of a token's loss; see `chunked_cross_entropy`."""

    chunk_tokens: int = 1024
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    pointwise: Pointwise = AS_COMPUTED
    backend: str = "torch"


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int = 1024,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    backend: str = "torch",
) -> Tensor:
    """Return the mean cross-entropy of ``hidden @ weight.T + bias``, in fp32, without all logits at once.

    Gradients are those of the plain loss, also under autocast. Tokens with an ignored label aren't computed. A second
    backward, by ``retain_graph=True``, is refused.

    Args:
        hidden: (..., width): input of the output layer.
        weight: (vocabulary, width): weight of the output layer; it may be the embedding's.
        labels: (...): integers.
        bias: (vocabulary,): bias of the output layer.
        chunk_tokens: tokens whose logits exist at a time.
        ignore_index: label of tokens that don't count. If no token counts, the loss is NaN and its gradients are
            zero, as in ``torch.nn.functional.cross_entropy``.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2, arXiv 2408.00118).
        z_loss: factor of the squared ``logsumexp`` of the logits, which is added (PaLM, arXiv 2204.02311).
        backend: ``torch``; or ``liger``, whose fused kernel computes losses and gradients of a chunk on a GPU.

    Raises:
        CapabilityError: ``liger`` isn't installed or can't run on this device.
        ValueError: shapes don't fit together, or an argument is out of range.
        IndexError: a label is outside the vocabulary.

    >>> hidden, weight, labels = torch.randn(6, 4), torch.randn(9, 4), torch.tensor([0, 8, 3, -100, 2, 2])
    >>> plain = F.cross_entropy(hidden @ weight.T, labels)
    >>> torch.allclose(chunked_cross_entropy(hidden, weight, labels, chunk_tokens=2), plain)
    True
    """
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap}: write a number above 0, or None for none")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: write at least 1")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing}: write a number from 0 to 1")
    if backend not in ("torch", "liger"):
        raise ValueError(f"backend={backend!r}: write 'torch' or 'liger'")
    if backend == "liger" and (lacks := liger.missing(hidden.device)):
        raise CapabilityError(f"backend='liger': {lacks}; write backend='torch'")
    pointwise = Pointwise() if softcap is None else Pointwise(1 / softcap, True, softcap)
    loss = Loss(chunk_tokens, ignore_index, label_smoothing, z_loss, pointwise, backend)
    return linear_cross_entropy(hidden, weight, bias, labels, loss, product_dtype(hidden))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    labels: Tensor,
    loss: Loss,
    dtype: torch.dtype,
    reduction: str = "mean",
) -> Tensor:
    """Return the losses of tokens, their mean or their sum; see `chunked_cross_entropy`.

    Args:
        hidden: (..., width), the input of the output layer.
        weight: (vocabulary, width). One in 8 bits or on the host is dequantized or copied a part at a time, again for
            each chunk.
        bias: (vocabulary,).
        labels: (...), integers.
        loss: options of the loss.
        dtype: type of the products with the weight.
        reduction: "mean", "sum" or "none".
    """
    if labels.shape != hidden.shape[:-1] or len(weight.shape) != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)}: write (..., "
            "width), (vocabulary, width) and (...)"
        )
    rows = _valid_rows(labels.flatten(), weight.shape[0], loss.ignore_index)
    arguments = (hidden.flatten(0, -2), weight, bias, labels.flatten(), rows, loss, dtype)
    if reduction == "none":
        return _LossPerToken.apply(*arguments).view(labels.shape)  # type: ignore[no-any-return,no-untyped-call]
    total: Tensor = _SumOfLosses.apply(*arguments, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    if reduction == "sum":
        return total
    return total / len(rows) if len(rows) else total + math.nan  # a division would make NaN of the gradients


def chunked_argmax(
    hidden: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None, loss: Loss, dtype: torch.dtype
) -> Tensor:
    """Return the index of each token's largest logit: (..., width) -> (...)."""
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        weight = weight.to(dtype) if isinstance(weight, Tensor) else weight
        bias = None if bias is None else bias.to(dtype)
        chunks = torch.split(hidden.flatten(0, -2), loss.chunk_tokens)
        found = [_logits(chunk.to(dtype), weight, bias, loss.pointwise).argmax(1) for chunk in chunks]
    return torch.cat(found).view(hidden.shape[:-1])


def _valid_rows(labels: Tensor, vocabulary: int, ignore_index: int) -> Tensor:
    """Return the indices of the tokens that are not ignored."""
    valid = labels != ignore_index
    wrong = valid & ((labels < 0) | (labels >= vocabulary))
    if bool(wrong.any()):
        label = int(labels[wrong][0])
        raise IndexError(
            f"labels: {label} is outside the vocabulary of {vocabulary}: write 0 to {vocabulary - 1}, or "
            f"{ignore_index} (ignore_index) for a token that doesn't count"
        )
    return valid.nonzero().squeeze(1)


class _SumOfLosses(torch.autograd.Function):
    """The sum of the tokens' losses. Forward also computes the gradients, which backward multiplies in place."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        differentiable = arguments[-1]
        needed = [differentiable and needs for needs in ctx.needs_input_grad[:3]]
        losses, ctx.gradients = _walk(*arguments[:-1], needed=needed)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        _refuse_second_derivative()
        if ctx.gradients is None:
            raise GradientError(
                f"chunked cross-entropy: the first backward of this loss has used up its gradients; {_REMEDY}"
            )
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if gradient is None else gradient.mul_(factor) for gradient in gradients), *[None] * 5


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():  # by create_graph=True alone
        raise GradientError(f"chunked cross-entropy: its gradients can't be differentiated again; {_REMEDY}")


class _LossPerToken(torch.autograd.Function):
    """The losses of all tokens, computed again in backward."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        hidden, weight, bias, labels, rows, ctx.loss, ctx.dtype = arguments
        ctx.quantized = None if isinstance(weight, Tensor) else weight
        ctx.save_for_backward(hidden, weight if ctx.quantized is None else None, bias, labels, rows)
        return _walk(*arguments)[0]

    @staticmethod
    def backward(ctx: Any, factors: Tensor) -> Any:
        _refuse_second_derivative()
        hidden, weight, *others = ctx.saved_tensors
        arguments = hidden, weight if ctx.quantized is None else ctx.quantized, *others, ctx.loss, ctx.dtype
        _, gradients = _walk(*arguments, needed=ctx.needs_input_grad[:3], factors=factors)
        return *gradients, *[None] * 4


def _walk(
    hidden: Tensor,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    labels: Tensor,
    rows: Tensor,
    loss: Loss,
    dtype: torch.dtype,
    *,
    needed: Sequence[bool] = (False, False, False),
    factors: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the losses of all tokens, and the gradients of hidden, weight and bias where needed.

    Gradients are of the sum of the losses, or of ``factors @ losses``.
    """
    all_count = len(rows) == len(labels)
    losses = hidden.new_zeros(len(labels), dtype=_exact(dtype))
    gradients = [
        torch.zeros_like(t) if isinstance(t, Tensor) and n else None
        for t, n in zip((hidden, weight, bias), needed, strict=True)
    ]
    of_hidden, of_weight, of_bias = gradients
    several = of_weight is not None and of_weight.itemsize < 4 and len(rows) > loss.chunk_tokens
    rest = torch.zeros_like(of_weight) if of_weight is not None and several else None  # of a rounded sum
    with torch.autocast(hidden.device.type, enabled=False):
        low_weight = weight.to(dtype) if isinstance(weight, Tensor) else weight
        low_bias = None if bias is None else bias.to(dtype)
        for start in range(0, len(rows), loss.chunk_tokens):
            end = min(start + loss.chunk_tokens, len(rows))
            at: Any = slice(start, end) if all_count else rows[start:end]
            chunk = hidden[at].to(dtype)
            losses[at], x = _losses(
                _logits(chunk, low_weight, low_bias, _before(loss)), labels[at].long(), loss, any(needed)
            )
            if x is None:
                continue
            if factors is not None:
                x.mul_(factors[at].unsqueeze(1))
            x = x.to(dtype)
            if of_hidden is not None:
                of_hidden[at] = _product(x, low_weight).to(of_hidden.dtype)
            if of_weight is not None:
                _add_product(of_weight, rest if start else None, x.t(), chunk)  # the first leaves no rest
            if of_bias is not None:
                of_bias.add_(x.sum(0, dtype=of_bias.dtype))
            del x
    return losses, gradients


def _exact(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype is torch.float64 else torch.float32


def _product(gradients: Tensor, weight: Tensor | QuantizedWeight) -> Tensor:
    """Return a chunk's gradients of the logits times the weight: (tokens, vocabulary) -> (tokens, width)."""
    if isinstance(weight, Tensor):
        return gradients @ weight
    total = gradients.new_zeros(len(gradients), weight.shape[1], dtype=_exact(gradients.dtype))
    for rows, part in weight.parts(gradients.dtype):
        total += gradients[:, rows] @ part
    return total


def _logits(hidden: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None, pointwise: Pointwise) -> Tensor:
    """Return a chunk's logits, in fp32: (tokens, vocabulary)."""
    if isinstance(weight, Tensor):
        logits = F.linear(hidden, weight, bias).to(_exact(hidden.dtype))
    else:
        logits = hidden.new_empty(len(hidden), weight.shape[0], dtype=_exact(hidden.dtype))
        for rows, part in weight.parts(hidden.dtype):
            logits[:, rows] = F.linear(hidden, part, None if bias is None else bias[rows])
    if pointwise.inner != 1:
        logits.mul_(pointwise.inner)
    if pointwise.capped:
        logits.tanh_().mul_(pointwise.outer)
    return logits


def _is_ligers(loss: Loss) -> bool:
    """Return whether Liger's kernel computes this loss: a soft cap's two factors must be reciprocal."""
    pointwise = loss.pointwise
    return loss.backend == "liger" and (not pointwise.capped or math.isclose(pointwise.inner * pointwise.outer, 1))


def _before(loss: Loss) -> Pointwise:
    """Return the function to apply to a chunk's logits before the loss; Liger's kernel applies the soft cap itself."""
    return AS_COMPUTED if _is_ligers(loss) and loss.pointwise.capped else loss.pointwise


def _losses_by_liger(x: Tensor, labels: Tensor, loss: Loss, differentiable: bool) -> tuple[Tensor, Tensor | None]:
    """Compute `_losses` by Liger's kernel."""
    softcap = loss.pointwise.outer if loss.pointwise.capped else None
    losses = liger.token_losses(
        x,
        labels,
        label_smoothing=loss.label_smoothing,
        softcap=softcap,
        z_loss=loss.z_loss,
        gradients=differentiable,
    )
    if differentiable and softcap is None and loss.pointwise.inner != 1:
        x.mul_(loss.pointwise.inner)
    return losses, x if differentiable else None


def _losses(x: Tensor, labels: Tensor, loss: Loss, differentiable: bool) -> tuple[Tensor, Tensor | None]:
    """Return a chunk's losses, and their gradients by the products, which overwrite the logits ``x``."""
    if _is_ligers(loss):
        return _losses_by_liger(x, labels, loss, differentiable)
    labels, smoothing, pointwise = labels.unsqueeze(1), loss.label_smoothing, loss.pointwise
    slope = None
    if differentiable and pointwise.capped:  # of outer * tanh(inner * x): inner * outer * (1 - tanh ** 2)
        slope = x.square().mul_(-pointwise.inner / pointwise.outer).add_(pointwise.inner * pointwise.outer)
    largest = x.amax(1, keepdim=True)
    x.sub_(largest)
    losses = (smoothing - 1) * x.gather(1, labels)
    if smoothing:
        losses -= smoothing * x.mean(1, keepdim=True)
    total = x.exp_().sum(1, keepdim=True)
    losses += total.log()
    normalizer = largest + total.log()  # logsumexp
    if loss.z_loss:
        losses += loss.z_loss * normalizer.square()
    if not differentiable:
        return losses.squeeze(1), None
    x.mul_((1 + 2 * loss.z_loss * normalizer) / total)  # softmax
    if smoothing:
        x.sub_(smoothing / x.shape[1])
    x.scatter_add_(1, labels, x.new_full((1, 1), smoothing - 1).expand_as(labels))
    if slope is not None:
        x.mul_(slope)
    elif pointwise.inner != 1:
        x.mul_(pointwise.inner)
    return losses.squeeze(1), x


def _add_product(total: Tensor, rest: Tensor | None, first: Tensor, second: Tensor) -> None:
    """Add a matrix product to a sum, which may have another type; ``rest`` keeps rounding errors of a 16-bit sum."""
    if rest is None and total.dtype is first.dtype:
        torch.addmm(total, first, second, out=total)  # torch counts no FLOPs of addmm_
        return
    for start in range(0, len(total), _ROWS):
        rows = slice(start, start + _ROWS)
        product = first[rows] @ second
        if rest is None:
            total[rows] += product
        else:
            exact = product.float().add_(rest[rows]).add_(total[rows])
            total[rows] = exact
            torch.sub(exact, total[rows], out=rest[rows])
