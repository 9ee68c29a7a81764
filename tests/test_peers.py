"""The comparison with peers: its counter, its search, its changed lines, and, where it is long, two peers for real."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_solo.memory.ledger import Ledger
from tests.pages import ROOT

SCRIPT = ROOT / "examples" / "compare_peers.py"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("compare_peers")


def training() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_counted_bytes_are_those_of_the_ledger(peers: Any) -> None:
    older: list[torch.Tensor] = []
    assert peers.allocated_peak(lambda: older.append(torch.zeros(1000))) == 4000

    def run() -> None:
        older.clear()  # was allocated in an earlier count
        training()

    with Ledger() as ledger:
        training()
    assert peers.allocated_peak(run) == ledger.peak_bytes


@pytest.mark.parametrize("budget", [9, 16, 17, 100, 100_000])
def test_the_largest_that_fits_is_found(peers: Any, budget: int) -> None:
    asked = []

    def peak(number: int) -> int:
        asked.append(number)
        return max(10 + 6 * number, 9 * number)

    found = peers.largest(peak, budget)
    assert found == max((n for n in range(1, 20_000) if peak(n) <= budget), default=0)


def test_small_numbers_that_take_the_same_lead_to_no_huge_one(peers: Any) -> None:
    asked = []

    def peak(number: int) -> int:
        asked.append(number)
        return max(8000 - number % 2, 900 * number)

    assert peers.largest(peak, 10_000) == 11
    assert max(asked) <= 22


def test_changed_lines_are_counted_against_plain_lightning(peers: Any) -> None:
    lines = {row.name: peers.changed_lines(row) for row in peers.ROWS if row.script}
    assert lines["Lightning"] == 0
    assert lines["lightning-solo, `compact`"] == 2  # the import, and the preset's arguments
    assert lines["transformers' Trainer, `gradient_checkpointing`"] == lines["transformers' Trainer"] + 1
    assert min(count for name, count in lines.items() if not name.startswith(("lightning-solo", "Lightning"))) > 2


def test_a_peer_that_refuses_the_installed_torch_is_a_reason(peers: Any, tmp_path: Path) -> None:
    folder = tmp_path / "mosaicml"
    metadata = folder / "mosaicml-0.32.1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    text = "Metadata-Version: 2.1\nName: mosaicml\nVersion: 0.32.1\nRequires-Dist: torch{}\n"
    metadata.write_text(text.format("<2.7.1,>=2.6.0"))
    assert "torch<2.7.1" in peers.unmet_pins(folder)
    metadata.write_text(text.format(">=2.6.0"))
    assert peers.unmet_pins(folder) == ""


def test_times_are_divided_by_those_of_the_preset_above_step_by_step(
    peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["lightning-solo, `baseline`", "Lightning", "lightning-solo, `baseline` with `early_zero_grad`", "PyTorch"]
    rows = [row for row in peers.ROWS if row.name in names]
    steps = {names[0]: [2.0, 4.0, 8.0], names[1]: [3.0, 2.0, 12.0], names[2]: [1.0] * 3, names[3]: [2.0] * 3}
    answers = {name: {"processor": [9.0] * peers.WARM_UP + each} for name, each in steps.items()}
    orders = []

    def in_turns(group: list[Any], sizes: dict[str, int]) -> list[dict[str, Any]]:
        orders.append([row.name for row in group])
        return [{**answers[row.name], "wall": answers[row.name]["processor"]} for row in group]

    monkeypatch.setattr(peers, "in_turns", in_turns)
    entries: dict[str, dict[str, Any]] = {row.name: {} for row in rows}
    for preset, group in peers.beside(rows).items():
        peers.time_rows(preset, group, entries, rounds=2, steps=7)
    assert orders == [names[:2], names[1::-1], names[2:], names[:1:-1]]
    assert entries["Lightning"]["processor_ratio"] == [1.5, 1.5]
    assert entries["Lightning"]["processor_s"] == 3.0
    assert entries["PyTorch"]["wall_ratio"] == [2.0, 2.0]
    assert "processor_ratio" not in entries[names[0]]


def test_processes_take_turns_and_one_that_fails_stops_none(
    peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.touch()
    body = """
import json, os, sys, time
name, steps, (go, ready) = json.loads(sys.argv[1])
for step in range(steps):
    os.write(ready, b".")
    os.read(go, 1)
    for word in ("begins", "ends"):
        with open(sys.argv[2], "a") as file:
            file.write(f"{name} {word}\\n")
        time.sleep(0.01)
if name == "fails":
    raise ValueError("it failed")
os.close(ready)
print(json.dumps({"steps": steps}))
"""

    def begun(part: str, row: tuple[str, int], sizes: dict[str, int], turns: tuple[int, int]) -> Any:
        command = [sys.executable, "-c", body, json.dumps([*row, turns]), str(log)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, pass_fds=turns, **pipes)

    monkeypatch.setattr(peers, "begun", begun)
    found = peers.in_turns([("a", 3), ("fails", 1), ("b", 3)], {})
    assert found == [{"steps": 3}, {"error": "ValueError: it failed"}, {"steps": 3}]
    turns = ["a", "fails", "b", "a", "b", "a", "b"]
    assert log.read_text().splitlines() == [f"{name} {word}" for name in turns for word in ("begins", "ends")]


@pytest.mark.long
def test_two_peers_train_the_same_steps(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    rows = ["`baseline` with `early", "PyTorch"]
    command = [sys.executable, str(SCRIPT), "--parts", "loss", "bytes", "--steps", "6", "--write", str(path)]
    done = subprocess.run([*command, "--rows", *rows], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    ours, theirs = found["lightning-solo, `baseline` with `early_zero_grad`"], found["PyTorch"]
    assert ours["loss"] == theirs["loss"] != ours["first_loss"] == theirs["first_loss"]
    assert ours["peak_bytes"] <= theirs["peak_bytes"] + 64  # a few numbers of Lightning's own


def test_results_have_a_row_for_each_peer(peers: Any) -> None:
    stored = json.loads((ROOT / "examples" / "results" / "peers_cpu.json").read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in stored] == [row.name for row in peers.ROWS]
