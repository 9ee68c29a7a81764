"""The command `lightning-solo` in a process, as a user calls it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "lightning_solo.cli", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}


def call(folder: Path, *arguments: str, code: int = 0) -> str:
    """Run a command in a folder and return what it prints to both outputs."""
    done = subprocess.run(
        command(*arguments), cwd=folder, env=environment(), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def signalled(folder: Path, *arguments: str, sent: signal.Signals, ready: Callable[[], bool]) -> tuple[int, str]:
    """Send a signal to a command once ``ready`` returns True; return its exit status and its output."""
    deadline = time.monotonic() + 500
    with subprocess.Popen(
        command(*arguments),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    ) as process:
        try:
            while not ready():
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.send_signal(sent)
            output, _ = process.communicate(timeout=500)
        finally:
            process.kill()
    return process.returncode, output
