"""Part g of `make gpu`: README's ladder; what it has measured when the time is over is its result."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from result import SMALL, Result

MODEL = (
    ["model=byte_gpt_tiny", "data.context=16", "data.max_bytes=100000", "--steps", "4"]
    if SMALL
    else ["model=byte_gpt_124m", "data.context=1024", "data.max_bytes=4000000", "--steps", "25"]
)
LIMIT_S = 380
"""Less than the part's own, so that the command can end what runs and write what is done."""


def main() -> int:
    """Run the ladder until it is done, or interrupt it."""
    result = Result("ladder")
    folder = tempfile.mkdtemp()
    through = os.environ.get("GPU_THROUGH")
    command = [sys.executable, *(["-m", through] if through else []), "-m", "lightning_solo.cli", "ladder", *MODEL]
    with result.attempt("ladder"):
        process = subprocess.Popen([*command, "run=gpu", f"root={folder}"])
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            status = process.wait()
        (found,) = Path(folder).rglob("ladder.json")
        shutil.copy(found, result.path.with_name("ladder_gpu.json"))
        rows = json.loads(found.read_text())["rows"]
        for row in rows:
            result.add(row["name"], **{name: value for name, value in row.items() if isinstance(value, int | float)})
        result.add("ladder", rungs=len(rows), status=status)
    return result.end()


if __name__ == "__main__":
    sys.exit(main())
