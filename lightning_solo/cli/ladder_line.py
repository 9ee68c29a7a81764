"""The command line of `lightning-solo ladder`: its checks, and the configuration of each combination."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_solo.cli.application import compose_application
from lightning_solo.cli.command_line import (
    CheckedConfig,
    check_command_line,
    check_config,
    check_root,
    chosen_batch,
)
from lightning_solo.cli.options import Parser, positive
from lightning_solo.errors import PresetError
from lightning_solo.ladder.ladder import Prepared
from lightning_solo.ladder.rungs import LadderTechnique, chosen, folder_name, overrides_of
from lightning_solo.ladder.rungs import techniques as rungs
from lightning_solo.presets.devices import budget_bytes
from lightning_solo.presets.overrides import parse_override, refuse_twice
from lightning_solo.presets.signature import parameters_of_class
from lightning_solo.sweeps.jobs import Settings

OURS = {
    "solo": "a ladder starts at `baseline` and chooses techniques; drop it, or choose some: --techniques bf16",
    "trainer.max_steps": "every rung takes the same number of optimizer steps; write --steps 25",
    "resume": "the same command always resumes a ladder; drop it",
    "hydra/launcher": "a ladder runs on hydra/launcher=solo; drop it",
    "monitor": "a rung keeps no checkpoint; drop it",
    "fault_tolerance": "a rung keeps no checkpoint; drop it",
}
"""Override of `lightning-solo train` that a ladder doesn't take -> what to write."""


@dataclass(frozen=True)
class RungConfig:
    """The configuration of one rung's process."""

    checked: CheckedConfig
    seed: int
    steps: int
    folder: str


@dataclass(frozen=True)
class LadderOptions:
    """The checked command line: overrides of `lightning-solo train`, and the ladder's options."""

    overrides: tuple[str, ...]
    steps: int
    until: int | None
    techniques: tuple[LadderTechnique, ...]

    @property
    def of_the_task(self) -> tuple[str, ...]:
        """The overrides without those that set the folder or Hydra's own section."""
        return tuple(t for t in self.overrides if not t.lstrip("+~").startswith(("hydra", "run=", "root=")))


def parse(arguments: Sequence[str]) -> LadderOptions:
    """Return the command line.

    Raises:
        PresetError: an unknown flag, a value out of range, or an override that a ladder doesn't take.
    """
    takes = "a ladder takes overrides as `lightning-solo train` does, --steps, --until and --techniques"
    parser = Parser("ladder", __doc__.splitlines()[0], takes)
    parser.add_argument("overrides", nargs="*", help="as for `lightning-solo train`: model=custom model._target_=...")
    parser.add_argument("--steps", default="25", help="optimizer steps of each rung (25)")
    parser.add_argument(
        "--until", help="stop at the first combination with a peak memory of at most this, such as 16GiB"
    )
    parser.add_argument("--techniques", help=f"some of {', '.join(rungs())}, or of all techniques, separated by commas")
    options = parser.parse_intermixed_args(list(arguments))
    steps, until = positive("--steps", options.steps, 25), budget_bytes(options.until, "--until")
    for override in parsed(options.overrides):
        key = override.key_or_group
        if override.is_sweep_override():
            raise PresetError(
                f"{override.input_line!r} names several values; a ladder takes one module: give one value"
            )
        if key in OURS:
            raise PresetError(f"{override.input_line}: {OURS[key]}")
    return LadderOptions(tuple(options.overrides), steps, until, chosen(options.techniques))


def parsed(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides."""
    return [parse_override(text) for text in overrides]


def compose_base(options: LadderOptions) -> DictConfig:
    """Return the baseline's configuration, with the checks of `lightning-solo train`."""
    overrides = overrides_of((), options.overrides, options.techniques)
    check_command_line(overrides)
    return compose_application(overrides)


def prepare(techniques: tuple[LadderTechnique, ...], options: LadderOptions, folder: Path) -> Prepared:
    """Return a combination that is ready to run, and the configuration of its process.

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
    """Return the application's configuration and its checked parts."""
    try:
        cfg = compose_application(overrides)
    except (HydraException, OmegaConfBaseException):
        check_command_line(overrides)  # raises an error with a remedy
        raise
    return cfg, check_config(cfg, overrides)


def same_global_batch(checked: CheckedConfig, overrides: Sequence[str]) -> list[str]:
    """Return overrides that divide the batch size by the micro-batches of a step, so that a step keeps its samples.

    If the loader's batch size isn't an argument, it stays, and the row notes that its steps take more samples.
    """
    factor, argument = checked.solo.first_factor, batch_argument(checked)
    if factor == 1 or argument is None or argument[1] % factor:
        return list(overrides)
    key, batch = argument
    return with_batch(overrides, key, batch // factor)


def batch_argument(checked: CheckedConfig) -> tuple[str, int] | None:
    """Return (override key, value) of the argument that sets the loader's batch; None if there is none.

    For a custom module, ``data.batch_size`` counts only if the user chose it, because the module may have a loader.
    """
    if "_target_" in checked.model and "batch_size" not in checked.model and "_target_" not in checked.data:
        batch = chosen_batch(checked)
        return None if batch is None else ("data.batch_size", batch)
    group = "data" if "_target_" in checked.data or "batch_size" not in checked.model else "model"
    batch = getattr(checked, group).get("batch_size")
    return (f"{group}.batch_size", batch) if isinstance(batch, int) else None


def suggested_argument(checked: CheckedConfig, data: Any) -> str | None:
    """Return the override key that would set the loader's batch size; None if its class takes no ``batch_size``.

    Args:
        checked: a configuration that doesn't set it.
        data: the data, or None if the module has its own loader.
    """
    group = "model" if data is None else "data"
    node = getattr(checked, group)
    if "_target_" not in node:
        return f"{group}.batch_size"
    accepted = parameters_of_class(get_object(node["_target_"]))
    return f"+{group}.batch_size" if accepted is None or "batch_size" in accepted else None


def with_batch(overrides: Sequence[str], key: str, batch: int) -> list[str]:
    """Return overrides with another batch size."""
    kept = [text for text in overrides if text.lstrip("+").partition("=")[0] != key]
    mark = next((text[: text.index(key)] for text in overrides if text.lstrip("+").partition("=")[0] == key), "")
    return [*kept, f"{mark}{key}={batch}"]


def settings_of(cfg: DictConfig) -> tuple[Settings, tuple[str, ...]]:
    """Return the processes' settings and the modules to preload, from ``hydra.launcher``."""
    launcher: Any = cfg.hydra.launcher
    if not str(launcher.get("_target_")).endswith("SoloLauncher"):
        raise PresetError(
            f"hydra/launcher={cfg.hydra.runtime.choices['hydra/launcher']}: a ladder needs the launcher solo; drop it"
        )
    return Settings(**{f.name: launcher[f.name] for f in fields(Settings)}), tuple(launcher.preload)


def folder_of(options: LadderOptions, cfg: DictConfig) -> Path:
    """Return the ladder's folder; its name is that of ``run=``, or a hash of the command."""
    named = any(override.key_or_group == "run" for override in parsed(options.overrides))
    what = [sorted(options.of_the_task), options.steps, [technique.name for technique in options.techniques]]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:8]
    folder = Path(str(cfg.root)) / (str(cfg.run) if named else f"ladder-{digest}")
    check_root(folder)
    return folder
