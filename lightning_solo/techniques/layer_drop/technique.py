"""Layer drop: skips a fixed number of the model's blocks in each micro-batch, drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError
from lightning_solo.memory.category_peaks import is_compiled
from lightning_solo.nn.blocks import counted, named_blocks
from lightning_solo.nn.layer_drop import SkippedBlocks
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.layer_drop.card import CARD, Settings

STATE = ("draws", "seed")


class LayerDrop(Technique, Settings):
    """Skips ``count`` of the model's blocks in each ``training_step``, so that memory and time are constant.

    Each block is skipped equally often on average. The seed of the draws is torch's when the first fit begins. It is
    saved in checkpoints, so that a resumed run draws the same blocks as an uninterrupted one.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._state: dict[str, int] = {}
        self._drop: SkippedBlocks | None = None
        self._named: set[str] = set()

    @property
    def skipped(self) -> tuple[str, ...]:
        """Qualified names of the blocks that the current micro-batch skips; empty outside a fit."""
        return () if self._drop is None else tuple(sorted(self._drop.skipped))

    def transform(self, ctx: Run) -> None:
        """Make the blocks skippable."""
        blocks = named_blocks(ctx.module, self.blocks, "callback.layer_drop.blocks")
        inner = set(blocks.values())
        for name, part in ctx.module.named_modules():
            if part not in inner and is_compiled(part) and not inner.isdisjoint(part.modules()):
                raise ConflictError(
                    f"layer_drop: {name or type(part).__name__} is compiled with its blocks, which each draw would"
                    " compile again; write +callback=regional_compilation instead of torch.compile, or"
                    " ~callback.layer_drop"
                )
        self._state = self._state or {"draws": 0, "seed": ctx.strategy.broadcast(torch.initial_seed())}
        self._drop = SkippedBlocks(blocks, self.count, self._state["seed"])
        self._drop.draws = self._state["draws"]
        self._named.clear()
        ctx.undo.callback(self._undo, self._drop)
        rank_zero_info(f"layer drop: {self.count} of {counted(blocks.values())} are skipped in each micro-batch")

    def rewind(self, ctx: Run) -> Callable[[], None]:
        assert self._drop is not None  # transform comes first
        return partial(setattr, self._drop, "draws", self._drop.draws)

    def training_step(self, ctx: Run, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self._drop is not None  # transform comes first
        self._drop.draw()
        self._state["draws"] = self._drop.draws
        return proceed(*args, **kwargs)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._drop is None or self.ctx is None or self.ctx.window.waits:
            return
        if not self._drop.calls:
            raise NothingToDoError(
                f"layer drop skipped nothing: none of {', '.join(self._drop.blocks)} was called as block(x) in training"
                " mode; write the classes of those that are, callback.layer_drop.blocks=[ClassName]"
            )
        new = {name: reason for name, reason in self._drop.left_out.items() if name not in self._named}
        if new:
            self._named.update(new)
            reasons = "; ".join(f"{name} {reason}" for name, reason in new.items())
            rank_zero_warn(f"layer drop: blocks that can't be skipped always run: {reasons}")

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and the number of draws."""
        return dict(self._state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the draws of the saved run."""
        if tuple(sorted(state_dict)) != STATE or any(type(value) is not int for value in state_dict.values()):
            raise CheckpointError(
                f"the checkpoint's state of LayerDrop is {state_dict}; it holds exactly the integers {', '.join(STATE)}"
            )
        self._state = dict(state_dict)
        if self._drop is not None:  # FSDP loads checkpoints after transform
            self._drop.seed, self._drop.draws = self._state["seed"], self._state["draws"]

    def _undo(self, drop: SkippedBlocks) -> None:
        drop.restore()
        self._drop = None
