"""A cache of operators on fake tensors, by the sizes, strides and types of their arguments.

Equal blocks call the same operators on the same sizes again and again. torch has a cache for this too, but computing
its keys and results takes most of a trace's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.utils import is_builtin
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from lightning_solo.planner.index_bounds import INDEXED

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_LIBRARIES = {"bitsandbytes"}
"""Libraries whose rules for fake tensors read nothing but the arguments' metadata."""
_META = torch.device("meta")
_BY_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


class OperatorCache:
    """Runs each operator once for arguments of equal metadata.

    Args:
        run: returns (result, its cost) of an operator; both may depend on metadata only.
        known: results of earlier caches with the same mode and kernels.
    """

    def __init__(self, run: Run, known: Known | None = None) -> None:
        self._run = run
        self._known: Known = {} if known is None else known

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return (result, cost) of an operator."""
        call = described(func, args, kwargs)
        return self._run(func, args, kwargs) if call is None else self.called(call, func, args, kwargs)

    def called(self, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return (result, cost) of an operator that is `described`."""
        key, tensors = call
        if (known := self._known.get(key)) is not None:
            kind, outputs, cost = known
            if kind is FakeTensor:
                return _rebuilt(outputs[0], tensors), cost
            results = [_rebuilt(output, tensors) for output in outputs]
            return (kind(results) if kind in (tuple, list) else results[0]), cost
        result, cost = self._run(func, args, kwargs)
        kind = type(result)
        results = result if kind in (tuple, list) else [result]
        if func in INDEXED:  # a loss returns the number of its targets, which only its backward reads
            for each in results:
                each.constant = None
        outputs = _outputs(results, tensors)
        if outputs and described(func, args, kwargs) == call:  # no argument was resized
            self._known[key] = kind, outputs, cost
        return result, cost


def described(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Return the metadata of a call and its tensors; None if its result may depend on more than metadata."""
    _, by_metadata, indexed = _operators.get(id(func)) or _operator(func)
    if not by_metadata:
        return None
    key: list[Any] = [id(func), torch.get_default_dtype(), *kwargs]
    tensors: list[Tensor] = []
    if not _describe(args, key, tensors, indexed) or not _describe(kwargs.values(), key, tensors, indexed):
        return None
    if not tensors:
        if (mode := torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)) is None:
            return None  # disabled by torch; the result has data
        key.append(mode)
    known = [tensor.constant is not None for tensor in tensors]  # type: ignore[attr-defined]
    if any(known) and (all(known) or func._schema.is_mutable):
        return None  # the constant is used or changed
    if len(tensors) > 1:
        positions = {id(tensor): position for position, tensor in enumerate(tensors)}
        if len(positions) < len(tensors):  # x * x reads one tensor
            key += [positions[id(tensor)] for tensor in tensors]
    return tuple(key), tensors


_operators: dict[int, tuple[Any, bool, bool]] = {}
"""id of an operator -> itself, whether its results depend on metadata only, and whether it is in `INDEXED`.

torch computes the hash of an operator in Python.
"""


def _operator(func: Any) -> tuple[Any, bool, bool]:
    known = isinstance(func, OpOverload) and (is_builtin(func) or func.namespace in _LIBRARIES)
    _operators[id(func)] = entry = func, known and _BY_DATA.isdisjoint(func.tags), func in INDEXED
    return entry


def _describe(values: Iterable[Any], key: list[Any], tensors: list[Tensor], indexed: bool) -> bool:
    """Add values to a key and their tensors to a list; return whether all could be described.

    Args:
        values: arguments of an operator.
        key: of the call.
        tensors: of the call.
        indexed: whether known numbers of indices don't matter.
    """
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None and not indexed and not value.is_floating_point():
                return False  # an index or a mask, whose numbers matter
            tensors.append(value)
            key += _metadata(value)
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            if not _describe(value, key, tensors, indexed):
                return False
        elif kind in _PLAIN:
            key += (kind, value)  # 1, 1.0 and True are equal
        else:
            return False
    return True


def _metadata(tensor: Tensor) -> tuple[Any, ...]:
    keys = torch._C._dispatch_keys(tensor).raw_repr()  # device, layout, conjugation
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.requires_grad, keys


class _Output(NamedTuple):
    """How to rebuild one value of a result.

    Attributes:
        argument: position of the call's tensor that the value is, or is a view of; -1 for none.
        layout: sizes, strides, offset, type and device; None for the argument itself and for a value that is no tensor.
        attributes: of the fake tensor; the value itself if it is no tensor.
    """

    argument: int
    layout: tuple[Any, Any, Any, torch.dtype, torch.device] | None = None
    attributes: Any = None


def _outputs(results: Sequence[Any], tensors: Sequence[Tensor]) -> list[_Output]:
    """Return how to rebuild each value of a result, or an empty list if one can't be rebuilt."""
    positions = {id(tensor): position for position, tensor in reversed(list(enumerate(tensors)))}
    owners: dict[int, set[int]] = {}  # storage -> positions of its tensors
    for position in positions.values():
        owners.setdefault(_storage(tensors[position]), set()).add(position)
    outputs: list[_Output] = []
    storages: list[int] = []  # new ones
    for result in results:
        if type(result) in _PLAIN:
            outputs.append(_Output(-1, attributes=result))
        elif type(result) is not FakeTensor or result.constant is not None:
            return []
        elif (position := positions.get(id(result), -1)) >= 0:
            outputs.append(_Output(position))
        else:
            storage = _storage(result)
            output = _output(result, tensors, owners.get(storage, set()))
            if output is None:
                return []
            outputs.append(output)
            if output.argument < 0:
                storages.append(storage)
    return outputs if len(set(storages)) == len(storages) else []


def _output(result: FakeTensor, tensors: Sequence[Tensor], owners: set[int]) -> _Output | None:
    """Return how to rebuild a new tensor; the ``tensors`` at positions ``owners`` share its storage."""
    if len(owners) > 1:
        return None
    layout = (result.shape, result.stride(), result.storage_offset(), result.dtype, result.fake_device)
    output = _Output(next(iter(owners), -1), layout, dict(vars(result)))
    rebuilt = _rebuilt(output, tensors)
    is_same = _metadata(rebuilt) == _metadata(result)
    return output if is_same and rebuilt.untyped_storage().nbytes() == result.untyped_storage().nbytes() else None


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _rebuilt(output: _Output, tensors: Sequence[Tensor]) -> Any:
    argument, layout, attributes = output
    if layout is None:
        return tensors[argument] if argument >= 0 else attributes
    sizes, strides, offset, dtype, device = layout
    with torch._C._DisableTorchDispatch():
        if argument < 0:
            data = torch.empty_strided(sizes, strides, dtype=dtype, device=_META)
        elif (owner := tensors[argument]).dtype is dtype:
            data = torch.as_strided(owner, sizes, strides, offset)
        else:
            data = torch.empty(0, dtype=dtype, device="meta").set_(owner.untyped_storage(), offset, sizes, strides)
    # as FakeTensor.__new__, which takes five times as long to set the same attributes
    result = Tensor._make_subclass(FakeTensor, data, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_throw_on_mutable_data_ptr(result)
    vars(result).update(attributes)
    return result


Call = tuple[tuple[Any, ...], list[Tensor]]
"""Metadata of a call, and its tensors."""
Known = dict[tuple[Any, ...], tuple[type, list[_Output], Any]]
"""Results of a cache, by the metadata of calls."""
