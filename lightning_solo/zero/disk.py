"""The folder of one run for what lies on disk, and gradients there at aligned addresses.

The second is a fault of DeepSpeed's (0.19.8), contained for one engine. ZeRO-Infinity reads a gradient from its file
straight into its place in the flat gradient, past the page cache. Where that place is no multiple of the disk's
alignment (a bias before it is enough) the read fails without a word, and the optimizer steps with what was in the
buffer. DeepSpeed splits off lengths that are not aligned; here offsets are too.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_solo.errors import CapabilityError

log = logging.getLogger(__name__)

PREFIX = "zero_offload-"


@contextmanager
def run_folder(parent: str | Path) -> Iterator[Path]:
    """Make a folder of this run's own below ``parent``, and remove it, with those that killed runs have left there.

    A run holds the lock of its folder while it lives; the kernel gives it back however the run ends.

    Raises:
        CapabilityError: nothing can be written there.
    """
    parent = Path(parent).expanduser().absolute()
    made = not parent.exists()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(f"{PREFIX}*"):
            _remove_if_left(left)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise CapabilityError(
            f"nvme_path={str(parent)!r}: {error}; write strategy.nvme_path=<a folder on a local SSD that you may write>"
        ) from None
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if made and not any(parent.iterdir()):
                parent.rmdir()


def _remove_if_left(folder: Path) -> None:
    try:
        with (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            log.warning("zero_offload: removed %s, which a killed run has left", folder)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # of a run that lives, or of somebody else
        return


def split_aligned(offset: int, numel: int, alignment: int) -> list[tuple[int, int]]:
    """Return ``(start, length)`` of up to three parts of a fragment: the middle one aligned in both.

    >>> split_aligned(offset=10, numel=30, alignment=8), split_aligned(16, 8, 8), split_aligned(10, 5, 8)
    ([(10, 6), (16, 24)], [(16, 8)], [(10, 5)])
    """
    first = min(-(-offset // alignment) * alignment, offset + numel)
    last = max((offset + numel) // alignment * alignment, first)
    ends = (offset, first, last, offset + numel)
    return [(start, end - start) for start, end in pairwise(ends) if end > start]


def align_gradients(swapper: Any) -> None:
    """Let the optimizer swapper of an engine split gradients so that what goes to disk is aligned."""

    def split(tensors: Sequence[Tensor], offsets: Sequence[int]) -> tuple[list[Tensor], list[int]]:
        parts, starts = [], []
        for tensor, offset in zip(tensors, offsets, strict=True):
            for start, length in split_aligned(offset, tensor.numel(), swapper.numel_alignment):
                parts.append(tensor.narrow(0, start - offset, length))
                starts.append(start)
        return parts, starts

    swapper._adjust_for_misaligned_lengths = split
