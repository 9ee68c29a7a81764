"""`auto`: the fastest that fits and no other, in the precision that was asked for; and what it says where none does."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader

from lightning_solo.attach import trainer_kwargs
from lightning_solo.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_solo.errors import BudgetError, CapabilityError, PlanError, PresetError
from lightning_solo.planner import auto
from lightning_solo.planner.answer import Plan, ranked
from lightning_solo.planner.auto import candidates, choose, difference
from lightning_solo.presets.compose import compose
from lightning_solo.presets.schema import SoloConfig
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.units import GiB, MiB


def planned(name: str, verdict: str = "fits", seconds: float = 1.0, needed: int = GiB, **given: Any) -> Plan:
    return Plan(
        **{
            "preset": name,
            "device": "cpu",
            "micro_batch": 4,
            "peak_bytes": needed,
            "breakdown": {"weights": needed // 2, "activations": needed - needed // 2},
            "phases": {},
            "needed_bytes": needed,
            "budget_bytes": 2 * GiB,
            "verdict": verdict,
            "host_bytes": 0,
            "seconds_per_step": seconds,
            "flops": 1,
            "bytes_moved": 1,
            "largest_micro_batch": 3,
            **given,
        }
    )


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, SoloConfig, Plan]]:
    """Return a function that chooses among plans that are given: ``answers(plan, ..., overrides=[...])``."""

    def among(*plans: Plan, overrides: Any = (), said: io.StringIO | None = None) -> tuple[str, SoloConfig, Plan]:
        monkeypatch.setattr(auto, "plan_configs", lambda *args, **kwargs: ranked(plans))
        config = compose("auto", [f"auto.presets=[{','.join(plan.preset for plan in plans)}]", *overrides])
        console = Console(file=said or io.StringIO(), width=200)
        return choose(config, None, None, check=lambda config: None, console=console)

    return among


# --- which one ---


def test_the_fastest_that_fits(answers: Any) -> None:
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


def test_a_tight_one_only_where_it_is_accepted(answers: Any) -> None:
    plans = planned("baseline", "tight", 0.5, needed=int(1.99 * GiB)), planned("checkpointing", "does not fit", 1.0)
    with pytest.raises(BudgetError, match=r"auto\.accept_tight=true would take baseline, which leaves"):
        answers(*plans)
    assert answers(*plans, overrides=["auto.accept_tight=true"])[0] == "baseline"


def test_one_that_fits_goes_before_a_tight_one_even_if_accepted(answers: Any) -> None:
    plans = planned("baseline", "tight", 0.5), planned("checkpointing", "fits", 1.0)
    assert answers(*plans, overrides=["auto.accept_tight=true"])[0] == "checkpointing"


def test_where_none_fits_the_nearest_is_named(answers: Any) -> None:
    said = io.StringIO()
    with pytest.raises(BudgetError) as caught:
        answers(
            planned("baseline", "does not fit", needed=4 * GiB),
            planned("checkpointing", "does not fit", needed=3 * GiB),
            said=said,
        )
    assert (
        "no preset fits in 2.00 GiB; the nearest, checkpointing, needs 3.00 GiB; take a smaller model, or batches of 3"
        in (str(caught.value))
    )
    assert (caught.value.needed, caught.value.available) == (3 * GiB, 2 * GiB)
    assert "baseline" in said.getvalue(), "the table is shown all the same"


# --- among which ---


def test_precision_and_accumulation_stay_what_they_are() -> None:
    config = compose("auto", ["precision=32-true", "accumulate_grad_batches=4"])
    found = candidates(config, lambda config: None, None, ())
    assert {made.precision for made in found.values()} == {"32-true"}
    assert {made.accumulate_grad_batches for made in found.values()} == {4}
    assert "auto" not in found
    assert "accumulation" not in found, "another global batch would be another training"
    assert "baseline" in found, "of those that are the same now, the one that is so by itself"
    assert not {"bf16", "bf16_true", "fp16"} & set(found)
    assert "bf16" in candidates(compose("auto"), lambda config: None, None, ())


def test_what_this_machine_cannot_run_is_no_candidate() -> None:
    def check(config: SoloConfig) -> None:
        if config.strategy is not None:
            raise CapabilityError("no GPU here")

    found = candidates(compose("auto"), check, None, ())
    assert found
    assert all(made.strategy is None for made in found.values())
    with pytest.raises(PresetError, match=r"none of zero_offload can be chosen: zero_offload: no GPU here"):
        candidates(compose("auto"), check, ["zero_offload"], ())


# --- what it may be told ---


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("+auto.budgett=16GiB", r"auto\.budgett='16GiB': no such field; did you mean 'budget'\?"),
        ("auto.budget=true", r"auto\.budget=True: write auto\.budget=16GiB"),
        ("auto.budget=[16]", r"auto\.budget=\[16\]: write"),
        ("auto.device=3", r"auto\.device=3: write auto\.device=rtx-4090"),
        ("auto.accept_tight=1", r"auto\.accept_tight=1: write auto\.accept_tight=true"),
        ("auto.presets=bf16", r"auto\.presets='bf16': write auto\.presets=\[bf16,checkpointing\]"),
        ("auto=3", "auto"),
    ],
)
def test_fields_that_cannot_be(override: str, says: str) -> None:
    with pytest.raises(PresetError, match=says):
        trainer_kwargs("auto", [override], module=ByteGPT())


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("auto.budget=16", "16GiB"),
        ("auto.budget=16 gigs", "16GiB"),
        ("auto.device=rtx_4091", "did you mean 'rtx_4090'"),
        ("auto.presets=[baselin]", "did you mean 'baseline'"),
    ],
)
def test_values_that_cannot_be_are_refused_before_anything_is_planned(override: str, says: str) -> None:
    with pytest.raises(PresetError, match=says):
        trainer_kwargs("auto", [override], module=ByteGPT(), batch=torch.zeros(2, 9, dtype=torch.uint8))


def test_without_a_module_it_says_how() -> None:
    with pytest.raises(PresetError, match=r'write trainer_kwargs\("auto", module=module, batch=batch\)'):
        trainer_kwargs("auto")


# --- from end to end ---

TOLD = ["precision=32-true", "auto.device=cpu", "auto.presets=[baseline,checkpointing]"]


def byte_gpt() -> ByteGPT:
    return ByteGPT(width=16, depth=4, heads=2, context=64, warmup_steps=2)


def text(size: int = 32) -> torch.Tensor:
    return torch.randint(256, (size, 65), dtype=torch.uint8)


def test_a_smaller_budget_chooses_another_and_a_fit_runs_with_it(make_trainer: Any, capsys: Any) -> None:
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
    trainer.fit(module, DataLoader([batch[:4]] * 3, batch_size=None))
    assert trainer.global_step == 2


def test_a_budget_for_none_names_the_nearest_and_its_need() -> None:
    with pytest.raises(BudgetError, match=r"no preset fits in 1\.00 MiB; the nearest, checkpointing, needs"):
        trainer_kwargs("auto", [*TOLD, f"auto.budget={MiB}"], module=byte_gpt(), batch=text())


def test_a_module_that_cannot_be_planned_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"RuntimeError: .*, at .*byte_gpt\.py:\d+; its model states"):
        trainer_kwargs("auto", TOLD, module=byte_gpt(), batch=torch.zeros(4, 9, 2, dtype=torch.uint8))


# --- afterwards ---


@pytest.mark.parametrize(("peak", "said"), [(1.0, False), (1.09, False), (0.91, False), (1.11, True), (0.89, True)])
def test_a_difference_is_said_above_a_tenth(peak: float, said: bool) -> None:
    plan = planned("checkpointing", peak_bytes=GiB)
    states = {"weights": 100 * MiB, "gradients": 200 * MiB, "optimizer_states": 0, "other": 7}
    message = difference(plan, int(peak * GiB), states)
    assert (message is not None) == said
    if message is not None:
        assert "planned a peak of 1.00 GiB for checkpointing" in message
        assert "planned: weights 512.00 MiB, activations 512.00 MiB" in message
        assert "read: weights 100.00 MiB, gradients 200.00 MiB, activations and temporaries" in message
