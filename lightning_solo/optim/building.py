"""Build a module with split master weights, so that its fp32 weights never exist all at once.

Parameters are created in fp32 whatever the default dtype is, and on a real device instead of "meta". The parameters
used last, up to a window of bytes, are *open*: they are fp32, 4 bytes per element. The others are *closed*: a bf16
weight and a correction, 3 bytes with 24 bits and 4 with 32. A closed parameter is opened before any torch function runs
on it, so user code reads and writes fp32 numbers.

A parameter that is overwritten as a whole, as in initialisation, is exact. If it is only changed after it was closed,
the change starts from numbers rounded to 24 bits; with 32 bits it is exact too.

- A parameter with views stays open until the views are gone or the building ends.
- A copy by `copy.deepcopy` is split when it is assigned to a module.
- `from_pretrained` uses "meta" itself; the loaded weights are split.
- A module that user code empties (`to_empty`, `skip_init`) was initialised before. The random numbers are those of the
  same code without "meta".
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_solo.optim.split_weights import join_parameters, split_parameters

WINDOW_BYTES = 2**28
"""Bytes of fp32 parameters that are open at a time; the youngest is open whatever its size."""

_TRIES = 8  # parameters with views that are skipped before closing is given up for this time
_tensor: Any = torch.Tensor
_BLIND = {  # functions whose result closing doesn't change
    _tensor.shape.__get__,
    _tensor.device.__get__,
    _tensor.requires_grad.__get__,
    _tensor.requires_grad.__set__,
    _tensor.requires_grad_,
    _tensor.size,
    _tensor.dim,
    _tensor.numel,
}


class Building(TorchFunctionMode):
    """A context that splits each fp32 parameter registered in it into bf16 and an entry of `corrections`.

    Enter it again to load weights: closed parameters are opened when they are used. An exception makes all parameters
    fp32 again.

    Args:
        master_bits: 32 or 24.
        splits: returns whether a parameter is split; all are by default.
        window_bytes: bytes of fp32 parameters that may be open, in addition to the newest parameter.
        corrections_on: the device of the corrections; by default that of their parameter.

    >>> with Building(24) as building, torch.device("meta"):
    ...     layer = torch.nn.Linear(512, 512)
    >>> layer.weight.device.type, layer.weight.dtype, building.corrections[layer.weight].dtype
    ('cpu', torch.bfloat16, torch.int8)
    """

    def __init__(
        self,
        master_bits: int = 24,
        *,
        splits: Callable[[Tensor], bool] | None = None,
        window_bytes: int | None = None,
        corrections_on: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.corrections_on = corrections_on
        self.master_bits = master_bits
        self.splits = splits
        self.window_bytes = WINDOW_BYTES if window_bytes is None else window_bytes
        self._parts: MutableMapping[Tensor, Tensor | None] = WeakTensorKeyDictionary()  # corrections, None where open
        self._left: MutableMapping[Tensor, tuple[int, int]] = (
            WeakTensorKeyDictionary()
        )  # marks of closed ones when the context was left
        self._young: OrderedDict[int, tuple[weakref.ref[Tensor], int]] = OrderedDict()  # open ones, oldest first
        self._young_bytes = 0
        self._undo: list[Callable[[], Any]] = []
        self._device = torch.device("cpu")
        self._thread = 0

    def __enter__(self) -> Building:
        self._note_other_writes()
        self._left.clear()
        device, dtype = torch.get_default_device(), torch.get_default_dtype()
        self._device = torch.device("cpu") if device.type == "meta" else device
        self._thread = threading.get_ident()
        super().__enter__()  # type: ignore[no-untyped-call]
        torch.set_default_dtype(torch.float32)
        self._undo = [
            lambda: torch.set_default_dtype(dtype),
            register_module_parameter_registration_hook(lambda module, name, p: self._add([p])).remove,
            register_module_module_registration_hook(
                lambda parent, name, child: self._add([] if child is None else child.parameters())
            ).remove,
        ]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for undo in self._undo:
            undo()
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        done = False
        try:
            if kind is None:
                for p in [p for p, part in self._parts.items() if part is None]:
                    self._close(p)
                done = True
        finally:
            self._young.clear()
            self._young_bytes = 0
            self._left.update({p: _mark(p) for p, correction in self._parts.items() if correction is not None})
            if not done:
                self.join()

    @property
    def corrections(self) -> dict[Tensor, Tensor]:
        """Corrections of the closed parameters; zeros for a parameter that was written to after it was closed."""
        self._note_other_writes()
        return {p: correction for p, correction in self._parts.items() if correction is not None}

    def join(self, on: torch.device | None = None) -> None:
        """Make all parameters fp32 again, optionally on another device that has room for them."""
        corrections = self.corrections
        self._parts.clear()
        self._left.clear()
        for p in list(corrections):
            if on is not None:
                p.data = p.data.to(on)
            join_parameters([p], {p: corrections.pop(p)})

    def _note_other_writes(self) -> None:
        for p in [p for p, mark in self._left.items() if mark != _mark(p)]:
            correction = self._parts[p]
            assert correction is not None  # it was closed
            same = p.dtype == torch.bfloat16 and p.numel() == correction.numel()
            self._parts[p] = correction.zero_() if same else None
            self._left.pop(p)

    # --- torch functions and registrations ---

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Open the parameters among a function's arguments, and move them off "meta"."""
        kwargs = kwargs or {}
        touched = [] if func in _BLIND else [t for t in _tensors((args, kwargs)) if t in self._parts]
        with torch._C.DisableTorchFunction():
            for p in touched:
                self._open(p)
        in_arguments = _is_meta(kwargs.get("device")) and func is not torch.Tensor.to  # a move to "meta" is intended
        by_default = torch.get_default_device().type == "meta"  # of `set_default_device`, which torch reads later
        if (in_arguments or by_default) and _is_loading():
            in_arguments = by_default = False
        with self._device if by_default else nullcontext():
            result = func(*args, **({**kwargs, "device": self._device} if in_arguments else kwargs))
        with torch._C.DisableTorchFunction():
            for p in touched:
                self._rejuvenate(p)
            self._close_old()
        return result

    def _add(self, parameters: Iterable[Tensor | None]) -> None:
        if threading.get_ident() != self._thread:  # this mode doesn't see the functions of other threads
            return
        with torch._C.DisableTorchFunction():
            for p in parameters:
                if p is not None and p not in self._parts:
                    self._open_shared(p)
                    self._parts[p] = None
                    self._rejuvenate(p)
            self._close_old()

    # --- open and closed ---

    def _rejuvenate(self, p: Tensor) -> None:
        self._forget(id(p))
        size = p.nbytes if self._is_open(p) else 0
        self._young[id(p)] = (weakref.ref(p), size)
        self._young_bytes += size

    def _forget(self, key: int) -> Tensor | None:
        reference, size = self._young.pop(key, (None, 0))
        self._young_bytes -= size
        return reference() if reference is not None else None

    def _close_old(self) -> None:
        shared = 0
        while self._young_bytes > self.window_bytes and len(self._young) > 1 and shared < _TRIES:
            p = self._forget(next(iter(self._young)))
            if p is None:  # freed
                continue
            if _users(p) == 1:
                self._close(p)
            else:  # its views would show outdated numbers
                shared += 1
                youngest = next(reversed(self._young))
                self._rejuvenate(p)
                self._young.move_to_end(youngest)

    def _is_open(self, p: Tensor) -> bool:
        return not is_lazy(p) and p.dtype == torch.float32 and p.device.type != "meta"

    def _close(self, p: Tensor) -> None:
        if self._is_open(p) and (self.splits is None or self.splits(p)):
            correction = split_parameters([p], self.master_bits)[p]
            self._parts[p] = correction if self.corrections_on is None else correction.to(self.corrections_on)

    def _open(self, p: Tensor) -> None:
        correction, self._parts[p] = self._parts[p], None
        if correction is not None:
            join_parameters([p], {p: correction})

    def _open_shared(self, p: Tensor) -> None:
        """Open the parameter from which ``nn.Parameter(closed)`` was made, since that calls no torch function."""
        if is_lazy(p) or p.dtype != torch.bfloat16:
            return
        closed = [q for q, correction in self._parts.items() if correction is not None]
        for other in [q for q in closed if q.untyped_storage()._cdata == p.untyped_storage()._cdata]:
            self._open(other)
            p.data = other.detach()


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, Mapping):
        yield from _tensors(list(values.values()))


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _is_loading() -> bool:
    """Return whether ``from_pretrained`` is running, which fills its "meta" parameters itself."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "from_pretrained":
        frame = frame.f_back
    return frame is not None


def _users(p: Tensor) -> int:
    """Return how many tensors share a parameter's storage, itself included."""
    return int(torch._C._storage_Use_Count(p.untyped_storage()._cdata)) - 1  # less the storage object of this call


def _mark(p: Tensor) -> tuple[int, int]:
    """Return (version, storage) of a parameter; any write changes this pair, except a write through ``.data``."""
    return p._version, p.untyped_storage()._cdata
