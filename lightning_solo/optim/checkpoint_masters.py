"""Master weights in checkpoints, and a record that names the parameters of each optimizer's states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.memory.sharded_tensors import gathered
from lightning_solo.optim.param_groups import parameters_of
from lightning_solo.optim.split_optimizer import SplitOptimizer

RECORD = "master_weights"
"""Key of a checkpoint whose value is a `record`."""


def record(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[list[dict[str, Any]]]:
    """Return name, shape, stride, bits and use of each parameter of each optimizer, in the order of its saved states.

    A checkpoint's optimizer states have numbers instead of names. With this record they can be converted without the
    module.
    """
    names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
    return [
        [
            {
                "name": names.get(p),
                "shape": list(p.shape),
                "stride": list(p.stride()),
                "bits": bits_of(optimizer, p),
                "trained": p.requires_grad,
            }
            for p in parameters_of(optimizer)
        ]
        for optimizer in optimizers
    ]


def bits_of(optimizer: Optimizer, p: Tensor) -> int:
    """Return the bits of a parameter's number that the optimizer steps: with a correction 24 or 32."""
    return optimizer.bits_of(p) if isinstance(optimizer, SplitOptimizer) else 8 * p.element_size()


def masters_of(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Callable[[], Tensor]]:
    """Return name -> function that computes the fp32 master weight, for each parameter of a `SplitOptimizer`."""
    held: dict[Tensor, SplitOptimizer] = {
        p: each for each in optimizers if isinstance(each, SplitOptimizer) for p in parameters_of(each)
    }
    named = module.named_parameters()
    return {name: partial(held[p].master_weight, p) for name, p in named if p in held}


def with_sharded_masters(
    weights: Mapping[str, Any], module: nn.Module, optimizers: Iterable[Optimizer]
) -> dict[str, Any]:
    """Return `with_masters` of gathered weights, which only one process has; all processes must call it."""
    masters, names = masters_of(module, optimizers), dict[Tensor, list[str]]()
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    result = dict(weights)
    for each in names.values():
        if each[0] in masters:
            master = gathered(masters[each[0]](), keep=bool(weights))
            result.update({name: master for name in each if name in weights})
    return result


def place(tensor: Tensor) -> Any:
    """Return a key that two tensors share if they are the same numbers in memory, as tied weights are."""
    if not tensor.numel():
        return id(tensor)
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def with_masters(weights: Mapping[str, Any], masters: Mapping[str, Callable[[], Tensor]]) -> dict[str, Any]:
    """Return a state dict with some weights replaced by their master weights, on the host; see `masters_of`.

    Tied weights stay tied: each of their names gets the same tensor.
    """
    functions = {place(weights[name]): make for name, make in masters.items() if name in weights}
    computed: dict[Any, Tensor] = {}
    result = dict(weights)
    for name, value in weights.items():
        if isinstance(value, Tensor) and (key := place(value)) in functions:
            if key not in computed:
                computed[key] = functions[key]().cpu()  # all at once might not fit on the device
            result[name] = computed[key]
    return result
