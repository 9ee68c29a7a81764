"""Block micro-batching: each block runs a batch in micro-batches, one after the other, before the next block does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_solo.errors import ConflictError, listed
from lightning_solo.memory.category_peaks import is_compiled
from lightning_solo.nn.blocks import counted, named_blocks
from lightning_solo.nn.forwards import restore_forwards
from lightning_solo.nn.recomputation import refuse_own_checkpointing
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.block_micro_batching.card import CARD, Settings
from lightning_solo.techniques.block_micro_batching.splitting import OPTION, Returned, Splitting, split_blocks


class BlockMicroBatching(Technique, Settings):
    """Runs each block of a model on one micro-batch after another during a fit, forward and backward.

    The module itself runs once on the whole batch. Validation, test and prediction are unchanged.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._splittings: dict[str, Splitting] = {}
        self._blocks: dict[str, nn.Module] = {}
        self._returned: Returned | None = None
        self._is_reported = False

    @property
    def divided(self) -> tuple[str, ...]:
        """Qualified names of the blocks that run in micro-batches; empty outside a fit."""
        return tuple(self._splittings)

    def transform(self, ctx: Run) -> None:
        """Divide the calls of the blocks."""
        refuse_own_checkpointing(ctx.module, OPTION)
        self._blocks = named_blocks(ctx.module, self.blocks, f"{OPTION}.blocks")
        inside = {id(block) for block in self._blocks.values()}
        for name, part in ctx.module.named_modules():
            if is_compiled(part) and any(id(each) in inside for each in part.modules()):
                raise ConflictError(
                    f"block micro-batching: {name or 'the whole module'} is compiled, and a block is to run several"
                    f" times in one call; compile parts inside the blocks, or write ~{OPTION}"
                )
        ctx.undo.callback(self._leave)
        self._splittings = split_blocks(self._blocks, self.micro_batches, self.batch_dim)
        self._is_reported = False
        self._note(Returned())
        ctx.info(
            f"block micro-batching: {counted(self._blocks.values())} run each batch in {self.micro_batches}"
            " micro-batches, one after the other"
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse layers in the blocks whose output depends on the whole batch."""
        layers = [
            f"{name}.{part_name}"
            for name, block in self._blocks.items()
            for part_name, part in block.named_modules()
            if isinstance(part, nn.modules.batchnorm._NormBase) and part.training and _uses_batch(part)
        ]
        if layers:
            raise ConflictError(
                f"{OPTION} and BatchNorm ({listed(layers)}), whose statistics would be those of micro-batches; replace"
                f" the layers by GroupNorm, put them into eval mode, or write ~{OPTION}"
            )

    def backward(self, ctx: Run, proceed: Callable[..., Any], loss: Tensor) -> Any:
        """Check at the first loss that it depends on what the blocks return."""
        returned = self._returned
        self._note(None)
        if returned is not None:
            returned.require(loss)
        return proceed(loss)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Warn after the first batch if nothing was divided."""
        self._note(None)
        if self._is_reported or not self._splittings or self.ctx is None or self.ctx.window.waits:
            return
        self._is_reported = True
        most = max(splitting.most for splitting in self._splittings.values())
        if not most:
            rank_zero_warn(
                f"block micro-batching saves nothing: in the first batch none of {', '.join(self._splittings)} was"
                f" called as block(x); write the classes of those that are, {OPTION}.blocks=[ClassName]"
            )
        elif most == 1 < self.micro_batches:
            rank_zero_warn(
                "block micro-batching: the first batch has one sample, or blocks get it in an object that is no tuple,"
                " dict or dataclass, so they run undivided, recomputed in backward; write a larger batch, or"
                f" {OPTION}.micro_batches=1 to expect that"
            )

    def _note(self, returned: Returned | None) -> None:
        self._returned = returned
        for splitting in self._splittings.values():
            splitting.returned = returned

    def _leave(self) -> None:
        restore_forwards(self._blocks.values(), Splitting)
        self._splittings, self._blocks, self._returned = {}, {}, None


def _uses_batch(norm: nn.modules.batchnorm._NormBase) -> bool:
    return isinstance(norm, nn.modules.batchnorm._BatchNorm) or norm.track_running_stats
