r"""Plans training of all weights of a language model whose weights and optimizer states are on the host.

Models are those of `plan_fine_tuning.py`, with recomputed blocks, fused kernels and the loss in chunks. A row has the
planned bytes of device and host, tokens per second, and the share of a step in which the device computes: 100 % is the
rate that computation alone would reach.

    python examples/plan_weights_on_host.py 8B --device rtx-4090 --tokens 8192
    python examples/plan_weights_on_host.py 8B 32B --device rtx-4090 rtx-5090 --tokens 4096 8192 16384   # a table
    python examples/plan_weights_on_host.py 8B --clip --device h200 --tokens 16384 --overrides \
        callback.weights_on_host.window=32 callback.weights_on_host.kept_gradients=device \
        callback.compact_states.state_budget=11.5GiB  # weights on the device, and half of the states
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

import torch
from plan_fine_tuning import HOST, SHAPES, LanguageModel

import lightning_solo as solo
from lightning_solo.planner.device import device as device_of
from lightning_solo.planner.timeline import COMPUTE, busy

CHUNK = "callback.chunked_cross_entropy.chunk_tokens"


def main() -> None:
    """Plan, and print a row for each model, device and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=SHAPES)
    parser.add_argument("--device", nargs="+", default=["rtx-4090"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192], help="of a step")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of a sequence, or fewer in a small step")
    parser.add_argument("--half", action="store_true", help="copies to the device at half speed while others run back")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens whose logits exist at a time")
    parser.add_argument("--preset", default="stream_checkpointing")
    parser.add_argument("--overrides", nargs="+", default=[], help="of the preset")
    parser.add_argument("--clip", action="store_true", help="by the norm of all gradients")
    given = parser.parse_args()
    chunks = ["+callback=[chunked_cross_entropy,fused_kernels]", f"{CHUNK}={given.chunk}"]
    for model in given.models:
        for tokens in given.tokens:
            sequence = min(given.sequence, tokens)
            batch = torch.zeros(tokens // sequence, sequence, dtype=torch.int64)
            for name in given.device:
                device = device_of(name)
                if given.half:
                    device = replace(device, host_bandwidth_both=[device.host_bandwidth / 2, device.host_bandwidth])
                plan = solo.plan(
                    partial(LanguageModel, model, torch.bfloat16), batch, preset=given.preset,
                    overrides=[*chunks, *given.overrides], device=device, host_memory=HOST, timeout_s=7200,
                    trainer={"gradient_clip_val": 1.0} if given.clip else {},
                    budget="1GiB",  # no other batch sizes are traced
                )  # fmt: skip
                print(
                    f"{model}, {device.label}, {batch.numel()} tokens: device {plan.needed_bytes / 2**30:.2f} GiB,"
                    f" host {plan.host_bytes / 2**30:.2f} GiB, {batch.numel() / plan.seconds_per_step:,.0f} tokens/s,"
                    f" {busy(plan.timeline, COMPUTE) / plan.seconds_per_step:.0%} of the step computes",
                    flush=True,
                )


if __name__ == "__main__":
    main()
