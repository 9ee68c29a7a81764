"""The C++ step of 8-bit moments on a CPU, `adamw_cpu.cpp`, built once per machine in about a second.

It passes over memory once. Its numbers equal those of torch's operators, except for roots that torch's MKL rounds the
other way. A step builds it when it first needs it. It is stored for all processes of this user (`cpp_builds`); where no
folder for it can be written, each process builds it again.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_solo.cpp_builds import build_folder, load_or_build
from lightning_solo.errors import CapabilityError
from lightning_solo.machine import NotPrivateError, cxx_compiler, tool_path
from lightning_solo.optim.compressed_moments import blocks
from lightning_solo.optim.kernels import Control, Piece

SOURCE = Path(__file__).with_name("adamw_cpu.cpp")
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", "-fopenmp-simd"),
    "-ffp-contract=off",  # rounded as torch's operators do
    *("-fno-math-errno", "-fno-trapping-math"),  # or roots and comparisons are not vectorised; no result changes
)
PATIENCE_S = 300
"""Time after which a compiler is killed."""

_FP32, _STOCHASTIC, _BITS24, _BITS32 = range(4)  # `Master` in the source
_POINTERS = ("weight", "grad", "correction", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
_NUMBERS = ("scale", "shrink", "pull", "first", "keep", "second", "correction2", "eps", "rate", "bound")


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in ("numel", "threads", "first_row")),
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
    except CapabilityError as error:
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
    numbers = {**piece.scalars._asdict(), "scale": control.scale_on_host, "bound": control.bound}
    step = _Step(
        *(tensors[name].data_ptr() if name in tensors else None for name in _POINTERS),
        *(weight.numel(), torch.get_num_threads(), piece.first_row, numbers["seed"], numbers["seed_of_weights"]),
        *(numbers[name] for name in _NUMBERS),
    )
    function(step, master, grad.dtype == torch.float32)


# --- building ---


def _library(compiler: Sequence[str]) -> ctypes.CDLL:
    """Return the library; build it if it isn't stored yet."""
    version = _output([*compiler, "--version"])

    def build(folder: Path) -> ctypes.CDLL:
        path = folder / "adamw.so"
        _output([*compiler, *FLAGS, str(SOURCE), "-o", str(path)])
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise CapabilityError(str(error)) from error

    try:
        folder = build_folder("adamw", SOURCE.read_bytes(), FLAGS, list(compiler), version)
        return load_or_build(folder, "CompactAdamW's step in C++", lambda path: ctypes.CDLL(str(path)), build)
    except NotPrivateError as error:
        warnings.warn(f"CompactAdamW's step in C++ is built in each process again: {error}", stacklevel=2)
    except OSError:  # no folder that this user may write, or one without locks
        pass
    with tempfile.TemporaryDirectory(prefix="lightning_solo-") as temporary:  # the loaded library needs no file
        return build(Path(temporary))


def _output(command: Sequence[str]) -> str:
    """Return the output of a command."""
    environment = {**os.environ, "PATH": tool_path()}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environment, timeout=PATIENCE_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CapabilityError(str(error)) from error
    if done.returncode:
        words = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        raise CapabilityError(f"{shlex.join(command)} ended with {done.returncode}: {words}")
    return done.stdout
