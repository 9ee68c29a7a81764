"""Techniques for tests, which act at every seam, note their calls, and do there what Lightning does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_solo.cards.phase import Phase
from lightning_solo.seams.technique import Checkpoint, Technique


class CheckpointProbe(Checkpoint):
    """Notes its calls."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    @contextmanager
    def loading_weights(self) -> Iterator[None]:
        self._probe.note("loading_weights")
        yield

    def load_states(self, proceed: Any, checkpoint: Any) -> None:
        self._probe.note("load_states")
        proceed(checkpoint)

    def saved_weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        self._probe.note("saved_weights")
        return weights

    def saved_states(self, optimizer: Any, states: dict[str, Any]) -> dict[str, Any]:
        self._probe.note("saved_states")
        return states

    def saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        self._probe.note("saved")
        return checkpoint


class Probe(Technique):
    """Notes its calls at every seam, except those of optimizers and their steps.

    Args:
        notes: the list that gets the seams' names.
        phase: its phase.
        name: prefix of its notes.
    """

    phase = Phase.STEP

    def __init__(self, notes: list[str], phase: Phase = Phase.STEP, name: str = "") -> None:
        self.notes, self.name = notes, name
        self.phase = phase  # type: ignore[misc]

    def note(self, seam: str) -> None:
        self.notes.append(f"{self.name}{seam}")

    @contextmanager
    def building(self, ctx: Any) -> Iterator[None]:
        self.note("building")
        yield
        self.note("built")

    def transform(self, ctx: Any) -> None:
        self.note("transform")
        ctx.undo.callback(self.note, "undone")

    def checkpoint(self, ctx: Any) -> Checkpoint:
        return CheckpointProbe(self)

    def loader(self, ctx: Any, loader: Any) -> Any:
        self.note("loader")
        return loader

    def loss(self, ctx: Any, proceed: Any) -> Any:
        self.note("loss")
        return proceed()

    def rewind(self, ctx: Any) -> Any:
        self.note("rewind")
        return super().rewind(ctx)

    def training_step(self, ctx: Any, proceed: Any, *args: Any, **kwargs: Any) -> Any:
        self.note("training_step")
        return proceed(*args, **kwargs)

    def backward(self, ctx: Any, proceed: Any, loss: Tensor) -> Any:
        self.note("backward")
        return proceed(loss)

    def clip(self, ctx: Any, proceed: Any, optimizer: Any, bound: float, by: str) -> None:
        assert (bound, by) in ((0.5, "norm"), (0.5, "value"))
        self.note("clip")
        proceed(optimizer, bound, by)

    def leaving(self, ctx: Any, proceed: Any) -> None:
        self.note("leaving")
        proceed()


class SteppingProbe(Probe):
    """Notes its calls at every seam."""

    def optimizers(self, ctx: Any, optimizers: list[Any], schedulers: Any) -> list[Any]:
        assert len(optimizers) == 1
        self.note("optimizers")
        return optimizers

    def step(self, ctx: Any, proceed: Any, optimizer: Any, closure: Any, **options: Any) -> Any:
        self.note("step")
        return proceed(optimizer, closure, **options)
