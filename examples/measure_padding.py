"""Measure the share of padding in plain batches, in batches of similar length and in packed rows.

On log-normal lengths; counts alone, no training:
`python examples/measure_padding.py --write examples/results/padding_cpu.json`
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from this_machine import machine, versions

from lightning_solo.data.length_batches import LengthBatches, padding_share
from lightning_solo.data.packing import PackedBatches

ITEMS, BATCH_SIZE, MAX_TOKENS, LONGEST = 10_000, 32, 16_384, 4096
MEDIAN, SIGMAS = 148, (0.8, 1.0, 1.2)  # exp(5), and the deviation of the logarithm


def measured(sigma: float) -> dict[str, Any]:
    """Return the shares of one distribution, each the worst of three epochs."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(ITEMS, generator=generator) * sigma).exp().mul(MEDIAN).clamp(1, LONGEST).long()
    plain = [torch.randperm(ITEMS, generator=generator).split(BATCH_SIZE) for _ in range(3)]
    by_count, by_tokens = LengthBatches(lengths, BATCH_SIZE), LengthBatches(lengths, max_tokens=MAX_TOKENS)
    packed = PackedBatches(lengths, LONGEST, MAX_TOKENS // LONGEST)
    return {
        "sigma": sigma,
        "lengths": [int(lengths.min()), int(lengths.max())],
        "plain": max(padding_share(lengths[batch].tolist() for batch in epoch) for epoch in plain),
        "by_count": max(
            padding_share(lengths[batch].tolist() for batch in by_count.batches(epoch)) for epoch in range(3)
        ),
        "by_tokens": max(
            padding_share(lengths[batch].tolist() for batch in by_tokens.batches(epoch)) for epoch in range(3)
        ),
        "packed": max(
            padding_share([int(lengths[list(row)].sum()) for row in batch] for batch in packed.batches(epoch))
            for epoch in range(3)
        ),
    }


def main() -> None:
    """Print the shares, and write them on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    rows = [measured(sigma) for sigma in SIGMAS]
    for row in rows:
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    if arguments.write:
        result = {
            "command": "python examples/measure_padding.py --write examples/results/padding_cpu.json",
            "machine": machine(),
            "versions": versions(),
            "items": ITEMS,
            "batch_size": BATCH_SIZE,
            "max_tokens": MAX_TOKENS,
            "capacity": LONGEST,
            "median": MEDIAN,
            "rows": rows,
        }
        arguments.write.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
