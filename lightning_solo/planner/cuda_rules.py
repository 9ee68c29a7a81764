"""CUDA's rules for tensors of the CPU: attention kernels, autocast lists, dropout, defaults of optimizers.

Lists after ``ATen/autocast_mode.h`` of torch 2.13; kernels after ``transformers/cuda/sdp_utils.cpp``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from lightning_solo.optim import adamw_update, host_memory, split_weights
from lightning_solo.planner.timeline import TO_DEVICE, TO_HOST

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)

# AT_FORALL_FP32: run in fp32 whatever comes in.
IN_FP32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "group_norm", "frobenius_norm"),
    *("nuclear_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d"),
    *("hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss"),
    *("multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss"),
    *("binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d"),
    *("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"),
)
# AT_FORALL_FP32_SET_OPT_DTYPE: their result is in fp32 unless they are told otherwise.
FP32_BY_DTYPE = (
    "prod",
    "softmax",
    "log_softmax",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "sum",
)


@contextmanager
def cuda_policy(attention: str = "fused") -> Iterator[None]:
    """Run CPU tensors by CUDA's rules. Registers kernels for the whole process, and takes them back.

    Args:
        attention: ``"fused"``, or ``"math"`` for the plain one, which keeps all scores: the pessimistic choice.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for names, by_dtype in ((IN_FP32, False), (FP32_BY_DTYPE, True)):
            for overload in _overloads(names):
                library.impl(overload.name(), _autocast(overload, by_dtype), "AutocastCPU", allow_override=True)
        if attention == "fused":
            library.impl("scaled_dot_product_attention", fused_attention, "AutogradCPU", allow_override=True)
        else:
            library.impl("scaled_dot_product_attention", math_attention, "AutogradCPU", allow_override=True)
        library.impl("dropout", dropout, "AutogradCPU", allow_override=True)
        _let_fused_optimizers_be(library)
        with _autocast_by_hand(), _capturable(), _pieces_of_cuda():
            yield
    finally:
        library._destroy()


@contextmanager
def cpu_policy() -> Iterator[None]:
    """Run fake tensors by the CPU's rules: where torch has none, it is told them for the time being."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        _let_fused_optimizers_be(library)
        yield
    finally:
        library._destroy()


def _let_fused_optimizers_be(library: Any) -> None:
    for name in ("_fused_sgd_", "_fused_adagrad_"):  # they change in place, and have no rule for fake tensors
        library.impl(name, lambda *args, **kwargs: None, "Meta", allow_override=True)


@contextmanager
def _autocast_by_hand() -> Iterator[None]:
    """Let ``torch.autocast("cuda")`` in a module cast on the CPU: without CUDA torch would switch it off."""
    original = torch.autocast.__init__

    def init(context: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(context, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.autocast.__init__ = init  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]


@contextmanager
def _capturable() -> Iterator[None]:
    """Let optimizers be ``capturable`` on the CPU, which they refuse because it can't replay a graph."""
    name = "_get_capturable_supported_devices"
    found = [module for key, module in sys.modules.items() if key.startswith("torch.optim.") and hasattr(module, name)]
    originals = [getattr(module, name) for module in found]
    for module, original in zip(found, originals, strict=True):
        setattr(module, name, partial(_with_cpu, original))
    try:
        yield
    finally:
        for module, original in zip(found, originals, strict=True):
            setattr(module, name, original)


def _with_cpu(original: Callable[..., list[str]], *args: Any, **kwargs: Any) -> list[str]:
    return [*original(*args, **kwargs), "cpu"]


class CudaByHand(TorchFunctionMode):
    """Puts on the CPU what a module puts on a CUDA device by hand: to a trace both are one.

    Args:
        allowed: whether there is such a device; not for a plan for the CPU.

    Attributes:
        used: whether anything was put there.

    Raises:
        RuntimeError: it isn't allowed; not an error of ours, so that the module's line is named.
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
            args = tuple("cpu" if _is_cuda(given) else given for given in args)
        return func(*args, **kwargs)

    def _use(self) -> None:
        if not self.allowed:
            raise RuntimeError("a tensor is put on a CUDA device by hand, and the plan is for the CPU")
        self.used = True


def _is_cuda(device: Any) -> bool:
    return str(device).startswith("cuda") if isinstance(device, (str, torch.device)) else False


def _overloads(names: tuple[str, ...]) -> Iterator[Any]:
    for name in names:
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            found = getattr(packet, overload)
            if not any(argument.is_out for argument in found._schema.arguments) and not found._schema.is_mutable:
                yield found


def _autocast(overload: Any, by_dtype: bool) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    names = [argument.name for argument in overload._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            if by_dtype:
                if args and isinstance(args[0], Tensor) and args[0].dtype in HALF:
                    position = names.index("dtype") if "dtype" in names else len(args)
                    if position >= len(args) and kwargs.get("dtype") is None and "dtype" in names:
                        kwargs["dtype"] = torch.float32
                    elif position < len(args) and args[position] is None:
                        args = (*args[:position], torch.float32, *args[position + 1 :])
            else:
                cast = lambda tensor: tensor.float() if tensor.dtype in HALF else tensor  # noqa: E731
                args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
            return overload(*args, **kwargs)

    return run


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention by the kernel that CUDA would take: flash, memory-efficient, or plain."""
    width = query.size(-1)
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (t.to(torch.get_autocast_dtype("cpu")) for t in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(query.dtype)
    scale = width**-0.5 if scale is None else scale
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        four = query.dim() == key.dim() == value.dim() == 4
        if four and query.dtype in HALF and attn_mask is None and width <= 256 and value.size(-1) == width:
            pad = -width % 8  # the kernel wants multiples of 8
            padded = [F.pad(t, (0, pad)) if pad else t for t in (query, key, value)]
            out: Tensor = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0]
            return out[..., :width] if pad else out
        if four and query.dtype in (*HALF, torch.float32):
            if enable_gqa:
                key, value = (t.repeat_interleave(query.size(1) // t.size(1), 1) for t in (key, value))
            bias = _bias(attn_mask, query, key)
            keeps = query.requires_grad or key.requires_grad or value.requires_grad
            return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
                query, key, value, bias, keeps and torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
            )[0]
        return math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention by matrix products."""
    out: Tensor = aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return out


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return a mask as the memory-efficient kernel takes it: numbers, of full shape, rows of whole 16 bytes."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    multiple = 16 // query.element_size()
    pad = -mask.size(-1) % multiple
    if pad:
        mask = F.pad(mask, (0, pad))[..., : mask.size(-1)]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    """Dropout that keeps a mask of one byte per element."""
    if not train or p == 0 or not tensor.numel():
        return tensor
    out: Tensor = aten.native_dropout(tensor, p, train)[0]
    return out


@contextmanager
def _pieces_of_cuda() -> Iterator[None]:
    """Let compact states be unpacked in pieces, and pass through buffers, as large and as many as on a GPU."""
    sizes = (adamw_update.CHUNK, split_weights.CHUNK, host_memory.SLOTS)
    own = [size["cpu"] for size in sizes]
    for size in sizes:
        size["cpu"] = size["cuda"]
    try:
        yield
    finally:
        for size, before in zip(sizes, own, strict=True):
            size["cpu"] = before


@contextmanager
def host_tensors_within(
    around: Callable[[], AbstractContextManager[None]], copied: Callable[[str, int, int], None]
) -> Iterator[None]:
    """Allocate what is for the host within a context: planned on a CPU, nothing else tells it from the device.

    What passes through the device takes its buffers there, and isn't copied.

    Args:
        around: returns the context.
        copied: is called with stream, bytes and staging buffer of each copy that a GPU would make.
    """
    allocate, stage = host_memory.host_tensors, host_memory.Staging.on_device

    def within(*arguments: Any) -> list[Tensor]:
        with around():
            return allocate(*arguments)

    @contextmanager
    def staged(
        self: host_memory.Staging,
        pieces: Mapping[str, Tensor],
        *,
        unread: bool = False,
        unchanged: Collection[str] = (),
    ) -> Iterator[dict[str, Tensor]]:
        slot, _ = self.next_slot(pieces)
        copied(TO_DEVICE, 0 if unread else sum(piece.nbytes for piece in pieces.values()), slot)
        yield dict(pieces)
        copied(TO_HOST, sum(piece.nbytes for name, piece in pieces.items() if name not in unchanged), slot)

    host_memory.host_tensors = within  # type: ignore[assignment]
    host_memory.Staging.on_device = staged  # type: ignore[method-assign]
    try:
        yield
    finally:
        host_memory.host_tensors = allocate
        host_memory.Staging.on_device = stage  # type: ignore[method-assign]


def choose_foreach(optimizer: Optimizer) -> None:
    """Let an optimizer update its parameters all at once, as it would on CUDA where nobody chose."""
    for group in optimizer.param_groups:
        other = group.get("fused") or group.get("differentiable")
        if "foreach" in group and group["foreach"] is None and not other:
            group["foreach"] = True


def fill_history(optimizer: Optimizer) -> bool:
    """Let LBFGS remember as many directions as it will after some steps; return whether it is that optimizer.

    How many it has after a step depends on the loss; on tensors without data it would never have one.
    """
    if not isinstance(optimizer, torch.optim.LBFGS):
        return False
    group = optimizer.param_groups[0]
    flat = [torch.cat([p.detach().flatten() for p in group["params"]]) for _ in range(2 * group["history_size"] + 2)]
    size = group["history_size"]
    one = flat[0].new_ones(())
    optimizer.state[group["params"][0]].update(
        func_evals=1,
        n_iter=1,
        d=flat[-1],
        prev_flat_grad=flat[-2],
        t=group["lr"],
        old_dirs=flat[:size],
        old_stps=flat[size:-2],
        ro=[one.clone() for _ in range(size)],
        H_diag=one,
        prev_loss=1.0,
    )
    return True
