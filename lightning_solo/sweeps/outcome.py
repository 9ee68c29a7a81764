"""The status of a job, from the exit of its process and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_solo.out_of_memory import DEVICE_MEMORY, HOST_MEMORY
from lightning_solo.processes import ending

FINISHED = "finished"
INTERRUPTED = "interrupted"
OUT_OF_DEVICE_MEMORY = "out of device memory"
STATUSES = {
    FINISHED: "the task function returned",
    "failed": "it raised an exception",
    OUT_OF_DEVICE_MEMORY: "CUDA had no memory left",
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


@dataclass(frozen=True)
class End:
    """The end of a job's process."""

    exit_code: int  # negative for a signal
    seconds: float | None = None
    peak_host_bytes: int | None = None  # resident memory of its largest process
    oom_kills: int = 0  # processes that the kernel killed for lack of memory while it ran
    timeout_s: float | None = None  # the time limit at which it was ended, if any
    interrupted: bool = False
    not_started: str = ""  # why it could not be started; empty if it was


def outcome(end: End, result: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return the status and a line of detail, from the end of the process and the result that it wrote, if any.

    >>> outcome(End(-11), None), outcome(End(0), None), outcome(End(-9, oom_kills=1), None)[0]
    (('crashed', 'SIGSEGV'), ('exited', 'with exit status 0, before the task function returned'), 'out of host memory')
    """
    how = ending(end.exit_code)
    if end.not_started:
        return "failed", f"could not be started: {end.not_started}"
    if result is not None and "error" not in result:
        return FINISHED, f"and then ended with {how}" if end.exit_code else ""
    if end.timeout_s is not None:
        by = f", ended by {how}" if end.exit_code < 0 else ""
        return "timed out", f"after {end.timeout_s:g} s (hydra.launcher.timeout_s){by}"
    if end.interrupted:
        return INTERRUPTED, ""
    if result is not None:
        return _of_error(result["error"])
    if end.exit_code >= 0:
        return "exited", f"with {how}, before the task function returned"
    if how == "SIGKILL" and end.oom_kills:
        return "out of host memory", "killed by the kernel"
    if how in OWN_SIGNALS:
        return "crashed", how
    return "killed", f"by {how}{', as the kernel does for lack of memory' if how == 'SIGKILL' else ''}"


def _of_error(error: Mapping[str, Any]) -> tuple[str, str]:
    kind, text = str(error["type"]), str(error["message"])
    line = f"{kind}: {text.strip().splitlines()[0] if text.strip() else ''}".removesuffix(": ")
    if kind == "CompactHydraException":  # a refusal with a complete message
        return "failed", " ".join(text.split())
    if kind == "OutOfMemoryError" or any(words in text for words in DEVICE_MEMORY):
        return OUT_OF_DEVICE_MEMORY, line
    if kind == "MemoryError" or any(words in text for words in HOST_MEMORY):
        return "out of host memory", line
    if kind == "KeyboardInterrupt":
        return INTERRUPTED, ""
    if kind == "SystemExit":
        return "exited", f"with exit status {text or 0}, before the task function returned"
    return "failed", line
