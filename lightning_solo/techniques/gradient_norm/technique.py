"""Norms of gradients, in total and by block, before and after clipping, wherever gradients are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.optim.param_groups import parameters_of
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.gradient_norm.card import CARD, Settings
from lightning_solo.techniques.gradient_norm.scales import (
    ActivationScales,
    block_names,
    norms_by_block,
    norms_of,
    norms_of_shards,
    on_host,
    outside,
)


class GradientNorm(Technique, Settings):
    """Logs the norm of all gradients and of each block's, before and after clipping, every ``every_n_steps`` steps.

    It measures ``.grad`` at the optimizer step. Under gradient release it measures each gradient in backward, or at the
    end of the window if gradients are kept until then. In the first step of a fit it warns of blocks whose activations
    or gradients have an rms outside a range.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._start({})

    @property
    def figures(self) -> dict[str, float]:
        """The figures of the last logged step, by logged key."""
        return dict(self._figures)

    def _start(self, names: dict[Tensor, str]) -> None:
        self._figures: dict[str, float] = {}
        self._names = names
        self._is_due = self._is_first = bool(names)
        self._clips = False  # whether a step of this fit was clipped
        self._activations: ActivationScales | None = None
        self._forget()

    def _forget(self) -> None:
        self._before: dict[Tensor, Tensor] = {}
        self._after: dict[Tensor, Tensor] = {}
        self._clipped: set[Tensor] = set()  # by hand, before the optimizer steps

    # --- when ---

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Measure gradients at the steps of the optimizers, and in the first step the outputs of blocks."""
        ctx = self.ctx
        assert ctx is not None
        self._start(block_names(pl_module))
        ctx.undo.callback(self._stop, ctx)
        for optimizer in trainer.optimizers:
            ctx.undo.callback(optimizer.register_step_post_hook(self._after_step).remove)
        self._activations = ActivationScales(pl_module, self._names.values())

    def _stop(self, ctx: Run) -> None:
        if self._activations is not None:
            self._activations.remove()
        if ctx.release is not None:
            ctx.release.observe = None
        figures = self._figures
        self._start({})
        self._figures = figures

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Measure this step if it is due."""
        self._is_due = self._is_first or (patches.stepped_batches(trainer) + 1) % self.every_n_steps == 0
        if self.ctx is not None and self.ctx.release is not None:
            self.ctx.release.observe = self._receive if self._is_due else None

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Measure gradients before clipping."""
        self._measure_before(optimizer)

    def clip(self, ctx: Run, proceed: Callable[..., Any], optimizer: Optimizer, bound: float, by: str) -> None:
        """Measure gradients before clipping, after other callbacks have changed them."""
        self._measure_before(optimizer)
        proceed(optimizer, bound, by)
        if bound and bound > 0:
            self._clips = True
            self._clipped.update(parameters_of(optimizer))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the figures of the step that ended with this batch."""
        if self._after:
            self._log(trainer)
        self._forget()

    # --- what ---

    def _measure_before(self, optimizer: Optimizer) -> None:
        if self._is_due:
            self._before |= norms_of(p for p in parameters_of(optimizer) if p not in self._clipped)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Measure clipped gradients, which a step doesn't change."""
        if self._is_due:
            self._after |= norms_of(parameters_of(optimizer))

    def _receive(self, parameters: Sequence[Tensor], before: Tensor, after: Tensor) -> None:
        """Add norms of released gradients."""
        self._before |= dict(zip(parameters, before.unbind(), strict=True))
        self._after |= dict(zip(parameters, after.unbind(), strict=True))

    def _log(self, trainer: Any) -> None:
        self._before, self._after = norms_of_shards(self._before), norms_of_shards(self._after)
        blocks = norms_by_block(self._before, self._names)
        before = {**self._totals(trainer, self._before), **blocks}
        after = {**self._totals(trainer, self._after), **norms_by_block(self._after, self._names)}
        norms = {f"gradient_norm/{name}": value for name, value in before.items()}
        norms |= {f"gradient_norm_clipped/{name}": value for name, value in after.items()}
        figures = on_host(norms)
        self._clips = self._clips or any(
            value != figures.get(key.replace("_clipped/", "/", 1)) for key, value in figures.items()
        )
        if not self._clips:
            figures = {key: value for key, value in figures.items() if not key.startswith("gradient_norm_clipped/")}
        self._figures = figures
        if self._is_first:
            self._is_first = False
            self._check(on_host(blocks))
        patches.log_metrics(trainer, figures)

    def _totals(self, trainer: Any, norms: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the norm of all gradients, or with several optimizers the norm of each one's gradients."""
        totals = {}
        for number, optimizer in enumerate(trainer.optimizers):
            values = [norms[p] for p in parameters_of(optimizer) if p in norms]
            name = "total" if len(trainer.optimizers) == 1 else f"total_{number}"
            if values:
                totals[name] = torch.linalg.vector_norm(torch.stack(values))
        return totals

    def _check(self, norms: Mapping[str, float]) -> None:
        """Warn of blocks whose activations or gradients are outside their range."""
        counts: dict[str, int] = {}
        for p in self._before:
            counts[self._names.get(p, "other")] = counts.get(self._names.get(p, "other"), 0) + p.numel()
        activations = {} if self._activations is None else self._activations.extremes()
        gradients = {name: (value / max(1, counts[name]) ** 0.5,) for name, value in norms.items()}
        for kind, scales, bounds in (
            ("activation", activations, self.activation_range),
            ("gradient", gradients, self.gradient_range),
        ):
            if words := outside(scales, bounds):
                warnings.warn(
                    f"GradientNorm: in the first step the {kind} rms of these blocks is outside"
                    f" {[*map(float, bounds)]}: {words}; check their initialization, input scale and learning rate, or"
                    f" write callback.gradient_norm.{kind}_range=[least,largest]",
                    stacklevel=2,
                )
        if self._activations is not None:
            self._activations.remove()
