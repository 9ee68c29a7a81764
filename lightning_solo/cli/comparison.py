"""Losses and seconds of a run's module before and after an export."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

BATCHES = 16
"""Batches of validation that are measured."""


def compared(before: Any, after: Any, data: Any, as_trained: Callable[[], object] | None = None) -> list[str]:
    """Return lines with losses and seconds of both modules on this CPU.

    Args:
        before: the module with full weights.
        after: the exported one.
        data: its data.
        as_trained: makes ``before`` compute as it did in training, if that is something else; a loss for that, too.
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    try:
        readings = {"before" if as_trained is None else "with full weights": validated(before, data)}
        if as_trained is not None:
            as_trained()
            readings["rounded as in training"] = validated(before, data)
        readings["after"] = validated(after, data)
    except MisconfigurationException:
        return ["loss and seconds: not measured, since the run has no validation"]
    (metrics, seconds), *_, (_, seconds_after) = readings.values()
    slower = "; it is slower here" if seconds_after > seconds else ""
    return [
        *(
            f"{name}: {', '.join(f'{values[name]:.4f} {word}' for word, (values, _) in readings.items())}"
            for name in metrics
        ),
        f"seconds of a validation batch on this CPU: {seconds:.4f} before, {seconds_after:.4f} after{slower}"
        f" (best of at most {BATCHES} batches)",
    ]


def validated(module: Any, data: Any) -> tuple[dict[str, float], float]:
    """Return the logged metrics and the least seconds of a batch."""
    import lightning as L

    class Times(L.Callback):
        least, began = float("inf"), 0.0

        def on_validation_batch_start(self, *_: Any) -> None:
            self.began = time.perf_counter()

        def on_validation_batch_end(self, *_: Any) -> None:
            self.least = min(self.least, time.perf_counter() - self.began)

    times = Times()
    trainer = validate_on_cpu(module, data, BATCHES, times)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, times.least


def validate_on_cpu(module: Any, data: Any, batches: int, *callbacks: Any) -> Any:
    """Validate on the CPU on at most some batches; return the Trainer."""
    import lightning as L

    from lightning_solo.seams.homes import quiet

    silent: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with quiet():
        trainer = L.Trainer(
            accelerator="cpu",
            callbacks=[*callbacks],
            limit_val_batches=batches,
            enable_model_summary=False,
            **silent,
        )
        trainer.validate(module, data, verbose=False)
    return trainer
