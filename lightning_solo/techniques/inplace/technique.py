"""Activations and dropouts in place, where the first batch shows that nothing else reads their input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_solo.attributes import replaced
from lightning_solo.errors import ConflictError, NothingToDoError, listed
from lightning_solo.memory.host_slabs import is_planned
from lightning_solo.memory.ledger import Ledger
from lightning_solo.nn.inplace import DROPOUTS, NOT_CALLED, ROUNDED, WITHOUT_GAIN, candidates, readers
from lightning_solo.nn.rollback import Rollback, attributes_kept
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.inplace.card import CARD, Settings
from lightning_solo.units import format_bytes

OPTION = "callback.inplace"
CHECKED_AGAIN = frozenset({2, 10, 100, 1000, 10_000})
"""Numbers of the batches, from 1 on, in which it is looked again whether anything else reads the inputs."""


class InPlace(Technique, Settings):
    """Runs activations and dropouts in place while training, where it is verified on the first batch.

    A pass over the first batch finds those whose input nothing else reads. Two more compare loss and gradients without
    and with them in place, to the bit. Some later batches have the first of these passes again. Buffers, metrics and
    random numbers are restored after each. In validation nothing runs in place, and after the fit the module is as
    before.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._parts: dict[str, Any] = {}
        self._batches = 0
        self._changed = ExitStack()

    @property
    def names(self) -> list[str]:
        """Names of the parts that run in place in the current or last fit."""
        return list(self._parts)

    def transform(self, ctx: Run) -> None:
        """Prepare the check."""
        if not ctx.training:
            return
        if not ctx.module.automatic_optimization:
            raise ConflictError(
                f"{OPTION} and manual optimization, under which the first batch can't be tried; write ~{OPTION}, and"
                " inplace=True in the module"
            )
        self._parts, self._batches = {}, 0
        ctx.undo.callback(self._changed.close)

    def training_step(self, ctx: Run, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Check the first batch, and some later ones."""
        self._batches += 1
        if self._batches == 1 or (self._batches in CHECKED_AGAIN and not is_planned()):
            batch, index = args[0] if args else next(iter(kwargs.values())), (ctx.window.latest or (0, 0))[1]
            step = partial(patches.step_result, ctx.trainer, batch, index)
            if self._batches == 1:
                self._parts = self._check(ctx, step)
            else:
                self._check_again(ctx, step)
            self._enter()
        return proceed(*args, **kwargs)

    def _check_again(self, ctx: Run, step: Callable[[], Any]) -> None:
        """Refuse a module that reads an input since a batch after the first."""
        self._changed.close()
        reasons = _restored(ctx, readers, self._parts, step)
        if read := [f"{name} ({reason})" for name, reason in reasons.items() if reason != NOT_CALLED]:
            raise ConflictError(
                f"{OPTION}: batch {self._batches} has a use that the first batch hadn't of inputs that are overwritten,"
                f" so losses since the first may be wrong: {listed(read)}; write ~{OPTION}, and inplace=True in the"
                " module for other parts"
            )

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Compute out of place in a validation, whose forward was not checked."""
        self._changed.close()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Continue in place."""
        if self.ctx is not None:
            self._enter()

    def _enter(self) -> None:
        self._changed.close()
        for part in self._parts.values():
            self._changed.enter_context(replaced(part, "inplace", True))

    # --- the check ---

    def _check(self, ctx: Run, step: Callable[[], Any]) -> dict[str, Any]:
        """Return the parts that may run in place, by name."""
        parts = candidates(ctx.module)
        if not self.dropouts:
            parts = {name: part for name, part in parts.items() if not isinstance(part, DROPOUTS)}
        restored = partial(_restored, ctx)
        reasons = restored(readers, parts, step)
        free = {name: part for name, part in parts.items() if name not in reasons}
        if not free:
            raise NothingToDoError(self._nothing(ctx.module, reasons))
        if is_planned():
            return free
        run = partial(_pass, ctx.module, step)
        before = restored(run, {})
        without_dropouts = {name: part for name, part in free.items() if not isinstance(part, DROPOUTS)}
        for tried in (free, without_dropouts):  # some kernels of dropout draw other numbers in place
            try:
                after = restored(run, tried) if tried else None
            except RuntimeError as error:
                if "inplace operation" not in str(error):  # autograd's, about a tensor that backward needs
                    raise
                after = None
            if after is not None and _equal(after, before):
                self._log(ctx, tried, before, after)
                return tried
        raise NothingToDoError(
            f"{OPTION}: loss or gradients of the first batch differ in place ({listed(free)}); if the module's kernels"
            f" aren't deterministic, write Trainer(deterministic=True), or ~{OPTION}"
        )

    def _nothing(self, module: Any, reasons: Mapping[str, str]) -> str:
        named = [f"{name} ({reason})" for name, reason in reasons.items()]
        for kinds, reason in ((WITHOUT_GAIN, "saves nothing in place"), (ROUNDED, "rounds its gradient otherwise")):
            found = {type(part).__name__ for part in module.modules() if isinstance(part, kinds)}
            named += [f"{name} ({reason})" for name in sorted(found)]
        return (
            f"{OPTION}: {type(module).__name__} has no activation or dropout that can run in place; there are"
            f" {listed(named) or 'none among its modules, and those of torch.nn.functional are not changed'}; write"
            f" ~{OPTION}"
        )

    def _log(self, ctx: Run, parts: Mapping[str, Any], before: _Pass, after: _Pass) -> None:
        ctx.info(
            f"inplace: {listed(parts)} run in place: the first batch keeps"
            f" {format_bytes(before.saved - after.saved)} less for backward ({format_bytes(after.saved)} instead of"
            f" {format_bytes(before.saved)}), and its peak is {format_bytes(before.peak - after.peak)} lower"
        )


def _restored(ctx: Run, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that runs the module, and restore the module's state and random numbers."""
    rollback = Rollback(ctx.module, ctx.device)
    rollback.save()
    try:
        with attributes_kept(ctx.module):
            return function(*args)
    finally:
        rollback.restore()


class _Pass(NamedTuple):
    """Loss and gradients of a pass, on the host; bytes that forward keeps; and the bytes at the peak of the pass."""

    values: list[Tensor | None]
    saved: int
    peak: int


def _pass(module: Any, step: Callable[[], Any], parts: Mapping[str, Any]) -> _Pass:
    """Run forward and backward with parts in place; no gradient is left in the parameters."""
    trained = [p for p in module.parameters() if p.requires_grad]
    with ExitStack() as stack:
        for part in parts.values():
            stack.enter_context(replaced(part, "inplace", True))
        ledger = stack.enter_context(Ledger())
        result = step()
        loss = result["loss"] if isinstance(result, Mapping) else result
        saved = ledger.live()["activations"]
        if loss is None or not loss.requires_grad:
            return _Pass([None], saved, ledger.peak_bytes)
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        peak = ledger.peak_bytes
    values = [loss.detach(), *gradients]
    return _Pass([None if value is None else value.detach().cpu() for value in values], saved, peak)


def _equal(one: _Pass, other: _Pass) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))
        for a, b in zip(one.values, other.values, strict=True)
    )
