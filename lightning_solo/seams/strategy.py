"""Seams in a strategy: techniques act around its methods, and without any it is the strategy that it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from lightning_solo.errors import ConflictError
from lightning_solo.seams import patches
from lightning_solo.seams.homes import for_home
from lightning_solo.seams.run import Run

if TYPE_CHECKING:
    from lightning.pytorch.strategies import SingleDeviceStrategy as Base

    from lightning_solo.seams.technique import Technique
else:
    Base = object


class _WhereAttached:
    """A method that `Seams` has in a run with techniques alone; otherwise its name leads to the next class's method.

    A test of Lightning's replaces ``Strategy.backward`` by a call of the strategy's own ``backward``: the two would
    call each other without end. As with any method, an object may have one of its own.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, strategy: Any, cls: type | None = None) -> Any:
        if strategy is None:
            return self._method
        if strategy.ctx is None:
            return getattr(super(self._owner, strategy), self._name)
        return MethodType(self._method, strategy)


class Seams(Base):
    """A mixin over a strategy of Lightning: each method runs the techniques of the run around the strategy's own.

    A class that has it is made an instance for the Trainer of ``lightning``; `for_home` gives that of the other home.
    """

    base: ClassVar[str] = "SingleDeviceStrategy"
    """The strategy of Lightning to stand on, by its name in ``<home>.strategies``."""
    home: str
    solo_run: Run | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(cls if hasattr(cls, "home") else for_home(cls))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state that is copied and pickled: without the run, and what it has put on the precision."""
        state: dict[str, Any] = super().__getstate__()
        state.pop("solo_run", None)
        state.pop("batch_to_device", None)  # of `patches.batches_through`
        if self.ctx is not None:
            state["_precision_plugin"] = patches.as_found(self.precision_plugin)
        return state

    # --- the run ---

    def begin(self, trainer: Any) -> Run:
        """Return a new run; the one before is ended."""
        if self.solo_run is not None:
            self.solo_run.end()
        self.solo_run = run = Run(self, trainer)
        return run

    @property
    def ctx(self) -> Run | None:
        """The run that is on, if it has techniques."""
        run = self.solo_run
        return None if run is None or run.ended else run

    def teardown(self) -> None:
        """End the run, after a fit as after an exception, behind the way of module and states to the host.

        Of a run that was never set up what is undone comes first: the module is to move as it was.
        """
        run, own = self.ctx, super().teardown
        if run is not None and not run.is_set_up:
            run.end()
        if run is None or run.ended:
            own()
            return
        try:
            run.around("leaving", own)()
        finally:
            run.end()

    # --- set-up ---

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Have ``configure_model`` run in the contexts of the techniques."""
        run = self.ctx
        with ExitStack() as stack:
            for technique in () if run is None else run.having("building"):
                stack.enter_context(technique.building(run))  # type: ignore[arg-type]
            stack.enter_context(super().model_sharded_context())
            yield

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights in the contexts of the techniques."""
        run = self.ctx
        with ExitStack() as stack:
            for technique in () if run is None else run.having("loading"):
                stack.enter_context(technique.loading(run))  # type: ignore[arg-type]
            super().load_model_state_dict(checkpoint, strict=strict)

    def setup(self, trainer: Any) -> None:
        """Have the techniques transform the module, and behind Lightning's set-up replace optimizers."""
        run = self.ctx
        if run is None:
            super().setup(trainer)
            return
        run.transform()
        super().setup(trainer)
        if run.training:
            for technique in run.having("optimizers"):
                schedulers = [config.scheduler for config in self.lr_scheduler_configs]
                self.optimizers = technique.optimizers(run, list(self.optimizers), schedulers)
            if run.having("clip"):
                run.undo.enter_context(patches.clipping(self.precision_plugin, partial(run.around, "clip")))
            if run.having("loss"):
                run.undo.enter_context(patches.micro_batches(trainer, partial(run.around, "loss")))
        run.is_set_up = True

    def process_dataloader(self, dataloader: object) -> object:
        """Let the techniques replace the loader for training."""
        loader: object = super().process_dataloader(dataloader)
        run = self.ctx
        if run is not None and run.trainer.training:
            for technique in run.having("loader"):
                loader = technique.loader(run, loader)
            patches.loader_numbered(run.trainer, loader)
        return loader

    # --- a step ---

    def on_train_start(self) -> None:
        """Have the loaders begin where a checkpoint was saved."""
        if (run := self.ctx) is not None:
            patches.loaders_resumed(run.trainer)
        super().on_train_start()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begin a micro-batch, behind the callbacks, which may have changed the factor."""
        if (run := self.ctx) is not None:
            run.window.start_batch(batch_idx)
        super().on_train_batch_start(batch, batch_idx)

    @_WhereAttached
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step."""
        run, own = self.ctx, super().training_step
        assert run is not None  # else `_WhereAttached` returns the next class's method
        return run.around("training_step", own)(*args, **kwargs)

    @_WhereAttached
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward of a micro-batch, whose loss counts by the window's weight."""
        run, own = self.ctx, super().backward
        assert run is not None  # else `_WhereAttached` returns the next class's method
        loss: Tensor = run.backward(lambda loss: own(loss, optimizer, *args, **kwargs), closure_loss)
        return loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step an optimizer."""
        run, own = self.ctx, super().optimizer_step
        if run is None or not run.having("step"):
            return own(optimizer, closure, model, **kwargs)

        def proceed(optimizer: Any, replacement: Callable[[], Any], **options: Any) -> Any:
            if replacement is with_hooks:
                return own(optimizer, closure, model, **options)
            if run.precision == "16-mixed":
                names = ", ".join(type(technique).__name__ for technique in run.having("step"))
                raise ConflictError(
                    f"precision=16-mixed, whose gradients are scaled until the step, and a closure of one's own"
                    f" ({names}): write precision=bf16-mixed"
                )
            with patches.without_hooks(self.precision_plugin):  # which the technique's closure has run, once
                return own(optimizer, replacement, model, **options)

        with_hooks = patches.with_hooks(self.precision_plugin, model or self.lightning_module, optimizer, closure)
        return run.around("step", proceed)(optimizer, with_hooks, **kwargs)

    # --- checkpoints, also behind a run ---

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights that a checkpoint has."""
        weights = super().lightning_module_state_dict()
        for technique in self._having_after("saved_weights"):
            weights = technique.saved_weights(self.solo_run, weights)  # type: ignore[arg-type]
        return weights

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the states of an optimizer that a checkpoint has."""
        states: dict[str, Any] = super().optimizer_state(optimizer)
        for technique in self._having_after("saved_states"):
            states = technique.saved_states(self.solo_run, optimizer, states)  # type: ignore[arg-type]
        return states

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers."""
        own, run = super().load_optimizer_state_dict, self.ctx
        (own if run is None else run.around("load_states", own))(checkpoint)

    def _having_after(self, seam: str) -> Sequence[Technique]:
        return () if self.solo_run is None else self.solo_run.having(seam)


def join(technique: Technique, trainer: Any) -> Run:
    """Join a technique to the run of a Trainer, and return the run; a strategy without seams is given them until then.

    Raises:
        ConflictError: as `Run.join`.
    """
    strategy = trainer.strategy
    undo = None if isinstance(strategy, Seams) else patches.give_seams(strategy, Seams)
    run: Run | None = strategy.ctx
    if run is None or run.trainer is not trainer:
        run = Seams.begin(strategy, trainer)
    if undo is not None:
        run.undo.callback(undo)  # first in, last out
    try:
        run.join(technique)
    except BaseException:
        run.end()
        raise
    return run
