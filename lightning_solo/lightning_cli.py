"""LightningCLI with presets: ``--solo compact --solo_overrides "[callback.memory_logger.every_n_steps=10]"``."""

from __future__ import annotations

import inspect
from typing import Any, List, Union  # noqa: UP035 - jsonargparse reads these annotations

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_solo.attach import trainer_kwargs
from lightning_solo.trainers import merged


class SoloCLI(LightningCLI):
    """A `LightningCLI` with the options ``--solo``, ``--solo_overrides`` and ``--solo_allow``, in YAML files too.

    A preset and a Trainer's argument that contradict each other are refused. Without ``--solo`` it is a
    `LightningCLI`.
    """

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of presets."""
        super().add_default_arguments_to_parser(parser)
        names, one_or_more = List[str], Union[List[str], str, None]  # noqa: UP006, UP007
        parser.add_argument("--solo", type=one_or_more, default=None, help="a preset, or a list of presets")
        parser.add_argument("--solo_overrides", type=names, default=[], help="overrides of the preset")
        parser.add_argument("--solo_allow", type=names, default=[], help="prefixes of _target_ entries that you trust")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return the Trainer, with the preset applied if there is one.

        Raises:
            ConflictError: the preset and an argument of the Trainer contradict each other.
            PresetError, CapabilityError, BudgetError, PlanError: as `lightning_solo.trainer_kwargs`.
        """
        config = self.config_init if self.subcommand is None else self.config_init[self.subcommand]
        if config.get("solo") is None:
            return super().instantiate_trainer(**kwargs)
        defaults = inspect.signature(self.trainer_class).parameters
        given = {**config.get("trainer", {}), **kwargs}
        # the parser fills in every default, so that an argument with its default counts as not set
        given = {name: value for name, value in given.items() if value != defaults[name].default}
        callbacks = given.pop("callbacks", [])
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        ours = trainer_kwargs(
            config["solo"],
            config["solo_overrides"],
            callbacks=callbacks,
            allow=config["solo_allow"],
            module=self.model,
            trainer=given,
        )
        return super().instantiate_trainer(**merged(given, ours))
