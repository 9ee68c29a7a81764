"""Writes the tables of README from `examples/results/*.json`, so that no figure is typed by hand.

python examples/readme_tables.py            # prints what would be written; exit 1 if README differs
python examples/readme_tables.py --write
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from lightning_solo.ladder.display import HEADINGS, cells, details, noise_in_words
from lightning_solo.ladder.figures import Figures
from lightning_solo.presets.files import describe, preset_files
from lightning_solo.sweeps.outcome import FINISHED

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(headers: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; every column but the first and the last is right-aligned."""
    rule = ["---", *["---:"] * (len(headers) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [headers, rule, *rows]) + "\n"


def ladder_table(result: dict[str, Any]) -> str:
    """Return what `lightning-solo ladder` has written to `ladder.json`, as the terminal shows it."""
    found = [Figures(**{**row, "overrides": tuple(row["overrides"])}) for row in result["rows"]]
    rows = [
        [f"`{row.name}`", *(cells(row) if row.status == FINISHED else [row.status, *[""] * (len(HEADINGS) - 1)])]
        for row in found
    ]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    note = (
        f"\n{result['hardware']}; {versions}; {result['steps']} optimizer steps each, in a fresh process. "
        f"Memory: {result['memory']}. {capitalized(noise_in_words(found))}. Command: `{result['command']}`\n"
    )
    said = "".join(f"- {line}\n" for line in details(found))
    return table(["rung", *HEADINGS], rows) + note + (f"\n{said}" if said else "")


def capitalized(text: str) -> str:
    """Return a sentence's beginning."""
    return text[:1].upper() + text[1:]


def callbacks_table(result: dict[str, Any]) -> str:
    """Return what each callback costs: its slowest hook on average, its slowest single call, its share of a step."""
    rows = []
    for name, found in result["callbacks"].items():
        hooks = found["hooks"].values()
        mean, slowest = max(h["mean_us"] for h in hooks), max(h["slowest_us"] for h in hooks)
        share = found["share_of_10_ms_step_percent"]
        rows.append([f"`{name}`", f"{mean:.1f} µs", f"{slowest:.0f} µs", f"{share:.2f} %"])
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    note = (
        f"\n{result['hardware']['cores']} cores ({result['hardware']['cpu']}); {versions}; median of {result['runs']} "
        f"runs of {result['steps']} steps with a CSVLogger. Command: `{result['command']}`\n"
    )
    return table(["callback", "dearest hook, mean", "slowest call (it logs)", "of a 10 ms step"], rows) + note


def import_table(result: dict[str, Any]) -> str:
    """Return the seconds of each import."""
    rows = [[f"`{name}`", f"{seconds:.3f} s"] for name, seconds in result["seconds"].items()]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    note = f"\n{result['hardware']}; {versions}; median of {result['runs']}. Command: `{result['command']}`\n"
    return table(["what", "takes"], rows) + note


def zero_offload_table(result: dict[str, Any]) -> str:
    """Return target by target what ZeRO-Offload reached: the worst of each part's rows."""
    parts = {name: part["rows"] for name, part in result["parts"].items()}
    targets = result["targets"]
    counted = [row for row in parts["device_states"] if "counted_bytes" in row]
    rows = []
    for precision, beside in (("32-true", "plain AdamW"), ("bf16-mixed", "the same layout by hand")):
        found = [row["relative_difference"] for row in parts["parity"] if row["precision"] == precision]
        what = f"loss after 50 steps against {beside}, `{precision}`, worst of {len(found)}"
        rows.append([what, f"{max(found):.1e}", f"{targets['parity']:.0e}"])
    for row in parts["start_up"]:
        seconds = max(row["above_fit_s"], row["above_process_s"])
        rows.append([f"start-up above `bf16`, {row['layout']}", f"{seconds:.1f} s", f"{targets['start_up']:.0f} s"])
    errors = [abs(row["relative_error"]) for row in parts["host_bytes"]]
    missed = [row["special"] or row["layout"] for row in parts["host_bytes"] if not row["met"]]
    met = f"{len(errors) - len(missed)} of {len(errors)} within the target{''.join(f', not: {m}' for m in missed)}"
    what = f"host bytes, predicted against measured: {met}; worst"
    rows.append([what, f"{max(errors):.1%}", f"{targets['host_bytes']:.0%}"])
    ratio = max(row["ratio"] for row in counted)
    size = counted[0]["parameters"] / 1e6
    what = f"model states on the device against `bf16`, {size:.0f} million parameters"
    rows.append([what, f"{ratio:.2f} x", f"{targets['device_states']} x"])
    rows.append(["tokens/s against DeepSpeed's own loop", "not run here: needs CUDA", f"{targets['speed']} x"])
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    note = f"{result['hardware']}; {versions}."
    command = "python examples/measure_zero_offload.py"
    return table(["what", "reached", "target"], rows) + f"\n{note} Command: `{command}`\n"


def compact_table(result: dict[str, Any]) -> str:
    """Return what each preset's model states take and do to the loss; a part that was not measured is left out."""
    rows = []
    losses: dict[str, list[float]] = {}
    for row in result.get("convergence", ()):
        losses.setdefault(row["preset"], []).append(row["held_out"])
    means = {preset: statistics.mean(found) for preset, found in losses.items()}
    for preset, mean in means.items():
        spread = max(losses[preset]) - min(losses[preset])
        change = "" if preset == "baseline" else f", {mean / means['baseline'] - 1:+.2%}"
        what = f"loss on held-out text after 1,000 steps, {len(losses[preset])} seeds"
        rows.append([f"`{preset}`", what, f"{mean:.4f} (seeds within {spread:.4f}){change}"])
    for row in result.get("states", ()):
        rows.append([f"`{row['preset']}`", "bytes per parameter behind a step, counted", f"{row['in_all']:.2f}"])
    for part, what in (("resident", "peak resident set"), ("largest", "three steps of a larger model")):
        for row in result.get(part, ()):
            size = (
                f"{row['parameters'] / 1e9:.2f} billion parameters" if "parameters" in row else f"depth {row['depth']}"
            )
            reached = f"{row['peak_bytes'] / 2**30:.2f} GiB" if "peak_bytes" in row else "did not train"
            rows.append([f"`{row['preset']}`", f"{what}, {size}", reached])
    for row in result.get("step", ()):
        names = [name for name in row if name.startswith(("torch", "24"))]
        for name in names:
            rows.append([name, f"a step of {row['elements'] / 1e6:.0f} million parameters", f"{row[name]:.3f} s"])
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        table(["preset", "what", "reached"], rows)
        + f"\n{result['machine']}; {versions}. Command: `{result['command']}`\n"
    )


def step_cost_table(result: dict[str, Any]) -> str:
    """Return what a step of each preset asks of a GPU, beside what it has to."""
    rows = []
    for name, row in result["rows"].items():
        theory = row["bytes_each_way_in_theory"]
        ways = f"{row['bytes_up_per_parameter']:.2f} / {row['bytes_down_per_parameter']:.2f}"
        own = str(row["launches_of_the_update"]) if name.startswith("compact") else ""
        needed = "" if theory is None else f"{theory:.2f}"
        peak = f"{row['peak_allocated'] / row['parameters']:.1f}"
        rows.append(
            [
                *(f"`{name.split(',')[0]}`{''.join(name.partition(',')[1:])}", str(row["launches"]), own),
                *(str(row["synchronisations"]), ways, needed, str(row["pageable_bytes"]), peak),
            ]
        )
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("torch", "lightning", "deepspeed"))
    headers = [
        *("preset", "launches", "of the compact step", "waits", "bytes up / down", "in theory"),
        *("pageable bytes", "peak bytes"),
    ]
    return table(headers, rows) + f"\n{versions}; a simulated device. Command: `{result['command']}`\n"


def catalogue(_: object = None) -> str:
    """Return the presets with the first line of each file."""
    rows = []
    for name, path in sorted(preset_files().items()):
        purpose, _, device = describe(path).partition(" Runs on: ")
        rows.append([f"`{name}`", purpose, device.rstrip(".")])
    return "| preset | what it is for | runs on |\n| --- | --- | --- |\n" + "".join(
        "| " + " | ".join(row) + " |\n" for row in rows
    )


TABLES = {
    "ladder_cpu.json": ladder_table,
    "ladder_gpu.json": ladder_table,
    "callbacks_cpu.json": callbacks_table,
    "import_cpu.json": import_table,
    "zero_offload_cpu.json": zero_offload_table,
    "compact_cpu.json": compact_table,
    "step_cost.json": step_cost_table,
}


def render(text: str) -> str:
    """Return README's text with every marked table made anew."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name == "presets":
            return match[1] + catalogue() + match[3]
        result = json.loads((ROOT / "examples" / "results" / name).read_text(encoding="utf-8"))
        return match[1] + TABLES[name](result) + match[3]

    return MARK.sub(fill, text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = render(before)
    if "--write" in sys.argv:
        readme.write_text(after, encoding="utf-8")
    elif before != after:
        sys.exit("README's tables differ from examples/results; write: python examples/readme_tables.py --write")
