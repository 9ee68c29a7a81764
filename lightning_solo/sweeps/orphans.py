"""Jobs that have outlived their command and the process that started them too: nobody else keeps their time."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from lightning_solo.sweeps.files import SweepFolder, read_json, write_in_room
from lightning_solo.sweeps.jobs import Settings
from lightning_solo.sweeps.outcome import outcome


class Orphans:
    """Ends the jobs of an earlier command in time, where the process that should have done it is gone.

    Args:
        folder: of the sweep.
        settings: of this command, which is the same one as a rule; the time counts from the job's start.
    """

    def __init__(self, folder: SweepFolder, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings
        self._stopped: dict[int, float] = {}  # job's number -> when it was asked to end, on the monotonic clock

    def described(self, number: int) -> str:
        """Return a job's process and its limit in words; nothing where a process lives that keeps its time."""
        pid = orphan(self.folder, number)
        limit = self.settings.timeout_s
        if pid is None:
            return ""
        if limit is None:
            return f"process {pid}, without a limit of its time (hydra.launcher.timeout_s); to end it: kill {pid}"
        return f"process {pid}, which may take {limit:g} s from its start (hydra.launcher.timeout_s)"

    def watch(self, number: int) -> None:
        """Ask a job to end whose time is over, and end it where it doesn't."""
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
        """Write how the jobs ended that were ended here."""
        for number in self._stopped:
            files = self.folder.job(number)
            start, said = read_json(files.start) or {}, read_json(files.result)
            if said is not None and said.get("attempt") != start["attempt"]:
                said = None
            status, detail = outcome(-signal.SIGTERM, said, timed_out=True)
            if status == "timed out":
                detail = f"after {self.settings.timeout_s:g} s (hydra.launcher.timeout_s), begun by an earlier command"
            now = time.time()
            end = {"attempt": start["attempt"], "status": status, "detail": detail}
            with suppress(OSError):  # a full disk: its row says that how it ended isn't known
                write_in_room(files.end, {**end, "seconds": now - start["started"], "ended": now})


def orphan(folder: SweepFolder, number: int) -> int | None:
    """Return the process of a job if it lives here, and the one that started it doesn't."""
    files = folder.job(number)
    process, start = read_json(files.process), read_json(files.start)
    if process is None or start is None or process["attempt"] != start["attempt"]:
        return None
    pid: int = process["pid"]
    # The lock tells a process of the sweep from one that was given the number of one that is gone
    return pid if holds(pid, folder.server_lock) and not holds(parent(pid), folder.server_lock) else None


def holds(pid: int, file: Path) -> bool:
    """Tell whether a process has a file open."""
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if descriptor.samefile(file):
                    return True
    return False


def parent(pid: int) -> int:
    """Return the process that a process belongs to; 0 where there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def end_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a job and what it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
