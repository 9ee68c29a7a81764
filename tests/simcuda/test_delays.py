"""Held back, copies and kernels show a wrong order by wrong numbers; a right order gives those of a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.simcuda import device

pytestmark = pytest.mark.simcuda
COUNT = 1000


def upload(waits: bool) -> float:
    side, buffer = torch.cuda.Stream(), torch.zeros(COUNT, device="cuda")
    torch.cuda.synchronize()
    source = torch.ones(COUNT).pin_memory()
    with torch.cuda.stream(side):
        buffer.copy_(source, non_blocking=True)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    return buffer.sum().item()


def reused(waits: bool) -> float:
    source, buffer = torch.ones(COUNT).pin_memory(), torch.zeros(COUNT, device="cuda")
    buffer.copy_(source, non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    source.fill_(5)
    return buffer.sum().item()


def read_early(waits: bool) -> float:
    values, target = torch.ones(COUNT, device="cuda"), torch.zeros(COUNT).pin_memory()
    target.copy_(values, non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    total = target.sum().item()
    torch.cuda.synchronize()
    return total


def freed(waits: bool) -> float:
    side, target = torch.cuda.Stream(), torch.zeros(COUNT).pin_memory()
    values = torch.ones(COUNT, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        target.copy_(values, non_blocking=True)
    if waits:
        values.record_stream(side)
    del values
    torch.full((COUNT,), 7.0, device="cuda")
    side.synchronize()
    return target.sum().item()


def download(waits: bool) -> float:
    side, values = torch.cuda.Stream(), torch.zeros(COUNT, device="cuda")
    target = torch.zeros(COUNT).pin_memory()
    torch.cuda.synchronize()
    values.add_(1)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        target.copy_(values, non_blocking=True)
    side.synchronize()
    return target.sum().item()


def kernels(waits: bool) -> float:
    side, values = torch.cuda.Stream(), torch.zeros(COUNT, device="cuda")
    torch.cuda.synchronize()
    values.add_(1)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = values.sum()
        return total.item()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("program", [upload, reused, read_early, freed])
def test_copies_that_are_held_back(program, waits: bool):
    with device.delayed("copies"):
        assert (program(waits) == COUNT) == waits
    assert bool(device.races()) != waits
    torch.cuda.synchronize()
    assert program(True) == COUNT


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("program", [download, kernels, upload])
def test_kernels_that_are_held_back(program, waits: bool):
    with device.delayed("all"):
        assert (program(waits) == COUNT) == waits
    assert bool(device.races()) != waits


def test_without_delays_only_the_detector_tells():
    assert kernels(False) == COUNT
    assert device.races()


@pytest.mark.parametrize("what", ["none", "copies", "all"])
def test_training_in_one_stream_is_the_same_whatever_is_held_back(what: str):
    def train(to: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(to)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        inputs = torch.randn(5, 8)
        for _ in range(3):
            optimizer.zero_grad()
            module(inputs.to(to, non_blocking=True)).square().mean().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
        return [p.detach().cpu() for p in module.parameters()]

    with device.delayed(what):
        made = train("cuda")
    for one, other in zip(made, train("cpu"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not device.races()


def test_memory_given_back_while_copies_are_held_back_is_left_alone():
    values = torch.ones(2**22, device="cuda")
    target = torch.zeros(2**22).pin_memory()
    with device.delayed("copies"):
        target.copy_(values, non_blocking=True)
        del target, values
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
