"""Plans training of all weights of a language model whose weights and optimizer states are on the host.

Models are those of `plan_fine_tuning.py`, with compact states, recomputed blocks and the loss in chunks. A row has the
planned bytes of device and host, tokens per second, and the share of a step in which the device computes.

    python examples/plan_weights_on_host.py 8B --device rtx-4090 --tokens 8192
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from plan_fine_tuning import CHUNKS, HOST, SHAPES, LanguageModel

import lightning_solo as solo
from lightning_solo.planner.timeline import COMPUTE, busy

PRESET = "compact_checkpointing"
OVERRIDES = ["+callback=[chunked_cross_entropy,weights_on_host]", CHUNKS[1], "callback.compact_states.state_budget=0"]


def main() -> None:
    """Plan, and print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=SHAPES)
    parser.add_argument("--device", default="rtx-4090")
    parser.add_argument("--tokens", type=int, default=8192, help="of the one sequence in a batch")
    given = parser.parse_args()
    batch = torch.zeros(1, given.tokens, dtype=torch.int64)
    for model in given.models:
        plan = solo.plan(
            partial(LanguageModel, model, torch.bfloat16), batch, preset=PRESET, overrides=OVERRIDES,
            device=given.device, host_memory=HOST, timeout_s=7200, budget="1GiB",  # no other batch sizes are traced
        )  # fmt: skip
        print(
            f"{model}: device {plan.needed_bytes / 2**30:.2f} GiB, host {plan.host_bytes / 2**30:.2f} GiB,"
            f" {given.tokens / plan.seconds_per_step:,.0f} tokens/s,"
            f" {busy(plan.timeline, COMPUTE) / plan.seconds_per_step:.0%} of the step computes",
            flush=True,
        )


if __name__ == "__main__":
    main()
