"""Each kind of race is found and named with both lines; the program without it has none."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import pytest
import torch

from tests.simcuda import device

pytestmark = pytest.mark.simcuda
COUNT = 1000
HERE = "test_races.py"


def pinned(value: float = 1.0) -> torch.Tensor:
    return torch.full((COUNT,), value).pin_memory()


def the_race() -> device.Race:
    (race,) = device.races()
    return race


def line_of(mark: str) -> str:
    """Return the ``file.py:12`` of this file's line that ends in a comment."""
    with open(__file__) as file:
        number = next(n for n, line in enumerate(file, 1) if line.rstrip().endswith(f"# {mark}"))
    return f"{HERE}:{number}"


# --- streams ---


@pytest.mark.parametrize("waits", [True, False])
def test_a_wait_for_an_event(waits: bool):
    side, buffer = torch.cuda.Stream(), torch.zeros(COUNT, device="cuda")
    source = pinned()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        buffer.copy_(source, non_blocking=True)  # uploads
    if waits:
        torch.cuda.current_stream().wait_event(side.record_event())
    total = buffer.sum()  # reads
    torch.cuda.synchronize()
    assert total == COUNT
    if waits:
        assert not device.races()
        return
    race = the_race()
    assert race.kind == "unordered"
    assert (race.later.name, race.later.writes, race.later.stream) == ("aten::sum", False, 0)
    assert (race.earlier.name, race.earlier.writes, race.earlier.stream) == ("copy to the device", True, side.stream_id)
    assert race.later.line.endswith(line_of("reads"))
    assert race.earlier.line.endswith(line_of("uploads"))
    for part in ("aten::sum", "copy to the device", f"stream {side.stream_id}", line_of("reads"), line_of("uploads")):
        assert part in str(race)


def test_an_event_orders_what_came_before_it_alone():
    side, first, second = torch.cuda.Stream(), torch.zeros(COUNT, device="cuda"), torch.zeros(COUNT, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        first.fill_(1)
        event = side.record_event()
        second.fill_(2)
    torch.cuda.current_stream().wait_event(event)
    first.sum()
    assert not device.races()
    second.sum()
    assert the_race().earlier.name == "aten::fill_"


def test_reads_need_no_order_and_other_bytes_neither():
    side, values = torch.cuda.Stream(), torch.ones(2 * COUNT, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        values.sum()
        values[:COUNT].add_(0)
    values[COUNT:].sum()
    values[COUNT:].add_(1)  # read as a whole on the other stream
    assert the_race().earlier.name == "aten::sum"


def test_three_streams_are_ordered_through_the_second():
    streams = [torch.cuda.Stream() for _ in range(3)]
    values = torch.ones(COUNT, device="cuda")
    before: Any = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            values.add_(1)
        before = stream
    torch.cuda.current_stream().wait_stream(before)
    assert values.sum().item() == 4 * COUNT
    assert not device.races()


# --- pinned memory and the host ---


@pytest.mark.parametrize("waits", [True, False])
def test_host_read_before_the_copy_is_done_races(waits: bool):
    target, values = pinned(), torch.ones(COUNT, device="cuda")
    target.copy_(values, non_blocking=True)  # downloads
    event = torch.cuda.current_stream().record_event()
    if waits:
        event.synchronize()
    target.sum()  # on the host
    if waits:
        assert not device.races()
        return
    race = the_race()
    assert (race.later.stream, race.later.name) == (device.HOST, "aten::sum")
    assert race.earlier.line.endswith(line_of("downloads"))
    assert race.later.line.endswith(line_of("on the host"))


@pytest.mark.parametrize("read", ["numpy", "tolist", "item", "clone", "cat", "save"])
def test_all_ways_of_reading_on_the_host_race(read: str, tmp_path: Any):
    target, values = pinned(), torch.ones(COUNT, device="cuda")
    target.copy_(values, non_blocking=True)
    ways = {
        "item": lambda: target[3].item(),
        "cat": lambda: torch.cat([target, target]),
        "save": lambda: torch.save(target, tmp_path / "file.pt"),
    }
    ways.get(read, lambda: getattr(target, read)())()
    assert the_race().later.stream == device.HOST


def test_metadata_and_views_of_pinned_memory_read_nothing():
    target, values = pinned(), torch.ones(COUNT, device="cuda")
    target.copy_(values, non_blocking=True)
    target.view(-1, 10).t()[2:].detach()
    torch.empty_like(target), target.is_pinned(), target.shape, target.new_zeros(3), torch.zeros_like(target)
    assert not device.races()
    torch.cuda.synchronize()


@pytest.mark.parametrize("query", [True, False])
def test_query_of_a_finished_event_orders_as_a_wait(query: bool):
    target, values = pinned(), torch.ones(COUNT, device="cuda")
    target.copy_(values, non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    assert not query or event.query()
    target.sum()
    assert bool(device.races()) != query


# --- memory that is freed ---


@pytest.mark.parametrize("recorded", [True, False])
def test_a_freed_block_is_given_to_others_while_another_stream_reads_it(recorded: bool):
    side = torch.cuda.Stream()
    values = torch.ones(COUNT, device="cuda")
    address = values.data_ptr()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        values.sum()  # side reads
    if recorded:
        values.record_stream(side)
    del values
    again = torch.zeros(COUNT, device="cuda")  # again
    assert again.data_ptr() == address
    if recorded:
        assert not device.races()
        return
    race = the_race()
    assert race.later.line.endswith(line_of("again"))
    assert race.earlier.line.endswith(line_of("side reads"))


@pytest.mark.parametrize("waits", [True, False])
def test_a_freed_block_is_recorded_on_a_stream_that_waits_for_its_reader(waits: bool):
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    values = torch.ones(COUNT, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        values.sum()
    if waits:
        other.wait_stream(side)
    values.record_stream(other)
    del values
    torch.zeros(COUNT, device="cuda")
    assert bool(device.races()) != waits


def test_a_freed_block_is_used_again_on_its_stream_without_a_race():
    for value in range(3):
        torch.full((COUNT,), float(value), device="cuda").sum()
    assert not device.races()


def test_memory_of_another_stream_is_not_taken():
    side = torch.cuda.Stream()
    address = torch.ones(COUNT, device="cuda").data_ptr()
    with torch.cuda.stream(side):
        assert torch.ones(COUNT, device="cuda").data_ptr() != address
    assert not device.races()


# --- registered memory ---


def registered(size: int = 2**16) -> tuple[mmap.mmap, torch.Tensor]:
    memory = mmap.mmap(-1, size)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    assert not int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), size, 0))
    return memory, whole


@pytest.mark.parametrize("waits", [True, False])
def test_unregistered_while_a_copy_is_under_way(waits: bool):
    _, whole = registered()
    target = torch.empty(whole.numel(), dtype=torch.uint8, device="cuda")
    target.copy_(whole, non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    assert not int(torch.cuda.cudart().cudaHostUnregister(whole.data_ptr()))
    if waits:
        assert not device.races()
    else:
        assert the_race().kind == "unregistered"


@pytest.mark.parametrize("first", [True, False])
def test_unregistered_after_it_was_unmapped(first: bool):
    memory, whole = registered()
    address = whole.data_ptr()
    unregister = torch.cuda.cudart().cudaHostUnregister
    if first:
        unregister(address)
    else:
        weakref.finalize(memory, unregister, address)  # runs behind munmap
    del whole, memory
    races = device.races()
    assert [race.kind for race in races] == ([] if first else ["unmapped"])


@pytest.mark.parametrize("held_back", ["none", "copies"])
def test_unmapped_while_a_copy_is_under_way(held_back: str):
    memory, whole = registered()
    address = whole.data_ptr()
    target = torch.empty(whole.numel(), dtype=torch.uint8, device="cuda")
    with device.delayed(held_back):
        target.copy_(whole, non_blocking=True)
        del whole
        memory.close()
        torch.cuda.synchronize()
        race = the_race()
        assert race.kind == "unmapped"
        assert race.earlier.name == "copy to the device"
    torch.cuda.cudart().cudaHostUnregister(address)
    assert [race.kind for race in device.races()] == ["unmapped"]


def test_registering_twice_and_unregistering_what_is_not():
    _memory, whole = registered()
    runtime = torch.cuda.cudart()
    assert whole.is_pinned()
    assert runtime.cudaHostRegister(whole.data_ptr(), 4096, 0) == 712
    assert runtime.cudaHostUnregister(whole.data_ptr()) == 0
    assert not whole.is_pinned()
    assert runtime.cudaHostUnregister(whole.data_ptr()) == 713


# --- what is said of a race ---


def test_a_race_in_backward_names_the_node_or_the_hook():
    side = torch.cuda.Stream()
    weight = torch.ones(COUNT, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    loss = (weight * weight).sum()
    with torch.cuda.stream(side):
        weight.data.add_(1)
    device.races()
    loss.backward()
    names = [race.later.line for race in device.races()]
    assert names
    assert all("backward of MulBackward" in name or HERE in name for name in names)


def test_a_copy_of_many_pages_is_one_race():
    side, values = torch.cuda.Stream(), torch.zeros(2**20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        values.fill_(1)
    values.sum()
    assert the_race().later.name == "aten::sum"


def test_plugin_fails_a_test_that_races(pytester_run: Any):
    done = pytester_run(
        """
        import torch
        def test_races():
            values = torch.zeros(100, device="cuda")
            with torch.cuda.stream(torch.cuda.Stream()):
                values.add_(1)
        def test_fine():
            assert torch.zeros(100, device="cuda").sum().item() == 0
        """,
        "-p",
        "tests.simcuda.plugin",
    )
    assert "1 failed, 1 passed" in done.stdout
    assert "write by aten::add_ on stream 1" in done.stdout
    assert "test_seeded.py:6" in done.stdout
