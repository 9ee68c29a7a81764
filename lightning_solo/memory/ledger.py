"""Live storages by category and the bytes that a forward saves for backward, counted exactly on real tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CATEGORIES = ("weights", "gradients", "optimizer_states", "activations", "other")


class _Entry:
    """One storage: the bytes the ledger last counted for it, and what it was born as; ``None`` if before the mode."""

    __slots__ = ("born_as", "bytes", "ref")

    def __init__(self, ref: weakref.ref[UntypedStorage], born_as: str | None) -> None:
        self.ref = ref
        self.bytes = 0
        self.born_as = born_as


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every storage that an operator returns while the mode is active, until the storage is freed.

    Storages are counted, not tensors: a view, a tied weight or an in-place result costs nothing. Bytes are those asked
    for (``UntypedStorage.nbytes``), before an allocator rounds them, and on every device alike. Memory that a kernel
    takes and gives back within one operator is not seen. Tensors from before the mode, such as a batch, count only
    where they belong to ``module`` or ``optimizers``.

    A storage keeps no label: its category is decided when asked, by identity, so that weights replaced by
    ``module.to(dtype)`` or gradients set to ``None`` are never counted as what they were.

    Args:
        module: Its parameters and buffers are ``weights``, the parameters' ``.grad`` are ``gradients``.
        optimizers: Tensors in their ``state`` are ``optimizer_states``.

    >>> layer = nn.Linear(3, 2)
    >>> with Ledger(layer) as ledger:
    ...     layer(torch.ones(4, 3)).sum().backward()
    >>> ledger.live()["weights"], ledger.live()["gradients"]  # 4 bytes x (3 x 2 + 2), twice
    (32, 32)
    """

    def __init__(self, module: nn.Module | None = None, optimizers: Sequence[Optimizer] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._module = module
        self._optimizers = tuple(optimizers)
        self._entries: dict[int, _Entry] = {}
        self._now = 0
        self._peak = 0

    def __enter__(self) -> Ledger:
        self._see_owned()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for storage in _storages((args, kwargs)):  # those from before, of which the result may be a view
            self._see(storage, None)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            self._see(storage, "activations" if torch.is_grad_enabled() else "other")
        return result

    def live(self) -> dict[str, int]:
        """Return the bytes of live storages in each category of ``CATEGORIES``."""
        self._see_owned()
        owner = {id(storage): category for category, storage in self._owned()}
        totals = dict.fromkeys(CATEGORIES, 0)
        for key, entry in list(self._entries.items()):
            storage = entry.ref()
            category = owner.get(key, entry.born_as)
            if storage is not None and category is not None:
                self._resize(entry, storage)  # a storage may have been resized without any operator
                totals[category] += entry.bytes
        return totals

    @property
    def live_bytes(self) -> int:
        """Bytes of all live storages; the sum of ``live()``."""
        return sum(self.live().values())

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were live at once since the mode was entered or ``reset_peak`` was called."""
        return self._peak

    def reset_peak(self) -> None:
        """Start a new peak at the bytes that are live now."""
        self._peak = self.live_bytes

    def _owned(self) -> Iterator[tuple[str, UntypedStorage]]:
        """Yield (category, storage) for what module and optimizers hold; where one is held twice the last one wins."""
        for optimizer in self._optimizers:
            yield from (("optimizer_states", storage) for storage in _storages(list(optimizer.state.values())))
        if self._module is not None:
            parameters, buffers = list(self._module.parameters()), list(self._module.buffers())
            yield from (("gradients", storage) for storage in _storages([p.grad for p in parameters]))
            yield from (("weights", storage) for storage in _storages([parameters, buffers]))

    def _see_owned(self) -> None:
        for category, storage in self._owned():
            self._see(storage, category)

    def _see(self, storage: UntypedStorage, born_as: str | None) -> None:
        key = id(storage)
        entry = self._entries.get(key)
        if entry is None or entry.ref() is not storage:  # ids are used again: compare the object too
            if entry is not None:
                self._now -= entry.bytes
            entry = self._entries[key] = _Entry(weakref.ref(storage, self._forget(key)), born_as)
        elif entry.born_as is None and born_as in ("weights", "gradients", "optimizer_states"):
            entry.born_as = "other"  # from before, and now known to belong to the module or an optimizer
        if entry.born_as is not None:
            self._resize(entry, storage)

    def _resize(self, entry: _Entry, storage: UntypedStorage) -> None:
        self._now += storage.nbytes() - entry.bytes
        entry.bytes = storage.nbytes()
        self._peak = max(self._peak, self._now)

    def _forget(self, key: int) -> Callable[[weakref.ref[UntypedStorage]], None]:
        """Return the function called when the storage of ``key`` is freed; it keeps no ledger alive."""
        ledger = weakref.ref(self)

        def forget(ref: weakref.ref[UntypedStorage]) -> None:
            self_ = ledger()
            if self_ is not None and (entry := self_._entries.get(key)) is not None and entry.ref is ref:
                self_._now -= self_._entries.pop(key).bytes

        return forget


def _storages(tree: Any) -> Iterator[UntypedStorage]:
    """Yield the storage of every tensor in ``tree`` that has one."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()


def saved_for_backward(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, int]:
    """Return ``function(*args, **kwargs)`` and the bytes it left alive while nothing but its output is held.

    These are the tensors that autograd saved, the inputs that ``torch.utils.checkpoint`` keeps for a recomputation,
    and the output itself; not the arguments and weights, which lived before and live on.

    >>> saved_for_backward(lambda x: x.exp().sum(), torch.zeros(5, requires_grad=True))[1]  # exp saves its result
    24
    """
    with Ledger() as ledger:
        output = function(*args, **kwargs)
        return output, ledger.live()["activations"]
