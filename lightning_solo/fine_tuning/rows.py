"""Rows of JSON Lines, of Parquet and Arrow files, and of folders of `datasets`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lightning_solo.atomic_files import read_json
from lightning_solo.errors import CapabilityError, PresetError, listed
from lightning_solo.machine import is_installed

STATE, SPLITS = "state.json", "dataset_dict.json"
"""Files of `datasets.save_to_disk`: in the folder of one split, and in a folder of several splits."""
ARROW = (".parquet", ".arrow")
LINES = (".jsonl", ".ndjson")
EXAMPLES = {
    "messages": '{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}',
    "prompt": '{"prompt": "2+2?", "completion": "4"}',
    "text": '{"text": "2+2 is 4."}',
}
"""Kind of row -> a line of a file."""


class Row(NamedTuple):
    """A row and its place: ``chats.jsonl:3`` is line 3 of a text file, or row 3 of another file."""

    place: str
    value: dict[str, Any]


class RowError(PresetError):
    """A row that can't be used. The data report counts rows by `reason`, a word or two."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class LeftOutError(RowError):
    """A row that a setting leaves out, such as a limit of its length. It isn't a bad row."""


def read_rows(path: str | Path, refuse: Callable[[str, RowError], None]) -> Iterator[Row]:
    """Yield the rows of a file or folder one by one, with at most some thousand in memory.

    Args:
        path: a file of JSON Lines in UTF-8, a Parquet or Arrow file, a folder of such files, or a folder that
            `datasets.save_to_disk` wrote.
        refuse: called with the place of a line that is no JSON object, and the error.

    Raises:
        PresetError: there is no such file, or it is of another kind.
        CapabilityError: the file needs pyarrow, which isn't installed.
    """
    for file in row_files(path):
        yield from _arrow(file) if file.suffix in ARROW else _lines(file, refuse)


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
        hub = f"download it first: hf download {path} --repo-type dataset --local-dir {path.name}"
        raise PresetError(f"{path}: no such file or folder; {hub if is_name else 'write the path of a file of rows'}")
    if (path / SPLITS).is_file():
        splits = [f"{path}/{name}" for name in (read_json(path / SPLITS) or {}).get("splits", [])]
        raise PresetError(f"{path}: a data set of several splits; write one of them: {', '.join(splits)}")
    if (path / STATE).is_file():
        files = [path / each["filename"] for each in (read_json(path / STATE) or {}).get("_data_files", [])]
        if missing := [file.name for file in files if not file.is_file()]:
            raise PresetError(f"{path}: {STATE} names {listed(missing)}, which is missing; save the data set again")
        return files
    files = sorted(file for file in path.iterdir() if file.suffix in (*ARROW, *LINES))
    if not files:
        others = listed(sorted(file.name for file in path.iterdir())) or "nothing"
        raise PresetError(f"{path}: the folder has no *.jsonl, *.parquet or *.arrow, but {others}")
    return files


def refuse_half_characters(text: str) -> None:
    """Refuse a text with half of a surrogate pair, which can't be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError("half a character", f"it has half of a surrogate pair ({error.reason}); write UTF-8") from error


def _lines(file: Path, refuse: Callable[[str, RowError], None]) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            line = _checked_start(file, line) if number == 1 else line
            if not line.strip():
                continue
            place = f"{file}:{number}"
            try:
                value = json.loads(line.decode("utf-8"))
                if not isinstance(value, dict):
                    raise ValueError(f"a {type(value).__name__}")
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
                shown = line[:60].decode("utf-8", "replace").strip()
                message = f"no JSON object ({error}): {shown!r}; write one a line: {EXAMPLES['messages']}"
                refuse(place, RowError("no JSON object", message))
            else:
                yield Row(place, value)


def _checked_start(file: Path, line: bytes) -> bytes:
    """Return a file's first line without a byte order mark; refuse UTF-16 and JSON arrays."""
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        command = f"iconv -f UTF-16 -t UTF-8 {file.name} > {file.stem}_utf8.jsonl"
        raise PresetError(f"{file}: it is UTF-16; write {command}")
    line = line.removeprefix(b"\xef\xbb\xbf")
    if line.lstrip().startswith(b"["):
        command = f"jq -c '.[]' {file.name} > {file.stem}_rows.jsonl"
        raise PresetError(f"{file}: it is one JSON array, and one object a line is needed; write {command}")
    return line


def _arrow(file: Path) -> Iterator[Row]:
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
            f"{file}: after {number:,} rows it is damaged, cut off or of another kind ({error}); write the file again"
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
