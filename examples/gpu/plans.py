"""Part f of `make gpu`: the device calibrated, then four presets planned by that and measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from result import SMALL, Result, apart
from runs import trained

PRESETS = ("bf16", "checkpointing", "compact", "compact_host")
SIZE = (
    ["--model", "tiny", "--context", "16", "--batch", "2"]
    if SMALL
    else ["--model", "124m", "--context", "1024", "--batch", "16"]
)


def main() -> int:
    """Calibrate, plan, measure."""
    result = Result("plans")
    os.environ["XDG_CACHE_HOME"] = str(result.path.parent / "cache")  # the readings are for this part alone
    with result.attempt("calibrate"):
        done = subprocess.run(apart("calibrate.py", []), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        result.add("calibrate", **json.loads(done.stdout))
    trained(result, {preset: [preset, *SIZE, "--plan"] for preset in PRESETS})
    return result.end()


if __name__ == "__main__":
    sys.exit(main())
