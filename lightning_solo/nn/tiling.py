"""Run a part of a model in tiles of tokens, forward and backward, with one tile's activations at a time.

A part saves only its input, and backward computes each tile again, as TiledMLP in Arctic's long-sequence training does
(arXiv 2506.13996).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase

from lightning_solo.errors import ConflictError, SoloError
from lightning_solo.nn.forward_state import ForwardState
from lightning_solo.nn.forwards import original_forward, record_of, replace_forward


@dataclass
class Tiling:
    """The settings and state of a tiled part."""

    name: str  # of the part, for messages
    tile_tokens: int  # tokens per tile
    checked: bool = False  # whether a check has shown that the part treats each token independently
    most_tokens: int = 0  # largest number of tokens in a forward with gradients

    def conflict(self, part: nn.Module, what: str) -> ConflictError:
        """Return the error that refuses a part, with the remedy."""
        return ConflictError(
            f"tiled MLP: {self.name!r} ({type(part).__name__}) {what}, so it can't be computed in tiles of tokens;"
            " write callback.tiled_mlp.parts=[ClassName] of classes that act on each token alone"
        )


def tile_parts(parts: Mapping[str, nn.Module], tile_tokens: int) -> dict[str, Tiling]:
    """Make each part compute ``tile_tokens`` tokens at a time, until `restore_forwards`; return name -> tiling.

    A part takes tensors ``(..., tokens, width)`` of equal leading sizes, and returns one. Its first forward with
    gradients compares the last rows of a tile with the same rows alone.

    Args:
        parts: name -> part; none is inside another.
        tile_tokens: tokens of a tile, over all sequences of a batch; intermediate results exist for one tile at a time.

    Raises:
        ConflictError: in forward, if a part mixes tokens, uses other modules' parameters, or takes or returns anything
            else.
    """
    tilings = {name: Tiling(name, tile_tokens) for name in parts}
    for name, part in parts.items():
        replace_forward(part, forward, tilings[name])
    return tilings


def forward(part: nn.Module, *tensors: Any, **kwargs: Any) -> Any:
    """Run a part in tiles."""
    tiling, original = record_of(part, Tiling), original_forward(part, Tiling)
    if tiling is None:
        return original(*tensors, **kwargs)
    # a compiler would fail at the recomputation, and unroll the loop over tiles
    run: Callable[..., Any] = _run
    if torch.compiler.is_compiling():
        run = torch.compiler.disable(_run)  # type: ignore[no-untyped-call]
    return run(part, tiling, original, tensors, kwargs)


def _run(part: nn.Module, tiling: Tiling, original: Callable[..., Any], tensors: tuple[Any, ...], kwargs: Any) -> Any:
    if (
        not tensors
        or kwargs
        or not all(isinstance(t, Tensor) and t.shape[:-1] == tensors[0].shape[:-1] for t in tensors)
    ):
        raise tiling.conflict(part, "takes other arguments than tensors (..., tokens, width) by position")
    shape = tensors[0].shape[:-1]
    tokens, differentiable = shape.numel(), torch.is_grad_enabled()
    if differentiable:
        tiling.most_tokens = max(tiling.most_tokens, tokens)
    if tokens <= tiling.tile_tokens:
        return original(*tensors)
    rows = [tensor.reshape(*[1] * (len(shape) - 1), tokens, tensor.shape[-1]) for tensor in tensors]
    if not tiling.checked:
        original = partial(_first_run, part, tiling, original)
    if differentiable and not tiling.checked and not isinstance(rows[0], FakeTensor):
        tiling.checked = True
        _check_rows(part, tiling, original, rows)
    if not differentiable:
        output = _in_tiles(original, rows, tiling.tile_tokens)
    else:
        parameters = [p for p in part.parameters() if p.requires_grad]
        call = _Call(part, tiling, original, parameters)
        output = _Tiled.apply(call, *rows, *parameters)  # type: ignore[no-untyped-call]
    return output.view(*shape, output.shape[-1])


def _first_run(part: nn.Module, tiling: Tiling, original: Callable[..., Any], *tensors: Tensor) -> Any:
    """Run an unchecked part, and refuse it if it fails, since it may require a certain shape."""
    try:
        return original(*tensors)
    except (SoloError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise tiling.conflict(part, f"fails on tokens of the shape {shapes} ({error})") from error


@dataclass
class _Call:
    part: nn.Module
    tiling: Tiling
    original: Callable[..., Any]
    parameters: list[nn.Parameter]


class _Tiled(torch.autograd.Function):
    """A part's output, (..., tokens, width). Backward runs forward and backward tile by tile."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        rows = tensors[: len(tensors) - len(call.parameters)]
        ctx.call, ctx.state = call, ForwardState(row.device for row in rows)
        ctx.save_for_backward(*rows)  # not the weights: in recomputed blocks they would come back as other tensors
        return _in_tiles(call.original, rows, call.tiling.tile_tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        call, needed, rows = ctx.call, ctx.needs_input_grad[1:], ctx.saved_tensors
        parameters = call.parameters
        of_rows = [torch.empty_like(r) if n else None for r, n in zip(rows, needed, strict=False)]
        sums: list[Tensor | None] = [None] * len(parameters)
        with ctx.state:
            for tile in _tiles(rows[0], call.tiling.tile_tokens):
                inputs = [r[..., tile, :].detach().requires_grad_(n) for r, n in zip(rows, needed, strict=False)]
                with torch.enable_grad():
                    # views: hooks that count operators by module can't stand leaves in autograd.grad
                    output = call.original(*(tensor.view_as(tensor) for tensor in inputs))
                _check_leaves(call, output, [*inputs, *parameters])
                wanted = [tensor for tensor in inputs if tensor.requires_grad]
                gradients = torch.autograd.grad(
                    output, [*wanted, *parameters], gradient[..., tile, :].to(output.dtype), allow_unused=True
                )
                for whole, part in zip((w for w in of_rows if w is not None), gradients, strict=False):
                    whole[..., tile, :] = 0 if part is None else part
                sums = [_add(total, part) for total, part in zip(sums, gradients[len(wanted) :], strict=True)]
        totals = [None if t is None else t.to(p.dtype) for t, p in zip(sums, parameters, strict=True)]
        return None, *of_rows, *totals


def _in_tiles(function: Callable[..., Any], rows: Iterable[Tensor], tile_tokens: int) -> Tensor:
    rows = [tensor.detach() for tensor in rows]
    output = torch.empty(0)
    for tile in _tiles(rows[0], tile_tokens):
        part = function(*(tensor[..., tile, :] for tensor in rows))
        if tile.start == 0:
            output = part.new_empty(*rows[0].shape[:-1], part.shape[-1])
        output[..., tile, :] = part
    return output


def _tiles(rows: Tensor, tile_tokens: int) -> Iterator[slice]:
    return (slice(start, start + tile_tokens) for start in range(0, rows.shape[-2], tile_tokens))


def _add(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Return a sum in at least fp32: in 16 bits each tile would round it."""
    if part is None:
        return total
    if total is None:  # a copy: two parameters may have got the same tensor
        return part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
    return total.add_(part)


def _check_rows(part: nn.Module, tiling: Tiling, original: Callable[..., Any], rows: list[Tensor]) -> None:
    """Raise ConflictError if the last rows of a tile differ from the same rows computed alone."""
    rows = [tensor.detach() for tensor in rows]  # else counters of operators look for their graph
    count = min(tiling.tile_tokens, rows[0].shape[-2])
    last = max(1, count // 16)  # few, so that an average over tokens would change
    kept = [(m, m.training) for m in part.modules() if not isinstance(m, _NormBase)]
    buffers = [(buffer, buffer.clone()) for buffer in part.buffers()]
    try:
        for module, _ in kept:
            module.training = False  # without dropout
        with torch.no_grad():
            whole = original(*(tensor[..., :count, :] for tensor in rows))
            if not isinstance(whole, Tensor) or whole.shape[:-1] != rows[0][..., :count, :].shape[:-1]:
                raise tiling.conflict(part, "doesn't return one tensor (..., tokens, width)")
            alone = original(*(tensor[..., count - last : count, :] for tensor in rows))
    finally:
        for module, training in kept:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    same = whole[..., count - last :, :].float()
    low = torch.is_autocast_enabled(whole.device.type) or min(whole.itemsize, rows[0].itemsize) < 4
    tolerance = 2e-2 if low else 1e-3
    if not torch.allclose(alone.float(), same, rtol=0.0, atol=tolerance * float(same.abs().max()), equal_nan=True):
        raise tiling.conflict(part, "mixes tokens: the same rows alone gave another output")


def _check_leaves(call: _Call, output: Tensor, known: list[Tensor]) -> None:
    """Raise ConflictError if the part uses parameters of other modules, whose gradients would be lost."""
    ids = {id(tensor) for tensor in known}
    nodes, seen = [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and id(variable) not in ids:
            raise call.tiling.conflict(call.part, "uses parameters that aren't its own")
        nodes += [below for below, _ in node.next_functions]
