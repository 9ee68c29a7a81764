"""`lightning-solo show NAME [override ...]`: a preset, or several as ``[NAME,NAME]``, as composed, in YAML."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

from lightning_solo.attach import show
from lightning_solo.errors import PresetError
from lightning_solo.presets.compose import compose
from lightning_solo.presets.files import names_in, preset_files


def run(arguments: Sequence[str]) -> int:
    """Print the preset, checked as a run would check it."""
    if not arguments:
        raise PresetError(f"show which preset? there are {', '.join(sorted(preset_files()))}")
    name, *overrides = arguments
    preset = names_in(name)
    overrides = [re.sub(r"^([+~]*)solo\.", r"\1", text) for text in overrides]  # as written for `train`
    compose(preset, overrides)
    with warnings.catch_warnings():  # said by compose
        warnings.simplefilter("ignore")
        print(show(preset, overrides), end="")
    return 0
