"""Causal attention within a window of tokens; memory and time grow linearly with the tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F


def sliding_window_attention(
    query: Tensor, key: Tensor, value: Tensor, window: int, *, scale: float | None = None
) -> Tensor:
    """Return attention in which each token attends to itself and the ``window - 1`` tokens before it (Longformer).

    Each block of ``window`` queries attends to two blocks of keys by ``scaled_dot_product_attention``, and so by a
    fused kernel where there is one. FlexAttention isn't used: it has no backward on a CPU (torch 2.13), and doesn't run
    while operators are counted.

    Args:
        query: (batch, heads, tokens, head width).
        key: (batch, key heads, tokens, head width); the key heads divide the heads.
        value: as key.
        window: tokens, at least 1.
        scale: factor of the products; None: 1 / sqrt(head width).

    Raises:
        ValueError: shapes don't fit together, or the window is below 1.

    >>> x = torch.randn(1, 2, 10, 4)
    >>> alone = sliding_window_attention(x, x, x, window=1)
    >>> torch.allclose(alone, x)
    True
    """
    if window < 1:
        raise ValueError(f"window={window}: write at least 1")
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    heads_fit = query.dim() == key.dim() == 4 and query.shape[1] % key.shape[1] == 0
    if not heads_fit or key.shape[:3] != value.shape[:3] or query.shape[::2] != key.shape[::2]:
        raise ValueError(
            f"query, key, value {shapes}: write (batch, heads, tokens, width) each, of as many tokens, with key heads"
            " that divide the heads"
        )
    tokens = query.shape[2]
    attention: Callable[..., Tensor] = partial(F.scaled_dot_product_attention, scale=scale)
    groups = query.shape[1] // key.shape[1]
    beginning = (tensor[:, :, :window] for tensor in (query, key, value))
    first = attention(*beginning, is_causal=True, enable_gqa=groups > 1)
    if tokens <= window:
        return first
    padding = (0, 0, 0, -tokens % window)  # no query attends to keys after it
    queries, keys, values = (F.pad(tensor, padding) for tensor in (query, key, value))
    distance = torch.arange(window, device=query.device).unsqueeze(1) + window
    distance = distance - torch.arange(2 * window, device=query.device)  # from a query back to a key
    rest = attention(
        _blocks(queries[:, :, window:], window, window),
        # each head gets its own keys: on CUDA grouped heads with a mask would use the kernel math
        _blocks(keys, 2 * window, window, groups),
        _blocks(values, 2 * window, window, groups),
        attn_mask=(distance >= 0) & (distance < window),
    )
    rest = rest.view(query.shape[0], -1, *rest.shape[1:]).transpose(1, 2).flatten(2, 3)
    return torch.cat([first, rest[:, :, : tokens - window]], 2)


def _blocks(tensor: Tensor, size: int, step: int, groups: int = 1) -> Tensor:
    """Return overlapping blocks of tokens, (batch x blocks, heads x groups, size, width)."""
    blocks = tensor.unfold(2, size, step).permute(0, 2, 1, 4, 3).unsqueeze(3)
    return blocks.expand(-1, -1, -1, groups, -1, -1).flatten(2, 3).flatten(0, 1)
