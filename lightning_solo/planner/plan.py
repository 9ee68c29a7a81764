"""The plan of one preset, its verdict, and the order in which to try presets; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from typing import Any

from lightning_solo.cards.configuration import Configuration
from lightning_solo.planner.timeline import Span
from lightning_solo.units import format_bytes

TIGHT = 0.05  # of the need: the workspaces of cuDNN and sorting are unknown, and the CUDA context is an estimate
HOST_NOT_JUDGED = (
    "the host has the memory that is kept there; --host-memory 64GiB (in Python host_memory=) would judge it"
)
# Estimates within 2 %, or within the host's time for the loop around a step, count as equal
NEAR, NEAR_S = 0.02, 1e-3
EQUAL = f"estimates within {NEAR:.0%} and {NEAR_S * 1e3:.0f} ms count as equal"
PLANNED, MEASURED = "plan/planned_", "plan/measured_"  # prefixes of the figures that a run logs
VERDICTS = ("fits", "tight", "does not fit")


@dataclass(frozen=True)
class Plan:
    """The predicted memory and time of one preset.

    Attributes:
        preset: name of the preset.
        device: name of the device.
        micro_batch: examples per forward.
        accumulation: micro-batches per optimizer step.
        batch: examples in a batch of the loader, which a preset may divide; None if it is unknown.
        host_memory_bytes: available on the host; None if unknown or if nothing is kept there.
        peak_bytes: peak of allocated bytes, as ``torch.cuda.max_memory_allocated`` counts; on a CPU exact.
        breakdown: bytes at the peak: the ledger's categories, the libraries' ``workspace``, ``rounding`` of blocks.
        phases: the peak of each phase: forward, backward, optimizer_step, between.
        needed_bytes: the least device memory with which a run survives: the caching allocator's and the CUDA context.
        reserved_bytes: the memory that the device will show: blocks that the allocator frees only under pressure
            (``torch.cuda.max_memory_reserved``), and the CUDA context; on a CPU the needed bytes.
        budget_bytes: memory of the device, or the allowed part of it.
        verdict: ``fits``, ``tight`` (less than 5 % left, on the device or on the host), or ``does not fit``.
        host_bytes: bytes that techniques keep on the host.
        seconds_per_step: estimate for an optimizer step, good enough to rank presets.
        flops: floating-point operations of an optimizer step.
        bytes_moved: read and written by operators in an optimizer step.
        largest_micro_batch: the most examples per forward that fit; 0 if none fits, None if unknown.
        assumptions: ways in which a run may differ, in words.
        traced: ``fake tensors``, or ``real steps on the CPU``.
        timeline: busy times of the device's streams in an optimizer step of at most two micro-batches, condensed for a
            picture; empty for presets that don't copy while they compute.
        configuration: the fields of a solved preset, which has no file; None for any other.
    """

    preset: str
    device: str
    micro_batch: int
    peak_bytes: int
    breakdown: dict[str, int]
    phases: dict[str, int]
    needed_bytes: int
    reserved_bytes: int
    budget_bytes: int
    verdict: str
    host_bytes: int
    seconds_per_step: float
    flops: int
    bytes_moved: int
    largest_micro_batch: int | None
    assumptions: tuple[str, ...] = ()
    traced: str = "fake tensors"
    accumulation: int = 1
    batch: int | None = None
    host_memory_bytes: int | None = None
    timeline: tuple[Span, ...] = ()
    configuration: dict[str, Any] | None = None

    @property
    def fits(self) -> bool:
        """Whether the preset fits, even if tightly."""
        return self.verdict != "does not fit"

    @property
    def seconds_per_example(self) -> float:
        """The seconds of an optimizer step divided by its examples."""
        return self.seconds_per_step / (self.micro_batch * self.accumulation)

    @property
    def margin_bytes(self) -> int:
        """The unused part of the budget; negative if the budget is too small."""
        return self.budget_bytes - self.needed_bytes

    @property
    def host_needed_bytes(self) -> int:
        """The host memory needed; for a plan on the CPU this includes the device memory."""
        return self.host_bytes + (self.needed_bytes if self.device == "cpu" else 0)

    @property
    def host_shortage(self) -> str:
        """Why host memory is too small or nearly so; empty if it suffices or is unknown."""
        if self.host_memory_bytes is None or verdict_of(self.host_needed_bytes, self.host_memory_bytes) == "fits":
            return ""
        return f"{format_bytes(self.host_needed_bytes)} on the host, which has {format_bytes(self.host_memory_bytes)}"

    @property
    def needs(self) -> str:
        """The device memory needed, and the host's where it is short, in words."""
        return " and ".join(filter(None, (format_bytes(self.needed_bytes), self.host_shortage)))

    @property
    def shortage(self) -> str:
        """The memory needed, and how much more that is than there is, in words."""
        more = f"{format_bytes(-self.margin_bytes)} more" if self.margin_bytes < 0 else ""
        host = f"and {self.host_shortage}" if self.host_shortage else ""
        return ", ".join(filter(None, (format_bytes(self.needed_bytes), more, host)))

    @property
    def missing_bytes(self) -> int:
        """The missing bytes on the device and on the host."""
        on_host = 0 if self.host_memory_bytes is None else self.host_needed_bytes - self.host_memory_bytes
        return max(-self.margin_bytes, 0) + max(on_host, 0)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and derived figures in plain containers."""
        derived = {"fits": self.fits, "margin_bytes": self.margin_bytes, "host_shortage": self.host_shortage}
        return {**asdict(self), **derived}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Plan:
        """Return the plan from the result of `as_dict`."""
        known = {field.name: plain[field.name] for field in fields(cls) if field.name in plain}
        timeline = tuple(Span(*span) for span in known.get("timeline", ()))
        return cls(**{**known, "assumptions": tuple(known.get("assumptions", ())), "timeline": timeline})


def verdict_of(needed: int, available: int) -> str:
    """Return the verdict for needed and available bytes.

    >>> verdict_of(90, 100), verdict_of(99, 100), verdict_of(101, 100)
    ('fits', 'tight', 'does not fit')
    """
    if needed > available:
        return "does not fit"
    return "tight" if needed * (1 + TIGHT) > available else "fits"


def with_host_memory(plan: Plan, host_memory: int | None) -> Plan:
    """Return the plan with a verdict that also considers host memory; ``host_memory`` is None if it is unknown."""
    if not plan.host_bytes:
        return plan
    if host_memory is None:
        return replace(plan, assumptions=(*plan.assumptions, HOST_NOT_JUDGED))
    on_host = verdict_of(plan.host_needed_bytes, host_memory)
    judged = replace(plan, host_memory_bytes=host_memory, verdict=max(plan.verdict, on_host, key=VERDICTS.index))
    return judged if on_host != "does not fit" else replace(judged, largest_micro_batch=0)


def as_fast(plan: Plan, other: Plan) -> bool:
    """Return whether a plan takes as long as another per example, within the accuracy of estimates."""
    slack = NEAR * other.seconds_per_step + NEAR_S
    return plan.seconds_per_example <= other.seconds_per_example + slack / (other.micro_batch * other.accumulation)


def ranked(plans: Sequence[Plan], presets: Mapping[str, Configuration], *, caveats_last: bool) -> list[Plan]:
    """Return plans in the order in which to try them: first those that fit, by time, then the others, by missing bytes.

    Plans as fast as the fastest remaining one are ordered by host memory, then by number of techniques.

    Args:
        plans: of several presets.
        presets: their configurations, by name.
        caveats_last: whether presets with a caveat come last among those of equal verdict; set it for presets that the
            user didn't name.
    """

    def group(plan: Plan) -> tuple[int, bool]:
        return VERDICTS.index(plan.verdict), caveats_last and bool(presets[plan.preset].caveats)

    def changes(plan: Plan) -> tuple[int, int, bool]:
        config = presets[plan.preset]  # in 16 bits throughout, small updates are lost
        return plan.host_bytes, len(config.techniques), str(config.precision).endswith("16-true")

    order: list[Plan] = []
    for _, members in groupby(sorted(plans, key=group), key=group):
        left = sorted(members, key=lambda plan: (plan.missing_bytes, plan.seconds_per_example))
        while left:
            alike = [plan for plan in left if plan.fits and as_fast(plan, left[0])] or left[:1]
            order += sorted(alike, key=changes)
            left = [plan for plan in left if plan not in alike]
    return order
