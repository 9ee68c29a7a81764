"""The rows of a ladder's table: the figures of each rung, compared with the baseline's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_solo.ladder.rungs import LadderTechnique, name_of
from lightning_solo.sweeps.outcome import FINISHED
from lightning_solo.sweeps.results import Row

NOT_RUN = "not run here"
REFUSED = "refused"
CHANGES = {"counted_bytes": "counted_change", "peak_bytes": "peak_change", "step_s": "step_change"}
"""Figure -> its relative change against the baseline."""
UNCHANGED = (
    *("counted_bytes", "breakdown", "peak_bytes", "before_bytes"),
    *("step_s", "step_quartiles_s", "samples_per_step", "device"),
)
"""Measurements that a row repeats."""


@dataclass(frozen=True)
class Figures:
    """A row of the ladder's table; a figure that could not be measured is None."""

    name: str
    status: str
    detail: str = ""  # why it did not finish, or can't be compared with the baseline
    # peak of the tensors of training, as `memory.ledger` counts them; None for a single step
    counted_bytes: int | None = None
    breakdown: Mapping[str, int] | None = None  # counted bytes of each category of ``memory.events.CATEGORIES``
    counted_change: float | None = None  # relative change against the baseline; -0.25 is a quarter less
    peak_bytes: int | None = None  # peak memory of the device, or of the process without a GPU
    peak_change: float | None = None  # relative change against the baseline
    step_s: float | None = None  # median seconds of an optimizer step, without the loader
    # first and third quartile of the step times; None if too few were timed
    step_quartiles_s: Sequence[float] | None = None
    step_change: float | None = None
    step_within_noise: bool | None = None  # whether the change of the step time is within the spread of the steps
    loss: float | None = None  # mean training loss of the last steps
    loss_difference: float | None = None  # difference from the baseline's loss
    # whether it is bit-equal to the rung without the last technique, if that technique claims to be exact
    exact: bool | None = None
    before_bytes: int | None = None  # use of the same memory before training
    samples_per_step: int | None = None
    device: str | None = None  # its type, cpu or cuda
    overrides: tuple[str, ...] = ()  # of `lightning-solo train`


def compare(
    techniques: Sequence[LadderTechnique],
    row: Row,
    error: dict[str, str] | None,
    base: Mapping[str, Any],
    without: Mapping[str, Any],
    steps: int,
) -> Figures:
    """Return a job's figures, compared with the baseline's and with those of the rung without its last technique.

    Args:
        techniques: of the job.
        row: its row in the sweep.
        error: type and whole message of the exception that ended it.
        base: measurements of the baseline.
        without: measurements of the rung without the last technique.
        steps: optimizer steps that each rung should take.
    """
    measures, status, detail = measured(row), row.status, row.detail
    if error is not None:
        message = " ".join(error["message"].split())
        of_the_machine = error["type"] == "CapabilityError"
        status, detail = (NOT_RUN, message) if of_the_machine else (status, f"{error['type']}: {message}")
    exact = None
    if techniques and techniques[-1].exact and measures.get("fingerprint") and without.get("fingerprint"):
        exact = measures["fingerprint"] == without["fingerprint"]
    remarks_ = [detail, *remarks(measures, base, steps, exact, name_of(techniques[:-1]))]
    loss, base_loss = finite(measures.get("loss")), finite(base.get("loss"))
    return Figures(
        name=name_of(techniques),
        status=status,
        detail="; ".join(text for text in remarks_ if text),
        step_within_noise=within_noise(measures, base) if techniques else None,
        loss=loss,
        loss_difference=None if loss is None or base_loss is None else loss - base_loss,
        exact=exact,
        overrides=row.overrides,
        **{name: measures.get(name) for name in UNCHANGED},
        **changes(measures, base),
    )


def measured(row: Row | None) -> dict[str, Any]:
    """Return the measurements of a rung's process; none if it did not finish."""
    return dict(row.returned) if row is not None and row.status == FINISHED and row.returned else {}


def remarks(
    measures: Mapping[str, Any], base: Mapping[str, Any], steps: int, exact: bool | None, without: str
) -> list[str]:
    """Return the reasons why a row can't be compared with the baseline."""
    notes = []
    if measures and measures["steps"] < steps:
        notes.append(f"ended by itself after {measures['steps']} of {steps} steps")
    samples, usual = measures.get("samples_per_step"), base.get("samples_per_step")
    if samples and usual and samples != usual:
        parts = max(samples // usual, 1)
        if usual % parts:
            remedy = f"a batch of {usual} can't be divided by {parts}, write a batch size that can"
        elif key := measures.get("batch_argument"):
            remedy = f"to have it divided write it as an argument: {key}={usual}"
        else:
            remedy = "to have it divided, give the class with the train_dataloader an argument batch_size"
        notes.append(
            f"each step takes {samples} samples, the baseline's {usual}: step time and loss are not of the same batch,"
            f" and each micro-batch is as large as the baseline's batch, so no memory is saved; {remedy}"
        )
    if measures and measures.get("loss") is None:
        notes.append("no loss to compare: training_step returns none, and logs none of that name")
    if measures.get("loss") is not None and not math.isfinite(measures["loss"]):
        notes.append(f"the loss is {measures['loss']}")
    if exact is False:
        notes.append(
            f"differs from {without}; a module that differs from run to run does too (trainer.deterministic=true)"
        )
    return notes


def changes(row: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's relative changes of memory and step time, by attribute of `Figures`."""
    return {name: change(row.get(key), base.get(key)) for key, name in CHANGES.items()}


def change(value: float | None, base: float | None) -> float | None:
    """Return the relative change.

    >>> change(3, 4), change(None, 4)
    (-0.25, None)
    """
    return None if value is None or not base else value / base - 1


def within_noise(measures: Mapping[str, Any], base: Mapping[str, Any]) -> bool | None:
    """Return whether the interquartile ranges of the step times overlap or are unknown; None without step times.

    >>> base = {"step_s": 2.0, "step_quartiles_s": [1.8, 2.2]}
    >>> [within_noise({"step_s": 2.4, "step_quartiles_s": [first, 2.6]}, base) for first in (2.1, 2.3)]
    [True, False]
    """
    if measures.get("step_s") is None or base.get("step_s") is None:
        return None
    ours, theirs = measures.get("step_quartiles_s"), base.get("step_quartiles_s")
    return not ours or not theirs or bool(ours[0] <= theirs[1] and theirs[0] <= ours[1])


def finite(value: float | None) -> float | None:
    """Return a number that JSON can hold, else None."""
    return value if value is not None and math.isfinite(value) else None
