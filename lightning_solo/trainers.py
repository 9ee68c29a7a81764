"""Create a Trainer from a configuration of its arguments and a preset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lightning_solo.attach import trainer_kwargs
from lightning_solo.build import HOMES
from lightning_solo.cards.arguments import Parameter, check_arguments
from lightning_solo.errors import ConflictError, PresetError
from lightning_solo.presets import old_spellings
from lightning_solo.presets.compose import Preset, compose, composes
from lightning_solo.presets.parse import PRECISIONS, contradiction, overriding, refuse_foreign_targets, targets
from lightning_solo.presets.signature import parameters
from lightning_solo.presets.targets import instantiate

TARGETS = {
    f"{home}.{path}": home for home in HOMES for path in ("Trainer", "trainer.Trainer", "trainer.trainer.Trainer")
}
TARGETS["lightning.Trainer"] = "lightning.pytorch"
"""Target of a Trainer -> its home."""

TRUSTED = tuple(
    f"{home}.{room}" for home in HOMES for room in ("callbacks", "loggers", "plugins", "profilers", "strategies")
)
"""Prefixes of the objects that a Trainer takes; not all of Lightning, which has functions that load any pickle."""


def trainer(
    config: Mapping[str, Any],
    preset: Preset,
    overrides: Sequence[str] = (),
    *,
    callbacks: Sequence[Any] = (),
    allow: Sequence[str] = (),
    module: Any = None,
    batch: Any = None,
    **arguments: Any,
) -> Any:
    """Return the Trainer of a configuration and a preset: ``solo.trainer(cfg.trainer, cfg.solo)``.

    Use it instead of ``hydra.utils.instantiate(cfg.trainer, **trainer_kwargs(cfg.solo))``, where the preset silently
    replaces values of ``cfg.trainer``.

    Args:
        config: arguments of the Trainer, a mapping or a `DictConfig`. Its ``_target_``, if it has one, is a Trainer of
            ``lightning`` or ``pytorch_lightning``. A value of None counts as not set. Lightning's callbacks,
            loggers, plugins, profilers and strategies may be nodes with a ``_target_``; others only if ``allow`` has
            their prefix.
        preset: as in `trainer_kwargs`.
        overrides: of the preset, as in `trainer_kwargs`.
        callbacks: added after those of the preset and of ``config``.
        allow: prefixes of the ``_target_`` entries that you trust, such as ``["my_project"]``.
        module: for ``auto`` only, as in `trainer_kwargs`.
        batch: for ``auto`` only, as in `trainer_kwargs`.
        arguments: further arguments of the Trainer, such as a logger that is already an object.

    Raises:
        ConflictError: ``config`` or ``arguments`` set what the preset sets, to another value.
        PresetError: the ``_target_`` is not a Trainer, an argument is given twice, or as `trainer_kwargs`.
        BudgetError, CapabilityError, PlanError: as `trainer_kwargs`.
    """
    fields: Any = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else dict(config)
    target = fields.pop("_target_", "lightning.pytorch.Trainer")
    if target not in TARGETS:
        raise PresetError(f"trainer._target_={target!r}: must be one of {', '.join(sorted(TARGETS))}")
    home = TARGETS[target]
    if twice := sorted(fields.keys() & arguments.keys()):
        raise PresetError(f"{twice[0]} is in the Trainer's configuration and an argument of solo.trainer: drop one")
    refuse_foreign_targets(fields, "trainer", [*TRUSTED, *allow])
    cls = resolve_name(f"{home}:Trainer")
    fields = {name: value for name, value in fields.items() if value is not None}
    check_arguments({**fields, **arguments}, _accepted(home, fields, arguments), "trainer")
    if old := old_spellings.refusal_of_argument({**fields, **arguments}.get("strategy")):
        raise PresetError(old)
    given = {**instantiate(fields, "trainer", [*TRUSTED, *allow]), **arguments}
    listed = [*_listed(given.pop("callbacks", None)), *callbacks]
    plain = {name: value for name, value in given.items() if value is not None}
    ours = trainer_kwargs(
        preset, overrides, callbacks=listed, allow=allow, lightning=home, module=module, batch=batch, trainer=plain
    )
    return cls(**{**given, **merged(plain, ours, preset, overrides, allow)})


def _accepted(home: str, fields: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Parameter]:
    """Return the arguments of a home's Trainer; ``arguments``, and objects in ``fields``, accept any value."""
    objects = {name for name, value in fields.items() if name == "callbacks" or any(targets(value, name))}
    objects |= arguments.keys()
    return {
        name: Parameter(Any, parameter.default) if name in objects else parameter
        for name, parameter in parameters(f"{home}.trainer.trainer:Trainer").items()
    }


def merged(
    given: Mapping[str, Any],
    ours: Mapping[str, Any],
    preset: Preset,
    overrides: Sequence[str] = (),
    allow: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a Trainer's arguments, merged from the user's (``given``) and a preset's (``ours``).

    ``devices=[2]`` and the accelerator ``"gpu"`` agree with the preset's ``devices=1`` and ``accelerator="cuda"``. The
    value ``"auto"`` leaves the choice to the preset.

    Raises:
        ConflictError: both set an argument, to different values.
    """
    arguments = {**given, **ours}
    for name in given.keys() & ours.keys() - {"callbacks"}:
        value = given[name]
        if value == "auto" or _long(name, value) == _long(name, ours[name]):
            continue
        if name == "devices":
            if _count_of(value) != ours[name]:
                configuration = compose(preset, overrides, allow=allow)
                if not configuration.engine:
                    raise ConflictError(configuration.one_device(f"trainer.devices={value!r}"))
                raise ConflictError(contradiction(name, value, ours[name], accepted=False))
            arguments[name] = value
        elif (name, value, ours[name]) != ("accelerator", "gpu", "cuda"):
            accepted = composes(preset, [*overrides, overriding(name, value)], allow)
            application = isinstance(preset, Mapping) and HydraConfig.initialized()
            raise ConflictError(contradiction(name, value, ours[name], accepted, application))
    return arguments


def _listed(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    if isinstance(callbacks, Mapping):
        return list(callbacks.values())
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def _long(name: str, value: Any) -> Any:
    return PRECISIONS.get(str(value), value) if name == "precision" else value


def _count_of(value: Any) -> int | None:
    """Return how many devices Lightning takes for ``devices``: 1 for ``1``, ``"1"``, ``[2]`` and ``"2,"``."""
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()] if "," in value else value.strip()
        value = int(value) if isinstance(value, str) and value.isdigit() else value
    return len(value) if isinstance(value, (list, tuple)) else value if isinstance(value, int) else None
