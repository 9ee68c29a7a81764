"""The attention kernels that CUDA would choose, following ``transformers/cuda/sdp_utils.cpp`` of torch 2.13."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_solo.planner.autocast import HALF, WITHOUT_AUTOCAST

aten = torch.ops.aten


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
    """Scaled dot-product attention by the kernel that CUDA would choose: flash, memory-efficient, or math."""
    width = query.size(-1)
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (t.to(torch.get_autocast_dtype("cpu")) for t in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(query.dtype)
    scale = width**-0.5 if scale is None else scale
    with torch._C._ExcludeDispatchKeyGuard(WITHOUT_AUTOCAST):
        has_heads = query.dim() == key.dim() == value.dim() == 4
        if has_heads and query.dtype in HALF and attn_mask is None and width <= 256 and value.size(-1) == width:
            pad = -width % 8  # the kernel needs multiples of 8
            padded = [F.pad(t, (0, pad)) if pad else t for t in (query, key, value)]
            out: Tensor = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0]
            return out[..., :width] if pad else out
        if has_heads and query.dtype in (*HALF, torch.float32):
            if enable_gqa:
                key, value = (t.repeat_interleave(query.size(1) // t.size(1), 1) for t in (key, value))
            bias = _bias(attn_mask, query, key)
            backward = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
            return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
                query, key, value, bias, backward, dropout_p, is_causal, scale=scale
            )[0]
        return math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def math_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Scaled dot-product attention by matrix products, which keeps all scores; arguments as `fused_attention`."""
    out: Tensor = aten._scaled_dot_product_attention_math(*args, **kwargs)[0]
    return out


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return a mask in the form of the memory-efficient kernel: floats, full shape, rows of a multiple of 16 bytes."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    pad = -mask.size(-1) % (16 // query.element_size())
    if pad:
        mask = F.pad(mask, (0, pad))[..., : mask.size(-1)]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
