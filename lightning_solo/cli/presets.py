"""`lightning-solo presets`: lists every preset with its purpose and device, and every technique."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from lightning_solo.cards.catalogue import catalogue
from lightning_solo.errors import PresetError
from lightning_solo.presets.files import describe, preset_files, user_conf_folder
from lightning_solo.tables import Cell, Table, terminal

FOR = "purpose and device"
SAVES = "what it saves; add it by +solo/callback=<name>, or +solo/strategy=<name>"


def run(arguments: Sequence[str]) -> int:
    """Print the tables of presets and of techniques."""
    if arguments:
        raise PresetError(f"presets takes no arguments, got {' '.join(arguments)!r}; for one preset write: show <name>")
    user_folder = user_conf_folder()
    presets = []
    for name, path in sorted(preset_files().items()):
        yours = " (yours)" if user_folder is not None and user_folder in path.parents else ""
        presets.append((Cell(name + yours, style="bold"), Cell(describe(path))))
    techniques = []
    for card in catalogue().cards.values():
        saves = card.saves.replace("``", "")  # marks for the documentation
        strategy = " (strategy)" if card.group == "strategy" else ""
        techniques.append((Cell(card.name, style="bold"), Cell(saves + strategy)))
    console = Console()
    console.print(terminal(Table("", ("preset", FOR), presets), (FOR,)))
    console.print()
    console.print(terminal(Table("", ("technique", SAVES), techniques), (SAVES,)))
    return 0
