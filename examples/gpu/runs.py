"""Runs of `train.py` in processes of their own, each a row of a part's result."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

from result import Result, apart

LIMIT_S = 120


def trained(result: Result, what: str, arguments: Sequence[str], script: str = "train.py") -> None:
    """Run a script whose last line is a row."""
    with result.attempt(what):
        done = subprocess.run(
            apart(script, arguments), capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            words = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["it said nothing"]
            raise RuntimeError(f"status {done.returncode}: {words[0]}")
        result.add(what, **json.loads(lines[-1]))
