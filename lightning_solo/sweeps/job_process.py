"""A job's own process: calls the task function and writes its result."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_solo.atomic_files import write_json
from lightning_solo.secret_values import print_error, without_secrets
from lightning_solo.sweeps.files import JobFiles
from lightning_solo.sweeps.jobs import Settings

VARIABLE = "LIGHTNING_SOLO_JOB"
"""Environment variable of a job: the folder of its `JobFiles`, for the observer that joins its Trainer."""
RESUMES = "LIGHTNING_SOLO_RESUMES"
"""Environment variable of a job that resumes: its folder is as the earlier, unfinished attempt left it."""
ENTRY_POINTS = str(Path(__file__).with_name("entry_points"))
"""Folder of package metadata by which Lightning adds the observer to every Trainer."""
BEFORE_S = 0.3
"""Seconds before its time limit at which a job prints its stack."""


@dataclass(frozen=True)
class JobRequest:
    """An attempt at a job, as sent to the process that starts it and to the job's process."""

    number: int
    attempt: int
    resumes: bool
    folder: str
    argument: bytes
    settings: Settings
    variables: Mapping[str, str] = field(default_factory=dict)  # environment variables of the job alone
    devices: int = 1  # number of devices, and of the job's processes


def run(task: Callable[[Any], Any], request: JobRequest, files: JobFiles, rank: int = 0) -> int:
    """Run the task function, write its result, and return the exit status of the process.

    The result of a job on several devices is that of rank 0, or the first error.
    """
    from hydra.errors import CompactHydraException

    faulthandler.enable(2)  # print the stack of a job that crashes or is about to be ended
    if request.settings.timeout_s is not None:
        faulthandler.dump_traceback_later(max(request.settings.timeout_s - BEFORE_S, BEFORE_S), file=2)
    os.environ[VARIABLE] = str(files.path)
    if rank == 0:
        sys.path.append(ENTRY_POINTS)
    if request.resumes:
        os.environ[RESUMES] = "1"
    result: dict[str, Any] = {"attempt": request.attempt}
    try:
        result |= returned(task(pickle.loads(request.argument)))
    except BaseException as error:  # SystemExit and Ctrl-C are results too
        with contextlib.suppress(OSError):  # the output may be on a full disk
            if type(error) is CompactHydraException:  # a refusal with a complete message
                print(without_secrets(str(error)), file=sys.stderr)
            elif not isinstance(error, SystemExit):
                print_error(type(error), error, error.__traceback__)
        result["error"] = {"type": type(error).__name__, "message": _message(error)}
    faulthandler.cancel_dump_traceback_later()
    if request.devices > 1:
        if "error" in (files.result_of(request.attempt) or {}):  # of another rank
            return int("error" in result)
        if rank != 0 and "error" not in result:
            return 0
    try:
        write_json(files.result, result | peaks())
    except OSError as error:  # a full disk, which may have room for a shorter result
        result = {"attempt": request.attempt, "error": {"type": "OSError", "message": f"its result: {error}"}}
        write_json(files.result, result)
    return int("error" in result)


def _message(error: BaseException) -> str:
    try:
        return str(without_secrets(str(error)))[:2000]
    except Exception:
        return "(its message can't be shown)"


def returned(value: object) -> dict[str, Any]:
    """Return a mapping with the task function's value if it is plain (numbers, strings, containers of them).

    >>> returned(0.5), returned({1: (2,)}), returned(print)
    ({'returned': 0.5}, {'returned': {'1': [2]}}, {'not_kept': 'builtin_function_or_method'})
    """
    try:
        return {"returned": _plain(value)}
    except Exception:  # a user's object may raise anything
        return {"not_kept": type(value).__name__}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if getattr(value, "ndim", None) == 0:  # a number of torch or numpy
        return _plain(value.item())
    raise TypeError(type(value).__name__)


def peaks() -> dict[str, Any]:
    """Return the device's name and this process's peak memory on it, in bytes, if it used one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    try:
        peak = max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
        return {"device": torch.cuda.get_device_name(), "peak_device_bytes": peak}
    except RuntimeError:  # the error that ended the job may have broken CUDA in this process
        return {}
