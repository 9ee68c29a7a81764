"""ZenFlow's second optimizer has the options of the user's, group by group, on the real engine; what it can't train."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_solo.errors import ConflictError
from lightning_solo.zero.checkpoint import groups_of
from lightning_solo.zero.config import merge, zero_config
from lightning_solo.zero.deepspeed_patches import into_zenflow, share_options
from lightning_solo.zero.extension import what_is_missing
from lightning_solo.zero.host_optimizer import HostOptimizer, host_optimizer
from lightning_solo.zero.run import EngineRun
from lightning_solo.zero.zenflow import SHARED, require_matrices, with_optimizer
from tests.messages import lines_with, mentions
from tests.zero.engines import batch, engine_of

pytest.importorskip("deepspeed", reason="listed on Linux only")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),  # the first test of a machine's life builds cpu_adam
    # DeepSpeed's own call, on torch 2.13
    pytest.mark.filterwarnings("ignore:`torch._utils.is_compiling` is deprecated"),
]
SECTION = {
    "topk_ratio": 0.2,
    "select_strategy": "step",
    "select_interval": 2,
    "update_interval": 2,
    "full_warm_up_rounds": 0,
    "overlap_step": False,
}
FIRST = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.3}
SECOND = {"lr": 0.001, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.0}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def two_groups(module: nn.Sequential) -> Optimizer:
    return AdamW([{"params": module[0].parameters(), **FIRST}, {"params": module[1].parameters(), **SECOND}])


def on_host(optimizer: Optimizer) -> Optimizer:
    """Return DeepSpeed's version; skips visibly where it can't be had."""
    if missing := what_is_missing("cpu_adam"):
        pytest.skip(f"no DeepSpeedCPUAdam: {missing}")
    return host_optimizer(optimizer, kind="deepspeed").optimizer


def shared(optimizer: Any) -> list[dict[str, Any]]:
    return [{name: group[name] for name in SHARED} for group in optimizer.param_groups]


# --- the configuration ---


def test_the_configuration_has_the_optimizers_options() -> None:
    config = merge(zero_config(), {"zero_optimization": {"zenflow": SECTION}})
    before = copy.deepcopy(config)
    made = with_optimizer(config, on_host(two_groups(net())))
    assert made == {**config, "optimizer": {"type": "AdamW", "params": FIRST}}
    assert config == before


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(SGD, id="another"),
        pytest.param(type("FusedAdam", (SGD,), {"adam_w_mode": True}), id="DeepSpeed's for the device"),
        pytest.param(AdamW, id="torch's own, where DeepSpeed's can't be built"),
        pytest.param(lambda of, lr: on_host(Adam(of, lr)), id="L2 in the place of decay"),
    ],
)
def test_what_is_not_adamw_is_refused(kind: Any) -> None:
    optimizer = kind(net().parameters(), lr=0.1)
    words = (
        rf"zenflow and {type(optimizer).__name__}: .*write torch\.optim\.AdamW and strategy\.host_optimizer=auto, or"
    )
    with pytest.raises(ConflictError, match=words):
        with_optimizer({}, optimizer)


def test_accumulation_is_refused_before_the_engine_takes_the_module() -> None:
    module = net()
    user = two_groups(module)
    config = merge(zero_config(), {"zero_optimization": {"zenflow": SECTION}})
    run = EngineRun(module, torch.bfloat16, torch.device("cpu", 0))
    words = (
        "ZenFlow and gradient accumulation or manual optimization: .*update_interval.*accumulate_grad_batches=1 without"
        " an AccumulationSchedule, and automatic_optimization=True, or take the preset zero_offload"
    )
    host = HostOptimizer(on_host(user), user, {})
    with pytest.raises(ConflictError, match=words):
        run.train(config, host, groups_of(user), accumulates=True)
    assert run.engine is None
    assert type(host.optimizer).__name__ == "DeepSpeedCPUAdam"
    run.end()


# --- the shapes ---


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 3), (5, 1)])
def test_vectors_and_matrices_are_let_through(shape: tuple[int, ...]) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(shape))
    require_matrices(module)


@pytest.mark.parametrize("shape", [(), (1, 3), (2, 3, 4), (2, 3, 4, 5)])
def test_other_shapes_are_named(shape: tuple[int, ...]) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Module())
    module[1].odd = nn.Parameter(torch.zeros(shape))
    with pytest.raises(ConflictError) as raised:
        require_matrices(module)
    assert lines_with(str(raised.value), "zenflow and 1 parameters", f"(1.odd {shape})")
    module[1].odd.requires_grad_(False)  # what is not trained has no gradient to select from
    require_matrices(module)


def test_of_many_the_first_five_are_named() -> None:
    module = nn.ModuleList([nn.Conv1d(2, 2, 2, bias=False) for _ in range(7)])
    with pytest.raises(
        ConflictError, match=mentions("7 parameters", "(0.weight (2, 2, 2), ", "4.weight (2, 2, 2))")
    ) as raised:
        require_matrices(module)
    assert "5.weight" not in str(raised.value)


# --- on the engine ---


def test_it_becomes_the_version_that_zenflow_steps() -> None:
    optimizer: Any = on_host(two_groups(net()))
    groups = optimizer.param_groups
    into_zenflow(optimizer, overlap_step=True)
    assert type(optimizer).__name__ == "ZenFlowCPUAdam"
    assert optimizer.param_groups is groups
    assert optimizer.overlap_step is True
    assert "step" not in vars(optimizer)  # another process steps
    into_zenflow(optimizer, overlap_step=False)
    assert optimizer.overlap_step is False
    assert "step" in vars(optimizer)  # this one, by a method that is told the number of the step


def test_each_group_has_its_own_options() -> None:
    module = net()
    optimizer = on_host(two_groups(module))
    config = with_optimizer(merge(zero_config(), {"zero_optimization": {"zenflow": SECTION}}), optimizer)
    into_zenflow(optimizer, overlap_step=False)
    with engine_of(module, optimizer, bf16=True, more=config) as engine:
        zero = engine.optimizer
        assert shared(zero.selective_optimizer) == [FIRST, FIRST]  # what DeepSpeed gives
        share_options(zero, SHARED)
        assert shared(zero.selective_optimizer) == shared(zero.optimizer) == [FIRST, SECOND]
        before = [p.detach().clone() for p in module.parameters()]
        for seed in range(4):
            engine.backward(engine(batch(seed).bfloat16()).float().square().mean())
            engine.step()
        moved = [(p - q).abs().max().item() for p, q in zip(module.parameters(), before, strict=True)]
        # About lr by step: 0.1 for the first group's two parameters, 0.001 for the second's.
        assert min(moved[:2]) > 0.05
        assert 0 < max(moved[2:]) < 0.01


def test_a_schedule_sees_that_it_stepped() -> None:
    module = net()
    user = two_groups(module)
    schedule = torch.optim.lr_scheduler.LambdaLR(user, lambda step: 1 / (1 + step))
    optimizer = host_optimizer(user, [schedule], kind="deepspeed").optimizer
    config = with_optimizer(merge(zero_config(), {"zero_optimization": {"zenflow": SECTION}}), optimizer)
    into_zenflow(optimizer, overlap_step=False)
    with engine_of(module, optimizer, bf16=True, more=config) as engine:
        share_options(engine.optimizer, SHARED)
        for seed in range(2):
            engine.backward(engine(batch(seed).bfloat16()).float().square().mean())
            engine.step()
            schedule.step()
        assert [group["lr"] for group in engine.optimizer.selective_optimizer.param_groups] == [0.1 / 2, 0.001 / 2]
