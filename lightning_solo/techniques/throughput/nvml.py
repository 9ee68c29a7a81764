"""A GPU's utilisation and throttling, by NVIDIA's management library where the package nvidia-ml-py is installed."""

from __future__ import annotations

import torch

from lightning_solo.machine import is_installed

POWER = 0x04 | 0x80
"""nvmlClocksEventReasonSwPowerCap and nvmlClocksThrottleReasonHwPowerBrakeSlowdown: a limit of power."""
HEAT = 0x20 | 0x40
"""nvmlClocksEventReasonSwThermalSlowdown and nvmlClocksThrottleReasonHwThermalSlowdown: too hot."""
OTHER = 0x08 | 0x200 | 0x400
"""nvmlClocksThrottleReasonHwSlowdown, BoardLimit and Reliability: slower, for one of these reasons or for another."""


class GpuState:
    """Reads a CUDA device's utilisation and throttling, until the first failure: the device may support neither."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._asks = device.type == "cuda" and is_installed("pynvml")

    def figures(self) -> dict[str, float]:
        """Return utilisation (the share of the last sample in which a kernel ran) and throttling, by logged key."""
        if not self._asks:
            return {}
        import pynvml

        try:
            used = torch.cuda.utilization(self.device) / 100
            handle = torch.cuda._get_pynvml_handler(self.device)
            reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        except (pynvml.NVMLError, RuntimeError, ImportError):
            self._asks = False
            return {}
        return {"throughput/utilization": used, **throttling(reasons)}


def throttling(reasons: int) -> dict[str, float]:
    """Return whether a GPU runs slower than it could (1.0), and why, by logged key, from NVML's bits.

    >>> throttling(0x01)  # idle: slow, but by choice
    {'throughput/throttled': 0.0, 'throughput/throttled_by_power': 0.0, 'throughput/throttled_by_heat': 0.0}
    """
    masks = {"throttled": POWER | HEAT | OTHER, "throttled_by_power": POWER, "throttled_by_heat": HEAT}
    return {f"throughput/{name}": float(bool(reasons & mask)) for name, mask in masks.items()}
