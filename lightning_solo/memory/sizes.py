"""Elements of a module's parameters, bytes of its buffers, and the bytes of both that are on the host."""

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


def host_bytes_of(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers that are on the host."""
    return sum(t.untyped_storage().nbytes() for t in (*module.parameters(), *module.buffers()) if t.is_cpu)
