"""From a preset's name, or a user's `cfg.solo`, and overrides to a checked `SoloConfig`; Hydra composes.

An override is Hydra's, with field names as Lightning's and without a prefix: `precision=32-true`,
`callback.memory_logger.every_n_steps=10`, `+callback=throughput` (adds one), `~callback.memory_logger` (removes one).
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from hydra import __version__ as hydra_version
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_solo.errors import ConflictError, PresetError, nearest
from lightning_solo.presets.files import check_choice, check_file, conf_folder, preset_files, user_conf_folder
from lightning_solo.presets.registry import leaves
from lightning_solo.presets.schema import FIELDS, PresetSchema, SoloConfig, composition, from_mapping, unknown_field

GROUPS = ("callback", "strategy")
# Hydra 1.3 warns without it, 1.4 with it
VERSION_BASE: dict[str, str] = {"version_base": "1.3"} if hydra_version.startswith("1.3") else {}
UNSET = ("precision", "accumulate_grad_batches")  # fields that are missing, in Hydra's sense, until a preset sets them
_GIVEN = "_given_"


def register_schema() -> None:
    """Let presets inherit the typed schema: `- /solo/schema@_here_: solo` in their defaults list."""
    store = ConfigStore.instance()
    if "schema" not in store.repo.get("solo", {}):  # each compose comes by; Hydra 1.5 refuses the second time
        store.store(group="solo/schema", name="solo", node=PresetSchema, provider="lightning-solo")


Preset = str | Sequence[str] | Mapping[str, Any]
"""A name, several names to combine, or the fields themselves (a Hydra application's ``cfg.solo``)."""


def compose(preset: Preset, overrides: Sequence[str] = (), *, allow: Sequence[str] = ()) -> SoloConfig:
    """Return the checked configuration of a preset.

    Args:
        preset: a name, the fields themselves (a user's ``cfg.solo``), or several names: of a field that two of them set
            the later one counts, with a warning.
        overrides: Hydra overrides without a prefix, such as ``"precision=32-true"``.
        allow: prefixes of ``_target_`` that the user trusts.

    Raises:
        PresetError: unknown preset, field, argument or target; a value of a wrong type.
        ConflictError: two choices that cannot be combined.
    """
    if isinstance(overrides, (str, Mapping)):
        raise PresetError(f"overrides={overrides!r}: must be a list of strings, such as ['precision=32-true']")
    if isinstance(allow, str) or not all(isinstance(prefix, str) and prefix for prefix in allow):
        raise PresetError(f"allow={allow!r}: must be a list of prefixes, such as allow=['my_project']")
    config = from_mapping(compose_mapping(preset, overrides, allow=allow), allow)
    try:
        composition(config).check()
    except ConflictError as error:
        if isinstance(preset, (str, Mapping)):
            raise
        raise ConflictError(f"presets {' and '.join(preset)}: {error}, or drop {' or '.join(preset)}") from error
    return config


def compose_mapping(preset: Preset, overrides: Sequence[str] = (), *, allow: Sequence[str] = ()) -> dict[str, Any]:
    """Return what Hydra makes of a preset and overrides as plain containers, not yet checked field by field.

    Raises:
        PresetError: unknown preset, ill-formed file, override that does not apply.
    """
    parsed = _parse(overrides)
    if not isinstance(preset, str) and isinstance(preset, Sequence):
        check_combination(preset, [override.key_or_group for override in parsed])
    names = [preset] if isinstance(preset, str) else preset if isinstance(preset, Sequence) else []
    files = {name: check_file(name) for name in names}
    with _preset_in_store(preset, allow) as name:
        groups = [_with_prefix(o) for o in parsed if o.key_or_group in GROUPS]
        values = [_with_prefix(o) for o in parsed if o.key_or_group not in GROUPS]
        try:
            composed = _run_hydra([f"+solo={name}", *groups, *values])
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            _explain(name, groups, [o for o in parsed if o.key_or_group not in GROUPS], allow)
            raise PresetError(_in_our_words(error, preset)) from error
    for name, node in files.items():
        for field in (field for field in UNSET if OmegaConf.is_missing(node, field) and field not in composed):
            raise PresetError(f"preset {name!r}: {field} is mandatory; write the override {field}=...")
    return composed


def _run_hydra(overrides: Sequence[str]) -> dict[str, Any]:
    with hydra_of_our_own():
        folder = str(user_conf_folder() or conf_folder() / "library")
        with initialize_config_dir(folder, **VERSION_BASE):
            composed = hydra_compose(config_name=None, overrides=list(overrides))
    return to_plain(composed.solo)


@contextmanager
def hydra_of_our_own() -> Iterator[None]:
    """Set aside the Hydra of a running application, and the version it asked for, and bring both back afterwards."""
    ours = ("GlobalHydra", "VersionBase")
    aside = {cls: Singleton._instances.pop(cls) for cls in list(Singleton._instances) if cls.__name__ in ours}
    try:
        yield
    finally:
        for cls in [cls for cls in Singleton._instances if cls.__name__ in ours]:
            del Singleton._instances[cls]
        Singleton._instances.update(aside)


def to_plain(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration node as plain dicts and lists, with interpolations resolved.

    Raises:
        PresetError: a mandatory value (`???`) is missing, or an interpolation leads nowhere; names the key.
    """
    try:
        node = node if isinstance(node, DictConfig) else OmegaConf.create(dict(node))
        plain = OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        remedy = f"; write {error.full_key}=..." if error.full_key else ""
        raise PresetError(f"{error.full_key or 'preset'}: {str(error).splitlines()[0]}{remedy}") from error
    if not isinstance(plain, dict):
        raise PresetError(f"a preset must be a mapping, got {node!r}")
    presets: list[tuple[Any, Any]] = [(node, plain), (node.get("solo"), plain.get("solo"))]
    for preset, fields in presets:
        if isinstance(preset, DictConfig) and OmegaConf.get_type(preset) is PresetSchema:
            for name in UNSET:
                if fields[name] == "???":
                    del fields[name]
    for path, value in leaves(plain):
        if value == "???":
            raise PresetError(f"{path}: a mandatory value is missing; write {path}=...")
        if isinstance(value, str) and "${" in value:  # it would be resolved once more, and could become a target then
            raise PresetError(f"{path}={value!r}: an escaped interpolation is not supported; write the value itself")
    return {str(key): value for key, value in plain.items()}


@contextmanager
def _preset_in_store(preset: Preset, allow: Sequence[str]) -> Iterator[str]:
    """Yield the name under which Hydra finds the preset; fields given as a mapping are put into its store meanwhile."""
    if isinstance(preset, str):
        yield preset
    elif isinstance(preset, Sequence):
        yield f"[{','.join(preset)}]"
    elif isinstance(preset, Mapping):
        store = ConfigStore.instance()
        fields = asdict(from_mapping(to_plain(preset), allow))
        store.store(group="solo", name=_GIVEN, node=fields, provider="lightning-solo")
        try:
            yield _GIVEN
        finally:
            del store.repo["solo"][f"{_GIVEN}.yaml"]
    elif preset is None:  # the cfg.solo of a Hydra application in which nobody has chosen one
        raise PresetError(
            "preset=None: no preset is chosen; in a Hydra application write `- solo: bf16` in the defaults list, or on"
            f" the command line +solo=bf16 where that list has no solo; there are {', '.join(preset_files())}"
        )
    else:
        raise PresetError(f"preset={preset!r}: must be a name, a list of names or a mapping of fields (cfg.solo)")


def check_combination(names: Sequence[str], overridden: Sequence[str] = ()) -> None:
    """Check a list of presets, and warn of each field that two of them set to different values: the later one counts.

    Raises:
        PresetError: an empty list, an unknown preset, one that is listed twice, `auto`.
        ConflictError: two of them choose different strategies, or one replaces all that another sets.
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise PresetError(f"preset={names!r}: write names, such as [compact,checkpointing]")
    composed: dict[str, dict[str, Any]] = {}
    for name in names:
        check_file(name)
        if name in composed:
            raise PresetError(f"presets {list(names)}: {name!r} is listed twice; drop one")
        composed[name] = compose_mapping(name)
        if composed[name].get("auto"):
            raise PresetError(f"presets {list(names)}: {name!r} chooses among the others; write it alone")
    chosen = {
        name: {path: value for path, value in leaves(fields, of_lists=False) if "." in path or value is not None}
        for name, fields in composed.items()
    }
    strategies = {name: options["strategy.name"] for name, options in chosen.items() if "strategy.name" in options}
    if len(set(strategies.values())) > 1:
        raise ConflictError(
            f"presets {' and '.join(strategies)}: each brings its strategy, {' and '.join(strategies.values())}, and a"
            f" run has one; drop {' or '.join(strategies)}"
        )
    for index, (name, options) in enumerate(chosen.items()):
        replaced = {}
        for option in options:
            later = [other for other in list(chosen)[index + 1 :] if option in chosen[other]]
            if later and chosen[later[-1]][option] != options[option]:
                replaced[option] = later[-1]
        if replaced and len(replaced) == len(options):
            others = " and ".join(dict.fromkeys(replaced.values()))
            raise ConflictError(
                f"presets {name} and {others}: {', '.join(replaced)} of {name} is replaced, which is all that it sets;"
                f" drop {name} or {others}"
            )
        for option, other in replaced.items():
            if option not in overridden:
                warnings.warn(
                    f"{option}={chosen[other][option]!r} of preset {other} replaces {options[option]!r} of preset"
                    f" {name}; to choose, change their order or write the override {option}=...",
                    stacklevel=_callers_stacklevel(),
                )


def _callers_stacklevel() -> int:
    """Return the ``stacklevel`` at which a warning of the calling function names the code that called this package."""
    package = str(Path(__file__).parents[1])
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    return level


def _parse(overrides: Sequence[str]) -> list[Override]:
    parsed = []
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except (HydraException, AttributeError, TypeError) as error:
            raise PresetError(f"override {text!r}: not of the form field=value ({error})") from error
        if override.is_sweep_override():
            raise PresetError(f"override {text!r}: one value at a time; sweeps are for the command line's -m")
        field = override.key_or_group.split(".")[0]
        if field not in FIELDS:
            raise PresetError(unknown_field(override.key_or_group, None if override.is_delete() else override.value()))
        if override.key_or_group in GROUPS and not override.is_delete():
            if field == "callback" and not override.is_add():
                raise PresetError(
                    f"{text!r} would replace every callback of the preset; write +{text} to add one, "
                    f"~callback.<name> to remove one"
                )
            check_choice(field, override.value())
        parsed.append(override)
    refuse_twice(parsed)
    return parsed


def refuse_twice(overrides: Sequence[Override]) -> None:
    """Refuse two overrides of one key, of which Hydra would silently take the last.

    Raises:
        PresetError: names both.
    """
    keys = [override.key_or_group for override in overrides]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice:
        same = [override for override in overrides if override.key_or_group == twice]
        remedy = "keep one"
        if twice.removeprefix("solo/") == "callback" and all(override.is_add() for override in same):
            remedy = f"write +{twice}=[{','.join(str(o.get_value_string()).strip('[]') for o in same)}]"
        raise PresetError(f"{twice} is set twice, by {' and '.join(repr(o.input_line) for o in same)}; {remedy}")


def _with_prefix(override: Override) -> str:
    """Return an override as Hydra needs it: the field below `solo`, a choice of a group as the group `solo/...`."""
    line = str(override.input_line)
    mark = line[: len(line) - len(line.lstrip("+~"))]
    separator = "/" if override.key_or_group in GROUPS else "."
    return f"{mark}solo{separator}{line[len(mark) :]}"


def _explain(name: str, groups: Sequence[str], values: Sequence[Override], allow: Sequence[str]) -> None:
    """Find the override that Hydra refused by placing each one alone, and raise our own message for it."""
    try:
        base = _run_hydra([f"+solo={name}", *groups])
    except (HydraException, OmegaConfBaseException, yaml.YAMLError):
        return
    for override in values:
        path = override.key_or_group.split(".")
        candidate = copy.deepcopy(base)
        if override.is_delete():
            _refuse_missing(candidate, path)
        else:
            known = _place(candidate, path, override.value())
            from_mapping(candidate, allow)
            text = str(override.input_line)
            if known and override.is_add():
                raise PresetError(f"{text!r}: the preset has that already; write {text.lstrip('+')}")
            if not known and not override.is_add():
                chosen = ", ".join(base["callback"]) or "none"
                raise PresetError(f"{text!r}: the preset's callbacks are {chosen}; write + in front to add this one")


def _refuse_missing(node: Any, path: Sequence[str]) -> None:
    for depth, key in enumerate(path):
        if not isinstance(node, Mapping) or key not in node:
            names = list(node) if isinstance(node, Mapping) else []
            where = ".".join(path[:depth]) or "the preset"
            raise PresetError(
                f"~{'.'.join(path)}: nothing of that name in {where}{nearest(key, names)}there is "
                f"{', '.join(map(str, names)) or 'nothing'}"
            )
        node = node[key]


def _place(node: dict[str, Any], path: Sequence[str], value: Any) -> bool:
    """Put a value at a path, and return whether there was one."""
    for key in path[:-1]:
        child = node.get(key)
        node[key] = child if isinstance(child, dict) else {}
        node = node[key]
    known = path[-1] in node
    node[path[-1]] = value
    return known


def _in_our_words(error: Exception, preset: object) -> str:
    text = str(error).replace("solo/", "").replace("solo.", "")
    name = f"preset {preset!r}: " if isinstance(preset, str) else ""
    cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
    return f"{name}{text}{cause}"
