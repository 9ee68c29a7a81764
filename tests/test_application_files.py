"""The command line's own configuration files: each says what it is for, and holds every argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_solo.cards.arguments import REQUIRED
from lightning_solo.presets.registry import NAMES
from lightning_solo.presets.signature import parameters

ROOT = Path(__file__).parents[1]
APPLICATION = sorted((ROOT / "conf" / "app").glob("*/*.yaml"))


@pytest.mark.parametrize("path", APPLICATION, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_file_of_the_application_says_what_it_is_for(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("# ") and not line.startswith("# @") for line in lines[:2])


@pytest.mark.parametrize("path", APPLICATION, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_argument_is_in_the_applications_files(path: Path) -> None:
    kind = path.parent.name
    node: Any = OmegaConf.to_container(OmegaConf.load(path))
    if kind not in ("model", "data") or "name" not in node:
        return
    accepted = parameters(NAMES[kind][node.pop("name")])
    assert list(node) == list(accepted)
    assert not [name for name, p in accepted.items() if p.default is REQUIRED and node[name] is None]
