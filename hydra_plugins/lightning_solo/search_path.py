"""Puts `conf/library` on every Hydra application's search path, so that the presets appear as the group `solo`."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from lightning_solo.presets.compose import register_schema
from lightning_solo.presets.files import conf_folder


class LightningSoloSearchPath(SearchPathPlugin):
    """Appends, so that an application's own files come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add our presets behind the application's own configurations, and the schema they inherit."""
        register_schema()
        search_path.append(provider="lightning-solo", path=f"file://{conf_folder() / 'library'}")
