"""Elements of a module's parameters and bytes of its buffers."""

from __future__ import annotations

from torch import nn

from lightning_solo.cards.footprint import Sizes


def sizes_of(module: nn.Module) -> Sizes:
    """Return the sizes of a module's parameters and buffers."""
    parameters = list(module.parameters())
    return Sizes(
        tuple(p.numel() for p in parameters if p.requires_grad),
        tuple(p.numel() for p in parameters if not p.requires_grad),
        sum(b.numel() * b.element_size() for b in module.buffers()),
    )
