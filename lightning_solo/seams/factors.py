"""The base of techniques that replace layers of a run's module by factorized ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from lightning_solo.cards.lightning_callbacks import refuse_callbacks
from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError, with_reasons
from lightning_solo.nn.blocks import counted
from lightning_solo.nn.factorized_layers import Factorized
from lightning_solo.nn.factorizing import (
    RECORD,
    Change,
    factorized,
    forget_weights,
    merge_factors,
    record_of,
    restructure,
    take_back,
)
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Checkpoint, Technique
from lightning_solo.units import format_bytes


class Factorizing(Technique):
    """Replaces layers by factorized ones: before optimizers are made, and in a resumed run before weights are loaded.

    Attributes:
        kinds: of the layers that it makes.
        option: path of its settings.
        rank: the setting, None where it isn't written.
        after_fit: "keep" or "merge".
    """

    kinds: ClassVar[tuple[str, ...]]
    option: ClassVar[str]
    joins_evaluation = True  # which may load a checkpoint with factors
    rank: int | float | None
    after_fit: str

    def _init_state(self) -> None:
        self._is_in = False
        self._new: dict[str, Factorized] = {}  # whose layers have their weights of before until training starts
        self._merged: dict[str, Factorized] = {}

    def factorize(self, ctx: Run, rank: int | float) -> Change:
        """Replace the layers of a module with dense weights."""
        raise NotImplementedError

    # --- a run ---

    def transform(self, ctx: Run) -> None:
        """Replace layers, unless a checkpoint or an earlier fit has.

        Raises:
            NothingToDoError: no rank is written, or there is no layer to replace.
            PresetError: factors would be larger than the layer.
            ConflictError: a layer can't be replaced; or a callback of Lightning copies the module before.
        """
        if not ctx.training:
            return
        refuse_callbacks(self.option, frozenset({"layers"}), ctx.trainer.callbacks)
        self._enter(ctx, None)

    def _enter(self, ctx: Run, record: Mapping[str, Any] | None) -> None:
        """Replace layers once, and register how the run leaves them."""
        if self._is_in:
            return
        name, self._merged = self.option.rpartition(".")[2], {}
        if present := factorized(ctx.module, self.kinds):
            ctx.info(f"{name}: {counted(present.values())} of an earlier fit are trained further")
            self._refuse_other_ranks({each: layer.rank for each, layer in present.items()}, "the module's layers have")
        elif record is not None:
            try:
                restructure(ctx.module, record)
            except AttributeError as error:
                raise CheckpointError(f"the checkpoint has factors of other layers ({error}): load it into a module of"
                                      " the class that was trained") from error  # fmt: skip
        elif self.rank is None:
            raise NothingToDoError(
                f"{self.option} has no rank; write {self.option}.rank=64, or a share of the energy as 0.95"
            )
        else:
            change = self.factorize(ctx, self.rank)
            self._new = change.layers
            ranks = sorted({layer.rank for layer in change.layers.values()})
            left = with_reasons(change.left_out, 5)
            ctx.info(
                f"{name}: {counted(dict.fromkeys(change.layers.values()))} of rank"
                f" {ranks[0] if len(ranks) == 1 else f'{ranks[0]} to {ranks[-1]}'}; the module's parameters take"
                f" {format_bytes(change.after)} instead of {format_bytes(change.before)}"
                f"{f'; left as they are: {left}' if left else ''}"
            )
        self._is_in = True
        ctx.undo.callback(self._leave, ctx)

    def _refuse_other_ranks(self, ranks: Mapping[str, int], what: str) -> None:
        if not isinstance(self.rank, int):
            return
        if other := {name: rank for name, rank in ranks.items() if rank != self.rank}:
            name, rank = next(iter(other.items()))
            raise ConflictError(
                f"{self.option}.rank={self.rank}, and {what} another one: {name} {rank}; write"
                f" {self.option}.rank={rank}, or call solo.merge_factors(module) before a new fit"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Drop the weights that the layers had."""
        super().on_train_start(trainer, pl_module)
        forget_weights(self._new.values())
        self._new = {}

    def _leave(self, ctx: Run) -> None:
        self._is_in = False
        if self._new:  # nothing was trained
            take_back(ctx.module, self._new.values())
            self._new = {}
            return
        if self.after_fit == "merge":
            self._merged = factorized(ctx.module, self.kinds)
            merge_factors(ctx.module, self.kinds)

    # --- checkpoints ---

    def checkpoint(self, ctx: Run) -> Checkpoint:
        """Return how factors are saved and loaded."""
        return FactorCheckpoint(ctx, self)


class FactorCheckpoint(Checkpoint):
    """Saves factors under their names, with the forms of the layers, from which a resumed run builds them."""

    def __init__(self, ctx: Run, technique: Factorizing) -> None:
        self._ctx = ctx
        self._technique = technique

    def saved_weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the weights. After a fit that merged factors they replace the products, as the optimizer has states of
        factors.
        """
        if not self._technique._merged:
            return weights
        for name, layer in self._technique._merged.items():
            weights.pop(f"{name}.weight", None)
            weights.pop(f"{name}.bias", None)
            weights |= {f"{name}.{own}": value for own, value in layer.state_dict().items()}
        return weights

    def saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint with the forms of the layers, beside those of other techniques."""
        technique = self._technique
        if not (layers := technique._merged or factorized(self._ctx.module, technique.kinds)):
            return checkpoint
        record, others = record_of(layers), checkpoint.get(RECORD, {"layers": {}, "tied": {}})
        return {**checkpoint, RECORD: {key: {**others[key], **record[key]} for key in record}}

    @contextmanager
    def loading_weights(self) -> Iterator[None]:
        """Make the module's layers those of the checkpoint, and load it.

        Raises:
            CheckpointError: the checkpoint has no factors, or those of other layers.
            ConflictError: they have another rank than the settings.
        """
        technique = self._technique
        record = patches.loaded_checkpoint(self._ctx.trainer).get(RECORD, {"layers": {}, "tied": {}})
        mine = {name: each for name, each in record["layers"].items() if each["form"]["kind"] in technique.kinds}
        if not mine and self._ctx.training:
            raise CheckpointError(
                f"the checkpoint has no factors, so a run with {technique.option} can't continue it; to factorize its"
                " weights, load them before the fit: module.load_state_dict(torch.load(path)['state_dict'])"
            )
        if mine:
            ranks = {name: each["form"]["rank"] for name, each in mine.items()}
            technique._refuse_other_ranks(ranks, "the checkpoint's layers have")
            inside = tuple(f"{name}." for name in mine)
            tied = {name: first for name, first in record["tied"].items() if name.startswith(inside)}
            technique._enter(self._ctx, {"layers": mine, "tied": tied})
        yield
