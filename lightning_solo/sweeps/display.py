"""A sweep on the terminal: a live display or a line per event, and a table of failures at the end."""

from __future__ import annotations

import logging
import shlex
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from lightning_solo.atomic_files import read_json
from lightning_solo.sweeps.files import OUTPUT, SweepFolder, tail
from lightning_solo.sweeps.outcome import FINISHED, INTERRUPTED
from lightning_solo.sweeps.results import Row, gpu_cell
from lightning_solo.tables import Cell, Table, duration, size, terminal
from lightning_solo.tables import number as figure
from lightning_solo.units import format_duration

log = logging.getLogger(__name__)
SHOWN = 12


class Display:
    """Shows the state of each job live on a console, by default on standard error; ``names`` are its overrides."""

    def __init__(
        self, folder: SweepFolder, names: Mapping[int, str], parallel: int, console: Console | None = None
    ) -> None:
        self.folder = folder
        self.names = dict(names)
        self.parallel = parallel
        self.console = console or Console(stderr=True)
        self.states: dict[int, str] = {}  # of jobs that were started or kept
        self.started: dict[int, float] = {}
        self.seconds: list[float] = []
        self._live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the jobs live until the end, if there is a terminal."""
        if not self.console.is_terminal:
            yield
            return
        with Live(self.render([]), console=self.console, auto_refresh=False, transient=True) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def tell(self, event: str, number: int | None, detail: str) -> None:
        """Update a job's state at an event of `Sweep`, and log the event if there is no live display.

        The reason why a job runs again is printed with or without a live display.
        """
        if number is None:
            log.warning("each job starts from a fresh interpreter, some seconds slower: %s", detail)
            return
        if event in ("started", "again"):
            self.states[number] = "running"
            self.started[number] = time.monotonic()
        elif event != "anew":
            self.states[number] = detail
            if number in self.started:
                self.seconds.append(time.monotonic() - self.started.pop(number))
        words = {
            "kept": f"{detail}, by an earlier command",
            "again": f"{detail}; started again",
            "anew": f"runs again, from the beginning: {detail}",
            "started": f"started {detail}".strip(),
        }
        line = f"#{number} {self.names.get(number, '')}: {words.get(event, detail)}"
        if self._live is None:
            log.info("%s", line)
        elif event == "anew":
            self.console.out(line, highlight=False)  # above the live display

    def look(self, running: Sequence[int]) -> None:
        """Refresh the live display."""
        if self._live is not None:
            self._live.update(self.render(running), refresh=True)

    def render(self, running: Sequence[int]) -> Group:
        """Return the live display: the running jobs, the last ones that ended, and a line about all jobs."""
        done = [number for number, state in self.states.items() if state != "running"]
        failed = [n for n in done if not self.states[n].startswith(FINISHED)]
        line = f"{len(done)} of {len(self.names)} jobs done"
        line += f", {len(failed)} failed" if failed else ""
        left = self.seconds_left(running)
        line += f", about {format_duration(left)} left" if left is not None else ""
        rows = [self._cells(number, number in running) for number in [*running, *done[::-1]][:SHOWN]]
        headings = ("job", "overrides", "state", "GPU", "step", "loss", "peak memory", "time")
        return Group(terminal(Table("", headings, rows), headings[1:]), Text(line, style="bold"))

    def _cells(self, number: int, runs: bool) -> list[Cell]:
        progress = read_json(self.folder.job(number).progress) or {} if runs else {}
        state = self.states[number]
        style = "yellow" if runs else "green" if state.startswith(FINISHED) else "red"
        step, steps = progress.get("step"), progress.get("of_steps")
        took = time.monotonic() - self.started[number] if number in self.started else None
        return [
            Cell(f"#{number}", number),
            Cell(self.names.get(number, "")),
            Cell("running" if runs else state, style=style),
            gpu_cell(str((read_json(self.folder.job(number).start) or {}).get("gpu", "")) if runs else ""),
            Cell() if step is None else Cell(f"{step}/{steps}" if steps else str(step), step),
            figure(progress.get("loss"), 4),
            size(progress.get("peak_device_bytes")),
            duration(took),
        ]

    def seconds_left(self, running: Sequence[int]) -> float | None:
        """Return the seconds until the sweep ends, estimated from ended jobs and the steps of running ones."""
        durations, elapsed = list(self.seconds), 0.0
        for number in running:
            took = time.monotonic() - self.started.get(number, time.monotonic())
            file = self.folder.job(number).progress
            progress = read_json(file) or {}
            if progress.get("step") and progress.get("of_steps"):
                until = took - max(time.time() - file.stat().st_mtime, 0.0)  # when these steps were written
                durations.append(until * progress["of_steps"] / progress["step"])
            elapsed += took
        if not durations:
            return None
        open_jobs = sum(self.states.get(number, "running") == "running" for number in self.names)
        return max(statistics.median(durations) * open_jobs - elapsed, 0.0) / self.parallel


def failures(rows: Sequence[Row], folder: Path, tail_lines: int = 0, *, rerun: bool = True) -> str:
    """Return a table of the jobs that did not finish, the ends of their outputs, and the numbers of all of them."""
    failed = [row for row in rows if row.status != FINISHED]
    table = Table(
        f"{len(failed)} of {len(rows)} jobs did not finish",
        ("job", "overrides", "status", "why"),
        [(Cell(f"#{row.number}", row.number), *map(Cell, (" ".join(row.overrides), row.status, row.detail)))
         for row in failed],
    )  # fmt: skip
    screen = Console(stderr=True)
    console = Console(width=screen.width if screen.is_terminal else 120, force_terminal=False)
    with console.capture() as captured:
        console.print(terminal(table))
        for row in failed:
            output = Path(row.folder, OUTPUT)
            lines = [f"job {row.number}: {output}", *(f"    {line}" for line in tail(output, tail_lines))]
            console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        if rerun and any(row.status != INTERRUPTED for row in failed):
            console.print("\nto run the failed ones again: the same command with hydra.launcher.rerun=failed")
        numbers = ", ".join(str(row.number) for row in failed)
        seen = shlex.join(["lightning-solo", "results", str(folder)])
        console.print(f"did not finish: {numbers}; to see all jobs: {seen}", soft_wrap=True, highlight=False)
    return captured.get()
