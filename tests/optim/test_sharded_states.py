"""Optimizers of shards step to the bits of whole parameters, and load whole states; each rank in a process of its own.

Torch's fake process group stands for the other processes. Two real ones gather states in `tests/engines`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_solo.errors import CheckpointError, PresetError
from lightning_solo.memory.sharded_tensors import is_sharded, local, part_of, span
from lightning_solo.optim.adamw_state_dict import unmarked
from lightning_solo.optim.adamw_states import plain
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.compressed_moments import LEAST
from lightning_solo.optim.master_weights import MasterWeights
from lightning_solo.optim.sharded_states import gathered_states, load_states
from lightning_solo.optim.split_weights import split_parameters

SHAPES = ((96, 64), (40, 128), (64,), (3, 5), (1, 4))  # of which the first two have moments in 8 bits
STEPS = 3
Make = Callable[[list[Any], Any], Any]


def _compact(bits: Any) -> Make:
    def make(parameters: list[Any], corrections: Any) -> Any:
        return CompactAdamW(parameters, lr=0.01, master_bits=bits, corrections=corrections, fused=False)

    return make


def _momentum(parameters: list[Any], corrections: Any) -> Any:
    sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return MasterWeights(sgd, master_bits=24, corrections=corrections)


MAKERS: dict[str, tuple[Any, Make]] = {
    "24 bits": (24, _compact(24)),
    "stochastic": ("16-stochastic", _compact("16-stochastic")),
    "fp32 weights": (None, _compact(32)),
    "momentum": (24, _momentum),
}


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[Any]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        name = f"rank {rank} of {world}"  # torch's caches take meshes of one name for one, with the rank of the first
        yield init_device_mesh("cpu", (world,), mesh_dim_names=(name,))
    finally:
        torch.distributed.destroy_process_group()


def _start(bits: Any) -> tuple[list[nn.Parameter], dict[Tensor, Tensor] | None]:
    generator = torch.Generator().manual_seed(1)
    whole = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    return whole, None if bits is None else split_parameters(whole, bits)


def _gradients(step: int, kind: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 + step)
    return [torch.randn(shape, generator=generator).to(kind) for shape in SHAPES]


def _shards(whole: list[nn.Parameter], corrections: Any, mesh: Any) -> tuple[list[Any], Any]:
    shards = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)) for p in whole]
    if corrections is None:
        return shards, None
    spans = [(shard, corrections[p], *span(shard)) for p, shard in zip(whole, shards, strict=True) if p in corrections]
    return shards, {shard: lower[first : first + count] for shard, lower, first, count in spans}


def _stepped(optimizer: Any, parameters: list[Any], first: int, last: int) -> None:
    for step in range(first, last):
        for p, gradient in zip(parameters, _gradients(step, parameters[0].dtype), strict=True):
            p.grad = gradient
            if is_sharded(p):
                p.grad = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
        optimizer.step()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_shards_step_to_the_bits_of_the_whole(name: str, world: int) -> None:
    bits, make = MAKERS[name]
    whole, corrections = _start(bits)
    optimizer = make(whole, corrections)
    started = [p.detach().clone() for p in whole]
    _stepped(optimizer, whole, 0, STEPS)
    states = copy.deepcopy(optimizer.state_dict())
    halfway = [p.detach().clone() for p in whole]
    _stepped(optimizer, whole, STEPS, STEPS + 1)
    assert not any(map(torch.equal, started, halfway))
    exact = [number for number in range(len(SHAPES)) if bits != "16-stochastic" or number < 2]  # others are in 1 block
    for rank in range(world):
        with rank_of(rank, world) as mesh:
            first, corrections = _start(bits)
            shards, lower = _shards(first, corrections, mesh)
            mine = make(shards, lower)
            _stepped(mine, shards, 0, STEPS)
            for number in exact:
                assert torch.equal(local(shards[number]), part_of(halfway[number], shards[number])), (rank, number)
            _stepped(mine, shards, STEPS, STEPS + 1)
            for number in exact:
                assert torch.equal(local(shards[number]), part_of(whole[number].detach(), shards[number])), number

            resumed, lower = _shards([nn.Parameter(p) for p in halfway], None, mesh)
            other = make(resumed, {})
            load_states(other, states)
            _stepped(other, resumed, STEPS, STEPS + 1)
            for number in exact:
                assert torch.equal(local(resumed[number]), local(shards[number])), (rank, number)


def test_the_size_of_the_whole_decides_the_precision_of_moments() -> None:
    with rank_of(0, 2) as mesh:
        shards, _ = _shards([nn.Parameter(torch.randn(64, 64))], None, mesh)
        optimizer = CompactAdamW(shards, master_bits=32)
        shards[0].grad = distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)], src_data_rank=None)
        optimizer.step()
        (state,) = optimizer.state.values()
        assert shards[0].numel() == LEAST
        assert (state["exp_avg"].dtype, state["exp_avg"].numel()) == (torch.int8, LEAST // 2)
        assert state["exp_avg_scale"].numel() == LEAST // 2 // 128


def test_sharded_weights_cannot_become_bf16_in_the_optimizer() -> None:
    with rank_of(0, 2) as mesh:
        shards, _ = _shards([nn.Parameter(torch.randn(64, 64))], None, mesh)
        with pytest.raises(PresetError, match=r"sharded.*compact_states"):
            CompactAdamW(shards)


def test_moments_in_blocks_that_shards_cut_are_rounded_again() -> None:
    whole = [nn.Parameter(torch.randn(6, 1000))]
    optimizer = CompactAdamW(whole, master_bits=32, fused=False)
    whole[0].grad = torch.randn(6, 1000)
    optimizer.step()
    plain = optimizer.adamw_state_dict()["state"][0]
    for rank in range(2):
        with rank_of(rank, 2) as mesh:
            shards, _ = _shards(whole, None, mesh)
            mine = CompactAdamW(shards, master_bits=32, fused=False)
            load_states(mine, optimizer.state_dict())
            for name in ("exp_avg", "exp_avg_sq"):
                expected = part_of(plain[name], shards[0])
                found = mine.adamw_state_dict()["state"][0][name]
                assert (local(found) - expected).abs().max() <= 0.02 * expected.abs().max()
                assert expected.abs().max() > 0


def _matrix(bits: Any) -> tuple[nn.Parameter, CompactAdamW]:
    matrix = nn.Parameter(torch.randn(96, 64))
    return matrix, _compact(bits)([matrix], split_parameters([matrix], bits))


@pytest.mark.parametrize("bits", [24, "16-stochastic"])
def test_plain_moments_beside_a_correction_of_other_bits_are_refused(bits: Any) -> None:
    matrix, optimizer = _matrix(32)
    matrix.grad = torch.randn_like(matrix)
    optimizer.step()
    saved = optimizer.state_dict()
    state = unmarked(saved)["state"][0]
    saved["state"][0] = {**plain(matrix, state), "correction": state["correction"]}  # as of shards that cut blocks
    with pytest.raises(CheckpointError, match="master_bits=32"):
        _matrix(bits)[1].load_state_dict(saved)
    same, other = _matrix(32)
    other.load_state_dict(saved)
    assert torch.equal(other.state[same]["correction"], state["correction"])


def test_states_of_a_vector_whose_shards_cut_blocks_are_gathered() -> None:
    with rank_of(0, 1) as mesh:
        shards, _ = _shards([nn.Parameter(torch.randn(5000))], None, mesh)
        optimizer = CompactAdamW(shards, master_bits=32, fused=False)
        shards[0].grad = distribute_tensor(torch.randn(5000), mesh, [Shard(0)], src_data_rank=None)
        optimizer.step()
        moments = optimizer.adamw_state_dict()["state"][0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lightning_solo.optim.sharded_states._cuts_blocks", lambda p: True)
            whole = gathered_states(optimizer, keep=True)["state"][0]
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(whole[name], local(moments[name]))
            assert whole[name].abs().max() > 0
