"""Part d of `make gpu`: a model of 1 billion parameters under each preset, each in a process of its own."""

from __future__ import annotations

import sys

from result import SMALL, Result
from runs import trained

FIRST = (
    ("compact", "compact_host")
    if SMALL
    else ("compact", "bf16", "checkpointing", "compact_checkpointing", "compact_host", "baseline", "bf16_true")
)
DEEPSPEED = ("zero_offload",) if SMALL else ("zero_offload", "zero_offload_parameters")
REST = () if SMALL else ("compact_host_checkpointing", "accumulation", "fp16")
SIZE = (
    ["--model", "tiny", "--context", "16", "--batch", "2"]
    if SMALL
    else ["--model", "1b", "--context", "2048", "--batch", "4"]
)


def main() -> int:
    """Train under each preset, those that matter most first."""
    result = Result("presets")
    for preset in (*FIRST, *REST):
        trained(result, preset, [preset, *SIZE, "--plan"])
    for preset in DEEPSPEED:
        if result.has("deepspeed", preset):
            trained(result, preset, [preset, *SIZE])
    return result.end()


if __name__ == "__main__":
    sys.exit(main())
