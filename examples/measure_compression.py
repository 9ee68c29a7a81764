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


def base(rate: float = MORE_RATE, warmup_steps: int = 0) -> Any:
    """Return the base model for further training. The first call on this machine trains it."""
    import torch

    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / "base.pt"
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            torch.save(train(byte_gpt(), BASE_STEPS).state_dict(), file)
    module = byte_gpt(rate, warmup_steps)
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
ROUNDS, TIMED_STEPS = 7, 40
Callbacks = Callable[[], list[Any]]


def distillation() -> dict[str, Any]:
    """Measure the losses of students alone, with the live base as teacher, and from 16 draws of it.

    The seed is that of the student's weights and of the order of the data.
    """
    teacher, folder = base(), Path(tempfile.mkdtemp())
    losses: dict[str, list[float]] = {}
    for seed in SEEDS:
        file = folder / f"{seed}.soft"
        write_labels(seed, teacher, file, STUDENT_STEPS)
        for name, callbacks in ways(teacher, file).items():
            trained = train(student(seed), STUDENT_STEPS, callbacks(), seed)
            losses.setdefault(name, []).append(held_out(trained))
            print(seed, name, losses[name][-1])
    alone = statistics.mean(losses["alone"])
    return {
        "teacher": held_out(teacher),
        "student_parameters": sum(p.numel() for p in student(1).parameters()),
        "student_steps": STUDENT_STEPS,
        "seeds": list(SEEDS),
        "bytes_per_position": round(file.stat().st_size / (STUDENT_STEPS * 16 * 128), 2),
        "ways": [
            {
                "way": name,
                "losses": each,
                "mean": round(statistics.mean(each), 4),
                "better_than_alone": round(alone - statistics.mean(each), 4),
            }
            for name, each in losses.items()
        ],
    }


def distillation_steps() -> dict[str, Any]:
    """Measure the steps of the same students: the least median of several short runs that take turns."""
    teacher, file = base(), Path(tempfile.mkdtemp()) / "labels.soft"
    write_labels(SEEDS[0], teacher, file, TIMED_STEPS)
    medians: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, callbacks in ways(teacher, file).items():
            watch = StepTimes()
            train(student(SEEDS[0]), TIMED_STEPS, [*callbacks(), watch], SEEDS[0])
            medians.setdefault(name, []).append(statistics.median(watch.seconds))
    least = {name: min(each) for name, each in medians.items()}
    steps = [
        {"way": name, "step_ms": round(1000 * s, 2), "of_alone": round(s / least["alone"], 2)}
        for name, s in least.items()
    ]
    return {"rounds": ROUNDS, "steps_per_round": TIMED_STEPS, "ways": steps}


def write_labels(seed: int, teacher: Any, file: Path, batches: int) -> None:
    """Write 16 draws for the first batches in the order of a seed."""
    import lightning_solo as solo
    from lightning_solo.reference.stdlib_text import StdlibText

    options: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False}
    print(solo.write_soft_labels(student(seed), StdlibText(seed=seed), teacher, file, batches=batches, **options))


def ways(teacher: Any, file: Path) -> dict[str, Callbacks]:
    """Return the callbacks of each way to train a student."""
    import lightning_solo as solo

    def live(alpha: float, **more: Any) -> list[Any]:
        return [solo.Distillation.from_module(copy.deepcopy(teacher), alpha=alpha, **more)]

    blocks = {"blocks.0": "blocks.1", "blocks.1": "blocks.3"}

    return {
        "alone": list,
        "live teacher": lambda: live(1.0),
        "half of the loss from the live teacher": lambda: live(0.5),
        "live teacher, and its blocks 1 and 3": lambda: live(1.0, features=blocks, feature_loss="normalized"),
        "16 draws from a file": lambda: [solo.Distillation(labels=str(file), alpha=1.0)],
    }


CYCLES, SNAPSHOT_STEPS = 4, 400


def snapshots() -> dict[str, Any]:
    """Measure snapshots at the ends of four cosines, their mean and ensembles, beside one cosine of as many steps."""
    import torch

    import lightning_solo as solo
    from lightning_solo.reference.stdlib_text import StdlibText, spread

    rows = spread(StdlibText(validation_batches=None).validation_windows, VALIDATION_WINDOWS).long()
    losses: dict[str, list[float]] = {}

    def ensemble(members: Sequence[dict[str, Any]], module: Any) -> float:
        shares = []
        for member in members:
            module.load_state_dict(member, strict=False)  # of tied weights one has the value
            with torch.no_grad():
                shares.append(module.eval()(rows[:, :-1]).float().softmax(-1))
        mean = torch.stack(shares).mean(0).log().flatten(0, 1)
        return round(float(torch.nn.functional.nll_loss(mean, rows[:, 1:].flatten())), 4)

    for seed in SEEDS:
        one = train(student(seed), SNAPSHOT_STEPS, (), seed)
        average = solo.WeightAverage(method="swa", cycles=True, members=CYCLES, at_end="live")
        cyclic = student(seed)
        cyclic.configure_optimizers = lambda module=cyclic: restarting(module)
        last = held_out(train(cyclic, SNAPSHOT_STEPS, [average], seed))
        members = average.average.members
        swa = ensemble([average.averaged_weights], cyclic)
        for name, loss in (
            ("one cosine of all steps", held_out(one)),
            ("four cosines: last snapshot", last),
            ("mean of the four snapshots' weights", swa),
            ("ensemble of the last two snapshots", ensemble(members[-2:], cyclic)),
            ("ensemble of the four snapshots", ensemble(members, cyclic)),
        ):
            losses.setdefault(name, []).append(loss)
            print(seed, name, loss)
    ways = [{"way": name, "losses": each, "mean": round(statistics.mean(each), 4)} for name, each in losses.items()]
    return {"student_steps": SNAPSHOT_STEPS, "cycles": CYCLES, "seeds": list(SEEDS), "ways": ways}


def restarting(module: Any) -> Any:
    """Return the student's optimizer with a cosine that restarts for each cycle."""
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, betas=(0.9, 0.95))
    cosine = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, SNAPSHOT_STEPS // CYCLES)
    return [optimizer], [{"scheduler": cosine, "interval": "step"}]


def student(seed: int) -> Any:
    """Return a byte GPT of 124,672 parameters."""
    import torch

    from lightning_solo.reference.byte_gpt import ByteGPT

    torch.manual_seed(seed)
    return ByteGPT(width=64, depth=2)


AVERAGED_STEPS, DECAYS = 400, (0.9, 0.97, 0.99)


def averaging() -> dict[str, Any]:
    """Measure averages of a byte GPT's weights: its last ones at a constant rate and with a cosine, EMA and SWA.

    One run makes all averages of a seed, since an average doesn't change training.
    """
    import lightning as L
    import torch

    from lightning_solo.optim.averages import Average

    class Averages(L.Callback):
        def __init__(self) -> None:
            self.by_name = {f"ema {decay}": Average("ema", decay, on_host=True) for decay in DECAYS}
            self.by_name["swa of the last 100"] = Average("swa", on_host=True)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            for name, average in self.by_name.items():
                if not name.startswith("swa") or trainer.global_step > AVERAGED_STEPS - 100:
                    average.update(dict(pl_module.named_parameters()))

    losses: dict[str, list[float]] = {}
    for seed in SEEDS:
        for schedule in ("constant", "cosine"):
            module, averages = student(seed), Averages()
            if schedule == "constant":
                rate = module.optimizer.keywords["lr"]
                module.configure_optimizers = lambda module=module, rate=rate: torch.optim.AdamW(
                    module.parameters(), lr=rate, betas=(0.9, 0.95)
                )
            train(module, AVERAGED_STEPS, [averages], seed)
            found = {"last": held_out(module)}
            for name, average in averages.by_name.items():
                with torch.no_grad():
                    for key, p in module.named_parameters():
                        p.copy_(average.values[key])
                found[name] = held_out(module)
            print(seed, schedule, found)
            for name, loss in found.items():
                losses.setdefault(f"{schedule} rate, {name}", []).append(loss)
    return {
        "parameters": sum(p.numel() for p in student(1).parameters()),
        "averaged_steps": AVERAGED_STEPS,
        "seeds": list(SEEDS),
        "losses": {name: {"each": each, "mean": round(statistics.mean(each), 4)} for name, each in losses.items()},
    }


PRUNED: dict[str, dict[str, Any]] = {
    "50 %": {"amount": 0.5},
    "2:4": {"pattern": "2:4"},
    "80 %": {"amount": 0.8},
    "80 % of all weights together": {"amount": 0.8, "scope": "global"},
    "90 %": {"amount": 0.9},
    "half of the channels": {"amount": 0.5, "pattern": "channels"},
    "1 of 4 heads": {"amount": 0.25, "pattern": "heads"},
}


PRUNED_RATES = ((MORE_RATE, 0), (RATE, 10))
"""Learning rates of the further steps, each with its number of warm-up steps."""


def pruning() -> dict[str, Any]:
    """Measure losses after further steps with pruned weights, at two rates, and bytes of their exports."""
    import lightning_solo as solo

    rows, controls = [], {}
    for rate, warmup_steps in PRUNED_RATES:
        control = controls[str(rate)] = held_out(train(base(rate, warmup_steps), STEPS, seed=1))
        for name, settings in PRUNED.items():
            technique = solo.Pruning(**settings)
            module = train(base(rate, warmup_steps), STEPS, [technique], seed=1)
            with tempfile.TemporaryDirectory() as folder:
                solo.export_pruned(module, Path(folder, "pruned"))
                size = Path(folder, "pruned", "model.safetensors").stat().st_size
            row = {"way": name, "rate": rate, "loss": held_out(module), "bytes": size}
            row["pruned"] = sum(technique.pruned.values())
            row["parameters"] = sum(p.numel() for p in module.parameters())
            row["more than control"] = round(row["loss"] - control, 4)
            rows.append(row)
            print(row, flush=True)
    return {
        "base": held_out(base()),
        "controls": controls,
        "parameters": sum(p.numel() for p in base().parameters()),
        "bytes_fp32": sum(p.nbytes for p in base().parameters()),
        "rows": rows,
    }


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


FACTORS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"linear layers, rank {rank}": ("LowRank", {"rank": rank}) for rank in (96, 64, 32, 0.9)},
    "linear layers, rank 32, from scratch": ("LowRank", {"rank": 32, "start": "random"}),
    **{f"embedding and tied head, rank {rank}": ("FactorizedEmbedding", {"rank": rank}) for rank in (64, 32)},
    **{
        f"{group} blocks share, from their {start}": ("SharedBlocks", {"group": group, "start": start})
        for group in (2, 4)
        for start in ("mean", "first")
    },
}


def low_rank() -> dict[str, Any]:
    """Measure losses of models with fewer weights, as they start and after further steps, and their bytes."""
    import lightning_solo as solo

    control, rows = held_out(more()), []
    for name, (word, settings) in FACTORS.items():
        technique = getattr(solo, word)
        first = train(base(), 1, [technique(**settings), *_without_steps()])
        module = more([technique(**settings)])
        with tempfile.TemporaryDirectory() as folder:
            if word == "SharedBlocks":
                solo.export_weights(module, output=Path(folder, "model.safetensors"))
            else:
                solo.export_factorized(module, Path(folder, "out"))
            size = next(Path(folder).rglob("model.safetensors")).stat().st_size
        count = sum(p.numel() for p in module.parameters())
        row = {"way": name, "parameters": count, "bytes": size, "start": held_out(first), "loss": held_out(module)}
        row["more than control"] = round(row["loss"] - control, 4)
        rows.append(row)
        print(row, flush=True)
    return {
        "base": held_out(base()),
        "control": control,
        "parameters": sum(p.numel() for p in base().parameters()),
        "bytes_fp32": sum(p.nbytes for p in base().parameters()),
        "rows": rows,
    }


def _without_steps() -> list[Any]:
    """Return a callback that leaves the weights as they are."""
    import lightning as L

    class Still(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = group["weight_decay"] = 0.0

    return [Still()]


FEW_BITS = ((4, 32), (3, 32), (2, 32), (2, 0))
AFTERWARDS: tuple[tuple[int | str, int], ...] = (
    (8, 0),
    ("fp8", 0),
    (6, 32),
    (4, 32),
    (4, 0),
    (3, 32),
    (3, 0),
    (2, 32),
    (2, 0),
)
WIDE, LAYERS, TURNS = 1024, 3, 60


def quantization() -> dict[str, Any]:
    """Measure losses with rounded weights, trained so or not, and bytes of exports."""
    import torch

    import lightning_solo as solo

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        control, start = more(), base()
        rows = []
        for bits, group_size in AFTERWARDS:
            row: dict[str, Any] = {"bits": bits, "group_size": group_size}
            row["base"], row["bytes"], row["difference"] = exported(start, Path(folder), bits, group_size)
            row["control"], _, _ = exported(control, Path(folder), bits, group_size)
            if (bits, group_size) in FEW_BITS:
                aware = more([solo.Quantization(bits, group_size)])
                row["trained so"], _, row["difference"] = exported(aware, Path(folder), bits, group_size)
                row["share recovered"] = round(
                    (row["control"] - row["trained so"]) / (row["control"] - held_out(control)), 3
                )
            rows.append(row)
            print(row, flush=True)
        inputs = []
        for activations in ("int8", "int8_static"):
            loss, _, _ = exported(start, Path(folder), 8, 0, activations)
            inputs.append({"bits": 8, "group_size": 0, "activations": activations, "base": loss})
            print(inputs[-1], flush=True)
        return {
            "base": held_out(start),
            "control": held_out(control),
            "bytes_fp32": sum(p.nbytes for p in start.parameters()),
            "rows": rows,
            "inputs": inputs,
        }


def quantization_times() -> dict[str, Any]:
    """Measure steps of training with rounded weights, and exported layers, on one core; on an idle machine alone."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return {
            "step_times": step_times(),
            "layers": f"{LAYERS} x Linear({WIDE}, {WIDE}), fp32, 1 core",
            "inference": inference(Path(folder)),
        }


def calibrate(module: Any) -> None:
    """Run the module on 16 windows of training."""
    from lightning_solo.reference.stdlib_text import StdlibText

    module(StdlibText().train_windows[:16, :-1].long())


def exported(
    module: Any, folder: Path, bits: int | str, group_size: int, activations: str = "unchanged"
) -> tuple[float, int, float]:
    """Return loss and bytes of an export, and the largest difference of its logits to the fake-quantized module's."""
    import torch

    import lightning_solo as solo
    from lightning_solo.nn.fake_quantization import Rounding, chosen_layers, round_weights
    from lightning_solo.nn.packed_weights import load

    options: dict[str, Any] = {"calibrate": calibrate} if "static" in activations else {}
    solo.export_quantized(module, folder / "few", bits, group_size, activations, overwrite=True, **options)
    loaded = load(byte_gpt(), folder / "few")
    fake, rounding = copy.deepcopy(module).eval(), Rounding(bits, group_size)
    round_weights(chosen_layers(fake, rounding), rounding)
    ids = torch.arange(128)[None]
    with torch.no_grad():
        difference = float((fake(ids) - loaded(ids)).abs().max())
    return held_out(loaded), (folder / "few" / "model.safetensors").stat().st_size, difference


def step_times(steps: int = 12, rounds: int = 5) -> list[dict[str, Any]]:
    """Return the median seconds of a step, of runs that take turns."""
    import lightning_solo as solo

    ways: dict[str, Callable[[], list[Any]]] = {
        "fp32": list,
        "4 bits, groups of 32": lambda: [solo.Quantization(4, 32)],
        "2 bits, groups of 32": lambda: [solo.Quantization(2, 32)],
        "4 bits, groups of 32, inputs in 8 bits": lambda: [solo.Quantization(4, 32, "int8")],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, callbacks in ways.items():
            watch = StepTimes()
            train(base(), steps, [*callbacks(), watch])
            times[name] += watch.seconds[2:]
    plain = statistics.median(times["fp32"])
    return [
        {
            "way": name,
            "seconds": round(statistics.median(each), 4),
            "of fp32": round(statistics.median(each) / plain, 2),
        }
        for name, each in times.items()
    ]


def inference(folder: Path) -> list[dict[str, Any]]:
    """Return how many times as fast as fp32 exported layers are, best of 60 turns."""
    import torch
    from torch import nn

    import lightning_solo as solo
    from lightning_solo.nn.packed_weights import load

    torch.manual_seed(0)
    ways: dict[str, Any] = {"fp32": nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(LAYERS))).eval()}
    size = sum(p.nbytes for p in ways["fp32"].parameters())
    sizes = {"fp32": size}
    for name, options in {
        "8 bits by rows, inputs in 8 bits": (8, 0, "int8"),
        "8 bits by rows, inputs in 8 bits with fixed scales": (8, 0, "int8_static"),
        "8 bits by rows": (8, 0, "unchanged"),
        "4 bits in groups of 32": (4, 32, "unchanged"),
    }.items():
        batches: dict[str, Any] = {}
        if "int8_static" in options:
            batches["calibrate"] = lambda module: module(torch.randn(256, WIDE))
        solo.export_quantized(ways["fp32"], folder / "wide", *options, layers="*", overwrite=True, **batches)
        sizes[name] = (folder / "wide" / "model.safetensors").stat().st_size
        ways[name] = load(copy.deepcopy(ways["fp32"]), folder / "wide")
    rows = [{"way": name, "bytes": sizes[name]} for name in ways]
    for batch, repeats in ((1, 20), (64, 5)):
        x, least = torch.randn(batch, WIDE), dict.fromkeys(ways, float("inf"))
        with torch.inference_mode():
            expected = ways["fp32"](x)
            for _ in range(TURNS):
                for name, layers in ways.items():
                    began = time.perf_counter()
                    for _ in range(repeats):
                        layers(x)
                    least[name] = min(least[name], (time.perf_counter() - began) / repeats)
            for row in rows:
                output = ways[str(row["way"])](x)
                row[f"batch {batch}"] = round(least["fp32"] / least[str(row["way"])], 2)
                row["error"] = round(float((output - expected).norm() / expected.norm()), 4)
    return rows


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
    "averaging": averaging,
    "control": lambda: {"base": held_out(base()), "control": held_out(more())},
    "distillation": distillation,
    "distillation_steps": distillation_steps,
    "low_rank": low_rank,
    "pruning": pruning,
    "quantization": quantization,
    "quantization_times": quantization_times,
    "snapshots": snapshots,
}


if __name__ == "__main__":
    main()
