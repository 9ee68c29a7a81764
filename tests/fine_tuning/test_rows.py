"""`fine_tuning.rows`: rows of JSON Lines, Parquet and Arrow; broken lines are named, and none is lost in silence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_solo.errors import CapabilityError, PresetError
from lightning_solo.fine_tuning.rows import Row, RowError, read_rows
from tests.messages import mentions

ROWS = [{"text": "one"}, {"text": "zwei, süß"}, {"messages": [{"role": "user", "content": "a\u2028b"}]}]


def rows_of(path: Any) -> list[Row]:
    """Return the rows of a path; the first bad one is raised, after its place."""

    def refuse(place: str, error: RowError) -> None:
        raise PresetError(f"{place}: {error}")

    return list(read_rows(path, refuse))


def lines(*rows: Any) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


@pytest.mark.parametrize(
    "content",
    [
        lines(*ROWS),
        b"\xef\xbb\xbf" + lines(*ROWS),
        lines(*ROWS).replace(b"\n", b"\r\n"),
        lines(*ROWS, b"", b"  ").rstrip(b"\n"),
        b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in ROWS),
    ],
    ids=["plain", "BOM", "CRLF", "blank lines, no last newline", "not escaped"],
)
def test_rows_of_a_file_come_with_their_lines(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    rows = rows_of(file)
    assert [row.value for row in rows] == ROWS
    assert [row.place for row in rows] == [f"{file}:{number}" for number in (1, 2, 3)]


BROKEN = [b'{"text": "cut', b"[1, 2]x", b"7", b'{"text": "\xff"}', b"[" * 100_000]


@pytest.mark.parametrize("broken", BROKEN, ids=["cut off", "no JSON", "no object", "not UTF-8", "nested too deep"])
def test_broken_line_is_refused_with_file_and_line_or_counted(broken: bytes, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(lines(ROWS[0], broken, ROWS[1]))
    with pytest.raises(PresetError, match=mentions(f"{file}:2", '{"messages"')):
        rows_of(file)
    skipped: list[str] = []
    assert [row.value for row in read_rows(file, lambda place, error: skipped.extend([place, error.reason]))] == ROWS[
        :2
    ]
    assert skipped == [f"{file}:2", "no JSON object"]


def test_file_that_is_something_else_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for name, content, remedy in [
        ("array.json", b'\n [{"text": "a"}]'[1:], "jq -c '.[]' array.json > array_rows.jsonl"),
        ("wide.jsonl", '{"text": "a"}'.encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(PresetError, match=mentions(name, remedy)):
            rows_of(tmp_path / name)
    with pytest.raises(PresetError, match=mentions("hf download owner/name --repo-type dataset --local-dir name")):
        rows_of("owner/name")
    with pytest.raises(PresetError, match=mentions("missing.jsonl")):
        rows_of(tmp_path / "missing.jsonl")
    (tmp_path / "folder").mkdir()
    with pytest.raises(PresetError, match=mentions("folder", "*.parquet")):
        rows_of(tmp_path / "folder")


def test_folder_of_files_is_read_in_order(tmp_path: Path) -> None:
    for name, row in (("b", ROWS[1]), ("a", ROWS[0])):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(row))
    assert [row.value for row in rows_of(tmp_path)] == ROWS[:2]


def arrow_stream(file: Path, rows: list[dict[str, Any]], layout: str = "new_stream") -> None:
    """Write rows as `datasets.save_to_disk` does."""
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(rows)
    with getattr(pyarrow.ipc, layout)(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def test_parquet_and_arrow_files_have_the_rows_that_were_written(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}]} for n in "abc"]
    parquet.write_table(parquet.read_table(_parquet(tmp_path, rows)), tmp_path / "again.parquet", row_group_size=2)
    arrow_stream(tmp_path / "stream.arrow", rows)
    arrow_stream(tmp_path / "file.arrow", rows, "new_file")
    for name in ("rows.parquet", "again.parquet", "stream.arrow", "file.arrow"):
        read = rows_of(tmp_path / name)
        assert [row.value for row in read] == rows
        assert read[2].place == f"{tmp_path / name}:3"
        content = (tmp_path / name).read_bytes()
        (tmp_path / f"cut_{name}").write_bytes(content[: len(content) // 2])
        with pytest.raises(PresetError, match=mentions(f"cut_{name}")):
            rows_of(tmp_path / f"cut_{name}")


def _parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def test_saved_data_set_is_read_by_its_list_of_files(tmp_path: Path) -> None:
    for index, row in enumerate(ROWS[:2]):
        arrow_stream(tmp_path / f"data-{index}.arrow", [row])
    files = [{"filename": f"data-{index}.arrow"} for index in (1, 0)]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": files}))
    assert [row.value for row in rows_of(tmp_path)] == [ROWS[1], ROWS[0]]
    (tmp_path / "data-0.arrow").unlink()
    with pytest.raises(PresetError, match=mentions("data-0.arrow")):
        rows_of(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(PresetError, match=mentions(f"{tmp_path}/train", f"{tmp_path}/test")):
        rows_of(tmp_path)


def test_without_pyarrow_its_installation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CapabilityError, match=mentions("pip install pyarrow")):
        rows_of(tmp_path / "rows.parquet")
