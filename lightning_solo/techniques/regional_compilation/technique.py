"""Regional compilation: a model's repeated blocks are compiled; blocks that are built alike share the compiled code."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_solo.errors import CapabilityError
from lightning_solo.machine import open_to_others
from lightning_solo.nn.blocks import counted, named_blocks
from lightning_solo.nn.compilation import CountingBackend, compile_blocks, restore_compiled
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.regional_compilation.card import CARD, Settings

RECOMPILES_TO_WARN = 3
"""Two are usual: the first new size is compiled again, and then code for all sizes."""


class RegionalCompilation(Technique, Settings):
    """Compiles the model's blocks during a fit, including the recomputation of their activations.

    Equal blocks share their compiled code, so the compile time doesn't grow with depth. Code outside the blocks isn't
    compiled. Names in checkpoints, copies and pickles stay the same.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._compiled: dict[str, nn.Module] = {}
        self._counting: CountingBackend | None = None
        self._before = 0
        self._is_reported = False
        self._recompiles = 0

    @property
    def compiled(self) -> tuple[str, ...]:
        """Qualified names of the compiled blocks; empty outside a fit."""
        return tuple(self._compiled)

    @property
    def graphs(self) -> int:
        """Number of graphs compiled for all blocks in the current or last fit."""
        return 0 if self._counting is None else self._counting.graphs

    def transform(self, ctx: Run) -> None:
        blocks = named_blocks(ctx.module, self.blocks, "callback.regional_compilation.blocks")
        reason = open_to_others("TORCHINDUCTOR_CACHE_DIR") if self.backend == "inductor" else None
        if reason is not None:
            raise CapabilityError(f"callback.regional_compilation: {reason}")
        backend = CountingBackend(self.backend, self.mode)
        compile_blocks(blocks, backend, self.dynamic)
        self._compiled, self._counting = blocks, backend
        self._is_reported, self._recompiles = False, 0
        ctx.undo.callback(self._undo)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._before = self.graphs

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        new = self.graphs - self._before
        if new and not self._is_reported:
            self._is_reported = True
            blocks = counted(self._compiled.values())
            rank_zero_info(f"regional compilation: {blocks}, compiled as {new} graph{'s' * (new > 1)}")
        elif new:
            self._recompiles += 1
            if self._recompiles == RECOMPILES_TO_WARN:
                rank_zero_warn(
                    f"regional compilation: blocks were compiled again in {RECOMPILES_TO_WARN} batches, which takes"
                    " longer than it saves; use batches of equal sizes, or write"
                    " callback.regional_compilation.dynamic=true; TORCH_LOGS=recompiles shows the reasons"
                )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if not self.graphs:
            rank_zero_warn(
                f"regional compilation did nothing: none of {', '.join(self._compiled)} was called as block(x), and"
                " without a TorchDispatchMode; write the classes of those that are,"
                " callback.regional_compilation.blocks=[ClassName]"
            )

    def _undo(self) -> None:
        restore_compiled(self._compiled.values())
        self._compiled = {}
