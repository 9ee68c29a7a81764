"""Weights that are split into bf16 and corrections, while a module is built and when it is set up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.memory.sharded_tensors import span
from lightning_solo.optim.building import Building
from lightning_solo.optim.split_weights import join_parameters, split_parameters


class WeightSplit:
    """The split weights of one module, from its building until an optimizer takes their corrections.

    Attributes:
        corrections: parameter -> the lower bits of its bf16 weight, until an optimizer takes them.
    """

    def __init__(self) -> None:
        self.corrections: dict[Tensor, Tensor] = {}
        self._building: Building | None = None
        self._parts: set[Tensor] = set()
        self._names: dict[str, Tensor] = {}

    @contextmanager
    def building(self, bits: int, splits: Callable[[Tensor], bool], on: torch.device | None) -> Iterator[None]:
        """Build modules with fp32 weights on a real device, and split each weight when later ones are created."""
        with self._building or Building(bits, splits=splits, corrections_on=on) as building:
            yield
        self._building = building

    def loading(self) -> AbstractContextManager[Any]:
        """Return a context for loading fp32 weights into a module whose weights are split, one weight at a time."""
        return self._building or nullcontext()

    def frozen(self, module: nn.Module) -> list[Tensor]:
        """Return the weights in fp32 that aren't trained, also those that were split while they were built."""
        built = self._building.corrections if self._building is not None else {}
        return [p for p in module.parameters() if not p.requires_grad and (p.dtype == torch.float32 or p in built)]

    def split(self, module: nn.Module, bits: int | str, splits: Callable[[Tensor], bool], *, to_bf16: bool) -> None:
        """Split the remaining weights one by one, and join split weights that no optimizer will step.

        Args:
            module: on the host.
            bits: 24, 32 or "16-stochastic", which has no corrections.
            splits: returns whether a parameter is split.
            to_bf16: whether weights that aren't trained become bf16.
        """
        built = self._take_built(to_bf16=to_bf16)
        whole = [p for p in module.parameters() if splits(p)]
        self.corrections = split_parameters(whole, bits)
        if not isinstance(bits, str):
            self.corrections |= built
        self._parts = {*built, *whole}
        self._names = {name: p for name, p in module.named_parameters() if p in self._parts}

    def follow(self, module: nn.Module) -> None:
        """Know the parameters of a module that was sharded since, with the corrections of this process's shards."""
        for name, p in module.named_parameters():
            whole = self._names.get(name)
            if whole is None or whole is p:
                continue
            self._names[name] = p
            self._parts = self._parts - {whole} | {p}
            if whole in self.corrections:
                first, count = span(p)
                self.corrections[p] = self.corrections.pop(whole)[first : first + count].clone()

    def _take_built(self, *, to_bf16: bool) -> dict[Tensor, Tensor]:
        building, self._building = self._building, None
        corrections = building.corrections if building is not None else {}
        for p in [p for p in corrections if not p.requires_grad]:
            join_parameters([p], {p: corrections.pop(p)})
            if to_bf16:  # as Lightning will, but one by one
                p.data = p.data.to(torch.bfloat16)
        return corrections

    def settle(self) -> None:
        """Drop the corrections once the optimizers have them, or if they aren't needed."""
        self.corrections, self._parts, self._names = {}, set(), {}

    def join(self, optimizers: Iterable[Optimizer]) -> None:
        """Make weights fp32 again after a failed set-up, on the host, since the device may lack the memory."""
        building, self._building = self._building, None
        if building is not None:
            building.join(torch.device("cpu"))
        parts, corrections = self._parts, self.corrections
        self.settle()
        if not parts:
            return
        states = [item for optimizer in optimizers for item in optimizer.state.items()]
        corrections = corrections | {p: state["correction"] for p, state in states if "correction" in state}
        for p in parts:
            p.data = p.data.cpu()
            join_parameters([p], corrections)
