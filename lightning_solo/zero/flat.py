"""Check by a trial that an optimizer computes the same on one flat tensor as on separate parameters.

ZeRO stores the parameters of a group end to end and gives the optimizer that one long tensor. An optimizer that treats
each element alone (AdamW, SGD, Lion) isn't affected. One that uses the shape or the norm of a parameter (Adafactor,
Muon, LAMB) would silently train differently.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.errors import ConflictError

SHAPES = ((3, 4), (5,))
STEPS = 3
# Far above rounding, which differs with the length of a vectorized loop, and far below what a norm changes.
TOLERANCE = 1e-3
INSTEAD = "write an element-wise optimizer, such as torch.optim.AdamW, or a preset without ZeRO"


def require_flat(optimizer: Optimizer) -> None:
    """Raise if an optimizer can't step ZeRO's flat partitions, or computes different values on them.

    A copy with the hyper-parameters of each group takes three steps on two small parameters and on one flat tensor of
    the same values. The optimizer, its parameters and the random state stay unchanged. An optimizer that the trial
    can't run passes with a warning.

    Raises:
        ConflictError: Its step needs a closure, or the two trials differ.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConflictError(
            f"{name} evaluates the model several times in a step, through a closure; ZeRO steps once, with the"
            f" gradients it has gathered; {INSTEAD}"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConflictError(f"{name} takes sparse gradients only, and ZeRO's are flat and dense; {INSTEAD}")
    for group in optimizer.param_groups:
        _require_equal_steps(optimizer, group)


def _require_equal_steps(optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    name = type(optimizer).__name__
    shapes: Sequence[tuple[int, ...]] = SHAPES
    shaped = _try_steps(optimizer, group, shapes)
    if isinstance(shaped, Exception):  # Muon, for one, takes matrices alone
        shapes = SHAPES[:1]
        shaped = _try_steps(optimizer, group, shapes)
    flat = _try_steps(optimizer, group, [(sum(map(math.prod, shapes)),)])
    if isinstance(shaped, Exception):
        if isinstance(flat, Exception):
            warnings.warn(
                f"{name} could not be tried on a small flat tensor ({type(flat).__name__}: {flat}); on ZeRO's flat"
                " partitions it is right only if it treats each element alone",
                stacklevel=4,
            )
        return
    if isinstance(flat, Exception):
        raise ConflictError(f"{name} can't step ZeRO's partitions, which have one dimension ({flat}); {INSTEAD}")
    ours, theirs = flat[0][0], torch.cat([tensor.flatten() for tensor in shaped[0]])
    moved = (theirs - _values(len(theirs))).abs().max()
    if not (ours - theirs).abs().max() <= TOLERANCE * moved:
        raise ConflictError(
            f"{name} uses the shape or the norm of a parameter, and ZeRO gives it all parameters of a group as one"
            f" flat tensor, which changes its result; {INSTEAD}"
        )


def states_per_element(optimizer: Optimizer) -> int | None:
    """Return the number of states per parameter, the largest of all groups; None if a trial fails.

    For each group, a copy of the optimizer steps one small flat tensor.
    """
    counts = []
    for group in optimizer.param_groups:
        tried = _try_steps(optimizer, group, [(sum(map(math.prod, SHAPES)),)])
        if isinstance(tried, Exception):
            return None
        counts.append(tried[1])
    return max(counts)


def _try_steps(
    optimizer: Optimizer, group: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]
) -> tuple[list[Tensor], int] | Exception:
    """Return the parameters after a few steps of a copy, and the number of states with the first parameter's shape.

    If a step raises an exception, the exception is returned.
    """
    sizes = [math.prod(shape) for shape in shapes]
    parts = torch.split(_values(sum(sizes)), sizes)
    parameters = [nn.Parameter(part.clone().view(shape)) for part, shape in zip(parts, shapes, strict=True)]
    trial = _copy_over(optimizer, group, parameters)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            for step in range(STEPS):
                gradients = torch.split(_gradients(sum(sizes), step), sizes)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient.clone().view_as(parameter)
                trial.step()
    except Exception as error:  # an optimizer of any package may raise anything
        return error
    kept = [value for value in trial.state[parameters[0]].values() if torch.is_tensor(value)]
    like = sum(value.shape == parameters[0].shape for value in kept)
    return [parameter.detach() for parameter in parameters], like


def _values(elements: int) -> Tensor:
    return torch.linspace(-1.0, 2.0, elements, dtype=torch.float32)


def _gradients(elements: int, step: int) -> Tensor:
    """Return gradients that are much larger for the first parameter, so that norms per parameter differ."""
    index = torch.arange(elements, dtype=torch.float32)
    return torch.sin(1.7 * index + step + 1) * torch.where(index < 12, 3.0, 0.1)


def _copy_over(optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """Return a copy of an optimizer for other parameters, without its state and hooks."""
    trial: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        vars(trial)[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    vars(trial).pop("step", None)  # a scheduler's wrapper, bound to the original
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(trial, name, OrderedDict())
    hyper = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    if "lr" in hyper:  # a warm-up starts at 0, where all optimizers agree
        hyper["lr"] = torch.tensor(0.01) if isinstance(hyper["lr"], Tensor) else 0.01
    if "capturable" in hyper:  # for CUDA graphs: the same arithmetic, refused on the CPU
        hyper["capturable"] = False
    trial.state = defaultdict(dict)
    trial.param_groups = [{**hyper, "params": parameters}]
    return trial
