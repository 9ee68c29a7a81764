"""Part j of `make gpu`: activations, weights and states on the host, and torch's `save_on_cpu`, beside a resident run.

Rows of one model: time of a step and peak, with activations kept, recomputed, their inputs on the host, all of them on
the host by torch's own context (which waits for each copy), and by `activation_offloading`. Then weights and states
stream, of this model and of a larger one.
"""

from __future__ import annotations

import sys

from result import SMALL, Result
from runs import trained

CONTEXT = ["--context", "16", "--batch", "2"] if SMALL else ["--context", "2048", "--batch", "4"]
ALL = ["+callback=activation_offloading", "callback.activation_offloading.mode=all"]
MIN = ["callback.activation_offloading.min_offload_bytes=64"] if SMALL else []
STREAMED = ["callback.weights_on_host.weight_budget=null", "callback.compact_states.state_budget=0"]
RUNS = {
    "all on the device": ["compact"],
    "recomputed": ["compact_checkpointing"],
    "recomputed, inputs on the host": ["compact_checkpointing", "+callback=activation_offloading", *MIN],
    "activations on the host by torch's save_on_cpu": ["compact", "--save-on-cpu"],
    "activations on the host": ["compact", *ALL, *MIN],
    "recomputed, states on the host": ["compact_checkpointing", STREAMED[1]],
    "recomputed, weights and states on the host": ["stream_checkpointing", *STREAMED],
    "recomputed, weights and states on the host as needed": ["stream_checkpointing"],
}


def main() -> int:
    """Train in each way, the larger model in the last two."""
    result = Result("streaming")
    one = ["--model", "tiny" if SMALL else "1b", *CONTEXT]
    trained(result, {what: [*arguments, *one] for what, arguments in RUNS.items()})
    if not SMALL:
        larger = {f"7 billion parameters, {what}": RUNS[what] for what in [*RUNS][-2:]}
        trained(result, {what: [*arguments, "--model", "7b", *CONTEXT] for what, arguments in larger.items()})
    return result.end()


if __name__ == "__main__":
    sys.exit(main())
