"""Calibration of this machine's device: memory of the CUDA context and workspace, speeds of a copy and a product.

A child process measures, so that readings exclude this process's context and tensors. It trains a small module for
a few steps, waits until this process has read its memory, then measures speeds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.errors import CapabilityError
from lightning_solo.planner.calibration import Readings, calibrated, context_of, keep
from lightning_solo.planner.device import CPU, Device, this_device
from lightning_solo.presets.devices import FP16_SUMS
from lightning_solo.processes import ProcessError, start
from lightning_solo.units import MiB

DTYPES = {
    FP16_SUMS: torch.float16,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
WIDTHS = {"cuda": 4096, "cpu": 1024}  # of the matrices that are multiplied: what a large layer has; a CPU is slower
COPIED = 256 * MiB  # beyond every cache
TRIES, SLOW_S = 5, 2.0


def calibrate() -> tuple[Device, Readings, Path]:
    """Measure this machine's GPU, else its CPU; return the calibrated device, the readings, and their file.

    Raises:
        CapabilityError: another program uses the GPU's memory; the file can't be written.
    """
    device = this_device()
    readings = _measured_apart(device)
    return calibrated(device, readings), readings, keep(device, readings)


def _measured_apart(device: Device) -> Readings:
    """Return the readings of a child process. Its CUDA context is the fall of the device's free memory while it runs.

    Raises:
        CapabilityError: the process failed; says why.
    """
    cuda = device.name != CPU
    free = torch.cuda.mem_get_info()[0] if cuda else 0  # creates this process's own context, before and after alike
    child = start("lightning_solo.planner.calibrate:measure")
    try:
        held = child.receive()
        context = context_of(free, torch.cuda.mem_get_info()[0], held["reserved"]) if cuda else 0
        child.send(None)  # it may continue
        speeds = child.receive()
    except ProcessError as error:
        raise CapabilityError(
            f"{device.label} could not be measured; end what else runs on it, and write again:"
            f" lightning-solo plan --calibrate\nThe process that measures ended with {error}"
        ) from None
    finally:
        child.close()
    return Readings(time.strftime("%Y-%m-%d"), context_bytes=context, workspace_bytes=held["workspace"], **speeds)


def measure(connection: Connection) -> None:
    """Measure in this process: send the bytes held after training, wait for a message, and send the speeds."""
    device = this_device()
    on = torch.device("cpu" if device.name == CPU else "cuda")
    connection.send(held_after_training(device, on))
    connection.recv()
    connection.send(speeds(device, on))


def held_after_training(device: Device, on: torch.device) -> dict[str, int]:
    """Return the bytes that torch's allocator has allocated, and reserved, after all tensors are freed."""
    train_a_little(on, torch.bfloat16 if device.flops["bf16"] else torch.float16)
    gc.collect()
    if on.type != "cuda":
        return {"workspace": 0, "reserved": 0}
    torch.cuda.empty_cache()
    return {"workspace": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}


def train_a_little(on: torch.device, dtype: torch.dtype) -> None:
    """Train a small transformer for three steps, which loads the kernels of a step."""
    width, classes = 256, 512
    block = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    module = nn.Sequential(nn.TransformerEncoder(block, 2, enable_nested_tensor=False), nn.Linear(width, classes)).to(
        on
    )
    optimizer = torch.optim.AdamW(module.parameters())
    inputs, targets = torch.randn(4, 128, width, device=on), torch.randint(classes, (4, 128), device=on)
    for _ in range(3):
        with torch.autocast(on.type, dtype):
            loss = nn.functional.cross_entropy(module(inputs).flatten(0, 1).float(), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()


def speeds(device: Device, on: torch.device, width: int | None = None, copied: int = COPIED) -> dict[str, Any]:
    """Return FLOP/s of a matrix product by kind, and bytes per second of copies on the device and by the host."""
    width = width or WIDTHS[on.type]
    kinds = [kind for kind in DTYPES if device.flops[kind] is not None]
    source, target = (torch.zeros(copied, dtype=torch.uint8, device=on) for _ in range(2))
    bandwidth = 2 * copied / fastest(lambda: target.copy_(source), on)  # read and written
    from_host, both, memory = bandwidth, None, None
    if on.type == "cuda":
        pinned, back = (torch.zeros(copied, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        from_host = copied / fastest(lambda: target.copy_(pinned, non_blocking=True), on)
        both = speeds_of_both_directions(target, pinned, source, back)
        memory = max(2 * copied / fastest(lambda: back.copy_(pinned), torch.device("cpu")), sum(both))
    flops = {kind: 2 * width**3 / product_seconds(kind, width, on) for kind in kinds}
    return {
        "flops": flops,
        "bandwidth": bandwidth,
        "host_bandwidth": from_host,
        "host_bandwidth_both": both,
        "host_memory_bandwidth": memory,
    }


def speeds_of_both_directions(target: Tensor, pinned: Tensor, source: Tensor, back: Tensor) -> list[float]:
    """Return bytes per second of ``target.copy_(pinned)``, and of ``back.copy_(source)``, while the other runs too.

    Each is timed while the other direction has three times as much to copy, and so doesn't end before it.
    """
    copies = [(target, pinned), (back, source)]
    found = []
    for timed in (0, 1):
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]  # type: ignore[no-untyped-call]
        best = 0.0
        for _ in range(TRIES):
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            for which, times in ((1 - timed, 3), (timed, 1)):
                with torch.cuda.stream(streams[which]):
                    if which == timed:
                        start.record()
                    for _ in range(times):
                        copies[which][0].copy_(copies[which][1], non_blocking=True)
                    if which == timed:
                        end.record()
            torch.cuda.synchronize()
            best = max(best, 1e3 * target.nbytes / start.elapsed_time(end))
        found.append(best)
    return found


def product_seconds(kind: str, width: int, on: torch.device) -> float:
    """Return the seconds of a product of two square matrices."""
    before, switches = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    sums_before, switches.allow_fp16_accumulation = switches.allow_fp16_accumulation, kind == FP16_SUMS
    try:
        a = torch.randn(width, width, device=on).to(DTYPES[kind])  # zeros need less power, and raise the clock
        return fastest(lambda: a @ a, on)
    finally:
        torch.set_float32_matmul_precision(before)
        switches.allow_fp16_accumulation = sums_before


def fastest(work: Callable[[], object], on: torch.device) -> float:
    """Return the seconds of the fastest of a few calls after a warm-up; a slow function is called fewer times."""
    wait: Callable[[], object] = torch.cuda.synchronize if on.type == "cuda" else lambda: None
    work()
    durations: list[float] = []
    while len(durations) < TRIES and sum(durations) < SLOW_S:
        wait()
        started = time.perf_counter()
        work()
        wait()
        durations.append(time.perf_counter() - started)
    return min(durations)
