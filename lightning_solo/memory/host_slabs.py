"""Tensors in slabs of host memory of exact size, pinned if the device is a GPU.

Torch rounds its pinned memory up to powers of two, which was measured to take 1.78 times the bytes of the tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_solo.errors import BudgetError
from lightning_solo.machine import host_memory
from lightning_solo.units import format_bytes

Sizes = Sequence[tuple[int, torch.dtype]]
"""(elements, type) of tensors."""

ALIGNMENT = 128
"""Bytes to which each tensor of a slab is aligned."""
SLAB_BYTES = 2**30
"""Most bytes of a slab, so that parts of the memory can be freed; a larger tensor has a slab of its own."""
HUGE_PAGE = 2**21


def host_tensors(sizes: Sizes, device: torch.device) -> list[Tensor]:
    """Return flat tensors of zeros in slabs of host memory, pinned if the device is a GPU.

    Each has its own storage, so that it is saved without the others. A slab is freed with the last of its tensors.
    """
    if is_planned():
        return [torch.zeros(count, dtype=kind) for count, kind in sizes]
    return [tensor for part in _slabs(sizes) for tensor in _slab(part, device)]


def packed_tensors(groups: Sequence[Sizes], device: torch.device) -> list[tuple[Tensor, list[Tensor]]]:
    """Return for each group its bytes in one piece of host memory, and its tensors, as `host_tensors` returns them.

    The bytes are laid out as by `host_copy`. A plan counts the tensors only.
    """
    if is_planned():
        return [(torch.empty(0, dtype=torch.uint8), host_tensors(sizes, device)) for sizes in groups]
    stored = host_tensors([(_slab_bytes(sizes), torch.uint8) for sizes in groups], device)
    return [(packed, _parts(packed.numpy(), sizes)) for packed, sizes in zip(stored, groups, strict=True)]


def _parts(memory: Any, sizes: Sizes) -> list[Tensor]:
    """Return flat tensors in a piece of host memory, each with a storage of its own; they keep the memory alive."""
    tensors, offset = [], 0
    for count, kind in sizes:
        empty = torch.zeros(0, dtype=kind)
        tensors.append(torch.frombuffer(memory, dtype=kind, count=count, offset=offset) if count else empty)
        offset += _aligned(count * kind.itemsize)
    return tensors


@torch.no_grad()
def host_copy(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return copies of dense tensors in one piece of host memory: its bytes, and the copies.

    Each copy has a storage of its own, so that it is saved without the others.
    """
    (stored,) = host_tensors([(packed_bytes(tensors), torch.uint8)], device)
    if is_planned():
        return stored, placed(stored, tensors)
    parts = _parts(stored.numpy(), [(tensor.numel(), tensor.dtype) for tensor in tensors])
    copies = [flat.as_strided(tensor.shape, tensor.stride()) for flat, tensor in zip(parts, tensors, strict=True)]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    return stored, copies


def packed_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors in one piece, as `host_copy` lays them out."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def placed(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a buffer of bytes, laid out as by `host_copy`, each like one of the tensors."""
    offsets = accumulate((_aligned(tensor.nbytes) for tensor in tensors), initial=0)
    return [
        buffer[offset : offset + tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        for tensor, offset in zip(tensors, offsets, strict=False)
    ]


def _slabs(sizes: Sizes) -> Iterator[Sizes]:
    """Yield the sizes of the tensors of each slab, in order."""
    part: list[tuple[int, torch.dtype]] = []
    slab_bytes = 0
    for count, kind in sizes:
        tensor_bytes = _aligned(count * kind.itemsize)
        if part and slab_bytes + tensor_bytes > SLAB_BYTES:
            yield part
            part, slab_bytes = [], 0
        part.append((count, kind))
        slab_bytes += tensor_bytes
    if part:
        yield part


def _slab(sizes: Sizes, device: torch.device) -> list[Tensor]:
    size = _slab_bytes(sizes)
    if not size:
        return [torch.zeros(0, dtype=kind) for _, kind in sizes]
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # pages are taken as they are written
    # the tensors hold this array, which is finalized before its memory is freed, and not the mmap, which isn't
    slab = (ctypes.c_char * size).from_buffer(memory)
    if device.type == "cuda":
        memory.madvise(mmap.MADV_DONTFORK)  # otherwise each worker of a data loader copies the pinned memory
        if size >= HUGE_PAGE:
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock, and to look up in a copy
        _pin(slab, device)
    return _parts(slab, sizes)


def _slab_bytes(sizes: Sizes) -> int:
    return sum(_aligned(count * kind.itemsize) for count, kind in sizes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def is_planned() -> bool:
    """Return whether new tensors are only planned: they have no data, and their bytes are counted."""
    return isinstance(torch.empty(0), FakeTensor)


def host_room() -> int:
    """Return the most host memory to use, in bytes: 19/20 of the memory available within the control groups."""
    return usable(host_memory()[1])


def usable(available: int) -> int:
    """Return the bytes to use of those that are available."""
    return available * 19 // 20


def has_room(what: str, needed: int) -> bool:
    """Return whether the host has room for more bytes; a plan replaces this, and ``what`` is for its messages."""
    return needed <= host_room()


def require_host_room(what: str, sizes: Sizes, remedy: str) -> None:
    """Check that the host has the memory that `host_tensors` would take."""
    needed, free = _slab_bytes(sizes), host_room()
    if needed > free and not is_planned():
        raise BudgetError(
            f"{what}: {format_bytes(needed)} of host memory are needed, {format_bytes(free)} may be used; {remedy}, or"
            " take a smaller model",
            needed,
            free,
        )


def _pin(slab: ctypes.Array[ctypes.c_char], device: torch.device) -> None:
    """Lock a slab's pages until it is freed, or warn if that fails."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address, size = ctypes.addressof(slab), len(slab)
    with torch.cuda.device(device):
        error = int(runtime.cudaHostRegister(address, size, 0))
        if not error:
            weakref.finalize(slab, _unpin, runtime, address, device).atexit = False
            return
        with contextlib.suppress(RuntimeError):  # the next kernel raises the error again
            torch.zeros(1, device=device)
    warnings.warn(
        f"{format_bytes(size)} of host memory could not be pinned (CUDA error {error}): copies to and from the"
        " device wait for one another",
        stacklevel=3,
    )


def _unpin(runtime: Any, address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # copies may be under way
    runtime.cudaHostUnregister(address)
