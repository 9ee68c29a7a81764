"""CUDA's autocast for CPU tensors, with the lists of ``ATen/autocast_mode.h`` of torch 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_solo.attributes import replaced

HALF = (torch.float16, torch.bfloat16)
WITHOUT_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

# AT_FORALL_FP32: run in fp32, for inputs of any type.
IN_FP32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "group_norm", "frobenius_norm"),
    *("nuclear_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d"),
    *("hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss"),
    *("multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss"),
    *("binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d"),
    *("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"),
)
# AT_FORALL_FP32_SET_OPT_DTYPE: the result is in fp32 unless the call sets another dtype.
FP32_BY_DTYPE = (
    *("prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum"),
)


def register_autocast(library: Any) -> None:
    """Register CUDA's lists for the CPU, in a library of ``aten`` kernels."""
    for names, by_dtype in ((IN_FP32, False), (FP32_BY_DTYPE, True)):
        for overload in _overloads(names):
            library.impl(overload.name(), _autocast(overload, by_dtype), "AutocastCPU", allow_override=True)


def cuda_autocast_on_cpu() -> AbstractContextManager[None]:
    """Make a module's ``torch.autocast("cuda")`` cast on the CPU; torch disables it without CUDA."""
    original = torch.autocast.__init__

    def init(context: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(context, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return replaced(torch.autocast, "__init__", init)


def _overloads(names: tuple[str, ...]) -> Iterator[Any]:
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        for overload_name in packet.overloads() if packet is not None else ():
            overload = getattr(packet, overload_name)
            schema = overload._schema
            if not schema.is_mutable and not any(argument.is_out for argument in schema.arguments):
                yield overload


def _autocast(overload: Any, by_dtype: bool) -> Callable[..., Any]:
    names = [argument.name for argument in overload._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(WITHOUT_AUTOCAST):
            if not by_dtype:
                args, kwargs = tree_map_only(Tensor, _in_fp32, (args, kwargs))
            elif "dtype" in names and args and isinstance(args[0], Tensor) and args[0].dtype in HALF:
                kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
                args = ()
                if kwargs.get("dtype") is None:
                    kwargs["dtype"] = torch.float32
            return overload(*args, **kwargs)

    return run


def _in_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor
