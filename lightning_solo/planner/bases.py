"""The entry of the solved plan among presets to plan, and the preset that it becomes; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_solo.cards.blocks import HOST_INPUT, OFFLOAD
from lightning_solo.cards.catalogue import catalogue
from lightning_solo.cards.configuration import Chosen, Configuration
from lightning_solo.errors import PresetError
from lightning_solo.planner.plan import Plan
from lightning_solo.presets.compose import compose
from lightning_solo.presets.files import preset_files
from lightning_solo.presets.writing import preset_file
from lightning_solo.units import format_bytes

SOLVED = "solved"
"""Name of the solved plan among presets."""
SOLVED_FOR = "# Solved by auto for "
"""Start of the file of a solved plan, before its device and budget."""
MICRO_BATCH, BLOCK_MICRO_BATCHES = "micro_batch", "micro_batches"
STATES, WEIGHTS = "state_budget", "weight_budget"


@dataclass(frozen=True)
class Bases:
    """Stands for the solved plan among the presets to plan.

    Attributes:
        bases: presets to which modes of blocks may be added, by name.
        whole_batch: whether each batch runs as a whole, in no micro-batches.
    """

    bases: Mapping[str, Configuration]
    whole_batch: bool = False

    @property
    def precision(self) -> str | None:
        """The precision of all bases."""
        return next((config.precision for config in self.bases.values()), None)

    def needs_cuda(self) -> None:
        """Return None: the solved plan uses what the device has."""


def is_base(config: Configuration) -> bool:
    """Return whether modes of blocks can be added to a preset."""
    owned = {resource for chosen in config.techniques for resource in chosen.owned()}
    moves = any(
        chosen.card.solved in ("moving", "weight_budget") or getattr(chosen.settings, "state_budget", None) is not None
        for chosen in config.techniques
    )
    return config.strategy is None and "saved_tensors" not in owned and not moves


def bases_among(presets: Mapping[str, Configuration]) -> dict[str, Configuration]:
    """Return the presets to which modes of blocks may be added, and that train the module as it is."""
    return {
        name: config
        for name, config in presets.items()
        if is_base(config)
        and not (config.accumulates or config.makes_batches or config.caveats)
        and not (str(config.precision).endswith("16-true") and not config.techniques)  # it loses small updates
    }


def with_modes(base: Configuration, modes: Mapping[str, Sequence[str]]) -> Configuration:
    """Return a preset whose blocks have modes, and that moves tensors to the host if a mode does."""
    added = [technique_for("modes", modes={mode: list(names) for mode, names in modes.items()})]
    if modes.keys() & {HOST_INPUT, OFFLOAD}:
        added.append(technique_for("moving"))
    return replace(base, techniques=(*base.techniques, *added))


def with_settings(config: Configuration, **values: Any) -> Configuration:
    """Return a preset with other settings of the technique whose card says that the solver decides them."""
    techniques = tuple(
        replace(chosen, settings=replace(chosen.settings, **values)) if chosen.card.solved in values else chosen
        for chosen in config.techniques
    )
    return replace(config, techniques=techniques)


def settings_of(config: Configuration, solved: str) -> Any:
    """Return the settings of the technique whose card has this part in a solved plan; None if it isn't chosen."""
    return next((chosen.settings for chosen in config.techniques if chosen.card.solved == solved), None)


def technique_for(solved: str, **values: Any) -> Chosen:
    """Return the technique whose card has this part in a solved plan, with settings."""
    card = next(card for card in catalogue().cards.values() if card.solved == solved)
    option = f"callback.{card.name}"
    return Chosen(card, card.settings.parse(values, option), option)


def configuration_of(plan: Plan, allow: Sequence[str] = ()) -> Configuration:
    """Return the configuration of a solved plan."""
    assert plan.configuration is not None
    return replace(compose(plan.configuration, allow=allow), preset=plan.preset)


def file_of(name: str, option: str) -> Path:
    """Return the file in `./conf/solo` to which a solved plan is written; ``option`` is what gives its name.

    Raises:
        PresetError: another preset has the name.
    """
    path = Path("conf") / "solo" / f"{name}.yaml"
    is_solved = path.exists() and path.read_text(encoding="utf-8").startswith(SOLVED_FOR)
    if not is_solved and (path.exists() or name in preset_files()):
        raise PresetError(f"{option}{name}: there is another preset of this name; write another name")
    return path


def save(plan: Plan, path: Path) -> str:
    """Write a solved plan as a preset; return words on the plan that it replaces, if there is one."""
    former = path.read_text(encoding="utf-8").removeprefix(SOLVED_FOR).partition(":")[0] if path.exists() else ""
    first = f"{SOLVED_FOR.removeprefix('# ')}{plan.device} and {format_bytes(plan.budget_bytes)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    assert plan.configuration is not None
    plan_line = f"planned peak {format_bytes(plan.peak_bytes)}, batches of {plan.batch or plan.micro_batch}"
    path.write_text(preset_file(plan.configuration, f"{first}: {plan_line}."), encoding="utf-8")
    return f" (it replaces the plan for {former})" if former else ""


def solved_lines(config: Configuration) -> list[str]:
    """Return the choices of a solved plan, in words: the blocks of each mode, and the budgets."""
    lines = []
    for chosen in config.techniques:
        value = getattr(chosen.settings, chosen.card.solved or "option", None)
        if isinstance(value, Mapping):
            lines += [f"{mode}: {', '.join(names)}" for mode, names in value.items()]
        elif type(value) is int:
            lines.append(f"{chosen.option}.{chosen.card.solved}={value}")
    return lines
