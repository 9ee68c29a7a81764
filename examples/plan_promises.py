"""Plans what guides to large models on one GPU promise: a figure for each promise, and what plain counts give here.

Plans are for an H200, operator by operator on tensors without data. Counts are exact, of a small byte GPT on a CPU.

    pip install transformers
    python examples/plan_promises.py     # to examples/results/promises.json, some minutes
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from this_machine import machine, versions
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_solo as solo
from lightning_solo.memory.ledger import Ledger, saved_for_backward
from lightning_solo.planner.plan import Plan
from lightning_solo.reference.byte_gpt import ByteGPT

DEVICE = "h200"
GPT = {"width": 768, "depth": 12, "heads": 12, "context": 1024}
SMALL = {"width": 64, "depth": 2, "heads": 2, "context": 64}
TOKENS = 32_768
"""Of a sequence; a second one, four times as long, shows how activations grow."""


class Llama(L.LightningModule):
    """A Llama of random weights with an optimizer of torch; its default shape is that of Llama-2-7B."""

    def __init__(self, optimizer: str, **shape: int) -> None:
        super().__init__()
        self.net = LlamaForCausalLM(LlamaConfig(use_cache=False, **shape))
        self.optimizer = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), lr=1e-3)
        return optimizer


def planned(make: Any, sequences: int, tokens: int, preset: str | list[str], overrides: tuple[str, ...] = ()) -> Plan:
    """Return the plan of a preset on a batch of so many sequences of tokens."""
    batch = torch.zeros(sequences, tokens, dtype=torch.int64)
    plan = solo.plan(make, batch, preset=preset, overrides=overrides, device=DEVICE, host_memory="1TiB")
    assert isinstance(plan, Plan)
    print(preset, sequences, tokens, plan.breakdown, f"{plan.seconds_per_step:.3f} s", flush=True)
    return plan


def states(plan: Plan) -> int:
    """Return the bytes of weights, gradients and optimizer states at the peak."""
    return sum(plan.breakdown[name] for name in ("weights", "gradients", "optimizer_states"))


def plans() -> dict[str, Any]:
    """Return the planned figures."""
    gpt = partial(ByteGPT, **GPT)
    plain, bf16, again = (planned(gpt, 16, GPT["context"] + 1, name) for name in ("baseline", "bf16", "checkpointing"))
    seven = LlamaConfig()
    parameters = sum(p.numel() for p in on_meta(seven).parameters())
    llama = {name: planned(partial(Llama, name), 1, 16, "baseline") for name in ("AdamW", "SGD")}
    compact = planned(partial(Llama, "AdamW"), 1, 16, "compact")
    batches = {n: planned(gpt, n, GPT["context"] + 1, "bf16") for n in (16, 128)}
    lengths = [
        planned(partial(ByteGPT, **{**GPT, "context": n}), 1, n + 1, "checkpointing") for n in (TOKENS, 4 * TOKENS)
    ]
    eight = partial(Llama, "AdamW", intermediate_size=14336, num_key_value_heads=8, vocab_size=128256)
    chunked = ["checkpointing", "chunked_cross_entropy"]
    ways = {
        "compact": ([*chunked, "compact"], ()),
        "compact_host": ([*chunked, "compact_host"], ("callback.compact_states.state_budget=0",)),
        "zero_offload": ([*chunked, "zero_offload"], ()),
    }
    return {
        "activations": [p.breakdown["activations"] for p in (plain, bf16, again)],
        "flops": [p.flops for p in (bf16, again)],
        "states_mixed": [states(p) for p in (plain, bf16)],
        "parameters": parameters,
        "states": {name: states(p) for name, p in llama.items()} | {"compact": states(compact)},
        "batches": {str(n): p.breakdown["activations"] for n, p in batches.items()},
        "lengths": [p.breakdown["activations"] + p.breakdown["temporaries"] for p in lengths],
        "seconds": {name: planned(eight, 8, 2048, *way).seconds_per_step for name, way in ways.items()},
    }


def on_meta(config: LlamaConfig) -> LlamaForCausalLM:
    """Return a model without data."""
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def counts() -> dict[str, Any]:
    """Return what is counted exactly on this machine."""
    found: dict[str, Any] = {"states": {}, "batches": {}}
    for name in ("AdamW", "SGD"):
        module = ByteGPT(**SMALL)
        optimizer = getattr(torch.optim, name)(module.parameters(), lr=1e-3)
        with Ledger(module, [optimizer]) as ledger:
            module.loss(torch.zeros(2, SMALL["context"] + 1, dtype=torch.uint8)).backward()
            optimizer.step()
        live = ledger.live()
        owned = sum(live[kind] for kind in ("weights", "gradients", "optimizer_states"))
        found["states"][name] = owned / sum(p.numel() for p in module.parameters())
    module = ByteGPT(**SMALL)
    for number in (16, 128):
        batch = torch.zeros(number, SMALL["context"] + 1, dtype=torch.uint8)
        found["batches"][str(number)] = saved_for_backward(module.loss, batch)[1]
    return found


def main() -> None:
    """Plan, count and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, default=Path(__file__).parent / "results" / "promises.json")
    path = parser.parse_args().write
    made = {"command": "python examples/plan_promises.py", "device": DEVICE, "machine": machine()}
    made |= {"versions": versions(), "counted": counts(), "planned": plans()}
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
