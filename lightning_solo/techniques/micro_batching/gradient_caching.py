"""Embed a batch in parts for a loss over the whole batch: gradient caching, Gao et al. 2021, arXiv 2101.06983.

Forward keeps the embeddings of each part, and no other activations. Backward of the loss gives the gradients of all
embeddings, and then runs forward and backward of one part after another. The paper passes embeddings and gradients from
step to step; here autograd does, since each part is one function that is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.data.nested import leaves, map_leaves
from lightning_solo.errors import ConflictError, NothingToDoError
from lightning_solo.memory.attempts import attempt
from lightning_solo.nn.forwards import original_forward, record_of, replace_forward, restore_forwards
from lightning_solo.nn.graph_nodes import next_node, reached
from lightning_solo.nn.recomputation import Wrap, run_recomputed
from lightning_solo.nn.rollback import Rollback, attributes_kept
from lightning_solo.nn.split_parity import close, same_for_parts

Part = tuple[tuple[Any, ...], dict[str, Any], int]
"""Arguments by position and by name, and their samples."""


@dataclass
class Embedding:
    """A module or method that embeds samples, and how its calls are split."""

    option: str  # the override that chose it, for messages
    # function of (args, kwargs, size) that returns the parts of a call, each of at most ``size`` samples
    split: Callable[[Any, Any, int], list[Part]]
    size: int | None = None  # the largest number of samples in a part; None: calls aren't split
    check: bool = True  # whether the next split call is compared with the undivided one
    calls: int = 0  # the calls with gradients
    is_split: bool = False  # whether a part of a call is running

    def __post_init__(self) -> None:
        self._made: list[range] | None = []  # numbers of the graph's nodes that parts made; None: needn't be known
        self._joined: set[int] = set()  # numbers of the nodes that join them
        remedy = f"Write {self.option.partition('=')[0]}=<another module or method> without it"
        self.wrap = Wrap(self.option, verify=True, remedy=remedy)

    def __call__(self, owner: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return ``function(*args, **kwargs)``; ``owner`` has all state that the function may change."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        self.calls += 1
        if self.size is None:
            return function(*args, **kwargs)
        parts = self.split(args, kwargs, self.size)
        if len(parts) == 1:
            return function(*args, **kwargs)
        function = partial(self._run_part, function)
        if self.check:
            attempt(partial(self._compare, owner, function, args, kwargs))  # without memory for it there is no check
            self.check = False
        first = next_node()
        outputs = [run_recomputed(owner, self.wrap, function, *part[:2]) for part in parts]
        last = next_node()
        joined = self._join(outputs, [samples for *_, samples in parts])
        if self._made is not None:
            self._made.append(range(first, last))
            nodes = (leaf.grad_fn for _, leaf in leaves(joined) if isinstance(leaf, Tensor))
            self._joined.update(node._sequence_nr() for node in nodes if node is not None)
        return joined

    def _run_part(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.is_split = True
        try:
            return function(*args, **kwargs)
        finally:
            self.is_split = False

    def require_returned(self, loss: Tensor) -> None:
        """Check once, at the first loss of split calls, that it depends only on the tensors which they return."""
        if not self._made:
            return
        made, self._made = self._made, None
        inner = reached([loss.grad_fn], lambda number: any(number in part for part in made), self._joined)
        for node in inner:
            raise ConflictError(
                f"{self.option}: the loss depends on a result of {node.name()} that was made in it and not"
                " returned, and so has the rows of one micro-batch. Return that from the method which"
                f" {self.option.partition('=')[0]} names, instead of keeping it in an attribute or a hook"
            )

    def _join(self, outputs: Sequence[Any], samples: Sequence[int]) -> Any:
        """Return the outputs of parts as the output of the whole batch."""
        by_path = [dict(leaves(output)) for output in outputs]

        def join(path: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            rows = [part.get(path) for part in by_path]
            if [len(row) if isinstance(row, Tensor) and row.dim() else None for row in rows] != [*samples]:
                raise self._conflict(
                    f"{path or 'its output'} has the shape {tuple(leaf.shape)} for {samples[-1]} samples"
                )
            return torch.cat(rows)  # type: ignore[arg-type]

        return map_leaves(outputs[-1], join)

    def _compare(self, owner: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Compare the embeddings of as many samples as a part has, together and in halves; all state is restored."""
        assert self.size is not None  # checked by the caller
        args, kwargs, samples = self.split(args, kwargs, max(self.size, 2))[0]
        device = next((p.device for p in owner.parameters()), torch.device("cpu"))
        rollback = Rollback(owner, device)
        rollback.save()
        try:
            with attributes_kept(owner), same_for_parts(owner), torch.no_grad():
                whole = function(*args, **kwargs)
                rollback.restore()
                parts = self.split(args, kwargs, -(-samples // 2))
                outputs = [function(*some, **named) for some, named, _ in parts]
                joined = self._join(outputs, [number for *_, number in parts])
                if _alike(whole, joined):
                    return
                rollback.seed(1)
                again = function(*args, **kwargs)
        finally:
            rollback.restore()
        if _alike(whole, again) or not _alike(whole, joined, values=False):  # no random numbers
            raise self._conflict("the embeddings of samples depend on the other samples")

    def _conflict(self, reason: str) -> ConflictError:
        option = self.option.partition("=")[0]
        return ConflictError(
            f"{self.option}: {reason}; write {option}=<the module or method> that returns a row for each sample, before"
            " samples are compared with one another"
        )


def _alike(one: Any, other: Any, *, values: bool = True) -> bool:
    """Return whether the tensors of two outputs have equal shapes, and values that differ by rounding at most."""
    pairs = [(a, b) for (_, a), (_, b) in zip(leaves(one), leaves(other), strict=True) if isinstance(a, Tensor)]
    return all(a.shape == b.shape and (not values or close(a, b)) for a, b in pairs)


def embed_by(module: nn.Module, name: str, embedding: Embedding) -> Callable[[], None]:
    """Make a part of a module run by an `Embedding`, and return a function that undoes it.

    Args:
        module: the whole module.
        name: of a module below it, or of a method of it or of a module below it, with dots.
        embedding: runs the calls.

    Raises:
        NothingToDoError: there is no such module or method; lists the modules.
    """
    path, _, attribute = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
        part = getattr(owner, attribute)
    except AttributeError:
        names = [child for child, each in module.named_children() if any(True for _ in each.parameters())]
        raise NothingToDoError(
            f"{embedding.option}: {type(module).__name__} has no module or method {name!r}; write the name of one that"
            f" embeds samples, such as {', '.join(names)}"
        ) from None
    if isinstance(part, nn.Module):
        replace_forward(part, forward, embedding)
        return lambda: restore_forwards([part], Embedding)
    if not callable(part):
        raise NothingToDoError(
            f"{embedding.option}: {name} is a {type(part).__name__}, neither module nor method; write the name of one"
        )

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = getattr(type(self), attribute)
        return embedding(self, MethodType(own, self), args, kwargs)

    setattr(owner, attribute, MethodType(method, owner))
    return lambda: delattr(owner, attribute)


def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module that embeds samples."""
    embedding, original = record_of(module, Embedding), original_forward(module, Embedding)
    return original(*args, **kwargs) if embedding is None else embedding(module, original, args, kwargs)
