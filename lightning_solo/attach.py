"""The public functions: `trainer_kwargs` and `callbacks` attach a preset, `show` and `list_presets` describe them."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from omegaconf import OmegaConf

from lightning_solo.build import build_callbacks, trainer_arguments
from lightning_solo.cards.catalogue import catalogue
from lightning_solo.cards.configuration import Chosen
from lightning_solo.errors import PresetError, nearest
from lightning_solo.presets.compose import Preset, compose, compose_yaml, refusal_of
from lightning_solo.presets.config_source import UNSET
from lightning_solo.presets.files import descriptions, preset_files
from lightning_solo.presets.parse import TRAINER, unknown_field
from lightning_solo.presets.signature import parameters
from lightning_solo.presets.spelling import written
from lightning_solo.requirements import check_machine


def trainer_kwargs(
    preset: Preset,
    overrides: Sequence[str] = (),
    *,
    callbacks: Any = (),
    allow: Sequence[str] = (),
    lightning: str = "lightning.pytorch",
    module: Any = None,
    batch: Any = None,
    trainer: Mapping[str, Any] | None = None,
    **arguments: NoReturn,
) -> dict[str, Any]:
    """Return the Trainer arguments of a preset: ``L.Trainer(**trainer_kwargs("bf16"))``.

    They are the arguments that the preset needs, and ``devices=1`` unless it is for several devices. Python refuses an
    argument that is passed twice. If a merged mapping has replaced one, the run is refused when it starts. If it has
    replaced ``callbacks``, nothing notices it, and the preset's techniques are gone: pass yours as ``callbacks``, or
    use `solo.trainer`.

    Args:
        preset: a name of `list_presets`, several names as ``["compact", "checkpointing"]``, or the fields themselves
            (a Hydra application's ``cfg.solo``).
        overrides: Hydra overrides without a prefix: ``["precision=32-true", "+callback=throughput"]``.
        callbacks: your own callbacks, one or several; they follow the preset's.
        allow: prefixes of the ``_target_`` entries that you trust, such as ``["my_project"]``.
        lightning: the package of your Trainer, ``"lightning.pytorch"`` or ``"pytorch_lightning"``.
        module: for ``auto`` only: the module to train; it is not changed.
        batch: for ``auto`` only: one micro-batch for ``training_step``, or a data module, whose first batch is taken;
            by default the first batch of the module's ``train_dataloader``.
        trainer: for ``auto`` only: your other Trainer arguments, such as ``{"gradient_clip_val": 1.0}``.
        arguments: refused; pass the Trainer's own to `lightning_solo.trainer`.

    Raises:
        BudgetError: ``auto`` finds no preset that fits.
        PlanError: ``auto`` can't plan the module.
        PresetError: an unknown preset, field or argument, or an impossible value.
        ConflictError: two choices that cannot be combined.
        CapabilityError: this machine lacks what the preset needs.
    """
    refused: Mapping[str, object] = arguments
    for name, value in refused.items():
        raise PresetError(_unknown_argument(trainer_kwargs, name, value, preset, overrides, allow))
    if not isinstance(callbacks, Sequence):  # the Trainer takes one, too
        callbacks = [] if callbacks is None else [callbacks]
    configuration = compose(preset, overrides, allow=allow)
    if configuration.auto is not None:
        if module is None:
            raise PresetError(
                "preset auto plans your module: write module=module as an argument, and batch=datamodule if the module"
                " has no train_dataloader"
            )
        from lightning_solo.planner.auto import choose
        from lightning_solo.planner.plan_check import PlanCheck

        check = functools.partial(check_machine, lightning=lightning)
        _, configuration, plan = choose(configuration, module, batch, check=check, trainer=trainer, allow=allow)
        callbacks = [*callbacks, PlanCheck(plan)]
    return trainer_arguments(configuration, callbacks=callbacks, lightning=lightning)


def _unknown_argument(
    of: Callable[..., Any], name: str, value: object, preset: Preset, overrides: Sequence[str], allow: Sequence[str]
) -> str:
    """Return the message for an argument that `trainer_kwargs` or `callbacks` doesn't take."""
    own = [each for each in inspect.signature(of).parameters if each != "arguments"]
    is_plain = isinstance(value, str | int | float | list | tuple | None)
    keyword, words = f"{name}={value!r}" if is_plain else f"{name}=...", f"{of.__name__} has no such argument"
    chosen = "cfg.solo" if isinstance(preset, Mapping) else repr(preset)
    if name in ("precision", "accumulate_grad_batches", "devices") or (
        name == "strategy" and value in catalogue().group(name)
    ):
        added = f"{'+' if name == 'strategy' else ''}{name}={written(value)}"
        if error := refusal_of(preset, [*overrides, added], allow):
            return f"{keyword}: {words}, and the preset refuses the override {added!r}: {error}"
        return f"{keyword}: {words}; write trainer_kwargs({chosen}, overrides={[*overrides, added]})"
    if name == "num_nodes":
        return unknown_field(name, value)
    if name in parameters(TRAINER):
        return f"{keyword}: {words}, but a Trainer has; write solo.trainer({{}}, {chosen}, {keyword})"
    return f"{keyword}: {words}{nearest(name, [*own, *parameters(TRAINER)])}there are {', '.join(own)}"


def callbacks(
    preset: Preset,
    overrides: Sequence[str] = (),
    *,
    allow: Sequence[str] = (),
    **arguments: NoReturn,
) -> list[Any]:
    """Return a preset's callbacks for an existing Trainer: ``trainer.callbacks += solo.callbacks("bf16")``.

    Warns of settings that only the Trainer's constructor takes, such as precision and strategy.

    Raises:
        PresetError, ConflictError, CapabilityError: as `trainer_kwargs`.
    """
    refused: Mapping[str, object] = arguments
    for name, value in refused.items():
        raise PresetError(_unknown_argument(callbacks, name, value, preset, overrides, allow))
    configuration = compose(preset, overrides, allow=allow)
    if configuration.auto is not None:
        raise PresetError(
            "preset auto needs a module when the Trainer is constructed; write"
            ' L.Trainer(**trainer_kwargs("auto", module=module, batch=datamodule))'
        )
    check_machine(configuration)
    carried = {name: getattr(configuration, name) for name in UNSET}
    if strategy := configuration.strategy:
        carried["strategy"] = strategy.card.name if isinstance(strategy, Chosen) else "yours"
    lost = [f"{name}={value!r}" for name, value in carried.items() if value is not None]
    if lost:
        name = "given" if isinstance(preset, Mapping) else repr(preset)
        warnings.warn(
            f"preset {name}: only the Trainer's constructor takes {', '.join(lost)}; write"
            f" L.Trainer(**trainer_kwargs({name}))",
            stacklevel=2,
        )
    return build_callbacks(configuration)


def list_presets() -> list[str]:
    """Return the names of all presets: ours, and yours in ``./conf/solo/``."""
    return sorted(preset_files())


def show(preset: str | Sequence[str], overrides: Sequence[str] = ()) -> str:
    """Return one or several presets as composed YAML, after a comment with the purpose of each.

    Raises:
        PresetError: unknown preset or override.
    """
    fields = compose_yaml(preset, overrides)
    composed = {key: value for key, value in fields.items() if value not in (None, {})}
    heads = "".join(f"# {line}\n" for line in descriptions(preset))
    return f"{heads}{OmegaConf.to_yaml(OmegaConf.create(composed))}"
