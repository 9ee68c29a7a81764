"""The command line of `lightning-solo plan`, checked before torch is imported."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from lightning_solo.cli.command_line import CheckedConfig
from lightning_solo.cli.ladder_line import composed, parsed
from lightning_solo.errors import CapabilityError, ConflictError, PresetError, SoloError, nearest
from lightning_solo.machine import is_installed
from lightning_solo.presets.compose import refuse_twice
from lightning_solo.presets.devices import Device, budget_on, device
from lightning_solo.presets.files import preset_files
from lightning_solo.presets.schema import SoloConfig
from lightning_solo.report.charts import PIP
from lightning_solo.units import parse_bytes

OURS = {
    "run": "a plan writes no run; drop it",
    "root": "a plan writes no run; drop it",
    "resume": "a plan goes on with nothing; drop it",
    "monitor": "a plan keeps no checkpoint; drop it",
    "hydra": "a plan runs no job; drop it",
}
"""Overrides of `lightning-solo train` that a plan has no use for, and what to write."""
DESCRIPTION = "What training would take under each preset, on a GPU that need not be here: nothing is trained."
AUTO = "auto"  # is itself an answer to a plan


@dataclass(frozen=True)
class Given:
    """The command line, checked.

    Attributes:
        overrides: as for `lightning-solo train`, without the preset.
        presets: their names.
        device: None for the one that is here, which only torch can tell.
        budget: bytes; None for all that the device has, where that is the one that is here.
        host_memory: bytes; None for what is available on this host, where the plan is for this machine.
        micro_batch: None for the batch of the data.
        as_json: whether standard output is for a program.
        picture: a PNG file to write.
        calibrate: whether the device that is here is to be measured, and nothing planned.
    """

    overrides: tuple[str, ...]
    presets: tuple[str, ...]
    device: Device | None
    budget: int | None
    micro_batch: int | None
    as_json: bool
    picture: Path | None
    host_memory: int | None = None
    calibrate: bool = False


class Parser(argparse.ArgumentParser):
    """Refuses in our words, not by printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise PresetError(
            f"{message}; a plan takes overrides as `lightning-solo train` does, --device, --budget, --host-memory,"
            " --micro-batch, --presets, --json and --picture; --calibrate alone"
        )


def parse(arguments: Sequence[str]) -> Given:
    """Return the command line.

    Raises:
        PresetError: a flag or a value that can't be, an override that a plan has no use for.
        CapabilityError: a picture is asked for, and what draws it is not installed.
    """
    parser = Parser(prog="lightning-solo plan", allow_abbrev=False, description=DESCRIPTION)
    parser.add_argument("overrides", nargs="*", help="as for `lightning-solo train`: model=byte_gpt_7b solo=bf16")
    parser.add_argument("--device", help="a GPU that need not be here, such as rtx-4090, or cpu (the one that is here)")
    parser.add_argument("--budget", help="how much of its memory may be taken, such as 16GiB (all of it)")
    parser.add_argument("--host-memory", help="of a machine that isn't this one, such as 64GiB (not judged)")
    parser.add_argument("--micro-batch", metavar="N", help="examples per forward (the data's batch)")
    parser.add_argument("--presets", help="some of the presets, joined by commas (all)")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on standard output")
    parser.add_argument("--picture", metavar="FILE.png", help="draw the peak of each preset by category")
    parser.add_argument("--calibrate", action="store_true", help="measure the device that is here, for later plans")
    found = parser.parse_intermixed_args(list(arguments))
    if found.calibrate and (others := [text for text in arguments if text not in ("--calibrate", "--json")]):
        raise ConflictError(
            f"--calibrate and {shlex.join(others)}: it measures the device that is here, and plans nothing; write"
            " lightning-solo plan --calibrate, then plan"
        )
    preset = None
    for override in parsed(found.overrides):
        key = override.key_or_group
        if override.is_sweep_override():
            raise PresetError(f"{override.input_line!r} names several values; a plan is of one module: {_instead(key)}")
        first = re.split(r"[./]", key)[0]
        if first in OURS and key != "hydra.searchpath":
            raise PresetError(f"{override.input_line}: {OURS[first]}")
        if key == "solo" and not override.is_delete():
            preset = str(override.value())
    if preset is not None and found.presets is not None:
        raise ConflictError(f"solo={preset} and --presets {found.presets}: keep one; --presets takes several names")
    on = None if found.device is None else device(found.device)
    return Given(
        overrides=tuple(text for text in found.overrides if not text.lstrip("+").startswith("solo=")),
        presets=_presets(preset if preset is not None else found.presets, "--presets " if preset is None else "solo="),
        device=on,
        budget=_budget(found.budget, on),
        micro_batch=_micro_batch(found.micro_batch),
        as_json=found.json,
        picture=_picture(found.picture),
        host_memory=_size(found.host_memory, "--host-memory"),
        calibrate=found.calibrate,
    )


def _instead(key: str) -> str:
    return "write --presets a,b" if key == "solo" else "give one value"


def _presets(given: str | None, option: str) -> tuple[str, ...]:
    there = [name for name in preset_files() if name != AUTO]
    if given is None:
        return tuple(there)
    names = tuple(dict.fromkeys(name.strip() for name in given.split(",")))
    for name in names:
        if name == AUTO:
            raise PresetError(
                f"{option}{given}: auto trains with what a plan picks; drop it, or choose among the others"
            )
        if name not in there:
            raise PresetError(f"{option}{given}: no preset {name!r}{nearest(name, there)}there are {', '.join(there)}")
    return names


def _budget(given: str | None, on: Device | None) -> int | None:
    budget = _size(given, "--budget")
    return budget if on is None else budget_on(on, budget, f"--budget {given}")


def _size(given: str | None, option: str) -> int | None:
    if given is None:
        return None
    try:
        return parse_bytes(given)
    except ValueError as error:
        raise PresetError(f"{option} {error}") from None


def _micro_batch(given: str | None) -> int | None:
    if given is None:
        return None
    if not given.isdecimal() or not int(given):
        raise PresetError(f"--micro-batch {given}: must be an integer of at least 1, such as --micro-batch 8")
    return int(given)


def _picture(given: str | None) -> Path | None:
    if given is None:
        return None
    path = Path(given)
    if path.suffix.lower() != ".png" or path.is_dir():
        raise PresetError(f"--picture {given}: must be the name of a PNG file, such as --picture plan.png")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise PresetError(f"--picture {given}: {folder} is a file, a folder is needed")
    for package in ("altair", "vl_convert"):
        if not is_installed(package):
            raise CapabilityError(f"--picture {given}: {package} is not installed; write: {PIP}")
    return path


def compose(given: Given) -> tuple[CheckedConfig, dict[str, SoloConfig], dict[str, SoloError]]:
    """Return what is trained, each preset, and those that refuse the overrides; checked as `lightning-solo train` does.

    Raises:
        PresetError, ConflictError: no preset takes the overrides.
    """
    overrides = parsed(given.overrides)
    refuse_twice(overrides)
    about_presets = any(override.key_or_group.startswith(("solo.", "solo/")) for override in overrides)
    whole: CheckedConfig | None = None
    presets: dict[str, SoloConfig] = {}
    refused: dict[str, SoloError] = {}
    for name in given.presets:
        try:
            _, checked = composed([*given.overrides, f"solo={name}"])
        except SoloError as error:
            if whole is None and not about_presets and isinstance(error, PresetError):
                raise  # a typo: no other preset would take it either
            refused[name] = error
            continue
        whole = whole or checked
        if replace(checked, solo=whole.solo) != whole:
            raise PresetError(
                f"model, data, optimizer and trainer differ between the presets {next(iter(presets))} and {name}; "
                f"plan one at a time: solo={name}"
            )
        presets[name] = checked.solo
    if whole is None:
        raise next(iter(refused.values()))
    return whole, presets, refused
