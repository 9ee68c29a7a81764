"""The states inside the real engine's flat tensors, parameter by parameter, beside those of a plain optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_solo.errors import CheckpointError
from lightning_solo.zero.deepspeed_internals import flat_tensors, in_memory
from lightning_solo.zero.states import ParameterStates, read, write
from tests.messages import mentions
from tests.zero.engines import PLACES, arguments, engine_of, net, step_engine, step_plain, trained

pytest.importorskip("deepspeed", reason="listed on Linux only")
pytestmark = pytest.mark.timeout(600)  # the first test of a machine's life builds async_io
Make = Callable[[nn.Module], Optimizer]


def adamw(module: nn.Module) -> Optimizer:
    """Two groups, the second with other options."""
    first, *others = [child for child in module.children() if next(child.parameters()).requires_grad]
    rest = [p for child in others for p in child.parameters()]
    return AdamW([{"params": list(first.parameters())}, {"params": rest, "lr": 1e-3, "betas": (0.5, 0.6)}], lr=1e-2)


def sgd(module: nn.Module) -> Optimizer:
    return SGD([p for p in module.parameters() if p.requires_grad], lr=1e-2, momentum=0.9)


def assert_same_states(
    found: dict[Tensor, ParameterStates], module: nn.Module, plain: nn.Module, by: Optimizer
) -> None:
    """Compare with the states of a plain optimizer, bit by bit."""
    assert set(found) == set(trained(module))
    for ours, theirs in zip(trained(module), trained(plain), strict=True):
        states, state = found[ours], by.state[theirs]
        assert torch.equal(states.master, theirs)
        assert {**states.tensors, **states.scalars}.keys() == state.keys()
        assert all(torch.equal(value, state[name]) for name, value in states.tensors.items())
        assert all(value == state[name] for name, value in states.scalars.items())


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Stage 2, stage 3, and stage 3 with the optimizer's states on disk."""
    return arguments(request.param, tmp_path)


# --- read ---


@pytest.mark.parametrize("make", [adamw, sgd])
def test_states_equal_those_of_a_plain_optimizer(place: dict[str, Any], make: Make) -> None:
    module, plain = net(), net()
    optimizer = make(plain)
    with engine_of(module, make(module), **place) as engine:
        fresh = read(engine.optimizer)
        assert all(torch.equal(fresh[p].master, q) for p, q in zip(trained(module), trained(plain), strict=True))
        for seed in range(3):
            step_plain(plain, optimizer, seed)
            step_engine(engine, seed)
        found = read(engine.optimizer)
        assert_same_states(found, module, plain, optimizer)
        assert {len(states.tensors) for states in found.values()} == {2 if make is adamw else 1}
        # Reading takes nothing away: training goes on as before.
        step_plain(plain, optimizer, 3)
        step_engine(engine, 3)
        assert_same_states(read(engine.optimizer), module, plain, optimizer)
        del fresh, found


def test_each_parameter_has_its_place_and_its_shape(place: dict[str, Any]) -> None:
    module = net()
    shapes = {p: p.shape for p in trained(module)}
    with engine_of(module, adamw(module), **place) as engine:
        places = [(index, spot) for index, (_, spots) in enumerate(flat_tensors(engine.optimizer)) for spot in spots]
        assert {spot.parameter: spot.shape for _, spot in places} == shapes
        # The groups' parameters end to end: 42 + 6, then 6 x 512 + 512 + 512 x 520 + 520 + 3 x 520 + 3.
        starts = [(index, spot.start) for index, spot in places]
        assert starts == [(0, 0), (0, 42), (1, 0), (1, 3072), (1, 3584), (1, 269824), (1, 270344), (1, 271904)]


@pytest.mark.parametrize("stage", [2, 3])
def test_in_memory_they_are_views(stage: int) -> None:
    module = net()
    with engine_of(module, adamw(module), stage=stage) as engine:
        step_engine(engine, 0)
        for flat, spots in flat_tensors(engine.optimizer):
            kept = {flat.untyped_storage().data_ptr()}
            kept |= {v.untyped_storage().data_ptr() for v in engine.optimizer.optimizer.state[flat].values()}
            for spot in spots:
                states = read(engine.optimizer)[spot.parameter]
                for view in (states.master, *states.tensors.values()):
                    assert view.untyped_storage().data_ptr() in kept


def test_plain_values_are_each_parameters_own(place: dict[str, Any]) -> None:
    """One count of steps for many parameters would count too fast in a plain optimizer that took it over."""
    module = net()
    with engine_of(module, adamw(module), **place) as engine:
        step_engine(engine, 0)
        found = read(engine.optimizer)
        counts = [states.scalars["step"] for states in found.values()]
        for count in counts:
            count += 1
        assert [float(count) for count in counts] == [2.0] * 8
        assert {float(states.scalars["step"]) for states in read(engine.optimizer).values()} == {1.0}


def test_of_the_disk_they_are_copies_in_files_where_a_folder_is_given(tmp_path: Path) -> None:
    given, folder, module = arguments("nvme", tmp_path / "swap"), tmp_path / "copies", net()
    folder.mkdir()
    with engine_of(module, adamw(module), **given) as engine:
        step_engine(engine, 0)
        without, found = read(engine.optimizer), read(engine.optimizer, folder)
        # The second group alone is large enough for the disk: its 6 parameters, each a master and two states.
        sizes = sorted(file.stat().st_size for file in folder.iterdir())
        numels = [6 * 512, 512, 512 * 520, 520, 3 * 520, 3]
        assert sizes == sorted(4 * n for n in numels for _ in range(3))
        for p, states in found.items():
            assert torch.equal(states.master, without[p].master)
            assert states.tensors.keys() == without[p].tensors.keys()
            assert all(torch.equal(value, without[p].tensors[name]) for name, value in states.tensors.items())
        found[module[3].weight].master.zero_()
        assert read(engine.optimizer)[module[3].weight].master.any()
        # Neither is in the buffers through which the next step swaps.
        second = [p for part in module[2:] for p in part.parameters()]
        before = {p: without[p].master.clone() for p in second}
        step_engine(engine, 1)
        assert all(torch.equal(without[p].master, before[p]) for p in second)
        assert not found[module[3].weight].master.any()
        assert not torch.equal(read(engine.optimizer)[module[3].weight].master, before[module[3].weight])
        del found, states


def test_of_the_disk_nothing_stays_in_memory(tmp_path: Path) -> None:
    given, module = arguments("nvme", tmp_path), net()
    with engine_of(module, adamw(module), **given) as engine:
        zero = engine.optimizer
        step_engine(engine, 0)
        flats = [flat for flat, _ in flat_tensors(zero)]
        sizes = []
        for index in range(2):
            with in_memory(zero, index) as from_disk:
                sizes.append((from_disk, flats[index].numel()))
        assert sizes == [(False, 48), (True, 271907)]
        assert [flat.numel() for flat in flats] == [48, 0]
        assert zero.optimizer_swapper.swap_buffer_manager.used_buffer_index == {}


# --- write ---


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_fresh_engine_continues_from_what_is_written(place: dict[str, Any], make: Make) -> None:
    plain = net()
    optimizer = make(plain)
    for seed in range(2):
        step_plain(plain, optimizer, seed)
    module = copy.deepcopy(plain)
    with engine_of(module, make(module), **place) as engine:
        given = {}
        for ours, theirs in zip(trained(module), trained(plain), strict=True):
            state = dict(optimizer.state[theirs])
            scalars = {"step": state.pop("step")} if "step" in state else {}
            given[ours] = ParameterStates(theirs.detach(), state, scalars)
        write(engine.optimizer, given)
        assert_same_states(read(engine.optimizer), module, plain, optimizer)
        for seed in range(2, 4):
            step_plain(plain, optimizer, seed)
            step_engine(engine, seed)
        assert_same_states(read(engine.optimizer), module, plain, optimizer)


def test_parameters_without_new_states_keep_theirs(place: dict[str, Any]) -> None:
    module = net()
    with engine_of(module, adamw(module), **place) as engine:
        step_engine(engine, 0)
        zero, written = engine.optimizer, module[3].bias
        before = {p: (s.master.clone(), s.tensors["exp_avg"].clone()) for p, s in read(zero).items()}
        ones = torch.ones(520)
        write(zero, {written: ParameterStates(ones, {"exp_avg": 2 * ones}, {"step": torch.tensor(7.0)})})
        after = read(zero)
        assert torch.equal(after[written].master, ones)
        assert torch.equal(after[written].tensors["exp_avg"], 2 * ones)
        for p in set(before) - {written}:
            assert torch.equal(after[p].master, before[p][0])
            assert torch.equal(after[p].tensors["exp_avg"], before[p][1])
        # The count is the flat tensor's: that of the second group's others too, not of the first group's.
        assert float(after[module[4].weight].scalars["step"]) == 7.0
        assert float(after[module[0].weight].scalars["step"]) == 1.0
        del after


@pytest.mark.parametrize("stage", [2, 3])
def test_counts_that_differ_within_a_flat_tensor_are_refused(stage: int) -> None:
    module = net()
    with engine_of(module, adamw(module), stage=stage) as engine:
        found = read(engine.optimizer)
        before = {p: states.master.clone() for p, states in found.items()}

        def counted(steps: dict[Tensor, int]) -> dict[Tensor, ParameterStates]:
            masters = {p: found[p].master + 1 for p in steps}
            return {p: ParameterStates(masters[p], {}, {"step": torch.tensor(float(n))}) for p, n in steps.items()}

        a, b, other = module[2].weight, module[2].bias, module[0].weight
        with pytest.raises(CheckpointError, match=mentions("'step'", "from 3.0 to 5.0", "without the optimizer")):
            write(engine.optimizer, counted({a: 5, b: 3, other: 5}))
        assert all(torch.equal(found[p].master, before[p]) for p in before)  # nothing was written
        write(engine.optimizer, counted({a: 5, b: 5, other: 3}))  # of two flat tensors they may
        after = read(engine.optimizer)
        assert [float(after[p].scalars["step"]) for p in (a, b, other)] == [5.0, 5.0, 3.0]


def test_the_count_that_is_written_is_not_the_callers(place: dict[str, Any]) -> None:
    module, count = net(), torch.tensor(4.0)
    with engine_of(module, adamw(module), **place) as engine:
        p = module[0].weight
        write(engine.optimizer, {p: ParameterStates(read(engine.optimizer)[p].master.clone(), {}, {"step": count})})
        count += 1
        assert float(read(engine.optimizer)[p].scalars["step"]) == 4.0
