"""The result of one part of `make gpu`: rows that are in the file as soon as they are known; and how time is taken."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from this_machine import machine, versions

SMALL = bool(os.environ.get("GPU_SMALL"))
"""Whether sizes are small: the same code, to see that it runs."""


class Result:
    """Rows of a part, in ``<folder>/<part>.json``.

    Args:
        part: its name.
    """

    def __init__(self, part: str) -> None:
        here = Path(__file__).resolve().parents[1] / "results" / "gpu"
        self.path = Path(os.environ.get("GPU_RESULTS") or here) / f"{part}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.failed = False
        self._writing = threading.Lock()
        self._content: dict[str, Any] = {
            "part": part,
            "command": " ".join(["python examples/gpu/run.py", *(["--small"] if SMALL else []), *through()]),
            "small": SMALL,
            "simulated": "simcuda" in os.environ.get("GPU_THROUGH", ""),
            "machine": machine(),
            "versions": versions(),
            "rows": [],
        }
        self._write()

    def add(self, what: str, **figures: Any) -> None:
        """Write a row, and print it."""
        row = {"what": what, **{name: short(value) for name, value in figures.items()}}
        with self._writing:
            self._content["rows"].append(row)
            self._write()
        print("  ".join([f"{what:<40}", *(f"{name}={value}" for name, value in row.items() if name != "what")]))

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Go on behind a measurement that fails: why is its row."""
        try:
            yield
        except Exception as error:
            self.failed = True
            traceback.print_exc(file=sys.stdout)
            self.add(what, failed=f"{type(error).__name__}: {error}"[:500])

    def has(self, package: str, what: str) -> bool:
        """Return whether a package is installed; else its absence is the row."""
        if importlib.util.find_spec(package) is not None:
            return True
        self.add(what, skipped=f"{package} is not installed")
        return False

    def end(self) -> int:
        """Return the exit status."""
        return int(self.failed)

    def _write(self) -> None:
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps(self._content, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)


def through() -> list[str]:
    """Return the options by which scripts run through another module."""
    return ["--through", os.environ["GPU_THROUGH"]] if os.environ.get("GPU_THROUGH") else []


def short(value: Any) -> Any:
    """Return a float in as many digits as a measurement has."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def milliseconds(work: Callable[[], Any], repeats: int = 20, warm_up: int = 3) -> float:
    """Return the median time of work on the GPU, by its own events."""
    import torch

    for _ in range(warm_up):
        work()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def seconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """Return the median time of work on the host, the device's included."""
    import torch

    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def apart(script: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs a script of this folder in a process of its own, with a fresh allocator."""
    through = os.environ.get("GPU_THROUGH")
    return [sys.executable, *(["-m", through] if through else []), str(Path(__file__).with_name(script)), *arguments]
