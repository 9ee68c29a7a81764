"""Measure what safe checkpoints cost: seconds of a save above `torch.save`, and the stall of an asynchronous one.

`python examples/measure_checkpoints.py --write examples/results/checkpoints_cpu.json`
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from this_machine import machine, versions

from lightning_solo.techniques.safe_checkpoint.io import SafeIO


class Nothing:
    """What a `SafeIO` needs of Lightning where it only writes."""

    def teardown(self) -> None:
        """Do nothing."""


def seconds(act: Callable[[], Any], after: Callable[[], Any] = lambda: None) -> float:
    """Return the seconds that a call takes; ``after`` runs when they are over."""
    started = time.perf_counter()
    act()
    taken = time.perf_counter() - started
    after()
    return taken


def measure(folder: Path, mebibytes: int, repeats: int, device: str = "cpu") -> list[dict[str, Any]]:
    """Return a row for each way to save a checkpoint of a size from a device; the ways take turns."""
    weights = {f"{n}": torch.randn(mebibytes << 10, 16, device=device) for n in range(16)}
    checkpoint = {"state_dict": weights, "global_step": 1}
    ways: dict[str, Callable[[Path], tuple[Callable[[], Any], Callable[[], Any]]]] = {
        "`torch.save`": lambda path: (lambda: torch.save(checkpoint, path), lambda: None),
        "`safe_checkpoint`, `durable=false`": partial(safely, checkpoint, durable=False),
        "`safe_checkpoint`": partial(safely, checkpoint),
        "`safe_checkpoint`, `asynchronous=true`: what training waits": partial(safely, checkpoint, asynchronous=True),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    acts = {}
    for number, (name, way) in enumerate(ways.items()):
        (folder / str(number)).mkdir()
        acts[name] = way(folder / str(number) / "last.ckpt")
    for _ in range(repeats + 1):  # the first one warms the page cache
        for name, (act, after) in acts.items():
            times[name].append(seconds(act, after))
    medians = {name: statistics.median(each[1:]) for name, each in times.items()}
    plain = medians["`torch.save`"]
    return [{"way": name, "seconds": value, "of_torch_save": value / plain} for name, value in medians.items()]


def safely(
    checkpoint: Any, path: Path, durable: bool = True, asynchronous: bool = False
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the functions that save during a fit, and that wait for the end of the save."""
    safe = SafeIO(Nothing(), asynchronous=asynchronous, durable=durable)
    safe.holds_locks = True
    return lambda: safe.save_checkpoint(checkpoint, path), safe.wait


def main() -> None:
    """Measure, and print or write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        rows = measure(Path(folder), given.mebibytes, given.repeats)
    result = {
        "machine": machine(),
        "versions": versions(),
        "mebibytes": given.mebibytes,
        "repeats": given.repeats,
        "rows": rows,
    }
    text = json.dumps(result, indent=1, ensure_ascii=False)
    given.write.write_text(text + "\n", encoding="utf-8") if given.write else print(text)


if __name__ == "__main__":
    main()
