"""From a configuration to objects and Trainer arguments, on a machine that can run it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pkgutil import resolve_name
from typing import Any

from lightning_solo.cards.configuration import Chosen, Configuration, Target
from lightning_solo.errors import ConflictError, PresetError
from lightning_solo.presets.registry import target_of
from lightning_solo.presets.signature import parameters_of_class
from lightning_solo.presets.targets import instantiate
from lightning_solo.requirements import check_machine

HOMES = ("lightning.pytorch", "pytorch_lightning")


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
    arguments["callbacks"] = [PresetGuard(arguments, advise), *ours, *callbacks]
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
    if issubclass(cls, type(part.settings)):
        return cls.from_settings(part.settings)
    arguments = {field.name: getattr(part.settings, field.name) for field in fields(part.settings)}
    accepted = parameters_of_class(cls)
    if accepted is not None and (lacking := [name for name in arguments if name not in accepted]):
        raise PresetError(
            f"{part.card.target} takes no {', '.join(lacking)}, which the settings on its card have: add what is"
            " missing to its constructor, or drop it from the settings"
        )
    return cls(**arguments)


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
        return _built_target({**node, "_partial_": True} if partial else node, kind, kind, allow)
    cls = resolve_name(target_of(kind, node["name"], f"{kind}.name"))
    arguments = {key: value for key, value in node.items() if key != "name"}
    return functools.partial(cls, **arguments) if partial else cls(**arguments)


def _built_target(node: Mapping[str, Any], kind: str, option: str, allow: Sequence[str]) -> Any:
    thing = instantiate(node, option, allow)
    _refuse_other_kind(thing, kind, option)
    return thing


def _refuse_other_kind(built: Any, kind: str, option: str) -> None:
    expected = {"callback": "Callback", "strategy": "Strategy", "model": "LightningModule"}.get(kind)
    homes = ("lightning", "pytorch_lightning")
    parents = [cls.__name__ for cls in type(built).__mro__ if cls.__module__.split(".")[0] in homes]
    if expected is not None and expected not in parents:
        raise PresetError(f"{option}: a {expected} of Lightning is needed, this is a {type(built).__name__}")


def _refuse_twice(built: Sequence[Any], callbacks: Sequence[Any]) -> None:
    for ours in built:
        if any(type(theirs) is type(ours) for theirs in callbacks):
            name = type(ours).__name__
            raise ConflictError(
                f"callbacks=[{name}(...)] and the preset's own {name}: keep one; "
                f"the preset's is removed by the override ~callback.<its name>"
            )
