"""Devices for plans, which need not be on this machine: their memory, speeds, and the memory that CUDA takes.

The figures and their sources are in ``conf/library/solo/device/<name>.yaml``. A user's devices, and better figures for
one of ours, are in ``./conf/solo/device/<name>.yaml``.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_solo.errors import PresetError, nearest
from lightning_solo.machine import host_memory
from lightning_solo.presets.files import conf_folder, user_conf_folder
from lightning_solo.units import format_bytes, parse_budget

CPU = "cpu"
FP16_SUMS = "fp16_accumulate"
"""Kind of the products in fp16 whose sums are in fp16; a file without it means the speed of sums in fp32."""
KINDS = (FP16_SUMS, "bf16", "fp16", "tf32", "fp32", "fp64")


def _is_speed(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _are_speeds(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_speed, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


_SPEED, _SIZE = "a number above 0, in bytes per second", "an integer of at least 0, in bytes"
_FLOPS = "{bf16: 165.2e12, fp16: 165.2e12, tf32: 82.6e12, fp32: 82.6e12, fp64: 1.29e12}"
FIELDS: dict[str, tuple[Callable[[Any], bool], str, object]] = {
    "label": (_is_text, "a text", "NVIDIA GeForce RTX 4090"),
    "memory_bytes": (lambda value: _is_size(value) and value > 0, "an integer of at least 1, in bytes", 25253904384),
    "memory_bandwidth": (_is_speed, _SPEED, 1.008e12),
    "host_bandwidth": (_is_speed, _SPEED, 2.5e10),
    "flops": (lambda value: isinstance(value, dict), "a mapping", _FLOPS),
    "context_bytes": (_is_size, _SIZE, 503316480),
    "workspace_bytes": (_is_size, _SIZE, 8519680),
    "source": (_is_text, "a text", "https://www.nvidia.com/..."),
}
"""Field of a device's file -> check of its value, the allowed values in words, an example."""
OPTIONAL: dict[str, tuple[Callable[[Any], bool], str, object]] = {
    "host_bandwidth_both": (_are_speeds, "two numbers above 0, in bytes per second, up and down", "[1.2e10, 2.4e10]"),
    "host_memory_bandwidth": (_is_speed, _SPEED, 7.0e10),
}
"""Fields that a file may leave out."""
FLOPS_REACHED, BANDWIDTH_REACHED = 0.70, 0.80  # shares of the peaks; set once, not fitted
MAKERS = ("nvidia", "geforce", "tesla", "gpu")  # words that a name may leave out


@dataclass(frozen=True)
class Device:
    """The figures of a device that a plan needs."""

    name: str  # stem of its file; without a file, ``cpu`` or a name derived from the label
    label: str  # the name that ``torch.cuda.get_device_name`` returns
    memory_bytes: int  # ``total_memory`` of ``torch.cuda.get_device_properties(0)``, less than the advertised memory
    memory_bandwidth: float  # peak bytes per second
    host_bandwidth: float  # bytes per second that copies to or from the host reach
    # peak dense floating-point operations per second for bf16, fp16, tf32, fp32 and fp64, with sums in fp32 or more,
    # and for fp16 with sums in fp16; None for a kind that the device doesn't have
    flops: Mapping[str, float | None]
    context_bytes: int  # CUDA's context and loaded kernels, outside torch's allocator
    workspace_bytes: int  # cuBLAS' workspace, inside torch's allocator
    source: str  # of the figures
    # bytes per second to the device, and of those to the host, while both directions copy; None if one doesn't slow the
    # other
    host_bandwidth_both: Sequence[float] | None = None
    # bytes per second that both directions together read and write of host memory; None for no limit
    host_memory_bandwidth: float | None = None
    # share of each of ``flops`` that a matrix product reaches
    flops_reached: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(KINDS, FLOPS_REACHED))
    bandwidth_reached: float = BANDWIDTH_REACHED  # share of ``memory_bandwidth`` that a copy reaches
    # date on which the shares, the host's bandwidths and the constants were measured; None if they weren't
    calibrated: str | None = None

    def copy_speeds(self) -> tuple[float, tuple[float, float]]:
        """Return bytes per second of one copy at a time, and of those to the device and to the host at once."""
        limit = self.host_memory_bandwidth or math.inf
        alone = min(self.host_bandwidth, limit)
        up, down = (min(speed, alone) for speed in self.host_bandwidth_both or (alone, alone))
        share = min(1.0, limit / (up + down))
        return alone, (share * up, share * down)


def devices() -> list[str]:
    """Return the names of the devices that a plan can be for; `cpu` is this machine's."""
    return [*_files(), *([] if CPU in _files() else [CPU])]


def device(name: str, option: str = "device") -> Device:
    """Return a device by the name of its file or by that of the GPU: ``rtx-4090``, ``NVIDIA GeForce RTX 4090``.

    Raises:
        PresetError: an unknown name, or a file that can't be read or lacks a field.
    """
    if isinstance(name, str) and (known := find(name)) is not None:
        return known
    names, wanted = devices(), file_name(str(name))
    close = nearest(wanted, [known for known in names if known.startswith(wanted)] or names)  # of an a100, not the h100
    raise PresetError(
        f"{option}={name!r}: no device of that name{close}there are {', '.join(names)}. "
        f"For another one write conf/solo/device/<name>.yaml with {', '.join(FIELDS)}"
    )


def budget_bytes(given: str | int | float | None, option: str = "budget") -> int | None:
    """Return the bytes of an option; None stands for a missing option.

    Raises:
        PresetError: neither a size such as ``16GiB`` nor at least 1 MiB in bytes.
    """
    try:
        return None if given is None else parse_budget(given)
    except ValueError as error:
        raise PresetError(f"{option}={error}") from error


def budget_on(on: Device, budget: int | None, given: str) -> int:
    """Return the budget; for None return all of the device's memory.

    Raises:
        PresetError: the device has less memory than the budget.
    """
    if budget is not None and budget > on.memory_bytes:
        raise PresetError(
            f"{given}: {on.label} has {format_bytes(on.memory_bytes)}; write less, or drop it for all of that"
        )
    return budget or on.memory_bytes


def file_name(name: str) -> str:
    """Return the stem of a device's file.

    >>> file_name("NVIDIA GeForce RTX 4090"), file_name("rtx-4090")
    ('rtx_4090', 'rtx_4090')
    """
    return "_".join(_words(name))


def find(name: str) -> Device | None:
    """Return the device with the name of its file or GPU, or None."""
    files, key = _files(), _key(name)
    if not key:
        return None
    for stem, path in files.items():
        if _key(stem) == key:
            return _read(stem, path)
    if key == CPU:
        return _cpu()
    return next((known for known in (_read(*file) for file in files.items()) if _key(known.label) == key), None)


def _files() -> dict[str, Path]:
    """Return the file of every device by name; a user's file replaces ours."""
    folders = [conf_folder() / "library" / "solo" / "device", (user_conf_folder() or Path()) / "solo" / "device"]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def _words(name: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9]+", name.lower()) if word not in MAKERS]


def _key(name: str) -> str:
    return "".join(_words(name))


def _cpu() -> Device:
    """Return this machine's CPU. Its speeds are guesses for a few desktop cores, the same for most precisions."""
    flops = {FP16_SUMS: None, "bf16": 4e11, "fp16": 4e11, "tf32": None, "fp32": 4e11, "fp64": 2e11}
    source = "memory of this host; the speeds are guesses, good for the order of presets only"
    return Device(CPU, "CPU", host_memory()[0], 4e10, 4e10, flops, 0, 0, source)


def _read(name: str, path: Path) -> Device:
    """Return the device in a file; check each field."""
    where = f"device {name!r}: {path}"
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise PresetError(f"{where} can't be read: {error}") from error
    if not isinstance(values, dict) or not values:
        raise PresetError(f"{where}: must hold a mapping of the fields {', '.join(FIELDS)}")
    _check_names(values, tuple(FIELDS), where, "a device has", optional=tuple(OPTIONAL))
    for field, (is_right, expected, example) in {**FIELDS, **OPTIONAL}.items():
        if field in values and not is_right(values[field]):
            raise PresetError(f"{where}: {field}={values[field]!r}: must be {expected}, such as {example}")
    flops = values["flops"]
    _check_names(flops, KINDS[1:], where, "flops are those of", "flops.", optional=(FP16_SUMS,))
    for kind, speed in flops.items():
        if not _is_speed(speed) and (speed is not None or kind == "fp32"):
            raise PresetError(
                f"{where}: flops.{kind}={speed!r}: must be a number above 0, in operations per second, such as 82.6e12"
            )
    fields = {**values, "flops": {kind: flops.get(kind, flops["fp16"]) for kind in KINDS}}
    return Device(name=name, **fields)


def _check_names(
    values: Mapping[Any, Any],
    fields: tuple[str, ...],
    where: str,
    what: str,
    prefix: str = "",
    optional: tuple[str, ...] = (),
) -> None:
    allowed = (*fields, *optional)
    for field, value in values.items():
        if field not in allowed:
            raise PresetError(
                f"{where}: {prefix}{field}={value!r}: no such field{nearest(str(field), allowed)}"
                f"{what} {', '.join(allowed)}"
            )
    for field in fields:
        if field not in values:
            example = FIELDS[field][2] if field in FIELDS else "null, or a number such as 82.6e12"
            raise PresetError(f"{where}: no {prefix}{field}; write {field}: {example}")
