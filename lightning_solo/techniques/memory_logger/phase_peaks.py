"""Peak bytes of forward, backward and optimizer step, in addition to those of the whole run."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_solo.memory.events import PHASES
from lightning_solo.memory.reading import Reading, read, resident_bytes, with_host


class PhasePeaks:
    """Reads a device, and keeps the peak of each phase.

    On a CUDA device the peak counters are reset whenever a phase begins or ends; `read` still includes the peaks
    before such a reset. On a CPU a phase's peak is the bytes resident at its end.

    Args:
        device: a CUDA device, or any other for the memory of this process.
        per_phase: keep peaks by phase. Otherwise `enter` does nothing, and no counter is reset.
    """

    def __init__(self, device: torch.device, per_phase: bool) -> None:
        self.device = device
        self.per_phase = per_phase
        self._phase: str | None = None
        self._peaks: dict[str, int] = {}
        self._hidden_allocated = self._hidden_reserved = 0

    def enter(self, phase: str | None) -> None:
        """End the phase and keep its peak; begin another one, unless it is None."""
        if not self.per_phase:
            return
        ended, self._phase = self._phase, phase
        peak = 0
        if self.device.type == "cuda":
            reading = read(self.device)
            peak = reading.peak_allocated or 0
            self._hidden_allocated = max(self._hidden_allocated, peak)
            self._hidden_reserved = max(self._hidden_reserved, reading.peak_reserved or 0)
            torch.cuda.reset_peak_memory_stats(self.device)
        elif ended is not None:
            peak = resident_bytes()
        if ended is not None:
            self._peaks[ended] = max(self._peaks.get(ended, 0), peak)

    def take(self) -> dict[str, int]:
        """Return the peak bytes of each phase since the last call, if they are above 0."""
        peaks, self._peaks = self._peaks, {}
        return {phase: peaks[phase] for phase in PHASES if peaks.get(phase)}

    def read(self) -> Reading:
        """Return a reading of the device whose peaks include those before the resets."""
        reading = with_host(read(self.device), self.device)
        if reading.peak_allocated is None or reading.peak_reserved is None:
            return reading
        return replace(
            reading,
            peak_allocated=max(reading.peak_allocated, self._hidden_allocated),
            peak_reserved=max(reading.peak_reserved, self._hidden_reserved),
        )
