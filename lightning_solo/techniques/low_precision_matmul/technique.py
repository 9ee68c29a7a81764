"""Products in low precision: linear layers of the model's blocks multiply in 8 or 4 bits, or sum in fp16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_solo.errors import CapabilityError, NothingToDoError
from lightning_solo.nn.blocks import counted, named_blocks
from lightning_solo.nn.forwards import restore_forwards
from lightning_solo.nn.low_precision import Product, linear_layers, multiply_in_low_precision, product
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.low_precision_matmul.card import CARD, FORMATS, Settings, formats_of


class LowPrecisionMatmul(Technique, Settings):
    """Multiplies in low precision in the linear layers of the model's blocks during a fit.

    Weights, gradients, optimizer, checkpoints and validation are unchanged, and so is everything outside the blocks,
    such as the output head.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._layers: dict[str, Any] = {}

    @property
    def layers(self) -> tuple[str, ...]:
        """Qualified names of the layers that multiply in low precision; empty outside a fit."""
        return tuple(self._layers)

    def transform(self, ctx: Run) -> None:
        """Replace the layers' products."""
        self._check(ctx.device)
        blocks = named_blocks(ctx.module, self.blocks, "callback.low_precision_matmul.blocks")
        multiply = product(self.format, ctx.device)
        layers, left_out = linear_layers(blocks, multiply.multiple)
        named = ", ".join(f"{name} ({sizes})" for name, sizes in left_out.items())
        if not layers:
            lacks = (
                f"no block has a linear layer with sizes that are multiples of {multiply.multiple}; there are {named}"
                if named
                else f"no block ({counted(blocks.values())}) has a plain nn.Linear; the weights are in"
                f" {', '.join(_kinds_with_matrices(blocks.values())) or 'none'}"
            )
            raise NothingToDoError(
                f"low_precision_matmul: {lacks}; write callback.low_precision_matmul.blocks=[ClassName] of other"
                " classes, or ~callback.low_precision_matmul"
            )
        ctx.undo.callback(self._layers.clear)
        ctx.undo.callback(restore_forwards, layers.values(), Product)
        self._layers.update(layers)
        multiply_in_low_precision(layers.values(), multiply)
        rank_zero_info(
            f"low precision: {counted(layers.values())} multiply in {self.format}"
            f"{f'; left out, as sizes must be multiples of {multiply.multiple}: {named}' if named else ''}"
        )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        is_first = trainer.fit_loop.epoch_loop.total_batch_idx == 0
        if is_first and self._layers and not any(layer.training for layer in self._layers.values()):
            raise NothingToDoError(
                f"low_precision_matmul: {', '.join(self._layers)} are in eval mode, which doesn't multiply in"
                " low precision; call .train() on their module before the fit (Hugging Face's from_pretrained leaves a"
                " model in eval mode), or write ~callback.low_precision_matmul"
            )

    def _check(self, device: torch.device) -> None:
        if device.type != "cuda":
            if not self.allow_cpu:
                raise CapabilityError(CARD.requires[1].words(self))
            return
        capability, label = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
        if self.format in (able := formats_of(capability, label)):
            return
        least = FORMATS[self.format].capability
        reason = (
            f"{label} has compute capability {'.'.join(map(str, capability))}, and {self.format} needs"
            f" {'.'.join(map(str, least))}"
            if capability < least
            else f"{label} adds products of fp16 in fp32 as fast as in fp16; only GeForce cards gain by {self.format}"
        )
        option = "callback.low_precision_matmul"
        remedies = [*(f"{option}.format={name}" for name in able), f"~{option}"]
        raise CapabilityError(
            f"callback.low_precision_matmul.format={self.format}: {reason}; write {' or '.join(remedies)}"
        )


def _kinds_with_matrices(blocks: Iterable[nn.Module]) -> list[str]:
    """Return the classes of the layers in blocks that have weights of at least two dimensions."""
    parts = (part for block in blocks for part in block.modules())
    kinds = {type(part).__name__: None for part in parts if any(p.ndim > 1 for p in part.parameters(recurse=False))}
    return list(kinds)
