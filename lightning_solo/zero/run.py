"""One run of DeepSpeed's engine around a module: make it, step, save, load, and restore the module at the end.

Weights, masters and optimizer states can be saved during a run and after it. Nothing here depends on Lightning, so that
another training loop can use it; a process group must be open.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.nn.recomputation import weights_gathered_on_use
from lightning_solo.zero.changes import OutsideChanges
from lightning_solo.zero.checkpoint import (
    Group,
    counters,
    load_optimizer,
    optimizer_state_dict,
    plain_state_dict,
    set_counters,
)
from lightning_solo.zero.deepspeed_internals import (
    destroy,
    has_masters,
    leave_forward,
    release_step_buffers,
    uses_disk,
)
from lightning_solo.zero.deepspeed_patches import (
    fetched_for_the_outermost_call,
    flat_broadcasts,
    linear_saves_the_parameter,
    statistics_in_fp32,
)
from lightning_solo.zero.engine import make_engine, weights_of
from lightning_solo.zero.host_optimizer import HostOptimizer, to_original_state
from lightning_solo.zero.module import OriginalModule
from lightning_solo.zero.states import ParameterStates, read, write
from lightning_solo.zero.window import GradientWindow


class EngineRun:
    """An engine around a module on the host, from its creation until the module is restored.

    Args:
        module: on the host.
        dtype: of the weights on the device; the masters are always fp32.
        device: a device with an index.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self.module = module
        self.dtype = dtype
        self.device = device
        self.engine: Any = None
        self.host: HostOptimizer | None = None
        self._groups: Sequence[Group] = ()
        self._window: GradientWindow | None = None
        self._changes: OutsideChanges | None = None
        self._clipping = 0.0
        self._counters: dict[str, dict[str, Any]] = {}
        self._masters: dict[Tensor, Tensor] = {}  # after the end: masters of weights that aren't fp32
        self._stack = ExitStack()
        self._original = OriginalModule(module, dtype)

    def train(
        self, config: Mapping[str, Any], host: HostOptimizer, groups: Sequence[Group], *, accumulates: bool
    ) -> None:
        """Make an engine that trains, with fp32 masters that start from the module's own weights."""
        # DeepSpeed's count doesn't know the end of an epoch or a schedule of accumulation, so the caller ends a window.
        # With one micro-batch per step DeepSpeed's count saves a copy.
        config = {"gradient_clipping": 0.0, **config, "managed_gradient_accumulation": not accumulates}
        self.host, self._groups = host, groups
        self.engine = self._make_engine(config, host.optimizer)
        self._start_from_fp32()
        self._clipping = self.zero.clip_grad
        self._window = GradientWindow(self.module)
        self._changes = OutsideChanges(self.module)

    def evaluate(self, config: Mapping[str, Any]) -> None:
        """Make an engine that only runs forward; at stage 2 it doesn't use ZeRO."""
        kept = {key: config[key] for key in ("fp16", "bf16", "zero_optimization") if key in config}
        if config["zero_optimization"]["stage"] == 2:
            kept.pop("zero_optimization")  # only training needs it
        kept["train_micro_batch_size_per_gpu"] = 1
        self.engine = self._make_engine(kept, None)

    def _make_engine(self, config: Mapping[str, Any], optimizer: Optimizer | None) -> Any:
        stage_3 = config.get("zero_optimization", {}).get("stage") == 3
        self._stack.enter_context(flat_broadcasts())
        self._stack.enter_context(statistics_in_fp32())
        if stage_3:
            self._stack.enter_context(linear_saves_the_parameter())
            self._stack.enter_context(weights_gathered_on_use(self.module))
        engine = make_engine(self.module, config, optimizer, self.dtype, self.device)
        if stage_3:
            self._stack.enter_context(fetched_for_the_outermost_call(self.module))
        return engine

    @property
    def zero(self) -> Any:
        """ZeRO's optimizer, around the host's."""
        return getattr(self.engine, "optimizer", None)

    def _start_from_fp32(self) -> None:
        """Set the masters to the original weights, not their 16-bit roundings; drop the copies of trained weights."""
        trained = {p: value for p, value in self._original.weights.items() if p.requires_grad}
        write(self.zero, {p: ParameterStates(value.float()) for p, value in trained.items()})
        for parameter in trained:
            del self._original.weights[parameter]

    def after_backward(self) -> None:
        """Record which parameters the micro-batch used. Call it after each backward pass of the engine."""
        assert self._window is not None
        self._window.after_backward(self.zero)

    def clip_next_step(self, norm: float) -> None:
        """Clip the window's gradients by their global norm in the next step; 0 means no clipping."""
        self.zero.clip_grad = float(norm)

    def step(self) -> None:
        """Step with the gradients of the micro-batches since the last step; without any, do nothing."""
        assert self._window is not None
        if self._window.micro_batches:
            self._take_over_changes()
            self._window.before_step(self.zero)
            self.engine.step()
        self.zero.clip_grad = self._clipping

    @contextmanager
    def _folder(self) -> Iterator[Path | None]:
        """Make a subfolder for copies of the states on disk, which may not fit in host memory.

        It is removed at the end. The content of its files lives as long as the tensors that are mapped to it.
        """
        if not uses_disk(self.zero):
            yield None
            return
        place = self.engine.config["zero_optimization"]["offload_optimizer"]["nvme_path"]
        with tempfile.TemporaryDirectory(dir=place) as folder:
            yield Path(folder)

    def _take_over_changes(self) -> None:
        if self._changes is not None:
            self._changes.take_over(self.zero, self._original.weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state dict with fp32 masters, as a plain run would have it; tensors are shared."""
        if self.engine is None:  # keep later changes
            masters = {p: value for p, value in self._masters.items() if torch.equal(p.cpu(), value.to(p.dtype))}
            return plain_state_dict(self.module, masters)
        self._take_over_changes()
        with self._folder() as folder:
            states = read(self.zero, folder, masters_only=True) if has_masters(self.zero) else {}
            known = {**self._original.weights, **{p: value.master for p, value in states.items()}}
            weights = weights_of(self.engine, self.module, known)
        return plain_state_dict(self.module, weights)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the state dict that the user's optimizer would have."""
        assert self.host is not None
        if self.engine is None:
            return self.host.original.state_dict()
        with self._folder() as folder:
            states = read(self.zero, folder)
        return optimizer_state_dict(self.host, self._groups, states)

    def load_optimizer_state_dict(self, saved: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Load the states of a plain run or one with ZeRO, and the masters from ``weights`` in full precision.

        Raises:
            CheckpointError: as `load_optimizer` and `write`.
        """
        assert self.host is not None
        masters = {p: states.master for p, states in read(self.zero, masters_only=True).items()}
        for name, p in self.module.named_parameters():
            value = weights.get(name)
            if p in masters and value is not None and value.shape == masters[p].shape:
                masters[p] = value
        write(self.zero, load_optimizer(self.host, self._groups, saved, masters))

    def counters(self) -> dict[str, dict[str, Any]]:
        """Return the counts of the training engine, or of the last one if it has ended, as plain values."""
        return self._counters if self.engine is None or self.host is None else counters(self.engine)

    def set_counters(self, saved: Mapping[str, Any]) -> None:
        """Set the values of `counters`."""
        set_counters(self.engine, saved)

    def end(self) -> None:
        """Destroy the engine and restore the module with its trained weights.

        The user's optimizer gets back its options and parameters, and the states that a plain run would leave in it.
        They are on the host, or mapped from removed files where they were on disk.
        """
        with self._stack:
            self._end()

    def _end(self) -> None:
        weights, states = dict(self._original.weights), {}
        try:
            if self._window is not None:
                self._window.remove()
                release_step_buffers(self.zero)
            if self.engine is not None:
                leave_forward(self.engine)
            self._take_over_changes()
            with self._folder() as folder:
                if self._changes is not None:  # else the masters are DeepSpeed's roundings
                    states, self._counters = read(self.zero, folder), counters(self.engine)
                    weights |= {p: value.master for p, value in states.items()}
                weights = weights_of(self.engine, self.module, weights)
        finally:
            try:
                if self.engine is not None:
                    destroy(self.engine, self.module)
            finally:
                for group in self._groups:
                    group.restore()
                self._original.restore(weights)
                self._keep(states)
                self.engine, self._groups = None, ()
                self._window, self._changes = None, None
                del weights, states
                gc.collect()  # the engine refers to itself
                if self.device.type == "cuda":
                    _give_back_caches()

    def _keep(self, states: Mapping[Tensor, ParameterStates]) -> None:
        """Give the user's optimizer its states, and keep the masters of weights that are not in fp32."""
        if self.host is None:
            return
        for parameter, value in states.items():
            if state := to_original_state(self.host, {**value.scalars, **value.tensors}):
                self.host.original.state[parameter] = state
        self.host = HostOptimizer(self.host.original, self.host.original, {})
        self._masters = {p: value.master for p, value in states.items() if p.dtype != value.master.dtype}


def _give_back_caches() -> None:
    """Release the freed device memory and pinned host memory that torch caches."""
    torch.cuda.empty_cache()
    empty_host_cache = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
    if empty_host_cache is not None:  # torch 2.13 has it
        empty_host_cache()
