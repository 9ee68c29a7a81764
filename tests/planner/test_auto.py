"""`auto`: the fastest that fits and no other, in the precision that was asked for; and what it says where none does."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader

from lightning_solo.attach import show, trainer_kwargs
from lightning_solo.cards.configuration import AutoSettings, Configuration
from lightning_solo.errors import BudgetError, CapabilityError, PlanError, PresetError
from lightning_solo.planner import auto
from lightning_solo.planner.auto import (
    candidates,
    choose,
    none_fits,
)
from lightning_solo.planner.bases import is_base
from lightning_solo.planner.plan import Plan, ranked, with_host_memory
from lightning_solo.planner.plan_check import PlanCheck
from lightning_solo.planner.worker import WORKER
from lightning_solo.presets.compose import compose
from lightning_solo.presets.writing import fields_of, preset_file
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.units import GiB, MiB
from tests.messages import lines_with, mentions, nearest
from tests.planner.modules import plan_with


def planned(name: str, verdict: str = "fits", seconds: float = 1.0, needed: int = GiB, **fields: Any) -> Plan:
    breakdown = {"weights": needed // 2, "activations": needed - needed // 2}
    own = {"device": "cpu", "peak_bytes": needed, "needed_bytes": needed, "budget_bytes": 2 * GiB, "host_bytes": 0}
    given = {**own, "breakdown": breakdown, "seconds_per_step": seconds, **fields}
    return plan_with(preset=name, verdict=verdict, **given)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, Configuration, Plan]]:
    """Return a function that chooses among plans that are given: ``answers(plan, ..., overrides=[...])``."""

    def among(*plans: Plan, overrides: Any = (), said: io.StringIO | None = None) -> tuple[str, Configuration, Plan]:
        presets = {plan.preset: compose(plan.preset) for plan in plans}
        monkeypatch.setattr(
            auto.preset_plans, "plan", lambda *args, **kwargs: ranked(plans, presets, caveats_last=False)
        )
        config = compose("auto", [f"auto.presets=[{','.join(plan.preset for plan in plans)}]", *overrides])
        console = Console(file=said or io.StringIO(), width=200)
        return choose(config, None, None, check=lambda config: None, console=console)

    return among


# --- which one ---


def test_fastest_fitting_preset_is_chosen(answers: Any) -> None:
    said = io.StringIO()
    name, _, _ = answers(
        planned("bf16_true", "does not fit", 0.1),
        planned("baseline", "tight", 0.5),
        planned("checkpointing", seconds=3.0),
        planned("zero_offload", seconds=2.0),
        said=said,
    )
    assert name == "zero_offload"
    assert all(name in said.getvalue() for name in ("bf16_true", "baseline", "checkpointing", "zero_offload *"))


def test_message_says_why_the_preset_is_chosen(answers: Any) -> None:
    said = io.StringIO()
    assert answers(planned("checkpointing", seconds=1.0), planned("bf16", seconds=1.01), said=said)[0] == "bf16"
    assert answers(planned("checkpointing", seconds=1.5), planned("bf16"), said=said)[0] == "bf16"
    (near, far) = lines_with(said.getvalue(), "auto: bf16, ")
    assert "less time" not in near
    assert "count as equal" in near
    assert "33% less time than checkpointing" in far
    answers(planned("bf16", seconds=0.0), planned("checkpointing", seconds=1.0), said=said)
    assert "100% less time than checkpointing" in said.getvalue()


def test_message_says_if_no_other_preset_was_planned(answers: Any) -> None:
    said = io.StringIO()
    answers(planned("bf16"), said=said)
    answers(planned("bf16"), planned("baseline", "does not fit"), said=said)
    alone, best = lines_with(said.getvalue(), "auto: bf16, ")
    assert "no other" in alone
    assert "only one" not in alone
    assert "only one" in best


def test_rows_of_the_table_are_not_wrapped_in_a_file(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    names = ["compact_host_checkpointing", "bf16"]
    plans = [
        replace(planned(name), phases={"backward": 1}, host_bytes=2**29, largest_micro_batch=100_000) for name in names
    ]
    monkeypatch.setattr(auto.preset_plans, "plan", lambda *args, **kwargs: plans)
    choose(compose("auto", [f"auto.presets=[{','.join(names)}]"]), None, None, check=lambda config: None)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(names[0]))
    assert " ".join(row.split()).endswith("fits 1.00 GiB 1.00 GiB 512.00 MiB 1.00 x 100,000 backward")


def test_named_preset_is_compared_despite_its_caveat(preset_with_caveat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = planned("bf16"), planned(preset_with_caveat, seconds=0.5)
    monkeypatch.setattr(WORKER, "answers", lambda request, timeout_s: ((plan.preset, plan) for plan in plans))
    config = compose("auto", [f"auto.presets=[bf16,{preset_with_caveat}]"])
    console = Console(file=io.StringIO())
    assert choose(config, ByteGPT, None, check=lambda config: None, console=console)[0] == preset_with_caveat


def test_tight_preset_needs_accept_tight(answers: Any) -> None:
    plans = planned("baseline", "tight", 0.5, needed=int(1.99 * GiB)), planned("checkpointing", "does not fit", 1.0)
    with pytest.raises(BudgetError, match=mentions("auto.accept_tight=true", "baseline")):
        answers(*plans)
    assert answers(*plans, overrides=["auto.accept_tight=true"])[0] == "baseline"


def test_error_names_the_nearest_preset_if_none_fits(answers: Any) -> None:
    said = io.StringIO()
    with pytest.raises(BudgetError) as caught:
        answers(
            planned("baseline", "does not fit", needed=4 * GiB),
            planned("checkpointing", "does not fit", needed=3 * GiB),
            said=said,
        )
    assert lines_with(
        str(caught.value), "2.00 GiB", "checkpointing", "3.00 GiB, 1.00 GiB more", "smaller model", "batches of 3"
    )
    assert (caught.value.needed, caught.value.available) == (3 * GiB, 2 * GiB)
    assert "write auto.budget=3226MiB, or" in str(caught.value)  # 1.05 * 3 GiB, the least that isn't tight
    assert "baseline" in said.getvalue(), "the table is shown all the same"


def test_error_names_the_host_if_its_memory_is_too_small() -> None:
    short = with_host_memory(planned("zero_offload", host_bytes=9 * GiB, device="t4"), 8 * GiB)
    error = none_fits([short, planned("bf16", "does not fit", needed=32 * GiB)], 16 * GiB)
    need = "1.00 GiB, and 9.00 GiB on the host, which has 8.00 GiB"
    assert lines_with(str(error), "zero_offload", need, "smaller model")
    assert (error.needed, error.available) == (9 * GiB, 8 * GiB)
    assert "auto.budget" not in str(error)


def test_host_memory_is_that_of_this_machine_for_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def plans(*args: Any, **given: Any) -> list[Plan]:
        asked.update(given)
        return [planned("bf16")]

    monkeypatch.setattr(auto.preset_plans, "plan", plans)
    monkeypatch.setattr(auto, "host_memory", lambda: (9, 7))
    config = compose("auto", ["auto.presets=[bf16]", "auto.device=rtx-4090"])
    choose(config, None, None, check=lambda config: None, console=Console(file=io.StringIO()))
    assert (asked["host_memory"], asked["device"]) == (7, "rtx-4090")


# --- among which ---


def test_presets_that_make_batches_are_no_candidates() -> None:
    presets = ["packing", "length_bucketing", "curriculum"]
    with pytest.raises(PresetError, match=mentions(*presets, "batches")):
        candidates(compose("auto"), lambda config: None, presets, ())


def test_a_preset_with_a_caveat_is_a_candidate_only_by_name(
    preset_with_caveat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["bf16", preset_with_caveat, "zero_offload"]
    monkeypatch.setattr(auto, "compose_all", lambda allow: {name: compose(name) for name in names})
    assert list(candidates(compose("auto"), lambda config: None, None, ())) == ["bf16", "zero_offload"]
    assert list(candidates(compose("auto"), lambda config: None, names, ())) == names
    monkeypatch.setattr(auto, "compose_all", lambda allow: {preset_with_caveat: compose(preset_with_caveat)})
    with pytest.raises(PresetError, match=mentions(f"{preset_with_caveat}: ", "some of the blocks", "auto.presets")):
        candidates(compose("auto"), lambda config: None, None, ())


@pytest.mark.long
def test_candidates_keep_precision_and_accumulation() -> None:
    config = compose("auto", ["precision=32-true", "accumulate_grad_batches=4"])
    found = candidates(config, lambda config: None, None, ())
    assert {made.precision for made in found.values()} == {"32-true"}
    assert {made.accumulate_grad_batches for made in found.values()} == {4}
    assert "auto" not in found
    assert "accumulation" not in found, "another global batch would be another training"
    assert not {"packing", "length_bucketing", "curriculum"} & set(found), "other batches than the one that is planned"
    assert "baseline" in found, "of those that are the same now, the one that is so by itself"
    assert not {"bf16", "bf16_true", "fp16"} & set(found)


def test_a_candidate_of_several_equal_presets_has_its_own_name() -> None:
    found = candidates(compose("auto"), lambda config: None, ["baseline", "bf16"], ())
    assert [(name, made.preset) for name, made in found.items()] == [("bf16", "bf16")]


def test_preset_that_this_machine_cannot_run_is_no_candidate() -> None:
    def check(config: Configuration) -> None:
        if config.strategy is not None:
            raise CapabilityError("no GPU here")

    found = candidates(compose("auto"), check, None, ())
    assert found
    assert all(made.strategy is None for made in found.values())
    with pytest.raises(PresetError, match="zero_offload: no GPU here"):
        candidates(compose("auto"), check, ["zero_offload"], ())


# --- the solved plan ---

MODES = {"keep": ["blocks.3"], "products": ["blocks.2"], "recompute": ["blocks.0", "blocks.1"]}
SOLVED_FIELDS = {"precision": "bf16-mixed", "callback": {"activation_checkpointing": {"modes": MODES}}}


def test_solved_plan_is_chosen_and_written_as_a_preset(
    answers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = io.StringIO()
    solved = planned("checkpointing", seconds=0.5, configuration=SOLVED_FIELDS)
    name, config, plan = answers(solved, planned("bf16"), overrides=["auto.save_preset=mine"], said=said)
    assert (name, plan) == ("checkpointing", solved)
    assert config == compose(SOLVED_FIELDS)
    assert lines_with(said.getvalue(), "auto: ", "recompute: blocks.0, blocks.1")
    assert lines_with(said.getvalue(), "conf/solo/mine.yaml", "solo=mine")
    assert compose("mine") == config, "the file is a preset like any other"
    assert lines_with((tmp_path / "conf/solo/mine.yaml").read_text(), "keep: [blocks.3]")
    answers(solved, overrides=["auto.save_preset=mine"], said=said)  # a file of its own is written anew
    assert len(lines_with(said.getvalue(), "conf/solo/mine.yaml", "replaces", "cpu and 2.00 GiB")) == 1
    answers(planned("bf16"), overrides=["auto.save_preset=mine"], said=said)
    assert lines_with(said.getvalue(), "conf/solo/mine.yaml isn't written", "bf16")
    (tmp_path / "conf/solo/mine.yaml").write_text("precision: bf16-mixed\n")
    with pytest.raises(PresetError, match=mentions("auto.save_preset=mine", "another name")):
        answers(solved, overrides=["auto.save_preset=mine"])


def test_micro_batches_within_blocks_are_said_and_written(
    answers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said, fields = io.StringIO(), {"callback": {"block_micro_batching": {"micro_batches": 2}}}
    answers(planned("bf16", configuration=fields), overrides=["auto.save_preset=mine"], said=said)
    assert lines_with(said.getvalue(), "callback.block_micro_batching.micro_batches=2")
    assert lines_with(said.getvalue(), "auto.whole_batch=true")
    assert compose("mine").techniques == compose(fields).techniques


def test_bases_are_presets_that_leave_blocks_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    names = ["bf16", "compact", "checkpointing", "offloading", "zero_offload"]
    monkeypatch.setattr(auto, "compose_all", lambda allow: {name: compose(name) for name in names})
    monkeypatch.setattr(auto.preset_plans, "plan", lambda *args, **given: asked.update(given) or [planned("bf16")])
    console = Console(file=io.StringIO())
    choose(compose("auto"), None, None, check=lambda config: None, console=console)
    assert list(asked["presets"]) == names
    assert list(asked["bases"].bases) == ["bf16", "compact"] == [name for name in names if is_base(compose(name))]
    choose(compose("auto", ["auto.presets=[bf16]"]), None, None, check=lambda config: None, console=console)
    assert asked["bases"] is None
    choose(compose("auto", ["auto.presets=[bf16,solved]"]), None, None, check=lambda config: None, console=console)
    assert (list(asked["presets"]), list(asked["bases"].bases)) == (["bf16"], ["bf16"])


def test_presets_are_compared_if_the_solved_plan_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(request: Any, timeout_s: float) -> Any:
        assert list(request.presets) == ["bf16", "solved"]
        yield "bf16", planned("bf16")
        raise PlanError("no plan after 600 s")

    monkeypatch.setattr(WORKER, "answers", answers)
    config, console = compose("auto", ["auto.presets=[bf16,solved]"]), Console(file=io.StringIO())
    assert choose(config, ByteGPT, None, check=lambda config: None, console=console)[0] == "bf16"


@pytest.mark.parametrize(
    "preset", ["compact_host_checkpointing", "zero_offload", "offloading", "checkpointing_selective"]
)
def test_written_fields_compose_to_the_same_preset(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose(preset)
    assert compose(fields_of(config)) == config
    (tmp_path / "conf/solo").mkdir(parents=True)
    (tmp_path / "conf/solo/written.yaml").write_text(preset_file(fields_of(config), "Written."))
    assert compose("written") == config


def test_resumed_run_needs_the_memory_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "host_memory", lambda: (8 * GiB, 0))
    plan = planned("solved", needed=3 * GiB, device="rtx_4090", host_bytes=6 * GiB)
    room = AutoSettings(device="rtx-4090", budget="4GiB")
    auto.check_room(plan, room)
    with pytest.raises(BudgetError, match=mentions("solved", "3.00 GiB", "2.00 GiB", "resume=override")):
        auto.check_room(plan, replace(room, budget="2GiB"))
    with pytest.raises(BudgetError, match=mentions("9.00 GiB", "8.00 GiB", "resume=override")):
        auto.check_room(replace(plan, host_bytes=9 * GiB), room)


# --- what it may be told ---


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("+auto.budgett=16GiB", ["auto.budgett='16GiB': ", nearest("budget")]),
        ("auto.budget=true", ["auto.budget=True: write auto.budget=16GiB"]),
        ("auto.budget=[16]", ["auto.budget=[16]: write"]),
        ("auto.device=3", ["auto.device=3: write auto.device=rtx-4090"]),
        ("auto.accept_tight=1", ["auto.accept_tight=1: write auto.accept_tight=true"]),
        ("auto.whole_batch=1", ["auto.whole_batch=1: write auto.whole_batch=true"]),
        ("auto.presets=bf16", ["auto.presets='bf16': write auto.presets=[bf16,checkpointing]"]),
        ("auto.presets=[baselin]", [nearest("baseline")]),
        ("auto.save_preset=a/b", ["auto.save_preset='a/b'", "auto.save_preset=my_run"]),
        ("auto.save_preset=bf16", ["auto.save_preset=bf16: ", "another name"]),
        ("auto=3", ["auto"]),
    ],
)
def test_invalid_fields_are_refused(override: str, says: list[str]) -> None:
    with pytest.raises(PresetError, match=mentions(*says)):
        trainer_kwargs("auto", [override], module=ByteGPT())


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["auto.device=rtx-4091"], ["auto.device='rtx-4091': ", nearest("rtx_4090")]),
        (["auto.budget=16 gigs"], ["auto.budget='16 gigs': ", "16GiB"]),
        (["auto.budget=16"], ["auto.budget=16: ", "16GiB"]),
        (
            ["auto.device=rtx-4090", "auto.budget=64GiB"],
            ["auto.budget=64GiB: NVIDIA GeForce RTX 4090 ", "23.52 GiB", "write less"],
        ),
    ],
)
def test_invalid_device_or_budget_is_refused_by_compose(overrides: list[str], says: list[str]) -> None:
    with pytest.raises(PresetError, match=mentions(*says)):
        compose("auto", overrides)


def test_invalid_device_is_refused_without_importing_torch() -> None:
    code = (
        "import sys\nfrom lightning_solo.errors import PresetError\n"
        "from lightning_solo.presets.compose import compose\n"
        "try: compose('auto', ['auto.device=rtx-4091'])\n"
        "except PresetError: assert not {'torch', 'lightning'} & set(sys.modules)\n"
        "else: raise AssertionError('not refused')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_device_name_is_shown_as_written() -> None:
    assert "device: RTX 4090" in show("auto", ["auto.device=RTX 4090"])


def test_a_budget_above_this_devices_memory_is_refused() -> None:
    with pytest.raises(PresetError, match=mentions("auto.budget=1024TiB: ", "CPU", "write less")):
        trainer_kwargs("auto", ["auto.device=cpu", "auto.budget=1024TiB"], module=byte_gpt(), batch=text())
    here = ["auto.budget=1024TiB", "auto.presets=[baseline]"]
    with pytest.raises(PresetError, match=mentions("budget='1024TiB': ", "write less")):
        trainer_kwargs("auto", here, module=byte_gpt(), batch=text())


def test_missing_module_is_refused_with_the_call_to_write() -> None:
    with pytest.raises(PresetError, match=mentions("write module=module", "batch=datamodule")):
        trainer_kwargs("auto")


# --- from end to end ---

TOLD = ["precision=32-true", "auto.device=cpu", "auto.presets=[baseline,checkpointing]"]


def byte_gpt() -> ByteGPT:
    return ByteGPT(width=16, depth=4, heads=2, context=64, warmup_steps=2)


def text(size: int = 32) -> torch.Tensor:
    return torch.randint(256, (size, 65), dtype=torch.uint8)


@pytest.mark.long
def test_smaller_budget_chooses_another_preset_and_its_fit_runs(make_trainer: Any, capsys: Any) -> None:
    module, batch = byte_gpt(), text()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    chosen = [
        trainer_kwargs("auto", [*TOLD, f"auto.budget={budget}"], module=module, batch=batch)
        # 4 blocks keep some 14 x 64 x 16 x 4 bytes of each example, 32 x 0.22 MiB, if they are not recomputed
        for budget in (64 * MiB, 10 * MiB)
    ]
    assert [any(isinstance(c, ActivationCheckpointing) for c in each["callbacks"]) for each in chosen] == [False, True]
    assert {each["precision"] for each in chosen} == {"32-true"}
    assert "checkpointing *" in capsys.readouterr().out
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    trainer = make_trainer(L.pytorch, **{**chosen[1], "max_steps": 2})
    trainer.fit(module, DataLoader([batch] * 3, batch_size=None))
    assert trainer.global_step == 2


@pytest.mark.long
def test_too_small_budget_is_refused_with_the_nearest_preset() -> None:
    with pytest.raises(BudgetError, match=mentions("1.00 MiB", "checkpointing")):
        trainer_kwargs("auto", [*TOLD, f"auto.budget={MiB}"], module=byte_gpt(), batch=text())


@pytest.mark.long
def test_failing_module_is_an_error_with_its_line() -> None:
    with pytest.raises(PlanError, match=r"RuntimeError: .*byte_gpt\.py:\d+"):
        trainer_kwargs("auto", TOLD, module=byte_gpt(), batch=torch.zeros(4, 9, 2, dtype=torch.uint8))


def test_trainer_kwargs_has_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto.preset_plans, "plan", lambda *args, **given: [planned("baseline", device="rtx_4090")])
    made = trainer_kwargs("auto", ["precision=32-true", "auto.presets=[baseline]"], module=byte_gpt(), batch=text())
    (check,) = (one for one in made["callbacks"] if isinstance(one, PlanCheck))
    assert check.plan.device == "rtx_4090"
