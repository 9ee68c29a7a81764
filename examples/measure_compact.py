"""Measures the preset `compact` against plain Lightning with AdamW, on a CPU: each run in a process of its own.

states        bytes per parameter of weights, gradients and optimizer states behind a step, counted by the ledger
convergence   loss on held-out text after 1,000 steps of a byte GPT, three seeds
resident      peak resident set of a few steps, 350 million parameters
step          seconds of an optimizer's step, 100 million parameters, beside torch's fused AdamW
largest       whether a model of so many parameters trains for three steps of one batch, and with what peak

    python examples/measure_compact.py --only convergence
    python examples/measure_compact.py --only largest --depth 72 --presets compact_checkpointing

Results are merged into examples/results/compact_cpu.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from this_machine import machine, versions

PARTS = ("states", "convergence", "resident", "step", "largest")
PRESETS = ("baseline", "bf16_true", "compact")
SEEDS, STEPS, LAST, EVERY = (1, 2, 3), 1000, 100, 25
ELEMENTS, TIMED = 100_000_000, 7


def trained(
    preset: str,
    *,
    width: int,
    depth: int,
    steps: int,
    batch_size: int,
    context: int,
    seed: int,
    lr: float = 1e-3,
    batches: int = 0,
) -> Any:
    """Return the Trainer and the losses of some steps of a byte GPT under a preset, of so many batches (0: all)."""
    import lightning as L
    import torch

    import lightning_solo as solo
    from lightning_solo.reference.byte_gpt import ByteGPT
    from lightning_solo.reference.stdlib_text import StdlibText

    class Losses(L.Callback):
        def __init__(self) -> None:
            self.all: list[float] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
            self.all.append(float(outputs["loss"]))

    L.seed_everything(seed, verbose=False)
    adamw = partial(torch.optim.AdamW, lr=lr, betas=(0.9, 0.95))
    module = ByteGPT(width=width, depth=depth, heads=width // 64, context=context, optimizer=adamw)
    data = StdlibText(context=context, batch_size=batch_size, max_bytes=4_000_000)
    losses = Losses()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    arguments = solo.trainer_kwargs(preset, callbacks=[losses])
    trainer = L.Trainer(
        **arguments,
        **quiet,
        enable_model_summary=False,
        accelerator="cpu",
        max_steps=steps,
        limit_val_batches=0,
        overfit_batches=batches,
    )
    trainer.fit(module, data)
    return trainer, losses.all


def states(preset: str, depth: int, seed: int) -> dict[str, Any]:
    """Return bytes per parameter by category."""
    from lightning_solo.memory.ledger import Ledger

    trainer, _ = trained(preset, width=512, depth=4, steps=2, batch_size=2, context=64, seed=1)
    module = trainer.lightning_module
    count = sum(p.numel() for p in module.parameters())
    live = Ledger(module, trainer.optimizers).live()
    held = {name: round(live[name] / count, 4) for name in ("weights", "gradients", "optimizer_states")}
    return {"parameters": count, **held, "in_all": round(sum(held.values()), 4)}


def convergence(preset: str, depth: int, seed: int) -> dict[str, Any]:
    """Return the loss on held-out text, of the last steps, and along the run, as means of 25 steps."""
    import torch

    from lightning_solo.reference.stdlib_text import StdlibText

    trainer, losses = trained(preset, width=128, depth=4, steps=STEPS, batch_size=8, context=128, seed=seed)
    module = trainer.lightning_module.float().eval()
    data = StdlibText(context=128, batch_size=32, max_bytes=4_000_000)
    held_out = []
    with torch.no_grad():
        for number, batch in enumerate(data.val_dataloader()):
            if number == 40:
                break
            logits = module(batch[:, :-1].long())
            held_out.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].long().flatten()))
    return {
        "seed": seed,
        "held_out": round(float(torch.stack(held_out).mean()), 5),
        "last": round(statistics.mean(losses[-LAST:]), 5),
        "every": EVERY,
        "curve": [round(statistics.mean(losses[at : at + EVERY]), 4) for at in range(0, STEPS, EVERY)],
    }


def resident(preset: str, depth: int, seed: int) -> dict[str, Any]:
    """Return the peak resident set of some steps."""
    import torch

    from lightning_solo.memory.reading import read

    begun = time.perf_counter()
    trainer, losses = trained(preset, width=1024, depth=depth, steps=3, batch_size=1, context=128, seed=1)
    count = sum(p.numel() for p in trainer.lightning_module.parameters())
    peak = read(torch.device("cpu")).peak_resident
    return {
        "parameters": count,
        "peak_bytes": peak,
        "losses": [round(loss, 3) for loss in losses],
        "seconds": round(time.perf_counter() - begun, 1),
    }


def largest(preset: str, depth: int, seed: int) -> dict[str, Any]:
    """Return what three steps of a wide model take."""
    import torch

    from lightning_solo.memory.reading import read

    begun = time.perf_counter()
    trainer, losses = trained(
        preset, width=2048, depth=depth, steps=3, batch_size=1, context=64, seed=1, lr=1e-5, batches=1
    )
    count = sum(p.numel() for p in trainer.lightning_module.parameters())
    return {
        "parameters": count,
        "peak_bytes": read(torch.device("cpu")).peak_resident,
        "losses": [round(loss, 3) for loss in losses],
        "seconds": round(time.perf_counter() - begun, 1),
    }


def step(preset: str, depth: int, seed: int) -> dict[str, Any]:
    """Return the median seconds of a step of torch's fused AdamW, and of ours: in C++, compiled by torch, and not."""
    import torch

    from lightning_solo.optim import CompactAdamW

    whole = torch.nn.Parameter(torch.randn(ELEMENTS))
    whole.grad = torch.randn(ELEMENTS)
    optimizers: dict[str, Any] = {"torch, fused": torch.optim.AdamW([whole], fused=True)}
    for name, fused in (("in C++", None), ("compiled", True), ("not compiled", False)):
        p = torch.nn.Parameter(torch.randn(ELEMENTS))
        optimizers[f"24 + 8 bits, {name}"] = optimizer = CompactAdamW([p], fused=fused)
        if name == "compiled":
            vars(optimizer)["_kernel"] = lambda parameter: None
        p.grad = torch.randn(ELEMENTS).bfloat16()
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(TIMED + 1):
        for name, optimizer in optimizers.items():
            begun = time.perf_counter()
            optimizer.step()
            if number:  # the first compiles, and makes the states
                times[name].append(time.perf_counter() - begun)
    return {
        "elements": ELEMENTS,
        "threads": torch.get_num_threads(),
        **{name: round(statistics.median(t), 4) for name, t in times.items()},
    }


def in_a_process(part: str, preset: str, depth: int, seed: int) -> dict[str, Any]:
    """Return what a part found in a process of its own, or how that ended."""
    arguments = ["--worker", part, "--presets", preset, "--depth", str(depth), "--seed", str(seed)]
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return {"ended_with": done.returncode}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--presets", default=None)
    parser.add_argument("--depth", type=int, default=None)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--worker", choices=PARTS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "compact_cpu.json")
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(globals()[given.worker](given.presets, given.depth, given.seed)))
        return
    made: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    made |= {
        "machine": machine(),
        "versions": versions(),
        "command": "python examples/measure_compact.py --only <part>",
    }
    for part in [given.only] if given.only else PARTS:
        presets = given.presets.split(",") if given.presets else list(PRESETS)
        depth = given.depth or (27 if part == "resident" else 26)
        rows = made.setdefault(part, [])
        for preset in presets if part != "step" else ["compact"]:
            for seed in SEEDS if part == "convergence" and given.seed is None else (given.seed or 1,):
                row = {"preset": preset, "depth": depth, **in_a_process(part, preset, depth, seed)}
                same = ("preset", "seed") if part == "convergence" else ("preset", "depth")
                rows[:] = [other for other in rows if any(other.get(key) != row.get(key) for key in same)]
                rows.append(row)
                print(part, row, flush=True)
        given.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
