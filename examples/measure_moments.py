"""Measures what 8 bits per moment do to AdamW's updates: this library's codes against others', in the same training.

Beside a byte GPT trained by AdamW in fp32, each code keeps moments of its own from the same gradients. A figure is how
far the update ``exp_avg / sqrt(exp_avg_sq)`` from those is off the one in fp32: relative (root of the mean square, over
all parameters of at least 4,096 elements), and the longest of a single element, in learning rates.

    python examples/measure_moments.py        # to examples/results/moments_cpu.json, about five minutes
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from this_machine import machine, versions
from torch import Tensor

from lightning_solo.optim.compressed_moments import (
    BLOCK,
    LEAST,
    dequantize_first,
    dequantize_second,
    quantize_first,
    quantize_second,
)
from lightning_solo.optim.random_numbers import seed_of, uniform
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.reference.stdlib_text import StdlibText

STEPS, BETA1, BETA2, EPS = 1000, 0.9, 0.999, 1e-8
Code = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]  # of both moments, in blocks, at a step: both as kept


def ours(m: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Keep moments as CompactAdamW does."""
    by = uniform(len(v), BLOCK, 0, seed_of(step, 0), v.device)
    return dequantize_first(*quantize_first(m)), dequantize_second(*quantize_second(v, uniform=by))


def to_nearest(m: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Keep them by the same curves, both rounded to the nearest code."""
    return dequantize_first(*quantize_first(m)), dequantize_second(*quantize_second(v))


def linear(m: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Keep them by codes of equal distance."""
    scale, scale_sq = (x.abs().amax(1, keepdim=True).clamp_min(1e-38) for x in (m, v))
    return (m / scale * 127).round() / 127 * scale, (v / scale_sq * 255).round() / 255 * scale_sq


def dynamic(m: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Keep them by the tables of torchao and bitsandbytes."""
    from torchao.optim.quant_utils import create_dynamic_map

    kept = []
    for values, signed in ((m, True), (v, False)):
        book = torch.tensor(create_dynamic_map(signed))
        scale = values.abs().amax(1, keepdim=True).clamp_min(1e-12)
        kept.append(book[torch.bucketize(values / scale, (book[1:] + book[:-1]) / 2)] * scale)
    return kept[0], kept[1]


CODES: dict[str, tuple[int, Code]] = {
    "this library's": (128, ours),
    "this library's, to the nearest": (128, to_nearest),
    "linear": (128, linear),
    "torchao's and bitsandbytes'": (256, dynamic),
}


def kept_in_blocks(code: Code, block: int, m: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return both moments as a code keeps them."""
    rows = [F.pad(x.flatten(), (0, -x.numel() % block)).view(-1, block) for x in (m, v)]
    first, second = (x.flatten()[: m.numel()].view_as(m) for x in code(rows[0], rows[1], step))
    return first, second


def update(m: Tensor, v: Tensor, step: int) -> Tensor:
    """Return AdamW's update, in learning rates."""
    return m / (1 - BETA1**step) / (v.sqrt() / math.sqrt(1 - BETA2**step) + EPS)


def measure(steps: int) -> dict[str, dict[str, float]]:
    """Return figures of each code after so many steps."""
    torch.manual_seed(0)
    module = ByteGPT(width=128, depth=3, context=64)
    data = StdlibText(context=64, batch_size=8, max_bytes=2_000_000)
    data.prepare_data()
    data.setup("fit")
    batches = iter(data.train_dataloader())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(BETA1, BETA2))
    large = [p for p in module.parameters() if p.numel() >= LEAST]
    moments = {name: [(torch.zeros_like(p), torch.zeros_like(p)) for p in large] for name in CODES}
    for step in range(1, steps + 1):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(data.train_dataloader())
            batch = next(batches)
        optimizer.zero_grad()
        loss = module.training_step(batch, 0)
        loss.backward()
        for name, (block, code) in CODES.items():
            for index, p in enumerate(large):
                assert p.grad is not None
                m, v = moments[name][index]
                m = m.lerp(p.grad, 1 - BETA1)
                v = v.mul(BETA2).addcmul(p.grad, p.grad, value=1 - BETA2)
                with torch.no_grad():
                    moments[name][index] = kept_in_blocks(code, block, m, v, step)
        optimizer.step()
    found = {}
    for name in CODES:
        exact = [update(optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"], steps) for p in large]
        own = [update(m, v, steps) for m, v in moments[name]]
        off = sum(float((a - b).square().sum()) for a, b in zip(own, exact, strict=True))
        found[name] = {
            "relative": round(math.sqrt(off / sum(float(b.square().sum()) for b in exact)), 4),
            "longest": round(max(float((a - b).abs().max()) for a, b in zip(own, exact, strict=True)), 3),
        }
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "moments_cpu.json")
    arguments = parser.parse_args()
    rows = [{"code": name, "block": CODES[name][0], **found} for name, found in measure(arguments.steps).items()]
    made: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(),
        "command": f"python examples/measure_moments.py --steps {arguments.steps}",
        "what": f"updates after {arguments.steps} steps of a byte GPT of width 128 and depth 3, off those in fp32",
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
