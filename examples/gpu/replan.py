"""Plans what parts d and j of `make gpu` have measured, from the calibration of part f; needs no GPU.

Planned figures are written beside the measured ones, in the same files. So a change of the planner can be compared with
a GPU on any machine. Runs that place tensors by the free memory aren't planned, and neither are those of `save_on_cpu`.

    python examples/gpu/replan.py
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "gpu"
LIMIT_S = 600


def main() -> int:
    """Plan each row, and print both figures."""
    sys.path.insert(0, str(HERE.parent))
    from result import short
    from train import made, parsed, planned

    device = calibrated_device()
    for name in ("presets", "streaming"):
        file = RESULTS / f"{name}.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        for row in content["rows"]:
            if "arguments" not in row:  # it failed
                continue
            given = parsed(shlex.split(row["arguments"]))
            if given.save_on_cpu or "as needed" in row["what"]:
                continue
            figures = planned(given, *made(given), device, LIMIT_S)
            if "plan_failed" in figures:
                print(f"{row['what']}: {figures['plan_failed']}", flush=True)
                continue
            row.update({key: short(value) for key, value in figures.items()})
            print(
                f"{row['what']}: {figures['planned_bytes'] / row['peak_allocated_bytes'] - 1:+.2%} of the bytes,"
                f" {figures['planned_s'] / row['micro_batch_s'] - 1:+.1%} of the seconds",
                flush=True,
            )
            file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def calibrated_device() -> Any:
    """Return the device that was measured."""
    from lightning_solo.planner.calibration import Readings, calibrated
    from lightning_solo.presets.devices import find

    rows = json.loads((RESULTS / "plans.json").read_text(encoding="utf-8"))["rows"]
    (row,) = (row for row in rows if row["what"] == "calibrate")
    device = find(row["device"])
    assert device is not None
    return calibrated(device, Readings(**{field.name: row[field.name] for field in fields(Readings)}))


if __name__ == "__main__":
    sys.exit(main())
