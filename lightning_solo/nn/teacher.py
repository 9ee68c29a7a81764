"""The calls of a module whose output are its logits, the positions that count, and a teacher for the same inputs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from lightning_solo.attributes import replaced
from lightning_solo.errors import ConflictError, NothingToDoError, PresetError, SoloError, listed, nearest
from lightning_solo.memory.block_ring import BlockRing
from lightning_solo.nn.blocks import repeated_blocks
from lightning_solo.nn.deferred_logits import DeferredLogits, Use, defer_logits, output_heads
from lightning_solo.nn.features import Features, Output
from lightning_solo.nn.forwards import restore_forwards
from lightning_solo.nn.streaming import Streamed, away, start_ring, stream_blocks
from lightning_solo.out_of_memory import is_out_of_memory

AUTO = "auto"
IGNORED = -100
OPTION = "callback.distillation"


@dataclass
class Call:
    """One call of a part whose output are logits.

    Attributes:
        name: of the part.
        args, kwargs: its inputs.
        logits: (batch, ..., vocabulary).
        outputs: name -> outputs of a layer within the call, of the layers that are watched.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    logits: Tensor
    outputs: Mapping[str, list[Output]] = field(default_factory=dict)


class Calls:
    """Records the outermost calls of parts whose output are logits, by hooks, until `remove`."""

    def __init__(self, parts: Mapping[str, nn.Module], features: Features | None = None) -> None:
        self.calls: list[Call] = []
        self._features = features
        self._before: list[tuple[int, int]] = []  # calls and outputs when each of those calls that run began
        self._is_on = False
        self._hooks: list[Any] = []
        for name, part in parts.items():
            self._hooks.append(part.register_forward_pre_hook(self._enter))
            leave: Callable[..., None] = partial(self._leave, name)
            self._hooks.append(part.register_forward_hook(leave, with_kwargs=True))

    @contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """Yield the list that gets the calls within this context; it is empty again after it."""
        self._before, self._is_on, self.calls = [], True, []
        try:
            with nullcontext() if self._features is None else self._features.recording():
                yield self.calls
        finally:
            self._is_on, self.calls = False, []

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        if self._features is not None:
            self._features.remove()

    def _enter(self, part: nn.Module, args: Any) -> None:
        self._before.append((len(self.calls), len(self._features.kept) if self._features else 0))

    def _leave(self, name: str, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls, outputs = self._before.pop() if self._before else (0, 0)
        if self._is_on and (logits := logits_of(output)) is not None:
            within = self._features.since(outputs) if self._features else {}
            self.calls[calls:] = [Call(name, args, kwargs, logits, within)]  # replaces the calls inside this one


def logits_of(output: Any) -> Tensor | None:
    """Return the logits in a part's output: a tensor, or the field ``logits`` of one; None if there are none."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif not isinstance(output, Tensor):
        output = getattr(output, "logits", None)
    is_logits = isinstance(output, Tensor) and output.dim() >= 2 and output.is_floating_point()
    return output if is_logits else None


@contextmanager
def labels_of_losses() -> Iterator[list[tuple[Tensor, int]]]:
    """Yield a list that gets labels and ignored label of each ``F.cross_entropy`` within this context."""
    seen: list[tuple[Tensor, int]] = []

    def cross_entropy(
        input: Tensor, target: Tensor, weight: Any = None, size_average: Any = None, ignore_index: int = IGNORED,
        *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        if not torch.compiler.is_compiling() and isinstance(target, Tensor) and not target.is_floating_point():
            seen.append((target, ignore_index))
        return original(input, target, weight, size_average, ignore_index, *args, **kwargs)  # type: ignore[no-any-return]

    with replaced(F, "cross_entropy", cross_entropy) as original:
        yield seen


def counted_positions(call: Call, seen: list[tuple[Tensor, int]], batch: Any) -> Tensor | None:
    """Return which positions of a call's logits the module's own loss counts, (batch, ...) in bool; None for all.

    These are the positions whose label isn't ignored, by the labels of its cross-entropy, which may be shifted by one;
    else by the batch's labels of a causal model; else by the attention mask.

    Args:
        call: of the student.
        seen: by `labels_of_losses`.
        batch: of the training step.
    """
    shape = call.logits.shape[:-1]
    of_words = len(shape) == 2
    for target, ignored in seen:
        if target.numel() == shape.numel():
            return (target != ignored).view(shape)
        if of_words and target.numel() == shape[0] * (shape[1] - 1):
            return F.pad((target != ignored).view(shape[0], -1), (0, 1))
    named = [call.kwargs, *(each for each in (*call.args, batch) if isinstance(each, Mapping))]
    for each in named:
        labels = each.get("labels")
        if of_words and isinstance(labels, Tensor) and labels.shape == shape:
            return F.pad(labels[:, 1:] != IGNORED, (0, 1))
    for each in named:
        mask = each.get("attention_mask")
        if of_words and isinstance(mask, Tensor) and mask.shape == shape:
            return mask != 0
    return None


class Teacher:
    """A module that makes logits from a student's inputs, without gradients, in evaluation mode, until `close`.

    Args:
        module: is changed: frozen, moved and set to evaluation.
        device: where it is moved.
        dtype: type of its floating weights; None leaves them.
        has_parts: whether its parts have the names of the student's; else it is called as the student's part.
        streamed: whether the weights of its repeated blocks stay on the host, and two blocks are on the device at a
            time.
        layers: names of those whose outputs are kept.

    Attributes:
        outputs: name -> outputs of such a layer in the latest call.

    Raises:
        NothingToDoError: it is to be streamed, and has no repeated blocks.
        PresetError: a layer doesn't exist.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        dtype: torch.dtype | None = None,
        *,
        has_parts: bool = False,
        streamed: bool = False,
        layers: Iterable[str] = (),
    ) -> None:
        self._features = Features(module, layers, "teacher")
        self.outputs: Mapping[str, list[Output]] = {}
        self.module = module.requires_grad_(False).eval().to(dtype=dtype)
        self.has_parts = has_parts
        self.ring: BlockRing | None = None
        self._heads: list[nn.Linear] | None = None  # with deferred logits, as the student's
        self._has_run = False  # with inputs that it takes
        self._blocks: list[nn.Module] = []
        if streamed:
            try:
                blocks = repeated_blocks(module)
            except NothingToDoError as error:
                reason = str(error).partition("; write")[0]
                raise NothingToDoError(
                    f"{OPTION}.streamed=true: {reason}, and the teacher stays on the device whole; write"
                    f" {OPTION}.streamed=false"
                ) from error
            records = stream_blocks(blocks)
            self._blocks = [*blocks.values()]
            self.ring = start_ring(module, blocks, records, device, 2, trains=False)
            with away(records):
                module.to(device)
        else:
            module.to(device)
        weights = (p.dtype for p in module.parameters() if p.is_floating_point())
        self.dtype = dtype or next(weights, torch.float32)

    def close(self) -> None:
        """Give the module its own forwards, without hooks; streamed blocks stay on the host."""
        self._features.remove()
        self.outputs = {}
        restore_forwards(self._blocks, Streamed)
        restore_forwards(self._heads or [], Use)
        if self.ring is not None:
            self.ring.close()

    @property
    def bytes(self) -> int:
        """Bytes of weights and buffers."""
        tensors = {id(t): t for t in (*self.module.parameters(), *self.module.buffers())}.values()
        return sum(tensor.nbytes for tensor in tensors)

    @torch.no_grad()
    def logits(self, call: Call) -> Tensor | None:
        """Return the logits for the inputs of a student's call; None if the output has none."""
        if isinstance(call.logits, DeferredLogits) and self._heads is None:
            self._heads = self._deferred(call.logits.chunk_tokens)
        part = self.module.get_submodule(call.name) if self.has_parts else self.module
        args, kwargs = tree_map_only(Tensor, self._converted, (call.args, call.kwargs))
        if not self.has_parts:
            kwargs.pop("labels", None)  # of which a model of transformers would compute a loss
        device = call.logits.device.type
        low = torch.autocast(device, self.dtype) if self.dtype.itemsize == 2 else nullcontext()
        with low, self._features.recording():
            try:
                logits = logits_of(part(*args, **kwargs))
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                if self._has_run or isinstance(error, SoloError) or is_out_of_memory(error):
                    raise
                reason = textwrap.shorten(str(error), 300, placeholder=" ...")
                raise ConflictError(
                    f"{OPTION}: the teacher {type(part).__name__} fails on the inputs of the student's"
                    f" {call.name or 'forward'} ({reason}); write a teacher that takes them, or"
                    f" {OPTION}.part=<the part with the teacher's inputs and outputs>"
                ) from error
            self.outputs, self._has_run = self._features.since(0), True
        return logits

    def _deferred(self, chunk_tokens: int) -> list[nn.Linear]:
        """Make the heads' logits exist in chunks alone; without such a head they exist as a whole."""
        try:
            heads = [*output_heads(self.module).values()]
        except (NothingToDoError, ConflictError):
            return []
        for head in heads:
            defer_logits(head, chunk_tokens)
        return heads

    def _converted(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def candidates(module: nn.Module, part: str, teacher: Teacher | None) -> dict[str, nn.Module]:
    """Return name -> part whose calls may make logits: the named one; a model of transformers; or all outermost ones.

    Raises:
        PresetError: no part has the name.
    """
    if not part:  # as labels name it
        return {"": module}
    if part != AUTO:
        names = dict(module.named_modules())
        if part not in names:
            raise PresetError(
                f"{OPTION}.part={part!r}: {type(module).__name__} has no such part{nearest(part, names)}there are"
                f" {listed((name for name in names if name), 12)}"
            )
        return {part: names[part]}
    if teacher is not None and not teacher.has_parts and hasattr(teacher.module, "config"):
        same = [(name, each) for name, each in module.named_modules() if hasattr(each, "base_model_prefix")]
        if same:
            return dict(same[:1])
    return {"": module, **dict(module.named_children())}


def of_one_part(module: nn.Module, recorded: list[Call], part: str) -> list[Call]:
    """Return the calls of the part that makes the logits.

    Args:
        module: of the training step.
        recorded: all calls of `candidates`.
        part: as for `candidates`.

    Raises:
        NothingToDoError: none was called.
        ConflictError: several were.
    """
    names = [*dict.fromkeys(call.name for call in recorded)]
    if len(names) == 1:
        return recorded
    cls = type(module).__name__
    if not names:
        asked = f"neither {cls} nor a child" if part == AUTO else part or cls
        there = listed((name for name, _ in module.named_children()), 8) or "no parts"
        raise NothingToDoError(
            f"distillation: in training_step {asked} returned no logits (batch, ..., classes) when called as a module;"
            f" there are {there}; write {OPTION}.part=<the part that is called with the inputs and returns logits>, or"
            f" ~{OPTION}"
        )
    raise ConflictError(
        f"distillation: training_step calls {', '.join(names)}, and the logits may be of any; write"
        f" {OPTION}.part={names[-1]} if it alone makes them from the inputs, or define forward() in {cls} and call"
        " self(...)"
    )


def of_same_shape(call: Call, logits: Tensor | None) -> Tensor:
    """Return a teacher's logits, if they correspond to the student's.

    Raises:
        ConflictError: there are none, or they are of another shape.
    """
    if logits is None:
        raise ConflictError(
            f"{OPTION}: the teacher returns no logits for the inputs of {call.name or 'the module'}; write"
            " callback.distillation.part=<the part with the teacher's inputs and outputs>"
        )
    if logits.shape != call.logits.shape:
        ours, theirs = call.logits.shape[-1], logits.shape[-1]
        what = f"{theirs} words, and the student's {ours}" if ours != theirs else f"shape {tuple(logits.shape)}"
        raise ConflictError(
            f"{OPTION}: the teacher's logits have {what}, for logits of the student of shape"
            f" {tuple(call.logits.shape)}; write a teacher of the same vocabulary (and tokenizer), or"
            f" {OPTION}.part=<the part with the teacher's inputs and outputs>"
        )
    return logits
