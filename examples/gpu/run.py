"""Measures a GPU part by part: what `make gpu` runs. Needs torch, Lightning and Hydra; no network, no build.

a  ceilings      versions, and what this machine can reach: copies, products, pinning, AdamW on its CPU
b  fused_step    the compact step's kernel: equal to torch's operators, and its time against the bandwidth
c  marked_tests  the tests of CUDA code, most of which CI runs on a simulated device
d  presets       a step of models of 1 and 8 billion parameters under most presets: time, launches, gaps, planned peak
e  host_states   8 billion parameters with states on the host: bytes per second by number and size of staging buffers
f  plans         `plan --calibrate`, then four presets planned and measured
g  ladder        README's ladder, a rung at a time
h  survival      a run resumed to the bit, what the guard adds to a step, safe and asynchronous saves
i  compression   pruning, quantization, distillation, averages, small optimizers, in place: time and peak of a step
j  streaming     activations, weights and states on the host, beside torch's save_on_cpu

Each part is a process under its own limit of time, writes each row of its result at once, and a part that fails doesn't
keep the next from running. Exit status 1 if one failed.

    python examples/gpu/run.py                        # all parts, at most an hour
    python examples/gpu/run.py --parts bc --results /tmp/results
    python examples/gpu/run.py --small                # the same code on small sizes, to see that it runs
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Part(NamedTuple):
    """A script of this folder, and the seconds that it may take."""

    name: str
    limit_s: int


PARTS = {
    "a": Part("ceilings", 180),
    "b": Part("fused_step", 300),
    "c": Part("marked_tests", 480),
    "d": Part("presets", 900),
    "e": Part("host_states", 300),
    "f": Part("plans", 180),
    "g": Part("ladder", 420),
    "h": Part("survival", 300),
    "i": Part("compression", 300),
    "j": Part("streaming", 240),
}


def main() -> int:
    """Run the parts that are asked for, and print how each ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="".join(PARTS), help="some of abcdefghij (all)")
    parser.add_argument("--results", type=Path, help="where files go (examples/results/gpu; runs/gpu with --small)")
    parser.add_argument("--small", action="store_true", help="small sizes")
    parser.add_argument("--through", default="", help="a module through which each script is run, as a debugger is")
    given = parser.parse_args()
    unknown = sorted(set(given.parts) - set(PARTS))
    if unknown or not given.parts:
        parser.error(f"--parts {given.parts}: write some of {''.join(PARTS)}")
    given.results = given.results or ROOT / ("runs/gpu" if given.small else "examples/results/gpu")
    given.results.mkdir(parents=True, exist_ok=True)
    ends = {}
    for letter in dict.fromkeys(given.parts):
        ends[letter] = run(letter, given.results.resolve(), small=given.small, through=given.through)
    for letter, end in ends.items():
        print(f"{letter}  {PARTS[letter].name:<12}  {end}")
    return int(any(not end.startswith("done") for end in ends.values()))


def run(letter: str, results: Path, *, small: bool, through: str) -> str:
    """Run one part and return how it ended; what it prints goes to the terminal and to ``log.txt``."""
    part = PARTS[letter]
    script = HERE / f"{part.name}.py"
    command = [sys.executable, *(["-m", through] if through else []), str(script)]
    folders = [str(ROOT), str(ROOT / "examples"), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "PYTHONUNBUFFERED": "1",
        "GPU_RESULTS": str(results),
        "GPU_SMALL": "1" if small else "",
        "GPU_THROUGH": through,
    }
    print(f"--- {letter} {part.name}, at most {part.limit_s} s", flush=True)
    begun = time.monotonic()
    with (
        open(results / "log.txt", "a", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        log.write(f"--- {letter} {part.name}\n")
        # the process may hang without a word, so it is not this loop that looks at the time
        stopper = subprocess.Popen(
            [sys.executable, "-c", STOPPER, str(process.pid), str(part.limit_s)], stdin=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                log.write(line)
                log.flush()
            status = process.wait()
        finally:
            _kill(process.pid)  # what it may have started and left
            stopper.kill()
            stopper.wait()
    seconds = time.monotonic() - begun
    if status == 0:
        return f"done in {seconds:.0f} s"
    if seconds >= part.limit_s:
        return f"stopped after {part.limit_s} s; what it had measured is in {part.name}.json"
    return f"failed with status {status} after {seconds:.0f} s"


STOPPER = """
import os, signal, sys, time
time.sleep(float(sys.argv[2]))
os.killpg(int(sys.argv[1]), signal.SIGKILL)
"""
"""A process that ends another's group when its time is over."""


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
