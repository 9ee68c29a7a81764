"""The module that an operator belongs to, in forward and in backward, without a change to the graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch.nn.modules import module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

_FORWARD_HOOKS: tuple[dict[int, Any], ...] = (
    module._global_forward_pre_hooks,
    module._global_forward_hooks,
    module._global_forward_hooks_always_called,
)


@contextmanager
def names_not_followed() -> Iterator[None]:
    """Remove the hooks of all `ModuleNames` in this context, since a graph compiled under them would differ."""
    before = [dict(hooks) for hooks in _FORWARD_HOOKS]
    ours = {
        key
        for hooks in before
        for key, hook in hooks.items()
        if isinstance(getattr(hook, "__self__", None), ModuleNames)
    }
    for hooks in _FORWARD_HOOKS:
        for key in ours & hooks.keys():
            del hooks[key]
    try:
        yield
    finally:
        for hooks, those in zip(_FORWARD_HOOKS, before, strict=True):
            hooks.clear()
            hooks.update(those)


class ModuleNames:
    """Follows which module of ``root`` runs; in backward, the module whose forward created the running node.

    Autograd numbers the nodes of a thread in the order of their creation, so a module's nodes are an interval.
    """

    def __init__(self, root: nn.Module | None) -> None:
        self._root = root
        self._names: dict[nn.Module, str] = {}
        self._stack: list[tuple[str, int]] = []
        self._intervals: deque[tuple[int, int, str]] = deque(maxlen=2**16)  # older forwards have had their backward
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Follow the forward of every module, by torch's global hooks."""
        if self._root is not None and not self._handles:
            self._handles = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ]

    def stop(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()
        self._stack.clear()

    def here(self) -> str:
        """Return the name of the running module."""
        if self._stack:
            return self._stack[-1][0]  # in backward too, where a block is recomputed
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        innermost = ""
        for first, end, name in reversed(self._intervals):
            if end <= number:
                break
            if first <= number:
                innermost = name  # inner modules end before outer ones
        return innermost

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module not in self._names and self._root is not None:
            self._names = {part: name for name, part in self._root.named_modules()}
            self._names.setdefault(module, "")
        self._stack.append((self._names[module], _get_sequence_nr()))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            name, first = self._stack.pop()
            if name:
                self._intervals.append((first, _get_sequence_nr(), name))
