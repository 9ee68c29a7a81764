"""Measures what compression does to the loss of a byte GPT, and to bytes and seconds, on a CPU.

The base is trained once, for 1,000 steps, and kept in a folder of this machine's temporary files. Each technique
continues from it for 100 steps, beside a control run of the same 100 steps without the technique.

    python examples/measure_compression.py quantization --write examples/results/quantization_cpu.json
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from this_machine import machine, versions

FOLDER = Path(tempfile.gettempdir()) / "compression_base"
BASE_STEPS, STEPS, SEED = 1000, 100, 1
RATE, MORE_RATE = 1e-3, 3e-4
"""Learning rates of the base and of the further steps, both with a cosine to zero."""
VALIDATION_WINDOWS = 64


def byte_gpt(rate: float = RATE, warmup_steps: int = 50) -> Any:
    """Return a byte GPT of 842,496 parameters with random weights."""
    import lightning as L
    import torch

    from lightning_solo.reference.byte_gpt import ByteGPT

    L.seed_everything(SEED, verbose=False)
    return ByteGPT(optimizer=partial(torch.optim.AdamW, lr=rate, betas=(0.9, 0.95)), warmup_steps=warmup_steps)


def train(module: Any, steps: int, callbacks: Sequence[Any] = (), seed: int = 0) -> Any:
    """Train on windows of the standard library's source, batch 16; return the module."""
    import lightning as L

    from lightning_solo.reference.stdlib_text import StdlibText

    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        max_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, StdlibText(seed=seed))
    return module


def base() -> Any:
    """Return the base model, trained at the first call on this machine."""
    import torch

    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / "base.pt"
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            torch.save(train(byte_gpt(), BASE_STEPS).state_dict(), file)
    module = byte_gpt(MORE_RATE, warmup_steps=0)
    module.load_state_dict(torch.load(file, weights_only=True))
    return module


def more(callbacks: Sequence[Any] = (), steps: int = STEPS) -> Any:
    """Return the base after further steps on batches that it hasn't seen in this order."""
    return train(base(), steps, callbacks, seed=1)


def held_out(module: Any) -> float:
    """Return the loss on 64 fixed windows of 128 bytes, in nats per byte, in fp32."""
    import torch

    from lightning_solo.reference.stdlib_text import StdlibText, spread

    rows = spread(StdlibText(validation_batches=None).validation_windows, VALIDATION_WINDOWS).long()
    module.eval()
    with torch.no_grad():
        return round(float(module.loss(rows)), 4)


STUDENT_STEPS, SEEDS = 250, (1, 2, 3)


def distillation() -> dict[str, Any]:
    """Measure students of 124,672 parameters alone, with the live base as teacher, and from 16 draws of it.

    The seed is that of the student's weights and of the order of the data. Times are medians over steps of runs that
    take turns.
    """
    import lightning_solo as solo
    from lightning_solo.reference.stdlib_text import StdlibText

    teacher, folder = base(), Path(tempfile.mkdtemp())
    ways: dict[str, Callable[[int], list[Any]]] = {
        "alone": lambda seed: [],
        "live teacher": lambda seed: [solo.Distillation.from_module(copy.deepcopy(teacher), alpha=1.0)],
        "half of the loss from the live teacher": lambda seed: [
            solo.Distillation.from_module(copy.deepcopy(teacher), alpha=0.5)
        ],
        "16 draws from a file": lambda seed: [solo.Distillation(labels=str(folder / f"{seed}.soft"), alpha=1.0)],
    }
    losses: dict[str, list[float]] = {name: [] for name in ways}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for seed in SEEDS:
        options: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False}
        print(
            solo.write_soft_labels(
                student(seed), StdlibText(seed=seed), teacher, folder / f"{seed}.soft", batches=STUDENT_STEPS, **options
            )
        )
        for name, callbacks in ways.items():
            watch = StepTimes()
            trained = train(student(seed), STUDENT_STEPS, [*callbacks(seed), watch], seed)
            losses[name].append(held_out(trained))
            times[name] += watch.seconds
            print(seed, name, losses[name][-1], statistics.median(watch.seconds))
    alone = statistics.mean(losses["alone"]), statistics.median(times["alone"])
    size = (folder / f"{SEEDS[0]}.soft").stat().st_size
    return {
        "teacher": held_out(teacher),
        "student_parameters": sum(p.numel() for p in student(1).parameters()),
        "student_steps": STUDENT_STEPS,
        "seeds": list(SEEDS),
        "bytes_per_position": round(size / (STUDENT_STEPS * 16 * 128), 2),
        "ways": [
            {
                "way": name,
                "losses": losses[name],
                "mean": round(statistics.mean(losses[name]), 4),
                "better_than_alone": round(alone[0] - statistics.mean(losses[name]), 4),
                "step_of_alone": round(statistics.median(times[name]) / alone[1], 2),
            }
            for name in ways
        ],
    }


def student(seed: int) -> Any:
    """Return a byte GPT of 124,672 parameters."""
    import torch

    from lightning_solo.reference.byte_gpt import ByteGPT

    torch.manual_seed(seed)
    return ByteGPT(width=64, depth=2)


class StepTimes:
    """Makes a callback with the seconds of each step."""

    def __new__(cls) -> Any:
        """Return it; Lightning is imported here."""
        import lightning as L

        class Times(L.Callback):
            def __init__(self) -> None:
                self.seconds: list[float] = []

            def on_train_batch_start(self, *args: Any) -> None:
                self.began = time.perf_counter()

            def on_train_batch_end(self, *args: Any) -> None:
                self.seconds.append(time.perf_counter() - self.began)

        return Times()


def main() -> None:
    """Measure one technique, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("technique", choices=sorted(MEASURED))
    parser.add_argument("--write", type=Path, default=None)
    arguments = parser.parse_args()
    result = {
        "machine": machine(),
        "versions": versions(),
        "command": f"python examples/measure_compression.py {arguments.technique} --write {arguments.write}",
        "base_steps": BASE_STEPS,
        "steps": STEPS,
        **MEASURED[arguments.technique](),
    }
    print(json.dumps(result, indent=1))
    if arguments.write is not None:
        arguments.write.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


MEASURED: dict[str, Callable[[], dict[str, Any]]] = {
    "control": lambda: {"base": held_out(base()), "control": held_out(more())},
    "distillation": distillation,
}


if __name__ == "__main__":
    main()
