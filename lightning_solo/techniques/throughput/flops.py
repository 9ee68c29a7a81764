"""Floating-point operations: the count of one call, and the peak rate of a device."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from torch.utils.flop_counter import FlopCounterMode

from lightning_solo.attributes import replaced
from lightning_solo.presets.devices import find


@contextlib.contextmanager
def eager_flop_counter() -> Iterator[FlopCounterMode]:
    """Count FLOPs in this context.

    Compiled functions run uncompiled, since Dynamo would never compile a function that it first meets under a dispatch
    mode. Dynamo takes seconds to load, so it is not loaded here.
    """
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield stack.enter_context(FlopCounterMode(display=False))


class CountedOnce:
    """Replaces an object's method until its next call; passes that call's FLOPs and arguments to ``receive``."""

    def __init__(self, owner: Any, name: str, receive: Callable[..., None]) -> None:
        self.receive: Callable[..., None] | None = receive
        self._patch = contextlib.ExitStack()
        self.method = self._patch.enter_context(replaced(owner, name, self))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Restore the method and call it under the counter; later calls are not counted."""
        self.remove()
        receive, self.receive = self.receive, None
        if receive is None:
            return self.method(*args, **kwargs)
        with eager_flop_counter() as counter:
            result = self.method(*args, **kwargs)
        receive(int(counter.get_total_flops()), *args)
        return result

    def remove(self) -> None:
        """Restore the method, unless it has been replaced since."""
        self._patch.close()


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return a device's dense operations per second, from our table or else Lightning's; None if unknown.

    Args:
        device: the device of the matrix products.
        dtype: the type of the matrix products; fp32 means TF32 if torch may use it.
    """
    known = find(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    kind = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}.get(dtype)
    if known is None or kind is None:
        return get_available_flops(device, dtype)
    if kind == "fp32" and torch.get_float32_matmul_precision() != "highest" and known.flops["tf32"]:
        kind = "tf32"
    return known.flops[kind]


def compute_dtype(precision: str) -> torch.dtype:
    """Return the type of matrix products under one of Lightning's precision names.

    >>> compute_dtype("bf16-mixed"), compute_dtype("16-true"), compute_dtype("32-true")
    (torch.bfloat16, torch.float16, torch.float32)
    """
    if precision.startswith("transformer-engine"):
        return torch.int8  # FP8 runs at the rate of int8, which is what Lightning's table lists
    return {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}.get(
        precision.split("-")[0], torch.float32
    )
