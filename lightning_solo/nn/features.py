"""Features of hidden layers: the outputs of named layers, and their distance from a teacher's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_solo.errors import ConflictError, NothingToDoError, PresetError, listed, nearest
from lightning_solo.memory.category_peaks import is_compiled

OPTION = "callback.distillation.features"
_LEAST = 1e-12  # mean square by which a vector is divided


class Output(NamedTuple):
    """An output of a layer."""

    tensor: Tensor | None  # its features; None if it has none
    kind: str  # name of the output's class
    version: int  # of the tensor as the layer returned it


class Features:
    """Keeps the outputs of named layers while it records, by hooks, until `remove`.

    Attributes:
        kept: name and output of each call of a layer since the recording began.

    Raises:
        PresetError: a layer doesn't exist.
        ConflictError: a layer is compiled, or inside a compiled one.
    """

    def __init__(self, module: nn.Module, names: Iterable[str], whose: str) -> None:
        self.kept: list[tuple[str, Output]] = []
        self._is_on = False
        layers = {name: layer_of(module, name, whose) for name in names}
        self._hooks = [layer.register_forward_hook(partial(self._leave, name)) for name, layer in layers.items()]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep outputs within this context; a recomputation in backward is outside of it."""
        self.kept, self._is_on = [], True
        try:
            yield
        finally:
            self.kept, self._is_on = [], False

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def since(self, begin: int) -> dict[str, list[Output]]:
        """Return name -> outputs of a layer, without the first ``begin`` of all layers."""
        found: dict[str, list[Output]] = {}
        for name, output in self.kept[begin:]:
            found.setdefault(name, []).append(output)
        return found

    def _leave(self, name: str, layer: nn.Module, args: Any, output: Any) -> None:
        if self._is_on:
            tensor = tensor_of(output)
            self.kept.append((name, Output(tensor, type(output).__name__, 0 if tensor is None else tensor._version)))


def tensor_of(output: Any) -> Tensor | None:
    """Return a layer's output itself, the first of several, or a model's last hidden state; None for anything else."""
    if isinstance(output, Mapping):
        output = output.get("last_hidden_state")
    elif isinstance(output, list | tuple) and output:
        output = output[0]
    is_feature = isinstance(output, Tensor) and output.is_floating_point() and output.dim() >= 2
    return output if is_feature else None


def layer_of(module: nn.Module, name: str, whose: str) -> nn.Module:
    """Return a layer by its name.

    Raises:
        PresetError: there is none; names the closest.
        ConflictError: it is compiled, or inside a compiled one, so that its hooks are, too.
    """
    layers = {each: part for each, part in module.named_modules(remove_duplicate=False) if each}
    if name not in layers:
        raise PresetError(
            f"{OPTION}: the {whose}, {type(module).__name__}, has no layer {name!r}{nearest(name, layers)}there are"
            f" {listed(layers, 12)}"
        )
    parts = name.split(".")
    for outer in (".".join(parts[:length]) for length in range(len(parts) + 1)):
        part = layers[outer] if outer else module
        if is_compiled(part) and not (outer == name and type(part).__name__ == "OptimizedModule"):
            raise ConflictError(
                f"{OPTION}: {name} of the {whose} belongs to {outer or type(module).__name__}, which is compiled; write"
                " a layer outside of compiled ones, such as the norm after the blocks, or don't compile"
                " (~callback.regional_compilation)"
            )
    layer: nn.Module = layers[name]
    return layer


def feature_of(outputs: Mapping[str, list[Output]], name: str, whose: str) -> Tensor:
    """Return the features of a layer that was called once.

    Raises:
        NothingToDoError: the layer wasn't called.
        ConflictError: it was called several times, returned no tensor, or its output was overwritten.
    """
    found = outputs.get(name, [])
    if not found:
        raise NothingToDoError(
            f"{OPTION}: {name} of the {whose} isn't called as a module within the part that makes the logits; write a"
            " layer that is, such as a block"
        )
    if len(found) > 1:
        raise ConflictError(
            f"{OPTION}: {name} of the {whose} is called {len(found)} times in one forward; write a layer that is called"
            " once, such as the norm after it"
        )
    (output,) = found
    if output.tensor is None:
        raise ConflictError(
            f"{OPTION}: {name} of the {whose} returns {output.kind}, and no tensor (batch, ..., width); write a layer"
            " that returns one"
        )
    if output.tensor._version != output.version:
        raise ConflictError(
            f"{OPTION}: the output of {name} of the {whose} is overwritten in place by a later operation; write the"
            " layer that does so, or inplace=False there"
        )
    return output.tensor


def width_dim(name: str, student: Tensor, teacher: Tensor) -> int:
    """Return the dimension of the width: the last one, or that of the channels of pictures.

    Raises:
        ConflictError: the features differ in another dimension.
    """
    ours, theirs = tuple(student.shape), tuple(teacher.shape)
    differing = [dim for dim, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
    if len(ours) == len(theirs) and differing in ([], [len(ours) - 1]):
        return -1
    if len(ours) == len(theirs) >= 4 and differing == [1]:
        return 1
    raise ConflictError(
        f"{OPTION}: {name} has features of shape {ours}, and the teacher's layer {theirs}; a projection adapts the"
        " width alone, which is the last dimension, or the channels of (batch, channels, height, width); write layers"
        " with the same positions"
    )


def distance(
    student: Tensor, teacher: Tensor, loss: str, counted: Tensor | None = None, projection: Tensor | None = None,
    dim: int = -1,
) -> Tensor:  # fmt: skip
    """Return the distance of features from a teacher's, in fp32: a mean over positions and width.

    ``mse`` is the mean of squared differences (Romero et al. 2015, FitNets, arXiv 1412.6550; Jiao et al. 2020,
    TinyBERT, arXiv 1909.10351). ``normalized`` divides each vector by its root of the mean square before, so that it is
    2 minus 2 times the cosine (as in DistilBERT, arXiv 1910.01108). Equal features give exactly 0.

    Args:
        student: (batch, ..., width), or (batch, width, ...) with ``dim=1``.
        teacher: the same, without a gradient; of another width with a projection.
        loss: ``mse`` or ``normalized``.
        counted: (batch, ...), bool: the positions that count; None for all, as is another shape.
        projection: (teacher's width, student's width).
        dim: of the width.

    >>> x = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    >>> float(distance(x, 2 * x, "mse")), round(float(distance(x, 2 * x, "normalized")), 6)
    (3.5, 0.0)
    """
    ours, theirs = student.movedim(dim, -1), teacher.movedim(dim, -1)
    if projection is not None:
        ours = F.linear(ours.to(projection.dtype), projection)
    exact = torch.promote_types(ours.dtype, torch.float32)
    ours, theirs = ours.to(exact), theirs.to(exact)
    if loss == "normalized":
        ours, theirs = (x * x.square().mean(-1, keepdim=True).clamp(min=_LEAST).rsqrt() for x in (ours, theirs))
    losses = (ours - theirs).square().mean(-1)
    if counted is None or counted.shape != losses.shape:
        return losses.mean()
    return torch.where(counted, losses, 0.0).sum() / counted.sum().clamp(min=1)
