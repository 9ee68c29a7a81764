"""Checks the section `hydra`, whose callbacks, launcher, sweeper and log handlers Hydra calls before our code."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_solo.atomic_files import is_name
from lightning_solo.errors import PresetError
from lightning_solo.presets.files import leaves
from lightning_solo.presets.parse import is_allowed, targets

LOG_CLASSES = ("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler", "colorlog.ColoredFormatter")
STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
LOG_FOLDER = "${hydra.runtime.output_dir}/"
FOLDERS = {"run.dir": "${root}/${run}", "sweep.dir": "${root}/${run}", "sweep.subdir": "${hydra.job.num}"}
CALLED = ("launcher", "sweeper", "job_logging", "hydra_logging", "callbacks")
"""Sections of which Hydra makes objects, or whose objects it calls."""
ENVIRONS = ("launcher", "sweeper")
"""Sections among them whose values may be variables of the environment."""
ENVIRONMENT = re.compile(r"\$\{oc\.env:[^{}]*\}")
CHECKED = ("${hydra.sweep.dir}", "${hydra.job.name}")
"""Values that are checked below, of which launchers of clusters make the names of their folders and jobs."""


def check_hydra(cfg: DictConfig) -> None:
    """Refuse what Hydra would call before our code, set in the environment, or write outside the run's folder.

    Raises:
        PresetError: a target that is neither Hydra's nor a plugin's, or a resolver that makes one from a string; a
            module to import; an environment variable; another folder or log file.
    """
    plain = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(plain, dict)
    for path, text in leaves(plain):
        if isinstance(text, str) and ("oc.create" in text or "oc.decode" in text):
            raise PresetError(f"{path}={text!r}: oc.create and oc.decode could make any object; write the value itself")
    hydra: Any = plain["hydra"]
    for path, target in targets(hydra, "hydra"):
        if not is_allowed(str(target), ("hydra._internal.core_plugins", "hydra_plugins")):
            raise PresetError(f"{path}._target_={target!r}: only Hydra's own launchers and sweepers, and its plugins'")
    for path, text in leaves(hydra, "hydra"):
        section, value = path.split(".")[1], str(text)
        for name in CHECKED:
            value = value.replace(name, "")
        harmless = value.startswith(LOG_FOLDER) or (section in ENVIRONS and ENVIRONMENT.fullmatch(value))
        if section in CALLED and "${" in value and not harmless:
            raise PresetError(f"{path}={text!r}: could lead to any object; write the value itself")
    if hydra.get("callbacks"):
        raise PresetError("hydra.callbacks: would run code of its own; a callback of Lightning goes to solo.callback")
    allow = ("lightning", "lightning_solo", *(plain.get("allow") or ()))
    for name in (hydra.get("launcher") or {}).get("preload") or ():
        if not is_allowed(str(name), allow):
            raise PresetError(f"hydra.launcher.preload=[{name}]: its import runs code; if you trust it, allow=[{name}]")
    for name in hydra["job"].get("env_set") or {}:
        raise PresetError(f"hydra.job.env_set.{name}: write it before the command: {name}=... lightning-solo train")
    _check_folders(hydra)
    for path, text in leaves({name: hydra[name] for name in ("job_logging", "hydra_logging")}, "hydra"):
        _check_logging(path, str(text))


def _check_folders(hydra: dict[str, Any]) -> None:
    for path, default in FOLDERS.items():
        group, _, name = path.partition(".")
        if hydra[group][name] != default:
            raise PresetError(f"hydra.{path}={hydra[group][name]!r}: write root=<folder> and run=<name>")
    for path, name in (("job.name", hydra["job"]["name"]), ("output_subdir", hydra["output_subdir"] or "x")):
        if not is_name(str(name)) or "$" in str(name):
            raise PresetError(f"hydra.{path}={name!r}: must be the name of a file, without a path")


def _check_logging(path: str, text: str) -> None:
    if path.endswith((".class", ".()")) and text not in LOG_CLASSES:
        raise PresetError(f"{path}={text!r}: allowed are {', '.join(LOG_CLASSES)}")
    if text.startswith(("ext:", "cfg:")) and text not in STREAMS:
        raise PresetError(f"{path}={text!r}: allowed are {', '.join(STREAMS)}")
    name = text.removeprefix(LOG_FOLDER).replace("${hydra.job.name}", "train")
    if path.endswith(".filename") and not (text.startswith(LOG_FOLDER) and is_name(name) and "$" not in name):
        raise PresetError(f"{path}={text!r}: must be a file in the run's folder, such as {LOG_FOLDER}train.log")
