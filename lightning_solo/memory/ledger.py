"""Exact counts of live storages by category, of their peak, and of the bytes that a forward saves for backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_solo.attributes import replaced
from lightning_solo.memory.block_ring import loaded_buffers
from lightning_solo.memory.events import CATEGORIES, EventLog, Peak
from lightning_solo.memory.module_names import ModuleNames

_DEVICE = torch.ops.prim.device.default
_OWNED = ("weights", "gradients", "optimizer_states")
_LEAVES = (int, float, str, type(None), torch.dtype, torch.device)


class _Entry(weakref.ref[UntypedStorage]):
    """A storage, with its last known bytes, number in the log, and category (None if it is older than the ledger)."""

    __slots__ = ("bytes", "key", "label", "number", "on_host")

    bytes: int
    key: int
    label: str | None
    number: int
    on_host: bool


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every storage that an operator returns while the mode is active, until the storage is freed.

    It counts storages, not tensors: a view, a tied weight or an in-place result costs nothing. Bytes are the requested
    ones (``UntypedStorage.nbytes``), before an allocator rounds them; fake tensors count as real ones. Older tensors,
    such as a batch, count only if they belong to ``module`` or ``optimizers``.

    It does not see memory that a kernel allocates and frees within one operator, or memory inside functions that
    torch.compile compiled earlier. A function compiled under the mode runs uncompiled.

    `live` looks up the category of each storage at the time of the call, so weights that ``module.to(dtype)`` replaced
    are no longer weights. `peak` counts a storage by its last category.

    Args:
        module: as in `owned_by`.
        optimizers: as in `owned_by`.
        device: type of the counted device, such as ``"cuda"``; all other storages are on the host. By default all
            devices are counted, and only storages allocated in `on_host` are on the host.

    >>> layer = nn.Linear(3, 2)
    >>> with Ledger(layer) as ledger:
    ...     layer(torch.ones(4, 3)).sum().backward()
    >>> ledger.live()["weights"], ledger.live()["gradients"]  # 4 bytes x (3 x 2 + 2), twice
    (32, 32)
    """

    def __init__(
        self, module: nn.Module | None = None, optimizers: Iterable[object] = (), device: str | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._module = module
        self._optimizers = tuple(optimizers)
        self._device = device
        self._entries: dict[int, _Entry] = {}
        self._now = self._host_now = 0
        self._peak = self._host_peak = 0
        self._where = ("", "")
        self._in_backward = self._on_host = False
        self._forget = _forget_in(weakref.ref(self))
        self._names = ModuleNames(module)
        self.log = EventLog()

    def __enter__(self) -> Ledger:
        self.see_owned()
        self._names.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._names.stop()
        self.see_owned()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.counted(func, args, kwargs or {})

    def counted(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, and count the storages that it gets and returns."""
        if func is _DEVICE:  # two of three calls on fake tensors
            return self.run(func, args, kwargs)
        if func is not torch.ops.aten.lift_fresh.default:  # the operator by which torch.tensor() returns a new tensor
            # older storages; the result may be a view of them
            for storage in storages_of((args, kwargs) if kwargs else args):
                self._see(storage, None)
        result = self.run(func, args, kwargs)
        self._see_result(func, storages_of(result))
        return result

    def _see_result(self, func: Callable[..., Any], storages: Iterable[UntypedStorage]) -> None:
        label = self._label()
        peak = self._peak
        for storage in storages:
            self._see(storage, label)
        if self._peak > peak:
            self._where = (str(func), self._names.here())

    def see_workspace(self, size: int) -> None:
        """Count bytes that an operator allocates and frees again, for subclasses that know them."""
        number = self.log.born("temporaries")
        self.log.events += [(number, size), (number, -size)]
        self._peak = max(self._peak, self._now + size)

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of one operator; subclasses may override it."""
        return func(*args, **kwargs)

    def _label(self) -> str:
        in_backward = torch._C._current_graph_task_id() != -1
        if self._in_backward and not in_backward:
            self.see_owned()  # before anyone drops the gradients
        self._in_backward = in_backward
        if torch.is_grad_enabled():
            return "activations"
        if not in_backward:
            return "other"
        node = torch._C._current_autograd_node()
        return "gradients" if node is not None and "AccumulateGrad" in node.name() else "temporaries"

    def live(self, *, on_host: bool = False) -> dict[str, int]:
        """Return the bytes of live storages in each category of ``CATEGORIES``, on the device or on the host."""
        self.see_owned()
        owner = {id(storage): category for category, storage in self._owned()}
        totals = dict.fromkeys(CATEGORIES, 0)
        for key, entry in list(self._entries.items()):
            storage = entry()
            if storage is None or entry.label is None:
                continue
            self._count(entry, self._size(storage))  # a storage may be resized without an operator
            # a storage that is no longer owned, such as a former weight, is of the rest
            unowned = "other" if entry.label in _OWNED else entry.label
            if entry.on_host == on_host:
                totals[owner.get(key, unowned)] += entry.bytes
        return totals

    @property
    def live_bytes(self) -> int:
        """The bytes of all live storages on the device."""
        return sum(self.live().values())

    @property
    def peak_bytes(self) -> int:
        """The peak of live bytes on the device since the mode was entered or ``reset_peak`` was called."""
        return self._peak

    @property
    def host_peak_bytes(self) -> int:
        """The peak of live bytes on the host since the mode was entered or ``reset_peak`` was called."""
        return self._host_peak

    def peak(self) -> Peak:
        """Return the peak on the device since the last reset, by category."""
        self.see_owned()
        most, count = self.log.peak()
        return Peak(most, self.log.breakdown(count), *self._where)

    def number_of(self, storage: UntypedStorage) -> int | None:
        """Return a storage's number in the log; None if it isn't counted on the device."""
        entry = self._entries.get(id(storage))
        return entry.number if entry is not None and entry() is storage and entry.number >= 0 else None

    def reset_peak(self) -> None:
        """Start a new peak at the bytes that are live now, and drop the events until now."""
        self._peak, self._host_peak = self.live_bytes, self._host_now
        self._where = ("", "")
        # storages that never had bytes have no number
        self.log.forget([(entry.number, entry.bytes) for entry in self._entries.values() if entry.number >= 0])

    def on_host(self) -> AbstractContextManager[Any]:
        """Count allocations in this context as on the host, where device and host share their memory."""
        return replaced(self, "_on_host", True)

    def see_owned(self) -> None:
        """Update the owners of storages; called at the end of each backward, and by `live` and `peak`."""
        for category, storage in self._owned():
            self._see(storage, category)

    def _owned(self) -> Iterator[tuple[str, UntypedStorage]]:
        for category, tree in owned_by(self._module, self._optimizers):
            yield from ((category, storage) for storage in storages_of(tree))

    def _see(self, storage: UntypedStorage, label: str | None) -> None:
        key = id(storage)
        entry = self._entries.get(key)
        if entry is None or entry() is not storage:  # ids are reused
            if entry is not None:
                self._count(entry, 0)
            entry = self._entries[key] = _Entry(storage, self._forget)
            entry.key, entry.bytes, entry.number, entry.label = key, 0, -1, label
            entry.on_host = self._on_host or (self._device is not None and storage.device.type != self._device)
        elif label in _OWNED:
            entry.label = label
            if entry.number >= 0:
                self.log.labels[entry.number] = label
        if entry.label is not None and (now := self._size(storage)) != entry.bytes:
            self._count(entry, now)

    def _size(self, storage: UntypedStorage) -> int:
        return storage.nbytes()

    def _count(self, entry: _Entry, now: int) -> None:
        change = now - entry.bytes
        if not change:
            return
        entry.bytes = now
        if entry.on_host:
            self._host_now += change
            self._host_peak = max(self._host_peak, self._host_now)
            return
        if entry.number < 0:
            entry.number = self.log.born(entry.label or "other")
        self.log.events.append((entry.number, change))
        self._now += change
        self._peak = max(self._peak, self._now)


def _forget_in(reference: weakref.ref[Ledger]) -> Callable[[Any], None]:
    """Return a function that records that a storage was freed. It doesn't keep the ledger alive."""

    def forget(entry: _Entry) -> None:
        ledger = reference()
        if ledger is not None and ledger._entries.get(entry.key) is entry:
            del ledger._entries[entry.key]
            ledger._count(entry, 0)

    return forget


def owned_by(module: nn.Module | None, optimizers: Iterable[object]) -> Iterator[tuple[str, Any]]:
    """Yield (category, tree of tensors) of a module and optimizers; the last category of a tensor counts.

    Args:
        module: its parameters and buffers are ``weights``, as the buffers of rings that load some of them; the
            parameters' ``.grad`` are ``gradients``.
        optimizers: tensors in their ``state`` are ``optimizer_states``; other classes than torch's are skipped.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, Optimizer):
            yield "optimizer_states", list(optimizer.state.values())
    if module is not None:
        parameters = list(module.parameters())
        yield "gradients", [parameter.grad for parameter in parameters]
        yield "weights", [parameters, list(module.buffers()), loaded_buffers()]


def storages_of(tree: Any) -> list[UntypedStorage]:
    """Return the storage of every tensor in ``tree`` that has one."""
    return [tensor.untyped_storage() for tensor in operator_tensors(tree) if tensor.layout is torch.strided]


def operator_tensors(tree: Any) -> list[Tensor]:
    """Return every tensor in ``tree``. Lists, tuples and dicts are searched directly, faster than by pytree."""
    tensors: list[Tensor] = []
    _gather(tree, tensors)
    return tensors


@functools.cache
def _is_wrapper(kind: type[Tensor]) -> bool:
    return hasattr(kind, "__tensor_flatten__")


def _gather(tree: Any, tensors: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        if _is_wrapper(type(tree)):  # torchao's states, FSDP2's shards: count the wrapped tensors
            wrapper: Any = tree
            parts = (getattr(tree, name) for name in wrapper.__tensor_flatten__()[0])
            tensors += (part for part in parts if isinstance(part, Tensor))  # a shard also names its mesh
        else:
            tensors.append(tree)
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            _gather(part, tensors)
    elif isinstance(tree, dict):
        for part in tree.values():
            _gather(part, tensors)
    elif not isinstance(tree, _LEAVES):
        tensors += (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def saved_for_backward(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, int]:
    """Return ``function(*args, **kwargs)``, and the bytes that stay allocated as long as its output.

    These are the tensors that autograd saved, the inputs that ``torch.utils.checkpoint`` keeps for a recomputation,
    and the output itself, without arguments and weights.

    >>> saved_for_backward(lambda x: x.exp().sum(), torch.zeros(5, requires_grad=True))[1]  # exp saves its result
    24
    """
    with Ledger() as ledger:
        output = function(*args, **kwargs)
        return output, ledger.live()["activations"]
