"""Presets that would fit where one did not: their model states against the free memory of device and host.

A rule of thumb for an error message: bytes per parameter by the cards' footprints, AdamW assumed, no activations.
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

MARGIN = 0.05  # on top of what is counted: batches, Python and the libraries


@dataclass(frozen=True)
class Room:
    """Bytes on device and host, needed or free. ``device`` of a run on the CPU is 0: all of it is on the host."""

    device: int
    host: int

    def missing(self, free: Room) -> int:
        """Return how many bytes of this are not in ``free``."""
        return max(self.device - free.device, 0) + max(self.host - free.host, 0)

    def __str__(self) -> str:
        device = f"{format_bytes(self.device)} on the device" if self.device else ""
        return " and ".join(
            part for part in (device, f"{format_bytes(self.host)} on the host" if self.host else "") if part
        )


def presets_that_fit(module: torch.nn.Module, check: Callable[[Configuration], None], free: Room | None = None) -> str:
    """Return a sentence that names the presets that would fit, or the smallest need if none does."""
    sizes = sizes_of(module)
    free = free or free_room(module)
    needs = {}
    for name in preset_files():
        try:
            config = compose(name)
            if config.auto is not None or config.makes_batches:  # one of the others, or as much as they
                continue
            if config.caveats:  # nobody should get it unasked
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
    """Return the room that a preset's model states need with AdamW and a margin; None where that isn't known."""
    if isinstance(config.strategy, Target):
        return None
    accumulation = max(config.first_factor, 2 if config.accumulates else 1)  # which bytes are kept, not how often
    footprint = footprint_of(config.techniques, Request(sizes, config.precision, accumulation, cuda))
    if footprint is None:
        return None
    device, host = (footprint.device, footprint.host) if cuda else (0, footprint.total)
    return Room(int(device * (1 + MARGIN)), int(host * (1 + MARGIN)))


def free_room(module: torch.nn.Module) -> Room:
    """Return the room for a new run: free memory, and the memory that this process and the module would give back."""
    host = host_memory()[1] + host_bytes_of(module)
    if not torch.cuda.is_available():
        return Room(0, host)
    return Room(free_device_bytes(module), host)
