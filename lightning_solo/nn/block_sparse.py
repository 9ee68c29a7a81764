"""Block-sparse attention: memory and time grow with the number of chosen blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Tensor | Sequence[Any],
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return attention in which each block of queries attends to some blocks of keys (Child et al. 2019).

    The keys and values of a block of queries are copied together. Blocks of queries with equally many keys run at once,
    by ``scaled_dot_product_attention``, and so by a fused kernel where there is one. Backward needs the copies: each
    block of keys is saved once per block of queries that attends to it, unless the model's block is recomputed.
    FlexAttention isn't used, for the reasons that ``sliding_window_attention`` gives.

    Args:
        query: (batch, heads, tokens, head width).
        key: (batch, key heads, key tokens, head width); the key heads divide the heads.
        value: as key.
        layout: (query blocks, key blocks) or (heads, query blocks, key blocks) of bool: whether a block of queries
            attends to a block of keys. It is a tensor on the CPU, or nested sequences, which a plan can read.
        causal: each token attends only to itself and to tokens before it, within these blocks.
        scale: factor of the products; None: 1 / sqrt(head width).

    Returns:
        (batch, heads, tokens, head width).

    Raises:
        ValueError: shapes don't fit together, or a block of queries attends to nothing.

    >>> x = torch.randn(1, 2, 8, 4)
    >>> halves = block_sparse_attention(x, x, x, [[True, False], [False, True]])
    >>> torch.allclose(halves[:, :, :4], F.scaled_dot_product_attention(*[x[:, :, :4]] * 3), atol=1e-6)
    True
    """
    chosen = _checked(query, key, value, layout, causal)
    batch, heads, tokens, _ = query.shape
    repeat = heads // key.shape[1]
    queries, keys, values = (
        tensor.reshape(batch, tensor.shape[1] * blocks, -1, tensor.shape[3])  # (batch, heads x blocks, block, width)
        for tensor, blocks in zip((query, key, value), (chosen.shape[1], *[chosen.shape[2]] * 2), strict=True)
    )
    block = queries.shape[2]
    outputs, order = [], []
    for rows, columns, ends_in_itself in _equal_rows(chosen, repeat, causal):
        row = torch.from_numpy(rows).to(query.device)
        column = torch.from_numpy(columns.ravel()).to(query.device)
        mask = None
        if ends_in_itself:  # all of earlier blocks, and earlier tokens of its own
            mask = torch.ones(block, columns.shape[1] * block, dtype=torch.bool, device=query.device)
            mask = mask.tril((columns.shape[1] - 1) * block)
        some_keys, some_values = (
            each.index_select(1, column).reshape(batch, len(rows), -1, each.shape[3]) for each in (keys, values)
        )
        outputs.append(
            F.scaled_dot_product_attention(
                queries.index_select(1, row), some_keys, some_values, attn_mask=mask, scale=scale
            )
        )
        order.append(rows)
    place = torch.from_numpy(np.argsort(np.concatenate(order))).to(query.device)
    return torch.cat(outputs, 1).index_select(1, place).reshape(batch, heads, tokens, value.shape[3])


def _checked(query: Tensor, key: Tensor, value: Tensor, layout: Any, causal: bool) -> Any:
    """Return the layout as an array of bool, (heads, query blocks, key blocks)."""
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    fit = query.dim() == key.dim() == value.dim() == 4 and key.shape[:3] == value.shape[:3]
    fit = fit and query.shape[0] == key.shape[0] and query.shape[3] == key.shape[3]
    if not fit or query.shape[1] % key.shape[1] or (causal and query.shape[2] != key.shape[2]):
        raise ValueError(
            f"query, key, value {shapes}: write (batch, heads, tokens, width) each, with key heads that divide the"
            f" heads{', of as many tokens where causal' if causal else ''}"
        )
    try:
        chosen = np.asarray(layout.numpy(force=True) if isinstance(layout, Tensor) else layout)
    except ValueError:
        raise ValueError("layout: its rows are of different lengths; write one bool for each block of keys") from None
    heads, tokens, key_tokens = query.shape[1], query.shape[2], key.shape[2]
    if chosen.dtype != np.bool_ or chosen.ndim not in (2, 3) or (chosen.ndim == 3 and chosen.shape[0] != heads):
        raise ValueError(
            f"layout {chosen.shape} of {chosen.dtype}: write (query blocks, key blocks), or those of each of the"
            f" {heads} heads, of bool"
        )
    chosen = np.broadcast_to(chosen, (heads, *chosen.shape[-2:]))
    rows, columns = chosen.shape[1:]
    if tokens % rows or key_tokens % columns or (causal and rows != columns):
        raise ValueError(
            f"layout of {rows} x {columns} blocks, and {tokens} and {key_tokens} tokens: numbers of blocks must divide"
            f" the tokens{', and be equal where causal' if causal else ''}"
        )
    chosen = np.tril(chosen) if causal else chosen
    empty = np.argwhere(~chosen.any(2))
    if len(empty):
        head, row = empty[0]
        raise ValueError(f"layout: block {row} of queries attends to nothing in head {head}; choose a block of keys")
    return chosen


def _equal_rows(chosen: Any, repeat: int, causal: bool) -> Iterator[tuple[Any, Any, bool]]:
    """Yield (query blocks, their key blocks, whether the last key block is the query block itself) with as many keys.

    Blocks are numbered over all heads; ``repeat`` heads share their keys.
    """
    heads, rows, columns = chosen.shape
    own = np.diagonal(chosen, axis1=1, axis2=2) if causal else np.zeros((heads, rows), dtype=bool)
    numbers = chosen.sum(2)
    for number in np.unique(numbers):
        for ends_in_itself in (False, True):
            head, row = np.nonzero((numbers == number) & (own == ends_in_itself))
            if len(head):
                places = np.nonzero(chosen[head, row])[1].reshape(-1, number)
                yield head * rows + row, places + (head // repeat * columns)[:, None], ends_in_itself
