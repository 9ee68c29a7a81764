"""The configurations without a file: the schema of presets, and each technique with its defaults.

`- /solo/schema@_here_: solo` in a defaults list names the schema, `+solo/callback=<name>` a technique.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Optional

from hydra.core.object_type import ObjectType
from hydra.errors import CompactHydraException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import MISSING, DictConfig, OmegaConf

from lightning_solo.cards.catalogue import catalogue
from lightning_solo.presets.old_spellings import refusal


@dataclass
class PresetSchema:
    """The fields of a preset for Hydra's composition.

    A field that a preset doesn't set is `MISSING`, not None: in a list of presets it keeps an earlier preset's value.
    """

    precision: Optional[str] = MISSING  # noqa: UP045
    accumulate_grad_batches: Optional[int] = MISSING  # noqa: UP045
    devices: Optional[int] = MISSING  # noqa: UP045
    strategy: Any = field(default_factory=dict)  # mappings; `parse_configuration` refuses others in its own words
    callback: Any = field(default_factory=dict)
    auto: Any = field(default_factory=dict)


FIELDS = tuple(f.name for f in fields(PresetSchema))
UNSET = ("precision", "accumulate_grad_batches", "devices")
"""Fields that are `MISSING` until a preset sets them."""

GROUPS = ("", "solo", "solo/callback", "solo/schema", "solo/strategy")


class TechniqueSource(ConfigSource):
    """Reads a card only when Hydra asks for its technique; Hydra's ConfigStore would need all cards at the start."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of this source's entries in the search path."""
        return "lightning-solo"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a configuration.

        Raises:
            ConfigLoadError: no configuration has this path.
        """
        config = _config(config_path)
        if config is None:
            raise ConfigLoadError(f"{self.scheme()} has no {config_path}")
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header={"package": None})

    def available(self) -> bool:
        """Return True."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return whether a path is a group of configurations."""
        return config_path.strip("/") in GROUPS

    def is_config(self, config_path: str) -> bool:
        """Return whether a path is a configuration."""
        return _config(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the sorted names of the groups and configurations in a group; ``results_filter`` selects one kind."""
        group = config_path.strip("/")
        names = ["solo"] if group == "solo/schema" else [*catalogue().group(group.removeprefix("solo/"))]
        below = [each.rpartition("/")[2] for each in GROUPS[1:] if each.rpartition("/")[0] == group]
        shown = {ObjectType.CONFIG: names, ObjectType.GROUP: below, None: [*below, *names]}
        return sorted(shown[results_filter])


def _config(path: str) -> DictConfig | None:
    """Return the configuration at a path such as ``solo/callback/throughput``; None if there is none."""
    group, _, name = path.strip("/").removesuffix(".yaml").rpartition("/")
    if (group, name) == ("solo/schema", "solo"):
        return OmegaConf.structured(PresetSchema)  # type: ignore[no-any-return]
    if group == "solo/strategy" and (message := refusal(name)):
        raise CompactHydraException(message)  # of an application of the user's, where Hydra looks before our checks
    card = catalogue().cards.get(name)
    if card is None or group != f"solo/{card.group}":
        return None
    return OmegaConf.create({"name": name, **card.defaults} if card.group == "strategy" else {name: card.defaults})
