"""Counts the peak of a training step by length of the sequence: attention kernels, a window, tiled feed-forward parts.

Recomputed blocks of a byte GPT in fp32 on the CPU, without embedding, head and loss. All figures are exact
counts, weights aside.

    python examples/measure_sequences.py        # to examples/results/sequences_cpu.json, two minutes
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from this_machine import machine, versions
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_solo.attributes import replaced
from lightning_solo.memory.ledger import Ledger
from lightning_solo.nn import sliding_window_attention
from lightning_solo.nn.attention_kernels import enabled_kernel
from lightning_solo.nn.blocks import feed_forward_parts
from lightning_solo.nn.recomputation import checkpoint_blocks
from lightning_solo.nn.tiling import tile_parts
from lightning_solo.reference.byte_gpt import ByteGPT

SHAPE = {"width": 128, "depth": 4, "heads": 2}
LENGTHS = [1024, 2048, 4096]
WINDOW = TILE = 256
WAYS = {
    "`math`": ("math", False, False),
    "`flash`": ("flash", False, False),
    "`flash`, tiled MLP": ("flash", False, True),
    "window, tiled MLP": ("flash", True, True),
}


def windowed(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> Tensor:
    """Attend to the last tokens, in place of all."""
    return sliding_window_attention(query, key, value, WINDOW)


def step(kernel: str, window: bool, tiled: bool, tokens: int) -> dict[str, int]:
    """Return the peak and the FLOPs of forward and backward."""
    torch.manual_seed(1)
    blocks = nn.Sequential(*ByteGPT(**SHAPE, context=8).blocks)
    if tiled:
        tile_parts(feed_forward_parts(blocks), TILE)
    checkpoint_blocks(dict(blocks.named_children()), verify=False)
    x = torch.randn(1, tokens, SHAPE["width"])
    counted = {}
    with ExitStack() as stack:
        stack.enter_context(enabled_kernel(kernel))
        if window:
            stack.enter_context(replaced(F, "scaled_dot_product_attention", _windowed_once()))
        blocks(x).sum().backward()  # tiles are compared here
        blocks.zero_grad()
        with Ledger(blocks, ()) as ledger:
            blocks(x).sum().backward()
        counted["peak"] = ledger.peak_bytes - sum(p.nbytes for p in blocks.parameters())
        blocks.zero_grad()
        with FlopCounterMode(display=False) as counter:
            blocks(x).sum().backward()
        counted["flops"] = counter.get_total_flops()
    return counted


def _windowed_once() -> Any:
    """Return `windowed`, whose own calls go to torch's function."""
    original = F.scaled_dot_product_attention

    def call(*args: Any, **kwargs: Any) -> Tensor:
        with replaced(F, "scaled_dot_product_attention", original):
            return windowed(*args)

    return call


def main() -> None:
    """Count and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, default=Path("examples/results/sequences_cpu.json"))
    path = parser.parse_args().write
    rows = []
    for name, (kernel, window, tiled) in WAYS.items():
        row = {"name": name, "steps": [step(kernel, window, tiled, tokens) for tokens in LENGTHS]}
        print(row, flush=True)
        rows.append(row)
    result = {
        "command": "python examples/measure_sequences.py",
        "machine": machine(),
        "versions": versions(),
        "what": f"{SHAPE['depth']} recomputed blocks of a byte GPT, width {SHAPE['width']}, one sequence, fp32; weights"
        f" aside, gradients included; window and tiles of {WINDOW} tokens",
        "lengths": LENGTHS,
        "rows": rows,
    }
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
