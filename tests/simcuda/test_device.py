"""What torch, and those that use it, find of a device: memory, random numbers, properties, operators, errors."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from lightning_solo.memory.events import EventLog
from lightning_solo.planner.replay import Capacities
from tests.simcuda import device

pytestmark = pytest.mark.simcuda


def test_torch_finds_a_device():
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.zeros(2, device="cuda").device == torch.device("cuda", 0)
    assert torch.zeros(2).cuda().is_cuda
    assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1]


def test_memory_is_rounded_cached_and_given_back():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    values = torch.empty(1001, dtype=torch.uint8, device="cuda")
    large = torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before[0] == 1024 + 3 * 2**20
    assert torch.cuda.memory_reserved() - before[1] <= (2 + 20) * 2**20
    del values, large
    assert torch.cuda.memory_allocated() == before[0]
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before[1]


def test_parts_of_a_segment_are_split_and_joined_again():
    torch.cuda.empty_cache()
    parts = [torch.empty(4 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(4)]
    reserved = torch.cuda.memory_reserved()
    del parts[1:3]
    parts.append(torch.empty(8 * 2**20, dtype=torch.uint8, device="cuda"))  # where the two were
    assert torch.cuda.memory_reserved() == reserved


def test_a_list_of_tensors_changed_in_place_is_noticed_by_autograd():
    weight = torch.ones(2, device="cuda", requires_grad=True)
    loss = (weight * weight).sum()
    with torch.no_grad():
        torch._foreach_add_([weight], 1.0)
    assert weight._version == 1
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


@pytest.mark.parametrize("operator", [torch._foreach_add_, torch._foreach_lerp_, torch._foreach_add])
def test_lists_of_tensors_on_two_devices_are_refused_as_by_cuda(operator):
    weights, more = [torch.ones(2, device="cuda") for _ in range(2)], (0.5,) * (operator is torch._foreach_lerp_)
    operator(weights, [torch.ones(2, device="cuda"), torch.tensor(1.0, device="cuda")], *more)
    with pytest.raises(RuntimeError, match="same device"):
        operator(weights, [torch.ones(2, device="cuda"), torch.ones(2)], *more)


def test_lists_of_tensors_that_cuda_takes_one_by_one():
    on_device, on_host = torch.ones(2, device="cuda"), torch.ones(2)
    torch._foreach_add_([on_device], [torch.tensor(1.0)])  # a number
    torch._foreach_mul_([on_device, on_host], 3.0)  # each where it is
    assert (on_device.tolist(), on_host.tolist()) == ([6.0, 6.0], [3.0, 3.0])
    torch._foreach_copy_([on_device], [on_host])
    assert on_device.tolist() == [3.0, 3.0]


def test_more_memory_than_there_is():
    torch.cuda.empty_cache()
    with device.memory_of(torch.cuda.memory_reserved() + 40 * 2**20):
        kept = torch.empty(30 * 2**20, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.empty(30 * 2**20, dtype=torch.uint8, device="cuda")
        del kept
        torch.empty(40 * 2**20, dtype=torch.uint8, device="cuda")  # what is cached is given back for it


def replay_on_the_device(log: EventLog) -> int:
    """Return the bytes by which the peak of reserved memory rises under a log."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, live = torch.cuda.memory_reserved(), {}
    for storage, change in log.events:
        if change < 0:
            del live[storage]
        else:
            live[storage] = torch.empty(change, dtype=torch.uint8, device="cuda")
    return torch.cuda.max_memory_reserved() - before


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_device_and_planner_reserve_the_same(expandable: bool, seed: int):
    """On a stream of its own, whose memory no other test has used."""
    draw, live, log = random.Random(seed), [], EventLog()
    for _ in range(200):
        if live and draw.random() < 0.45:
            storage, size = live.pop(draw.randrange(len(live)))
            log.events.append((storage, -size))
        else:
            size = draw.choice([1, 2**14, 2**20, 3 * 2**20, 12 * 2**20]) + draw.randrange(2**18)
            live.append((log.born("other"), size))
            log.events.append(live[-1])
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            assert replay_on_the_device(log) == Capacities(log, expandable=expandable).peak_reserved()
            most = Capacities(log, expandable=expandable).smallest()
            torch.cuda.empty_cache()
            with device.memory_of(torch.cuda.memory_reserved() + most):
                replay_on_the_device(log)
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def test_pinned_memory_of_torch_is_rounded_to_powers_of_two():
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    made = torch.empty(1000, dtype=torch.uint8, pin_memory=True)
    assert made.is_pinned()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] - before == 1024
    assert not torch.empty(1000).is_pinned()


def test_uninitialised_memory_is_nan():
    assert torch.empty(100, device="cuda").isnan().all()


def test_random_numbers_are_the_devices_own():
    torch.manual_seed(3)
    first = torch.rand(5, device="cuda")
    host = torch.rand(5)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(5), host)  # what the device drew took none of the host's
    state = torch.cuda.get_rng_state()
    assert torch.equal(torch.rand(5, device="cuda"), first)
    torch.cuda.set_rng_state(state)
    assert torch.equal(nn.functional.dropout(torch.ones(50, device="cuda")).cpu() > 0, drawn(state))
    generator = torch.Generator().manual_seed(4)
    assert torch.equal(
        torch.rand(5, device="cuda", generator=generator).cpu(), torch.rand(5, generator=generator.manual_seed(4))
    )


def drawn(state: torch.Tensor) -> torch.Tensor:
    torch.cuda.set_rng_state(state)
    return nn.functional.dropout(torch.ones(50, device="cuda")).cpu() > 0


def test_tensors_of_two_devices_are_refused():
    values = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="same device"):
        values + torch.ones(3)
    assert torch.equal((values + torch.tensor(1.0)).cpu(), torch.full((3,), 2.0))  # a number may come from anywhere
    assert values[torch.tensor([0, 2])].shape == (2,)


def test_a_result_that_is_resized_and_one_that_is_an_argument():
    out = torch.empty(0, device="cuda")
    made = torch.cat([torch.ones(3, device="cuda"), torch.zeros(2, device="cuda")], out=out)
    assert made is out
    assert out.tolist() == [1, 1, 1, 0, 0]
    assert out.add_(1) is out
    parts = out.split(2)
    parts[0].zero_()
    assert out.tolist() == [0, 0, 2, 1, 1]
    assert torch.unfold_copy(out, 0, 2, 1).shape == (4, 2)
    assert out.unfold(0, 2, 1).data_ptr() == out.data_ptr()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_transformer_is_trained_as_on_the_cpu(kind: torch.dtype):
    results = []
    for to in ("cpu", "cuda"):
        torch.manual_seed(1)
        module = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).to(to)
        inputs = torch.randn(2, 5, 16).to(to)
        with torch.autocast(to, dtype=kind, enabled=kind != torch.float32):
            loss = module(inputs).float().square().mean()
        loss.backward()
        results.append([loss.detach().cpu(), *(p.grad.cpu() for p in module.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2 if kind != torch.float32 else 1e-4, atol=1e-2)


def test_installing_again_does_nothing():
    before = torch.cuda.is_available
    device.install()
    assert torch.cuda.is_available is before
