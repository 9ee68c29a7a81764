"""Shared blocks: groups of equal blocks use one block's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_solo.cards.lightning_callbacks import refuse_callbacks
from lightning_solo.errors import CheckpointError, ConflictError, with_reasons
from lightning_solo.memory.host_slabs import is_planned
from lightning_solo.nn.blocks import counted, expert_lists, named_blocks
from lightning_solo.nn.sharing import Sharing, as_before, separate, share_blocks, take_back
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Checkpoint, Technique
from lightning_solo.techniques.shared_blocks.card import CARD, OPTION, Settings
from lightning_solo.units import format_bytes

RECORD = "shared_blocks"
"""Key of a checkpoint with name of a shared parameter -> name of the one in the first block."""
BATCHES = 16
"""Batches of validation on which the module is compared before and after."""


class SharedBlocks(Technique, Settings):
    """Makes groups of equal blocks use the same parameters: the first block's, or the mean of theirs.

    Names stay: each block has its parameters under its own names, and a checkpoint stores shared ones once. Buffers,
    such as BatchNorm's statistics, stay each block's own. At the start, validation before and after sharing is logged.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._names: dict[str, str] = {}
        self._sharing = Sharing()
        self._is_in = False

    @property
    def shared(self) -> dict[str, str]:
        """Qualified name of each parameter -> that of the first block's, which it is; of the last fit."""
        return dict(self._names)

    def transform(self, ctx: Run) -> None:
        """Share parameters."""
        if not ctx.training:
            return
        refuse_callbacks(OPTION, frozenset({"layers"}), ctx.trainer.callbacks)
        self.enter(ctx, self.start)

    def enter(self, ctx: Run, start: str) -> None:
        """Share parameters once, and register how the run leaves them."""
        if self._is_in:
            return
        blocks = named_blocks(ctx.module, self.blocks, f"{OPTION}.blocks")
        experts = expert_lists(ctx.module) if self.blocks == "auto" else {}
        if routed := [name for name in blocks if name.rpartition(".")[0] in experts]:
            raise ConflictError(
                f"{OPTION} and {routed[0]}, among which a matrix with a row for each may choose, as the router of a"
                f" mixture of experts does; with shared weights they would compute the same; write ~{OPTION}, or"
                f" {OPTION}.blocks=[{type(blocks[routed[0]]).__name__}] if they are computed one after another"
            )
        sharing = share_blocks(ctx.module, blocks, self.group, start, OPTION)
        self._names, self._sharing, self._is_in = dict(sharing.names), sharing, True
        ctx.undo.callback(self._leave, ctx)
        if sharing.before == sharing.after:
            ctx.info("shared_blocks: the blocks share since an earlier fit, and are trained further")
            return
        shared = counted(blocks[name] for names in sharing.groups for name in names)
        sizes = " and ".join(str(size) for size in sorted({len(names) for names in sharing.groups}))
        left = with_reasons(sharing.left_out, 5)
        ctx.info(
            f"shared_blocks: {shared} in groups of {sizes} start from the {self.start}; the module's parameters take"
            f" {format_bytes(sharing.after)} instead of {format_bytes(sharing.before)}"
            f"{f'; each block keeps its own: {left}' if left else ''}"
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Log validation with the blocks' weights of before, and with shared ones."""
        before, self._sharing.own = self._sharing.own, {}
        has_all = before.keys() <= {name for name, _ in pl_module.named_parameters(remove_duplicate=False)}
        if self.ctx is None or not before or not has_all or is_planned() or trainer.fast_dev_run or trainer.ckpt_path:
            return  # another technique may have replaced them
        with as_before(pl_module, before):
            metrics = patches.validation_metrics(trainer, BATCHES)
        for name, value in patches.validation_metrics(trainer, BATCHES).items() if metrics else ():
            self.ctx.info(f"shared_blocks: {name}: {metrics[name]:.4f} before, {value:.4f} with shared weights")

    def _leave(self, ctx: Run) -> None:
        self._is_in = False
        if self._sharing.own:  # nothing was trained
            take_back(ctx.module, self._sharing)
            self._sharing.own = {}
        elif self.after_fit == "keep":
            return
        else:
            separate(ctx.module, self._sharing)
        self._names = {}

    def checkpoint(self, ctx: Run) -> Checkpoint:
        """Return how shared weights are saved and loaded."""
        return _SharedCheckpoint(ctx, self)


class _SharedCheckpoint(Checkpoint):
    """The module's own names, with a note that states belong to shared weights."""

    def __init__(self, ctx: Run, technique: SharedBlocks) -> None:
        self._ctx = ctx
        self._technique = technique

    def saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint with the names that share."""
        return {**checkpoint, RECORD: {"group": self._technique.group}}

    @contextmanager
    def loading_weights(self) -> Iterator[None]:
        """Share parameters, before another technique changes them, and load weights."""
        record = patches.loaded_checkpoint(self._ctx.trainer).get(RECORD)
        if not self._ctx.training:
            yield
            return
        if record is None:
            raise CheckpointError(
                f"the checkpoint is of a run without shared blocks, so a run with {OPTION} can't continue it; to share"
                " its weights, load them before the fit: module.load_state_dict(torch.load(path)['state_dict'])"
            )
        if record["group"] != self._technique.group:
            raise CheckpointError(
                f"the checkpoint's blocks share in groups of {record['group'] or 'all'}; write"
                f" {OPTION}.group={record['group'] or 'null'}"
            )
        self._technique.enter(self._ctx, "first")
        yield
