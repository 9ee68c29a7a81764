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
        CapabilityError: a dependency is too old or malicious, or a CUDA device, native bf16 or a package is missing.
    """
    check_versions(lightning)
    for requirement, words in configuration.requirements():
        require(requirement, words)
    import torch

    wants_bf16 = configuration.precision in ("bf16-mixed", "bf16-true")
    if wants_bf16 and torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name()
        raise CapabilityError(
            f"precision={configuration.precision}: {name} has no native bf16 (Ampere or newer has); use the preset"
            " 'fp16'"
        )


def require(requirement: Requirement, words: str) -> None:
    """Refuse a machine that doesn't meet a requirement.

    Raises:
        CapabilityError: the message names what is missing, and has ``words`` as the remedy.
    """
    if requirement.kind == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise CapabilityError(f"no CUDA device on this machine: {words}")
    elif requirement.kind == "check":
        if missing := resolve_name(requirement.name)():
            raise CapabilityError(f"{words}: {missing}")
    elif requirement.kind == "compiler" and cxx_compiler() is None:
        raise CapabilityError(f"no C++ compiler on this machine: {words}")
    elif requirement.kind == "package":
        _require_package(PackageRequirement(requirement.name), words)


def _require_package(wanted: PackageRequirement, words: str) -> None:
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        raise CapabilityError(f'{wanted.name} is not installed: {words}; write: pip install "{wanted}"') from None
    if not wanted.specifier.contains(version, prereleases=True):
        raise CapabilityError(f'{wanted.name} {version} is installed: {words}; write: pip install "{wanted}"')


def check_versions(lightning: str = "lightning.pytorch") -> None:
    """Refuse dependencies outside the declared ranges, which exclude two malicious releases of lightning.

    Raises:
        CapabilityError: names the package, its version, the range and the command.
    """
    try:
        declared = importlib.metadata.requires("lightning-solo") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return
    if lightning == "pytorch_lightning":  # the other home has the same versions, the malicious ones too
        declared = [*declared, *(f"pytorch-{line}" for line in declared if re.match(r"lightning\b", line))]
    for requirement in map(PackageRequirement, declared):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:  # its user reports it
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            raise CapabilityError(
                f"{requirement.name} {version} is installed, lightning-solo needs {requirement.specifier}; "
                f'write: pip install "{requirement.name}{requirement.specifier}"'
            )
