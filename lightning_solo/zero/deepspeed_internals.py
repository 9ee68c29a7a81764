"""Functions that wrap each private name of DeepSpeed that this package reads or sets.

Read from DeepSpeed 0.19.8, for one process, in which a partition is the whole. Code of DeepSpeed is replaced in
`deepspeed_patches` only. ``zero`` is ZeRO's optimizer (stage 2 or 3), around the one that steps on the host.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SAVED_MASTERS = "single_partition_of_fp32_groups"
"""Key of the flat fp32 master weights in a file that the engine saved in stage 1 or 2."""
# Plain values that DeepSpeed leaves on parameters and modules, and the method that Lightning replaces
LEFT_BEHIND = frozenset(
    {
        "_dp_group",
        "_external_params",
        "_hp_mapping",
        "_in_forward",
        "_index_in_param_group",
        "_original_parameters",
        "_z3_optimizer",
        "applied_pre_backward_ref_cnt",
        "forward",
        "grad_accum",
        "is_external_param",
        "nvme_swapper",
        "param_idx_in_group",
    }
)


def is_deepspeeds(value: Any) -> bool:
    """Return whether a function or an object is DeepSpeed's."""
    owner = getattr(value, "__self__", value)
    return any(
        (getattr(thing, "__module__", None) or "").partition(".")[0] == "deepspeed"
        for thing in (value, type(owner), getattr(value, "__func__", None))
    )


def is_left_behind(name: str, value: Any) -> bool:
    """Return whether an attribute of a module or a parameter was set by DeepSpeed, which doesn't remove it."""
    return name in LEFT_BEHIND or name.startswith("ds_") or is_deepspeeds(value)


# --- parameters and flat tensors ---


@dataclass(frozen=True)
class Place:
    """A parameter's place in a flat tensor."""

    parameter: Tensor
    start: int
    shape: torch.Size

    def of(self, flat: Tensor) -> Tensor:
        """Return a view of the parameter's part of ``flat``, in the parameter's shape."""
        return flat.narrow(0, self.start, self.shape.numel()).view(self.shape)


def is_partitioned(parameter: Tensor) -> bool:
    """Return whether stage 3 manages a parameter, which is then empty outside of its module's passes."""
    return hasattr(parameter, "ds_id")


def has_masters(zero: Any) -> bool:
    """Return whether this is ZeRO's optimizer. An engine that only runs forward has another one, or none."""
    return hasattr(zero, "single_partition_of_fp32_groups") or hasattr(zero, "fp32_partitioned_groups_flat")


def flat_tensors(zero: Any) -> list[tuple[Tensor, list[Place]]]:
    """Return each flat fp32 master with the places of its parameters."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3
        return [
            (flat, [Place(p, zero.grad_position[zero.get_param_id(p)][1], p.ds_shape) for p in group])
            for flat, group in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
        ]
    return [
        (
            flat,
            [Place(p, mapping.get_hp_fragment_address().start, p.shape) for p in group if (mapping := p._hp_mapping)],
        )
        for flat, group in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True)
    ]


# --- parts of several processes ---


def trained_parameters(zero: Any) -> list[tuple[Tensor, list[Tensor]]]:
    """Return each flat fp32 master of this process with the parameters of which it has a part."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3
        return list(zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True))
    return list(zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True))


def whole_state(parameter: Any, key: str | None = None) -> Tensor:
    """Return the master of a parameter, or a state, gathered from all processes, which must all call it."""
    owner = parameter._z3_optimizer if is_partitioned(parameter) else None
    whole = owner.get_full_hp_param(parameter, key) if owner else parameter.get_full_hp_param(key)
    return whole.detach().view(parameter.ds_shape if owner else parameter.shape)  # type: ignore[no-any-return]


def set_whole_state(parameter: Any, value: Tensor, key: str | None = None) -> None:
    """Set this process's part of a parameter's master or state."""
    if not is_partitioned(parameter):
        parameter.set_full_hp_param(value, key)
        return
    zero = parameter._z3_optimizer
    part, _ = zero._get_fp32_opt_state_partition(parameter, release_swap_buffers=False, optim_state_key=key)
    start = part.numel() * zero._get_param_partition_rank(parameter)
    own = value.flatten()[start : start + part.numel()]  # the last part may be padded, which DeepSpeed's setter refuses
    part.data[: own.numel()].copy_(own)


def make_states(zero: Any, flat: Tensor, parameters: list[Tensor], keys: Iterable[str]) -> None:
    """Make zeroed states of a flat master that a fresh engine lacks, since optimizers make them in their first step."""
    state = zero.optimizer.state[flat]
    for key in keys:
        state.setdefault(key, torch.zeros_like(flat, requires_grad=False))
    for parameter in parameters:
        mapping: Any = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            mapping.set_optim_state_fragment(flat, state)


# --- masters and states on disk ---


def uses_disk(zero: Any) -> bool:
    """Return whether masters, gradients and states of large sub-groups are stored on disk."""
    return bool(getattr(zero, "swap_optimizer", False))


def is_on_disk(zero: Any, index: int) -> bool:
    """Return whether the flat tensor ``index`` (of `flat_tensors`), its gradient and its states are stored on disk."""
    return uses_disk(zero) and bool(zero._swappable_optimizer_subgroup(index))


@contextmanager
def in_memory(zero: Any, index: int, *, written: bool = False) -> Iterator[bool]:
    """Keep the flat tensor ``index`` and its states in host memory; yield whether they came from the disk.

    Args:
        zero: ZeRO's optimizer.
        index: position in `flat_tensors`.
        written: write them back afterwards.
    """
    from_disk = is_on_disk(zero, index)
    if from_disk:
        zero._optimizer_states_and_gradient_swap_in(index)
    try:
        yield from_disk
    except BaseException:
        if from_disk:  # half-made changes are not written
            zero._release_swap_buffers(index)
        raise
    if from_disk and written:
        zero._writeback_swap_state(index, True, False)  # keeps the gradients that are still in memory
    elif from_disk:
        zero._release_swap_buffers(index)


def release_step_buffers(zero: Any) -> None:
    """Release the buffers of an interrupted step; the files on disk keep the values from before it."""
    for index in range(len(zero.fp32_partitioned_groups_flat) if uses_disk(zero) else 0):
        if is_on_disk(zero, index):
            zero._release_swap_buffers(index)


# --- weights on disk ---


def weight_swapper(engine: Any) -> Any:
    """Return the object that reads an engine's weights from disk; None where they are in memory."""
    return next((s for p in engine.module.parameters() if (s := getattr(p, "nvme_swapper", None)) is not None), None)


def release_weight_buffers(engine: Any, *_: Any) -> None:
    """Release the buffers of unused prefetched weights. Call it between two passes."""
    swapper = weight_swapper(engine)
    if swapper is None or not swapper.param_id_to_buffer_id:
        return
    swapper.synchronize_reads()
    _partition_all(engine)
    held = [p for p in engine.module.parameters() if p.ds_id in swapper.param_id_to_buffer_id]
    swapper.remove_partition_and_release_buffers(held)


def _partition_all(engine: Any) -> None:
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    if hasattr(offload, "partition_all_parameters"):
        offload.partition_all_parameters()


# --- gradients of a window ---


def accumulated_gradient(zero: Any, parameter: Tensor) -> Tensor | None:
    """Return the host buffer in which a parameter's gradients accumulate, if it has one."""
    if hasattr(zero, "accumulated_grads_in_cpu"):  # stage 2
        buffer: Tensor | None = zero.accumulated_grads_in_cpu.get(zero.get_param_id(parameter))
        return buffer
    partitions = getattr(zero, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", None)
    return None if partitions is None else partitions.get(parameter.ds_id)  # type: ignore[attr-defined]


def zero_gradients(zero: Any, parameters: set[Tensor]) -> None:
    """Zero the gradients of these parameters for the next step, in memory or on disk."""
    for index, (flat, places) in enumerate(flat_tensors(zero)):
        for place in places:
            if place.parameter not in parameters:
                continue
            start, numel = place.start, place.shape.numel()
            if is_on_disk(zero, index):
                zeros = torch.zeros(numel, dtype=zero.master_weights_and_grads_dtype)
                zero.optimizer_swapper.swap_out_gradients(
                    parameter=flat, gradient_offsets=[start], gradient_tensors=[zeros]
                )
            elif flat.grad is not None:
                flat.grad.narrow(0, start, numel).zero_()


# --- the end of a pass, of an engine, of a process group ---


def leave_forward(engine: Any) -> None:
    """Reset stage 3 after an exception in a forward pass; without this it treats the pass's weights as still in use."""
    for part in engine.module.modules():
        if hasattr(parameters := vars(part)["_parameters"], "_in_forward"):
            parameters._in_forward = False
    _partition_all(engine)


def destroy(engine: Any, module: nn.Module) -> None:
    """Destroy an engine: remove its hooks, buffers and gradients, and DeepSpeed's global references to the module.

    ``engine.destroy()`` alone keeps states and buffers (https://github.com/deepspeedai/DeepSpeed/issues/7204), in
    addition to the module's weights.
    """
    zero = engine.optimizer
    trains = has_masters(zero)
    for flat, _ in flat_tensors(zero) if trains else ():
        flat.grad = None
    engine.destroy()
    if trains:
        zero.optimizer.state.clear()
        for name in ("offload_gradient_dict", "param_buffer_of_bit16_for_cpu_offload_groups"):
            if hasattr(zero, name):
                getattr(zero, name).clear()
    stack = importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK
    stack[:] = [other for other in stack if other is not module]


def forget_process_group() -> None:
    """Remove DeepSpeed's handle on a process group; otherwise the next ``init_distributed`` returns at once."""
    importlib.import_module("deepspeed.utils.groups")._release_process_group_references(group=None)
    communication: Any = importlib.import_module("deepspeed.comm.comm")
    communication.cdb = None


# --- configuration and extensions ---


def zero_section_type() -> Any:
    """Return the pydantic model of the section ``zero_optimization``."""
    return importlib.import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig


def loaded_extensions(builder: Any) -> MutableMapping[str, Any]:
    """Return DeepSpeed's mapping of extension -> loaded module, which every builder reads first."""
    modules: MutableMapping[str, Any] = builder._loaded_ops
    return modules


def is_compiled_in(builder: Any) -> bool:
    """Return whether an extension was compiled when DeepSpeed was installed (``DS_BUILD_OPS=1``)."""
    information = importlib.import_module("deepspeed.git_version_info")
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    return bool(
        information.installed_ops.get(builder.name, False) and information.accelerator_name == accelerator.device_name()
    )
