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
from tests.engines.processes import run

NEAR = {"ddp": 0.01, "fsdp": 0.05, "zero3": 0.05}
SMALL = partial(ByteGPT, width=32, depth=3, heads=2, context=16)


@cache
def planned(engine: str, devices: int = 1, make: Any = SMALL) -> Plan:
    plan = solo.plan(
        make, torch.zeros(BATCH, 17, dtype=torch.int64), preset=engine, overrides=[f"devices={devices}"], device="cpu"
    )
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


@pytest.mark.long
def test_a_processs_plan_is_near_counted_bytes(tmp_path: Path) -> None:
    counted = run("counting:counted", tmp_path, "ddp", "fsdp", "zero3")
    for case, peak in counted.items():
        engine, depth = case.split()
        plan = planned(engine, 2, partial(model, int(depth)))
        print(f"{case}: planned {plan.peak_bytes:,}, counted {peak:,} ({plan.peak_bytes / peak - 1:+.1%})")
        assert plan.peak_bytes == pytest.approx(peak, rel=NEAR[engine]), case
        plain = planned("baseline", 1, partial(model, int(depth)))
        assert plain.peak_bytes != pytest.approx(peak, rel=NEAR[engine]), case
