"""What runs in a job's own process: the task function, under Hydra or called plainly, and its own word on its end."""

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

VARIABLE = "LIGHTNING_SOLO_JOB"
"""Environment variable of a job: the folder of its `JobFiles`, for the observer that joins its Trainer."""


BEFORE_S = 0.3
"""Seconds before its time is over in which a job tells where it is."""
RESUMES = "LIGHTNING_SOLO_RESUMES"
"""Environment variable of a job that was begun before and not finished: its folder is as it left it."""


@dataclass(frozen=True)
class Asked:
    """What a job is asked to do; `context` is what `pickled` or `plain` made, for a process of this user's own."""

    number: int
    attempt: int
    resumes: bool
    failures: int
    overrides: tuple[str, ...]
    folder: str
    config_hash: str
    context: bytes
    timeout_s: float | None = None
    grace_s: float = 10.0
    output_bytes: int = 0


def pickled(hydra_context: Any, config: Any) -> bytes:
    """Return what Hydra needs to run a job, as bytes for a process of this user's own.

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
    """Return the argument of a plain call as bytes for a process of this user's own."""
    return pickle.dumps(Plain(argument))


def run(task: Callable[..., Any], asked: Asked, files: JobFiles) -> int:
    """Run the task function, write what came of it, and return the exit status of the process."""
    from hydra.errors import CompactHydraException

    faulthandler.enable(2)  # where it was, in the output of one that crashes, or is about to be ended
    if asked.timeout_s is not None:
        faulthandler.dump_traceback_later(max(asked.timeout_s - BEFORE_S, BEFORE_S), file=2)
    os.environ[VARIABLE] = str(files.path)
    entry_points.find(SweepFolder(files.path.parents[2]).entry_points)
    if asked.resumes:
        os.environ[RESUMES] = "1"
    said: dict[str, Any] = {"attempt": asked.attempt}
    status = 1
    try:
        context = pickle.loads(asked.context)
        value = task(context.argument) if isinstance(context, Plain) else under_hydra(task, *context)
        said |= returned(value)
        status = 0
    except BaseException as error:  # SystemExit and Ctrl-C too: they are what became of it
        with contextlib.suppress(OSError):  # a full disk has no room for its output
            if type(error) is CompactHydraException:  # a refusal that says all there is to say
                print(error, file=sys.stderr)
            elif not isinstance(error, SystemExit):
                traceback.print_exc()
        status = _status_of(error)
        said["error"] = {"type": type(error).__name__, "message": _message(error)}
    faulthandler.cancel_dump_traceback_later()
    said |= peaks()
    try:
        write_in_room(files.result, said)
    except OSError as error:  # a full disk, and a value too large for the room that was kept
        with contextlib.suppress(OSError):
            told = {"type": "OSError", "message": f"what it returned could not be written: {error}"}
            write_in_room(files.result, {"attempt": asked.attempt, "error": told})
        return 1
    return status


def under_hydra(task: Callable[..., Any], hydra_context: Any, config: Any, instances: Any) -> Any:
    """Return what the task function returns under Hydra's `run_job`; raise what it raises."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.plugins import Plugins
    from hydra.core.singleton import Singleton
    from hydra.core.utils import JobStatus, run_job, setup_globals

    setup_globals()
    # Filled when the application was imported, in the process that forks the jobs
    found = {Plugins: Plugins.instance(), ConfigStore: ConfigStore.instance()}
    Singleton.set_state({**Singleton.get_state(), "instances": {**instances, **found}})
    HydraConfig.instance().set_config(config)
    done = run_job(
        task_function=task,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
        hydra_context=hydra_context,
    )
    if done.status != JobStatus.COMPLETED:
        raise done._return_value
    return done.return_value


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
    except Exception:  # whatever an object of the user's says to being looked at
        return {"not_kept": type(value).__name__}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if getattr(value, "ndim", None) == 0:  # a number of torch's or numpy's
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
