"""Runs of `train.py` in processes of their own, each a row of a part's result."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from result import Result, apart

LIMIT_S = 120
"""Seconds that a run may have the device."""
AT_ONCE = min(4, (os.cpu_count() or 1) // 2 or 1)
"""How many processes run at a time. They import and plan side by side, and take turns on the device."""


def trained(result: Result, runs: Mapping[str, Sequence[str]]) -> None:
    """Run ``train.py`` once for each row, with the row's arguments; the last line that it prints is the row.

    Args:
        result: gets the rows.
        runs: arguments by the name of the row.
    """
    with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(AT_ONCE) as pool:
        environment = {**os.environ, "GPU_LOCK": lock.name, "GPU_LIMIT_S": str(LIMIT_S)}

        def one(what: str) -> None:
            with result.attempt(what):
                done = subprocess.run(
                    apart("train.py", runs[what]), capture_output=True, text=True, errors="replace", env=environment,
                    timeout=2 * AT_ONCE * LIMIT_S, check=False,
                )  # fmt: skip
                lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
                if done.returncode or not lines:
                    print(done.stderr[-3000:])
                    words = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["it said nothing"]
                    raise RuntimeError(f"status {done.returncode}: {words[0]}")
                result.add(what, arguments=shlex.join(runs[what]), **json.loads(lines[-1]))

        list(pool.map(one, runs))
