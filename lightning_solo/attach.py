"""The public calls: `trainer_kwargs` and `callbacks` attach a preset, `show` prints it, `list_presets` names all."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from lightning_solo.build import build_callbacks, trainer_arguments
from lightning_solo.cards.configuration import Chosen
from lightning_solo.errors import PresetError
from lightning_solo.presets.compose import Preset, compose, compose_yaml
from lightning_solo.presets.files import descriptions, preset_files
from lightning_solo.presets.overrides import parse_overrides
from lightning_solo.requirements import check_machine


def trainer_kwargs(
    preset: Preset,
    overrides: Sequence[str] = (),
    *,
    callbacks: Sequence[Any] = (),
    allow: Sequence[str] = (),
    lightning: str = "lightning.pytorch",
    module: Any = None,
    batch: Any = None,
    trainer: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the arguments with which a Trainer trains under a preset: ``L.Trainer(**trainer_kwargs("bf16"))``.

    It holds only the arguments that the preset needs, and always ``devices=1``. Python refuses an argument that is
    given twice; a run is refused at its start if a merged mapping has replaced one.

    Args:
        preset: a name of `list_presets`, several of them as ``["compact", "checkpointing"]``, or the fields themselves
            (a Hydra application's ``cfg.solo``).
        overrides: Hydra overrides without a prefix: ``["precision=32-true", "+callback=throughput"]``.
        callbacks: your own, appended behind the preset's.
        allow: prefixes of the ``_target_`` entries that you trust, such as ``["my_project"]``.
        lightning: the home of your Trainer, ``"lightning.pytorch"`` or ``"pytorch_lightning"``.
        module: for ``auto`` only: what will be trained; it is left as it is.
        batch: for ``auto`` only: one micro-batch, as ``training_step`` takes it; without it the first of the module's
            own ``train_dataloader``.
        trainer: for ``auto`` only: your other arguments of the Trainer, such as ``{"gradient_clip_val": 1.0}``.

    Raises:
        BudgetError: ``auto``: no preset fits.
        PlanError: ``auto``: the module can't be planned.
        PresetError: an unknown preset, field or argument, or an impossible value.
        ConflictError: two choices that cannot be combined.
        CapabilityError: this machine lacks what the preset needs.
    """
    configuration = compose(preset, overrides, allow=allow)
    if configuration.auto is not None:
        if module is None:
            raise PresetError(
                'preset auto: chosen for a module and a batch; write trainer_kwargs("auto", module=module, batch=batch)'
            )
        from lightning_solo.planner.auto import checks, choose

        check = functools.partial(check_machine, lightning=lightning)
        _, configuration, plan = choose(configuration, module, batch, check=check, trainer=trainer, allow=allow)
        callbacks = [*callbacks, *checks(plan)]
    return trainer_arguments(configuration, callbacks=callbacks, lightning=lightning)


def callbacks(
    preset: Preset,
    overrides: Sequence[str] = (),
    *,
    allow: Sequence[str] = (),
) -> list[Any]:
    """Return a preset's callbacks, for a Trainer that exists: ``trainer.callbacks += solo.callbacks("bf16")``.

    Warns of settings that callbacks can't carry, such as precision and strategy: a Trainer takes those when it is made.

    Raises:
        PresetError, ConflictError, CapabilityError: as `trainer_kwargs`.
    """
    configuration = compose(preset, overrides, allow=allow)
    if configuration.auto is not None:
        raise PresetError(
            "preset auto: chosen for a module and a batch, when the Trainer is made; write"
            ' L.Trainer(**trainer_kwargs("auto", module=module, batch=batch))'
        )
    check_machine(configuration)
    carried = {name: getattr(configuration, name) for name in ("precision", "accumulate_grad_batches")}
    if strategy := configuration.strategy:
        carried["strategy"] = strategy.card.name if isinstance(strategy, Chosen) else "yours"
    lost = [f"{name}={value!r}" for name, value in carried.items() if value is not None]
    if lost:
        warnings.warn(
            f"preset {_name(preset)}: callbacks can't carry {', '.join(lost)}; a Trainer takes those when it is made, "
            f"as in L.Trainer(**trainer_kwargs({_name(preset)}))",
            stacklevel=2,
        )
    return build_callbacks(configuration)


def list_presets() -> list[str]:
    """Return the names of all presets: ours, and the user's own from ``./conf/solo/``."""
    return sorted(preset_files())


def show(preset: str | Sequence[str], overrides: Sequence[str] = ()) -> str:
    """Return one or several presets as composed YAML, headed by the purpose of each.

    Raises:
        PresetError: unknown preset or override.
    """
    fields = compose_yaml(preset, parse_overrides(overrides))
    composed = {key: value for key, value in fields.items() if value not in (None, {})}
    heads = "".join(f"# {line}\n" for line in descriptions(preset))
    return f"{heads}{OmegaConf.to_yaml(OmegaConf.create(composed))}"


def _name(preset: Preset) -> str:
    return "given" if isinstance(preset, Mapping) else repr(preset)
