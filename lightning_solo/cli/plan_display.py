"""Plans on the terminal: how far it is, the table, the peaks as bars, what was assumed, and the command to write."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from lightning_solo.cli.command_line import CheckedConfig
from lightning_solo.cli.ladder_line import batch_argument, with_batch
from lightning_solo.errors import SoloError
from lightning_solo.planner.calibration import Readings
from lightning_solo.planner.device import CPU, Device
from lightning_solo.planner.plan import Plan
from lightning_solo.planner.table import COLOURS, table
from lightning_solo.presets.files import describe, preset_files
from lightning_solo.report.plan_chart import CATEGORIES, OVERHEAD, length, parts
from lightning_solo.units import format_bytes

INKS = ("blue", "yellow", "green", "magenta", "red", "cyan", "bright_black")
WIDEST = 100  # columns of a bar with its name and figure
FIGURE = len(" 1023.99 GiB")
BUDGET = "|"


class Progress:
    """Says on standard error what is being planned and what came of the others: in place, or a line for each.

    Args:
        names: of the presets, in the order in which they are planned.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.done: dict[str, str] = {}
        self.console = Console(stderr=True)
        self._status: Status | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show it, where there is a terminal."""
        if not self.console.is_terminal:
            yield
            return
        with self.console.status(self._line()) as self._status:
            yield

    def tell(self, name: str, found: Plan | SoloError) -> None:
        """Take note of a preset that is done."""
        self.done[name] = found.verdict if isinstance(found, Plan) else "could not be planned"
        if self._status is not None:
            self._status.update(self._line())
        else:
            needed = f", {format_bytes(found.needed_bytes)}" if isinstance(found, Plan) else ""
            self.console.print(f"{name}: {self.done[name]}{needed}", highlight=False, markup=False, soft_wrap=True)

    def _line(self) -> Text:
        now = next((name for name in self.names if name not in self.done), "")
        line = Text(f"{len(self.done)} of {len(self.names)} planned" + (f", now {now}" if now else ""))
        for name, verdict in self.done.items():
            line.append("; ").append(f"{name} {verdict}", style=COLOURS.get(verdict, "dim"))
        return line


def print_plans(plans: Sequence[Plan], failed: Mapping[str, SoloError], notes: Sequence[str], advice: str) -> None:
    """Print all of it; plans come with the one to try first in front."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    if plans:
        console.print(heading(plans), soft_wrap=True, highlight=False, markup=False)
        console.print(table(plans))
        console.print()
        console.print(bars(plans, console.width))
        for line in [*assumptions(plans), *notes, *shortages(plans)]:
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    for name, error in failed.items():
        console.print(f"{name}: not planned: {error}", soft_wrap=True, highlight=False, markup=False)
    console.print(advice, style="bold", soft_wrap=True, highlight=False, markup=False)


def heading(plans: Sequence[Plan]) -> str:
    """Return what all rows have in common, and what the columns are."""
    first = plans[0]
    context = "" if first.device == CPU else " with the CUDA context"
    fastest = "the fastest that fits" if first.fits else "the fastest"
    return (
        f"{first.device}, {format_bytes(first.budget_bytes)}; batches of {first.micro_batch}; needed: of the device"
        f"{context}; step: per example, against {fastest}; batch: the largest that fits\n"
    )


def bars(plans: Sequence[Plan], width: int) -> Text:
    """Return a bar per preset, of a sign per category, with the budget marked; and what the signs mean."""
    inks = dict(zip(CATEGORIES, INKS, strict=True))
    names, budget = max(len(plan.preset) for plan in plans) + 1, plans[0].budget_bytes
    cells = max(min(width, WIDEST) - names - FIGURE, 10)
    scale = length(plans) / (cells - 1)  # the mark has a cell of its own behind the budget
    mark = BUDGET if budget <= length(plans) else ""
    drawn, used = Text(), set()
    for plan in plans:
        signs, end = Text(), 0
        for category, size in parts(plan).items():
            end += size
            signs.append(CATEGORIES[category] * (round(end / scale) - len(signs)), style=inks[category])
        used |= set(signs.plain)
        signs.pad_right(cells - len(signs))
        if mark:
            place = round(budget / scale)
            signs = signs[:place] + Text(mark) + signs[place + 1 :]
        drawn.append(f"{plan.preset:<{names}}").append(signs).append(f"{format_bytes(plan.needed_bytes):>{FIGURE}}\n")
    for category, sign in CATEGORIES.items():
        if sign in used:
            words = OVERHEAD if category == "overhead" else category
            drawn.append(sign, style=inks[category]).append(f" {words}  ")
    return drawn.append(f"{mark} {format_bytes(budget)}\n" if mark else "\n")


def assumptions(plans: Sequence[Plan]) -> list[str]:
    """Return what was taken for granted, each once, with the presets that it is about where those are not all."""
    of: dict[str, list[str]] = {}
    for plan in plans:
        for text in plan.assumptions:
            of.setdefault(text, []).append(plan.preset)
    return [
        f"assumed: {text}" + (f" ({', '.join(names)})" if len(names) < len(plans) else "") for text, names in of.items()
    ]


def shortages(plans: Sequence[Plan]) -> list[str]:
    """Return a line for each preset whose verdict is due to the host's memory."""
    return [f"{plan.preset}: {plan.verdict}: {plan.host_shortage}" for plan in plans if plan.host_shortage]


def what_to_write(plans: Sequence[Plan], overrides: Sequence[str], checked: CheckedConfig) -> str:
    """Return the command that trains with the first that fits; or the nearest, and what is missing."""
    if not plans:
        return "none could be planned"
    first = plans[0]
    if first.fits:
        left = f"{format_bytes(first.margin_bytes)} are left" + (": tight" if first.verdict == "tight" else "")
        again = command(first.preset, overrides, checked, first.micro_batch)
        return f"{first.preset} fits, {left}. {describe(preset_files()[first.preset])}\ntrain with it: {again}"
    said = (
        f"none fits in {format_bytes(first.budget_bytes)}; the nearest, {first.preset}, needs"
        f" {format_bytes(first.needed_bytes)}"
        + (f", {format_bytes(-first.margin_bytes)} more" if first.margin_bytes < 0 else "")
        + (f", and {first.host_shortage}" if first.host_shortage else "")
    )
    smaller = max(plans, key=lambda plan: plan.largest_micro_batch or 0)
    if not smaller.largest_micro_batch:
        return said
    again = command(smaller.preset, overrides, checked, smaller.largest_micro_batch)
    return f"{said}\n{smaller.preset} fits with batches of {smaller.largest_micro_batch}; train with it: {again}"


def print_readings(device: Device, readings: Readings, path: Path) -> None:
    """Print what was measured on a device, beside its peaks, and where it is kept."""
    console = Console()
    made = Table(box=None, pad_edge=False, show_header=False)
    for kind, speed in readings.flops.items():
        peak = device.flops[kind]
        if speed is not None and peak is not None:
            made.add_row(f"{kind} product", f"{speed / 1e12:.2f} TFLOP/s", f"{speed / peak:.0%} of {peak / 1e12:g}")
    peak = device.memory_bandwidth
    made.add_row("copy", f"{readings.bandwidth / 1e9:.1f} GB/s", f"{readings.bandwidth / peak:.0%} of {peak / 1e9:g}")
    if device.name != CPU:
        made.add_row("from pinned host memory", f"{readings.host_bandwidth / 1e9:.1f} GB/s")
        made.add_row("CUDA context", format_bytes(readings.context_bytes))
        made.add_row("workspace", format_bytes(readings.workspace_bytes))
    console.print(f"{device.label}, measured on {readings.date}", highlight=False, markup=False)
    console.print(made)
    console.print(f"kept for plans for the device that is here: {path}", soft_wrap=True, highlight=False, markup=False)


def command(preset: str, overrides: Sequence[str], checked: CheckedConfig, micro_batch: int) -> str:
    """Return the command that trains with a preset and a micro-batch."""
    given, found = list(overrides), batch_argument(checked)
    if found is not None and found[1] != micro_batch:
        given = with_batch(given, found[0], micro_batch)
    return shlex.join(["lightning-solo", "train", *given, f"solo={preset}"])
