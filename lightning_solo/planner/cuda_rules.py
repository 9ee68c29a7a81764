"""CUDA's rules for CPU tensors: its autocast, attention, dropout, optimizers and device names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import _scoped_library
from torch.overrides import TorchFunctionMode

from lightning_solo.planner.attention import fused_attention, math_attention
from lightning_solo.planner.autocast import cuda_autocast_on_cpu, register_autocast
from lightning_solo.planner.kernels import cuda_chunk_sizes
from lightning_solo.planner.optimizer_rules import capturable_on_cpu, register_fused_steps


@contextmanager
def cuda_rules(attention: str = "fused") -> Iterator[None]:
    """Run CPU tensors by CUDA's rules in a context, in which the kernels are replaced for the whole process.

    Args:
        attention: ``"fused"``, or ``"math"`` for the kernel that keeps all scores: the pessimistic choice.
    """
    kernel = fused_attention if attention == "fused" else math_attention
    with _scoped_library("aten", "IMPL") as library:
        register_autocast(library)
        library.impl("scaled_dot_product_attention", kernel, "AutogradCPU", allow_override=True)
        library.impl("dropout", dropout, "AutogradCPU", allow_override=True)
        register_fused_steps(library)
        with cuda_autocast_on_cpu(), capturable_on_cpu(), cuda_chunk_sizes():
            yield


@contextmanager
def cpu_rules() -> Iterator[None]:
    """Run fake tensors by the CPU's rules, including those that torch lacks."""
    with _scoped_library("aten", "IMPL") as library:
        register_fused_steps(library)
        yield


def dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    """Dropout that keeps a mask of one byte per element."""
    if not train or p == 0 or not tensor.numel():
        return tensor
    out: Tensor = torch.ops.aten.native_dropout(tensor, p, train)[0]
    return out


class CudaByHand(TorchFunctionMode):
    """Places on the CPU the tensors that a module places on a CUDA device by hand.

    Args:
        allowed: whether the plan is for a CUDA device.

    Attributes:
        used: whether a tensor was placed this way.

    Raises:
        RuntimeError: the plan is for the CPU. It isn't one of our errors, so that the message names the module's line.
    """

    def __init__(self, *, allowed: bool) -> None:
        super().__init__()
        self.allowed = allowed
        self.used = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            self._use()
            return args[0]
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            self._use()
            kwargs = {**kwargs, "device": "cpu"}
        elif func is Tensor.to and any(map(_is_cuda, args)):
            self._use()
            args = tuple("cpu" if _is_cuda(argument) else argument for argument in args)
        return func(*args, **kwargs)

    def _use(self) -> None:
        if not self.allowed:
            raise RuntimeError("a tensor is put on a CUDA device by hand, and the plan is for the CPU")
        self.used = True


def _is_cuda(device: Any) -> bool:
    return str(device).startswith("cuda") if isinstance(device, (str, torch.device)) else False
