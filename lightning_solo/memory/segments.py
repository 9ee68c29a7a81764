"""Segments of CUDA's caching allocator: what of them is free, and the setting with which they can grow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_solo.units import MiB, format_bytes

PAGES = {"small": 2 * MiB, "large": 20 * MiB}
"""Bytes by which an expandable segment grows and shrinks: kSmallBuffer, and large_segment_size_mb's default."""
_last_set = ""
"""Settings that were set last here: torch before 2.12 can't tell them."""


@dataclass(frozen=True)
class FreeMemory:
    """Free memory within the allocator's segments, in bytes."""

    largest: int  # of the largest free block; a larger request needs another segment
    returnable: int  # that ``torch.cuda.empty_cache`` would return to the device


def free_memory(segments: Iterable[Mapping[str, Any]]) -> FreeMemory:
    """Return the free memory of segments, as ``torch.cuda.memory_snapshot`` lists them.

    An ordinary segment is returned if all of it is free, an expandable one page by page. Blocks that wait for another
    stream are not free yet.

    >>> block = {"address": 0, "size": 30 * MiB, "state": "inactive"}
    >>> free_memory([{"address": 0, "segment_type": "large", "is_expandable": True, "blocks": [block]}])
    FreeMemory(largest=31457280, returnable=20971520)
    """
    largest = returnable = 0
    for segment in segments:
        free = [block for block in segment["blocks"] if block["state"] == "inactive"]
        largest = max([largest, *(block["size"] for block in free)])
        if segment.get("is_expandable"):
            page = PAGES[segment["segment_type"]]
            for block in free:
                begin = block["address"] - segment["address"]
                pages = (begin + block["size"]) // page - -(-begin // page)
                returnable += page * max(pages, 0)
        elif len(free) == len(segment["blocks"]):
            returnable += sum(block["size"] for block in free)
    return FreeMemory(largest, returnable)


def segments_of(device: torch.device) -> list[Mapping[str, Any]]:
    """Return the allocator's segments on a CUDA device, without synchronising."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return [segment for segment in _snapshot() if segment["device"] == index]


def _snapshot() -> list[Mapping[str, Any]]:
    return list(torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]


def are_expandable() -> bool:
    """Return whether new segments can grow, by the environment variable or by `expandable_segments`."""
    values = re.findall(r"expandable_segments\s*:\s*(\w+)", _settings())
    return bool(values) and values[-1] == "True"


def why_not_expandable() -> str | None:
    """Return why this process can't switch to expandable segments, and what to write; None if it can.

    Memory that is allocated before the switch stays in ordinary segments, which no longer fit together.
    """
    if are_expandable() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    ordinary = [segment for segment in _snapshot() if not segment.get("is_expandable")]
    used = sum(segment["active_size"] for segment in ordinary)
    if not used:
        return None
    return (
        f"CUDA has started, and {format_bytes(used)} are in use in segments that can't grow; write"
        " PYTORCH_ALLOC_CONF=expandable_segments:True before the command"
    )


@contextmanager
def expandable_segments() -> Iterator[None]:
    """Make new segments expandable, unless they are; afterwards new ones are ordinary again."""
    if are_expandable():
        yield
        return
    # one option alone would reset others, such as max_split_size_mb
    options = [before] if (before := _settings()) else []
    _set(",".join([*options, "expandable_segments:True"]))
    try:
        yield
    finally:
        _set(",".join([*options, "expandable_segments:False"]))


def _settings() -> str:
    """Return the allocator's settings. Where torch can't tell: the last of `_set`, or those of the environment."""
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):  # since 2.12
        return torch._C._accelerator_getAllocatorSettings()
    return _last_set or os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def _set(settings: str) -> None:
    global _last_set
    torch._C._accelerator_setAllocatorSettings(settings)
    _last_set = settings
