"""Early zeroing of gradients: the last step's gradients are freed before the next forward, not after it."""

from __future__ import annotations

from lightning_solo.errors import ConflictError
from lightning_solo.seams.patches import zeroing_first
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.early_zero_grad.card import CARD, Settings


class EarlyZeroGrad(Technique, Settings):
    """Zeroes gradients before the forward that begins an accumulation window; Lightning zeroes them after it.

    The module's ``optimizer_zero_grad`` and the hooks ``on_before_zero_grad`` run as often as in a plain fit, and
    ``on_train_batch_end`` still sees the gradients.
    """

    phase = CARD.phase

    def transform(self, ctx: Run) -> None:
        """Zero gradients before forward for the length of a fit."""
        if not ctx.module.automatic_optimization:
            raise ConflictError(
                "early_zero_grad with manual optimization: the module zeroes gradients itself; write"
                " optimizer.zero_grad() before forward in training_step, and ~callback.early_zero_grad"
            )
        ctx.undo.enter_context(zeroing_first(ctx.trainer))
