"""The parts of the exam, each of which can run in a process of its own."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lightning_solo.machine import file_system
from tests.faults import file_faults, kill_loop, rows

PLACES = {"disk": Path(tempfile.gettempdir()), "shared memory": Path("/dev/shm")}
"""Folders on two file systems."""


def kills(way: str, place: str, trials: int) -> list[dict[str, Any]]:
    """Return the results of killed processes by moments."""
    seed = [*kill_loop.WAYS].index(way) + 100 * [*PLACES].index(place)
    found = kill_loop.run(way, PLACES[place], trials, seed)
    return [{**asdict(each), "folder": place, "file_system": file_system(PLACES[place])} for each in found]


def files() -> dict[str, Any]:
    """Return the results of faults at every byte of a file."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("full", "full_stock", "damaged"):
            (Path(folder) / name).mkdir()
        found["full_disk"] = {
            "ours": file_faults.full_disk(Path(folder, "full")),
            "stock": file_faults.full_disk_of_stock(Path(folder, "full_stock")),
        }
        ours, stock = file_faults.damage_at_every_byte(Path(folder, "damaged")).values()
        found["damage"] = {"ours": ours, "stock": stock}
    return found


def in_fresh_process(part: Callable[[], Any]) -> Any:
    """Return the result of a part; the process that runs it starts others as an ordinary one does."""
    multiprocessing.set_start_method("fork", force=True)  # a spawned process would spawn the workers of loaders
    return part()


def all_parts(root: Path, trials: int) -> dict[str, Callable[[], Any]]:
    """Return the parts of the exam by name."""
    killing = {
        f"kills: {way}, {place}": partial(kills, way, place, trials) for way in kill_loop.WAYS for place in PLACES
    }
    return {**killing, "files": files, "rows": partial(rows.run, root)}
