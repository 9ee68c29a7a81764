"""Use and free gradients in backward, as soon as each is complete.

Without accumulation and clipping by norm a parameter is stepped in backward, and at most a few gradients exist at a
time; small ones wait for one another, up to `Kernels.grouped_bytes`. With either of them an exact step needs all
micro-batches or the norm. Then gradients are kept until the end of the window (`GradientSums`), on the device or in
pinned memory of the host:

```
                          kept, per parameter
one micro-batch           the gradient itself: 2 bytes in bf16, 4 in fp32
several                   their sum in fp32: 4 bytes; in bf16 a sum stops growing at 256 times its addends
```

Nothing is approximated: fp32 parameters end up as after `torch.nn.utils.clip_grad_norm_` and a step of the optimizer.
Where the norm is computed from norms of parts, by Triton or for large parameters on the host, they equal it within the
rounding of a sum.

On a GPU the host waits for the device once, at the end of a window, to learn whether all gradients were finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_solo.errors import GradientError, PresetError, RefusedStepError
from lightning_solo.memory.sharded_tensors import is_sharded, local
from lightning_solo.optim import kernels
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.gradient_checks import not_finite, require_dense
from lightning_solo.optim.gradient_sums import GradientSums
from lightning_solo.optim.immediate_steps import ImmediateSteps, clamped
from lightning_solo.optim.kernels import Control, Sum
from lightning_solo.optim.memory_order import buckets, in_memory_order
from lightning_solo.optim.operator_kernels import greatest, norm
from lightning_solo.optim.param_groups import name_in, parameters_of
from lightning_solo.optim.staging import Staging
from lightning_solo.optim.window_gradients import saved_window

BUFFERS = ("device", "host")
_TOO_LARGE = "the norm of all gradients is too large for fp32; no weight has been touched"
Observer = Callable[[Sequence[Tensor], Tensor, Tensor], None]
"""Receives parameters, and the norms of their gradients before and after clipping, in fp32, a number for each; of
sharded ones the norms of this process's shards."""


class StepInBackward:
    """Steps an optimizer from backward; `step` ends a window of one or more micro-batches.

    ```
    release = StepInBackward(optimizer, accumulation=4, max_norm=1.0)
    for step in range(steps):
        for batch in window:
            (loss(batch) / len(window)).backward()
        norm = release.step()
    ```

    Args:
        optimizer: a `CompactAdamW`, or a torch optimizer that steps each parameter by itself.
        accumulation: micro-batches in a window; if above 1, windows may have any number of them.
        max_norm: bound of the gradients' global norm, as in `torch.nn.utils.clip_grad_norm_`.
        max_value: bound of each element; gradients are clamped to it before the norm is taken.
        buffer: where gradients are kept: "device" or "host".
        remedy: what to write where the host has no room for them.
        option: the path of the technique that steps, for messages.

    Attributes:
        observe: called with the norms of gradients before they are used; None measures none.
        arriving: called with a parameter whose gradient is complete, before anything is done with it.
        losses: if given, kept gradients are only stepped with if they are finite; looked at with the gradients' norm.
        postpone: called at the end of a window of kept gradients, all finite, with their parameters and a function that
            steps some of them, now or later, with the hyperparameters of now. Returns those that step now; the others
            must have been stepped before their next gradient.
        measures: whether each window of one micro-batch has a backward within `measuring`, which only measures
            gradients, and then another with the same gradients, which steps; ``max_norm`` keeps no gradient then.
        keep_in: the type of kept gradients on the host; None: as they come, sums in fp32 or wider.

    Raises:
        ConflictError: the optimizer isn't known to step each parameter by itself.
        PresetError: a value isn't allowed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        accumulation: int = 1,
        max_norm: float | None = None,
        max_value: float | None = None,
        buffer: str = "device",
        remedy: str = "write callback.gradient_release.buffer=device",
        option: str = "callback.gradient_release",
    ) -> None:
        if type(accumulation) is not int or accumulation < 1:
            raise PresetError(f"StepInBackward: accumulation={accumulation!r}: write a whole number of at least 1")
        for name, bound in (("max_norm", max_norm), ("max_value", max_value)):
            if bound is not None and not bound > 0:
                raise PresetError(f"StepInBackward: {name}={bound}: write a number above 0, or None")
        if buffer not in BUFFERS:
            raise PresetError(f"StepInBackward: buffer={buffer!r}: write 'device' or 'host'")
        self.optimizer, self.accumulation, self.buffer = optimizer, accumulation, buffer
        self.max_norm, self.max_value = max_norm, max_value
        self.observe: Observer | None = None
        self.arriving: Callable[[Tensor], None] | None = None
        self.losses: Tensor | None = None
        self.postpone: Callable[[list[Tensor], Callable[[list[Tensor]], None]], list[Tensor]] | None = None
        self.keep_in: torch.dtype | None = None
        self.measures = False
        self._norms: dict[Tensor, Tensor] | None = None  # of parts of the gradients that are only measured
        self._remedy, self.option = remedy, option
        self._immediate = ImmediateSteps(optimizer, option)
        self._compact = optimizer if isinstance(optimizer, CompactAdamW) else None
        self._kept: GradientSums | None = None
        self._plain: Control | None = None  # where the optimizer has none
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._zero_grad = optimizer.zero_grad
        optimizer.zero_grad = self._forget_and_zero  # type: ignore[method-assign]
        self._hooks = [
            optimizer.register_step_pre_hook(self._require_ended),
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_pre_hook(self._load),
        ]
        self.watch()

    def watch(self) -> None:
        """Watch the optimizer's parameters; call it again after parameters are unfrozen or added."""
        for p in self._unwatched():
            self._handles[p] = p.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    @property
    def immediate(self) -> bool:
        """Whether parameters are stepped in backward, so that no gradient is kept."""
        return self.accumulation == 1 and (self.max_norm is None or self.measures)

    @property
    def is_measuring(self) -> bool:
        """Whether gradients are only measured now; see `measuring`."""
        return self._norms is not None

    @property
    def has_kept(self) -> bool:
        """Whether a window has begun."""
        return bool(self._kept)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the gradients of all watched parameters that a window keeps until its end."""
        return 0 if self.immediate else sum(p.numel() * self._kind(p).itemsize for p in self._handles)

    @torch.no_grad()
    def step(self) -> Tensor | None:
        """End the window: check, clip and step the kept gradients; return their norm before clipping, or None.

        Raises:
            GradientError: a gradient is infinite or NaN, or its parameter isn't watched. Kept gradients are dropped.
                The message says whether weights have changed; none have if gradients were kept.
        """
        self._require_watched()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn of a wrong order
        if self.immediate:
            self._immediate.finish(self._bound)
            return None
        if not self.has_kept:
            return None
        try:
            return self._step_kept()
        finally:
            self._sums.clear()

    def flush(self) -> None:
        """Step the parameters that wait for others, so that no weight changes later for a gradient of before."""
        self._immediate.flush(self._bound)

    def _require_ended(self, *_: Any) -> None:
        if self.has_kept:
            raise GradientError(
                "optimizer.step() finds no gradients, since StepInBackward keeps those of this window; call"
                " release.step() instead, which ends the window"
            )

    def remove(self) -> None:
        """Remove the hooks from the parameters, and drop the kept gradients."""
        for handle in [*self._hooks, *self._handles.values()]:
            handle.remove()
        self._handles.clear()
        self.forget()
        if self._kept is not None:
            self._kept.remove()
        if vars(self.optimizer).get("zero_grad") == self._forget_and_zero:
            del self.optimizer.zero_grad

    def forget(self) -> None:
        """Drop the gradients kept in this window, as the optimizer's ``zero_grad`` does."""
        if self._kept is not None:
            self._kept.clear()
        self._immediate.forget()

    def _forget_and_zero(self, *args: Any, **kwargs: Any) -> None:
        self.forget()
        self._zero_grad(*args, **kwargs)

    def __enter__(self) -> StepInBackward:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _unwatched(self) -> list[Tensor]:
        return [p for p in parameters_of(self.optimizer) if p.requires_grad and p not in self._handles]

    def _require_watched(self) -> None:
        for p in self._unwatched():
            if p.grad is not None:
                self.forget()
                raise GradientError(
                    f"{self._name(p)} was unfrozen or added after StepInBackward was made, and its gradient was not"
                    " released; call watch() before backward"
                )

    # --- in the optimizer's state dict ---

    def _save(self, _: Optimizer, state_dict: dict[str, Any]) -> None:
        """Save the kept gradients of an open window, by parameter number, and the window's length."""
        if self.has_kept and self.accumulation > 1:
            numbered = enumerate(parameters_of(self.optimizer))
            state_dict["window"] = {number: self._sums.saved(p) for number, p in numbered if p in self._sums}
            state_dict["accumulation"] = self.accumulation

    def _load(self, _: Optimizer, state_dict: dict[str, Any]) -> None:
        continues = 1 < self.accumulation == state_dict.get("accumulation", self.accumulation)
        for p, sums in saved_window(self.optimizer, state_dict, continues=continues).items():
            if not self._sums.has_room(p, sums.dtype):
                self.allocate()
            self._sums.restore(p, sums)

    # --- in backward ---

    def _take(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is None:
            return
        if gradient.is_sparse:
            require_dense(self.optimizer, [(parameter, gradient)])
        if self._norms is not None:
            self._norms[parameter] = self._measured(parameter, gradient)
            return
        if self.arriving is not None:
            self.arriving(parameter)
        if not self.immediate:
            self._keep(parameter, gradient)
        elif parameter in self._immediate:
            raise self._second_gradient(parameter, ", and has been stepped with the first")
        else:
            if self.observe is not None:
                with torch.no_grad():
                    shard = local(gradient)
                    before, after = (norm(shard, bound).float().view(1) for bound in (math.inf, self._bound))
                    scale = self._immediate.scale
                    self.observe([parameter], before, after if scale is None else after * scale)
            self._immediate.step(parameter, gradient, self._bound)

    @torch.no_grad()
    def _measured(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return the norms of the parts of a gradient."""
        assert self._norms is not None
        if parameter in self._norms:
            raise self._second_gradient(parameter)
        measuring = self._immediate.kernels_of(gradient.device)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        norms = torch.zeros(measuring.partials_of(gradient.numel()), dtype=wide, device=gradient.device)
        measuring.add([Sum(in_memory_order(gradient), partials=norms)], self._control())
        return norms

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Only measure gradients within this context; those of the next backward are clipped by their norm.

        Raises:
            GradientError: a gradient is infinite or NaN; no weight has been touched.
        """
        norms: dict[Tensor, Tensor] = {}
        self._norms, self._immediate.scale = norms, None
        try:
            yield
        finally:
            self._norms = None
        kept = [p for p in parameters_of(self.optimizer) if p in norms]
        if not kept:
            return
        scale = self._scale(torch.linalg.vector_norm(torch.cat([norms[p] for p in kept])))
        if bool(scale.isnan()):
            for p in kept:
                if bool(norms[p].isfinite().logical_not().any()):
                    raise not_finite(self.optimizer, p)
            raise RefusedStepError(_TOO_LARGE)
        self._immediate.scale = scale.float() if self._compact is not None else scale

    def _scale(self, total: Tensor) -> Tensor:
        """Return the factor of gradients with a norm; NaN if that isn't finite."""
        scale = (math.inf if self.max_norm is None else self.max_norm) / (total + 1e-6)
        return torch.where(total.isfinite(), scale.clamp(max=1.0), torch.nan)

    def _control(self, scale: Tensor | None = None) -> Control:
        if self._compact is not None:
            return self._compact.control(scale, self._bound)
        if self._plain is None or self._plain.bound != self._bound:
            self._plain = self._measuring(self._bound)
        return self._plain

    def _measuring(self, bound: float) -> Control:
        """Return a control for sums, which read the bound alone."""
        zero = torch.zeros((), device=self._first.device)
        return Control(zero, zero, bound)

    @property
    def _bound(self) -> float:
        return math.inf if self.max_value is None else self.max_value

    def _second_gradient(self, parameter: Tensor, consequence: str = "") -> GradientError:
        """Drop the kept gradients; return the error for a second gradient in a window of one micro-batch."""
        self.forget()
        return GradientError(
            f"{self._name(parameter)} got a second gradient in one window{consequence}: write use_reentrant=False for"
            " activation checkpointing, Trainer(accumulate_grad_batches=...) instead of an optimizer_step that doesn't"
            f" step each time, or ~{self.option}; with StepInBackward itself, call"
            " release.step() after each window, and write accumulation=2 for several backward calls in one"
        )

    @torch.no_grad()
    def _keep(self, parameter: Tensor, gradient: Tensor) -> None:
        if is_sharded(gradient):
            raise GradientError(
                f"the gradient of {self._name(parameter)} is sharded, and can't be kept for accumulation or clipping by"
                " norm; write accumulate_grad_batches=1 for all of the run"
            )
        if parameter in self._sums:
            if self.accumulation == 1:
                raise self._second_gradient(parameter)
        elif not self._sums.has_room(parameter, self._kind(gradient)):
            self.allocate()
        self._sums.add(parameter, gradient, self._kind(gradient), self._control())

    def _kind(self, tensor: Tensor) -> torch.dtype:
        if self.keep_in is not None and tensor.is_floating_point():
            return self.keep_in
        return tensor.dtype if self.accumulation == 1 else torch.promote_types(tensor.dtype, torch.float32)

    def allocate(self) -> None:
        """Allocate host memory for the gradients of all watched parameters; the first gradient calls it.

        Raises:
            BudgetError: the host has too little memory.
        """
        self._sums.allocate({p: self._kind(p) for p in self._handles if p not in self._sums})

    @property
    def _first(self) -> Tensor:
        return parameters_of(self.optimizer)[0]

    @property
    def _sums(self) -> GradientSums:
        if self._kept is None:
            device, compact = self._first.device, self._compact
            staging = None
            if self.buffer == "host":  # shared with the states, so that each waits for the other's copies
                staging = compact.staging if compact is not None else Staging(device)
            adding = compact.kernels if compact is not None else kernels.kernels_on(device)
            self._kept = GradientSums(adding, staging, self._remedy)
        return self._kept

    # --- at the end of a window ---

    def _step_kept(self) -> Tensor | None:
        kept = [p for p in parameters_of(self.optimizer) if p in self._sums]
        if not kept:
            return None
        total = self._sums.norm(kept, self._control())
        if self.losses is not None:
            total = total + 0 * self.losses.sum()  # NaN if one isn't finite
        scale = self._scale(total)
        if self.observe is not None:
            after = self._sums.norms(kept, self._control())
            before = after if self.max_value is None else self._sums.norms(kept, self._measuring(math.inf))
            self.observe(kept, before, after * scale.float())
        if self._compact is None or self.postpone is not None:
            factor = float(scale)  # the one wait for the device
            if math.isnan(factor):
                self._refuse(kept)
            step = self._stepping(scale, factor)
            now = kept if self.postpone is None else self.postpone(kept, step)
            step(now)
            return total
        self._compact.step_many([(p, self._sums[p]) for p in kept], self._control(scale.float()))
        if bool(total.isfinite().logical_not()):  # the first time that the host waits for the device
            self._compact.uncount(kept)
            self._refuse(kept)
        return total

    def _stepping(self, scale: Tensor, factor: float) -> Callable[[list[Tensor]], None]:
        """Return a function that steps parameters, at any time, with their gradients and hyperparameters of now.

        ``factor`` is the number of ``scale``, by which gradients are multiplied.
        """
        gradients, bound, sums = self._sums.taken(), self._bound, self._sums
        groups = [_hyperparameters(group, torch.clone) for group in self.optimizer.param_groups]

        @torch.no_grad()
        def step(parameters: list[Tensor]) -> None:
            now = [_hyperparameters(group) for group in self.optimizer.param_groups]
            try:
                for group, then in zip(self.optimizer.param_groups, groups, strict=False):  # new ones come last
                    group.update(then)
                for gradient in (gradients[p] for p in parameters if gradients[p].is_cuda):
                    gradient.record_stream(torch.cuda.current_stream(gradient.device))  # perhaps not that of backward
                if self._compact is not None:
                    pairs = [(p, gradients.pop(p)) for p in parameters]
                    self._compact.step_many(pairs, self._compact.control(scale.float(), bound))
                    return
                small: float = self._immediate.kernels_of(self._first.device).grouped_below
                if hasattr(self.optimizer, "back_end") and bound == math.inf:  # these loop over parameters
                    ready = all((gradients[p].dtype, gradients[p].device) == (p.dtype, p.device) for p in parameters)
                    small = math.inf if ready else small
                for bucket in buckets(parameters, small, Tensor.numel):
                    pairs = [(p, clamped(sums.on_device(p, gradients.pop(p)), bound)) for p in bucket]
                    self._immediate.step_pairs(pairs, factor)
            finally:
                for group, each in zip(self.optimizer.param_groups, now, strict=True):
                    group.update(each)

        return step

    def _refuse(self, kept: list[Tensor]) -> None:
        """Raise the error for gradients with a non-finite norm."""
        if self.losses is not None and not bool(self.losses.isfinite().all()):
            raise RefusedStepError("a loss is not finite; no weight has been touched")
        for p in kept:  # the norm of finite ones may be too large for fp32
            gradient = self._sums.on_device(p, self._sums[p])
            if gradient.numel() and bool(greatest([gradient])[0].isfinite().logical_not()):
                raise not_finite(self.optimizer, p)
        raise RefusedStepError(_TOO_LARGE)

    def _name(self, parameter: Tensor) -> str:
        return name_in(self.optimizer, parameter)


def _hyperparameters(group: Mapping[str, Any], of_tensor: Callable[[Tensor], Tensor] = lambda x: x) -> dict[str, Any]:
    """Return what a parameter group has but its parameters."""
    values = ((name, value) for name, value in group.items() if name != "params")
    return {name: of_tensor(value) if isinstance(value, Tensor) else value for name, value in values}
