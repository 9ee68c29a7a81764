"""Lengths or difficulties of a data set's items, from a sequence, a column, a function or the collate function."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from lightning_solo.data.nested import leaves, parts_of
from lightning_solo.errors import ConflictError

REPORT_EVERY_S = 10.0

Length = str | Callable[[Any], int]
Report = Callable[[int, int], None]


def reported(count: int, report: Report | None) -> Iterator[int]:
    """Yield the indices of ``count`` items; call ``report`` with (items done, all items) every 10 seconds."""
    last = time.monotonic()
    for index in range(count):
        yield index
        if report is not None and time.monotonic() - last > REPORT_EVERY_S:
            last = time.monotonic()
            report(index + 1, count)


def length_of(item: object) -> int | None:
    """Return the length of an item's first sequence: a tensor's or array's first dimension, a list's or text's length.

    Mappings, sequences and objects are searched in order; None if there is no sequence.

    >>> length_of((torch.zeros(5), torch.tensor(1))), length_of({"id": 7, "input_ids": [3, 1, 2]}), length_of("four")
    (5, 3, 4)
    """
    if isinstance(item, str | bytes):
        return len(item)
    shape = getattr(item, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if isinstance(item, list) and (not item or length_of(item[0]) is None or isinstance(item[0], str | bytes)):
        return len(item)
    parts = parts_of(item) or getattr(item, "__dict__", {})
    return next((length for part in parts.values() if (length := length_of(part)) is not None), None)


def collated_length(batch: object) -> int | None:
    """Return the sequence length of a batch of one item: the second dimension of the first tensor with two or more.

    >>> collated_length({"input_ids": torch.zeros(1, 12), "labels": torch.zeros(1)})
    12
    """
    tensors = (leaf for _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
    return next((tensor.shape[1] for tensor in tensors if tensor.ndim > 1), None)


def item_lengths(
    dataset: Any,
    length: Length | Literal["auto", "collated"] = "auto",
    collate_fn: Callable[[list[Any]], Any] | None = None,
    report: Report | None = None,
    option: str = "length",
) -> torch.Tensor:
    """Return the length of every item of a map-style data set, in int64; each item is read once.

    Args:
        dataset: with ``len`` and items by index.
        length: ``auto`` for the column ``length`` if the data set has one, else `length_of`; ``collated`` for
            `collated_length` of ``collate_fn([item])``, for a collate function that tokenizes; a function of an item;
            or the name of a column, key or attribute that holds a sequence or the length itself. Of a data set with
            ``column_names`` only this column is read.
        collate_fn: for ``collated``.
        report: called with (items done, all items) every 10 seconds.
        option: the user's option for ``length``, for messages.

    Raises:
        ConflictError: an item has no length, or reading it fails; names its index and the cause.
    """
    return _numbers(dataset, length, collate_fn, report, option, whole=True)


def item_difficulties(
    dataset: Any,
    by: Length | Literal["auto", "collated"],
    collate_fn: Callable[[list[Any]], Any] | None = None,
    report: Report | None = None,
    option: str = "by",
) -> torch.Tensor:
    """Return a finite number for every item, in float64, by the same choices as `item_lengths`.

    Raises:
        ConflictError: as `item_lengths`.
    """
    return _numbers(dataset, by, collate_fn, report, option, whole=False)


def _numbers(
    dataset: Any,
    by: Length,
    collate_fn: Callable[[list[Any]], Any] | None,
    report: Report | None,
    option: str,
    *,
    whole: bool,
) -> torch.Tensor:
    noun, kind = ("length", "an integer") if whole else ("difficulty", "a number")
    columns = getattr(dataset, "column_names", None) or ()
    if by == "auto" and "length" in columns:
        by = "length"
    column = dataset[by] if isinstance(by, str) and by in columns else None
    remedy = f"write {option}=<name of a column>, {option}=collated, or a function of an item that returns {kind}"
    numbers = torch.empty(len(dataset), dtype=torch.int64 if whole else torch.float64)
    for index in reported(len(dataset), report):
        item = f"{option}={name_of(by)}: item {index} of {type(dataset).__name__}"
        try:
            value: Any = _as_length(column[index]) if column is not None else _length(dataset[index], by, collate_fn)
        except Exception as error:
            raise ConflictError(f"{item} raised {type(error).__name__}: {error}; {remedy}") from error
        if not (_is_count(value) if whole else _is_finite(value)):
            raise ConflictError(f"{item} has no {noun}, but {value!r}; {remedy}")
        numbers[index] = value
    return numbers


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _length(item: Any, length: Length, collate_fn: Callable[[list[Any]], Any] | None) -> object:
    if callable(length):
        return _as_length(length(item))
    if length == "auto":
        return length_of(item)
    if length == "collated":
        assert collate_fn is not None  # the loader's
        return collated_length(collate_fn([item]))
    return _as_length(item[length] if isinstance(item, Mapping) else getattr(item, length))


def _as_length(value: Any) -> object:
    """Return a number, such as a scalar tensor, as a Python number; return the length of anything else."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float) or (hasattr(value, "item") and not getattr(value, "shape", (1,))):
        value = value if isinstance(value, int | float) else value.item()
        return int(value) if math.isfinite(value) and value == int(value) else value
    return length_of(value)


def range_of(lengths: Sequence[int]) -> str:
    """Return the range of lengths as text.

    >>> range_of([5, 2, 7])
    '2 to 7'
    """
    return f"{min(lengths)} to {max(lengths)}" if lengths else "0"


def name_of(length: Length | Callable[[Any], float]) -> str:
    """Return the name of a length or difficulty, for messages."""
    return length if isinstance(length, str) else getattr(length, "__name__", repr(length))
