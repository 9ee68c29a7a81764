"""What a plan says, and which one to try first: read where torch is not imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Plan:
    """What one preset would take.

    Attributes:
        preset: its name.
        device: name of the device.
        micro_batch: examples per forward.
        accumulation: micro-batches per optimizer step.
        peak_bytes: allocated on the device, at most, as ``torch.cuda.max_memory_allocated`` counts; on a CPU exact.
        breakdown: bytes at the peak: the ledger's categories, the libraries' ``workspace``, ``rounding`` of blocks.
        phases: the peak of each phase: forward, backward, optimizer_step, between.
        needed_bytes: of the whole device: the least in which the caching allocator survives, and the CUDA context.
        budget_bytes: what the device has, or what was allowed.
        verdict: ``fits``, ``tight`` (less than 5 % left), or ``does not fit``.
        host_bytes: held on the host by the technique.
        seconds_per_step: an optimizer step, estimated; the order of presets is what it is for.
        flops: floating-point operations of an optimizer step.
        bytes_moved: that operators read and write in an optimizer step.
        largest_micro_batch: the most examples per forward that fit; 0 if none does, None if that could not be priced.
        assumptions: what the plan took for granted, in words.
        traced: how: ``fake tensors``, or ``real steps on the CPU``.
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

    def as_dict(self) -> dict[str, Any]:
        """Return all of it in plain containers."""
        return {**asdict(self), "fits": self.fits, "margin_bytes": self.margin_bytes}


def ranked(plans: Sequence[Plan]) -> list[Plan]:
    """Return plans in the order in which one would try them: those that fit by time, then the others by need."""
    order = {"fits": 0, "tight": 1, "does not fit": 2}
    return sorted(
        plans,
        key=lambda p: (
            order[p.verdict],
            p.needed_bytes if p.verdict == "does not fit" else float(f"{p.seconds_per_example:.3g}"),
        ),
    )
