"""Two steps without data hold what two real ones hold, byte by byte."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from lightning_solo.planner.capture import Trace, capture
from tests.planner.modules import MODULES

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped_window": {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0},
}


def both(make: Any, batch: Any, arguments: Any) -> tuple[Trace, Trace]:
    """Return (fake, real), by the CPU's own rules."""
    made = []
    for fake in (True, False):
        torch.manual_seed(0)
        made.append(capture(make, batch, arguments(), fake=fake, cuda=False))
    return made[0], made[1]


def assert_equal(fake: Trace, real: Trace) -> None:
    (fake_peak, fake_where), (real_peak, real_where) = fake.log.peak(), real.log.peak()
    assert fake_peak == real_peak > 0
    assert fake.log.breakdown(fake_where) == real.log.breakdown(real_where)


def named(choices: Any) -> list[Any]:
    return [pytest.param(*choice, id="-".join(choice)) for choice in choices]


@pytest.mark.parametrize(
    ("name", "precision", "extra"),
    named(itertools.product([name for name in MODULES if name != "recurrent"], PRECISIONS, ARGUMENTS)),
)
def test_fake_steps_hold_what_real_steps_hold(name: str, precision: str, extra: str) -> None:
    make, batch = MODULES[name]
    if name == "two_optimizers" and extra != "plain":
        pytest.skip("Lightning neither accumulates nor clips where optimization is by hand")
    assert_equal(*both(make, batch(), lambda: {"precision": precision, **ARGUMENTS[extra]}))
