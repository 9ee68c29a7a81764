"""Marks of a trace: where calls of blocks begin and end, in forward and in backward."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_solo.nn.blocks import named_blocks
from lightning_solo.planner.tracer import Tracer

FORWARD, AFTER, BACKWARD = "forward", "after", "backward"


class Mark(NamedTuple):
    """A place in a trace: the beginning or the end of a block's forward, or the beginning of its backward.

    Args:
        event, cost: numbers of events and costs before it.
        kind: `FORWARD`, `AFTER` or `BACKWARD`.
        block: name of the block.
        call: number of its call in the micro-batch.
    """

    event: int
    cost: int
    kind: str
    block: str
    call: int


class BlockMarks(Callback):
    """Records the marks of the module's repeated blocks, by hooks that change no memory."""

    def __init__(self, tracer: Tracer) -> None:
        self.marks: list[Mark] = []
        self._tracer = tracer
        self._calls: Counter[str] = Counter()
        self._begun: set[tuple[str, int]] = set()  # calls whose backward has begun
        self._hooks: list[RemovableHandle] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Put hooks on the blocks."""
        for name, block in named_blocks(pl_module).items():
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
                tensor.register_hook(partial(self._backward, name, call))  # type: ignore[no-untyped-call]

    def _backward(self, name: str, call: int, gradient: Tensor) -> None:
        if (name, call) not in self._begun:
            self._begun.add((name, call))
            self._mark(BACKWARD, name, call)

    def _mark(self, kind: str, name: str, call: int) -> None:
        tracer = self._tracer
        self.marks.append(Mark(len(tracer.log.events), len(tracer.costs), kind, name, call))
