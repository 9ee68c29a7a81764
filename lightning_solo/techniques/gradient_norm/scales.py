"""Norms of gradients and scales of activations, by block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_solo.errors import NothingToDoError, listed
from lightning_solo.memory.category_peaks import is_compiled
from lightning_solo.memory.sharded_tensors import is_sharded, local
from lightning_solo.nn.blocks import repeated_blocks
from lightning_solo.optim.operator_kernels import norm

NAMED = 8
"""Largest number of blocks that a warning names."""


def block_names(module: nn.Module) -> dict[Tensor, str]:
    """Return parameter -> name of its repeated block, or of its own module if it is in none.

    >>> names = block_names(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    >>> list(names.values())
    ['0', '0', '1', '1']
    """
    try:
        blocks = list(repeated_blocks(module))
    except NothingToDoError:
        blocks = []
    names: dict[Tensor, str] = {}
    for name, parameter in module.named_parameters():
        block = next((block for block in blocks if name.startswith(f"{block}.")), None)
        names[parameter] = block or name.rpartition(".")[0] or name
    return names


def norms_of(parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Return parameter -> norm of its gradient or a shard's, in fp32, if it has one; doesn't wait for the device."""
    gradients = {p: p.grad for p in parameters if p.grad is not None}
    values = {p: grad.coalesce().values() if grad.is_sparse else grad for p, grad in gradients.items()}
    return {p: norm(local(value)).float() for p, value in values.items()}


def norms_of_shards(norms: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Return the norms of whole gradients from those of shards; all processes must call it."""
    sharded: list[Any] = [p for p in norms if is_sharded(p)]
    if not sharded:
        return dict(norms)
    squares = torch.stack([norms[p] for p in sharded]).square()
    torch.distributed.all_reduce(squares, group=sharded[0].device_mesh.get_group())
    return {**norms, **dict(zip(sharded, squares.sqrt().unbind(), strict=True))}


def norms_by_block(norms: Mapping[Tensor, Tensor], names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """Return block -> norm of all its gradients, from the norms of single ones."""
    parts: dict[str, list[Tensor]] = {}
    for parameter, value in norms.items():
        parts.setdefault(names.get(parameter, "other"), []).append(value)
    return {name: torch.linalg.vector_norm(torch.stack(values)) for name, values in parts.items()}


def on_host(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return values as numbers; waits for the device once."""
    if not values:
        return {}
    device = next(iter(values.values())).device
    return dict(zip(values, torch.stack([value.to(device) for value in values.values()]).tolist(), strict=True))


class ActivationScales:
    """Measures the root mean square of the outputs of modules until `remove`.

    Args:
        module: contains the modules; those that are compiled are left out.
        names: qualified names; those of no module are left out.
    """

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self._measured: dict[str, list[Tensor]] = {}
        self._hooks = ExitStack()
        modules = dict(module.named_modules())
        for name in dict.fromkeys(names):
            if name in modules and not any(map(is_compiled, modules[name].modules())):
                hook = modules[name].register_forward_hook(partial(self._measure, name))
                self._hooks.callback(hook.remove)

    @torch.no_grad()
    def _measure(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for value in tree_leaves(output):
            if type(value) is Tensor and value.is_floating_point() and value.numel():  # a subclass may stand for more
                self._measured.setdefault(name, []).append(norm(value).float() / value.numel() ** 0.5)

    def remove(self) -> None:
        """Stop measuring."""
        self._hooks.close()

    def extremes(self) -> dict[str, tuple[float, float]]:
        """Return module -> least and largest rms of its outputs; NaN if an output wasn't finite."""
        stacked = {name: torch.stack(values) for name, values in self._measured.items()}
        least, largest = (on_host({name: f(v) for name, v in stacked.items()}) for f in (torch.amin, torch.amax))
        return {name: (least[name], largest[name]) for name in stacked}


def outside(scales: Mapping[str, Sequence[float]], bounds: Sequence[float]) -> str:
    """Return the names and values that are outside of bounds, in words; empty if none is.

    >>> outside({"a": [1.0], "b": [0.5, 2e4], "c": [float("nan")]}, [1e-3, 1e3])
    'b 2.0e+04, c nan'
    """
    least, largest = bounds
    far = {name: [v for v in values if not least <= v <= largest] for name, values in scales.items()}
    words = [f"{name} {values[-1]:.1e}" for name, values in far.items() if values]
    return listed(words, NAMED)
