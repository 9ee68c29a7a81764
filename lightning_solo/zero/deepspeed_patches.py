"""All patches of DeepSpeed, and of torch for DeepSpeed. Check them when DeepSpeed is upgraded.

Each docstring states the fault, the version in which it was seen, its report where one is known, how the patch is
undone, and the test that fails without it. Patches of an engine or its optimizer end with them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.attributes import replaced
from lightning_solo.nn.sharding import send
from lightning_solo.zero.deepspeed_internals import (
    is_deepspeeds,
    release_weight_buffers,
    weight_swapper,
)

# --- the process ---


def nothing_compiled_for_communication() -> AbstractContextManager[None]:
    """Stop ``deepspeed.init_distributed`` from compiling an all-reduce operator for the processes of one machine.

    Fault: On a CPU it is compiled even for a single process, which has nothing to reduce.
    Seen: 0.19.8.
    Undone: on leaving the context.
    Test: tests/zero/test_process.py::test_nothing_is_compiled_for_it
    """
    # The attribute deepspeed.comm.torch is torch itself, so the module is imported by its name.
    return replaced(importlib.import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None)


@contextmanager
def flat_broadcasts() -> Iterator[None]:
    """Send weights from one process to the others as flat bytes; a single process sends nothing.

    Fault: The broadcast views a tensor as bytes, which fails for a scalar parameter, such as CLIP's ``logit_scale``: at
        stage 2 when the engine is made, at stage 3 in ``zero.Init`` and at the end of ``GatheredParameters``.
    Seen: 0.19.8.
    Undone: on leaving the context.
    Test: tests/zero/test_engine.py::test_a_scalar_parameter_is_trained
    """
    weights = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    engine = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine
    leave = weights.GatheredParameters._exit

    def shared(parameters: Iterable[Any], first: int = 0) -> None:
        if torch.distributed.get_world_size() > 1:
            for p in parameters:
                send(p.data, torch.distributed.group.WORLD, p.device, first)

    def take_over(init: Any, parameter: Any) -> None:
        init._convert_to_deepspeed_param(parameter)
        shared([parameter])
        parameter.partition()

    def leave_changed(gathered: Any, *error: Any) -> None:
        if gathered.src_rank is None:
            leave(gathered, *error)
            return
        shared(gathered.params, gathered.src_rank)
        changed = gathered._params_to_partition()
        gathered._record_deferred_updates(changed)
        gathered._partition_params(changed, has_been_updated=True)

    broadcast = engine._broadcast_model

    def share_weights(engine: Any) -> None:
        parameters = list(engine.module.parameters())
        if any(not getattr(p, "allreduce", True) or hasattr(p, "ds_optim_param") for p in parameters):
            broadcast(engine)  # experts and adapters of DeepSpeed differ between processes
        else:
            shared(p for p in parameters if not hasattr(p, "ds_status"))

    with ExitStack() as undo:
        undo.enter_context(replaced(engine, "_broadcast_model", share_weights))
        undo.enter_context(replaced(weights.Init, "_zero_init_param", take_over))
        undo.enter_context(replaced(weights.GatheredParameters, "_exit", leave_changed))
        yield


# --- the forward pass ---


def linear_saves_the_parameter() -> AbstractContextManager[None]:
    """Make ``torch.nn.functional.linear`` save the weight itself for backward, in this process, while stage 3 runs.

    Fault: torch's saves a transposed view, which keeps the fetched weights of all layers in memory until the backward
        pass; on a CPU the view reads what the buffer holds next. DeepSpeed's version saves the weight, but its option
        ``memory_efficient_linear`` installs it for good.
    Seen: 0.19.8; https://github.com/deepspeedai/DeepSpeed/pull/8189
    Undone: on leaving the context.
    Test: tests/zero/test_engine.py::test_linear_saves_the_parameter_while_stage_3_runs
    """
    linear = importlib.import_module("deepspeed.runtime.zero.linear").zero3_linear_wrap
    return replaced(torch.nn.functional, "linear", linear)


def statistics_in_fp32() -> AbstractContextManager[None]:
    """Make ``torch.nn.functional.batch_norm`` accept 16-bit weights with fp32 statistics, in this process.

    Fault: DeepSpeed casts the weights, but not the statistics. torch accepts all in 16 bit, where a running mean soon
        stops changing, or weights and statistics in fp32 with a 16-bit input, as under autocast and here.
    Seen: 0.19.8.
    Undone: on leaving the context.
    Test: tests/zero/test_engine.py::test_batch_norms_keep_their_statistics_in_fp32
    """
    original: Any = torch.nn.functional.batch_norm

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
        output: Tensor = original(input, mean, var, weight, bias, *rest, **more)
        return output

    return replaced(torch.nn.functional, "batch_norm", batch_norm)


@contextmanager
def fetched_for_the_outermost_call(module: nn.Module) -> Iterator[None]:
    """Keep the direct parameters of stage 3's root module in memory until its outermost call ends.

    Fault: Lightning runs ``training_step`` inside a call of the module, and the step calls the module again. DeepSpeed
        releases a direct parameter, such as a temperature, after that inner call, so the rest of the step reads an
        empty tensor.
    Seen: 0.19.8.
    Undone: on leaving the context; the wrapped hooks are DeepSpeed's, and are removed with the engine.
    Test: tests/zero/test_engine.py::test_a_modules_own_parameter_is_there_after_it_was_called_within_the_step
    """
    depth = 0

    def begin(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def end(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    def outermost(hook: Any) -> Any:
        @functools.wraps(hook)  # DeepSpeed's name, by which it is found and removed
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


# --- the disk ---


def prefetch_once(engine: Any) -> None:
    """Read each weight on disk ahead only once, and release all buffers before a forward pass.

    Fault: Weights are prefetched in the order of a training step, into a few buffers that are released after use. A
        forward pass without a backward, as in validation, never uses the weights that were prefetched for backward, and
        the run ends with "Not enough buffers". A weight that is used twice is prefetched twice: "already assigned".
    Seen: 0.19.8; https://github.com/deepspeedai/DeepSpeed/issues/3062
    Undone: with the engine.
    Test: tests/zero/test_weights_on_disk.py::test_weights_in_files_train_and_validate_as_in_memory
    """
    swapper = weight_swapper(engine)
    if swapper is None:
        return
    swap_in = swapper.swap_in

    def once(params: Sequence[Tensor], async_op: bool = True, swap_in_buffers: Any = None) -> None:
        swap_in(list(dict.fromkeys(params)) if swap_in_buffers is None else params, async_op, swap_in_buffers)

    swapper.swap_in = once
    engine.register_forward_pre_hook(release_weight_buffers)


def align_gradients(swapper: Any) -> None:
    """Make the optimizer swapper split gradients so that each part on disk is aligned.

    Fault: A gradient is read from its file directly into its place in the flat gradient, without the page cache. If
        that place is no multiple of the disk's alignment, for example after a bias, the read fails silently, and the
        optimizer steps with the buffer's old content. DeepSpeed splits off unaligned lengths, but not offsets.
    Seen: 0.19.8.
    Undone: with the engine.
    Test: tests/zero/test_disk.py::test_a_bias_before_matrices_trains_as_plain
    """

    def split(tensors: Sequence[Tensor], offsets: Sequence[int]) -> tuple[list[Tensor], list[int]]:
        parts, starts = [], []
        for tensor, offset in zip(tensors, offsets, strict=True):
            for start, length in split_aligned(offset, tensor.numel(), swapper.numel_alignment):
                parts.append(tensor.narrow(0, start - offset, length))
                starts.append(start)
        return parts, starts

    swapper._adjust_for_misaligned_lengths = split


def split_aligned(offset: int, numel: int, alignment: int) -> list[tuple[int, int]]:
    """Return ``(start, length)`` of up to three parts of a fragment; start and length of the middle one are aligned.

    >>> split_aligned(offset=10, numel=30, alignment=8), split_aligned(16, 8, 8), split_aligned(10, 5, 8)
    ([(10, 6), (16, 24)], [(16, 8)], [(10, 5)])
    """
    first = min(-(-offset // alignment) * alignment, offset + numel)
    last = max((offset + numel) // alignment * alignment, first)
    ends = (offset, first, last, offset + numel)
    return [(start, end - start) for start, end in pairwise(ends) if end > start]
