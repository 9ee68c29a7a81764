"""From a configuration to objects and Trainer arguments, on a machine that can run it."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pkgutil import resolve_name
from typing import Any

from packaging.requirements import Requirement

from lightning_solo.cards.arguments import check_arguments
from lightning_solo.cards.card import Requirement as Need
from lightning_solo.cards.configuration import Chosen, Configuration, Target
from lightning_solo.errors import CapabilityError, ConflictError, PresetError, nearest
from lightning_solo.machine import cxx_compiler
from lightning_solo.presets.registry import is_allowed, refuse_foreign_targets, target_of
from lightning_solo.presets.signature import parameters_of_class

HOMES = ("lightning.pytorch", "pytorch_lightning")
_SPECIAL = ("_target_", "_args_", "_partial_", "_convert_", "_recursive_")  # Hydra's words in a node


def trainer_arguments(
    configuration: Configuration, *, callbacks: Sequence[Any] = (), lightning: str = "lightning.pytorch"
) -> dict[str, Any]:
    """Return the arguments for ``Trainer(**...)`` of the given home: only those the preset needs, and one device.

    Args:
        configuration: of a preset.
        callbacks: the user's own, appended to the preset's.
        lightning: the package whose Trainer will take the arguments, one of `HOMES` (or ``"lightning"``).

    Raises:
        CapabilityError: this machine lacks something that the preset needs.
        ConflictError: a callback of the preset is also among ``callbacks``.
        PresetError: ``lightning`` is not one of its two homes, a target or one of ``callbacks`` is not a callback.
    """
    lightning = "lightning.pytorch" if lightning == "lightning" else lightning
    if lightning not in HOMES:
        raise PresetError(f"lightning={lightning!r}: must be one of {', '.join(map(repr, HOMES))}")
    check_machine(configuration, lightning)
    from lightning_solo.fitting import presets_that_fit
    from lightning_solo.guard import PresetGuard

    arguments: dict[str, Any] = {"devices": 1}
    if configuration.precision is not None:
        arguments["precision"] = configuration.precision
    if configuration.accumulate_grad_batches is not None:
        arguments["accumulate_grad_batches"] = configuration.accumulate_grad_batches
    if configuration.needs_cuda():
        arguments["accelerator"] = "cuda"
    if configuration.strategy is not None:
        arguments["strategy"] = built(configuration.strategy, lightning)
    ours = build_callbacks(configuration)
    for index, callback in enumerate(callbacks):
        _refuse_other_kind(callback, "callback", f"callbacks[{index}]")
    _refuse_twice(ours, callbacks)
    advise = functools.partial(presets_that_fit, check=functools.partial(check_machine, lightning=lightning))
    arguments["callbacks"] = [PresetGuard({**arguments, "callbacks": ours}, advise, lightning), *ours, *callbacks]
    return arguments


def build_callbacks(configuration: Configuration) -> list[Any]:
    """Return the callbacks of a configuration: techniques in the order in which they are listed, then targets."""
    return [built(part) for part in configuration.parts if part.option != "strategy"]


def built(part: Chosen | Target, lightning: str = "lightning.pytorch") -> Any:
    """Return the callback or strategy that a part of a configuration describes.

    Args:
        part: with settings that are checked.
        lightning: the home of Lightning for which a strategy is made.

    Raises:
        PresetError: a target is defined outside the allowed prefixes, or is no callback or strategy.
    """
    kind = part.option.split(".")[0]
    if isinstance(part, Target):
        return _built_target(part.node, kind, part.option, part.allow)
    cls = resolve_name(part.card.target)
    if kind == "strategy":
        from lightning_solo.seams.homes import for_home

        cls = for_home(cls, lightning)
    arguments = {field.name: getattr(part.settings, field.name) for field in fields(part.settings)}
    accepted = parameters_of_class(cls)
    if accepted is not None and (lacking := [name for name in arguments if name not in accepted]):
        raise PresetError(
            f"{part.card.target} takes no {', '.join(lacking)}, which the settings on its card have: add what is"
            " missing to its constructor, or drop it from the settings"
        )
    return cls(**arguments)


def check_machine(configuration: Configuration, lightning: str = "lightning.pytorch") -> None:
    """Refuse a configuration that this machine can't run, before Lightning is imported.

    Raises:
        CapabilityError: a dependency too old or known as malicious, no CUDA device, no native bf16, no DeepSpeed.
    """
    check_versions(lightning)
    for chosen, requirement in configuration.unmet():
        require(requirement, chosen.settings)
    reason = configuration.needs_cuda()
    import torch

    cuda = torch.cuda.is_available()
    if reason and not cuda:
        raise CapabilityError(f"no CUDA device on this machine: {reason}")
    wants_bf16 = configuration.precision in ("bf16-mixed", "bf16-true")
    if cuda and wants_bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name()
        raise CapabilityError(
            f"precision={configuration.precision}: {name} has no native bf16 (Ampere or newer has); use the preset"
            " 'fp16'"
        )


def require(requirement: Need, settings: Any) -> None:
    """Refuse what this machine lacks for a technique; for a CUDA device `check_machine` does.

    Raises:
        CapabilityError: names what is missing and the remedy.
    """
    words = requirement.words(settings)
    if requirement.kind == "check":
        if missing := resolve_name(requirement.name)():
            raise CapabilityError(f"{words}: {missing}")
    elif requirement.kind == "compiler" and cxx_compiler() is None:
        raise CapabilityError(f"no C++ compiler on this machine: {words}")
    elif requirement.kind == "package":
        _require_package(Requirement(requirement.name), words)


def _require_package(wanted: Requirement, words: str) -> None:
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        raise CapabilityError(f'{wanted.name} is not installed: {words}; write: pip install "{wanted}"') from None
    if not wanted.specifier.contains(version, prereleases=True):
        raise CapabilityError(f'{wanted.name} {version} is installed: {words}; write: pip install "{wanted}"')


def check_versions(lightning: str = "lightning.pytorch") -> None:
    """Refuse dependencies outside the ranges that this package declares; two releases of lightning were malware.

    Raises:
        CapabilityError: names the package, its version, the range and the command.
    """
    try:
        declared = importlib.metadata.requires("lightning-solo") or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return
    if lightning == "pytorch_lightning":  # the other home has the same versions, the malicious ones too
        declared = [*declared, *(f"pytorch-{line}" for line in declared if re.match(r"lightning\b", line))]
    for requirement in map(Requirement, declared):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:  # reported where it is needed
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            raise CapabilityError(
                f"{requirement.name} {version} is installed, lightning-solo needs {requirement.specifier}; "
                f'write: pip install "{requirement.name}{requirement.specifier}"'
            )


def make(kind: str, node: Mapping[str, Any], *, allow: Sequence[str] = (), partial: bool = False) -> Any:
    """Return the model, data or optimizer that a checked node describes: a ``name``, or an allowed ``_target_``.

    Args:
        kind: ``"model"``, ``"data"`` or ``"optimizer"``.
        node: the arguments beside ``name`` or ``_target_``; plain containers.
        allow: prefixes that the user trusts.
        partial: return a function that still takes positional arguments (an optimizer's parameters).

    Raises:
        PresetError: a target is defined outside the allowed prefixes, or is of another kind.
    """
    if "_target_" in node:
        refuse_foreign_targets(node, kind, allow)
        return _built_target({**node, "_partial_": True} if partial else node, kind, kind, allow)
    cls = resolve_name(target_of(kind, node["name"], f"{kind}.name"))
    arguments = {key: value for key, value in node.items() if key != "name"}
    return functools.partial(cls, **arguments) if partial else cls(**arguments)


def _built_target(node: Mapping[str, Any], kind: str, option: str, allow: Sequence[str]) -> Any:
    thing = _instantiate(node, option, allow)
    _refuse_other_kind(thing, kind, option)
    return thing


def _instantiate(node: Any, option: str, allow: Sequence[str]) -> Any:
    """Return what a plain, checked tree describes: Hydra's `_target_`, `_args_` and `_partial_`, nothing resolved anew.

    Not `hydra.utils.instantiate`: it resolves interpolations once more, which could make a target after our check.
    """
    if isinstance(node, (list, tuple)):
        return [_instantiate(value, f"{option}[{index}]", allow) for index, value in enumerate(node)]
    if not isinstance(node, Mapping):
        return node
    arguments = {
        key: _instantiate(value, f"{option}.{key}", allow) for key, value in node.items() if key not in _SPECIAL
    }
    if "_target_" not in node:
        return arguments
    if "_recursive_" in node:
        raise PresetError(f"{option}._recursive_={node['_recursive_']!r}: not supported here; drop it")
    target = _allowed(str(node["_target_"]), option, allow)
    positional = _instantiate(list(node.get("_args_", ())), f"{option}._args_", allow)
    accepted = parameters_of_class(target)
    if accepted is not None and not positional and not node.get("_partial_"):
        check_arguments(arguments, accepted, option)
    if node.get("_partial_"):
        return functools.partial(target, *positional, **arguments)
    return target(*positional, **arguments)


def _allowed(target: str, option: str, allow: Sequence[str]) -> Any:
    """Return the object at a path; refuse ``my_project.os.system``: below an allowed name, but defined elsewhere."""
    thing = _locate(target, option)
    home = f"{getattr(thing, '__module__', None)}.{getattr(thing, '__qualname__', '')}"
    if not callable(thing) or not is_allowed(home, allow):
        raise PresetError(
            f"{option}._target_={target!r} is {home}, outside the allowed {', '.join(allow)}; "
            f"name it where it is defined, and allow that if you trust it"
        )
    return thing


def _refuse_other_kind(built: Any, kind: str, option: str) -> None:
    expected = {"callback": "Callback", "strategy": "Strategy", "model": "LightningModule"}.get(kind)
    homes = ("lightning", "pytorch_lightning")
    parents = [cls.__name__ for cls in type(built).__mro__ if cls.__module__.split(".")[0] in homes]
    if expected is not None and expected not in parents:
        raise PresetError(f"{option}: a {expected} of Lightning is needed, this is a {type(built).__name__}")


def _locate(target: str, option: str) -> Any:
    parts = target.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:depth])
        try:
            thing: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and not (module == error.name or module.startswith(error.name + ".")):
                raise  # the user's module exists, but one that it imports doesn't
            continue
        for name in parts[depth:]:
            if not hasattr(thing, name):
                raise PresetError(
                    f"{option}._target_={target!r}: {module} has no {name!r}{_instead(name, thing, parts[0])}"
                )
            thing = getattr(thing, name)
        return thing
    raise PresetError(
        f"{option}._target_={target!r}: there is no module {parts[0]!r}; install it, or run in the folder that has it"
    )


def _instead(name: str, thing: Any, package: str) -> str:
    """Return which of the package's own classes and functions in a module or class could be meant."""
    names = [
        own
        for own, value in getattr(thing, "__dict__", {}).items()
        if callable(value) and not own.startswith("_") and f"{value.__module__}.".startswith(f"{package}.")
    ]
    return f"{nearest(name, names)}there are {', '.join(sorted(names)[:20])}" if names else ""


def _refuse_twice(built: Sequence[Any], callbacks: Sequence[Any]) -> None:
    for ours in built:
        if any(type(theirs) is type(ours) for theirs in callbacks):
            name = type(ours).__name__
            raise ConflictError(
                f"callbacks=[{name}(...)] and the preset's own {name}: keep one; "
                f"the preset's is removed by the override ~callback.<its name>"
            )
