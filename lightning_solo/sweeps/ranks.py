"""The processes of a job on several devices, one per device, with the environment that torchrun gives them.

Lightning's own strategies would start the application's command again for each device, and so the whole sweep.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait

from lightning_solo.machine import HOST_SHARE
from lightning_solo.processes import Child, fork

GRACE_S = 30.0
"""Seconds that the other processes have to end after one has failed."""


def run_ranks(devices: int, work: Callable[[int], int]) -> int:
    """Call a function with each rank in a fork, for one device in this process; return 0, or the first failure.

    Args:
        devices: number of ranks.
        work: returns an exit status.

    Returns:
        an exit status, or the negative number of the signal that ended the rank that failed first.
    """
    if devices == 1:
        return work(0)
    with reserved_port() as port:
        return _run(devices, work, port)


def _run(devices: int, work: Callable[[int], int], port: int) -> int:
    ranks: dict[int, Child] = {}
    for rank in range(devices):
        child = fork(partial(_rank, work, rank, devices, port))
        ranks[os.pidfd_open(child.pid)] = child
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the ranks too, whose process group this one leads
        signal.signal(number, lambda *_: None)
    failure, deadline = 0, None
    while ranks:
        ready = wait([*ranks], None if deadline is None else max(deadline - time.monotonic(), 0))
        for descriptor in [each for each in ranks if each in ready or not ready]:  # none is ready: time is over
            status = ranks.pop(descriptor).close()
            os.close(descriptor)
            if status and not failure:
                failure, deadline = status, time.monotonic() + GRACE_S
    return failure


def _rank(work: Callable[[int], int], rank: int, devices: int, port: int, _: Connection) -> int:
    """Run one rank, and end as a script does."""
    of_all = {"WORLD_SIZE": devices, "LOCAL_WORLD_SIZE": devices, "NODE_RANK": 0, "MASTER_PORT": port}
    variables = {"RANK": rank, "LOCAL_RANK": rank, **of_all}
    if share := os.environ.get(HOST_SHARE):  # of the job
        variables[HOST_SHARE] = int(share) // devices
    os.environ.update({name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "127.0.0.1"})
    try:
        status = work(rank)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        return status
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port that only a listener that reuses addresses can take in this context, as torch's store does."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
