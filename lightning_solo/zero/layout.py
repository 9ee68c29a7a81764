"""Predict the bytes of every buffer that ZeRO-Offload will allocate on device, host and disk.

Read from DeepSpeed 0.19.8 for one process (world size 1), in which a partition is the whole. Each formula names the
function it comes from: Z2 is ``DeepSpeedZeroOptimizer`` (runtime/zero/stage_1_and_2.py), Z3 is
``DeepSpeedZeroOptimizer_Stage3`` (runtime/zero/stage3.py). Activations, the CUDA context and Python are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

WEIGHT_BYTES = {"32-true": 4, "16-mixed": 2, "bf16-mixed": 2, "16-true": 2, "bf16-true": 2}
"""Precision -> bytes of a weight under DeepSpeed; the master is always fp32."""
FP32 = 4
IN_BACKWARD = ("gradients", "buckets", "reduced")
IN_STEP = ("step_temporaries",)
# runtime/swap_tensor/utils.py: MIN_AIO_BYTES and AIO_ALIGNED_BYTES; below the first a tensor stays in memory.
MIN_DISK_BYTES, DISK_ALIGNMENT = 2**20, 1024
# Sizes in `ZeroSettings` -> DeepSpeed's names, below zero_optimization and below its offload_param
SIZES = {
    "reduce_bucket": "reduce_bucket_size",
    "sub_group": "sub_group_size",
    "persistence_threshold": "stage3_param_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
}
WEIGHT_SIZES = {
    "parameter_buffer": "buffer_size",
    "parameter_buffer_count": "buffer_count",
    "max_in_cpu": "max_in_cpu",
}


@dataclass(frozen=True)
class ZeroSettings:
    """Settings that determine the layout of a module; the default sizes are DeepSpeed's.

    Attributes:
        states: fp32 tensors that the optimizer keeps per parameter: AdamW 2, Lion, SGD with momentum and Adagrad 1.
        step_temporaries: fp32 tensors as large as the parameters that one step takes and releases. torch's AdamW
            on the host 2 (``exp_avg_sq.sqrt()`` and its quotient), Adagrad 1, SGD 0, ``fused=True`` and
            ``DeepSpeedCPUAdam`` 0.
        accumulates: Whether there is more than one micro-batch per optimizer step.
        cuda: Whether the device is a CUDA device; otherwise device and host share memory, and nothing is pinned.
        keeps_weights: Whether the host keeps the original fp32 weights under a 16-bit precision. Trained weights are
            kept until the masters exist, frozen ones during the whole run.
        reduce_bucket: Elements, DeepSpeed's ``reduce_bucket_size``. The names of the following sizes are also
            DeepSpeed's, shortened.
    """

    stage: int = 2
    precision: str = "32-true"
    states: int = 2
    step_temporaries: int = 2
    accumulates: bool = False
    offload_parameters: bool = False
    nvme_optimizer: bool = False
    nvme_parameters: bool = False
    pin_memory: bool = True
    cuda: bool = True
    overlap_comm: bool = True
    keeps_weights: bool = False
    reduce_bucket: int = 50_000_000
    sub_group: int = 1_000_000_000
    persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    optimizer_buffer_count: int = 4
    parameter_buffer_count: int = 5
    parameter_buffer: int = 100_000_000
    max_in_cpu: int = 1_000_000_000

    @classmethod
    def of(cls, config: Mapping[str, Any], **more: Any) -> ZeroSettings:
        """Return the settings in a DeepSpeed configuration; ``more`` gives those that it doesn't contain."""
        zero = config["zero_optimization"]
        optimizer, weights = zero["offload_optimizer"], zero.get("offload_param", {})
        sizes: dict[str, Any] = {ours: int(zero[theirs]) for ours, theirs in SIZES.items() if theirs in zero}
        sizes |= {ours: int(weights[theirs]) for ours, theirs in WEIGHT_SIZES.items() if theirs in weights}
        return cls(
            stage=zero["stage"],
            offload_parameters="offload_param" in zero,
            nvme_optimizer=optimizer["device"] == "nvme",
            nvme_parameters=weights.get("device") == "nvme",
            pin_memory=optimizer["pin_memory"],
            overlap_comm=zero["overlap_comm"],
            optimizer_buffer_count=int(optimizer.get("buffer_count", cls.optimizer_buffer_count)),
            keeps_weights=True,
            **sizes,
            **more,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight in the engine, and of a gradient before the step, since ``grad_accum_dtype`` is not set."""
        return WEIGHT_BYTES[self.precision]

    def pinned(self, size: int, always: bool = False) -> int:
        """Return the bytes that ``size`` bytes take: rounded up to a power of two where they are pinned.

        ``Accelerator.pin_memory`` uses torch's ``CachingHostAllocator``, whose ``allocate`` rounds up. DeepSpeed's own
        op (csrc/pin_memory) doesn't round; it serves only ``DS_PIN_MEMORY_BACKEND=native`` and the NVMe buffers. On a
        CPU neither pins.
        """
        rounds = self.cuda and (self.pin_memory or always) and size > 0
        return 1 << (size - 1).bit_length() if rounds else size


@dataclass(frozen=True)
class ZeroLayout:
    """Bytes by part: `device` and `host` at the peak while training, `start` before it.

    Attributes:
        start: stage of making the engine -> bytes on (device, host).
    """

    device: Mapping[str, int]
    host: Mapping[str, int]
    disk: Mapping[str, int]
    start: Mapping[str, tuple[int, int]]

    @property
    def device_bytes(self) -> int:
        """Peak bytes on the device, the start included, without activations."""
        return max(sum(self.device.values()), *(device for device, _ in self.start.values()))

    @property
    def host_bytes(self) -> int:
        """Peak bytes on the host, the start included."""
        return max(sum(self.host.values()), *(host for _, host in self.start.values()))

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files: swapped tensors, and copies while a checkpoint is written."""
        return sum(self.disk.values())

    @property
    def one_memory_bytes(self) -> int:
        """Peak bytes if device and host share memory. Bytes of backward and bytes of the step never exist together."""
        return max(self.kept_bytes + max(self.in_backward_bytes, self.in_step_bytes), self.start_bytes)

    @property
    def kept_bytes(self) -> int:
        """Bytes on both sides that live from the first step to the end."""
        return sum(self.device.values()) + sum(self.host.values()) - self.in_backward_bytes - self.in_step_bytes

    @property
    def in_backward_bytes(self) -> int:
        """Bytes that live only during a backward pass."""
        return sum(self.device.get(part, 0) for part in IN_BACKWARD)

    @property
    def in_step_bytes(self) -> int:
        """Bytes that live only during an optimizer step."""
        return sum(self.host.get(part, 0) for part in IN_STEP)

    @property
    def start_bytes(self) -> int:
        """Peak bytes while the engine is made, device and host together."""
        return max(device + host for device, host in self.start.values())


def zero_layout(
    groups: Sequence[Sequence[int]],
    settings: ZeroSettings | None = None,
    *,
    frozen: Sequence[int] = (),
    buffer_bytes: int = 0,
) -> ZeroLayout:
    """Return the bytes that the engine will allocate.

    Args:
        groups: elements of each trainable parameter, for each parameter group of the optimizer.
        settings: stage, precision, offloading and sizes of buckets.
        frozen: elements of the parameters that are not trained, which are cast too.
        buffer_bytes: bytes of the module's buffers, which the engine doesn't change.

    Raises:
        ValueError: there is no trainable parameter.

    >>> layout = zero_layout([[600, 400]], ZeroSettings(precision="bf16-mixed", pin_memory=False))
    >>> layout.host["master"], layout.host["states"]  # 4 bytes x 1000, (4 + 4) bytes x 1000
    (4000, 8000)
    """
    settings = settings or ZeroSettings()
    trained = [list(group) for group in groups if sum(group)]
    if not trained:
        raise ValueError("no trainable parameters: there is nothing that ZeRO-Offload could offload")
    layout = (_stage_2 if settings.stage == 2 else _stage_3)(trained, settings, frozen, buffer_bytes)
    if settings.keeps_weights and settings.weight_bytes < FP32:
        originals = FP32 * (sum(map(sum, trained)) + sum(frozen))
        start = {moment: (device, host + originals) for moment, (device, host) in layout.start.items()}
        return replace(layout, host={**layout.host, "frozen": FP32 * sum(frozen)}, start=start)
    return layout


def _stage_2(groups: list[list[int]], s: ZeroSettings, frozen: Sequence[int], buffer_bytes: int) -> ZeroLayout:
    w = s.weight_bytes
    # Z2.__init__, flatten_dense_tensors_aligned: a group is padded to nccl_start_alignment_factor = 2 elements.
    flats = [sum(group) + sum(group) % 2 for group in groups]
    total, largest = sum(flats), max(map(max, groups))
    device = {
        "weights": w * (total + sum(frozen)),  # bit16_groups_flat; frozen ones keep tensors of their own
        "buffers": buffer_bytes,
        "scratch": w * largest,  # temp_grad_buffer_for_gpu_offload
        # Autograd's gradient until it is in the bucket (reduce_independent_p_g_buckets_and_remove_grads), which
        # clones one that is larger than the bucket.
        "gradients": w * largest * (2 if largest > s.reduce_bucket else 1),
        "buckets": w * _bucket_elements(s, total, 2 if s.overlap_comm else 1),  # setup_buckets, each backward
    }
    host = {
        "master": sum(s.pinned(FP32 * n) for n in flats),  # single_partition_of_fp32_groups
        "gradients": sum(s.pinned(FP32 * n) for n in flats),  # their .grad, initialize_optimizer_states
        "states": FP32 * s.states * total,  # zeros_like in the optimizer's first step: never pinned
        "copy_out": sum(s.pinned(w * n) for n in flats),  # param_buffer_of_bit16_for_cpu_offload_groups
        "scratch": s.pinned(w * largest),  # temp_grad_buffer_for_cpu_offload
        # accumulated_grads_in_cpu: one buffer per parameter, in async_accumulate_grad_in_cpu_via_gpu
        "accumulated": sum(s.pinned(w * n) for group in groups for n in group) if s.accumulates else 0,
        "step_temporaries": FP32 * s.step_temporaries * max(flats),  # _optimizer_step: one group at a time
    }
    return ZeroLayout(device, host, {}, _start_2(flats, s, device, host))


def _start_2(
    flats: list[int], s: ZeroSettings, device: Mapping[str, int], host: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Follow Z2.__init__ in its order. ``pin_memory`` copies, and its source is freed after the copy."""
    w, copies = s.weight_bytes, s.cuda and s.pin_memory
    weights = device["weights"] + device["buffers"]
    # At the last group, where the masters of all groups before it exist.
    masters, outs, last = host["master"], host["copy_out"], flats[-1]
    lingering = w * last if copies else 0  # temp_buffer_bit16 is a local of __init__
    source = FP32 * max(flats) if copies else 0
    return {
        # The parameters and their flat copy, then the flat copy and the clone that becomes the master.
        "flatten": (weights + w * max(flats), 0),
        # .clone().to("cpu", fp32); a change of dtype on the way goes through a copy in the weights' dtype.
        "master": (weights + w * last, masters + outs - s.pinned(w * last) + (source or (w * last if w < FP32 else 0))),
        "gradients": (weights + device["scratch"], masters + outs + lingering + host["gradients"] + source),
    }


def _stage_3(groups: list[list[int]], s: ZeroSettings, frozen: Sequence[int], buffer_bytes: int) -> ZeroLayout:
    w = s.weight_bytes
    total, largest = sum(map(sum, groups)), max(*map(max, groups), *frozen, 0)
    subs = [sub for group in groups for sub in _sub_groups(group, s.sub_group)]
    sums = [sum(sub) for sub in subs]
    everything = [*(n for group in groups for n in group), *frozen]
    device = {
        "weights": 0 if s.offload_parameters else w * sum(everything),  # lp_param_buffer (defragment); frozen ds_tensor
        # Fetched for use (NoGatherCoalescedHandle copies to the device), and kept while max_live_parameters allows
        # it: stage3_max_reuse_distance, 1e9 elements, releases nothing below that. Small ones are never released.
        # On a CPU ``to`` copies nothing.
        "live_weights": w * _live(everything, s) if s.offload_parameters and s.cuda else 0,
        "buffers": buffer_bytes,
        "bucket": w * _bucket_elements(s, total, 1),  # IPGBucket.buffer, _setup_for_real_optimizer, for good
        "gradients": w * largest,  # autograd's, until __add_grad_to_ipg_bucket
        # reduce_scatter_coalesced flattens once more, and gloo, the CPU's backend, copies its input.
        "reduced": w * _bucket_elements(s, total, 1) * (1 if s.cuda else 2),
    }
    host, disk = _host_3(groups, sums, s, frozen)
    disk |= _optimizer_disk(subs, s)
    return ZeroLayout(device, host, disk, _start_3(groups, sums, s, device, host, frozen))


def _host_3(
    groups: list[list[int]], sums: list[int], s: ZeroSettings, frozen: Sequence[int]
) -> tuple[dict[str, int], dict[str, int]]:
    w, total = s.weight_bytes, sum(sums)
    in_memory = [
        n for n in sums if not (s.nvme_optimizer and FP32 * n >= MIN_DISK_BYTES)
    ]  # _swappable_optimizer_subgroup
    swapped = len(in_memory) < len(sums)
    weights, disk = _weights_3(groups, sums, s, frozen)
    host = {
        **weights,
        "master": FP32 * sum(in_memory),  # _create_fp32_partitions: .to().clone(), never pinned
        "gradients": sum(s.pinned(FP32 * n) for n in in_memory),  # initialize_optimizer_states, one per sub-group
        "accumulated": s.pinned(w * total),  # grad_partitions_flat_buffer, on the host also under NVMe
        "states": FP32 * s.states * sum(in_memory),
        # SwapBufferManager: page-locked by DeepSpeed's own op, without rounding
        "swap_buffers": FP32 * s.optimizer_buffer_count * _aligned(max(sums), FP32) if swapped else 0,
        # The first step makes the states outside of the swap buffers.
        "step_temporaries": FP32 * (s.step_temporaries + (s.states if swapped else 0)) * max(sums),
    }
    if s.precision.startswith("16"):  # has_overflow: isinf takes abs() and a mask of the whole buffer, before the step
        host["step_temporaries"] = max(host["step_temporaries"], (w + 1) * total)
    return host, disk


def _weights_3(
    groups: list[list[int]], sums: list[int], s: ZeroSettings, frozen: Sequence[int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of offloaded weights on (host, disk)."""
    w, everything = s.weight_bytes, [*(n for group in groups for n in group), *frozen]
    if not s.offload_parameters:
        return {}, {}
    on_disk = [n for n in everything if s.nvme_parameters and w * n >= MIN_DISK_BYTES]
    flats, room = [], s.max_in_cpu if s.nvme_parameters else sum(sums)
    for group in groups:  # _create_param_groups_fp16_flat_cpu_memory: under NVMe too, up to max_in_cpu elements
        flats.append(min(sum(group), max(room, 0)))
        room -= sum(group)
    # Init._partition_param: one pinned tensor each, replaced by the flat buffer, but kept by torch's pinned cache.
    first = [s.pinned(w * n) for group in groups for n in group if w * n < MIN_DISK_BYTES or not s.nvme_parameters]
    host = {
        "weights": sum(s.pinned(w * n, always=True) for n in flats)  # pinned even with pin_memory=False
        + sum(s.pinned(w * n) for n in frozen if n not in on_disk),
        "pinned_leftovers": sum(first) if s.cuda and s.pin_memory else 0,
    }
    if s.nvme_parameters:  # AsyncPartitionedParameterSwapper: page-locked without rounding
        host["swap_buffers_weights"] = w * s.parameter_buffer_count * _aligned(s.parameter_buffer, w)
        if sum(flats) < sum(sums):  # reserve_partitioned_swap_space
            host["swap_buffers_weights"] += w * _aligned(max(sums), w)
    return host, {"weights": sum(w * _aligned(n, w) for n in on_disk)} if on_disk else {}


def _optimizer_disk(subs: list[list[int]], s: ZeroSettings) -> dict[str, int]:
    """Return the bytes of OptimizerStateSwapInfo's files: masters, states and gradients of sub-groups.

    The part ``copies`` is written for a checkpoint: masters for its weights, then masters and states.
    """
    swapped = [sub for sub in subs if s.nvme_optimizer and FP32 * sum(sub) >= MIN_DISK_BYTES]
    if not swapped:
        return {}
    tensor = sum(FP32 * _aligned(sum(sub), FP32) for sub in swapped)
    gradients = sum(FP32 * n for sub in swapped for n in sub if FP32 * n >= MIN_DISK_BYTES)
    return {"master": tensor, "states": s.states * tensor, "gradients": gradients, "copies": (2 + s.states) * tensor}


def _start_3(
    groups: list[list[int]],
    sums: list[int],
    s: ZeroSettings,
    device: Mapping[str, int],
    host: Mapping[str, int],
    frozen: Sequence[int],
) -> dict[str, tuple[int, int]]:
    """Follow engine._configure_distributed_model, then Z3.__init__, in their order."""
    w, total, largest_sub = s.weight_bytes, sum(sums), max(sums)
    copies = s.cuda and s.pin_memory
    kept = device["weights"] + device["buffers"]
    weights = host.get("weights", 0) + host.get("pinned_leftovers", 0) + host.get("swap_buffers_weights", 0)
    converted = FP32 * largest_sub if s.cuda or w < FP32 or not s.offload_parameters else 0
    masters = weights + host["swap_buffers"] + host["master"]
    gradients = masters + host["gradients"]
    return {
        # zero.Init(module=...): one parameter at a time on the device, then in its partition
        "to_device": (kept + w * max(*map(max, groups), *frozen, 0), weights),
        "weights": (kept, weights if s.offload_parameters or not s.cuda else w * total),  # defragment's cpu_buffer
        "master": (kept, masters + converted),
        "gradients": (
            kept,
            gradients + FP32 * largest_sub * (2 if copies else 1),
        ),  # gradient_buffer, and its pinned copy
        "accumulated": (
            kept + (device["bucket"] if s.cuda else 0),
            gradients + host["accumulated"] + (w * total if copies else 0),
        ),
    }


def _bucket_elements(s: ZeroSettings, total: int, count: int) -> int:
    """Return the elements of ``count`` buckets; on a CPU only written pages take memory."""
    return s.reduce_bucket * count if s.cuda else min(s.reduce_bucket * count, total)


def _live(numels: Sequence[int], s: ZeroSettings) -> int:
    small = sum(n for n in numels if n < s.persistence_threshold)
    return min(sum(numels), max(s.max_live_parameters, small))


def _sub_groups(group: Sequence[int], size: int) -> list[list[int]]:
    """Split a group as Z3._create_fp16_sub_groups does: a new sub-group starts once ``size`` is reached."""
    subs: list[list[int]] = [[]]
    for n in group:
        if sum(subs[-1]) >= size:
            subs.append([])
        subs[-1].append(n)
    return subs


def _aligned(numel: int, element: int) -> int:
    step = DISK_ALIGNMENT // element
    return -(-numel // step) * step
