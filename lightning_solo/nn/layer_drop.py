"""Skip some of a module's blocks in each step: a skipped block returns its input, in the form of its output."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.errors import NothingToDoError, PresetError
from lightning_solo.nn.blocks import counted
from lightning_solo.nn.recomputation import statistics_kept, without_cache

_CALL = "_compiled_call_impl"
"""Attribute that ``nn.Module.__call__`` calls if it is set; copies and pickles don't have it."""

Place = int | str
"""An argument's position or name."""


@dataclass(frozen=True)
class _Form:
    """The form of a block's output, built from the block's arguments."""

    hidden: Place  # place of the hidden state among the arguments
    dtype: torch.dtype  # type of the hidden state in the output
    container: type | None = None  # tuple or list; None if the output is the hidden state alone
    rest: tuple[Place | None, ...] = ()  # places of the values after the hidden state; None for a value that is None

    def output(self, args: Any, kwargs: Any) -> Any:
        """Return the output of a skipped block."""
        values = {**dict(enumerate(args)), **kwargs}
        hidden = values[self.hidden].to(self.dtype)
        rest = (None if place is None else values[place] for place in self.rest)
        return hidden if self.container is None else self.container((hidden, *rest))


def _form(args: Any, kwargs: Any, output: Any) -> _Form | str:
    """Return the form of a block's output, or the reason why arguments can't give it."""
    values: dict[Place, Any] = {**dict(enumerate(args)), **kwargs}
    container = type(output) if type(output) in (tuple, list) and len(output) else None
    hidden, *rest = output if container is not None else (output,)
    if not isinstance(hidden, Tensor):
        return f"returns {type(output).__name__}, not a hidden state or a tuple that begins with one"
    alike = [place for place, value in values.items() if isinstance(value, Tensor) and value.shape == hidden.shape]
    if not alike:
        return f"returns shape {tuple(hidden.shape)}, which none of its inputs has"
    places: list[Place | None] = []
    for value in rest:
        same = [place for place, each in values.items() if each is value]
        if value is not None and not same:
            return f"also returns {type(value).__name__}, which is none of its inputs"
        places.append(None if value is None else same[0])
    return _Form(alike[0], hidden.dtype, container, tuple(places))


class SkippedBlocks:
    """Skips exactly ``count`` blocks from one `draw` to the next, each equally often on average.

    Blocks are skipped only in training mode. Nothing is scaled (Fan et al. 2019, https://arxiv.org/abs/1909.11556,
    section 3). A draw depends on ``seed`` and the number of draws; torch's generators aren't used. A block's first call
    shows the form of its output; if that call is skipped, the block runs once without gradients.

    Attributes:
        skipped: names of the blocks that are skipped now.
        draws: number of draws so far.
        calls: number of calls of blocks in training mode, skipped or not.
        left_out: name -> reason, for each block that can't be skipped.

    Raises:
        PresetError: no block would be left to run.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], count: int, seed: int) -> None:
        if count >= len(blocks):
            smaller = f"callback.layer_drop.count={len(blocks) - 1} or less, " if len(blocks) > 1 else ""
            raise PresetError(
                f"layer_drop.count={count}, and {counted(blocks.values())} ({', '.join(blocks)}): at least one has to"
                f" run; write {smaller}callback.layer_drop.blocks=[ClassName] of other classes, or ~callback.layer_drop"
            )
        self.blocks = dict(blocks)
        self.count = count
        self.seed = seed
        self.draws = self.calls = 0
        self.skipped: frozenset[str] = frozenset()
        self.left_out: dict[str, str] = {}
        self._forms: dict[str, _Form] = {}
        for name, block in self.blocks.items():
            block.__dict__[_CALL] = SkippableCall(self, name, block, block.__dict__.get(_CALL))

    def draw(self) -> None:
        """Choose the blocks that are skipped from now on.

        Raises:
            NothingToDoError: too few blocks can be skipped; the message says why for each of the others.
        """
        able = [name for name, block in self.blocks.items() if block.training and name not in self.left_out]
        if len(able) < self.count:
            in_eval = {name: "is in eval mode (write .train())" for name, b in self.blocks.items() if not b.training}
            reasons = "; ".join(f"{name} {reason}" for name, reason in {**in_eval, **self.left_out}.items())
            raise NothingToDoError(
                f"layer_drop.count={self.count}: only {len(able)} of {len(self.blocks)} blocks can be skipped"
                f" ({reasons}); write a smaller callback.layer_drop.count, or callback.layer_drop.blocks=[ClassName] of"
                " other classes"
            )
        self.skipped = frozenset(random.Random(f"{self.seed}/{self.draws}").sample(able, self.count))
        self.draws += 1

    def restore(self) -> None:
        """Restore the blocks' calls; a second call does nothing."""
        for block in self.blocks.values():
            call = block.__dict__.get(_CALL)
            if isinstance(call, SkippableCall) and call.drop is self:
                del block.__dict__[_CALL]
                if call.compiled is not None:
                    block.__dict__[_CALL] = call.compiled

    def call(self, name: str, block: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block, or return its input."""
        if not block.training:
            return inner(*args, **kwargs)
        self.calls += 1
        if name in self.skipped:
            if name not in self._forms and name not in self.left_out:
                self._learn(name, args, kwargs, _tried(block, args, kwargs))
            if name in self._forms:
                return self._forms[name].output(args, kwargs)
        output = inner(*args, **kwargs)
        if name not in self._forms and name not in self.left_out:
            self._learn(name, args, kwargs, output)
        return output

    def _learn(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        form = _form(args, kwargs, output)
        if isinstance(form, str):
            self.left_out[name] = form
        else:
            self._forms[name] = form


class SkippableCall:
    """A replaced call of a block, which ``drop`` may skip.

    Attributes:
        compiled: the compiled call that it replaces; None for the module's own.
    """

    def __init__(self, drop: SkippedBlocks, name: str, block: nn.Module, compiled: Callable[..., Any] | None) -> None:
        self.drop, self.name, self.block, self.compiled = drop, name, block, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner = self.block._call_impl if self.compiled is None else self.compiled
        return self.drop.call(self.name, self.block, inner, args, kwargs)


def _tried(block: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return a block's output without gradients, and without a change of random numbers, statistics or caches."""
    args, kwargs, _ = without_cache(block, args, kwargs)
    devices = {p.device for p in block.parameters() if p.device.type != "cpu"}
    with torch.no_grad(), torch.random.fork_rng(list(devices)), statistics_kept(block):
        output = block._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # never compiled for this
    torch.clear_autocast_cache()  # later products would use weights that were cast without gradients
    return output
