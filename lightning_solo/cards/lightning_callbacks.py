"""Lightning's callbacks that change a resource of a technique, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_solo.cards.card import RESOURCES
from lightning_solo.errors import ConflictError

# Class name (the same in both homes of Lightning) -> resource -> what to write instead
CALLBACKS = {
    "BaseFinetuning": {
        "optimizer_states": "freeze with requires_grad_(False) before the fit, and fit again for the next phase",
        "trained_parameters": "leave the choice to the technique",
    },
    "BatchSizeFinder": {"weights": "try sizes with trainer.limit_train_batches=2"},
    "GradientAccumulationScheduler": {
        "accumulation_factor": "write its schedule as milestones of lightning_solo.AccumulationSchedule"
        " (+callback=accumulation_schedule)"
    },
    "LearningRateFinder": {"weights": "find the rate under a preset without ZeRO, on a smaller model"},
    "StochasticWeightAveraging": {
        "averaged_weights": "write callback.weight_averaging.method=swa",
        "weights": "average saved checkpoints, which are plain state dicts",
        "accumulation_factor": "average with Lightning's WeightAveraging, which leaves the factor alone",
        "layers": "average saved checkpoints: it copies the module before its layers change",
    },
    "WeightAveraging": {
        "averaged_weights": "leave the average to callback.weight_averaging",
        "weights": "average saved checkpoints, which are plain state dicts",
        "layers": "average saved checkpoints: it copies the module before its layers change",
    },
}


def refuse_callbacks(
    choice: str, owned: frozenset[str], callbacks: Iterable[object], instead: str | None = None
) -> None:
    """Refuse callbacks of Lightning, and their subclasses, that change a resource of a technique.

    Args:
        choice: the technique's name in the message.
        owned: the technique's resources.
        callbacks: of the Trainer.
        instead: a remedy that replaces those of `CALLBACKS`.
    """
    for callback in callbacks:
        for kind in type(callback).__mro__:
            for resource, remedy in CALLBACKS.get(kind.__name__, {}).items():
                if resource in owned:
                    raise ConflictError(
                        f"{choice} and {type(callback).__name__}: only one of a run can own {resource}"
                        f" ({RESOURCES[resource]}); {instead or f'remove the callback, and {remedy}'}"
                    )
