"""Plans one step of several sequences whose blocks run one micro-batch after another, with weights on the host.

Models are those of `plan_fine_tuning.py`, with compact states and the blocks' inputs on the host, and the loss in
chunks. A row has the number of micro-batches, the planned bytes of device and host, and the seconds of the bus. With
`--solved` a row follows of the plan that is solved from the preset `compact`; it takes minutes.

    python examples/plan_block_micro_batching.py 8B --micro-batches 1 4
    python examples/plan_block_micro_batching.py 8B --device laptop-8gb --tokens 4096 --micro-batches --solved
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from plan_fine_tuning import CHUNKS, HOST, SHAPES, LanguageModel
from plan_weights_on_host import solved_plans

import lightning_solo as solo
from lightning_solo.planner.bases import configuration_of, solved_lines
from lightning_solo.planner.plan import Plan
from lightning_solo.planner.timeline import COMPUTE, TO_DEVICE, TO_HOST, busy
from lightning_solo.presets.compose import compose
from lightning_solo.units import parse_budget

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
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--solved", action="store_true", help="solve a plan, too")
    given = parser.parse_args()
    batch = torch.zeros(given.sequences, given.tokens, dtype=torch.int64)
    same = {"device": given.device, "timeout_s": 7200}
    for model in given.models:
        module = partial(LanguageModel, model, torch.bfloat16)
        for number in given.micro_batches:
            plan = solo.plan(
                module, batch, preset=PRESET,
                overrides=[*OVERRIDES, f"callback.block_micro_batching.micro_batches={number}"],
                host_memory=HOST, budget="1GiB", **same,  # no other batch sizes are traced
            )  # fmt: skip
            tell(f"{model}, {number} micro-batches", batch.numel(), plan)
        if given.solved:
            for plan in solved_plans(module, batch, {PRESET: compose(PRESET, CHUNKS)}, parse_budget(HOST), same):
                tell(f"{model}, solved, {plan.verdict}", batch.numel(), plan)
                print("\n".join(solved_lines(configuration_of(plan))))


def tell(name: str, tokens: int, plan: Plan) -> None:
    """Print the row of a plan."""
    up, down, compute = (busy(plan.timeline, way) for way in (TO_DEVICE, TO_HOST, COMPUTE))
    print(
        f"{name}: device {plan.needed_bytes / 2**30:.2f} GiB, host {plan.host_bytes / 2**30:.2f} GiB, bus busy for"
        f" {up:.2f} s up and {down:.2f} s down, {compute:.2f} s of compute,"
        f" {tokens / plan.seconds_per_step:,.0f} tokens/s",
        flush=True,
    )


if __name__ == "__main__":
    main()
