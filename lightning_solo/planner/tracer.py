"""The ledger of a planned run: what each operator costs, what was assumed, and where each phase begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils.flop_counter import flop_registry

from lightning_solo.memory.ledger import Ledger, tensors_of
from lightning_solo.planner.cuda_rules import HALF
from lightning_solo.planner.data_dependent_ops import STAND_INS
from lightning_solo.planner.index_bounds import check_indices
from lightning_solo.planner.timeline import COMPUTE

aten = torch.ops.aten
PHASES = ("forward", "backward", "optimizer_step", "between")
NORMS = (
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
)


_META = torch.device("meta")


class Cost(NamedTuple):
    """What one operator takes: floating-point operations, bytes read and written, and the type it computes in.

    A copy to the device or back has its direction for a stream, and the staging buffer through which it goes.
    """

    flops: int
    bytes: int
    dtype: torch.dtype
    stream: str = COMPUTE
    slot: int = -1


class Tracer(Ledger):  # type: ignore[no-untyped-call]
    """A ledger that answers for operators which need data, and writes down phases and costs.

    Args:
        module: as `Ledger`.
        fake: whether tensors are without data.
        cuda: whether results are as CUDA's kernels give them, rather than the CPU's.
    """

    def __init__(self, module: nn.Module, *, fake: bool = True, cuda: bool = True) -> None:
        super().__init__(module)
        self.fake = fake
        self.cuda = cuda
        self.assumptions: dict[str, None] = {}  # in order, each once
        self.costs: list[Cost] = []
        self.phases: list[tuple[int, int, str]] = []  # events before it, costs before it, name
        self.steps: list[int] = []  # costs before the end of each optimizer step

    def assume(self, what: str) -> None:
        """Note an assumption."""
        self.assumptions[what] = None

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Forget all until now: what is live is where training starts from."""
        self._optimizers = tuple(optimizers)
        self.reset_peak()
        self.costs.clear()
        self.phases = [(0, 0, "between")]
        self.steps.clear()

    def enter(self, phase: str) -> None:
        """A phase begins."""
        self.phases.append((len(self.log.events), len(self.costs), phase))

    def launch(self, size: int) -> None:
        """A kernel of our own moves bytes."""
        self.costs.append(Cost(0, size, torch.float32))

    def copy(self, stream: str, size: int, slot: int) -> None:
        """Bytes go to the device, or back, through one of the staging buffers."""
        self.costs.append(Cost(0, size, torch.uint8, stream, slot))

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, or answer in its stead."""
        if func is torch.ops.prim.device.default:
            return _device(args[0]) if isinstance(args[0], FakeTensor) else func(*args, **kwargs)
        if self.fake:
            check_indices(func, args)
        stand_in = STAND_INS.get(func) if self.fake else None
        if stand_in is not None and all(known(t) for t in tensors_of((args, kwargs))):
            stand_in = None
        result = NotImplemented if stand_in is None else stand_in(self.assume, *args, **kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
        if self.fake and func in NORMS and result[1].dtype in HALF and (self.cuda or _mixed(args)):
            # torch's rule for fake tensors gives the statistics in 16 bits; the kernels keep them in fp32
            result = (result[0], result[1].float(), result[2].float(), *result[3:])
        if not func.is_view and func not in _FREE:  # type: ignore[attr-defined]
            self.costs.append(_cost(func, args, kwargs, result))
        return result


def _device(tensor: FakeTensor) -> torch.device:
    """Return what torch's own rule does, which is asked for twice as often as all else, by fewer calls."""
    return _META if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


def known(tensor: Tensor) -> bool:
    """Tell whether a tensor's numbers are known."""
    return not isinstance(tensor, FakeTensor) or tensor.constant is not None


def _mixed(args: tuple[Any, ...]) -> bool:
    """Tell whether a norm has weights of another type than what it normalizes."""
    return any(isinstance(a, Tensor) and a.dtype != args[0].dtype for a in args[1:])


_FREE = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.detach.default,
    aten.lift_fresh.default,
    *STAND_INS,
}


def _cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Cost:
    count = flop_registry.get(func._overloadpacket)
    flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
    tensors = {id(t): t for t in tensors_of((args, kwargs, result))}
    moved = sum(_bytes(t) for t in tensors.values())
    dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)
    return Cost(flops, moved, dtype)


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that reading a tensor takes: what is expanded is read once."""
    if tensor.layout is not torch.strided:
        return 0
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else min(length, 1)
    return size
