"""The CUDA allocator's history: its recording, and the moment in it when most bytes were allocated."""

from __future__ import annotations

import os
import pickle
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from lightning_solo.atomic_files import write_whole
from lightning_solo.memory.ledger import owned_by, storages_of
from lightning_solo.units import format_bytes

NOT_USERS = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "deepspeed")
NO_FRAME = "backward, or a library's own thread: no Python frame"
BEFORE = "from before this history, no Python frame"


class History:
    """Records the CUDA allocator's history; a recording that somebody else started is left running.

    Args:
        max_entries: of the history; older ones are dropped.
        native_frames: also record C++ frames, which name the operators of backward; reading them takes minutes.
    """

    def __init__(self, max_entries: int, native_frames: bool = False) -> None:
        self.max_entries = max_entries
        self.native_frames = native_frames
        self._on = False

    @property
    def on(self) -> bool:
        """Whether this object records."""
        return self._on

    def start(self) -> None:
        """Record from now on."""
        if not self._on and not records():
            self._record()

    def clear(self) -> None:
        """Forget the history until now, but keep the frames of live allocations."""
        if self._on:
            self._record()

    def _record(self) -> None:
        self._on = True
        torch.cuda.memory._record_memory_history(
            "all",
            context="all",
            stacks="all" if self.native_frames else "python",
            max_entries=self.max_entries,
            clear_history=True,
        )

    def stop(self) -> None:
        """Stop the recording if this object started it; a second call does nothing."""
        if self._on:
            self._on = False
            torch.cuda.memory._record_memory_history(None)


def records() -> bool:
    """Return whether the CUDA allocator records its history."""
    is_enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)  # absent in a torch without CUDA
    return is_enabled is not None and bool(is_enabled())


@dataclass(frozen=True)
class Counters:
    """Counters of the allocator: peak bytes since the last reset, and the number of OOMs."""

    peak_allocated: int
    ooms: int


def read_counters(device: torch.device) -> Counters:
    """Return the counters of a CUDA device, by one call that doesn't synchronise."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    peak = stats.get("allocated_bytes", {}).get("all", {}).get("peak", 0)
    return Counters(int(peak), int(stats.get("num_ooms", 0)))


@dataclass(frozen=True)
class Block:
    """One allocation: its requested bytes, and the frames of the call that made it, the innermost first."""

    bytes: int
    frames: Sequence[Mapping[str, Any]] | None
    survived: bool  # until the snapshot, so that its address was not used again


@dataclass(frozen=True)
class Moment:
    """The allocations at one moment of a history.

    Attributes:
        blocks: address -> allocation.
        wanted: bytes whose allocation failed, at an OOM.
        free: bytes that the device had left then.
    """

    blocks: dict[int, Block]
    wanted: int = 0
    free: int = 0

    @property
    def bytes(self) -> int:
        """The requested bytes of all allocations, before the allocator rounds them."""
        return sum(block.bytes for block in self.blocks.values())


def moment_of_peak(snapshot: Mapping[str, Any], device: int = 0) -> Moment:
    """Return the moment of the history at which most bytes were allocated; its start or end included."""
    events = _events(snapshot, device)
    now = sum(block["requested_size"] for block in _active(snapshot, device).values())
    most, where = now, len(events)
    for index in range(len(events) - 1, -1, -1):
        now -= _change(events[index])
        if now > most:
            most, where = now, index
    return _moment(snapshot, device, where)


def moment_of_oom(snapshot: Mapping[str, Any], device: int = 0) -> Moment | None:
    """Return the moment of the last OOM in the history, or None."""
    events = _events(snapshot, device)
    where = next((index for index in range(len(events) - 1, -1, -1) if events[index]["action"] == "oom"), None)
    if where is None:
        return None
    return _moment(snapshot, device, where, events[where].get("size", 0), events[where].get("device_free", 0))


def _events(snapshot: Mapping[str, Any], device: int) -> Sequence[Mapping[str, Any]]:
    traces: Sequence[Sequence[Mapping[str, Any]]] = snapshot["device_traces"]
    return traces[device] if device < len(traces) else ()


def _active(snapshot: Mapping[str, Any], device: int) -> dict[int, Mapping[str, Any]]:
    """Return address -> block of the memory that is allocated at the end."""
    return {
        block["address"]: block
        for segment in snapshot["segments"]
        if segment.get("device", device) == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def _change(event: Mapping[str, Any]) -> int:
    """Return the change of the allocated bytes at an event."""
    return int({"alloc": 1, "free_requested": -1}.get(event["action"], 0) * event.get("size", 0))


def _moment(snapshot: Mapping[str, Any], device: int, where: int, wanted: int = 0, free: int = 0) -> Moment:
    """Return the moment after the first ``where`` events, by undoing the later ones."""
    events = _events(snapshot, device)
    blocks = {
        address: Block(block["requested_size"], block.get("frames") or None, True)
        for address, block in _active(snapshot, device).items()
    }
    for event in reversed(events[where:]):
        if event["action"] == "alloc":
            blocks.pop(event["addr"], None)
        elif event["action"] == "free_requested":
            blocks[event["addr"]] = Block(event["size"], None, False)
    allocated = {event["addr"]: event for event in events[:where] if event["action"] == "alloc"}
    for address, block in blocks.items():
        if block.frames is None and address in allocated:
            blocks[address] = Block(block.bytes, allocated[address].get("frames", []), block.survived)
    return Moment(blocks, wanted, free)


@dataclass(frozen=True)
class Holding:
    """Allocations that belong together: of a category, or by one place in the code."""

    what: str
    bytes: int
    count: int


def holdings(moment: Moment, module: nn.Module | None = None, optimizers: Iterable[object] = ()) -> list[Holding]:
    """Return the allocations, the largest first: weights, gradients, optimizer states, the rest by its place.

    Args:
        moment: of a snapshot taken just now: addresses are compared.
        module: its weights, gradients and ``forward`` get names.
        optimizers: their states get names.
    """
    owners, code = owners_of(module, optimizers), code_of(module)
    sizes: dict[str, list[int]] = {}
    for address, block in moment.blocks.items():
        owner = owners.get(address) if block.survived else None
        sizes.setdefault(owner or place_of(block.frames, code), []).append(block.bytes)
    rows = [Holding(what, sum(counts), len(counts)) for what, counts in sizes.items()]
    return sorted(rows, key=lambda row: -row.bytes)


def owners_of(module: nn.Module | None, optimizers: Iterable[object] = ()) -> dict[int, str]:
    """Return address -> category of what module and optimizers hold now."""
    return {
        storage.data_ptr(): category.replace("_", " ")
        for category, tree in owned_by(module, optimizers)
        for storage in storages_of(tree)
    }


@dataclass(frozen=True)
class Code:
    """The lines of one method of a module's class, and which modules run it."""

    name: str
    first: int
    last: int
    modules: str


def code_of(module: nn.Module | None) -> dict[str, list[Code]]:
    """Return file -> the methods in it that belong to the classes of ``module`` and its parts, torch's own left out."""
    names: dict[type, list[str]] = {}
    for name, part in module.named_modules() if module is not None else ():
        for cls in type(part).__mro__:
            if issubclass(cls, nn.Module) and cls is not nn.Module:
                names.setdefault(cls, []).append(name)
    methods: dict[str, list[Code]] = {}
    for cls, parts in names.items():
        where = _shortened([name for name in parts if name])
        for function in vars(cls).values():
            if isinstance(function, FunctionType) and _is_users(function.__code__.co_filename):
                code = function.__code__
                last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
                method = Code(f"{cls.__name__}.{function.__name__}", code.co_firstlineno, last, where)
                methods.setdefault(code.co_filename, []).append(method)
    return methods


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} ... {names[-1]}, {len(names)} modules"


def place_of(frames: Sequence[Mapping[str, Any]] | None, code: Mapping[str, Sequence[Code]] | None = None) -> str:
    """Return a text about the line that made an allocation: the user's innermost one, else the library's.

    >>> place_of([{"filename": "/home/me/model.py", "line": 7, "name": "forward"}])
    'forward at model.py:7'
    """
    if frames is None:
        return BEFORE
    python = [frame for frame in frames if str(frame["filename"]).endswith(".py")]
    users = next((frame for frame in python if _is_users(frame["filename"])), None)
    operator = next((node[1] for frame in frames if (node := _NODE.search(str(frame["name"])))), "")
    if users is None:
        if operator:
            return f"{operator} in backward"
        return _words_of(python[0]) if python else NO_FRAME
    inside = [
        one
        for one in (code or {}).get(users["filename"], ())
        if one.first <= users["line"] <= one.last and one.name.endswith(f".{str(users['name']).rpartition('.')[2]}")
    ]
    words = _words_of(users, inside[0].name if inside else "")
    modules = f" ({inside[0].modules})" if inside and inside[0].modules else ""
    return f"{words}{modules}{f', {operator}' if operator else ''}"


_NODE = re.compile(r"(\w+Backward\d*)(?:::|\b)")


def _words_of(frame: Mapping[str, Any], name: str = "") -> str:
    return f"{name or frame['name']} at {os.path.basename(str(frame['filename']))}:{frame['line']}"


def _is_users(filename: str) -> bool:
    """Return whether a file is neither Python's nor torch's nor Lightning's nor this package's."""
    if filename.startswith("<"):
        return False
    return not any(filename.startswith(root) for root in _roots()) or f"{os.sep}reference{os.sep}" in filename


def _roots() -> Iterator[str]:
    package = Path(__file__).parents[1]
    yield f"{package}{os.sep}"
    standard = sysconfig.get_path("stdlib")
    # site-packages is below the standard library's folder: only some modules outside of it are taken as Python's
    yield from (f"{standard}{os.sep}{name}" for name in ("contextlib", "functools", "threading", "asyncio", "runpy"))
    for name in NOT_USERS:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            yield f"{os.path.dirname(file)}{os.sep}"


def describe(title: str, moment: Moment, rows: Sequence[Holding], most: int = 8) -> str:
    """Return a moment as text: total bytes, and a line per category or line of code."""
    lines = [f"{title}: {format_bytes(moment.bytes)} allocated"]
    if moment.wanted:
        lines[0] += f", {format_bytes(moment.wanted)} more were wanted, {format_bytes(moment.free)} of the device free"
    lines += [f"{format_bytes(row.bytes):>12}  {row.what} ({row.count})" for row in rows[:most]]
    rest = rows[most:]
    if rest:
        lines.append(
            f"{format_bytes(sum(row.bytes for row in rest)):>12}  {len(rest)} other places "
            f"({sum(row.count for row in rest)})"
        )
    return "\n".join(lines)


def write_snapshot(snapshot: Mapping[str, Any], words: str, path: Path) -> None:
    """Write a snapshot for https://docs.pytorch.org/memory_viz, and its text beside it.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(path, pickle.dumps(snapshot))
    write_whole(path.with_suffix(".txt"), f"{words}\n".encode())
