"""Find presets that would fit in place of one that did not, from their model states and the free memory.

A rule of thumb for an error message: it adds the cards' footprints under AdamW and ignores activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_solo.cards.configuration import Configuration, Target
from lightning_solo.cards.footprint import Request, Sizes, footprint_of
from lightning_solo.errors import SoloError
from lightning_solo.machine import host_memory
from lightning_solo.memory.reading import free_device_bytes
from lightning_solo.memory.sizes import host_bytes_of, sizes_of
from lightning_solo.presets.compose import compose
from lightning_solo.presets.files import preset_files
from lightning_solo.units import format_bytes

MARGIN = 0.05  # for batches, Python and libraries, which are not counted


@dataclass(frozen=True)
class Room:
    """Needed or free bytes on device and host. A run on the CPU has all of its bytes on the host."""

    device: int
    host: int

    def missing(self, free: Room) -> int:
        """Return the bytes by which this exceeds ``free``."""
        return max(self.device - free.device, 0) + max(self.host - free.host, 0)

    def __str__(self) -> str:
        parts = {"device": self.device, "host": self.host}
        return " and ".join(f"{format_bytes(size)} on the {place}" for place, size in parts.items() if size)


def presets_that_fit(
    module: torch.nn.Module, check: Callable[[Configuration], None], free: Room | None = None, failed: str = ""
) -> str:
    """Return a sentence that names the presets that would fit, or the one that lacks the least memory.

    The preset ``failed`` isn't among them.
    """
    sizes = sizes_of(module)
    free = free or free_room(module)
    needs = {}
    for name in preset_files():
        if name == failed:
            continue
        try:
            config = compose(name)
            # auto is one of the others; new batches don't change model states; a caveat is for those who name it
            if config.auto is not None or config.makes_batches or config.caveats:
                continue
            check(config)
            need = model_states(config, sizes, cuda=torch.cuda.is_available())
        except (SoloError, ValueError):  # not for this machine, or a file of the user's with a mistake in it
            continue
        if need is not None:
            needs[name] = need
    fitting = [f"{name} ({need})" for name, need in needs.items() if not need.missing(free)]
    if fitting:
        return f"presets that would fit, before activations, with AdamW: {', '.join(fitting)}"
    if not needs:
        return "no preset runs on this machine"
    name, need = min(needs.items(), key=lambda item: item[1].missing(free))
    return f"no preset would fit: the nearest, {name}, needs {need} before activations, with AdamW; use a smaller model"


def model_states(config: Configuration, sizes: Sizes, *, cuda: bool) -> Room | None:
    """Return the room for a preset's model states with AdamW and a margin; None if it isn't known."""
    if isinstance(config.strategy, Target):
        return None
    accumulation = max(config.first_factor, 2 if config.accumulates else 1)  # only 1 or more matters
    footprint = footprint_of(config.techniques, Request(sizes, config.precision, accumulation, cuda))
    if footprint is None:
        return None
    device, host = (footprint.device, footprint.host) if cuda else (0, footprint.total)
    return Room(int(device * (1 + MARGIN)), int(host * (1 + MARGIN)))


def free_room(module: torch.nn.Module) -> Room:
    """Return the memory for a new run: free memory, plus the memory that this process and the module would free."""
    host = host_memory()[1] + host_bytes_of(module)
    if not torch.cuda.is_available():
        return Room(0, host)
    return Room(free_device_bytes(module), host)
