"""Quantized base: frozen linear weights are stored in 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_solo.cards.lightning_callbacks import refuse_callbacks
from lightning_solo.errors import CheckpointError, ConflictError, with_reasons
from lightning_solo.nn.quantizable import OPTION, Choice, chosen_weights
from lightning_solo.nn.quantized import (
    HOST,
    QuantizedLinear,
    QuantizedWeight,
    quantize,
    quantized,
    quantized_weights_of,
    weights_in,
    with_plain_weights,
)
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Checkpoint, Technique
from lightning_solo.techniques.quantized_base.card import CARD, FROZEN, Settings
from lightning_solo.units import format_bytes

RECORD = "quantized_base"
"""The key of a checkpoint that holds the codes and scales of quantized weights."""


class QuantizedBase(Technique, Settings):
    """Stores frozen linear weights in 4 or 8 bits during a fit, and computes with them as with the rounded weights.

    Embeddings and output heads may be stored in 8 bits, or stay on the host.

    After the fit the layers have plain weights again, which are the rounded ones. A module whose weights are quantized
    before the fit, by ``solo.load_quantized``, keeps them so.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._weights: dict[str, QuantizedWeight] = {}
        self._settings: dict[int, tuple[str, str]] = {}  # id of a weight -> the setting of its format, and its value

    @property
    def weights(self) -> Mapping[str, QuantizedWeight]:
        """Qualified name -> weight that is quantized by this technique; empty outside a fit."""
        return dict(self._weights)

    def transform(self, ctx: Run) -> None:
        """Quantize the weights one by one, on the device of the run."""
        refuse_callbacks(OPTION, frozenset({"layers", "trained_parameters"}), ctx.trainer.callbacks)
        before = quantized_weights_of(ctx.module)
        if copies := [name.rpartition(".")[0] for name in before if "modules_to_save" in name.split(".")]:
            raise ConflictError(
                f"callback.quantized_base: {copies[0]} is a copy of a layer in 4 or 8 bits, and modules_to_save would"
                " train it, which has no effect; leave it out of modules_to_save, or don't quantize this layer"
            )
        patterns = None if self.layers == FROZEN else [self.layers] if isinstance(self.layers, str) else self.layers
        tables = {"embeddings": self.embeddings, "head": self.head}
        choice = chosen_weights(ctx.module, patterns, **tables, required=not before)
        ctx.undo.callback(self._weights.clear)
        ctx.undo.callback(self._settings.clear)
        for part in ctx.module.modules():
            if isinstance(part, QuantizedLinear) and (weight := weights_in(part)["weight"]).format == HOST:
                weight.pin(ctx.device)
        by_tensor: dict[int, QuantizedWeight] = {}
        bytes_before = sum(p.nbytes for p in {id(p): p for p in choice.parameters().values()}.values())
        for part, parameters in choice.modules.values():
            weights = {}
            for parameter_name in parameters:
                p = part._parameters[parameter_name]
                assert p is not None
                if id(p) not in by_tensor:  # tied weights stay tied
                    setting = choice.tables.get(id(p), ("format", self.format))
                    made = quantized(p.detach(), setting[1], ctx.device)
                    by_tensor[id(p)] = made.to(p.device)  # so that no more than one is there before the module moves
                    self._settings[id(made)] = setting
                weights[parameter_name] = by_tensor[id(p)]
            ctx.undo.callback(quantize(part, weights))
        already, now = {id(weight): weight for weight in before.values()}, quantized_weights_of(ctx.module)
        self._weights.update({name: weight for name, weight in now.items() if id(weight) not in already})
        self._log(ctx, choice, bytes_before, list(by_tensor.values()), list(already.values()))

    def _log(self, ctx: Run, choice: Choice, before: int, weights: list[QuantizedWeight], already: list[Any]) -> None:
        parts = []
        if hosted := [weight for weight in weights if weight.format == HOST]:
            size = format_bytes(sum(weight.nbytes for weight in hosted))
            parts.append(f"{len(hosted)} frozen embeddings and heads stay on the host, {size}")
            weights, before = [w for w in weights if w.format != HOST], before - sum(w.nbytes for w in hosted)
        if count := sum(weight.shape.numel() for weight in weights):
            now, forms = sum(weight.nbytes for weight in weights), " and ".join(sorted({w.format for w in weights}))
            parts.append(
                f"{len(weights)} frozen weights in {forms} take {format_bytes(now)} instead of {format_bytes(before)},"
                f" {now / count:.3f} bytes per number; Lightning's table of parameters leaves out these {count:,}"
                " numbers"
            )
        if already:
            parts.append(f"{len(already)} weights were quantized before")
        if choice.left_out:
            named = with_reasons(choice.left_out, 5)
            whole = before + sum(weight.shape.numel() * weight.dtype.itemsize for weight in already)
            share = choice.left_bytes / max(1, choice.left_bytes + whole)
            parts.append(f"{share:.0%} of the bytes of frozen weights stay as they are: {named}")
        ctx.info(f"quantized_base: {'; '.join(parts)}")

    def checkpoint(self, ctx: Run) -> Checkpoint:
        """Return how quantized weights are saved and loaded."""
        return _QuantizedCheckpoint(self._weights, self._settings)


class _QuantizedCheckpoint(Checkpoint):
    """Plain weights under their names, which any module loads, and the codes beside them, for an exact resume.

    Quantizing the rounded weights again would move their scales a little.
    """

    def __init__(self, weights: Mapping[str, QuantizedWeight], settings: Mapping[int, tuple[str, str]]) -> None:
        self._weights, self._settings = weights, settings

    def saved_weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the weights with dequantized ones instead of codes and scales."""
        return with_plain_weights(weights, self._weights)

    def saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint with the codes and scales of the weights that it holds."""
        held = {
            name: dict(weight.state_dict())
            for name, weight in self._weights.items()
            if weight.rounding and name in checkpoint["state_dict"]
        }
        return {**checkpoint, RECORD: held} if held else checkpoint

    def load_states(self, proceed: Any, checkpoint: Mapping[str, Any]) -> None:
        """Load codes and scales, and Lightning's states."""
        for name, stored in checkpoint.get(RECORD, {}).items():
            if (weight := self._weights.get(name)) is None:
                continue
            if weight.format != (form := "nf4" if "scale_codes" in stored else "int8"):
                setting, value = self._settings[id(weight)]
                raise CheckpointError(
                    f"the checkpoint has {name} in {form}, and callback.quantized_base.{setting}={value} asks for"
                    f" another format; write callback.quantized_base.{setting}={form}, as in the run that saved it"
                )
            weight.load_state_dict(stored)
        proceed(checkpoint)
