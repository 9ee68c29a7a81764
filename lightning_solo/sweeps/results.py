"""The rows of a sweep, one per job, in `results.jsonl`, which stays readable after an interrupted write."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_solo.atomic_files import read_json
from lightning_solo.errors import CheckpointError
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.outcome import BEGUN, FINISHED, NOT_STARTED
from lightning_solo.tables import Cell

VERSION = 1


@dataclass(frozen=True)
class Row:
    """The result of one job and its costs."""

    number: int  # number of the job in its sweep, from 0
    overrides: tuple[str, ...]  # the job's overrides, without Hydra's own
    status: str  # one of `outcome.STATUSES`
    detail: str = ""  # a line such as the exception
    folder: str = ""  # the job's folder
    attempt: int = 1  # number of times that the job was started
    returned: Any = None  # the value of the task function if it is plain, else None
    # the metrics of the last fit and of tests after it, by name
    metrics: Mapping[str, float] = field(default_factory=dict)
    steps: int | None = None  # number of optimizer steps
    # seconds from the start to the end of its process, plus those of the attempts that it resumed
    seconds: float | None = None
    started: float | None = None
    peak_device_bytes: int | None = None  # peak memory on the device; None without a device
    peak_host_bytes: int | None = None  # peak resident memory of the job's largest process
    gpu: str = ""  # the job's CUDA_VISIBLE_DEVICES, if the sweep shares out GPUs
    config_hash: str = ""  # hash of the composed configuration, without Hydra's section
    hardware: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)  # package -> version

    @property
    def loss(self) -> float | None:
        """The number that the task function returns, alone or as ``loss``; else the logged validation or other loss.

        None for a job that didn't finish: its last logged loss may be of another kind, or of a single batch.
        """
        if self.status != FINISHED:
            return None
        if isinstance(self.returned, Mapping) and "loss" in self.returned:
            return number(self.returned["loss"])
        returned = number(self.returned)
        return loss_of(self.metrics) if returned is None else returned

    @property
    def loss_name(self) -> str | None:
        """The name of the metric that is the loss; None without a loss, or if the task function returns it."""
        if self.loss is None or number(self.returned) is not None:
            return None
        return None if isinstance(self.returned, Mapping) and "loss" in self.returned else name_of_loss(self.metrics)

    @property
    def tokens_per_s(self) -> float | None:
        """The last logged ``throughput/tokens_per_s``, if any."""
        return self.metrics.get("throughput/tokens_per_s")


def number(value: object) -> float | None:
    """Return a number as a float, and None for anything else.

    >>> number(2), number(True), number("2"), number(None)
    (2.0, None, None, None)
    """
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def gpu_cell(gpu: str) -> Cell:
    """Return a job's GPUs for a table, the UUIDs shortened.

    >>> gpu_cell("0,1").text, gpu_cell("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6").text
    ('0,1', 'GPU-8932f937')
    """
    return Cell(re.sub(r"((?:GPU|MIG)-[0-9a-f]{8})-[0-9a-f-]+", r"\1", gpu), gpu or None)


def is_validation_loss(name: str) -> bool:
    """Return whether a metric has the name of a validation loss, which a search monitors by default."""
    return "val" in name.lower() and "loss" in name.lower()


def name_of_loss(metrics: Mapping[str, float]) -> str | None:
    """Return the name of the validation loss if one is logged, else of another logged loss, a test's last.

    >>> name_of_loss({"train/loss": 2.0, "val_loss": 3.0}), name_of_loss({"test/loss": 2.0, "loss": 3.0})
    ('val_loss', 'loss')
    """
    names = [name for name in metrics if "loss" in name.lower()]
    return min(names, key=lambda name: (not is_validation_loss(name), "test" in name.lower()), default=None)


def loss_of(metrics: Mapping[str, float]) -> float | None:
    """Return the loss that `name_of_loss` names.

    >>> loss_of({"train/loss": 2.0, "val_loss": 3.0}), loss_of({"accuracy": 1.0})
    (3.0, None)
    """
    name = name_of_loss(metrics)
    return None if name is None else metrics[name]


def append(path: Path, row: Row) -> None:
    """Append a row, on its own line even after an interrupted write.

    Raises:
        OSError: it cannot be written, such as on a full disk.
    """
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line_of(row))
        file.flush()
        os.fsync(file.fileno())


def line_of(row: Row) -> bytes:
    """Return a row as a line with a checksum, which detects an incomplete line."""
    text = json.dumps({"version": VERSION, **asdict(row)}, allow_nan=True)
    return f"{zlib.crc32(text.encode()):08x} {text}\n".encode()


def read(path: Path) -> list[Row]:
    """Return the last row of each job, by number; incomplete lines are skipped.

    Raises:
        CheckpointError: the file is of another version of this library, or has a line that is no row.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return []
    rows = {}
    known = {f.name for f in fields(Row)}
    for line in lines:
        checksum, _, text = line.partition(b" ")
        if not text or checksum != f"{zlib.crc32(text):08x}".encode():
            continue
        values = _printable(json.loads(text))
        if not _is_row(values):
            raise CheckpointError(f"{path}: a line is no row of a sweep: {text[:80]!r}; remove that line")
        version = values.pop("version")
        if version != VERSION or set(values) - known:
            raise CheckpointError(
                f"{path}: its rows are of version {version}, this lightning-solo reads {VERSION}; read it with the"
                " lightning-solo that wrote it, or give the sweep another name"
            )
        rows[values["number"]] = Row(**{**values, "overrides": tuple(values["overrides"])})
    return [rows[number] for number in sorted(rows)]


def _is_row(values: Any) -> bool:
    kinds = {
        "version": int,
        "number": int,
        "overrides": list,
        "status": str,
        "detail": str,
        "folder": str,
        "metrics": dict,
    }
    return isinstance(values, dict) and all(isinstance(values.get(name), kind) for name, kind in kinds.items())


def _printable(value: Any) -> Any:
    """Return plain data with a question mark for each character that would control a terminal."""
    if isinstance(value, str):
        return "".join(each if each.isprintable() or each in "\n\t" else "?" for each in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(each) for key, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, list) else value


def read_all(sweep: SweepFolder) -> list[Row]:
    """Return the rows of a sweep by number, including jobs without a result or not yet started.

    Raises:
        CheckpointError: they are of another version of this library.
    """
    rows = {row.number: row for row in read(sweep.results)}
    listed = read_json(sweep.listed) or {}
    for job in sweep.jobs():
        start, progress = read_json(sweep.job(job).start), read_json(sweep.job(job).progress) or {}
        ended = rows[job].attempt if job in rows else 0
        if start is not None and start.get("attempt", 1) > ended:
            rows[job] = Row(
                job, tuple(start.get("overrides", ())), BEGUN, folder=str(start.get("folder", "")),
                attempt=start.get("attempt", 1), metrics=progress.get("metrics") or {}, steps=progress.get("step"),
                gpu=str(start.get("gpu", "")),
            )  # fmt: skip
        elif job not in rows and str(job) in listed:
            rows[job] = Row(job, tuple(listed[str(job)]), NOT_STARTED)
    return [rows[job] for job in sorted(rows)]
