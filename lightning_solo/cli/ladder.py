"""`lightning-solo ladder`: measures each technique on your model, alone and together."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lightning_solo.atomic_files import read_json, write_json
from lightning_solo.build import trainer_arguments
from lightning_solo.cli import INTERRUPTED
from lightning_solo.cli.ladder_line import (
    LadderOptions,
    RungConfig,
    compose_base,
    folder_of,
    parse,
    prepare,
    settings_of,
    suggested_argument,
)
from lightning_solo.cli.options import print_lines
from lightning_solo.cli.train import build_parts, own_arguments
from lightning_solo.errors import CheckpointError, SoloError
from lightning_solo.ladder.display import details, memory_in_words, noise_in_words, table
from lightning_solo.ladder.figures import NOT_RUN, REFUSED, Figures
from lightning_solo.ladder.ladder import Ladder
from lightning_solo.ladder.rungs import BASELINE
from lightning_solo.machine import versions
from lightning_solo.report.write import write_report
from lightning_solo.requirements import check_machine
from lightning_solo.sweeps import results
from lightning_solo.sweeps.application import application_of
from lightning_solo.sweeps.display import Display
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.outcome import FINISHED
from lightning_solo.sweeps.outcome import INTERRUPTED as INTERRUPTED_JOB
from lightning_solo.tables import table_console
from lightning_solo.units import format_bytes

PRELOAD = ("lightning_solo.ladder.measurement",)


def rung(config: RungConfig) -> dict[str, Any]:
    """Train one combination in this process and return its measurements."""
    from lightning_solo.ladder.measurement import Clock, counted_of, measure

    clock, checked = Clock(counted_of(config.steps)), config.checked
    check_machine(checked.solo)
    import lightning as L

    from lightning_solo.seams.homes import home_of

    L.seed_everything(config.seed, workers=True, verbose=False)
    model, data = build_parts(checked)
    home = home_of(model)
    arguments = trainer_arguments(checked.solo, callbacks=[clock], lightning=home)
    trainer = {**own_arguments(Path(config.folder), home), **checked.trainer, **arguments}
    measures = measure(model, data, trainer, clock, config.steps)
    return {**measures, "batch_argument": suggested_argument(checked, data)}


def run(arguments: Sequence[str]) -> int:
    """Run, print and write the ladder; return 0 if a rung finished or, with ``--until``, if one fits."""
    options = parse(arguments)
    cfg = compose_base(options)
    settings, preload = settings_of(cfg)
    folder = SweepFolder(folder_of(options, cfg))
    command = shlex.join(["lightning-solo", "ladder", *arguments])
    claim(folder, options, command)
    display = Display(folder, {}, parallel=1)
    ladder = Ladder(
        folder,
        application_of(rung, (*preload, *PRELOAD)),
        settings,
        options.techniques,
        partial(prepare, options=options, folder=folder.path),
        steps=options.steps,
        until=options.until,
        tell=partial(tell, display),
        look=display.look,
        names=display.names,
    )
    ladder.plan()
    print_lines(display.console, details(ladder.figures()))  # refused rungs, which are known before any runs
    try:
        with display.shown():
            rows = ladder.run()
    except KeyboardInterrupt:
        done = [row for row in ladder.figures() if row.status != INTERRUPTED_JOB]
        write(folder, options, command, done)
        resumes = f"interrupted, rungs done: {len(done)}; the same command resumes: {folder.path}"
        print_lines(display.console, [resumes])
        return INTERRUPTED
    written = write(folder, options, command, rows)
    return report(rows, options, folder, written, ladder.fitting())


def claim(folder: SweepFolder, options: LadderOptions, command: str) -> None:
    """Reserve the folder for this ladder.

    Raises:
        CheckpointError: the folder has other files.
    """
    file = folder.path / "ladder.json"
    if file.exists():
        return
    if folder.path.exists() and any(folder.path.iterdir()):
        raise CheckpointError(f"{folder.path} has files that are not of a ladder; give another name: run=...")
    write(folder, options, command, [])


def write(folder: SweepFolder, options: LadderOptions, command: str, rows: Sequence[Figures]) -> Path:
    """Write `ladder.json` and return its path."""
    of_jobs = results.read(folder.results)
    file = folder.path / "ladder.json"
    before = read_json(file) or {}
    write_json(
        file,
        {
            "what": "peak memory, time and loss of each technique, alone and together",
            "baseline": BASELINE,
            "steps": options.steps,
            "memory": memory_in_words(rows),
            "hardware": of_jobs[0].hardware if of_jobs else before.get("hardware"),
            "versions": dict(of_jobs[0].versions) if of_jobs else versions(),
            "command": command,
            "rows": [asdict(row) for row in rows],
        },
    )
    return file


def failed(row: Figures) -> bool:
    """Return whether a rung ran but did not finish."""
    return row.status not in (FINISHED, NOT_RUN, REFUSED)


def tell(display: Display, event: str, number: int | None, detail: str) -> None:
    """Pass an event to the display; print a line if the display is not a terminal."""
    display.tell(event, number, detail)
    if number is not None and event != "anew" and not display.console.is_terminal:
        line = event if event == "started" else detail.replace("failed CapabilityError", NOT_RUN)
        line += ", by an earlier command" if event == "kept" else ""
        print_lines(display.console, [f"{display.names[number]}: {line}"])


def picture(folder: Path) -> str:
    """Write the ladder's page and pictures; return a line about them."""
    try:
        return f"report: {write_report(folder).page}"
    except SoloError as error:
        return f"no report: {error}"


def report(
    rows: Sequence[Figures], options: LadderOptions, folder: SweepFolder, written: Path, fits: Figures | None
) -> int:
    """Print the table and the result of ``--until``, write the page, and return the exit status."""
    console = table_console()
    console.print(table(rows, options.steps))
    outputs = [folder.path / row.name.replace(" ", "") / "output.log" for row in rows if failed(row)]
    notes = [f"memory: {memory_in_words(rows)}", noise_in_words(rows), *details(rows)]
    print_lines(console, [*filter(None, notes), *(f"output: {path}" for path in outputs if path.exists())])
    print_lines(console, [f"figures: {written}", picture(folder.path)])
    finished = [row for row in rows if row.status == FINISHED]
    if any(failed(row) for row in rows):
        print_lines(console, ["to run the failed ones again: the same command with hydra.launcher.rerun=failed"])
    if options.until is None:
        return 0 if finished else 1
    limit = format_bytes(options.until)
    if fits is None:
        least = min(finished, key=lambda row: row.peak_bytes or 0, default=None)
        nearest = f"; the smallest, {least.name}, takes {format_bytes(least.peak_bytes or 0)}" if least else ""
        print_lines(console, [f"none fits in {limit}{nearest}"], style="bold")
        return 1
    fitting = f"{fits.name} fits in {limit}, with {format_bytes(fits.peak_bytes or 0)}; train with it:"
    print_lines(console, [fitting, shlex.join(["lightning-solo", "train", *fits.overrides])], style="bold")
    return 0
