"""Blocks whose frozen weights are on the host and are loaded by a `BlockRing` while the block runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_solo.data.nested import tensors_of
from lightning_solo.errors import ConflictError
from lightning_solo.memory.block_ring import BlockRing
from lightning_solo.nn.forwards import original_forward, record_of, replace_forward, restore_forwards
from lightning_solo.nn.quantized import HOST, STORED, QuantizedWeight

_PLAIN = (Tensor, nn.Parameter, FakeTensor)  # other classes hold their numbers in tensors of their own


class Place(NamedTuple):
    """An entry of a module's parameters or buffers."""

    name: str
    register: dict[str, Any]
    key: str
    tensor: Tensor
    is_trained: bool


class Streamed:
    """The record of a block: the places of its frozen weights, and its number in a ring.

    Copies and pickles have no ring: they run with weights of their own, as any module.
    """

    def __init__(self) -> None:
        self.ring: BlockRing | None = None
        self.number = -1
        self.places: list[Place] = []
        self._indices: list[int] = []  # of each place's tensor in the ring's block
        self._is_loaded = False

    def start(self, ring: BlockRing, number: int, places: list[Place]) -> None:
        """Load the weights from a ring from now on."""
        order = [*dict.fromkeys(id(place.tensor) for place in places)]
        self.ring, self.number, self.places = ring, number, places
        self._indices = [order.index(id(place.tensor)) for place in places]

    def __reduce__(self) -> Any:
        return Streamed, ()

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Put the weights on the device in the place of those on the host.

        Raises:
            ConflictError: a weight has been unfrozen or replaced.
        """
        if self.ring is None or self._is_loaded:
            yield
            return
        for place in self.places:
            own = place.register.get(place.key)
            if own is not place.tensor or own.requires_grad != place.is_trained:
                raise ConflictError(
                    f"callback.frozen_streaming: {place.name} was unfrozen or replaced during the fit, and only weights"
                    " that stay frozen are streamed; unfreeze it before the fit, or write ~callback.frozen_streaming"
                )
        with self.ring.using(self.number) as tensors:
            self._is_loaded = True
            for place, index in zip(self.places, self._indices, strict=True):
                place.register[place.key] = tensors[index]
            try:
                yield
            finally:
                self._is_loaded = False
                for place in self.places:
                    place.register[place.key] = place.tensor

    def load(self, gradient: Tensor) -> None:
        """Load the weights for backward."""
        if self.ring is not None:
            self.ring.load(self.number)


def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a block with its weights on the device; backward loads them again before it enters the block."""
    streamed, original = record_of(block, Streamed), original_forward(block, Streamed)
    if streamed is None or streamed.ring is None:
        return original(*args, **kwargs)
    inputs = list(tensors_of((args, kwargs)))
    given = {id(x): x.grad_fn for x in [*inputs, *map(hooked, inputs)]}
    with streamed.loaded():
        output = original(*args, **kwargs)
    if torch.is_grad_enabled():
        for tensor in tensors_of(output):
            if not tensor.requires_grad:
                continue
            made = hooked(tensor)
            if given.get(id(made), ()) is not made.grad_fn:  # else the block passes on what others made
                made.register_hook(streamed.load)  # type: ignore[no-untyped-call]
    return output


def hooked(tensor: Tensor) -> Tensor:
    """Return the tensor whose hooks run before the backward of what has made this one: of a view its base.

    When a view is changed in place, autograd gives it another history, without the hooks of the view.
    """
    base = tensor._base
    return tensor if base is None or base.grad_fn is None else base


def stream_blocks(blocks: Mapping[str, nn.Module]) -> dict[str, Streamed]:
    """Replace each block's forward by one that loads its weights once its record has a ring; return the records.

    ``restore_forwards(blocks, Streamed)`` undoes it.
    """
    records = {name: Streamed() for name in blocks}
    restore_forwards(blocks.values(), Streamed)  # of a copy from within a fit
    for name, block in blocks.items():
        replace_forward(block, forward, records[name])
    return records


def start_ring(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    records: Mapping[str, Streamed],
    device: torch.device,
    window: int,
    trains: bool,
) -> BlockRing | None:
    """Move the frozen weights of blocks to the host, and return the ring that loads them; None if there are none.

    All weights count as frozen unless the module ``trains``.
    """
    places = streamed_places(module, blocks, trains)
    if not places:
        return None
    tensors = [{id(place.tensor): place.tensor for place in each}.values() for each in places.values()]
    ring = BlockRing([list(each) for each in tensors], device, window)
    for number, (name, each) in enumerate(places.items()):
        records[name].start(ring, number, each)
    return ring


def streamed_places(module: nn.Module, blocks: Mapping[str, nn.Module], trains: bool) -> dict[str, list[Place]]:
    """Return for each block that has some the places of its weights to stream, which no other part shares.

    These are parameters, frozen ones if the module ``trains``, and the codes and scales of quantized weights. A weight
    under several names in one block has several places.
    """
    owner = dict.fromkeys(_outside(module, blocks), "")  # id of a part -> its block; empty if it has none or several
    for name, block in blocks.items():
        for part in block.modules():
            owner[id(part)] = name if id(part) not in owner else ""
    owners: dict[int, set[str]] = {}
    places: dict[str, list[Place]] = {name: [] for name in blocks}
    for name, part in module.named_modules():
        of_block = owner[id(part)]
        registers: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for register in registers:
            for key, tensor in register.items():
                if tensor is not None:
                    owners.setdefault(id(tensor), set()).add(of_block)
                    if of_block and _is_streamed(part, key, tensor) and not (trains and tensor.requires_grad):
                        places[of_block].append(Place(f"{name}.{key}", register, key, tensor, tensor.requires_grad))
    for name, all_places in places.items():
        places[name] = [place for place in all_places if owners[id(place.tensor)] == {name}]
    return {name: kept for name, kept in places.items() if kept}


def _outside(module: nn.Module, blocks: Mapping[str, nn.Module]) -> set[int]:
    """Return the ids of the parts that are reached without going through a block."""
    inside, seen, rest = {id(block) for block in blocks.values()}, set[int](), [module]
    while rest:
        part = rest.pop()
        if id(part) not in inside and id(part) not in seen:
            seen.add(id(part))
            rest.extend(part.children())
    return seen


def _is_streamed(part: nn.Module, key: str, tensor: Tensor) -> bool:
    if key in part._buffers:
        return isinstance(part, QuantizedWeight) and key in STORED and part.format != HOST
    # recurrent layers keep a list of their weights
    is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not isinstance(part, nn.RNNBase)
    return is_plain and not tensor.is_meta and _is_dense(tensor)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are in memory one after the other, in any order of dimensions."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in strides)
    return tensor.numel() > 0 and last == tensor.numel() - 1


def away(records: Mapping[str, Streamed]) -> AbstractContextManager[None]:
    """Take the streamed weights out of their modules, so that these move to the device without them."""
    return taken_out([place for record in records.values() for place in record.places])


@contextmanager
def taken_out(places: Sequence[Place]) -> Iterator[None]:
    """Take tensors out of their modules within a context."""
    for place in places:
        place.register[place.key] = None
    try:
        yield
    finally:
        for place in places:
            place.register[place.key] = place.tensor
