"""What stands for bytes: every place that takes a budget reads the same texts and numbers, and refuses the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_solo.cards.budget import bytes_or_share
from lightning_solo.errors import PresetError
from lightning_solo.memory.limit import MemoryLimit
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.presets.devices import budget_bytes
from lightning_solo.techniques.compact_states.card import Settings
from lightning_solo.units import GiB, MiB, parse_budget

READERS: dict[str, Callable[[Any], object]] = {
    "parse_budget": parse_budget,
    "plan": budget_bytes,
    "share": bytes_or_share,
    "states": lambda value: Settings(state_budget=value).budget,
    "CompactAdamW": lambda value: CompactAdamW([torch.zeros(1)], state_budget=value).state_budget,
    "limit": lambda value: MemoryLimit(value).limit,
}
STATES, FROM_0 = ("states", "CompactAdamW"), ("states", "CompactAdamW", "limit")
NONE_GIVEN = dict.fromkeys(("plan", *STATES))
SAME: list[tuple[Any, int]] = [
    ("8GiB", 8 * GiB),
    (" 1.5 gib", 3 * GiB // 2),
    ("512B", 512),
    ("6442450944", 6 * GiB),
    (6 * GiB, 6 * GiB),
    (MiB, MiB),
]
OTHERS: list[tuple[Any, dict[str, Any]]] = [  # by whom each is read, and as what; all others refuse it
    (1.6e10, dict.fromkeys(set(READERS) - {"states"}, 16_000_000_000)),  # a setting of integers
    ("0.5", {"share": 0.5}),
    (0.5, {"share": 0.5}),
    ("1", {"share": 1.0, **dict.fromkeys(FROM_0, 1)}),
    (0, {"share": 0.0, **dict.fromkeys(FROM_0, 0)}),
    ("0GiB", dict.fromkeys(FROM_0, 0)),
    ("16", dict.fromkeys(FROM_0, 16)),
    (MiB - 1, dict.fromkeys(FROM_0, MiB - 1)),
    ("auto", dict.fromkeys(STATES, "auto")),
    (None, NONE_GIVEN),
    (float("nan"), {}),
    (float("inf"), {}),
    *((value, {}) for value in (1.5, "1.5", -1, "-1", True, "", "16GB", "16 gigs", "50%", [16])),
]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("given", "read"), [*((given, dict.fromkeys(READERS, count)) for given, count in SAME), *OTHERS]
)
def test_budgets_that_each_reader_accepts(reader: str, given: Any, read: dict[str, Any]) -> None:
    if reader in read:
        result = READERS[reader](given)
        assert (type(result), result) == (type(read[reader]), read[reader])
    else:
        with pytest.raises((ValueError, PresetError)):
            READERS[reader](given)


@pytest.mark.parametrize("given", ["16 gigs", "16", 16, -1, "16GB"])
def test_refusal_names_value_and_remedy(given: Any) -> None:
    with pytest.raises(ValueError, match=f"^{given!r}: .*16GiB.*at least 1.00 MiB.*17179869184") as caught:
        parse_budget(given)
    with pytest.raises(PresetError, match=f"^budget={given!r}: ") as of_plan:
        budget_bytes(given)
    assert str(of_plan.value).endswith(str(caught.value))
