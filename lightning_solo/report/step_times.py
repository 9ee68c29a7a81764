"""Seconds per optimizer step: as logged, else from the times of TensorBoard's events."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lightning_solo.errors import CheckpointError
from lightning_solo.report.series import Series

OURS = "throughput/step_s"
KEYS = ("step_s", "step_time_s", "seconds_per_step", "step_time")
BETWEEN = "Wall-clock time between two logged steps, including validation and checkpoints"


def of_metrics(metrics: Mapping[str, Series]) -> list[Series]:
    """Return the logged step times: ours, else all metrics with a name of `KEYS`."""
    if OURS in metrics:
        return [metrics[OURS]]
    return [one for name, one in metrics.items() if name.rsplit("/", 1)[-1] in KEYS]


def source_of(times: Sequence[Series]) -> str:
    """Return the caption of step times, which names their source."""
    if [one.name for one in times] == [OURS]:
        return f"{OURS}: mean of the steps since the log before, without validation."
    return f"{', '.join(dict.fromkeys(one.name for one in times))}."


def of_tensorboard(folder: Path) -> list[Series]:
    """Return the seconds per step between events of the most logged tag, as a part per file.

    Raises:
        CheckpointError: a file is no event file.
    """
    parts: list[Series] = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        moments = max(_moments(path).values(), key=len, default=[])
        pairs = [
            (step, (moment - before) / (step - step_before))
            for (step_before, before), (step, moment) in itertools.pairwise(moments)
            if step > step_before and moment >= before
        ]
        if pairs:
            parts.append(Series(BETWEEN, [step for step, _ in pairs], [s for _, s in pairs], part=len(parts)))
    return parts


def _moments(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the (step, time) at which each tag was logged."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError:  # TensorBoard is optional for a report
        return {}
    moments: dict[str, list[tuple[int, float]]] = {}
    try:
        for record in records(path):
            event = Event.FromString(record)
            for value in event.summary.value:
                if not value.tag.startswith(("_hparams_", "hp_metric")):
                    moments.setdefault(value.tag, []).append((event.step, event.wall_time))
    except Exception as error:  # protobuf's DecodeError, whose module differs between its versions
        raise CheckpointError(f"{path}: no TensorBoard events ({type(error).__name__}: {error})") from error
    return moments


def records(path: Path) -> Iterator[bytes]:
    """Yield the complete records of a TFRecord file, which may still be written.

    A record is its length in 8 bytes, 4 of checksum, its bytes, 4 of checksum. TensorBoard's own loader computes the
    checksums in Python: 9 s for 200,000 events.
    """
    left = path.stat().st_size
    with path.open("rb") as file:
        while left >= 16:
            (length,) = struct.unpack("<Q", file.read(12)[:8])
            left -= 16 + length
            if left >= 0:
                yield file.read(length + 4)[:length]
