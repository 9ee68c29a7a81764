"""The learning rate rises to its height, and falls to zero where the run ends."""

from __future__ import annotations

import pytest

from lightning_solo.optim.schedules import SCHEDULES, factor_at


def test_factor_rises_falls_and_stays_at_zero() -> None:
    middle = {"constant": 1.0, "linear": 0.5, "cosine": 0.5, "wsd": 1.0}
    for schedule in SCHEDULES:
        factors = [factor_at(step, schedule, warmup_steps=4, total_steps=20) for step in range(25)]
        assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
        assert factors[12] == pytest.approx(middle[schedule])
        assert factors[4:] == sorted(factors[4:], reverse=True)
        assert factors[20:] == [float(schedule == "constant")] * 5
    stable = [factor_at(step, "wsd", total_steps=20, decay_share=0.25) for step in range(20)]
    assert stable[:16] == [1.0] * 16
    assert stable[16:] == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_run_without_an_end_keeps_its_rate_and_a_short_one_never_divides_by_zero() -> None:
    assert [factor_at(step, warmup_steps=1) for step in (0, 1, 10**6)] == [0.5, 1.0, 1.0]
    assert factor_at(0, warmup_steps=4, total_steps=1) == pytest.approx(0.2)
    assert factor_at(1, warmup_steps=4, total_steps=1) == 0.0
    assert factor_at(0, warmup_steps=0, total_steps=0) == 1.0
