"""How each technique is planned: attached as it is, left out because it holds nothing, or by its own formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_solo.build import make
from lightning_solo.errors import PlanError
from lightning_solo.optim.back_end_facts import BACK_ENDS
from lightning_solo.presets.schema import SoloConfig

# A window of two micro-batches holds what one of any length holds: the gradients, kept through a forward.
WINDOW = 2


@dataclass
class Arrangement:
    """How a preset is traced.

    Attributes:
        arguments: of a Trainer on the CPU; made anew for each trace.
        precision: of the real run, by Lightning's name.
        accumulation: micro-batches per optimizer step in the real run.
        zero_offload: the node of that strategy: model states are then counted by its layout, not traced.
        assumptions: where the trace differs from the run, in words.
    """

    arguments: Callable[[], dict[str, Any]]
    precision: str
    accumulation: int = 1
    zero_offload: Mapping[str, Any] | None = None
    assumptions: list[str] = field(default_factory=list)


def arrange(config: SoloConfig, given: Mapping[str, Any], allow: Sequence[str] = ()) -> Arrangement:
    """Return how a checked preset is traced.

    Args:
        config: the preset.
        given: the user's own arguments of the Trainer, such as ``gradient_clip_val``.
        allow: prefixes of ``_target_`` that the user trusts.

    Raises:
        PlanError: a strategy that no rule knows.
    """
    assumptions: list[str] = []
    asked, strategy = config.precision or str(given.get("precision", "32-true")), config.strategy
    precision = asked
    if strategy is not None and strategy.get("name") not in STRATEGIES:
        raise PlanError(f"strategy={strategy.get('name', strategy.get('_target_'))!r}: no rule says how to plan it")
    if strategy is not None and (back_end := strategy.get("back_end", "own")) != "own":
        raise PlanError(
            f"strategy.back_end={back_end}: a library's own kernels can't be traced; plan strategy.back_end=own with"
            f" {_nearest(back_end)}"
        )
    if strategy is not None:
        precision = STRATEGIES[strategy["name"]](precision)
    elif precision == "16-mixed":
        precision = "bf16-mixed"
        assumptions.append("16-mixed is planned as bf16-mixed: the sizes are the same, no step is skipped")
    nodes, factors = [], [config.accumulate_grad_batches or int(given.get("accumulate_grad_batches", 1))]
    for key, node in config.callback.items():
        planned = CALLBACKS.get(node.get("name", ""), _attached)(node)
        if planned is None:
            continue
        if "factor" in planned:
            factors.append(planned["factor"])
        else:
            nodes.append((key, planned))
    accumulation = max(factors)
    by_layout = strategy if strategy is not None and strategy["name"] == "zero_offload" else None
    attached = strategy if by_layout is None else None

    def arguments() -> dict[str, Any]:
        callbacks = [make("callback", node, allow=allow, option=f"callback.{key}") for key, node in nodes]
        own = {} if attached is None else {"strategy": make("strategy", attached, allow=allow)}
        return {
            **{key: value for key, value in given.items() if key in KEPT},
            **own,
            "precision": precision,
            "accumulate_grad_batches": min(accumulation, WINDOW),
            "callbacks": callbacks,
        }

    if attached is not None:
        assumptions.append("the step of compact is planned as a Triton kernel that reads and writes each tensor once")
        if attached.get("state_budget") == "auto":
            attached = {**attached, "state_budget": 0}
            assumptions.append(
                "all of compact's states are planned on the host: in a run, what fits stays on the device"
            )
    return Arrangement(arguments, asked, accumulation, by_layout, assumptions)


def _nearest(back_end: str) -> str:
    """Return the bits of our own whose states take the most like a back end's, and what those take."""
    library = BACK_ENDS[back_end]
    bits = "24" if library.correction_bytes else "16-stochastic"
    bits = bits if library.bf16_weights else "32 precision=32-true"
    own = f"strategy.master_bits={bits} strategy.moment_bits={library.moment_bits}"
    return f"{own}, whose states take about as much as its {library.state_bytes:.2f} bytes per parameter"


KEPT = ("gradient_clip_val", "gradient_clip_algorithm", "detect_anomaly", "inference_mode")
"""Arguments of a Trainer that change what a step holds."""


def _attached(node: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return node


def _observer(node: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return None


def _checkpointing(node: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return {**node, "verify_recomputation": False}  # compares numbers, in the first step only


def _schedule(node: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return {"factor": max((int(factor) for _, factor in node.get("milestones") or [(0, 1)]), default=1)}


CALLBACKS: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any] | None]] = {
    "accumulation_schedule": _schedule,
    "activation_checkpointing": _checkpointing,
    "compact_states": _attached,
    "gradient_release": _attached,
    "leak_finder": _observer,
    "memory_logger": _observer,
    "memory_snapshot": _observer,
    "throughput": _observer,
}
"""Name of a callback -> what is attached in its stead: the same, another one, or nothing."""


def _by_layout(precision: str) -> str:
    """DeepSpeed's weights are in the low precision throughout, without autocast."""
    return {"bf16-mixed": "bf16-true", "16-mixed": "16-true"}.get(precision, precision)


def _as_given(precision: str) -> str:
    return precision


STRATEGIES: dict[str, Callable[[str], str]] = {"compact": _as_given, "zero_offload": _by_layout}
"""Name of a strategy -> the precision in which forward and backward are traced."""
