"""Nodes of autograd's graph, by the order in which they were made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import torch


def next_node() -> int:
    """Return the number of the next node of autograd's graph in this thread."""
    with torch.enable_grad():
        node: Any = torch.ones((), requires_grad=True).clone().grad_fn
    return int(node._sequence_nr()) + 1


def reached(nodes: Iterable[Any], inside: Callable[[int], bool], ends: Set[int]) -> Iterator[Any]:
    """Yield the first nodes for which ``inside`` is true that gradients of ``nodes`` reach.

    Args:
        nodes: where backward begins; None for a tensor without a graph.
        inside: function of a node's number. What these nodes depend on isn't searched.
        ends: numbers of nodes that aren't searched either.
    """
    ahead, seen = [*nodes], set(ends)
    while ahead:
        node = ahead.pop()
        if node is None or (number := node._sequence_nr()) in seen:
            continue
        if node.next_functions:  # those that accumulate gradients have no number of their own
            seen.add(number)
        if inside(number):
            yield node
        else:
            ahead += [child for child, _ in node.next_functions]
