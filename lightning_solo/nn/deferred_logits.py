"""Logits that are computed only when needed; their cross-entropy is computed in chunks instead.

A module's code is written for logits: ``F.cross_entropy(self.head(hidden).view(-1, words), labels)``. `defer_logits`
makes its head return `DeferredLogits`. They support the usual operations before the loss: other shapes and types, a
scale, a soft cap, a choice of tokens. Any other operation computes the logits as the head would have.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from lightning_solo.errors import ConflictError, NothingToDoError
from lightning_solo.nn.cross_entropy import (
    AS_COMPUTED,
    Loss,
    Pointwise,
    chunked_argmax,
    linear_cross_entropy,
)
from lightning_solo.nn.factorized_layers import Factorized
from lightning_solo.nn.forwards import record_of, replace_forward
from lightning_solo.nn.quantized import QuantizedLinear, QuantizedWeight, product, product_dtype, weights_in

AUTO = "auto"


@dataclass
class Use:
    """A record of how a head's logits are used while gradients are enabled."""

    chunk_tokens: int  # tokens whose logits exist at a time
    backend: str = "torch"  # ``torch`` or ``liger``, which computes a chunk's losses
    losses: int = 0  # number of losses that were computed in chunks
    computed_for: dict[str, None] = field(default_factory=dict)  # names of functions for which all logits were computed


def output_heads(module: nn.Module, head: str = AUTO) -> dict[str, nn.Linear]:
    """Return qualified name -> linear layer that computes a module's logits.

    ``auto`` finds the layers that Hugging Face's ``get_output_embeddings`` returns in any part of the module. If there
    are none, it finds the last linear layer with as many outputs as an embedding has rows.

    Raises:
        NothingToDoError: there is no such layer; the message lists the largest linear layers.
        ConflictError: the layer isn't a plain linear layer.
    """
    names = {part: name for name, part in module.named_modules()}
    if head != AUTO:
        chosen = [part for part, name in names.items() if name == head]
    else:
        methods = [getattr(part, "get_output_embeddings", None) for part in names]
        returned = [method() for method in methods if callable(method)]
        chosen = [part for part in dict.fromkeys(returned) if part in names] or _of_vocabulary_size(names)
    if not chosen:
        linear = sorted((p for p in names if isinstance(p, nn.Linear)), key=lambda p: p.out_features, reverse=True)
        listing = ", ".join(f"{names[p]} ({p.in_features} -> {p.out_features})" for p in linear[:8])
        raise NothingToDoError(
            f"chunked cross-entropy: {type(module).__name__} has no output layer"
            f" {'as language models have' if head == AUTO else repr(head)}; write"
            " callback.chunked_cross_entropy.head=<name of the linear layer that computes the logits>; the largest"
            f" linear layers are: {listing or 'none'}"
        )
    # a factorized head computes the logits by its last layer
    chosen = [part[-1] if isinstance(part, Factorized) else part for part in chosen]
    for part in chosen:
        if not _is_linear(part):
            if "base_layer" in part._modules:
                raise ConflictError(
                    f"chunked cross-entropy: the head {names[part]!r} has an adapter, which adds to its logits; write"
                    " callback.adapters.targets without it, or ~callback.chunked_cross_entropy"
                )
            raise ConflictError(
                f"chunked cross-entropy: the head {names[part]!r} is a {type(part).__name__}, which isn't computed as a"
                " linear layer; write callback.chunked_cross_entropy.head=<name of an nn.Linear>, or"
                " ~callback.chunked_cross_entropy"
            )
    return {names[part]: part for part in chosen}


def _is_linear(part: Any) -> bool:
    """Return whether a part computes its ``weight`` times its input, as peft's layer with trained rows does too."""
    rows = part._modules.get("token_adapter")
    layer = part if rows is None else rows.base_layer
    is_plain = type(layer).forward in (nn.Linear.forward, QuantizedLinear.forward)
    is_plain = is_plain and (rows is None or layer.bias is None)
    return is_plain and "forward" not in vars(part)


def _of_vocabulary_size(parts: Iterable[nn.Module]) -> list[nn.Module]:
    parts = list(parts)
    sizes = {part.num_embeddings for part in parts if isinstance(part, nn.Embedding)}
    matching: list[nn.Module] = [p for p in parts if isinstance(p, nn.Linear) and p.out_features in sizes]
    return matching[-1:]


def defer_logits(head: nn.Linear, chunk_tokens: int, backend: str = "torch") -> Use:
    """Make a head return `DeferredLogits` until ``restore_forwards([head], Use)``; return the record of their use."""
    use = Use(chunk_tokens, backend)
    replace_forward(head, forward, use)
    return use


def forward(head: nn.Linear, input: Tensor) -> Tensor:
    """Return a head's deferred logits."""
    use = record_of(head, Use)
    if use is None or torch.compiler.is_compiling():
        return type(head).forward(head, input)
    layer = _Layer(head, input, use)
    return DeferredLogits(
        layer, lambda _: layer.logits(), None, hidden=input, differentiable=torch.is_grad_enabled(), dtype=layer.dtype
    )


class _Layer:
    """One call of a head: its input and weights, and whether its logits have been computed."""

    def __init__(self, head: nn.Linear, input: Tensor, use: Use) -> None:
        self.input, self.bias, self.use = input, getattr(head, "bias", None), use
        quantized = weights_in(head).get("weight")
        self.weight: Any = head.weight if quantized is None else quantized
        self.dtype = product_dtype(input)
        self.autocast = torch.is_autocast_enabled(input.device.type)
        self.computed = False
        self._versions = self._current()

    def _current(self) -> list[int]:
        weights = [self.weight] if isinstance(self.weight, Tensor) else self.weight.tensors()
        return [_version(tensor) for tensor in (self.input, *weights, self.bias)]

    def check(self) -> None:
        """Raise ConflictError if input or weights have changed in place since the head ran."""
        if self._current() != self._versions:
            raise ConflictError(
                "chunked cross-entropy: logits are used after the head's input or weights have changed, for example by"
                " an optimizer step; use them before, or keep logits.clone()"
            )

    def logits(self) -> Tensor:
        """Compute the logits as the head would."""
        self.check()
        self.computed = True
        device, dtype = self.input.device.type, self.dtype if self.autocast else None
        with torch.autocast(device, dtype, enabled=self.autocast):
            return self.product(self.input)

    def product(self, hidden: Tensor) -> Tensor:
        """Return the layer's output for an input."""
        if isinstance(self.weight, QuantizedWeight):
            return product(hidden, self.weight, self.bias)
        return F.linear(hidden, self.weight, self.bias)


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


class DeferredLogits(Tensor):
    """The logits of a head's call, possibly reshaped or scaled, without data.

    Args:
        layer: the head's call.
        step: computes these logits from those of ``before``. For the head's own logits it gets None.
        before: the deferred logits that these were derived from; None for the head's own.
        hidden: (..., width): the input's rows for these logits.
        differentiable: whether gradients go from these logits to the head.
        dtype: type of the logits.
        pointwise: function of each of the head's logits.
        class_first: whether the vocabulary is dimension 1 of 3.
    """

    _layer: _Layer
    _step: Callable[[Any], Tensor]
    _before: DeferredLogits | None
    _hidden: Tensor
    _differentiable: bool
    _pointwise: Pointwise
    _class_first: bool
    _logits: Tensor | None
    _version_computed: int

    def __new__(
        cls,
        layer: _Layer,
        step: Callable[[Any], Tensor],
        before: DeferredLogits | None,
        *,
        hidden: Tensor,
        differentiable: bool,
        dtype: torch.dtype,
        pointwise: Pointwise = AS_COMPUTED,
        class_first: bool = False,
    ) -> DeferredLogits:
        shape = [*hidden.shape[:-1], layer.weight.shape[0]]
        if class_first:
            shape = [shape[0], shape[2], shape[1]]
        leaves = (hidden, layer.weight, layer.bias)
        needs = differentiable and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        self: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device, requires_grad=needs)
        self._layer, self._step, self._before, self._hidden = layer, step, before, hidden
        self._differentiable, self._pointwise, self._class_first = differentiable, pointwise, class_first
        self._logits, self._version_computed = None, 0
        if needs:
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(_refuse_gradient)
        return self  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> Any:
        return ["_hidden"], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _REQUIRES_GRAD and args[0]._logits is None:
            return False  # else torch's FLOP counter, which hooks modules' outputs, would compute them
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        tree_map_only(DeferredLogits, _refuse_custom_function, (args, kwargs))
        result = NotImplemented
        if name in _RULES and args and isinstance(args[0], cls) and not args[0]._layer.computed:
            rule, signature = _RULES[name]
            try:
                call = signature.bind(*args, **kwargs)
            except TypeError:  # an argument that no rule knows
                pass
            else:
                result = rule(*call.args, **call.kwargs)
        if result is not NotImplemented:
            return result
        args, kwargs = tree_map_only(DeferredLogits, lambda logits: logits._compute(name), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise ConflictError(f"chunked cross-entropy: {func} reads logits that were not computed; {_REMEDY}")

    def _compute(self, name: str) -> Tensor:
        """Return the logits with their data: the same tensor each time, since it may be changed in place."""
        if self._logits is None:
            before = None if self._before is None else self._before._compute(name)
            if before is None and self._differentiable:
                self._layer.use.computed_for[name] = None
            if before is not None and before._version != self._before._version_computed:  # type: ignore[union-attr]
                raise ConflictError(
                    "chunked cross-entropy: logits were changed in place after others were made from them; change"
                    " them earlier, or write ~callback.chunked_cross_entropy"
                )
            with torch.set_grad_enabled(self._differentiable):
                self._logits = self._step(before)
            self._version_computed = self._logits._version
        return self._logits

    @property
    def chunk_tokens(self) -> int:
        """Positions whose logits exist at a time."""
        return self._layer.use.chunk_tokens

    def of_rows(self, at: slice) -> Tensor:
        """Return the logits of some positions, counted over all dimensions: (positions, vocabulary)."""
        layer, (inner, is_capped, outer) = self._layer, self._pointwise
        layer.check()
        hidden, dtype = self._hidden.flatten(0, -2)[at], layer.dtype if layer.autocast else None
        with (
            torch.set_grad_enabled(self._differentiable and torch.is_grad_enabled()),
            torch.autocast(hidden.device.type, dtype, enabled=layer.autocast),
        ):
            logits = layer.product(hidden)
            scaled = logits if inner == 1 else inner * logits
            return outer * scaled.tanh() if is_capped else scaled

    def _next(self, step: Callable[[Tensor], Tensor], **changed: Any) -> DeferredLogits:
        """Return the deferred result of a function of these logits."""
        now = {
            "hidden": self._hidden,
            "differentiable": self._differentiable and torch.is_grad_enabled(),
            "dtype": self.dtype,
            "pointwise": self._pointwise,
            "class_first": self._class_first,
        }
        return DeferredLogits(self._layer, step, self, **{**now, **changed})


_REMEDY = "compute the loss by torch.nn.functional.cross_entropy, or write ~callback.chunked_cross_entropy"


def _refuse_gradient(*_: Tensor) -> None:
    """Refuse a custom autograd.Function, whose arguments torch doesn't allow to be replaced."""
    raise ConflictError(f"chunked cross-entropy: logits go through a custom autograd.Function; {_REMEDY}")


def _refuse_custom_function(logits: DeferredLogits) -> None:
    """Refuse logits that a custom autograd.Function has returned."""
    with torch._C.DisableTorchFunctionSubclass():
        if logits.grad_fn is not None:
            _refuse_gradient()


# --- operations on logits that aren't computed; NotImplemented: compute them ---


def _reshape(logits: DeferredLogits, *sizes: Any) -> Any:
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    if logits._class_first or not sizes or not all(type(size) is int for size in sizes):
        return NotImplemented
    known = math.prod(size for size in sizes if size != -1)
    sizes = tuple(logits.numel() // max(known, 1) if size == -1 else size for size in sizes)
    if sizes[-1] != logits.shape[-1] or math.prod(sizes) != logits.numel():
        return NotImplemented
    hidden = logits._hidden.reshape(*sizes[:-1], logits._hidden.shape[-1])
    return logits._next(lambda x: x.reshape(sizes), hidden=hidden)


def _flatten(logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % logits.dim(), end_dim % logits.dim()
    if logits._class_first or not start <= end < logits.dim() - 1:
        return NotImplemented
    return logits._next(lambda x: x.flatten(start, end), hidden=logits._hidden.flatten(start, end))


def _index(logits: DeferredLogits, index: Any) -> Any:
    """Choose tokens, by an index that keeps the last dimension."""
    parts = index if isinstance(index, tuple) else (index,)
    if logits._class_first or not all(type(p) in _INDICES or isinstance(p, Tensor) for p in parts):
        return NotImplemented
    mask = (torch.bool, torch.uint8)
    taken = [
        p.dim() if isinstance(p, Tensor) and p.dtype in mask else int(p is not None and p is not ...) for p in parts
    ]
    to_the_end = sum(taken) == logits.dim() or any(p is ... for p in parts[:-1])
    if to_the_end and not (isinstance(parts[-1], slice) and parts[-1] == slice(None)):
        return NotImplemented
    return logits._next(lambda x: x[index], hidden=logits._hidden[index])


def _detach(logits: DeferredLogits) -> Any:
    return logits._next(Tensor.detach, hidden=logits._hidden.detach(), differentiable=False)


def _to(logits: DeferredLogits, to: Any = None, **kwargs: Any) -> Any:
    to = kwargs.pop("dtype", to)
    if kwargs or (to != logits.device if isinstance(to, torch.device) else to not in (torch.float32, logits.dtype)):
        return NotImplemented
    return logits if to in (logits.device, logits.dtype) else logits._next(lambda x: x.to(to), dtype=to)


def _permute(logits: DeferredLogits, *dims: Any) -> Any:
    """Move the vocabulary to dimension 1 of 3, as cross-entropy allows."""
    dims = tuple(dims[0]) if len(dims) == 1 else dims
    if logits._class_first or logits.dim() != 3 or tuple(dim % 3 for dim in dims) != (0, 2, 1):
        return NotImplemented
    return logits._next(lambda x: x.permute(0, 2, 1), class_first=True)


def _transpose(logits: DeferredLogits, dim0: int, dim1: int) -> Any:
    swapped = logits.dim() == 3 and {dim0 % 3, dim1 % 3} == {1, 2}
    return _permute(logits, 0, 2, 1) if swapped else NotImplemented


def _multiply(logits: DeferredLogits, factor: Any) -> Any:
    if type(factor) not in (int, float):
        return NotImplemented
    return logits._next(lambda x: x * factor, pointwise=logits._pointwise.scaled(factor))


def _divide(logits: DeferredLogits, divisor: Any) -> Any:
    if type(divisor) not in (int, float) or divisor == 0:
        return NotImplemented
    return logits._next(lambda x: x / divisor, pointwise=logits._pointwise.scaled(1 / divisor))


def _tanh(logits: DeferredLogits) -> Any:
    if logits._pointwise.capped:
        return NotImplemented
    return logits._next(torch.tanh, pointwise=logits._pointwise._replace(capped=True))


def _cross_entropy(*args: Any, **kwargs: Any) -> Any:
    """Compute the loss in chunks, unless it has class weights, or labels that are probabilities."""
    call = _SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    logits, labels, options = call.arguments["input"], call.arguments["target"], call.arguments
    if not isinstance(labels, Tensor) or logits.dim() < 2:
        return NotImplemented
    reasons = [f"{name}=" for name in ("weight", "size_average", "reduce") if options[name] is not None]
    reasons += ["labels that are probabilities"] * labels.is_floating_point()
    if reasons:
        logits._compute(f"cross_entropy with {' and '.join(reasons)}")
        return NotImplemented
    if labels.shape != logits._hidden.shape[:-1] or options["reduction"] not in ("mean", "sum", "none"):
        return NotImplemented  # torch raises the error
    layer = logits._layer
    layer.check()
    pointwise, smoothing = logits._pointwise, options["label_smoothing"]
    loss = Loss(
        layer.use.chunk_tokens, options["ignore_index"], smoothing, pointwise=pointwise, backend=layer.use.backend
    )
    with torch.set_grad_enabled(logits._differentiable and torch.is_grad_enabled()):
        result = linear_cross_entropy(
            logits._hidden, layer.weight, layer.bias, labels, loss, layer.dtype, options["reduction"]
        )
    layer.use.losses += result.requires_grad
    autocast = torch.is_autocast_enabled(logits.device.type)
    return result if autocast else result.to(logits.dtype)


def _argmax(logits: DeferredLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim not in (-1, logits.dim() - 1) or keepdim or logits._class_first:
        return NotImplemented
    layer = logits._layer
    layer.check()
    loss = Loss(layer.use.chunk_tokens, pointwise=logits._pointwise)
    return chunked_argmax(logits._hidden, layer.weight, layer.bias, loss, layer.dtype)


_INDICES = (int, slice, type(None), type(...))
_SIGNATURE = inspect.signature(F.cross_entropy)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    "__getitem__": _index,
    "contiguous": lambda logits: logits._next(Tensor.contiguous),
    "detach": _detach,
    "to": _to,
    "float": lambda logits: _to(logits, torch.float32),
    "permute": _permute,
    "transpose": _transpose,
    "mul": _multiply,
    "div": _divide,
    "tanh": _tanh,
    "cross_entropy": _cross_entropy,
    "argmax": _argmax,
}
_RULES = {name: (rule, inspect.signature(rule)) for name, rule in _FUNCTIONS.items()}
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_METADATA = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.__len__,
    Tensor.__hash__,
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda")),
}
