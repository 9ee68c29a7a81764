"""What an optimizer step asks of a GPU under each preset, counted on the simulated device: launches, waits, copies.

python examples/measure_step_cost.py --write examples/results/step_cost.json

GPT-2 of 124 million parameters, randomly initialised, one sequence of 32 tokens, each preset in a process of its own.
Counted is the third optimizer step, from the first batch of its window to the end of the last. Exact, and the same on
every machine: what is launched, waited for and copied. Not simulated: time, and kernels that libraries fuse; each of
torch's operators counts as one launch, and of a Triton kernel each launch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from this_machine import machine, versions

FOLDER = Path(__file__).resolve().parents[1]
PRESETS = {  # name -> further overrides
    "baseline": [],
    "bf16": [],
    "bf16_true": [],
    "checkpointing": [],
    "accumulation": [],
    "compact": [],
    "compact, clipped": ["gradient_clip_val=1.0"],
    "compact, 4 micro-batches": ["accumulate_grad_batches=4"],
    "compact, not released": ["~callback.gradient_release"],
    "compact_checkpointing": [],
    "compact_host": ["callback.compact_states.state_budget=0"],
    "compact_host, 4 micro-batches on the host": [
        *(
            "callback.compact_states.state_budget=0",
            "accumulate_grad_batches=4",
            "callback.gradient_release.buffer=host",
        ),
    ],
    "compact_host_checkpointing": ["callback.compact_states.state_budget=0"],
    "zero_offload": [],
    "zero_offload_parameters": [],
}
COMMAND = "python examples/measure_step_cost.py --write examples/results/step_cost.json"
STEP = 3
STATES = 1 + 1 + 1 + 2 * 4 / 128  # bytes per parameter: correction, two codes, two scales of a block of 128
THEORY = {  # bytes per parameter that have to go each way in a step; not of DeepSpeed's, which go their own ways
    **dict.fromkeys((name for name in PRESETS if not name.startswith("zero")), 0.0),
    "compact_host": STATES,
    "compact_host_checkpointing": STATES,
    "compact_host, 4 micro-batches on the host": 3 * 4 + 4 + STATES,  # the fp32 sum to be added to, and to be stepped
}


def measured(name: str) -> dict[str, Any]:
    """Train under one preset on the simulated device, and return the counts of a step."""
    import lightning as L
    import torch
    from torch.utils.data import DataLoader
    from transformers import GPT2Config, GPT2LMHeadModel

    import lightning_solo as solo
    from tests.simcuda import device

    class GPT2(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Counter(L.Callback):
        """Counts one optimizer step."""

        def __init__(self) -> None:
            self.counts: Any = None
            self._counting: Any = None

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == STEP - 1 and self._counting is None:
                self._counting = device.counted()
                self.counts = self._counting.__enter__()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == STEP and self._counting is not None:
                self._counting.__exit__(None, None, None)
                self._counting = None
                trainer.should_stop = True

    preset, overrides = name.split(",")[0], PRESETS[name]
    clip = dict(each.split("=") for each in overrides if each.startswith("gradient_clip_val"))
    counter = Counter()
    arguments = solo.trainer_kwargs(preset, [each for each in overrides if "clip" not in each], callbacks=[counter])
    arguments |= {key: float(value) for key, value in clip.items()}
    torch.manual_seed(0)
    module = GPT2()
    numel = sum(p.numel() for p in module.parameters())
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            **{"accelerator": "cuda", **arguments},
            max_steps=STEP + 1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        tokens: Any = torch.randint(0, 50257, (64, 32))
        trainer.fit(module, DataLoader(tokens, batch_size=1, pin_memory=True))
    counts = counter.counts
    ours = (
        "lightning_solo/optim",
        "lightning_solo/techniques",
        "tests/simcuda/triton_kernels.py",
    )  # which stand for it
    own = [one for one in counts.operations if one.kind == "kernel" and place(one.line).startswith(ours)]
    return {
        "parameters": numel,
        "launches": counts.kernels,
        "launches_of_the_update": len(own),
        "synchronisations": counts.synchronisations,
        "synchronised_at": sorted({place(one.line) for one in counts.operations if one.kind == "synchronise"}),
        "copies_up": counts.copies("up"),
        "copies_down": counts.copies("down"),
        "pageable_bytes": sum(counts.copied_bytes(way, pinned=False) for way in ("up", "down")),
        "bytes_up_per_parameter": counts.copied_bytes("up") / numel,
        "bytes_down_per_parameter": counts.copied_bytes("down") / numel,
        "peak_allocated": counts.peak_allocated,
        "peak_reserved": counts.peak_reserved,
        "bytes_each_way_in_theory": THEORY.get(name),
    }


def place(line: str) -> str:
    """Return a line of code without the folder of the checkout or of the environment."""
    return line.removeprefix(f"{FOLDER}/").rpartition("site-packages/")[2]


def main() -> int:
    """Measure each preset, or one; print a line for each, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--one",
        choices=list(PRESETS),
        help="measure it in this process, which is to run by python -m tests.simcuda, and print JSON",
    )
    parser.add_argument("--presets", nargs="*", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--write", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(given.one)))
        return 0
    failed = False
    results = json.loads(given.write.read_text())["rows"] if given.write and given.write.exists() else {}
    for name in given.presets:
        command = [sys.executable, "-m", "tests.simcuda", str(Path(__file__).resolve()), "--one", name]
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
        if done.returncode:
            failed = True
            words = done.stderr.strip().splitlines()
            print(f"{name}: exit status {done.returncode}: {words[-1] if words else 'no message'}", flush=True)
            continue
        results[name] = one = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{name:42} {one['launches']:6} launches, {one['launches_of_the_update']:4} of the update,"
            f" {one['synchronisations']:3} waits, {one['bytes_up_per_parameter']:6.2f} bytes up and"
            f" {one['bytes_down_per_parameter']:6.2f} down per parameter, {one['pageable_bytes']} pageable",
            flush=True,
        )
        if given.write:
            about = {"command": COMMAND, "machine": machine(), "versions": versions()}
            given.write.write_text(json.dumps({**about, "rows": results}, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
