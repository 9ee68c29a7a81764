"""A separate process that makes plans, so that a crash in it is only an error in this process."""

from __future__ import annotations

import atexit
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from lightning_solo.errors import CapabilityError, PlanError, SoloError
from lightning_solo.machine import usable_cores
from lightning_solo.planner.bases import Bases
from lightning_solo.planner.device import CPU
from lightning_solo.planner.forks import run_in_workers
from lightning_solo.planner.plan import Plan
from lightning_solo.processes import Child, ProcessError, fork, start
from lightning_solo.requirements import missing_packages

MOST_WORKERS = 8
"""Processes that plan presets at the same time; further ones would mostly repeat what each has to learn."""

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""A plan needs no GPU. Where torch finds one, autograd starts threads for it, which the forks of a plan would lack."""


@dataclass
class PlanRequest:
    """The arguments of a `Planner`, and the presets to plan, by name."""

    make: Callable[[], Any]
    batch: Any
    trainer: Mapping[str, Any]
    device: Any
    budget: int
    micro_batch: int | None
    presets: Mapping[str, Any]
    host_memory: int | None = None


class Worker:
    """A process that has imported torch and Lightning, and forks for each request."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._lock = threading.Lock()  # one request at a time uses the connection

    def start(self) -> None:
        """Start the process, which imports its packages before the first request and ends with this process."""
        with self._lock:
            self._running()

    def answers(self, request: PlanRequest, timeout_s: float) -> Iterator[tuple[str, Any]]:
        """Yield (name, plan or exception) for each preset when it is done; ("", exception) if none can be planned.

        If the process dies while it plans a preset, that preset gets an exception, and the others are requested again.

        Raises:
            PlanError: the timeout has passed.
        """
        remaining = dict(request.presets)
        with self._lock:
            while remaining:
                for name, answer in self._answers_until_death(replace(request, presets=remaining), timeout_s):
                    remaining = {other: config for other, config in remaining.items() if name not in ("", other)}
                    yield name, answer

    def _answers_until_death(self, request: PlanRequest, timeout_s: float) -> Iterator[tuple[str, Any]]:
        payload = cloudpickle.dumps(request)
        pending = list(request.presets)
        child = self._running()
        deadline = time.monotonic() + timeout_s
        try:
            child.send(payload)
            while isinstance(message := child.receive(max(deadline - time.monotonic(), 0)), tuple):
                name, answer = message
                if name in pending:
                    pending.remove(name)
                if isinstance(answer, ProcessError):
                    answer = _died(answer, child)
                yield name, answer
            if message:
                yield pending[0], _died(message, child)
        except BaseException as error:
            self.close()  # its other messages would be read as those to the next request
            if isinstance(error, TimeoutError):
                raise PlanError(
                    f"no plan after {timeout_s:g} s; is there a loop in training_step that waits for a number?"
                ) from None
            if isinstance(error, ProcessError):
                raise PlanError(f"the process that plans ended: {error}") from None
            raise

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _running(self) -> Child:
        # between requests there is nothing to read but the end of a process that has died
        if self._child is not None and self._child.connection.poll():
            self.close()
        if self._child is None:
            self._child = start("lightning_solo.planner.worker:serve", variables=NO_GPU)
            atexit.register(self.close)
        return self._child


def serve(connection: Connection) -> None:
    """Answer requests until the connection is closed, each in a forked process."""
    gc.disable()  # imports leave no garbage, and each trace begins with a collection
    import torch

    import lightning_solo.planner.planner  # noqa: F401 - torch and Lightning, once

    gc.freeze()  # later collections skip what was imported
    torch.set_num_threads(1)  # OpenMP's threads would not exist after a fork

    while True:
        try:
            payload = connection.recv()
        except (EOFError, OSError):
            return
        child = fork(partial(_answer, payload, connection))
        connection.send(child.death() if child.wait() else "")
        child.close()


def _answer(payload: bytes, connection: Connection, _: Connection) -> int:
    try:
        for answer in plans(cloudpickle.loads(payload)):
            connection.send(answer)
    except Exception as error:  # of the module, the batch or the request
        connection.send(("", _explained(error)))
    return 0


def plans(request: PlanRequest) -> Iterator[tuple[str, Any]]:
    """Yield (name, plan or exception) of each preset, in order; a `ProcessError` if its process died.

    Once a first preset is planned on fake tensors, the others share the processor's cores.

    Raises:
        PlanError: the module can't be planned.
    """
    from lightning_solo.planner.planner import Planner
    from lightning_solo.planner.solved_plan import solved
    from lightning_solo.planner.traces import FAKE

    planner = Planner(**{name: value for name, value in vars(request).items() if name != "presets"})
    configs = {name: config for name, config in request.presets.items() if not isinstance(config, Bases)}

    def answer(name: str) -> Any:
        try:
            if request.device.name == CPU and (reason := configs[name].needs_cuda()):
                raise CapabilityError(reason)
            return planner.plan(name, configs[name])
        except Exception as error:
            if isinstance(error.__cause__, ModuleNotFoundError) and (missing := missing_packages(configs[name])):
                return CapabilityError("\n".join(missing))
            return _explained(error)

    def key(name: str) -> str:
        try:
            return planner.key(configs[name])
        except Exception:  # `answer` returns it
            return name

    found: dict[str, Plan] = {}
    checked = False
    remaining = [*configs]
    while remaining and not any(plan.traced == FAKE for plan in found.values()):
        name = remaining.pop(0)
        result = answer(name)
        if isinstance(result, Plan):
            found[name] = result
        elif isinstance(result, PlanError) and not (found or checked):
            planner.check_module(dict.fromkeys(config.precision for config in configs.values()))
            checked = True
        yield name, result
    count = min(usable_cores(), MOST_WORKERS, max(1, len(remaining)))
    for name, result in run_in_workers(answer, remaining, key, count):
        if isinstance(result, Plan):
            found[name] = result
        yield name, result
    for name, bases in request.presets.items():
        if isinstance(bases, Bases):
            try:
                yield name, solved(planner, bases, found)
            except Exception as error:
                yield name, _explained(error)


def _died(how: object, child: Child) -> PlanError:
    return PlanError(f"the process that plans died of {how}{child.last_output()}")


def _explained(error: Exception) -> SoloError:
    return error if isinstance(error, SoloError) else PlanError(f"{type(error).__name__}: {error}")


WORKER = Worker()
