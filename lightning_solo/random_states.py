"""States of random generators as plain data, which `torch.load(weights_only=True)` reads."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_solo.errors import CheckpointError

DEPTH = 6
"""Attributes of attributes that are searched for generators."""
SEARCHES = 32
"""Looks after which no new generators are expected."""
ITEMS = 64
"""Items of a longer container aren't searched: it holds data."""


class Source(NamedTuple):
    """Functions that return and set the state of a random generator, and that seed it."""

    get: Callable[[], Any]
    put: Callable[[Any], Any]
    seed: Callable[[int], Any]


def torch_sources(devices: Iterable[torch.device] = ()) -> dict[str, Source]:
    """Return torch's global generators, of the CPU and of devices."""
    sources = {"torch": source_of(torch.default_generator)}
    for device in devices:
        if device.type in ("cuda", "xpu"):
            back_end = getattr(torch, device.type)
            get, put = partial(back_end.get_rng_state, device), partial(back_end.set_rng_state, device=device)
            sources[device.type] = Source(get, put, back_end.manual_seed)
        elif device.type == "mps":
            sources["mps"] = Source(torch.mps.get_rng_state, torch.mps.set_rng_state, torch.mps.manual_seed)
    return sources


def global_sources(device: torch.device | None = None) -> dict[str, Source]:
    """Return the global generators of torch, Python, NumPy if it is imported, and of a device."""
    sources = torch_sources([] if device is None else [device])
    sources["python"] = Source(random.getstate, random.setstate, random.seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        get = partial(numpy.random.get_state, legacy=False)
        sources["numpy"] = Source(get, numpy.random.set_state, partial(_seed_numpys, numpy))
    return sources


def _seed_numpys(numpy: Any, seed: int) -> None:
    """Seed NumPy's global generator, which may be of any kind."""
    kind = type(numpy.random.get_bit_generator())
    numpy.random.set_state(kind(seed).state)


def sources_in(owners: Mapping[str, Any]) -> dict[str, Source]:
    """Return the generators that are attributes of objects, by ``"owner.attribute"``."""
    return {
        f"{owner}.{name}": source_of(value)
        for owner, thing in owners.items()
        for name, value in vars(thing).items()
        if is_generator(value)
    }


def get_states(sources: Mapping[str, Source]) -> dict[str, Any]:
    """Return the states of random generators as plain data."""
    return {name: plain(source.get()) for name, source in sources.items()}


def put_states(sources: Mapping[str, Source], states: Mapping[str, Any]) -> None:
    """Set the states of random generators; those of generators that aren't there are skipped."""
    for name, source in sources.items():
        if name in states:
            source.put(raw(states[name]))


def plain(state: Any) -> Any:
    """Return a state with its NumPy arrays as mappings of bytes in a tensor and a dtype.

    >>> import numpy
    >>> state = numpy.random.default_rng(1).bit_generator.state
    >>> raw(plain(state)) == state
    True
    """
    if isinstance(state, Mapping):
        return {name: plain(value) for name, value in state.items()}
    if type(state).__module__ == "numpy":
        if not state.shape:
            return state.item()
        return {"dtype": str(state.dtype), "bytes": torch.frombuffer(bytearray(state.tobytes()), dtype=torch.uint8)}
    return state


def raw(state: Any) -> Any:
    """Return the state of which `plain` made plain data."""
    if isinstance(state, Mapping):
        if set(state) == {"dtype", "bytes"}:
            import numpy

            return numpy.frombuffer(state["bytes"].numpy().tobytes(), state["dtype"]).copy()
        return {name: raw(value) for name, value in state.items()}
    if isinstance(state, list):  # a checkpoint that was written in another format
        return tuple(map(raw, state))
    return state


def same(one: Any, other: Any) -> bool:
    """Return whether two plain states are equal."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return bool(one == other)


# --- generators that are attributes ---


def source_of(generator: Any) -> Source:
    """Return the functions for one of `is_generator`'s objects."""
    if isinstance(generator, torch.Generator):
        return Source(generator.get_state, generator.set_state, generator.manual_seed)
    if isinstance(generator, random.Random):
        return Source(generator.getstate, generator.setstate, generator.seed)
    if hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        return Source(partial(getattr, bits, "state"), partial(setattr, bits, "state"), partial(_seed_bits, bits))
    return Source(partial(generator.get_state, legacy=False), generator.set_state, generator.seed)


def _seed_bits(bits: Any, seed: int) -> None:
    bits.state = type(bits)(seed).state


def is_generator(value: Any) -> bool:
    """Return whether a value is a random generator of torch, Python or NumPy with a state."""
    if isinstance(value, torch.Generator | random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState)


def _search(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the generators in attributes, with paths such as ``"dataset.transforms.0.rng"``."""
    if id(value) in seen or isinstance(value, Tensor | type) or not depth:
        return
    if is_generator(value):
        seen.add(id(value))
        yield path, value
        return
    if isinstance(value, Mapping):
        children = [*value.items()] if len(value) <= ITEMS else []
    elif isinstance(value, list | tuple):
        children = [*enumerate(value)] if len(value) <= ITEMS else []
    elif isinstance(value, partial):
        children = [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    elif getattr(value, "__closure__", None):  # a function
        children = [
            (name, _content(cell)) for name, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True)
        ]
    elif type(value).__module__ in ("builtins", "numpy", "functools"):
        return
    else:
        children = [*getattr(value, "__dict__", {}).items()]
        if hasattr(value, "__self__"):  # a method
            children.append(("__self__", value.__self__))
    seen.add(id(value))
    for name, child in children:
        yield from _search(child, f"{path}.{name}", depth - 1, seen)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None


class OwnSources:
    """The generators in the attributes of objects, found anew in the first `SEARCHES`: some are made with an item."""

    def __init__(self, **roots: Any) -> None:
        self.roots = roots
        self._searches = 0
        self._latest: dict[str, Any] = {}

    def _found(self) -> dict[str, Any]:
        if self._searches < SEARCHES:
            self._searches += 1
            roots = self.roots.items()
            self._latest = {path: each for name, root in roots for path, each in _search(root, name, DEPTH, set())}
        return self._latest

    def get(self) -> dict[str, Any]:
        """Return the states as plain data, with the kinds of the generators."""
        found = self._found().items()
        return {path: {"kind": _kind(each), "state": plain(source_of(each).get())} for path, each in found}

    def put(self, states: Mapping[str, Any], owner: str) -> None:
        """Set states, and make the generators that aren't there yet.

        Args:
            states: from `get`.
            owner: what holds the generators, for the message.

        Raises:
            CheckpointError: an object with a generator isn't there, or holds another kind of generator.
        """
        found = self._found()
        for path, saved in states.items():
            generator = found.get(path) or self._made(path, saved["kind"])
            if generator is None or _kind(generator) != saved["kind"]:
                raise CheckpointError(
                    f"the checkpoint has the state of {path}, a random generator ({saved['kind']}) that {owner} doesn't"
                    " hold here; resume with the same data set, samplers and loader, or load the weights alone"
                )
            source_of(generator).put(raw(saved["state"]))

    def _made(self, path: str, kind: str) -> Any:
        """Return a new generator in an attribute that is None so far; None if there is no such attribute."""
        root, *names = path.split(".")
        owner = self.roots.get(root)
        for name in names[:-1]:
            if isinstance(owner, list | tuple):
                owner = owner[int(name)] if int(name) < len(owner) else None
            else:
                owner = owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)
        attributes = getattr(owner, "__dict__", {})
        if not names or attributes.get(names[-1]) is not None or owner is None:
            return None
        generator = _generator_of(kind)
        if generator is not None:
            setattr(owner, names[-1], generator)
        return generator


def _kind(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return f"torch:{generator.device}"
    if isinstance(generator, random.Random):
        return "python"
    bits = getattr(generator, "bit_generator", None)
    return f"numpy:{type(bits).__name__}" if bits is not None else "numpy"


def _generator_of(kind: str) -> Any:
    library, _, name = kind.partition(":")
    if library == "torch":
        return torch.Generator(name)
    if library == "python":
        return random.Random()
    import numpy

    if not name:
        return numpy.random.RandomState()
    bits = getattr(numpy.random, name, None) if name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64") else None
    return None if bits is None else numpy.random.Generator(bits())
