"""Optimizer states of a checkpoint between torch's form and the engine's, without the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_solo.errors import CheckpointError
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.zero.checkpoint import (
    COUNTERS,
    counters,
    groups_of,
    load_optimizer,
    optimizer_state_dict,
    set_counters,
)
from lightning_solo.zero.host_optimizer import host_optimizer
from lightning_solo.zero.states import ParameterStates
from tests.messages import mentions
from tests.training import equal


def small(count: int = 3) -> tuple[list[nn.Parameter], Optimizer]:
    parameters = [nn.Parameter(torch.full((2, 2), float(n))) for n in range(count)]
    return parameters, AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.5)


def loaded(optimizer: Optimizer, saved: dict[str, Any], masters: dict[Tensor, Tensor]) -> dict[Tensor, ParameterStates]:
    groups, host = groups_of(optimizer), host_optimizer(optimizer, kind="torch")
    return load_optimizer(host, groups, saved, masters)


def stepped() -> tuple[list[nn.Parameter], Optimizer]:
    parameters, optimizer = small()
    for parameter in parameters:
        parameter.grad = parameter.detach() + 1
    optimizer.step()
    return parameters, optimizer


def test_compact_states_are_refused() -> None:
    parameters, _ = small()
    compact = CompactAdamW([{"params": parameters[:1]}, {"params": parameters[1:]}], master_bits=32)
    for parameter in parameters:
        parameter.grad = parameter.detach() + 1
    compact.step()
    same, optimizer = small()
    with pytest.raises(CheckpointError, match="compact states of parameter 0"):
        loaded(optimizer, compact.state_dict(), {p: p.detach() for p in same})


def test_states_are_found_by_the_groups_own_numbers() -> None:
    """Torch numbers by order, but reads what a file says."""
    _, source = stepped()
    saved = source.state_dict()
    saved["param_groups"][0]["params"], saved["param_groups"][1]["params"] = [12], [10, 11]
    saved["state"] = {12: saved["state"][0], 10: saved["state"][1], 11: saved["state"][2]}
    parameters, optimizer = small()
    states = loaded(optimizer, saved, {p: p.detach() for p in parameters})
    # exp_avg is 0.1 of the gradient, which is n + 1.
    assert [float(states[p].tensors["exp_avg"][0, 0]) for p in parameters] == pytest.approx([0.1, 0.2, 0.3])
    assert [list(states[p].scalars) for p in parameters] == 3 * [["step"]]


def test_options_are_taken_over_and_parameters_are_not() -> None:
    _, source = stepped()
    source.param_groups[1].update(lr=0.25, weight_decay=0.75, initial_lr=1.0)
    saved = source.state_dict()
    parameters, optimizer = small()
    loaded(optimizer, saved, {p: p.detach() for p in parameters})
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert (optimizer.param_groups[1]["weight_decay"], optimizer.param_groups[1]["initial_lr"]) == (0.75, 1.0)
    assert [p for group in optimizer.param_groups for p in group["params"]] == parameters


def test_other_groups_are_refused_by_their_sizes() -> None:
    _, source = stepped()
    parameters, optimizer = small(4)
    words = r"groups of \[1, 2\] parameters, this module's has \[1, 3\]; give configure_optimizers the groups of"
    with pytest.raises(CheckpointError, match=words):
        loaded(optimizer, source.state_dict(), {p: p.detach() for p in parameters})
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_states_that_are_not_there_are_counted() -> None:
    _, source = stepped()
    saved = source.state_dict()
    del saved["state"][1]
    parameters, optimizer = small()
    masters = {p: p.detach() for p in parameters}
    with pytest.warns(UserWarning, match=mentions("1 of 3 parameters", "optimizer state")):
        states = loaded(optimizer, saved, masters)
    assert (states[parameters[1]].tensors, states[parameters[1]].scalars) == ({}, {})
    saved["state"] = {}  # saved before the first step: nothing to say
    assert all(not found.tensors for found in loaded(optimizer, saved, masters).values())


def test_a_frozen_parameter_of_a_group_is_passed_over() -> None:
    _, source = stepped()
    parameters, optimizer = small()
    masters = {p: p.detach() for p in parameters[:2]}
    assert set(loaded(optimizer, source.state_dict(), masters)) == set(parameters[:2])


def test_a_parameter_of_one_element_keeps_its_count_apart() -> None:
    """Its states have the shape of its count of steps."""
    parameter = nn.Parameter(torch.tensor(1.0))
    source = AdamW([parameter], lr=0.1)
    parameter.grad = torch.tensor(2.0)
    source.step()
    other = nn.Parameter(torch.tensor(1.0))
    states = loaded(AdamW([other], lr=0.1), source.state_dict(), {other: other.detach()})[other]
    assert (set(states.tensors), set(states.scalars)) == ({"exp_avg", "exp_avg_sq"}, {"step"})


def test_loaded_states_are_saved_as_they_were() -> None:
    _, source = stepped()
    parameters, optimizer = small()
    masters = {p: p.detach() for p in parameters}
    groups, host = groups_of(optimizer), host_optimizer(optimizer, kind="torch")
    states = load_optimizer(host, groups, source.state_dict(), masters)
    saved = optimizer_state_dict(host, groups, states)
    assert [group["params"] for group in saved["param_groups"]] == [[0], [1, 2]]
    assert sorted(saved["state"]) == [0, 1, 2]
    assert equal(saved["state"], source.state_dict()["state"])


def test_counts_of_another_loss_scaler_are_left_out() -> None:
    scaler = SimpleNamespace(cur_scale=4, dtype=torch.float16, last_overflow_iter=-1)
    engine = SimpleNamespace(**dict.fromkeys(COUNTERS, 1), optimizer=SimpleNamespace(loss_scaler=scaler))
    assert counters(engine)["loss_scaler"] == {"cur_scale": 4, "last_overflow_iter": -1}
    set_counters(engine, {"engine": {"global_steps": 5, "unknown": 1}, "loss_scaler": {"cur_scale": 8, "of_fp16": 2}})
    assert vars(scaler) == {"cur_scale": 8, "dtype": torch.float16, "last_overflow_iter": -1}
    assert engine.global_steps == 5
    assert not hasattr(engine, "unknown")
