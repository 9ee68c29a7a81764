"""Overrides of a preset: checked by name before Hydra composes, applied to the composed fields.

An override has Hydra's syntax, Lightning's names of fields and no prefix: `precision=32-true`,
`callback.memory_logger.every_n_steps=10`, `+callback=throughput` (adds one), `~callback.memory_logger` (removes one).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from lightning_solo.errors import PresetError, nearest
from lightning_solo.presets.config_source import FIELDS
from lightning_solo.presets.files import check_choice, preset_files
from lightning_solo.presets.parse import card_of, unknown_field

GROUPS = ("callback", "strategy")
MISSING: Any = object()


def parse_overrides(texts: Sequence[str]) -> tuple[Override, ...]:
    """Parse and check overrides of a preset.

    Raises:
        PresetError: not of the form field=value; an unknown field, callback or strategy; a sweep; a repeated key.
    """
    if isinstance(texts, (str, Mapping)):
        raise PresetError(f"overrides={texts!r}: must be a list of strings, such as ['precision=32-true']")
    overrides = tuple(map(parse_override, texts))
    for override in overrides:
        _check(override)
    refuse_twice(overrides)
    return overrides


def parse_override(text: str) -> Override:
    """Parse one override.

    Raises:
        PresetError: not of the form key=value.
    """
    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, AttributeError, TypeError) as error:
        reason = f" ({error})" if "=" in text else ""
        if text in preset_files():
            reason = f"; the preset is chosen by solo={text}, several by 'solo=[{text},...]'"
        raise PresetError(f"override {text!r}: not of the form key=value{reason}") from error


def _check(override: Override) -> None:
    text, key = str(override.input_line), override.key_or_group
    if override.is_sweep_override():
        raise PresetError(f"override {text!r}: one value at a time; sweeps are for the command line's -m")
    field, value = key.split(".")[0], None if override.is_delete() else override.value()
    if field not in FIELDS:
        raise PresetError(unknown_field(key, value, marks_of(override)))
    if not is_choice(override):
        if override.is_delete() and "=" in text:
            below = f".{text.partition('=')[2]}" if key == "callback" else ""
            raise PresetError(f"{text!r}: a deletion takes no value; write ~{key}{below}")
        return
    if field == "callback":
        check_not_replacing(override)
    if value is None:
        raise PresetError(f"{text!r}: write ~{key}{'.<name> to remove one' if key == 'callback' else ''}")
    check_choice(field, value)


def check_not_replacing(override: Override) -> None:
    """Refuse a choice of callbacks that isn't added."""
    if not override.is_add() and not override.is_delete():
        text = str(override.input_line)
        raise PresetError(
            f"{text!r} would replace every callback of the preset; write +{text} to add one, ~callback.<name> to remove"
            " one"
        )


def is_choice(override: Override) -> bool:
    """Return whether an override chooses a callback or strategy by name; Hydra applies such an override."""
    return override.key_or_group in GROUPS and not override.is_delete()


def refuse_twice(overrides: Sequence[Override]) -> None:
    """Refuse two overrides of the same key; Hydra would silently use the last."""
    keys = [override.key_or_group for override in overrides]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice:
        same = [override for override in overrides if override.key_or_group == twice]
        remedy = "keep one"
        if twice.removeprefix("solo/") == "callback" and all(override.is_add() for override in same):
            remedy = f"write +{twice}=[{','.join(str(o.get_value_string()).strip('[]') for o in same)}]"
        raise PresetError(f"{twice} is set twice, by {' and '.join(repr(o.input_line) for o in same)}; {remedy}")


def marks_of(override: Override) -> str:
    """Return the marks before an override's key: ``+``, ``++``, ``~`` or none."""
    line = str(override.input_line)
    return line[: len(line) - len(line.lstrip("+~"))]


def apply_override(fields: DictConfig, override: Override) -> None:
    """Apply an override to the fields of a preset.

    Raises:
        PresetError: the override adds an existing field, or changes or removes a missing one.
    """
    text, path = str(override.input_line), override.key_or_group.split(".")
    if override.is_delete():
        del _require(fields, path, f"~{override.key_or_group}")[path[-1]]
        return
    present = OmegaConf.select(fields, override.key_or_group, default=MISSING) is not MISSING
    value: Any = override.value()
    if override.is_add() and not override.is_force_add() and present and not isinstance(value, dict | list):
        raise PresetError(f"{text!r}: the preset has that already; write {text.lstrip('+')}")
    if not override.is_add() and not override.is_force_add() and not present:
        _refuse_absent(fields, text, path)
    OmegaConf.update(fields, override.key_or_group, value, force_add=True)


def _require(node: Any, path: Sequence[str], text: str) -> Any:
    """Return the container of the last key in a path."""
    for depth, key in enumerate(path):
        if not isinstance(node, DictConfig) or key not in node or (depth == 0 and node[key] == {}):
            names = list(map(str, node)) if isinstance(node, DictConfig) else []
            where = ".".join(path[:depth]) or "the preset"
            raise PresetError(
                f"{text}: nothing of that name in {where}{nearest(key, names)}there is {', '.join(names) or 'nothing'}"
            )
        holder, node = node, node._get_node(key)
    return holder


def _refuse_absent(fields: DictConfig, text: str, path: Sequence[str]) -> None:
    """Refuse to change a callback that the preset doesn't have; an unset setting of its callbacks may be changed."""
    if path[0] == "auto" and not fields.get("auto"):
        raise PresetError(f"{text!r}: only the preset auto has settings of auto; choose it, or drop {path[0]}")
    if path[0] == "callback" and path[1] not in (chosen := fields.get("callback") or {}):
        if path[2:] != ["_target_"]:
            card_of("callback", path[1], f"callback.{path[1]}")
        there = ", ".join(map(str, chosen)) or "none"
        raise PresetError(f"{text!r}: the preset's callbacks are {there}; write +{text} to add this one")
