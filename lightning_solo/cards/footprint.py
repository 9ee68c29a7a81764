"""Bytes of model states, estimated before a run: those of plain AdamW, then changed by each technique."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pkgutil import resolve_name

from lightning_solo.cards.configuration import Chosen

# Bytes of weight, gradient and each of AdamW's states; the other precisions keep all of them in fp32.
ELEMENT_BYTES = {"bf16-true": 2, "16-true": 2, "64-true": 8}


@dataclass(frozen=True)
class Sizes:
    """Elements of each trainable and each frozen parameter of a module, and the bytes of its buffers."""

    trainable: tuple[int, ...]
    frozen: tuple[int, ...]
    buffer_bytes: int


@dataclass(frozen=True)
class Request:
    """Input of a footprint function."""

    sizes: Sizes  # of the module
    precision: str | None  # Lightning's long name, or None
    accumulation: int  # micro-batches per optimizer step
    cuda: bool  # whether the device is a GPU


@dataclass(frozen=True)
class Footprint:
    """Bytes of model states.

    Attributes:
        weights, gradients, optimizer_states: on the device.
        host: in the host's memory, where the device is a GPU.
        one_memory: bytes on a machine whose device and host share one memory; None if they are the sum of the others.
    """

    weights: int
    gradients: int
    optimizer_states: int
    host: int = 0
    one_memory: int | None = None

    @property
    def device(self) -> int:
        """Bytes on the device."""
        return self.weights + self.gradients + self.optimizer_states

    @property
    def total(self) -> int:
        """Bytes on device and host together, for a machine where they share one memory."""
        return self.device + self.host if self.one_memory is None else self.one_memory


def plain_footprint(request: Request) -> Footprint:
    """Return the bytes of the model states with AdamW and no technique.

    >>> plain_footprint(Request(Sizes((1000,), (), 0), "bf16-mixed", 1, cuda=True)).device  # 4 + 4 + 8
    16000
    """
    element, trained = ELEMENT_BYTES.get(request.precision or "", 4), sum(request.sizes.trainable)
    weights = element * (trained + sum(request.sizes.frozen)) + request.sizes.buffer_bytes
    return Footprint(weights, element * trained, 2 * element * trained)


def without_gradients(before: Footprint, request: Request, buffer: str) -> Footprint:
    """Return the bytes under gradient release, which keeps an fp32 sum only when gradients accumulate.

    Args:
        before: the bytes without release.
        request: module, precision and accumulation.
        buffer: where the sum is stored, ``"device"`` or ``"host"``.
    """
    kept = 0 if request.accumulation == 1 else 4 * sum(request.sizes.trainable)
    if buffer == "host":
        return replace(before, gradients=0, host=before.host + kept)
    return replace(before, gradients=kept)


def footprint_of(techniques: Iterable[Chosen], request: Request) -> Footprint | None:
    """Return the bytes of the model states under techniques; None if one of them can't serve this request."""
    footprint: Footprint | None = plain_footprint(request)
    for chosen in sorted(techniques, key=lambda chosen: chosen.card.phase):
        if chosen.card.footprint is not None and footprint is not None:
            footprint = resolve_name(chosen.card.footprint)(chosen.settings, request, footprint)
    return footprint
