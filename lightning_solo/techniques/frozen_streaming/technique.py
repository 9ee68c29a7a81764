"""Frozen streaming: frozen weights stay on the host, and each block's are copied to the device ahead of its use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_solo.errors import ConflictError, NothingToDoError
from lightning_solo.memory.block_ring import BlockRing
from lightning_solo.memory.category_peaks import is_compiled
from lightning_solo.nn.blocks import counted, named_blocks
from lightning_solo.nn.forwards import restore_forwards
from lightning_solo.nn.streaming import Streamed, away, start_ring, stream_blocks
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.frozen_streaming.card import CARD, Settings
from lightning_solo.units import format_bytes

OPTION = "callback.frozen_streaming"


class FrozenStreaming(Technique, Settings):
    """Keeps the blocks' frozen weights on the host, and loads them block by block in forward and in backward.

    An evaluation without a fit streams all of the blocks' weights. After a run the module has its weights on the host.
    """

    phase = CARD.phase
    joins_evaluation = True

    def _init_state(self) -> None:
        self._ring: BlockRing | None = None
        self._blocks: dict[str, nn.Module] = {}
        self._is_checked = False

    @property
    def ring(self) -> BlockRing | None:
        """The buffers and copies of the current or last run."""
        return self._ring

    @property
    def streamed(self) -> tuple[str, ...]:
        """Qualified names of the blocks whose weights are streamed; empty outside a run."""
        return tuple(self._blocks)

    def transform(self, ctx: Run) -> None:
        """Keep the blocks' weights on the host while the module moves to the device; each block loads its own."""
        if [type(each) for each in ctx.techniques].count(type(self)) > 1:
            raise ConflictError("two FrozenStreaming in one run: drop one")
        self._ring, self._is_checked = None, False
        blocks = named_blocks(ctx.module, self.blocks, f"{OPTION}.blocks")
        _refuse_compiled(ctx.module, blocks)
        records = stream_blocks(blocks)
        ctx.undo.callback(self._leave, blocks)
        ctx.undo.enter_context(patches.moves_within(ctx.strategy, lambda: self._moving(ctx, blocks, records)))

    @contextmanager
    def _moving(self, ctx: Run, blocks: Mapping[str, nn.Module], records: Mapping[str, Streamed]) -> Iterator[None]:
        """Copy the frozen weights, which have their final type by now, to the host; move the module without them."""
        self._ring = start_ring(ctx.module, blocks, records, ctx.device, self.window, ctx.training)
        if self._ring is None and not ctx.training:
            yield
            return
        if self._ring is None:
            raise NothingToDoError(
                f"frozen_streaming: no frozen weight in {counted(blocks.values())}; freeze weights by"
                f" requires_grad_(False), or write +callback=adapters, or ~{OPTION}"
            )
        self._blocks = {name: block for name, block in blocks.items() if records[name].ring is not None}
        host, device = format_bytes(self._ring.host_bytes), format_bytes(self._ring.device_bytes)
        ctx.info(
            f"frozen_streaming: frozen weights of {counted(self._blocks.values())} are on the host ({host}), and pass"
            f" through {device} on the device"
        )
        with away(records):
            yield

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Warn after the first batch if no block was called."""
        if self._is_checked or self.ctx is None or self.ctx.window.waits:
            return
        self._is_checked = True
        if self._ring is not None and not self._ring.copies:
            rank_zero_warn(
                f"frozen_streaming: none of {', '.join(self._blocks)} was called as block(x), so nothing was loaded;"
                f" write the classes of those that are, {OPTION}.blocks=[ClassName]"
            )

    def _leave(self, blocks: Mapping[str, nn.Module]) -> None:
        restore_forwards(blocks.values(), Streamed)
        if self._ring is not None:
            self._ring.close()
        self._blocks = {}


def _refuse_compiled(module: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    inside = {id(block) for block in blocks.values()}
    for name, part in module.named_modules():
        if is_compiled(part) and any(id(each) in inside for each in part.modules()):
            raise ConflictError(
                f"{OPTION}: {name or 'the whole module'} is compiled, and blocks load their weights as they run;"
                f" compile parts inside the blocks, or write ~{OPTION}"
            )
