"""`lightning-solo export RUN --format pruned`: writes a run's pruned weights, and measures both modules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_solo.cli.comparison import compared, validated
from lightning_solo.cli.trained_run import parts_of, run_of
from lightning_solo.errors import CheckpointError


def write_pruned(
    source: Path,
    output: Path | None = None,
    format: str = "pruned",
    *,
    dtype: str = "fp32",
    live: bool = False,
    allow: Sequence[str] = (),
    overwrite: bool = False,
) -> list[str]:
    """Write a checkpoint's weights as `export_pruned` does. For a run, the lines have losses and seconds, too.

    Args:
        source: the folder of a run, or a checkpoint.
        output: the folder to write; by default beside the checkpoint.
        format: of the export.
        dtype: of the weights.
        live: whether the trained weights themselves are written where there is an average of them.
        allow: prefixes of code that may be imported.
        overwrite: whether an earlier export is replaced.

    Raises:
        SoloError: as `export_pruned`.
    """
    from lightning_solo.export.pruned import export_pruned
    from lightning_solo.export.pruned_structure import structure_of
    from lightning_solo.export.sources import checkpoint_of
    from lightning_solo.export.sparse_weights import load
    from lightning_solo.export.trained_weights import load_trained_weights

    checkpoint = checkpoint_of(source)
    output = output or checkpoint.with_name(f"{checkpoint.stem}-{format}")
    lines = export_pruned(source, output, dtype, live=live, overwrite=overwrite)
    try:
        run = run_of(source, allow, "solo.export_pruned(module, 'folder')")
    except CheckpointError:
        return [*lines, "loss and seconds: not measured, since there is no run"]
    module, data = parts_of(run)
    load_trained_weights(module, run.checkpoint)
    lines += compared(module, load(parts_of(run)[0], output), data)
    if structure_of(checkpoint) is not None and "not measured" not in lines[-1]:
        seconds = validated(parts_of(run, whole=True)[0], data)[1]
        lines.append(f"seconds of a validation batch with all channels and heads: {seconds:.4f}")
    return lines
