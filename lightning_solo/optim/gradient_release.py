"""Gradients that are used and freed one by one, in backward, as soon as each is complete.

Without accumulation and without clipping by norm a parameter is stepped right there, and at most a few gradients exist
at a time. With either of them no step can be exact before all micro-batches are through and the norm is known, so the
gradients are kept until then, in a buffer:

```
                          kept, per parameter
one micro-batch           as it came: 2 bytes in bf16, 4 in fp32
several                   their sum in fp32: 4 bytes; in bf16 a sum stops growing at 256 times its addends
```

on the device, or on the host, from where they pass through the device once more. Nothing is approximated: fp32
parameters end up where `torch.nn.utils.clip_grad_norm_` and a step of the optimizer would have them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_solo.errors import ConflictError, GradientError, PresetError
from lightning_solo.optim.names import name_in

BUFFERS = ("device", "host")
ONE_BY_ONE = (
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
    "Adafactor",
)
"""Torch's optimizers that step each parameter by its own gradient and states alone."""


class GradientRelease:
    """Steps an optimizer from backward; `step` ends a window of micro-batches of any length.

    ```
    release = GradientRelease(optimizer, accumulation=4, max_norm=1.0)
    for step in range(steps):
        for batch in window:
            (loss(batch) / len(window)).backward()
        norm = release.step()
    ```

    Args:
        optimizer: a `CompactAdamW`, or one of torch's that step each parameter by itself.
        accumulation: micro-batches in a window: 1, or more for several, whose number need not be the same each time.
        max_norm: the gradients' global norm is clipped to it, as `torch.nn.utils.clip_grad_norm_` does.
        max_value: each gradient is clamped to it, before the norm is taken, so that both bounds hold.
        buffer: where gradients are kept when they have to be: "device" or "host".

    Raises:
        ConflictError: an optimizer whose step needs all gradients at once, or of which that isn't known.
        PresetError: a value that is none of those allowed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        accumulation: int = 1,
        max_norm: float | None = None,
        max_value: float | None = None,
        buffer: str = "device",
    ) -> None:
        if type(accumulation) is not int or accumulation < 1:
            raise PresetError(f"GradientRelease: accumulation={accumulation!r}: write a whole number of at least 1")
        for name, bound in (("max_norm", max_norm), ("max_value", max_value)):
            if bound is not None and not bound > 0:
                raise PresetError(f"GradientRelease: {name}={bound}: write a number above 0, or None")
        if buffer not in BUFFERS:
            raise PresetError(f"GradientRelease: buffer={buffer!r}: write 'device' or 'host'")
        self.optimizer, self.accumulation, self.buffer = optimizer, accumulation, buffer
        self.max_norm, self.max_value = max_norm, max_value
        self._step_one = stepper(optimizer)
        self._kept: dict[Tensor, Tensor] = {}
        self._used: dict[Tensor, Tensor] = {}  # parameters stepped in this window, with their greatest gradient
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._zero_grad = optimizer.zero_grad
        optimizer.zero_grad = self._forget_and_zero  # type: ignore[method-assign]
        self.watch()

    def watch(self) -> None:
        """Watch the optimizer's parameters; again where some have been unfrozen or added since."""
        for p in self._unwatched():
            self._handles[p] = p.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    @property
    def immediate(self) -> bool:
        """Whether a parameter is stepped in backward, and nothing is kept."""
        return self.accumulation == 1 and self.max_norm is None

    @property
    def has_kept(self) -> bool:
        """Whether a window has begun."""
        return bool(self._kept)

    @property
    def bytes_per_parameter(self) -> int:
        """What is kept of the gradients in a window, for parameters in bf16."""
        return 0 if self.immediate else 2 if self.accumulation == 1 else 4

    @torch.no_grad()
    def step(self) -> Tensor | None:
        """End the window: check, clip, step what was kept; return the norm before clipping, or None if none was kept.

        Raises:
            GradientError: a gradient is infinite or NaN, or is of a parameter that isn't watched. What was kept is
                dropped; the message says what has been touched, which is nothing where gradients are kept.
        """
        self._require_watched()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn of a wrong order
        if self.immediate:
            self._require_finite_used()
            return None
        kept = {p: self._kept[p] for group in self.optimizer.param_groups for p in group["params"] if p in self._kept}
        try:
            return self._step_kept(kept) if kept else None
        finally:
            self._kept.clear()

    def remove(self) -> None:
        """Take the hooks off the parameters, and forget what was kept."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self.forget()
        if vars(self.optimizer).get("zero_grad") == self._forget_and_zero:
            del self.optimizer.zero_grad

    def forget(self) -> None:
        """Drop what was kept in this window, as the optimizer's ``zero_grad`` does."""
        self._kept.clear()
        self._used.clear()

    def _forget_and_zero(self, *args: Any, **kwargs: Any) -> None:
        self.forget()
        self._zero_grad(*args, **kwargs)

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _unwatched(self) -> list[Tensor]:
        every = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [p for p in every if p.requires_grad and p not in self._handles]

    def _require_watched(self) -> None:
        for p in self._unwatched():
            if p.grad is not None:
                self._kept.clear()
                self._used.clear()
                raise GradientError(
                    f"{self._name(p)} was unfrozen or added after GradientRelease was made, and its gradient was not"
                    " released; call watch() before backward"
                )

    # --- in backward ---

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is None:
            return
        if gradient.is_sparse:
            raise GradientError(
                f"the gradient of {self._name(parameter)} is sparse; write nn.Embedding(..., sparse=False)"
            )
        if self.immediate:
            self._use(parameter, gradient)
        else:
            self._keep(parameter, gradient)

    def _use(self, parameter: Tensor, gradient: Tensor) -> None:
        if parameter in self._used:
            self._require_several(parameter, ", and has been stepped with the first")
        greatest = torch.linalg.vector_norm(gradient, float("inf"), dtype=torch.float32) if gradient.numel() else None
        if greatest is not None:
            self._used[parameter] = greatest
            if not greatest.is_cuda:  # there it would wait for the device, at each parameter
                self._require_finite(parameter, greatest)
        self._step_one(parameter, self._bounded(gradient), 1.0)

    def _require_several(self, parameter: Tensor, and_what: str) -> None:
        if self.accumulation == 1:
            self.forget()
            raise GradientError(
                f"{self._name(parameter)} got a second gradient in one window{and_what}; call release.step(), not"
                " optimizer.step(), behind each window, write accumulation=2 for several backward calls in one, and"
                " use_reentrant=False for activation checkpointing"
            )

    def _keep(self, parameter: Tensor, gradient: Tensor) -> None:
        kept = self._kept.get(parameter)
        if kept is not None:
            self._require_several(parameter, "")
            kept.add_(gradient.to(kept.device))
            return
        kind = gradient.dtype if self.accumulation == 1 else _at_least_fp32(gradient.dtype)
        self._kept[parameter] = gradient.to("cpu" if self.buffer == "host" else gradient.device, kind)

    # --- at the end of a window ---

    def _step_kept(self, kept: dict[Tensor, Tensor]) -> Tensor:
        if self.max_value is not None:
            self._require_finite_kept(kept, float("inf"))  # before infinity is made a number
        total = self._require_finite_kept(kept, 2)
        if bool(total.isfinite().logical_not()):
            raise GradientError("the norm of all gradients is too large for fp32; no weight has been touched")
        scale = 1.0 if self.max_norm is None else float((self.max_norm / (total + 1e-6)).clamp(max=1.0))
        for parameter in list(kept):
            gradient = kept.pop(parameter)
            self._kept.pop(parameter)
            self._step_one(parameter, self._bounded(gradient).to(parameter.device), scale)
        return total

    def _bounded(self, gradient: Tensor) -> Tensor:
        if self.max_value is None:
            return gradient
        # a bound is seldom a bf16; what is in fp32 is this object's own
        return gradient.to(_at_least_fp32(gradient.dtype)).clamp_(-self.max_value, self.max_value)

    def _require_finite_kept(self, kept: dict[Tensor, Tensor], order: float) -> Tensor:
        norms = []
        for gradient in kept.values():
            one = self._bounded(gradient) if order == 2 else gradient
            one = one if one.numel() else one.new_zeros(1)
            norms.append(torch.linalg.vector_norm(one, order, dtype=_at_least_fp32(one.dtype)))
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
        if bool(total.isfinite().logical_not()):
            for parameter, gradient in kept.items():  # the norm of finite ones may be too large for fp32
                if gradient.numel():
                    self._require_finite(parameter, torch.linalg.vector_norm(gradient, float("inf")))
        return total

    def _require_finite(self, parameter: Tensor, measure: Tensor) -> None:
        if not bool(measure.isfinite().logical_not()):
            return
        touched = f"{len(self._used) - 1} parameters before it have been stepped" if self._used else ""
        self._used.clear()
        raise GradientError(
            f"the gradient of {self._name(parameter)} is not finite; {touched or 'no weight has been touched'}"
        )

    def _require_finite_used(self) -> None:
        used, self._used = self._used, {}
        on_device = [(p, greatest) for p, greatest in used.items() if greatest.is_cuda]
        if on_device and bool(torch.stack([greatest for _, greatest in on_device]).isfinite().logical_not().any()):
            first = next(p for p, greatest in on_device if not bool(greatest.isfinite()))
            raise GradientError(
                f"the gradient of {self._name(first)} is not finite; it and others have been stepped: go on from a"
                " checkpoint, or write max_norm, with which gradients are kept and checked before any step"
            )

    def _name(self, parameter: Tensor) -> str:
        return name_in(self.optimizer, parameter)


def stepper(optimizer: Optimizer) -> Callable[[Tensor, Tensor, float], None]:
    """Return a function (parameter, gradient, factor of the gradient) that steps one parameter.

    Raises:
        ConflictError: the optimizer's step needs all gradients at once, or that isn't known.
    """
    own = getattr(optimizer, "step_one", None)
    if own is not None:
        return own  # type: ignore[no-any-return]
    kind = type(optimizer)
    if kind.__name__ not in ONE_BY_ONE or kind.__module__.split(".")[0] != "torch":
        raise ConflictError(
            f"release_gradients with {kind.__name__}: known to step each parameter by itself are CompactAdamW and"
            f" torch's {', '.join(ONE_BY_ONE)}; write release_gradients=false"
        )
    return partial(step_alone, optimizer)


def _at_least_fp32(kind: torch.dtype) -> torch.dtype:
    return torch.promote_types(kind, torch.float32)


def step_alone(optimizer: Optimizer, parameter: Tensor, gradient: Tensor, scale: float = 1.0) -> None:
    """Step one parameter by an optimizer's own ``step``, which passes over those that have no gradient."""
    parameter.grad = (gradient * scale).to(parameter.dtype)
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # for a whole step, not for each parameter
    hooks = {name: getattr(optimizer, name) for name in names}
    try:
        for name in names:
            setattr(optimizer, name, OrderedDict())
        optimizer.step()
    finally:
        parameter.grad = None
        for name, own in hooks.items():
            setattr(optimizer, name, own)
