"""The plan of one preset, its verdict, and the order in which to try several; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lightning_solo.planner.timeline import Span
from lightning_solo.units import format_bytes

TIGHT = 0.05  # of the need: libraries that take memory unseen (cuDNN, sorting), and the context, are estimates
HOST_NOT_JUDGED = (
    "the host has the memory that is kept there; --host-memory 64GiB (in Python host_memory=) would judge it"
)
VERDICTS = ("fits", "tight", "does not fit")


@dataclass(frozen=True)
class Plan:
    """What one preset would take.

    Attributes:
        preset: its name.
        device: name of the device.
        micro_batch: examples per forward.
        accumulation: micro-batches per optimizer step.
        host_memory_bytes: what the host has for it; None where that isn't known, or nothing is held there.
        peak_bytes: allocated on the device, at most, as ``torch.cuda.max_memory_allocated`` counts; on a CPU exact.
        breakdown: bytes at the peak: the ledger's categories, the libraries' ``workspace``, ``rounding`` of blocks.
        phases: the peak of each phase: forward, backward, optimizer_step, between.
        needed_bytes: of the whole device: the least in which the caching allocator survives, and the CUDA context.
        budget_bytes: what the device has, or what was allowed.
        verdict: ``fits``, ``tight`` (less than 5 % left, here or on the host), or ``does not fit``.
        host_bytes: held on the host by the technique.
        seconds_per_step: an optimizer step, estimated; the order of presets is what it is for.
        flops: floating-point operations of an optimizer step.
        bytes_moved: that operators read and write in an optimizer step.
        largest_micro_batch: the most examples per forward that fit; 0 if none does, None if that could not be priced.
        assumptions: what the plan took for granted, in words.
        traced: how: ``fake tensors``, or ``real steps on the CPU``.
        timeline: of a preset that copies while it computes: when the device's streams are at work in an optimizer step
            of at most two micro-batches, joined to what a picture can show; empty for other presets.
    """

    preset: str
    device: str
    micro_batch: int
    peak_bytes: int
    breakdown: dict[str, int]
    phases: dict[str, int]
    needed_bytes: int
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
    host_memory_bytes: int | None = None
    timeline: tuple[Span, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether it fits, if only just."""
        return self.verdict != "does not fit"

    @property
    def seconds_per_example(self) -> float:
        """An optimizer step's seconds, shared among its examples."""
        return self.seconds_per_step / (self.micro_batch * self.accumulation)

    @property
    def margin_bytes(self) -> int:
        """What is left of the budget; negative where it doesn't suffice."""
        return self.budget_bytes - self.needed_bytes

    @property
    def host_needed_bytes(self) -> int:
        """What is needed of the host's memory; planned for the CPU, what is "on the device" is there too."""
        return self.host_bytes + (self.needed_bytes if self.device == "cpu" else 0)

    @property
    def host_shortage(self) -> str:
        """Why the host's memory does not suffice, or only just, in words; empty where it does, or isn't known."""
        if self.host_memory_bytes is None or verdict_of(self.host_needed_bytes, self.host_memory_bytes) == "fits":
            return ""
        return f"{format_bytes(self.host_needed_bytes)} on the host, which has {format_bytes(self.host_memory_bytes)}"

    @property
    def missing_bytes(self) -> int:
        """What is missing, on the device and on the host."""
        on_host = 0 if self.host_memory_bytes is None else self.host_needed_bytes - self.host_memory_bytes
        return max(-self.margin_bytes, 0) + max(on_host, 0)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it in plain containers."""
        told = {"fits": self.fits, "margin_bytes": self.margin_bytes, "host_shortage": self.host_shortage}
        return {**asdict(self), **told}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Plan:
        """Return the plan that `as_dict` wrote."""
        known = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        timeline = tuple(Span(*span) for span in known.get("timeline", ()))
        return cls(**{**known, "assumptions": tuple(known.get("assumptions", ())), "timeline": timeline})


def verdict_of(needed: int, there: int) -> str:
    """Return whether bytes that are needed are there.

    >>> verdict_of(90, 100), verdict_of(99, 100), verdict_of(101, 100)
    ('fits', 'tight', 'does not fit')
    """
    if needed > there:
        return "does not fit"
    return "tight" if needed * (1 + TIGHT) > there else "fits"


def with_host_memory(plan: Plan, host_memory: int | None) -> Plan:
    """Return the plan with its verdict for the host's memory too; None is that of a machine that isn't here."""
    if not plan.host_bytes:
        return plan
    if host_memory is None:
        return replace(plan, assumptions=(*plan.assumptions, HOST_NOT_JUDGED))
    there = verdict_of(plan.host_needed_bytes, host_memory)
    judged = replace(plan, host_memory_bytes=host_memory, verdict=max(plan.verdict, there, key=VERDICTS.index))
    return judged if there != "does not fit" else replace(judged, largest_micro_batch=0)


def ranked(plans: Sequence[Plan]) -> list[Plan]:
    """Return plans in the order in which one would try them: those that fit by time, the others by what is missing."""
    return sorted(
        plans,
        key=lambda p: (
            VERDICTS.index(p.verdict),
            p.missing_bytes if p.verdict == "does not fit" else float(f"{p.seconds_per_example:.3g}"),
        ),
    )
