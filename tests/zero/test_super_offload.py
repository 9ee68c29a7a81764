"""SuperOffload on the CPU: its real engine and its real worker; what it can't train; what it leaves behind.

DeepSpeed has it for CUDA only. Two things stand in here: its check for CUDA is passed over, and the CPU, which has no
streams, has one to wait for. So the worker, the order of the steps and their arithmetic are DeepSpeed's own; what
a GPU does at the same time, and page-locked memory, are left to `tests/techniques/test_zero_offload_gpu.py`.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_solo.errors import ConflictError
from lightning_solo.processes import environment
from lightning_solo.zero.checkpoint import groups_of
from lightning_solo.zero.config import merge, zero_config
from lightning_solo.zero.extension import load_extension, what_is_missing
from lightning_solo.zero.host_optimizer import HostOptimizer, host_optimizer
from lightning_solo.zero.process import (
    ONE_PROCESS,
    close_process_group,
    open_process_group,
    without_deprecations,
)
from lightning_solo.zero.run import EngineRun
from lightning_solo.zero.super_offload import Worker
from tests.messages import mentions
from tests.zero.engines import batch, step_plain

pytest.importorskip("deepspeed", reason="listed on Linux only")
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # the first test of a machine's life builds cpu_adam
SECTION = {
    # Three sub-groups: 42 elements of the first weight; a bias, a weight, a bias of 6 + 30 + 5; and 35 + 5 of the side
    "sub_group_size": 40,
    "offload_optimizer": {"super_offload": True, "cpuadam_cores_perc": 0.5},
}
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu", 0)


class Branches(nn.Module):
    """Two layers in a row, and one that a call may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.main = nn.Sequential(nn.Linear(7, 6), nn.Linear(6, 5))
        self.side = nn.Linear(7, 5)
        self.uses_side = True

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x) + self.side(x) if self.uses_side else self.main(x)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)


def configuration(**more: Any) -> dict[str, Any]:
    return merge(zero_config(3, pin_memory=False), {"zero_optimization": {**SECTION, **more}})


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let DeepSpeed run SuperOffload on the CPU, and this test have CPUAdam; skips visibly where it can't be had."""
    if missing := what_is_missing("cpu_adam"):
        pytest.skip(f"no DeepSpeedCPUAdam: {missing}")
    load_extension("cpu_adam")
    stage3: Any = importlib.import_module("deepspeed.runtime.superoffload.superoffload_stage3")
    monkeypatch.setattr(stage3, "_validate_superoffload_accelerator", lambda: None)
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    monkeypatch.setattr(accelerator, "current_stream", lambda *_: SimpleNamespace(synchronize=lambda: None))


@contextmanager
def running(module: nn.Module, clipping: float = 0.0) -> Iterator[EngineRun]:
    """A run of SuperOffload on the CPU."""
    run = EngineRun(module, torch.float32, CPU)
    user = adamw(module)
    with environment(ONE_PROCESS), without_deprecations():
        open_process_group("gloo")
        try:
            groups = groups_of(user)
            host = host_optimizer(user, kind="deepspeed")
            run.train({**configuration(), "gradient_clipping": clipping}, host, groups, accumulates=False)
            yield run
        finally:
            try:
                run.end()
            finally:
                close_process_group()


def backward(run: EngineRun, seed: int) -> None:
    run.engine.backward(run.engine(batch(seed)).square().mean())
    run.after_backward()


def step(run: EngineRun, seed: int) -> None:
    backward(run, seed)
    run.step()


@torch.no_grad()
def difference(a: nn.Module, b: nn.Module) -> float:
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True))


# --- it trains, and leaves nothing behind ---


def test_its_worker_needs_no_compiler_and_ends_with_the_run(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # where nothing can be compiled, and ninja isn't found
    module, plain = Branches(), Branches()
    optimizer, cores = adamw(plain), os.sched_getaffinity(0)
    done, seen = threading.Event(), []
    with running(module) as run:
        thread = threading.Thread(target=lambda: (done.wait(60), seen.append(os.sched_getaffinity(0))))
        thread.start()
        pinned = os.sched_getaffinity(0)
        worker = run.zero.superoffload_cpu_optimizer.cpuadam_process
        for seed in range(3):
            backward(run, seed)
            assert run.zero._submitted_cpu_sub_groups == {0, 1, 2}  # before the step, while backward ran
            run.step()
            step_plain(plain, optimizer, seed)
        assert worker.is_alive()
    assert (not worker.is_alive(), worker.exitcode) == (True, 0)
    done.set()
    thread.join()
    assert pinned < cores or len(cores) == 1
    assert os.sched_getaffinity(0) == cores
    assert seen == [cores]
    utils: Any = importlib.import_module("deepspeed.runtime.superoffload.superoffload_utils")
    assert utils.superoffload_optimizer_worker.__module__ == utils.__name__
    assert difference(module, plain) < 1e-6
    assert difference(module, Branches()) > 1e-2


def test_a_run_that_breaks_off_in_backward_ends_its_worker_after_its_steps(on_cpu: None) -> None:
    module, plain = Branches(), Branches()
    with running(module) as run:
        worker = run.zero.superoffload_cpu_optimizer.cpuadam_process
        backward(run, 0)
    step_plain(plain, adamw(plain), 0)
    assert worker.exitcode == 0
    assert difference(module, plain) < 1e-6  # the worker has stepped for the backward pass before


def test_the_worker_of_a_killed_run_ends(on_cpu: None) -> None:
    code = """
import os, torch
from deepspeed.runtime.superoffload.superoffload_utils import SuperOffloadCPUOptimizer
from lightning_solo.zero.deepspeed_patches import worker_run_by
from lightning_solo.zero.super_offload import prepare_and_run_worker
group = {"lr": 0.5, "betas": (0.9, 0.999), "eps": 0.0, "weight_decay": 0.0, "amsgrad": False}
with worker_run_by(prepare_and_run_worker):
    worker = SuperOffloadCPUOptimizer(group, cpuadam_cores_perc=0.5, max_grad_numel=4, pin_memory=False)
worker.async_step(0, 0, torch.ones(4), torch.ones(4))
print(worker.result_queue.get()["updated_param"].round(decimals=3).tolist(), flush=True)
os.kill(os.getpid(), 9)
"""
    # It returns when nobody has its output open any more, the worker included.
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr
    assert "[0.5, 0.5, 0.5, 0.5]" in done.stdout


def test_a_change_from_outside_comes_before_the_step(on_cpu: None) -> None:
    """The worker steps before the run's own step, in which the change would be found otherwise."""
    import deepspeed

    module, plain = Branches(), Branches()
    optimizer = adamw(plain)
    with running(module) as run:
        for seed in range(3):
            with deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0), torch.no_grad():
                module.side.weight.clamp_(-0.1, 0.1)
            with torch.no_grad():
                plain.side.weight.clamp_(-0.1, 0.1)
            backward(run, seed)
            run.zero._wait_for_async_operations()  # the worker may be as fast as that
            run.step()
            step_plain(plain, optimizer, seed)
    assert difference(module, plain) < 1e-6


# --- what a step would leave as it is ---


def test_an_unused_parameter_is_named_and_with_clipping_it_steps(on_cpu: None) -> None:
    module, plain = Branches(), Branches()
    module.uses_side = plain.uses_side = False
    with running(module) as run, pytest.raises(ConflictError) as raised:
        step(run, 0)
    assert "side.weight, side.bias" in str(raised.value)
    assert "Trainer(gradient_clip_val=...)" in str(raised.value)
    assert all(torch.isfinite(p).all() for p in module.parameters())
    module = Branches()
    module.uses_side = False
    optimizer = adamw(plain)
    with running(module, clipping=1e3) as run:
        for seed in range(2):
            for p in plain.parameters():
                p.grad = torch.zeros_like(p)
            plain(batch(seed)).square().mean().backward()
            optimizer.step()
            step(run, seed)
    assert difference(module, plain) < 1e-6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"betas": (0.5, 0.999)}, ["betas=(0.5, 0.999), before (0.9, 0.999)", "cycle_momentum=False"]),
        ({"weight_decay": 0.2, "eps": 1e-3}, ["eps=0.001, before 1e-08; weight_decay=0.2, before 0.1"]),
    ],
)
def test_an_option_that_the_worker_does_not_learn_of_is_named(change: dict[str, Any], words: list[str]) -> None:
    """Without the engine: all that is looked at is the groups of an optimizer."""
    optimizer = adamw(Branches())
    worker = Worker(SimpleNamespace(optimizer=optimizer, clip_grad=1.0), {})
    optimizer.param_groups[0].update(lr=3.0, betas=[0.9, 0.999])  # a list: as a checkpoint may have it
    worker.before_step([])
    optimizer.param_groups[0].update(change)
    with pytest.raises(ConflictError, match=mentions(*words)):
        worker.before_step([])


# --- checkpoints ---


def test_states_are_not_in_a_checkpoint_and_that_is_said_once(on_cpu: None) -> None:
    module, plain = Branches(), Branches()
    optimizer = adamw(plain)
    step_plain(plain, optimizer, 0)
    module.load_state_dict(plain.state_dict())  # as the strategy does, before the engine is made
    words = "SuperOffload: checkpoints hold the exact fp32 weights, and neither give nor take the optimizer's states"
    with running(module) as run:
        with pytest.warns(UserWarning, match=words):
            assert run.optimizer_state_dict()["state"] == {}
        run.optimizer_state_dict()  # once: another warning would be an error
        run._warns_of_states = True
        with pytest.warns(UserWarning, match=words):
            run.load_optimizer_state_dict(optimizer.state_dict(), plain.state_dict())
        assert dict(run.zero.optimizer.state) == {}
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in run.state_dict().items())
        step(run, 1)
    step_plain(plain, adamw(plain), 1)  # moments that start anew
    assert difference(module, plain) < 1e-6


# --- refused before the engine takes the module ---


def kept(optimizer: torch.optim.Optimizer) -> HostOptimizer:
    return HostOptimizer(optimizer, optimizer, {})


def l2(module: nn.Module) -> HostOptimizer:
    return host_optimizer(torch.optim.Adam(module.parameters()), kind="deepspeed")


def without_bias_correction(module: nn.Module) -> HostOptimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return kept(DeepSpeedCPUAdam(module.parameters(), bias_correction=False))


@pytest.mark.parametrize(
    ("host", "dtype", "accumulates", "words"),
    [
        pytest.param(
            lambda module: host_optimizer(adamw(module), kind="deepspeed"),
            torch.bfloat16,
            True,
            ["SuperOffload and ", "accumulate_grad_batches=1", "automatic_optimization=True", "preset zero_offload"],
            id="accumulation",
        ),
        pytest.param(
            lambda module: kept(adamw(module)),
            torch.bfloat16,
            False,
            ["SuperOffload and AdamW: ", "write torch.optim.AdamW and strategy.host_optimizer=deepspeed, or"],
            id="torch's own",
        ),
        pytest.param(l2, torch.bfloat16, False, ["SuperOffload and DeepSpeedCPUAdam: ", "AdamW mode"], id="L2"),
        pytest.param(without_bias_correction, torch.bfloat16, False, ["bias correction"], id="no bias correction"),
        pytest.param(
            lambda module: host_optimizer(adamw(module), kind="deepspeed"),
            torch.float16,
            False,
            ["SuperOffload and fp16: ", "precision=bf16-mixed"],
            id="a scaled loss",
        ),
    ],
)
def test_what_it_would_train_wrong_is_refused(
    on_cpu: None, host: Callable[[nn.Module], HostOptimizer], dtype: torch.dtype, accumulates: bool, words: list[str]
) -> None:
    module, cores = Branches(), os.sched_getaffinity(0)
    run = EngineRun(module, dtype, CPU)
    with pytest.raises(ConflictError, match=mentions(*words)):
        run.train(configuration(), host(module), groups_of(adamw(module)), accumulates=accumulates)
    assert run.engine is None
    run.end()
    assert difference(module, Branches()) == 0
    assert os.sched_getaffinity(0) == cores
