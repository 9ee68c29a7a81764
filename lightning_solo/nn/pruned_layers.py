"""Modules from which channels or heads were removed, on torch alone; the ``load.py`` of exports has a copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, pad, scaled_dot_product_attention


def shrink(module: nn.Module, structure: dict[str, Any]) -> None:
    """Give a new module the smaller sizes of a trained one; the weights that change are not set.

    Args:
        module: made as for training.
        structure: ``"sizes"``, name of a tensor -> its shapes before and after; and ``"numbers"``, name of an
            attribute -> its value, such as the number of heads.

    Raises:
        ValueError: a tensor is missing, or has neither of its shapes.
    """
    for name, (before, after) in structure.get("sizes", {}).items():
        part, _, own = name.rpartition(".")
        try:
            tensor = getattr(module.get_submodule(part), own)
        except AttributeError:
            raise ValueError(f"the module has no {name}; make it as for training") from None
        if list(tensor.shape) not in (before, after):
            raise ValueError(f"{name} has the shape {list(tensor.shape)}; expected is {before}, as before training")
        if list(tensor.shape) != after:
            tensor.data = tensor.data.new_empty(after)
    for name, value in structure.get("numbers", {}).items():
        part, _, own = name.rpartition(".")
        setattr(module.get_submodule(part), own, value)
    keep_head_width(module)


class PrunedAttention(nn.MultiheadAttention):
    """torch's attention with any number of heads, whose width is that of its weights; torch divides by the number."""

    _qkv_same_embed_dim = property(lambda self: False)  # keeps layers off torch's fast path

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and the attention weights; arguments and shapes are `torch.nn.MultiheadAttention`'s."""
        is_batched = query.dim() == 3
        inputs = [x if not is_batched or self.batch_first else x.transpose(0, 1) for x in (query, key, value)]
        q, k, v = self._projected([x if is_batched else x[None] for x in inputs], is_self=query is key is value)
        batch, length, keys = *q.shape[:2], k.shape[1]
        if self.bias_k is not None:
            k, v = _longer(k, self.bias_k), _longer(v, self.bias_v)
        if self.add_zero_attn:
            k, v = _longer(k, 0), _longer(v, 0)
        q, k, v = (x.view(batch, x.shape[1], self.num_heads, -1).transpose(1, 2) for x in (q, k, v))
        is_causal = is_causal and key_padding_mask is None and not need_weights
        mask = None
        if attn_mask is not None and not is_causal:
            each = (batch, self.num_heads) if attn_mask.dim() == 3 else (1, 1)
            mask = _added(attn_mask, q.dtype).view(*each, length, keys)
        if key_padding_mask is not None:
            padding = _added(key_padding_mask, q.dtype).view(batch, 1, 1, keys)
            mask = padding if mask is None else mask + padding
        mask = None if mask is None else pad(mask, (0, k.shape[2] - keys))
        share = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.mT * q.shape[-1] ** -0.5
            weights = dropout((scores if mask is None else scores + mask).softmax(-1), share)
            y = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if is_batched else weights[0]
        else:
            y = scaled_dot_product_attention(q, k, v, mask, share, is_causal)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        return (y[0] if not is_batched else y if self.batch_first else y.transpose(0, 1)), weights

    def _projected(self, inputs: list[Tensor], *, is_self: bool) -> tuple[Tensor, ...]:
        if is_self and self.in_proj_weight is not None:
            return linear(inputs[0], self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        apart = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        own = apart if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(map(linear, inputs, own, biases))


def _longer(x: Tensor, row: Any) -> Tensor:
    """Return keys or values (batch, length + 1, width): ``row`` comes last in each sample."""
    return torch.cat([x, x.new_zeros(len(x), 1, x.shape[2]) + row], 1)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add: of minus infinity where a bool one is true."""
    is_bool = mask.dtype == torch.bool
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf")) if is_bool else mask.to(dtype)


def keep_head_width(module: nn.Module, *, everywhere: bool = False) -> None:
    """Make torch's attention compute with fewer heads of the same width, where some were removed or ``everywhere``."""
    part: Any
    for part in module.modules():
        if type(part) in (nn.MultiheadAttention, PrunedAttention):
            is_whole = part.num_heads * part.head_dim == part.embed_dim
            part.__class__ = nn.MultiheadAttention if is_whole and not everywhere else PrunedAttention
    for part in () if everywhere else module.modules():  # whose nested tensors only the fast path takes
        if isinstance(part, nn.TransformerEncoder) and any(type(each) is PrunedAttention for each in part.modules()):
            part.use_nested_tensor = False
