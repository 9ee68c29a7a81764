"""The rows of JSON Lines, of Parquet files and of folders of `datasets`, each with its place for messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lightning_solo.atomic_files import read_json
from lightning_solo.errors import CapabilityError, PresetError, listed
from lightning_solo.machine import is_installed

STATE, SPLITS = "state.json", "dataset_dict.json"
"""Files that `datasets.save_to_disk` writes beside the rows of one split, and above the folders of several."""
ARROW = (".parquet", ".arrow")
LINES = (".jsonl", ".ndjson", ".json")


class Row(NamedTuple):
    """A row and its place: ``chats.jsonl:3`` is the third line of a file, or its third row."""

    place: str
    value: dict[str, Any]


class RowError(PresetError):
    """A row that can't be used. `reason` is a word or two, by which such rows are counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def read_rows(path: str | Path, refuse: Callable[[RowError], None] | None = None) -> Iterator[Row]:
    """Yield the rows of a file or folder one by one; no more than some thousand are in memory.

    Args:
        path: a file of JSON Lines in UTF-8, a Parquet or Arrow file, a folder that `datasets.save_to_disk` wrote, or a
            folder of such files.
        refuse: called for a line that is no JSON object; the next rows follow. By default the error is raised.

    Raises:
        RowError: a line isn't a JSON object; names file and line.
        PresetError: there is no such file, it has no rows, or it is of another kind.
        CapabilityError: the file needs pyarrow, which isn't installed.
    """
    files = row_files(path)
    empty = True
    for file in files:
        for row in (_arrow if file.suffix in ARROW else _lines)(file, refuse or _raise):
            empty = False
            yield row
    if empty and refuse is None:
        raise PresetError(f"{path}: no rows; write one JSON object a line, such as {example('messages')}")


def row_files(path: str | Path) -> list[Path]:
    """Return the files of a path for `read_rows`, in order.

    Raises:
        PresetError: there are none; the message says what to write.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        is_name = len(path.parts) == 2 and not path.suffix and path.parts[0] not in ("/", "..")
        hub = f"; download it first: hf download {path} --repo-type dataset --local-dir {path.name}" if is_name else ""
        raise PresetError(f"{path}: no such file or folder{hub or '; write the path of a file of rows'}")
    if (path / SPLITS).is_file():
        names = (read_json(path / SPLITS) or {}).get("splits", [])
        raise PresetError(
            f"{path}: it has several splits; write one of them: {', '.join(f'{path}/{n}' for n in names)}"
        )
    if (path / STATE).is_file():
        files = [path / each["filename"] for each in (read_json(path / STATE) or {}).get("_data_files", [])]
        if missing := [file.name for file in files if not file.is_file()]:
            raise PresetError(f"{path}: {STATE} names {listed(missing)}, which isn't there; save the data set again")
        return files
    files = sorted(file for file in path.iterdir() if file.suffix in ARROW or file.suffix in LINES[:2])
    if not files:
        there = listed(sorted(file.name for file in path.iterdir())) or "nothing"
        raise PresetError(f"{path}: no *.jsonl, *.parquet or *.arrow in this folder, but {there}")
    return files


def example(kind: str) -> str:
    """Return a row of a kind, as it is written in a file."""
    return {
        "messages": '{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}',
        "prompt": '{"prompt": "2+2?", "completion": "4"}',
        "text": '{"text": "2+2 is 4."}',
    }[kind]


def _raise(error: RowError) -> None:
    raise error


def _lines(file: Path, refuse: Callable[[RowError], None]) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            place = f"{file}:{number}"
            if number == 1:
                if line.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise PresetError(
                        f"{file}: it is UTF-16; write iconv -f UTF-16 -t UTF-8 {file.name} > {file.stem}_utf8.jsonl"
                    )
                line = line.removeprefix(b"\xef\xbb\xbf")
                if line.lstrip().startswith(b"["):
                    raise PresetError(
                        f"{file}: it is one JSON array, and one object a line is needed; write"
                        f" jq -c '.[]' {file.name} > {file.stem}_rows.jsonl"
                    )
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8"))
                if not isinstance(value, dict):
                    raise ValueError(f"a {type(value).__name__}, no object")
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
                shown = line[:60].decode("utf-8", "replace").strip()
                refuse(
                    RowError(
                        "no JSON object",
                        f"{place}: no JSON object ({error}): {shown!r}; write one a line: {example('messages')}",
                    )
                )
                continue
            yield Row(place, value)


def _arrow(file: Path, refuse: Callable[[RowError], None]) -> Iterator[Row]:
    if not is_installed("pyarrow"):
        raise CapabilityError(f"{file}: it is read by pyarrow, which isn't installed; write pip install pyarrow")
    import pyarrow

    number = 0
    try:
        for batch in _batches(file):
            for value in batch.to_pylist():
                number += 1
                yield Row(f"{file}:{number}", value)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise PresetError(
            f"{file}: damaged, cut off or of another kind, after {number:,} rows ({error}); write the file again"
        ) from error


def _batches(file: Path) -> Iterator[Any]:
    import pyarrow

    if file.suffix == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1000)
        return
    with pyarrow.memory_map(str(file)) as mapped:
        try:
            batches = iter(pyarrow.ipc.open_stream(mapped))
        except pyarrow.ArrowInvalid:
            mapped.seek(0)
            reader = pyarrow.ipc.open_file(mapped)  # the other layout of Arrow, with an index at its end
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        yield from batches
