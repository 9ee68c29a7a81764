"""README is short, and its tables are those of the result files; its code runs in test_docs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from lightning_solo.cli.ladder_line import compose_base, parse
from lightning_solo.ladder.figures import Figures
from tests.messages import lines_with
from tests.pages import DOCS, ROOT, TABLES, load_file

PICTURES = load_file(DOCS / "pictures.py")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_read_in_three_minutes() -> None:
    assert README.count("\n") <= 160
    assert len(README.encode()) <= 10 * 1024


def test_tables_are_those_of_the_files() -> None:
    assert len(TABLES.MARK.findall(README)) == README.count("<!-- table:") == 2
    assert TABLES.render(README) == README


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_ladder_is_that_of_make_ladder(device: str, tmp_path: Path) -> None:
    # device_of: what make finds out otherwise; VENV: an environment that it need not make to print what it would run
    make = ["make", "-n", "ladder", f"device_of={device}", f"BIN={Path(sys.executable).parent}", f"VENV={tmp_path}"]
    printed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    measures = next(n for n, line in enumerate(printed) if " -m lightning_solo.cli ladder " in line)
    arguments = shlex.split(printed[measures].partition(" -m lightning_solo.cli ")[2])
    compose_base(parse(arguments[1:]))
    file = Path("examples/results", f"ladder_{device}.json")
    assert printed[measures + 1].endswith(f" runs/readme/ladder.json {file}")
    assert printed[measures + 2].endswith(" docs/tables.py --write")
    assert printed[measures + 3].endswith(" docs/pictures.py --write")
    assert (ROOT / file).exists() or device == "gpu"
    if (ROOT / file).exists():
        assert json.loads((ROOT / file).read_text())["command"] == shlex.join(["lightning-solo", *arguments])
        assert f"<!-- table: {file.name} -->" in README


def test_the_ladders_table_says_what_it_was_measured_with() -> None:
    numbers = {
        "counted_bytes": 2**29,
        "peak_bytes": 2**30,
        "step_s": 0.5,
        "step_quartiles_s": (0.45, 0.55),
        "loss": 2.0,
        "device": "cpu",
    }
    rows = [Figures("baseline", "finished", **numbers, counted_change=0.0, step_change=0.0)]
    rows += [Figures("a", "finished", **numbers, counted_change=-0.5, step_change=0.02, step_within_noise=True)]
    rows += [Figures("b", "not run here", "no CUDA device")]
    said = {
        "hardware": "2 cores",
        "versions": {"torch": "2.13"},
        "steps": 7,
        "memory": "peak",
        "command": "the command",
    }
    lines = TABLES.ladder_table({**said, "command": "the command", "rows": [asdict(row) for row in rows]}).splitlines()
    assert lines[3] == "| `a` | 512 MiB | -50% | 1024 MiB | 500 ms ±10% | ~ +2% | 2 |"  # (0.55 - 0.45) / 2 / 0.5
    assert lines[4].startswith("| `b`: not run here |")
    assert {line.count("|") for line in lines[:5]} == {8}
    for text in ("2 cores; torch 2.13; 7 optimizer steps", "~: ", "Command: `the command`"):
        assert text in lines[6]
    assert lines_with(lines[8], "- b: ", "not run here", "no CUDA device")


def test_a_changed_table_is_noticed() -> None:
    figure = re.search(r"\d+ MiB", README)
    assert figure is not None
    assert TABLES.render(README.replace(figure[0], "7 MiB", 1)) == README


def test_pictures_are_those_of_the_results() -> None:
    for path, text in PICTURES.files().items():
        assert path.read_text(encoding="utf-8") == text, "write: python docs/pictures.py --write"
        assert README.count(f"docs/_static/{path.name}") == 1


def test_chart_names_each_rung_with_its_figure() -> None:
    memory, _ = PICTURES.figures("ladder_cpu.json")
    drawn = PICTURES.svg(memory, PICTURES.LIGHT)
    assert len(memory.table.rows) > 9
    for name, figure in memory.table.rows:
        assert f">{name.text}<" in drawn
        assert f">{figure.text}<" in drawn
