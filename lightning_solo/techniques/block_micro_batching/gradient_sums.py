"""Sum the gradients that a block's 16-bit weights get from several micro-batches in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.nn.recomputation import is_gathered_on_use


class BlockSums:
    """Gives the weights of a block a node of autograd's graph for each micro-batch.

    Autograd itself would add gradients in the type of the weight, and a sum in bf16 stops growing at 256 times its
    addends. Weights in fp32, tensors of other classes and weights that are gathered on use keep their own sum.
    """

    def __init__(self, block: nn.Module) -> None:
        wholes: dict[nn.Parameter, tuple[Tensor, _Sum]] = {}
        self._places: list[tuple[dict[str, Any], str, nn.Parameter, tuple[Tensor, _Sum]]] = []
        for part in block.modules() if not is_gathered_on_use(block) else ():
            for name, p in part._parameters.items():
                if type(p) is nn.Parameter and p.requires_grad and p.dtype in (torch.bfloat16, torch.float16):
                    if p not in wholes:
                        total = _Sum()
                        wholes[p] = _Whole.apply(p, total), total  # type: ignore[no-untyped-call]
                    self._places.append((part._parameters, name, p, wholes[p]))

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Put an alias of each weight into its place for the forward of one micro-batch."""
        aliases = {p: _Addend.apply(*whole) for _, _, p, whole in self._places}  # type: ignore[no-untyped-call]
        try:
            for register, name, p, _ in self._places:
                register[name] = aliases[p]
            yield
        finally:
            for register, name, p, _ in self._places:
                register[name] = p


class _Sum:
    """The sum of the gradients that have come, in fp32."""

    def __init__(self) -> None:
        self.total: Tensor | None = None


class _Whole(torch.autograd.Function):
    """A weight. Its gradient is the sum of its addends."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: _Sum) -> Tensor:
        ctx.total, ctx.dtype = total, weight.dtype
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: None) -> Any:
        total, ctx.total.total = ctx.total.total, None
        return None if total is None else total.to(ctx.dtype), None


class _Addend(torch.autograd.Function):
    """The weight of one micro-batch. Its gradient goes to the sum, and no further."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: _Sum) -> Tensor:
        ctx.total = total
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is not None and ctx.total.total is None:
            ctx.total.total = gradient.float()
        elif gradient is not None:
            ctx.total.total += gradient
        return None, None
