"""Optimizers on compact and host states in a plan: their kernels and copies record the bytes they move.

A step isn't traced chunk by chunk, which would take minutes for a module with billions of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lightning_solo.attributes import replaced
from lightning_solo.memory import host_slabs
from lightning_solo.memory.block_ring import BlockRing
from lightning_solo.memory.weight_ring import WeightRing
from lightning_solo.nn import fused_operators, quantized
from lightning_solo.nn.offloading import Offloader
from lightning_solo.optim import (
    adamw_update,
    cpu_kernel,
    kernels,
    memory_order,
    operator_kernels,
    split_weights,
    staging,
)
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.gpu_kernel import TritonKernels
from lightning_solo.optim.kernels import Control, Kernels, Piece, Sum
from lightning_solo.optim.operator_kernels import CpuKernels
from lightning_solo.planner.notes import SLOT
from lightning_solo.planner.timeline import AWAITED, BESIDE, TO_DEVICE, TO_HOST
from lightning_solo.planner.tracer import RING_BUFFERS, Tracer, ring_buffer


class PlannedGpuKernels(TritonKernels):
    """Records the bytes of each launch of a Triton kernel; computes nothing."""

    def __init__(self, tracer: Tracer, *, fused: bool = True) -> None:
        self._tracer, self._fused = tracer, fused

    def step(self, pieces: Sequence[Piece], control: Control) -> None:
        """Record that all tensors are read once, and all but the gradients written."""
        moved = 0
        for piece in pieces:
            moved += _moved(piece)
            if not self._fused or not self.serves(piece.layout):  # compiled: two fp32 buffers of a chunk
                size = min(piece.numel, adamw_update.CHUNK["cuda"])
                buffers = [torch.empty(size, device=control.scale.device) for _ in range(2)]
                moved += 2 * 4 * piece.numel * len(buffers)
                del buffers
        self._tracer.launch(moved)

    def add(self, sums: Sequence[Sum], control: Control) -> None:
        """Record that gradients and totals are read once, and the totals written."""
        totals = [each.total.nbytes * (1 if each.is_first else 2) for each in sums if each.total is not None]
        self._tracer.launch(sum(each.gradient.nbytes for each in sums) + sum(totals))


class PlannedCpuKernels(CpuKernels):
    """A CPU's kernels; the C++ step records the bytes it moves, and computes only on real tensors."""

    def __init__(self, tracer: Tracer, device: torch.device) -> None:
        super().__init__(device, fused=False)
        self._tracer = tracer

    def _kernel(self, piece: Piece) -> cpu_kernel.Kernel | None:
        kernel = None if piece.first_row or not cpu_kernel.has_layout(piece) else cpu_kernel.kernel()
        if kernel is None:
            return None

        def step(piece: Piece, control: Control) -> None:
            self._tracer.launch(_moved(piece))
            if not isinstance(piece.tensors["weight"], FakeTensor):
                kernel(piece, control)

        return step


def _moved(piece: Piece) -> int:
    """Return the bytes of a step that reads each tensor once and writes all but the gradient."""
    return sum(tensor.nbytes * (1 if name == "grad" else 2) for name, tensor in piece.tensors.items())


@contextmanager
def planned_kernels(tracer: Tracer, *, cuda: bool) -> Iterator[None]:
    """Make optimizers and sums of gradients use a plan's kernels: Triton's on a GPU, C++ or operators on a CPU.

    On fake tensors, operators that process a tensor in chunks are traced for two chunks, since results of one chunk may
    live until those of the next exist. The cost of the second is multiplied for the rest.
    """

    def kernels_on(device: torch.device, *, fused: bool | None = None, numel: int = 0) -> Kernels:
        return PlannedGpuKernels(tracer, fused=fused is not False) if cuda else PlannedCpuKernels(tracer, device)

    def two_chunks(count: int, size: int) -> Iterator[slice]:
        yield from chunks(min(size, count), size)
        if count > size and tracer.phases:  # a conversion before the first phase isn't recorded
            begin = len(tracer.costs)
            yield slice(size, min(2 * size, count))
            tracer.multiply(begin, max(count / size - 1, 1))

    chunks = memory_order.chunks
    with ExitStack() as stack:
        stack.enter_context(replaced(kernels, "kernels_on", kernels_on))
        if cuda:
            stack.enter_context(replaced(operator_kernels, "is_on_cpu", lambda tensor: False))
            for name in _FUSED:
                stack.enter_context(
                    replaced(fused_operators, name, _one_kernel(tracer, getattr(fused_operators, name)))
                )
        if cuda and tracer.fake:  # whose kernels read no more than the bytes of a piece's tensors
            stack.enter_context(replaced(Piece, "blocks", _blocks_without_data))
        if tracer.fake:
            stack.enter_context(replaced(memory_order, "chunks", two_chunks))
            # without numbers, with which torch would compute each view of the table
            stack.enter_context(replaced(quantized, "_table", lambda device: torch.empty(256, device=device)))
        yield


def _blocks_without_data(piece: Piece, first: int, last: int) -> Piece:
    parts = {}
    with torch._C._DisableTorchDispatch():
        for name, tensor in piece.tensors.items():
            width = piece.width(name)
            size = min(last * width, tensor.numel()) - first * width
            parts[name] = torch.empty(size, dtype=tensor.dtype, device="meta")
    return Piece(parts, piece.scalars, piece.first_row + first, piece.index)


_FUSED = (
    "rms_norm_forward",
    "rms_norm_backward",
    "layer_norm_forward",
    "layer_norm_backward",
    "gated_forward",
    "gated_backward",
)


def _one_kernel(tracer: Tracer, operators: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operators that stand for a fused kernel, recorded as one launch.

    It reads its tensors once and writes its results once.
    """

    def run(*arguments: Any) -> Any:
        begin = len(tracer.costs)
        results = operators(*arguments)
        del tracer.costs[begin:]
        tensors = [each for each in (*arguments, *tree_leaves(results)) if isinstance(each, Tensor)]
        tracer.launch(sum(tensor.nbytes for tensor in tensors))
        return results

    return run


@contextmanager
def cuda_chunk_sizes() -> Iterator[None]:
    """Use the chunk sizes and staging buffers of a GPU for compact states."""
    with ExitStack() as stack:
        for table in (adamw_update.CHUNK, split_weights.CHUNK, staging.SLOTS):
            stack.callback(table.__setitem__, "cpu", table["cpu"])
            table["cpu"] = table["cuda"]
        yield


@contextmanager
def planned_host_memory(tracer: Tracer) -> Iterator[None]:
    """Mark allocations of host memory, and record the copies that a GPU would make through staging buffers.

    Plans run on a CPU, where host memory can't be told from the device's. Staging buffers are notes (see `notes`).
    """
    hosted = WeakIdKeyDictionary()

    def on_host(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def allocated(*arguments: Any) -> Any:
            with tracer.on_host():
                made = allocate(*arguments)
            hosted.update((each, True) for each in made if isinstance(each, Tensor))
            return made

        return allocated

    @contextmanager
    def on_device(
        self: staging.Staging,
        pieces: Mapping[str, Tensor],
        *,
        unread: bool = False,
        unchanged: Collection[str] = (),
        packed: Tensor | None = None,
    ) -> Iterator[dict[str, Tensor]]:
        tracer.stage(self, host_slabs.packed_bytes(pieces.values()))
        tracer.copy(TO_DEVICE, 0 if unread else sum(piece.nbytes for piece in pieces.values()), SLOT)
        tracer.copy(AWAITED, 0, SLOT)
        yield dict(pieces)
        tracer.copy(TO_HOST, sum(piece.nbytes for name, piece in pieces.items() if name not in unchanged), SLOT)

    with ExitStack() as stack:
        for name in ("host_tensors", "host_copy"):  # `packed_tensors` calls the first
            stack.enter_context(replaced(host_slabs, name, on_host(getattr(host_slabs, name))))
        stack.enter_context(replaced(staging.Staging, "on_device", on_device))
        stack.enter_context(replaced(CompactAdamW, "_is_away", staticmethod(lambda gradient, _: gradient in hosted)))
        yield


@contextmanager
def planned_host_room(tracer: Tracer, memory: int | None, answers: dict[str, bool]) -> Iterator[None]:
    """Decide by a plan's host memory whether the host has room, as a run decides by what is available.

    Args:
        tracer: knows the host memory in use.
        memory: bytes of the host; None if they are unknown: then it has room.
        answers: those given so far, which hold for traces of fewer blocks, too: the first trace is of the whole module.
    """

    def has_room(what: str, needed: int) -> bool:
        used = sum(tracer.live(on_host=True).values()) + (0 if tracer.cuda else tracer.live_bytes)
        has = answers.setdefault(what, memory is None or needed <= host_slabs.usable(memory - used))
        if not has:
            tracer.assume(f"the host has no room for {what}")
        return has

    with replaced(host_slabs, "has_room", has_room):
        yield


@contextmanager
def planned_offloading(tracer: Tracer, *, cuda: bool) -> Iterator[None]:
    """Mark the buffers of offloaded tensors as host memory, and record the copies that a GPU overlaps with kernels."""
    allocate, copy = Offloader._new_buffer, Offloader._copy

    def new_buffer(self: Offloader, size: int) -> Tensor:
        with tracer.on_host():
            return allocate(self, size)

    def copy_aside(self: Offloader, moved: Any, memory: Tensor, *, to_host: bool) -> None:
        if not tracer.fake:
            copy(self, moved, memory, to_host=to_host)
        tracer.copy(TO_HOST if to_host else TO_DEVICE, moved.bytes, _slot(moved))

    def await_copy(self: Offloader, moved: Any) -> None:
        tracer.copy(AWAITED, 0, _slot(moved))

    with ExitStack() as stack:
        stack.enter_context(replaced(Offloader, "_new_buffer", new_buffer))
        if cuda:
            stack.enter_context(replaced(Offloader, "_copy", copy_aside))
            stack.enter_context(replaced(Offloader, "_await_copy", await_copy))
        yield


@contextmanager
def planned_rings(tracer: Tracer) -> Iterator[None]:
    """Record the copies of blocks to a GPU, which wait for the operators that use a buffer's last block, and back."""
    copy, back = BlockRing._copy, WeightRing._copy_back

    def copy_aside(self: BlockRing, slot: Any, number: int) -> None:
        if not tracer.fake:
            copy(self, slot, number)
        buffer = ring_buffer(len(self._slots), number)
        tracer.copy(TO_HOST, 0, buffer)  # of which a copy to the device waits, as it does for operators
        tracer.copy(TO_DEVICE, self._stored[number].nbytes, buffer)
        slot.copied = buffer

    def await_copy(self: BlockRing, slot: Any) -> None:
        tracer.copy(AWAITED, 0, slot.copied)

    def copy_back(self: WeightRing, slot: Any, number: int, size: int) -> None:
        if not tracer.fake:
            back(self, slot, number, size)
        tracer.copy(TO_HOST, size, ring_buffer(len(self._slots), number))

    @contextmanager
    def beside(self: WeightRing, slot: Any) -> Iterator[None]:
        slot.copied = buffer = ring_buffer(len(self._slots), slot.holds)
        tracer.copy(BESIDE, 0, buffer)
        yield
        tracer.copy(BESIDE, 0, buffer)

    with (
        replaced(BlockRing, "_copy", copy_aside),
        replaced(BlockRing, "_await_copy", await_copy),
        replaced(WeightRing, "_copy_back", copy_back),
        replaced(WeightRing, "_beside", beside),
    ):
        yield


@contextmanager
def planned_host_weights(tracer: Tracer) -> Iterator[None]:
    """Record the copies of weights on the host to a GPU, each of which the next operator awaits."""

    def copied(weight: Tensor, device: torch.device) -> Tensor:
        tracer.copy(TO_DEVICE, weight.nbytes, _HOST_WEIGHTS)
        tracer.copy(AWAITED, 0, _HOST_WEIGHTS)
        return weight.clone()

    with replaced(quantized, "on_device", copied):
        yield


_HOST_WEIGHTS = RING_BUFFERS - 1
"""Number of the buffer of weights on the host, above those of staging buffers."""


def _slot(moved: Any) -> int:
    """Return a number that differs from those of staging buffers."""
    return -2 - int(moved.number)
