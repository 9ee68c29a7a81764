"""Ranges in a trace that name the running module and technique."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from lightning_solo.attributes import replaced
from lightning_solo.memory.category_peaks import is_compiled
from lightning_solo.seams.technique import Technique

MODULE, RECOMPUTED, TECHNIQUE, WITHIN = "module ", "recomputed ", "technique ", "within "
"""Beginnings of the ranges' names. `WITHIN` is what a technique calls: Lightning's own work and inner techniques."""
HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
SEAMS = ("loss", "training_step", "backward", "clip", "step")


@contextmanager
def labelled(module: nn.Module, callbacks: Iterable[Any]) -> Iterator[None]:
    """Name modules and callbacks in the traces that are made in this context.

    A compiled module and its parts get no range, since their code would be compiled again.
    """
    with ExitStack() as stack:
        ranges: list[Any] = []
        for name, part in _uncompiled(module):
            stack.enter_context(part.register_forward_pre_hook(_entering(ranges, name)))
            stack.enter_context(part.register_forward_hook(_leaving(ranges), always_call=True))
        for callback in callbacks:
            name = type(callback).__name__
            for hook in HOOKS:
                if not getattr(type(callback), hook).__qualname__.startswith("Callback."):
                    stack.enter_context(replaced(callback, hook, _hook(name, getattr(callback, hook))))
            for seam in SEAMS if isinstance(callback, Technique) else ():
                if callback.overrides(seam):
                    stack.enter_context(replaced(callback, seam, _seam(name, getattr(callback, seam))))
        yield


def _uncompiled(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names of a module's uncompiled parts, and the parts; once each."""
    seen: set[nn.Module] = set()
    waiting = [("", module)]
    while waiting:
        name, part = waiting.pop()
        if part in seen or is_compiled(part):
            continue
        seen.add(part)
        yield name or type(part).__name__, part
        waiting += [(f"{name}.{key}" if name else key, child) for key, child in part.named_children()]


def _entering(ranges: list[Any], name: str) -> Callable[..., None]:
    def enter(module: nn.Module, args: Any) -> None:
        in_backward = torch._C._current_autograd_node() is not None
        ranges.append(record_function(f"{RECOMPUTED if in_backward else MODULE}{name}"))
        ranges[-1].__enter__()

    return enter


def _leaving(ranges: list[Any]) -> Callable[..., None]:
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if ranges:
            ranges.pop().__exit__(None, None, None)

    return leave


def _hook(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"{TECHNIQUE}{name}"):
            return function(*args, **kwargs)

    return run


def _seam(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(ctx: Any, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def within(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"{WITHIN}{name}"):
                return proceed(*args, **kwargs)

        with record_function(f"{TECHNIQUE}{name}"):
            return function(ctx, within, *args, **kwargs)

    return run
