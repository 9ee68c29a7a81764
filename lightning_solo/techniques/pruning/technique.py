"""Pruning: the smallest weights become zero, and stay zero while the others are trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.cards.phase import Phase
from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError, PresetError, listed, with_reasons
from lightning_solo.export.pruned_structure import RECORD, load_sizes
from lightning_solo.memory.host_slabs import is_planned
from lightning_solo.nn.prunable import Choice, prunable_weights
from lightning_solo.optim.memory_order import is_dense
from lightning_solo.optim.weight_masks import WeightMasks, count_bits
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run, optimizer_steps
from lightning_solo.seams.technique import Checkpoint, Technique
from lightning_solo.techniques.pruning.card import CARD, FOURS, OPTION, Settings
from lightning_solo.techniques.pruning.structured import Structured
from lightning_solo.units import format_bytes

STATE = {"at", "masks"}


class Pruning(Technique, Settings):
    """Prunes weights by their magnitude during a fit, and keeps them at zero with their moments.

    The masks take a bit per weight, and are in the checkpoint's state of this callback, so that a resumed run has the
    same. The module gets no buffers, hooks or parametrizations: after the fit it is as before, with zeros.

    Raises:
        ConflictError: arguments contradict each other.
    """

    phase = CARD.phase
    joins_evaluation = True  # which may load a checkpoint with fewer channels

    def _init_state(self) -> None:
        if self.structured:
            self.phase = Phase.ADAPT  # type: ignore[misc]  # before what acts on the layers
        self._structured: Structured | None = None
        self._choice: Choice | None = None
        self._masks: WeightMasks | None = None
        self._saved: dict[str, Tensor] = {}  # masks by name, of the last fit or of a checkpoint
        self._at = -1  # optimizer step of the last change of the mask
        self._seen = 0  # optimizer steps before the latest batch

    @property
    def pruned(self) -> dict[str, int]:
        """Qualified name of each parameter that is pruned -> number of its pruned weights."""
        return {name: count_bits(mask) for name, mask in self._packed().items()}

    def _packed(self) -> Mapping[str, Tensor]:
        return self._saved if self._masks is None else self._masks.packed

    # --- a fit ---

    def transform(self, ctx: Run) -> None:
        """Find the weights to prune."""
        if not ctx.training:
            return
        if self.amount is None and self.threshold is None and self.pattern != FOURS:
            raise NothingToDoError(
                f"{OPTION} prunes nothing; write {OPTION}.amount=0.5, {OPTION}.threshold=<magnitude>, or a"
                f" {OPTION}.pattern"
            )
        if self.structured:
            self._structured = Structured(self, ctx)
            ctx.undo.callback(setattr, self, "_structured", None)
            if not is_planned():
                self._structured.remove(trial=self.removes_later)
            return
        self._choice = choice = prunable_weights(ctx.module, self.layers, self.kept, in_fours=self.pattern == FOURS)
        ctx.undo.callback(self._leave)
        if gaps := [name for name, p in choice.weights.items() if not is_dense(p)]:
            raise ConflictError(
                f"{OPTION} and {gaps[0]}, whose numbers have gaps in memory; make it contiguous, or write"
                f" {OPTION}.kept=[{gaps[0]}]"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the masks of a checkpoint, and check the schedule against the run."""
        ctx, choice = self.ctx, self._choice
        assert ctx is not None  # joined in setup
        self._seen = step = optimizer_steps(trainer)
        if self.structured:
            if step == 0 or (self.schedule == "once" and getattr(pl_module, RECORD, None) is None):
                self._at = -1
            if self.removes_later:
                self._check_schedule(trainer, step, is_new=self._at < 0)
            return
        assert choice is not None  # made in transform
        self._check_schedule(trainer, step, is_new=not self._saved)
        masks = WeightMasks({name: pl_module.get_parameter(name) for name in choice.weights})
        self._check_amount([p.numel() for p in masks.weights.values()])
        if step > 0 and self._saved:
            self._load(masks)
        else:
            self._at = -1
        self._masks, self._saved = masks, {}
        left_out = with_reasons(choice.left_out, 5)
        ctx.info(
            f"pruning: {sum(p.numel() for p in masks.weights.values()):,} weights of {len(masks.weights)} parameters"
            f" ({listed(masks.weights)}) can be pruned; masks take {format_bytes(masks.nbytes)}"
            f"{f'; left out are {left_out}' if left_out else ''}"
        )

    def _check_schedule(self, trainer: Any, step: int, *, is_new: bool) -> None:
        if step > self.begin and is_new:
            raise PresetError(
                f"{OPTION}.begin={self.begin}, but the run begins at optimizer step {step} of a checkpoint in which"
                f" nothing is pruned; write {OPTION}.begin={step} or a later step"
            )
        if not trainer.lightning_module.automatic_optimization or is_planned() or trainer.fast_dev_run:
            return  # how often optimizers step isn't known, or doesn't matter
        steps = trainer.estimated_stepping_batches
        if self.last_step >= steps:
            name = "begin" if self.begin >= steps or self.end is None else "end"
            first = 0 if name == "begin" else self.begin
            raise PresetError(
                f"{OPTION}.{name}={getattr(self, name)}, and the run has {steps} optimizer steps, counted from 0:"
                f" nothing is trained after the mask's last change; write {OPTION}.{name}={(first + int(steps)) // 2},"
                " or train longer"
            )

    def _check_amount(self, sizes: list[int]) -> None:
        most = sum(sizes) if self.scope == "global" else max(sizes)
        if self.amount is not None and round(self.amount * most) == 0:
            of = "all weights together have" if self.scope == "global" else "the largest parameter has"
            raise NothingToDoError(
                f"{OPTION}.amount={self.amount} prunes no weight: {of} {most:,}; write"
                f" {OPTION}.amount={1 / most:.2g} or more"
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Change the masks, or remove channels or heads, if the schedule says so."""
        masks, ctx = self._masks, self.ctx
        step = optimizer_steps(trainer)
        if self._structured is not None and self.removes_later and not is_planned():
            change = self.change_at(step)
            if change is not None and change > self._at:
                self._structured.remove((batch, batch_idx), None if self.amount is None else self.share_at(change))
                self._at = change
        if masks is None or ctx is None:
            return
        if step < self._seen:  # weights are those of an earlier checkpoint
            self._apply(ctx, masks)
        self._seen = step
        change = self.change_at(step)
        if change is not None and change > self._at:
            self._change(ctx, masks, change)
            self._at = change

    def _change(self, ctx: Run, masks: WeightMasks, step: int) -> None:
        if not is_planned():  # else there are no numbers to choose from
            self._choose(masks, ctx.strategy.optimizers, step)
        self._apply(ctx, masks)
        if step in (self.begin, self.last_step) and not is_planned():
            pruned, every = sum(masks.pruned.values()), sum(p.numel() for p in masks.weights.values())
            if pruned == 0 and self.threshold is not None:
                raise NothingToDoError(
                    f"{OPTION}.threshold={self.threshold} is below the magnitude of all weights; write a larger one, or"
                    f" {OPTION}.amount=0.5"
                )
            ctx.info(f"pruning: from optimizer step {step} on {pruned:,} of {every:,} weights are 0")

    def _choose(self, masks: WeightMasks, optimizers: list[Optimizer], step: int) -> None:
        assert self._choice is not None  # made in transform
        if self.pattern == FOURS:
            masks.prune_fours(optimizers, self._choice.transposed)
        elif self.threshold is not None:
            masks.prune_below(self.threshold, optimizers)
        elif self.schedule == "regrow" and self._at >= 0:
            masks.exchange(self.regrown, optimizers, step, self.seed)
        else:
            masks.prune_share(self.share_at(step), optimizers, over_all=self.scope == "global")

    def _apply(self, ctx: Run, masks: WeightMasks) -> None:
        masks.apply_to(masks.weights)
        for optimizer in ctx.strategy.optimizers:
            masks.apply(optimizer)

    def step(
        self, ctx: Run, proceed: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any], **options: Any
    ) -> Any:
        """Set the pruned weights and their states to zero after the step."""
        result = proceed(optimizer, closure, **options)
        if self._masks is not None and self._at >= 0:
            self._masks.apply(optimizer)
        return result

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Warn if the run has ended before the mask's last change, as an early stop and manual optimization may."""
        acts = self._masks is not None or self.removes_later
        if acts and self._at < self.last_step and not (is_planned() or trainer.fast_dev_run):
            name = "begin" if self.end is None else "end"
            weights = "" if self._masks is None else f"; {sum(self._masks.pruned.values()):,} weights are pruned"
            warnings.warn(
                f"{OPTION}: the run ended after {optimizer_steps(trainer)} optimizer steps, before the last change by"
                f" the schedule ({OPTION}.{name}={self.last_step}){weights}; write a smaller {OPTION}.{name}, or resume"
                " the run",
                stacklevel=2,
            )

    def leaving(self, ctx: Run, proceed: Callable[[], Any]) -> None:
        """Set the pruned weights to zero once more, since an average of weights may have taken their place."""
        if self._masks is not None:
            self._masks.apply_to(self._masks.weights)
        proceed()

    def _leave(self) -> None:
        if self._masks is not None:
            self._saved = {name: mask.cpu() for name, mask in self._masks.packed.items()}
        self._masks = self._choice = None

    # --- checkpoints ---

    def checkpoint(self, ctx: Run) -> Checkpoint:
        """Return how the pruned weights are saved."""
        return _Pruned(self._masks, self._structured, ctx)

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, a bit per weight, and the step of their last change."""
        return {"at": self._at, "masks": {name: mask.cpu() for name, mask in self._packed().items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the saved run's masks."""
        if set(state_dict) != STATE:
            raise CheckpointError(
                f"{OPTION}: the checkpoint's state has {', '.join(state_dict)}; expected are {', '.join(sorted(STATE))}"
            )
        self._at, self._saved = int(state_dict["at"]), dict(state_dict["masks"])

    def _load(self, masks: WeightMasks) -> None:
        """Replace new masks by saved ones."""
        sizes = {name: mask.numel() for name, mask in masks.packed.items()}
        saved = {name: mask.numel() for name, mask in self._saved.items()}
        if other := [name for name in {**sizes, **saved} if sizes.get(name) != saved.get(name)]:
            raise CheckpointError(
                f"{OPTION}: the checkpoint's masks and this run's differ in {listed(other)}; write the"
                f" {OPTION}.layers and {OPTION}.kept of the run that saved it"
            )
        masks.packed = {name: self._saved[name].to(mask.device) for name, mask in masks.packed.items()}
        if (name := masks.misfit()) is not None:
            raise CheckpointError(
                f"{OPTION}: {name} isn't zero where the checkpoint's mask says so: its weights and masks are of"
                " different runs; resume from the file of one run, or begin with its weights alone"
            )


class _Pruned(Checkpoint):
    """Saves averages with the same zeros as the weights, and smaller modules with their sizes."""

    def __init__(self, masks: WeightMasks | None, structured: Structured | None, ctx: Run) -> None:
        self._masks = masks
        self._structured = structured
        self._ctx = ctx

    @contextmanager
    def loading_weights(self) -> Iterator[None]:
        load_sizes(self._ctx.module, patches.loaded_checkpoint(self._ctx.trainer))
        yield

    def load_states(self, proceed: Callable[..., Any], checkpoint: Mapping[str, Any]) -> None:
        if self._structured is None:
            proceed(checkpoint)
        else:
            self._structured.load_states(proceed, checkpoint)

    def saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        if self._masks is not None:
            weights = checkpoint.get("state_dict", {})
            self._masks.apply_to({name: value for name, value in weights.items() if isinstance(value, Tensor)})
        record = getattr(self._ctx.module, RECORD, None)
        return checkpoint if record is None else {**checkpoint, RECORD: record}
