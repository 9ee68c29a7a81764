"""README says only what is true: its Python runs and prints what it says, its tables are those of the result files."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_solo.cli.command_line import check_command_line
from lightning_solo.cli.ladder_line import compose_base, parse
from lightning_solo.ladder.figures import Figures, as_json
from lightning_solo.presets.compose import compose

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", README, re.DOTALL)
NUMBER = re.compile(r"\d+\.\d+")


def test_there_are_blocks_to_run() -> None:
    assert len(BLOCKS) == README.count("```python") >= 3


@pytest.mark.parametrize(("code", "expected"), BLOCKS, ids=[f"block{n}" for n in range(len(BLOCKS))])
def test_code_runs_and_prints_what_it_says(code: str, expected: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    for line in expected.strip().splitlines():
        pattern = NUMBER.sub("(NUMBER)", line)
        pattern = re.escape(pattern).replace(re.escape("(NUMBER)"), r"(\d+\.\d+)")
        found = re.search(pattern, printed)
        assert found, f"{line!r} was not printed:\n{printed}"
        for said, was in zip(NUMBER.findall(line), found.groups(), strict=True):  # figures differ between processors
            assert float(was) == pytest.approx(float(said), rel=0.1)


def tables() -> Any:
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "examples" / "readme_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_files() -> None:
    module = tables()
    assert len(module.MARK.findall(README)) == README.count("<!-- table:") >= 3
    assert module.render(README) == README


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
    assert printed[measures + 2].endswith(" examples/readme_tables.py --write")
    assert (ROOT / file).exists() or device == "gpu"
    if (ROOT / file).exists():
        assert json.loads((ROOT / file).read_text())["command"] == shlex.join(["lightning-solo", *arguments])
        assert f"<!-- table: {file.name} -->" in README


def test_the_ladders_table_says_what_it_was_measured_with() -> None:
    numbers = {"peak_bytes": 2**30, "step_s": 0.5, "step_quartiles_s": (0.45, 0.55), "loss": 2.0, "device": "cpu"}
    rows = [Figures("baseline", "finished", **numbers, peak_change=0.0, step_change=0.0)]
    rows += [Figures("a", "finished", **numbers, peak_change=-0.5, step_change=0.02, step_within_noise=True)]
    rows += [Figures("b", "not run here", "no CUDA device")]
    said = {
        "hardware": "2 cores",
        "versions": {"torch": "2.13"},
        "steps": 7,
        "memory": "peak",
        "command": "the command",
    }
    lines = tables().ladder_table({**said, "command": "the command", "rows": as_json(rows)}).splitlines()
    assert lines[3] == "| `a` | 1.00 GiB | -50% | 500 ms | ±10% | ~ +2% | 2.0000 |  |  |"  # (0.55 - 0.45) / 2 / 0.5
    assert lines[4].startswith("| `b` | not run here |")
    assert {line.count("|") for line in lines[:5]} == {10}
    for text in ("2 cores; torch 2.13; 7 optimizer steps", "~: within the noise", "Command: `the command`"):
        assert text in lines[6]
    assert lines[8] == "- b: not run here: no CUDA device"


def test_a_changed_table_is_noticed() -> None:
    module = tables()
    figure = re.search(r"\d+\.\d\d [GM]iB", README)
    assert figure is not None
    assert module.render(README.replace(figure[0], "0.01 GiB", 1)) == README


def test_every_training_command_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = re.findall(r"^\$ lightning-solo train (.*)$", README, re.MULTILINE)
    assert len(commands) >= 4
    with monkeypatch.context() as context:
        context.chdir(tmp_path)
        for command in commands:
            check_command_line(command.split())


def test_the_preset_shown_is_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = re.search(r"```yaml\n(# bf16.*?)```", README, re.DOTALL)
    assert shown is not None
    (tmp_path / "conf" / "solo").mkdir(parents=True)
    (tmp_path / "conf" / "solo" / "mine.yaml").write_text(shown[1])
    with monkeypatch.context() as context:
        context.chdir(tmp_path)
        assert compose("mine").callback["activation_checkpointing"]["every_k"] == 2


def test_every_make_target_and_path_it_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make (\w+)`?", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for path in re.findall(r"`((?:conf|examples|tests)/[\w/.]+)`", README):
        assert (ROOT / path).exists() or path.startswith("conf/solo/"), path
