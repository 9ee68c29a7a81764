"""Units of a layer's inputs, such as channels or heads, with all numbers that belong to them; and their removal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_solo.nn.forwards import evaluating

Step = Callable[[], Any]
"""Runs one training step, and returns its loss or outputs; it leaves no trace, and repeats random numbers."""
CHANNELS, HEADS = "channels", "heads"
ALONE, SHARED = -1, -2
"""In the place of the number of a unit: no unit depends on it, or all do."""
_SIZES_OUT, _SIZES_IN = ("out_features", "out_channels", "nf"), ("in_features", "in_channels", "nx")


class Slice(NamedTuple):
    """The numbers of a tensor that belong to units."""

    owner: str  # qualified name of the module that has it
    name: str  # of the parameter or buffer there
    dim: int  # dimension along which units are removed
    unit: Tensor  # int64 of the dimension's size: number of the unit of each index, or `SHARED` where it stays

    @property
    def path(self) -> str:
        """Qualified name of the tensor."""
        return f"{self.owner}.{self.name}" if self.owner else self.name


@dataclass
class Structure:
    """Units that can be removed: the inputs of a layer, with the outputs of layers that they are computed from."""

    layer: str  # qualified name of the layer
    kind: str  # "channels" or "heads"
    units: int  # number of them
    layers: tuple[str, ...]  # qualified names of all layers that become smaller
    slices: tuple[Slice, ...]  # the numbers that belong to the units
    # qualified name of an attribute -> its value for each unit, as the number of heads
    numbers: dict[str, int] = field(default_factory=dict)

    def scores(self, module: nn.Module) -> Tensor:
        """Return the norm of each unit's weights, fp32."""
        total = torch.zeros(self.units)
        for each in self.slices:
            weight = tensor_of(module, each)
            if isinstance(weight, nn.Parameter) and weight.ndim > 1:
                others = [dim for dim in range(weight.ndim) if dim != each.dim]
                squares = weight.detach().float().square().sum(others).cpu()
                held = each.unit >= 0
                total.index_add_(0, each.unit[held], squares[held])
        return total.sqrt()


def tensor_of(module: nn.Module, each: Slice) -> Tensor:
    """Return the parameter or buffer of a slice."""
    tensor: Tensor = getattr(module.get_submodule(each.owner), each.name)
    return tensor


# --- removing units ---


@dataclass
class Removal:
    """What was removed from a module, and how to put it back.

    Attributes:
        indices: qualified name of a parameter -> dimension and kept indices of each of its slices.
        sizes: qualified name of each tensor that is smaller -> its shape.
        numbers: qualified name of an attribute -> its new value.
    """

    indices: dict[str, list[tuple[int, Tensor]]] = field(default_factory=lambda: defaultdict(list))
    sizes: dict[str, list[int]] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    _before: list[tuple[Any, str, Any]] = field(default_factory=list)

    def undo(self) -> None:
        """Put everything back."""
        for owner, name, value in reversed(self._before):
            setattr(owner, name, value)

    def set_number(self, module: nn.Module, path: str, value: int) -> None:
        """Change an attribute."""
        part, _, name = path.rpartition(".")
        owner = module.get_submodule(part)
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)
        self.numbers[path] = value

    def keep(self, module: nn.Module, each: Slice, kept: Tensor) -> None:
        """Keep units of a tensor, by a bool for each."""
        tensor = tensor_of(module, each)
        is_kept = (each.unit < 0) | kept[each.unit.clamp(min=0)]
        index = is_kept.nonzero()[:, 0]
        before = tensor.shape[each.dim]
        smaller = tensor.data.index_select(each.dim, index.to(tensor.device)).contiguous()
        self.sizes[each.path] = list(smaller.shape)
        owner = module.get_submodule(each.owner)
        if isinstance(tensor, nn.Parameter):
            self._before.append((tensor, "data", tensor.data))
            tensor.data, tensor.grad = smaller, None
            self.indices[each.path].append((each.dim, index))
        else:  # another object, since copies of the present one have its shape
            self._before.append((owner, each.name, tensor))
            setattr(owner, each.name, smaller)
        for name in _size_names(owner, each, before):
            self.set_number(module, f"{each.owner}.{name}" if each.owner else name, len(index))


def remove(module: nn.Module, structures: Iterable[Structure], kept: Mapping[str, Tensor]) -> Removal:
    """Remove units of a module; parameters stay the same objects.

    Args:
        module: the module.
        structures: of the module.
        kept: layer of a structure -> bool for each of its units.
    """
    removal = Removal()
    for structure in structures:
        mask = kept[structure.layer]
        for each in structure.slices:
            removal.keep(module, each, mask)
        for path, number in structure.numbers.items():
            removal.set_number(module, path, number * int(mask.sum()))
    return removal


def _size_names(owner: nn.Module, each: Slice, size: int) -> list[str]:
    """Return the attributes of a tensor's module that hold the size of its dimension."""
    if is_layer(owner):
        if each.name != "weight":
            return []
        names = _SIZES_OUT if each.dim == weight_dims(owner)[0] else _SIZES_IN
        return [name for name in names if name in vars(owner)]
    if not type(owner).__module__.startswith("torch.nn."):  # torch's attention isn't while heads are removed
        return []
    if isinstance(owner, nn.modules.conv._ConvTransposeNd) and owner.groups == 1:
        return ["out_channels"]  # its inputs may have the same size
    return [name for name, value in vars(owner).items() if type(value) is int and value == size]


# --- layers ---


def is_layer(part: nn.Module) -> bool:
    """Return whether a module is a linear layer or a convolution that mixes all its channels."""
    if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return part.groups == 1
    return isinstance(part, nn.Linear) or (type(part).__name__ == "Conv1D" and hasattr(part, "nf"))


def weight_dims(layer: nn.Module) -> tuple[int, int]:
    """Return the dimensions of outputs and of inputs of a layer's weight."""
    return (1, 0) if type(layer).__name__ == "Conv1D" else (0, 1)


def channel_axis(layer: nn.Module, x: Tensor) -> int:
    """Return the dimension of the channels of a layer's inputs or outputs."""
    if isinstance(layer, nn.modules.conv._ConvNd):
        return x.ndim - 1 - len(layer.kernel_size)
    return x.ndim - 1


@contextmanager
def hooked(layers: Mapping[str, nn.Module], hook: Callable[[str, Any, Tensor, Tensor], None]) -> Iterator[None]:
    """Call ``hook(name, layer, input, output)`` after each layer."""
    with ExitStack() as stack:
        for name, layer in layers.items():

            def after(layer: Any, args: Any, kwargs: Any, y: Any, name: str = name) -> None:
                hook(name, layer, args[0] if args else next(iter(kwargs.values())), y)

            stack.callback(layer.register_forward_hook(after, with_kwargs=True).remove)
        yield


@contextmanager
def as_evaluated(module: nn.Module) -> Iterator[None]:
    """Make all parameters require gradients, and all layers compute as in evaluation."""
    flags = [(p, p.requires_grad) for p in module.parameters() if p.is_floating_point()]
    for p, _ in flags:
        p.requires_grad_(True)
    try:
        with evaluating(module), torch.enable_grad():
            yield
    finally:
        for p, flag in flags:
            p.requires_grad_(flag)


def tracked(value: Any) -> list[Tensor]:
    """Return the tensors in a step's result that have a gradient."""
    leaves = tree_leaves(value)
    return [each for each in leaves if isinstance(each, Tensor) and each.grad_fn is not None]
