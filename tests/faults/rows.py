"""Tests of single faults, by the rows of faults in their parameter ids, and the table of the exam."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lightning_solo.tables import Cell, Table, markdown

FAULTS = {
    32: "SIGKILL at a chosen call of a save",
    33: "SIGKILL at a random moment of a save",
    34: "the same on another file system",
    35: "disk full at any byte",
    36: "quota, limit of sizes, read-only or failing disk",
    37: "folder may not be written",
    38: "folder deleted in the run",
    39: "file empty, truncated at any byte, any byte flipped",
    40: "all files damaged",
    41: "manifest missing or damaged",
    42: "unfinished files of a killed run",
    43: "two processes in one folder",
    44: "clock goes back",
    45: "save in mid-epoch, resume",
    46: "save within an accumulation window, resume",
    47: "save on the last batch of an epoch, resume",
    48: "resume with shuffling, dropout, workers",
    49: "resume within validation",
    50: "resume with another accumulation schedule",
    51: "a loader without state",
    52: "SIGTERM in training, validation, sanity check; twice",
    53: "SIGUSR1, SIGINT, SIGHUP",
    54: "exception in a step, a callback, a save",
    55: "validation after a failed fit removes its checkpoint",
    56: "checkpoint with missing keys, other keys, other shapes",
    57: "OmegaConf's objects in hyperparameters",
    58: "pruning while the newest file is damaged",
    59: "three crashes and resumes in a row",
    60: "out of memory in forward or backward",
    61: "out of memory in the optimizer's step",
    62: "out of memory in validation",
    63: "out of memory with one sample",
    64: "texts of errors of memory",
    65: "tensors alive after an error of memory",
    66: "offloading after an exception",
    67: "planner against a limit of memory",
    68: "host memory too small for offloading",
    69: "`empty_cache` fails",
    70: "loss NaN or infinite in any micro-batch",
    71: "gradient infinite, loss finite",
    72: "spike of the loss",
    73: "loss scale of fp16 at its floor",
    74: "means over tokens, in windows and parts",
    75: "short last window",
    76: "clipping with accumulation",
    77: "recomputation of batch norm, dropout, tied weights and others",
    78: "offloading of views, changes in place, second backward",
    79: "presets and techniques in pairs",
    80: "pickled code in a file",
    81: "`_target_` that is not allowed",
    82: "logging section that calls",
    83: "secret of the environment in a configuration",
    84: "run's name that is a path",
    85: "link out of the run's folder, remote folder",
    86: "folder of compiled code that others may write into",
    87: "lock of a killed build",
    88: "two of four jobs of a sweep fail",
    89: "job killed or hanging",
    90: "sweep interrupted and started again",
    91: "log that can't be written, half a line",
    92: "order of callbacks; one of them twice",
}
"""Row of faults -> the fault."""

STOCK = {
    35: "former file destroyed (disk full)",
    36: "former file kept (limit of sizes)",
    37: "no error, no file",
    38: "goes on without a word",
    39: "no other file is tried; flipped bits load",
    45: "the first batches are replayed",
    46: "gradients of the window are lost",
    47: "an epoch is lost",
    48: "4 of 32 exact",
    52: "nothing saved, status 0",
    53: "nothing saved (SIGUSR1)",
    55: "file removed",
    57: "can't be resumed",
    64: "misses cuBLAS, cuDNN, HIP and MPS",
    70: "all weights NaN",
    75: "gradient 0.25 to 0.75 of its size",
}
"""Row -> what stock Lightning 2.6.6 did when it was measured apart from this exam."""

STOCK_WAY = "stock Lightning"
"""Name of its way to save."""

ID = re.compile(r"\brow (\d+)\b")


class Plugin:
    """Runs the tests that have a row in their parameter id, and counts them."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, int]] = {}
        self.failed: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if _rows(item.nodeid) and _is_quick(item)]
        config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
        items[:] = chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        for row in _rows(report.nodeid):
            counts = self.rows.setdefault(row, {"passed": 0, "failed": 0, "skipped": 0})
            counts[report.outcome] += 1
        if report.failed:
            self.failed.append(report.nodeid)


def _is_quick(item: pytest.Item) -> bool:
    """Return whether a test is in `make test`, or in the exam alone."""
    return item.get_closest_marker("long") is None or "/faults/" in str(item.path)


def _rows(nodeid: str) -> list[str]:
    return ID.findall(nodeid.partition("[")[2])


def run(root: Path) -> dict[str, Any]:
    """Return by row how many tests passed, failed or were skipped, in a process that has imported nothing before."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        subprocess.run([sys.executable, "-m", "tests.faults.rows", str(root), str(file)], cwd=root, check=True)
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def run_here(root: Path) -> dict[str, Any]:
    """As `run`, in this process."""
    plugin = Plugin()
    suite = "not gpu and not simcuda"
    arguments = [str(root / "tests"), "-q", "-m", suite, "--timeout=600", "-p", "no:cacheprovider"]
    pytest.main(arguments, plugins=[plugin])
    return {"tests": dict(sorted(plugin.rows.items())), "failed": plugin.failed}


def report(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a line for each row: fault, trials, what came of ours and of stock Lightning."""
    lines = []
    for row, fault in FAULTS.items():
        counts = result.get("rows", {}).get("tests", {}).get(str(row), {})
        passed, failed = counts.get("passed", 0), counts.get("failed", 0)
        ours, trials = (f"{failed} failed" if failed else "passed") if passed + failed else "no test", passed + failed
        stock = f"{STOCK[row]}¹" if row in STOCK else ""
        for more, wrong, text, other in _measured(result, row):
            trials, failed = trials + more, failed + wrong
            ours, stock = text, other
        lines.append({"row": row, "fault": fault, "trials": trials, "ours": ours, "stock": stock, "failed": failed})
    return lines


def _measured(result: dict[str, Any], row: int) -> list[tuple[int, int, str, str]]:
    """Return trials, failed trials and the words for ours and stock, of a row that the exam measures itself."""
    if row in (32, 33, 34) and "kills" in result:
        kinds = {32: ("failpoints", "disk"), 33: ("random", "disk"), 34: (None, "shared memory")}
        moments, folder = kinds[row]
        found = [k for k in result["kills"] if moments in (None, k["moments"]) and k["folder"] == folder]
        ours, stock = ([k for k in found if (k["way"] == STOCK_WAY) == is_stock] for is_stock in (False, True))
        return [(total(ours, "trials"), bad(ours), _kills(ours), _kills(stock))]
    if row == 35 and "full_disk" in result:
        ours, stock = result["full_disk"]["ours"], result["full_disk"]["stock"]
        words = [f"former file lost in {each['former file lost']:,} of {each['trials']:,}" for each in (ours, stock)]
        return [(ours["trials"], ours["former file lost"] + ours["left over"] + ours.get("no error", 0), *words)]
    if row == 39 and "damage" in result:
        ours, stock = ({**each} for each in result["damage"].values())
        words = [f"{_missed(each):,} of {sum(each.values()):,} load otherwise" for each in (ours, stock)]
        return [(sum(ours.values()), _missed(ours), *words)]
    return []


def total(kills: list[dict[str, Any]], name: str) -> int:
    """Return the sum of a field of results of killed processes."""
    return sum(each[name] for each in kills)


def bad(kills: list[dict[str, Any]]) -> int:
    """Return how many killed processes left a file that can't be read, of other content or too old."""
    return total(kills, "unreadable") + total(kills, "changed") + total(kills, "lost")


def _kills(kills: list[dict[str, Any]]) -> str:
    names = {"unreadable": "unreadable", "changed": "of other content", "lost": "older than the last save"}
    counts = [f"{total(kills, name)} {words}" for name, words in names.items() if total(kills, name)]
    return f"{' and '.join(counts) or '0 unreadable or old'} of {total(kills, 'trials'):,}"


def _missed(damage: dict[str, int]) -> int:
    return sum(count for kind, count in damage.items() if kind.endswith(("otherwise", "missed")))


HEADS = ["row", "fault", "trials or tests", "ours", "stock Lightning 2.6.6"]


def text(lines: list[dict[str, Any]]) -> str:
    """Return the table as Markdown."""
    cells = [[str(line[name]) for name in ("row", "fault", "trials", "ours", "stock")] for line in lines]
    return markdown(Table("", HEADS, [[Cell(each) for each in line] for line in cells]))


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run_here(Path(sys.argv[1]))))
