"""The command line of `lightning-solo plan`, checked before torch is imported."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_solo.cards.configuration import Configuration
from lightning_solo.cli.command_line import CheckedConfig
from lightning_solo.cli.ladder_line import composed, parsed
from lightning_solo.cli.options import Parser, positive
from lightning_solo.errors import CapabilityError, ConflictError, PresetError, SoloError, nearest
from lightning_solo.machine import is_installed
from lightning_solo.planner.bases import SOLVED
from lightning_solo.presets.compose import check_combination
from lightning_solo.presets.devices import Device, budget_bytes, budget_on, device
from lightning_solo.presets.files import names_in, preset_files
from lightning_solo.presets.old_spellings import refuse_old_preset
from lightning_solo.presets.overrides import refuse_twice
from lightning_solo.presets.parse import check_name
from lightning_solo.report.charts import PIP

OURS = {
    "run": "a plan writes no run; drop it",
    "root": "a plan writes no run; drop it",
    "resume": "a plan resumes nothing; drop it",
    "monitor": "a plan keeps no checkpoint; drop it",
    "fault_tolerance": "a plan keeps no checkpoint; drop it",
    "hydra": "a plan runs no job; drop it",
}
"""Override of `lightning-solo train` that a plan doesn't take -> what to write."""
TAKES = (
    "a plan takes overrides as `lightning-solo train` does, --device, --budget, --host-memory, --micro-batch,"
    " --presets, --save-preset, --largest, --multiple-of, --json and --picture; --calibrate alone"
)
DESCRIPTION = "Predict memory and time under each preset, also for a GPU that this machine lacks. Nothing is trained."
AUTO = "auto"  # the preset that trains with the best plan's preset


@dataclass(frozen=True)
class PlanOptions:
    """The checked command line; None stands for the default in brackets in an option's help."""

    overrides: tuple[str, ...]
    presets: tuple[str, ...]
    device: Device | None
    budget: int | None
    micro_batch: int | None
    as_json: bool
    picture: Path | None
    host_memory: int | None = None
    calibrate: bool = False
    all_presets: bool = True  # no preset is named
    largest: str = ""
    multiple_of: int | None = None
    solves: bool = True  # a plan whose blocks differ, too
    save_preset: str | None = None
    whole_batch: bool = False


def parse(arguments: Sequence[str]) -> PlanOptions:
    """Return the command line.

    Raises:
        PresetError: an unknown flag, a value out of range, or an override that a plan doesn't take.
        CapabilityError: a package that draws pictures is not installed.
    """
    parser = Parser("plan", DESCRIPTION, TAKES)
    parser.add_argument("overrides", nargs="*", help="as for `lightning-solo train`: model=byte_gpt_7b solo=bf16")
    parser.add_argument("--device", help="the device, such as rtx-4090, or cpu (this machine's)")
    parser.add_argument("--budget", help="its usable memory, such as 16GiB (all of it)")
    parser.add_argument("--host-memory", help="host memory of another machine, such as 64GiB (not checked)")
    parser.add_argument("--micro-batch", metavar="N", help="examples per forward (the data's batch)")
    parser.add_argument("--presets", help="presets, separated by commas; [a,b] combines two (all, and solved)")
    parser.add_argument("--save-preset", metavar="NAME", help="write the solved plan to conf/solo/NAME.yaml")
    parser.add_argument("--whole-batch", action="store_true", help="solve a plan without micro-batches")
    parser.add_argument("--largest", metavar="SETTING", help="find the largest value that fits, as of model.width")
    parser.add_argument("--multiple-of", metavar="N", help="with --largest: the values to try (64, or 1 below 64)")
    parser.add_argument("--json", action="store_true", help="print only JSON on standard output")
    parser.add_argument("--picture", metavar="FILE.png", help="draw each preset's peak by category")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine's device for later plans")
    options = parser.parse_intermixed_args(list(arguments))
    if options.calibrate and (others := [text for text in arguments if text not in ("--calibrate", "--json")]):
        raise ConflictError(
            f"--calibrate and {shlex.join(others)}: --calibrate measures this machine's device and plans nothing; write"
            " lightning-solo plan --calibrate, then plan"
        )
    if options.multiple_of is not None and options.largest is None:
        raise ConflictError(
            f"--multiple-of {options.multiple_of}: it is for --largest; write --largest model.width too, or drop it"
        )
    if options.largest is not None and re.split(r"[./]", options.largest.lstrip("+"))[0] in OURS:
        raise PresetError(f"--largest {options.largest}: a plan doesn't depend on it; write --largest model.width")
    if options.save_preset is not None:
        check_name(options.save_preset, "--save-preset ")
        if options.largest is not None:
            raise ConflictError("--save-preset and --largest: plan the value that --largest finds; drop one of them")
    preset = None
    for override in parsed(options.overrides):
        key = override.key_or_group
        if override.is_sweep_override():
            raise PresetError(f"{override.input_line!r} names several values; a plan takes one module: {_instead(key)}")
        first = re.split(r"[./]", key)[0]
        if first in OURS and key != "hydra.searchpath":
            raise PresetError(f"{override.input_line}: {OURS[first]}")
        if key == "solo" and not override.is_delete():
            value = override.value()
            preset = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
    if preset is not None and options.presets is not None:
        raise ConflictError(f"solo={preset} and --presets {options.presets}: keep one; --presets takes several names")
    named = options.presets if preset is None else preset
    unsolved, solves = _without_solved(named)
    if options.save_preset is not None and not solves:
        raise ConflictError(
            f"--save-preset {options.save_preset}: it writes the solved plan, which isn't among the presets {named};"
            f" write --presets {named},{SOLVED}, or drop it"
        )
    on = None if options.device is None else device(options.device)
    budget = budget_bytes(options.budget, "--budget")
    return PlanOptions(
        overrides=tuple(text for text in options.overrides if not text.lstrip("+").startswith("solo=")),
        all_presets=preset is None and options.presets is None,
        presets=_presets("--presets ", unsolved) if preset is None else _presets("solo=", preset),
        solves=solves and options.largest is None,
        save_preset=options.save_preset,
        whole_batch=options.whole_batch,
        device=on,
        budget=budget if on is None else budget_on(on, budget, f"--budget {options.budget}"),
        micro_batch=None if options.micro_batch is None else positive("--micro-batch", options.micro_batch, 8),
        as_json=options.json,
        picture=None if options.picture is None else _picture(options.picture),
        host_memory=budget_bytes(options.host_memory, "--host-memory"),
        calibrate=options.calibrate,
        largest=options.largest or "",
        multiple_of=None if options.multiple_of is None else positive("--multiple-of", options.multiple_of, 64),
    )


def _instead(key: str) -> str:
    return "write --presets a,b" if key == "solo" else "give one value"


def _without_solved(names: str | None) -> tuple[str | None, bool]:
    """Return the presets without the solved plan, and whether it is among them; None stands for all."""
    every = re.findall(r"\[[^]]*\]|[^,]+", names or "")
    left = [name for name in every if name.strip() != SOLVED]
    if len(left) == len(every):
        return names, names is None
    return ",".join(left) or None, True


def _presets(option: str, text: str | None) -> tuple[str, ...]:
    known = [name for name in preset_files() if name != AUTO]
    if text is None:
        return tuple(known)
    names = tuple(dict.fromkeys(name.strip() for name in re.findall(r"\[[^]]*\]|[^,]+", text) or [""]))
    for name in names:
        if isinstance(combination := names_in(name), list):
            check_combination(combination)
            continue
        if name == AUTO:
            raise PresetError(f"{option}{text}: auto chooses among the others by their plans; drop it, or name others")
        if name not in known:
            refuse_old_preset(name)
            raise PresetError(f"{option}{text}: no preset {name!r}{nearest(name, known)}there are {', '.join(known)}")
    return names


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() != ".png" or path.is_dir():
        raise PresetError(f"--picture {text}: must be the name of a PNG file, such as --picture plan.png")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise PresetError(f"--picture {text}: {folder} is a file, a folder is needed")
    for package in ("altair", "vl_convert"):
        if not is_installed(package):
            raise CapabilityError(f"--picture {text}: {package} is not installed; write: {PIP}")
    return path


def compose(options: PlanOptions) -> tuple[CheckedConfig, dict[str, Configuration], dict[str, SoloError]]:
    """Return the checked application, the configuration of each preset, and the errors of presets that refuse it.

    Raises:
        PresetError, ConflictError: every preset refuses the overrides.
    """
    overrides = parsed(options.overrides)
    refuse_twice(overrides)
    about_presets = any(override.key_or_group.startswith(("solo.", "solo/")) for override in overrides)
    first: CheckedConfig | None = None
    presets: dict[str, Configuration] = {}
    refused: dict[str, SoloError] = {}
    for name in options.presets:
        try:
            _, checked = composed([*options.overrides, f"solo={name}"])
        except SoloError as error:
            if first is None and not about_presets and isinstance(error, PresetError):
                raise  # a typo: every preset would refuse it
            refused[name] = error
            continue
        first = first or checked
        if replace(checked, solo=first.solo) != first:
            raise PresetError(
                f"model, data, optimizer and trainer differ between the presets {next(iter(presets))} and {name}; "
                f"plan one at a time: solo={name}"
            )
        presets[name] = checked.solo
    if first is None:
        raise next(iter(refused.values()))
    return first, presets, refused
