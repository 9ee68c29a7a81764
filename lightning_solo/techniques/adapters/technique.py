"""Adapters: the module's weights are frozen, and small factors beside them are trained."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_solo.cards.lightning_callbacks import refuse_callbacks
from lightning_solo.errors import ConflictError, NothingToDoError, PresetError, listed, with_reasons
from lightning_solo.nn.adaptation import (
    AdapterConfig,
    adapter_configs,
    adapter_names,
    adapter_parameters,
    base_tensors,
    freeze,
    insert,
    use_adapter,
    whole_parameters,
)
from lightning_solo.nn.adapted import plain_modules
from lightning_solo.nn.adapter_merging import merge, merge_summary, remove_adapters
from lightning_solo.nn.adapter_targets import ALL_LINEAR, OPTION, feed_forward_outputs, named_modules_of, targets_of
from lightning_solo.nn.adapter_weights import base_record, quantized_record
from lightning_solo.nn.quantized import count_parameters
from lightning_solo.nn.rollback import Unchanged
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.adapters.card import CARD, Settings
from lightning_solo.techniques.adapters.checkpoints import AdapterCheckpoint
from lightning_solo.units import format_bytes

WATCHED = 50
"""Batches after which adapters without a gradient are named."""


class Adapters(Technique, Settings):
    """Trains adapters of peft, and freezes all other weights.

    After the fit ``requires_grad`` is as before. The module keeps its adapters and answers as trained;
    ``solo.merge_adapters(module)`` adds them to its weights, and ``solo.remove_adapters(module)`` takes them out.
    With ``after_fit="merge"`` they are merged when the fit ends.
    """

    phase = CARD.phase
    joins_evaluation = True  # which may load a checkpoint of adapters

    def _init_state(self) -> None:
        self.config: AdapterConfig | None = None
        self.base: Any = None
        self.buffers: Unchanged | None = None
        self.loaded: list[str] = []
        self.merged: dict[str, Any] | None = None
        self._left_out: dict[str, str] = {}
        self._inserted = False
        self._unreached: dict[str, Any] = {}
        self._batches = 0

    # --- joining ---

    def transform(self, ctx: Run) -> None:
        """Put the adapters in, in fp32, unless a checkpoint or an earlier fit has; freeze everything else."""
        kept = lambda module: adapter_parameters(module).values()  # noqa: E731
        ctx.undo.enter_context(patches.conversion_around(ctx.strategy.precision_plugin, kept))
        if not ctx.training:
            return
        refuse_callbacks(OPTION, frozenset({"layers", "trained_parameters"}), ctx.trainer.callbacks)
        if any(isinstance(other, Adapters) and other is not self for other in ctx.techniques):
            raise ConflictError("two Adapters in one run: drop one; a second fit trains another adapter_name")
        self.enter(ctx)
        assert self.config is not None
        flags = {name: p.requires_grad for name, p in base_tensors(ctx.module).items()}
        freeze(ctx.module, self.config)
        ctx.undo.callback(_restore, ctx.module, flags)
        self._log(ctx)

    def enter(self, ctx: Run) -> None:
        """Put the adapters into the module of a run, once, and register how they are left."""
        if self._inserted:
            return
        module = ctx.module
        self.config = self._config_for(module)
        self.base = base_record(module, self.config)
        self.merged, self.buffers, self.loaded = None, None, []
        if self.adapter_name in adapter_names(module):
            use_adapter(module, self.adapter_name)
            ctx.undo.callback(self._leave, ctx, new=False)
        else:
            insert(module, self.config)
            ctx.undo.callback(self._leave, ctx, new=True)
        self._inserted = True

    def _config_for(self, module: nn.Module) -> AdapterConfig:
        present = adapter_configs(module)
        if foreign := [name for name in adapter_names(module) if name not in present]:
            raise ConflictError(
                f"{OPTION} and adapters that are in the module already ({', '.join(foreign)}), which something else has"
                f" put there: drop that, or write ~{OPTION}"
            )
        targets = targets_of(module, self.targets, self.method)
        whole = named_modules_of(module, self.modules_to_save, f"{OPTION}.modules_to_save")
        for name in whole:
            inside = [each for each in targets.layers if f"{each}.".startswith(f"{name}.")]
            if self.targets == ALL_LINEAR and len(inside) < len(targets.layers):
                for each in inside:
                    del targets.layers[each]
            elif inside:
                raise ConflictError(
                    f"{OPTION}.modules_to_save trains {name} whole, and {OPTION}.targets gives {listed(inside)} an"
                    " adapter; write other targets, or leave it out of modules_to_save"
                )
        trained = tuple(f"{name}." for name in whole)
        self._left_out = {name: why for name, why in targets.left_out.items() if not f"{name}.".startswith(trained)}
        saved = whole_parameters(module, tuple(whole))  # refuses what can't be trained
        config = AdapterConfig(
            name=self.adapter_name,
            method=self.method,
            r=self.r,
            alpha=self.alpha,
            dropout=self.dropout,
            layers=tuple(targets.layers),
            feed_forward=tuple(feed_forward_outputs(module, targets.layers)) if self.method == "ia3" else (),
            modules_to_save=tuple(whole),
            tokens={name: rows for name, rows in self._rows(module).items() if f"{name}.weight" not in saved},
        )
        if self.adapter_name in present and present[self.adapter_name] != config:
            changed = present[self.adapter_name].changed(config)
            raise ConflictError(
                f"the module has an adapter {self.adapter_name!r} from an earlier fit, with {listed(changed)}; write"
                f" these settings, another {OPTION}.adapter_name, or first solo.merge_adapters(module)"
            )
        return config

    def _rows(self, module: nn.Module) -> dict[str, tuple[int, ...]]:
        """Return name of an embedding or head -> rows to train: the settings' and those of the module's new tokens."""
        own = self._rows_of(module, getattr(module, "trainable_token_indices", ()))
        rows = self._rows_of(module, self.trainable_token_indices or ())
        return {name: tuple(sorted({*own.get(name, ()), *rows.get(name, ())})) for name in {**own, **rows}}

    def _rows_of(self, module: nn.Module, rows: Any) -> dict[str, tuple[int, ...]]:
        option = f"{OPTION}.trainable_token_indices"
        if not rows:
            return {}
        if self.method == "ia3":
            raise ConflictError(f"{OPTION}.method=ia3 and the module's new tokens: IA3 has no rows; write method=lora")
        if isinstance(rows, Mapping):
            names = {each: named_modules_of(module, [each], option) for each in rows}
            return {name: tuple(rows[each]) for each, tables in names.items() for name in tables}
        sizes = {name: part.num_embeddings for name, part in plain_modules(module) if isinstance(part, nn.Embedding)}
        if not sizes:
            raise NothingToDoError(f"{option}={list(rows)[:3]}: {type(module).__name__} has no embedding")
        largest = [name for name, size in sizes.items() if size == max(sizes.values())]
        if len(largest) > 1:
            raise PresetError(
                f"{option}: there are several embeddings of {sizes[largest[0]]} rows ({listed(largest)}); write"
                f" {option}={{{largest[0]}: {list(rows)[:3]}}}"
            )
        return {largest[0]: tuple(rows)}

    def _log(self, ctx: Run) -> None:
        assert self.config is not None
        trained = [p for p in ctx.module.parameters() if p.requires_grad]
        words = (
            f"adapters: {self.method} in {len(self.config.layers)} layers trains {sum(p.numel() for p in trained):,} of"
            f" {count_parameters(ctx.module):,} parameters ({format_bytes(sum(p.nbytes for p in trained))})"
        )
        if self._left_out:
            named = with_reasons(self._left_out, 5)
            words += f"; without an adapter: {named}"
            if any(reason.endswith(", an output head") for reason in self._left_out.values()):
                words += f" (a new head is trained by {OPTION}.modules_to_save)"
        ctx.info(words)

    # --- the fit ---

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note from now on which buffers change, such as running statistics, since checkpoints hold them."""
        super().on_train_start(trainer, pl_module)
        self.buffers = Unchanged(dict(pl_module.named_buffers()))
        self._unreached = {}
        self._batches = 0
        if self.base is not None:
            self.base |= quantized_record(pl_module)
        if self.ctx is None or self.config is None:
            return
        for name, p in adapter_parameters(pl_module, self.config.name).items():
            self._unreached[name] = p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._reached, name)
            )
            self.ctx.undo.callback(self._unreached[name].remove)

    def _reached(self, name: str, p: Tensor) -> None:
        self._unreached.pop(name).remove()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Warn once of adapters that never had a gradient."""
        super().on_train_batch_end(trainer, pl_module, *args)
        self._batches += 1
        if self._batches == WATCHED:
            self._warn()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Warn at the end of a shorter run."""
        super().on_train_end(trainer, pl_module)
        if self._batches < WATCHED:
            self._warn()

    def _warn(self) -> None:
        layers = dict.fromkeys(
            name.rpartition(f".{self.adapter_name}")[0].rpartition(".")[0] for name in self._unreached
        )
        if layers:
            warnings.warn(
                f"adapters: {listed(layers)} had no gradient in {self._batches} batches: the module doesn't call these"
                f" layers, or reads their weights itself; write {OPTION}.targets without them",
                stacklevel=2,
            )

    def checkpoint(self, ctx: Run) -> AdapterCheckpoint:
        """Return how adapters are saved and loaded."""
        return AdapterCheckpoint(ctx, self)

    # --- leaving ---

    def _leave(self, ctx: Run, new: bool) -> None:
        self._inserted = False
        module, config = ctx.module, self.config
        assert config is not None
        if self.after_fit == "keep" and (ctx.is_set_up or not new):
            return
        if not ctx.is_set_up and config.method != "pissa":
            if new:
                remove_adapters(module)
            return
        self.merged = AdapterCheckpoint(ctx, self).own_weights(module.state_dict())
        ctx.info(merge_summary(merge(module)))


def _restore(module: nn.Module, flags: Mapping[str, bool]) -> None:
    for name, p in base_tensors(module).items():
        p.requires_grad_(flags.get(name, True))
