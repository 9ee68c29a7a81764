"""Processes: this one's environment, fresh interpreters, ending with a parent, and whether one runs."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""How torch looks for a CUDA device; with it the search doesn't start CUDA, which can't be forked."""
SET_BY_IMPORTS = (NVML,)  # by Lightning's and DeepSpeed's


@contextmanager
def environment(variables: Mapping[str, str], *, everything: bool = False) -> Iterator[None]:
    """Set environment variables, and restore them, and those that imports set, at the end; or ``everything``."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in {*os.environ, *before} if everything else {*variables, *SET_BY_IMPORTS}:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


def end_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when its parent ends, for whatever reason; on Linux only.

    Args:
        parent: the parent's id; this process exits at once if that has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def interpreter(function: str, *arguments: str) -> list[str]:
    """Return the command of a fresh interpreter with the same `sys.path`, which calls a ``"module:function"``."""
    module, _, name = function.partition(":")
    # the folders first: this package may be found by one of them
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import {name}; {name}(*sys.argv[1:])"
    return [sys.executable, "-c", code, *arguments]


def is_running(pid: int | str) -> bool:
    """Return whether a process runs; one that has ended, and that its parent hasn't waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
