"""The charts as PNG files, and as images for TensorBoard."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from lightning_solo.report.model import Figure, Report
from lightning_solo.report.page import vega_lite, vl_convert
from lightning_solo.report.palette import LIGHT, Palette

WIDTH = 800
SCALE = 2  # of its pixels, for dense screens


def pictures(report: Report) -> dict[str, bytes]:
    """Return each chart as a PNG on white, by name.

    Raises:
        CapabilityError: Altair or vl-convert is not installed.
    """
    return {figure.name: png(figure) for figure in report.figures}


def png(figure: Figure, palette: Palette = LIGHT) -> bytes:
    """Return a chart with its title as a PNG.

    Raises:
        CapabilityError: Altair or vl-convert is not installed.
    """
    spec = {**figure.draw(palette), "width": WIDTH, "background": palette.ground}
    spec["title"] = {"text": figure.title, "color": palette.ink, "anchor": "start", "fontSize": 15}
    # as text, since names from files may have characters that vl-convert's own encoder refuses
    text = json.dumps(spec, allow_nan=False)
    drawn: bytes = vl_convert().vegalite_to_png(text, vl_version=vega_lite(), scale=SCALE, allowed_base_urls=[])
    return drawn


def to_tensorboard(pngs: dict[str, bytes], folder: Path) -> bool:
    """Write images as ``report/<name>`` into their own folder, in place of those of an earlier report.

    The bytes are written unchanged; ``SummaryWriter.add_image`` would decode and encode them, and needs torch.

    Returns:
        Whether TensorBoard is installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        return False
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    writer = EventFileWriter(str(folder))
    for name, png in pngs.items():
        width, height = size_of(png)
        image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=png)
        event = Event(step=0, summary=Summary(value=[Summary.Value(tag=f"report/{name}", image=image)]))
        writer.add_event(event)
    writer.close()
    return True


def size_of(png: bytes) -> tuple[int, int]:
    """Return width and height of a PNG, from its first chunk.

    >>> size_of(bytes(16) + bytes([0, 0, 2, 0, 0, 0, 1, 0]))
    (512, 256)
    """
    width, height = struct.unpack(">II", png[16:24])
    return int(width), int(height)
