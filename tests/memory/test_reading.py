"""A reading: integers in bytes, from the allocator or from the process."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from lightning_solo.memory import reading
from lightning_solo.memory.reading import Reading, read, resident_bytes, with_host
from lightning_solo.units import MiB

CPU = torch.device("cpu")


def test_a_cpu_reading_sees_bytes_that_are_written() -> None:
    before = read(CPU)
    block = torch.ones(64 * MiB, dtype=torch.uint8)
    after = read(CPU)
    assert before.resident is not None
    assert after.resident is not None
    assert after.resident - before.resident >= 60 * MiB  # 64 less what was resident and free before
    del block
    peak = read(CPU).peak_resident
    assert isinstance(peak, int)
    assert peak >= after.resident - MiB  # the kernel counts resident pages in batches
    assert after.allocated is after.reserved is after.alloc_retries is None


def test_resident_bytes_are_the_peak_outside_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(reading, "_STATM", reading.Path("/nonexistent/statm"))
    monkeypatch.setattr(reading, "_STATUS", reading.Path("/nonexistent/status"))
    found = read(CPU)
    assert found.resident == found.peak_resident == resident_bytes()
    assert found.resident is not None
    assert found.resident > MiB


def test_a_cuda_reading_takes_the_allocators_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    def counters(current: int, peak: int) -> dict[str, dict[str, int]]:
        return {"all": {"current": current, "peak": peak}}

    stats = {"allocated_bytes": counters(1, 2), "reserved_bytes": counters(3, 4), "num_alloc_retries": 5}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    assert read(torch.device("cuda:0")) == Reading(1, 3, 2, 4, 5)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {})  # CUDA has not started
    assert read(torch.device("cuda:0")) == Reading(0, 0, 0, 0, 0)


def test_swap_is_the_process_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("VmHWM:\t    4096 kB\nVmSwap:\t    2048 kB\nVmSwapPages: 9 kB\n")
    monkeypatch.setattr(reading, "_STATUS", status)
    assert read(CPU).swap == 2 * MiB
    status.write_text("VmHWM:\t    4096 kB\n")  # a kernel without swap
    assert read(CPU).swap is None


def test_host_is_read_beside_a_device() -> None:
    assert with_host(Reading(resident=5), CPU) == Reading(resident=5)
    if not torch.cuda.is_available():  # CUDA has not started
        found = with_host(Reading(allocated=5), torch.device("cuda:0"))
        assert (found.allocated, found.device_used, found.swap) == (5, 0, read(CPU).swap)
        assert found.resident is not None
        assert found.resident > MiB


@pytest.mark.gpu
def test_used_bytes_of_the_device_include_the_cache() -> None:
    device = torch.device("cuda:0")
    block = torch.empty(64 * MiB, dtype=torch.uint8, device=device)
    found = with_host(read(device), device)
    free, total = torch.cuda.mem_get_info(device)
    assert found.device_used == total - free >= torch.cuda.memory_reserved()
    del block


@pytest.mark.gpu
def test_a_cuda_reading_is_exact() -> None:
    device = torch.device("cuda:0")
    before = read(device)
    block = torch.empty(8 * MiB, dtype=torch.uint8, device=device)
    after = read(device)
    assert before.allocated is not None
    assert after.allocated == before.allocated + 8 * MiB
    assert after.peak_allocated == torch.cuda.max_memory_allocated()
    del block
    assert all(
        isinstance(count, int) for name, count in asdict(after).items() if "allocated" in name or "reserved" in name
    )
