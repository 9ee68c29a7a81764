"""Name the module and operator that first made a value infinite or NaN, by a second pass on the same batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_UNKNOWN = ("empty", "new_empty", "resize")
"""Starts of the names of operators whose output is whatever the memory held."""
_GIVEN = ("fill", "full", "new_full", "masked_fill", "where", "scalar_tensor", "lift", "detach")
"""Starts of the names of operators that write an infinity that they were given, as masks do."""


class Origin(NamedTuple):
    """Where a value was first infinite or NaN."""

    operator: str  # the operator of torch, such as ``"aten.log"``
    module: str  # qualified name of the innermost module that called it; empty for the root
    from_infinity: bool  # whether one of its inputs was infinite

    def words(self, root: str) -> str:
        """Return operator and module in words; ``root`` names the root."""
        return f"{self.operator} in {self.module or root}"


def explain(
    module: nn.Module,
    batch: Iterable[tuple[str, Tensor]],
    forward: Callable[[], Tensor | None],
    *,
    of_gradients: bool = False,
    root: str = "the module",
) -> str | None:
    """Return in words where a loss, or with ``of_gradients`` a gradient, is first infinite or NaN; None if nowhere.

    It looks at the batch, then at parameters and buffers, then runs ``forward`` on them and, for gradients, backward.
    Gradients that parameters hold stay as they are. The caller restores buffers and random numbers.

    Args:
        module: its submodules are named.
        batch: path and tensor of each part of the batch.
        forward: returns the loss.
        of_gradients: whether backward runs too.
        root: how the module itself is named.

    >>> layer = nn.Linear(2, 1)
    >>> explain(layer, [], lambda: (0 * layer(torch.zeros(3, 2))).log().sum() * float("nan"))
    'the first such value comes from aten.log in the module'
    """
    for path, value in batch:
        if kinds := _kinds([value], ("nan", "inf")):
            return f"the batch itself holds {' and '.join(kinds)}{f' in {path}' if path else ''}"
    for what, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, value in named:
            if _kinds([value], ("nan",) if what == "buffer" else ("nan", "inf", "-inf")):  # a mask may hold infinities
                return f"the {what} {name} was not finite before"
    origins = _Origins(module)
    with torch.enable_grad(), torch.compiler.set_stance("force_eager"), origins.watching():
        loss = forward()
        if loss is None:
            return None
        if not of_gradients or not bool(loss.isfinite().all()):
            found = origins.first() if not bool(loss.isfinite().all()) else None
            return None if found is None else f"the first such value comes from {found.words(root)}"
        origins.clear()
        named_parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, [p for _, p in named_parameters], allow_unused=True)
    for (name, _), gradient in zip(named_parameters, gradients, strict=True):
        if gradient is not None and _kinds([gradient], ("nan", "inf", "-inf")):
            found = origins.first()
            start = "" if found is None else f"the first such value comes from backward of {found.words(root)}; "
            return f"{start}it reached the gradient of {name}"
    return None


class _Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the first operators whose output is infinite or NaN while no input is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._module = module
        self._inside: list[str] = []  # the modules whose forward runs, the innermost last
        self._nodes: list[tuple[int, int, str]] = []  # first and last number of the autograd nodes of a call
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        self._nan: Origin | None = None
        self._infinity: Origin | None = None

    def first(self) -> Origin | None:
        """Return the origin: that of an infinity, if NaN came from it."""
        if self._nan is None or (self._nan.from_infinity and self._infinity is not None):
            return self._infinity
        return self._nan

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record within this context."""
        with ExitStack() as stack:
            for name, part in self._module.named_modules():
                enter = part.register_forward_pre_hook(partial(self._enter, name))
                leave = part.register_forward_hook(self._leave, always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            stack.enter_context(self)
            yield

    def _enter(self, name: str, *_: Any) -> None:
        self._inside.append(name)
        self._nodes.append((torch.autograd._get_sequence_nr(), -1, name))  # type: ignore[attr-defined]

    def _leave(self, *_: Any) -> None:
        name = self._inside.pop()
        last = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        for index in reversed(range(len(self._nodes))):
            first, end, named = self._nodes[index]
            if end < 0 and named == name:
                self._nodes[index] = first, last, name
                return

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__.lstrip("_")
        before = _kinds(tree_leaves((args, kwargs)), ("nan", "inf", "-inf"))  # in place, it changes them
        output = func(*args, **(kwargs or {}))
        if name.startswith(_UNKNOWN):
            return output
        after = _kinds(tree_leaves(output), ("nan", "inf", "-inf"))
        infinite = bool({"inf", "-inf"} & {*before})
        origin = Origin(f"aten.{func._overloadpacket.__name__}", self._where(), infinite)
        if self._nan is None and "nan" in after and "nan" not in before:
            self._nan = origin
        if self._infinity is None and {"inf", "-inf"} & {*after} and not before and not name.startswith(_GIVEN):
            self._infinity = origin
        return output

    def _where(self) -> str:
        """Return the innermost module: in backward, that whose forward made the node."""
        if self._inside:
            return self._inside[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        number = node._sequence_nr()
        around = [(last - first, name) for first, last, name in self._nodes if first <= number < last]
        return min(around)[1] if around else ""


def _kinds(values: Any, kinds: tuple[str, ...]) -> list[str]:
    """Return which of NaN and the two infinities are in any of the tensors."""
    found: set[str] = set()
    for value in values:
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()) or not value.numel():
            continue
        if value.layout is not torch.strided or bool(value.isfinite().all()):
            continue
        real = torch.view_as_real(value) if value.is_complex() else value
        where = {"nan": real.isnan(), "inf": real == torch.inf, "-inf": real == -torch.inf}
        found |= {kind for kind, places in where.items() if bool(places.any())}
    return [kind for kind in kinds if kind in found]
