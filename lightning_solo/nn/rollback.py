"""Restore random numbers, buffers and the states of metrics to their values before a forward and backward."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_solo.errors import ConflictError
from lightning_solo.memory.sharded_tensors import is_sharded
from lightning_solo.random_states import Source, global_sources, sources_in


class Rollback:
    """Restores a module and the random numbers to their state at the last `save`.

    It saves buffers, the states of torchmetrics' metrics, and the states of random generators: torch's on the CPU and
    on ``device``, Python's, NumPy's if it is imported, and generators that are attributes of modules. `restore` removes
    buffers and submodules that were registered since `save`.

    The first `save` copies all tensors. Later ones skip tensors that never change, such as large masks: those that were
    unchanged at the second `save`, and whose version hasn't increased since.

    >>> module = nn.BatchNorm1d(2)
    >>> rollback = Rollback(module, torch.device("cpu")); rollback.save()
    >>> _ = module(torch.randn(4, 2)); rollback.restore()
    >>> module.running_mean, module.num_batches_tracked
    (tensor([0., 0.]), tensor(0))
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._collect()

    def _collect(self) -> None:
        """Collect the values that the module has now."""
        self._modules = dict(self._module.named_modules())
        modules = self._modules.items()
        self._registers = [each for _, module in modules for each in (module._modules, module._buffers)]
        self._registered = [{*register} for register in self._registers]
        self._lengths = [*map(len, self._registers)]
        buffers = [_Place(module._buffers, name, path) for path, module in modules for name in module._buffers]
        metrics = [_Place(vars(module), name, path) for path, module in modules for name in names_in_metric(module)]
        self._values = _Values(buffers), _Values(metrics)  # apart: a metric replaces its values, a buffer stays
        self._generators = _generators(self._modules, self._device)
        self._states: list[Any] = []

    @torch.no_grad()
    def save(self, *, random: bool = True) -> None:
        """Save the current state, or all of it but random numbers."""
        if [*map(len, self._registers)] != self._lengths:
            self._collect()
        for values in self._values:
            values.save()
        self._states = [generator.get() for generator in self._generators] if random else []

    @torch.no_grad()
    def restore(self, *, random: bool = True) -> None:
        """Restore the saved state, or all of it but random numbers; a second call restores it again.

        Raises:
            ConflictError: a buffer that wasn't copied has changed, or belongs to a module that replaced another one.
        """
        for register, names in zip(self._registers, self._registered, strict=True):
            for name in register.keys() - names:
                del register[name]
        known = {*map(id, self._modules.values())}  # the hash of a metric changes with its state
        for path, module in self._module.named_modules():
            if id(module) not in known and module._buffers:
                raise ConflictError(
                    f"{path} has taken the place of another module, and its buffers can't be put back after a step that"
                    " is undone: resume from the last checkpoint; if it ran out of memory, with a smaller micro-batch"
                )
        for values in self._values:
            values.restore()
        if random:
            for generator, state in zip(self._generators, self._states, strict=True):
                generator.put(state)

    def saved(self) -> dict[str, Any]:
        """Return the values of the last `save` that may have changed since, by path, without restoring them."""
        return {str(place): value for values in self._values for place, value in values.saved()}

    def seed(self, seed: int) -> None:
        """Seed all random generators that `restore` restores."""
        for generator in self._generators:
            generator.seed(seed)


class Unchanged:
    """Notes which parameters change in place.

    >>> weight = nn.Parameter(torch.ones(2)); unchanged = Unchanged({"weight": weight})
    >>> with torch.no_grad(): _ = weight.add_(1)
    >>> unchanged.changed()
    ['weight']
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._names, self._tensors = [*parameters], [*parameters.values()]
        self.note()

    def note(self) -> None:
        """Take the current values as unchanged."""
        self._versions = [*map(_version, self._tensors)]

    def changed(self) -> list[str]:
        """Return the names of the parameters that have changed since the last `note`."""
        now = map(_version, self._tensors)
        return [
            name for name, before, version in zip(self._names, self._versions, now, strict=True) if before != version
        ]


class RandomStates:
    """States of the random generators that a function draws from: those that its first calls changed.

    Others needn't be read each time: NumPy's takes as long as a small step's look at all gradients.

    >>> states = RandomStates(nn.Module(), torch.device("cpu"))
    >>> with states.watching():
    ...     before = states.get(); first = torch.rand(())
    >>> states.put(before); bool(torch.rand(()) == first)
    True
    """

    CALLS = 8
    """Calls after which a generator that none of them changed is left out."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._generators = _generators(dict(module.named_modules()), device)
        self._changed: set[int] = set()
        self._calls = 0

    @property
    def is_known(self) -> bool:
        """Whether there have been enough calls to know the generators."""
        return self._calls >= self.CALLS

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note within this context, around a call, which generators change."""
        before = [_as_bytes(generator.get()) for generator in self._generators]
        yield
        after = [_as_bytes(generator.get()) for generator in self._generators]
        self._changed |= {number for number, state in enumerate(before) if state != after[number]}
        self._calls += 1
        if self.is_known:
            self._generators = [each for number, each in enumerate(self._generators) if number in self._changed]

    @property
    def drawn(self) -> bool:
        """Whether any of the calls drew random numbers."""
        return bool(self._changed)

    def get(self) -> list[tuple[Callable[[Any], Any], Any]]:
        """Return the states, each after the function that sets it."""
        return [(generator.put, generator.get()) for generator in self._generators]

    @staticmethod
    def put(states: Iterable[tuple[Callable[[Any], Any], Any]]) -> None:
        """Set states that `get` returned."""
        for set_state, state in states:
            set_state(state)


def _as_bytes(state: Any) -> bytes:
    return state.cpu().numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state)


class _Place(NamedTuple):
    """A value's owner, a module's buffers or attributes, and its name there."""

    owner: Any
    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def is_unseen(self) -> bool:
        """Whether batch norm's kernels change the value without increasing its version."""
        return self.name in ("running_mean", "running_var")


_ABSENT: Any = object()
_version = attrgetter("_version")


def _at(places: Iterable[_Place]) -> list[Any]:
    return [owner.get(name, _ABSENT) for owner, name, _ in places]


def _kind(value: Any) -> Any:
    """Return a key of tensors that are copied together; None for values that can't change in place.

    Those are expanded tensors, tensors of inference mode and values that aren't tensors.
    """
    if not isinstance(value, Tensor) or value.is_inference():
        return None
    strided = value.layout is torch.strided
    if strided and 0 in value.stride() and any(map(_is_expanded, value.shape, value.stride())):
        return None
    plain = strided and type(value) is Tensor and not value.is_quantized
    return (value.device, value.dtype, value.shape) if plain else id(value)


def _is_expanded(size: int, stride: int) -> bool:
    return stride == 0 and size > 1


class _Values:
    """Values at places, with copies of the tensors among them that change.

    `save` runs in every step, so its loops are built-in functions over lists.
    """

    def __init__(self, places: list[_Place]) -> None:
        self._is_empty = not places
        self._changing = places
        self._values: list[Any] = []  # at these places
        self._groups: dict[Any, tuple[list[Tensor], Any]] = {}  # those of the values that can change in place
        self._lists: list[tuple[list[Any], list[Any]]] = []  # and lists among the values, with copies
        self._saves = 0
        self._constant: list[_Place] = []
        self._constants: list[Any] = []
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []

    def save(self) -> None:
        if self._is_empty:
            return
        self._saves += 1
        if self._saves == 2:
            self._settle()
        elif not self._are_constant():
            self._give_up_constants()
        values = _at(self._changing)
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            self._values = values
            self._group()
        for tensors, copies in self._groups.values():
            if isinstance(copies, list):
                torch._foreach_copy_(copies, tensors)
            else:
                torch.stack(tensors, out=copies)
        self._lists = [(value, [*value]) for value in values if isinstance(value, list)]

    def _group(self) -> None:
        """Allocate one tensor for all copies of a kind, which one kernel then fills."""
        groups: dict[Any, list[Tensor]] = {}
        for value in self._values:
            if (kind := _kind(value)) is not None:
                groups.setdefault(kind, []).append(value)
        before, self._groups = self._groups, {}
        for kind, tensors in groups.items():
            earlier, copies = before.get(kind, ((), None))
            if len(earlier) != len(tensors):
                first = tensors[0]
                stacked = not isinstance(kind, int)
                if stacked:
                    copies = first.new_empty(len(tensors), *first.shape)
                else:  # one tensor, in one place or several
                    copies = [torch.empty_like(first)] * len(tensors)
            self._groups[kind] = tensors, copies

    def _settle(self) -> None:
        """Find the values that the first step left constant, by content: kernels may not count changes."""
        copies = {id(tensor): copy for pair in self._groups.values() for tensor, copy in zip(*pair, strict=True)}
        rows = [*zip(self._changing, self._values, _at(self._changing), strict=True)]
        stays = [now is value and _is_equal(place, value, copies.get(id(value))) for place, value, now in rows]
        constant = [place for place, stay in zip(self._changing, stays, strict=True) if stay]
        self._changing = [place for place, stay in zip(self._changing, stays, strict=True) if not stay]
        self._values, self._groups = [], {}
        self._take_as_constant(constant)

    def _take_as_constant(self, places: list[_Place]) -> None:
        self._constant, self._constants = places, _at(places)
        self._tensors = [value for value in self._constants if _kind(value) is not None]
        self._versions = [*map(_version, self._tensors)]

    def _are_constant(self) -> bool:
        same = all(map(is_, _at(self._constant), self._constants))
        return same and [*map(_version, self._tensors)] == self._versions

    def _changed_constants(self) -> Iterator[tuple[_Place, bool]]:
        """Yield each place whose value was replaced or changed in place, and which of the two happened."""
        versions = iter(self._versions)
        for place, value in zip(self._constant, self._constants, strict=True):
            in_place = _kind(value) is not None and value._version != next(versions)
            if in_place or place.owner.get(place.name, _ABSENT) is not value:
                yield place, in_place

    def _give_up_constants(self) -> None:
        changed = [place for place, _ in self._changed_constants()]
        numbers = {*map(id, changed)}  # equality of two places would compare all values of their owners
        self._changing = self._changing + changed
        self._take_as_constant([place for place in self._constant if id(place) not in numbers])

    def saved(self) -> Iterator[tuple[_Place, Any]]:
        """Yield the places that may have changed, each with its saved value."""
        copies: dict[int, Any] = {
            id(tensor): copy for pair in self._groups.values() for tensor, copy in zip(*pair, strict=True)
        }
        copies |= {id(value): items for value, items in self._lists}
        for place, value in zip(self._changing, self._values, strict=True):
            if value is not _ABSENT:
                yield place, copies.get(id(value), value)

    def restore(self) -> None:
        if self._saves == 1:
            self._saves = 0  # a restored value hides from the next save that it changes
        lost = [place for place, in_place in self._changed_constants() if in_place]
        if lost:
            raise ConflictError(
                f"{lost[0]} changed for the first time in a step that is undone, and can't be put back: resume from the"
                " last checkpoint; if the step ran out of memory, with a smaller micro-batch"
            )
        for place, value in zip(self._constant + self._changing, self._constants + self._values, strict=True):
            if value is _ABSENT:
                place.owner.pop(place.name, None)
            else:
                place.owner[place.name] = value
        for tensors, copies in self._groups.values():
            torch._foreach_copy_(tensors, [*copies])
        for value, items in self._lists:
            value[:] = items


def _is_equal(place: _Place, value: Any, copy: Any) -> bool:
    if isinstance(value, list) or place.is_unseen:
        return False
    return copy is None or (value.layout is torch.strided and torch.equal(value, copy))


_METRIC_ATTRIBUTES = (
    *("_update_count", "_computed", "_forward_cache", "_cache", "_is_synced"),
    *("_to_sync", "_should_unsync", "_enable_grad", "compute_on_cpu"),  # a forward that fails leaves those of one batch
)


def names_in_metric(module: nn.Module) -> tuple[str, ...]:
    """Return the attributes that are the state of a torchmetrics metric; none for another module."""
    defaults = getattr(module, "_defaults", None)
    return (*defaults, *_METRIC_ATTRIBUTES) if isinstance(defaults, dict) else ()


def _generators(modules: Mapping[str, nn.Module], device: torch.device) -> list[Source]:
    """Return the global random generators, and those that are attributes of modules."""
    return [*global_sources(device).values(), *sources_in(modules).values()]


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of all parts of a module after a context, and the items of containers among them."""
    before = [(vars(part), {**vars(part)}) for part in module.modules()]
    sharded: list[Any] = [part for part in module.modules() if _is_sharded(part)]
    containers = {id(value): (value, copy(value)) for _, attributes in before for value in _containers(attributes)}
    try:
        yield
    finally:
        for part in sharded:
            part.reshard()  # FSDP2 puts shards and whole weights among the attributes, and keeps an account
        for attributes, values in before:
            for name in attributes.keys() - values.keys():
                del attributes[name]
            attributes.update(values)
        for container, items in containers.values():
            if len(container) == len(items) and all(map(is_, _flat(container), _flat(items))):
                continue
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(items)


def _is_sharded(part: nn.Module) -> bool:
    """Return whether FSDP2 gathers a part's weights, and hasn't gathered them."""
    is_fsdps = any(cls.__name__ == "FSDPModule" for cls in type(part).__mro__)
    return is_fsdps and all(map(is_sharded, part.parameters()))


def _containers(value: Any) -> Iterator[Any]:
    """Yield the lists, dicts, sets and deques in the values of a dict, also nested ones."""
    seen: set[int] = set()
    ahead = [*value.values()]
    while ahead:
        value = ahead.pop()
        if not isinstance(value, list | dict | set | deque | tuple) or id(value) in seen:
            continue
        seen.add(id(value))
        ahead += value.values() if isinstance(value, dict) else value
        if not isinstance(value, tuple):
            yield value


def _flat(container: Any) -> Iterable[Any]:
    return chain(container, container.values()) if isinstance(container, dict) else container
