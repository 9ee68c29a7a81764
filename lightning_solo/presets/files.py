"""Folders and files of presets: ours, those of other packages, and those in the user's `./conf`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_solo.cards.catalogue import catalogue
from lightning_solo.errors import PresetError, nearest, unknown_name
from lightning_solo.presets.old_spellings import refusal, refuse_old_preset


def conf_folder() -> Path:
    """Return the folder of our configurations: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def library_folders() -> list[Path]:
    """Return the folders with presets: ours, then those of other packages."""
    return [conf_folder() / "library", *catalogue().folders]


def user_conf_folder() -> Path | None:
    """Return `./conf` of the working directory if it has presets or parts of the application, else None."""
    folder = Path.cwd() / "conf"
    groups = ("solo", "model", "data", "optimizer", "experiment")
    return folder if any((folder / group).is_dir() for group in groups) else None


def preset_files() -> dict[str, Path]:
    """Return the file of every preset by name; a user's file (`conf/solo/<name>.yaml`) replaces ours, as in Hydra."""
    folder = user_conf_folder()
    return {**_library_presets(), **({} if folder is None else _presets_in(folder))}


@functools.cache
def _library_presets() -> dict[str, Path]:
    presets: dict[str, Path] = {}
    for folder in library_folders():
        for name, path in _presets_in(folder).items():
            if presets.setdefault(name, path) is not path:
                warnings.warn(f"the preset {path} is left out: {presets[name]} has its name", stacklevel=2)
    return presets


def _presets_in(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted((folder / "solo").glob("*.yaml"))}


def names_in(text: str) -> str | list[str]:
    """Return the names in a text such as ``[compact,checkpointing]``; return a single name unchanged.

    >>> names_in("[compact, checkpointing]"), names_in("bf16")
    (['compact', 'checkpointing'], 'bf16')
    """
    if not (text.startswith("[") and text.endswith("]")):
        return text
    return [name.strip() for name in text[1:-1].split(",") if name.strip()]


def describe(path: Path) -> str:
    """Return the first line of a preset's file: its purpose and its device; or why it can't be read."""
    try:
        first = path.read_text(encoding="utf-8-sig", errors="replace").partition("\n")[0]
    except OSError as error:  # a dangling link, or a folder
        return f"can't be read: {error.strerror}"
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def descriptions(preset: str | Sequence[str]) -> list[str]:
    """Return the purpose of each preset."""
    files = preset_files()
    return [describe(files[name]) for name in ([preset] if isinstance(preset, str) else preset)]


def check_file(name: str) -> DictConfig:
    """Return the content of a preset's file.

    Raises:
        PresetError: an unknown preset, or a file that doesn't hold a mapping; names the nearest preset, or the line.
    """
    files = preset_files()
    if name not in files:
        refuse_old_preset(name)
        raise PresetError(f"no preset {name!r}{_other_form(name)}{nearest(name, files)}there are {', '.join(files)}")
    path = files[name]
    try:
        node = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise PresetError(f"preset {name!r} can't be read: {path}: {error}") from error
    if not isinstance(node, DictConfig) or not node:
        raise PresetError(
            f"preset {name!r}: {path}, line 1: must hold a mapping of fields such as `precision: bf16-mixed`"
        )
    return node


def written_fields(name: str) -> dict[str, Any]:
    """Return path -> value of each option that a preset's file sets, directly or by its defaults list.

    A technique in the defaults list sets all its settings.

    >>> written_fields("bf16"), written_fields("checkpointing")["callback.memory_logger.every_n_steps"]
    ({'precision': 'bf16-mixed'}, 50)
    """
    node: Any = OmegaConf.to_container(check_file(name), resolve=False)
    own = dict(leaves({key: value for key, value in node.items() if key != "defaults"}, of_lists=False))
    options: dict[str, Any] = {}
    defaults = node.get("defaults", [])
    for entry in [*defaults, *(["_self_"] if "_self_" not in defaults else [])]:
        if entry == "_self_":
            options |= own
        elif isinstance(entry, str) and entry in preset_files():
            options |= written_fields(entry)
        elif isinstance(entry, dict):
            for group, choice in entry.items():
                for word in choice if isinstance(choice, list) else [choice]:
                    options |= _settings_of(str(group), word)
    return options


def leaves(node: Any, path: str = "", *, of_lists: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each value in a plain configuration; with ``of_lists=False`` a list is one value.

    >>> list(leaves({"a": {"b": [1, 2]}})), list(leaves({"a": {"b": [1, 2]}}, of_lists=False))
    ([('a.b[0]', 1), ('a.b[1]', 2)], [('a.b', [1, 2])])
    """
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key), of_lists=of_lists)
    elif isinstance(node, list) and of_lists:
        for index, value in enumerate(node):
            yield from leaves(value, f"{path}[{index}]")
    else:
        yield path, node


def _settings_of(group: str, word: Any) -> dict[str, Any]:
    """Return path -> default of each setting of a technique; empty for a user's file."""
    card = catalogue().cards.get(word)
    if card is None or card.group != group:
        return {}
    path = "strategy" if group == "strategy" else f"callback.{word}"
    named = {"strategy.name": word} if group == "strategy" else {}
    return named | {f"{path}.{name}": default for name, default in card.defaults.items()}


def _other_form(name: str) -> str:
    """Return the remedy if a preset's name is a list written as a text, or the name of a technique."""
    if "," in name:
        names = [each.strip() for each in name.strip("[]").split(",")]
        return f"; several are a list: write {names}"
    if name in catalogue().cards:
        group = catalogue().cards[name].group
        return f", but a technique: write a preset and the override +{group}={name}"
    return ""


def check_choice(group: str, value: object) -> None:
    """Refuse a callback or strategy that is neither a technique nor a file of the user."""
    if group == "strategy" and (message := refusal(value)):
        raise PresetError(message)
    for name in value if isinstance(value, list) else [value]:
        if name is not None and name not in _choices(group):
            raise PresetError(unknown_choice(group, name))


def unknown_choice(group: str, name: object) -> str:
    """Return the message for a callback or strategy that is neither a technique nor a file of the user."""
    return unknown_name(group, name, group, _choices(group))


def _choices(group: str) -> list[str]:
    folders = [*catalogue().folders, user_conf_folder() or Path()]
    files = [path.stem for folder in folders for path in sorted((folder / "solo" / group).glob("*.yaml"))]
    return [*catalogue().group(group), *files]
