"""DeepSpeed's C++ extensions, built once per machine (`cpp_builds`) after a check of the tools that a build needs.

DeepSpeed compiles at first use, in silence, and fails late: ninja of a virtual environment is not found without its
folder on PATH, and torch waits forever for the lock file that a killed build leaves.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lightning_solo.cpp_builds import ELSEWHERE, build_folder, load_or_build, say, stored_library
from lightning_solo.errors import CapabilityError, PresetError, nearest
from lightning_solo.machine import cxx_compiler, has_python_headers, links, ninja_executable, nvcc_release, tool_path
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
# async_io uses symbols of pin_memory's library.
STANDS_ON = {"async_io": "pin_memory"}
TAIL_LINES = 15


def what_is_missing(name: str) -> str | None:
    """Return why an extension can't be loaded or built here, with the remedy, or None; build nothing.

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
    """Return whether an extension and those it needs are built, by `load_extension` or in DeepSpeed's wheel.

    Raises:
        PresetError: There is no such extension.
        CapabilityError: DeepSpeed is missing, or the folder of extensions can't be used.
    """
    if name in STANDS_ON and not is_built(STANDS_ON[name]):
        return False
    with environment({}, everything=True):
        builder = _builder(name)
        return _is_ready(builder) or stored_library(_folder(builder)) is not None


def load_extension(name: str) -> ModuleType:
    """Return an extension of DeepSpeed; build it if it isn't built. DeepSpeed's own classes then use it.

    The environment is restored afterwards. A build takes 35 to 185 s on two cores.

    Raises:
        PresetError: There is no such extension.
        CapabilityError: This machine lacks something that the build needs, or the build failed.
    """
    with environment({}, everything=True):
        builder = _builder(name)
        if name in STANDS_ON:
            if missing := what_is_missing(name):  # before the other one is built in vain
                raise CapabilityError(missing)
            load_extension(STANDS_ON[name])
        if _is_ready(builder):
            return _load(builder)
        folder = _folder(builder)
        try:
            module = load_or_build(
                folder,
                f"DeepSpeed's {name}",
                lambda file: _load_file(builder, file),
                lambda fresh: _build(builder, fresh, folder),
            )
        except OSError as error:
            raise CapabilityError(f"DeepSpeed's {name} can't be stored in {folder}: {error}; {ELSEWHERE}") from error
        module.__file__ = str(folder / Path(str(module.__file__)).name)  # pin_memory's builder opens it by name
        return module


def _folder(builder: Any) -> Path:
    """Return the folder of an extension, for the installed DeepSpeed and its sources as they are now."""
    sources = [Path(builder.deepspeed_src_path(path)) for path in builder.sources()]
    headers = Path(builder.deepspeed_src_path("csrc")).rglob("*.h")
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted({*sources, *headers})]
    try:
        return build_folder(builder.name, version("deepspeed"), files)
    except OSError as error:
        raise CapabilityError(f"DeepSpeed's {builder.name} can't be stored: {error}; {ELSEWHERE}") from error


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
    """Return the module that DeepSpeed's builder loads, or builds in the current environment."""
    try:
        module: ModuleType = builder.load(verbose=False)
    except Exception as error:  # torch and DeepSpeed raise many types, also KeyError
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
    """Return the missing part of the CUDA toolkit; builders need it on a machine with a CUDA device."""
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


def _load_file(builder: Any, file: Path) -> ModuleType:
    """Load an extension from a file and register it with DeepSpeed.

    This needs neither compiler nor ninja; torch's loader would run both to check for changes.
    """
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None  # for a file *.so
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loaded_extensions(builder)[builder.name] = module
    return _load(builder)


def _build(builder: Any, fresh: Path, folder: Path) -> ModuleType:
    """Build an extension in a fresh folder and return it."""
    if missing := list(_missing_tools(builder)):
        raise CapabilityError(_lacking(builder.name, missing))
    tools = os.pathsep.join([str(Path(ninja_executable() or "").parent), tool_path()])
    started = time.monotonic()
    say(f"building DeepSpeed's {builder.name}, one to three minutes, once; into {folder}")
    with environment({"TORCH_EXTENSIONS_DIR": str(fresh), "PATH": tools, "CXX": cxx_compiler() or ""}):
        module = _load(builder)
    say(f"built DeepSpeed's {builder.name} in {time.monotonic() - started:.0f} s")
    return module
