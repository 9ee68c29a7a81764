"""`lightning-solo presets`: every preset with its purpose and the device it needs, then every technique."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_solo.cards.catalogue import catalogue
from lightning_solo.errors import PresetError
from lightning_solo.presets.files import describe, preset_files, user_conf_folder


def run(arguments: Sequence[str]) -> int:
    """Print the tables of presets and of techniques."""
    if arguments:
        raise PresetError(f"presets takes no arguments, got {' '.join(arguments)!r}; for one preset write: show <name>")
    table = Table(box=None, pad_edge=False)
    table.add_column("preset", style="bold", no_wrap=True)
    table.add_column("what it is for, and where it runs")
    user_folder = user_conf_folder()
    for name, path in sorted(preset_files().items()):
        yours = " (yours)" if user_folder is not None and user_folder in path.parents else ""
        table.add_row(name + yours, describe(path))
    techniques = Table(box=None, pad_edge=False)
    techniques.add_column("technique", style="bold", no_wrap=True)
    techniques.add_column("what it saves; added by +solo/callback=<name>, or +solo/strategy=<name>")
    for card in catalogue().cards.values():
        saves = card.saves.replace("``", "")  # marks for the documentation
        techniques.add_row(card.name, Text(f"{saves}{' (strategy)' if card.group == 'strategy' else ''}"))
    console = Console()
    console.print(table)
    console.print()
    console.print(techniques)
    return 0
