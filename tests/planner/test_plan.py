"""What a plan says: the host's memory in its verdict, the order in which plans are tried, the table."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from rich.console import Console

from lightning_solo.errors import CapabilityError, PlanError, PresetError
from lightning_solo.planner import preset_plans
from lightning_solo.planner.device import assumed, device
from lightning_solo.planner.plan import HOST_NOT_JUDGED, Plan, ranked, with_host_memory
from lightning_solo.planner.preset_plans import plan
from lightning_solo.planner.table import table
from lightning_solo.planner.worker import WORKER
from lightning_solo.presets.compose import compose
from lightning_solo.presets.files import preset_files
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.units import GiB
from tests.messages import lines_with, mentions
from tests.planner.modules import plan_with

# --- host memory ---


@pytest.mark.parametrize(
    ("on", "gib", "verdict", "largest"),
    [
        ("rtx_4090", 11, "fits", 3),
        ("rtx_4090", 10.2, "tight", 3),  # 10 x 1.05 are more
        ("rtx_4090", 9, "does not fit", 0),
        ("cpu", 13, "fits", 3),  # 10 and the 2 "on the device" are in one memory
        ("cpu", 11, "does not fit", 0),
    ],
)
def test_host_memory_is_in_the_verdict(on: str, gib: float, verdict: str, largest: int) -> None:
    found = with_host_memory(plan_with(device=on), int(gib * GiB))
    assert (found.verdict, found.largest_micro_batch, found.fits) == (verdict, largest, verdict != "does not fit")
    assert bool(found.host_shortage) == (verdict != "fits")
    assert found.missing_bytes == (max(found.host_needed_bytes - int(gib * GiB), 0))
    assert found.as_dict()["host_shortage"] == found.host_shortage


def test_a_shortage_in_words() -> None:
    found = with_host_memory(plan_with(), 9 * GiB)
    assert lines_with(found.host_shortage, "10.00 GiB", "host", "9.00 GiB")


def test_the_worse_of_two_verdicts_stays() -> None:
    assert with_host_memory(plan_with(verdict="tight"), 100 * GiB).verdict == "tight"
    assert with_host_memory(plan_with(verdict="does not fit"), int(10.2 * GiB)).verdict == "does not fit"


def test_unknown_host_memory_is_an_assumption() -> None:
    assert with_host_memory(plan_with(host_bytes=0), 1) == plan_with(host_bytes=0)
    found = with_host_memory(plan_with(), None)
    assert (found.verdict, found.host_shortage, found.assumptions) == ("fits", "", (HOST_NOT_JUDGED,))


def test_plans_that_do_not_fit_are_ordered_by_missing_bytes() -> None:
    on_host = with_host_memory(plan_with(preset="host"), 9 * GiB)  # lacks 1
    on_device = plan_with(preset="device", verdict="does not fit", needed_bytes=20 * GiB + 1, host_bytes=0)
    far = plan_with(preset="far", verdict="does not fit", needed_bytes=30 * GiB, host_bytes=0)
    assert order(far, on_host, on_device) == ["device", "host", "far"]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # 2 % of the fastest that is left, not of a grid: 1.019 is beside 1.0, and 1.022 begins anew
        ({"checkpointing": 1.0, "bf16": 1.019, "baseline": 1.022}, ["bf16", "checkpointing", "baseline"]),
        ({"checkpointing": 1.0, "bf16": 1.022, "baseline": 1.03}, ["checkpointing", "bf16", "baseline"]),
        ({"compact_checkpointing": 0.1, "compact": 0.1, "bf16": 0.1}, ["bf16", "compact", "compact_checkpointing"]),
        ({"bf16_true": 0.1, "bf16": 0.1}, ["bf16", "bf16_true"]),
        ({"zero_offload": 0.1, "compact_checkpointing": 0.1}, ["compact_checkpointing", "zero_offload"]),  # the host
        ({"zero_offload": 1e-4, "baseline": 9e-4}, ["baseline", "zero_offload"]),  # less than 1 ms a step
        ({"layer_drop": 0.1, "bf16": 3.0}, ["bf16", "layer_drop"]),  # has a caveat
    ],
)
def test_equally_fast_plans_are_ordered_by_changes(seconds: dict[str, float], expected: list[str]) -> None:
    on_host = {"zero_offload": GiB}
    plans = [plan_with(preset=name, seconds_per_step=s, host_bytes=on_host.get(name, 0)) for name, s in seconds.items()]
    assert order(*plans) == order(*plans[::-1]) == expected


def test_tight_plan_comes_after_a_fitting_one() -> None:
    plans = plan_with(preset="bf16", verdict="tight", seconds_per_step=0.1), plan_with(preset="layer_drop")
    assert order(*plans) == ["layer_drop", "bf16"]


def test_a_caveat_counts_only_where_no_preset_is_named(
    preset_with_caveat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = plan_with(preset=preset_with_caveat, seconds_per_step=0.1)
    plans = plan_with(preset="bf16"), fast
    assert order(*plans) == ["bf16", preset_with_caveat]
    assert order(*plans, caveats_last=False) == [preset_with_caveat, "bf16"]
    configs = {name: compose(name) for name in ("bf16", preset_with_caveat)}
    monkeypatch.setattr(preset_plans, "compose_all", lambda overrides, allow: configs)
    monkeypatch.setattr(WORKER, "answers", lambda request, timeout_s: ((plan.preset, plan) for plan in plans))
    found = {
        presets: [one.preset for one in plan(byte_gpt, BATCH, presets=presets, device="rtx-4090")]  # type: ignore[union-attr]
        for presets in ("all", ("bf16", preset_with_caveat))
    }
    assert list(found.values()) == [["bf16", preset_with_caveat], [preset_with_caveat, "bf16"]]


def test_error_of_the_module_comes_before_that_of_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"zero_offload": CapabilityError("no CUDA"), "": PlanError("in forward")}
    monkeypatch.setattr(WORKER, "answers", lambda request, timeout_s: iter(answers.items()))
    with pytest.raises(PlanError, match="in forward"):
        plan(byte_gpt, BATCH, presets=["zero_offload", "bf16"], device="cpu")


def order(*plans: Plan, caveats_last: bool = True) -> list[str]:
    known = preset_files()
    added = {"layer_drop": ["+callback=layer_drop"]}
    presets = {p.preset: compose(p.preset if p.preset in known else "bf16", added.get(p.preset, ())) for p in plans}
    return [one.preset for one in ranked(plans, presets, caveats_last=caveats_last)]


def byte_gpt() -> ByteGPT:
    return ByteGPT(width=16, depth=2, heads=2, context=64)


BATCH = torch.zeros(4, 65, dtype=torch.uint8)


@pytest.mark.long
def test_given_host_memory_is_judged() -> None:
    found = plan(byte_gpt, BATCH, presets=["zero_offload", "bf16"], device="rtx-4090", host_memory="1KiB")
    assert isinstance(found, list)
    by_name = {one.preset: one for one in found}
    assert (by_name["bf16"].verdict, by_name["zero_offload"].verdict) == ("fits", "does not fit")
    assert by_name["zero_offload"].host_memory_bytes == 1024
    other = plan(byte_gpt, BATCH, preset="zero_offload", device="rtx-4090")
    assert isinstance(other, Plan)
    assert other.verdict == "fits"
    assert HOST_NOT_JUDGED in other.assumptions
    clipped = plan(
        byte_gpt,
        BATCH,
        preset="stream",
        device="rtx-4090",
        host_memory="1KiB",
        trainer={"gradient_clip_val": 1.0},
        budget="1MiB",  # no other batch sizes are traced
    )
    assert isinstance(clipped, Plan)
    assert "kept gradients" in "".join(clipped.assumptions)


def test_host_memory_of_this_machine_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preset_plans, "memory_here", lambda: (64 * GiB, 1024))
    on_cpu: dict[str, Any] = {"preset": "zero_offload", "device": "cpu", "overrides": ["strategy.allow_cpu=true"]}
    found = plan(byte_gpt, BATCH, **on_cpu)
    assert isinstance(found, Plan)
    assert (found.verdict, found.host_memory_bytes) == ("does not fit", 1024), "what is available, not all there is"


@pytest.mark.parametrize(
    ("given", "says"), [("16 gigs", "host_memory='16 gigs': write"), (16, "host_memory=16: write")]
)
def test_invalid_host_memory_is_refused(given: Any, says: str) -> None:
    with pytest.raises(PresetError, match=says):
        plan(byte_gpt, BATCH, preset="bf16", device="rtx-4090", host_memory=given)


def test_a_budget_above_the_devices_memory_is_refused() -> None:
    with pytest.raises(PresetError, match=mentions("budget='64GiB': ", "RTX 4090", "23.52 GiB", "write less")):
        plan(byte_gpt, BATCH, preset="bf16", device="rtx-4090", budget="64GiB")


# --- arithmetic that a device has not ---


def test_bf16_on_a_device_without_it_is_reported() -> None:
    said = (
        "Tesla T4 has no bf16 arithmetic: it is emulated and slow, and a run is refused there; fp16 works (preset fp16)"
    )
    assert said in assumed(device("t4"), "bf16-mixed")
    assert said in assumed(device("t4"), "bf16-true")
    assert said not in assumed(device("t4"), "16-mixed")
    assert not any("bf16" in text for text in assumed(device("l4"), "bf16-mixed"))
    found = plan(byte_gpt, BATCH, presets=["bf16", "fp16"], device="t4")
    assert isinstance(found, list)
    assert {one.preset for one in found if said in one.assumptions} == {"bf16"}


# --- written and read, and shown ---


def test_plan_is_restored_from_json() -> None:
    whole = with_host_memory(plan_with(assumptions=("a", "b")), 9 * GiB)
    assert Plan.from_dict(json.loads(json.dumps(whole.as_dict()))) == whole


def test_a_preset_stays_in_one_piece_in_eighty_columns() -> None:
    said = io.StringIO()
    long = plan_with(preset="compact_host_checkpointing", verdict="does not fit", needed_bytes=130 * GiB)
    Console(file=said, width=80).print(table([long], long))
    assert lines_with(said.getvalue(), "compact_host_checkpointing *", "130.00")
    assert "\u2026" not in said.getvalue(), "and nothing is cut off"


def test_table_marks_the_chosen_plan() -> None:
    first, second = plan_with(), plan_with(preset="bf16", host_bytes=0, largest_micro_batch=None, seconds_per_step=2.0)
    said = io.StringIO()
    Console(file=said, width=100).print(table([first, second], second))
    heading, *rows = (line.split() for line in said.getvalue().splitlines())
    assert heading == ["preset", "verdict", "peak", "needed", "host", "step", "batch", "peak", "in"]
    assert " ".join(rows[0]) == "zero_offload fits 1.00 GiB 2.00 GiB 10.00 GiB 1.00 x 3 optimizer step"
    assert " ".join(rows[1]) == "bf16 * fits 1.00 GiB 2.00 GiB 2.00 x ? optimizer step"
