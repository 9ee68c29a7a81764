"""Notes of a trace: where calls of blocks begin and end, in forward and in backward."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_solo.nn.blocks import named_blocks
from lightning_solo.nn.streaming import hooked
from lightning_solo.planner.notes import MARK, label
from lightning_solo.planner.tracer import Cost, Tracer

FORWARD, AFTER, BACKWARD = "forward", "after", "backward"


class BlockMarks(Callback):
    """Notes where calls of the module's repeated blocks begin and end, by hooks that change no memory."""

    def __init__(self, tracer: Tracer) -> None:
        self.blocks: list[str] = []
        self._tracer = tracer
        self._calls: Counter[str] = Counter()
        self._begun: set[tuple[str, int]] = set()  # calls whose backward has begun
        self._hooks: list[RemovableHandle] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Put hooks on the blocks."""
        for name, block in named_blocks(pl_module).items():
            self.blocks.append(name)
            self._hooks.append(block.register_forward_pre_hook(partial(self._before, name)))
            self._hooks.append(block.register_forward_hook(partial(self._after, name)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove the hooks of the blocks."""
        while self._hooks:
            self._hooks.pop().remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the hooks of the blocks."""
        self.on_train_end(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count calls anew."""
        self._calls.clear()
        self._begun.clear()

    def _before(self, name: str, block: nn.Module, args: Any) -> None:
        self._mark(FORWARD, name, self._calls[name])

    def _after(self, name: str, block: nn.Module, args: Any, output: Any) -> None:
        call = self._calls[name]
        self._calls[name] += 1
        self._mark(AFTER, name, call)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                hooked(tensor).register_hook(partial(self._backward, name, call))  # type: ignore[no-untyped-call]

    def _backward(self, name: str, call: int, gradient: Tensor) -> None:
        if (name, call) not in self._begun:
            self._begun.add((name, call))
            self._mark(BACKWARD, name, call)

    def _mark(self, kind: str, name: str, call: int) -> None:
        self._tracer.note(MARK, kind)
        self._tracer.costs.append(Cost(0, 0, torch.uint8, label(MARK, kind, call), self.blocks.index(name)))
