"""The layout's bytes against every tensor of the real DeepSpeed engine; the budget check and the disk's."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_solo.errors import BudgetError, CapabilityError
from lightning_solo.memory.ledger import Ledger
from lightning_solo.processes import environment
from lightning_solo.units import GiB, MiB
from lightning_solo.zero.budget import check_device_budget, check_disk_budget, check_host_budget, disk_budget
from lightning_solo.zero.layout import ZeroLayout, ZeroSettings, zero_layout
from lightning_solo.zero.process import ONE_PROCESS, close_process_group, open_process_group
from tests.messages import mentions

ROOT = Path(__file__).parents[2]
BUCKET = 40


def module() -> nn.Sequential:
    """Parameters of 5 x 7 = 35, 5, 15 and 3 elements, the first layer frozen in none, the last one frozen: 12 and 4."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3), nn.Linear(3, 4))
    made[3].requires_grad_(False)
    return made


GROUPS, FROZEN = [[35, 5], [15, 3]], [12, 4]
BUFFERS = 4 * 5 + 4 * 5 + 8  # running mean and variance in fp32, batches seen in int64


def config(stage: int, precision: str, accumulation: int, offload_parameters: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": stage,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
        "sub_group_size": 30,
    }
    if offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        **({"bf16": {"enabled": True}} if precision == "bf16-mixed" else {}),
    }


def train(stage: int, precision: str, accumulation: int, offload_parameters: bool, optimizer: Any) -> Any:
    """Return (engine, bytes of the reduce buckets during a backward pass) after two optimizer steps."""
    import deepspeed

    made = module()
    groups = [{"params": [*made[0].parameters()]}, {"params": [*made[2].parameters()]}]
    engine = deepspeed.initialize(
        model=made, optimizer=optimizer(groups), config=config(stage, precision, accumulation, offload_parameters)
    )[0]
    seen: list[int] = []

    def look(gradient: torch.Tensor) -> None:
        buffers = [bucket.buffer for bucket in engine.optimizer.ipg_buckets.values()]
        seen.append(sum(map(total, buffers)))

    made[0].bias.register_hook(look)
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    for _ in range(2 * accumulation):
        x = (
            made[3](made[2](made[1](made[0](torch.randn(2, 7, dtype=dtype)))))
            if stage == 2
            else engine(torch.randn(2, 7, dtype=dtype))
        )
        engine.backward(x.float().sum())
        engine.step()
    return engine, max(seen)


def total(tensors: Any) -> int:
    """Return the bytes of a tensor or of many, a storage counted once."""
    many = [tensors] if torch.is_tensor(tensors) else list(tensors)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in many}.values())


def states(optimizer: torch.optim.Optimizer) -> int:
    return total(t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim())


def settings(stage: int, precision: str, accumulation: int, offload: bool = False, **more: Any) -> ZeroSettings:
    # As on a GPU, so that a bucket counts in full, and unpinned, so that nothing is rounded: the tensors themselves.
    given = {"cuda": True, "pin_memory": False, "reduce_bucket": BUCKET, "sub_group": 30, **more}
    return ZeroSettings(
        stage=stage, precision=precision, accumulates=accumulation > 1, offload_parameters=offload, **given
    )


@pytest.fixture
def one_process() -> Iterator[None]:
    pytest.importorskip("deepspeed", reason="listed on Linux only")
    with environment(ONE_PROCESS):
        open_process_group("gloo")
        yield
        close_process_group()


# --- the engine's tensors ---


@pytest.mark.parametrize(("optimizer", "kept"), [(torch.optim.AdamW, 2), (torch.optim.SGD, 0)])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.usefixtures("one_process")
def test_stage_2_holds_what_the_layout_says(precision: str, accumulation: int, optimizer: Any, kept: int) -> None:
    engine, buckets = train(2, precision, accumulation, False, lambda groups: optimizer(groups, lr=0.1))
    zero = engine.optimizer
    masters = zero.single_partition_of_fp32_groups
    layout = zero_layout(GROUPS, settings(2, precision, accumulation, states=kept), frozen=FROZEN, buffer_bytes=BUFFERS)
    w = 2 if precision == "bf16-mixed" else 4
    assert dict(layout.host) == {
        "master": total(masters),
        "gradients": total(m.grad for m in masters),
        "states": states(zero.optimizer),
        "copy_out": total(zero.param_buffer_of_bit16_for_cpu_offload_groups),
        "scratch": total(zero.temp_grad_buffer_for_cpu_offload),
        "accumulated": total(zero.accumulated_grads_in_cpu.values()),
        "step_temporaries": 2 * 4 * 40,  # see below; the larger group
    }
    assert dict(layout.device) == {
        "weights": total(engine.module.parameters()),
        "buffers": total(engine.module.buffers()),
        "scratch": total(zero.temp_grad_buffer_for_gpu_offload),
        "gradients": w * 35,
        "buckets": buckets,
    }
    # 40 and 18 elements: even, so nothing is padded
    assert layout.host["master"] == 4 * (40 + 18)
    assert layout.device["weights"] == w * (40 + 18 + 12 + 4)
    assert layout.host["accumulated"] == (w * (35 + 5 + 15 + 3) if accumulation > 1 else 0)
    engine.destroy()


@pytest.mark.usefixtures("one_process")
def test_stage_2_pads_a_group_to_an_even_number() -> None:
    import deepspeed

    layer = nn.Linear(3, 1, bias=False)
    engine = deepspeed.initialize(
        model=layer, optimizer=torch.optim.SGD(layer.parameters(), 0.1), config=config(2, "32-true", 1, False)
    )[0]
    layout = zero_layout([[3]], settings(2, "32-true", 1))
    assert layout.host["master"] == total(engine.optimizer.single_partition_of_fp32_groups) == 4 * 4
    engine.destroy()


CHILD = """
import json, sys, warnings
warnings.simplefilter("ignore")
from tests.zero.test_layout import *
case = json.loads(sys.argv[1])
open_process_group("gloo")
engine, buckets = train(3, *case, lambda groups: torch.optim.AdamW(groups, lr=0.1))
zero = engine.optimizer
masters = zero.fp32_partitioned_groups_flat
partitions = total(p.ds_tensor for p in engine.module.parameters())
found = {
    "master": total(masters),
    "gradients": total(m.grad for m in masters),
    "states": states(zero.optimizer),
    "accumulated": total(zero.grad_partitions_flat_buffer),
    "weights": partitions,
    "bucket": buckets,
    "sub_groups": [m.numel() for m in masters],
}
open(sys.argv[2], "w").write(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_stage_3_holds_what_the_layout_says(precision: str, offload: bool, tmp_path: Path) -> None:
    """In a child process, judged by the file it writes: stage 3 on the CPU aborts at the interpreter's exit."""
    pytest.importorskip("deepspeed", reason="listed on Linux only")
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps([precision, 2, offload]), str(result)],
        env={**os.environ, **ONE_PROCESS, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.is_file(), done.stderr[-2000:]
    found = json.loads(result.read_text())
    layout = zero_layout(GROUPS, settings(3, precision, 2, offload), frozen=FROZEN, buffer_bytes=BUFFERS)
    # Offloaded weights are always pinned, and so rounded, but on a CPU.
    on_cpu = zero_layout(GROUPS, settings(3, precision, 2, offload, cuda=False), frozen=FROZEN)
    where = on_cpu.host if offload else layout.device
    assert found.pop("sub_groups") == [35, 5, 18]  # 30 elements are reached by the first; the second group holds 18
    assert {
        "weights": where["weights"],
        "bucket": layout.device["bucket"],
        **{part: layout.host[part] for part in ("master", "gradients", "states", "accumulated")},
    } == found
    w = 2 if precision == "bf16-mixed" else 4
    assert layout.host["step_temporaries"] == 2 * 4 * 35
    assert layout.host["accumulated"] == w * 58  # also without accumulation
    # One weight at a time is moved to the device, and copied to its partition.
    kept = layout.device["weights"] + BUFFERS
    largest = max(*(n for group in GROUPS for n in group), *FROZEN)
    assert layout.start["to_device"][0] == kept + w * largest


@pytest.mark.parametrize(
    ("optimizer", "arguments", "kept", "temporaries"),
    [
        (torch.optim.AdamW, {}, 2, 2),
        (torch.optim.AdamW, {"fused": True}, 2, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 1, 0),
        (torch.optim.Adagrad, {}, 1, 1),
    ],
)
def test_temporaries_of_a_step(optimizer: Any, arguments: dict[str, Any], kept: int, temporaries: int) -> None:
    """The figures that ZeroSettings names, on one flat fp32 master as the engine has it."""
    count = 1000
    master = nn.Parameter(torch.randn(count))
    master.grad = torch.randn(count)
    stepping = optimizer([master], lr=0.1, **arguments)
    stepping.step()
    assert states(stepping) == kept * 4 * count
    with Ledger() as ledger:
        stepping.step()
    assert ledger.peak_bytes // (4 * count) == temporaries  # scalars aside


# --- arithmetic that only a GPU or a disk shows ---


def test_pinned_memory_is_rounded_up_to_a_power_of_two_and_states_are_not() -> None:
    plain = zero_layout([[1000, 200]], settings(2, "bf16-mixed", 4))
    pinned = zero_layout([[1000, 200]], settings(2, "bf16-mixed", 4, pin_memory=True))
    assert plain.host["master"] == 4800
    assert pinned.host["master"] == pinned.host["gradients"] == 8192
    assert pinned.host["copy_out"] == 4096  # 2400
    assert pinned.host["scratch"] == 2048  # 2000
    assert pinned.host["accumulated"] == 2048 + 512  # 2000 + 400, each of its own
    assert pinned.host["states"] == plain.host["states"] == 9600
    on_cpu = zero_layout([[1000, 200]], settings(2, "bf16-mixed", 4, pin_memory=True, cuda=False))
    assert on_cpu.host == plain.host


def test_offloaded_parameters_are_pinned_whether_asked_or_not() -> None:
    unasked = zero_layout([[1000, 200]], settings(3, "bf16-mixed", 1, True, sub_group=10_000))
    asked = zero_layout([[1000, 200]], settings(3, "bf16-mixed", 1, True, sub_group=10_000, pin_memory=True))
    assert unasked.host["weights"] == asked.host["weights"] == 4096  # 2400
    # The first copy of each parameter is freed, and stays in torch's cache of pinned memory: 2000 and 400 bytes.
    assert (unasked.host["pinned_leftovers"], asked.host["pinned_leftovers"]) == (0, 2048 + 512)
    assert asked.host["master"] == 4800  # never pinned
    assert unasked.device["live_weights"] == 2400
    assert "live_weights" not in {k for k, n in zero_layout([[9]], settings(3, "32-true", 1)).device.items() if n}


def test_zero_infinity_leaves_gradients_and_buffers_on_the_host() -> None:
    m = 1_000_000
    layout = zero_layout(
        [[3 * m, m, 100]],
        settings(3, "bf16-mixed", 1, True, sub_group=10 * m, nvme_optimizer=True, nvme_parameters=True, max_in_cpu=m),
    )
    aligned = 4_000_256  # of 4,000,100, to 1024 bytes
    assert layout.host["accumulated"] == 2 * 4_000_100
    assert layout.host["swap_buffers"] == 4 * 4 * aligned
    assert layout.host["master"] == layout.host["gradients"] == layout.host["states"] == 0
    assert layout.host["weights"] == 2**21  # max_in_cpu elements of 2 bytes, pinned
    assert layout.host["swap_buffers_weights"] == 2 * (5 * 100_000_256 + 4_000_256)
    assert layout.host["step_temporaries"] == 4 * (2 + 2) * 4_000_100  # the first step makes the states beside
    assert layout.disk == {
        "weights": 2 * (3_000_320 + 1_000_448),  # 100 elements are below 1 MiB
        "master": 4 * aligned,
        "states": 8 * aligned,
        "gradients": 4 * 4 * m,
        "copies": (4 + 4 + 8) * aligned,
    }


def test_the_start_can_be_the_peak() -> None:
    layout = zero_layout([[1000]], settings(2, "bf16-mixed", 1, pin_memory=True, states=0, step_temporaries=0))
    # master 4096, copy 2048 and what it was copied from 2000, gradients 4096 and what they were copied from 4000
    assert layout.start["gradients"][1] == 4096 + 2048 + 2000 + 4096 + 4000
    assert layout.host_bytes == layout.start["gradients"][1] > sum(layout.host.values())
    # the parameters and their flat copy
    assert layout.start["flatten"][0] == 2 * 2000


def test_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="trainable"):
        zero_layout([[], []], frozen=[5])


# --- budget ---


def layout_of(device: int = 0, host: int = 0, disk: int = 0, start: int = 0) -> ZeroLayout:
    return ZeroLayout({"weights": device}, {"master": host}, {"states": disk}, {"made": (0, start)})


def test_the_host_budget_says_how_much_is_missing() -> None:
    layout = layout_of(host=100 * GiB)
    check_host_budget(layout, 105 * GiB)
    with pytest.raises(BudgetError, match=mentions("105.00 GiB of host memory", "100.00 GiB", " 5.00 GiB")) as e:
        check_host_budget(layout, 100 * GiB)
    assert (e.value.needed, e.value.available) == (105 * GiB, 100 * GiB)
    assert "margin of 5%" in str(e.value)
    assert "master 100.00 GiB" in str(e.value)
    again = pickle.loads(pickle.dumps(e.value))
    assert (str(again), again.needed) == (str(e.value), e.value.needed)
    # The module's own memory is given back, or counted already.
    check_host_budget(layout, 100 * GiB, resident=5 * GiB)
    with pytest.raises(BudgetError):
        check_host_budget(layout_of(start=100 * GiB), 100 * GiB)


def test_on_the_cpu_device_and_host_are_one_memory() -> None:
    layout = layout_of(device=50 * GiB, host=50 * GiB)
    check_host_budget(layout, 60 * GiB)
    with pytest.raises(BudgetError, match=mentions("device weights 50.00 GiB")):
        check_host_budget(layout, 100 * GiB, one_memory=True)


def test_the_device_budget() -> None:
    check_device_budget(layout_of(device=100 * GiB), 105 * GiB)
    with pytest.raises(BudgetError, match=mentions("device memory", "activations")):
        check_device_budget(layout_of(device=100 * GiB), 104 * GiB)


def test_the_disk_budget(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    free = disk_budget(folder)
    assert free > MiB
    assert not folder.parent.exists()
    check_disk_budget(layout_of(disk=MiB), folder)
    with pytest.raises(BudgetError, match=mentions("of disk", "are missing")):
        check_disk_budget(layout_of(disk=2 * free), folder)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CapabilityError, match=mentions(str(tmp_path / "file"), "write strategy.nvme_path=")):
        disk_budget(tmp_path / "file" / "below")


@pytest.mark.parametrize(("kind", "refused"), [("tmpfs", True), ("ramfs", True), ("ext4", False)])
def test_a_folder_in_memory_saves_none(tmp_path: Path, kind: str, refused: bool) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"root / ext4 rw 0 0\nbelow {tmp_path.parent} overlay rw 0 0\nit {tmp_path} {kind} rw 0 0\n")
    if refused:
        with pytest.raises(CapabilityError, match=mentions(f"is {kind}", "host memory")):
            disk_budget(tmp_path / "swap", mounts)
    else:
        assert disk_budget(tmp_path / "swap", mounts) > 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a folder without the permission")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CapabilityError, match="read-only"):
        disk_budget(tmp_path / "swap")
