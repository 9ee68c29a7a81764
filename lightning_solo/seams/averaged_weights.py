"""Averages in the place of the weights: the average is validated, saved and left after the fit, others are trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from lightning_solo.cards.phase import Phase
from lightning_solo.optim.schedule_free import ScheduleFreeAdamW
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Checkpoint, Technique


class AveragedWeights(Technique):
    """Puts an average in the place of the weights for validation and the end of a fit, for which Lightning has no hook.

    Training continues with the same bits after each. The average is that of each `ScheduleFreeAdamW`; without such an
    optimizer nothing is done. A subclass with an average of its own overrides `put_average` and `put_live`.
    """

    phase = Phase.OPTIMIZER

    def put_average(self) -> None:
        """Put the average into the module; a second call does nothing."""
        for optimizer in averaging(self.ctx):
            optimizer.evaluate()

    def put_live(self) -> None:
        """Put the trained weights back into the module; a second call does nothing."""
        for optimizer in averaging(self.ctx):
            optimizer.train()

    def checkpoint(self, ctx: Run) -> Checkpoint:
        """Return how averages are saved, and training weights loaded."""
        return AveragedCheckpoint(ctx)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Train from the training weights of a checkpoint."""
        super().on_train_start(trainer, pl_module)
        self.put_live()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Validate the average."""
        super().on_validation_start(trainer, pl_module)
        self.put_average()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Train on; checkpoints are saved after this."""
        super().on_validation_end(trainer, pl_module)
        self.put_live()

    def leaving(self, ctx: Run, proceed: Callable[[], Any]) -> None:
        """Leave the average in the module."""
        self.put_average()
        proceed()


class AveragedCheckpoint(Checkpoint):
    """Averages as the weights of a file, and training weights among the optimizer's states."""

    def __init__(self, ctx: Run) -> None:
        self._ctx = ctx

    def saved_weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the averages, in host memory; other weights as they are."""
        averages = {p: x.cpu() for optimizer in averaging(self._ctx) for p, x in optimizer.averaged()}
        named = self._ctx.module.named_parameters(remove_duplicate=False) if averages else ()
        return {**weights, **{name: averages[p] for name, p in named if p in averages and name in weights}}

    def saved_states(self, optimizer: Optimizer, states: dict[str, Any]) -> dict[str, Any]:
        """Return states with the training weights."""
        return optimizer.saved(states) if isinstance(optimizer, ScheduleFreeAdamW) else states

    def load_states(self, proceed: Callable[..., Any], checkpoint: Mapping[str, Any]) -> None:
        """Load states, and put the training weights into the module."""
        proceed(checkpoint)
        for optimizer in averaging(self._ctx):
            optimizer.train()


def averaging(ctx: Run | None) -> list[ScheduleFreeAdamW]:
    """Return the optimizers of a run that average."""
    optimizers = [] if ctx is None else ctx.strategy.optimizers
    return [optimizer for optimizer in optimizers if isinstance(optimizer, ScheduleFreeAdamW)]
