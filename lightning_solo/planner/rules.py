"""The tracing of a preset: by its card, each technique is attached, left out, or changes the tracing by a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

from lightning_solo.build import built
from lightning_solo.cards.card import resources
from lightning_solo.cards.configuration import Chosen, Configuration, Target
from lightning_solo.cards.tracing import Tracing
from lightning_solo.errors import PlanError

# Two micro-batches take as much memory as a window of any length: the gradients live through a forward.
WINDOW = 2
KEPT = ("gradient_clip_val", "gradient_clip_algorithm", "detect_anomaly", "inference_mode")
"""Arguments of a Trainer that change the memory of a step."""


@dataclass(frozen=True)
class Arrangement(Tracing):
    """The tracing of a preset with all its techniques; ``precision`` is that of the real run.

    Attributes:
        arguments: returns arguments of a Trainer on the CPU, new ones for each trace. Its own argument is a function of
            the names of blocks that returns those in the traced module, or None for a block that this lacks.
        window: micro-batches of the traced window, which takes as much memory as a whole one.
        released: whether gradients are released in backward, small ones in groups.
        mixed: whether blocks have several modes.
        foreign: whether objects are attached that are no techniques.
        processes: number of an engine's processes; 1 if it is unknown.
        answers: whether the host has room for something, by its name, as far as techniques asked in a trace.
    """

    arguments: Callable[..., dict[str, Any]] = dict
    window: int = 1
    released: bool = False
    mixed: bool = False
    foreign: bool = False
    processes: int = 1
    answers: dict[str, bool] = field(default_factory=dict)


def arrange(config: Configuration, trainer: Mapping[str, Any], *, undivided: bool = False) -> Arrangement:
    """Return the tracing of a preset.

    Args:
        config: the preset.
        trainer: the user's arguments of the Trainer.
        undivided: whether the batch fits as a whole, so that a technique which splits batches doesn't split it.

    Raises:
        PlanError: the strategy is the user's, or a technique can't be planned with its settings.
    """
    if isinstance(config.strategy, Target):
        raise PlanError(f"strategy={config.strategy.node['_target_']!r}: no card says how to plan it")
    precision = config.precision or str(trainer.get("precision", "32-true"))
    accumulation = config.accumulate_grad_batches or int(trainer.get("accumulate_grad_batches", 1))
    tracing = Tracing(precision, accumulation)
    attached: list[Chosen | Target] = []
    for chosen in config.techniques:
        tracing, way = replace(tracing, attached=chosen.settings), chosen.card.planned
        if way == "left out":
            continue
        if way != "attached":  # the name of a function
            tracing = resolve_name(way)(chosen.settings, tracing)
        if tracing.attached is not None:
            attached.append(replace(chosen, settings=tracing.attached))
    attached += config.foreign
    released = any("gradients" in resources(chosen.card.frees, chosen.settings) for chosen in config.techniques)
    if undivided and not released:  # released gradients are summed, so a batch may be split anyway
        tracing = replace(tracing, splits=False)
    if tracing.precision == "16-mixed":
        assumption = "16-mixed is planned as bf16-mixed: the sizes are the same, no step is skipped"
        tracing = replace(tracing, precision="bf16-mixed", assumptions=(*tracing.assumptions, assumption))

    processes = processes_of(config, trainer) if tracing.ranks is not None else 1
    if tracing.ranks is not None:
        assumption = (
            f"planned for one rank of {processes}; seconds without communication between them"
            if processes > 1
            else f"{config.engine}: planned for one process alone; devices=2 plans one of two"
        )
        tracing = replace(tracing, assumptions=(*tracing.assumptions, assumption))

    window = WINDOW if tracing.splits else min(tracing.accumulation, WINDOW)

    def arguments(named: Callable[[str], str | None] = str) -> dict[str, Any]:
        objects = {part.option: built(_with_names(part, named)) for part in attached}
        strategy = {"strategy": objects.pop("strategy")} if "strategy" in objects else {}
        return {
            **{key: value for key, value in trainer.items() if key in KEPT},
            **strategy,
            "precision": tracing.precision,
            "accumulate_grad_batches": window,
            "callbacks": list(objects.values()),
        }

    return Arrangement(
        **{**vars(tracing), "precision": precision},
        arguments=arguments,
        window=window,
        released=released,
        foreign=bool(config.foreign),
        processes=processes,
        mixed=any(len(list(filter(None, _modes(part).values()))) > 1 for part in attached),
    )


def processes_of(config: Configuration, trainer: Mapping[str, Any]) -> int:
    """Return the number of an engine's processes, of the preset or the Trainer; 1 if it is unknown."""
    devices = config.devices if config.devices is not None else trainer.get("devices")
    count = len(devices) if isinstance(devices, Sequence) and not isinstance(devices, str) else devices
    return max(count, 1) * int(trainer.get("num_nodes") or 1) if isinstance(count, int) else 1


def _modes(part: Chosen | Target) -> Mapping[str, Sequence[str]]:
    """Return mode -> names of the blocks that a technique gives it."""
    return (isinstance(part, Chosen) and part.card.solved == "modes" and part.settings.modes) or {}


def _with_names(part: Chosen | Target, named: Callable[[str], str | None]) -> Chosen | Target:
    """Return a technique with the names of blocks in the traced module."""
    if not (modes := _modes(part)):
        return part
    assert isinstance(part, Chosen)
    renamed = {mode: [new for name in names if (new := named(name)) is not None] for mode, names in modes.items()}
    return replace(part, settings=replace(part.settings, modes=renamed))
