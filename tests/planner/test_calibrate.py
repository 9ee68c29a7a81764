"""Calibrating: what was measured takes the place of the table's shares and constants, and is kept for later plans."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_solo.errors import CapabilityError
from lightning_solo.planner import calibrate as measuring
from lightning_solo.planner import calibration
from lightning_solo.planner.calibrate import calibrate, speeds
from lightning_solo.planner.calibration import Readings, calibrated, context_of, keep, kept, place
from lightning_solo.planner.device import Device, assumed, device, this_device
from lightning_solo.planner.step_time import step_seconds
from lightning_solo.planner.tracer import Cost
from lightning_solo.units import GiB, MiB
from tests.messages import lines_with, mentions

READINGS = Readings(
    date="2026-11-22",
    flops={"fp16": 2e13, "fp32": 4e12, "fp64": None},
    bandwidth=1e11,
    host_bandwidth=5e9,
    context_bytes=200 * MiB,
    workspace_bytes=16 * MiB,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache folder with nothing in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- from readings to a device ---


def test_readings_replace_the_tables_figures() -> None:
    table = device("t4")
    found = calibrated(table, READINGS)
    assert (found.context_bytes, found.workspace_bytes, found.host_bandwidth) == (200 * MiB, 16 * MiB, 5e9)
    assert found.bandwidth_reached == pytest.approx(1e11 / table.memory_bandwidth)
    assert found.flops_reached["fp16"] == pytest.approx(2e13 / (table.flops["fp16"] or 0))
    assert found.flops_reached["fp32"] == pytest.approx(4e12 / (table.flops["fp32"] or 0))
    assert found.flops_reached["fp64"] == found.flops_reached["bf16"] == 0.70, "not tried, so as the table has it"
    assert (found.flops, found.memory_bandwidth, found.memory_bytes) == (
        table.flops,
        table.memory_bandwidth,
        table.memory_bytes,
    )
    assert "2026-11-22" in found.source


def test_readings_of_both_directions_replace_those_of_the_file() -> None:
    table = device("a100_80gb")
    assert table.host_bandwidth_both == [1.2e10, 2.4e10]
    assert calibrated(table, READINGS).host_bandwidth_both == table.host_bandwidth_both, "not measured"
    found = calibrated(table, replace(READINGS, host_bandwidth_both=[3e9, 4e9], host_memory_bandwidth=2e10))
    assert (found.host_bandwidth_both, found.host_memory_bandwidth) == ([3e9, 4e9], 2e10)


def test_readings_of_before_are_still_read(cache: Path) -> None:
    path = keep(device("cpu"), READINGS)
    values = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in values.items() if not key.startswith("host_b") or value}))
    assert "host_bandwidth_both" not in json.loads(path.read_text())
    assert kept(device("cpu")) == READINGS


def test_step_time_follows_from_readings() -> None:
    found = calibrated(device("t4"), READINGS)
    # 2e13 operations at 2e13 a second, 4e12 at 4e12, 3e11 bytes at 1e11 a second: 1 + 1 + 3
    costs = [Cost(2 * 10**13, 0, torch.float16), Cost(4 * 10**12, 0, torch.float32), Cost(0, 3 * 10**11, torch.float32)]
    assert step_seconds(costs, found) == pytest.approx(5.0)
    # bf16, which a T4 has not, is as slow as its fp32
    assert step_seconds([Cost(4 * 10**12, 0, torch.bfloat16)], found) == pytest.approx(1.0)
    table = device("t4")
    assert step_seconds(costs[:1], table) == pytest.approx(2e13 / (0.70 * (table.flops["fp16"] or 0)))
    sums = [Cost(10**13, 0, torch.float16, fp16_sums=True)]
    assert step_seconds(sums, device("rtx_4090")) == pytest.approx(1e13 / (0.70 * 330.3e12))
    assert step_seconds(sums, device("h100")) == pytest.approx(1e13 / (0.70 * 989.4e12)), "as fast as with sums in fp32"
    assert step_seconds(costs[2:], table) == pytest.approx(3e11 / (0.80 * table.memory_bandwidth))


def test_context_is_the_missing_memory_that_torch_did_not_reserve() -> None:
    assert context_of(10 * GiB, 7 * GiB, 3 * GiB - 300 * MiB) == 300 * MiB
    for after in (12 * GiB, 10 * GiB, 1 * GiB):  # others gave memory back, or took some
        with pytest.raises(CapabilityError, match="CUDA context"):
            context_of(10 * GiB, after, GiB)


def test_a_plan_says_that_its_device_is_calibrated() -> None:
    table = device("t4")
    assert not any("calibrated" in said for said in assumed(table, "16-mixed"))
    said = assumed(calibrated(table, READINGS), "16-mixed")
    assert lines_with(said[0], "200.00 MiB", "CUDA context")
    assert lines_with(said[1], "speeds", "CUDA context", "workspace", "Tesla T4", "2026-11-22")
    on_cpu = assumed(calibrated(device("cpu"), READINGS), "32-true")[1]
    assert lines_with(on_cpu, "speeds", "CPU", "2026-11-22")
    assert "CUDA context" not in on_cpu


# --- kept ---


def test_readings_are_kept_by_device_driver_and_torch(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "nvidia_driver", lambda: "535.104.05")
    on = device("rtx_4090")
    assert kept(on) is None
    path = keep(on, READINGS)
    assert path == cache / "lightning_solo" / "devices" / f"rtx_4090-driver_535.104.05-torch_{torch.__version__}.json"
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing half-written is left"
    assert kept(on) == READINGS
    assert kept(device("rtx_3090")) is None
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "9.9.9")
        assert kept(on) is None
    with monkeypatch.context() as other:
        other.setattr(calibration, "nvidia_driver", lambda: "600.1")
        assert kept(on) is None


def test_a_cpus_readings_are_kept_by_processor_and_threads(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "processor", lambda: "Acme(R) 3000 @ 2.0 GHz")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    path = place(device("cpu"))
    assert path is not None
    assert path.name == f"acme_r_3000_2_0_ghz-3_threads-torch_{torch.__version__}.json"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert place(device("cpu")) != path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bandwidth", -1.0),
        ("bandwidth", "fast"),
        ("flops", 3),
        ("flops", {"bf16": 0}),
        ("host_bandwidth_both", [0, 1]),
        ("context_bytes", 1.5),
    ],
)
def test_invalid_file_of_readings_gives_a_warning_and_is_ignored(cache: Path, key: str, value: object) -> None:
    on = device("cpu")
    path = keep(on, READINGS)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.warns(UserWarning, match=mentions(str(path), "lightning-solo plan --calibrate")):
        assert kept(on) is None
    path.write_text("{")
    with pytest.warns(UserWarning, match=mentions(str(path))):
        assert kept(on) is None


def test_readings_without_a_folder_are_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file")
    with pytest.raises(CapabilityError, match=mentions("Not a directory", "write XDG_CACHE_HOME=")):
        keep(device("cpu"), READINGS)
    monkeypatch.setattr(calibration, "user_cache", lambda: None)
    assert kept(device("cpu")) is None
    with pytest.raises(CapabilityError, match=mentions("home", "write XDG_CACHE_HOME=")):
        keep(device("cpu"), READINGS)


def test_this_device_is_calibrated(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(name="Tesla T4", major=7, minor=5, total_memory=15 * GiB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: here)
    table = this_device()
    assert table.calibrated is None
    keep(table, READINGS)
    assert this_device() == calibrated(table, READINGS)
    assert this_device().memory_bytes == 15 * GiB
    assert device("t4").calibrated is None, "a T4 by its name may be another one"


# --- measured ---


def small(on: Device) -> dict[str, float | None]:
    """The device with two kinds of arithmetic, which are quick to try."""
    return {kind: peak if kind in ("bf16", "fp32") else None for kind, peak in on.flops.items()}


def test_speeds_of_this_cpu() -> None:
    cpu = device("cpu")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = speeds(replace(cpu, flops=small(cpu)), torch.device("cpu"), width=256, copied=4 * MiB)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(found["flops"]) == {"bf16", "fp32"}
    # between a hundredth of one core of old and a rack of new ones
    assert all(1e7 < speed < 1e14 for speed in found["flops"].values())
    assert 1e8 < found["bandwidth"] < 1e13
    assert found["host_bandwidth"] == found["bandwidth"]
    assert found["host_bandwidth_both"] is None


def test_fastest_call_after_the_warm_up_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, called = [0.0], []
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock[0])

    def work() -> None:
        called.append(1)
        clock[0] += {1: 100.0, 4: 0.25}.get(len(called), 0.5)  # the first one compiles and loads

    assert measuring.fastest(work, torch.device("cpu")) == 0.25
    # one that warms up, then 0.5 + 0.5 + 0.25 + 0.5 + 0.5 s in TRIES = 5 calls
    assert len(called) == 6
    called.clear()
    monkeypatch.setattr(measuring, "SLOW_S", 0.6)
    measuring.fastest(work, torch.device("cpu"))
    assert len(called) == 3


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there the GPU is measured")
def test_this_cpu_from_end_to_end(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found, readings, path = calibrate()
    assert (found.name, found.context_bytes, found.workspace_bytes) == ("cpu", 0, 0)
    assert found.calibrated == readings.date
    assert found.flops_reached["fp32"] != 0.70
    assert found.bandwidth_reached != 0.80
    assert path.is_relative_to(cache)
    assert this_device() == found


def test_failed_process_is_an_error_with_its_last_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = cache.parent / "fails"
    script.write_text("#!/bin/sh\necho first >&2\necho 'torch.OutOfMemoryError: all of it is taken' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(CapabilityError, match=mentions("torch.OutOfMemoryError")):
        calibrate()
    assert not cache.exists()


@pytest.mark.gpu(needs="time")
def test_this_gpu_from_end_to_end(cache: Path) -> None:
    table = this_device()
    found, readings, _ = calibrate()
    assert 50 * MiB < readings.context_bytes < 2 * GiB
    assert MiB <= readings.workspace_bytes < 256 * MiB
    assert 0.3 < found.bandwidth_reached < 1.2
    assert all(0.05 < share < 1.5 for kind, share in found.flops_reached.items() if table.flops[kind])
    assert 1e9 < readings.host_bandwidth < 1e12
    assert readings.host_bandwidth_both is not None
    assert all(0.2 < speed / readings.host_bandwidth < 1.5 for speed in readings.host_bandwidth_both)
    assert this_device() == found
