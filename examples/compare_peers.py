"""Trains one model by lightning-solo and by its peers, side by side: the same weights, batches and clipping.

Each row of ROWS is a script in examples/peers, as a user of that peer would write it, run in processes of its own:

loss    the mean loss of the last ten of 100 steps, and the peak resident set of a larger model's steps
bytes   peak of the bytes that torch's allocator has handed out, counted one by one, in two steps of that model
fits    the largest batch, and the deepest model, whose counted bytes stay within a budget
time    processor seconds of a step in one thread; a preset and the peers below it take turns, a step each

A peer that the environment lacks is installed into a folder of its own, without dependencies that would replace
torch; one that isn't on the package index, refuses this torch or needs a GPU is a row with that reason.

    python examples/compare_peers.py                              # everything
    python examples/compare_peers.py --parts time --rounds 7      # on a quiet machine
    python examples/compare_peers.py --parts bytes --rows torchao
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import truediv
from pathlib import Path
from typing import Any

from this_machine import machine, versions

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "peers"
FOLDERS = HERE.parent / ".venv-peers"
PARTS = ("loss", "bytes", "fits", "time")
SMALL = {"WIDTH": 256, "DEPTH": 4, "BATCH": 4, "CONTEXT": 128}
LARGE = {"WIDTH": 512, "DEPTH": 4, "BATCH": 8, "CONTEXT": 128}
FITS = {"WIDTH": 256, "DEPTH": 4, "BATCH": 1, "CONTEXT": 128, "STEPS": 2}
BUDGET = 128 * 2**20
WARM_UP = 4

FP32, RECOMPUTED = "AdamW in 32 bits", "AdamW in 32 bits, blocks recomputed"
LOW, OTHER = "weights in bf16, smaller states", "systems of their own"


@dataclass(frozen=True)
class Row:
    """A script with its options; ``packages`` are those that the tests' environment lacks."""

    name: str
    script: str
    work: str
    options: Mapping[str, Any] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    gpu: bool = False

    @property
    def ours(self) -> bool:
        return self.script == "lightning_solo_trainer"


COMPACT = "callback.compact_states."


def ours(name: str, work: str, preset: str, *overrides: str) -> Row:
    """Return a row of lightning-solo."""
    return Row(
        f"lightning-solo, {name}", "lightning_solo_trainer", work, {"preset": preset, "overrides": list(overrides)}
    )


def deepspeed(**bf16: bool) -> dict[str, Any]:
    """Return DeepSpeed's configuration of ZeRO-2 with states on the host, and buffers that suit a small model."""
    buckets = {"reduce_bucket_size": 2**20, "allgather_bucket_size": 2**20}
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, **buckets}
    return {"bf16": bf16, "zero_optimization": zero, "optimizer": {}}


ROWS = (
    ours("`baseline`", FP32, "baseline"),
    Row("Lightning", "lightning_trainer", FP32),
    ours("`baseline` with `early_zero_grad`", FP32, "baseline", "+callback=early_zero_grad"),
    Row("PyTorch", "pytorch_loop", FP32),
    Row("transformers' Trainer", "transformers_trainer", FP32),
    Row("DeepSpeed", "deepspeed_engine", FP32),
    Row("Composer", "composer_trainer", FP32, packages=("mosaicml",)),
    ours(
        "`baseline` with `activation_checkpointing` and `early_zero_grad`",
        RECOMPUTED,
        "baseline",
        "+callback=[early_zero_grad,activation_checkpointing]",
    ),
    Row("PyTorch, `gradient_checkpointing_enable`", "pytorch_loop", RECOMPUTED, {"checkpointing": True}),
    Row(
        "transformers' Trainer, `gradient_checkpointing`",
        "transformers_trainer",
        RECOMPUTED,
        {"gradient_checkpointing": True},
    ),
    ours("`split_weights` with `early_zero_grad`", LOW, "split_weights", "+callback=early_zero_grad"),
    Row("DeepSpeed, ZeRO-2 with offload", "deepspeed_engine", LOW, deepspeed(enabled=True)),
    ours("`compact`", LOW, "compact"),
    Row("FlashOptim, `FlashAdamW`", "flashoptim_loop", LOW, packages=("flashoptim", "triton==3.9.0")),
    ours("`compact` with `master_bits=16-stochastic`", LOW, "compact", COMPACT + "master_bits=16-stochastic"),
    Row("PyTorch, states in bf16", "pytorch_loop", LOW, {"dtype": "bfloat16"}),
    Row("bitsandbytes, `AdamW8bit`", "bitsandbytes_loop", LOW),
    Row(
        "DeepSpeed, ZeRO-2 with offload, states in bf16",
        "deepspeed_engine",
        LOW,
        deepspeed(enabled=True, bf16_master_weights_and_grads=True, bf16_optimizer_states=True),
    ),
    ours("`compact` with `back_end=torchao_8bit`", LOW, "compact", COMPACT + "back_end=torchao_8bit"),
    Row("torchao, `AdamW8bit`", "torchao_loop", LOW),
    ours(
        "`compact` with `master_bits=16-stochastic` and `moment_bits=4`",
        LOW,
        "compact",
        COMPACT + "master_bits=16-stochastic",
        COMPACT + "moment_bits=4",
    ),
    ours("`compact` with `back_end=torchao_4bit`", LOW, "compact", COMPACT + "back_end=torchao_4bit"),
    Row("torchao, `AdamW4bit`", "torchao_loop", LOW, {"optimizer": "AdamW4bit"}),
    Row("offload_adam", "offload_adam_loop", LOW, packages=("offload-adam",), gpu=True),
    Row("RoundPipe", "roundpipe_loop", OTHER, packages=("roundpipe", "beartype"), gpu=True),
    Row("LLMQ", "", OTHER, packages=("pyllmq",), gpu=True),
    Row("Unsloth", "", OTHER, packages=("unsloth",), gpu=True),
)


def folder_of(row: Row) -> Path | None:
    """Return where a peer's own packages are."""
    return FOLDERS / row.packages[0] if row.packages else None


def reason_against(row: Row) -> str | None:
    """Install what a peer needs; return why it can't run here, None if it can."""
    import torch

    folder = folder_of(row)
    if folder is not None and not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *row.packages]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if "No matching distribution found" in done.stderr:
            return f"not on the package index for Python {sys.version_info.major}.{sys.version_info.minor}"
        if done.returncode:
            return f"pip: {done.stderr.strip()[-200:]}"
    if folder is not None and (unmet := unmet_pins(folder)):
        return unmet
    if row.gpu and not torch.cuda.is_available():
        return "runs on a GPU only"
    return None if row.script else "trains models of its own only"


def unmet_pins(folder: Path) -> str:
    """Return which installed packages the first package of a folder refuses, among torch and transformers."""
    from packaging.requirements import Requirement

    package = next(d for d in importlib.metadata.distributions(path=[str(folder)]) if d.name.lower() == folder.name)
    for line in package.requires or ():
        needed = Requirement(line)
        if needed.name in ("torch", "transformers") and (
            needed.marker is None or needed.marker.evaluate({"extra": ""})
        ):
            there = importlib.metadata.version(needed.name)
            if unmet := [str(one) for one in needed.specifier if not one.contains(there.split("+")[0])]:
                return f"{package.name} {package.version} requires {needed.name}{','.join(unmet)}; here is {there}"
    return ""


def changed_lines(row: Row) -> int:
    """Return the lines that differ from plain Lightning's script: added, changed or removed, and a line an option."""
    plain, script = (code_lines(SCRIPTS / f"{name}.py") for name in ("lightning_trainer", row.script))
    parts = difflib.SequenceMatcher(a=plain, b=script, autojunk=False).get_opcodes()
    differ = sum(max(end - start, stop - begin) for tag, start, end, begin, stop in parts if tag != "equal")
    return differ + (0 if row.ours else len(row.options))


def code_lines(path: Path) -> list[str]:
    """Return a script's lines of code, without documentation and the header of `main`, which only takes options."""
    text = path.read_text(encoding="utf-8")
    documentation = ast.parse(text).body[0].end_lineno or 0
    lines = [line.rstrip() for line in text.splitlines()[documentation:]]
    return [line for line in lines if line.strip() and not line.startswith("def main(")]


# --- in a process of its own


def observed(
    script: str, options: dict[str, Any], sizes: dict[str, int], turns: Sequence[int] = ()
) -> dict[str, list[float]]:
    """Run a script; return each step's loss, and its wall and processor seconds from one forward to the next.

    With ``turns``, the ends of two pipes, each step first waits for a byte.
    """
    import torch

    project = importlib.import_module("project")
    vars(project).update(sizes)
    losses: list[Any] = []
    clocks: list[tuple[float, ...]] = []
    build = getattr(project, "build", project.model)

    def started(*_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ended = time.perf_counter(), time.process_time()
        if turns:
            os.write(turns[1], b".")
            os.read(turns[0], 1)
        clocks.append((*ended, time.perf_counter(), time.process_time()))

    def seen(loss: Any) -> None:
        started()
        losses.append(loss.detach().float().cpu())

    def model() -> Any:
        module = build()
        module.register_forward_pre_hook(started)
        module.register_forward_hook(lambda module, args, output: losses.append(output.loss.detach().float().cpu()))
        return module

    vars(project).update(build=build, model=model, seen=seen)
    importlib.import_module(script).main(**options)
    if turns:
        os.close(turns[1])
    return {
        "losses": [float(loss) for loss in losses],
        "wall": [after[0] - before[2] for before, after in pairwise(clocks)],
        "processor": [after[1] - before[3] for before, after in pairwise(clocks)],
    }


def allocated_peak(run: Callable[[], Any]) -> int:
    """Return the peak of the bytes that torch's allocator hands out during a run, those inside kernels included."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    live: dict[int, int] = {}
    now = peak = 0
    for _, address, size in sorted(allocations(profiler.profiler.kineto_results.experimental_event_tree())):
        if size > 0:
            live[address] = size
        now += size if size > 0 else -live.pop(address, 0)  # what is older isn't counted
        peak = max(peak, now)
    return peak


def allocations(events: list[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield (time, address, bytes) of each allocation; bytes are negative where it is freed."""
    while events:
        event = events.pop()
        events += event.children
        if event.name == "[memory]":
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size


def largest(peak: Callable[[int], int], budget: int) -> int:
    """Return the largest number whose peak is within a budget; 0 if that of 1 isn't. Peaks grow about linearly.

    >>> largest(lambda n: 10 + 7 * n, 100)
    12
    """
    low, high, at = (0, 0), (1 << 20, 0), 1
    while True:
        found = peak(at)
        if found <= budget:
            slope = max(1, (found - low[1]) // (at - low[0])) if low[0] else found // at
            low = (at, found)
            guess = at + max(1, (budget - found) // slope)
        else:
            high = (at, found)
            slope = max(1, (found - low[1]) // (at - low[0]))
            guess = at - max(1, -(-(found - budget) // slope))
        if high[0] - low[0] == 1:
            return low[0]
        at = min(max(guess, low[0] + 1), high[0] - 1, 2 * at)  # no further, where small ones take the same


def measured(
    part: str, script: str, options: dict[str, Any], sizes: dict[str, int], turns: Sequence[int]
) -> dict[str, Any]:
    """Return what one process measures."""
    import torch

    from lightning_solo.memory.reading import read

    if not torch.cuda.is_available():
        torch.set_num_threads(1)

    def peak(**changed: int) -> int:
        return allocated_peak(lambda: observed(script, options, {**sizes, **changed}))

    if part == "bytes":
        return {"peak_bytes": peak()}
    if part == "fits":
        batch, depth = largest(lambda n: peak(BATCH=n), BUDGET), largest(lambda n: peak(DEPTH=n), BUDGET)
        project = importlib.import_module("project")
        vars(project).update(sizes, DEPTH=depth)
        parameters = sum(p.numel() for p in project.build().parameters()) if depth else 0
        return {"batch": batch, "depth": depth, "parameters": parameters}
    found = observed(script, options, sizes, turns)
    if part == "loss":
        observed(script, options, {**LARGE, "STEPS": 2})
    reading = read(torch.device(importlib.import_module("project").DEVICE))
    return found | {"peak_resident": reading.peak_resident, "peak_reserved": reading.peak_reserved}


def begun(part: str, row: Row, sizes: dict[str, int], turns: Sequence[int] = ()) -> subprocess.Popen[str]:
    """Start a process that measures."""
    request = {"part": part, "script": row.script, "options": row.options, "sizes": sizes, "turns": turns}
    folder = folder_of(row)
    path = [str(SCRIPTS), *([str(folder)] if folder else []), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--worker", json.dumps(request)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "pass_fds": turns}
    return subprocess.Popen(command, text=True, env=environment, **pipes)


def answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a process; return what it has measured, or its error."""
    output, errors = process.communicate()
    if process.returncode:
        print(errors[-3000:], file=sys.stderr)
        ended = f"the process ended with exit status {process.returncode}"
        return {"error": next((line for line in reversed(errors.splitlines()) if "Error" in line), ended)[:300]}
    answer: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return answer


def in_turns(rows: list[Row], sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Return what a process of each row measures; they take turns, a step each, so that no two train at once."""
    with ThreadPoolExecutor(len(rows)) as threads:
        answers, turns = [], []
        for row in rows:
            (ready, tell), (hear, go) = os.pipe(), os.pipe()
            answers.append(threads.submit(answer_of, begun("run", row, sizes, (hear, tell))))
            os.close(hear)
            os.close(tell)
            turns.append((ready, go))
        there = [turn for turn in turns if os.read(turn[0], 1)]  # no byte: the process has ended
        while there:
            for ready, go in list(there):
                with suppress(BrokenPipeError):
                    os.write(go, b".")
                if not os.read(ready, 1):
                    there.remove((ready, go))
        for end in chain(*turns):
            os.close(end)
        return [answer.result() for answer in answers]


# --- the table


def measure(part: str, row: Row, entry: dict[str, Any], steps: int) -> None:
    """Measure a part of a row into its entry."""
    sizes = {"loss": {**SMALL, "STEPS": steps}, "bytes": {**LARGE, "STEPS": 2}, "fits": FITS}[part]
    found = answer_of(begun(part, row, sizes))
    if part == "loss" and "error" not in found:
        peaks = {name: found[name] for name in ("peak_resident", "peak_reserved") if found[name]}
        found = {"loss": round(statistics.mean(found["losses"][-10:]), 4), "first_loss": found["losses"][0], **peaks}
    entry.update(found)
    print(part, row.name, found, flush=True)


def time_rows(preset: str, rows: list[Row], entries: dict[str, dict[str, Any]], rounds: int, steps: int) -> None:
    """Time a preset and the peers below it; keep medians, and of each round the median ratio to the preset's steps."""
    found: dict[str, list[dict[str, list[float]]]] = {row.name: [] for row in rows}
    for number in range(rounds):
        order = [row for row in rows if "error" not in entries[row.name]][:: -1 if number % 2 else 1]
        for row, one in zip(order, in_turns(order, {**SMALL, "STEPS": steps}), strict=True):
            if "error" in one:
                entries[row.name]["error"] = one["error"]
                continue
            found[row.name].append({clock: one[clock][WARM_UP:] for clock in ("processor", "wall")})
            seconds = {clock: round(statistics.median(each), 5) for clock, each in found[row.name][-1].items()}
            print("time", number, row.name, seconds, flush=True)
    for name, mine in found.items():
        for clock in ("processor", "wall") if mine else ():
            medians = [statistics.median(one[clock]) for one in mine]
            entries[name][f"{clock}_s"] = round(statistics.median(medians), 5)
            entries[name].pop(f"{clock}_ratio", None)
            if name != preset and len(found.get(preset, ())) == len(mine):
                pairs = zip(mine, found[preset], strict=True)
                ratios = [statistics.median(map(truediv, one[clock], other[clock])) for one, other in pairs]
                entries[name][f"{clock}_ratio"] = [round(ratio, 3) for ratio in sorted(ratios)]
            entries[name]["rounds"] = len(mine)


def beside(rows: list[Row]) -> dict[str, list[Row]]:
    """Return for the name of each preset its row and those of the peers below it."""
    found: dict[str, list[Row]] = {}
    preset = ""
    for row in ROWS:
        preset = row.name if row.ours else preset
        if row in rows:
            found.setdefault(preset, []).append(row)
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rows", nargs="+", default=[""], help="parts of names; all rows by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="of part loss")
    parser.add_argument("--timed-steps", type=int, default=40)
    parser.add_argument("--write", type=Path, default=None)
    parser.add_argument("--worker", type=json.loads)
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(measured(**given.worker)))
        return
    import torch

    device = "gpu" if torch.cuda.is_available() else "cpu"
    path = given.write or HERE / "results" / f"peers_{device}.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    entries = {entry["name"]: entry for entry in kept}
    chosen = [row for row in ROWS if any(part.lower() in row.name.lower() for part in given.rows)]
    runnable = []
    for row in chosen:
        entry = entries.setdefault(row.name, {"name": row.name})
        entry |= {"work": row.work, "script": row.script, "options": dict(row.options), "ours": row.ours}
        for name in ("reason", "error"):
            entry.pop(name, None)
        if row.script:
            entry["lines"] = changed_lines(row)
        if reason := reason_against(row):
            entry["reason"] = reason
        else:
            runnable.append(row)

    def write() -> None:
        made = {
            "machine": machine(),
            "versions": versions() | {n: importlib.metadata.version(n) for n in ("transformers", "bitsandbytes")},
            "command": "make peers",
            "sizes": {"small": SMALL, "large": LARGE, "fits": FITS, "budget": BUDGET},
            "steps": given.steps,
            "timed_steps": given.timed_steps,
            "rows": [entries[row.name] for row in ROWS if row.name in entries],
        }
        path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")

    write()
    for part in given.parts:
        rows = [row for row in runnable if "error" not in entries[row.name]]
        if part == "time":
            for preset, group in beside(rows).items():
                time_rows(preset, group, entries, given.rounds, given.timed_steps)
                write()
        else:
            for row in rows:
                measure(part, row, entries[row.name], given.steps)
                write()


if __name__ == "__main__":
    main()
