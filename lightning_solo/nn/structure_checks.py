"""Checks of channels and heads that are to be removed: the module computes as with zeros in their place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.nn.structure import (
    CHANNELS,
    HEADS,
    Step,
    Structure,
    as_evaluated,
    channel_axis,
    hooked,
    remove,
    tensor_of,
    tracked,
)

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_LOOSE = 5e-2  # of outputs in 16 bits


def checked(
    module: nn.Module, step: Step, structures: Sequence[Structure], kept: Mapping[str, Tensor]
) -> tuple[list[Structure], dict[str, str]]:
    """Return the structures of which units can be removed, with the attributes to change; and why of others not.

    Outputs of layers and the loss are compared with those of a module in which these units' inputs are zero.

    Args:
        module: the module, which is unchanged.
        step: a training step on one batch.
        structures: of the module.
        kept: layer of a structure -> bool for each of its units.
    """
    good: list[Structure] = []
    reasons: dict[str, str] = {}
    for together in ([*structures], *([each] for each in structures)):
        if not together or (len(together) == 1 and together[0].layer in {each.layer for each in good}):
            continue
        expected = _outputs(module, step, together, kept)
        for attempt in _attempts(module, together):
            removal = remove(module, attempt, kept)
            try:
                actual = _outputs(module, step, together, {})
                difference = _difference(expected, actual)
            except Exception as error:  # whatever the user's forward raises with other shapes
                difference = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            finally:
                removal.undo()
            if difference is None:
                good += attempt
                break
        else:
            if len(together) == 1:
                reasons[together[0].layer] = f"without some of its {together[0].kind} the forward fails ({difference})"
        if len(good) == len(structures):
            break
    return good, reasons


def _outputs(
    module: nn.Module, step: Step, structures: Sequence[Structure], kept: Mapping[str, Tensor]
) -> dict[str, list[Tensor]]:
    """Return the outputs of the structures' layers, and the loss; with inputs of removed units set to zero."""
    outputs: dict[str, list[Tensor]] = defaultdict(list)
    layers = {each.layer: module.get_submodule(each.layer) for each in structures}
    with ExitStack() as stack:
        for each in structures:
            if each.layer in kept:
                mask = kept[each.layer][each.slices[0].unit]
                stack.callback(layers[each.layer].register_forward_pre_hook(_Zeros(mask), with_kwargs=True).remove)
        stack.enter_context(hooked(layers, lambda name, layer, x, y: outputs[name].append(y.detach().clone())))
        stack.enter_context(as_evaluated(module))
        outputs[""] = [each.detach() for each in tracked(step())]
    return outputs


class _Zeros:
    """Sets channels of a layer's input to zero."""

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept

    def __call__(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (self._masked(layer, args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: self._masked(layer, kwargs[name])}

    def _masked(self, layer: nn.Module, x: Tensor) -> Tensor:
        shape = [1] * x.ndim
        shape[channel_axis(layer, x)] = -1
        return torch.where(self.kept.to(x.device).view(shape), x, 0)


def _difference(expected: Mapping[str, list[Tensor]], actual: Mapping[str, list[Tensor]]) -> str | None:
    for name, values in expected.items():
        for before, after in zip(values, actual[name], strict=True):
            if before.shape != after.shape:
                return f"{name or 'the loss'} has the shape {tuple(after.shape)} instead of {tuple(before.shape)}"
            bound = _TOLERANCE.get(before.dtype, _LOOSE) * float(before.abs().max().clamp(min=1e-6))
            if before.numel() and not bool(((after - before).abs() <= bound).all()):
                return f"{name or 'the loss'} differs"
    return None


def _attempts(module: nn.Module, structures: Sequence[Structure]) -> Iterator[list[Structure]]:
    """Yield the structures with different choices of attributes to change, such as numbers of heads."""
    choices = [_number_choices(module, each) for each in structures]
    for number in range(4):
        pairs = zip(structures, choices, strict=True)
        yield [replace(each, numbers=numbers[number]) for each, numbers in pairs]


def _number_choices(module: nn.Module, structure: Structure) -> list[dict[str, int]]:
    """Return attributes by their names; numbers of heads, or unambiguous widths; these with all widths; and none.

    Names come first, since another attribute, such as a number of steps, may equal a width. The attributes are those of
    parts that have the layers, within the smallest part that has all of them.
    """
    parents = [name.split(".")[:-1] for name in structure.layers]
    depth = next(n for n in range(min(map(len, parents)), -1, -1) if len({tuple(each[:n]) for each in parents}) == 1)
    paths = {".".join(each[:n]) for each in parents for n in range(depth, len(each) + 1)}
    cut = {(each.path, each.dim): len(each.unit) for each in structure.slices}
    shapes = {each.path: tensor_of(module, each).shape for each in structure.slices}
    others = {size for path, shape in shapes.items() for dim, size in enumerate(shape) if (path, dim) not in cut}
    named: dict[str, int] = {}
    sure: dict[str, int] = {}
    widths: dict[str, int] = {}
    for path in sorted(paths):
        for name, value in vars(module.get_submodule(path)).items():
            if type(value) is not int or value % structure.units or value == 0:
                continue
            is_size = any(word in name for word in ("dim", "size", "features", "width", "hidden", "channels"))
            is_number = structure.kind == HEADS and "head" in name and not is_size
            if is_number or (structure.kind == CHANNELS and value in {*cut.values()} - others):
                sure[f"{path}.{name}".lstrip(".")] = value // structure.units
                if is_number or (is_size and "batch" not in name):
                    named[f"{path}.{name}".lstrip(".")] = value // structure.units
            elif value in cut.values():
                widths[f"{path}.{name}".lstrip(".")] = value // structure.units
    return [named, sure, {**sure, **widths}, {}]
