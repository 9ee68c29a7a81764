"""Changes of Lightning's objects, and uses of its private names: to check with `resuming` when Lightning is upgraded.

Written for Lightning 2.6, which has no callback hook between ``configure_model`` and the optimizers, around forward
and backward, or for clipping. Each patch changes one object, not a class, and can be undone. For each
one a test in `tests/seams/test_patches.py`, for both homes, fails if its target no longer exists.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any
from weakref import proxy

from torch import nn
from torch.random import fork_rng
from torch.utils.data import RandomSampler

from lightning_solo.attributes import replaced
from lightning_solo.errors import ConflictError
from lightning_solo.seams.homes import part

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes a method of Lightning, and returns its replacement."""


@contextmanager
def methods_through(strategy: Any, around: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace methods of a strategy by functions that take the original method as their first argument.

    Copies and pickles of the strategy and its precision don't contain the replacements.
    """
    stock_state = strategy.__getstate__
    # `batches_through`, `checkpoint_reads` and `moves_within` replace the last three
    left_out = {*around, "__getstate__", "solo_run", "batch_to_device", "load_checkpoint", "model_to_device"}

    def state() -> dict[str, Any]:
        plain = {name: value for name, value in stock_state().items() if name not in left_out}
        return plain | {"_precision_plugin": as_found(strategy.precision_plugin)}

    with ExitStack() as stack:
        stack.enter_context(replaced(strategy, "__getstate__", state))
        for name, function in around.items():
            stack.enter_context(replaced(strategy, name, partial(function, getattr(strategy, name))))
        yield


def as_found(thing: Any) -> Any:
    """Return a shallow copy without the instance attributes that shadow methods."""
    plain = copy(thing)
    for name, value in vars(thing).items():
        if callable(value) and callable(getattr(type(thing), name, None)):
            delattr(plain, name)
    return plain


@contextmanager
def stepping_batches(trainer: Any, count: Callable[[Any, int | float], int | float]) -> Iterator[None]:
    """Replace ``trainer.estimated_stepping_batches`` by ``count(trainer, Lightning's value)``.

    Python looks up a property in the class, so this Trainer gets a subclass. Its copies and pickles have the original
    class.
    """
    cls = type(trainer)
    stock = cls.estimated_stepping_batches.fget

    def reduced(thing: Any, protocol: Any) -> Any:
        # Python 3.10 has no __getstate__ of every object.
        state = thing.__getstate__() if hasattr(thing, "__getstate__") else vars(thing)
        return object.__new__, (cls,), state

    body = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    counted = property(lambda self: count(self, stock(self)))
    trainer.__class__ = type(
        cls.__name__, (cls,), {**body, "__reduce_ex__": reduced, "estimated_stepping_batches": counted}
    )
    try:
        yield
    finally:
        trainer.__class__ = cls


@contextmanager
def windows(trainer: Any, before: Callable[[int], int]) -> Iterator[None]:
    """Start an accumulation window where ``before(batch_idx)``, the batch's index in its window, is 0.

    Lightning starts one where the factor divides ``batch_idx``.
    """
    loop = trainer.fit_loop.epoch_loop
    stock = loop.automatic_optimization._make_zero_grad_fn

    def make_zero_grad_fn(batch_idx: int, optimizer: Any) -> Any:
        if before(batch_idx) != 0:
            return None
        with replaced(trainer, "accumulate_grad_batches", 1):  # Lightning then zeroes gradients at each batch
            return stock(batch_idx, optimizer)

    with (
        replaced(loop, "_accumulated_batches_reached", lambda: before(loop.batch_progress.current.ready) == 0),
        replaced(loop.automatic_optimization, "_make_zero_grad_fn", make_zero_grad_fn),
    ):
        yield


def clipping(precision: Any, around: Around) -> Any:
    """Replace the precision's clipping by ``around(stock)``, called with ``(optimizer, bound, "norm" or "value")``.

    ``LightningModule.clip_gradients`` calls it too, whether Lightning or the user clips.
    """
    stock = precision.clip_gradients

    def clip_gradients(optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        by = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))
        around(stock)(optimizer, clip_val, by)

    return replaced(precision, "clip_gradients", clip_gradients)


def without_clipping(precision: Any) -> Any:
    """Clip nothing; the techniques' ``clip`` is still called."""
    return replaced(precision, "clip_gradients", lambda *args, **kwargs: None)


def without_module_init_context(precision: Any) -> Any:
    """Build weights in fp32 in ``configure_model``, not in the dtype that the precision's context sets."""
    return replaced(precision, "module_init_context", nullcontext)


@contextmanager
def conversion_around(precision: Any, kept: Callable[[Any], Iterable[Any]]) -> Iterator[None]:
    """Convert a module to the precision's type without the parameters of ``kept(module)``."""
    stock = precision.convert_module

    def convert_module(module: Any) -> Any:
        values = [p.data for p in kept(module)]
        converted = stock(module)
        for p, value in zip(kept(module), values, strict=True):  # of tensors without data it makes new parameters
            p.data = value.to(p.device)
        return converted

    with replaced(precision, "convert_module", convert_module):
        yield


def configures_its_model(module: Any) -> Any:
    """Let Lightning's strategy for FSDP2 accept a module that doesn't override ``configure_model``."""
    return replaced(module, "configure_model", lambda: None)


def loaded_checkpoint(trainer: Any) -> Mapping[str, Any]:
    """Return the checkpoint that a Trainer is loading."""
    checkpoint: Mapping[str, Any] = trainer._checkpoint_connector._loaded_checkpoint
    return checkpoint


def validation_metrics(trainer: Any, batches: int) -> dict[str, float]:
    """Return what validation of the first batches logs, as Lightning's sanity check runs it; empty without validation.

    Nothing of it reaches loggers and callbacks of the fit, and random numbers are as before.
    """
    loop, metrics = trainer.fit_loop.epoch_loop.val_loop, dict[str, float]()
    stock = loop.run

    def run() -> None:
        stock()
        metrics.update({name: float(value) for name, value in trainer.callback_metrics.items()})

    with replaced(loop, "run", run), replaced(trainer, "num_sanity_val_steps", batches), fork_rng():
        trainer._run_sanity_check()
    return metrics


def without_distributed_sampler(trainer: Any) -> Any:
    """Keep the samplers of training loaders, which a strategy for several processes would replace."""
    return replaced(trainer._accelerator_connector, "use_distributed_sampler", False)


def samplers_kept_in_order(trainer: Any) -> Any:
    """Split a training loader's items over processes in its sampler's order; Lightning alone would shuffle them.

    Fewer items than processes are refused: torch's sampler would repeat them.
    """
    connector = trainer._data_connector
    stock = connector._resolve_sampler

    def resolve_sampler(dataloader: Any, shuffle: bool, mode: Any = None) -> Any:
        if getattr(mode, "value", None) == "train" and connector._requires_distributed_sampler(dataloader):
            items = len(dataloader.sampler) if isinstance(dataloader.sampler, Sized) else 0  # Lightning refuses others
            if 0 < items < trainer.world_size:
                raise ConflictError(
                    f"the training loader has fewer items than processes ({items} < {trainer.world_size}): torch's"
                    f" sampler would give one item to several; write devices={items}, or give the loader more items"
                )
        return stock(dataloader, shuffle=shuffle and isinstance(dataloader.sampler, RandomSampler), mode=mode)

    return replaced(connector, "_resolve_sampler", resolve_sampler)


def kills_through(around: Around) -> None:
    """Replace by ``around(stock)`` how Lightning kills this process and its children after a child has failed.

    The thread that does so ends with the process, and so does the replacement.
    """
    for thread in threading.enumerate():
        if thread.name == "child-process-observer":
            observer: Any = thread
            observer._terminate_all = around(partial(type(observer)._terminate_all, observer))


def batches_through(strategy: Any, around: Around) -> Any:
    """Replace the strategy's function that moves a batch to the device by ``around(stock)``."""
    return replaced(strategy, "batch_to_device", around(strategy.batch_to_device))


def moves_within(strategy: Any, context: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Move the module to the device, after its conversion to the precision's type, in ``context()``."""
    stock = strategy.model_to_device

    def model_to_device() -> None:
        with context():
            stock()

    return replaced(strategy, "model_to_device", model_to_device)


def after_optimizers(strategy: Any, then: Callable[[], None]) -> Any:
    """Call a function once the user's optimizers are made, before techniques replace them."""
    stock = strategy.setup_optimizers

    def setup_optimizers(trainer: Any) -> None:
        stock(trainer)
        then()

    return replaced(strategy, "setup_optimizers", setup_optimizers)


def checkpoint_reads(strategy: Any, around: Around) -> Any:
    """Replace the strategy's function that reads a checkpoint from a path by ``around(stock)``."""
    return replaced(strategy, "load_checkpoint", around(strategy.load_checkpoint))


@contextmanager
def fetches(trainer: Any, begin: Callable[..., None], end: Callable[[], None]) -> Iterator[None]:
    """Call ``begin()`` before each wait for a training batch, and ``end()`` after it.

    An epoch starts with ``begin(with_epoch=True)``, before the loader makes its iterator and starts its workers. The
    first batch's own ``begin()`` follows.
    """
    loop = trainer.fit_loop.epoch_loop
    start, before, after = loop.on_run_start, loop._on_before_fetch, loop._on_after_fetch

    def on_run_start(data_fetcher: Any) -> None:
        begin(with_epoch=True)
        start(data_fetcher)

    def on_before_fetch() -> None:
        before()
        begin()

    def on_after_fetch() -> None:
        end()
        after()

    with ExitStack() as stack:
        stack.enter_context(replaced(loop, "on_run_start", on_run_start))
        stack.enter_context(replaced(loop, "_on_before_fetch", on_before_fetch))
        stack.enter_context(replaced(loop, "_on_after_fetch", on_after_fetch))
        yield


def micro_batches(trainer: Any, around: Around) -> Any:
    """Replace each micro-batch of automatic optimization (forward, zeroing, backward) by ``around(stock)``.

    The first micro-batch of a window that reaches backward zeroes the gradients.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    stock = loop._make_closure
    pending_zero: list[Callable[[], None]] = []

    def make_closure(kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        closure = stock(kwargs, optimizer, batch_idx)
        own_zero = closure._zero_grad_fn  # not the closure: in a circle of references the batch would outlive the step

        def zero() -> None:
            while pending_zero:
                pending_zero.pop()()

        def proceed(weight: float = 1.0, **replaced: Any) -> Any:
            arguments = type(kwargs)({name: replaced.get(name, value) for name, value in kwargs.items()})
            micro_batch = stock(arguments, optimizer, batch_idx)
            micro_batch._zero_grad_fn = zero if pending_zero else None
            if weight != 1 and micro_batch._backward_fn is not None:
                micro_batch._backward_fn = partial(_weighted, micro_batch._backward_fn, weight)
            return micro_batch.closure()

        def run(*args: Any, **kwargs: Any) -> Any:
            if own_zero is not None:
                pending_zero[:] = [own_zero]
            return around(proceed)()

        closure.closure = run
        return closure

    return replaced(loop, "_make_closure", make_closure)


@contextmanager
def states_stay(home: str) -> Iterator[None]:
    """Load optimizer states in this context without moving them to the device, as Lightning would."""
    with replaced(part(home, "strategies.strategy"), "_optimizer_to_device", lambda optimizer, device: None):
        yield


@contextmanager
def all_stays(strategy: Any) -> Iterator[None]:
    """Tear down a strategy in this context without moving module and optimizer states to the host."""
    module = strategy.lightning_module
    with replaced(strategy, "_optimizers", []), replaced(module, "cpu", lambda: module):
        yield


def log_metrics(trainer: Any, metrics: Mapping[str, float | None]) -> None:
    """Pass metrics to all loggers, at the step number that ``self.log`` uses, without its keys and aggregation."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=stepped_batches(trainer))


def stepped_batches(trainer: Any) -> int:
    """Return the number of batches after which optimizers have stepped: the step number of ``self.log``."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def correct_logged_steps(trainer: Any, *_: Any) -> None:
    """Set the step number of ``self.log`` to the number of steps before this batch; for `on_train_batch_start`.

    Lightning counts a step twice if a run resumes from a checkpoint that was saved in `on_train_end` or by Ctrl-C.
    """
    loop = trainer.fit_loop.epoch_loop
    automatic = trainer.lightning_module.automatic_optimization  # else a batch may have several optimizer steps
    loop._batches_that_stepped = trainer.global_step if automatic else loop.batch_progress.total.completed


@contextmanager
def learning_rates_named(trainer: Any, originals: Mapping[Any, type[Any]]) -> Iterator[None]:
    """Name optimizers in learning-rate monitors by the classes of the originals: ``lr-AdamW``, not ``lr-CompactAdamW``.

    Args:
        trainer: of any callbacks.
        originals: optimizer -> class of the optimizer that it replaced.
    """

    def through(stock: Callable[..., Any]) -> Callable[..., Any]:
        def names(optimizer: Any, name: str, seen: list[Any], counts: Any, config: Any) -> Any:
            original = originals.get(optimizer)
            if original is None:
                return stock(optimizer, name, seen, counts, config)
            stand_in = object.__new__(original)  # the monitor counts optimizers by their class
            vars(stand_in)["param_groups"] = optimizer.param_groups
            if config is None or config.name is None:
                name = f"lr-{original.__name__}"
            seen.append(optimizer)
            return stock(stand_in, name, [], counts, config)

        return names

    with ExitStack() as stack:
        for callback in trainer.callbacks:
            if any(cls.__name__ == "LearningRateMonitor" for cls in type(callback).__mro__):
                stock = callback._check_duplicates_and_update_name
                stack.enter_context(replaced(callback, "_check_duplicates_and_update_name", through(stock)))
        yield


def steps_next(trainer: Any) -> bool:
    """Return whether the optimizer steps after this micro-batch: its window is full, or the epoch ends."""
    return not trainer.fit_loop._should_accumulate()


def logged(trainer: Any) -> Callable[..., None]:
    """Return the function that receives the values of ``self.log`` in a training batch."""
    log: Callable[..., None] = trainer.fit_loop.epoch_loop._results.log
    return log


BATCH_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


@contextmanager
def empty_hooks_left_out(callback: Any, base: type) -> Iterator[None]:
    """Leave out a callback's hooks of each batch that are those of ``base``, which do nothing.

    Lightning calls all that are callable, each through its profiler.
    """
    own, cls = vars(callback), type(callback)
    names = [name for name in BATCH_HOOKS if name not in own and getattr(cls, name) is getattr(base, name)]
    own.update(dict.fromkeys(names))
    try:
        yield
    finally:
        for name in names:
            own.pop(name, None)


@contextmanager
def around_hooks(trainer: Any, home: str, within: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter ``within(hook)`` while Lightning calls a hook of all callbacks or of the module."""
    call = part(home, "trainer.call")

    def around(stock: Callable[..., Any]) -> Callable[..., Any]:
        def called(caller: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
            with within(hook_name) if caller is trainer else nullcontext():
                return stock(caller, hook_name, *args, **kwargs)

        return called

    with ExitStack() as stack:
        for name in ("_call_callback_hooks", "_call_lightning_module_hook"):
            stack.enter_context(replaced(call, name, around(getattr(call, name))))
        yield


def logged_sums(trainer: Any) -> Callable[[], None]:
    """Return a function that takes out of the epoch's means and sums what `self.log` gets from now on.

    Values that are shown at each step stay. The states of metrics are the caller's to restore.
    """
    results, is_first = trainer.fit_loop.epoch_loop._results, trainer._logger_connector._first_loop_iter
    before = {
        key: (metric.has_reset, [getattr(metric, name) for name in metric._defaults]) for key, metric in results.items()
    }

    def take_out() -> None:
        for key, metric in results.items():
            has_reset, values = before.get(key, (True, ()))
            if metric.is_tensor and metric.meta.on_epoch and not (values and metric.value is values[0]):
                if is_first or not values:  # the sums of the epoch begin with the next batch
                    metric.reset()
                    continue
                vars(metric).update(zip(metric._defaults, values, strict=True))
                metric._computed = None
            metric.has_reset = has_reset

    return take_out


def fetcher(trainer: Any) -> Any:
    """Return the object that fetches training batches; it holds one or two of them."""
    return trainer.fit_loop._data_fetcher


@contextmanager
def guarded_batches(trainer: Any, around: Callable[..., Any], skipped: Callable[[], bool]) -> Iterator[None]:
    """Replace the work on each training batch of automatic optimization by ``around(stock, ...)``.

    After a batch for which ``skipped()`` is true, no scheduler steps that steps with each optimizer step, and the step
    isn't counted.
    """
    loop = trainer.fit_loop.epoch_loop
    optimization, schedulers = loop.automatic_optimization, loop.update_lr_schedulers

    def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
        if not (interval == "step" and skipped()):
            schedulers(interval, update_plateau_schedulers=update_plateau_schedulers)

    def run(*args: Any, **kwargs: Any) -> Any:
        result = around(stock, *args, **kwargs)
        if skipped():
            progress = optimization.optim_progress.optimizer.step
            for count in (progress.total, progress.current):
                count.ready = count.completed
        return result

    stock = optimization.run
    with replaced(optimization, "run", run), replaced(loop, "update_lr_schedulers", update_lr_schedulers):
        yield


def steps_through(strategy: Any, around: Callable[..., Any]) -> Any:
    """Replace the strategy's step of an optimizer by ``around(stock, ...)``, outside of the techniques' seams."""
    return replaced(strategy, "optimizer_step", partial(around, strategy.optimizer_step))


def before_updates(precision: Any, look: Callable[[Any], None]) -> Any:
    """Call ``look(optimizer)`` after hooks and clipping, just before the optimizer updates weights."""
    stock = precision._after_closure

    def after_closure(model: Any, optimizer: Any) -> None:
        stock(model, optimizer)
        look(optimizer)

    return replaced(precision, "_after_closure", after_closure)


@contextmanager
def clipped_norms(precision: Any, record: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call ``record(optimizer, norm)`` with the norm of all gradients where Lightning clips by it."""
    if type(precision).clip_grad_by_norm.__qualname__ != "Precision.clip_grad_by_norm":  # a precision of the user's
        yield
        return

    def clip_grad_by_norm(optimizer: Any, clip_val: float) -> None:
        record(optimizer, nn.utils.clip_grad_norm_(precision.main_params(optimizer), clip_val))

    with replaced(precision, "clip_grad_by_norm", clip_grad_by_norm):
        yield


def saves_noted(strategy: Any, note: Callable[[Any], None]) -> Any:
    """Call ``note(path)`` after each checkpoint with optimizer states that the strategy has saved."""
    stock = strategy.save_checkpoint

    def save_checkpoint(checkpoint: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        stock(checkpoint, filepath, *args, **kwargs)
        if "optimizer_states" in checkpoint:
            note(filepath)

    return replaced(strategy, "save_checkpoint", save_checkpoint)


def saves_refused(trainer: Any, refuse: Callable[[bool], None]) -> Any:
    """Replace saving of checkpoints by ``refuse(fails)``, where ``fails`` says whether the fit is just failing."""
    return replaced(trainer, "save_checkpoint", lambda *_, **__: refuse(trainer.state.stage is not None))


def engine_left_out(strategy: Any) -> bool | None:
    """Return whether DeepSpeed's engine left out its last step, for a gradient that isn't finite; None without one."""
    left_out: bool | None = getattr(next(iter(strategy.optimizers), None), "overflow", None)
    return left_out


def change_logged_hyperparameters(part: Any, change: Callable[[Any], Any]) -> None:
    """Change the hyperparameters of a module or data module that loggers get; its own stay as they are."""
    if hasattr(part, "_hparams_initial"):
        part._hparams_initial = change(part._hparams_initial)


def checkpoint_folders(trainer: Any) -> list[str]:
    """Return the folders of a Trainer's `ModelCheckpoint` callbacks, which have been set up."""
    folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    return list(dict.fromkeys(str(folder) for folder in folders if folder))


def requeue_path(trainer: Any) -> Path | None:
    """Return the path from which Lightning resumes a job that SLURM runs again; None if SLURM won't."""
    environment = trainer._accelerator_connector.cluster_environment
    if not getattr(environment, "auto_requeue", False) or "SLURM_JOB_ID" not in os.environ:
        return None
    return Path(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


def scaler_of(precision: Any) -> Any:
    """Return the scaler of losses under ``16-mixed``; None under another precision."""
    return getattr(precision, "scaler", None)


def forget_unscaling(precision: Any, optimizer: Any) -> None:
    """Let the scaler unscale an optimizer's gradients again, after a step that was not taken."""
    scaler = scaler_of(precision)
    if scaler is not None:
        scaler._per_optimizer_states.pop(id(optimizer), None)


def after_closure(precision: Any, module: Any, optimizer: Any) -> None:
    """Run clipping and the hooks between backward and the optimizer step."""
    precision._after_closure(module, optimizer)


def weights_dtype(precision: Any) -> Any:
    """Return the dtype of the weights under the precision of DeepSpeed's strategy."""
    return precision._desired_dtype


def new_optimizers(module: Any, home: str) -> Any:
    """Return the optimizers and scheduler configurations of the module's ``configure_optimizers``."""
    return part(home, "core.optimizer")._init_optimizers_and_lr_schedulers(module)


def empty_result(trainer: Any, outputs: dict[str, Any] | None = None) -> Any:
    """Return Lightning's result of a micro-batch without a loss; `on_train_batch_end` gets ``outputs``."""
    result = trainer.fit_loop.epoch_loop.automatic_optimization.output_result_cls(None)
    if outputs is not None:  # Lightning asks for them only if there is a loss
        result.loss, result.asdict = float("nan"), lambda: outputs
    return result


def within_batch(precision: Any) -> Any:
    """Leave `on_after_backward` out, since other parts of the batch follow; callbacks of this package have it."""

    def post_backward(tensor: Any, module: Any) -> Any:
        for callback in module.trainer.callbacks:
            if type(callback).__module__.startswith("lightning_solo.") and callable(callback.on_after_backward):
                callback.on_after_backward(module.trainer, module)
        return tensor.detach()

    return replaced(precision, "post_backward", post_backward)


def on_device(trainer: Any, batch: Any) -> Any:
    """Return a loader's batch as ``training_step`` gets it, without the function of `batches_through`."""
    strategy = trainer.strategy
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return type(strategy).batch_to_device(strategy, batch, dataloader_idx=0)


def loss_of(trainer: Any, batch: Any, batch_idx: int) -> Any:
    """Return the result of the module's ``training_step`` for a loader's batch; its logged values are dropped."""
    return step_result(trainer, on_device(trainer, batch), batch_idx)


def step_result(trainer: Any, batch: Any, batch_idx: int, log: Callable[..., None] = lambda *_, **__: None) -> Any:
    """Return the result of the module's ``training_step``, without techniques; ``log`` gets its logged values."""
    module, strategy = trainer.lightning_module, trainer.strategy
    arguments = trainer.fit_loop.epoch_loop._build_kwargs({}, batch, batch_idx)
    with (
        logged_through(trainer, log),
        replaced(module, "_current_fx_name", "training_step"),
        replaced(trainer._logger_connector, "_current_fx", "training_step"),
    ):
        return type(strategy).training_step(strategy, *arguments.values())


def training_source(trainer: Any) -> Any:
    """Return what makes a fit's training loader: a module, a data module, or a loader itself."""
    return trainer.fit_loop._data_source.instance


def first_batch_step(trainer: Any, home: str) -> Callable[[], Any]:
    """Return a function that runs the module's ``training_step`` on a training batch, before the fit has loaders.

    The batch comes from an iterator of its own. The step runs where the module is, in the types of its weights.
    """
    module = trainer.lightning_module
    loaders = part(home, "utilities.combined_loader").CombinedLoader(trainer.fit_loop._data_source.dataloader())
    batch, batch_idx, _ = next(iter(loaders))
    device = next((p.device for p in module.parameters()), module.device)
    if any(p.is_floating_point() and p.itemsize < 4 for p in module.parameters()):
        batch = trainer.precision_plugin.convert_input(batch)
    batch = module._apply_batch_transfer_handler(batch, device=device, dataloader_idx=0)
    return batch_step(trainer, home, batch, batch_idx)


def batch_step(trainer: Any, home: str, batch: Any, batch_idx: int) -> Callable[[], Any]:
    """Return a function that runs the module's ``training_step`` on a batch, without techniques and autocast."""
    plain = part(home, "plugins.precision").Precision()

    def step() -> Any:
        with replaced(trainer.strategy, "_precision_plugin", plain):
            return step_result(trainer, batch, batch_idx)

    return step


def logged_through(trainer: Any, log: Callable[..., None]) -> Any:
    """Redirect ``self.log`` of a training batch to ``log``; yield the original.

    ``log`` takes the name of the hook, the name of the value, the value, and the options of ``self.log``.
    """
    return replaced(trainer.fit_loop.epoch_loop._results, "log", log)


def zeroing_first(trainer: Any) -> Any:
    """Zero gradients before forward; Lightning's automatic optimization zeroes them after it."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    stock = loop._make_closure

    def make_closure(kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        micro_batch = stock(kwargs, optimizer, batch_idx)
        # a proxy: in a circle of references the batch would outlive the step
        micro_batch.closure = partial(_zeroed_first, type(micro_batch).closure, proxy(micro_batch))
        return micro_batch

    return replaced(loop, "_make_closure", make_closure)


def _zeroed_first(closure: Callable[..., Any], micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
    zero_grad = micro_batch._zero_grad_fn  # None within a window, and for all but the first part of a batch
    if zero_grad is not None:
        zero_grad()
    with replaced(micro_batch, "_zero_grad_fn", None):
        return closure(micro_batch, *args, **kwargs)


def _weighted(backward: Callable[[Any], Any], weight: float, loss: Any) -> None:
    backward(loss * weight)


def with_hooks(precision: Any, module: Any, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return the closure followed by clipping and the hooks before the optimizer step."""
    return partial(precision._wrap_closure, module, optimizer, closure)


def without_hooks(precision: Any) -> Any:
    """Step with a closure that already runs these hooks."""
    return replaced(precision, "_wrap_closure", lambda module, optimizer, closure: closure())
