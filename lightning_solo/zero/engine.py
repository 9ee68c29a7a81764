"""DeepSpeed's engine around a module that lies on the host, and the way out of it, with the trained weights."""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.zero.disk import align_gradients, contain_reading_ahead, release_buffers
from lightning_solo.zero.module import is_deepspeeds
from lightning_solo.zero.states import FLAT_MASTERS, flat_tensors, read


def make_engine(
    module: nn.Module, config: Mapping[str, Any], optimizer: Optimizer | None, dtype: torch.dtype, device: torch.device
) -> Any:
    """Return DeepSpeed's engine for a module; at stage 3 no more than one parameter at a time goes to the device whole.

    Args:
        module: on the host.
        config: DeepSpeed's configuration.
        optimizer: steps on the host; None for an engine that only runs forward.
        dtype: of the weights on the device.
        device: with its index.
    """
    import deepspeed

    if config.get("zero_optimization", {}).get("stage") == 3:
        _partition(module, config, dtype, device)
    engine, *_ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=device.index),
        model=module,
        optimizer=optimizer,
        model_parameters=[p for p in module.parameters() if p.requires_grad] if optimizer else [],
        config=dict(config),
        dist_init_required=False,
    )
    if getattr(engine.optimizer, "swap_optimizer", False):
        align_gradients(engine.optimizer.optimizer_swapper)
    contain_reading_ahead(engine)
    return engine


def _partition(module: nn.Module, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Give stage 3 the parameters one by one; deepspeed.initialize would first move them all to the device."""
    import deepspeed

    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    place = config["zero_optimization"].get("offload_param", {}).get("device")
    deepspeed.zero.Init(module=module, config_dict_or_path=dict(config), remote_device=place)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


def has_optimizer(engine: Any) -> bool:
    """Tell whether an engine trains: otherwise there are no masters. None is one that was not made."""
    return any(hasattr(getattr(engine, "optimizer", None), name) for name in FLAT_MASTERS)


def weights_of(
    engine: Any,
    module: nn.Module,
    as_found: Mapping[Tensor, Tensor],
    folder: Path | None = None,
    *,
    masters: bool = True,
) -> dict[Tensor, Tensor]:
    """Return parameter -> its value now, of the parameter's shape, where the parameter itself doesn't hold it.

    That is the fp32 master of what is trained (a view, on the host), the value ``as_found`` of what was only cast, and
    at stage 3 a copy of all the rest. ``folder`` is `read`'s. Without ``masters`` trained
    weights are taken from the engine's copies.
    """
    weights = dict(as_found)
    if masters and has_optimizer(engine):
        weights.update(
            {
                parameter: states.master
                for parameter, states in read(engine.optimizer, folder, masters_only=True).items()
            }
        )
    if engine is not None:
        release_buffers(engine)
    for parameter in module.parameters():
        if parameter not in weights and hasattr(parameter, "ds_id"):
            weights[parameter] = gathered(parameter)
    return weights


@contextmanager
def linear_saves_the_parameter() -> Iterator[None]:
    """Let ``torch.nn.functional.linear`` save the weight itself for backward, in this process, while stage 3 runs.

    torch's saves a transposed view, which keeps what stage 3 fetched in memory until the backward pass, of all layers
    at once; on the CPU it would see the buffer's next content. DeepSpeed has the other version, and installs it for
    good (``memory_efficient_linear``).
    """
    before = torch.nn.functional.linear
    torch.nn.functional.linear = importlib.import_module("deepspeed.runtime.zero.linear").zero3_linear_wrap
    try:
        yield
    finally:
        torch.nn.functional.linear = before


@contextmanager
def statistics_in_fp32() -> Iterator[None]:
    """Let ``torch.nn.functional.batch_norm`` take 16-bit weights beside fp32 statistics, in this process.

    DeepSpeed casts the weights and leaves the statistics, and torch takes either all in 16 bit, where a running mean
    soon stands still, or weights and statistics in fp32 beside a 16-bit input, which autocast gives it and this does.
    """
    functional: Any = torch.nn.functional
    before = functional.batch_norm

    def batch_norm(
        input: Tensor,
        mean: Tensor | None,
        var: Tensor | None,
        weight: Any = None,
        bias: Any = None,
        *rest: Any,
        **more: Any,
    ) -> Tensor:
        if mean is not None and weight is not None and weight.dtype != mean.dtype:
            weight, bias = weight.to(mean.dtype), None if bias is None else bias.to(mean.dtype)
        out: Tensor = before(input, mean, var, weight, bias, *rest, **more)
        return out

    functional.batch_norm = batch_norm
    try:
        yield
    finally:
        functional.batch_norm = before


@contextmanager
def fetched_for_the_outermost_call(module: nn.Module) -> Iterator[None]:
    """Let stage 3 keep a module's own parameters until the outermost of its calls ends.

    Lightning's ``training_step`` runs inside a call of the module, and calls it again: DeepSpeed would release a
    temperature, say, with ``self(x)``, and what the step does with it afterwards would see an empty tensor.

    Args:
        module: the root, around which an engine has been made.
    """
    depth = 0

    def begin(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def end(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    def outermost(hook: Any) -> Any:
        @functools.wraps(hook)  # under its own name, by which it is found and removed
        def hooked(*args: Any) -> Any:
            return hook(*args) if depth == 1 else None

        return hooked

    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if is_deepspeeds(hook)]:
            hooks[key] = outermost(hooks[key])
    first = module.register_forward_pre_hook(begin, prepend=True)
    last = module.register_forward_hook(end, always_call=True)
    try:
        yield
    finally:
        first.remove()
        last.remove()


def leave_forward(engine: Any) -> None:
    """Let stage 3 forget a forward pass that an exception ended: otherwise it takes its weights to be in use."""
    for part in engine.module.modules():
        if hasattr(parameters := vars(part)["_parameters"], "_in_forward"):
            parameters._in_forward = False
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    if hasattr(offload, "partition_all_parameters"):
        offload.partition_all_parameters()


def gathered(parameter: Tensor) -> Tensor:
    """Return a copy, on the host, of a parameter that stage 3 has partitioned."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().cpu().clone()


def destroy(engine: Any, module: nn.Module) -> None:
    """End an engine: its hooks, its buffers, its gradients, and the references to the module in DeepSpeed's globals."""
    if has_optimizer(engine):
        for flat, _ in flat_tensors(engine.optimizer):
            flat.grad = None
    zero, trained = engine.optimizer, has_optimizer(engine)
    engine.destroy()
    if trained:  # what it leaves: the module's own weights come on top of it otherwise
        zero.optimizer.state.clear()
        for name in ("offload_gradient_dict", "param_buffer_of_bit16_for_cpu_offload_groups"):
            if hasattr(zero, name):
                getattr(zero, name).clear()
    stack = importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK
    stack[:] = [other for other in stack if other is not module]
