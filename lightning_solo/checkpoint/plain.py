"""Checkpoints of plain data, which load with ``weights_only=True``."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from typing import Any

import torch

from lightning_solo.secret_values import secret_in

HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
TYPES = ("hparams_type", "datamodule_hparams_type")
"""Keys of the classes of OmegaConf's containers, to which Lightning would turn hyperparameters back."""


def plain(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a checkpoint that ``weights_only=True`` loads, and the hyperparameters that were left out of it.

    OmegaConf's containers, as ``save_hyperparameters`` stores them, become plain ones. Hyperparameters that can't be
    loaded, such as an optimizer's constructor, are left out, and those with a secret of the environment; they are
    returned with the names of their classes or secrets.
    """
    changed = {key: _plain(value) if key != "state_dict" else value for key, value in checkpoint.items()}
    for key in TYPES:
        changed.pop(key, None)
    left_out: dict[str, str] = {}
    for key in HYPERPARAMETERS:
        values = changed.get(key)
        if isinstance(values, Mapping):
            refused = {name: type(value).__name__ for name, value in values.items() if not _is_loadable(value)}
            refused |= {name: f"${found}" for name, value in values.items() if (found := secret_in(value)) is not None}
            changed[key] = {name: value for name, value in values.items() if name not in refused}
            left_out |= refused
    return changed, left_out


def _is_loadable(value: Any) -> bool:
    if value is None or isinstance(value, bool | int | float | str):
        return True
    content = io.BytesIO()
    try:
        torch.save(value, content)
        content.seek(0)
        torch.load(content, weights_only=True)
    except Exception:  # of many kinds, by the value
        return False
    return True


def _plain(value: Any) -> Any:
    if type(value).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf

        return OmegaConf.to_container(value) if OmegaConf.is_config(value) else copy.deepcopy(value)
    if type(value) is dict:
        return {key: _plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(each) for each in value)
    return value
