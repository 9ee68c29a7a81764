"""Compose a `Configuration` by Hydra, from a preset's name, or a user's `cfg.solo`, and overrides."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra import __version__ as hydra_version
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.singleton import Singleton
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from lightning_solo.cards.configuration import Configuration
from lightning_solo.errors import ConflictError, PresetError, SoloError, nearest
from lightning_solo.presets.config_source import FIELDS, UNSET, PresetSchema
from lightning_solo.presets.files import (
    check_file,
    conf_folder,
    leaves,
    names_in,
    preset_files,
    unknown_choice,
    user_conf_folder,
    written_fields,
)
from lightning_solo.presets.overrides import (
    GROUPS,
    apply_override,
    check_not_replacing,
    is_choice,
    marks_of,
    parse_override,
    parse_overrides,
)
from lightning_solo.presets.parse import parse_configuration, unknown_field
from lightning_solo.presets.spelling import on_command_line

# Hydra 1.3 warns if it is missing, 1.4 if it is passed
VERSION_BASE: dict[str, str] = {"version_base": "1.3"} if hydra_version.startswith("1.3") else {}


# Hydra's own section, which a preset doesn't need; its files are a third of the time of a composition
WITHOUT_HYDRA = [f"~hydra/{group}" for choice in HydraConf().defaults for group, name in choice.items() if name]

Preset = str | Sequence[str] | Mapping[str, Any]
"""A name, several names to combine, or the fields themselves (a Hydra application's ``cfg.solo``)."""


def compose(preset: Preset, overrides: Sequence[str] = (), *, allow: Sequence[str] = ()) -> Configuration:
    """Return the configuration of a preset.

    Args:
        preset: a name, several names, or the fields themselves (a user's ``cfg.solo``). If two presets set the same
            field, the later one wins, with a warning.
        overrides: Hydra overrides without a prefix, such as ``"precision=32-true"``.
        allow: prefixes of ``_target_`` that the user trusts.

    Raises:
        PresetError: unknown preset, field, argument or target; a value of a wrong type.
        ConflictError: two choices that cannot be combined.
    """
    composed = compose_yaml(preset, overrides)
    try:
        if isinstance(preset, Mapping) and HydraConfig.initialized():
            _check_overrides_of_application()
            _check_list_of_application(composed, [override.key_or_group for override in parse_overrides(overrides)])
        return parse_configuration(composed, allow, name_of(preset))
    except SoloError as error:
        of_application = isinstance(preset, Mapping) and not overrides and HydraConfig.initialized()  # its `cfg.solo`
        message = str(error)
        if isinstance(error, ConflictError):
            names = chosen_names(HydraConfig.get()) if of_application else ()
            message = with_remedies(message, composed if of_application else preset, overrides, allow, names=names)
        if not of_application and message == str(error):
            raise
        raise type(error)(on_command_line(message) if of_application else message) from error


def with_remedies(
    conflicts: str, preset: Preset, overrides: Sequence[str], allow: Sequence[str], *, names: Sequence[str] = ()
) -> str:
    """Return conflicts, a line each, with the presets that bring them about, and what solves all of them.

    That is the first remedy that each message offers, if these lead to an accepted configuration, and the removal of
    one of several presets.

    Args:
        conflicts: from the configuration of the preset.
        preset: names, or the fields themselves.
        overrides: of the preset.
        allow: prefixes of ``_target_`` that the user trusts.
        names: presets that an application chose; they count if they alone give the fields.
    """
    if isinstance(preset, Mapping) and len(names) > 1 and _give(names, preset):
        preset = names
    is_list = not isinstance(preset, (str, Mapping))
    if not is_list and "\n" not in conflicts:
        return conflicts
    remedies: list[str] = []
    kept = overrides
    while (refused := refusal_of(preset, [*kept, *remedies], allow)) is not None:
        offered = re.search(r"\bwrite (\S+?),?(?=\s|$)", str(refused))
        if not isinstance(refused, ConflictError) or offered is None or offered[1] in remedies:
            remedies = []
            break
        remedies.append(offered[1])
        kept = [
            each for each in kept if each.lstrip("+~").partition("=")[0] != offered[1].lstrip("+~").partition("=")[0]
        ]
    cures = [name for name in preset if composes([n for n in preset if n != name], overrides, allow)] if is_list else []
    drop = [f"drop {' or '.join(cures)}"] if cures else []
    start = f"presets {' and '.join(_with_parts(name, conflicts) for name in preset)}:" if is_list else ""
    if "\n" not in conflicts and len(remedies) < 2:
        return ", or ".join([f"{start} {conflicts}", *drop])
    ways = [*([f"write {' and '.join(remedies)}"] if remedies else []), *drop]
    solved = f"for all of it {', or '.join(ways)}" if ways else ""
    return "\n".join(filter(None, [start, conflicts, solved]))


def _give(names: Sequence[str], fields: Mapping[str, Any]) -> bool:
    """Return whether presets alone give these fields."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compose_yaml(names) == fields
    except SoloError:
        return False


def _with_parts(name: str, conflicts: str) -> str:
    """Return a preset's name, with its techniques that conflicts name."""
    fields = written_fields(name)
    parts = [f"strategy={fields['strategy.name']}"] if "strategy.name" in fields else []
    parts += dict.fromkeys(".".join(field.split(".")[:2]) for field in fields if field.startswith("callback."))
    named = [part for part in parts if re.search(rf"{re.escape(part)}\b", conflicts) and part != f"strategy={name}"]
    return f"{name} ({', '.join(named)})" if named else name


def composes(preset: Preset, overrides: Sequence[str], allow: Sequence[str]) -> bool:
    """Return whether a preset accepts overrides."""
    return refusal_of(preset, overrides, allow) is None


def refusal_of(preset: Preset, overrides: Sequence[str], allow: Sequence[str]) -> SoloError | None:
    """Return the error if a preset doesn't accept overrides, else None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parse_configuration(compose_yaml(preset, overrides), allow)
    except SoloError as error:
        return error
    return None


def name_of(preset: Preset) -> str:
    """Return the name that the user chose, of fields the one that the running Hydra application chose; else "".

    >>> name_of("compact"), name_of(["compact", "checkpointing"]), name_of({"precision": "32-true"})
    ('compact', '[compact,checkpointing]', '')
    """
    if isinstance(preset, Mapping):
        names = chosen_names(HydraConfig.get()) if HydraConfig.initialized() else []
        return names[0] if len(names) == 1 else f"[{','.join(names)}]" if names else ""
    return preset if isinstance(preset, str) else f"[{','.join(preset)}]"


def chosen_in(hydra: Any) -> str:
    """Return the preset that an application chose, from its section `hydra`; "" if it isn't recorded there.

    Hydra records the choice of one preset, and a list only if it is an override.
    """
    written = [text.partition("=")[2] for text in hydra.overrides.task if text.lstrip("+").startswith("solo=")]
    return str(hydra.runtime.choices.get("solo") or (written or [""])[-1])


def chosen_names(hydra: Any) -> list[str]:
    """Return the presets that the running application chose, from its section `hydra`.

    Hydra doesn't record a list of presets. It is in the defaults list, which is computed again.
    """
    if choice := hydra.runtime.choices.get("solo"):
        return [str(choice)]
    if not GlobalHydra.instance().is_initialized():  # as in a job of some launchers
        chosen = names_in(chosen_in(hydra))
        return chosen if isinstance(chosen, list) else [chosen] if chosen else []
    overrides = [*hydra.overrides.hydra, *hydra.overrides.task]
    loader = GlobalHydra.instance().config_loader()
    chosen = loader.compute_defaults_list(hydra.job.config_name, overrides, RunMode.RUN).defaults
    presets = [(str(each.config_path), str(each.parent)) for each in chosen if each.package == "solo"]
    return [path.removeprefix("solo/") for path, parent in presets if not parent.startswith("solo/")]


def _check_overrides_of_application() -> None:
    """Check the overrides that the running application got, of which Hydra takes some that change no preset."""
    hydra = HydraConfig.get()
    for override in map(parse_override, hydra.overrides.task):
        text, key = override.input_line, override.key_or_group
        group = key.removeprefix("solo/")
        if key.startswith("solo/") and group not in (*GROUPS, "schema"):
            there = f"{nearest(group, GROUPS)}there are {', '.join(GROUPS)}"
            raise PresetError(f"{text!r}: presets have no such group{there}")
        if group == "callback" != key:
            check_not_replacing(override)
        if override.is_add() and key.split(".")[0] in FIELDS and key not in hydra.runtime.choices:
            own = str(text).lstrip("+") if key in UNSET else str(text)  # those are fields of every preset
            warnings.warn(
                f"{text!r} adds {key} to the application, not to its preset; for the preset write"
                f" {on_command_line(own)}",
                stacklevel=_callers_stacklevel(),
            )


def _check_list_of_application(composed: Mapping[str, Any], overridden: Sequence[str]) -> None:
    """Check the presets that the running application chose, as `check_combination`, but for fields that it sets itself.

    Presets of the application's own folder are not compared.
    """
    hydra = HydraConfig.get()
    names = [name for name in chosen_names(hydra) if name in preset_files()]
    if len(names) < 2:
        return
    result, written = dict(leaves(composed, of_lists=False)), [written_fields(name) for name in names]
    options = {option for each in written for option in each}
    set_later = [option for option in options if result.get(option) not in [each.get(option) for each in written]]
    typed = [text.lstrip("+~").partition("=")[0].removeprefix("solo.") for text in hydra.overrides.task]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_combination(names, [*set_later, *typed, *overridden])
    for warning in caught:
        warnings.warn(on_command_line(str(warning.message)), stacklevel=_callers_stacklevel())


def compose_all(overrides: Sequence[str] = (), *, allow: Sequence[str] = ()) -> dict[str, Configuration]:
    """Return name -> configuration of every preset but ``auto``; a file that can't be used is left out with a warning.

    Raises:
        PresetError: an override doesn't apply to one of them.
    """
    configs = {}
    for name, path in preset_files().items():
        if name == "auto":
            continue
        try:
            configs[name] = compose(name, overrides, allow=allow)
        except SoloError:
            try:
                compose(name, allow=allow)
            except SoloError as error:
                warnings.warn(f"{path} is left out: {error}", stacklevel=2)
            else:
                raise
    return configs


def compose_yaml(preset: Preset, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields of a preset with overrides as plain containers; `parse_configuration` checks them.

    Hydra composes files and chosen techniques; the other overrides are applied to the result.

    Raises:
        PresetError: unknown preset, ill-formed file, inapplicable override.
    """
    parsed = parse_overrides(overrides)
    choices = [_with_prefix(override) for override in parsed if is_choice(override)]
    values = [override for override in parsed if not is_choice(override)]
    if isinstance(preset, Mapping):
        fields: Any = OmegaConf.create(to_plain(preset))
        if choices:
            fields = OmegaConf.merge(fields, _hydra(choices, "cfg.solo").solo)
    elif isinstance(preset, (str, Sequence)):
        names = [preset] if isinstance(preset, str) else list(preset)
        if not isinstance(preset, str):
            check_combination(names, [override.key_or_group for override in parsed])
        files = {name: check_file(name) for name in names}
        fields = _hydra([f"+solo=[{','.join(names)}]", *choices], f"preset {preset!r}").solo
        for name, file in files.items():
            _refuse_mandatory(name, file, fields, values)
    elif preset is None:  # the cfg.solo of a Hydra application that has not chosen a preset
        raise PresetError(
            "preset=None: no preset is chosen; write 'baseline' to change nothing. In a Hydra application write"
            " `- solo: bf16` in the defaults list, or +solo=bf16 on the command line if that list has no solo;"
            f" there are {', '.join(preset_files())}"
        )
    else:
        raise PresetError(f"preset={preset!r}: must be a name, a list of names or a mapping of fields (cfg.solo)")
    return _with_values(fields, values)


def _hydra(overrides: Sequence[str], what: str) -> DictConfig:
    """Return Hydra's composition of overrides. ``what`` starts the message of an error.

    Hydra looks in the user's ``./conf``, then in the entries that `hydra_plugins.lightning_solo.search_path` appends:
    ``conf/library``, other packages' folders, and `TechniqueSource`, which has techniques and the schema of presets.
    """
    try:
        with hydra_of_our_own():
            folder = str(user_conf_folder() or conf_folder())  # the latter has no group of a preset
            with initialize_config_dir(folder, **VERSION_BASE):
                return hydra_compose(config_name=None, overrides=[*overrides, *WITHOUT_HYDRA])
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        if match := re.search(r"Could not override .* use \+solo/(\w+)=(\S+)", str(error), re.DOTALL):
            choice = "=".join(match.groups())
            raise PresetError(f"{choice!r}: the preset has no {match[1]} to replace; write +{choice}") from error
        words = explained(error).replace("solo/", "").replace("solo.", "")  # the names that a user of a preset writes
        raise PresetError(f"{what}: {words}") from error


def explained(error: Exception) -> str:
    """Return Hydra's message with the remedy if a preset's file has an unknown field, technique or type of value."""
    place, cause = str(error).partition(":")[0], error.__cause__ or error.__context__
    if isinstance(error, MissingConfigException):
        group, _, name = str(error.missing_cfg_file).removeprefix("solo/").rpartition("/")
        if group in GROUPS:
            return f"{place.partition(' Could')[0].rstrip('.:')}: {unknown_choice(group, name)}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError | ValidationError):
        field, reason = str(cause.full_key).removeprefix("solo."), str(cause).splitlines()[0]
        words = f"{field}: {reason}" if isinstance(cause, ValidationError) else unknown_field(field)
        return f"{place}: {words}"
    return str(error) if error.__cause__ is None else f"{error} ({error.__cause__})"


def _with_values(composed: DictConfig, overrides: Sequence[Override]) -> dict[str, Any]:
    """Apply overrides to composed fields; return plain containers with interpolations resolved."""
    fields = _without_unset(composed, OmegaConf.to_container(composed, resolve=False))
    root = OmegaConf.create({"solo": fields})  # interpolations are absolute, as in an application
    for override in overrides:
        apply_override(root.solo, override)
    return to_plain(root.solo)


def _refuse_mandatory(name: str, file: DictConfig, fields: DictConfig, overrides: Sequence[Override]) -> None:
    keys = [override.key_or_group for override in overrides]
    for field in UNSET:
        if OmegaConf.is_missing(file, field) and OmegaConf.is_missing(fields, field) and field not in keys:
            raise PresetError(f"preset {name!r}: {field} is mandatory; write the override {field}=...")


@contextmanager
def hydra_of_our_own() -> Iterator[None]:
    """Hide the Hydra of a running application, and its version; restore both afterwards."""
    ours = ("GlobalHydra", "VersionBase")
    aside = {cls: Singleton._instances.pop(cls) for cls in list(Singleton._instances) if cls.__name__ in ours}
    try:
        yield
    finally:
        for cls in [cls for cls in Singleton._instances if cls.__name__ in ours]:
            del Singleton._instances[cls]
        Singleton._instances.update(aside)


def to_plain(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration node as plain dicts and lists with interpolations resolved.

    Raises:
        PresetError: a mandatory value (`???`) is missing, or an interpolation can't be resolved; names the key.
    """
    try:
        node = node if isinstance(node, DictConfig) else OmegaConf.create(dict(node))
        plain = OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        missing = re.search(r"Missing mandatory value: ([\w.]+)", str(error))  # of the key that this one refers to
        key = missing[1] if missing else error.full_key
        raise PresetError(
            f"{key or 'preset'}: {str(error).splitlines()[0]}{f'; write {key}=...' * bool(key)}"
        ) from error
    if not isinstance(plain, dict):
        raise PresetError(f"a preset must be a mapping, got {node!r}")
    plain = _without_unset(node, plain)
    if "solo" in plain:
        plain["solo"] = _without_unset(node.get("solo"), plain["solo"])
    for path, value in leaves(plain):
        if value == "???":
            raise PresetError(f"{path}: a mandatory value is missing; write {path}=...")
        if isinstance(value, str) and "${" in value:  # a second resolution could turn it into a target
            raise PresetError(f"{path}={value!r}: an escaped interpolation is not supported; write the value itself")
    return {str(key): value for key, value in plain.items()}


def _without_unset(preset: Any, fields: Any) -> Any:
    """Return a preset's plain fields without those that no file sets, if it has been composed from the schema.

    A composed preset that was saved, as in Hydra's `.hydra/config.yaml`, has all of the schema's mappings.
    """
    if OmegaConf.get_type(preset) is not PresetSchema and not {"strategy", "callback", "auto"} <= {*(fields or {})}:
        return fields
    return {name: value for name, value in fields.items() if not (name in UNSET and value == "???")}


def check_combination(names: Sequence[str], overridden: Sequence[str] = ()) -> None:
    """Check a list of presets; warn of each field that two of them set differently, because the later preset wins.

    Raises:
        PresetError: an empty list, an unknown preset, a preset that is listed twice, `auto`.
        ConflictError: two presets choose different strategies, or one replaces every field of another.
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise PresetError(f"preset={names!r}: write names, such as [compact,checkpointing]")
    chosen: dict[str, dict[str, Any]] = {}
    for name in names:
        if name in chosen:
            raise PresetError(f"presets {list(names)}: {name!r} is listed twice; drop one")
        chosen[name] = written_fields(name)
        if any(option.startswith("auto.") for option in chosen[name]):
            raise PresetError(f"presets {list(names)}: {name!r} chooses among the others; write it alone")
    strategies = {name: options["strategy.name"] for name, options in chosen.items() if "strategy.name" in options}
    if len(set(strategies.values())) > 1:
        raise ConflictError(
            f"presets {' and '.join(strategies)}: a run has one strategy, but these choose"
            f" {' and '.join(strategies.values())}; drop {' or '.join(strategies)}"
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
                f"presets {name} and {others}: {others} replaces every field that {name} sets, {', '.join(replaced)};"
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
    """Return the ``stacklevel`` for a warning that names the caller of this package."""
    package = str(Path(__file__).parents[1])
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    return level


def _with_prefix(override: Override) -> str:
    """Return a choice of a callback or strategy with Hydra's group ``solo/...``."""
    marks = marks_of(override)
    return f"{marks}solo/{str(override.input_line)[len(marks) :]}"
