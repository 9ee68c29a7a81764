"""`lightning-solo export RUN --format quantized`: rounds a run's weights, and measures the module before and after."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_solo.attributes import replaced
from lightning_solo.cli.comparison import BATCHES, compared, validate_on_cpu
from lightning_solo.cli.trained_run import parts_of, run_of
from lightning_solo.errors import CheckpointError, NothingToDoError, PresetError, SoloError

DEFAULTS = {"bits": 4, "group_size": 32, "activations": "unchanged", "layers": "linear"}


def write_quantized(
    source: Path,
    output: Path | None = None,
    format: str = "quantized",
    *,
    bits: int | str | None = None,
    group_size: int | None = None,
    activations: str | None = None,
    calibration_batches: int | None = None,
    layers: Sequence[str] | None = None,
    live: bool = False,
    allow: Sequence[str] = (),
    overwrite: bool = False,
) -> list[str]:
    """Write a run's module with weights of few bits; return lines about it, with losses and seconds.

    Args:
        source: the folder of a run, or one of its checkpoints.
        output: the folder to write; by default beside the checkpoint.
        format: of the export.
        bits: of a weight; this, ``group_size``, ``activations`` and ``layers`` are by default as the run rounded.
        group_size: inputs of a layer whose weights share a scale; 0 for a scale per row.
        activations: "int8", "int8_static" or "unchanged".
        calibration_batches: of the run's validation that give "int8_static" its scales, by default `BATCHES`; of a run
            without validation those of training.
        layers: patterns of names.
        live: whether the trained weights themselves are rounded and measured where there is an average of them.
        allow: prefixes of code that may be imported.
        overwrite: whether an earlier export is replaced.

    Raises:
        CheckpointError: the source is no run; or the weights are of another module.
        NothingToDoError: the run trained adapters.
        SoloError: as `export_quantized`.
    """
    run = run_of(source, allow, "solo.export_quantized(module, 'folder')")
    from lightning_solo.export.quantized import STATIC, export_quantized
    from lightning_solo.export.sources import read
    from lightning_solo.export.weights import source_of, widest_weights
    from lightning_solo.nn.adapter_weights import RECORD as ADAPTER
    from lightning_solo.nn.factorizing import restructure
    from lightning_solo.nn.fake_quantization import RECORD, Rounding
    from lightning_solo.nn.packed_weights import load

    output = output or run.checkpoint.with_name(f"{run.checkpoint.stem}-{format}")
    saved = read(run.checkpoint, inert=True) if run.checkpoint.is_file() else {}
    if ADAPTER in saved:
        raise NothingToDoError(
            f"{run.checkpoint} has adapters alone; write --format hf, which merges them, and then in Python"
            " solo.export_quantized(AutoModelForCausalLM.from_pretrained(<that folder>), 'folder')"
        )
    record = saved.get(RECORD, {})
    patterns = "linear" if layers == ["linear"] else layers
    written = {"bits": bits, "group_size": group_size, "activations": activations, "layers": patterns}
    options: dict[str, Any] = {**DEFAULTS, **record, **{name: v for name, v in written.items() if v is not None}}
    if calibration_batches is not None and options["activations"] != STATIC:
        raise PresetError(
            f"--calibration-batches {calibration_batches} and --activations {options['activations']}: batches give"
            f" scales to --activations {STATIC}; write that, or leave --calibration-batches out"
        )
    module, data = parts_of(run)
    if options["activations"] == STATIC:
        batches = BATCHES if calibration_batches is None else calibration_batches
        options["calibrate"] = lambda module: _calibrated(module, data, batches)
    weights = source_of(run.checkpoint, live=live, factors=True)
    if {each["form"]["kind"] for each in weights.factors.get("layers", {}).values()} - {"linear"}:
        weights = source_of(run.checkpoint, live=live)  # the products of an embedding's factors
    elif weights.factors:
        restructure(module, weights.factors)
    try:  # rounded in training were the weights as they are; otherwise fp32 masters are closer
        module.load_state_dict(weights.weights if record else widest_weights(weights))
    except RuntimeError as error:
        raise CheckpointError(
            f"{run.checkpoint} has weights of another module than {run.folder}/config.yaml:"
            f" {textwrap.shorten(str(error), 300, placeholder=' ...')}"
        ) from error
    try:
        lines = export_quantized(module, output, **options, overwrite=overwrite)
    except SoloError as error:
        words = re.sub(
            r"\b(bits|group_size|activations|layers)=", lambda match: f"--{match[1].replace('_', '-')} ", str(error)
        )
        raise type(error)(words) from error
    aware = bool(record) and all(options[name] == value for name, value in record.items())
    if weights.averaged:
        lines.append(f"{weights.averaged} of its weights are averages; --live takes the weights that were averaged")
    lines.append("the run was trained with these rounded weights" if aware else "quantization after training")
    rounding = Rounding(*(options[name] for name in ("bits", "group_size", "activations"))) if aware else None
    as_trained = partial(_round, module, rounding, options["layers"]) if rounding else None
    return [*lines, *compared(module, load(parts_of(run)[0], output), data, as_trained)]


def _round(module: Any, rounding: Any, patterns: Any) -> None:
    """Make a module compute with rounded weights, as in training."""
    from lightning_solo.nn.fake_quantization import chosen_layers, round_weights
    from lightning_solo.nn.packed_weights import kernels_past

    choice = chosen_layers(module, rounding, patterns)
    round_weights(choice, rounding)
    for part, name, value in kernels_past(module, choice.modules):
        setattr(part, name, value)


def _calibrated(module: Any, data: Any, batches: int) -> None:
    """Run the module on batches of validation, or on those of training where there are none."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.utilities.model_helpers import is_overridden

    try:
        validate_on_cpu(module, data, batches)
    except MisconfigurationException:  # no step or no loader of validation
        source = module if data is None else data
        if data is not None:
            data.setup("fit")
        step = "validation_step" if is_overridden("validation_step", module) else "training_step"
        with replaced(module, "validation_step", getattr(module, step)):
            validate_on_cpu(module, source.train_dataloader(), batches)
