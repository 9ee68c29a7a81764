"""Host memory and staging buffers of a planned run: their sizes on a GPU, and a copy for each that a GPU would make."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from lightning_solo.attributes import replaced
from lightning_solo.optim import adamw_update, host_slabs, split_weights, staging
from lightning_solo.planner.timeline import TO_DEVICE, TO_HOST


@contextmanager
def cuda_chunk_sizes() -> Iterator[None]:
    """Unpack compact states in chunks, and stage them in buffers, of the sizes and numbers that a GPU has."""
    tables = (adamw_update.CHUNK, split_weights.CHUNK, staging.SLOTS)
    originals = [table["cpu"] for table in tables]
    for table in tables:
        table["cpu"] = table["cuda"]
    try:
        yield
    finally:
        for table, original in zip(tables, originals, strict=True):
            table["cpu"] = original


@contextmanager
def planned_host_memory(
    on_host: Callable[[], AbstractContextManager[None]], copied: Callable[[str, int, int], None]
) -> Iterator[None]:
    """Mark allocations of host memory, which on a CPU look like those of the device.

    Tensors that pass through a staging buffer allocate it on the device, and aren't copied.

    Args:
        on_host: returns the context in which host memory is allocated.
        copied: is called with stream, bytes and staging buffer of each copy that a GPU would make.
    """
    allocate = host_slabs.host_tensors

    def host_tensors(*arguments: Any) -> list[Tensor]:
        with on_host():
            return allocate(*arguments)

    @contextmanager
    def on_device(
        self: staging.Staging,
        pieces: Mapping[str, Tensor],
        *,
        unread: bool = False,
        unchanged: Collection[str] = (),
    ) -> Iterator[dict[str, Tensor]]:
        slot, _ = self.next_slot(pieces)
        copied(TO_DEVICE, 0 if unread else sum(piece.nbytes for piece in pieces.values()), slot)
        yield dict(pieces)
        copied(TO_HOST, sum(piece.nbytes for name, piece in pieces.items() if name not in unchanged), slot)

    on_gpu = replaced(staging.Staging, "on_device", on_device)
    with replaced(host_slabs, "host_tensors", host_tensors), on_gpu:
        yield
