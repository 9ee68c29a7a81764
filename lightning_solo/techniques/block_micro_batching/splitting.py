"""Run a block's batch in micro-batches, one after the other, each of which backward recomputes.

The module runs once on the whole batch, and so does all that is outside its blocks, the loss included. Backward comes
to a block once. It runs the micro-batches in reverse, and then has the block's whole gradients.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_solo.attributes import replaced, switched
from lightning_solo.data.nested import leaves, map_leaves, tensors_of
from lightning_solo.data.splitting import even_ranges
from lightning_solo.errors import ConflictError, SoloError
from lightning_solo.memory.attempts import attempt
from lightning_solo.nn.forwards import original_forward, record_of, replace_forward
from lightning_solo.nn.graph_nodes import next_node, reached
from lightning_solo.nn.recomputation import Wrap, is_gathered_on_use, keeping_inputs, run_recomputed, without_cache
from lightning_solo.nn.rollback import Rollback, attributes_kept
from lightning_solo.nn.split_parity import close, same_for_parts
from lightning_solo.out_of_memory import is_out_of_memory
from lightning_solo.techniques.block_micro_batching.gradient_sums import BlockSums

OPTION = "callback.block_micro_batching"
Dims = dict[str, int | None]
"""Path of a tensor -> dimension that is divided among micro-batches; None: all have the whole tensor."""


class Returned:
    """Notes what micro-batches make and return in a step, so that the loss shows whether it depends on anything else.

    An attribute, a hook or a list of the model's may take a tensor out of a block past its output.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Splitting, nn.Module, list[range]]] = []
        self._starts: list[Any] = []
        self._ends: set[int] = set()

    def note(self, splitting: Splitting, block: nn.Module, made: list[range], given: Any, output: Any) -> None:
        """Note a call: the graph's nodes that each micro-batch made, the arguments and the output."""
        self.calls.append((splitting, block, made))
        self._starts += [tensor.grad_fn for tensor in tensors_in(given).values()]
        ends = (tensor.grad_fn for tensor in tensors_in(output).values())
        self._ends |= {node._sequence_nr() for node in ends if node is not None}

    def require(self, loss: Tensor) -> None:
        """Check that a loss depends on what blocks returned, or on rows that all micro-batches made."""
        of_node = [(part, call, n) for call, (*_, made) in enumerate(self.calls) for n, part in enumerate(made)]
        found: dict[int, set[int]] = {}

        def inside(number: int) -> bool:
            return any(number in part for part, *_ in of_node)

        for node in reached([loss.grad_fn, *self._starts], inside, self._ends):
            call, micro_batch = next((c, n) for part, c, n in of_node if node._sequence_nr() in part)
            found.setdefault(call, set()).add(micro_batch)
            if any(len(each.shape) < 2 for each in node._input_metadata):  # such as a loss of its own
                found[call].clear()
                break
        for call, which in found.items():
            splitting, block, made = self.calls[call]
            if len(which) < len(made):
                raise splitting.conflict(
                    block, "gives the loss a result past its output, by an attribute, a hook or a list"
                )


@dataclass
class Splitting:
    """The settings and state of a block that runs in micro-batches."""

    name: str  # of the block, for messages
    micro_batches: int  # how many there are at most
    batch_dim: int = 0  # of the hidden states
    calls: int = 0  # number of calls with gradients
    most: int = 0  # largest number of micro-batches of a call
    is_checked: bool = False  # whether samples have been compared with one another
    # what is known of arguments; those left out are divided if their size is the batch's
    arguments: Dims = field(default_factory=dict)
    # what is known of outputs; those left out are joined if their sizes are the micro-batches'
    outputs: Dims = field(default_factory=dict)
    returned: Returned | None = None  # notes what is made and returned; None: needn't be known

    def __post_init__(self) -> None:
        remedy = f"Write {OPTION}.blocks=[ClassName] of classes that don't contain it, or ~{OPTION}"
        self.wrap = Wrap(f"block micro-batching: block {self.name!r}", verify=True, remedy=remedy)

    def conflict(self, block: nn.Module, what: str, instead: str = "") -> ConflictError:
        """Return the error that refuses a block, with the remedy."""
        return ConflictError(
            f"block micro-batching: block {self.name!r} ({type(block).__name__}) {what}, so its batch can't be divided;"
            f" write {instead or f'{OPTION}.blocks=[ClassName] of classes whose samples are independent'}, or replace"
            f" it by activation_checkpointing: ~{OPTION} +callback.activation_checkpointing={{}}"
        )

    def run(self, block: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the output of a call with gradients."""
        self.calls += 1
        given = {**dict(enumerate(args)), **kwargs}
        tensors = tensors_in(given)
        self._refuse_packed(block, tensors)
        first = next((t for t in tensors.values() if t.is_floating_point() and t.dim() > self.batch_dim), None)
        size = 1 if first is None else first.shape[self.batch_dim]
        ranges = even_ranges(size, -(-size // self.micro_batches)) if size > 1 else [(0, 1)]
        self.most = max(self.most, len(ranges))
        if len(ranges) == 1:
            return run_recomputed(block, self.wrap, original, args, kwargs)
        if not self.is_checked and not isinstance(first, FakeTensor):
            # without memory for it there is no check
            attempt(partial(self._check, block, original, given, max(2, ranges[0][1]), size))
            self.is_checked = True
        sizes = [last - start for start, last in ranges]
        recorded = {name: (items, len(items)) for name, items in _recorded().items()}
        sums, outputs, made = BlockSums(block), [], []
        for part in self._parts(given, self._dims(tensors, size), sizes, size):
            start = next_node() if self.returned is not None else 0
            with sums.micro_batch(), _weights_cast_anew():
                outputs.append(run_recomputed(block, self.wrap, original, *_arguments(part)))
            made.append(range(start, next_node()) if self.returned is not None else range(0))
        output = self._join(block, outputs, sizes)
        for items, before in recorded.values():
            items[before:] = self._joined_records(items[before:], sizes)
        if self.returned is not None:
            self.returned.note(self, block, made, given, output)
        return output

    def _refuse_packed(self, block: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        for path, tensor in tensors.items():
            if tensor.is_nested or tensor.layout is not torch.strided:
                raise self.conflict(block, f"gets a nested or sparse tensor, {path!r}")
            if "cu_seq" in path and any(t.dim() and t.shape[0] > 1 for t in tensors.values() if t.is_floating_point()):
                raise self.conflict(block, f"gets packed sequences, whose boundaries {path!r} count across samples")

    # --- arguments ---

    def _dims(self, tensors: Mapping[str, Tensor], size: int) -> Dims:
        return {path: self._dim(path, tensor, size) for path, tensor in tensors.items()}

    def _dim(self, path: str, tensor: Tensor, size: int) -> int | None:
        if path in self.arguments:
            dim = self.arguments[path]
            fits = dim is not None and tensor.dim() > dim and tensor.shape[dim] and tensor.shape[dim] % size == 0
            return dim if fits else None
        return self.batch_dim if tensor.dim() > self.batch_dim and tensor.shape[self.batch_dim] == size else None

    def _parts(self, given: Any, dims: Dims, sizes: list[int], size: int) -> Iterator[Any]:
        """Yield the arguments of each micro-batch; one tensor that comes twice is one tensor in each, too."""
        pieces: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        for path, tensor in tensors_in(given).items():
            dim = dims[path]
            if dim is not None and (id(tensor), dim) not in pieces:
                step = tensor.shape[dim] // size
                pieces[id(tensor), dim] = torch.split(tensor, [step * each for each in sizes], dim)

        def piece(number: int, path: str, leaf: Any) -> Any:
            dim = dims.get(path)
            return leaf if dim is None else pieces[id(leaf), dim][number]

        return (map_leaves(given, partial(piece, number)) for number in range(len(sizes)))

    # --- outputs ---

    def _join(self, block: nn.Module, outputs: list[Any], sizes: list[int]) -> Any:
        every = [dict(leaves(output)) for output in outputs]
        if any(each.keys() != every[0].keys() for each in every):
            raise self.conflict(block, "returns other items for other samples")

        def join(path: str, first: Any) -> Any:
            values = [each[path] for each in every]
            if all(value is first for value in values):
                return first
            if not isinstance(first, Tensor):
                if next(tensors_of(first), None) is not None or not all(_is_equal(first, value) for value in values):
                    raise self.conflict(block, f"returns a {type(first).__name__} that depends on the samples")
                return first
            dim = self.outputs[path] if path in self.outputs else self._joined_dim(values, sizes)
            return first if dim is None else torch.cat(values, dim)

        return map_leaves(outputs[0], join)

    def _joined_records(self, items: list[Any], sizes: list[int]) -> list[Any]:
        """Return what a hook has recorded in each of the micro-batches as what it would record in the whole batch."""
        each, rest = divmod(len(items), len(sizes))
        if rest or not all(isinstance(item, Tensor) for item in items):
            return items
        values = [items[number::each] for number in range(each)]
        dims = [self._joined_dim(value, sizes) for value in values]
        return [value[0] if dim is None else torch.cat(value, dim) for value, dim in zip(values, dims, strict=True)]

    def _joined_dim(self, values: list[Tensor], sizes: list[int]) -> int | None:
        """Return the dimension along which the outputs of micro-batches are joined, by their shapes."""
        first = values[0].shape
        for dim in (self.batch_dim, 0):
            if len(first) > dim and all(value.shape[dim] == size for value, size in zip(values, sizes, strict=True)):
                return dim
        # rows of tokens
        return 0 if len(first) > 1 and first[0] % sizes[0] == 0 else None

    # --- the check ---

    def _check(self, block: nn.Module, original: Callable[..., Any], given: Any, group: int, size: int) -> None:
        """Compare a group of samples with its last one alone, and learn how arguments and outputs are divided."""
        tensors, reasons = tensors_in(given), []
        for tried in self._choices(tensors, size):
            self.arguments = tried
            learned = self._compare(block, original, given, self._dims(tensors, size), group, size)
            if isinstance(learned, dict):
                self.outputs = learned
                known: Dims = {}  # another size than the batch's now may be equal to it later
                for path, tensor in tensors.items():
                    if tensor.dim() and self._dim(path, tensor, size) is None:
                        known |= {path: None} if tensor.shape[min(self.batch_dim, tensor.dim() - 1)] != 1 else {}
                self.arguments = {**known, **tried}
                return
            reasons.append(learned)
        other = f"{OPTION}.batch_dim={1 - self.batch_dim} if the batch is that dimension of its hidden states"
        raise self.conflict(block, reasons[0], f"{other}, {OPTION}.blocks=[ClassName] of others")

    def _choices(self, tensors: Mapping[str, Tensor], size: int) -> Iterator[Dims]:
        """Yield what is tried for the arguments: by their sizes, then otherwise where these may mean something else."""
        yield {}
        by_size = self._dims(tensors, size)
        first = next(path for path, dim in by_size.items() if dim is not None)
        left = [(path, t) for path, t in tensors.items() if by_size[path] is None]
        other = 1 - self.batch_dim  # as of a recurrent layer's states
        moved: Dims = {
            p: other for p, t in tensors.items() if p != first and t.dim() > other and t.shape[other] == size
        }
        rows = {path: 0 for path, t in left if t.dim() and t.shape[0] > size and t.shape[0] % size == 0}
        shared = [path for path, dim in by_size.items() if dim is not None and path != first]
        yield from filter(None, (moved, rows))
        for paths in [*([path] for path in shared), shared]:  # such as a mask (sequence, sequence) of this size
            yield dict.fromkeys(paths, None)

    def _compare(
        self, block: nn.Module, original: Callable[..., Any], given: Any, dims: Dims, group: int, size: int
    ) -> Dims | str:
        """Return how the outputs are joined, or the difference between samples together and alone."""
        rollback = Rollback(block, next((t.device for t in tensors_in(given).values()), torch.device("cpu")))
        rollback.save()
        together, rest = list(self._parts(given, dims, [group, size - group], size))[:1], size - group
        (alone,) = list(self._parts(given, dims, [group - 1, 1, rest], size))[1:2]
        before = [path for path, _ in leaves(together[0])]
        versions = [tensor._version for tensor in tensors_in(together[0]).values()]
        args, kwargs = _arguments(together[0])
        try:
            with attributes_kept(block), same_for_parts(block), torch.no_grad(), _weights_cast_anew(), _unseen(block):
                output = original(*args, **kwargs)
                if [path for path, _ in leaves({**dict(enumerate(args)), **kwargs})] != before:
                    raise self.conflict(block, "changes a list that it is given")
                if [tensor._version for tensor in tensors_in(together[0]).values()] != versions:
                    raise self.conflict(block, "changes its input in place")
                rollback.restore()
                args, kwargs = _arguments(alone)
                learned, differ = self._learned(output, original(*args, **kwargs), group)
                if not isinstance(learned, dict) or not differ:
                    return learned
                rollback.seed(1)
                args, kwargs = _arguments(together[0])
                again = original(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError) as error:
            if isinstance(error, SoloError) or is_out_of_memory(error):
                raise
            return f"fails on {group} of {size} samples, or on one ({error})"
        finally:
            rollback.restore()
        pairs = zip(tensors_in(output).values(), tensors_in(again).values(), strict=True)
        if all(close(one, other) for one, other in pairs):  # no random numbers
            return f"mixes samples: {differ} isn't the same for a sample among {group} as for it alone"
        return learned

    def _learned(self, output: Any, alone: Any, group: int) -> tuple[Dims | str, str]:
        """Return the dimension of each output that grows with the samples, and the name of one with other numbers."""
        one, other = tensors_in(output), tensors_in(alone)
        dims: Dims = {}
        different = ""
        if one.keys() != other.keys():
            return "returns other items for other samples", ""
        for path, many in one.items():
            few, name = other[path], f"output {path!r}" if path else "its output"
            grown = [d for d in range(many.dim()) if many.dim() == few.dim() and many.shape[d] != few.shape[d]]
            if many.dim() != few.dim() or len(grown) > 1 or any(many.shape[d] != group * few.shape[d] for d in grown):
                shapes = tuple(many.shape), tuple(few.shape)
                return f"returns {name} of shape {shapes[0]} for {group} samples and {shapes[1]} for one", ""
            dims[path] = grown[0] if grown else None
            last = many.narrow(grown[0], -few.shape[grown[0]], few.shape[grown[0]]) if grown else many
            different = different or ("" if close(last, few) else name)
        return dims, different


def split_blocks(blocks: Mapping[str, nn.Module], micro_batches: int, batch_dim: int = 0) -> dict[str, Splitting]:
    """Make each block run its batch in micro-batches if gradients are needed; return name -> splitting.

    ``restore_forwards(blocks, Splitting)`` undoes it.

    Args:
        blocks: name -> block; none is inside another.
        micro_batches: number of parts, as even as possible; a batch with fewer samples has as many.
        batch_dim: of the first tensor that a block takes. Other tensors of this size there are divided, too.

    Raises:
        ConflictError: in forward, if a block can't be divided.
    """
    splittings = {name: Splitting(name, micro_batches, batch_dim) for name in blocks}
    for name, block in blocks.items():
        replace_forward(block, forward, splittings[name])
    return splittings


def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a block in micro-batches."""
    splitting, original = record_of(block, Splitting), original_forward(block, Splitting)
    if splitting is None or not torch.is_grad_enabled():
        return original(*args, **kwargs)
    args, kwargs, has_keys = without_cache(block, args, kwargs)
    if has_keys:
        raise splitting.conflict(block, "gets a key-value cache that already holds keys", "use_cache=False")
    with keeping_inputs():
        return splitting.run(block, original, args, kwargs)


def tensors_in(nested: Any) -> dict[str, Tensor]:
    """Return path -> tensor of nested arguments or outputs."""
    return {path: leaf for path, leaf in leaves(nested) if isinstance(leaf, Tensor)}


def _arguments(given: Mapping[Any, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments by position and by name."""
    args = [value for name, value in given.items() if isinstance(name, int)]
    return args, {name: value for name, value in given.items() if not isinstance(name, int)}


def _recorded() -> dict[str, list[Any]]:
    """Return the lists in which hooks of transformers record results inside blocks, such as a router's logits."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    return {name: items for name, items in ((collector and collector.get()) or {}).items() if isinstance(items, list)}


def _is_equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and isinstance(one, int | float | str | bytes | None) and one == other


def _weights_cast_anew() -> AbstractContextManager[None]:
    """Turn off autocast's copies of weights, through which gradients of micro-batches would be added in 16 bits."""
    return switched(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False)


@contextmanager
def _unseen(block: nn.Module) -> Iterator[None]:
    """Run without the forward hooks of a block's parts, which may collect what they see."""
    with ExitStack() as stack:
        for part in block.modules():
            if part._forward_hooks and not is_gathered_on_use(part):  # else they release its weights
                stack.enter_context(replaced(part, "_forward_hooks", OrderedDict()))
        yield
