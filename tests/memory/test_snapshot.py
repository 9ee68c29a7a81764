"""What a history of the allocator tells: every number below is counted by hand from the events above it."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_solo.memory import snapshot
from lightning_solo.memory.snapshot import (
    BEFORE,
    NO_FRAME,
    History,
    Holding,
    describe,
    holdings,
    moment_of_oom,
    moment_of_peak,
    place_of,
    write_snapshot,
)
from lightning_solo.units import MiB
from tests.messages import lines_with
from tests.modules import Stack


def frame(line: int, name: str = "forward", filename: Any = "/home/me/model.py") -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def event(action: str, addr: int, size: int, line: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "frames": [frame(line)] if line else []}


def active(address: int, size: int, line: int = 0) -> dict[str, Any]:
    frames = [frame(line)] if line else []
    return {
        "address": address, "size": 2 * size, "requested_size": size, "state": "active_allocated", "frames": frames,
    }  # fmt: skip


def recorded(events: list[dict[str, Any]], blocks: list[dict[str, Any]], device: int = 0) -> dict[str, Any]:
    other = {"device": 1 - device, "blocks": [active(1, 10**6)]}
    free = {**active(2, 10**6), "state": "inactive"}
    traces = [[], []]
    traces[device] = events
    return {"segments": [{"device": device, "blocks": [*blocks, free]}, other], "device_traces": traces}


# 100 bytes from before; 200 come and go, 300 come and stay: the peak of 600 is in between.
EVENTS = [
    event("alloc", 20, 200, line=7),
    event("segment_alloc", 90, 10**6),
    event("alloc", 30, 300, line=9),
    event("free_requested", 20, 200),
    event("free_completed", 20, 200),
]
BLOCKS = [active(10, 100), active(30, 300, line=9)]


@pytest.mark.parametrize("device", [0, 1])
def test_peak_is_between_allocation_and_free(device: int) -> None:
    moment = moment_of_peak(recorded(EVENTS, BLOCKS, device), device)
    assert moment.bytes == 100 + 200 + 300
    assert {address: block.bytes for address, block in moment.blocks.items()} == {10: 100, 20: 200, 30: 300}
    assert {address for address, block in moment.blocks.items() if block.survived} == {10, 30}
    assert [row.what for row in holdings(moment)] == ["forward at model.py:9", "forward at model.py:7", BEFORE]


def test_reused_address_is_another_block() -> None:
    events = [event("alloc", 20, 500, 5), event("free_requested", 20, 500), event("alloc", 20, 50, 6)]
    moment = moment_of_peak(recorded(events, [active(20, 50, 6)]))
    assert moment.bytes == 500
    assert not moment.blocks[20].survived
    assert holdings(moment) == [Holding("forward at model.py:5", 500, 1)]


def test_the_peak_may_be_at_the_start_or_at_the_end() -> None:
    falls = recorded([event("free_requested", 20, 200)], [active(10, 100)])
    assert moment_of_peak(falls).bytes == 300
    assert [row.what for row in holdings(moment_of_peak(falls))] == [BEFORE]  # both
    rises = recorded([event("alloc", 20, 200)], [active(10, 100), active(20, 200)])
    assert moment_of_peak(rises).bytes == 300
    assert [row.what for row in holdings(moment_of_peak(rises))] == [NO_FRAME, BEFORE]
    assert moment_of_peak(recorded([], [])).bytes == 0


def test_moment_of_oom_is_before_memory_was_freed() -> None:
    events = [
        event("alloc", 20, 900, 7), event("free_requested", 20, 900), event("alloc", 30, 300, 9),
        {"action": "oom", "size": 5 * MiB, "device_free": MiB, "frames": [frame(11)]}, event("free_requested", 30, 300),
    ]  # fmt: skip
    found = moment_of_oom(recorded(events, [active(10, 100)]))
    assert found is not None
    assert (found.bytes, found.wanted, found.free) == (100 + 300, 5 * MiB, MiB)
    assert moment_of_oom(recorded(EVENTS, BLOCKS)) is None
    words = describe("out of memory", found, holdings(found))
    assert lines_with(words, "out of memory: ", "400 B", "5.00 MiB", "1.00 MiB")


def test_memory_of_a_module_is_named_by_category() -> None:
    module = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weight = module.weight
    state = optimizer.state[weight]["momentum_buffer"]
    addresses = [tensor.data_ptr() for tensor in (weight, module.bias, weight.grad, state)]
    blocks = [active(address, 24, line=3) for address in addresses]
    found = holdings(moment_of_peak(recorded([], blocks)), module, [optimizer])
    assert found == [Holding("weights", 48, 2), Holding("gradients", 24, 1), Holding("optimizer states", 24, 1)]
    # freed since: what lies there now is something else
    freed = recorded([event("free_requested", addresses[0], 24)], [])
    assert [row.what for row in holdings(moment_of_peak(freed), module)] == [BEFORE]


def test_line_is_named_with_its_modules() -> None:
    module = Stack(blocks=3)
    code = type(module.blocks[0]).forward.__code__
    inner = {"filename": nn.Linear.forward.__code__.co_filename, "line": 1, "name": "forward"}
    users = {"filename": code.co_filename, "line": code.co_firstlineno + 1, "name": "forward"}
    block = {**active(10, 100), "frames": [inner, users]}
    (row,) = holdings(moment_of_peak(recorded([], [block])), module)
    place = f"Block.forward at modules.py:{code.co_firstlineno + 1}"
    assert row.what == f"{place} (blocks.0 ... blocks.2, 3 modules)"


def test_library_line_is_named_if_no_user_line_is_known() -> None:
    optimizer = frame(12, "_init_group", importlib.import_module("torch.optim.adamw").__file__)
    assert place_of([optimizer]) == "_init_group at adamw.py:12"
    native = {"filename": "??", "line": 0, "name": "torch::autograd::generated::MmBackward0::apply(...)"}
    assert place_of([native]) == "MmBackward0 in backward"
    assert place_of([native, frame(4, "hook")]) == "hook at model.py:4, MmBackward0"
    assert place_of([]) == NO_FRAME


def test_long_lists_end_with_the_rest() -> None:
    moment = moment_of_peak(recorded([], [active(10 * n, n, line=n) for n in range(1, 12)]))
    lines = describe("peak", moment, holdings(moment), most=3).splitlines()
    assert len(lines) == 1 + 3 + 1
    assert lines[1].split() == ["11", "B", "forward", "at", "model.py:11", "(1)"]
    assert lines[-1].split()[:2] == [str(sum(range(1, 9))), "B"]
    assert "8 other places (8)" in lines[-1]


def test_files_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "step-3.pickle"
    write_snapshot(recorded(EVENTS, BLOCKS), "words", path)
    assert pickle.loads(path.read_bytes()) == recorded(EVENTS, BLOCKS)
    assert path.with_suffix(".txt").read_text() == "words\n"

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="no space"):
            write_snapshot({}, "", path)
    assert sorted(one.name for one in path.parent.iterdir()) == ["step-3.pickle", "step-3.txt"]
    assert pickle.loads(path.read_bytes()) != {}


# --- started and stopped ---


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """Return the calls of torch's function, which also says whether it records."""
    made: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda on, **kwargs: made.append((on, kwargs)))
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: bool(made and made[-1][0]), raising=False)
    return made


def test_it_records_until_it_is_stopped_once(calls: list[Any]) -> None:
    history = History(50)
    history.clear()
    history.stop()
    assert calls == []
    history.start()
    history.start()
    assert [on for on, _ in calls] == ["all"]
    assert calls[0][1] == {"context": "all", "stacks": "python", "max_entries": 50, "clear_history": True}
    assert snapshot.records()
    history.clear()
    history.stop()
    history.stop()
    assert [on for on, _ in calls] == ["all", "all", None]
    assert not snapshot.records()


def test_the_arguments_are_torchs_own() -> None:
    accepted = torch.cuda.memory._record_memory_history.__signature__.parameters  # type: ignore[attr-defined]
    assert {"enabled", "context", "stacks", "max_entries", "clear_history"} <= set(accepted)


def test_recording_of_others_continues(calls: list[Any]) -> None:
    calls.append(("all", {}))
    history = History(50)
    history.start()
    history.clear()
    history.stop()
    assert not history.on
    assert len(calls) == 1


@pytest.mark.gpu
def test_the_peak_of_a_real_history_is_the_allocators() -> None:
    history = History(10_000)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    history.start()
    try:
        kept = torch.empty(3 * MiB, dtype=torch.uint8, device="cuda")
        gone = torch.empty(5 * MiB, dtype=torch.uint8, device="cuda")
        del gone
        moment = moment_of_peak(torch.cuda.memory._snapshot(), torch.cuda.current_device())
    finally:
        history.stop()
    assert not snapshot.records()
    assert moment.bytes <= torch.cuda.max_memory_allocated() == before + 8 * MiB
    sizes = sorted(block.bytes for block in moment.blocks.values() if block.frames)
    assert sizes[-2:] == [3 * MiB, 5 * MiB]
    places = [row.what for row in holdings(moment)[:2]]
    assert all("test_snapshot.py" in place for place in places)
    assert kept.numel() == 3 * MiB
