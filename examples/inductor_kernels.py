"""Compiles what torch.compile makes of the compact step for GPUs that are not here, in every layout of a parameter.

    python -m tests.simcuda examples/inductor_kernels.py [--only sm_90]

That is what steps where the kernels of `gpu_kernel` don't. Inductor believes in the simulated device, and its code goes
to Triton's compiler and NVIDIA's assembler as on a real one; nothing is launched. Ends with 1 where something isn't
compiled. The seeds are what Triton takes for an int64, whatever number a first step has.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest import mock

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # processes of their own would look for a real driver
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
os.environ["TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER"] = "0"  # which keeps no machine code

import torch
import triton.backends
from measure_kernels import ARCHITECTURES, MASTERS, counts
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from lightning_solo.machine import is_installed
from lightning_solo.optim.adamw_update import Blocks, update_blocks
from lightning_solo.optim.compressed_moments import BLOCK, codebooks
from lightning_solo.optim.kernels import Scalars

MOMENT_BITS = (8, 32, *((4,) if is_installed("torchao") else ()))
ROWS = 2**17
"""Blocks of a chunk: `adamw_update.CHUNK` on a GPU."""


class CompiledError(Exception):
    """A step is compiled, and would be taken now."""


class NoDriver:
    """What Inductor and Triton ask a driver for: which device to compile for."""

    architecture = 90

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def arguments_of(master: str, moment_bits: int) -> tuple[Blocks, Scalars]:
    """Return what `update_blocks` takes: zeros, in a layout, and the numbers of a step."""
    kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "weight": ((ROWS, BLOCK), torch.float32 if master == "fp32" else torch.bfloat16),
        "grad": ((ROWS, BLOCK), torch.bfloat16),
    }
    correction = MASTERS[master]
    if correction is not None:
        kinds["correction"] = ((ROWS, BLOCK), correction)
    width = BLOCK // 2 if moment_bits == 4 else BLOCK
    types = {8: (torch.int8, torch.uint8), 4: (torch.uint8, torch.uint8), 32: (torch.float32, torch.float32)}
    for name, dtype in zip(("exp_avg", "exp_avg_sq"), types[moment_bits], strict=True):
        kinds[name] = ((ROWS, width), dtype)
        if moment_bits != 32:
            kinds[f"{name}_scale"] = ((ROWS,), torch.float32)
    tensors: dict[str, Any] = {n: torch.zeros(shape, dtype=dtype, device="cuda") for n, (shape, dtype) in kinds.items()}
    if moment_bits == 4:
        tensors["book"], tensors["book_sq"] = codebooks(torch.device("cuda"))
    numbers = {"shrink": 1.0, "pull": 0.0, "first": 0.1, "keep": 0.999, "second": 0.001, "correction2": 0.03}
    scalars = Scalars(**numbers, eps=1e-8, rate=1e-3, seed=3_000_000_000, seed_of_weights=3_000_000_001)
    return Blocks(**tensors), scalars


def _stop(*_: Any) -> None:
    """Stand for what would launch kernels."""
    raise CompiledError


def compiled(master: str, moment_bits: int) -> Iterator[tuple[str, bytes]]:
    """Yield kernels that a step is compiled to, as (name, machine code)."""
    noted: list[CachingAutotuner] = []
    update = torch.compile(update_blocks, dynamic=True, fullgraph=True)
    torch._dynamo.reset()
    with (
        mock.patch.object(CachingAutotuner, "_make_launchers", lambda kernel: noted.append(kernel)),
        mock.patch.object(CompiledFxGraph, "__call__", _stop),
        torch.no_grad(),
        suppress(CompiledError),
    ):
        update(*arguments_of(master, moment_bits), first_row=0, scale=1.0)
    for kernel in noted:
        for result in kernel.compile_results:
            yield kernel.fn.__name__, result.kernel.asm["cubin"]


def main() -> int:
    """Compile every layout, and print a line for each kernel and architecture."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", help="an architecture, such as sm_90")
    by = arguments.parse_args()
    backend = triton.backends.backends["nvidia"]
    triton.backends.backends["nvidia"] = dataclasses.replace(backend, driver=NoDriver)
    driver.set_active(NoDriver())
    failed = 0
    for master in MASTERS:
        for bits in MOMENT_BITS:
            for architecture in ARCHITECTURES:
                target = f"sm_{architecture}"
                if by.only not in (None, target):
                    continue
                NoDriver.architecture = architecture
                name = f"inductor, {master}, moments {bits}"
                try:
                    kernels = list(compiled(master, bits))
                except Exception:
                    traceback.print_exc()
                    kernels = []
                spills = collections.defaultdict(list)
                for kernel, binary in kernels:
                    spills[kernel].append(counts(binary)[0]["spilled_bytes"])
                for kernel, spilled in spills.items():
                    print(
                        f"{name:30} {target:7} {len(spilled)} variants, least spills {min(spilled)} {kernel}",
                        flush=True,
                    )
                if not kernels:
                    failed += 1
                    print(f"{name:30} {target:7} is not compiled", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
