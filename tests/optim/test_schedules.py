"""The learning rate rises to its height, and falls to zero where the run ends."""

from __future__ import annotations

import math

import pytest

from lightning_solo.optim.schedules import warmup_cosine


def test_factor_rises_falls_and_stays_at_zero() -> None:
    factors = [warmup_cosine(step, 4, 20) for step in range(25)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[12] == pytest.approx(0.5)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[20:] == [0.0] * 5


def test_run_without_an_end_keeps_its_rate_and_a_short_one_never_divides_by_zero() -> None:
    assert [warmup_cosine(step, 1, math.inf) for step in (0, 1, 10**6)] == [0.5, 1.0, 1.0]
    assert warmup_cosine(0, 4, 1) == pytest.approx(0.2)
    assert warmup_cosine(1, 4, 1) == 0.0
    assert warmup_cosine(0, 0, 0) == 1.0
