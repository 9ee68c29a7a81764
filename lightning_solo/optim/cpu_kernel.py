"""The C++ step of 8-bit moments on a CPU, `adamw_cpu.cpp`, built once per machine in about a second.

It passes over memory once, and gives the numbers of torch's operators but for a root that torch's MKL rounds the other
way. It is built when a step first needs it, and stored in ``$XDG_CACHE_HOME/lightning_solo/kernels``, by default below
``~/.cache``, for every process of this user on such a processor; where no such folder can be written, each process
builds its own.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from lightning_solo.machine import (
    NotPrivateError,
    cxx_compiler,
    is_private,
    private_folder,
    processor,
    processor_flags,
    tool_path,
    user_cache,
)
from lightning_solo.optim.compressed_moments import blocks
from lightning_solo.optim.kernels import Control, Piece

SOURCE = Path(__file__).with_name("adamw_cpu.cpp")
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", "-fopenmp-simd"),
    "-ffp-contract=off",  # rounded as torch's operators do
    *("-fno-math-errno", "-fno-trapping-math"),  # or roots and comparisons are not vectorised; no result changes
)
PATIENCE_S = 300
"""After which a compiler is taken to hang."""

_FP32, _STOCHASTIC, _BITS24, _BITS32 = range(4)  # `Master` in the source
_POINTERS = ("weight", "grad", "correction", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
_NUMBERS = ("scale", "shrink", "pull", "first", "keep", "second", "correction2", "eps", "rate", "bound")


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in ("numel", "threads")),
        *((name, ctypes.c_uint64) for name in ("seed", "seed_of_weights")),
        *((name, ctypes.c_float) for name in _NUMBERS),
    )


Kernel = Callable[[Piece, Control], None]
"""Steps all of a parameter."""


@functools.cache
def kernel() -> Kernel | None:
    """Return the step in C++; None without a compiler, or with a warning if compilation fails."""
    compiler = cxx_compiler()
    if compiler is None or os.name != "posix":
        return None
    try:
        function = _library(shlex.split(compiler)).lightning_solo_compact_adamw
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"CompactAdamW's step in C++ was not built, and torch's operators take several times as long: {error};"
            " write CXX=<a C++ compiler that works> before the command",
            stacklevel=2,
        )
        return None
    function.argtypes = (ctypes.POINTER(_Step), ctypes.c_int32, ctypes.c_int32)
    function.restype = None
    return functools.partial(_step, function)


def serves(piece: Piece) -> bool:
    """Return whether the C++ step can run on a parameter's tensors, which it reads by address."""
    return all(type(tensor) is Tensor for tensor in piece.tensors.values()) and has_layout(piece)


def has_layout(piece: Piece) -> bool:
    """Return whether the C++ step supports the types and sizes of a parameter's tensors."""
    tensors = piece.tensors
    weight, correction = tensors["weight"], tensors.get("correction")
    if tensors["exp_avg"].dtype != torch.int8 or (weight.dtype == torch.float32 and correction is not None):
        return False
    return all(
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.numel() == (blocks(weight.numel()) if name.endswith("_scale") else weight.numel())
        for name, tensor in tensors.items()
    )


def _step(function: Callable[..., None], piece: Piece, control: Control) -> None:
    """Step a parameter in place, in as many threads as torch has."""
    tensors = dict(piece.tensors)
    weight, grad, correction = tensors["weight"], tensors["grad"], tensors.get("correction")
    if grad.dtype not in (torch.float32, torch.bfloat16):
        grad = tensors["grad"] = grad.float()
    if weight.dtype == torch.float32:
        master = _FP32
    elif correction is None:
        master = _STOCHASTIC
    else:
        master = _BITS24 if correction.dtype == torch.int8 else _BITS32
    numbers = {**vars(piece.scalars), "scale": control.scale_on_host, "bound": control.bound}
    step = _Step(
        *(tensors[name].data_ptr() if name in tensors else None for name in _POINTERS),
        *(weight.numel(), torch.get_num_threads(), numbers["seed"], numbers["seed_of_weights"]),
        *(numbers[name] for name in _NUMBERS),
    )
    function(step, master, grad.dtype == torch.float32)


# --- building ---


def _library(compiler: Sequence[str]) -> ctypes.CDLL:
    """Return the library, built if need be."""
    name = f"adamw-{_key(compiler)}.so"
    folder = _folder()
    if folder is not None:
        path = folder / name
        if path.is_file() and is_private(path):
            with suppress(OSError):  # half of it, left by a machine that went down
                return ctypes.CDLL(str(path))
        with suppress(PermissionError):  # a folder that may be read, and no more
            _build(compiler, path)
            return ctypes.CDLL(str(path))
    with tempfile.TemporaryDirectory(prefix="lightning_solo-") as temporary:  # once loaded, it needs its file no more
        path = Path(temporary, name)
        _build(compiler, path)
        return ctypes.CDLL(str(path))


def _build(compiler: Sequence[str], path: Path) -> None:
    """Compile into a file atomically, since other processes may build and load it at the same time."""
    handle, library = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        _output([*compiler, *FLAGS, str(SOURCE), "-o", library])
        os.chmod(library, 0o700)
        os.replace(library, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(library)


def _folder() -> Path | None:
    """Return the folder of libraries, writable by this user alone; None if it can't be made."""
    cache = user_cache()
    if cache is None:
        return None
    try:
        return private_folder(cache, "lightning_solo", "kernels")
    except NotPrivateError as error:
        warnings.warn(f"CompactAdamW's step in C++ is built in each process again: {error}", stacklevel=2)
    except OSError:
        pass
    return None


def _key(compiler: Sequence[str]) -> str:
    """Return a hash of what a library depends on: source, compiler, flags and processor."""
    version = _output([*compiler, "--version"])
    differs = (list(compiler), version, FLAGS, platform.machine(), processor(), processor_flags())
    return hashlib.sha256(SOURCE.read_bytes() + repr(differs).encode()).hexdigest()[:16]


def _output(command: Sequence[str]) -> str:
    """Return what a command prints.

    Raises:
        OSError: it can't be run, or fails: with the first line of its error.
    """
    environment = {**os.environ, "PATH": tool_path()}
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=environment, timeout=PATIENCE_S, check=False
    )
    if done.returncode:
        words = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        raise OSError(f"{shlex.join(command)} ended with {done.returncode}: {words}")
    return done.stdout
