"""Run Lightning's own tests without and with seams around the strategy's methods.

    python examples/measure_lightning_suite.py <checkout of Lightning, at the tag of the installed version>

No technique is attached, so every difference is one of the seams. The script exits with 1 if a test fails with seams
alone. Needs pytest-timeout, pytest-xdist, and what Lightning's tests
import (``fastapi httpx matplotlib pillow scikit-learn``). Left out: tests of several processes or other accelerators.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from this_machine import machine, versions

PARTS = ("callbacks", "checkpointing", "core", "loops", "models", "strategies/test_single_device.py", "trainer")
LEFT_OUT = ("ddp", "spawn", "fork", "fsdp", "deepspeed", "notebook", "tpu", "spike")
RESULTS = Path(__file__).with_name("results") / "lightning_suite.json"


def pytest_configure() -> None:
    """Begin a run with seams, and without techniques, under each strategy: this file is the suite's plugin."""
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from lightning_solo.seams.strategy import begin

    stock = SingleDeviceStrategy.setup_environment

    def setup_environment(strategy: SingleDeviceStrategy) -> None:
        stock(strategy)
        if strategy.lightning_module is not None:
            begin(strategy, strategy.lightning_module.trainer)

    SingleDeviceStrategy.setup_environment = setup_environment


def outcomes(tests: Path, part: str, ours: bool, results: Path) -> dict[str, str]:
    """Return how each test of a part ended: ``"passed"``, ``"skipped"``, ``"failure"`` or ``"error"``."""
    here = Path(__file__).resolve().parent
    paths = [str(here.parent), str(here), str(tests), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", f"tests_pytorch/{part}", "-q", "-n1", "--timeout=600"]
    command += ["-k", " and ".join(f"not {word}" for word in LEFT_OUT), f"--junitxml={results}"]
    command += ["-p", Path(__file__).stem] if ours else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True)
    if run.returncode not in (0, 1):
        raise SystemExit(f"{part} was not run:\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}")
    cases = ElementTree.parse(results).getroot().iter("testcase")
    return {f"{case.get('classname')}::{case.get('name')}": ending(case) for case in cases}


def ending(case: ElementTree.Element) -> str:
    """Return how a test ended."""
    return next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")


def main() -> None:
    """Compare part by part, and write the counts and the differences."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("checkout", type=Path)
    arguments.add_argument("--parts", nargs="*", default=list(PARTS), help="folders below tests/tests_pytorch")
    line = arguments.parse_args()
    rows: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in line.parts:
            stock, ours = (
                outcomes(line.checkout / "tests", part, which, Path(folder, "results.xml")) for which in (False, True)
            )
            if stock.keys() != ours.keys():
                raise SystemExit(f"{part}: not the same tests: {sorted(stock.keys() ^ ours.keys())}")
            row: dict[str, object] = {"part": part}
            for word in ("passed", "skipped", "failure", "error"):
                row[word] = [sum(how == word for how in each.values()) for each in (stock, ours)]
            failed = [name for name, how in ours.items() if how in ("failure", "error") and stock[name] != how]
            rows[part] = row | {"fails_with_ours_alone": failed}
            print(json.dumps(rows[part]), flush=True)
    worse = any(row["fails_with_ours_alone"] for row in rows.values())
    if line.parts == list(PARTS):
        report = {"machine": machine(), "versions": versions(), "columns": ["stock", "ours"], "parts": rows}
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(worse)


if __name__ == "__main__":
    main()
