"""Plans of ZeRO-Offload: model states by the layout of DeepSpeed's engine, activations as traced."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_solo.fitting import zero_settings
from lightning_solo.memory.events import EventLog
from lightning_solo.planner.capture import Trace
from lightning_solo.planner.device import Device
from lightning_solo.zero.layout import ZeroLayout, zero_layout

STATES = ("weights", "gradients", "optimizer_states")
# The category of each part of the layout; all others are gradients in transit.
PARTS = {"weights": "weights", "live_weights": "weights", "buffers": "weights"}
HOST_BANDWIDTH = 100e9  # bytes/s that an update on the host reads and writes; assumed, not measured
DISK_BANDWIDTH = 3e9  # bytes/s of an SSD, each way; assumed
UPDATE_BYTES = 28  # per parameter: master, gradient and two states read, master and states written, all fp32


def layout_for(node: Mapping[str, Any], precision: str, accumulation: int, trace: Trace) -> ZeroLayout:
    """Return the layout of the module that was traced."""
    trained = trace.sizes.trainable
    settings = zero_settings(dict(node), precision, accumulation, max(trained), cuda=True)
    return zero_layout([trained], settings, frozen=trace.sizes.frozen, buffer_bytes=trace.sizes.buffer_bytes)


def with_layout(trace: Trace, layout: ZeroLayout) -> Trace:
    """Return the trace with the engine's buffers as model states, and without allocations of the optimizer step."""
    labels = list(trace.log.labels)
    firsts = [first for first, _, _ in trace.phases]
    dropped = {number for number, label in enumerate(labels) if label in STATES}
    events = []
    for index, (storage, change) in enumerate(trace.log.events):
        if change > 0 and trace.phases[bisect_right(firsts, index) - 1][2] == "optimizer_step":
            dropped.add(storage)
        if storage not in dropped:
            events.append((index, (storage, change)))
    held = {storage: size for storage, size in trace.log.held.items() if storage not in dropped}
    for part, size in layout.device.items():
        held[len(labels)] = size
        labels.append(PARTS.get(part, "gradients"))
    kept = [index for index, _ in events]
    phases = [(bisect_left(kept, first), costs, name) for first, costs, name in trace.phases]
    log = EventLog([event for _, event in events], labels, held)
    return replace(trace, log=log, phases=phases, host_bytes=layout.host_bytes)


def offload_seconds(
    layout: ZeroLayout, node: Mapping[str, Any], trace: Trace, device: Device, micro_batches: int
) -> tuple[float, float]:
    """Return (seconds of transfers that may overlap with the micro-batches, seconds of the update after them).

    Gradients go to the host at each micro-batch, weights to the device after each step; with ``offload_parameters``
    weights go to the device twice a micro-batch too, for forward and backward.
    """
    trained = sum(trace.sizes.trainable)
    weight = max(layout.device.get("gradients", 0) // max(*trace.sizes.trainable, 1), 2)
    fetched = 2 * micro_batches if node.get("offload_parameters") else 1
    moved = min(weight, 4) * trained * (micro_batches + fetched)
    # model states on disk are read and written at each step
    swapped = UPDATE_BYTES * trained / DISK_BANDWIDTH if node.get("nvme_path") else 0.0
    return moved / device.host_bandwidth, max(UPDATE_BYTES * trained / HOST_BANDWIDTH, swapped)
