"""`lightning-solo plan --largest model.width`: the largest value of a setting with which a preset fits."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra.utils import get_object
from omegaconf import OmegaConf

from lightning_solo.cli.command_line import CheckedConfig
from lightning_solo.cli.ladder_line import composed, parsed
from lightning_solo.cli.plan_line import PlanOptions
from lightning_solo.errors import PresetError, nearest
from lightning_solo.planner.plan import Plan

MOST = 2**20
"""Times the first value, up to which larger ones are tried."""
COARSE = 64
"""Multiple of which widths usually are."""


@dataclass(frozen=True)
class Setting:
    """A numeric setting whose largest value is searched."""

    key: str  # its name in the configuration, such as ``model.width``
    value: int  # the first value that is planned
    multiple_of: int  # the number that divides each value
    prefix: str = ""  # of its override: ``+`` for an argument that the configuration lacks

    def options(self, options: PlanOptions, value: int) -> PlanOptions:
        """Return the command line with a value."""
        others = [text for text in options.overrides if _key(text) != self.key]
        return replace(options, overrides=(*others, f"{self.prefix}{self.key}={value}"))


def setting_of(options: PlanOptions) -> Setting:
    """Return the setting of ``--largest``, with the value that it has in the configuration.

    Raises:
        PresetError: the configuration lacks it, or it isn't a whole number of at least 1.
    """
    key = options.largest.lstrip("+")
    prefix = next(("+" for text in options.overrides if _key(text) == key and text.startswith("+")), "")
    first = next((name for name in options.presets), "")
    cfg, checked = composed([*options.overrides, f"solo={first}"])
    value = OmegaConf.select(cfg, key)
    if value is None:
        if re.fullmatch(r"-?[\d.]+", key):
            raise PresetError(f"--largest {key}: must be a setting's name, not its value; write --largest model.width")
        value, prefix = _default(checked, key), "+"
    if value is None:
        try:
            composed([*options.overrides, f"+{key}=1", f"solo={first}"])
        except PresetError as error:
            raise PresetError(f"--largest {options.largest}: {str(error).removeprefix(f'{key}=1: ')}") from error
        raise PresetError(
            f"--largest {options.largest}: the configuration has no value of {key} to start from; write one:"
            f" {key}=64 --largest {key}, or +{key}=64 for an argument of your own class"
        )
    if type(value) is not int or value < 1:
        raise PresetError(f"--largest {options.largest}: {key} is {value!r}, and only whole numbers from 1 are tried")
    return Setting(key, value, options.multiple_of or _multiple(value), prefix)


def largest(fits: Callable[[int], bool], first: int, multiple_of: int) -> tuple[int, int | None]:
    """Return the largest multiple that fits, and the next one, which doesn't, by doubling and bisection.

    The first number is 0 if none fits. The second is None if the largest value that is tried fits.

    >>> largest(lambda value: value <= 1000, 100, 64)
    (960, 1024)
    """
    low, high = 0, None
    units = max(first // multiple_of, 1)
    most = units * MOST
    while high is None and units <= most:
        if fits(units * multiple_of):
            low, units = units, 2 * units
        else:
            high = units
    if high is None:
        return low * multiple_of, None
    while low == 0 and high > 1:  # the first value is too large
        units = high // 2
        low, high = (units, high) if fits(units * multiple_of) else (0, units)
    while high - low > 1:
        units = (low + high) // 2
        low, high = (units, high) if fits(units * multiple_of) else (low, units)
    return low * multiple_of, high * multiple_of


def thriftiest(plans: Sequence[Plan]) -> Plan:
    """Return the plan that takes the smallest share of the device's and the host's memory."""

    def share(plan: Plan) -> float:
        on_host = plan.host_needed_bytes / plan.host_memory_bytes if plan.host_memory_bytes else 0.0
        return max(plan.needed_bytes / plan.budget_bytes, on_host)

    return min(plans, key=share)


def line(setting: Setting, value: int, plan: Plan) -> str:
    """Return the result of a value, in words."""
    return f"{setting.key}={value}: {plan.preset} {plan.verdict}, needs {plan.needs}"


def conclusion(setting: Setting, value: int, too_large: int | None, preset: str, refusal: str = "") -> str:
    """Return the largest value, in words, and if the next one can't be planned, why."""
    multiples = f" of the multiples of {setting.multiple_of}" if setting.multiple_of > 1 else ""
    if not value:
        return f"no {setting.key} fits with {preset}, down to {setting.multiple_of}"
    if too_large is None:
        return f"{setting.key}={value} still fits with {preset}: no limit was reached"
    found = f"{setting.key}={value} is the largest{multiples} that"
    if refusal:
        others = "--multiple-of N tries only multiples of N"
        return f"{found} was found to fit with {preset}; {too_large} can't be planned ({refusal}); {others}"
    finer = "; --multiple-of 1 tries all numbers" if setting.multiple_of > 1 else ""
    return f"{found} fits with {preset}; {too_large} doesn't{finer}"


def _default(checked: CheckedConfig, key: str) -> Any:
    """Return the default of a custom class's argument; None if the class or the default is unknown.

    Raises:
        PresetError: the class names no such argument.
    """
    group, name, *_ = [*key.split("."), ""]
    node = getattr(checked, group) if group in ("model", "data") else {}
    try:
        known = inspect.signature(get_object(node["_target_"])).parameters
    except Exception:  # no custom class, or one that can't be imported, which a plan says
        return None
    if name not in known:
        names = [each for each, parameter in known.items() if parameter.kind is not parameter.VAR_KEYWORD]
        others = (
            f"; for one of **kwargs write a first value: +{key}=64 --largest {key}" if len(names) < len(known) else ""
        )
        raise PresetError(
            f"--largest {key}: {node['_target_']} names no argument {name!r}{nearest(name, names)}there are"
            f" {', '.join(names) or 'none'}{others}"
        )
    return None if known[name].default is inspect.Parameter.empty else known[name].default


def _multiple(value: int) -> int:
    """Return the largest power of two up to 64 that divides a value from 64 on, else 1."""
    return 1 if value < COARSE else min(value & -value, COARSE)


def _key(text: str) -> Any:
    return parsed([text])[0].key_or_group
