"""C++ libraries that are compiled once per machine, by one process at a time, and loaded by all later processes.

Each library has a folder ``$XDG_CACHE_HOME/lightning_solo/extensions/<name>-<hash>``, by default below ``~/.cache``, or
``$TORCH_EXTENSIONS_DIR/<name>-<hash>`` where that is set. The hash covers everything that determines the machine code.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console

from lightning_solo.atomic_files import try_lock
from lightning_solo.machine import is_private, private_folder, processor, processor_flags, user_cache

Library = TypeVar("Library")
ELSEWHERE = "write TORCH_EXTENSIONS_DIR=<a folder of yours> before the command"


def build_folder(name: str, *determined_by: object) -> Path:
    """Return the folder of a library on this machine, and make it if it is missing.

    Args:
        name: first part of the folder's name.
        determined_by: values that determine the machine code besides Python, torch and the processor: the source, the
            compiler and its flags.

    Raises:
        NotPrivateError: other users may write into it.
        OSError: it can't be made.
    """
    # Code is compiled for this processor, and machines may share a home folder. The place of torch counts, since two
    # environments may have different builds of one version.
    python = (sys.implementation.cache_tag, getattr(sys, "abiflags", ""), torch.__version__, torch.__file__)
    machine = (platform.machine(), processor(), processor_flags())
    folder = f"{name}-{hashlib.sha256(repr((python, machine, determined_by)).encode()).hexdigest()[:16]}"
    if root := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return private_folder(Path(root).absolute(), folder)
    if (cache := user_cache()) is None:
        raise OSError("this user has no home folder")
    return private_folder(cache, "lightning_solo", "extensions", folder)


def stored_library(folder: Path) -> Path | None:
    """Return the library in a folder of `build_folder`; None if there is none, or if other users may write to it."""
    return next((path for path in folder.glob("*.so") if is_private(path)), None)


def load_or_build(
    folder: Path, title: str, load: Callable[[Path], Library], build: Callable[[Path], Library]
) -> Library:
    """Return the library in a folder of `build_folder`; build it if it is missing or can't be loaded.

    A library is built in a fresh folder and moved when it is complete. If another process is building, this waits.

    Args:
        folder: the library's folder.
        title: the library's title, for messages.
        load: returns the library in a file; raises OSError or ImportError for a damaged one.
        build: compiles one file ``*.so`` somewhere below an empty folder, and returns the library in it.

    Raises:
        OSError: the folder can't be written or locked.
    """
    if (library := _stored(folder, load)) is not None:
        return library
    with _locked(folder, title):
        if (library := _stored(folder, load)) is not None:  # built by the process that had the lock
            return library
        for path in folder.glob("building-*"):
            shutil.rmtree(path, ignore_errors=True)  # first: the warning may be an error
            warnings.warn(f"a build of {title} was killed; its files are removed: {path}", stacklevel=3)
        fresh = Path(tempfile.mkdtemp(prefix="building-", dir=folder))
        try:
            library = build(fresh)
            file = next(fresh.rglob("*.so"))
            file.chmod(0o700)
            for damaged in folder.glob("*.so"):
                damaged.unlink()
            file.replace(folder / file.name)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        return library


def _stored(folder: Path, load: Callable[[Path], Library]) -> Library | None:
    file = stored_library(folder)
    if file is not None:
        # half written by a machine that went down, or made for another build of the same version of torch
        with suppress(OSError, ImportError):
            return load(file)
    return None


@contextmanager
def _locked(folder: Path, title: str) -> Iterator[None]:
    with (folder / "lock").open("a") as lock:
        if not try_lock(lock.fileno()):
            say(f"waiting for another process, which builds {title} in {folder}")
            while not try_lock(lock.fileno()):
                time.sleep(0.05)
        yield


def say(text: str) -> None:
    """Print a line to the standard error."""
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(text)
