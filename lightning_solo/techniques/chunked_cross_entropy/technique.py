"""Chunked cross-entropy: the loss of a language model without its logits."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_solo.errors import CapabilityError, NothingToDoError
from lightning_solo.nn import liger
from lightning_solo.nn.deferred_logits import Use, defer_logits, output_heads
from lightning_solo.nn.forwards import restore_forwards
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.chunked_cross_entropy.card import CARD, Settings


class ChunkedCrossEntropy(Technique, Settings):
    """Computes ``F.cross_entropy`` of a head's output in chunks of tokens during a fit.

    The module's code is unchanged: its head returns logits that are computed only if anything but a cross-entropy needs
    them (`lightning_solo.nn.deferred_logits`).
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._uses: dict[str, Use] = {}

    @property
    def heads(self) -> tuple[str, ...]:
        """Qualified names of the output layers with deferred logits; empty outside a fit."""
        return tuple(self._uses)

    def transform(self, ctx: Run) -> None:
        if self.backend == "liger" and (lacks := liger.missing(ctx.device)):
            raise CapabilityError(
                f"callback.chunked_cross_entropy.backend=liger: {lacks}; write"
                " callback.chunked_cross_entropy.backend=torch"
            )
        heads = output_heads(ctx.module, self.head)
        ctx.undo.callback(self._uses.clear)
        ctx.undo.callback(restore_forwards, heads.values(), Use)
        self._uses.update({name: defer_logits(head, self.chunk_tokens, self.backend) for name, head in heads.items()})
        self._checked = False
        ctx.info(f"chunked cross-entropy: the loss of {', '.join(heads)} is computed by {self.chunk_tokens} tokens")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._checked and self.ctx is not None and not self.ctx.window.waits:
            self._checked = True
            check_use(self._uses)


def check_use(uses: dict[str, Use]) -> None:
    """Warn of logits that were computed nevertheless.

    Raises:
        NothingToDoError: no loss was computed in chunks.
    """
    computed = ", ".join(dict.fromkeys(name for use in uses.values() for name in use.computed_for))
    if not any(use.losses for use in uses.values()):
        raise NothingToDoError(
            "chunked cross-entropy: in the first batch no torch.nn.functional.cross_entropy of logits of"
            f" {', '.join(uses)} could be computed in chunks (they went to: {computed or 'nothing'}); write"
            " callback.chunked_cross_entropy.head=<name of the layer whose output goes to one without weight=>, or"
            " ~callback.chunked_cross_entropy and in training_step"
            " lightning_solo.nn.chunked_cross_entropy(hidden, weight, labels)"
        )
    if computed:
        rank_zero_warn(
            f"chunked cross-entropy: all logits were computed for {computed} in training_step, which takes as much"
            " memory as a plain run; call it without gradients (torch.no_grad()) on fewer tokens, or write"
            " ~callback.chunked_cross_entropy"
        )
