"""Measures `lightning-solo plan` against its targets, on a GPT of 7.05B parameters that no part of is ever there.

one_cold   seconds of the command for one preset, from a shell's prompt to the next
all_cold   seconds of the command for all presets
one_warm   seconds of `plan()` for one preset, in a program that has planned before
memory     resident memory of the command for one preset: at most in the command's process, in any that it starts, and
           in all at once, what they share counted once

    python examples/measure_planner.py        # to examples/results/planner_cpu.json, about four minutes
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from this_machine import machine, versions

from lightning_solo.planner.preset_plans import plan
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.units import GiB, KiB

RUNS = 3
DEVICE = "h200"
PRESET = "bf16"
COMMAND = ["plan", "model=byte_gpt_7b", "--device", DEVICE, "--json"]
TARGETS = {"one_cold_s": 10, "one_warm_s": 5, "all_cold_s": 60, "memory_bytes": GiB}


def started(*arguments: str) -> subprocess.Popen[bytes]:
    """Start the command of this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    given = [sys.executable, "-m", "lightning_solo.cli", *COMMAND, *arguments]
    return subprocess.Popen(given, stdout=subprocess.DEVNULL, env=environment)


def cold(*arguments: str) -> None:
    """Run the command to its end.

    Raises:
        RuntimeError: it failed; 1 is an answer, that nothing fits.
    """
    status = started(*arguments).wait()
    if status not in (0, 1):
        raise RuntimeError(f"the command ended with {status}")


def warm() -> None:
    """Plan the module of the command."""
    plan(partial(ByteGPT, width=4096, depth=35, heads=32), text(), preset=PRESET, device=DEVICE)


def text() -> torch.Tensor:
    """Return a batch: (16, 129) bytes."""
    return torch.randint(256, (16, 129), dtype=torch.uint8)


def seconds(function: Callable[[], None]) -> dict[str, Any]:
    """Return the median of some runs, and each."""
    times = []
    for _ in range(RUNS):
        begun = time.perf_counter()
        function()
        times.append(round(time.perf_counter() - begun, 2))
    return {"median_s": statistics.median(times), "runs_s": times}


def memory() -> dict[str, int]:
    """Return the most bytes that are resident in the command, in one of the others, and in all at once."""
    command, others, together = 0, 0, 0
    process = started(f"solo={PRESET}")
    while process.poll() is None:
        time.sleep(0.05)
        shares = 0
        for pid in family(process.pid):
            try:
                most = field(Path(f"/proc/{pid}/status"), "VmHWM:")
                shares += field(Path(f"/proc/{pid}/smaps_rollup"), "Pss:")
            except (OSError, StopIteration):  # it has just ended
                continue
            command, others = (max(command, most), others) if pid == process.pid else (command, max(others, most))
        together = max(together, shares)
    return {"command_bytes": command, "other_bytes": others, "together_bytes": together}


def family(pid: int) -> list[int]:
    """Return a process and all that it and they have started."""
    try:
        children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in started_by(task)]
    except OSError:
        return [pid]
    return [pid, *(one for child in children for one in family(child))]


def started_by(task: Path) -> list[str]:
    """Return the processes that a thread has started."""
    return (task / "children").read_text().split()


def field(file: Path, name: str) -> int:
    """Return a field of a file under /proc, in bytes."""
    return next(int(line.split()[1]) * KiB for line in file.read_text().splitlines() if line.startswith(name))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "planner_cpu.json")
    arguments = parser.parse_args()
    # a program that has planned before: the process that plans has imported torch and Lightning
    plan(partial(ByteGPT, width=16, depth=1), text(), preset=PRESET, device=DEVICE)
    result: dict[str, Any] = {
        "what": "lightning-solo plan against its targets",
        "hardware": machine(),
        "versions": versions(),
        "command": "python examples/measure_planner.py",
        "planned": {"command": ["lightning-solo", *COMMAND], "one": f"solo={PRESET}", "parameters": parameters()},
        "targets": TARGETS,
    }
    parts: dict[str, Callable[[], Any]] = {
        "one_warm": partial(seconds, warm),
        "one_cold": partial(seconds, partial(cold, f"solo={PRESET}")),
        "memory": memory,
        "all_cold": partial(seconds, cold),
    }
    for name, part in parts.items():
        result[name] = part()
        print(name, result[name], flush=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {arguments.out}")


def parameters() -> int:
    """Return the parameters of the module that is planned."""
    with torch.device("meta"):
        return sum(p.numel() for p in ByteGPT(width=4096, depth=35, heads=32).parameters())


if __name__ == "__main__":
    main()
