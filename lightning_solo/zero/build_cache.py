"""Where built extensions are kept: a private folder per Python, torch, DeepSpeed and processor, one builder at a time.

DeepSpeed compiles with ``-march=native``, so the folder's name holds a hash of the processor's flags: a home folder
that two machines share must not hand one the other's instructions.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import IO

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lightning_solo.errors import CapabilityError
from lightning_solo.machine import processor_flags, user_cache


def cache_folder() -> Path:
    """Return the folder of this machine's extensions, made with mode 0700 where it is not there.

    It is ``$XDG_CACHE_HOME/lightning_solo/extensions/<key>``, with ``~/.cache`` for the first part if that is not
    set; or ``$TORCH_EXTENSIONS_DIR/<key>`` where the user has set that.

    Raises:
        CapabilityError: It can't be made, belongs to somebody else, or others may write into it: what is in it is
            loaded as machine code.
    """
    root, ours = _places()
    try:
        root.mkdir(parents=True, exist_ok=True)
        for part in ours:
            root = root / part
            root.mkdir(mode=0o700, exist_ok=True)
            _require_private(root)
    except OSError as error:
        raise CapabilityError(
            f"the folder {root} for DeepSpeed's extensions can't be made: {error.strerror}; write"
            " TORCH_EXTENSIONS_DIR=<a folder of yours> before the command"
        ) from error
    return root


def _places() -> tuple[Path, tuple[str, ...]]:
    """Return the folder that the user or the system gives, and what is ours below it."""
    if given := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(given).absolute(), (_key(),)
    root = user_cache()
    if root is None:
        raise CapabilityError(
            "this user has no home folder to keep DeepSpeed's extensions in; write"
            " TORCH_EXTENSIONS_DIR=<a folder of yours> before the command"
        )
    return root, ("lightning_solo", "extensions", _key())


def _key() -> str:
    """Return what must be the same for a built extension to be loaded again.

    The packages' places count too: two environments on one key would build over one another's headers.
    """
    spec = importlib.util.find_spec("deepspeed")
    differs = (processor_flags(), platform.machine(), torch.__file__, spec and spec.origin)
    digest = hashlib.sha256(repr(differs).encode()).hexdigest()[:12]
    python = f"{sys.implementation.cache_tag}{getattr(sys, 'abiflags', '')}"
    return f"{python}-torch{torch.__version__}-deepspeed{version('deepspeed')}-{digest}"


def _require_private(folder: Path) -> None:
    status = folder.stat()
    remedy = "or write TORCH_EXTENSIONS_DIR=<a folder of yours> before the command"
    if status.st_uid != os.geteuid():
        raise CapabilityError(
            f"the folder {folder} belongs to user {status.st_uid}, and you are {os.geteuid()}: what is in it would be"
            f" loaded as machine code; remove it, {remedy}"
        )
    if status.st_mode & 0o022:
        raise CapabilityError(
            f"others may write into the folder {folder}, and what is in it would be loaded as machine code; write"
            f" chmod -R go-w '{folder}' if you trust what it holds, {remedy}"
        )


@contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock on an extension's build, and show who holds it while waiting.

    The kernel gives the lock back when its holder dies, unlike torch's, which is a file that a killed build leaves.

    Raises:
        CapabilityError: The file system has no locks, or lets nobody write.
    """
    path = folder / f"{name}.lock"
    try:
        file = path.open("a+", encoding="utf-8")
        free = _try_lock(file)
    except OSError as error:
        raise CapabilityError(
            f"{path} can't be locked: {error.strerror}; write TORCH_EXTENSIONS_DIR=<a folder on a local disk> before"
            " the command"
        ) from error
    with file:
        if not free:
            with shown(f"waiting for {_holder(file)}, which builds DeepSpeed's {name} in {folder}"):
                while not _try_lock(file):
                    time.sleep(0.1)
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%H:%M:%S')}")
        file.flush()
        yield


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read() or "another process"


@contextmanager
def shown(text: str) -> Iterator[None]:
    """Show what is going on for as long as it does: a spinner with the time on a terminal, else one line."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    if not console.is_terminal:
        console.print(text)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    # Not by rich's own thread, which it leaves running for a moment: tests and forks look at threads.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        progress.add_task(text, total=None)
        done = threading.Event()
        thread = threading.Thread(target=_refresh, args=(progress, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _refresh(progress: Progress, done: threading.Event) -> None:
    while not done.wait(0.1):
        progress.refresh()
