"""Zero the gradients of parameters that a window didn't use, so that none is updated by an earlier gradient.

DeepSpeed (0.19.8) keeps each parameter's gradient on the host until the next one overwrites it. A parameter that a step
didn't use is updated with its last gradient again. If only a later micro-batch of a window uses it, its new gradient is
added to that of the last window. Here both are set to zero, which is the gradient of an unused parameter.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

from lightning_solo.errors import listed
from lightning_solo.zero.deepspeed_internals import accumulated_gradient, zero_gradients


class GradientWindow:
    """The micro-batches between two optimizer steps of the engine of one module."""

    def __init__(self, module: nn.Module) -> None:
        self._names: dict[Tensor, str] = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self.parameters = list(self._names)
        self._warned = False
        self.micro_batches = 0
        self._used: set[Tensor] = set()
        hook: Any = Tensor.register_post_accumulate_grad_hook
        self._hooks = [hook(p, self._used.add) for p in self.parameters]

    def after_backward(self, zero: Any) -> None:
        """Count a micro-batch; after a window's first one, zero the old gradients of parameters that it didn't use."""
        self.micro_batches += 1
        if self.micro_batches == 1:
            for parameter in self.unused():
                accumulated = accumulated_gradient(zero, parameter)
                if accumulated is not None:
                    accumulated.zero_()

    def before_step(self, zero: Any) -> None:
        """Zero the gradients of the parameters that the window didn't use, and end the window."""
        if unused := self.unused():
            zero_gradients(zero, set(unused))
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{listed(self._names[p] for p in unused)}: not used by a step. Under ZeRO the gradients are zero,"
                    " so that momentum and weight decay still change them, and plain training leaves them alone",
                    stacklevel=2,
                )
        self._used.clear()
        self.micro_batches = 0

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def unused(self) -> list[Tensor]:
        """Return the parameters that no micro-batch of the window has used so far."""
        return [p for p in self.parameters if p not in self._used]
