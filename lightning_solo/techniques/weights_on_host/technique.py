"""Weights on the host: each block's come to the device ahead of their use, are updated in backward, and go back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.errors import ConflictError, NothingToDoError, RefusedStepError
from lightning_solo.memory import host_slabs
from lightning_solo.memory.category_peaks import is_compiled
from lightning_solo.memory.weight_ring import WeightRing, refuses_absent
from lightning_solo.nn.blocks import counted, named_blocks
from lightning_solo.nn.forwards import restore_forwards
from lightning_solo.nn.host_weights import leaving, store, weights_of_blocks
from lightning_solo.nn.rollback import Rollback, attributes_kept
from lightning_solo.nn.streaming import Streamed, stream_blocks, taken_out
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.gradient_release import StepInBackward
from lightning_solo.optim.param_groups import parameters_of
from lightning_solo.optim.state_placement import free_bytes
from lightning_solo.seams import patches
from lightning_solo.seams.hooks import code_of_others
from lightning_solo.seams.released_gradients import ReleasedGradients
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Checkpoint
from lightning_solo.techniques.weights_on_host.card import AUTO, CARD, OPTION, Settings
from lightning_solo.units import format_bytes

BETWEEN = (
    *("on_train_batch_end", "on_train_batch_start", "lr_scheduler_step", "optimizer_step"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)
"""Hooks of Lightning from a step's end to the next forward of the same epoch."""
WITHIN = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks of Lightning after a step's forward, which find no weights of blocks on the device."""


class WeightsOnHost(ReleasedGradients, Settings):
    """Stores the weights of blocks on the host; each block's are on the device while it runs, and while it is updated.

    Parameters step in backward, as under gradient release, with any optimizer that this serves. Between steps all
    weights are on the host. An evaluation without a fit brings the blocks' weights, too.

    Under clipping by norm gradients are kept on the host. Once their norm is known, weights outside the blocks step,
    and each block as it is used in the next step's forward; the last of all before anything else may read weights.
    Or each batch runs twice, first to measure the norm.

    Raises:
        PresetError: an argument is ill-formed.
    """

    phase = CARD.phase
    option = OPTION
    buffer = "host"  # of gradients that are kept
    remedy = (
        f"write {OPTION}.clipping=second_backward or Trainer(gradient_clip_algorithm='value'), which keep no gradients,"
        f" or {OPTION}.kept_gradients=bf16"
    )
    joins_evaluation = True

    def _init_state(self) -> None:
        super()._init_state()
        self._ring: WeightRing | None = None
        self._blocks: dict[str, nn.Module] = {}
        self._is_checked = self._is_settled = False
        self._is_second = False  # whether the batch runs a second time
        self._rollback: Rollback | None = None
        self._is_between = False  # steps, while blocks wait for their updates
        self._readers: set[str] = set()  # hooks between and within steps of code that may read weights

    def measures(self, ctx: Run, release: StepInBackward) -> bool:
        """Return whether each batch runs twice, first to measure the norm of its gradients."""
        if self.clipping == "deferred" or release.accumulation > 1:
            return False
        if self.clipping == "auto" and self.kept_on == "device":
            return False
        why = ""
        if self.clipping == "auto":
            if isinstance(release.optimizer, CompactAdamW):
                release.optimizer.place_states()  # they take host memory, too
            needed = release.kept_bytes
            if host_slabs.has_room("kept gradients", needed):
                return False
            room = host_slabs.host_room()
            why = f", which need {format_bytes(needed)} of host memory, and {format_bytes(room)} may be used"
        ctx.info(
            "weights_on_host: each batch runs forward and backward twice, first to measure the norm of its gradients"
            + why
        )
        return True

    @property
    def kept_on(self) -> str:
        return "device" if self.kept_gradients == "device" else "host"

    @property
    def keep_in(self) -> torch.dtype | None:
        """The type of kept gradients; None: as they come."""
        return torch.bfloat16 if self.kept_gradients == "bf16" else None

    @property
    def ring(self) -> WeightRing | None:
        """The buffers and copies of the current or last run."""
        return self._ring

    @property
    def stored(self) -> tuple[str, ...]:
        """Qualified names of the blocks whose weights are on the host; empty outside a run."""
        return tuple(self._blocks)

    # --- set-up ---

    def transform(self, ctx: Run) -> None:
        """Keep the blocks' weights on the host while the module moves to the device.

        Raises:
            ConflictError: a fit whose gradients are needed together, or compiled blocks; the message says what to
                write.
        """
        self._ring, self._is_checked, self._is_settled = None, False, self.weight_budget != AUTO
        self._rollback = None
        if ctx.training:
            super().transform(ctx)
            _refuse(ctx)
        try:
            blocks = named_blocks(ctx.module, self.blocks, f"{OPTION}.blocks")
        except NothingToDoError:
            compiled = {name: each for name, each in ctx.module.named_modules() if is_compiled(each)}
            if len(compiled) > 1:  # which hide the blocks
                _refuse_compiled(ctx.module, compiled)
            raise
        _refuse_compiled(ctx.module, blocks)
        records = stream_blocks(blocks)
        ctx.undo.callback(self._leave, blocks)
        ctx.undo.enter_context(patches.moves_within(ctx.strategy, lambda: self._moving(ctx, blocks, records)))
        ctx.undo.enter_context(patches.after_optimizers(ctx.strategy, self._leave_host))

    @contextmanager
    def _moving(self, ctx: Run, blocks: Mapping[str, nn.Module], records: Mapping[str, Streamed]) -> Iterator[None]:
        """Copy the weights, which have their final type by now, to their slabs; move the module without them.

        Raises:
            BudgetError: the host has too little memory, or the budget is too small.
            NothingToDoError: no block has weights that leave.
        """
        places = weights_of_blocks(ctx.module, blocks)
        chosen = leaving(ctx.module, places, self.budget)
        if not chosen and ctx.training:
            why = "all weights fit into weight_budget" if places else f"no weights in {counted(blocks.values())}"
            raise NothingToDoError(f"{OPTION}: {why}; write ~{OPTION}")
        if not chosen:
            yield
            return
        self._ring = ring = store(chosen, records, ctx.device, self.window)
        self._blocks = {name: blocks[name] for name in chosen}
        for each in {ctx.module, *(each for block in self._blocks.values() for each in block.modules())}:
            for register in (each.register_state_dict_pre_hook, each.register_load_state_dict_pre_hook):
                ctx.undo.callback(register(_AtRest(ring)).remove)  # should one be asked for in a step
        ctx.info(
            f"weights_on_host: weights of {counted(self._blocks.values())} are on the host"
            f" ({format_bytes(ring.host_bytes)}), and pass through {format_bytes(ring.device_bytes)} on the device"
        )
        with taken_out([place for each in chosen.values() for place in each]):
            yield

    def _leave_host(self) -> None:
        if self._ring is not None:
            self._ring.leave_host()

    def optimizers(self, ctx: Run, optimizers: list[Optimizer], schedulers: Sequence[Any]) -> list[Optimizer]:
        """Release the optimizer's gradients, unless another technique does; its states have their places by now.

        Raises:
            ConflictError: an optimizer whose step needs all gradients at once.
        """
        if not any(isinstance(each, ReleasedGradients) and each is not self for each in ctx.techniques):
            optimizers = super().optimizers(ctx, optimizers, schedulers)
        if self._ring is not None:
            self._ring.rest()
        return optimizers

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Bring a parameter's block for its update.

        Raises:
            ConflictError: gradients are kept until the step.
        """
        super().on_train_start(trainer, pl_module)
        ring, release, ctx = self._ring, self._release_of_run, self.ctx
        if ring is None or ctx is None:
            return
        if release is None or release.accumulation > 1:
            raise ConflictError(
                f"{OPTION} updates each block in the backward of one micro-batch, and gradients are kept for several;"
                f" write ~{OPTION}"
            )
        ring.flush = release.flush
        self._look_for_readers(ctx, deferred=not release.immediate)
        ctx.undo.enter_context(patches.around_hooks(trainer, ctx.home, self._hook))
        if release.immediate:
            release.arriving = ring.update
            return
        if self.clipping == "second_backward":
            raise ConflictError(
                f"{OPTION}.clipping=second_backward and {type(pl_module).__name__}.configure_gradient_clipping, whose"
                " bound isn't known before backward; write Trainer(gradient_clip_val=1.0) instead of the method, or"
                f" {OPTION}.clipping=deferred"
            )
        release.arriving, release.postpone = ring.arrive, ring.postpone
        for optimizer in ctx.strategy.optimizers:
            for register in (optimizer.register_state_dict_pre_hook, optimizer.register_load_state_dict_pre_hook):
                ctx.undo.callback(register(_AtRest(ring)).remove)

    def _look_for_readers(self, ctx: Run, deferred: bool) -> None:
        """Find code between and within steps that may read weights; say that it costs time."""
        owners = [*ctx.trainer.callbacks, ctx.module, getattr(ctx.trainer, "datamodule", None)]
        hooks = (*BETWEEN, *WITHIN) if deferred else WITHIN
        found = {hook: [name for each in owners for name in code_of_others(each, [hook])] for hook in hooks}
        self._readers = {hook for hook, names in found.items() if names}
        if names := sorted({name for hook in WITHIN for name in found[hook]}):
            ctx.info(
                f"weights_on_host: all weights go back to the host before {', '.join(names)}, which may read them"
                " within a step, and come again as they are used"
            )
        if names := sorted({name for hook in {*found} - {*WITHIN} for name in found[hook]}):
            ctx.info(
                "weights_on_host: blocks are updated at the end of each step, and not in the next forward, where that"
                f" would overlap with computation, since {', '.join(names)} may read weights between steps"
            )

    @contextmanager
    def _hook(self, hook: str) -> Iterator[None]:
        """Take the updates that blocks wait for, unless a hook reads no weights; show them within a step, too."""
        if self._is_between and (hook in self._readers or hook not in BETWEEN):
            self._settle()
        ring = self._ring
        if hook in ("on_validation_epoch_end", "on_validation_end") and ring is not None:
            ring.rest()  # blocks still come ahead of a forward that doesn't follow
        if hook not in WITHIN or hook not in self._readers or ring is None:
            yield
            return
        ring.rest()
        yield
        ring.begin()

    def _settle(self) -> None:
        """Take the updates that blocks wait for; then all numbers are on the host."""
        self._is_between = False
        if self._ring is not None and self._ring.waits:
            self._ring.rest()

    @property
    def _release_of_run(self) -> StepInBackward | None:
        return None if self.ctx is None else self.ctx.release

    # --- steps ---

    def training_step(self, ctx: Run, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Begin a step.

        Raises:
            ConflictError: it takes several micro-batches by now.
        """
        _refuse_accumulation(ctx)
        self._is_between = False
        if self._is_second:  # of the same batch, whose weights are the same
            return proceed(*args, **kwargs)
        if self._ring is not None and self._is_checked and not self._is_settled:
            self._settle_budget(ctx, self._ring)
        if self._ring is not None and not self._ring.waits:
            self._ring.begin()
        return proceed(*args, **kwargs)

    def loss(self, ctx: Run, proceed: Callable[..., Any]) -> Any:
        """Run a batch, twice where the first backward measures the norm of the gradients.

        Raises:
            GradientError: a gradient is infinite or NaN.
        """
        release = ctx.release
        if release is None or not release.measures or self._ring is None:
            return proceed()
        if self._rollback is None:
            self._rollback = Rollback(ctx.module, ctx.device)
        self._rollback.save()
        rewinds = [technique.rewind(ctx) for technique in ctx.having("rewind")]
        with (
            release.measuring(),
            attributes_kept(ctx.module),
            patches.within_batch(ctx.strategy.precision_plugin),
            patches.logged_through(ctx.trainer, lambda *_, **__: None),
        ):
            proceed()
        for restore in (self._rollback.restore, *rewinds):
            restore()
        self._is_second = True
        try:
            return proceed()
        finally:
            self._is_second = False

    def _settle_budget(self, ctx: Run, ring: WeightRing) -> None:
        """Keep the last blocks on the device, as many as fit beside the peak of the first step."""
        self._is_settled = True
        if not free_bytes(ctx.device):
            return
        if ring.waits:
            ring.rest()
        # states were made in the first step's backward, perhaps after its peak
        states = [
            value for each in ctx.strategy.optimizers for state in each.state.values() for value in state.values()
        ]
        made = sum(each.nbytes for each in states if isinstance(each, Tensor) and each.device.type == ctx.device.type)
        count = ring.keep_last(free_bytes(ctx.device) - made)
        kept = [self._blocks.popitem()[1] for _ in range(count)]
        restore_forwards(kept, Streamed)
        if kept:
            ctx.info(
                f"weights_on_host: weights of {counted(kept)} stay on the device from the second step on;"
                f" {format_bytes(ring.host_bytes)} are on the host"
            )

    def step(
        self, ctx: Run, proceed: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any], **options: Any
    ) -> Any:
        """Step in backward, then wait until all weights are on the host again, unless blocks wait for their updates.

        Raises:
            RefusedStepError: a gradient is infinite or NaN.
        """
        try:
            result = super().step(ctx, proceed, optimizer, closure, **options)
        except RuntimeError as error:
            if isinstance(error, RefusedStepError) or refuses_absent(error):
                why = f"under {OPTION} a weight is NaN outside its block's forward and backward"
                blocks = f"write the classes of blocks without it, {OPTION}.blocks=[ClassName], or ~{OPTION}"
                error.args = (f"{error}; {why}: {blocks}",)
            if self._ring is not None and ctx.release is not None and not ctx.release.immediate:  # it is left out
                self._ring.rest()
            raise
        if self._ring is not None and self._ring.waits and "optimizer_step" not in self._readers:
            self._is_between = True
        elif self._ring is not None:
            self._ring.rest()
        return result

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Warn after the first batch if no block was called."""
        if not self._is_checked and self._ring is not None and not self._ring.copies:
            rank_zero_warn(
                f"weights_on_host: none of {', '.join(self._blocks)} was called as block(x), so their weights stayed on"
                f" the host; write the classes of those that are, {OPTION}.blocks=[ClassName]"
            )
        self._is_checked = True

    def checkpoint(self, ctx: Run) -> Checkpoint:
        """Return how optimizer states are loaded to the device that the weights come to."""
        return _States(ctx, self._ring)

    def leaving(self, ctx: Run, proceed: Callable[[], Any]) -> None:
        """Take the updates that blocks wait for while optimizer states are on the device."""
        self._settle()
        proceed()

    def _leave(self, blocks: Mapping[str, nn.Module]) -> None:
        restore_forwards(blocks.values(), Streamed)
        if self._ring is not None:
            self._ring.close()
        self._blocks = {}


class _AtRest:
    """Puts all numbers onto the host before a state dict is made or loaded; does nothing in copies and pickles."""

    def __init__(self, ring: WeightRing | None = None) -> None:
        self._ring = ring

    def __call__(self, *_: Any) -> None:
        if self._ring is not None:
            self._ring.rest()

    def __reduce__(self) -> Any:
        return _AtRest, ()


class _States(Checkpoint):
    """Moves loaded optimizer states to the device on which their parameters are updated."""

    def __init__(self, ctx: Run, ring: WeightRing | None) -> None:
        self._ctx, self._ring = ctx, ring

    @torch.no_grad()
    def load_states(self, proceed: Callable[..., Any], checkpoint: Mapping[str, Any]) -> None:
        """Load states; those that aren't placed on the host went to where the weights are between steps."""
        proceed(checkpoint)
        for optimizer in self._ctx.strategy.optimizers if self._ring is not None else ():
            placed: Mapping[Tensor, Any] = getattr(optimizer, "host_states", {})
            for p in parameters_of(optimizer):
                state = optimizer.state.get(p, {}) if p not in placed else {}
                for name, value in state.items():
                    if isinstance(value, Tensor) and name != "step":
                        state[name] = value.to(self._ctx.device)


def _refuse(ctx: Run) -> None:
    """Refuse steps of several backward passes."""
    if not ctx.module.automatic_optimization:
        raise ConflictError(f"{OPTION} and manual optimization, which keeps gradients until the step; write ~{OPTION}")
    _refuse_accumulation(ctx)


def _refuse_accumulation(ctx: Run) -> None:
    if ctx.training and ctx.window.accumulates:
        raise ConflictError(
            f"{OPTION} updates each block in the backward of one micro-batch, and"
            f" accumulate_grad_batches={ctx.window.factor}; write accumulate_grad_batches=1 and larger batches, or"
            f" ~{OPTION}"
        )


def _refuse_compiled(module: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    inside = {id(block) for block in blocks.values()}
    for name, each in module.named_modules():
        if is_compiled(each) and any(id(inner) in inside for inner in each.modules()):
            raise ConflictError(
                f"{OPTION}: {name or 'the whole module'} is compiled, and blocks get their weights as they run;"
                f" compile parts inside the blocks, or write ~{OPTION}"
            )
