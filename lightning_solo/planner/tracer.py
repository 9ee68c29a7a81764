"""The ledger of a planned run: costs of operators, assumptions, and the start of each phase."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from lightning_solo.memory.ledger import Ledger, operator_tensors, storages_of
from lightning_solo.nn.rounded_products import fp16_accumulated
from lightning_solo.optim.staging import Staging
from lightning_solo.planner.autocast import HALF
from lightning_solo.planner.convolutions import CONVOLUTIONS, workspaces
from lightning_solo.planner.data_dependent_ops import DATA_DEPENDENT
from lightning_solo.planner.fake_modules import KNOWN, may_have_numbers, with_new_numbers
from lightning_solo.planner.index_bounds import BOUNDS, check_indices
from lightning_solo.planner.notes import SERVED, STAGED, label
from lightning_solo.planner.operator_cache import Known, OperatorCache, described
from lightning_solo.planner.timeline import COMPUTE

aten = torch.ops.aten
RING_BUFFERS = 10**6
"""Slots of rings' buffers begin here, above those of staging buffers; those of offloaded tensors are negative."""


def ring_buffer(window: int, block: int) -> int:
    """Return the slot of a block that has one of ``window`` buffers; it grows with the block, as others don't."""
    return RING_BUFFERS * window + block


def buffer_of(slot: int) -> int:
    """Return the number of a slot's buffer, which blocks of a ring share."""
    window, block = divmod(slot, RING_BUFFERS)
    return slot if window < 1 else RING_BUFFERS + block % window


PHASES = ("forward", "backward", "optimizer_step", "between")
NORMS = (
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
)
_META = torch.device("meta")
_DEVICE = torch.ops.prim.device.default
_NUMBER = aten._local_scalar_dense.default
_NEW = aten.lift_fresh.default  # what torch.tensor() runs


class Cost(NamedTuple):
    """Cost of one operator: floating-point operations, bytes read and written, and the type it computes in.

    A copy between host and device has its direction as ``stream`` and its staging buffer as ``slot``. A wait for a
    buffer's last copy has them too. ``fp16_sums`` marks products that are summed in fp16.
    """

    flops: int
    bytes: int
    dtype: torch.dtype
    stream: str = COMPUTE
    slot: int = -1
    fp16_sums: bool = False


class Tracer(Ledger):  # type: ignore[no-untyped-call]
    """A ledger that also records phases and costs, and replaces operators that need data.

    Args:
        module: as `Ledger`.
        fake: whether tensors have no data.
        cuda: whether results are those of CUDA's kernels rather than the CPU's.
        known: results of operators in earlier traces with the same mode and device.
    """

    def __init__(self, module: nn.Module, *, fake: bool = True, cuda: bool = True, known: Known | None = None) -> None:
        super().__init__(module)
        self.fake = fake
        self.cuda = cuda
        self.assumptions: dict[str, None] = {}  # in order, each once
        self.costs: list[Cost] = []
        self.phases: list[tuple[int, int, str]] = []  # (number of events before it, number of costs before it, name)
        self.steps: list[int] = []  # number of costs before the end of each optimizer step
        self._cached = OperatorCache(self._computed, known)
        self._served: dict[Staging, int] = {}

    def assume(self, what: str) -> None:
        """Record an assumption."""
        self.assumptions[what] = None

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Begin the record, with the live storages."""
        self._optimizers = tuple(optimizers)
        self.reset_peak()
        self.costs.clear()
        self.phases = [(0, 0, "between")]
        self.steps.clear()
        self._served.clear()

    def enter(self, phase: str) -> None:
        """Record the start of a phase."""
        self.phases.append((len(self.log.events), len(self.costs), phase))

    def launch(self, size: int) -> None:
        """Record a launch of one of our kernels, by the bytes it moves."""
        self.costs.append(Cost(0, size, torch.float32))

    def multiply(self, first: int, times: float) -> None:
        """Multiply the costs from ``first`` on, for operations that are traced once and run many times."""
        for index in range(first, len(self.costs)):
            cost = self.costs[index]
            self.costs[index] = cost._replace(flops=round(cost.flops * times), bytes=round(cost.bytes * times))

    def copy(self, stream: str, size: int, slot: int) -> None:
        """Record a copy through a staging buffer to the device or host, or a wait for the buffer's last copy."""
        self.costs.append(Cost(0, size, torch.uint8, stream, slot))

    def note(self, *words: Any, size: int = 1) -> None:
        """Record a note among the events."""
        number = self.log.born(label(*words))
        self.log.events += [(number, size), (number, -size)]

    def stage(self, staging: Staging, size: int) -> None:
        """Record that a number of bytes pass through a staging buffer."""
        served = self._served.setdefault(staging, 0)
        number = [*self._served].index(staging)
        if staging.served != served:
            self.note(SERVED, number, size=staging.served)
        self._served[staging] = staging.served
        self.note(STAGED, number, self._label(), size=size)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # the ledger's `__torch_dispatch__` skips it; skipping here too takes longer than naming a device
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # two of three calls
            return _META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device  # as torch's rule does
        if get_eval_frame_callback() is None:  # Dynamo compiles nothing here, and needn't be told to skip it
            kwargs = kwargs or {}
            if self.fake and (_plain.get(id(func)) or _is_plain(func))[1]:
                return self._counted_by_metadata(func, args, kwargs)
            return self.counted(func, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _counted_by_metadata(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do as `counted`, with the tensors that the cache finds among the arguments."""
        call = described(func, args, kwargs)
        if call is None:
            return self.counted(func, args, kwargs)
        for tensor in call[1]:
            self._see(tensor.untyped_storage(), None)
        result, cost = self._cached.called(call, func, args, kwargs)
        if cost is not None:
            self.costs.append(cost)
        self._see_result(func, [result.untyped_storage()] if type(result) is FakeTensor else storages_of(result))
        return result

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, or its replacement if it needs data that fake tensors lack."""
        if self.fake:
            if func is _NUMBER and (numbers := getattr(args[0], "constant", None)) is not None:
                with no_dispatch():
                    return numbers.item()
            if func is _NEW and may_have_numbers(args[0]):
                return with_new_numbers(args[0])
            check_indices(func, args)
        cached = self.fake and func not in DATA_DEPENDENT and func not in CONVOLUTIONS
        result, cost = self._cached(func, args, kwargs) if cached else self._computed(func, args, kwargs)
        if cost is not None:
            self.costs.append(cost)
        return result

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Cost | None]:
        """Return the result of one operator, and its cost unless it is free."""
        replacement = DATA_DEPENDENT.get(func) if self.fake else None
        result: Any = NotImplemented
        if replacement is not None and not all(map(has_numbers, operator_tensors((args, kwargs)))):
            result = replacement(self.assume, *args, **kwargs)
        if self.fake and _updates_lists(func) and not any(map(has_numbers, operator_tensors((args, kwargs)))):
            result = None  # torch would spend time on each tensor to find it unchanged
        if result is NotImplemented:
            with _numbers_of_few(func, args, kwargs) if self.fake else nullcontext():
                result = func(*args, **kwargs)
        if self.fake and func in _RANGES:
            result = _range_with_numbers(func, args, kwargs, result)
        if self.fake and func in NORMS and result[1].dtype in HALF and (self.cuda or _mixed(args)):
            # torch's rule for fake tensors returns statistics in 16 bits; the kernels keep them in fp32
            result = (result[0], result[1].float(), result[2].float(), *result[3:])
        if func in CONVOLUTIONS and self.cuda:
            self.assume("convolutions: cuDNN's workspaces, which depend on the chosen algorithms, are not counted")
        elif func in CONVOLUTIONS:
            for size in workspaces(func, args, result):
                self.see_workspace(size)
        return result, None if func.is_view or func in _FREE else _cost(func, args, kwargs, result)


_plain: dict[int, tuple[Any, bool]] = {}
"""id of an operator -> itself, and whether it is run as it is."""


def _is_plain(func: Any) -> tuple[Any, bool]:
    special = func in (_NUMBER, _NEW, *CONVOLUTIONS) or func in BOUNDS or func in DATA_DEPENDENT
    _plain[id(func)] = entry = func, not special
    return entry


@functools.cache
def _updates_lists(func: Any) -> bool:
    """Return whether an operator changes lists of tensors in place, and returns nothing."""
    return isinstance(func, OpOverload) and func._schema.name.startswith("aten::_foreach_") and not func._schema.returns


def has_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor's numbers are known."""
    return not isinstance(tensor, FakeTensor) or tensor.constant is not None


def _mixed(args: tuple[Any, ...]) -> bool:
    """Return whether a norm's weights and its input have different types."""
    return any(isinstance(a, Tensor) and a.dtype != args[0].dtype for a in args[1:])


@contextmanager
def _numbers_of_few(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Discard the known values of an operator's inputs if its result is too large, such as a mask over all pairs.

    torch would compute the result before it checks the size.
    """
    tensors = [tensor for tensor in operator_tensors((args, kwargs)) if isinstance(tensor, FakeTensor)]
    numbers = [tensor.constant for tensor in tensors]
    if any(number is None for number in numbers) or not any(tensor.numel() ** 2 > KNOWN for tensor in tensors):
        yield
        return
    with no_dispatch(), suppress(RuntimeError):  # raised if the size depends on the numbers
        empty = tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), (args, kwargs))
        if any(result.numel() > KNOWN for result in operator_tensors(func(*empty[0], **empty[1]))):
            for tensor in tensors:
                tensor.constant = None
    try:
        yield
    finally:
        for tensor, number in zip(tensors, numbers, strict=True):
            tensor.constant = number


_RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)


def _range_with_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Return a range with known numbers unless there are many: models compare positions before they build a mask."""
    if not isinstance(result, FakeTensor) or result.is_floating_point() or result.numel() > KNOWN:
        return result
    with no_dispatch():
        numbers = func(*args, **{**kwargs, "device": "cpu"})
    return result.fake_mode.fake_tensor_converter.from_real_tensor(result.fake_mode, numbers)


_FREE = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.detach.default,
    aten.lift_fresh.default,
    aten._unsafe_view.default,  # of a product of tensors of several dimensions; a view, though not marked as one
    *DATA_DEPENDENT,
}


def _cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Cost:
    integers = func is aten._int_mm.default  # counted as a product in bf16, for which torch has a rule
    count = flop_registry.get(aten.mm if integers else func._overloadpacket)
    flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
    if flops and _is_causal(func, args, kwargs):  # torch counts all pairs; the kernels skip those above the diagonal
        flops //= 2
    tensors = {id(t): t for t in operator_tensors((args, kwargs, result))}.values()
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.bfloat16 if integers else torch.float32)
    return Cost(flops, sum(map(_bytes, tensors)), dtype, fp16_sums=func is fp16_accumulated._opoverload)


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator is attention under a causal mask, of as many queries as keys."""
    if not isinstance(func, OpOverload):
        return False
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return bool(named.get("is_causal")) and named["query"].shape[-2] == named["key"].shape[-2]


def _bytes(tensor: Tensor) -> int:
    """Return the bytes read for a tensor; expanded dimensions are read once."""
    if tensor.layout is not torch.strided:
        return 0
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else min(length, 1)
    return size
