"""The simulated device's library: compiled once per machine, for each version of its sources, of torch and of Python.

Nothing here imports torch, because the device must be installed first.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
NAME = "simulated_cuda"
FLAGS = ["-std=c++20", "-O2", "-g0", "-fPIC", "-w", "-DNDEBUG", f"-DTORCH_EXTENSION_NAME={NAME}"]
WRITTEN_FOR = "2.13"
"""The version of torch whose C++ interfaces the sources use; others may do."""


class UnavailableError(RuntimeError):
    """The simulated device isn't available here; the message says why."""


def library() -> Path:
    """Return the compiled library; build it if this machine doesn't have it yet.

    Raises:
        UnavailableError: there is no compiler, torch has CUDA itself, or the sources don't compile for this torch.
    """
    torch = torch_folder()
    version = importlib.metadata.version("torch")
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise UnavailableError(f"torch {version} is built with CUDA: a device is simulated on the CPU's build alone")
    compiler = _compiler()
    if compiler is None:
        raise UnavailableError("no C++ compiler: install g++, or name one in CXX")
    folder = cache_folder() / _digest(version, compiler)
    built = folder / f"{NAME}.so"
    if built.exists():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():  # another process may have built it meanwhile
            _build(built, torch, version, compiler)
    return built


def torch_folder() -> Path:
    """Return where torch is installed.

    Raises:
        UnavailableError: torch isn't installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise UnavailableError("torch isn't installed")
    return Path(spec.origin).parent


def cache_folder() -> Path:
    """Return the folder of all builds, in the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "lightning-solo" / "simcuda"


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [named] if named else ["g++", "c++", "clang++"])), None)


def _digest(version: str, compiler: str) -> str:
    digest = hashlib.sha256(repr((version, sys.version, compiler, FLAGS)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _build(built: Path, torch: Path, version: str, compiler: str) -> None:
    include = torch / "include"
    folders = [include, include / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include")]
    flags = [*FLAGS, *(f"-I{folder}" for folder in folders)]
    with tempfile.TemporaryDirectory(dir=built.parent) as work:

        def compiled(source: Path) -> str:
            target = str(Path(work) / f"{source.stem}.o")
            _run([compiler, *flags, "-c", str(source), "-o", target], version)
            return target

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, sorted(SOURCES.glob("*.cpp"))))
        libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        made = Path(work) / built.name
        _run([compiler, "-shared", *objects, *libraries, "-o", str(made)], version)
        made.replace(built)


def _run(command: list[str], version: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        errors = (
            [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no word"]
        )
        raise UnavailableError(
            f"the simulated device is written for torch {WRITTEN_FOR}, and doesn't compile for torch {version}:"
            f" {errors[0]}"
        )
