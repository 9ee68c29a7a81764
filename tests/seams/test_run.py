"""A technique that doesn't call `proceed` is refused if another one acts inside it, whose seam would never run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import lightning_solo as solo
from lightning_solo.cards.phase import Phase
from lightning_solo.errors import ConflictError
from lightning_solo.seams import patches
from lightning_solo.seams.technique import Checkpoint, Technique
from tests.messages import mentions
from tests.modules import loader, regression

Make = Callable[..., Any]


def keeps_steps_to_itself(ctx: Any, proceed: Any, optimizer: Any, closure: Any, **options: Any) -> Any:
    loss = closure()
    optimizer.step(**options)
    return loss


def keeps_training_steps_to_itself(ctx: Any, proceed: Any, batch: Any, batch_idx: int) -> Any:
    return ctx.module.training_step(batch, batch_idx)


def keeps_losses_to_itself(ctx: Any, proceed: Any) -> Any:
    return patches.empty_result(ctx.trainer)


SWALLOWS = {
    "loss": keeps_losses_to_itself,
    "training_step": keeps_training_steps_to_itself,
    "backward": lambda ctx, proceed, loss: loss.backward(),
    "clip": lambda ctx, proceed, optimizer, bound, by: None,
    "step": keeps_steps_to_itself,
    "leaving": lambda ctx, proceed: None,
}
"""Seam -> a function in its place that never calls ``proceed``."""


def named(name: str, phase: Phase, **seams: Any) -> Technique:
    """Return a technique with its functions at seams."""
    methods = {
        seam: lambda self, *args, function=function, **kw: function(*args, **kw) for seam, function in seams.items()
    }
    technique: Technique = type(name, (Technique,), {"phase": phase, **methods})()
    return technique


def acting(calls: list[str], seam: str) -> Any:
    """Return a function for a seam that notes its call and proceeds."""

    def act(ctx: Any, proceed: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(seam)
        return proceed(*args, **kwargs)

    return act


@pytest.mark.parametrize("seam", SWALLOWS)
def test_technique_that_keeps_an_inner_one_from_acting_is_refused(
    home: ModuleType, make_trainer: Make, seam: str
) -> None:
    calls: list[str] = []
    inner = named("Inner", Phase.OBSERVE, **{seam: acting(calls, seam)})
    outer = named("Outer", Phase.BATCHES, **{seam: SWALLOWS[seam]})
    # the phases decide, not the order of the list
    for callbacks in ([outer, inner], [inner, outer]):
        with pytest.raises(ConflictError, match=mentions("Outer", "Inner", f"Outer.{seam}", "call proceed")):
            make_trainer(home, callbacks=callbacks).fit(regression(home), loader(2))
    assert calls == []


@pytest.mark.parametrize("seam", SWALLOWS)
def test_technique_with_nothing_inside_need_not_proceed(home: ModuleType, make_trainer: Make, seam: str) -> None:
    calls: list[str] = []
    outer = named("Outer", Phase.BATCHES, **{seam: acting(calls, seam)})
    inner = named("Inner", Phase.OBSERVE, **{seam: SWALLOWS[seam]})
    make_trainer(home, callbacks=[outer, inner]).fit(regression(home), loader(2))
    assert calls.count(seam) == (1 if seam == "leaving" else 2)


def test_loss_may_wait_for_the_last_micro_batch_of_a_step(home: ModuleType, make_trainer: Make) -> None:
    calls: list[str] = []

    def waits(ctx: Any, proceed: Any) -> Any:
        return proceed() if ctx.window.is_last else patches.empty_result(ctx.trainer)

    outer, inner = named("Outer", Phase.BATCHES, loss=waits), named("Inner", Phase.OBSERVE, loss=acting(calls, "loss"))
    trainer = make_trainer(home, callbacks=[outer, inner], accumulate_grad_batches=2)
    trainer.fit(regression(home), loader(4))
    assert calls == ["loss", "loss"]


class Loads(Technique):
    """Loads optimizer states, or keeps others from it."""

    def __init__(self, phase: Phase, proceeds: bool) -> None:
        self.phase, self.proceeds = phase, proceeds  # type: ignore[misc]

    def checkpoint(self, ctx: Any) -> Checkpoint:
        proceeds = self.proceeds

        class Changed(Checkpoint):
            def load_states(self, proceed: Any, checkpoint: Any) -> None:
                if proceeds:
                    proceed(checkpoint)

        return Changed()


class LoadsToo(Loads):
    """Another class, for its name."""


def test_checkpoint_that_keeps_an_inner_one_from_loading_is_refused(
    home: ModuleType, make_trainer: Make, tmp_path: Path
) -> None:
    trainer = make_trainer(home)
    trainer.fit(regression(home), loader(1))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    torch.manual_seed(0)
    trainer = make_trainer(home, callbacks=[LoadsToo(Phase.OBSERVE, True), Loads(Phase.BATCHES, False)], max_epochs=2)
    with pytest.raises(ConflictError, match=mentions("Loads.load_states", "LoadsToo", "call proceed")):
        trainer.fit(regression(home), loader(1), ckpt_path=tmp_path / "one.ckpt", weights_only=True)


def test_module_is_transformed_once_in_a_run(home: ModuleType, make_trainer: Make) -> None:
    transformed: list[Any] = []

    def transform(ctx: Any) -> None:
        transformed.append(ctx.module)
        if len(transformed) == 1:
            ctx.transform()  # as when an engine sets up the module again

    trainer = make_trainer(home, callbacks=[named("Counts", Phase.REWRITE, transform=transform)])
    trainer.fit(regression(home), loader(2))
    assert len(transformed) == 1


def test_lazy_layers_are_named_where_their_shape_is_needed(home: ModuleType, make_trainer: Make) -> None:
    module = regression(home, torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.LazyLinear(1)))
    for technique in (solo.SharedBlocks(), solo.OptimizerReplacement(optimizer="lion", lr=1e-3)):
        words = (type(technique).__name__, "net.0.weight", "run the module on a batch")
        with pytest.raises(ConflictError, match=mentions(*words)):
            make_trainer(home, callbacks=[technique]).fit(module, loader(2))
    average = solo.WeightAverage(decay=0.5)
    make_trainer(home, callbacks=[average]).fit(module, loader(2))
    assert torch.equal(average.averaged_weights["net.0.weight"], module.net[0].weight)
