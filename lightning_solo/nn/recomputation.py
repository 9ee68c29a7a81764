"""Recompute a block's activations in backward instead of keeping them; a recomputation that would differ is refused."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_solo.errors import ConflictError, PresetError
from lightning_solo.memory.category_peaks import uncounted
from lightning_solo.nn.activation_budget import Call, Calls, saved_bytes
from lightning_solo.nn.forward_state import ForwardState
from lightning_solo.nn.forwards import original_forward, record_of, replace_forward
from lightning_solo.nn.recomputed_tensors import RecomputedTensors
from lightning_solo.nn.rollback import Rollback, names_in_metric

_SAMPLE = 1024  # elements of each output that the first recomputation is compared with
_GATHERED_ON_USE: WeakSet[nn.Module] = WeakSet()
_keeping: Callable[[], AbstractContextManager[Any]] = nullcontext  # in which wrapped blocks save their inputs

_NOTHING: Any = nullcontext()
_NO_MODULES: Any = nullcontext(frozenset[nn.Module]())

PRODUCTS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten._int_mm",
    "aten._scaled_mm",
    "aten._scaled_mm_v2",
    "lightning_solo.fp16_accumulated",
    "aten.convolution",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
)
"""Operators that take most of the time: products of matrices, convolutions and attention."""


NONE, INPUT, ALL = "none", "input", "all"


class Kept:
    """Operators whose results recomputed blocks keep.

    Args:
        names: such as ``aten.mm``, for all its overloads.

    Attributes:
        matched: whether one of them has run in a block.
        seen: names of the operators that ran in blocks.

    Raises:
        PresetError: torch has no operator with one of the names.
    """

    def __init__(self, names: Iterable[str]) -> None:
        importlib.import_module("lightning_solo.nn.rounded_products")  # registers its operator, one of PRODUCTS
        self.names = frozenset(names)
        self.matched = False
        self.seen: set[str] = set()
        for name in self.names:
            space, _, operator = name.partition(".")
            if not operator or not hasattr(getattr(torch.ops, space), operator):
                raise PresetError(
                    f"callback.activation_checkpointing.keep: torch has no operator {name!r}; write for example"
                    " callback.activation_checkpointing.keep=[aten.mm,aten.gelu]"
                )

    def contexts(self) -> Any:
        """Return the contexts of a forward and of its recomputation."""
        return create_selective_checkpoint_contexts(self._policy)  # type: ignore[no-untyped-call]

    def _policy(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(getattr(operator, "overloadpacket", operator))
        self.seen.add(name)
        if name not in self.names:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.matched = True
        return CheckpointPolicy.MUST_SAVE


@dataclass
class Wrap:
    """The settings and state of a block whose activations are recomputed."""

    name: str
    verify: bool  # whether the next recomputation is compared with its forward
    keep: Kept | None = None  # operators whose results are kept
    calls: Calls | None = None  # records which calls keep all their results; None: no call
    number: Call | None = None  # of a call that came through `run_compiled`
    keeps: bool = False  # whether that call keeps all its results
    moves: str = INPUT  # saved tensors that `inputs_kept_in` may move: its input, NONE, or ALL, without recomputation
    host_state: bool = True  # whether its forward may change a _HostState
    statistics: bool | None = None  # whether it has layers as BatchNorm; None: not looked for yet
    recomputed: bool = False
    remedy: str = ""  # for a recomputation that differs; empty: that of activation checkpointing


def checkpoint_blocks(
    blocks: Mapping[str, nn.Module],
    verify: bool = True,
    keep: Kept | None = None,
    calls: Calls | None = None,
    moves: str = INPUT,
) -> dict[str, nn.Module]:
    """Make each block recompute its activations in backward; return those that were not wrapped before.

    A forward without gradients stays the same. ``restore_forwards(blocks, Wrap)`` undoes it.

    Args:
        blocks: name -> block; the names are for messages.
        verify: compare each block's first recomputation with its forward, and raise ``ConflictError`` in backward if
            they differ. Torch compares only shapes, dtypes and devices, so a block that takes another branch, or
            updates a tensor that it reads, would silently get wrong gradients.
        keep: operators whose results are kept instead of recomputed.
        calls: decides which calls keep all their activations.
        moves: as in `Wrap`.
    """
    fresh = {name: block for name, block in blocks.items() if record_of(block, Wrap) is None}
    for name, block in fresh.items():
        replace_forward(block, forward, Wrap(name, verify, keep, calls, moves=moves))
    return fresh


@contextmanager
def weights_gathered_on_use(module: nn.Module) -> Iterator[None]:
    """Return a context that marks a module's weights as present only while a part that uses them runs.

    Its blocks are recomputed, but not verified: a second forward to its end would release weights that backward uses
    next.
    """
    parts = list(module.modules())
    _GATHERED_ON_USE.update(parts)
    try:
        yield
    finally:
        _GATHERED_ON_USE.difference_update(parts)


def is_gathered_on_use(part: nn.Module) -> bool:
    """Return whether a part's weights are present only while it runs; see `weights_gathered_on_use`."""
    return part in _GATHERED_ON_USE


@contextmanager
def inputs_kept_in(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Make wrapped blocks save the inputs of their recomputation in ``context()``, and nothing else; see `Wrap`."""
    global _keeping
    before, _keeping = _keeping, context
    try:
        yield
    finally:
        _keeping = before


def keeping_inputs() -> AbstractContextManager[Any]:
    """Return the context of `inputs_kept_in`, in which to call `run_recomputed`."""
    return _keeping()


def refuse_own_checkpointing(module: nn.Module, option: str) -> None:
    """Refuse a module that recomputes its blocks by itself, beside ``option``, such as ``"callback.<technique>"``."""
    for name, part in module.named_modules():
        for switch in ("gradient_checkpointing", "grad_checkpointing"):  # Hugging Face's and timm's
            if getattr(part, switch, False) is True:
                raise ConflictError(
                    f"{option}: {type(part).__name__} at {name or 'the root'!r} has {switch}=True and "
                    "recomputes by itself; write model.gradient_checkpointing_disable() (timm: "
                    f"set_grad_checkpointing(False)) before the fit, or ~{option}"
                )


def run_compiled(block: nn.Module, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return ``compiled(block, *args, **kwargs)``, which compiles `forward` of a wrapped block.

    It decides outside the graph whether the call keeps its results, so that all blocks share one graph for either case.
    It also enters the context in which inputs are saved.
    """
    wrap = record_of(block, Wrap)
    run = partial(compiled, block, *args, **kwargs)
    if wrap is None or not torch.is_grad_enabled():
        return run()
    calls = wrap.calls
    try:
        if calls is not None:
            wrap.number = calls.number(wrap.name)
            if calls.counting:
                wrap.keeps = True
                calls.compiled[wrap.number] = _saved_when_compiled(block, run, (args, kwargs))
            wrap.keeps = wrap.number in calls.kept
        with nullcontext() if wrap.keeps or wrap.keep is not None or wrap.moves == NONE else _keeping():
            return run()
    finally:
        wrap.number, wrap.keeps = None, False


def _saved_when_compiled(block: nn.Module, run: Callable[[], Any], inputs: Any) -> int:
    """Return the bytes that a block's compiled forward saves for backward, without side effects."""
    rollback, host = Rollback(block, _device_of(block)), _HostState(block)
    rollback.save()
    try:
        with uncounted():
            return saved_bytes(run, inputs, list(block.parameters()), list(block.buffers()))
    finally:
        rollback.restore()
        host.restore()


def _device_of(block: nn.Module) -> torch.device:
    return next((p.device for p in block.parameters()), torch.device("cpu"))


def has_recomputed(blocks: Iterable[nn.Module]) -> bool:
    """Return whether any wrapped block was recomputed."""
    return any(wrap.recomputed for block in blocks if (wrap := record_of(block, Wrap)) is not None)


def moves_activations(module: nn.Module) -> bool:
    """Return whether `inputs_kept_in` moves all saved tensors of a wrapped block in a module."""
    return any(wrap.moves == ALL for block in module.modules() if (wrap := record_of(block, Wrap)) is not None)


def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a wrapped block's forward; with gradients, save what its recomputation needs."""
    wrap, original = record_of(block, Wrap), original_forward(block, Wrap)
    if wrap is None or not torch.is_grad_enabled():
        return original(*args, **kwargs)
    if wrap.moves == ALL:
        with nullcontext() if torch.compiler.is_compiling() else _keeping():
            return original(*args, **kwargs)
    args, kwargs, has_keys = without_cache(block, args, kwargs)
    if has_keys:
        raise ConflictError(
            f"activation checkpointing: block {wrap.name!r} gets a key-value cache that already holds keys; "
            "write use_cache=False, or ~callback.activation_checkpointing"
        )
    if torch.compiler.is_compiling():
        if wrap.keeps:
            return original(*args, **kwargs)
        wrap.recomputed = True  # by the compiler's code
        if wrap.keep is not None:  # partial, since torch.compile takes no method there
            kwargs["context_fn"] = partial(Kept.contexts, wrap.keep)
        return checkpoint(original, *args, use_reentrant=False, **kwargs)
    number = None if wrap.calls is None else wrap.number or wrap.calls.number(wrap.name)
    if wrap.calls is not None and number in wrap.calls.kept:
        return original(*args, **kwargs)
    with nullcontext() if wrap.moves == NONE else _keeping():  # tensors inside are saved by a context of their own
        return run_recomputed(block, wrap, original, args, kwargs, number)


def run_recomputed(
    block: nn.Module, wrap: Wrap, function: Callable[..., Any], args: Any, kwargs: Any, number: Call | None = None
) -> Any:
    """Return ``function(*args, **kwargs)``, which runs again in backward instead of keeping its activations."""
    return _Call(block, wrap, function, number).forward(args, kwargs)


class _Call:
    """A forward of a block, and its recomputation.

    Tensors nested in arguments are saved like those by position. The forward gets the caller's containers, so that a
    block can append to the caller's list; the recomputation gets copies.
    """

    def __init__(self, block: nn.Module, wrap: Wrap, original: Callable[..., Any], number: Call | None = None) -> None:
        self.block, self.wrap, self.original, self.number = block, wrap, original, number
        self.verify, wrap.verify = wrap.verify and block not in _GATHERED_ON_USE, False
        self.spec: Any = None  # None: all arguments are tensors by position, as most blocks are called
        # around the block's own operators only, not around those that compare its recomputation
        self.keeping, self.using = (_NOTHING, _NOTHING) if wrap.keep is None else wrap.keep.contexts()
        self.order: list[int] | None = None  # of tensors that are passed several times
        self.host: _HostState | None = None  # from before the forward, if the forward changed it

    def forward(self, args: Any, kwargs: Any) -> Any:
        """Run the block; backward recomputes the tensors that it saves."""
        tensors: Sequence[Any] = args
        if kwargs or not all(isinstance(value, Tensor) for value in args):
            leaves, self.spec = tree_flatten((args, kwargs))
            self.is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
            self.others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
            tensors = list(compress(leaves, self.is_tensor))
        different = {id(tensor): tensor for tensor in tensors}
        if len(different) < len(tensors):  # attention asks whether its key *is* its value
            numbers = {key: number for number, key in enumerate(different)}
            self.order = [numbers[id(tensor)] for tensor in tensors]
            tensors = list(different.values())
        self.state = ForwardState([tensor.device for tensor in tensors] or [_device_of(self.block)])
        before = _HostState(self.block) if self.wrap.host_state else None
        versions = [_version(tensor) for tensor in tensors] if self.verify else []
        # a comparison or a count needs the recomputation to run to its end
        counting = self.wrap.calls is not None and self.wrap.calls.counting
        whole = self.verify or (counting and self.block not in _GATHERED_ON_USE)
        with RecomputedTensors(self.recompute, tensors, whole, self.different), self.keeping:
            output = self.run(args, kwargs)
        self.host = before if before is not None and before != _HostState(self.block) else None
        if self.verify:
            if versions != [_version(tensor) for tensor in tensors]:
                raise self.conflict("changes its input in place, so it can't be computed again")
            self.wrap.host_state = self.host is not None
            self.samples = _samples(output)
            self.low_precision = any(torch.is_autocast_enabled(t.device.type) for t in self.samples)
        return output

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run the block's own forward."""
        if self.wrap.calls is None or self.number is None:
            return self.original(*args, **kwargs)
        return self.wrap.calls.counted(self.number, partial(self.original, *args, **kwargs), (args, kwargs))

    def recompute(self, *tensors: Tensor) -> None:
        """Run the block again under the state of its forward, and compare the results if `verify` is set."""
        self.wrap.recomputed = True
        args: Any = tensors if self.order is None else [tensors[number] for number in self.order]
        kwargs: dict[str, Any] = {}
        if self.spec is not None:
            tensor, other = iter(args), iter(self.others)
            leaves = [next(tensor if is_tensor else other) for is_tensor in self.is_tensor]
            args, kwargs = tree_unflatten(leaves, self.spec)
        if self.wrap.statistics is None:
            self.wrap.statistics = any(isinstance(module, _NormBase) for module in self.block.modules())
        host = _NOTHING if self.host is None else self.host.again()
        statistics = statistics_kept(self.block) if self.wrap.statistics else _NO_MODULES
        with self.state, host, statistics as kept:
            if not self.verify:
                self.run_again(args, kwargs)
                return
            buffers = [(m, name, b, b.clone()) for m, name, b in _buffers(self.block) if m not in kept]
            others = [(m, name, _copied(value)) for m, name, value in _sums(self.block)]
            output = self.run_again(args, kwargs)
            for module, name, buffer, before in buffers:
                if not _same(before, module._buffers.get(name, buffer)):
                    raise self.conflict(f"updates {type(module).__name__}.{name} in forward, which would happen twice")
        for module, name, value in others:
            if _adds_up(value, vars(module).get(name)):
                raise self.conflict(f"updates {type(module).__name__}.{name} in forward, which would happen twice")
        new = _samples(output)
        tolerance = 2e-2 if self.low_precision or any(t.dtype.itemsize < 4 for t in new) else 1e-3
        if len(new) != len(self.samples) or not all(map(_same, self.samples, new, [tolerance] * len(new))):
            raise self.conflict("gives another output when it is computed again")

    def run_again(self, args: Any, kwargs: Any) -> Any:
        """Run the block's own forward with the results that its first one kept."""
        try:
            with self.using:
                return self.run(args, kwargs)
        except RuntimeError as error:
            if self.wrap.keep is not None and "mutated" in str(error):
                raise self.conflict(
                    "changes a kept result in place (write callback.activation_checkpointing.keep=nothing, or relu for"
                    " relu_)"
                ) from error
            if self.wrap.keep is not None and "backward an extra time" in str(error):
                raise ConflictError(
                    f"activation checkpointing: block {self.wrap.name!r} has a second backward, as in a penalty of"
                    " gradients, and kept results allow one; write callback.activation_checkpointing.keep=nothing"
                ) from error
            raise

    def different(self) -> ConflictError:
        return self.conflict("saves other tensors when it is computed again")

    def conflict(self, what: str) -> ConflictError:
        if self.wrap.remedy:
            return ConflictError(f"{self.wrap.name} {what}; its gradients would be wrong. {self.wrap.remedy}")
        kind = type(self.block).__name__
        return ConflictError(
            f"activation checkpointing: block {self.wrap.name!r} ({kind}) {what}; its gradients would be wrong. "
            f"Write callback.activation_checkpointing.blocks=[ClassName] of classes that don't contain it, not {kind}"
        )


def without_cache(block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, bool]:
    """Return the arguments without Hugging Face key-value caches, and whether a cache has keys of this block already.

    A second forward would append to the caches again. Hugging Face's own gradient checkpointing leaves them out, too:
    a training forward starts with an empty cache, which it doesn't read.
    """
    cache_utils = sys.modules.get("transformers.cache_utils")
    if cache_utils is None or getattr(block, "_can_checkpoint_with_cache", False):
        return args, kwargs, False
    caches = [value for value in (*args, *kwargs.values()) if isinstance(value, cache_utils.Cache)]
    layers = {getattr(m, "layer_idx", None) for m in block.modules()} - {None} if caches else set()
    has_keys = any(int(cache.get_seq_length(layer)) for cache in caches for layer in layers)
    args = [None if isinstance(value, cache_utils.Cache) else value for value in args]
    kwargs = {key: None if isinstance(value, cache_utils.Cache) else value for key, value in kwargs.items()}
    if kwargs.get("use_cache") is True and hasattr(block, "gradient_checkpointing"):  # a Hugging Face layer
        kwargs["use_cache"] = False
    return args, kwargs, has_keys


class _HostState:
    """State on the host that a forward may change and torch doesn't replay.

    It consists of Python's and NumPy's global random generators, and of numbers, flags and lists that are attributes of
    the block's modules, such as a count of calls. Lists of metrics are left out: recomputation refuses their changes.
    """

    def __init__(self, block: nn.Module) -> None:
        numpy = sys.modules.get("numpy")
        self.block = block
        self.python = random.getstate()
        self.numpy = numpy.random.get_state() if numpy is not None else None
        self.attributes = [(module, _numbers(module)) for module in block.modules()]
        self.lists = [(module, name, value, [*value]) for module, name, value in _lists(block)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _HostState):
            return NotImplemented
        return (
            self.python == other.python
            and _numpy_key(self.numpy) == _numpy_key(other.numpy)
            and [values for _, values in self.attributes] == [values for _, values in other.attributes]
            and [[*map(id, items)] for *_, items in self.lists] == [[*map(id, items)] for *_, items in other.lists]
        )

    __hash__ = None  # type: ignore[assignment]

    def restore(self) -> None:
        """Restore this state."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        for module, values in self.attributes:
            for name in _numbers(module).keys() - values.keys():  # set since, over a default of the class
                del vars(module)[name]
            vars(module).update(values)
        before = {(module, name) for module, name, *_ in self.lists}
        for module, name, _ in [each for each in _lists(self.block) if each[:2] not in before]:
            del vars(module)[name]
        for module, name, value, items in self.lists:
            value[:] = items
            vars(module)[name] = value

    @contextmanager
    def again(self) -> Iterator[None]:
        """Set this state in a context."""
        now = _HostState(self.block)
        self.restore()
        try:
            yield
        finally:
            now.restore()


def _numbers(module: nn.Module) -> dict[str, int | float | bool]:
    return {name: value for name, value in vars(module).items() if type(value) in (int, float, bool)}


def _lists(block: nn.Module) -> Iterator[tuple[nn.Module, str, list[Any]]]:
    for module in block.modules():
        if not names_in_metric(module):
            yield from ((module, name, value) for name, value in vars(module).items() if type(value) is list)


def _numpy_key(state: Any) -> Any:
    return state and (state[1].tobytes(), *state[2:])


@contextmanager
def statistics_kept(block: nn.Module) -> Iterator[set[nn.Module]]:
    """Make BatchNorm and similar layers update copies of their statistics, and yield these layers."""
    norms = [m for m in block.modules() if isinstance(m, _NormBase) and m.training and m.track_running_stats]
    originals = [dict(norm._buffers) for norm in norms]
    try:
        for norm in norms:
            norm._buffers.update({name: b if b is None else b.clone() for name, b in norm._buffers.items()})
        yield set(norms)
    finally:
        for norm, buffers in zip(norms, originals, strict=True):
            norm._buffers.update(buffers)


def _buffers(block: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [(m, name, b) for m in block.modules() for name, b in m._buffers.items() if b is not None]


def _sums(block: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor | list[Any]]]:
    """Yield the attributes of a block's modules that may add up over calls: tensors, and lists of metrics."""
    for module in block.modules():
        in_metric = names_in_metric(module)
        for name, value in vars(module).items():
            is_plain = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
            if is_plain or (isinstance(value, list) and name in in_metric):
                yield module, name, value


def _copied(value: Tensor | list[Any]) -> Tensor | list[Any]:
    return value.detach().clone() if isinstance(value, Tensor) else [*value]


def _adds_up(before: Any, after: Any) -> bool:
    """Return whether a value of `_sums` has changed in a second forward."""
    if isinstance(before, list):
        return isinstance(after, list) and len(after) > len(before)
    return isinstance(after, Tensor) and not _same(before, after, 2e-2 if after.requires_grad else 1e-4)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _samples(output: Any) -> list[Tensor]:
    """Return up to 1024 evenly spaced elements of each tensor in an output."""
    tensors = [t.detach() for t in tree_leaves(output) if isinstance(t, Tensor) and t.layout is torch.strided]
    return [t.reshape(-1)[:: max(1, -(-t.numel() // _SAMPLE))].clone() for t in tensors if not t.is_nested]


def _same(first: Tensor, second: Tensor | None, tolerance: float = 0.0) -> bool:
    """Return whether two tensors agree up to ``tolerance`` times the largest element."""
    if second is None or first.shape != second.shape or first.dtype != second.dtype:
        return False
    if torch.equal(first, second) or not first.numel():
        return True
    if first.is_complex():
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    if not first.is_floating_point():
        return False
    first, second = first.float(), second.float()
    scale = first.nan_to_num(0, 0, 0).abs().max().item()
    return torch.allclose(first, second, rtol=0.0, atol=tolerance * scale, equal_nan=True)
