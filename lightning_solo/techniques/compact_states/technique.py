"""Compact states: weights split into bf16 and corrections, moments in 8 bits, on the device or the host."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.errors import ConflictError, listed
from lightning_solo.memory.sharded_tensors import local
from lightning_solo.nn.rollback import Unchanged
from lightning_solo.nn.spectral_norms import spectral_norms
from lightning_solo.optim import back_ends
from lightning_solo.optim.back_end_facts import BACK_ENDS
from lightning_solo.optim.checkpoint_masters import bits_of
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.param_groups import parameters_of
from lightning_solo.optim.split_weights import STOCHASTIC
from lightning_solo.seams import patches
from lightning_solo.seams.engines import shards_parameters
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.compact_states.card import CARD, MIXED_SHARDS, Settings
from lightning_solo.techniques.compact_states.checkpoints import WITH_MASTERS, CompactCheckpoint
from lightning_solo.techniques.compact_states.states import convert, host_has_room, require_room
from lightning_solo.techniques.compact_states.weights import WeightSplit
from lightning_solo.units import format_bytes

BF16 = ("bf16-true", "bf16-mixed")
WATCHED = 5
"""Batches after which frozen weights are no longer watched."""


class CompactStates(Technique, Settings):
    """Trains with compact weights and optimizer states, with any AdamW or Adam of ``configure_optimizers``.

    With torch's other optimizers that step each parameter independently the weights are as compact, the states in fp32.

    Raises:
        ConflictError: bits or a budget are combined with a back end that has none.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._weights = WeightSplit()
        self._normed: set[Tensor] = set()  # weights of layers with spectral norms
        self._watched: Unchanged | None = None
        self._batches_watched = 0
        self._settles = False  # whether the first step will decide which states stay on the device

    # --- weights ---

    def _is_split(self, p: Tensor, precision: str) -> bool:
        if not p.requires_grad or p.dtype != torch.float32 or precision not in BF16:
            return False
        if self.back_end != "own" and not BACK_ENDS[self.back_end].bf16_weights:
            return False
        # under autocast norms need fp32 weights, spectral norms among them; vectors take few bytes
        return precision == "bf16-true" or (p.dim() > 1 and p not in self._normed)

    @contextmanager
    def building(self, ctx: Run) -> Iterator[None]:
        """Build ``configure_model`` with fp32 weights on a real device, and split each when later ones are created.

        Lightning's own context would create bf16 weights from other random numbers, so it is left out.
        """
        precision = ctx.precision
        if precision not in (*BF16, "32-true"):  # no weight is split
            yield
            return

        def splits(p: Tensor) -> bool:
            # bf16-true leaves nothing in fp32; frozen weights, often frozen later, need no correction
            return precision == "bf16-true" or self._is_split(p, precision)

        bits = 24 if isinstance(self.master_bits, str) else self.master_bits
        keep = None if self.budget is None else torch.device("cpu")  # the optimizer moves them from there
        ctx.undo.callback(self._join, ctx)
        with (
            patches.without_module_init_context(ctx.strategy.precision_plugin),
            self._weights.building(bits, splits, keep),
        ):
            yield

    def transform(self, ctx: Run) -> None:
        """Split the weights one by one, before Lightning's conversion would drop their lower bits."""
        precision = ctx.precision
        if message := self.precision_refusal(precision):
            raise ConflictError(message)
        if shards_parameters(ctx.strategy):
            if precision == "bf16-mixed":
                raise ConflictError(f"callback.compact_states and strategy=fsdp: {MIXED_SHARDS}")
            if others := [name for name, p in ctx.module.named_parameters() if not p.is_contiguous()]:
                raise ConflictError(
                    f"callback.compact_states, strategy=fsdp and {listed(others)}: states are stored in the order of"
                    " memory, which shards change for weights that aren't stored row by row; write"
                    " nn.Parameter(weight.contiguous())"
                )
        ctx.undo.callback(self._join, ctx)
        self._normed = {p for layer in spectral_norms(ctx.module).values() for p in layer.parameters()}
        ctx.undo.callback(self._normed.clear)
        if precision == "bf16-true" and (frozen := sum(p.numel() for p in self._weights.frozen(ctx.module))):
            ctx.info(
                f"compact_states: {frozen:,} frozen weights are rounded to bf16 for good, which saves"
                f" {format_bytes(2 * frozen)}; precision=bf16-mixed keeps them in fp32"
            )
        bits = self.master_bits if self.back_end == "own" else STOCHASTIC  # without corrections of ours
        self._weights.split(ctx.module, bits, lambda p: self._is_split(p, precision), to_bf16=precision == "bf16-true")

    def _join(self, ctx: Run) -> None:
        """Make weights fp32 again, unless the run was set up."""
        if ctx.is_set_up:
            self._weights.settle()
        else:
            getattr(ctx.strategy, "make_whole", lambda: None)()  # a shard can't take another type
            self._weights.follow(ctx.module)
            self._weights.join(ctx.strategy.optimizers)

    # --- states ---

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch frozen weights in bf16, which an average of other weights would move too little."""
        super().on_train_start(trainer, pl_module)
        frozen = {name: p for name, p in pl_module.named_parameters() if not p.requires_grad}
        self._watched = Unchanged({name: p for name, p in frozen.items() if p.dtype is torch.bfloat16})
        self._batches_watched = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Warn once of frozen weights that change during the first batches."""
        super().on_train_batch_end(trainer, pl_module, *args)
        if self._watched is None or self._batches_watched == WATCHED:
            return
        self._batches_watched += 1
        if names := self._watched.changed():
            self._watched = None
            warnings.warn(
                f"frozen weights in bf16 change during training ({listed(names)}): a moving average in bf16 loses"
                " updates below 1/256 of a weight; write precision=bf16-mixed, which keeps frozen weights in fp32",
                stacklevel=2,
            )

    def optimizers(self, ctx: Run, optimizers: list[Optimizer], schedulers: Sequence[Any]) -> list[Optimizer]:
        """Convert the optimizers, after Lightning's set-up, which moves all states to the device."""
        self._weights.follow(ctx.module)
        corrections = self._weights.corrections
        require_room(optimizers, self, corrections, ctx.module, ctx.device)

        def put(converted: list[Optimizer]) -> None:
            ctx.strategy.optimizers = list(converted)

        compact = convert(optimizers, schedulers, self, corrections, put)
        originals = {new: type(old) for old, new in zip(optimizers, compact, strict=True)}
        ctx.undo.enter_context(patches.learning_rates_named(ctx.trainer, originals))
        for optimizer in compact:  # for messages; names in the groups would refuse groups that come without
            vars(optimizer)["parameter_names"] = {p: name for name, p in ctx.module.named_parameters()}
        corrections.clear()
        self._settles = self._will_settle(compact)
        parameters = [*map(local, ctx.module.parameters())]
        weights, count = sum(p.nbytes for p in parameters), max(1, sum(p.numel() for p in parameters))
        ctx.info(
            f"compact_states: weights, {weights / count:.2f} bytes per parameter: {format_bytes(weights)} on the device"
        )
        self._log_states(ctx, compact)
        return compact

    def _will_settle(self, optimizers: Sequence[Optimizer]) -> bool:
        return any(not optimizer.is_settled for optimizer in optimizers if isinstance(optimizer, CompactAdamW))

    def _log_states(self, ctx: Run, optimizers: Sequence[Optimizer]) -> None:
        for number, optimizer in enumerate(optimizers):
            whose = f"optimizer states of optimizer {number}" if len(optimizers) > 1 else "optimizer states"
            if isinstance(optimizer, WITH_MASTERS):
                ctx.info(f"compact_states: {whose}, {optimizer.summary()}")
            elif self.back_end != "own":
                ctx.info(f"compact_states: {whose}, {back_ends.summary(optimizer)}")

    def step(
        self, ctx: Run, proceed: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any], **options: Any
    ) -> Any:
        """Step as Lightning does, and log once where the states are stored, after that is decided."""
        result = proceed(optimizer, closure, **options)
        if self._settles and not self._will_settle(ctx.strategy.optimizers):
            self._settles = False
            self._log_states(ctx, ctx.strategy.optimizers)
        return result

    def _log_bits(self, ctx: Run) -> None:
        """Log which bits the module's weights have after the fit, and the call that returns their master weights."""
        every = list(ctx.module.parameters())
        if not (parts := [p for p in every if p.dtype == torch.bfloat16]):
            return
        held = {p: bits_of(each, p) for each in ctx.strategy.optimizers for p in parameters_of(each)}
        words = f"{len(parts)} of the module's {len(every)} weights are bf16"
        if (bits := max(held.get(p, 16) for p in parts)) > 16:
            words += (
                f", rounded from master weights of {bits} bits; solo.export_weights(module) returns those in fp32, and"
                ' output="weights.safetensors" writes them'
            )
        else:
            words += "; there are no master weights"
        ctx.info(f"compact_states: at the end of the fit {words}")

    def leaving(self, ctx: Run, proceed: Callable[[], Any]) -> None:
        """Move weights and states to the host if they fit there."""
        self._log_bits(ctx)
        strategy = ctx.strategy
        if self.budget is None or host_has_room(ctx.module, strategy.optimizers):
            proceed()
            return
        warnings.warn(
            "the host has no room for the weights and optimizer states on the device; they stay there", stacklevel=2
        )
        with patches.all_stays(strategy):
            proceed()

    def checkpoint(self, ctx: Run) -> CompactCheckpoint:
        """Return how compact states are saved and loaded."""
        return CompactCheckpoint(ctx, self._weights, self.checkpoint_weights)
