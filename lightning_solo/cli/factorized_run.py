"""`lightning-solo export RUN --format factorized`: writes a run's factors, and measures the module before and after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_solo.cli.comparison import compared
from lightning_solo.cli.trained_run import parts_of, run_of
from lightning_solo.errors import CheckpointError, ConflictError


def write_factorized(
    source: Path,
    output: Path | None = None,
    format: str = "factorized",
    *,
    rank: int | float | None = None,
    layers: Sequence[str] | None = None,
    live: bool = False,
    allow: Sequence[str] = (),
    overwrite: bool = False,
) -> list[str]:
    """Write a run's module with factorized layers; return lines about it, with losses and seconds.

    Args:
        source: the folder of a run, or one of its checkpoints; without a run a checkpoint with factors.
        output: the folder to write; by default beside the checkpoint.
        format: of the export.
        rank: of a run without factors: the rank to which linear layers are factorized now, or a share of the energy.
        layers: patterns of names of those layers.
        live: whether the trained weights themselves are written where there is an average of them.
        allow: prefixes of code that may be imported.
        overwrite: whether an earlier export is replaced.

    Raises:
        ConflictError: a rank for a run that has factors.
        SoloError: as `export_factorized` and `factorize_linear`.
    """
    from lightning_solo.export.factorized import export_factorized
    from lightning_solo.export.sources import checkpoint_of
    from lightning_solo.export.trained_weights import load_trained_weights
    from lightning_solo.export.weights import source_of
    from lightning_solo.nn.factorized_layers import load
    from lightning_solo.nn.factorizing import factorize_linear

    checkpoint = checkpoint_of(source)
    output = output or checkpoint.with_name(f"{checkpoint.stem}-{format}")
    has_factors = bool(source_of(checkpoint, factors=True).factors)
    if has_factors and (rank is not None or layers is not None):
        raise ConflictError(f"{checkpoint} has factorized layers already; leave out --rank and --layers")
    try:
        run = run_of(source, allow, "solo.export_factorized(module, 'folder')")
    except CheckpointError:
        if not has_factors:
            raise
        lines = export_factorized(checkpoint, output, live=live, overwrite=overwrite)
        return [*lines, "loss and seconds: not measured, since there is no run"]
    module, data = parts_of(run)
    load_trained_weights(module, run.checkpoint)
    written: Any = run.checkpoint
    if rank is not None:
        written = parts_of(run)[0]
        load_trained_weights(written, run.checkpoint)
        factorize_linear(written, rank, layers)
    lines = export_factorized(written, output, live=live, overwrite=overwrite)
    lines.append("factorized after training" if rank is not None else "the run was trained with these factors")
    return [*lines, *compared(module, load(parts_of(run)[0], output), data)]
