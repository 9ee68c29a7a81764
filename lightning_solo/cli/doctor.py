"""`lightning-solo doctor`: prints this machine's tools and what presets lack; --build compiles DeepSpeed extensions."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lightning_solo.errors import CapabilityError, PresetError, SoloError
from lightning_solo.machine import (
    PACKAGES,
    code_folders,
    cxx_compiler,
    host_memory,
    is_private,
    ninja_executable,
    nvidia_driver,
    nvidia_gpus,
    others_may_write,
    versions,
)
from lightning_solo.presets.compose import compose
from lightning_solo.presets.files import preset_files
from lightning_solo.presets.spelling import on_command_line
from lightning_solo.requirements import lacks
from lightning_solo.sweeps.gpus import VISIBLE, gpus_of
from lightning_solo.sweeps.jobs import Settings
from lightning_solo.tables import Cell, Table, terminal
from lightning_solo.units import format_bytes


def run(arguments: Sequence[str]) -> int:
    """Print what this machine has, then a line per preset; return 0 even if presets lack something.

    ``--build`` compiles the extensions that DeepSpeed would compile at first use; it returns 1 if one can't be built.
    """
    if list(arguments) == ["--build"]:
        return build()
    if arguments:
        raise PresetError(f"doctor takes --build or nothing, got {' '.join(arguments)!r}")
    machine = {**dict.fromkeys(PACKAGES, "not installed"), **versions(), **hardware(), **gpus(), **tools(), **unsafe()}
    presets = {name: lacking(name) or "ready" for name in sorted(preset_files())}
    console = Console()
    console.print(terminal(table("", ("", " "), machine), (" ",), headings=False))
    console.print()
    console.print(terminal(table("presets", ("preset", "here"), presets), ("here",)))
    return 0


def table(caption: str, headings: tuple[str, str], texts: dict[str, str]) -> Table:
    """Return a table of names and texts."""
    return Table(caption, headings, [(Cell(name, style="bold"), Cell(text)) for name, text in texts.items()])


def build() -> int:
    """Build DeepSpeed's extensions, print a line for each, and return 1 if one can't be built, else 0."""
    from lightning_solo.zero.extension import BUILDERS, is_built, load_extension

    failed = 0
    for name in BUILDERS:
        try:
            before = is_built(name)
            file = load_extension(name).__file__
            print(f"{name}: {'was built before' if before else 'built'}, {file}")
        except CapabilityError as error:
            failed = 1
            print(f"{name}: {error}")
    return failed


def hardware() -> dict[str, str]:
    """Return descriptions of processor, memory, disk and CUDA device."""
    import torch

    total, available = host_memory()
    disk = shutil.disk_usage(Path.cwd())
    found = {
        "cpu": f"{os.cpu_count()} cores, {platform.machine()}",
        "host memory": f"{format_bytes(available)} available of {format_bytes(total)}",
        "disk here": f"{format_bytes(disk.free)} free of {format_bytes(disk.total)}",
    }
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        return {**found, "gpu": f"none ({built})"}
    properties = torch.cuda.get_device_properties(0)
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    return {
        **found,
        "gpu": f"{properties.name}, {format_bytes(properties.total_memory)}, sm_{properties.major}{properties.minor}",
        "driver": nvidia_driver() or "unknown",
        "CUDA of torch": str(torch.version.cuda),
        "cuDNN of torch": cudnn_version() or "none",
        "native bf16": "yes" if native else "no: use fp16",
    }


def gpus() -> dict[str, str]:
    """Return a line for each GPU of a machine with several, and one for CUDA_VISIBLE_DEVICES if it is set."""
    present, variable = nvidia_gpus(), os.environ.get(VISIBLE)
    lines = {}
    for gpu in present if len(present) > 1 else ():
        memory = "" if gpu.free_bytes is None else f", {format_bytes(gpu.free_bytes)} free"
        lines[f"GPU {gpu.number}" if gpu.number else gpu.name] = f"{gpu.name}, {gpu.uuid}{memory}"
    if variable is not None:
        try:
            entries = gpus_of(Settings(gpus="auto"), variable, present)
            lines[VISIBLE] = f"{variable} ({len(entries)} of {len(present)} GPUs)" if present else variable
        except SoloError as error:
            lines[VISIBLE] = str(error)
    return lines


def cudnn_version() -> str:
    """Return the version of cuDNN that torch uses, such as ``9.10.2``; empty without cuDNN."""
    import torch

    number = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    # 8.9.2 is 8902; from 9 on, 9.10.2 is 91002
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}" if number else ""


def tools() -> dict[str, str]:
    """Return descriptions of the compiler, ninja and DeepSpeed's extensions."""
    from lightning_solo.zero.extension import is_built, what_is_missing

    def state(extension: str) -> str:
        if missing := what_is_missing(extension):
            return missing
        return "built" if is_built(extension) else "can be built: lightning-solo doctor --build"

    return {
        "C++ compiler": cxx_compiler() or "none: torch.compile and DeepSpeed's extensions need one",
        "ninja": ninja_executable() or "none: DeepSpeed's extensions need it; pip install ninja",
        "DeepSpeed's CPUAdam": state("cpu_adam"),
        "its disk I/O (NVMe)": state("async_io"),
    }


def unsafe() -> dict[str, str]:
    """Return a line for each folder of compiled code, which processes run, into which other users may write."""
    return {
        f"unsafe: {variable}": others_may_write(folder, variable)
        for variable, folder in code_folders().items()
        if folder.is_dir() and not is_private(folder)
    }


def lacking(preset: str) -> str:
    """Return all that this machine lacks to run a preset, or why the preset is refused; empty if it can run it."""
    try:
        missing = lacks(compose(preset))
    except SoloError as error:
        missing = [str(error)]
    return on_command_line("\n".join(missing))
