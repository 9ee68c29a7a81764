"""The exam of fault tolerance: `make faults`, which prints a table by row of faults and writes it as JSON.

Each part runs in a process of its own, and its result is kept in a file. An interrupted exam continues after the last
part that ended, unless the code has changed since.

python -m tests.faults --write examples/results/faults_cpu.json --parts kills,files,rows
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from this_machine import machine, versions  # noqa: E402

from lightning_solo.atomic_files import read_json, write_json, write_whole  # noqa: E402
from tests.faults import rows  # noqa: E402
from tests.faults.parts import all_parts, in_fresh_process  # noqa: E402

KEPT = ROOT / "runs" / "faults.json"
"""Results of the parts of an exam that hasn't ended."""


def code_hash() -> str:
    """Return a hash of the package and its tests."""
    found = hashlib.sha256()
    for path in sorted(path for folder in ("lightning_solo", "tests", "conf") for path in (ROOT / folder).rglob("*")):
        if path.suffix in (".py", ".yaml", ".cpp"):
            found.update(path.read_bytes())
    return found.hexdigest()


def result_of(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the exam's result of the results of its parts."""
    values = {name: part["result"] for name, part in parts.items()}
    result = {"kills": [each for name, found in values.items() if name.startswith("kills") for each in found]}
    result |= values.get("files", {})
    if "rows" in values:
        result["rows"] = values["rows"]
    result["seconds"] = {name: part["seconds"] for name, part in parts.items()}
    return {**result, "hardware": machine(), "versions": versions(), "table": rows.report(result)}


def main() -> int:
    """Run the parts that have no result yet; return 1 if a fault was not survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="kills,files,rows", help="beginnings of the names of parts")
    parser.add_argument("--trials", type=int, default=250, help="killed processes by way, file system and moments")
    parser.add_argument("--write", type=Path, help="file for the result, once all parts have one")
    options = parser.parse_args()
    same = {"code": code_hash(), "trials": options.trials}
    kept = read_json(KEPT) or {}
    if {name: kept.get(name) for name in same} != same:
        kept = {**same, "parts": {}}
    every = all_parts(ROOT, options.trials)
    for name, part in every.items():
        if name in kept["parts"] or not name.startswith(tuple(options.parts.split(","))):
            continue
        started = time.monotonic()
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(in_fresh_process, part).result()
        kept["parts"][name] = {"result": found, "seconds": time.monotonic() - started}
        write_json(KEPT, kept)
        print(f"{name}: {kept['parts'][name]['seconds']:.0f} s", flush=True)
    result = result_of(kept["parts"])
    print(rows.text(result["table"]))
    if kept["parts"].keys() == every.keys():
        if options.write:
            write_whole(options.write, (json.dumps(result, indent=1, default=dict) + "\n").encode())
        KEPT.unlink()
    else:
        print(f"without a result yet: {', '.join(name for name in every if name not in kept['parts'])}")
    return int(any(line["failed"] for line in result["table"]))


if __name__ == "__main__":
    sys.exit(main())
