"""The trace of a few optimizer steps of the real `Trainer.fit`, on fake or real tensors."""

from __future__ import annotations

import functools
import gc
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_solo.cards.footprint import Sizes
from lightning_solo.data.nested import map_tensors
from lightning_solo.errors import PlanError
from lightning_solo.memory.events import EventLog
from lightning_solo.memory.sizes import sizes_of
from lightning_solo.planner.block_marks import BlockMarks
from lightning_solo.planner.cuda_rules import CudaByHand, cpu_rules, cuda_rules
from lightning_solo.planner.data_dependent_ops import arrays_of_zeros
from lightning_solo.planner.fake_modules import (
    built_without_data,
    copied_by_clone,
    fake_mode,
    inspected_masks,
    known_numbers,
    replaced_by_apply,
    to_random,
    with_numbers,
)
from lightning_solo.planner.kernels import (
    planned_host_memory,
    planned_host_room,
    planned_host_weights,
    planned_kernels,
    planned_offloading,
    planned_rings,
)
from lightning_solo.planner.notes import Mark, resolved
from lightning_solo.planner.operator_cache import Known
from lightning_solo.planner.optimizer_rules import choose_foreach, fill_history
from lightning_solo.planner.tracer import Cost, Tracer
from lightning_solo.seams.homes import home_of, quiet
from lightning_solo.seams.patches import batches_through

OWN_ARGUMENTS = {
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
"""Arguments of the Trainer of every trace."""
MOST_KNOWN = 20_000
"""Results of operators that are kept for further traces; one takes about a kilobyte."""


@dataclass
class Trace:
    """Allocations and costs of optimizer steps.

    Attributes:
        log: allocations and frees of storages, from the start of training.
        phases: (index of the first event, index of the first cost, name), in order.
        costs: of each operator.
        steps: the number of costs at the end of each optimizer step.
        assumptions: ways in which a run may differ from the trace, in words.
        host_bytes: the peak of a technique's host memory.
        sizes: of the module's parameters.
        blocks: names of the repeated blocks, if `capture` was asked to mark them.
        marks: where their calls begin and end.
    """

    log: EventLog
    phases: list[tuple[int, int, str]]
    costs: list[Cost]
    steps: list[int]
    assumptions: list[str] = field(default_factory=list)
    host_bytes: int = 0
    sizes: Sizes = field(default_factory=lambda: Sizes((), (), 0))
    blocks: list[str] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


def capture(
    make: Callable[[], L.LightningModule],
    batch: Any,
    arguments: Mapping[str, Any],
    *,
    fake: bool = True,
    cuda: bool = True,
    attention: str = "fused",
    steps: int = 2,
    moves_batches: bool = True,
    marked: bool = False,
    noted: bool = False,
    host: int | None = None,
    answers: dict[str, bool] | None = None,
) -> Trace:
    """Train for a few optimizer steps and return their trace.

    Args:
        make: returns the module.
        batch: one micro-batch, of tensors on the CPU.
        arguments: of a Trainer on the CPU: precision, callbacks, accumulation, clipping.
        fake: whether tensors have no data and operators don't compute.
        cuda: whether kernels and temporaries are those of a CUDA device.
        attention: as in `cuda_rules`.
        steps: number of optimizer steps; at least two, if optimizer states are to exist from the start of one.
        moves_batches: whether each batch is copied to the CUDA device in its step, and counted from then on.
        marked: whether calls of blocks are marked.
        noted: whether the trace keeps its notes, from which `resolved` computes what depends on all blocks.
        host: bytes of the host's memory, as in `planned_host_room`.
        answers: whether the host has room, likewise.

    Raises:
        PlanError: the module makes no optimizer step or computes no gradient; an index in the batch is out of range; an
            LSTM on fake tensors of a CPU.
    """
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(_collected_at_steps(fake=fake))
        mode, known = _shared(cuda) if fake else (None, None)
        by_hand = CudaByHand(allowed=cuda)
        stack.enter_context(by_hand.on_cpu())
        if mode is None:
            module = make()
            to_random(module)
        else:
            module = built_without_data(make, mode)
        tracer = Tracer(module, fake=fake, cuda=cuda, known=known)
        if fake:
            _check_recurrent_layers(module, tracer)
        stack.enter_context(known_numbers())
        stack.enter_context(inspected_masks())
        loader = Loader(batch, mode)
        watch = _Watch(tracer, steps)
        home = importlib.import_module(home_of(module))  # its Trainer accepts the module
        marks = BlockMarks(tracer)
        callbacks = [watch, *([marks] if marked else []), *arguments.get("callbacks", ())]
        logger = home.loggers.logger.DummyLogger()
        trainer = home.Trainer(**{**arguments, **OWN_ARGUMENTS, "callbacks": callbacks, "logger": logger})
        stack.enter_context(planned_kernels(tracer, cuda=cuda))
        stack.enter_context(planned_offloading(tracer, cuda=cuda))
        if fake:
            stack.enter_context(planned_host_room(tracer, host, {} if answers is None else answers))
        if cuda:
            stack.enter_context(cuda_rules(attention))
            stack.enter_context(planned_host_memory(tracer))
            stack.enter_context(planned_rings(tracer))
            stack.enter_context(planned_host_weights(tracer))
            if moves_batches:  # on the CPU, which a trace uses for both devices, nothing would be copied
                stack.enter_context(batches_through(trainer.strategy, _cloned))
        elif fake:
            stack.enter_context(cpu_rules())
        if mode is not None:
            stack.enter_context(replaced_by_apply())
            stack.enter_context(arrays_of_zeros(tracer.assume))
            stack.enter_context(mode)
            stack.enter_context(copied_by_clone())
        stack.enter_context(tracer)
        try:
            trainer.fit(module, loader)
        except EndOfTrace:
            return Trace(tracer.log, tracer.phases, tracer.costs, [], sizes=sizes_of(module), blocks=marks.blocks)
        del tracer.log.events[watch.events :]  # what is undone after training is on the host
        if by_hand.used:
            tracer.assume("tensors that the module puts on a CUDA device by hand are on the planned device")
        if len(tracer.steps) < steps:
            raise PlanError(f"{type(module).__name__} made no optimizer step in {watch.batches} batches")
        if "gradients" not in tracer.log.labels:  # the plan of such a step would be 0 bytes of gradients
            raise PlanError(f"{type(module).__name__} computed no gradient in {watch.batches} batches")
        assumptions, sizes = list(tracer.assumptions), sizes_of(module)
        host_bytes, blocks = tracer.host_peak_bytes, marks.blocks
        trace = Trace(tracer.log, tracer.phases, tracer.costs, tracer.steps, assumptions, host_bytes, sizes, blocks)
        return trace if noted else resolved(trace)


@functools.cache
def _shared_by(cuda: bool) -> tuple[FakeTensorMode, Known]:
    return fake_mode(), {}


def _shared(cuda: bool) -> tuple[FakeTensorMode, Known]:
    """Return the mode of this process's traces of a kind of device, and the results of operators in earlier ones."""
    mode, known = _shared_by(cuda)
    if len(known) > MOST_KNOWN:
        known.clear()
    return mode, known


def _cloned(move: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: map_tensors(move(*args, **kwargs), torch.clone)


def _check_recurrent_layers(module: torch.nn.Module, tracer: Tracer) -> None:
    """Record the assumption that recurrent layers run without fused kernels.

    Raises:
        PlanError: the module has an LSTM, and the plan is for a CPU: only a run shows the size of oneDNN's buffers.
    """
    layers = [part for part in module.modules() if isinstance(part, torch.nn.RNNBase)]
    if layers and tracer.cuda:
        tracer.assume("recurrent layers are planned step by step: cuDNN's fused kernels keep other buffers")
    elif any(isinstance(layer, torch.nn.LSTM) and not layer.proj_size for layer in layers):
        raise PlanError("the memory that an LSTM's kernel keeps on a CPU is known only from real steps")


class Loader:
    """Repeats one batch. Lightning would take a list for several loaders."""

    def __init__(self, batch: Any, mode: FakeTensorMode | None) -> None:
        self.batch = batch if mode is None else map_tensors(batch, partial(with_numbers, mode))

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.batch

    def __len__(self) -> int:
        return 10_000


class EndOfTrace(Exception):  # noqa: N818 - not an error
    """Raised by a callback to end a trace early, with the events and costs until then."""


class _Watch(Callback):
    """Reports phases and steps to the tracer; ends training after ``steps`` optimizer steps."""

    def __init__(self, tracer: Tracer, steps: int) -> None:
        self.tracer = tracer
        self.steps = steps
        self.batches = self.stepped = self.events = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        for optimizer in trainer.optimizers:
            if self.tracer.cuda:
                choose_foreach(optimizer)
            if fill_history(optimizer):
                self.tracer.assume("LBFGS keeps its full history of directions from the first step on")
        gc.collect(1)
        self.tracer.start(trainer.optimizers)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.tracer.enter("forward")

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.tracer.enter("backward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.tracer.see_owned()
        self.tracer.enter("forward")  # manual optimization may run several forwards; the optimizer has its own hook

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.tracer.enter("optimizer_step")

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.tracer.see_owned()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tracer.see_owned()
        self.tracer.enter("between")
        gc.collect(1)
        self.batches += 1
        if trainer.global_step > self.stepped:  # several optimizers count a step each
            self.stepped = trainer.global_step
            self.tracer.steps.append(len(self.tracer.costs))
        if len(self.tracer.steps) >= self.steps or self.batches >= 64:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.events = len(self.tracer.log.events)


@functools.cache
def _keeps_frozen(process: int) -> bool:
    """Return whether this process had frozen its imports before its first trace; to count them takes a while."""
    return bool(gc.get_freeze_count())


@contextmanager
def _collected_at_steps(*, fake: bool) -> Iterator[None]:
    """Collect garbage only at the end of each micro-batch; Python's own collections differ from run to run.

    Args:
        fake: whether what exists is frozen, since a collection of it takes as long as half a trace of fake tensors. If
            the process keeps its imports frozen, the garbage of earlier traces is collected before: frozen, it would
            stay.
    """
    enabled, keeps = gc.isenabled(), _keeps_frozen(os.getpid())
    if keeps or not fake:
        gc.collect()  # survivors move to the oldest generation, which isn't collected from here on
    if fake:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if fake and not keeps:
            gc.unfreeze()
        if enabled:
            gc.enable()
