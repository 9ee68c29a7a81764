"""Layer freezing: parts of the module aren't trained, or only from some epoch or step on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_solo.cards.lightning_callbacks import refuse_callbacks
from lightning_solo.errors import NothingToDoError, PresetError, listed
from lightning_solo.nn.blocks import counted, named_blocks
from lightning_solo.nn.freezing import Depths, frozen_parts
from lightning_solo.nn.named_weights import matching
from lightning_solo.nn.quantized import count_parameters
from lightning_solo.optim.group_division import split_groups
from lightning_solo.seams.run import Run, optimizer_steps
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.layer_freezing.card import CARD, Settings

OPTION = "callback.layer_freezing"


class LayerFreezing(Technique, Settings):
    """Freezes parts of the module, by depth or by name, for the fit or until a milestone.

    The choice follows from the epoch or the optimizer step alone, so a resumed run trains what an uninterrupted one
    does. Optimizers get every parameter that is trained at any time, and make its states at its first gradient. After
    the fit ``requires_grad`` is as before.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._depths: Depths | None = None
        self._trainable: dict[str, nn.Parameter] = {}
        self._patterns: set[str] = set()
        self._norms: dict[str, nn.Module] = {}
        self._still: list[nn.Module] = []
        self._now: int | str | None = "unset"

    def transform(self, ctx: Run) -> None:
        """Freeze what is never trained; what a milestone unfreezes is frozen when training starts."""
        if not ctx.training:
            return
        refuse_callbacks(OPTION, frozenset({"trained_parameters"}), ctx.trainer.callbacks)
        module = ctx.module
        by_depth = self.most_blocks is not None or self.rate_decay != 1
        blocks = named_blocks(module, self.blocks, f"{OPTION}.blocks") if by_depth else {}
        if not by_depth and not self.frozen:
            raise NothingToDoError(
                f"{OPTION} freezes nothing; write {OPTION}.trained_blocks=<number of the last blocks that train>, or"
                f" names in {OPTION}.frozen; there are {', '.join(name for name, _ in module.named_children())}"
            )
        if by_depth and (self.most_blocks or 0) > len(blocks):
            raise PresetError(
                f"{OPTION}: {self.most_blocks} trained blocks, and there are {counted(blocks.values())}; write at most"
                f" {len(blocks)}, which trains everything"
            )
        self._depths = Depths(module, blocks)
        self._patterns = matching(self._depths.parameters, self.frozen, f"{OPTION}.frozen")
        self._trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._norms = {name: module.get_submodule(name) for name in self._depths.norms}
        self._still, self._now = [], "unset"
        for p in self._trainable.values():
            ctx.undo.callback(p.requires_grad_, True)
        ctx.undo.callback(self._leave)
        self._set(self.most_blocks)
        trained = [p for p in self._trainable.values() if p.requires_grad]
        if not trained:
            raise PresetError(f"{OPTION} freezes all parameters; write more trained_blocks, or fewer names in frozen")
        count, every = sum(p.numel() for p in trained), count_parameters(module)
        at_last = " after the last milestone" if self.milestones else ""
        frozen = listed(frozen_parts(module), 6) or "single parameters"
        ctx.info(f"layer_freezing: {count:,} of {every:,} parameters are trained{at_last}; frozen are {frozen}")

    def optimizers(self, ctx: Run, optimizers: list[Optimizer], schedulers: Sequence[Any]) -> list[Optimizer]:
        """Give each depth its learning rate."""
        if self.rate_decay != 1 and self._depths is not None:
            depths, top = self._depths, self._depths.count
            factors = {
                p: self.rate_decay ** (top - depths.parameters[name])
                for name, p in ctx.module.named_parameters()
                if name in depths.parameters
            }
            for optimizer in optimizers:
                split_groups(optimizer, schedulers, lambda p: factors.get(p, 1.0))
        return optimizers

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Train the blocks of this epoch or step."""
        if self._depths is None:
            return
        blocks = self.blocks_at(trainer.current_epoch, optimizer_steps(trainer))
        if blocks != self._now:
            self._set(blocks)
            self._now = blocks
        for norm in self._still:  # Lightning puts all parts into training mode again
            norm.training = False

    def _set(self, blocks: int | None) -> None:
        """Train the last so many blocks, and what comes after them."""
        assert self._depths is not None
        depths = self._depths
        is_trained = depths.trained(depths.count if blocks is None else blocks)
        for name, p in self._trainable.items():
            p.requires_grad_(is_trained(depths.parameters[name]) and name not in self._patterns)
        for norm in self._still:
            norm.training = True
        self._still = [norm for name, norm in self._norms.items() if self._is_still(name, norm, is_trained)]

    def _is_still(self, name: str, norm: nn.Module, is_trained: Any) -> bool:
        """Return whether a normalisation keeps its running statistics: it is in training mode, and frozen."""
        assert self._depths is not None
        if not norm.training:  # by the user
            return False
        if own := [p for p in norm._parameters.values() if p is not None]:
            return not any(p.requires_grad for p in own)
        return not is_trained(self._depths.norms[name]) or name in self._patterns

    def _leave(self) -> None:
        for norm in self._still:
            norm.training = True
        self._depths, self._still = None, []
        self._trainable, self._norms = {}, {}
