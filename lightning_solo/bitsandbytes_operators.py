"""Import of bitsandbytes' operators, without a download and without its line on stderr."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_solo.attributes import replaced


@functools.cache
def bitsandbytes() -> Any:
    """Return the package bitsandbytes.

    On CPUs with AVX512-BF16 its import asks the package ``kernels``, if that is installed, for a kernel from a hub, and
    complains on stderr if it isn't. Neither happens here. The kernel is for inference; nothing in this package uses it.
    Functions that the package compiles are compiled when they are first called, since torch's compiler takes more than
    a second to import.
    """
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    missing = object()
    before = sys.modules.get("kernels", missing)
    sys.modules["kernels"] = None  # type: ignore[assignment]  # `import kernels` raises ImportError
    try:
        compiled = replaced(torch, "compile", _compiled_at_first_call)
        with compiled, replaced(logger, "disabled", True), _disable_current_modes():
            return importlib.import_module("bitsandbytes")
    finally:
        del sys.modules["kernels"]
        if before is not missing:
            sys.modules["kernels"] = before  # type: ignore[assignment]


def _compiled_at_first_call(function: Any = None, **options: Any) -> Any:
    if function is None:
        return functools.partial(_compiled_at_first_call, **options)
    compiled: Any = functools.cache(lambda: torch.compile(function, **options))
    return lambda *args, **kwargs: compiled()(*args, **kwargs)


@functools.cache
def dynamic_codes() -> tuple[float, ...]:
    """Return the 256 numbers of bitsandbytes' signed 8-bit type, in which it stores the scales of 4-bit blocks."""
    with _disable_current_modes():
        return tuple(bitsandbytes().functional.create_dynamic_map().tolist())
