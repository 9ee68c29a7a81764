"""Check whether this process can be forked, and renew the state that a fork shares with its siblings."""

from __future__ import annotations

import os
import random
import sys
import threading
from contextlib import suppress
from pathlib import Path


def why_not_fork() -> str:
    """Return why this process can't be forked now, or an empty string if it can."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the application starts CUDA while it is imported"
    with suppress(OSError):
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if os.readlink(descriptor).startswith("/dev/nvidia"):
                    return "the application opens the CUDA device while it is imported"
    with suppress(OSError):
        # native threads too: a fork has none of them and would wait for them
        others = len(os.listdir("/proc/self/task")) - 1
        if others > openblas_threads():
            names = ", ".join(t.name for t in threading.enumerate() if t is not threading.main_thread())
            return f"the application starts threads while it is imported ({names or f'{others}, native'})"
    return ""


def openblas_threads() -> int:
    """Return the number of threads that OpenBLAS started on import, by numpy and others; these survive a fork.

    OpenBLAS ends them before a fork and starts them again; each loaded copy has its own threads.
    """
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line}
    settings = (os.environ.get(name, "") for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"))
    threads = next((int(text) for text in settings if text.isdigit() and int(text)), len(os.sched_getaffinity(0)))
    return len(loaded) * (threads - 1)


def seed_afresh() -> None:
    """Seed the random numbers of a forked process; otherwise its siblings would draw the same ones."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
