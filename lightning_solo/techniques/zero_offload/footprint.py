"""Predict the bytes of model states under ZeRO-Offload, and the seconds of its copies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_solo.cards.footprint import Footprint, Request, Sizes
from lightning_solo.zero.layout import WEIGHT_BYTES, ZeroLayout, ZeroSettings, zero_layout

if TYPE_CHECKING:
    from lightning_solo.techniques.zero_offload.card import Settings

WEIGHTS = ("weights", "live_weights", "buffers")  # parts of the layout; the others are for gradients
HOST_BANDWIDTH = 100e9  # bytes/s that an update on the host reads and writes; assumed, not measured
DISK_BANDWIDTH = 3e9  # bytes/s of an SSD, each way; assumed
UPDATE_BYTES = 28  # per parameter: master, gradient and two states read, master and states written, all fp32


def layout_for(settings: Settings, sizes: Sizes, precision: str, accumulation: int, *, cuda: bool) -> ZeroLayout:
    """Return the bytes of each part; ``precision`` is Lightning's name."""
    config = settings.engine_config()
    engine = ZeroSettings.of(
        config,
        precision=precision,
        accumulates=accumulation > 1,
        cuda=cuda,
        step_temporaries=0,  # DeepSpeed's AdamW, or torch's fused one
    )
    if engine.nvme_parameters and "buffer_size" not in config["zero_optimization"]["offload_param"]:
        engine = replace(engine, parameter_buffer=max(sizes.trainable))  # as zero.disk.parameter_buffers does
    return zero_layout([sizes.trainable], engine, frozen=sizes.frozen, buffer_bytes=sizes.buffer_bytes)


def footprint(settings: Settings, request: Request, plain: Footprint) -> Footprint | None:
    """Return the peak bytes on device and host, the engine's start included; None if the engine can't train it."""
    precision = request.precision or "32-true"
    if precision not in WEIGHT_BYTES or not request.sizes.trainable:
        return None
    layout = layout_for(settings, request.sizes, precision, request.accumulation, cuda=request.cuda)
    weights = sum(size for part, size in layout.device.items() if part in WEIGHTS)
    return Footprint(weights, layout.device_bytes - weights, 0, layout.host_bytes, layout.one_memory_bytes)


class ZeroStates:
    """Model states as the engine stores them under the strategy's settings, for a plan."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def buffers(self, sizes: Sizes, precision: str, accumulation: int) -> tuple[list[tuple[str, int]], int]:
        """Return (category, bytes) of each of the engine's buffers on a GPU, and the bytes on its host."""
        layout = layout_for(self.settings, sizes, precision, accumulation, cuda=True)
        parts = [("weights" if part in WEIGHTS else "gradients", size) for part, size in layout.device.items()]
        return parts, layout.host_bytes

    def seconds(self, sizes: Sizes, precision: str, accumulation: int, host_bandwidth: float) -> tuple[float, float]:
        """Return (seconds of transfers that may overlap with the micro-batches, seconds of the update after them).

        Gradients are copied to the host in each micro-batch, and weights to the device after each step. With
        ``offload_parameters`` weights are copied twice in each micro-batch, for forward and backward.
        """
        trained = sum(sizes.trainable)
        fetched = 2 * accumulation if self.settings.offload_parameters else 1
        moved = WEIGHT_BYTES[precision] * trained * (accumulation + fetched)  # a gradient is as large as its weight
        # each step reads and writes the states on disk
        swapped = UPDATE_BYTES * trained / DISK_BANDWIDTH if self.settings.nvme_path else 0.0
        return moved / host_bandwidth, max(UPDATE_BYTES * trained / HOST_BANDWIDTH, swapped)
