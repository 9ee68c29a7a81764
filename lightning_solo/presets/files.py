"""Where the configurations lie: ours, inside an installed wheel or beside the package, and the user's `./conf`."""

from __future__ import annotations

from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_solo.errors import PresetError, nearest


def conf_folder() -> Path:
    """Return the folder of our configurations: inside an installed wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def user_conf_folder() -> Path | None:
    """Return `./conf` of the folder the user stands in, if it holds presets or parts for the command line."""
    folder = Path.cwd() / "conf"
    groups = ("solo", "model", "data", "optimizer", "experiment")
    return folder if any((folder / group).is_dir() for group in groups) else None


def preset_files() -> dict[str, Path]:
    """Return the file of every preset by name; a user's own (`conf/solo/<name>.yaml`) goes first, as in Hydra."""
    files = {path.stem: path for path in sorted((conf_folder() / "library" / "solo").glob("*.yaml"))}
    own = user_conf_folder()
    if own is not None:
        files.update({path.stem: path for path in sorted((own / "solo").glob("*.yaml"))})
    return files


def describe(path: Path) -> str:
    """Return the first line of a preset's file: what it is for and which device it needs."""
    first = path.read_text(encoding="utf-8-sig").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def check_file(name: str) -> None:
    """Refuse an unknown preset, and a file that holds no mapping of fields.

    Raises:
        PresetError: names the nearest preset, or the file and the line.
    """
    files = preset_files()
    if name not in files:
        raise PresetError(f"no preset {name!r}{nearest(name, files)}there are {', '.join(files)}")
    path = files[name]
    try:
        node = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise PresetError(f"preset {name!r} can't be read: {path}: {error}") from error
    if not isinstance(node, DictConfig) or not node:
        raise PresetError(
            f"preset {name!r}: {path}, line 1: must hold a mapping of fields such as `precision: bf16-mixed`"
        )


def check_choice(group: str, value: object) -> None:
    """Refuse a callback or strategy for which there is no file.

    Raises:
        PresetError: names the nearest one and what there is.
    """
    folders = [conf_folder() / "library" / "solo" / group, (user_conf_folder() or Path()) / "solo" / group]
    choices = [path.stem for folder in folders for path in sorted(folder.glob("*.yaml"))]
    for name in value if isinstance(value, list) else [value]:
        if name is not None and name not in choices:
            there = ", ".join(choices)
            raise PresetError(
                f"{group}={name!r}: no {group} of that name{nearest(str(name), choices)}there are {there}"
            )
