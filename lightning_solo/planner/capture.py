"""Two steps of the real `Trainer.fit`, on tensors without data or on real ones, written down event by event."""

from __future__ import annotations

import gc
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_solo.errors import PlanError
from lightning_solo.fitting import Sizes, sizes_of
from lightning_solo.memory.events import EventLog
from lightning_solo.planner.batches import mapped
from lightning_solo.planner.cuda_rules import (
    CudaByHand,
    choose_foreach,
    cpu_policy,
    cuda_policy,
    fill_history,
    host_tensors_within,
)
from lightning_solo.planner.data_dependent_ops import arrays_of_zeros
from lightning_solo.planner.fake_modules import (
    CopiedByClone,
    built_without_data,
    fake_mode,
    known_numbers,
    replaced_by_apply,
    taken_for_real,
    to_random,
    with_numbers,
)
from lightning_solo.planner.kernels import planned_kernels
from lightning_solo.planner.tracer import Cost, Tracer

STEPS = 2  # an optimizer has its states from the second step on


@dataclass
class Trace:
    """What two optimizer steps did.

    Attributes:
        log: births and deaths of storages, from the start of training on.
        phases: (events before, costs before, name), in order.
        costs: of each operator.
        steps: costs before the end of each optimizer step.
        assumptions: what was made up, in words.
        host_bytes: the most that a technique kept on the host.
        sizes: of the module's parameters.
    """

    log: EventLog
    phases: list[tuple[int, int, str]]
    costs: list[Cost]
    steps: list[int]
    assumptions: list[str] = field(default_factory=list)
    host_bytes: int = 0
    sizes: Sizes = field(default_factory=lambda: Sizes((), (), 0))


def capture(
    make: Callable[[], L.LightningModule],
    batch: Any,
    arguments: Mapping[str, Any],
    *,
    fake: bool = True,
    cuda: bool = True,
    attention: str = "fused",
) -> Trace:
    """Train for two optimizer steps, and return what was allocated and computed.

    Args:
        make: returns the module; on fake tensors its parameters come without data.
        batch: one micro-batch, of tensors on the CPU.
        arguments: for the Trainer, as a preset gives them, for the CPU: precision, callbacks, accumulation, clipping.
        fake: whether no operator computes.
        cuda: whether kernels and transients are as on a CUDA device.
        attention: as `cuda_policy`.

    Raises:
        PlanError: the module makes no optimizer step, or one without gradients; an index of the batch is out of range;
            an LSTM on a CPU without data.
    """
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        mode = fake_mode() if fake else None
        by_hand = stack.enter_context(CudaByHand(allowed=cuda))
        if mode is None:
            module = make()
            to_random(module)
        else:
            module = built_without_data(make, mode)
        tracer = Tracer(module, fake=fake, cuda=cuda)
        if fake:
            _look_for_recurrent_layers(module, tracer)
        stack.enter_context(known_numbers())
        stack.enter_context(taken_for_real())
        loader = Loader(batch, mode)
        watch = _Watch(tracer)
        home = _home(module)
        trainer = home.Trainer(**_trainer_arguments(arguments, watch), logger=home.loggers.logger.DummyLogger())
        stack.enter_context(planned_kernels(tracer.launch, cuda=cuda))
        if cuda:
            stack.enter_context(cuda_policy(attention))
            stack.enter_context(host_tensors_within(tracer.on_host, tracer.copy))
            _copy_batches(trainer, tracer)
        elif fake:
            stack.enter_context(cpu_policy())
        if mode is not None:
            stack.enter_context(replaced_by_apply())
            stack.enter_context(arrays_of_zeros(tracer.assume))
            stack.enter_context(mode)
            stack.enter_context(CopiedByClone())
        stack.enter_context(_collected_at_steps())
        stack.enter_context(tracer)
        trainer.fit(module, loader)
        if by_hand.used:
            tracer.assume("what the module puts on a CUDA device by hand is put on the one that is planned for")
        if len(tracer.steps) < STEPS:
            raise PlanError(f"{type(module).__name__} made no optimizer step in {watch.batches} batches")
        if "gradients" not in tracer.log.labels:  # a step without any would be planned as one that needs nothing
            raise PlanError(f"{type(module).__name__} computed no gradient in {watch.batches} batches")
        return Trace(
            tracer.log,
            tracer.phases,
            tracer.costs,
            tracer.steps,
            list(tracer.assumptions),
            tracer.host_peak_bytes,
            sizes_of(module),
        )


def _look_for_recurrent_layers(module: torch.nn.Module, tracer: Tracer) -> None:
    """Note that fused kernels of recurrent layers are not known, or refuse.

    Raises:
        PlanError: an LSTM on a CPU, where oneDNN's keeps buffers that only a run tells; the others run step by step.
    """
    layers = [part for part in module.modules() if isinstance(part, torch.nn.RNNBase)]
    if layers and tracer.cuda:
        tracer.assume("recurrent layers are planned step by step: cuDNN's fused kernels keep other buffers")
    elif any(isinstance(layer, torch.nn.LSTM) and not layer.proj_size for layer in layers):
        raise PlanError("what an LSTM's kernel keeps on a CPU is known from real steps only")


class Loader:
    """Gives the same batch again and again; not a list, which Lightning takes for several loaders."""

    def __init__(self, batch: Any, mode: FakeTensorMode | None) -> None:
        self.batch = batch if mode is None else mapped(batch, partial(with_numbers, mode))

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.batch

    def __len__(self) -> int:
        return 10_000


class _Watch(Callback):
    """Tells the tracer where training is, and ends it after two optimizer steps."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.batches = self.stepped = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        for optimizer in trainer.optimizers:
            if self.tracer.cuda:
                choose_foreach(optimizer)
            if fill_history(optimizer):
                self.tracer.assume("LBFGS remembers as many directions as it ever will")
        gc.collect(1)
        self.tracer.start(trainer.optimizers)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.tracer.enter("forward")

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.tracer.enter("backward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.tracer.see_owned()
        self.tracer.enter("forward")  # of a module that runs several by hand; the optimizer's begins for itself

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.tracer.enter("optimizer_step")

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.tracer.see_owned()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tracer.see_owned()
        self.tracer.enter("between")
        gc.collect(1)
        self.batches += 1
        if trainer.global_step > self.stepped:  # of several optimizers each takes one
            self.stepped = trainer.global_step
            self.tracer.steps.append(len(self.tracer.costs))
        if len(self.tracer.steps) >= STEPS or self.batches >= 64:
            trainer.should_stop = True


def _home(module: Any) -> Any:
    """Return the package whose Trainer takes a module: its classes are not those of the other one."""
    here = isinstance(module, L.LightningModule)
    return importlib.import_module("lightning.pytorch" if here else "pytorch_lightning")


def _trainer_arguments(arguments: Mapping[str, Any], watch: Callback) -> dict[str, Any]:
    given = dict(arguments)
    given["callbacks"] = [watch, *given.get("callbacks", ())]
    ours = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": -1,
        "max_steps": 1000,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return {**given, **ours}


def _copy_batches(trainer: L.Trainer, tracer: Tracer) -> None:
    """Let a batch be copied where it would go to the device: here both are the CPU."""
    strategy = trainer.strategy
    move = strategy.batch_to_device

    def batch_to_device(batch: Any, *args: Any, **kwargs: Any) -> Any:
        return mapped(move(batch, *args, **kwargs), torch.clone)

    strategy.batch_to_device = batch_to_device  # type: ignore[method-assign]


@contextmanager
def _collected_at_steps() -> Iterator[None]:
    """Collect cycles at the end of each micro-batch, and nowhere else: when Python does it depends on all else."""
    enabled = gc.isenabled()
    gc.collect()  # what is left is old: the generations that are collected from here on are without it
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what Lightning says about a Trainer that nobody asked for."""
    names = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
    loggers = [logging.getLogger(name) for name in (*names, *(f"{name}.utilities.rank_zero" for name in names))]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
