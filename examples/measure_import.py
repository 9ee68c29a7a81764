"""Measures what importing costs: the package alone, and a preset's arguments above `import lightning.pytorch`.

python examples/measure_import.py
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

RUNS = 9
TIMED = "import time; started = time.perf_counter(); {code}; print(time.perf_counter() - started)"
CODES = {
    "import lightning_solo": "import lightning_solo",
    "import lightning.pytorch": "import lightning.pytorch",
    "import lightning.pytorch, then trainer_kwargs('bf16')": (
        "import lightning.pytorch, lightning_solo; lightning_solo.trainer_kwargs('bf16')"
    ),
    "import lightning.pytorch, then trainer_kwargs('checkpointing')": (
        "import lightning.pytorch, lightning_solo; lightning_solo.trainer_kwargs('checkpointing')"
    ),
}


def seconds(code: str) -> float:
    """Return how long ``code`` takes in a fresh process, without the start of Python."""
    done = subprocess.run([sys.executable, "-c", TIMED.format(code=code)], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    """Measure in turns, so that a slow moment of the machine hits every row, and write the medians."""
    times: dict[str, list[float]] = {name: [] for name in CODES}
    for _ in range(RUNS):
        for name, code in CODES.items():
            times[name].append(seconds(code))
    result = {
        "command": "python examples/measure_import.py",
        "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()})",
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in ("torch", "lightning", "hydra-core")},
        },
        "runs": RUNS,
        "seconds": {name: round(statistics.median(found), 3) for name, found in times.items()},
    }
    out = Path(__file__).parent / "results" / "import_cpu.json"
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result["seconds"], indent=2))


if __name__ == "__main__":
    main()
