"""The ledger's peak of single optimizer steps: entered for one batch at a time, left between them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_solo.memory.events import Peak
from lightning_solo.memory.ledger import Ledger


class PeakWatch:
    """One `Ledger` over the batches of an optimizer step, off in between.

    While it is on, functions that torch.compile made run as written: dynamo marks what it first meets under a dispatch
    mode as not to be compiled, for good. So their peak is that of the uncompiled code.
    """

    def __init__(self) -> None:
        self._ledger: Ledger | None = None
        self._on = ExitStack()

    @property
    def started(self) -> bool:
        """Whether there is a step whose peak was not taken yet."""
        return self._ledger is not None

    def enter(self, module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        """Count from now until `leave`; the first time since `take` with a ledger that knows nothing yet."""
        self.leave()
        if self._ledger is None:
            # on a CPU all is counted: what an offloading technique calls the host is the device there
            self._ledger = Ledger(module, optimizers, None if device.type == "cpu" else device.type)
        if "torch._dynamo" in sys.modules:
            self._on.enter_context(torch.compiler.set_stance("force_eager"))
            # a compiled wrapper warns at every call that the hooks by which modules are named run twice for it
            self._on.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=".*when there are global hooks on modules", category=UserWarning)
        self._on.enter_context(self._ledger)

    def leave(self) -> None:
        """Count no longer; a second call does nothing."""
        self._on.close()

    def take(self) -> Peak | None:
        """Leave, and return the peak since the last time; None where nothing was counted."""
        self.leave()
        ledger, self._ledger = self._ledger, None
        return None if ledger is None else ledger.peak()


def compiled_parts(module: nn.Module) -> list[str]:
    """Return what of ``module`` torch.compile made, by name: parts, and functions kept as attributes.

    >>> layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> layers[0].compile(backend="eager")
    >>> compiled_parts(layers)
    ['0']
    """
    found = []
    for name, part in module.named_modules():
        whole = name or f"the whole {type(part).__name__}"
        # nn.Module.compile(), torch.compile(module), torch.compile(LightningModule)
        if getattr(part, "_compiled_call_impl", None) is not None or getattr(part, "_compiler_ctx", None) is not None:
            found.append(whole)
        elif type(part).__name__ == "OptimizedModule":
            found.append(whole)
            continue
        prefix = f"{name}." if name else ""
        found += [
            f"{prefix}{key}"
            for key, value in vars(part).items()
            if not key.startswith("_") and not isinstance(value, nn.Module) and is_compiled(value)
        ]
    return found


def is_compiled(function: object) -> bool:
    """Tell whether torch.compile returned this function."""
    return callable(function) and hasattr(function, "_torchdynamo_orig_callable")
