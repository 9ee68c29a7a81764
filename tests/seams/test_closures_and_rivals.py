"""A technique's own closure of a step is run, once, and techniques that own one thing are refused however they come."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import lightning_solo as solo
from lightning_solo.cards.card import Card, resources
from lightning_solo.cards.catalogue import built_in_cards, load_class
from lightning_solo.cards.phase import Phase
from lightning_solo.errors import ConflictError
from lightning_solo.seams.technique import Technique
from tests.messages import mentions
from tests.modules import loader, regression


class Doubled(Technique):
    """Doubles gradients between clipping and the update: by a closure around Lightning's, or behind it."""

    phase = Phase.STEP

    def __init__(self, wraps: bool) -> None:
        self.wraps = wraps

    def step(self, ctx: Any, proceed: Any, optimizer: Any, closure: Any, **options: Any) -> Any:
        def doubled() -> Any:
            loss = closure()
            for p in ctx.module.parameters():
                p.grad.mul_(2)
            return loss

        if self.wraps:
            return proceed(optimizer, doubled, **options)
        loss = doubled()
        return proceed(optimizer, lambda: loss, **options)


def trained(home: ModuleType, make_trainer: Callable[..., Any], *callbacks: Any, scale: float = 1.0) -> Any:
    torch.manual_seed(0)
    module = regression(home)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1e-3 * scale)
    calls = []
    step = module.training_step
    module.training_step = lambda *arguments: [calls.append(1), step(*arguments)][1]
    make_trainer(home, callbacks=list(callbacks)).fit(module, loader(4))
    assert len(calls) == 4  # forward runs once per batch
    return module


@pytest.mark.parametrize("wraps", [True, False])
def test_a_closure_of_ones_own_is_run_once(home: ModuleType, make_trainer: Callable[..., Any], wraps: bool) -> None:
    twice = trained(home, make_trainer, Doubled(wraps))
    expected = trained(home, make_trainer, scale=2.0)  # SGD: twice the gradient is twice the rate
    assert all(torch.equal(p, q) for p, q in zip(twice.parameters(), expected.parameters(), strict=True))


class OwnsGradients(solo.GradientRelease):
    """A rival of gradient release, whose card it inherits."""


@pytest.mark.parametrize("rival", [solo.GradientRelease, OwnsGradients])
def test_an_owner_that_comes_as_a_callback_is_refused_beside_another(
    home: ModuleType, make_trainer: Callable[..., Any], rival: type[Any]
) -> None:
    module = regression(home)
    before = [p.detach().clone() for p in module.parameters()]
    kwargs = solo.trainer_kwargs("compact", lightning=home.__name__)
    trainer = make_trainer(home, **{**kwargs, "callbacks": [*kwargs["callbacks"], rival()]})
    with pytest.raises(ConflictError, match=r"gradients|GradientRelease"):
        trainer.fit(module, loader(1))
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


MAKES_BATCHES = [card for card in built_in_cards().values() if "batches" in resources(card.owns, card.settings())]


@pytest.mark.parametrize("card", MAKES_BATCHES, ids=lambda card: card.name)
def test_other_batches_in_each_epoch_are_not_overfitted(
    card: Card, home: ModuleType, make_trainer: Callable[..., Any]
) -> None:
    trainer = make_trainer(home, callbacks=[load_class(card)()], max_epochs=2, overfit_batches=2)
    with pytest.raises(ConflictError, match=mentions("overfit_batches=2", "Subset", f"~callback.{card.name}")):
        trainer.fit(regression(home), loader(4))
