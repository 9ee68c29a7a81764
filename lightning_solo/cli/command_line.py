"""Checks the overrides of `lightning-solo train` before torch is imported: names, types, targets, number of jobs."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_solo.cards.arguments import check_arguments
from lightning_solo.cards.configuration import Chosen, Configuration
from lightning_solo.cli.application import GROUPS, SOLO_GROUPS, compose_application, refusal, search_path_override
from lightning_solo.cli.hydra_section import check_hydra
from lightning_solo.errors import ConflictError, PresetError, nearest
from lightning_solo.presets import old_spellings
from lightning_solo.presets.compose import (
    VERSION_BASE,
    check_combination,
    chosen_in,
    hydra_of_our_own,
    to_plain,
    with_remedies,
)
from lightning_solo.presets.files import check_choice, check_file, conf_folder, names_in, preset_files, user_conf_folder
from lightning_solo.presets.overrides import parse_override, refuse_twice
from lightning_solo.presets.parse import PRECISIONS, TRAINER, check_object, parse_configuration
from lightning_solo.presets.registry import target_of
from lightning_solo.presets.signature import parameters
from lightning_solo.secret_values import secret_in
from lightning_solo.sweeps.jobs import check_most, count_jobs

DEFAULT_OPTIMIZER = "adamw"
RESUME = ("never", "auto", "override")
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
FLAGS_WITH_VALUE = (
    "-cd",
    "--config-dir",
    "-cn",
    "--config-name",
    "-cp",
    "--config-path",
    "-p",
    "--package",
    "-c",
    "--cfg",
)
CHECKED_VALUES = 20  # of each override before a sweep; every job checks its own
TOP = (
    "run",
    "root",
    "resume",
    "monitor",
    "fault_tolerance",
    "seed",
    "allow",
    "trainer",
    "model",
    "data",
    "optimizer",
    "solo",
)


@dataclass(frozen=True)
class CheckedConfig:
    """The checked parts of the application's configuration, in plain containers.

    ``batch_chosen``: an override sets ``data.batch_size``, perhaps to the default.
    """

    solo: Configuration
    model: dict[str, Any]
    data: dict[str, Any]
    optimizer: dict[str, Any]
    trainer: dict[str, Any]
    allow: list[str]
    batch_chosen: bool = False


def chosen_batch(checked: CheckedConfig) -> int | None:
    """Return the batch size that the user chose for the default text data; None if unchanged, or for other data."""
    if checked.data.get("name") != "stdlib_text":
        return None
    default = parameters(target_of("data", "stdlib_text", "data.name"))["batch_size"].default
    batch = checked.data.get("batch_size", default)
    return batch if checked.batch_chosen or batch != default else None


def check_command_line(arguments: Sequence[str]) -> None:
    """Refuse a command line with mistakes that can be found without the model.

    Raises:
        PresetError: an unknown preset, field or argument, a wrong value, an empty or endless sweep, a bad run name.
        ConflictError: two choices that cannot be combined.
    """
    flags, overrides = split(arguments)
    if any(flag.startswith("--experimental-rerun") for flag in flags):
        raise PresetError("--experimental-rerun unpickles a file, which could run any code; give the overrides again")
    if any(flag.partition("=")[0] in ("-cn", "--config-name", "-cp", "--config-path") for flag in flags):
        raise PresetError(
            "--config-name and --config-path: lightning-solo train has its own application; write experiment=<name> for"
            " conf/experiment/<name>.yaml"
        )
    if any(flag in ("-h", "--help", "--hydra-help", "--version") for flag in flags):
        return
    sweeping = any(flag in ("-m", "--multirun") for flag in flags)
    parsed = _parsed(overrides, sweeping=sweeping)
    counts = count_jobs(parsed)
    choices = [_choices(override) for override in parsed]
    first = [texts[0] for texts in choices]
    if sweeping:
        _refuse_sweep(parsed, counts, first)
    for index, texts in enumerate(choices):  # each value beside the first value of every other override
        for text in texts[0 if index == 0 else 1 :]:
            _check_job([*first[:index], text, *first[index + 1 :]])
    if not choices:
        _check_job([])


def _parsed(overrides: Sequence[str], *, sweeping: bool) -> list[Override]:
    for text in overrides:
        if (name := secret_in(text)) is not None:
            key = text.partition("=")[0]
            raise PresetError(
                f"{key}=...: the run's files would have the value of ${name}; write {key}='${{oc.env:{name}}}'"
            )
    parsed = [parse_override(text) for text in overrides]
    refuse_twice(parsed)
    swept = [str(o.input_line) for o in parsed if o.is_sweep_override()]
    if not sweeping and swept:
        key, _, values = swept[0].partition("=")
        combined = f", or '{key}=[{values}]' to combine them" if key == "solo" else ""
        raise PresetError(f"{swept[0]!r} names several values; write -m for a sweep over them{combined}")
    return parsed


def check_config(cfg: DictConfig, overrides: Sequence[str] = ()) -> CheckedConfig:
    """Return the checked parts of the application's configuration.

    Raises:
        PresetError: an unknown key, name or argument, a wrong value, a forbidden target, a bad run name.
        ConflictError: two choices that cannot be combined; a Trainer argument that the preset sets.
    """
    for key in map(str, cfg):
        if key not in (*TOP, "hydra"):
            raise PresetError(f"{key}: no such key{nearest(key, TOP)}there are {', '.join(TOP)}")
    plain = {"model": None, "data": None, "optimizer": None, **to_plain(OmegaConf.masked_copy(cfg, list(TOP)))}
    for key in TOP:
        if key not in plain:
            raise PresetError(f"~{key}: a run needs {key}; drop that")
    allow = plain["allow"]
    if not isinstance(allow, list) or not all(isinstance(prefix, str) and prefix for prefix in allow):
        raise PresetError(f"allow={allow!r}: must be a list of prefixes, such as allow=[my_project]")
    if plain["resume"] not in RESUME:
        raise PresetError(
            f"resume={plain['resume']!r}{nearest(str(plain['resume']), RESUME)}one of {', '.join(RESUME)}"
        )
    check_run_name(plain["run"])
    if type(plain["fault_tolerance"]) is not bool:
        raise PresetError(f"fault_tolerance={plain['fault_tolerance']!r}: must be true or false")
    if type(plain["seed"]) is not int or not 0 <= plain["seed"] < 2**32:
        raise PresetError(f"seed={plain['seed']!r}: must be an integer from 0 to {2**32 - 1}, such as seed=1")
    for kind in ("model", "data"):
        check_object(kind, plain[kind], allow)
    check_object("optimizer", plain["optimizer"], allow, given=["params"])
    if plain["optimizer"] and "optimizer" not in (plain["model"] or {}):
        _refuse_unused_optimizer(plain["optimizer"], overrides)
        plain["optimizer"] = {}
    hydra: Any = cfg.get("hydra") or (HydraConfig.get() if HydraConfig.initialized() else None)
    chosen = chosen_in(hydra) if "hydra" in cfg else ""
    try:
        solo = parse_configuration(plain["solo"], allow, chosen)
    except ConflictError as error:
        names = names_in(chosen)
        names = names if isinstance(names, list) else []
        raise ConflictError(with_remedies(str(error), plain["solo"], (), allow, names=names)) from error
    check_arguments(plain["trainer"], parameters(TRAINER), "trainer")
    if old := old_spellings.refusal_of_argument(plain["trainer"].get("strategy")):
        raise PresetError(old)
    _refuse_set_twice(solo, plain["trainer"])
    return CheckedConfig(
        solo=solo,
        model=plain["model"] or {},
        data=plain["data"] or {},
        optimizer=plain["optimizer"] or {},
        trainer=plain["trainer"],
        allow=allow,
        batch_chosen=hydra is not None and any(text.startswith("data.batch_size=") for text in hydra.overrides.task),
    )


def _refuse_unused_optimizer(optimizer: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Refuse a chosen optimizer if the model has its own; the default optimizer is not a choice."""
    default = OmegaConf.to_container(OmegaConf.load(conf_folder() / f"app/optimizer/{DEFAULT_OPTIMIZER}.yaml"))
    chosen = [text for text in overrides if text.lstrip("+~").startswith(("optimizer=", "optimizer."))]
    if chosen or optimizer != default:
        raise ConflictError(
            f"{' '.join(chosen) or 'optimizer'} and model: this model has its own optimizer; drop yours, or pass it as"
            " an argument: '+model.optimizer=${optimizer}'"
        )


def check_run_name(name: object) -> None:
    """Refuse a run name that is not a plain file name."""
    if not isinstance(name, (str, int)) or not RUN_NAME.fullmatch(str(name)):
        raise PresetError(
            f"run={name!r}: must be 1 to 100 letters, digits, '.', '_' or '-', the first a letter or digit, "
            f"such as run=first"
        )


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (flags with their values, overrides). Hydra's parser refuses flags between overrides."""
    flags, overrides = [], []
    waiting = False
    for argument in arguments:
        if waiting or argument.startswith("-"):
            waiting = not waiting and argument in FLAGS_WITH_VALUE
            flags.append(argument)
        else:
            overrides.append(argument)
    return flags, overrides


def _choices(override: Override) -> list[str]:
    """Return an override of a sweep as overrides with one value each, the first `CHECKED_VALUES` of them."""
    text = str(override.input_line)
    if not override.is_sweep_override():
        return [text]
    if isinstance(override._value, Glob):
        raise PresetError(f"{text!r}: write the names themselves, separated by commas")
    if override.is_discrete_sweep():
        values = itertools.islice(override.sweep_string_iterator(), CHECKED_VALUES)
        return [f"{override.get_key_element()}={value}" for value in values]
    interval: Any = override.value()
    return [f"{override.get_key_element()}={value}" for value in (interval.start, interval.end)]


def _refuse_sweep(overrides: Sequence[Override], counts: Mapping[str, int], first: Sequence[str]) -> None:
    """Refuse an interval or too many jobs, unless the sweep is a search."""
    try:
        section = compose_application(first).hydra
    except (HydraException, OmegaConfBaseException):
        return  # the check of the first job says why
    if not str(section.sweeper.get("_target_")).endswith(".BasicSweeper"):
        return
    for override in overrides:
        if override.is_interval_sweep():
            raise PresetError(
                f"{override.input_line!r}: only a search takes an interval; write hydra/sweeper=solo_optuna"
            )
    check_most(counts, section.launcher.get("max_jobs"))


def _check_job(overrides: Sequence[str]) -> None:
    check_names([parse_override(text) for text in overrides])
    try:
        cfg = compose_application(overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise refusal(error, overrides) from error
    check_application(cfg, overrides)


@contextmanager
def composed_once(overrides: Sequence[str]) -> Iterator[tuple[DictConfig, CheckedConfig, HydraContext]]:
    """Yield the application's configuration, its checked parts, and the context for Hydra's `run_job`.

    Raises:
        PresetError, ConflictError: as `check_command_line`.
    """
    check_names(_parsed(overrides, sweeping=False))
    with hydra_of_our_own(), initialize_config_dir(str(conf_folder() / "app"), job_name="train", **VERSION_BASE):
        app = GlobalHydra.instance().hydra
        assert app is not None
        try:
            cfg = app.compose_config("train", [*search_path_override(overrides), *overrides], RunMode.RUN)
        except (HydraException, OmegaConfBaseException) as error:
            raise refusal(error, overrides) from error
        checked = check_application(cfg, overrides)
        cfg.hydra.mode = cfg.hydra.mode or RunMode.RUN  # as `hydra.main` leaves it; an experiment may say MULTIRUN
        yield cfg, checked, HydraContext(config_loader=app.config_loader, callbacks=Callbacks(cfg))


def check_names(overrides: Sequence[Override]) -> None:
    """Refuse unknown names of presets, techniques, models, data and optimizers, before Hydra runs."""
    for override in overrides:
        key, text = override.key_or_group, str(override.input_line)
        if override.is_delete():
            continue
        if key in GROUPS:
            _check_choice(key, override.value())
        if key in SOLO_GROUPS:
            check_choice(key.removeprefix("solo/"), override.value())
        group = f"solo/{key}"
        if group in SOLO_GROUPS and isinstance(override.value(), str | list):
            check_choice(key, override.value())
            raise PresetError(f"{text!r}: a {key} is part of the preset; write +{group}={text.partition('=')[2]}")
        if key == "run":
            check_run_name(override.value())


def check_application(cfg: DictConfig, overrides: Sequence[str]) -> CheckedConfig:
    """Return the checked parts of the application, after checks of Hydra's section and of the run's folder.

    Raises:
        PresetError, ConflictError: as `check_config`, `check_hydra` and `check_root`.
    """
    check_hydra(cfg)
    refuse_trust_in_files(cfg, overrides)
    checked = check_config(cfg, overrides)
    check_root(Path(str(cfg.root)) / str(cfg.run))
    return checked


def refuse_trust_in_files(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse ``allow`` in a configuration file, which may come from elsewhere."""
    if cfg.get("allow") and not any(parse_override(text).key_or_group == "allow" for text in overrides):
        names = ",".join(map(str, cfg.allow))
        raise PresetError(
            f"allow=[{names}] is set in a configuration file, which could allow any code; if you trust these prefixes,"
            f" write allow=[{names}] on the command line"
        )


def _check_choice(group: str, choice: object) -> None:
    folders = [conf_folder() / "app" / group, (user_conf_folder() or Path()) / group]
    there = preset_files() if group == "solo" else [path.stem for f in folders for path in sorted(f.glob("*.yaml"))]
    if choice is None and group == "experiment":
        return
    if group == "solo" and isinstance(choice, list):
        check_combination(choice)
        return
    if not isinstance(choice, str) or choice not in there:
        what = "preset" if group == "solo" else group
        raise PresetError(
            f"{group}={choice}: no {what} of that name{nearest(str(choice), there)}there are {', '.join(there)}"
        )
    if group == "solo":
        check_file(choice)


def check_root(folder: Path) -> None:
    """Refuse a run's folder that can't be written."""
    if any(part.endswith(":") for part in folder.parts[:1]):
        raise PresetError(
            f"root={folder.parent}: a run is written to a local folder; write root=<folder>, and upload it afterwards"
        )
    if ".." in folder.parts:
        raise PresetError(f"root={folder.parent}: must not lead upwards; write an absolute path to leave this folder")
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not there.is_dir():
        raise PresetError(f"root={folder.parent}: {there} is a file, a folder is needed; write root=<folder>")
    try:
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        raise PresetError(
            f"root={folder.parent}: nothing can be written to {there} ({error.strerror}); write root=<folder>"
        ) from error


def _refuse_set_twice(solo: Configuration, trainer: Mapping[str, Any]) -> None:
    promised = {
        "devices": solo.devices or (None if solo.engine else 1),
        "precision": solo.precision,
        "strategy": solo.strategy.card.name if isinstance(solo.strategy, Chosen) else None,
        "accumulate_grad_batches": solo.accumulate_grad_batches,
        "accelerator": "cuda" if solo.needs_cuda() else None,
    }
    if "callbacks" in trainer:
        raise ConflictError(
            f"trainer.callbacks={trainer['callbacks']!r}: callbacks belong to the preset; write "
            f"'+solo.callback.mine={{_target_: my_project.MyCallback}}' and allow=[my_project]"
        )
    for name, value in promised.items():
        given = PRECISIONS.get(str(trainer.get(name)), trainer.get(name)) if name == "precision" else trainer.get(name)
        if value is not None and name in trainer and given != value:
            if name == "devices" and not solo.engine:
                raise ConflictError(solo.one_device(f"trainer.devices={trainer[name]}"))
            remedy = f"drop trainer.{name}"
            if name in ("precision", "accumulate_grad_batches", "devices"):
                wanted: dict[str, Any] = {name: given}
                remedy = _instead(replace(solo, **wanted), remedy, f"solo.{name}={trainer[name]}")
            raise ConflictError(f"trainer.{name}={trainer[name]!r} and the preset's {name}={value!r}: {remedy}")


def _instead(solo: Configuration, remedy: str, override: str) -> str:
    """Return the remedy with an override, or with the reason why the preset can't have it."""
    try:
        solo.check()
    except ConflictError as error:
        return f"{remedy}; with {override} there is this conflict: {error}"
    return f"write {override} and {remedy}"
