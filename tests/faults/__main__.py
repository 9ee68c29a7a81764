"""The exam of fault tolerance: `make faults`, which prints a table by row of faults and writes it as JSON.

python -m tests.faults --write examples/results/faults_cpu.json --parts kills,files,rows
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from this_machine import machine, versions  # noqa: E402

from tests.faults import file_faults, kill_loop, rows  # noqa: E402

SHARED_MEMORY = Path("/dev/shm")  # another file system than that of temporary files


def kills(trials: int) -> dict[str, Any]:
    """Return what came of killed processes, by way, file system and moments."""
    found = []
    with tempfile.TemporaryDirectory() as disk:
        for way in kill_loop.WAYS:
            for name, place in (("disk", Path(disk)), ("shared memory", SHARED_MEMORY)):
                for each in kill_loop.run(way, place, trials, seed=len(found)):
                    found.append({**asdict(each), "folder": name})
                    print(found[-1], flush=True)
    return {"kills": found}


def files(_: int) -> dict[str, Any]:
    """Return what came of faults at every byte of a file."""
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
    print(found)
    return found


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "kills": kills,
    "files": files,
    "rows": lambda _: {"rows": rows.run(ROOT)},
}


def main() -> int:
    """Run the parts; return 1 if a fault was not survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--trials", type=int, default=250, help="killed processes by way, file system and moments")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    result = json.loads(options.write.read_text()) if options.write and options.write.exists() else {}
    for part in options.parts.split(","):
        started = time.monotonic()
        result |= PARTS[part](options.trials)
        result.setdefault("seconds", {})[part] = time.monotonic() - started
        result |= {"hardware": machine(), "versions": versions()}
        result["table"] = rows.report(result)
        if options.write:
            options.write.write_text(json.dumps(result, indent=1, default=dict) + "\n", encoding="utf-8")
    print(rows.text(result["table"]))
    return int(any(line["failed"] for line in result["table"]))


if __name__ == "__main__":
    sys.exit(main())
