"""Free memory of the allocator's segments by hand, and the switch to expandable ones on the device."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_solo.memory.segments import (
    FreeMemory,
    are_expandable,
    expandable_segments,
    free_memory,
    segments_of,
    why_not_expandable,
)
from lightning_solo.units import MiB
from tests.messages import mentions
from tests.training import workspaces

DEVICE = torch.device("cuda", 0)
tells_settings = pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch before 2.12 can't tell its settings"
)


def segment(*blocks: tuple[int, str], kind: str = "large", expandable: bool = False, start: int = 7 * MiB) -> Any:
    """Return a segment of blocks, each (MiB, state)."""
    address, made = start, []
    for size, state in blocks:
        made.append({"address": address, "size": size * MiB, "state": state})
        address += size * MiB
    return {"address": start, "segment_type": kind, "is_expandable": expandable, "blocks": made}


FREE, LIVE, WAITS = "inactive", "active_allocated", "active_pending_free"


@pytest.mark.parametrize(
    ("segments", "largest", "returnable"),
    [
        ([], 0, 0),
        ([segment((20, LIVE))], 0, 0),
        ([segment((20, FREE)), segment((2, FREE), kind="small")], 20, 22),
        ([segment((4, LIVE), (16, FREE))], 16, 0),  # an ordinary segment is returned whole
        ([segment((20, WAITS))], 0, 0),
        ([segment((60, FREE), expandable=True)], 60, 60),
        ([segment((30, LIVE), (50, FREE), expandable=True)], 50, 40),  # pages 40-60 and 60-80
        ([segment((30, LIVE), (29, FREE), (1, LIVE), expandable=True)], 29, 0),  # no whole page
        ([segment((1, LIVE), (4, FREE), (15, LIVE), expandable=True)], 4, 0),
        ([segment((1, LIVE), (4, FREE), (1, LIVE), kind="small", expandable=True)], 4, 2),
    ],
)
def test_free_memory(segments: list[Any], largest: int, returnable: int) -> None:
    assert free_memory(segments) == FreeMemory(largest * MiB, returnable * MiB)


def test_the_switch_is_undone_and_keeps_other_options() -> None:
    settings = torch._C._accelerator_getAllocatorSettings
    before = settings()
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:200")
    try:
        assert not are_expandable()
        with expandable_segments():
            assert are_expandable()
            assert settings().startswith("max_split_size_mb:200,")
            with expandable_segments():  # nothing to do, and nothing to undo
                pass
            assert are_expandable()
        assert not are_expandable()
        assert settings().startswith("max_split_size_mb:200,")
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


@tells_settings
@pytest.mark.parametrize(
    ("text", "expandable"),
    [
        ("", False),
        ("expandable_segments:True", True),
        ("max_split_size_mb:200, expandable_segments: True", True),
        ("expandable_segments:True,expandable_segments:False", False),
    ],
)
def test_settings_of_the_environment_are_read(text: str, expandable: bool) -> None:
    before = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings(text)
    try:
        assert are_expandable() is expandable
    finally:
        torch._C._accelerator_setAllocatorSettings(f"{before},expandable_segments:False".lstrip(","))


@pytest.fixture
def empty_device() -> Iterator[None]:
    gc.collect()
    workspaces()  # that earlier tests left
    torch.cuda.empty_cache()
    if torch.cuda.memory_allocated():
        pytest.skip("an earlier test keeps memory on the device")
    yield
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_empty_cache_returns_what_is_said(empty_device: None) -> None:
    for switch in (False, True):
        with expandable_segments() if switch else torch.no_grad():
            kept = [torch.empty(size * MiB, dtype=torch.uint8, device=DEVICE) for size in (30, 50, 4, 70, 1)]
            del kept[1:4:2]
            free, before = free_memory(segments_of(DEVICE)), torch.cuda.memory_reserved()
            assert free.largest >= 70 * MiB
            torch.cuda.empty_cache()
            assert before - torch.cuda.memory_reserved() == free.returnable > 0
            del kept
            torch.cuda.empty_cache()


@pytest.mark.gpu
def test_memory_on_the_device_is_a_reason_against_the_switch(empty_device: None) -> None:
    assert why_not_expandable() is None
    with expandable_segments():
        grown = torch.empty(3 * MiB, dtype=torch.uint8, device=DEVICE)
    assert why_not_expandable() is None  # it is in a segment that can grow
    ordinary = torch.empty(5 * MiB, dtype=torch.uint8, device=DEVICE)
    assert re.search(mentions("5.00 MiB", "PYTORCH_ALLOC_CONF=expandable_segments:True"), why_not_expandable() or "")
    with expandable_segments():
        assert why_not_expandable() is None
    del grown, ordinary
