"""Micro-batches of limited size, each with its share in the mean over the whole batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning_solo.data.loss_weights import weight_of
from lightning_solo.data.splitting import BatchDim, samples_of, split_evenly
from lightning_solo.errors import ConflictError

OPTION = "callback.micro_batching.weight_by"


class MicroBatch(NamedTuple):
    """A batch, or part of one, for one forward and backward."""

    data: Any  # a batch, or a part of one
    samples: int  # number of samples; 0 for a single undivided batch, whose samples aren't counted
    batch: int  # index of the batch that it is a part of
    # its weight in the mean over all samples or tokens of all batches; 0 if it has no valid token, in which case its
    # loss may be NaN
    share: float


class Splitter:
    """Splits batches along their batch dimension, or by a function.

    Args:
        batch_dim: as in `lightning_solo.data.splitting`.
        split: function of (batch, size) that returns a list of pairs (part, number of samples), with at most ``size``
            samples in each part.
        weight_by: how a part is weighted, as ``by`` of `lightning_solo.data.loss_weights.weight_of`.
    """

    def __init__(
        self, batch_dim: BatchDim = 0, split: Callable[..., Any] | None = None, weight_by: str = "samples"
    ) -> None:
        self.batch_dim = batch_dim
        self.split = split
        self.weight_by = weight_by

    def samples(self, batch: Any) -> int:
        """Return the samples in a batch.

        Raises:
            ConflictError: it can't be split.
        """
        if self.split is None:
            return samples_of(batch, self.batch_dim)
        return sum(samples for _, samples in self.parts(batch, sys.maxsize))

    def parts(self, batch: Any, max_samples: int) -> list[tuple[Any, int]]:
        """Return a batch in parts of at most ``max_samples``, each with its samples.

        Raises:
            ConflictError: it can't be split, or ``split`` returned something else.
        """
        if self.split is None:
            return split_evenly(batch, max_samples, self.batch_dim)
        parts: list[tuple[Any, int]] = self.split(batch, max_samples)
        if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], int) for pair in parts):
            raise ConflictError(
                f"callback.micro_batching.split(batch, {max_samples}) returned other items than pairs; return a list of"
                " (part, its samples), where samples is an integer"
            )
        largest = max((samples for _, samples in parts), default=0)
        if not 0 < largest <= max_samples:
            raise ConflictError(
                f"callback.micro_batching.split(batch, {max_samples}) returned {len(parts)} parts, the largest of"
                f" {largest} samples; return a list of (part, its samples), each of 1 to {max_samples} samples"
            )
        return parts

    def split_arguments(self, args: Any, kwargs: Any, max_samples: int) -> list[tuple[Any, Any, int]]:
        """Return the arguments of a call in parts, each (args, kwargs, samples).

        A batch as the only argument is split as `parts`, other arguments along their first dimension.

        Raises:
            ConflictError: they can't be split.
        """
        if len(args) == 1 and not kwargs and not hasattr(args[0], "shape"):
            return [((part,), {}, samples) for part, samples in self.parts(args[0], max_samples)]
        dim = self.batch_dim if isinstance(self.batch_dim, int) else 0
        return [(*part, samples) for part, samples in split_evenly((args, kwargs), max_samples, dim)]

    def require_parts(self, batch: Any) -> None:
        """Check that a batch can be divided and its parts weighted, before a shortage of memory requires it."""
        if (samples := self.samples(batch)) > 1:
            self.micro_batches([batch], -(-samples // 2))

    def micro_batches(self, batches: Sequence[Any], max_samples: int | None = None) -> list[MicroBatch]:
        """Return micro-batches of at most ``max_samples``; an optimizer step takes the mean over all of them.

        A single batch without ``max_samples`` is returned undivided: neither counted nor passed to ``split``.

        >>> import torch
        >>> [(part.samples, part.share) for part in Splitter().micro_batches([torch.zeros(8, 1)], max_samples=3)]
        [(3, 0.375), (3, 0.375), (2, 0.25)]

        Raises:
            ConflictError: a batch can't be split, or the function lost samples.
        """
        if max_samples is None and len(batches) == 1:
            return [MicroBatch(batches[0], 0, 0, 1.0)]
        pieces: list[tuple[Any, int, int]] = []
        for index, batch in enumerate(batches):
            parts = self.parts(batch, max_samples or sys.maxsize)
            returned = sum(samples for _, samples in parts)
            if self.split is not None and max_samples and returned != (samples := self.samples(batch)):
                raise ConflictError(
                    f"callback.micro_batching.split(batch, {max_samples}) returned {returned} samples in {len(parts)}"
                    f" parts of a batch of {samples} samples; return all of them for every size"
                )
            pieces += [(*part, index) for part in parts]
        if len(pieces) == 1:
            return [MicroBatch(*pieces[0], 1.0)]
        weights = [weight_of(data, samples, self.weight_by, OPTION) for data, samples, _ in pieces]
        if not sum(weights):  # no valid token: keep the module's loss of the undivided batch
            weights = [float(samples) for _, samples, _ in pieces]
        total = sum(weights)
        return [MicroBatch(*piece, weight / total) for piece, weight in zip(pieces, weights, strict=True)]
