"""The composed configuration of the command line's application, and the errors for overrides that Hydra refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_solo.errors import ConflictError, PresetError, SoloError, nearest
from lightning_solo.presets import old_spellings
from lightning_solo.presets.compose import (
    VERSION_BASE,
    chosen_in,
    compose,
    compose_yaml,
    explained,
    hydra_of_our_own,
    to_plain,
)
from lightning_solo.presets.config_source import FIELDS
from lightning_solo.presets.files import conf_folder, user_conf_folder
from lightning_solo.presets.overrides import marks_of, parse_override
from lightning_solo.presets.parse import TRAINER, parse_configuration, unknown_field
from lightning_solo.presets.registry import NAMES, target_of
from lightning_solo.presets.signature import parameters

GROUPS = ("solo", "model", "data", "optimizer", "experiment")
SOLO_GROUPS = ("solo/callback", "solo/strategy")


def search_path_override(overrides: Sequence[str]) -> list[str]:
    """Return the override that adds `./conf` to the search path; none if the user set that path."""
    folder = user_conf_folder()
    is_set = any(text.lstrip("+").startswith("hydra.searchpath=") for text in overrides)
    return [f"hydra.searchpath=[file://{folder}]"] if folder is not None and not is_set else []


def compose_application(overrides: Sequence[str]) -> DictConfig:
    """Return the application's composed configuration with its section `hydra`.

    Raises:
        PresetError: a file isn't YAML; names it.
    """
    with hydra_of_our_own(), initialize_config_dir(str(conf_folder() / "app"), **VERSION_BASE):
        everything = [*search_path_override(overrides), *overrides]
        try:
            return hydra_compose(config_name="train", overrides=everything, return_hydra_config=True)
        except yaml.YAMLError as error:
            raise PresetError(f"a configuration file can't be read: {error}") from error


def refusal(error: Exception, overrides: Sequence[str]) -> SoloError:
    """Return the error for a composition that Hydra refused: with a remedy if an override is the reason."""
    try:
        _refuse(overrides)
    except SoloError as ours:
        return ours
    return PresetError(explained(error))


def _refuse(overrides: Sequence[str]) -> None:
    """Refuse the first override that doesn't apply to the application without overrides."""
    parsed = [parse_override(text) for text in overrides]
    groups = [
        o
        for o in parsed
        if o.key_or_group in GROUPS
        or o.key_or_group.startswith("hydra/")
        or (o.key_or_group in SOLO_GROUPS and o.is_add())
    ]
    try:
        base = compose_application([str(o.input_line) for o in groups])
    except (HydraException, OmegaConfBaseException):
        return
    allow: Any = next((o.value() for o in parsed if o.key_or_group == "allow"), [])
    for override in parsed:
        if override in groups:
            continue
        text, marks = str(override.input_line), marks_of(override)
        field, _, rest = override.key_or_group.partition(".")
        if override.is_delete() and (name := override.key_or_group.removeprefix("solo.")) in FIELDS:
            raise PresetError(f"{text!r}: Hydra deletes no field of a preset; write solo.{name}=null")
        if field == "solo" and rest:
            compose(to_plain(base.solo), [f"{marks}{text[len(marks) :].removeprefix('solo.')}"], allow=allow)
        elif field in FIELDS:
            old = old_spellings.refusal_of_strategy({rest: override.value()}) if field == "strategy" else None
            raise PresetError(old or f"{text!r}: a preset's field; write {marks}solo.{text[len(marks) :]}")
        elif not override.is_add():
            _refuse_unknown(base, override, allow)


def _refuse_unknown(base: DictConfig, override: Override, allow: Sequence[str]) -> None:
    node: Any = OmegaConf.to_container(base, resolve=False)
    path = override.key_or_group.split(".")
    for depth, key in enumerate(path):
        if key == "num_nodes":
            raise PresetError(unknown_field(key, override.value()))
        if not isinstance(node, Mapping) or key not in node:
            where = ".".join(path[:depth])
            accepted = _accepted(where, node)
            names = list(accepted if accepted is not None else map(str, node if isinstance(node, Mapping) else ()))
            if where == "trainer" and key in FIELDS:
                old = old_spellings.refusal_of_argument(override.value())
                remedy = f"{key}={override.value()}"
                if old is None:
                    try:
                        parse_configuration(compose_yaml(to_plain(base.solo), [remedy]), allow, chosen_in(base.hydra))
                    except SoloError as error:
                        raise ConflictError(
                            f"{override.input_line}: the preset has that field, and refuses it: {error}"
                        ) from error
                raise PresetError(old or f"{override.input_line}: the preset sets that; write solo.{remedy}")
            if key in names:
                raise PresetError(f"{override.input_line}: not set yet; write +{override.input_line}")
            foreign = where in ("model", "data") and accepted is None
            hint = f"; a new argument is added by +{override.input_line}" if foreign else ""
            raise PresetError(
                f"{override.input_line}: no {key!r} in {where or 'the application'}{nearest(key, names)}"
                f"there are {', '.join(names) or 'none'}{hint}"
            )
        node = node[key]


def _accepted(where: str, node: Any) -> list[str] | None:
    """Return the arguments of the Trainer, or of a named model, data or optimizer; None if they aren't known."""
    if where == "trainer":
        return list(parameters(TRAINER))
    if where in NAMES and isinstance(node, Mapping) and node.get("name") in NAMES[where]:
        return list(parameters(target_of(where, node["name"], where)))
    return None
