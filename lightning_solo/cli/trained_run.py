"""A trained run, read from its folder: its checked configuration and one of its checkpoints."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_solo.cards.configuration import Configuration
from lightning_solo.cli.command_line import CheckedConfig, check_config
from lightning_solo.errors import CheckpointError, PresetError
from lightning_solo.presets import old_spellings
from lightning_solo.presets.overrides import parse_override
from lightning_solo.requirements import check_machine

CHANGEABLE = ("data", "model", "trainer", "solo")
"""Keys of a run's configuration that a command may override."""
CHECKPOINTS = ("last", "best")
PATHS = ("path", "tokenizer", "chat_template", "new_tokens", "cache", "predict_path")
"""Arguments of models and data that may be paths even without a slash."""


@dataclass(frozen=True)
class TrainedRun:
    """A run to use again."""

    folder: Path  # of the run
    checkpoint: Path  # the file with the weights to use
    checked: CheckedConfig  # the run's configuration; a null of the model is the value that training took from the data
    seed: int  # of the run

    def configuration(self) -> Configuration:
        """Return the preset, or what `auto` chose when the run began."""
        from lightning_solo.cli.train import AUTO_FILE, chosen

        if self.checked.solo.auto is None:
            return self.checked.solo
        return chosen(self.checked, self.folder / AUTO_FILE, resumes=True)[0]


def open_run(
    folder: Path, checkpoint: str = "last", overrides: Sequence[str] = (), allow: Sequence[str] = ()
) -> TrainedRun:
    """Return a run by its folder.

    Args:
        folder: of the run.
        checkpoint: one of `CHECKPOINTS`, or the path of a file.
        overrides: ``key=value`` of `CHANGEABLE`.
        allow: prefixes of code that may be imported.

    Raises:
        CheckpointError: the folder isn't one of a run, or has no such checkpoint.
        PresetError: a wrong override; or the run's code is in no prefix of ``allow``.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        raise CheckpointError(
            f"{folder} is not the folder of a run of lightning-solo train, which has config.yaml; write that folder"
            " (one file of it by --checkpoint FILE)"
        )
    try:
        cfg: Any = OmegaConf.create(file.read_text(encoding="utf-8"))
        if not OmegaConf.is_dict(cfg):
            raise ValueError("it is no mapping")
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise CheckpointError(f"{file} can't be read ({str(error).partition(chr(10))[0]})") from error
    _make_absolute(cfg, folder)
    cfg.fault_tolerance = False  # of training
    cfg.run, cfg.root, cfg.resume = folder.resolve().name, str(folder.resolve().parent), "never"
    fields: Any = OmegaConf.to_container(cfg.get("solo") or OmegaConf.create({}), resolve=False)
    cfg.solo = {name: value for name, value in old_spellings.updated(fields).items() if value != "???"}  # not set
    if lacking := [prefix for prefix in cfg.get("allow") or () if prefix not in allow]:
        raise PresetError(
            f"{file} has code of {', '.join(map(str, lacking))}, and a file could name any code; if you trust it, write"
            f" --allow {','.join(map(str, cfg.allow))}"
        )
    cfg.allow = list(allow)
    for text in overrides:
        override = parse_override(text)
        key = override.key_or_group
        if key.partition(".")[0] not in CHANGEABLE or "." not in key or override.is_delete():
            raise PresetError(
                f"{text!r}: write data., model., trainer. or solo. with a name, such as data.batch_size=64"
            )
        OmegaConf.update(cfg, key, override.value(), force_add=True)
    weights = _checkpoint(folder, checkpoint)
    checked = check_config(cfg)
    return TrainedRun(folder, weights, replace(checked, model=_as_trained(checked.model, weights)), cfg.seed)


def _make_absolute(cfg: Any, folder: Path) -> None:
    """Make relative paths of a run's model and data absolute.

    They begin in the folder in which the run was started. It is known where ``root`` is a relative path: this and the
    run's name are the end of the run's own path.
    """
    own, here = (Path(str(cfg.get("root"))) / folder.resolve().name).parts, folder.resolve().parts
    if here[-len(own) :] != own or (start := Path(*here[: -len(own)])) == Path.cwd():
        return
    for part in filter(OmegaConf.is_dict, (cfg.get("model"), cfg.get("data"))):
        values: Any = OmegaConf.to_container(part, resolve=False)
        for key, value in values.items():
            is_path = isinstance(value, str) and (key in PATHS or os.sep in value) and "${" not in value
            if is_path and (start / value).exists():  # an absolute path stays
                part[key] = str(start / value)


def run_of(source: Path, allow: Sequence[str], in_python: str) -> TrainedRun:
    """Return the run that a folder or one of its checkpoints belongs to.

    Args:
        source: the folder or the checkpoint.
        allow: prefixes of code that may be imported.
        in_python: a call that needs no run, for the message.

    Raises:
        CheckpointError: there is none.
    """
    if not source.exists():
        raise CheckpointError(f"{source}: no such file or folder; write the folder of a run, or one of its checkpoints")
    folder = source if source.is_dir() else source.absolute().parents[1]
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(
            f"{source}: {folder} is no run of lightning-solo train, so its module is unknown; write {in_python} in"
            " Python"
        )
    return open_run(folder, "last" if source.is_dir() else str(source), allow=allow)


def parts_of(run: TrainedRun, *, whole: bool = False) -> tuple[Any, Any]:
    """Return a run's module with the weights that it begins with, and its data.

    It is as small as its checkpoint, unless it is to be ``whole``, as before channels or heads were removed.
    """
    from lightning_solo.cli.train import build_parts
    from lightning_solo.export.pruned_structure import RECORD, load_sizes, structure_of

    module, data = build_parts(run.checked, announces=False)
    module.configure_model()
    if not whole:
        load_sizes(module, {RECORD: structure_of(run.checkpoint)})
    return module, data


def _checkpoint(folder: Path, name: str) -> Path:
    from lightning_solo.cli.generate import best_of
    from lightning_solo.export.sources import checkpoint_of

    if name not in CHECKPOINTS:
        return checkpoint_of(Path(name))
    last = checkpoint_of(folder)
    return best_of(last, "--checkpoint best") if name == "best" else last


def _as_trained(model: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Return a model's arguments, with those that are null as its checkpoint has them, such as names of labels."""
    from lightning_solo.export.sources import read

    if not checkpoint.is_file() or None not in model.values():
        return dict(model)
    saved = read(checkpoint, inert=True).get("hyper_parameters", {})
    return {name: saved.get(name) if value is None else value for name, value in model.items()}


def rebuilt(run: TrainedRun, folder: Path) -> tuple[Any, Any, Any]:
    """Return (Trainer, module, data) of a run with its preset; the Trainer neither logs nor saves.

    Raises:
        CapabilityError: this machine lacks something that the preset needs.
        PresetError: the Trainer refuses an argument.
    """
    configuration = run.configuration()
    check_machine(configuration)
    import lightning as L

    from lightning_solo.build import trainer_arguments
    from lightning_solo.cli.train import build_parts, quieten
    from lightning_solo.seams.homes import fabric_part, home_of, part

    quieten()
    warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks used to create")
    L.seed_everything(run.seed, workers=True, verbose=False)
    module, data = build_parts(run.checked)
    home = home_of(module)
    silent = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    preset = trainer_arguments(configuration, lightning=home)
    arguments = {"default_root_dir": str(folder), **run.checked.trainer, **preset, **silent}
    misconfigured = fabric_part(home, "utilities.exceptions").MisconfigurationException
    try:
        return part(home, "trainer").Trainer(**arguments), module, data
    except (ImportError, misconfigured, TypeError, ValueError) as error:
        raise PresetError(f"trainer: {error}") from error
