"""Peaks of single optimizer steps by category, counted by a ledger during the batches of a step."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_solo.memory.events import Peak
from lightning_solo.memory.ledger import Ledger
from lightning_solo.memory.module_names import names_not_followed
from lightning_solo.units import format_bytes

_as_written = ExitStack()
_counting = 0


@contextmanager
def counted_as_written(ledger: Ledger) -> Iterator[None]:
    """Count with a ledger, and run compiled functions uncompiled.

    Dynamo would never compile a function that it first meets under a dispatch mode. Contexts of several ledgers may
    overlap, and end in any order.
    """
    global _counting
    if not _counting and "torch._dynamo" in sys.modules:
        _as_written.enter_context(torch.compiler.set_stance("force_eager"))
        # a compiled wrapper warns at every call that the ledger's hooks run twice for it
        _as_written.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules", category=UserWarning)
    _counting += 1
    try:
        with ledger:
            yield
    finally:
        _counting -= 1
        if not _counting:
            _as_written.close()


@contextmanager
def uncounted() -> Iterator[None]:
    """Count nothing in this context, and run compiled functions compiled."""
    with _disable_current_modes(), names_not_followed(), torch.compiler.set_stance("default"):
        yield


class CategoryPeaks:
    """Counts the next ``steps_left`` optimizer steps, each with a new `Ledger`.

    Compiled functions run uncompiled in these steps, so their peak is that of the uncompiled code; one warning says so.
    """

    def __init__(self, steps_left: int) -> None:
        self.steps_left = steps_left
        self.first_step = 0  # `global_step` at the start of the counted step
        self._ledger: Ledger | None = None
        self._on = ExitStack()
        self._peaks: list[tuple[Peak, int]] = []
        self._warned = False

    def enter(self, module: nn.Module, optimizers: Iterable[object], device: torch.device, step: int) -> None:
        """Count until `leave`, if this optimizer step is being counted already or ``steps_left`` isn't 0."""
        self.leave()
        if self._ledger is None:
            if not self.steps_left:
                return
            self.steps_left -= 1
            self.first_step = step
            self._warn_of_compiled(module)
            # on a CPU the device and the host that techniques offload to are the same memory
            self._ledger = Ledger(module, optimizers, None if device.type == "cpu" else device.type)
        self._on.enter_context(counted_as_written(self._ledger))

    def leave(self) -> None:
        """Stop counting; a second call does nothing."""
        self._on.close()

    def discard(self) -> None:
        """Stop counting, and drop the step that was being counted."""
        self.leave()
        self._ledger = None

    def take(self, step: int) -> Peak | None:
        """Stop counting, keep the peak as that of optimizer step ``step``, and return it; None if none was counted."""
        self.leave()
        if self._ledger is None:
            return None
        peak, self._ledger = self._ledger.peak(), None
        self._peaks.append((peak, step))
        return peak

    @property
    def largest(self) -> tuple[Peak, int] | None:
        """The largest peak so far, and its optimizer step."""
        return max(self._peaks, key=lambda taken: taken[0].bytes, default=None)

    def _warn_of_compiled(self, module: nn.Module) -> None:
        compiled = [] if self._warned else compiled_parts(module)
        if compiled:
            self._warned = True
            warnings.warn(
                f"compiled: {', '.join(compiled)}; in the steps counted by category it runs uncompiled, so activations "
                "and temporaries are those of the uncompiled code: memory of the compiled code is not seen",
                stacklevel=2,
            )


def compiled_parts(module: nn.Module) -> list[str]:
    """Return the names of the compiled parts of a module, and of compiled functions among its attributes.

    >>> layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> layers[0].compile(backend="eager")
    >>> compiled_parts(layers)
    ['0']
    """
    names = []
    for name, part in module.named_modules():
        whole = name or f"the whole {type(part).__name__}"
        if is_compiled(part):
            names.append(whole)
            if type(part).__name__ == "OptimizedModule":
                continue
        prefix = f"{name}." if name else ""
        names += [
            f"{prefix}{key}"
            for key, value in vars(part).items()
            if not key.startswith("_") and not isinstance(value, nn.Module) and is_compiled(value)
        ]
    return names


def is_compiled(what: object) -> bool:
    """Return whether a function is compiled, or a module or its calls."""
    if isinstance(what, nn.Module):  # torch.compile(module), nn.Module.compile(), torch.compile(LightningModule)
        call = getattr(what, "_compiled_call_impl", None)
        by_attribute = (getattr(call, "compiled", call), getattr(what, "_compiler_ctx", None))
        return type(what).__name__ == "OptimizedModule" or any(value is not None for value in by_attribute)
    return callable(what) and hasattr(what, "_torchdynamo_orig_callable")


def describe(peak: Peak, step: int) -> str:
    """Return the peak of an optimizer step, and the operator and module that made it, as text.

    >>> describe(Peak(3 * 2**30, {}, "aten.mm.default", "net.head"), 2)
    'counted peak 3.00 GiB, optimizer step 2: made by aten.mm.default in net.head'
    """
    if not peak.operator:
        return f"counted peak {format_bytes(peak.bytes)}, optimizer step {step}: at its start"
    where = f"in {peak.module}" if peak.module else "outside of the module's parts"
    return f"counted peak {format_bytes(peak.bytes)}, optimizer step {step}: made by {peak.operator} {where}"
