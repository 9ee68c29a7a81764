"""Every part of `make gpu` runs to its end on small sizes: no minute of a lent GPU is lost to a misspelt name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.messages import lines_with

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "a": "ceilings",
    "b": "fused_step",
    "c": "marked_tests",
    "d": "presets",
    "e": "host_states",
    "f": "plans",
    "g": "ladder",
    "h": "survival",
    "i": "compression",
    "j": "streaming",
}
SHORT = "a"

pytestmark = pytest.mark.simcuda


@pytest.mark.parametrize(
    "part", [part if part in SHORT else pytest.param(part, marks=pytest.mark.long) for part in PARTS]
)
def test_a_part_runs_on_small_sizes(part: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / "gpu" / "run.py"
    options = ["--small", "--through", "tests.simcuda", "--parts", part, "--results", str(tmp_path)]
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert f"{part}  {PARTS[part]:<12}  done in" in done.stdout
    content = json.loads((tmp_path / f"{PARTS[part]}.json").read_text())
    assert content["rows"]
    assert not [row for row in content["rows"] if "failed" in row]
    assert all(row.get("equal", True) is True and row.get("acts", True) is True for row in content["rows"])
    assert PARTS[part] in (tmp_path / "log.txt").read_text()


def test_parts_that_do_not_exist_are_refused() -> None:
    script = ROOT / "examples" / "gpu" / "run.py"
    done = subprocess.run([sys.executable, str(script), "--parts", "ax"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert lines_with(done.stderr, "--parts ax: ", "abcdefghij")
