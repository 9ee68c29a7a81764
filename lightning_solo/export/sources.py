"""Read checkpoints as plain data, and write files that are whole or absent."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_solo.atomic_files import whole_file
from lightning_solo.checkpoint.damage import LAST, beside, refuse_damaged
from lightning_solo.errors import CheckpointError, SoloError

ENGINE_STATES = "*_model_states.pt"
"""The file in which DeepSpeed's engine saves a module."""


class Inert:
    """Takes the place of each unknown class in a file, so that reading runs no code of it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Return an object without the arguments."""
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the arguments."""

    def __setstate__(self, state: Any) -> None:
        """Ignore the state."""


def engine_folder(folder: Path) -> Path | None:
    """Return the folder with the files of the latest checkpoint that DeepSpeed's engine saved; None if it has none."""
    latest = folder / "latest"
    tag = latest.read_text(encoding="utf-8").strip() if latest.is_file() else ""
    places = (folder, folder / Path(tag).name, folder / "checkpoint")
    return next((each for each in places if any(each.glob(ENGINE_STATES))), None)


def checkpoint_of(source: Path) -> Path:
    """Return the checkpoint that a path names: itself, or the last one in the folder of a run.

    Raises:
        CheckpointError: there is none.
    """
    if (source / LAST).exists():
        return source / LAST
    if source.is_file() or engine_folder(source) is not None:
        return source
    if not source.exists():
        raise CheckpointError(f"{source}: no such file or folder; write the path of a checkpoint or of a run's folder")
    below = sorted(map(str, source.rglob("*.ckpt")))[:5]
    hint = f"it has {', '.join(below)}" if below else "it has no *.ckpt"
    raise CheckpointError(f"{source} is not the folder of a run, which has {LAST}: write the path of a file; {hint}")


def read(path: Path, *, inert: bool = False) -> dict[str, Any]:
    """Return a checkpoint, on the host, by ``weights_only=True``.

    Args:
        path: the file.
        inert: whether objects of unknown classes are replaced by objects without content; else they are refused.

    Raises:
        CheckpointError: the file is damaged, isn't a checkpoint, or has objects that are no plain data.
    """
    whole = zipfile.is_zipfile(path)  # torch's format since 1.6, whose tensors can be mapped into memory
    if whole:
        refuse_damaged(path, "another file")  # torch doesn't compare the checksums
    try:
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path) if whole else []
        if foreign and not inert:
            raise CheckpointError(
                f"{path} has objects of {', '.join(sorted(foreign))}, which are no plain data and can't be copied"
                " safely; save it without them, for example by self.save_hyperparameters(ignore=[...])"
            )
        with torch.serialization.safe_globals([_inert(name) for name in foreign]):
            content = torch.load(path, map_location="cpu", mmap=whole, weights_only=True)
    except (RuntimeError, EOFError, LookupError, ValueError, TypeError, OSError, pickle.UnpicklingError) as error:
        if isinstance(error, CheckpointError):
            raise
        lines = str(error).rpartition("WeightsUnpickler error:")[2].split("\n")  # torch writes a page around it
        reason = next(filter(None, map(str.strip, lines)), type(error).__name__)
        raise CheckpointError(f"{path} is damaged, or no checkpoint ({reason}){beside(path)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} has a {type(content).__name__}, not a checkpoint")
    return content


def _inert(name: str) -> tuple[Callable[..., Any], str]:
    as_dict = name == "collections.defaultdict"  # whose items torch puts into dictionaries alone
    return (_dictionary if as_dict else type("Inert", (Inert,), {})), name


def _dictionary(*args: Any) -> dict[Any, Any]:
    return {}


def refuse_existing(output: Path, *, overwrite: bool) -> None:
    """Refuse to replace a file."""
    refuse_inside_checkpoint(output)
    if output.is_dir():
        raise CheckpointError(f"{output} is a folder; write the path of a file")
    if output.exists() and not overwrite:
        raise CheckpointError(f"{output} exists; write --force (in Python overwrite=True) to replace it, or another")


def refuse_inside_checkpoint(output: Path) -> None:
    """Refuse an output inside a folder of DeepSpeed's engine, with which it would be deleted."""
    for parent in output.absolute().parents:
        if (parent / "latest").is_file() and engine_folder(parent) is not None:
            raise CheckpointError(
                f"{output} is inside the checkpoint {parent}, and would be deleted with it; write --output"
                f" {parent.parent / output.name}"
            )


@contextmanager
def new_file(output: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes the output at a clean end.

    Raises:
        CheckpointError: it can't be written; nothing is left.
    """
    try:
        with whole_file(output) as new:
            yield new
    except SoloError:
        raise
    except Exception as error:  # OSError, or of the writing library, where the disk is full
        raise CheckpointError(f"{output} can't be written: {getattr(error, 'strerror', None) or error}") from error
