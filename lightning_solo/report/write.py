"""Reads the folder of a run, a sweep or a ladder, and writes its report into it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning_solo.atomic_files import write_whole
from lightning_solo.errors import CheckpointError, NothingToDoError, PresetError
from lightning_solo.report.ladder_file import FILE, read_ladder
from lightning_solo.report.model import Report, plain
from lightning_solo.report.page import page
from lightning_solo.report.pictures import pictures, to_tensorboard
from lightning_solo.report.run_folder import read_run
from lightning_solo.report.sweep_folder import is_sweep, read_sweep

KINDS = "a run has csv/metrics.csv, csv/memory.csv or config.yaml, a sweep has results.jsonl, a ladder has ladder.json"


@dataclass(frozen=True)
class Written:
    """The files of a report, and notes on its omissions."""

    page: Path
    pngs: tuple[Path, ...]
    tensorboard: Path | None
    notes: tuple[str, ...]


def write_report(folder: Path) -> Written:
    """Write ``report.html``, ``report/*.png`` and ``tensorboard/report`` into the folder of a run, sweep or ladder.

    Raises:
        PresetError: there is no such folder, or it can't be written.
        NothingToDoError: it holds nothing to report on.
        CheckpointError: none of its files can be read.
        CapabilityError: a package is missing.
    """
    report = read(folder)
    html = page(report)
    drawn = pictures(report)
    target = folder / "report.html"
    try:
        files = {folder / "report" / f"{name}.png": png for name, png in drawn.items()}
        for path, content in {**files, target: html.encode("utf-8", errors="replace")}.items():
            write_whole(path, content)
        events = folder / "tensorboard" / "report"
        has_events = bool(drawn) and to_tensorboard(drawn, events)
    except OSError as error:
        raise PresetError(f"report {folder}: can't be written: {error.strerror}: {error.filename}") from error
    return Written(target, tuple(files), events if has_events else None, tuple(report.notes))


def read(folder: Path) -> Report:
    """Return the report on a folder."""
    if not folder.is_dir():
        beside = Path("runs") / folder
        hint = f"; did you mean {str(beside)!r}? " if not folder.is_absolute() and beside.is_dir() else "; "
        what = "is a file" if folder.exists() else "no such folder"
        raise PresetError(
            f"report {str(folder)!r}: {what}{hint}write the folder of a run, a sweep or a ladder; {KINDS}"
        )
    report = Report(title=plain(folder.resolve().name))
    try:
        if (folder / FILE).is_file():
            report.add(read_ladder(folder))
        sweep = is_sweep(folder)
        if sweep:
            report.add(read_sweep(folder))
        report.add(read_run(folder, ("csv", ".")) if sweep else read_run(folder))
    except OSError as error:
        raise PresetError(f"report {folder}: can't be read: {error.strerror}: {error.filename}") from error
    if report.has_content:
        return report
    if report.notes:
        raise CheckpointError(f"report {str(folder)!r}: nothing can be read:\n  " + "\n  ".join(report.notes))
    names = ", ".join(sorted(plain(path.name) for path in folder.iterdir())[:12]) or "nothing"
    raise NothingToDoError(f"report {str(folder)!r}: nothing to report on; {KINDS}; there is {names}")
