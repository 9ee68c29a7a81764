"""Where the states of a `CompactAdamW` are stored: on the device of their parameter, or in host memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from lightning_solo.errors import BudgetError
from lightning_solo.memory import host_slabs
from lightning_solo.optim import compressed_moments as moments
from lightning_solo.optim.adamw_states import Layout, bytes_of
from lightning_solo.optim.back_end_facts import SETTINGS
from lightning_solo.optim.staging import Staging
from lightning_solo.units import MiB, format_bytes

States = MutableMapping[Tensor, dict[str, Tensor]]
"""Parameter -> tensors of its state by name."""


class StatePlacement:
    """Decides which parameters have their states on the host, and copies these states through the device.

    Args:
        layout: returns the layout of a parameter's state.
        budget: bytes of states that stay on the device; "auto": as many as fit after the first step; None: all.

    Attributes:
        host: parameter -> tensors of its state on the host, by name.
        is_settled: whether the placement is final; with "auto" the first step decides it.
    """

    def __init__(self, layout: Callable[[Tensor], Layout], budget: int | str | None) -> None:
        self.host: dict[Tensor, dict[str, Tensor]] = {}
        self.is_settled = budget != "auto"
        self._packed: dict[Tensor, Tensor] = {}  # parameter -> bytes of these tensors, with the gaps between them
        self._layout, self._budget = layout, budget
        self._budget_left: int | None = None  # set when states are placed
        self._unplaced: list[Tensor] = []
        self._first: Tensor | None = None  # the parameter stepped first; its second step ends the first of all
        self._staging: Staging | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_staging": None, "_packed": {}}  # tensors of a copy aren't in one piece of memory

    def add(self, p: Tensor) -> None:
        """Add a parameter; `place` then places its state."""
        if self._budget is not None:
            self._unplaced.append(p)

    def place(self, states: States) -> None:
        """Allocate host memory for the states of added parameters, and move those that exist already.

        Raises:
            BudgetError: the host has too little memory; nothing has been allocated.
        """
        if not self._unplaced:
            return
        parameters = [p for p in self._unplaced if p.requires_grad or p in states]
        if not parameters:
            return  # frozen parameters have no states
        placed = set(parameters)
        self._unplaced = [p for p in self._unplaced if p not in placed]
        layouts = {p: self._layout(p) for p in parameters}
        is_auto = self._budget == "auto"  # at least the states stay that the host has no room for
        if self._budget_left is None:
            total = sum(map(bytes_of, layouts.values()))
            self._budget_left = total - host_slabs.host_room() if is_auto else int(self._budget or 0)
        small = {p: layout for p, layout in layouts.items() if p.numel() < moments.LEAST}  # stay in any case
        self._budget_left -= sum(map(bytes_of, small.values()))
        leaving = {}
        for p, layout in layouts.items():
            if p in small:
                continue
            stays = self._budget_left > 0 if is_auto else bytes_of(layout) <= self._budget_left
            if stays:
                self._budget_left -= bytes_of(layout)
            else:
                leaving[p] = layout
        sizes = [size for layout in leaving.values() for size in layout.values()]
        bits = f"{SETTINGS}.moment_bits=4 or {SETTINGS}.master_bits=16-stochastic"
        remedy = f"write a larger {SETTINGS}.state_budget, {bits}"
        try:
            host_slabs.require_host_room("optimizer states", sizes, remedy)
        except BudgetError:
            self._unplaced = [*parameters, *self._unplaced]
            raise
        homes = host_slabs.packed_tensors([[*layout.values()] for layout in leaving.values()], parameters[0].device)
        if self._staging is not None:  # gradients on the host came first
            self._staging.serve(sum(map(bytes_of, leaving.values())))
        for (p, layout), (packed, tensors) in zip(leaving.items(), homes, strict=True):
            self.host[p] = dict(zip(layout, tensors, strict=True))
            self._packed[p] = packed
        for p in parameters:
            if p in states:
                states[p] = self._moved(p, states[p])

    def note_step(self, p: Tensor, states: States) -> None:
        """Record that a parameter is stepped; at the start of the second step move states back to the device."""
        if self.is_settled:
            return
        if self._first is p:  # memory has had its peak
            self._settle(states)
        self._first = p if self._first is None else self._first

    def _settle(self, states: States) -> None:
        """Move states back to the device, from the first parameter on, while there is room."""
        self.is_settled = True
        self.wait()
        left = free_bytes(next(iter(self.host)).device) if self.host else 0
        for p in list(self.host):
            left -= bytes_of(self._layout(p))
            if left < 0:
                break
            if self._staging is not None:
                self._staging.serve(-bytes_of(self._layout(p)))
            del self.host[p]
            self._packed.pop(p, None)  # a copy of the optimizer has none
            states[p] = self._moved(p, states[p])

    def _moved(self, p: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a parameter's state, moved to its place."""
        home = self.host.get(p, {})
        return {
            name: home[name].copy_(value) if name in home else value if name == "step" else value.to(p.device)
            for name, value in state.items()
        }

    def empty(self, p: Tensor, kept: Collection[str]) -> dict[str, Tensor]:
        """Return a parameter's host tensors, zeroed except the kept ones."""
        home = self.host.get(p, {})
        return {name: tensor if name in kept else tensor.zero_() for name, tensor in home.items()}

    def packed(self, p: Tensor, state: Mapping[str, Tensor]) -> Tensor | None:
        """Return the bytes of a parameter's host tensors if its state still consists of them, otherwise None."""
        is_home = all(state[name] is tensor for name, tensor in self.host.get(p, {}).items())
        return self._packed.get(p) if is_home else None

    def staging(self, device: torch.device) -> Staging:
        """Return the staging buffers through which host tensors reach a device."""
        if self._staging is None:
            self._staging = Staging(device)
            self._staging.serve(self.host_bytes)
        return self._staging

    def follow(self, device: torch.device) -> None:
        """Drop the staging buffers if they are on another device than ``device``, after their last copies are done."""
        if self._staging is not None and self._staging.device != device:
            self.wait()
            self._staging = None

    def wait(self) -> None:
        """Wait until all copies to the host are done; call it before the host reads states."""
        if self._staging is not None:
            self._staging.wait()

    @property
    def host_bytes(self) -> int:
        """Bytes of the placed states on the host."""
        return sum(tensor.nbytes for home in self.host.values() for tensor in home.values())

    def summary(self, total: int) -> str:
        """Describe where states of ``total`` bytes are stored."""
        words = f"{format_bytes(total - self.host_bytes)} on the device"
        if self._unplaced:
            words = f"{format_bytes(total)}, placed at the first step"
        elif self.host_bytes:
            words += f", {format_bytes(self.host_bytes)} on the host"
        return words if self.is_settled else f"{words}; as many as fit return to the device after the first step"


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU, minus 5 % of its memory but at least 32 MiB; 0 for a CPU.

    5 % of a small GPU may be less than a segment of torch's allocator, 20 MiB for tensors of 1 to 10 MiB.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - max(total // 20, 32 * MiB))
