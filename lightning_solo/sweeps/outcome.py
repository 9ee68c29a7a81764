"""The status of a job, from the exit of its process and its result."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from lightning_solo.out_of_memory import DEVICE_MEMORY, HOST_MEMORY
from lightning_solo.processes import ending

FINISHED = "finished"
INTERRUPTED = "interrupted"
STATUSES = {
    FINISHED: "the task function returned",
    "failed": "it raised an exception",
    "out of device memory": "CUDA had no memory left",
    "out of host memory": "the kernel killed it for lack of memory, or Python had none left",
    "timed out": "it took longer than hydra.launcher.timeout_s",
    "crashed": "it crashed, for example by a segmentation fault",
    "killed": "another process ended it by a signal",
    "exited": "it left by sys.exit or os._exit before the task function returned",
    INTERRUPTED: "Ctrl-C; the same command runs it again",
}
BEGUN = "begun, no result yet"
NOT_STARTED = "not started"
OWN_SIGNALS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGSYS", "SIGTRAP")


def outcome(
    exit_code: int,
    result: Mapping[str, Any] | None,
    *,
    timed_out: bool = False,
    interrupted: bool = False,
    oom_kills: int = 0,
) -> tuple[str, str]:
    """Return the status and a line of detail.

    >>> outcome(-11, None), outcome(0, None), outcome(-9, None, oom_kills=1)[0]
    (('crashed', 'SIGSEGV'), ('exited', 'with exit status 0, before the task function returned'), 'out of host memory')
    """
    if result is not None and "error" not in result:
        return FINISHED, f"and then ended with {ending(exit_code)}" if exit_code else ""
    if timed_out:
        return "timed out", f"ended by {ending(exit_code)}" if exit_code < 0 else ""
    if interrupted:
        return INTERRUPTED, ""
    if result is not None:
        return _of_error(result["error"])
    if exit_code >= 0:
        return "exited", f"with {ending(exit_code)}, before the task function returned"
    name = ending(exit_code)
    if exit_code == -signal.SIGKILL and oom_kills:
        return "out of host memory", "killed by the kernel"
    if name in OWN_SIGNALS:
        return "crashed", name
    return "killed", f"by {name}{', as the kernel does for lack of memory' if name == 'SIGKILL' else ''}"


def _of_error(error: Mapping[str, Any]) -> tuple[str, str]:
    kind, text = str(error["type"]), str(error["message"])
    line = f"{kind}: {text.strip().splitlines()[0] if text.strip() else ''}".removesuffix(": ")
    if kind == "CompactHydraException":  # a refusal with a complete message
        return "failed", " ".join(text.split())
    if kind == "OutOfMemoryError" or any(words in text for words in DEVICE_MEMORY):
        return "out of device memory", line
    if kind == "MemoryError" or any(words in text for words in HOST_MEMORY):
        return "out of host memory", line
    if kind == "KeyboardInterrupt":
        return INTERRUPTED, ""
    if kind == "SystemExit":
        return "exited", f"with exit status {text or 0}, before the task function returned"
    return "failed", line
