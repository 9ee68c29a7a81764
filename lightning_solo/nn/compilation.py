"""Compile a module's blocks one by one; all blocks that are built alike share the compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_solo.errors import CapabilityError, ConflictError
from lightning_solo.memory.category_peaks import is_compiled
from lightning_solo.nn.recomputation import run_compiled


class CountingBackend:
    """A back end of ``torch.compile`` that counts the graphs it compiles.

    Args:
        name: the back end's name, such as ``"inductor"``.
        mode: Inductor's mode, as in ``torch._inductor.list_mode_options``.
    """

    def __init__(self, name: str = "inductor", mode: str = "default") -> None:
        self.graphs = 0
        self._compile: Callable[..., Any] = torch._dynamo.lookup_backend(name)
        self._options = {"config_patches": torch._inductor.list_mode_options(mode)} if name == "inductor" else {}

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self._compile(graph, inputs, **self._options)


def compile_blocks(blocks: Mapping[str, nn.Module], backend: CountingBackend, dynamic: bool | None = None) -> None:
    """Compile each block at its next call; ``restore_compiled`` undoes it.

    Types, parameters, state-dict keys and hooks stay the same. Copies and pickles of a block aren't compiled.

    Args:
        blocks: name -> block; the names are for messages.
        backend: compiles the blocks, and counts their graphs.
        dynamic: whether sizes may vary without another compilation; None allows it after the second size.

    A block whose compilation fails raises a CapabilityError when it is called.

    Raises:
        ConflictError: a block or a part of it is compiled already.
    """
    for name, block in blocks.items():
        if any(map(is_compiled, block.modules())):
            raise ConflictError(
                f"regional compilation: {name} is compiled already; remove the module's own torch.compile, compile once"
                " only, or name other classes, callback.regional_compilation.blocks=[ClassName]"
            )
    compiled: dict[Any, Callable[..., Any]] = {}
    for block in blocks.values():
        build = (type(block), tuple((name, p.shape) for name, p in block.named_parameters()))
        if build not in compiled:
            compiled[build] = torch.compile(_new_call(), backend=backend, dynamic=dynamic)
        block._compiled_call_impl = partial(_call_compiled, compiled[build], dynamic, block)


def _call_compiled(
    compiled: Callable[..., Any], dynamic: bool | None, block: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    try:
        return run_compiled(block, compiled, args, kwargs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        inner = error.inner_exception
        reason = f"{type(inner).__name__}: {inner}".split("\n")[0]
        each_size = "callback.regional_compilation.dynamic=false, which compiles each size of input alone,"
        raise CapabilityError(
            f"regional compilation: torch's compiler failed at {type(block).__name__}: {reason};"
            f" write {'' if dynamic is False else each_size + ' '}callback.regional_compilation.backend=aot_eager,"
            " or ~callback.regional_compilation"
        ) from error


def _new_call() -> Callable[..., Any]:
    """Return a function that calls a block and has its own code object.

    Torch stores its compiled code by code object, 8 times at most. `nn.Module.compile` uses that of ``nn.Module``, for
    which several kinds of blocks or several fits of a process would exceed the limit, and then run uncompiled.
    """

    def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return block._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    call.__code__ = call.__code__.replace()
    return call


def is_compiled_alone(block: nn.Module) -> bool:
    """Return whether ``compile_blocks`` compiles the calls of a block."""
    call = getattr(block, "_compiled_call_impl", None)
    return getattr(getattr(call, "compiled", call), "func", None) is _call_compiled


def restore_compiled(blocks: Iterable[nn.Module]) -> None:
    """Undo ``compile_blocks``; a second call does nothing."""
    for block in blocks:
        block.__dict__.pop("_compiled_call_impl", None)
