"""The folder of one run for what lies on disk; gradients there at aligned addresses; buffers that suffice.

The last two are faults of DeepSpeed's (0.19.8), contained for one engine.

ZeRO-Infinity reads a gradient from its file straight into its place in the flat gradient, past the page cache. Where
that place is no multiple of the disk's alignment (a bias before it is enough) the read fails without a word, and the
optimizer steps with what was in the buffer. DeepSpeed splits off lengths that are not aligned; here offsets are too.

Weights are read ahead, in the order of a training step, into a few buffers that are given back once they were used. A
forward pass without a backward (validation) never uses what was read ahead for the latter, and the run ends with
"Not enough buffers"; so it does where a module has more parameters, or larger ones, than the buffers. Where there are
more buffers, a weight that is used twice in what is read ahead is read twice, which ends with "already assigned".
"""

from __future__ import annotations

import fcntl
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from torch import Tensor, nn

from lightning_solo.errors import CapabilityError
from lightning_solo.zero.layout import MIN_DISK_BYTES

log = logging.getLogger(__name__)

PREFIX = "zero_offload-"


@contextmanager
def run_folder(parent: str | Path) -> Iterator[Path]:
    """Make a folder of this run's own below ``parent``, and remove it, with those that killed runs have left there.

    A run holds the lock of its folder while it lives; the kernel gives it back however the run ends.

    Raises:
        CapabilityError: nothing can be written, or locked, there.
    """
    parent = Path(parent).expanduser().absolute()
    made = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(f"{PREFIX}*"):
            _remove_if_left(left)
        folder, lock = _locked_folder(parent)
    except OSError as error:
        raise CapabilityError(
            f"nvme_path={str(parent)!r}: {error}; write strategy.nvme_path=<a folder on a local SSD that you may write>"
        ) from None
    with lock:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            for empty in made:
                with suppress(OSError):  # another run is in it
                    empty.rmdir()


def _locked_folder(parent: Path) -> tuple[Path, IO[str]]:
    starting = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))  # not to be seen before it is locked
    with ExitStack() as undo:  # on a file system that has no locks
        undo.callback(shutil.rmtree, starting, ignore_errors=True)
        lock = undo.enter_context((starting / "lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = starting.rename(parent / starting.name.removeprefix("."))
        undo.pop_all()
    return folder, lock


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


def parameter_buffers(module: nn.Module, element_bytes: int) -> dict[str, int]:
    """Return how many buffers, of how many elements, a module's weights need on their way from the disk.

    Args:
        module: not yet partitioned.
        element_bytes: of a weight on the device; parameters below ``MIN_DISK_BYTES`` stay in memory.
    """
    on_disk = [
        [n for p in part.parameters(recurse=False) if (n := p.numel()) * element_bytes >= MIN_DISK_BYTES]
        for part in module.modules()
    ]
    # DeepSpeed's 5, and those of one module and of the one that is read ahead for it
    return {
        "buffer_size": max((max(numels) for numels in on_disk if numels), default=MIN_DISK_BYTES),
        "buffer_count": max(5, 2 * max(map(len, on_disk))),
    }


def contain_reading_ahead(engine: Any) -> None:
    """Let an engine with weights on disk read each ahead once, and give all buffers back before a forward pass."""
    swapper = _swapper(engine)
    if swapper is None:
        return
    swap_in = swapper.swap_in

    def once(params: Sequence[Tensor], async_op: bool = True, swap_in_buffers: Any = None) -> None:
        swap_in(list(dict.fromkeys(params)) if swap_in_buffers is None else params, async_op, swap_in_buffers)

    swapper.swap_in = once
    engine.register_forward_pre_hook(release_buffers)


def _swapper(engine: Any) -> Any:
    return next((s for p in engine.module.parameters() if (s := getattr(p, "nvme_swapper", None)) is not None), None)


def release_buffers(engine: Any, *_: Any) -> None:
    """Give back the buffers of weights that were read ahead or kept for a use that didn't come; between two passes."""
    swapper = _swapper(engine)
    if swapper is None or not swapper.param_id_to_buffer_id:
        return
    swapper.synchronize_reads()
    getattr(engine.optimizer, "parameter_offload", engine.optimizer).partition_all_parameters()
    held = [p for p in engine.module.parameters() if p.ds_id in swapper.param_id_to_buffer_id]
    swapper.remove_partition_and_release_buffers(held)


def release_step_buffers(zero: Any) -> None:
    """Give back the buffers of a step that was broken off; what lies on disk is from before it."""
    if getattr(zero, "swap_optimizer", False):
        for index in range(len(zero.fp32_partitioned_groups_flat)):
            if zero._swappable_optimizer_subgroup(index):
                zero._release_swap_buffers(index)
