"""A job's own process: runs the task function, under Hydra or by a plain call, and writes its result."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_solo.errors import ConflictError
from lightning_solo.sweeps import entry_points
from lightning_solo.sweeps.files import JobFiles, SweepFolder, write_in_room
from lightning_solo.sweeps.jobs import Settings

VARIABLE = "LIGHTNING_SOLO_JOB"
"""Environment variable of a job: the folder of its `JobFiles`, for the observer that joins its Trainer."""
RESUMES = "LIGHTNING_SOLO_RESUMES"
"""Environment variable of a job that an earlier attempt began and did not finish: its folder is as that left it."""
BEFORE_S = 0.3
"""Seconds before its time limit at which a job prints its stack."""


@dataclass(frozen=True)
class JobRequest:
    """An attempt at a job, for the process that starts it and for its own.

    Attributes:
        resumes: whether an earlier attempt began the job.
        failures: earlier attempts that count against ``settings.retries``.
        context: from `pickled` or `plain`, for a process of the same user.
        settings: of the sweep.
    """

    number: int
    attempt: int
    resumes: bool
    failures: int
    overrides: tuple[str, ...]
    folder: str
    config_hash: str
    context: bytes
    settings: Settings


def pickled(hydra_context: Any, config: Any) -> bytes:
    """Return what Hydra needs to run a job, as bytes for a process of the same user.

    Raises:
        ConflictError: some of it can't be pickled.
    """
    from hydra.core.config_store import ConfigStore
    from hydra.core.singleton import Singleton

    instances = {kind: one for kind, one in Singleton.get_state()["instances"].items() if kind is not ConfigStore}
    try:
        return pickle.dumps((hydra_context, config, instances))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConflictError(
            f"hydra/launcher=solo: the configuration, or one of hydra.callbacks, can't be handed to another process:"
            f" {error}; define its classes at the top level of a module"
        ) from None


@dataclass(frozen=True)
class Plain:
    """The context of a job that is a call of the task function with one argument, without Hydra."""

    argument: Any


def plain(argument: Any) -> bytes:
    """Return the argument of a plain call as bytes for a process of the same user."""
    return pickle.dumps(Plain(argument))


def run(task: Callable[..., Any], request: JobRequest, files: JobFiles) -> int:
    """Run the task function, write its result, and return the exit status of the process."""
    from hydra.errors import CompactHydraException

    faulthandler.enable(2)  # a stack in the output of a job that crashes, or is about to be ended
    if request.settings.timeout_s is not None:
        faulthandler.dump_traceback_later(max(request.settings.timeout_s - BEFORE_S, BEFORE_S), file=2)
    os.environ[VARIABLE] = str(files.path)
    entry_points.find(SweepFolder(files.path.parents[2]).entry_points)
    if request.resumes:
        os.environ[RESUMES] = "1"
    result: dict[str, Any] = {"attempt": request.attempt}
    status = 1
    try:
        context = pickle.loads(request.context)
        value = task(context.argument) if isinstance(context, Plain) else under_hydra(task, *context)
        result |= returned(value)
        status = 0
    except BaseException as error:  # SystemExit and Ctrl-C too: they are a result as well
        with contextlib.suppress(OSError):  # a full disk has no room for its output
            if type(error) is CompactHydraException:  # a refusal, whose message is complete
                print(error, file=sys.stderr)
            elif not isinstance(error, SystemExit):
                traceback.print_exc()
        status = _status_of(error)
        result["error"] = {"type": type(error).__name__, "message": _message(error)}
    faulthandler.cancel_dump_traceback_later()
    result |= peaks()
    try:
        write_in_room(files.result, result)
    except OSError as error:  # a full disk, and a value too large for the room that was kept
        with contextlib.suppress(OSError):
            too_large = {"type": "OSError", "message": f"what it returned could not be written: {error}"}
            write_in_room(files.result, {"attempt": request.attempt, "error": too_large})
        return 1
    return status


def under_hydra(task: Callable[..., Any], hydra_context: Any, config: Any, instances: Any) -> Any:
    """Return what the task function returns under Hydra's `run_job`; exceptions of it pass through."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.plugins import Plugins
    from hydra.core.singleton import Singleton
    from hydra.core.utils import JobStatus, run_job, setup_globals

    setup_globals()
    # Filled when the application was imported, in the process that forks the jobs
    filled = {Plugins: Plugins.instance(), ConfigStore: ConfigStore.instance()}
    Singleton.set_state({**Singleton.get_state(), "instances": {**instances, **filled}})
    HydraConfig.instance().set_config(config)
    job_return = run_job(
        task_function=task,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
        hydra_context=hydra_context,
    )
    if job_return.status != JobStatus.COMPLETED:
        raise job_return._return_value
    return job_return.return_value


def _status_of(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _message(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except Exception:
        return "(its message can't be shown)"


def returned(value: object) -> dict[str, Any]:
    """Return what is kept of a task function's value: plain numbers, strings and containers of them.

    >>> returned(0.5), returned({"loss": 1}), returned(print)
    ({'returned': 0.5}, {'returned': {'loss': 1}}, {'not_kept': 'builtin_function_or_method'})
    """
    try:
        return {"returned": _plain(value)}
    except Exception:  # any object of the user's, which may raise anything
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
    """Return the name of the device and the peak of its memory in this process, in bytes, if it used one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    try:
        peak = max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
        return {"device": torch.cuda.get_device_name(), "peak_device_bytes": peak}
    except RuntimeError:  # the error that ended the job has ended CUDA in this process too
        return {}
