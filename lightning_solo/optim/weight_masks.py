"""Masks of pruned weights, of one bit per weight, and the choice of the weights to prune.

A mask is uint8 with a bit for each weight in the order of its memory; a bit of 1 is a pruned weight. Masks act after
an optimizer's step: on weights, on the corrections of split ones, and on states that have a number for each weight.

The smallest weights are found by their bits: the magnitude of an fp32 number, read as an integer, has the same order.
Two histograms of 2**15 and 2**16 bins give the exact bound for any number of weights without sorting or gathering them.
Among equal ones those that come first are pruned, so that the count is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.errors import ConflictError
from lightning_solo.optim.memory_order import chunks, in_memory_order
from lightning_solo.optim.param_groups import parameters_of
from lightning_solo.optim.random_numbers import seed_of
from lightning_solo.optim.split_optimizer import SplitOptimizer

CHUNK = {"cpu": 2**17, "cuda": 2**22}
"""Weights that are read or masked at a time; a multiple of 8."""
_INFINITY = 0x7F800000  # as the bits of an fp32 number; above it are NaNs
_NEVER = 2**31 - 1  # the key of a number that isn't chosen
Keys = Callable[[], Iterable[Tensor]]
"""Yields integers, int32 of one dimension, in the same order each time; the smallest are chosen."""


def pack(bits: Tensor) -> Tensor:
    """Return uint8 with 8 bits in each number, the first one lowest; bool of one dimension.

    >>> pack(torch.tensor([True, False, False, False, False, False, False, False, True]))
    tensor([1, 1], dtype=torch.uint8)
    """
    rows = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (rows * powers).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, count: int, table: Tensor | None = None) -> Tensor:
    """Return the first ``count`` bits, bool; ``table`` is `bits_of_bytes` of the device; None computes it."""
    table = bits_of_bytes(packed.device) if table is None else table
    return table[packed.int()].view(torch.bool)[:count]


def count_bits(packed: Tensor) -> int:
    """Return how many bits are 1."""
    table = bits_of_bytes(packed.device)
    return sum(int(table[packed[part].int()].view(torch.bool).sum()) for part in chunks(packed.numel(), CHUNK["cpu"]))


def bits_of_bytes(device: torch.device) -> Tensor:
    """Return for each byte its 8 bits, as 8 bytes that are read as one int64."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return bits.to(torch.uint8).view(torch.int64)[:, 0]


class WeightMasks:
    """Masks of weights, found by the identity of their parameter.

    Args:
        weights: name -> parameter, dense in memory; without masks nothing is pruned.

    Attributes:
        weights: name -> parameter.
        packed: name -> mask, on the parameter's device.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)
        self.packed = {name: _no_bits(p) for name, p in self.weights.items()}
        self._names = {p: name for name, p in self.weights.items()}
        self._tables = {p.device: bits_of_bytes(p.device) for p in self.weights.values()}

    @property
    def pruned(self) -> dict[str, int]:
        """Name -> number of pruned weights."""
        return {name: count_bits(mask) for name, mask in self.packed.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all masks."""
        return sum(mask.nbytes for mask in self.packed.values())

    def _slices(self, name: str) -> Iterator[slice]:
        """Yield slices of a weight in the order of its memory."""
        p = self.weights[name]
        yield from chunks(p.numel(), CHUNK.get(p.device.type, CHUNK["cuda"]))

    def _parts(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of a weight, and whether each number is pruned."""
        packed, table = self.packed[name], self._tables[self.weights[name].device]
        for part in self._slices(name):
            yield part, unpack(packed[part.start // 8 : -(-part.stop // 8)], part.stop - part.start, table)

    # --- acting ---

    @torch.no_grad()
    def apply(self, optimizer: Optimizer) -> None:
        """Set an optimizer's pruned weights to zero, with the states of each."""
        for p in parameters_of(optimizer):
            if (name := self._names.get(p)) is not None:
                self._zero(name, [p.detach(), *_elementwise(p, optimizer.state.get(p, {}).values())])

    @torch.no_grad()
    def apply_to(self, tensors: Mapping[str, Tensor]) -> None:
        """Set numbers to zero in tensors of the weights' names and shapes, such as their averages."""
        for name, tensor in tensors.items():
            if name in self.weights and tensor.shape == self.weights[name].shape:
                self._zero(name, [tensor.detach()])

    def _zero(self, name: str, tensors: Sequence[Tensor]) -> None:
        p = self.weights[name]
        flat = [each if each.ndim == 1 else in_memory_order(each, p.detach()) for each in tensors]
        for part, bits in self._parts(name):
            for each in flat:
                # on a CPU 0.6 of the time of masked_fill_
                each[part].copy_(torch.where(bits.to(each.device), 0, each[part]))
        for tensor, each in zip(tensors, flat, strict=True):
            if each.data_ptr() != tensor.data_ptr():  # it has another order in memory
                tensor.copy_(each.as_strided(p.shape, p.stride()))

    def misfit(self) -> str | None:
        """Return the name of a weight that isn't zero where its mask says so, or None."""
        for name, p in self.weights.items():
            flat = in_memory_order(p.detach())
            if any(bool((flat[part] != 0).logical_and_(bits).any()) for part, bits in self._parts(name)):
                return name
        return None

    # --- choosing ---

    def prune_share(self, share: float, optimizers: Sequence[Optimizer], *, over_all: bool) -> None:
        """Prune the smallest weights of each parameter, or of all together; pruned ones count as the smallest.

        Raises:
            ConflictError: a weight is NaN, or a parameter would have no weight left.
        """
        keys = {name: partial(self._magnitudes, name, optimizers) for name in self.weights}
        if over_all:
            sizes = sum(p.numel() for p in self.weights.values())
            taken = smallest(lambda: (key for each in keys.values() for key in each()), round(share * sizes))
            chosen = {name: _joined(next(taken) for _ in self._slices(name)) for name in keys}
        else:
            chosen = {
                name: _joined(smallest(each, round(share * self.weights[name].numel()))) for name, each in keys.items()
            }
        self._set(chosen)

    def prune_below(self, threshold: float, optimizers: Sequence[Optimizer]) -> None:
        """Prune the weights whose magnitude is below a threshold.

        Raises:
            ConflictError: as `prune_share`.
        """
        bound = int(torch.tensor(threshold, dtype=torch.float32).view(torch.int32)) + 1
        self._set({name: _joined(keys < bound for keys in self._magnitudes(name, optimizers)) for name in self.weights})

    def prune_fours(self, optimizers: Sequence[Optimizer], transposed: Iterable[str]) -> None:
        """Prune the two smallest of each four inputs of a matrix (outputs, inputs); if transposed, (inputs, outputs).

        Raises:
            ConflictError: a weight is NaN.
        """
        turned = set(transposed)
        self._set(
            {
                name: _joined(self._fours(name, optimizers, p.shape[1] if name in turned else 1))
                for name, p in self.weights.items()
            }
        )

    def _fours(self, name: str, optimizers: Sequence[Optimizer], inner: int) -> Iterator[Tensor]:
        master = in_memory_order(_master(self.weights[name], optimizers), self.weights[name].detach())
        rows = max(2, CHUNK["cpu"] // (4 * inner) // 2 * 2)  # an even number of groups: whole bytes of a mask
        for part in chunks(master.numel() // (4 * inner), rows):
            groups = _keys(name, master.view(-1, 4, inner)[part])
            order = groups.argsort(dim=1, stable=True)
            yield torch.zeros_like(groups, dtype=torch.bool).scatter_(1, order[:, :2], True).view(-1)

    def exchange(self, share: float, optimizers: Sequence[Optimizer], step: int, seed: int) -> None:
        """Prune a share of each parameter's weights, the smallest, and let as many pruned ones grow again, at random.

        Those start at zero, with zero states. Their choice depends on seed and step alone.

        Raises:
            ConflictError: a weight is NaN.
        """
        pruned = self.pruned
        chosen = {}
        for number, (name, p) in enumerate(self.weights.items()):
            count = min(round(share * (p.numel() - pruned[name])), pruned[name])
            dropped = smallest(partial(self._magnitudes, name, optimizers, never=True), count)
            draws = partial(self._draws, name, seed_of(step, number, seed))
            grown = smallest(draws, count)
            both = zip(self._parts(name), dropped, grown, strict=True)
            chosen[name] = _joined((bits & ~new) | old for (_, bits), old, new in both)
        self._set(chosen)

    def _magnitudes(self, name: str, optimizers: Sequence[Optimizer], never: bool = False) -> Iterator[Tensor]:
        """Yield keys of magnitudes, above those of pruned weights; those are the smallest, or never chosen."""
        p = self.weights[name]
        flat = in_memory_order(_master(p, optimizers), p.detach())
        for part, bits in self._parts(name):
            yield _keys(name, flat[part]).masked_fill_(bits, _NEVER if never else 0)

    def _draws(self, name: str, seed: int) -> Iterator[Tensor]:
        """Yield random keys of pruned weights."""
        generator = torch.Generator(self.weights[name].device).manual_seed(seed)
        for part, bits in self._parts(name):
            size, device = (part.stop - part.start,), bits.device
            drawn = torch.randint(_NEVER, size, generator=generator, device=device, dtype=torch.int32)
            yield drawn.masked_fill_(~bits, _NEVER)

    def _set(self, packed: Mapping[str, Tensor]) -> None:
        """Replace the masks, unless a parameter would have no weight left."""
        before, self.packed = self.packed, dict(packed)
        for name, count in self.pruned.items():
            if count == self.weights[name].numel():
                self.packed = before
                raise ConflictError(
                    f"callback.pruning would prune all {count:,} weights of {name}; write a smaller"
                    f" callback.pruning.amount or threshold, scope=layer, or callback.pruning.kept=[{name}]"
                )


def _no_bits(p: Tensor) -> Tensor:
    return torch.zeros(-(-p.numel() // 8), dtype=torch.uint8, device=p.device)


def _joined(parts: Iterable[Tensor]) -> Tensor:
    """Return the mask of a weight from its parts, all but the last of whole bytes."""
    return torch.cat([pack(part) for part in parts])


def _elementwise(p: Tensor, states: Iterable[object]) -> list[Tensor]:
    """Return the states that have a number for each weight, whose zero is 0: moments and corrections."""
    tensors = [each for each in states if isinstance(each, Tensor)]
    return [each for each in tensors if each.shape in (p.shape, (p.numel(),))]


def _master(p: Tensor, optimizers: Sequence[Optimizer]) -> Tensor:
    """Return a weight with all its bits, in fp32 or its own type."""
    for optimizer in optimizers:
        if isinstance(optimizer, SplitOptimizer) and "correction" in optimizer.state.get(p, {}):
            return optimizer.master_weight(p)
    return p.detach()


def _keys(name: str, values: Tensor) -> Tensor:
    """Return the order of magnitudes as int32, from 1 on."""
    keys = values.to(torch.float32).abs().view(torch.int32)
    if bool((keys > _INFINITY).any()):
        raise ConflictError(
            f"callback.pruning and {name}, which has weights that are NaN and have no order; resume from an earlier"
            " checkpoint, and write +callback=finite_guard, which stops before a weight becomes NaN"
        )
    return keys + 1


def smallest(keys: Keys, count: int) -> Iterator[Tensor]:
    """Yield for each tensor of keys which numbers are among the ``count`` smallest; of equal ones the first.

    >>> [bits.tolist() for bits in smallest(lambda: [torch.tensor([3, 1], dtype=torch.int32)] * 2, 3)]
    [[True, True], [False, True]]
    """
    upper, below = _bin_of(((key >> 16) for key in keys()), 2**15, count)
    lower, more = _bin_of((key[key >> 16 == upper] & 0xFFFF for key in keys()), 2**16, count - below)
    bound, left = (upper << 16) + lower, count - below - more
    for key in keys():
        bits = key < bound
        if left:
            equal = key == bound
            first = equal & (equal.cumsum(0) <= left)
            left -= int(first.sum())
            bits |= first
        yield bits


def _bin_of(numbers: Iterable[Tensor], bins: int, count: int) -> tuple[int, int]:
    """Return the bin of the number that is ``count``-th in order, and how many numbers are in lower bins."""
    histogram = sum(torch.bincount(each, minlength=bins).cpu() for each in numbers)
    assert isinstance(histogram, Tensor)
    sums = histogram.cumsum(0)
    at = int(torch.searchsorted(sums, max(count, 1)))
    return at, int(sums[at] - histogram[at])
