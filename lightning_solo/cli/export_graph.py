"""Write the module of a run as a graph: `lightning-solo export --format onnx|torch_export`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_solo.cli.trained_run import parts_of, run_of
from lightning_solo.errors import CheckpointError, PresetError


def write_graph(
    source: Path,
    output: Path | None = None,
    format: str = "onnx",
    *,
    batch: str | None = None,
    length: str | None = None,
    allow: Sequence[str] = (),
    overwrite: bool = False,
) -> list[str]:
    """Write the module of a run with a checkpoint's fp32 weights, by default beside it; return lines about it.

    Args:
        source: the folder of a run, or one of its checkpoints.
        output: the file to write.
        format: "onnx" or "torch_export".
        batch: range of the number of rows, such as "1:64", or one number.
        length: range of the second dimension.
        allow: prefixes of code that may be imported.
        overwrite: whether an existing file is replaced.

    Raises:
        CheckpointError: the checkpoint isn't in the folder of a run, or is of another module.
        SoloError: as `export_graph`.
    """
    ranges = {name: _range(f"--{name}", text) for name, text in (("batch", batch), ("length", length))}
    run = run_of(source, allow, "solo.export_graph(module, batch, 'file.onnx')")
    from lightning_solo.export.graphs import BATCH, SUFFIXES, export_graph
    from lightning_solo.export.trained_weights import load_trained_weights

    module, data = parts_of(run)
    load_trained_weights(module, run.checkpoint)
    return export_graph(
        module,
        _example(module if data is None else data),
        output or run.checkpoint.with_suffix(SUFFIXES[format]),
        format,
        batch_range=ranges["batch"] or BATCH,
        length_range=ranges["length"],
        overwrite=overwrite,
    )


def _range(option: str, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    if not (match := re.fullmatch(r"(\d+)(?::(\d+))?", text)):
        raise PresetError(
            f"{option} {text}: write the smallest and the largest size, such as {option} 1:64, or one size"
        )
    return int(match[1]), int(match[2] or match[1])


def _example(source: Any) -> Any:
    """Return the first training batch of a module, data module or loader."""
    if not hasattr(source, "train_dataloader"):
        return next(iter(source))
    source.prepare_data()
    source.setup("fit")
    try:
        return next(iter(source.train_dataloader()))
    except StopIteration:
        raise CheckpointError(
            f"the train_dataloader of {type(source).__name__} has no batch to trace forward with"
        ) from None
