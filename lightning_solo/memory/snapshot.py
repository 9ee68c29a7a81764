"""The CUDA allocator's history: its recording, and the moment of its peak."""

from __future__ import annotations

import os
import pickle
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
    """Records the CUDA allocator's history. A recording that was started elsewhere is neither restarted nor stopped.

    Args:
        max_entries: entries of the history; older ones are dropped.
        native_frames: also record C++ frames, which name the operators of backward; reading them takes minutes.
    """

    def __init__(self, max_entries: int, native_frames: bool = False) -> None:
        self.max_entries = max_entries
        self.native_frames = native_frames
        self.on = False  # whether this object records

    def start(self) -> None:
        """Start the recording, unless the allocator records already."""
        if not records():
            self._record()

    def clear(self) -> None:
        """Drop the history so far, but keep the frames of live allocations."""
        if self.on:
            self._record()

    def _record(self) -> None:
        self.on = True
        torch.cuda.memory._record_memory_history(
            "all",
            context="all",
            stacks="all" if self.native_frames else "python",
            max_entries=self.max_entries,
            clear_history=True,
        )

    def stop(self) -> None:
        """Stop the recording if this object started it; a second call does nothing."""
        if self.on:
            self.on = False
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
    """One allocation: its requested bytes, and the frames of the call that made it, innermost first."""

    bytes: int
    frames: Sequence[Mapping[str, Any]] | None
    survived: bool  # until the snapshot, so that its address was not reused


@dataclass(frozen=True)
class Moment:
    """The allocations at one moment of a history."""

    blocks: dict[int, Block]  # address -> allocation
    wanted: int = 0  # at an OOM, the bytes whose allocation failed
    free: int = 0  # at an OOM, the device's free bytes

    @property
    def bytes(self) -> int:
        """The requested bytes of all allocations, before the allocator rounds them."""
        return sum(block.bytes for block in self.blocks.values())


def moment_of_peak(snapshot: Mapping[str, Any], device: int = 0) -> Moment:
    """Return the moment of the history at which most bytes were allocated, including its start and end."""
    changes = [_change(event) for event in _events(snapshot, device)]
    end = sum(block["requested_size"] for block in _active(snapshot, device).values())
    totals = list(accumulate(changes, initial=end - sum(changes)))
    return _moment(snapshot, device, max(range(len(totals)), key=lambda index: (totals[index], index)))


def moment_of_oom(snapshot: Mapping[str, Any], device: int = 0) -> Moment | None:
    """Return the moment of the last OOM in the history, or None."""
    ooms = [(index, event) for index, event in enumerate(_events(snapshot, device)) if event["action"] == "oom"]
    if not ooms:
        return None
    index, event = ooms[-1]
    return _moment(snapshot, device, index, event.get("size", 0), event.get("device_free", 0))


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
    """Allocations of one category, or from one place in the code."""

    what: str
    bytes: int
    count: int


def holdings(moment: Moment, module: nn.Module | None = None, optimizers: Iterable[object] = ()) -> list[Holding]:
    """Return weights, gradients, optimizer states, and the other allocations by place in the code, the largest first.

    Args:
        moment: a moment of a snapshot that was taken just now, since addresses are compared.
        module: for names of weights, gradients and the methods of modules.
        optimizers: for names of optimizer states.
    """
    owners, code = owners_of(module, optimizers), code_of(module)
    sizes: dict[str, list[int]] = {}
    for address, block in moment.blocks.items():
        owner = owners.get(address) if block.survived else None
        sizes.setdefault(owner or place_of(block.frames, code), []).append(block.bytes)
    rows = [Holding(what, sum(counts), len(counts)) for what, counts in sizes.items()]
    return sorted(rows, key=lambda row: -row.bytes)


def owners_of(module: nn.Module | None, optimizers: Iterable[object] = ()) -> dict[int, str]:
    """Return address -> category of the storages that a module and optimizers hold now."""
    return {
        storage.data_ptr(): category.replace("_", " ")
        for category, tree in owned_by(module, optimizers)
        for storage in storages_of(tree)
    }


Code = Mapping[tuple[Any, Any], tuple[str, str]]
"""(file, line) -> the method of a module's class, and the names of the modules that run it."""


def code_of(module: nn.Module | None) -> Code:
    """Return the lines of the methods of a module and its parts, except in torch's own files."""
    names: dict[type, list[str]] = {}
    for name, part in module.named_modules() if module is not None else ():
        for cls in type(part).__mro__:
            if issubclass(cls, nn.Module) and cls is not nn.Module:
                names.setdefault(cls, []).extend([name] if name else [])
    code: dict[tuple[Any, Any], tuple[str, str]] = {}
    for cls, parts in names.items():
        shown = ", ".join(parts) if len(parts) <= 2 else f"{parts[0]} ... {parts[-1]}, {len(parts)} modules"
        for function in vars(cls).values():
            if isinstance(function, FunctionType) and is_users(function.__code__.co_filename):
                for _, _, line in function.__code__.co_lines():
                    method = f"{cls.__name__}.{function.__name__}"
                    code.setdefault((function.__code__.co_filename, line), (method, shown))
    return code


def place_of(frames: Sequence[Mapping[str, Any]] | None, code: Code | None = None) -> str:
    """Return the user's innermost line that made an allocation, else the library's, as text.

    >>> place_of([{"filename": "/home/me/model.py", "line": 7, "name": "forward"}])
    'forward at model.py:7'
    """
    if frames is None:
        return BEFORE
    python = [frame for frame in frames if str(frame["filename"]).endswith(".py")]
    users = next((frame for frame in python if is_users(frame["filename"])), None)
    operator = next((node[1] for frame in frames if (node := _NODE.search(str(frame["name"])))), "")
    if users is None:
        if operator:
            return f"{operator} in backward"
        return _words_of(python[0]) if python else NO_FRAME
    method, modules = (code or {}).get((users["filename"], users["line"]), (users["name"], ""))
    words = _words_of({**users, "name": method})
    return f"{words}{f' ({modules})' if modules else ''}{f', {operator}' if operator else ''}"


_NODE = re.compile(r"(\w+Backward\d*)(?:::|\b)")


def _words_of(frame: Mapping[str, Any]) -> str:
    return f"{frame['name']} at {os.path.basename(str(frame['filename']))}:{frame['line']}"


def is_users(filename: str) -> bool:
    """Return whether a file is the user's, and not Python's, torch's, Lightning's or this package's."""
    if filename.startswith("<"):
        return False
    return not any(filename.startswith(root) for root in _roots()) or f"{os.sep}reference{os.sep}" in filename


def _roots() -> Iterator[str]:
    package = Path(__file__).parents[1]
    yield f"{package}{os.sep}"
    standard = sysconfig.get_path("stdlib")
    # not the standard library's whole folder, since site-packages is below it
    yield from (f"{standard}{os.sep}{name}" for name in ("contextlib", "functools", "threading", "asyncio", "runpy"))
    for name in NOT_USERS:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            yield f"{os.path.dirname(file)}{os.sep}"


def describe(title: str, moment: Moment, rows: Sequence[Holding], most: int = 8) -> str:
    """Return a moment as text: its total bytes, and a line for each of the ``most`` largest holdings."""
    lines = [f"{title}: {format_bytes(moment.bytes)} allocated"]
    if moment.wanted:
        lines[0] += (
            f", {format_bytes(moment.wanted)} more were requested, {format_bytes(moment.free)} of the device free"
        )
    lines += [f"{format_bytes(row.bytes):>12}  {row.what} ({row.count})" for row in rows[:most]]
    rest = rows[most:]
    if rest:
        lines.append(
            f"{format_bytes(sum(row.bytes for row in rest)):>12}  {len(rest)} other places "
            f"({sum(row.count for row in rest)})"
        )
    return "\n".join(lines)


def write_snapshot(snapshot: Mapping[str, Any], words: str, path: Path) -> None:
    """Write a snapshot for https://docs.pytorch.org/memory_viz, and its text next to it, with the suffix ``.txt``.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(path, pickle.dumps(snapshot))
    write_whole(path.with_suffix(".txt"), f"{words}\n".encode())
