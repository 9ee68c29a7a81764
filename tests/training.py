"""Train and compare in tests: steps on plain torch, fits of either home's Trainer, and equality of what they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import is_dataclass
from types import ModuleType
from typing import Any

import lightning.pytorch
import torch
from torch import Tensor, nn

from tests.modules import Stack, loader, regression


def equal(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    """Return whether two values hold the same: tensors of one type, to the bit or within an absolute tolerance.

    Modules are compared by their `state_dict`; mappings, sequences, iterators and dataclasses item by item. An empty
    one equals nothing, since it would show nothing.
    """
    match one:
        case nn.Module():
            return equal(one.state_dict(), other.state_dict(), tolerance)
        case Iterator() | ValuesView():
            return equal(list(one), list(other), tolerance)
        case Mapping() | Sequence():
            return len(one) > 0 and _equal(one, other, tolerance)
    return _equal(one, other, tolerance)


def _equal(one: Any, other: Any, tolerance: float) -> bool:
    match one:
        case Tensor():
            if not isinstance(other, Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
                return False
            return torch.allclose(one, other, rtol=0, atol=tolerance) if tolerance else torch.equal(one, other)
        case Mapping():
            return list(one) == list(other) and all(_equal(one[key], other[key], tolerance) for key in one)
        case list() | tuple():
            alike = type(one) is type(other) and len(one) == len(other)
            return alike and all(_equal(*both, tolerance) for both in zip(one, other, strict=True))
    if is_dataclass(one):
        return type(one) is type(other) and _equal(vars(one), vars(other), tolerance)
    return bool(one == other)


def contents(optimizer: Any) -> list[Tensor]:
    """Return copies of all weights and states of an optimizer, in order, without the subclasses that wrap tensors."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    values = [*every, *(state for p in every for _, state in sorted(optimizer.state.get(p, {}).items()))]
    return [part.detach().clone() for value in values for part in _parts(value)]


def _parts(value: Any) -> list[Tensor]:
    if hasattr(value, "__tensor_flatten__"):
        return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    return [torch.as_tensor(value)]


def rows(step: int, width: int) -> Tensor:
    """Return the input of a step: 8 rows, (8, width), which its number draws."""
    return torch.randn(8, width, generator=torch.Generator().manual_seed(step))


def backward(module: nn.Module, step: int) -> None:
    """Run backward of the mean square that a stack of linear layers makes of a step's rows."""
    first = next(module.parameters())
    module(rows(step, first.shape[-1]).to(first.dtype)).float().square().mean().backward()


def train(module: nn.Module, optimizer: Any, steps: int | Iterable[int] = 8, *schedulers: Any) -> None:
    """Take steps of an optimizer, by their count or their numbers, and of schedulers after each."""
    for step in range(steps) if isinstance(steps, int) else steps:
        optimizer.zero_grad()
        backward(module, step)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def fit(
    make_trainer: Callable[..., Any],
    *callbacks: Any,
    module: Any = None,
    data: Any = None,
    home: ModuleType = lightning.pytorch,
    **arguments: Any,
) -> Any:
    """Fit a module under callbacks, with the same random numbers each time, and return it; its `trainer` is set.

    Args:
        make_trainer: The fixture.
        callbacks: Those of the Trainer; None is left out.
        module: By default a `regression` of a stack with dropout.
        data: A loader; by default ten batches.
        home: The package whose Trainer is made; the module's, where one is given.
        arguments: Those of the Trainer.
    """
    torch.manual_seed(1)
    if module is None:
        module = regression(home, Stack(dropout=0.2))
    trainer = make_trainer(home, callbacks=[each for each in callbacks if each is not None], **arguments)
    torch.manual_seed(2)
    trainer.fit(module, loader() if data is None else data)
    return module


def workspaces() -> int:
    """Free the workspaces that cuBLAS keeps for products on a GPU, and return their bytes; Lightning frees them, too.

    The simulated device has none. Hopper's are of 32 MiB, more than a test's model takes.
    """
    if not hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        return 0
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()
