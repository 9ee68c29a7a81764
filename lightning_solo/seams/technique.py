"""The base class of callbacks that need more than Lightning's callback hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from lightning.pytorch import Callback
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.cards.phase import Phase
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.seams.strategy import join


class Checkpoint:
    """A technique's changes to checkpoints; none by default. Override the methods that are needed."""

    def loading_weights(self) -> AbstractContextManager[Any]:
        """Return a context for loading a checkpoint's weights into the module, before `Technique.transform`."""
        return nullcontext()

    def load_states(self, proceed: Callable[..., Any], checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states; ``proceed(checkpoint)`` does Lightning's work."""
        proceed(checkpoint)

    def saved_weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the weights to save, from the module's state dict."""
        return weights

    def saved_states(self, optimizer: Optimizer, states: dict[str, Any]) -> dict[str, Any]:
        """Return the states to save, from the optimizer's state dict."""
        return states

    def saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint to write, of which weights and states are a part."""
        return checkpoint


class Technique(Callback):
    """A callback that also acts at seams of the strategy, under any strategy for one device and in both homes.

    Override only the seams that are needed; the others cost nothing. Register a function that restores each change by
    ``ctx.undo.callback(restore, ...)``; it runs after the fit, also after a failed one. A seam with ``proceed`` runs
    around Lightning's own work, the first phase outermost. Call ``proceed``: a run is stopped with `ConflictError` if
    a technique keeps another one from acting.
    """

    phase: ClassVar[Phase]
    joins_evaluation: ClassVar[bool] = False
    """Whether it also joins the run of a validation, test or prediction."""
    ctx: Run | None = None
    """The current run; None outside a fit."""

    # --- the seams, in the order of a fit ---

    def building(self, ctx: Run) -> AbstractContextManager[Any]:
        """Return a context for ``configure_model``."""
        return nullcontext()

    def transform(self, ctx: Run) -> None:
        """Change the module. It has its weights already; after this it moves to the device, and optimizers are made."""

    def optimizers(self, ctx: Run, optimizers: list[Optimizer], schedulers: Sequence[Any]) -> list[Optimizer]:
        """Return optimizers to use instead of those from ``configure_optimizers``."""
        return optimizers

    def checkpoint(self, ctx: Run) -> Checkpoint:
        """Return this technique's changes to saved and loaded checkpoints."""
        return Checkpoint()

    def loader(self, ctx: Run, loader: Any) -> Any:
        """Return a loader to use instead of the training loader."""
        return loader

    def loss(self, ctx: Run, proceed: Callable[..., Any]) -> Any:
        """Run forward and backward of one micro-batch, under automatic optimization.

        ``proceed()`` does so for the loader's batch; ``proceed(batch=..., batch_idx=..., weight=...)`` for a part of it
        or another batch, with its loss multiplied by ``weight``. It returns Lightning's ``ClosureResult``. The first
        call of a window zeroes the gradients.
        """
        return proceed()

    def rewind(self, ctx: Run) -> Callable[[], None]:
        """Return a function that restores this technique's state; called before micro-batches that may run again."""
        return lambda: None

    def training_step(self, ctx: Run, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step`` by ``proceed(*args, **kwargs)``, also under manual optimization."""
        return proceed(*args, **kwargs)

    def backward(self, ctx: Run, proceed: Callable[..., Any], loss: Tensor) -> Any:
        """Run backward; ``proceed(loss)`` does Lightning's work."""
        return proceed(loss)

    def clip(self, ctx: Run, proceed: Callable[..., Any], optimizer: Optimizer, bound: float, by: str) -> None:
        """Clip gradients ``by`` "norm" or "value"; ``proceed(optimizer, bound, by)`` does Lightning's work."""
        proceed(optimizer, bound, by)

    def step(
        self, ctx: Run, proceed: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any], **options: Any
    ) -> Any:
        """Step an optimizer and return the loss.

        Args:
            ctx: the run.
            proceed: ``proceed(optimizer, closure, **options)`` does Lightning's work with the closure it gets. Wrap the
                closure to act between clipping and the update, or call it first and pass ``lambda: loss``.
            optimizer: the optimizer that steps.
            closure: runs forward and backward of the window's last micro-batch, then clipping and hooks, and returns
                the loss; it must run once.
            options: the arguments of ``optimizer.step``.
        """
        return proceed(optimizer, closure, **options)

    def leaving(self, ctx: Run, proceed: Callable[[], Any]) -> None:
        """Leave the device at the end of a run; ``proceed()`` moves module and states to the host by Lightning."""
        proceed()

    # --- joining a run, and leaving it ---

    @classmethod
    def overrides(cls, seam: str) -> bool:
        """Return whether this class overrides a seam."""
        return getattr(cls, seam) is not getattr(Technique, seam)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Join the run of a fit, or of an evaluation if `joins_evaluation`."""
        if stage == "fit" or self.joins_evaluation:
            join(self, trainer).undo.enter_context(patches.empty_hooks_left_out(self, Technique))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the run if the strategy's teardown didn't."""
        if self.ctx is not None:
            self.ctx.end()
