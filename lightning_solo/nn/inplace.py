"""Activations and dropouts that can overwrite their input, since nothing else reads it.

A pass over a batch shows which: the input is the result of one operator, no other operator reads it, and it isn't alive
after forward, so that neither a backward, nor a recomputation, nor an attribute will read it. In this pass activations
save nothing of their input, which would otherwise keep it alive. They need their result for their gradient, so nothing
may overwrite that.

ReLU and dropout then take one tensor less while they run. LeakyReLU also saves one less for backward, since torch
computes its gradient in place from the result. ELU, CELU and SELU do so too, but round their gradients otherwise. SiLU,
Mish and units with bounds would gain nothing: in place they save a copy of their input. GELU has no form in place.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_solo.attributes import replaced
from lightning_solo.memory.category_peaks import is_compiled
from lightning_solo.memory.ledger import storages_of

ACTIVATIONS = (nn.ReLU, nn.LeakyReLU)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
ROUNDED = (nn.ELU, nn.CELU, nn.SELU)
"""Classes whose gradients differ in place by rounding."""
WITHOUT_GAIN = (nn.GELU, nn.SiLU, nn.Mish, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Threshold)
"""Classes without a form in place, or with one that saves nothing."""
NOT_CALLED = "isn't called in training"


def candidates(module: nn.Module) -> dict[str, Any]:
    """Return name -> activation or dropout that could run in place, outside of compiled parts."""
    compiled = [name for name, part in module.named_modules() if is_compiled(part)]
    return {
        name: part
        for name, part in module.named_modules()
        if type(part) in ACTIVATIONS + DROPOUTS
        and not part.inplace
        and not (isinstance(part, DROPOUTS) and part.p == 0)
        and not any(f"{name}.".startswith(f"{each}." if each else "") for each in compiled)
    }


def readers(parts: Mapping[str, Any], step: Callable[[], Any]) -> dict[str, str]:
    """Return name -> why the input of a part must not be overwritten; those left out may be.

    Args:
        parts: activations and dropouts by name, with all of whose calls the answer holds.
        step: runs a forward pass, and returns all that it leaves.
    """
    mode = _Reads()
    calls: list[_Call] = []
    with ExitStack() as stack:
        for name, part in parts.items():
            stack.enter_context(
                replaced(
                    part, "forward", partial(_noted, mode, calls, name, isinstance(part, ACTIVATIONS), part.forward)
                )
            )
        stack.enter_context(mode)
        result = step()
    gc.collect()  # what a cycle of references holds isn't read
    called = {call.name for call in calls}
    reasons = dict.fromkeys(parts.keys() - called, NOT_CALLED)
    uses = Counter(call.key for call in calls)
    for call in calls:
        if call.reason or mode.reads[call.key] or uses[call.key] > 1 or not call.storage.expired():  # type: ignore[no-untyped-call]
            reasons.setdefault(call.name, call.reason or "its input is read by something else")
    del result
    return reasons


class _Call(NamedTuple):
    """A call of a part."""

    name: str  # of the part
    key: int  # of the input's storage
    storage: StorageWeakRef  # weak reference to it; while that is alive, no other storage has the key
    reason: str  # why the input must not be overwritten, if the call itself shows it


def _noted(
    mode: _Reads, calls: list[_Call], name: str, is_activation: bool, forward: Callable[..., Any], x: Any
) -> Any:
    """Call a part so that it saves nothing of its input, and note the call."""
    if type(x) is not Tensor or not x.is_floating_point():
        calls.append(_Call(name, 0, _reference(torch.empty(0).untyped_storage()), "its input is no plain tensor"))
        return forward(x)
    key, is_leaf = _key(x.untyped_storage()), x.requires_grad and x.grad_fn is None
    reason = "its input is the batch or a parameter" if key not in mode.born or is_leaf else ""
    if not x.requires_grad:
        reason = reason or "its input has no gradient, so this pass doesn't show what a backward needs"
    calls.append(_Call(name, key, _reference(x.untyped_storage()), reason))
    with mode.paused():
        result = _SavesNothing.apply(x, forward)  # type: ignore[no-untyped-call]
    if is_activation:
        mode.reads[_key(result.untyped_storage())] += 1  # by its own backward
    return result


def _reference(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _key(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage's own record, which no other has while that is referred to, even weakly."""
    return int(storage._cdata)


class _SavesNothing(torch.autograd.Function):
    """Calls a function without a graph of its own; its input stays connected, and isn't kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x.new_empty(0))  # a part that is recomputed for it keeps its own inputs
        result = function(x)
        return result.clone() if result is x else result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("this pass has no backward")  # pragma: no cover


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that read each storage, but for views and the one that made it.

    Attributes:
        born: storages that an operator made under this mode.
        reads: storage -> operators that have read it since.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.born: set[int] = set()
        self.reads: Counter[int] = Counter()
        self._is_paused = False

    def paused(self) -> AbstractContextManager[Any]:
        """Count no reads in a context."""
        return replaced(self, "_is_paused", True)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        taken = {_key(each) for each in storages_of((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        if not self._is_paused and not getattr(func, "is_view", False):
            self.reads.update(taken)
        for storage in storages_of(result):
            key = _key(storage)
            if key not in taken:
                self.born.add(key)
                self.reads[key] = 0
        return result
