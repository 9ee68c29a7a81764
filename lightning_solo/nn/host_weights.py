"""The weights of blocks that are stored on the host, as far as a budget doesn't keep them on the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lightning_solo.errors import BudgetError
from lightning_solo.memory.weight_ring import WeightRing
from lightning_solo.nn.streaming import Place, Streamed, streamed_places
from lightning_solo.units import format_bytes

OPTION = "callback.weights_on_host"
BUDGET = f"{OPTION}.weight_budget"


def weights_of_blocks(module: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, list[Place]]:
    """Return the places of each block's parameters, trained and frozen, that no other part shares; none is empty.

    Parameters of integers stay on the device: they have no NaN.
    """
    every = streamed_places(module, blocks, trains=False)

    def is_weight(tensor: torch.Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) and (tensor.is_floating_point() or tensor.is_complex())

    places = {name: [place for place in each if is_weight(place.tensor)] for name, each in every.items()}
    return {name: each for name, each in places.items() if each}


def leaving(module: nn.Module, places: Mapping[str, list[Place]], budget: int | None) -> dict[str, list[Place]]:
    """Return the places of the blocks whose weights leave the device: all but the last ones, which backward uses first.

    Args:
        module: on the host.
        places: of all blocks, as `weights_of_blocks` returns them.
        budget: bytes of weights on the device: first those outside the blocks. None: no block's.

    Raises:
        BudgetError: the weights outside the blocks take more.
    """
    sizes = {name: sum(p.nbytes for p in _parameters(each)) for name, each in places.items()}
    outside = sum(p.nbytes for p in module.parameters()) - sum(sizes.values())
    left = 0 if budget is None else budget - outside
    if left < 0:
        raise BudgetError(
            f"{BUDGET}={budget}: the weights outside the blocks take {format_bytes(outside)}, {format_bytes(-left)}"
            f" more; write {BUDGET}={outside} or more",
            outside,
            outside + left,
        )
    names = [*places]
    while names and sizes[names[-1]] <= left:
        left -= sizes[names.pop()]
    return {name: places[name] for name in names}


def store(
    places: Mapping[str, list[Place]], records: Mapping[str, Streamed], device: torch.device, window: int
) -> WeightRing:
    """Move the weights of blocks to the host, and return the ring that brings them to their blocks.

    Raises:
        BudgetError: the host has too little memory.
    """
    remedy = f"write a larger {BUDGET}, which keeps more blocks on the device"
    ring = WeightRing([_parameters(each) for each in places.values()], device, window, remedy)
    for number, name in enumerate(places):
        records[name].start(ring, number, [])  # parameters stay in their places
    return ring


def _parameters(places: list[Place]) -> list[torch.Tensor]:
    """Return the parameters in places, each once."""
    return [*{id(place.tensor): place.tensor for place in places}.values()]
