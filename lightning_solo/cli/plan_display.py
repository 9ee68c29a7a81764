"""Plans on the terminal: progress, table, bars of the peaks, assumptions, and the command that trains."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.text import Text

from lightning_solo.cli.command_line import CheckedConfig
from lightning_solo.cli.ladder_line import batch_argument, with_batch
from lightning_solo.cli.options import print_lines
from lightning_solo.errors import SoloError
from lightning_solo.planner.calibration import Readings
from lightning_solo.planner.device import CPU, Device
from lightning_solo.planner.plan import EQUAL, Plan, as_fast
from lightning_solo.planner.table import COLOURS
from lightning_solo.planner.table import table as plan_table
from lightning_solo.presets.files import descriptions, names_in
from lightning_solo.presets.spelling import on_command_line
from lightning_solo.report.plan_chart import CATEGORIES, OVERHEAD, length, parts
from lightning_solo.tables import Cell, Table, table_console, terminal
from lightning_solo.units import format_bytes

INKS = ("blue", "yellow", "green", "magenta", "red", "cyan", "bright_black")
WIDEST = 100  # columns of a bar with name and figure
FIGURE = len(" 1023.99 GiB")
BUDGET = "|"


class Progress:
    """Shows the current preset and the verdicts of the earlier ones on standard error.

    Args:
        names: names of the presets, in the order in which they are planned.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.done: dict[str, str] = {}
        self.console = Console(stderr=True)
        self._status: Status | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the progress in place if standard error is a terminal."""
        if not self.console.is_terminal:
            yield
            return
        with self.console.status(self._line()) as self._status:
            yield

    def tell(self, name: str, answer: Plan | SoloError) -> None:
        """Show the result of a preset."""
        self.done[name] = answer.verdict if isinstance(answer, Plan) else "could not be planned"
        if self._status is not None:
            self._status.update(self._line())
        else:
            needed = f", {answer.needs}" if isinstance(answer, Plan) else ""
            print_lines(self.console, [f"{name}: {self.done[name]}{needed}"])

    def _line(self) -> Text:
        now = next((name for name in self.names if name not in self.done), "")
        line = Text(f"{len(self.done)} of {len(self.names)} planned" + (f", now {now}" if now else ""))
        for name, verdict in self.done.items():
            line.append("; ").append(f"{name} {verdict}", style=COLOURS.get(verdict, "dim"))
        return line


def print_plans(plans: Sequence[Plan], failed: Mapping[str, SoloError], notes: Sequence[str], advice: str) -> None:
    """Print plans, best first, errors, notes and advice."""
    console = table_console()
    if plans:
        print_lines(console, [heading(plans)])
        console.print(plan_table(plans, width=console.width))
        console.print()
        console.print(bars(plans, console.width))
        shortages = [f"{plan.preset}: {plan.verdict}: {plan.host_shortage}" for plan in plans if plan.host_shortage]
        print_lines(console, [*order(plans), *assumptions(plans), *notes, *shortages])
    names_by_error: dict[str, list[str]] = {}
    for name, error in failed.items():
        names_by_error.setdefault(on_command_line(str(error)), []).append(name)
    print_lines(console, [f"{', '.join(names)}: not planned: {error}" for error, names in names_by_error.items()])
    print_lines(console, [advice], style="bold")


def heading(plans: Sequence[Plan]) -> str:
    """Return a line with device, budget, batch and the meaning of the columns."""
    first = plans[0]
    context = "" if first.device == CPU else " with the CUDA context"
    batch = first.batch or first.micro_batch
    fastest = "the fastest that fits" if first.fits else "the fastest"
    return (
        f"{first.device}, {format_bytes(first.budget_bytes)}; batches of {batch}; needed: of the device"
        f"{context}; step: per example, against {fastest}; batch: the largest that fits\n"
    )


def bars(plans: Sequence[Plan], width: int) -> Text:
    """Return a bar per preset with a sign per category and a mark at the budget, and a legend."""
    inks = dict(zip(CATEGORIES, INKS, strict=True))
    names, budget = max(len(plan.preset) for plan in plans) + 1, plans[0].budget_bytes
    cells = max(min(width, WIDEST) - names - FIGURE, 10)
    scale = length(plans) / (cells - 1)  # one cell is for the mark
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


def order(plans: Sequence[Plan]) -> list[str]:
    """Return a line on presets that count as equally fast, if a slower one comes before a faster one."""
    pairs = [(one, after) for one, after in pairwise(plans) if one.verdict == after.verdict and after.fits]
    applies = any(one.seconds_per_example > after.seconds_per_example and as_fast(one, after) for one, after in pairs)
    return [f"{EQUAL}, and the preset that changes less comes first"] if applies else []


def assumptions(plans: Sequence[Plan]) -> list[str]:
    """Return each assumption once; name its presets unless it holds for all."""
    names_by_text: dict[str, list[str]] = {}
    for plan in plans:
        for text in plan.assumptions:
            names_by_text.setdefault(text, []).append(plan.preset)
    return [
        f"assumed: {text}" + (f" ({', '.join(names)})" if len(names) < len(plans) else "")
        for text, names in names_by_text.items()
    ]


def what_to_write(
    plans: Sequence[Plan], overrides: Sequence[str], checked: CheckedConfig, saved: str | None = None
) -> str:
    """Return the command that trains with the first preset if it fits, else the bytes that the nearest one lacks.

    Args:
        plans: best first.
        overrides: of the command line.
        checked: the application.
        saved: the preset to which a solved plan is written.
    """
    if not plans:
        return "none could be planned"
    first = plans[0]
    if first.fits:
        left = f"{format_bytes(first.margin_bytes)} are left"
        if first.verdict == "tight":
            left += f" of the device, but it needs {first.host_shortage}: tight" if first.host_shortage else ": tight"
        if first.device != CPU:
            left += f"; the device will show {format_bytes(first.reserved_bytes)} as taken"
        if first.configuration is not None and saved is None:
            return f"{first.preset} fits, {left}. --save-preset my_run would write it as a preset, for solo=my_run"
        preset = first.preset
        if saved is not None and first.configuration is not None:  # which has what overrides add
            preset = saved
            overrides = [text for text in overrides if not text.lstrip("+~").startswith(("solo.", "solo/"))]
        again = command(preset, overrides, checked, first.batch or first.micro_batch)
        return f"{first.preset} fits, {left}. {' '.join(descriptions(names_in(preset)))}\n{again}"
    shortage = f"none fits in {format_bytes(first.budget_bytes)}; the nearest, {first.preset}, needs {first.shortage}"
    smaller = max(plans, key=lambda plan: 0 if plan.configuration else plan.largest_micro_batch or 0)
    if not smaller.largest_micro_batch:
        return shortage
    again = command(smaller.preset, overrides, checked, smaller.largest_micro_batch)
    return f"{shortage}\n{smaller.preset} fits with batches of {smaller.largest_micro_batch}; {again}"


def print_readings(device: Device, readings: Readings, path: Path) -> None:
    """Print a device's readings, their share of its peaks, and their file."""
    console = Console()
    rows = [
        (f"{kind} product", f"{speed / 1e12:.2f} TFLOP/s", f"{speed / peak:.0%} of {peak / 1e12:g}")
        for kind, speed in readings.flops.items()
        if speed is not None and (peak := device.flops[kind]) is not None
    ]
    peak = device.memory_bandwidth
    rows.append(("copy", f"{readings.bandwidth / 1e9:.1f} GB/s", f"{readings.bandwidth / peak:.0%} of {peak / 1e9:g}"))
    if device.name != CPU:
        rows.append(("from pinned host memory", f"{readings.host_bandwidth / 1e9:.1f} GB/s", ""))
        for way, speed in zip(("to the device", "to the host"), readings.host_bandwidth_both or (), strict=False):
            rows.append((f"{way}, both ways at once", f"{speed / 1e9:.1f} GB/s", ""))
        if readings.host_memory_bandwidth is not None:
            rows.append(("copy in host memory", f"{readings.host_memory_bandwidth / 1e9:.1f} GB/s", ""))
        rows.append(("CUDA context", format_bytes(readings.context_bytes), ""))
        rows.append(("workspace", format_bytes(readings.workspace_bytes), ""))
    table = Table("", ("what", "reading", "of peak"), [tuple(map(Cell, row)) for row in rows])
    print_lines(console, [f"{device.label}, measured on {readings.date}"])
    console.print(terminal(table, headings=False))
    print_lines(console, [f"plans for this machine's device use them: {path}"])


def command(preset: str, overrides: Sequence[str], checked: CheckedConfig, micro_batch: int) -> str:
    """Return a sentence with the command that trains with a preset and a micro-batch."""
    argument = batch_argument(checked)
    if argument is not None and argument[1] != micro_batch:
        overrides = with_batch(overrides, argument[0], micro_batch)
    loader = "" if argument is not None else f", with a loader of batches of {micro_batch}"
    return f"train with it{loader}: {shlex.join(['lightning-solo', 'train', *overrides, f'solo={preset}'])}"
