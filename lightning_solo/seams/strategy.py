"""Seams in any strategy: during a run its methods call the techniques."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_solo.errors import ConflictError, GradientError
from lightning_solo.optim.averages import AVERAGE, averaged_weights
from lightning_solo.optim.torch_optimizers import refuse_states_of_others
from lightning_solo.seams import patches, resuming
from lightning_solo.seams.run import Run

if TYPE_CHECKING:
    from lightning_solo.seams.technique import Technique

Own = Callable[..., Any]
"""A method of a strategy, bound to it."""


def begin(strategy: Any, trainer: Any) -> Run:
    """Return a new run, during which techniques act around the strategy's methods; end the previous run."""
    if (before := run_of(strategy)) is not None:
        before.end()
    run = Run(strategy, trainer)
    _replace_methods(run, AROUND)
    return run


def _replace_methods(run: Run, around: Mapping[str, Callable[..., Any]]) -> None:
    """Replace methods of the run's strategy until the changes of the run are undone."""
    strategy = run.strategy
    strategy.solo_run = run
    run.undo.callback(delattr, strategy, "solo_run")
    run.undo.enter_context(
        patches.methods_through(strategy, {name: partial(function, run) for name, function in around.items()})
    )


def run_of(strategy: Any) -> Run | None:
    """Return the current run of a strategy; None if it has none."""
    run: Run | None = getattr(strategy, "solo_run", None)
    return run


def join(technique: Technique, trainer: Any) -> Run:
    """Add a technique to the run of a Trainer, and return the run.

    Raises:
        ConflictError: as `Run.join`.
    """
    run = run_of(trainer.strategy)
    if run is None or run.ended or run.trainer is not trainer:
        run = begin(trainer.strategy, trainer)
    try:
        run.join(technique)
    except BaseException:
        run.end()
        raise
    return run


# --- the run ---


def _teardown(run: Run, own: Own) -> None:
    """End the run once module and states are on the host, also after an exception.

    A run that was never set up ends first, so that the module moves unchanged. Checkpoints that are saved later, before
    the next run, have the same form as those saved in the run.
    """
    if not run.is_set_up:
        run.end()
        own()
        return
    try:
        run.around("leaving", own)()
    finally:
        run.end()
        if run.having("checkpoint"):
            _replace_methods(run, SAVING)


# --- set-up ---


@contextmanager
def _model_sharded_context(run: Run, own: Own) -> Iterator[None]:
    """Run ``configure_model`` inside the techniques' contexts."""
    with ExitStack() as stack:
        for technique in run.having("building"):
            stack.enter_context(technique.building(run))
        stack.enter_context(own())
        yield


def _load_model_state_dict(run: Run, own: Own, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
    """Load weights inside the techniques' contexts; say so if the checkpoint has an average that none continues."""
    if run.training and averaged_weights(checkpoint) and not any(hasattr(each, AVERAGE) for each in run.techniques):
        run.info(
            "the checkpoint also has an average of the weights; this run continues with the live weights; write"
            " +callback=weight_averaging to continue the average"
        )
    with ExitStack() as stack:
        for each in run.checkpoints():
            stack.enter_context(each.loading_weights())
        own(checkpoint, strict=strict)


def _setup(run: Run, own: Own, trainer: Any) -> None:
    """Transform the module, run the strategy's set-up, and replace optimizers."""
    run.transform()
    own(trainer)
    if run.training:
        strategy = run.strategy
        for technique in run.having("optimizers"):
            schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
            with run.naming_lazy(technique):
                strategy.optimizers = technique.optimizers(run, list(strategy.optimizers), schedulers)
        if run.having("clip"):
            run.undo.enter_context(patches.clipping(strategy.precision_plugin, partial(run.around, "clip")))
        if run.having("loss"):
            run.undo.enter_context(patches.micro_batches(trainer, run.loss))
    run.is_set_up = True


def _process_dataloader(run: Run, own: Own, dataloader: object) -> object:
    """Replace the loader for training."""
    loader: object = own(dataloader)
    if run.trainer.training:
        for technique in run.having("loader"):
            loader = technique.loader(run, loader)
        resuming.loader_numbered(run.trainer, loader)
    return loader


# --- a step ---


def _on_train_start(run: Run, own: Own) -> None:
    """Start the loaders at a checkpoint's position."""
    resuming.loaders_resumed(run.trainer)
    own()


def _on_train_batch_start(run: Run, own: Own, batch: Any, batch_idx: int) -> None:
    """Begin a micro-batch; callbacks ran before and may have changed the factor."""
    run.window.start_batch(batch_idx)
    own(batch, batch_idx)


def _training_step(run: Run, own: Own, *args: Any, **kwargs: Any) -> Any:
    """Run the module's training step."""
    try:  # a context would take longer, in each step
        return run.around("training_step", own)(*args, **kwargs)
    except GradientError as error:
        run.locate(error)
        raise


def _backward(run: Run, own: Own, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Run backward of a micro-batch, with its loss multiplied by the window's weight."""
    loss: Tensor = run.backward(lambda loss: own(loss, optimizer, *args, **kwargs), closure_loss)
    return loss


def _optimizer_step(run: Run, own: Own, optimizer: Any, closure: Own, model: Any = None, **kwargs: Any) -> Any:
    """Step an optimizer; automatic optimization runs forward and backward in it."""
    try:
        return _stepped(run, own, optimizer, closure, model, **kwargs)
    except GradientError as error:
        run.locate(error)
        raise


def _stepped(run: Run, own: Own, optimizer: Any, closure: Own, model: Any, **kwargs: Any) -> Any:
    if not run.having("step"):
        result = own(optimizer, closure, model, **kwargs)
        run.end_step()
        return result
    precision = run.strategy.precision_plugin
    clipped = patches.with_hooks(precision, model or run.module, optimizer, closure)

    def proceed(optimizer: Any, replacement: Own, **options: Any) -> Any:
        if replacement is clipped:
            return own(optimizer, closure, model, **options)
        if run.precision == "16-mixed":
            names = ", ".join(type(technique).__name__ for technique in run.having("step"))
            raise ConflictError(
                f"precision=16-mixed and {names}: the gradients are scaled until the step, and {names} replaces its"
                " closure; write precision=bf16-mixed"
            )
        with patches.without_hooks(precision):  # the technique's closure ran them
            return own(optimizer, replacement, model, **options)

    result = run.around("step", proceed)(optimizer, clipped, **kwargs)
    run.end_step()
    return result


# --- checkpoints ---


def _lightning_module_state_dict(run: Run, own: Own) -> dict[str, Any]:
    """Return the weights for a checkpoint."""
    weights: dict[str, Any] = own()
    for checkpoint in run.checkpoints():
        weights = checkpoint.saved_weights(weights)
    return weights


def _optimizer_state(run: Run, own: Own, optimizer: Any) -> dict[str, Any]:
    """Return the states of an optimizer for a checkpoint."""
    states: dict[str, Any] = own(optimizer)
    for checkpoint in run.checkpoints():
        states = checkpoint.saved_states(optimizer, states)
    return states


def _save_checkpoint(run: Run, own: Own, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """Write a checkpoint."""
    for each in run.checkpoints():
        checkpoint = each.saved(checkpoint)
    own(checkpoint, *args, **kwargs)


def _load_optimizer_state_dict(run: Run, own: Own, checkpoint: Mapping[str, Any]) -> None:
    """Load the states of the optimizers.

    Raises:
        CheckpointError: they are of another optimizer.
    """

    def load(checkpoint: Mapping[str, Any]) -> None:
        for optimizer, states in zip(run.strategy.optimizers, checkpoint.get("optimizer_states", ()), strict=False):
            refuse_states_of_others(optimizer, states)
        own(checkpoint)

    run.load_states(load)(checkpoint)


SAVING: dict[str, Callable[..., Any]] = {
    "lightning_module_state_dict": _lightning_module_state_dict,
    "optimizer_state": _optimizer_state,
    "save_checkpoint": _save_checkpoint,
}
"""The replacements that stay after a run, until the next one, if a technique changes checkpoints."""
AROUND: dict[str, Callable[..., Any]] = {
    "teardown": _teardown,
    "model_sharded_context": _model_sharded_context,
    "load_model_state_dict": _load_model_state_dict,
    "setup": _setup,
    "process_dataloader": _process_dataloader,
    "on_train_start": _on_train_start,
    "on_train_batch_start": _on_train_batch_start,
    "training_step": _training_step,
    "backward": _backward,
    "optimizer_step": _optimizer_step,
    **SAVING,
    "load_optimizer_state_dict": _load_optimizer_state_dict,
}
"""Method of a strategy -> its replacement during a run, called with the run and the method."""
