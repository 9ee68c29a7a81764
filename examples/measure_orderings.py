"""Remove each ordering of streams and the host from the package, one at a time, and see whether a test turns red.

An ordering is a call of one of `NAMES` on a stream, an event, a tensor, a device or an object of ours that waits for
one; they are found in the syntax tree, so those that are added later are among them. In a copy of the checkout each is
replaced by None, and the tests of the simulated CUDA device run until the first fails. All must.

    python examples/measure_orderings.py --write examples/results/orderings.json
    python examples/measure_orderings.py --only staging   # places whose path or line holds this; other rows are kept
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from this_machine import machine, versions

ROOT = Path(__file__).resolve().parents[1]
NAMES = {"wait_event", "wait_stream", "record_stream", "record_event", "synchronize", "wait", "_wait", "_await_copy"}
NOT_STREAMS = {"_process", "process", "done"}  # other processes that are waited for
TESTS = [
    ["tests/simcuda/test_orderings.py"],
    ["tests/techniques/test_activation_offloading.py", "-k", "not pytorch_lightning"],
    [
        "tests/simcuda/test_presets.py",
        "tests/optim",
        "tests/techniques/test_compact_states.py",
        "-k",
        "not pytorch_lightning",
    ],
]
"""In this order: those that are made for it first."""
MARKS = "(gpu or simcuda or every_change) and not long"


class Place(NamedTuple):
    """A call in a file of the package."""

    path: str
    line: int
    function: str
    call: str


def places(folder: Path) -> Iterator[tuple[Place, ast.Call]]:
    """Yield the orderings of all files below a folder."""
    for file in sorted((folder / "lightning_solo").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for function in [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]:
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in NAMES:
                    of = node.func.value
                    last = of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
                    if last not in NOT_STREAMS:
                        path = str(file.relative_to(folder))
                        yield Place(path, node.lineno, function.name, ast.unparse(node)), node


def without(source: str, call: ast.Call) -> str:
    """Return a file's text with a call replaced by None."""
    lines = source.splitlines(keepends=True)
    first, last = call.lineno - 1, (call.end_lineno or call.lineno) - 1
    head = lines[first].encode()[: call.col_offset].decode()
    tail = lines[last].encode()[call.end_col_offset :].decode()
    return "".join([*lines[:first], head + "None" + tail, *lines[last + 1 :]])


def first_failure(folder: Path) -> str:
    """Return the first test that fails in a checkout, with what it says; "" if none does."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    for tests in TESTS:
        command = [sys.executable, "-m", "pytest", "-p", "tests.simcuda.plugin", "-m", MARKS, "-x", "-q", "--tb=line"]
        command += ["-p", "no:cacheprovider", "--timeout=300", *tests]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 1:
            lines = done.stdout.splitlines()
            failed = next(line for line in lines if line.startswith(("FAILED", "ERROR")))
            raced = any("races on the simulated CUDA device" in line for line in lines)
            return f"{failed.split(' - ')[0].split(' ', 1)[1]} ({'race' if raced else 'assertion'})"
        if done.returncode != 0:
            raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
    return ""


def measure(only: str) -> dict[str, Any]:
    """Return whether each ordering's removal turns a test red, by which."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv*", "*.pyc", "__pycache__", "runs", "results")
        shutil.copytree(ROOT, folder, ignore=ignored)
        if failed := first_failure(folder):
            raise SystemExit(f"with all orderings in their place {failed} fails already: mend that first")
        for place, call in places(folder):
            if only not in f"{place.path}:{place.line}":
                continue
            file, begun = folder / place.path, time.monotonic()
            source = file.read_text(encoding="utf-8")
            file.write_text(without(source, call), encoding="utf-8")
            try:
                red = first_failure(folder)
            finally:
                file.write_text(source, encoding="utf-8")
            rows.append({**place._asdict(), "red": red, "seconds": round(time.monotonic() - begun, 1)})
            print(f"{place.path}:{place.line}  {place.call}  {red or 'NO TEST FAILS'}", flush=True)
    return results(rows)


def results(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return rows with their counts, and where they were measured."""
    red = sum(bool(row["red"]) for row in rows)
    return {"machine": machine(), "versions": versions(), "orderings": len(rows), "red": red, "rows": rows}


def with_others(found: dict[str, Any], only: str, path: Path) -> dict[str, Any]:
    """Return results with the rows of a file that weren't measured again."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if only and path.exists() else []
    kept = [row for row in rows if only not in f"{row['path']}:{row['line']}"]
    return results(sorted([*kept, *found["rows"]], key=lambda row: (row["path"], row["line"])))


def main() -> int:
    """Remove, run, print; exit status 1 if a removal goes unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of path:line")
    parser.add_argument("--write", type=Path, help="the results file")
    given = parser.parse_args()
    found = measure(given.only)
    print(f"{found['red']} of {found['orderings']} removals turn a test red")
    if given.write:
        found = with_others(found, given.only, given.write)
        given.write.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(found["red"] < found["orderings"])


if __name__ == "__main__":
    sys.exit(main())
