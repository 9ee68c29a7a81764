"""How a preset is traced: each technique as its card says, attached as it is, left out, or by its own function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from lightning_solo.build import make
from lightning_solo.cards.tracing import EngineStates, Tracing
from lightning_solo.errors import PlanError
from lightning_solo.presets.schema import SoloConfig, composition

# A window of two micro-batches holds what one of any length holds: the gradients, kept through a forward.
WINDOW = 2
KEPT = ("gradient_clip_val", "gradient_clip_algorithm", "detect_anomaly", "inference_mode")
"""Arguments of a Trainer that change what a step holds."""


@dataclass
class Arrangement:
    """How a preset is traced.

    Attributes:
        arguments: of a Trainer on the CPU; made anew for each trace.
        precision: of the real run, by Lightning's name.
        accumulation: micro-batches per optimizer step in the real run.
        states: how model states are counted where an engine stores them and they aren't traced.
        assumptions: where the trace differs from the run, in words.
    """

    arguments: Callable[[], dict[str, Any]]
    precision: str
    accumulation: int = 1
    states: EngineStates | None = None
    assumptions: Sequence[str] = ()


def arrange(config: SoloConfig, trainer: Mapping[str, Any], allow: Sequence[str] = ()) -> Arrangement:
    """Return how a checked preset is traced.

    Args:
        config: the preset.
        trainer: the user's own arguments of the Trainer, such as ``gradient_clip_val``.
        allow: prefixes of ``_target_`` that the user trusts.

    Raises:
        PlanError: a strategy of the user's own, or a technique that can't be planned with its settings.
    """
    if config.strategy is not None and "name" not in config.strategy:
        raise PlanError(f"strategy={config.strategy['_target_']!r}: no card says how to plan it")
    precision = config.precision or str(trainer.get("precision", "32-true"))
    accumulation = config.accumulate_grad_batches or int(trainer.get("accumulate_grad_batches", 1))
    tracing = Tracing(precision, accumulation)
    planned = {chosen.option: chosen for chosen in composition(config).techniques}
    nodes = {} if config.strategy is None else {"strategy": config.strategy}
    nodes |= {f"callback.{key}": node for key, node in config.callback.items()}
    attached: dict[str, Mapping[str, Any]] = {}
    for option, node in nodes.items():
        tracing = replace(tracing, node=node)
        if option in planned:
            tracing = _planned(planned[option].card.planned, planned[option].settings, tracing)
        if tracing.node is not None:
            attached[option] = tracing.node
    if tracing.precision == "16-mixed":
        assumption = "16-mixed is planned as bf16-mixed: the sizes are the same, no step is skipped"
        tracing = replace(tracing, precision="bf16-mixed", assumptions=(*tracing.assumptions, assumption))

    def arguments() -> dict[str, Any]:
        objects = {
            option: make(option.split(".")[0], node, allow=allow, option=option) for option, node in attached.items()
        }
        strategy = {"strategy": objects.pop("strategy")} if "strategy" in objects else {}
        return {
            **{key: value for key, value in trainer.items() if key in KEPT},
            **strategy,
            "precision": tracing.precision,
            "accumulate_grad_batches": min(tracing.accumulation, WINDOW),
            "callbacks": list(objects.values()),
        }

    return Arrangement(arguments, precision, tracing.accumulation, tracing.states, tracing.assumptions)


def _planned(way: str, settings: Any, tracing: Tracing) -> Tracing:
    """Return the tracing after a technique, by its card's ``planned``."""
    if way == "attached":
        return tracing
    if way == "left out":
        return replace(tracing, node=None)
    module, _, function = way.partition(":")
    changed: Tracing = getattr(import_module(module), function)(settings, tracing)
    return changed
