"""`lightning-solo show NAME [override ...]`: prints a preset, several as ``[NAME,NAME]``, or a technique in YAML."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

from omegaconf import OmegaConf

from lightning_solo.attach import show
from lightning_solo.cards.card import Card
from lightning_solo.cards.catalogue import catalogue
from lightning_solo.errors import PresetError
from lightning_solo.presets.compose import compose, compose_yaml
from lightning_solo.presets.files import names_in, preset_files


def run(arguments: Sequence[str]) -> int:
    """Print the preset after the checks of a run."""
    if not arguments:
        raise PresetError(f"show which preset? there are {', '.join(sorted(preset_files()))}")
    name, *overrides = arguments
    if "=" in name or name.startswith("~"):
        raise PresetError(f"show which preset? write its name first: lightning-solo show bf16 {name}")
    if several := [each for each in overrides if each in preset_files()]:
        raise PresetError(f"show several presets as a list: lightning-solo show '[{','.join([name, *several])}]'")
    overrides = [re.sub(r"^([+~]*)solo[./]", r"\1", text) for text in overrides]  # the prefix of `train`
    if name in catalogue().cards and name not in preset_files():
        print(technique(catalogue().cards[name], overrides), end="")
        return 0
    preset = names_in(name)
    compose(preset, overrides)
    with warnings.catch_warnings():  # compose has warned
        warnings.simplefilter("ignore")
        print(show(preset, overrides), end="")
    return 0


def technique(card: Card, overrides: Sequence[str]) -> str:
    """Return a technique's settings in YAML, after comments with its savings and the override that adds it."""
    node = compose_yaml("baseline", [f"+{card.group}={card.name}", *overrides])[card.group]
    saves = card.saves.replace("``", "")  # marks for the documentation
    head = f"# Saves {saves}.\n# A technique: +solo/{card.group}={card.name} adds it to a preset.\n"
    return f"{head}{OmegaConf.to_yaml(OmegaConf.create({card.group: node}))}"
