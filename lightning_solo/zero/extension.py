"""DeepSpeed's C++ extensions, built once, by one process at a time, after a check of what the build needs.

DeepSpeed compiles at first use, in silence, and fails late: ninja of a virtual environment is not found without its
folder on PATH, and torch waits for ever for the lock file that a killed build leaves. Here each build has a fresh
folder, which is renamed to the kept one when it is complete.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from filelock import FileLock, Timeout
from rich.console import Console

from lightning_solo.errors import CapabilityError, PresetError, nearest
from lightning_solo.machine import (
    NotPrivateError,
    cxx_compiler,
    has_python_headers,
    links,
    ninja_executable,
    nvcc_release,
    private_folder,
    processor_flags,
    tool_path,
    user_cache,
)
from lightning_solo.processes import environment
from lightning_solo.zero.deepspeed_internals import is_compiled_in, loaded_extensions
from lightning_solo.zero.process import INSTALL, check_deepspeed

BUILDERS = {
    "cpu_adam": "CPUAdamBuilder",
    "cpu_adagrad": "CPUAdagradBuilder",
    "cpu_lion": "CPULionBuilder",
    "pin_memory": "PinMemoryBuilder",
    "async_io": "AsyncIOBuilder",
}
# async_io takes symbols from pin_memory's library.
STANDS_ON = {"async_io": "pin_memory"}
STAMP = "built.json"
TAIL_LINES = 15
ELSEWHERE = "write TORCH_EXTENSIONS_DIR=<a folder of yours> before the command"


def what_is_missing(name: str) -> str | None:
    """Return why an extension can't be loaded or built here, with the remedy, or None. Nothing is built.

    Raises:
        PresetError: There is no such extension.
    """
    try:
        if is_built(name):
            return None
        with environment({}, everything=True):
            missing = list(_missing_tools(_builder(name)))
    except CapabilityError as error:
        return str(error)
    if not missing and name in STANDS_ON:
        return what_is_missing(STANDS_ON[name])
    return _lacking(name, missing) if missing else None


def disk_access_lacks() -> str | None:
    """Return why DeepSpeed's asynchronous disk access can't run here, or None."""
    return what_is_missing("async_io")


def is_built(name: str) -> bool:
    """Return whether an extension and those it needs are built already, by us or in DeepSpeed's wheel.

    Raises:
        PresetError: There is no such extension.
        CapabilityError: DeepSpeed is missing, or the folder of extensions can't be used.
    """
    if name in STANDS_ON and not is_built(STANDS_ON[name]):
        return False
    with environment({}, everything=True):
        builder = _builder(name)
        return _is_ready(builder) or _built(builder, cache_folder()) is not None


def load_extension(name: str) -> ModuleType:
    """Return an extension of DeepSpeed, built if need be. DeepSpeed's own classes then use it.

    The environment is restored afterwards. A build takes 35 to 185 s on two cores.

    Raises:
        PresetError: There is no such extension.
        CapabilityError: This machine lacks something that the build needs, or the build failed.
    """
    with environment({}, everything=True):
        builder = _builder(name)
        if name in STANDS_ON:
            if missing := what_is_missing(name):  # before the other one is built for nothing
                raise CapabilityError(missing)
            load_extension(STANDS_ON[name])
        if _is_ready(builder):
            return _load(builder)
        folder = cache_folder()
        if (module := _adopt(builder, folder)) is not None:
            return module
        with _alone(folder, name):
            # Whoever held the lock may have built it.
            module = _adopt(builder, folder)
            return _build(builder, folder) if module is None else module


def cache_folder() -> Path:
    """Return the folder of this machine's extensions; make it if need be.

    It is ``$XDG_CACHE_HOME/lightning_solo/extensions/<key>``, with ``~/.cache`` for the first part if that is not
    set; or ``$TORCH_EXTENSIONS_DIR/<key>`` where the user has set that.

    Raises:
        CapabilityError: It can't be made, or isn't this user's alone.
    """
    # An extension is loaded again by the same Python, torch, DeepSpeed and processor: DeepSpeed compiles with
    # -march=native, and machines may share a home folder. The packages' places count too: two environments on one
    # key would build over one another's headers.
    spec = importlib.util.find_spec("deepspeed")
    differs = (processor_flags(), platform.machine(), torch.__file__, spec and spec.origin)
    digest = hashlib.sha256(repr(differs).encode()).hexdigest()[:12]
    python = f"{sys.implementation.cache_tag}{getattr(sys, 'abiflags', '')}"
    key = f"{python}-torch{torch.__version__}-deepspeed{version('deepspeed')}-{digest}"
    try:
        if given := os.environ.get("TORCH_EXTENSIONS_DIR"):
            return private_folder(Path(given).absolute(), key)
        if (cache := user_cache()) is not None:
            return private_folder(cache, "lightning_solo", "extensions", key)
    except NotPrivateError as error:
        raise CapabilityError(f"{error}, or {ELSEWHERE}") from error
    except OSError as error:
        raise CapabilityError(
            f"the folder {error.filename} for DeepSpeed's extensions can't be made: {error.strerror}; {ELSEWHERE}"
        ) from error
    raise CapabilityError(f"this user has no home folder to keep DeepSpeed's extensions in; {ELSEWHERE}")


@contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock on an extension's build; the kernel releases it when the process dies."""
    lock = FileLock(folder / f"{name}.lock")
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _say(f"waiting for another process, which builds DeepSpeed's {name} in {folder}")
            lock.acquire()
    except OSError as error:
        raise CapabilityError(f"{lock.lock_file} can't be locked: {error.strerror}; {ELSEWHERE}") from error
    try:
        yield
    finally:
        lock.release()


def _say(text: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(text)


def _builder(name: str) -> Any:
    """Return DeepSpeed's builder of an extension for the accelerator of this machine."""
    if name not in BUILDERS:
        raise PresetError(f"no extension {name!r}{nearest(name, BUILDERS)}there are {', '.join(BUILDERS)}")
    check_deepspeed()
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(BUILDERS[name])
    if builder is None:
        raise CapabilityError(
            f"this version of DeepSpeed has no {name} for {get_accelerator().device_name()!r}; write: {INSTALL} -U"
        )
    return builder


def _is_ready(builder: Any) -> bool:
    """Return whether an extension is loaded, or was compiled when DeepSpeed was installed."""
    return is_compiled_in(builder) or builder.name in loaded_extensions(builder)


def _load(builder: Any) -> ModuleType:
    """Return the module that DeepSpeed's builder loads, or builds in the present environment."""
    try:
        module: ModuleType = builder.load(verbose=False)
    except Exception as error:  # torch and DeepSpeed raise half a dozen types, down to KeyError
        tail = "\n".join(f"  {line}" for line in str(error).splitlines()[-TAIL_LINES:])
        raise CapabilityError(
            f"DeepSpeed's {builder.name} could not be built or loaded, with the compiler {cxx_compiler()}; use"
            f" another one (CXX=g++ before the command), or an optimizer of torch's. The end of its output:\n{tail}"
        ) from error
    return module


def _lacking(name: str, tools: list[str]) -> str:
    return f"DeepSpeed's {name} has to be built, and this machine lacks " + "; ".join(tools)


def _missing_tools(builder: Any) -> Iterator[str]:
    """Yield each tool that the build of an extension lacks on this machine, with its remedy."""
    if cxx_compiler() is None:
        name = os.environ.get("CXX")
        yield f"the C++ compiler that CXX names, {name!r} (unset CXX)" if name else "a C++ compiler (apt install g++)"
    elif not has_python_headers():
        yield "Python.h (apt install python3-dev)"
    elif builder.name == "async_io" and not links("io_submit", "aio"):
        yield "libaio with its header (apt install libaio-dev, or set CFLAGS and LDFLAGS to where it is)"
    if ninja_executable() is None:
        yield "ninja (pip install ninja)"
    if (toolkit := _missing_toolkit(builder)) is not None:
        yield toolkit


def _missing_toolkit(builder: Any) -> str | None:
    """Return the missing part of the CUDA toolkit, which builders for CUDA need where there is a device."""
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder

    if not isinstance(builder, CUDAOpBuilder) or torch.version.cuda is None or not torch.cuda.is_available():
        return None
    from torch.utils.cpp_extension import CUDA_HOME

    major = int(torch.version.cuda.split(".")[0])
    release = nvcc_release(CUDA_HOME)
    if release is None:
        return f"nvcc of CUDA {major} (install the CUDA toolkit, and set CUDA_HOME to its folder)"
    if release[0] != major and os.environ.get("DS_SKIP_CUDA_CHECK", "0") != "1":
        return (
            f"nvcc of CUDA {major}: {CUDA_HOME} holds {release[0]}.{release[1]} (set CUDA_HOME to one that fits torch)"
        )
    return None


def _sources(builder: Any) -> dict[str, list[int]]:
    """Return size and time of each file that an extension is compiled from."""
    sources = [Path(builder.deepspeed_src_path(path)) for path in builder.sources()]
    headers = [file for path in builder.include_paths() for file in Path(builder.deepspeed_src_path(path)).glob("*.h")]
    return {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in (*sources, *headers)}


def _built(builder: Any, folder: Path) -> Path | None:
    """Return an extension's library in the folder, if its sources have not changed since it was built."""
    try:
        stamp = json.loads((folder / builder.name / STAMP).read_text(encoding="utf-8"))
        file = folder / builder.name / stamp["file"]
        return file if file.is_file() and stamp["sources"] == _sources(builder) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _adopt(builder: Any, folder: Path) -> ModuleType | None:
    """Load an extension from the folder and register it with DeepSpeed; return None if it doesn't load.

    Neither compiler nor ninja is needed: torch would call both, only to find that nothing has changed.
    """
    file = _built(builder, folder)
    spec = importlib.util.spec_from_file_location(file.stem, file) if file else None
    if spec is None or spec.loader is None:
        return None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError:  # a torch of the same version was compiled anew
        return None
    loaded_extensions(builder)[builder.name] = module
    return _load(builder)


def _build(builder: Any, folder: Path) -> ModuleType:
    """Build an extension in a fresh folder, move it to its final place, and return it. The caller holds the lock."""
    name = builder.name
    if missing := list(_missing_tools(builder)):
        raise CapabilityError(_lacking(name, missing))
    _remove_leftovers(folder, name)
    attempt = Path(tempfile.mkdtemp(prefix=f"{name}.building-", dir=folder))
    tools = os.pathsep.join([str(Path(ninja_executable() or "").parent), tool_path()])
    variables = {"TORCH_EXTENSIONS_DIR": str(attempt), "PATH": tools, "CXX": cxx_compiler() or ""}
    started = time.monotonic()
    try:
        _say(f"building DeepSpeed's {name}, one to three minutes, once; into {folder}")
        with environment(variables):
            module = _load(builder)
        _keep(builder, module, attempt, folder)
    finally:
        shutil.rmtree(attempt, ignore_errors=True)
    _say(f"built DeepSpeed's {name} in {time.monotonic() - started:.0f} s")
    return module


def _keep(builder: Any, module: ModuleType, attempt: Path, folder: Path) -> None:
    """Move a complete build to its final place."""
    built, kept = attempt / builder.name, folder / builder.name
    file = Path(str(module.__file__)).name
    stamp = {"file": file, "sources": _sources(builder), "python": sys.version}
    (built / STAMP).write_text(json.dumps(stamp, indent=1), encoding="utf-8")
    if kept.exists():
        kept.rename(attempt / "outdated")  # other processes may be running it
    built.rename(kept)
    module.__file__ = str(kept / file)  # pin_memory's builder opens it once more, by name


def _remove_leftovers(folder: Path, name: str) -> None:
    """Remove the files of a killed build, with a warning. The caller holds the lock, so no build is running."""
    for path in sorted(folder.glob(f"{name}.building-*")):
        lock = path / name / "lock"
        left = lock if lock.exists() else path
        shutil.rmtree(path, ignore_errors=True)  # first: the warning may be an error
        warnings.warn(f"a build of DeepSpeed's {name} was killed; what it left is removed: {left}", stacklevel=5)
