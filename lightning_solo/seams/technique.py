"""The base of callbacks that need more of Lightning than a callback's hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from lightning.pytorch import Callback
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.cards.phase import Phase
from lightning_solo.seams.run import Run
from lightning_solo.seams.strategy import join


class Checkpoint:
    """How a technique changes checkpoints; by default not at all. Override the methods that are needed."""

    def loading_weights(self) -> AbstractContextManager[Any]:
        """Return a context for loading a checkpoint's weights into the module, before `Technique.transform`."""
        return nullcontext()

    def load_states(self, proceed: Callable[..., Any], checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states; ``proceed(checkpoint)`` does as Lightning."""
        proceed(checkpoint)

    def saved_weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the weights to save, from the module's state dict."""
        return weights

    def saved_states(self, optimizer: Optimizer, states: dict[str, Any]) -> dict[str, Any]:
        """Return the states to save, from the optimizer's state dict."""
        return states


class Technique(Callback):
    """A callback that also acts at seams of the strategy, whichever strategy and home the Trainer has.

    Override the seams that are needed and no others: one that isn't overridden costs nothing. What is changed is
    undone by what a seam registers, ``ctx.undo.callback(restore, ...)``, after the fit and after a failure. Those with
    ``proceed`` run around Lightning's own work, the first phase outermost.
    """

    phase: ClassVar[Phase]
    ctx: Run | None = None
    """The run that this technique has joined; None outside a fit."""

    # --- the seams, in the order in which a fit comes to them ---

    def building(self, ctx: Run) -> AbstractContextManager[Any]:
        """Return a context for ``configure_model``."""
        return nullcontext()

    def transform(self, ctx: Run) -> None:
        """Change the module, which is built and has its weights; it goes to the device next, then to optimizers."""

    def optimizers(self, ctx: Run, optimizers: list[Optimizer], schedulers: Sequence[Any]) -> list[Optimizer]:
        """Return the optimizers that take the place of those that ``configure_optimizers`` made."""
        return optimizers

    def checkpoint(self, ctx: Run) -> Checkpoint:
        """Return how this technique changes checkpoints: what is saved, and how it is loaded."""
        return Checkpoint()

    def loader(self, ctx: Run, loader: Any) -> Any:
        """Return the loader that takes the place of the one for training."""
        return loader

    def loss(self, ctx: Run, proceed: Callable[..., Any]) -> Any:
        """Run one micro-batch: forward, and backward of the loss; under automatic optimization.

        ``proceed(batch=..., batch_idx=..., weight=1.0)`` does so for the loader's batch, or for a part of it or another
        one with its weight in the loss, and returns Lightning's ``ClosureResult``. Gradients are zeroed in its first
        call, where they are at all.
        """
        return proceed()

    def rewind(self, ctx: Run) -> Callable[[], None]:
        """Return what puts this technique back to where it is now; called before micro-batches that may run again."""
        return lambda: None

    def training_step(self, ctx: Run, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step``, under manual optimization too; ``proceed(*args, **kwargs)`` does so."""
        return proceed(*args, **kwargs)

    def backward(self, ctx: Run, proceed: Callable[..., Any], loss: Tensor) -> Any:
        """Run backward; ``proceed(loss)`` does as Lightning."""
        return proceed(loss)

    def clip(self, ctx: Run, proceed: Callable[..., Any], optimizer: Optimizer, bound: float, by: str) -> None:
        """Clip gradients ``by`` "norm" or "value"; ``proceed(optimizer, bound, by)`` does as Lightning."""
        proceed(optimizer, bound, by)

    def step(
        self, ctx: Run, proceed: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any], **options: Any
    ) -> Any:
        """Step an optimizer, and return the loss.

        Args:
            ctx: the run.
            proceed: ``proceed(optimizer, closure, **options)`` does as Lightning, with the closure that it is given:
                wrap it to act between clipping and the update, or call it first and hand over ``lambda: loss``.
            optimizer: whose step it is.
            closure: forward and backward of the window's last micro-batch, with clipping and hooks behind it; it
                returns the loss, and must run once.
            options: of ``optimizer.step``.
        """
        return proceed(optimizer, closure, **options)

    def leaving(self, ctx: Run, proceed: Callable[[], Any]) -> None:
        """Leave the device at the end of a run; ``proceed()`` does as Lightning: all moves to the host."""
        proceed()

    # --- joining a run, and leaving it ---

    @classmethod
    def overrides(cls, seam: str) -> bool:
        """Return whether this class acts at a seam."""
        return getattr(cls, seam) is not getattr(Technique, seam)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Join the run, where it is a fit."""
        if stage == "fit":
            join(self, trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the run; after a fit, and after an exception, the strategy's teardown has done so already."""
        if self.ctx is not None:
            self.ctx.end()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save after a fit as during it, when the strategy has no seams any more."""
        if self.ctx is not None:
            return
        ctx = Run(trainer.strategy, trainer)
        own = self.checkpoint(ctx)
        checkpoint["state_dict"] = own.saved_weights(checkpoint["state_dict"])
        states = zip(trainer.strategy.optimizers, checkpoint.get("optimizer_states", ()), strict=False)
        saved = [own.saved_states(optimizer, state) for optimizer, state in states]
        if saved:
            checkpoint["optimizer_states"] = saved
