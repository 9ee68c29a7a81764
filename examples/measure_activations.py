"""Counts what each way of keeping activations saves: bytes between forward and backward, and FLOPs of both.

A byte GPT of 12 blocks in fp32 on the CPU, loss included. All figures are exact counts, and each way's gradients are
compared with those of the plain model, bit for bit.

    python examples/measure_activations.py        # to examples/results/activations_cpu.json, about a minute
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from this_machine import machine, versions
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_solo.memory.ledger import saved_for_backward
from lightning_solo.nn.blocks import repeated_blocks
from lightning_solo.nn.forwards import restore_forwards
from lightning_solo.nn.offloading import Offloader
from lightning_solo.nn.recomputation import PRODUCTS, Kept, Wrap, checkpoint_blocks, inputs_kept_in
from lightning_solo.reference.byte_gpt import ByteGPT

SHAPE = {"width": 512, "depth": 12, "heads": 8, "context": 512}
SEQUENCES = 2
MIN_BYTES = 2**14
HALF = "everything offloaded, `keep_on_device=0.5`"
Context = Callable[[Offloader], AbstractContextManager[Any]]
WAYS: dict[str, tuple[bool, Kept | None, Context]] = {
    "everything kept": (False, None, lambda offloader: nullcontext()),
    "`keep=products`": (True, Kept(PRODUCTS), lambda offloader: nullcontext()),
    "blocks recomputed": (True, None, lambda offloader: nullcontext()),
    "block inputs offloaded": (True, None, lambda offloader: inputs_kept_in(offloader.saving)),
    HALF: (False, None, lambda offloader: offloader.saving()),
    "everything offloaded": (False, None, lambda offloader: offloader.saving()),
}


def measure() -> list[dict[str, Any]]:
    """Return a row for each way."""
    torch.manual_seed(1)
    module = ByteGPT(**SHAPE)
    tokens = torch.randint(256, (SEQUENCES, SHAPE["context"] + 1))

    def loss() -> Tensor:
        return F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    rows: list[dict[str, Any]] = []
    plain: list[Tensor] = []
    for name, (recomputed, keep, context) in WAYS.items():
        if recomputed:
            checkpoint_blocks(repeated_blocks(module), verify=False, keep=keep)
        offloader = Offloader(torch.device("cpu"), MIN_BYTES, keep_on_device=0.5 if name == HALF else None)
        offloader.leave(module)

        def forward(context: Context = context, offloader: Offloader = offloader) -> Tensor:
            with context(offloader):
                return loss()

        device_bytes = saved_for_backward(forward)[1]  # the graph is freed here, and its buffers are used again
        module.zero_grad()
        with FlopCounterMode(display=False) as counter:
            forward().backward()
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        plain = plain or [gradient.clone() for gradient in gradients]
        if not all(map(torch.equal, plain, gradients)):
            raise SystemExit(f"{name}: other gradients than those of the plain model")
        row = {"name": name, "device_bytes": device_bytes, "host_bytes": offloader.host_bytes}
        rows.append({**row, "flops": counter.get_total_flops()})
        restore_forwards(module.modules(), Wrap)
        print(row, flush=True)
    return rows


def main() -> None:
    """Count and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, default=Path("examples/results/activations_cpu.json"))
    path = parser.parse_args().write
    result = {
        "command": "python examples/measure_activations.py",
        "machine": machine(),
        "versions": versions(),
        "what": f"byte GPT of {SHAPE['depth']} blocks, width {SHAPE['width']}, {SEQUENCES} sequences of"
        f" {SHAPE['context']} bytes, fp32; gradients equal to the bit in every row",
        "rows": measure(),
    }
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
