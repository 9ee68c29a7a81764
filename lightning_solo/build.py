"""Build objects and Trainer arguments from a configuration."""

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
    """Return the Trainer arguments that a preset needs, with ``devices=1`` unless it has an engine for several.

    Raises:
        CapabilityError: this machine lacks something that the preset needs.
        ConflictError: a callback of the preset is also among ``callbacks``.
        PresetError: ``lightning`` is none of its packages; a target, or one of ``callbacks``, is not a callback.
    """
    lightning = "lightning.pytorch" if lightning == "lightning" else lightning
    if lightning not in HOMES:
        raise PresetError(f"lightning={lightning!r}: must be one of {', '.join(map(repr, HOMES))}")
    check_machine(configuration, lightning)
    from lightning_solo.fitting import presets_that_fit
    from lightning_solo.guard import PresetGuard

    arguments: dict[str, Any] = {} if configuration.engine else {"devices": 1}
    for name in ("precision", "accumulate_grad_batches", "devices"):
        if (value := getattr(configuration, name)) is not None:
            arguments[name] = value
    if configuration.needs_cuda():
        arguments["accelerator"] = "cuda"
    if configuration.strategy is not None:
        arguments["strategy"] = built(configuration.strategy, lightning)
    ours = {part.option: built(part) for part in configuration.parts if part.option != "strategy"}
    for index, callback in enumerate(callbacks):
        _of_kind(callback, "callback", f"callbacks[{index}]")
    _refuse_twice(ours, callbacks)
    check = functools.partial(check_machine, lightning=lightning)
    advise = functools.partial(presets_that_fit, check=check, failed=configuration.preset)
    arguments["callbacks"] = [PresetGuard(arguments, advise, configuration), *ours.values(), *callbacks]
    return arguments


def build_callbacks(configuration: Configuration) -> list[Any]:
    """Return the callbacks of a configuration: techniques in the order of the preset, then targets."""
    return [built(part) for part in configuration.parts if part.option != "strategy"]


def built(part: Chosen | Target, lightning: str = "lightning.pytorch") -> Any:
    """Return the callback or strategy of a part of a configuration.

    Args:
        part: a technique with checked settings, or a target.
        lightning: the Trainer's package, for a strategy.

    Raises:
        PresetError: a target is defined outside the allowed prefixes, or is neither a callback nor a strategy.
    """
    kind = part.option.split(".")[0]
    if isinstance(part, Target):
        return _of_kind(instantiate(part.node, part.option, part.allow), kind, part.option)
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
            f"{part.card.target} takes no {', '.join(lacking)}, but its settings have that: add it to the constructor,"
            " or drop it from the settings"
        )
    return cls(**arguments)


def make(kind: str, node: Mapping[str, Any], *, allow: Sequence[str] = (), partial: bool = False) -> Any:
    """Return the model, data or optimizer of a checked node.

    Args:
        kind: ``"model"``, ``"data"`` or ``"optimizer"``.
        node: ``name`` or ``_target_``, and arguments, in plain containers.
        allow: prefixes of ``_target_`` that the user trusts.
        partial: return a function of the positional arguments (an optimizer's parameters).

    Raises:
        PresetError: a target is defined outside the allowed prefixes, or is of another kind; or the class of a name
            refuses an argument.
    """
    if "_target_" in node:
        return _of_kind(instantiate({**node, "_partial_": True} if partial else node, kind, allow), kind, kind)
    import torch  # which its class has imported

    cls = resolve_name(target_of(kind, node["name"], f"{kind}.name"))
    arguments = {key: value for key, value in node.items() if key != "name"}
    try:
        if not partial:
            return cls(**arguments)
        cls([torch.zeros(1, requires_grad=True)], **arguments)  # it checks its arguments only when it is made
    except ValueError as error:
        raise PresetError(f"{kind}: {error}") from error
    return functools.partial(cls, **arguments)


def _of_kind(thing: Any, kind: str, option: str) -> Any:
    """Return an object; refuse one that is not of Lightning's class for this kind."""
    expected = {"callback": "Callback", "strategy": "Strategy", "model": "LightningModule"}.get(kind)
    homes = ("lightning", "pytorch_lightning")
    parents = [cls.__name__ for cls in type(thing).__mro__ if cls.__module__.split(".")[0] in homes]
    if expected is not None and expected not in parents:
        raise PresetError(f"{option}: a {expected} of Lightning is needed, this is a {type(thing).__name__}")
    return thing


def _refuse_twice(ours: Mapping[str, Any], theirs: Sequence[Any]) -> None:
    kinds = {type(callback) for callback in theirs}
    for option, callback in ours.items():
        if type(callback) in kinds:
            name = type(callback).__name__
            raise ConflictError(
                f"callbacks=[{name}(...)] and the preset's own {name}: keep one; the override ~{option} removes the"
                " preset's"
            )
