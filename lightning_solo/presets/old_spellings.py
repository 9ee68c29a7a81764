"""Presets of earlier versions, and what to write instead."""

from __future__ import annotations

from lightning_solo.errors import PresetError

_OFFLOADING = "write compact_host, which keeps states on the host too, or zero_offload"
PRESETS = {  # name -> remedy
    "super_offload": _OFFLOADING,
    "zenflow": _OFFLOADING,
}


def refuse_old_preset(name: str) -> None:
    """Refuse a preset that an earlier version had; do nothing for other names.

    Raises:
        PresetError: names what to write instead.
    """
    if name in PRESETS:
        raise PresetError(f"preset {name!r} is of an earlier version; {PRESETS[name]}")
