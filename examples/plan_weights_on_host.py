r"""Plans training of all weights of a language model whose weights and optimizer states are on the host.

Models are those of `plan_fine_tuning.py`, with recomputed blocks, fused kernels and the loss in chunks. A row has the
planned bytes of device and host, tokens per second, and the share of a step in which the device computes: 100 % is the
rate that computation alone would reach. With `--solved` a second plan follows, solved from the preset `compact`: each
block keeps, recomputes or moves what is fastest within the device and the host; it takes minutes.

    python examples/plan_weights_on_host.py 8B --device rtx-4090 --tokens 8192
    python examples/plan_weights_on_host.py 8B 32B --device rtx-4090 rtx-5090 --tokens 4096 8192 16384   # a table
    python examples/plan_weights_on_host.py 8B --tokens 8192 --solved --host-memory 64GiB
    python examples/plan_weights_on_host.py 32B --low-precision fp16_accumulate
    python examples/plan_weights_on_host.py 8B --clip --device h200 --tokens 16384 --overrides \
        callback.weights_on_host.window=32 callback.weights_on_host.kept_gradients=device \
        callback.compact_states.state_budget=11.5GiB
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from plan_fine_tuning import HOST, SHAPES, LanguageModel

import lightning_solo as solo
from lightning_solo.cards.configuration import Configuration
from lightning_solo.planner.bases import Bases
from lightning_solo.planner.device import device as device_of
from lightning_solo.planner.plan import Plan
from lightning_solo.planner.timeline import COMPUTE, busy
from lightning_solo.presets.compose import compose
from lightning_solo.units import parse_budget

CHUNK = "callback.chunked_cross_entropy.chunk_tokens"


def solved_plans(
    module: Callable[[], Any], batch: torch.Tensor, base: Mapping[str, Configuration], host: int, same: dict[str, Any]
) -> list[Plan]:
    """Return the plan that is solved from a preset, which itself need not fit."""
    plans = solo.plan(module, batch, presets=base, bases=Bases(base), host_memory=host, **same)
    return [plan for plan in plans if plan.configuration is not None]


def tell(model: str, batch: torch.Tensor, label: str, *plans: Plan) -> None:
    """Print the row of a plan, and how many blocks have each mode if it is solved."""
    for plan in plans:
        modes = ((plan.configuration or {}).get("callback", {}).get("activation_checkpointing") or {}).get("modes", {})
        print(
            f"{model}, {label}, {batch.numel()} tokens, {plan.preset}: device {plan.needed_bytes / 2**30:.2f} GiB,"
            f" host {plan.host_bytes / 2**30:.2f} GiB, {batch.numel() / plan.seconds_per_step:,.0f} tokens/s,"
            f" {busy(plan.timeline, COMPUTE) / plan.seconds_per_step:.0%} of the step computes"
            + "".join(f", {len(names)} blocks {mode}" for mode, names in modes.items()),
            flush=True,
        )


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
    parser.add_argument("--low-precision", metavar="FORMAT", help="of products, such as fp16_accumulate")
    parser.add_argument("--clip", action="store_true", help="by the norm of all gradients")
    parser.add_argument("--solved", action="store_true", help="solve a plan, too, whose blocks differ")
    parser.add_argument("--host-memory", default=HOST, help="for the solved plan")
    given = parser.parse_args()
    chunks = ["+callback=[chunked_cross_entropy,fused_kernels]", f"{CHUNK}={given.chunk}"]
    if given.low_precision:
        chunks[0] = chunks[0].replace("]", ",low_precision_matmul]")
        chunks.append(f"callback.low_precision_matmul.format={given.low_precision}")
    for model in given.models:
        for tokens in given.tokens:
            sequence = min(given.sequence, tokens)
            batch = torch.zeros(tokens // sequence, sequence, dtype=torch.int64)
            for name in given.device:
                device = device_of(name)
                if given.half:
                    device = replace(device, host_bandwidth_both=[device.host_bandwidth / 2, device.host_bandwidth])
                overrides = [*chunks, *given.overrides]
                same: dict[str, Any] = {
                    "device": device, "timeout_s": 7200, "trainer": {"gradient_clip_val": 1.0} if given.clip else {},
                }  # fmt: skip
                module = partial(LanguageModel, model, torch.bfloat16)
                plan = solo.plan(
                    module, batch, preset=given.preset, overrides=overrides, host_memory=HOST, **same,
                    budget="1GiB",  # no other batch sizes are traced
                )  # fmt: skip
                tell(model, batch, device.label, plan)
                if given.solved:
                    host = parse_budget(given.host_memory)
                    base = {"compact": compose("compact", overrides)}
                    tell(model, batch, device.label, *solved_plans(module, batch, base, host, same))


if __name__ == "__main__":
    main()
