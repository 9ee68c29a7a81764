"""Continue a fit at an exact place in Lightning's loops. Uses private names, as `patches` does.

Written for Lightning 2.6. Its own restart knows the place by counts of batches only, and in some places repeats or
leaves out what was due.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from lightning_solo.attributes import replaced
from lightning_solo.data.epoch_batches import EpochBatches
from lightning_solo.seams.homes import fabric_part, part

BETWEEN_EPOCHS = ("before", "start", "epoch_start", "epoch_done")
AT_AN_END = ("batch_end", "batch_done", "validated", "epoch_end")


@contextmanager
def places(
    trainer: Any, at: Callable[[str], None], resumed: Callable[[], tuple[str, list[str]] | None]
) -> Iterator[Callable[[], list[str]]]:
    """Call ``at(place)`` where a fit comes to another place, and continue a resumed fit exactly at its place.

    Lightning's own restart skips validation and hooks that were due, repeats those of an epoch's end, and trains on a
    batch of a next epoch (its issues 19764 and 20550).

    Args:
        trainer: that fits.
        at: gets ``"first_fetch"`` (before the iterator of a further epoch is made), ``"epoch_start"``, ``"batch"``,
            ``"batch_done"`` (before its validation), ``"validation"``, ``"between"`` (batches), ``"epoch_end"`` (hooks)
            or ``"epoch_done"``.
        resumed: returns the `place_of` the checkpoint and its hooks; None for a fit from the start.

    Yields:
        A function that returns of whose hooks the latest end of an epoch or validation has called, as class names.
    """
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    validation = epoch.val_loop
    runs = {"fit": fit.run, "reset": fit.reset, "start": fit.on_advance_start, "advance": fit.advance}
    ends = {"epoch": fit.on_advance_end, "batch": epoch.on_advance_end}
    advance, validate, begin_epoch = epoch.advance, validation.run, epoch.on_run_start
    place: str | None = None
    hooks, steps = _Hooks(trainer), ExitStack()

    def run() -> None:
        nonlocal place
        if (saved := resumed()) is not None:
            place, hooks.done = saved[0], [*saved[1]]
            _settle(trainer, place)
            fit._restarting = epoch.restarting = True  # so that the loaders' positions are loaded
        with ExitStack() as stack:
            if place in AT_AN_END:  # it may be that of the run, which Lightning would leave out
                steps.enter_context(replaced(epoch, "max_steps", -1))
            stack.callback(steps.close)
            runs["fit"]()

    def reset() -> None:
        if place is None:
            at("start")
        if place in BETWEEN_EPOCHS:  # as a fit that goes on by itself
            for loop in (fit, epoch, validation):
                loop._restarting = False
                loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
        runs["reset"]()

    def on_epoch_start() -> None:
        nonlocal place
        at("epoch_start" if place is None or place in BETWEEN_EPOCHS else place)
        if place in BETWEEN_EPOCHS:
            place = None
        runs["start"]()

    def advance_epoch() -> None:
        if place != "epoch_end":
            runs["advance"]()

    def on_batches_start(data_fetcher: Any) -> None:
        if trainer.current_epoch > 0 and not fit.is_resuming and not epoch.restarting:  # it makes the iterator
            at("first_fetch")
        begin_epoch(data_fetcher)

    def on_epoch_end() -> None:
        nonlocal place
        steps.close()
        if place == "epoch_end":
            fit._restarting = epoch.restarting = False
        else:
            hooks.done = []
        place = None
        at("epoch_end")
        with hooks.counted("on_train_epoch_end"):
            ends["epoch"]()
        at("epoch_done")

    def advance_batch(data_fetcher: Any) -> None:
        nonlocal place
        before, place = place, None
        steps.close()
        if before is not None:
            fit._restarting = False  # else plateau schedulers don't step at this epoch's end
            validation.restarting = False
            if before in AT_AN_END:
                at(before)
                if before == "batch_end":
                    _end_batch(trainer)
                epoch._skip_next_val = before == "validated"
                if before == "validated":
                    hooks.run_rest("on_validation_end")
                return
            epoch._restarting = False
        at("batch")
        advance(data_fetcher)

    def on_batch_end(data_fetcher: Any) -> None:
        at("validated" if epoch._skip_next_val else "batch_done")
        ends["batch"](data_fetcher)
        at("between")

    def run_validation() -> Any:
        if trainer.sanity_checking:
            return validate()
        at("validation")
        hooks.done = []
        with hooks.counted("on_validation_end"):
            result = validate()
        at("validated")
        return result

    with ExitStack() as stack:
        for owner, name, function in (
            (fit, "run", run),
            (fit, "reset", reset),
            (fit, "on_advance_start", on_epoch_start),
            (fit, "advance", advance_epoch),
            (fit, "on_advance_end", on_epoch_end),
            (epoch, "on_run_start", on_batches_start),
            (epoch, "advance", advance_batch),
            (epoch, "on_advance_end", on_batch_end),
            (validation, "run", run_validation),
        ):
            stack.enter_context(replaced(owner, name, function))
        yield lambda: [*hooks.begun]


class _Hooks:
    """Notes of which callbacks and module a hook was called; leaves out those of which the saved run called it.

    Attributes:
        done: class names of those of the saved run.
        begun: class names of those of this run.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.done: list[str] = []
        self.begun: list[str] = []

    @contextmanager
    def counted(self, hook: str) -> Iterator[None]:
        """Note the calls in this context."""
        self.begun = []
        with ExitStack() as stack:
            for owner in (*self._trainer.callbacks, self._trainer.lightning_module):
                stack.enter_context(replaced(owner, hook, partial(self._call, owner, getattr(owner, hook))))
            yield

    def _call(self, owner: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = type(owner).__name__
        self.begun.append(name)
        if name in self.done:
            self.done.remove(name)
            return None
        return stock(*args, **kwargs)

    def run_rest(self, hook: str) -> None:
        """Call the hooks that the saved run hasn't called, of a validation's end."""
        trainer, module = self._trainer, self._trainer.lightning_module
        trainer.validating = True
        self.begun = []
        for callback in trainer.callbacks:
            self._call(callback, getattr(callback, hook), trainer, module)
        self._call(module, getattr(module, hook))
        trainer.training = True


def place_of(trainer: Any, latest: str, ready: int) -> str:
    """Return the place at which a run that loads a checkpoint of now continues.

    Args:
        trainer: that fits.
        latest: the last place of `places`; ``"before"`` before the first.
        ready: batches of the epoch that had been fetched there.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    batches = progress.current
    if latest == "batch":
        if batches.ready == ready or batches.processed < batches.ready:
            return "batch"
        return "batch_end" if batches.completed < batches.processed else "batch_done"
    if latest == "validation":
        return "batch_done"
    is_cut = batches.ready < trainer.num_training_batches and not progress.is_last_batch
    if latest in ("epoch_end", "epoch_done") and is_cut:  # by max_steps, for example
        return "between"
    return latest


def batches_fetched(trainer: Any) -> int:
    """Return the number of the epoch's batches that Lightning has begun to train on."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def batches_done(trainer: Any) -> int:
    """Return the number of the epoch's batches that were trained on."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)


def fetched_ahead(trainer: Any) -> int:
    """Return the number of batches that were fetched, but not trained on."""
    loop = trainer.fit_loop
    progress = loop.epoch_loop.batch_progress.current
    return 0 if loop._data_fetcher is None else max(0, int(loop._data_fetcher.fetched - progress.processed))


def fetches_ahead(trainer: Any) -> bool:
    """Return whether each batch is fetched while its predecessor is trained on, since their number is unknown."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and fetcher.length is None


def fetches_first(trainer: Any) -> bool:
    """Return whether a batch is fetched as an epoch's iterator is made, where no fit can be continued."""
    return fetches_ahead(trainer) and trainer.fit_loop._data_fetcher.fetched == 0


def _settle(trainer: Any, place: str) -> None:
    """Set the loops' counts to a place."""
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    batches, epochs = epoch.batch_progress, fit.epoch_progress
    optimization = epoch.automatic_optimization.optim_progress.optimizer
    for progress in (batches, optimization.step, optimization.zero_grad, epoch.scheduler_progress):
        for count in (progress.total, progress.current):
            if hasattr(count, "processed"):
                count.completed = count.processed
            for name in ("ready", "started", "processed"):
                if hasattr(count, name):
                    setattr(count, name, count.completed)
    for count in (epochs.total, epochs.current):
        if place in BETWEEN_EPOCHS:
            count.ready = count.started = count.processed = count.completed
        else:
            count.started = count.ready
            count.processed = count.completed = count.ready - 1
    if place in BETWEEN_EPOCHS:
        batches.current.reset()
    if place in (*BETWEEN_EPOCHS, "batch", "between"):
        batches.is_last_batch = False


def _end_batch(trainer: Any) -> None:
    """Do what Lightning does after the hooks of a batch's end."""
    connector = trainer._logger_connector
    connector.on_batch_end()
    connector.update_train_step_metrics()


def logged_values(trainer: Any) -> dict[str, Any]:
    """Return what Lightning has of `self.log` in this epoch, and the metrics that callbacks see, as plain data.

    Nothing is copied, since Lightning replaces these tensors and never changes them.
    """
    connector = trainer._logger_connector
    results = []
    for key, metric in trainer.fit_loop.epoch_loop._results.items():
        meta = {name: value for name, value in vars(metric.meta).items() if name not in ("reduce_fx", "_sync")}
        meta["reduce_fx"] = metric.meta.reduce_fx.__name__
        result = {"key": key, "meta": meta, "has_reset": metric.has_reset, "cache": metric._forward_cache}
        result |= {"sync": metric.meta.sync.should, "rank_zero_only": metric.meta.sync.rank_zero_only}
        result |= {"updates": metric._update_count}
        if metric.is_tensor:
            result["values"] = {name: getattr(metric, name) for name in metric._defaults}
        results.append(result)
    shown = {name: dict(getattr(connector, f"_{name}_metrics")) for name in ("callback", "logged", "progress_bar")}
    return {"results": results, "first": connector._first_loop_iter, "fx": connector._current_fx, **shown}


def values_logged(trainer: Any, home: str, state: Mapping[str, Any], place: str) -> None:
    """Restore what `logged_values` returned, for a run that continues at a place."""
    connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
    classes = part(home, "trainer.connectors.logger_connector.result")
    for saved in state["results"]:
        meta = classes._Metadata(**saved["meta"])
        reduce: Any = trainer.strategy.reduce
        meta.sync = classes._Sync(fn=reduce, _should=saved["sync"], rank_zero_only=saved["rank_zero_only"])
        metric = classes._ResultMetric(meta, "values" in saved)
        for name, value in saved.get("values", {}).items():
            setattr(metric, name, value)
        if "values" not in saved:
            metric.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
        metric.to(trainer.strategy.root_device)
        metric.has_reset, metric._update_count = saved["has_reset"], saved["updates"]
        metric._forward_cache = saved["cache"]
        results[saved["key"]] = metric
    for name in ("callback", "logged", "progress_bar"):
        setattr(connector, f"_{name}_metrics", dict(state[name]))
    within = place not in (*BETWEEN_EPOCHS, "epoch_end")
    # None, as during a validation: the next batch would begin the sums anew
    connector._first_loop_iter = False if within and state["first"] is None else state["first"]
    connector._current_fx = state["fx"]


def batches_used(trainer: Any, loader: Any) -> float:
    """Return how many batches of each epoch are used at most, by the Trainer's limit."""
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        return limit
    try:
        return int(len(loader) * limit)
    except TypeError:
        return math.inf


def accumulation_scheduled(trainer: Any) -> None:
    """Set the epoch's factor of a `GradientAccumulationScheduler`, which Lightning calls at an epoch's start alone."""
    for callback in _callbacks(trainer, "GradientAccumulationScheduler"):
        callback.on_train_epoch_start(trainer)


def has_callback(trainer: Any, name: str) -> bool:
    """Return whether a Trainer has a callback of a class of either home, by its name."""
    return bool(_callbacks(trainer, name))


def _callbacks(trainer: Any, name: str) -> list[Any]:
    return [each for each in trainer.callbacks if any(cls.__name__ == name for cls in type(each).__mro__)]


def loader_states(checkpoint: Mapping[str, Any]) -> list[Any] | None:
    """Return the list of the loaders' states in a checkpoint; None if there is none."""
    states: list[Any] | None = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader")
    return states


def set_loader_states(checkpoint: Mapping[str, Any], states: list[Any]) -> None:
    """Replace the list of the loaders' states in a checkpoint."""
    loop = checkpoint["loops"]["fit_loop"]["state_dict"]
    loop.pop("combined_loader", None)
    if states:
        loop["combined_loader"] = states


def sampler_numbered(trainer: Any, loader: Any, home: str) -> None:
    """Call ``set_epoch`` of a loader's samplers with the number of the resumed epoch, as Lightning does later."""
    processed = trainer.fit_loop.epoch_progress.current.processed
    fabric_part(home, "utilities.data")._set_sampler_epoch(loader, processed)


def after_train_start(strategy: Any, then: Callable[[], None]) -> Any:
    """Call ``then()`` after all hooks of `on_train_start`."""
    stock = strategy.on_train_start

    def on_train_start() -> None:
        stock()
        then()

    return replaced(strategy, "on_train_start", on_train_start)


def loaders_resumed(trainer: Any) -> None:
    """Load the loaders' positions from the checkpoint, if Lightning didn't.

    Lightning loads them when it makes the loaders. It makes them before it reads the checkpoint's loops if
    ``configure_optimizers`` reads ``estimated_stepping_batches``.
    """
    loop = trainer.fit_loop
    if not loop.restarting:
        return
    if loop._combined_loader_states_to_load:
        loop._load_combined_loader_states()
        iter(loop._data_fetcher)
    if batch_within(trainer) is not None:  # saved within a batch, as by Ctrl-C: Lightning runs that batch again
        for batches in _epoch_batches(loop._combined_loader):
            batches.step_back()
    if loop.epoch_loop.batch_progress.current.completed == trainer.num_training_batches:
        for batches in _epoch_batches(loop._combined_loader):
            if batches.start == 0:
                # Lightning ends that epoch once more; without validation it would train on one of its batches
                batches.go_to(batches.epoch - 1, batches.count)


def batch_within(trainer: Any) -> int | None:
    """Return the index of the unfinished batch, as after Ctrl-C; None between batches."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    return progress.ready - 1 if progress.ready > progress.processed else None


def loader_numbered(trainer: Any, loader: Any) -> None:
    """Set how many batches of each epoch an `EpochBatches` loader uses; copy the previous sampler's position."""
    batches = getattr(loader, "batch_sampler", None)
    if isinstance(batches, EpochBatches):
        limit = trainer.limit_train_batches
        batches.batches_used = min(batches.count, limit) if isinstance(limit, int) else int(batches.count * limit)
        for before in _epoch_batches(trainer.fit_loop._combined_loader):  # reloaded
            batches.follow(before)


def _epoch_batches(combined: Any) -> list[EpochBatches]:
    samplers = [getattr(loader, "batch_sampler", None) for loader in ([] if combined is None else combined.flattened)]
    return [sampler for sampler in samplers if isinstance(sampler, EpochBatches)]


def go_back(trainer: Any, checkpoint: Mapping[str, Any]) -> int:
    """Load weights, optimizer states, schedulers, the loss scale and the number of steps; return that number.

    The loaders, the number of the epoch, schedulers that step with it, and other callbacks go on.
    """
    connector = trainer._checkpoint_connector
    by_epoch = [
        (
            config.scheduler,
            config.scheduler.state_dict(),
            [group["lr"] for group in config.scheduler.optimizer.param_groups],
        )
        for config in trainer.lr_scheduler_configs
        if config.interval == "epoch"
    ]
    with replaced(connector, "_loaded_checkpoint", checkpoint):
        connector.restore_model()
        connector.restore_precision_plugin_state()
        connector.restore_optimizers_and_schedulers()
    steps = int(checkpoint["global_step"])
    for scheduler, state, rates in by_epoch:
        scheduler.load_state_dict(state)
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    progress.ready = progress.completed = steps
    return steps
