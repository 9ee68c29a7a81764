"""Part a of `make gpu`: versions, and the most that this machine reaches, which every other figure is judged by."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import shutil
import subprocess
import sys
import time

import torch
from result import SMALL, Result, milliseconds, seconds

from lightning_solo.machine import host_memory
from lightning_solo.planner.calibrate import product_seconds

COPIED = 2**22 if SMALL else 2**30
PINNED = 2**24 if SMALL else 4 * 2**30
WIDTH = 64 if SMALL else 8192
ADAMW = 10_000 if SMALL else 100_000_000
PACKAGES = ("torch", "triton", "lightning", "pytorch-lightning", "hydra-core", "transformers", "deepspeed", "torchao",
            "bitsandbytes", "flashoptim", "optuna", "hypothesis", "pytest", "numpy")  # fmt: skip


def main() -> int:
    """Measure, the cheapest first."""
    result = Result("ceilings")
    with result.attempt("versions"):
        there = {name.lower() for name in (dist.metadata["Name"] for dist in importlib.metadata.distributions())}
        found = {name: importlib.metadata.version(name) for name in PACKAGES if name in there}
        total, available = host_memory()
        properties = torch.cuda.get_device_properties(0)
        result.add(
            "versions",
            python=sys.version.split()[0],
            **{name.replace("-", "_"): version for name, version in found.items()},
            missing=" ".join(name for name in PACKAGES if name not in found),
            cuda=torch.version.cuda,
            driver=_driver(),
            cores=os.cpu_count(),
            host_bytes=total,
            host_available_bytes=available,
            device_bytes=properties.total_memory,
            multiprocessors=properties.multi_processor_count,
        )
    with result.attempt("copy on the device"):
        source = torch.zeros(COPIED, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        result.add("copy on the device", gb_per_s=2 * COPIED / milliseconds(lambda: target.copy_(source)) / 1e6)
    with result.attempt("bf16 product"):
        taken = product_seconds("bf16", WIDTH, torch.device("cuda"))
        result.add("bf16 product", width=WIDTH, tflop_per_s=2 * WIDTH**3 / taken / 1e12)
    with result.attempt("copies"):
        copies(result)
    for huge, touched in ((False, False), (True, False), (True, True)):
        name = f"pinning{', huge pages' if huge else ''}{', touched by all cores first' if touched else ''}"
        with result.attempt(name):
            result.add(name, gb_per_s=PINNED / pinning_s(huge=huge, touched=touched) / 1e9)
    with result.attempt("fused AdamW on the CPU"):
        p = torch.nn.Parameter(torch.zeros(ADAMW))
        p.grad = torch.ones_like(p)
        optimizer = torch.optim.AdamW([p], fused=True)
        taken = seconds(optimizer.step, repeats=3)
        result.add("fused AdamW on the CPU", elements=ADAMW, seconds=taken, gb_per_s=28 * ADAMW / taken / 1e9)
    return result.end()


def copies(result: Result) -> None:
    """Measure copies to the device and back, from pinned and pageable memory, and both ways at once."""
    device = [torch.zeros(COPIED, dtype=torch.uint8, device="cuda") for _ in range(2)]
    pinned = [torch.zeros(COPIED, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    pageable = torch.zeros(COPIED, dtype=torch.uint8)
    up, down = torch.cuda.Stream(), torch.cuda.Stream()

    def both() -> None:
        now = torch.cuda.current_stream()
        for stream, target, source in ((up, device[0], pinned[0]), (down, pinned[1], device[1])):
            stream.wait_stream(now)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            now.wait_stream(stream)

    ways = {
        "to the device, pinned": lambda: device[0].copy_(pinned[0], non_blocking=True),
        "to the host, pinned": lambda: pinned[1].copy_(device[1], non_blocking=True),
        "both at once, pinned, each": both,
        "to the device, pageable": lambda: device[0].copy_(pageable),
    }
    for name, copy in ways.items():
        result.add(name, gb_per_s=COPIED / milliseconds(copy, repeats=10) / 1e6)


def pinning_s(*, huge: bool, touched: bool) -> float:
    """Return the seconds in which fresh memory gets its pages and is registered with CUDA.

    Args:
        huge: whether pages of 2 MiB are asked for.
        touched: whether torch's threads write it first; else registering takes the pages, in one thread.
    """
    runtime = torch.cuda.cudart()
    memory = mmap.mmap(-1, PINNED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    begun = time.perf_counter()
    if touched:
        tensor.zero_()
    error = int(runtime.cudaHostRegister(tensor.data_ptr(), PINNED, 0))
    taken = time.perf_counter() - begun
    if error:
        raise RuntimeError(f"cudaHostRegister of {PINNED} bytes: error {error}")
    runtime.cudaHostUnregister(tensor.data_ptr())
    return taken


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
