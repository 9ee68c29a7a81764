"""Checkpoints of plain data, which load with ``weights_only=True``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def plain(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with plain containers instead of OmegaConf's, as ``save_hyperparameters`` stores them."""
    return {key: _plain(value) if key != "state_dict" else value for key, value in checkpoint.items()}


def _plain(value: Any) -> Any:
    if type(value).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf

        return OmegaConf.to_container(value) if OmegaConf.is_config(value) else copy.deepcopy(value)
    if type(value) is dict:
        return {key: _plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(each) for each in value)
    return value
