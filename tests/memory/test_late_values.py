"""Numbers that go to the host can be read there as often as needed, on either device."""

from __future__ import annotations

import pytest
import torch

from lightning_solo.memory.late_values import LateValues

pytestmark = pytest.mark.any_device


def test_numbers_are_read_later(device: torch.device) -> None:
    values = torch.tensor([1.5, float("inf")], device=device)
    late = LateValues(values.clone())
    assert late.read() == [1.5, float("inf")]
    assert late.read() == [1.5, float("inf")]
