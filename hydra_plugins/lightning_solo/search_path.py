"""Puts the presets, and those of other packages' techniques, on every Hydra application's search path."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from lightning_solo.presets.config_source import TechniqueSource  # Hydra registers the sources that it finds here
from lightning_solo.presets.files import library_folders


class LightningSoloSearchPath(SearchPathPlugin):
    """Appends its entries, so that an application's own files come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folders of presets, and the source of techniques and of the schema that presets inherit."""
        for folder in library_folders():
            search_path.append(provider="lightning-solo", path=f"file://{folder}")
        search_path.append(provider="lightning-solo", path=f"{TechniqueSource.scheme()}://")
