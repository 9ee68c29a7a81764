"""Gradients that are used and freed one by one, in backward, as soon as each is complete.

Without accumulation and without clipping by norm a parameter is stepped right there, and at most a few gradients exist
at a time. With either of them no step can be exact before all micro-batches are through and the norm is known, so the
gradients are kept until then, in a buffer:

```
                          kept, per parameter
one micro-batch           as it came: 2 bytes in bf16, 4 in fp32
several                   their sum in fp32: 4 bytes; in bf16 a sum stops growing at 256 times its addends
```

on the device, or in pinned memory of the host, from where they pass through the device to be summed, measured and used.
Nothing is approximated: fp32 parameters end up where `torch.nn.utils.clip_grad_norm_` and a step of the optimizer would
have them; of a parameter of more than 2**24 elements, kept on the host, the norm is summed up piece by piece.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_solo.errors import ConflictError, GradientError, PresetError
from lightning_solo.optim import host_memory
from lightning_solo.optim.adamw_update import in_memory_order
from lightning_solo.optim.compact_adamw import CompactAdamW, greatest
from lightning_solo.optim.host_memory import Staging
from lightning_solo.optim.names import name_in

BUFFERS = ("device", "host")
PIECE = 2**24
"""Elements of a gradient on the host that pass through the device at once."""
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
        self._host: dict[Tensor, Tensor] = {}  # where gradients are kept on the host, from window to window
        self._staging: Staging | None = None
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
        self._wait()
        self._host.clear()
        if vars(self.optimizer).get("zero_grad") == self._forget_and_zero:
            del self.optimizer.zero_grad

    def forget(self) -> None:
        """Drop what was kept in this window, as the optimizer's ``zero_grad`` does."""
        self._kept.clear()
        self._used.clear()

    def _wait(self) -> None:
        if self._staging is not None:  # it may still write what is freed
            self._staging.wait()

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
        if gradient.numel():
            self._used[parameter] = measure = greatest([gradient])[0].float()
            if not measure.is_cuda:  # there it would wait for the device, at each parameter
                self._require_finite(parameter, measure)
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
        if self.buffer == "host":
            self._kept[parameter] = self._kept_on_host(parameter, gradient, kept)
        elif kept is not None:
            kept.add_(gradient)
        else:
            self._kept[parameter] = gradient.to(self._kind(gradient))

    def _kind(self, tensor: Tensor) -> torch.dtype:
        return tensor.dtype if self.accumulation == 1 else _at_least_fp32(tensor.dtype)

    def _kept_on_host(self, parameter: Tensor, gradient: Tensor, kept: Tensor | None) -> Tensor:
        """Return the parameter's host tensor, to which the gradient has been added: flat, in the parameter's order."""
        if kept is None and (parameter not in self._host or self._host[parameter].dtype != self._kind(parameter)):
            self.allocate()
        self._staging = self._staging or Staging(parameter.device)
        target, flat = self._host[parameter], in_memory_order(gradient, parameter)
        for first in range(0, target.numel(), PIECE):
            pieces = {"sum": target[first : first + PIECE]}
            with self._staging.on_device(pieces, unread=kept is None) as staged:
                given = flat[first : first + PIECE]
                staged["sum"].copy_(given) if kept is None else staged["sum"].add_(given)
        return target

    def allocate(self) -> None:
        """Have room on the host for the gradients of all watched parameters: called by itself when the first one comes.

        Raises:
            BudgetError: the host has too little memory.
        """
        lacking = [p for p in self._handles if p not in self._kept]
        if not lacking:
            return
        self._wait()
        wanted = [(p.numel(), self._kind(p)) for p in lacking]
        for p in lacking:
            self._host.pop(p, None)
        host_memory.require_host_room("gradients", wanted, "keep them on the device")
        self._host |= dict(zip(lacking, host_memory.host_tensors(wanted, lacking[0].device), strict=True))

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
            self._step_one(parameter, self._to_use(parameter, gradient), scale)
        return total

    def _bounded(self, gradient: Tensor) -> Tensor:
        if self.max_value is None:
            return gradient
        # a bound is seldom a bf16; what is in fp32 is this object's own
        return gradient.to(_at_least_fp32(gradient.dtype)).clamp_(-self.max_value, self.max_value)

    def _to_use(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return a kept gradient as the optimizer takes it."""
        if self.buffer == "device":
            return self._bounded(gradient)
        # brings it to the device by itself: all of it is on the host, for the norm has been waited for
        if self.max_value is None and isinstance(self.optimizer, CompactAdamW):
            return gradient
        made = torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False)
        in_memory_order(made).copy_(gradient)
        return self._bounded(made)

    def _require_finite_kept(self, kept: dict[Tensor, Tensor], order: float) -> Tensor:
        norms = [self._norm(parameter, gradient, order) for parameter, gradient in kept.items()]
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
        if bool(total.isfinite().logical_not()):
            for parameter, gradient in kept.items():  # the norm of finite ones may be too large for fp32
                if gradient.numel():
                    self._require_finite(parameter, greatest([gradient])[0])
        return total

    def _norm(self, parameter: Tensor, gradient: Tensor, order: float) -> Tensor:
        """Return the norm of a kept gradient as it will be used, or, of order infinity, as it is."""
        norms = []
        for piece in self._pieces(gradient):
            if order == 2:
                one = self._bounded(piece)
                norms.append(torch.linalg.vector_norm(one, order, dtype=_at_least_fp32(one.dtype)))
            else:
                norms.append(greatest([piece])[0].to(_at_least_fp32(piece.dtype)))
        if not norms:
            return torch.zeros((), device=parameter.device)
        whole: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)
        return whole

    def _pieces(self, gradient: Tensor) -> Iterator[Tensor]:
        """Yield a kept gradient on the device: as it is, or from the host piece by piece; nothing of an empty one."""
        if self._staging is None:
            yield from (gradient,) if gradient.numel() else ()
            return
        for first in range(0, gradient.numel(), PIECE):
            with self._staging.on_device({"grad": gradient[first : first + PIECE]}, unchanged=("grad",)) as staged:
                yield staged["grad"]

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
        on_device = [(p, measure) for p, measure in used.items() if measure.is_cuda]
        if on_device and bool(torch.stack([measure for _, measure in on_device]).isfinite().logical_not().any()):
            first = next(p for p, measure in on_device if not bool(measure.isfinite()))
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
