"""The rows of a ladder's table: what each process measured, beside what the baseline's did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_solo.sweeps.files import JobFiles, read_json
from lightning_solo.sweeps.outcome import FINISHED
from lightning_solo.sweeps.results import Row
from lightning_solo.sweeps.rungs import Technique, name_of

NOT_RUN = "not run here"


@dataclass(frozen=True)
class Figures:
    """A row of the ladder's table; what could not be measured is None.

    Attributes:
        detail: why it did not finish, or what keeps it from being compared with the baseline.
        peak_bytes: of the device, or of this process where there is none.
        before_bytes: what was there of it before training.
        peak_change: against the baseline; -0.25 is a quarter less.
        step_s: median seconds of an optimizer step, the loader aside.
        step_quartiles_s: between which the middle half of the steps lies; None where too few were timed.
        step_within_noise: Whether the change of the step time can't be told from the steps' own spread.
        loss: mean training loss of the last steps.
        loss_difference: from the baseline's.
        exact: equal to the bit to the rung without the last technique, where that one claims to be.
        device: its type, cpu or cuda.
        overrides: of `lightning-solo train`.
    """

    name: str
    status: str
    detail: str = ""
    peak_bytes: int | None = None
    peak_change: float | None = None
    step_s: float | None = None
    step_quartiles_s: tuple[float, float] | None = None
    step_change: float | None = None
    step_within_noise: bool | None = None
    loss: float | None = None
    loss_difference: float | None = None
    exact: bool | None = None
    before_bytes: int | None = None
    samples_per_step: int | None = None
    device: str | None = None
    overrides: tuple[str, ...] = ()


def compare(
    techniques: Sequence[Technique],
    row: Row,
    error: dict[str, str] | None,
    base: Mapping[str, Any],
    without: Mapping[str, Any],
    steps: int,
) -> Figures:
    """Return a row of the table.

    Args:
        techniques: of the combination.
        row: what became of its process.
        error: what that said of its end, where it was an exception.
        base: what was measured of the baseline.
        without: what was measured of the combination without the last technique.
        steps: optimizer steps that were asked for.
    """
    found, status, detail = measured(row), row.status, row.detail
    if error is not None:
        message = " ".join(error["message"].split())
        of_the_machine = error["type"] == "CapabilityError"
        status, detail = (NOT_RUN, message) if of_the_machine else (status, f"{error['type']}: {message}")
    exact = None
    if techniques and techniques[-1].exact and found.get("fingerprint") and without.get("fingerprint"):
        exact = found["fingerprint"] == without["fingerprint"]
    said = [detail, *remarks(found, base, steps, exact, name_of(techniques[:-1]))]
    return Figures(
        name=name_of(techniques),
        status=status,
        detail="; ".join(text for text in said if text),
        peak_bytes=found.get("peak_bytes"),
        peak_change=change(found.get("peak_bytes"), base.get("peak_bytes")),
        step_s=found.get("step_s"),
        step_quartiles_s=found.get("step_quartiles_s") and tuple(found["step_quartiles_s"]),
        step_change=change(found.get("step_s"), base.get("step_s")),
        step_within_noise=within_noise(found, base) if techniques else None,
        loss=finite(found.get("loss")),
        loss_difference=difference(found.get("loss"), base.get("loss")),
        exact=exact,
        before_bytes=found.get("before_bytes"),
        samples_per_step=found.get("samples_per_step"),
        device=found.get("device"),
        overrides=row.overrides,
    )


def error_of(files: JobFiles, row: Row) -> dict[str, str] | None:
    """Return type and message of the exception that ended a job: all of it, a sweep's row has the first line."""
    said = read_json(files.result) or {}
    return said.get("error") if row.status != FINISHED and said.get("attempt") == row.attempt else None


def measured(row: Row | None) -> dict[str, Any]:
    """Return what a rung's process has measured; nothing where it did not finish."""
    return dict(row.returned) if row is not None and row.status == FINISHED and row.returned else {}


def remarks(
    found: Mapping[str, Any], base: Mapping[str, Any], steps: int, exact: bool | None, without: str
) -> list[str]:
    """Return what a reader of the row has to know: where it can't be compared with the baseline as it stands."""
    said = []
    if found and found["steps"] < steps:
        said.append(f"ended by itself after {found['steps']} of {steps} steps")
    samples, usual = found.get("samples_per_step"), base.get("samples_per_step")
    if samples and usual and samples != usual:
        said.append(
            f"each step takes {samples} samples, the baseline's {usual}: step time and loss are not of the same batch,"
            " and no memory is saved; a batch size that is an argument (data.batch_size, +model.batch_size) is divided"
        )
    if found and found.get("loss") is None:
        said.append("no loss to compare: training_step returns none, and logs none of that name")
    if found.get("loss") is not None and not math.isfinite(found["loss"]):
        said.append(f"the loss is {found['loss']}")
    if exact is False:
        said.append(
            f"differs from {without}; a module that differs from run to run does too (trainer.deterministic=true)"
        )
    return said


def change(value: float | None, base: float | None) -> float | None:
    """Return the relative change.

    >>> change(3, 4), change(None, 4)
    (-0.25, None)
    """
    return None if value is None or not base else value / base - 1


def within_noise(found: Mapping[str, Any], base: Mapping[str, Any]) -> bool | None:
    """Tell whether the middle halves of the step times overlap, or are not known; None where there is no change.

    >>> base = {"step_s": 2.0, "step_quartiles_s": [1.8, 2.2]}
    >>> [within_noise({"step_s": 2.4, "step_quartiles_s": [first, 2.6]}, base) for first in (2.1, 2.3)]
    [True, False]
    """
    if found.get("step_s") is None or base.get("step_s") is None:
        return None
    here, there = found.get("step_quartiles_s"), base.get("step_quartiles_s")
    return not here or not there or bool(here[0] <= there[1] and there[0] <= here[1])


def difference(value: float | None, base: float | None) -> float | None:
    """Return the difference of two finite numbers."""
    return None if finite(value) is None or finite(base) is None else value - base  # type: ignore[operator]


def finite(value: float | None) -> float | None:
    """Return a number that JSON has."""
    return value if value is not None and math.isfinite(value) else None


def as_json(rows: Sequence[Figures]) -> list[dict[str, Any]]:
    """Return rows as `ladder.json` has them."""
    return [asdict(row) for row in rows]
