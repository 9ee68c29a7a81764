"""Channels and attention heads of a module that can be removed, found by its own forward and autograd's graph.

A layer's inputs are divided into units: single channels, or runs of channels, such as a head. Units can be removed
if each one depends on outputs of earlier layers that no other unit depends on. Autograd's graph of one forward says
which layers and parameters an input is computed from, up to the next layers. A gradient of NaN at some of its channels
then marks exactly those outputs that they depend on, whatever is computed in between: an activation keeps channels
apart, attention keeps heads apart, and a normalization mixes all. Each number is read off from few marks, by the bits
of the number of its unit. Finally forwards are compared: without the units, and with their inputs set to zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_solo.nn.structure import (
    ALONE,
    CHANNELS,
    HEADS,
    SHARED,
    Slice,
    Step,
    Structure,
    as_evaluated,
    channel_axis,
    hooked,
    is_layer,
    tracked,
    weight_dims,
)


class _Call(NamedTuple):
    """One call of a layer."""

    name: str
    layer: nn.Module
    x: Tensor
    axis: int
    edge: GradientEdge | None
    out_axis: int
    outputs: int


@dataclass
class Findings:
    """The structures of a module."""

    structures: list[Structure] = field(default_factory=list)  # in module order
    # qualified name of another layer -> why none of its inputs can be removed
    left_out: dict[str, str] = field(default_factory=dict)


def find_structures(module: nn.Module, step: Step) -> Findings:
    """Return the channels and heads that can be removed from a module.

    Args:
        module: the module, which is unchanged.
        step: a training step on one batch.
    """
    layers = {name: part for name, part in module.named_modules() if is_layer(part)}
    calls: list[_Call] = []

    def record(name: str, layer: Any, x: Tensor, y: Tensor) -> None:
        edge = get_gradient_edge(y) if y.grad_fn is not None else None
        out_axis = channel_axis(layer, y)
        calls.append(_Call(name, layer, x, channel_axis(layer, x), edge, out_axis, y.shape[out_axis]))

    with as_evaluated(module):
        with hooked(layers, record):
            loss = step()
        return _Search(module, layers, calls, loss).findings()


def _owners(module: nn.Module) -> dict[Tensor, list[str]]:
    """Return parameter -> all its qualified names."""
    owners: dict[Tensor, list[str]] = defaultdict(list)
    for name, p in module.named_parameters(remove_duplicate=False):
        owners[p].append(name)
    return owners


class _Search:
    """Finds structures in the calls of one forward."""

    def __init__(self, module: nn.Module, layers: Mapping[str, nn.Module], calls: list[_Call], loss: Any) -> None:
        self.module, self.layers, self.calls = module, layers, calls
        self.owners = _owners(module)
        self.outputs = {call.edge.node: call for call in calls if call.edge is not None}
        self.sources = [self._sources(call.x.grad_fn) for call in calls]
        self.readers: dict[str, set[str]] = defaultdict(set)  # layer or parameter -> layers that use it
        for call, (producers, leaves) in zip(calls, self.sources, strict=True):
            for name in [*(each.name for each in producers), *map(self._path, leaves)]:
                self.readers[name].add(call.name)
        for tensor in tracked(loss):
            for each in self._sources(tensor.grad_fn)[0]:
                self.readers[each.name].add("the loss")

    def _path(self, p: Tensor) -> str:
        return next(iter(self.owners.get(p, [])), "")

    def _sources(self, node: Any) -> tuple[list[_Call], list[Tensor]]:
        """Return the calls of layers, and the parameters, that a tensor is computed from without layers between."""
        producers: list[_Call] = []
        leaves: dict[Tensor, None] = {}
        ahead, seen = [node], {node}
        while ahead:
            node = ahead.pop()
            if node is None:
                continue
            if node in self.outputs:
                producers.append(self.outputs[node])
            elif hasattr(node, "variable"):
                leaves[node.variable] = None
            else:
                new = [each for each, _ in node.next_functions if each not in seen]
                seen.update(new)
                ahead += new
        return producers, list(leaves)

    def findings(self) -> Findings:
        result = Findings()
        by_layer: dict[str, list[int]] = defaultdict(list)
        for number, call in enumerate(self.calls):
            by_layer[call.name].append(number)
        for name in self.layers:
            found = self._of_layer(name, by_layer[name])
            if isinstance(found, str):
                result.left_out[name] = found
            else:
                result.structures.append(found)
        return result

    def _of_layer(self, name: str, numbers: list[int]) -> Structure | str:
        """Return the structure of a layer's inputs, or why there is none."""
        if not numbers:
            return "not called by the first batch, or its weight is read by something else"
        found: Structure | None = None
        for number in numbers:
            one = self._of_call(self.calls[number], *self.sources[number])
            if isinstance(one, str):
                return one
            if found is not None and not _same_slices(found, one):
                return "called several times with other inputs"
            found = one
        assert found is not None
        return self._unsuitable(found) or found

    def _of_call(self, call: _Call, producers: list[_Call], leaves: list[Tensor]) -> Structure | str:
        matrices = [p for p in leaves if p.ndim > 1]
        if not producers and not matrices:
            return "its input isn't computed by a layer"
        sources = [*(each.name for each in producers), *map(self._path, matrices)]
        has_own = any(self.readers[self._path(p)] == {call.name} for p in matrices)  # as torch's attention
        if not has_own and (reason := self._read_elsewhere(call, sources)):  # a probe of a residual stream is slow
            return reason
        probe = _Probe(call, producers, leaves)
        inputs = call.x.shape[call.axis]
        for size in self._run_lengths(call, inputs):
            units = probe.units(size)
            if units is not None:
                structure = self._structure(call, producers, leaves, units, inputs // size, size)
                cut = {name for each in structure.slices[1:] for name in (each.owner, each.path)}
                return self._read_elsewhere(call, [each for each in sources if each in cut]) or structure
        return "something mixes all its inputs, as a normalization or a single head does"

    def _read_elsewhere(self, call: _Call, sources: list[str]) -> str | None:
        """Return why a layer's inputs stay that are computed by layers and parameters, if others use these too."""
        others = {reader for source in sources for reader in self.readers[source]} - {call.name}
        if last := [name for name in (*self.layers, "the loss") if name in others][-1:]:  # one for a whole stream
            return f"input from a source that {last[0]} reads too"
        return None

    def _run_lengths(self, call: _Call, inputs: int) -> list[int]:
        """Return the possible sizes of units: 1, those by numbers of heads, and all other divisors."""
        part = self.module.get_submodule(call.name.rpartition(".")[0])
        named = [n for name, n in vars(part).items() if "head" in name and type(n) is int and n > 1 and inputs % n == 0]
        likely = sorted({size for n in named for size in (n, inputs // n)})
        return list(dict.fromkeys([1, *likely, *(n for n in range(1, inputs // 2 + 1) if inputs % n == 0)]))

    def _structure(
        self,
        call: _Call,
        producers: list[_Call],
        leaves: list[Tensor],
        units: tuple[list[Tensor], list[tuple[int, Tensor] | None]],
        count: int,
        size: int,
    ) -> Structure:
        slices = [Slice(call.name, "weight", weight_dims(call.layer)[1], torch.arange(count).repeat_interleave(size))]
        mixed = False
        for producer, unit in zip(producers, units[0], strict=True):
            if bool((unit >= 0).any()):
                mixed |= int((unit == 0).sum()) > 1
                slices.append(Slice(producer.name, "weight", weight_dims(producer.layer)[0], unit))
                if getattr(producer.layer, "bias", None) is not None:
                    slices.append(Slice(producer.name, "bias", 0, unit))
        for p, where in zip(leaves, units[1], strict=True):
            if where is not None:
                owner, _, name = self._path(p).rpartition(".")
                slices.append(Slice(owner, name, *where))
                mixed |= p.ndim > 1 and int((where[1] == 0).sum()) > 1
                part, total = self.module.get_submodule(owner), len(where[1])
                for buffer, value in part.named_buffers(recurse=False):  # as those of a batch norm
                    if value.ndim and value.shape[0] == total and type(part).__module__.startswith("torch.nn."):
                        slices.append(Slice(owner, buffer, 0, where[1]))
        slices = list({(each.owner, each.name, each.dim): each for each in slices}.values())
        kind = HEADS if size > 1 and mixed else CHANNELS
        layers = tuple(dict.fromkeys([call.name, *(each.owner for each in slices if each.owner in self.layers)]))
        return Structure(call.name, kind, count, layers, tuple(slices))

    def _unsuitable(self, structure: Structure) -> str | None:
        """Return why tensors of a structure can't become smaller, or None."""
        for each in structure.slices:
            part = self.module.get_submodule(each.owner)
            if each.name in part._buffers:
                continue
            p = part._parameters.get(each.name)
            if p is None or type(p) is not nn.Parameter:
                return f"{each.path} isn't a plain parameter"
            if len(self.owners[p]) > 1:
                return f"{each.path} is also {sorted(set(self.owners[p]) - {each.path})[0]}"
            if isinstance(part, nn.Embedding | nn.EmbeddingBag):
                return f"its input is computed by the embedding {each.owner}"
        return None


def _same_slices(one: Structure, other: Structure) -> bool:
    if one.units != other.units or len(one.slices) != len(other.slices):
        return False
    return all(a[:3] == b[:3] and torch.equal(a.unit, b.unit) for a, b in zip(one.slices, other.slices, strict=True))


class _Probe:
    """Marks channels of a layer's input by gradients of NaN, and reads which outputs and parameters they depend on."""

    def __init__(self, call: _Call, producers: list[_Call], leaves: list[Tensor]) -> None:
        self.call, self.producers, self.leaves = call, producers, leaves
        self._inputs: list[Any] = [*(each.edge for each in producers), *leaves]
        self._dims = [[each.out_axis] for each in producers] + [list(range(p.ndim)) for p in leaves]

    def _marked(self, chosen: Tensor) -> list[list[Tensor]]:
        """Return for each source, and each of its dimensions, which indices some chosen channel depends on."""
        x, axis = self.call.x, self.call.axis
        shape = [1] * x.ndim
        shape[axis] = -1
        mark = torch.where(chosen.to(x.device).view(shape), float("nan"), torch.zeros_like(x))
        grads = torch.autograd.grad(x, self._inputs, mark.to(x.dtype), retain_graph=True, allow_unused=True)
        marks = []
        for number, (grad, dims) in enumerate(zip(grads, self._dims, strict=True)):
            if grad is None:
                marks.append([torch.zeros(self._size(number, dim), dtype=torch.bool) for dim in dims])
            else:
                nan = grad.isnan().cpu()
                marks.append([nan.any(dim=[d for d in range(nan.ndim) if d != dim]) for dim in dims])
        return marks

    def _size(self, number: int, dim: int) -> int:
        if number < len(self.producers):
            return self.producers[number].outputs
        return self.leaves[number - len(self.producers)].shape[dim]

    def units(self, size: int) -> tuple[list[Tensor], list[tuple[int, Tensor] | None]] | None:
        """Return the unit of each output of the layers before, and of parameters the dimension and the unit of each.

        None if runs of ``size`` channels aren't independent.
        """
        count = self.call.x.shape[self.call.axis] // size
        if count < 2:
            return None
        number = torch.arange(count).repeat_interleave(size)
        on: list[Any] = []
        off: list[Any] = []
        for bit in range((count - 1).bit_length()):
            is_one = (number >> bit & 1).bool()
            on.append(self._marked(is_one))
            off.append(self._marked(~is_one))
            if not self._may_differ(on, off):
                return None
        decoded = [
            [
                _unit_numbers([each[s][d] for each in on], [each[s][d] for each in off], count)
                for d in range(len(self._dims[s]))
            ]
            for s in range(len(self._inputs))
        ]
        outputs = [one[0] for one in decoded[: len(self.producers)]]
        if any(each is None for each in outputs):
            return None
        known = [each for each in outputs if each is not None]
        parameters: list[tuple[int, Tensor] | None] = []
        for dims in decoded[len(self.producers) :]:
            split = next((d for d, each in enumerate(dims) if each is not None and bool((each >= 0).any())), None)
            if split is None and any(each is None for each in dims):
                return None
            chosen = None if split is None else dims[split]
            parameters.append(None if split is None or chosen is None else (split, chosen))
        matrices = [each[1] for p, each in zip(self.leaves, parameters, strict=True) if each is not None and p.ndim > 1]
        held = torch.cat([torch.zeros(0, dtype=torch.long), *known, *matrices])
        return (known, parameters) if set(range(count)) <= set(held.tolist()) else None

    def _may_differ(self, on: list[Any], off: list[Any]) -> bool:
        """Return whether no output depends so far on units of both kinds in one bit and of one kind in another."""
        for s in range(len(self.producers)):
            both = torch.stack([a[s][0] & b[s][0] for a, b in zip(on, off, strict=True)])
            one = torch.stack([a[s][0] ^ b[s][0] for a, b in zip(on, off, strict=True)])
            if bool((both.any(0) & one.any(0)).any()):
                return False
        return True


def _unit_numbers(on: Sequence[Tensor], off: Sequence[Tensor], count: int) -> Tensor | None:
    """Return the number of the unit that depends on each index, `SHARED` or `ALONE`; None if several do, but not all.

    Args:
        on: for each bit, which indices units depend on whose number has this bit.
        off: the same of the other units.
        count: number of units.

    An index that no mark reached, as of a unit whose activation is 0, is taken to continue the others' order.
    """
    one, zero = torch.stack([*on]), torch.stack([*off])
    powers = 2 ** torch.arange(len(one))[:, None]
    unit = (one * powers).sum(0)
    shared = (one & zero).all(0)
    dead = ~(one | zero).any(0)
    alone = (one ^ zero).all(0)
    if not bool((shared | dead | alone).all()) or bool((unit[alone] >= count).any()):
        return None
    unit[shared] = SHARED
    if bool(dead.any()):
        if bool(alone.any()):
            indices = torch.arange(len(unit))
            for guess in (indices % count, indices * count // len(unit)):
                if len(unit) % count == 0 and torch.equal(guess[~dead], unit[~dead]):
                    return guess
            return None
        unit[dead] = ALONE
    return unit
