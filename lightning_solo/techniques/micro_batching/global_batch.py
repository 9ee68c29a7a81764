"""The number of batches in an optimizer step, from its number of samples."""

from __future__ import annotations

import math
from typing import Any

from lightning_solo.errors import ConflictError


class GlobalBatch:
    """The samples of an optimizer step, and the number of batches that hold them.

    Args:
        samples: samples in an optimizer step; None if ``accumulate_grad_batches`` sets the number of batches.

    Attributes:
        factor: batches in a step; None until it is known.
    """

    def __init__(self, samples: int | None) -> None:
        self.samples = samples
        self.factor: int | None = None
        self._in_first_batch: int | None = None  # if the loader has no batch size

    def see_loader(self, loader: Any) -> None:
        """Read the samples per batch from a loader that has a batch size."""
        sampler = getattr(loader, "batch_sampler", None)
        in_batch = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
        if self.samples is not None and isinstance(in_batch, int):
            self.factor = self._batches_of(in_batch)

    @property
    def needs_batches(self) -> bool:
        """Whether the batch size is read from the batches, which then must all have the same size."""
        return self.samples is not None and (self.factor is None or self._in_first_batch is not None)

    def see_batch(self, in_batch: int, batch_idx: int, *, is_last: bool) -> None:
        """Read the size of the first batch, and check that the others are as large.

        Raises:
            ConflictError: ``samples`` isn't a multiple of the batch size, or a batch has another size.
        """
        if self._in_first_batch is None:
            self._in_first_batch, self.factor = in_batch, self._batches_of(in_batch)
        elif not is_last and in_batch != self._in_first_batch:
            raise ConflictError(
                f"callback.micro_batching.global_batch={self.samples} needs batches of equal size, but batch"
                f" {batch_idx} has {in_batch} samples and the first had {self._in_first_batch}; write"
                " callback.micro_batching.global_batch=null, and accumulate_grad_batches=<batches in a step>"
            )

    def _batches_of(self, in_batch: int) -> int:
        assert self.samples is not None  # checked by the callers
        factor, rest = divmod(self.samples, in_batch)
        if rest or not factor:
            lower = f"{factor * in_batch} or " if factor else ""
            raise ConflictError(
                f"callback.micro_batching.global_batch={self.samples} isn't a multiple of the loader's batch of"
                f" {in_batch}; write {lower}{(factor + 1) * in_batch}, or a batch_size that divides {self.samples}"
            )
        return factor

    def count_steps(self, trainer: Any, stock: int | float) -> int | float:
        """Return the optimizer steps of a fit, or Lightning's own count ``stock`` if they are unknown."""
        batches = trainer.num_training_batches
        if self.factor is None or trainer.max_epochs == -1 or batches == math.inf:
            return stock
        steps = -(-int(batches) // self.factor) * max(int(trainer.max_epochs), 1)
        return steps if trainer.max_steps == -1 else min(steps, int(trainer.max_steps))
