"""Tiled MLP: a model's feed-forward parts are computed in tiles of tokens."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_solo.cards.blocks import AUTO
from lightning_solo.nn.blocks import blocks_of_class, counted, feed_forward_parts
from lightning_solo.nn.forwards import restore_forwards
from lightning_solo.nn.tiling import Tiling, tile_parts
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.tiled_mlp.card import CARD, Settings


class TiledMlp(Technique, Settings):
    """Computes a model's feed-forward parts in tiles of tokens during a fit, forward and backward."""

    phase = CARD.phase

    def _init_state(self) -> None:
        self._tilings: dict[str, Tiling] = {}
        self._is_reported = False

    @property
    def tiled(self) -> tuple[str, ...]:
        """Qualified names of the tiled parts; empty outside a fit."""
        return tuple(self._tilings)

    def transform(self, ctx: Run) -> None:
        if self.parts == AUTO:
            parts = feed_forward_parts(ctx.module)
        else:
            names = [self.parts] if isinstance(self.parts, str) else self.parts
            parts = blocks_of_class(ctx.module, names, "callback.tiled_mlp.parts")
        ctx.undo.callback(self._tilings.clear)
        ctx.undo.callback(restore_forwards, parts.values(), Tiling)
        self._tilings.update(tile_parts(parts, self.tile_tokens))
        self._is_reported = False
        ctx.info(f"tiled MLP: {counted(parts.values())} are computed {self.tile_tokens} tokens at a time")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._is_reported or not self._tilings or self.ctx is None or self.ctx.window.waits:
            return
        self._is_reported = True
        most = max(tiling.most_tokens for tiling in self._tilings.values())
        if most <= self.tile_tokens:
            rank_zero_warn(
                f"tiled MLP saves nothing: the first micro-batch has {most} tokens, and"
                f" callback.tiled_mlp.tile_tokens={self.tile_tokens}; write a smaller one, or ~callback.tiled_mlp"
            )
