"""Jobs that outlived both their command and the process that started them: nothing else enforces their time limit."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from lightning_solo.atomic_files import read_json
from lightning_solo.sweeps.files import SweepFolder, write_in_room
from lightning_solo.sweeps.jobs import Settings
from lightning_solo.sweeps.outcome import outcome


class Orphans:
    """Ends the jobs of an earlier command at their time limit, where the process that would have done it is gone.

    Args:
        folder: of the sweep.
        settings: of this command, usually the same as the earlier one's; the time counts from the job's start.
    """

    def __init__(self, folder: SweepFolder, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings
        self._stopped: dict[int, float] = {}  # job's number -> when it was signalled to end, on the monotonic clock

    def described(self, number: int) -> str:
        """Return a sentence about a job's process and its limit; empty where the process that started it lives."""
        pid = orphan(self.folder, number)
        limit = self.settings.timeout_s
        if pid is None:
            return ""
        if limit is None:
            return f"process {pid}, without a limit of its time (hydra.launcher.timeout_s); to end it: kill {pid}"
        return f"process {pid}, which may take {limit:g} s from its start (hydra.launcher.timeout_s)"

    def watch(self, number: int) -> None:
        """Signal a job to end once its time is over, and kill it if it doesn't."""
        start = read_json(self.folder.job(number).start)
        limit, pid = self.settings.timeout_s, orphan(self.folder, number)
        if start is None or limit is None or pid is None or time.time() - start["started"] <= limit:
            return
        if number not in self._stopped:
            self._stopped[number] = time.monotonic()
            end_group(pid, signal.SIGTERM)
        elif time.monotonic() - self._stopped[number] > self.settings.grace_s:
            end_group(pid, signal.SIGKILL)

    def note_ends(self) -> None:
        """Record how the jobs that were signalled here ended."""
        for number in self._stopped:
            files = self.folder.job(number)
            start = read_json(files.start) or {}
            status, detail = outcome(-signal.SIGTERM, files.result_of(start["attempt"]), timed_out=True)
            if status == "timed out":
                detail = (
                    f"after {self.settings.timeout_s:g} s (hydra.launcher.timeout_s), started by an earlier command"
                )
            now = time.time()
            end = {"attempt": start["attempt"], "status": status, "detail": detail}
            with suppress(OSError):  # a full disk: the row says that the end is not known
                write_in_room(files.end, {**end, "seconds": now - start["started"], "ended": now})


def orphan(folder: SweepFolder, number: int) -> int | None:
    """Return the process of a job if it lives here and the process that started it doesn't."""
    files = folder.job(number)
    process, start = read_json(files.process), read_json(files.start)
    if process is None or start is None or process["attempt"] != start["attempt"]:
        return None
    pid: int = process["pid"]
    # the lock distinguishes a process of the sweep from a later one with the same id
    return pid if holds(pid, folder.server_lock) and not holds(parent(pid), folder.server_lock) else None


def holds(pid: int, file: Path) -> bool:
    """Return whether a process has a file open."""
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if descriptor.samefile(file):
                    return True
    return False


def parent(pid: int) -> int:
    """Return the parent of a process; 0 where there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def end_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a job and the processes it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
