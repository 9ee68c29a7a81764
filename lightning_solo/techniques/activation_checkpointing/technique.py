"""Activation checkpointing: save a block's inputs instead of its activations, and recompute those in backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_solo.cards.blocks import AUTO, HOST_INPUT, KEEP_PRODUCTS, OFFLOAD, RECOMPUTE
from lightning_solo.cards.budget import bytes_or_share
from lightning_solo.errors import ConflictError, NothingToDoError, PresetError, nearest
from lightning_solo.memory.category_peaks import is_compiled
from lightning_solo.nn.activation_budget import Calls
from lightning_solo.nn.blocks import counted, named_blocks
from lightning_solo.nn.compilation import is_compiled_alone
from lightning_solo.nn.forwards import restore_forwards
from lightning_solo.nn.recomputation import (
    ALL,
    INPUT,
    NONE,
    PRODUCTS,
    Kept,
    Wrap,
    checkpoint_blocks,
    has_recomputed,
    refuse_own_checkpointing,
)
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.activation_checkpointing.budget import BudgetedBatches
from lightning_solo.techniques.activation_checkpointing.card import ALL_PRODUCTS, CARD, NOTHING, Settings


def choose_blocks(module: nn.Module, blocks: str | Sequence[str] = AUTO, every_k: int = 1) -> dict[str, nn.Module]:
    """Return name -> every ``every_k``-th block: of the repeated blocks, or of those of the named classes.

    Raises:
        NothingToDoError: there is no such block; the message lists the candidates.
        ConflictError: the module checkpoints its activations itself.
    """
    refuse_own_checkpointing(module, "callback.activation_checkpointing")
    return dict(list(named_blocks(module, blocks, "callback.activation_checkpointing.blocks").items())[::every_k])


def wrap_by_mode(blocks: Mapping[str, nn.Module], mode_of: Mapping[str, str], verify: bool) -> dict[str, nn.Module]:
    """Wrap each block by its mode, one of `MODES`; return the wrapped ones. Blocks without a mode are recomputed.

    Raises:
        PresetError: a name is no block's.
    """
    if unknown := next((name for name in mode_of if name not in blocks), None):
        raise PresetError(
            f"callback.activation_checkpointing.modes: no block {unknown!r}{nearest(unknown, blocks)}there are"
            f" {', '.join(blocks)}; a preset that auto solved is for one module: write solo=auto to solve one for this"
        )
    kept = Kept(PRODUCTS)
    wrapped: dict[str, nn.Module] = {}
    for mode in (KEEP_PRODUCTS, RECOMPUTE, HOST_INPUT, OFFLOAD):
        group = {name: block for name, block in blocks.items() if mode_of.get(name, RECOMPUTE) == mode}
        keep = kept if mode == KEEP_PRODUCTS else None
        moves = ALL if mode == OFFLOAD else INPUT if mode == HOST_INPUT else NONE
        wrapped |= checkpoint_blocks(group, verify, keep, moves=moves)
    return {name: wrapped[name] for name in blocks if name in wrapped}


class ActivationCheckpointing(Technique, Settings):
    """Wraps the model's blocks for the length of a fit, so that backward recomputes their activations.

    The blocks are chosen after ``configure_model`` and before the optimizer, so they may be built anywhere.
    Validation, test and prediction are unchanged.

    Raises:
        ConflictError: ``keep`` and ``budget`` together.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._batches: BudgetedBatches | None = None
        self._first_step = 0
        self._is_checked = False  # whether blocks are recomputed
        self._loss_scale = 0.0
        self._kept: Kept | None = None
        self._wrapped: dict[str, nn.Module] = {}

    @property
    def wrapped(self) -> tuple[str, ...]:
        """Qualified names of the wrapped blocks; empty outside a fit."""
        return tuple(self._wrapped)

    def transform(self, ctx: Run) -> None:
        names = PRODUCTS if self.keep == ALL_PRODUCTS else self.keep
        self._kept = None if self.keep == NOTHING else Kept(names)
        blocks = choose_blocks(ctx.module, self.blocks, self.every_k)
        calls = None if self.budget is None else Calls()
        if self.modes is None:
            self._wrapped = checkpoint_blocks(blocks, self.verify_recomputation, self._kept, calls)
        else:
            self._wrapped = wrap_by_mode(blocks, self.mode_of, self.verify_recomputation)
        if not self._wrapped and set(self.mode_of) == set(blocks):
            raise NothingToDoError(
                "activation checkpointing: modes keeps the activations of all blocks; write"
                " ~callback.activation_checkpointing, or list some under recompute"
            )
        if not self._wrapped:
            raise ConflictError(
                "activation checkpointing: the blocks are wrapped already, by another ActivationCheckpointing; keep one"
            )
        ctx.undo.callback(self._wrapped.clear)
        ctx.undo.callback(restore_forwards, self._wrapped.values(), Wrap)
        self._batches = None
        if self.budget is not None and calls is not None:
            self._batches = BudgetedBatches(bytes_or_share(self.budget), calls)
            ctx.undo.callback(self._batches.stop)
        kept = self.keep if isinstance(self.keep, str) else ", ".join(self.keep)
        but = "" if self._kept is None else f", but for {kept}"
        but += "" if self.budget is None else f", or fewer under budget={self.budget}"
        recomputed = [block for name, block in self._wrapped.items() if self.mode_of.get(name) != OFFLOAD]
        if recomputed:
            rank_zero_info(f"activation checkpointing: backward recomputes {counted(recomputed)}{but}")

    @property
    def kept(self) -> tuple[str, ...]:
        """Qualified names of the blocks that ``budget`` keeps in the current batch, one per call."""
        return () if self._batches is None else tuple(sorted(name for name, _ in self._batches.calls.kept))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._first_step, self._loss_scale, self._is_checked = trainer.global_step, 0.0, False
        if self._batches is None:
            return
        blocks = {id(block) for block in self._wrapped.values()}
        inside = {id(part) for block in self._wrapped.values() for part in block.modules()}
        for name, part in pl_module.named_modules():
            if not is_compiled(part) or (id(part) in blocks and is_compiled_alone(part)):
                continue
            # by identity: a metric equals every module
            if id(part) in inside or any(id(each) in blocks for each in part.modules()):
                raise ConflictError(
                    f"activation checkpointing: budget={self.budget} chooses single blocks, and"
                    f" {name or 'the whole module'} is compiled; write callback.activation_checkpointing.budget=null,"
                    " or compile only these blocks, as the preset compile does"
                )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._batches is None or self.ctx is None:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            before, self._loss_scale = self._loss_scale, scaler.get_scale()
            if self._loss_scale < before:  # the step overflowed and was skipped, so there are no optimizer states
                self._first_step = trainer.global_step
        window, stepped = self.ctx.window, trainer.global_step - self._first_step
        kind = window.before(batch_idx) == 0, window.is_last
        # an optimizer has its states from its first step on
        steady = stepped >= max(1, len(trainer.optimizers))
        self._batches.begin(batch, kind, pl_module, trainer.optimizers, self.ctx.device, steady)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._batches is not None:  # on_train_batch_start may have ended the epoch in the middle of a batch
            self._batches.stop()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._wrapped and self._kept is not None and self._kept.seen and not self._kept.matched:
            raise NothingToDoError(
                f"activation checkpointing: keep={self.keep!r} keeps nothing, as none of these operators ran in a"
                f" block; these ran: {', '.join(sorted(self._kept.seen))}"
            )
        looks = not self._is_checked and self.ctx is not None and not self.ctx.window.waits
        self._is_checked |= looks
        recomputed = [block for name, block in self._wrapped.items() if self.mode_of.get(name) != OFFLOAD]
        if looks and recomputed and not has_recomputed(recomputed):
            rank_zero_warn(
                f"activation checkpointing saves nothing: in the first batch none of {', '.join(self._wrapped)} ran"
                " again in backward; write the classes of those that do,"
                " callback.activation_checkpointing.blocks=[ClassName]"
            )
        if self._batches is not None and self.ctx is not None:
            line, warning = self._batches.end(self.ctx.window.before(batch_idx + 1) == 0)
            if line:
                self.ctx.info(line)
            if warning:
                rank_zero_warn(warning)
