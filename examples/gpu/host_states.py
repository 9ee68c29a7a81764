"""Part e of `make gpu`: 8 billion parameters stepped with their states on the host, by size of buffers and of pieces.

A pass steps every parameter, as backward does under released gradients: alone, which the bus limits, and behind a
product each that takes as long as a parameter's gradients at 8,192 tokens would, which hides copies if enough of them
are ahead. Rows have the bytes per second each way beside the ceiling, and the pass beside one of products alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from result import SMALL, Result, milliseconds, seconds

from lightning_solo.optim import staging
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.gpu_kernel import TritonKernels

ROWS, WIDTH, COUNT, TOKENS = (64, 128, 4, 16) if SMALL else (4096, 32768, 60, 8192)
MIB = 2**20
BUFFERS = (1, 2) if SMALL else (150 * MIB, 300 * MIB, 600 * MIB, 1024 * MIB, 2048 * MIB)
PIECES = (2**12,) if SMALL else (2**21, 2**23, 2**25)
COPIED = MIB if SMALL else 2**30


def main() -> int:
    """Measure the ceiling, then each size of buffers, then each size of pieces."""
    result = Result("host_states")
    ceiling = both_ways()
    result.add("ceiling, both ways at once, each", gb_per_s=ceiling)
    weights = [torch.nn.Parameter(torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")) for _ in range(COUNT)]
    gradient = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")
    left = torch.randn(TOKENS, ROWS, dtype=torch.bfloat16, device="cuda")
    right = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, device="cuda")

    def product() -> None:  # a weight's gradient and its input's: as long as two of these
        torch.mm(left.t(), right, out=product_of)
        torch.mm(left.t(), right, out=product_of)

    product_of = torch.empty_like(gradient)
    alone = seconds(lambda: [product() for _ in weights], repeats=3)
    result.add("products alone", ms=alone * 1e3, tokens=TOKENS, parameters=COUNT * ROWS * WIDTH)
    optimizer = CompactAdamW(weights, state_budget=0)
    with result.attempt("pinning"):
        taken = seconds_once(optimizer.place_states)
        result.add("pinning the states", seconds=taken, gib=optimizer.host_bytes / 2**30)
    if not isinstance(optimizer.kernels, TritonKernels):
        result.add("pieces", skipped="triton is not installed, or refuses this device")
        return result.end()
    settings = [(size, PIECES[len(PIECES) // 2]) for size in BUFFERS]
    settings += [(BUFFERS[-2], piece) for piece in PIECES]
    for size, piece in dict.fromkeys(settings):
        what = f"buffers of {size / MIB:.0f} MiB, pieces of {piece} elements"
        with result.attempt(what):
            result.add(what, **stepped(optimizer, weights, gradient, product, size, piece, ceiling, alone))
    return result.end()


def stepped(
    optimizer: CompactAdamW,
    weights: list[Any],
    gradient: torch.Tensor,
    product: Callable[[], None],
    size: int,
    piece: int,
    ceiling: float,
    alone: float,
) -> dict[str, float]:
    """Return figures of a pass with buffers of this size in all, and pieces of so many elements."""
    staging.STAGING_BYTES, staging.SERVED_PART = size, 1
    optimizer.__dict__.update(_staging=None, _kernels=None)
    vars(optimizer.kernels)["piece"] = piece

    def step() -> None:
        for p in weights:
            optimizer.step_one(p, gradient)

    def behind_products() -> None:
        for p in weights:
            product()
            optimizer.step_one(p, gradient)

    bare, hidden = seconds(step, repeats=2), seconds(behind_products, repeats=2)
    rate = optimizer.host_bytes / bare / 1e9
    return {
        "gb_per_s_each_way": rate,
        "of_ceiling": rate / ceiling,
        "bare_ms": bare * 1e3,
        "behind_products_ms": hidden * 1e3,
        "of_the_longer_alone": hidden / max(alone, bare),
    }


def both_ways() -> float:
    """Return the GB per second of pinned copies each way while the other goes as well."""
    device = [torch.zeros(COPIED, dtype=torch.uint8, device="cuda") for _ in range(2)]
    pinned = [torch.zeros(COPIED, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copy() -> None:
        now = torch.cuda.current_stream()
        for stream, target, source in zip(streams, (device[0], pinned[1]), (pinned[0], device[1]), strict=True):
            stream.wait_stream(now)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            now.wait_stream(stream)

    return COPIED / milliseconds(copy, repeats=10) / 1e6


def seconds_once(work: Callable[[], Any]) -> float:
    """Return the time of work that can be done but once."""
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
