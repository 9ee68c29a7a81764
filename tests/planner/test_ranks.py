"""Plans of one of several processes: its shards, gathered blocks and buckets, beside bytes that were counted."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_solo as solo
from lightning_solo.planner.plan import Plan
from lightning_solo.planner.ranks import Groups
from lightning_solo.reference.byte_gpt import ByteGPT
from tests.engines.counting import BATCH, model
from tests.engines.processes import ENGINES, run

NEAR = {"ddp": 0.01, "fsdp": 0.05, "zero2": 0.05, "zero3": 0.05}
COUNTED = (
    "ddp 32-true", "fsdp 32-true", "zero3 32-true", "zero3 bf16-true", "zero3 bf16-mixed", "zero2 bf16-mixed",
)  # fmt: skip
SMALL = partial(ByteGPT, width=32, depth=3, heads=2, context=16)


@cache
def planned(engine: str, devices: int = 1, make: Any = SMALL, precision: str = "32-true") -> Plan:
    preset = {"precision": precision, "devices": devices, "strategy": ENGINES.get(engine)}
    plan = solo.plan(make, torch.zeros(BATCH, 17, dtype=torch.int64), preset=preset, device="cpu")
    assert isinstance(plan, Plan)
    return plan


def test_a_process_of_fsdp_has_its_share_of_the_states() -> None:
    alone, half, quarter = (planned("fsdp", devices) for devices in (1, 2, 4))
    assert "one process alone" in " ".join(alone.assumptions)
    assert "one rank of 4" in " ".join(quarter.assumptions)
    states = alone.breakdown["optimizer_states"]
    assert half.breakdown["optimizer_states"] == pytest.approx(states / 2, rel=0.01)
    assert quarter.breakdown["optimizer_states"] == pytest.approx(states / 4, rel=0.01)
    assert alone.peak_bytes > half.peak_bytes > quarter.peak_bytes
    assert half.phases["between"] < alone.phases["between"]
    root = sum(4 * p.numel() for name, p in SMALL().named_parameters() if not name.startswith("blocks."))
    # at the end of backward the blocks are shards again; the root's weights, its gradients and their copy are whole
    assert half.phases["optimizer_step"] == pytest.approx(half.phases["between"] + 3 * root, rel=0.01)


def test_ddp_holds_buckets_of_all_gradients() -> None:
    plain, alone, two, four = planned("baseline"), planned("ddp"), planned("ddp", 2), planned("ddp", 4)
    assert alone.peak_bytes == two.peak_bytes == four.peak_bytes  # a process of one has buckets too
    weights = sum(p.numel() * 4 for p in SMALL().parameters())
    # the old and the new buckets, weights and AdamW's two states
    assert two.phases["forward"] >= 5 * weights
    assert two.phases["between"] >= 4 * weights
    assert plain.breakdown["gradients"] <= weights


def test_groups_are_the_blocks_and_the_rest() -> None:
    module = SMALL()
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in module.named_children()}
    groups = Groups.of(SMALL, "auto")
    assert groups.blocks == pytest.approx(3 * groups.block)
    assert groups.blocks == pytest.approx(max(sizes.values()) / sum(p.numel() for p in module.parameters()))
    assert Groups.of(partial(torch.nn.Linear, 4, 4), "auto") == Groups()


@pytest.mark.parametrize(("precision", "element"), [("32-true", 4), ("bf16-true", 2), ("bf16-mixed", 2)])
def test_a_process_of_zero3_steps_an_fp32_master(precision: str, element: int) -> None:
    share = sum(p.numel() for p in SMALL().parameters()) / 2
    plan = planned("zero3", 2, precision=precision)
    # weight and flat gradient in their precision, fp32 master and AdamW's two states; the bucket of 5e7 gradients
    kept = (2 * element + 4 + 2 * 4) * share + element * 50_000_000
    assert plan.phases["between"] == pytest.approx(kept, rel=1e-3)
    # the fp32 gradient, and the root of a state with its quotient
    assert plan.phases["optimizer_step"] - kept == pytest.approx((4 + 2 * 4) * share, rel=0.01)
    # weights are gathered, and a buffer has them as they came
    assert plan.phases["forward"] - kept >= 2 * element * 2 * share


def test_a_process_of_zero2_has_all_weights_and_two_buckets() -> None:
    share = sum(p.numel() for p in SMALL().parameters()) / 2
    plan = planned("zero2", 2, precision="bf16-mixed")
    # whole weights, a share of flat gradients, fp32 master and states
    kept = 2 * 2 * share + (2 + 4 + 2 * 4) * share
    assert plan.phases["between"] == pytest.approx(kept, rel=0.01)
    assert plan.phases["backward"] >= 2 * 2 * 50_000_000 + kept


@pytest.mark.long
def test_a_processs_plan_is_near_counted_bytes(tmp_path: Path) -> None:
    for case, peak in run("counting:counted", tmp_path, *COUNTED).items():
        engine, precision, depth = case.split()
        plan = planned(engine, 2, partial(model, int(depth)), precision)
        print(f"{case}: planned {plan.peak_bytes:,}, counted {peak:,} ({plan.peak_bytes / peak - 1:+.1%})")
        assert plan.peak_bytes == pytest.approx(peak, rel=NEAR[engine]), case
        plain = planned("baseline", 1, partial(model, int(depth)), precision)
        assert plain.peak_bytes != pytest.approx(peak, rel=NEAR[engine]), case
