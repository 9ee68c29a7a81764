"""Quantization-aware training: layers compute with weights of few bits, which are trained in full precision."""

from __future__ import annotations

from typing import Any

from lightning_solo.attributes import replaced
from lightning_solo.errors import PresetError, with_reasons
from lightning_solo.nn.blocks import counted
from lightning_solo.nn.fake_quantization import (
    RECORD,
    Layers,
    Rounding,
    chosen_layers,
    restore,
    round_weights,
)
from lightning_solo.nn.packed_weights import kernels_past
from lightning_solo.seams.run import Run, optimizer_steps
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.quantization.card import CARD, Settings

OPTION = "callback.quantization"


class Quantization(Technique, Settings):
    """Rounds weights in each forward of a fit, so that the model learns to work with few bits.

    They are those of linear layers, of torch's attention, and of experts in three dimensions.

    Parameters, keys, tied weights and optimizers stay as they are. Validation during the fit computes with rounded
    weights too. After the fit the module has its full weights and computes with them; `solo.export_quantized` and
    ``lightning-solo export --format quantized`` round them to the same numbers.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._choice = Layers()
        self._record: dict[str, Any] = {}
        self._rounding = Rounding(self.bits, self.group_size, self.activations, active=False)

    @property
    def quantized_layers(self) -> tuple[str, ...]:
        """Qualified names of the modules that compute with rounded weights now; empty outside a fit."""
        return (*self._choice.layers, *self._choice.insides) if self._rounding.active else ()

    def transform(self, ctx: Run) -> None:
        """Make the layers round their weights."""
        if not ctx.training:
            return
        self._choice = choice = chosen_layers(ctx.module, self._rounding, self.layers, OPTION)
        self._record = {}
        self._set(active=self.start_step == 0)
        ctx.undo.callback(self._leave)
        ctx.undo.callback(restore, choice)
        round_weights(choice, self._rounding)
        for part, name, value in kernels_past(ctx.module, choice.modules):
            ctx.undo.enter_context(replaced(part, name, value))
        scale = f"groups of {self.group_size}" if self.group_size else "rows"
        left = with_reasons(choice.left_out, 5)
        ctx.info(
            f"quantization: {counted(choice.modules)} compute with weights"
            f" {'in fp8' if self.bits == 'fp8' else f'of {self.bits} bits'}, by {scale}"
            f"{f', from step {self.start_step} on' if self.start_step else ''}; {choice.left_share:.0%} of the numbers"
            f" stay as they are{f': {left}' if left else ''}"
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        steps = trainer.estimated_stepping_batches
        if self._choice.weights and self.start_step >= steps > 0:
            raise PresetError(
                f"{OPTION}.start_step={self.start_step}: the run has {steps} optimizer steps, and would end before"
                f" weights are rounded; write {OPTION}.start_step={int(steps) // 2} or less, or train longer"
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Round from the first step on that is to be trained so."""
        if self._choice.weights:
            self._set(active=optimizer_steps(trainer) >= self.start_step)

    def _set(self, *, active: bool) -> None:
        self._rounding.active = active
        if active and not self._record:
            self._record = {**self._rounding.as_record(), "layers": self._choice.names}

    def _leave(self) -> None:
        self._rounding.active, self._choice = False, Layers()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the settings of the rounding, with which an export rounds the same; nothing before the first rounding."""
        if self._record:
            checkpoint[RECORD] = self._record
