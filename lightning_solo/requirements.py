"""Checks that this machine can run a configuration: versions, packages, compiler, CUDA device."""

from __future__ import annotations

import importlib.metadata
import re
from pkgutil import resolve_name

from packaging.requirements import Requirement as PackageRequirement

from lightning_solo.cards.card import Requirement
from lightning_solo.cards.configuration import Configuration
from lightning_solo.errors import CapabilityError
from lightning_solo.machine import cxx_compiler


def check_machine(configuration: Configuration, lightning: str = "lightning.pytorch") -> None:
    """Refuse a configuration that this machine can't run, before Lightning is imported.

    Raises:
        CapabilityError: a dependency is too old or malicious, or a CUDA device, native bf16 or a package is missing;
            names all that is missing.
    """
    if missing := lacks(configuration, lightning):
        raise CapabilityError("\n".join(missing))


def lacks(configuration: Configuration, lightning: str = "lightning.pytorch") -> list[str]:
    """Return what this machine lacks to run a configuration, each with the remedy."""
    missing = outdated(lightning)
    for requirement, words in configuration.requirements():
        missing += filter(None, [lack(requirement, words)])
    import torch

    wants_bf16 = configuration.precision in ("bf16-mixed", "bf16-true")
    if wants_bf16 and torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        missing.append(
            f"precision={configuration.precision}: {torch.cuda.get_device_name()} has no native bf16 (Ampere or newer"
            " has); use the preset 'fp16'"
        )
    return missing


def missing_packages(configuration: Configuration) -> list[str]:
    """Return the packages that a configuration needs and this machine lacks, each with the remedy."""
    needs = [(each, words) for each, words in configuration.requirements() if each.kind == "package"]
    return [text for each, words in needs if (text := lack(each, words)) is not None]


def lack(requirement: Requirement, words: str) -> str | None:
    """Return what this machine lacks to meet a requirement, with ``words`` as the remedy; None if it meets it."""
    if requirement.kind == "cuda":
        import torch

        return None if torch.cuda.is_available() else f"no CUDA device on this machine: {words}"
    if requirement.kind == "check":
        missing = resolve_name(requirement.name)()
        return f"{words}: {missing}" if missing else None
    if requirement.kind == "compiler":
        return None if cxx_compiler() else f"no C++ compiler on this machine: {words}"
    wanted = PackageRequirement(requirement.name)
    version = installed(wanted.name)
    if version is not None and wanted.specifier.contains(version, prereleases=True):
        return None
    found = "is not installed" if version is None else f"{version} is installed"
    return f'{wanted.name} {found}: {words}; write: pip install "{wanted}"'


def installed(package: str) -> str | None:
    """Return the version of an installed package; None if it isn't installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def outdated(lightning: str = "lightning.pytorch") -> list[str]:
    """Return a message for each dependency outside its declared range, which excludes two malicious releases.

    The message names the package, its version, the range and the command.
    """
    try:
        declared = importlib.metadata.requires("lightning-solo") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return []
    if lightning == "pytorch_lightning":  # the other home has the same versions, the malicious ones too
        declared = [*declared, *(f"pytorch-{line}" for line in declared if re.match(r"lightning\b", line))]
    messages = []
    for wanted in map(PackageRequirement, declared):
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        version = installed(wanted.name)  # the user of a missing package reports it
        if version is not None and not wanted.specifier.contains(version, prereleases=True):
            messages.append(
                f"{wanted.name} {version} is installed, lightning-solo needs {wanted.specifier}; "
                f'write: pip install "{wanted.name}{wanted.specifier}"'
            )
    return messages
