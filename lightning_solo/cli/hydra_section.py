"""Checks the section `hydra`, whose callbacks, launcher, sweeper and log handlers Hydra calls before our code."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from lightning_solo.errors import PresetError
from lightning_solo.presets.files import leaves
from lightning_solo.presets.parse import is_allowed, targets

LOG_CLASSES = ("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler", "colorlog.ColoredFormatter")


def check_hydra(cfg: DictConfig) -> None:
    """Refuse foreign callbacks, launchers and log handlers, which Hydra would call before our code.

    Raises:
        PresetError: a target that is neither Hydra's nor a plugin's, or a resolver that makes one from a string.
    """
    plain = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(plain, dict)
    for path, text in leaves(plain):
        if isinstance(text, str) and ("oc.create" in text or "oc.decode" in text):
            raise PresetError(f"{path}={text!r}: oc.create and oc.decode could make any object; write the value itself")
    for path, target in targets(plain["hydra"], "hydra"):
        if not is_allowed(str(target), ("hydra._internal.core_plugins", "hydra_plugins")):
            raise PresetError(f"{path}._target_={target!r}: only Hydra's own launchers and sweepers, and its plugins'")
    if plain["hydra"].get("callbacks"):
        raise PresetError("hydra.callbacks: would run code of its own; a callback of Lightning goes to solo.callback")
    for path, text in leaves({name: plain["hydra"][name] for name in ("job_logging", "hydra_logging")}, "hydra"):
        if path.endswith((".class", ".()")) and text not in LOG_CLASSES:
            raise PresetError(f"{path}={text!r}: allowed are {', '.join(LOG_CLASSES)}")
