"""Measures `hydra/launcher=solo` against its targets, on an application of somebody else's.

gap        seconds from the end of one job's process to the first line of the next job's task, torch and Lightning
           imported by the application; beside it the seconds that the imports take from cold
failures   30 jobs of which 10 fail in 5 ways
kills      the command killed at 20 random moments and given again
parent     resident memory of the command over 200 jobs

    python examples/measure_sweep.py          # to examples/results/sweep_cpu.json, about five minutes
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from this_machine import machine, versions

from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.results import read

APPLICATION = """
import os, signal, sys, time
import hydra
from hydra.core.config_store import ConfigStore
{imports}

@hydra.main(config_path=None, config_name="config", version_base="1.3")
def train(cfg):
    begun = time.time()
    with open("starts.txt", "a") as file:
        file.write(f"{{cfg.n}}\\n")
    time.sleep(cfg.sleep)
    if cfg.n < 10:
        way = cfg.n % 5 if cfg.fails else None
        if way == 0: raise ValueError("bad luck")
        if way == 1: os.kill(os.getpid(), signal.SIGSEGV)
        if way == 2: os.kill(os.getpid(), signal.SIGKILL)
        if way == 3: time.sleep(1000)
        if way == 4: os._exit(0)
    return begun

ConfigStore.instance().store(name="config", node={{"n": 0, "sleep": 0.0, "fails": False}})
if __name__ == "__main__":
    train()
"""
HEAVY = "import torch, lightning.pytorch"
TARGETS = {"gap_s": 0.2, "results": 20, "failures": 10, "starts_beyond_jobs": "at most one per kill"}


def command(folder: Path, *overrides: str, imports: str = "") -> list[str]:
    """Write the application and return the command that sweeps it."""
    (folder / "train.py").write_text(APPLICATION.format(imports=imports))
    return [sys.executable, "train.py", "-m", "hydra/launcher=solo", *overrides]


def environment() -> dict[str, str]:
    """Return the environment in which this checkout is found."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


def run(folder: Path, given: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a sweep to its end."""
    return subprocess.run(given, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def the_sweep(folder: Path) -> SweepFolder:
    """Return the one sweep of a folder."""
    (found,) = (folder / "multirun").iterdir()
    return SweepFolder(found)


def gap(folder: Path) -> dict[str, Any]:
    """Measure 20 jobs in a row."""
    run(folder, command(folder, "n=range(20)", imports=HEAVY))
    sweep = the_sweep(folder)
    rows = read(sweep.results)
    begun = [row.returned for row in rows]
    ended = [(row.started or 0.0) + (row.seconds or 0.0) for row in rows]
    gaps = [b - e for b, e in zip(begun[1:], ended[:-1], strict=True)]
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", HEAVY], env=environment(), check=True)
    imports = time.perf_counter() - started
    return {"jobs": 20, "median_s": statistics.median(gaps), "longest_s": max(gaps), "imports_from_cold_s": imports}


def failures(folder: Path) -> dict[str, Any]:
    """Sweep 30 jobs of which 10 fail."""
    done = run(folder, command(folder, "n=range(30)", "fails=true", "hydra.launcher.timeout_s=2"))
    rows = read(the_sweep(folder).results)
    statuses = Counter(row.status for row in rows)
    named = sum(f"/{row.number}/output.log" in done.stderr for row in rows if row.status != "finished")
    return {"rows": len(rows), "statuses": dict(statuses), "failures_named": named, "exit_status": done.returncode}


def kills(folder: Path) -> dict[str, Any]:
    """Kill the command at 20 random moments; give it again each time."""
    moments, killed = random.Random(0), 0
    given = command(folder, "n=range(60)", "sleep=0.3")
    while killed < 20:
        process = subprocess.Popen(
            given, cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(timeout=moments.uniform(0.2, 2.5))
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
    run(folder, given)
    starts = Counter((folder / "starts.txt").read_text().split())
    sweep = the_sweep(folder)
    lines = sweep.results.read_text().splitlines()
    return {
        "kills": killed,
        "jobs": 60,
        "most_starts": max(starts.values()),
        "starts": sum(starts.values()),
        "rows": len(read(sweep.results)),
        "lines": len(lines),
    }


def parent(folder: Path) -> dict[str, Any]:
    """Watch the command's resident memory over 200 jobs."""
    process = subprocess.Popen(
        command(folder, "n=range(200)"), cwd=folder, env=environment(), stdout=subprocess.DEVNULL
    )
    seen: dict[int, int] = {}
    while process.poll() is None:
        time.sleep(0.02)
        try:
            done = len((folder / "starts.txt").read_text().split())
            resident = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            continue
        if resident:  # a process that has ended has none
            seen[done] = resident
    first = next(seen[n] for n in sorted(seen) if n >= 20)
    last = seen[max(seen)]
    return {"jobs": 200, "resident_bytes_at_20": first, "resident_bytes_at_200": last, "grown_bytes": last - first}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sweep_cpu.json")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "what": "hydra/launcher=solo against its targets",
        "hardware": machine(),
        "versions": versions(),
        "command": "python examples/measure_sweep.py",
        "targets": TARGETS,
    }
    for part in (gap, failures, kills, parent):
        with tempfile.TemporaryDirectory() as folder:
            result[part.__name__] = part(Path(folder))
        print(part.__name__, result[part.__name__], flush=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
