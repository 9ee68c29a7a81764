"""Part c of `make gpu`: the tests of CUDA code on the real device, each with how it ended and why it was skipped.

They are the tests marked `gpu`, and those that CI runs on the simulated device (`any_device`, `simcuda`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from result import SMALL, Result

MARKS = ("gpu", "any_device", "simcuda")
SOME = ["tests/memory", "tests/optim/test_host_memory.py"]
"""What a small run looks at."""


def files() -> list[str]:
    """Return the files that have such tests, but for those in `tests/simcuda`, which test the simulated device."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(Path("tests").rglob("test_*.py"))}
    return [
        str(path)
        for path, text in texts.items()
        if path.parts[1] != "simcuda" and any(f"mark.{mark}" in text for mark in MARKS)
    ]


def main() -> int:
    """Run the tests, and write a row for each that did not pass."""
    result = Result("marked_tests")
    report = result.path.with_name("tests.xml")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu" if SMALL else " or ".join(MARKS),
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        "--timeout=120",
        "-q",
        *(SOME if SMALL else files()),
    ]
    if through := os.environ.get("GPU_THROUGH"):
        command = [sys.executable, "-m", through, "-m", *command[2:]]
    status = subprocess.run(command, check=False).returncode
    with result.attempt("tests"):
        passed = 0
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
            end = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
            if end is None:
                passed += 1
            else:
                kind = {"skipped": "skipped"}.get(end.tag, "failed")
                result.add(name, **{kind: (end.get("message") or "")[:300], "seconds": float(case.get("time", 0))})
        result.add("tests", passed=passed, status=status)
        report.unlink()
    return result.end() or status


if __name__ == "__main__":
    sys.exit(main())
