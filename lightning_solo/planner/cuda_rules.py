"""CUDA's rules for CPU tensors: its autocast, attention, dropout, optimizers and device names."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import _scoped_library
from torch.utils._device import DeviceContext, _device_constructors

from lightning_solo.attributes import replaced
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


class CudaByHand:
    """Places on the CPU the tensors that a module places on a CUDA device by hand.

    torch's functions are replaced, since a mode would be called for each attribute of a tensor, too.

    Args:
        allowed: whether the plan is for a CUDA device.

    Attributes:
        used: whether a tensor was placed this way.
    """

    def __init__(self, *, allowed: bool) -> None:
        self.allowed = allowed
        self.used = False

    @contextmanager
    def on_cpu(self) -> Iterator[None]:
        """Place the tensors on the CPU in this context.

        Raises:
            RuntimeError: the plan is for the CPU. It isn't one of our errors, so that the message names the module's
                line.
        """

        def stays(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self._use()
            return tensor

        _device_constructors()  # torch makes this set once; made below, it would be of the replacements
        imported = _imported_by_name(len(sys.modules))
        with ExitStack() as stack:
            for owner, names in ((Tensor, _METHODS), (DeviceContext, ("__init__",)), (torch, _CONSTRUCTORS), *imported):
                for name in names:
                    stack.enter_context(replaced(owner, name, self._placing(getattr(owner, name))))
            stack.enter_context(replaced(Tensor, "cuda", stays))
            yield

    def _placing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def place(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs and _is_cuda(kwargs["device"]):
                self._use()
                kwargs["device"] = "cpu"
            elif len(args) > 1 and _is_cuda(args[1]):  # of `Tensor.to` and a device's context
                self._use()
                args = (args[0], "cpu", *args[2:])
            return function(*args, **kwargs)

        return place

    def _use(self) -> None:
        if not self.allowed:
            raise RuntimeError("a tensor is put on a CUDA device by hand, and the plan is for the CPU")
        self.used = True


_CONSTRUCTORS = (
    *("arange", "as_tensor", "asarray", "empty", "empty_like", "empty_permuted", "empty_strided", "eye", "full"),
    *("full_like", "linspace", "logspace", "normal", "ones", "ones_like", "rand", "rand_like", "randint"),
    *("randint_like", "randn", "randn_like", "randperm", "range", "scalar_tensor", "tensor", "tril_indices"),
    *("triu_indices", "zeros", "zeros_like", "hann_window", "hamming_window", "kaiser_window", "blackman_window"),
    "bartlett_window",
)
"""torch's functions with a device."""
_METHODS = ("to", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


@functools.lru_cache(maxsize=1)
def _imported_by_name(count: int) -> list[tuple[Any, list[str]]]:
    """Return the modules with functions that they have from torch by name; ``count``: of all modules by now."""
    found = []
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] != "torch":
            names = getattr(module, "__dict__", {})
            found.append((module, [name for name in _CONSTRUCTORS if names.get(name) is getattr(torch, name)]))
    return [(module, names) for module, names in found if names]


def _is_cuda(device: Any) -> bool:
    return str(device).startswith("cuda") if isinstance(device, (str, torch.device)) else False
