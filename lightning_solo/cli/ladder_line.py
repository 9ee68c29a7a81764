"""The command line of `lightning-solo ladder`: checked, and turned into the configuration of each combination."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_solo.cli.command_line import (
    CheckedConfig,
    check_command_line,
    check_config,
    check_root,
    chosen_batch,
    compose_application,
)
from lightning_solo.cli.options import Parser, positive, size
from lightning_solo.errors import PresetError
from lightning_solo.ladder.ladder import Prepared
from lightning_solo.ladder.rungs import LadderTechnique, chosen, folder_name, overrides_of
from lightning_solo.ladder.rungs import techniques as rungs
from lightning_solo.presets.overrides import parse_override, refuse_twice
from lightning_solo.sweeps.jobs import Settings

OURS = {
    "solo": "the ladder chooses the presets, from `baseline` on; drop it, or choose techniques: --techniques bf16",
    "trainer.max_steps": "every rung takes as many optimizer steps; write --steps 25",
    "resume": "a ladder always resumes where the same command stopped; drop it",
    "hydra/launcher": "a ladder runs on hydra/launcher=solo; drop it",
    "monitor": "a rung keeps no checkpoint; drop it",
}
"""Overrides of `lightning-solo train` that a ladder has no use for, and what to write."""


@dataclass(frozen=True)
class RungConfig:
    """The configuration of one rung, for its process."""

    checked: CheckedConfig
    seed: int
    steps: int
    folder: str


@dataclass(frozen=True)
class LadderOptions:
    """The command line, checked: overrides of `lightning-solo train`, and the ladder's own options."""

    overrides: tuple[str, ...]
    steps: int
    until: int | None
    techniques: tuple[LadderTechnique, ...]

    @property
    def of_the_task(self) -> tuple[str, ...]:
        """The overrides of what is trained, without those of where and how it runs."""
        return tuple(t for t in self.overrides if not t.lstrip("+~").startswith(("hydra", "run=", "root=")))


def parse(arguments: Sequence[str]) -> LadderOptions:
    """Return the command line.

    Raises:
        PresetError: an unknown flag, a value out of range, or an override that a ladder has no use for.
    """
    takes = "a ladder takes overrides as `lightning-solo train` does, --steps, --until and --techniques"
    parser = Parser("ladder", __doc__.splitlines()[0], takes)
    parser.add_argument("overrides", nargs="*", help="as for `lightning-solo train`: model=custom model._target_=...")
    parser.add_argument("--steps", default="25", help="optimizer steps of each rung (25)")
    parser.add_argument("--until", help="stop at the first combination whose peak memory is within this, such as 16GiB")
    parser.add_argument("--techniques", help=f"some of the rungs, joined by commas: {', '.join(rungs())}")
    options = parser.parse_intermixed_args(list(arguments))
    steps, until = positive("--steps", options.steps, 25), size("--until", options.until)
    for override in parsed(options.overrides):
        key = override.key_or_group
        if override.is_sweep_override():
            raise PresetError(
                f"{override.input_line!r} names several values; a ladder is of one module: give one value"
            )
        if key in OURS:
            raise PresetError(f"{override.input_line}: {OURS[key]}")
    return LadderOptions(tuple(options.overrides), steps, until, chosen(options.techniques))


def parsed(overrides: Sequence[str]) -> list[Override]:
    """Return Hydra's own reading of overrides."""
    return [parse_override(text) for text in overrides]


def compose_base(options: LadderOptions) -> DictConfig:
    """Return the baseline's configuration, checked like that of `lightning-solo train`."""
    overrides = overrides_of((), options.overrides, options.techniques)
    check_command_line(overrides)
    return compose_application(overrides)


def prepare(techniques: tuple[LadderTechnique, ...], options: LadderOptions, folder: Path) -> Prepared:
    """Return a combination with the configuration for its process.

    Raises:
        PresetError, ConflictError: as `check_config`.
    """
    overrides = overrides_of(techniques, options.of_the_task, options.techniques)
    refuse_twice(parsed(overrides))
    cfg, checked = composed(overrides)
    smaller = same_global_batch(checked, overrides)
    if smaller != overrides:
        cfg, checked = composed(smaller)
    config = RungConfig(checked, int(cfg.seed), options.steps, str((folder / folder_name(techniques)).absolute()))
    text = json.dumps([asdict(checked), config.seed, config.steps], sort_keys=True, default=str)
    return Prepared(tuple(smaller), config, hashlib.sha256(text.encode()).hexdigest()[:16])


def composed(overrides: Sequence[str]) -> tuple[DictConfig, CheckedConfig]:
    """Return the application's configuration, and its parts, checked."""
    try:
        cfg = compose_application(overrides)
    except (HydraException, OmegaConfBaseException):
        check_command_line(overrides)  # raises an error of its own, with the remedy
        raise
    return cfg, check_config(cfg, overrides)


def same_global_batch(checked: CheckedConfig, overrides: Sequence[str]) -> list[str]:
    """Return the overrides with the batch divided by the micro-batches of a step, where it is an argument.

    A loader whose batch is not an argument keeps it; the row then notes that its steps take more samples.
    """
    factor, argument = checked.solo.first_factor, batch_argument(checked)
    if factor == 1 or argument is None or argument[1] % factor:
        return list(overrides)
    key, batch = argument
    return with_batch(overrides, key, batch // factor)


def batch_argument(checked: CheckedConfig) -> tuple[str, int] | None:
    """Return key and value of the argument that sets the loader's batch; None where there is none.

    A custom module may bring its own loader, for which ``data.batch_size`` is refused: that counts where it was chosen.
    """
    if "_target_" in checked.model and "batch_size" not in checked.model and "_target_" not in checked.data:
        batch = chosen_batch(checked.data)
        return None if batch is None else ("data.batch_size", batch)
    group = "data" if "_target_" in checked.data or "batch_size" not in checked.model else "model"
    batch = getattr(checked, group).get("batch_size")
    return (f"{group}.batch_size", batch) if isinstance(batch, int) else None


def with_batch(overrides: Sequence[str], key: str, batch: int) -> list[str]:
    """Return overrides with another value of the argument that sets the loader's batch."""
    kept = [text for text in overrides if text.lstrip("+").partition("=")[0] != key]
    mark = next((text[: text.index(key)] for text in overrides if text.lstrip("+").partition("=")[0] == key), "")
    return [*kept, f"{mark}{key}={batch}"]


def settings_of(cfg: DictConfig) -> tuple[Settings, tuple[str, ...]]:
    """Return the settings of the processes and the modules to preload, from ``hydra.launcher``."""
    launcher: Any = cfg.hydra.launcher
    if not str(launcher.get("_target_")).endswith("SoloLauncher"):
        raise PresetError(
            f"hydra/launcher={cfg.hydra.runtime.choices['hydra/launcher']}: a ladder runs on solo; drop it"
        )
    return Settings(**{f.name: launcher[f.name] for f in fields(Settings)}), tuple(launcher.preload)


def folder_of(options: LadderOptions, cfg: DictConfig) -> Path:
    """Return the ladder's folder: named by ``run=``, else by a hash of the command."""
    named = any(override.key_or_group == "run" for override in parsed(options.overrides))
    what = [sorted(options.of_the_task), options.steps, [technique.name for technique in options.techniques]]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:8]
    folder = Path(str(cfg.root)) / (str(cfg.run) if named else f"ladder-{digest}")
    check_root(folder)
    return folder
