"""LightningCLI with presets: ``--solo compact --solo_overrides "[callback.memory_logger.every_n_steps=10]"``."""

from __future__ import annotations

import inspect
from typing import Any, List, Union  # noqa: UP035 - jsonargparse reads these annotations

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_solo.attach import trainer_kwargs
from lightning_solo.errors import PresetError, SoloError
from lightning_solo.presets import old_spellings
from lightning_solo.presets.spelling import on_lightning_cli
from lightning_solo.trainers import merged


class SoloCLI(LightningCLI):
    """A `LightningCLI` with the options ``--solo``, ``--solo_overrides`` and ``--solo_allow``, in YAML files too.

    A preset and a Trainer's argument that contradict each other are refused. Without ``--solo`` it is a
    `LightningCLI`.
    """

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of presets."""
        super().add_default_arguments_to_parser(parser)
        names, preset = Union[List[str], str], Union[List[str], str, None]  # noqa: UP006, UP007
        parser.add_argument("--solo", type=preset, default=None, help="a preset, or a list of presets")
        parser.add_argument("--solo_overrides", type=names, default=[], help="an override of the preset, or a list")
        parser.add_argument("--solo_allow", type=names, default=[], help="prefixes of _target_ entries that you trust")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return the Trainer, with the preset applied if there is one.

        A refused choice ends the program as the parser's own errors do: with the message and exit status 2.
        """
        config = self.config_init if self.subcommand is None else self.config_init[self.subcommand]
        try:
            arguments = self._arguments(config, kwargs)
        except SoloError as error:
            self._parser(self.subcommand).error(on_lightning_cli(str(error)), error)
        return super().instantiate_trainer(**arguments)

    def _arguments(self, config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with which those of the configuration are replaced."""
        given = {**config.get("trainer", {}), **kwargs}
        if old := old_spellings.refusal_of_argument(given.get("strategy")):
            raise PresetError(old)
        overrides, allow = (_listed(config[name]) for name in ("solo_overrides", "solo_allow"))
        if config.get("solo") is None:
            if overrides or allow:
                option = "solo_overrides" if overrides else "solo_allow"
                raise PresetError(f"{option}={config[option]!r} without a preset: write --solo <preset>, such as bf16")
            return kwargs
        defaults = inspect.signature(self.trainer_class).parameters
        # the parser fills in every default, so that an argument with its default counts as not set
        given = {name: value for name, value in given.items() if value != defaults[name].default}
        callbacks = _listed(given.pop("callbacks", []))
        ours = trainer_kwargs(
            config["solo"],
            overrides,
            callbacks=callbacks,
            allow=allow,
            module=self.model,
            batch=self.datamodule,
            trainer=given,
        )
        return merged(given, ours, config["solo"], overrides, allow)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
