"""What is launched, copied, waited for and allocated is counted exactly."""

from __future__ import annotations

import pytest
import torch

from tests.simcuda import device

pytestmark = pytest.mark.simcuda
COUNT = 1000


def test_kernels_one_per_operator_in_place_or_not():
    values = torch.ones(COUNT, device="cuda")
    with device.counted() as counts:
        made = values * 2  # 1
        made.add_(1)  # 1: not a copy as well
        torch.addcmul(made, values, values, out=made)  # 1
        torch._foreach_mul_([values, made], 2.0)  # 1
        made.view(10, -1).t()[2:]  # none: views
        made[:0].add_(1)  # none: nothing to do
        made.to(torch.bfloat16)  # 1
    assert counts.kernels_by_name == {
        "aten::mul": 1,
        "aten::add_": 1,
        "aten::addcmul": 1,
        "aten::_foreach_mul_": 1,
        "aten::copy_": 1,
    }
    assert counts.synchronisations == 0


def test_bytes_of_kernels_are_those_read_and_written():
    values = torch.ones(COUNT, device="cuda")
    with device.counted() as counts:
        values.mul(2)
        values.mul_(2)
    assert [one.bytes for one in counts.operations] == [4 * COUNT * 2, 4 * COUNT]


def test_copies_by_direction_and_kind():
    values, pinned, pageable = torch.ones(COUNT, device="cuda"), torch.ones(COUNT).pin_memory(), torch.ones(COUNT)
    with device.counted() as counts:
        values.copy_(pinned, non_blocking=True)
        values.copy_(pageable, non_blocking=True)
        pinned.copy_(values, non_blocking=True)
        pageable.copy_(values)
        values[:10].copy_(values[10:20])
    torch.cuda.synchronize()
    size = 4 * COUNT
    assert [counts.copied_bytes("up", pinned=kind) for kind in (True, False, None)] == [size, size, 2 * size]
    assert [counts.copied_bytes("down", pinned=kind) for kind in (True, False)] == [size, size]
    assert (counts.copies("within"), counts.copied_bytes("within")) == (1, 40)
    assert counts.kernels == 0
    assert counts.synchronisations == 2  # both pageable copies; pinned ones wait for nothing
    with pytest.raises(ValueError, match="'up', 'down' or 'within'"):
        counts.copies("sideways")


@pytest.mark.parametrize("non_blocking", [True, False])
def test_copy_that_converts_uses_pageable_memory(non_blocking: bool):
    values, pinned = torch.zeros(COUNT, device="cuda"), torch.ones(COUNT, dtype=torch.float64).pin_memory()
    with device.counted() as counts:
        values.copy_(pinned, non_blocking=non_blocking)
    assert counts.copied_bytes("up", pinned=False) == 4 * COUNT
    assert counts.copied_bytes("up", pinned=True) == 0
    assert counts.synchronisations == 1
    assert values.sum().item() == COUNT


def test_synchronisations_of_each_kind():
    values = torch.ones(COUNT, device="cuda")
    event = torch.cuda.current_stream().record_event()
    waits = [
        torch.cuda.synchronize,
        torch.cuda.current_stream().synchronize,
        event.synchronize,
        values[0].item,
        values.nonzero,
        values.cpu,
        lambda: values[values > 0],
        lambda: bool(values.sum() > 0),
        lambda: torch.equal(values, values),
    ]
    for wait in waits:
        with device.counted() as counts:
            wait()
        assert counts.synchronisations == 1, wait
    with device.counted() as counts:
        torch.where(values > 0, values, 0).sum()
        event.query()
    assert counts.synchronisations == 0


def test_operations_per_stream_with_their_events_and_lines():
    side, values = torch.cuda.Stream(), torch.ones(COUNT, device="cuda")
    with device.counted() as counts:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            values.add_(1)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
    streams = counts.by_stream()
    assert [one.kind for one in streams[0]] == ["record", "wait"]
    assert [one.kind for one in streams[side.stream_id]] == ["wait", "kernel", "record"]
    assert [one.kind for one in streams[device.HOST]] == ["synchronise"]
    assert streams[0][0].event == streams[side.stream_id][0].event
    assert streams[side.stream_id][2].event == streams[0][1].event
    assert all("test_counts.py:" in one.line for one in counts.operations)


def test_peaks_are_those_of_the_context_and_inner_ones_are_apart():
    torch.cuda.empty_cache()
    held = torch.empty(2**20, dtype=torch.uint8, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    with device.counted() as outer:
        torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
        with device.counted() as inner:
            torch.empty(1000, device="cuda")
        torch.empty(2 * 2**20, dtype=torch.uint8, device="cuda")
    assert outer.peak_allocated == base + 3 * 2**20
    assert inner.peak_allocated == base + 4096  # in blocks of 512
    assert torch.cuda.max_memory_allocated() == base + 3 * 2**20
    assert held.numel()


def test_nested_counts_and_nothing_is_counted_outside():
    values = torch.ones(COUNT, device="cuda")
    with device.counted() as outer:
        values.add_(1)
        with device.counted() as inner:
            values.add_(1)
        values.add_(1)
    values.add_(1)
    assert (outer.kernels, inner.kernels) == (3, 1)


# --- kernels of our own ---


def test_a_launched_function_is_one_kernel():
    values, total = torch.ones(COUNT, device="cuda"), torch.zeros(1, device="cuda")

    def body(source: torch.Tensor, target: torch.Tensor) -> None:
        assert source.device.type == target.device.type == "cpu"
        target.copy_((source * 3).sum() + 1)

    with device.counted() as counts:
        device.launch("our_kernel", body, reads=[values], writes=[total])
    assert counts.kernels_by_name == {"our_kernel": 1}
    assert counts.operations[0].bytes == 4 * COUNT + 4
    assert counts.operations[0].line.endswith(".py:" + counts.operations[0].line.rsplit(":", 1)[1])
    assert "test_counts.py" in counts.operations[0].line
    assert total.item() == 3 * COUNT + 1


@pytest.mark.parametrize("waits", [True, False])
def test_launched_function_races_by_its_declared_accesses(waits: bool):
    values, side = torch.ones(COUNT, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        device.launch("our_kernel", lambda to: to.fill_(5), writes=[values])
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    values.sum()
    races = device.races()
    assert [(race.earlier.name, race.later.name) for race in races] == ([] if waits else [("our_kernel", "aten::sum")])


def test_a_launched_function_that_fails_leaves_the_device_as_it_was():
    values = torch.ones(COUNT, device="cuda")

    def body(_: torch.Tensor) -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        device.launch("our_kernel", body, writes=[values])
    assert values.sum().item() == COUNT
