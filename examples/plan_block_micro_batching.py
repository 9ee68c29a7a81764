"""Plans one step of several sequences whose blocks run one micro-batch after another, with weights on the host.

Models are those of `plan_fine_tuning.py`, with compact states and the blocks' inputs on the host, and the loss in
chunks. A row has the number of micro-batches, the planned bytes of device and host, and the seconds of the bus.

    python examples/plan_block_micro_batching.py 8B --micro-batches 1 4
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from plan_fine_tuning import CHUNKS, HOST, SHAPES, LanguageModel

import lightning_solo as solo
from lightning_solo.planner.timeline import COMPUTE, TO_DEVICE, TO_HOST, busy

PRESET = "compact"
OVERRIDES = [
    "+callback=[chunked_cross_entropy,activation_offloading,weights_on_host,block_micro_batching]",
    CHUNKS[1],
    "callback.compact_states.state_budget=0",
]


def main() -> None:
    """Plan, and print a row for each number of micro-batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=SHAPES)
    parser.add_argument("--device", default="rtx-4090")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192, help="of each sequence")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4])
    given = parser.parse_args()
    batch = torch.zeros(given.sequences, given.tokens, dtype=torch.int64)
    for model in given.models:
        for number in given.micro_batches:
            plan = solo.plan(
                partial(LanguageModel, model, torch.bfloat16), batch, preset=PRESET,
                overrides=[*OVERRIDES, f"callback.block_micro_batching.micro_batches={number}"], device=given.device,
                host_memory=HOST, timeout_s=7200, budget="1GiB",  # no other batch sizes are traced
            )  # fmt: skip
            up, down, compute = (busy(plan.timeline, way) for way in (TO_DEVICE, TO_HOST, COMPUTE))
            print(
                f"{model}, {number} micro-batches: device {plan.needed_bytes / 2**30:.2f} GiB,"
                f" host {plan.host_bytes / 2**30:.2f} GiB, bus busy for {up:.2f} s up and {down:.2f} s down,"
                f" {compute:.2f} s of compute, {given.sequences * given.tokens / plan.seconds_per_step:,.0f} tokens/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
