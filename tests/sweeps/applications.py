"""A Hydra application of somebody else's, with jobs that end in every way, and how it is swept."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_solo.sweeps.application import Application
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.jobs import Job, Settings
from lightning_solo.sweeps.results import Row, read
from lightning_solo.sweeps.sweep import Sweep

ROOT = Path(__file__).parents[2]
TRAIN = """
import os, signal, sys, time
from dataclasses import dataclass
import hydra
from hydra.core.config_store import ConfigStore

@dataclass
class Config:
    n: int = 0
    kind: str = "fine"
    sleep: float = 0.0

class Model:
    pass

def do(cfg):
    with open("starts.txt", "a") as file:
        file.write(f"{cfg.n}\\n")
    print(f"job {cfg.n} of {__name__}")
    time.sleep(cfg.sleep)
    if cfg.kind == "raise":
        raise ValueError("bad luck")
    if cfg.kind == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if cfg.kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if cfg.kind == "exit_3":
        sys.exit(3)
    if cfg.kind == "exit_0":
        os._exit(0)
    if cfg.kind == "hang":
        time.sleep(1000)
    if cfg.kind == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    if cfg.kind == "memory":
        raise MemoryError("no room")
    if cfg.kind == "cuda":
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if cfg.kind == "loud":
        for _ in range(300):
            print("x" * 10**5)
    if cfg.kind == "object":
        return Model()
    if cfg.kind == "once" and not os.path.exists(f"tried-{cfg.n}"):
        open(f"tried-{cfg.n}", "w").close()
        raise ValueError("the first time")
    return cfg.n * 1.5

@hydra.main(config_path=None, config_name="config", version_base="1.3")
def train(cfg):
    return do(cfg)

ConfigStore.instance().store(name="config", node=Config)
if __name__ == "__main__":
    train()
"""

PLAIN = """
import os

def note(asked):
    folder, n = asked
    with open(os.path.join(folder, "begun.txt"), "a") as file:
        file.write(f"{n}\\n")
    return n
"""


def plain_jobs(folder: Path, count: int) -> list[Job]:
    """Return jobs of a sweep without Hydra, each of which notes that it began, and returns its number."""
    (folder / "noting.py").write_text(PLAIN)
    return [Job(n, (), folder / str(n), "hash", partial(pickle.dumps, (str(folder), n))) for n in range(count)]


def plain_sweep(folder: Path, tell: Callable[[str, int | None, str], None] = lambda *_: None, **settings: Any) -> Sweep:
    """Return a sweep of them in this process."""
    application = Application("noting", None, "note", 0, (str(folder), *sys.path), ("noting",))
    return Sweep(SweepFolder(folder), application, Settings(**settings), tell=tell)


def begun(folder: Path) -> list[int]:
    """Return the numbers of the jobs that began, each as often as it did."""
    return sorted(map(int, (folder / "begun.txt").read_text().split()))


THREAD = "import threading\nthreading.Thread(target=time.sleep, args=(5,), daemon=True).start()"
"""Code that starts a thread, which can't be forked."""


def training(end: str = "", before: str = "") -> str:
    """Return the application with another end of `do`, and with code before its class `Model`."""
    script = TRAIN.replace("return cfg.n * 1.5", end.strip()) if end else TRAIN
    return script.replace("class Model:", f"{before}\n\nclass Model:") if before else script


def command(*overrides: str, launcher: str = "solo") -> list[str]:
    """Return the command that sweeps `train.py`."""
    return [sys.executable, "train.py", "-m", f"hydra/launcher={launcher}", *overrides]


def environment(threads: int | None = 1) -> dict[str, str]:
    """Return an environment in which this checkout is found; torch uses ``threads`` cores, None for all."""
    one = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return {**os.environ, "PYTHONPATH": str(ROOT), **one, "COLUMNS": "200"}


def run(
    folder: Path, command: Sequence[str], *, code: int = 0, threads: int | None = 1, given: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command with the standard input ``given``, and check its exit code."""
    streams: dict[str, Any] = {"input": given, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=folder, env=environment(threads), timeout=500, check=False, **streams)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def sweep(
    folder: Path, *overrides: str, code: int = 0, script: str = TRAIN, threads: int | None = 1
) -> subprocess.CompletedProcess[str]:
    """Write the application, sweep it, and check the exit code."""
    (folder / "train.py").write_text(script)
    return run(folder, command(*overrides), code=code, threads=threads)


def sweep_folder(folder: Path) -> Path:
    """Return the folder of the only sweep."""
    (found,) = (folder / "multirun").iterdir()
    return found


def rows_of(folder: Path) -> list[Row]:
    """Return the rows of the only sweep."""
    return read(sweep_folder(folder) / "results.jsonl")


def returned(folder: Path) -> list[Any]:
    """Return the values of the jobs of the only sweep."""
    return [row.returned for row in rows_of(folder)]


def starts(folder: Path) -> dict[int, int]:
    """Return how often each job was started: n -> times."""
    try:
        return dict(Counter(map(int, (folder / "starts.txt").read_text().split())))
    except FileNotFoundError:
        return {}


def popen(folder: Path, *overrides: str, script: str = TRAIN, **arguments: Any) -> subprocess.Popen[str]:
    """Start a sweep and return at once."""
    (folder / "train.py").write_text(script)
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command(*overrides), cwd=folder, env=environment(), text=True, **streams | arguments)
