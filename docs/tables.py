"""Tables of the documentation and of README, from `examples/results/*.json`, cards and presets: no figure is typed.

In the documentation they are directives (`docs/_ext/tables_extension.py`), in README they stand between marks:

    python docs/tables.py            # exit 1 if README's tables differ
    python docs/tables.py --write
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning_solo.cards.card import RESOURCES, Card
from lightning_solo.cards.catalogue import built_in_cards
from lightning_solo.cards.configuration import Chosen, Configuration
from lightning_solo.cards.engines import ENGINES, EXACT, ROUNDING, answer_of
from lightning_solo.ladder.display import COLUMNS, details, noise_in_words, shortened
from lightning_solo.ladder.figures import Figures
from lightning_solo.planner.device import CAPABILITIES, device
from lightning_solo.planner.plan import Plan
from lightning_solo.presets.compose import compose
from lightning_solo.presets.files import describe
from lightning_solo.sweeps.outcome import FINISHED
from lightning_solo.tables import Cell, Column, Table, filled_table, markdown
from lightning_solo.techniques.low_precision_matmul.card import FORMATS, formats_of
from lightning_solo.units import GiB, MiB

ROOT = Path(__file__).resolve().parents[1]
PRESETS = ROOT / "conf" / "library" / "solo"
MARK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(headers: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; columns of which most cells begin with a number are right-aligned."""
    columns = [[cell for cell in column if cell] for column in zip(*rows, strict=True)]
    numbers = [sum(cell[0] in "0123456789+-~±" for cell in column) * 2 > len(column) for column in columns]
    return markdown(
        Table("", headers, [[Cell(text, n or None) for text, n in zip(row, numbers, strict=True)] for row in rows])
    )


def ladder_table(result: dict[str, Any]) -> str:
    """Return the rows of `ladder.json`; a column without a figure is left out."""
    rungs = [Figures(**{**row, "overrides": tuple(row["overrides"])}) for row in result["rows"]]
    name = Column[Figures](
        "rung", lambda row: Cell(f"`{row.name}`{'' if row.status == FINISHED else f': {row.status}'}")
    )
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    note = (
        f"\n{result['hardware']}; {versions}; {result['steps']} optimizer steps each, in a fresh process. "
        f"Memory: {result['memory']}. {capitalized(noise_in_words(rungs))}. Command: `{result['command']}`\n"
    )
    remarks = "".join(f"- {line}\n" for line in details(rungs))
    return markdown(filled_table("", (name, *COLUMNS), shortened(rungs))) + note + (f"\n{remarks}" if remarks else "")


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


def preset_overhead_table(result: dict[str, Any]) -> str:
    """Return the CPU time that presets add to a step of a small module."""
    rows = []
    for name, found in result["presets"].items():
        low, high = found["quartiles_ms"]
        preset, _, rest = name.partition(", ")
        figures = [f"{found[key]:.2f} ms" for key in ("plain_ms", "more_ms")]
        rows.append([f"`{preset}`" + (f", {rest}" if rest else ""), *figures, f"{low:.2f} to {high:.2f} ms"])
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    note = (
        f"\n{result['hardware']['cores']} shared cores ({result['hardware']['cpu']}); {versions}; CPU time of a batch"
        f" in one thread, median of {result['runs']} pairs of fits of {result['steps']} steps. Command:"
        f" `{result['command']}`\n"
    )
    return table(["preset", "plain", "added", "quartiles"], rows) + note


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
        rows.append([f"`{row['preset']}`", "bytes per parameter after a step, counted", f"{row['in_all']:.2f}"])
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


def versions_of(result: dict[str, Any]) -> str:
    """Return hardware and versions of a measurement."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    hardware = result.get("machine", result.get("hardware", ""))
    if isinstance(hardware, dict):
        hardware = f"{hardware['cores']} CPU cores ({hardware['cpu']}, {hardware['capability']})"
    return f"{hardware}; {versions}" if hardware else versions


def note(result: dict[str, Any], command: str, explained: str = "") -> str:
    """Return what stands below a table: what was measured with what, and the command that measures it again."""
    return f"\n{explained}{' ' if explained else ''}{versions_of(result)}. Command: `{command}`\n"


def sweep_table(result: dict[str, Any]) -> str:
    """Return the figures of the launcher, beside their targets."""
    gap, failures, kills, parent = result["gap"], result["failures"], result["kills"], result["parent"]
    failed = sum(count for status, count in failures["statuses"].items() if status != "finished")
    rows = [
        ["from the end of a job to the first line of the next, median", f"{gap['median_s']:.2f} s"],
        ["the same, longest", f"{gap['longest_s']:.2f} s (target {result['targets']['gap_s']:g} s)"],
        [
            "importing torch and Lightning, which the launcher saves each job",
            f"{gap['imports_from_cold_s']:.1f} s",
        ],
        [
            f"of {failures['rows']} jobs, those that fail",
            f"{failed}, of which {failures['failures_named']} are named",
        ],
        [f"command killed {kills['kills']} times during {kills['jobs']} jobs: rows", f"{kills['rows']}"],
        ["the same: most starts of one job", f"{kills['most_starts']}"],
        [f"growth of the command's memory over {parent['jobs'] - 20} jobs", f"{parent['grown_bytes'] / 2**20:.1f} MiB"],
    ]
    return table(["what", "measured"], rows) + note(result, result["command"])


def planner_table(result: dict[str, Any]) -> str:
    """Return the seconds and bytes of a plan, beside their targets."""
    targets, billions = result["targets"], result["planned"]["parameters"] / 1e9
    parts = {
        "one preset, from the prompt": "one_cold",
        "one preset, in a program that has planned": "one_warm",
        "all presets, from the prompt": "all_cold",
    }
    figures = [(what, result[key]["median_s"], targets[f"{key}_s"], 1, "s") for what, key in parts.items()]
    memory = result["memory"]["together_bytes"] / MiB
    figures.append(("resident memory of all processes", memory, targets["memory_bytes"] // MiB, 0, "MiB"))
    rows = [
        [what, f"{got:.{digits}f} {unit}", f"{target} {unit}", "yes" if got <= target else "no"]
        for what, got, target, digits, unit in figures
    ]
    size = f"{billions:.2f} billion parameters, `{shlex.join(result['planned']['command'])}`."
    return table(["what", "measured", "target", "met"], rows) + note(result, result["command"], size)


def plan_table(result: dict[str, Any]) -> str:
    """Return the line of each plan."""
    rows = [
        [
            f"`{plan.preset}`",
            plan.verdict,
            f"{plan.needed_bytes / GiB:.2f} GiB",
            f"{plan.host_bytes / GiB:.2f} GiB",
            f"{1e3 * plan.seconds_per_step:.0f} ms",
            str(plan.largest_micro_batch),
        ]
        for plan in map(Plan.from_dict, result["plans"])
    ]
    heads = ["preset", "verdict", "needs", "on the host", "step", "largest batch"]
    return table(heads, rows) + f"\nPlanned, not measured. Command: `{result['command']}`\n"


def plan_order_table(result: dict[str, Any]) -> str:
    """Return how planned times order presets, against real ones, by the table's speeds and by calibrated ones."""
    kinds = [result["as_in_the_table"], result["as_calibrated"]]
    parts = {
        "Spearman, all modules and presets": "spearman_all",
        "Spearman over the presets of a module, median": "spearman_of_a_module_median",
        "the preset planned as fastest is within 10 % of it": "fastest_chosen_within_10_percent",
        "planned over real, median": "planned_over_real_median",
    }
    rows = [[words, *(str(kind[key]) for kind in kinds)] for words, key in parts.items()]
    what = f"{len(result['rows'])} runs of {result['modules']} modules; calibrated while other work used the processor."
    return table(["what", "speeds of the table", "calibrated"], rows) + note(result, result["command"], what)


def architectures_table(result: dict[str, Any]) -> str:
    """Return how many architectures of transformers are planned to the byte."""
    summary = result["summary"]
    rows = [
        ["tried, from a small configuration", str(summary["tried"])],
        ["that train here", str(summary["counted"])],
        ["planned on tensors without data (the others are planned from real steps)", str(summary["traced"])],
        ["whose plan for the CPU equals real steps to the byte", str(summary["equal"])],
    ]
    return table(["architectures of transformers", "number"], rows) + note(
        result, "python examples/measure_architectures.py --write examples/results/architectures_cpu.json"
    )


def third_party_table(result: dict[str, Any]) -> str:
    """Return for each module of another library the presets under which it is equal to the bit, and the refusals."""
    rows = []
    for name, presets in result["modules"].items():
        library = next(each for each in result["libraries"] if name.startswith(f"{each}_"))
        others = [preset for preset, found in presets.items() if found["result"] != "equal to the bit"]
        words = {
            preset: "without the preset, too, it fails in bf16"
            if presets[preset]["result"].startswith("fails")
            else THIRD_PARTY_REASONS[presets[preset]["why"].partition(":")[0]]
            for preset in others
        }
        reasons = {why: ", ".join(f"`{p}`" for p in others if words[p] == why) for why in words.values()}
        equal = f"{len(presets) - len(others)} of {len(presets)}"
        explained = "; ".join(f"{why}: {names}" for why, names in reasons.items())
        rows.append([library, f"`{name.removeprefix(f'{library}_')}`", equal, explained])
    return table(["library", "module", "equal to the bit", "other presets"], rows) + note(result, result["command"])


THIRD_PARTY_REASONS = {"NothingToDoError": "refused, no repeated blocks", "CapabilityError": "refused, needs a GPU"}
"""Error -> what it means in the table of modules of other libraries."""


def lightning_suite_table(result: dict[str, Any]) -> str:
    """Return how Lightning's own tests end with its strategy for one device, and with ours in its place."""
    kinds = ("passed", "skipped", "failure", "error")
    rows = [
        [
            part,
            *(f"{stock}, {ours}" for stock, ours in (row[kind] for kind in kinds)),
            str(len(row["fails_with_ours_alone"])),
        ]
        for part, row in result["parts"].items()
    ]
    headers = ["tests of Lightning", "passed", "skipped", "failed", "errors", "fail with seams alone"]
    explained = "Each without seams, then with seams and no technique."
    return table(headers, rows) + note(result, "python examples/measure_lightning_suite.py <checkout>", explained)


def moments_table(result: dict[str, Any]) -> str:
    """Return how far 8-bit moments move an update from that of fp32."""
    rows = [
        [row["code"], str(row["block"]), f"{row['relative']:.1%}", f"{row['longest']:.2f} learning rates"]
        for row in result["rows"]
    ]
    heads = ["8-bit code", "elements per scale", "error of an update", "largest error of an element"]
    return table(heads, rows) + note(result, result["command"], f"{capitalized(result['what'])}.")


def averaging_table(result: dict[str, Any]) -> str:
    """Return the loss of the last weights and of their averages, by schedule."""
    names = [name.split(", ", 1)[1] for name in result["losses"] if name.startswith("constant")]

    def cell(schedule: str, name: str) -> str:
        loss = result["losses"][f"{schedule} rate, {name}"]
        return f"{loss['mean']:.3f} ({', '.join(f'{each:.3f}' for each in loss['each'])})"

    rows = [[name, cell("constant", name), cell("cosine", name)] for name in names]
    headers = ["weights", "constant learning rate", "cosine to zero"]
    words = f"Nats per byte on 64 held-out windows after {result['averaged_steps']} steps of a byte GPT of"
    explained = f"{words} {result['parameters']:,} parameters: the mean of {len(result['seeds'])} seeds (each)."
    return table(headers, rows) + note(result, result["command"], explained)


def activations_table(result: dict[str, Any]) -> str:
    """Return what each way of keeping activations leaves on the device, and what it computes."""
    first = result["rows"][0]
    rows = [
        [
            row["name"],
            f"{row['device_bytes'] / MiB:.1f} MiB",
            f"{row['device_bytes'] / first['device_bytes']:.3f}",
            f"{row['host_bytes'] / MiB:.1f} MiB",
            f"{row['flops'] / first['flops']:.2f}",
        ]
        for row in result["rows"]
    ]
    heads = ["", "saved for backward, on the device", "share", "on the host", "FLOPs, to the first"]
    return table(heads, rows) + note(result, result["command"], f"{capitalized(result['what'])}.")


def activation_budget_table(result: dict[str, Any]) -> str:
    """Return the budget asked for and the peak reached, by model."""
    models: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        models.setdefault(row["model"], []).append(row)
    rows = [
        [
            name,
            *(f"{row['budget'] / MiB:.1f}: {row['peak'] / MiB:.1f} ({row['kept']})" for row in measured),
            f"{max(row['peak'] / row['budget'] for row in measured):.3f} x",
        ]
        for name, measured in models.items()
    ]
    count = max(map(len, models.values()))
    heads = [
        "budget: peak (blocks kept), in MiB",
        *(f"budget {number + 1}" for number in range(count)),
        "largest peak, of its budget",
    ]
    return table(heads, rows) + note(result, result["command"], f"{capitalized(result['what'])}.")


def sequences_table(result: dict[str, Any]) -> str:
    """Return the peak of a step by length of the sequence, for each way of computing a block."""
    rows = []
    for row in result["rows"]:
        peaks = [step["peak"] for step in row["steps"]]
        rows.append([row["name"], *(f"{peak / MiB:.1f} MiB" for peak in peaks), f"{peaks[-1] / peaks[-2]:.2f} x"])
    heads = ["", *(f"{tokens:,} tokens" for tokens in result["lengths"]), "last doubling"]
    return table(heads, rows) + note(result, result["command"], f"{capitalized(result['what'])}.")


def prefetch_table(result: dict[str, Any]) -> str:
    """Return which share of a step is spent waiting for data, with and without prefetching."""
    rows = [[f"{row['loading']:.2f}", f"{row['plain']:.1%}", f"{row['prefetch']:.1%}"] for row in result["rows"]]
    heads = ["loading of a batch, in steps", "waited, of a step", "with `prefetch`"]
    explained = f"A loader without workers and steps of {result['step_s'] * 1000:.0f} ms, both of which sleep."
    command = "python examples/measure_prefetch.py --write examples/results/prefetch_cpu.json"
    return table(heads, rows) + note(result, command, explained)


def item_cache_table(result: dict[str, Any]) -> str:
    """Return what an item costs after the first epoch, and the memory that keeps the items."""
    rows = [
        [f"{row['workers']}", row["way"], f"{row['item_ms']:.2f} ms", f"{row['mebibytes']} MiB"]
        for row in result["rows"]
    ]
    heads = ["workers", "items are", "an item, after the first epoch", "more memory"]
    explained = (
        f"{result['items']:,} JPEG images of 224 x 224, medians of {result['repeats']} fits; the system's cache of"
        " the file on the disk isn't counted."
    )
    command = "python examples/measure_item_cache.py --write examples/results/item_cache_cpu.json"
    return table(heads, rows) + note(result, command, explained)


def finite_guard_table(result: dict[str, Any]) -> str:
    """Return what a batch takes more with the guard of loss and gradients, and its share of a 10 ms step."""
    rows = [
        [
            f"{row['module']}, {row['way']}",
            f"{row['plain_us'] / 1e3:.1f} ms",
            f"{row['more_us']} µs ({row['quartiles_us'][0]} to {row['quartiles_us'][1]})",
            f"{row['share_of_step']:.1%}",
        ]
        for row in result["rows"]
    ]
    heads = ["module", "batch without it", "more with it (quartiles)", "of a 10 ms step"]
    explained = f"CPU time in one thread, {result['pairs']} pairs of fits of {result['steps']} batches."
    command = "python examples/measure_finite_guard.py --write examples/results/finite_guard_cpu.json"
    return table(heads, rows) + note(result, command, explained)


def exact_resume_table(result: dict[str, Any]) -> str:
    """Return what a batch takes more with exact_resume, and how much larger a checkpoint is."""
    rows = [
        [
            f"{row['workers']}, {'random' if row['draws'] else 'constant'}",
            f"{row['plain_us'] / 1e3:.1f} ms",
            f"{row['more_us']} µs ({row['quartiles_us'][0]} to {row['quartiles_us'][1]})",
            f"{row['bytes'] / 1e3:.0f} kB",
        ]
        for row in result["rows"]
    ]
    heads = ["workers, items", "batch without it", "more with it (quartiles)", "more in a checkpoint"]
    explained = f"CPU time of the training process, {result['pairs']} pairs of fits of {result['steps']} batches."
    command = "python examples/measure_exact_resume.py --write examples/results/exact_resume_cpu.json"
    return table(heads, rows) + note(result, command, explained)


def checkpoints_table(result: dict[str, Any]) -> str:
    """Return what a save of a checkpoint takes, by the way it is saved."""
    rows = [[row["way"], f"{row['seconds']:.3f} s", f"{row['of_torch_save']:.2f} x"] for row in result["rows"]]
    heads = [f"a save of {result['mebibytes']} MiB", "time", "of `torch.save`"]
    command = "python examples/measure_checkpoints.py --write examples/results/checkpoints_cpu.json"
    return table(heads, rows) + note(result, command, f"Median of {result['repeats']} saves each, which take turns.")


def faults_table(result: dict[str, Any]) -> str:
    """Return row by row what came of injected faults, and what stock Lightning does on the same."""
    rows = [
        [str(line["row"]), line["fault"], f"{line['trials']:,}" if line["trials"] else "", line["ours"], line["stock"]]
        for line in result["table"]
    ]
    heads = ["row", "fault", "trials or tests", "with this package", "Lightning 2.6.6"]
    explained = "¹ measured apart from this exam."
    return f"{kills_table(result)}\n{table(heads, rows)}{note(result, 'make faults', explained)}"


def kills_table(result: dict[str, Any]) -> str:
    """Return how many processes were killed, by the way they saved and where, and the files that they left."""
    places: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in result["kills"]:
        places.setdefault((each["way"], each["file_system"]), []).append(each)
    rows = []
    for (way, file_system), parts in places.items():
        after = [
            [count for each in parts for saves, count in each["saves"].items() if int(saves) == n] for n in range(3)
        ]
        trials = sum(each["trials"] for each in parts)
        counts = [*map(sum, after), trials - sum(map(sum, after))]
        bad = [sum(each[name] for each in parts) for name in ("unreadable", "changed", "lost")]
        rows.append([f"{way}, {file_system}", f"{trials:,}", *map(str, counts), *map(str, bad)])
    after_saves = ["after 0 saves", "1", "2", "3 or more"]
    heads = ["saved by, on", "processes killed", *after_saves, "newest file unreadable", "of other content", "too old"]
    return table(heads, rows)


def loader_advice_table(result: dict[str, Any]) -> str:
    """Return what options of a loader were said to save at most, and what they saved."""
    rows = []
    for row in result["rows"]:
        option = f"`{row['write']}`" if row["write"] else "none named"
        rows.append([row["case"], f"{row['batch_ms']:.1f} ms", option, f"{row['at_most']:.1%}", f"{row['saved']:.1%}"])
    heads = ["loader", "a batch's time", "option", "said to save at most", "saved"]
    explained = "Loaders and steps of 25 ms that sleep; savings are shares of the time per batch, each from two fits."
    explained += f" The observer takes {result['cost_us']:.1f} µs per batch."
    command = "python examples/measure_loader_advice.py --write examples/results/loader_advice_cpu.json"
    return table(heads, rows) + note(result, command, explained)


def micro_batching_table(result: dict[str, Any]) -> str:
    """Return what a step takes more with micro-batching, for models of several kinds."""
    heads = ["model", "modules", "parameter tensors", "buffers", "step", "more, median", "quartiles", "of the step"]
    rows = []
    for row in result["rows"]:
        counts = [str(row[key]) for key in ("modules", "parameter_tensors", "buffers")]
        low, high = row["quartiles_us"]
        share = f"{row['more_us'] / row['step_ms'] / 10:.1f} %"
        rows.append(
            [row["model"], *counts, f"{row['step_ms']} ms", f"{row['more_us']} µs", f"{low} to {high} µs", share]
        )
    explained = (
        f"{result['steps']} steps, in turns with a fit without it, in one process; seconds of each fit's own thread."
        f" Other work shared the cores (load {result['load']}), and their caches: hence the spread."
    )
    return table(heads, rows) + note(result, result["command"], explained)


def curriculum_table(result: dict[str, Any]) -> str:
    """Return in how many steps and tokens runs with and without a curriculum came to a loss."""

    def each(values: list[Any], words: Callable[[Any], str]) -> str:
        return ", ".join("not reached" if value is None else words(value) for value in values)

    rows = [
        [
            row["items"],
            row["curriculum"],
            f"{row['target']:.2f}",
            each(row["steps"], str),
            each(row["tokens"], lambda tokens: f"{tokens / 1e6:.2f} M"),
            each(row["at_end"], lambda loss: f"{loss:.3f}"),
        ]
        for row in result["rows"]
    ]
    heads = ["items", "curriculum", "loss to come to", "steps", "tokens", "loss at the end"]
    explained = (
        f"A byte GPT of width {result['model']['width']} and depth {result['model']['depth']} on windows of"
        f" {result['model']['context']} bytes or on paragraphs, held-out loss every 20 steps; seeds"
        f" {', '.join(map(str, result['seeds']))}. Each run has {result['max_steps']} steps of {result['batch_size']}"
        f" items, and the curriculum ends after {result['duration']} of them; it starts with {result['start']:.0%}."
        " The loss to come to is what all runs without a curriculum have after four fifths of their steps."
    )
    return table(heads, rows) + note(result, result["command"], explained)


def low_precision_table(result: dict[str, Any]) -> str:
    """Return the loss after training in each format, and its gap to bf16 with the same seeds."""
    plain = result["rows"][0]["held_out"]
    rows = []
    for row in result["rows"]:
        gaps = [loss - other for loss, other in zip(row["held_out"], plain, strict=True)]
        shown = (
            [f"{statistics.mean(gaps):+.4f}", f"{min(gaps):+.4f} to {max(gaps):+.4f}"]
            if row["format"] != "bf16"
            else ["", ""]
        )
        rows.append([f"`{row['format']}`", f"{statistics.mean(row['held_out']):.4f}", *shown])
    model = result["model"]
    explained = (
        f"A byte GPT of width {model['width']} and {model['depth']} blocks under `bf16-mixed`, {result['steps']} steps,"
        f" {len(result['seeds'])} seeds; loss on held-out text, computed in fp32. Not exact; all but int8 is emulated."
    )
    heads = ["products in", "held-out loss, mean", "gap to bf16, mean", "over the seeds"]
    return table(heads, rows) + note(result, result["command"], explained)


def quantized_loading_table(result: dict[str, Any]) -> str:
    """Return the growth of anonymous memory for each way to load a model."""
    rows = [[row["way"], str(row["peak_mib"]), str(row["kept_mib"])] for row in result["rows"]]
    quantized = max(row["quantized_mib"] for row in result["rows"])
    explained = (
        f"A Llama of {result['weights'] / 1e6:.0f} million weights in bf16, on one thread; its linear layers take"
        f" {quantized} MiB in 4 bits. The largest of three fresh processes for each way, with the shards in the file"
        " system's cache; anonymous memory (RssAnon) is without mapped files."
    )
    return table(["way", "growth at the peak, MiB", "growth kept, MiB"], rows) + note(
        result, result["command"], explained
    )


def distillation_table(result: dict[str, Any]) -> str:
    """Return the losses of students alone and with a teacher, for each seed."""
    rows = [
        [row["way"], *map(str, row["losses"]), str(row["mean"]), str(row["better_than_alone"])]
        for row in result["ways"]
    ]
    explained = (
        f"Validation loss of students of {result['student_parameters']:,} parameters after {result['student_steps']}"
        f" steps, in nats per byte; that of their teacher, a byte GPT of 842,496 parameters, is {result['teacher']}."
        f" The file takes {result['bytes_per_position']} bytes per position."
    )
    seeds = [f"seed {seed}" for seed in result["seeds"]]
    return table(["way", *seeds, "mean", "better than alone"], rows) + note(result, result["command"], explained)


def distillation_steps_table(result: dict[str, Any]) -> str:
    """Return the time of a student's step alone and with a teacher."""
    rows = [[row["way"], str(row["step_ms"]), str(row["of_alone"])] for row in result["ways"]]
    explained = (
        f"The least median of {result['rounds']} runs of {result['steps_per_round']} steps that take turns, on one"
        " thread."
    )
    return table(["way", "step, ms", "of alone"], rows) + note(result, result["command"], explained)


def snapshots_table(result: dict[str, Any]) -> str:
    """Return the losses of snapshots of a cyclic schedule, alone, averaged and as ensembles."""
    rows = [[row["way"], *map(str, row["losses"]), str(row["mean"])] for row in result["ways"]]
    explained = (
        f"Validation loss in nats per byte of byte GPTs of 124,672 parameters after {result['student_steps']} steps:"
        f" with one cosine, or with {result['cycles']}, each of as many steps. A prediction of an ensemble is the mean"
        " of its members' probabilities."
    )
    seeds = [f"seed {seed}" for seed in result["seeds"]]
    return table(["weights", *seeds, "mean"], rows) + note(result, result["command"], explained)


def pruning_table(result: dict[str, Any]) -> str:
    """Return the losses of a byte GPT with pruned weights, at each rate, and the bytes of its exports."""
    controls = list(result["controls"].items())
    rows = [
        ["none", "0", f"{result['parameters']:,}", *(cell for _, loss in controls for cell in (str(loss), "")), "1.00"]
    ]
    for way in dict.fromkeys(row["way"] for row in result["rows"]):
        same = [row for row in result["rows"] if row["way"] == way]
        losses = [cell for row in same for cell in (str(row["loss"]), f"{row['more than control']:+.4f}")]
        share = f"{same[0]['bytes'] / result['bytes_fp32']:.2f}"
        rows.append([way, f"{same[0]['pruned']:,}", f"{same[0]['parameters']:,}", *losses, share])
    explained = (
        f"Validation loss in nats per byte of a byte GPT of {result['parameters']:,} parameters: trained for"
        f" {result['base_steps']:,} steps ({result['base']}), pruned, and trained for {result['steps']} steps more, all"
        f" of one seed, at the learning rate {controls[0][0]}, or at that of the base with 10 warm-up steps. The"
        " embedding isn't pruned. Bytes are those of the exported file at the first rate, of the weights in fp32."
    )
    at = [column for rate, _ in controls for column in (f"loss at {rate}", "above none")]
    return table(["pruned", "weights that are 0", "parameters", *at, "bytes"], rows) + note(
        result, result["command"], explained
    )


def low_rank_table(result: dict[str, Any]) -> str:
    """Return the losses of a byte GPT with factorized or shared weights, and their bytes."""
    rows = [["none", f"{result['parameters']:,}", str(result["base"]), str(result["control"]), "", "1.00"]]
    for row in result["rows"]:
        share = f"{row['bytes'] / result['bytes_fp32']:.2f}"
        losses = [str(row["start"]), str(row["loss"]), f"{row['more than control']:+.4f}"]
        rows.append([row["way"], f"{row['parameters']:,}", *losses, share])
    explained = (
        f"Validation loss in nats per byte of a byte GPT of {result['parameters']:,} parameters: trained for"
        f" {result['base_steps']:,} steps, changed, and trained for {result['steps']} steps more, all of one seed."
        " None is the control, of the same steps. Width 128: at rank 96 only the feed-forward layers get smaller, and"
        " at rank 64 no square layer does. Bytes are those of the exported file, of the weights in fp32."
    )
    header = ["changed", "parameters", "loss at the start", "after further steps", "above none", "bytes"]
    return table(header, rows) + note(result, result["command"], explained)


def quantization_table(result: dict[str, Any]) -> str:
    """Return the losses of a byte GPT in few bits."""
    rows = [
        [
            str(row["bits"]),
            str(row["group_size"] or "row"),
            f"{row['bytes'] / 1e6:.2f}",
            *(f"{row[key]:.4f}" if key in row else "" for key in ("base", "control", "trained so")),
            f"{row['share recovered']:.0%}"
            if row["control"] - result["control"] > 0.01 and "trained so" in row
            else "",
        ]
        for row in result["rows"]
    ]
    heads = ["bits", "group", "MB", "base", "control, rounded afterwards", "trained so", "share of the gap recovered"]
    explained = (
        f"A byte GPT after {result['base_steps']} steps (base, in fp32 {result['base']:.4f} nats per byte and"
        f" {result['bytes_fp32'] / 1e6:.2f} MB) and after {result['steps']} more (control, {result['control']:.4f}), or"
        " the same steps with rounded weights; one seed, 8,192 bytes of held-out text. Embeddings and the tied head"
        " stay in fp32. Losses are those of exported models; logits equal those of training to the bit in every row."
    )
    inputs = "".join(
        f" With 8 bits by rows and activations={row['activations']} the base has {row['base']:.4f}."
        for row in result.get("inputs", ())
    )
    return table(heads, rows) + note(result, result["command"], explained + inputs)


def quantization_times_table(result: dict[str, Any]) -> str:
    """Return the seconds of a step with rounded weights, and the speed of exported layers."""
    steps = [[row["way"], f"{row['seconds']:.3f}", f"{row['of fp32']:.2f}"] for row in result["step_times"]]
    speeds = [
        [
            row["way"],
            f"{row['bytes'] / 1e6:.2f}",
            *(f"{row[f'batch {size}']:.2f}" for size in (1, 64)),
            f"{row['error']:.4f}",
        ]
        for row in result["inference"]
    ]
    explained = f"{result['layers']}, best of 60 turns."
    return "\n\n".join(
        (
            table(["training step", "median seconds", "of fp32"], steps),
            table(["exported layers", "MB", "x fp32, batch 1", "x fp32, batch 64", "error"], speeds),
        )
    ) + note(result, result["command"], explained)


def formats() -> str:
    """Return which formats of low precision each device that can be planned for multiplies in."""
    rows = []
    for name, capability in CAPABILITIES.items():
        able = formats_of(capability, device(name).label)
        rows.append([f"`{name}`", ".".join(map(str, capability)), *("yes" if kind in able else "" for kind in FORMATS)])
    return table(["device", "compute capability", *(f"`{kind}`" for kind in FORMATS)], rows)


def padding_table(result: dict[str, Any]) -> str:
    """Return the share of padding in random batches, in those of similar length and in packed rows."""
    kinds = {
        "plain": "random batches",
        "by_count": f"{result['batch_size']} items of similar length",
        "by_tokens": f"up to {result['max_tokens']:,} tokens of similar length",
        "packed": f"packed rows of {result['capacity']:,}",
    }
    rows = [
        [f"{row['sigma']:g}", f"{row['lengths'][0]} to {row['lengths'][1]:,}", *(f"{row[kind]:.1%}" for kind in kinds)]
        for row in result["rows"]
    ]
    explained = (
        f"Share of padding among the tokens of {result['items']:,} items with log-normal lengths of median"
        f" {result['median']}, the worst of three epochs; random batches have {result['batch_size']} items."
    )
    return table(["deviation", "lengths", *kinds.values()], rows) + note(result, result["command"], explained)


def optimizers_table(result: dict[str, Any]) -> str:
    """Return the bytes of each optimizer's states."""
    headers = ["`optimizer`", "bytes per parameter of a matrix", "of the whole model"]
    rows = [[f"`{row['name']}`", f"{row['matrix']:.2f}", f"{row['all']:.2f}"] for row in result["rows"]]
    explained = "States of a byte GPT with 10.8 million parameters, in fp32, after a step."
    return table(headers, rows) + note(result, result["command"], explained)


def whole_ladder_table(result: dict[str, Any]) -> str:
    """Return the planned peak under one technique after another, and validation losses without and with all of them."""
    first = result["rungs"][0]["peak_bytes"]
    parts = ("weights", "gradients", "optimizer_states", "activations", "temporaries")
    rows = [
        [
            f"`{row['name']}`",
            f"{row['peak_bytes'] / MiB:,.0f} MiB",
            f"{first / row['peak_bytes']:.1f} x",
            *(f"{row['breakdown'][part] / MiB:,.0f}" for part in parts),
        ]
        for row in result["rungs"]
    ]
    case, small = result["case"], result["small"]
    losses = ", ".join(f"{row['plain']:.3f} and {row['everything']:.3f}" for row in result["losses"])
    explained = (
        f"Planned for the device `{result['device']}`: GPT-2 of width {case['n_embd']} and {case['n_layer']} blocks,"
        f" vocabulary {case['vocab_size']:,}, {case['sequences']} sequences of {case['context']:,} tokens;"
        f" parts of the peak in MiB; target {result['target']} x. Validation losses without and with all techniques,"
        f" trained on this CPU for {small['steps']} steps, width {small['n_embd']}, three seeds: {losses}."
    )
    heads = ["rung", "peak", "saved", *(part.replace("_", " ") for part in parts)]
    return table(heads, rows) + note(result, result["command"], explained)


def fine_tuning_plans_table(result: dict[str, Any]) -> str:
    """Return the largest model that fits each card under each way of training, by its plans."""
    ways = list(dict.fromkeys(row["way"] for row in result["plans"] if not row["way"].endswith(", smaller")))
    tokens = result["plans"][0]["tokens"]

    def largest(way: str, gibibytes: int) -> str:
        models = list(dict.fromkeys(row["model"] for row in result["plans"]))
        fitting = [
            (models.index(row["model"]), row["way"] == way, row)
            for row in result["plans"]
            if row["way"] in (way, f"{way}, smaller")
            and row["tokens"] == tokens
            and row["needed_bytes"] <= 0.95 * gibibytes * GiB
        ]
        if not fitting:
            return "none"
        _, plain, row = max(fitting, key=lambda each: each[:2])
        host = f" + {row['host_bytes'] / GiB:.0f}" if row["host_bytes"] else ""
        return f"{row['model']}{'' if plain else '*'}: {row['needed_bytes'] / GiB:.1f}{host}"

    rows = [[card, *(largest(way, size) for way in ways)] for card, size in result["cards"].items()]
    explained = (
        f"Planned, not measured: the largest model that leaves 5 % of the card free, and the GiB that it needs (+ on"
        f" the host), for one sequence of {tokens:,} tokens, blocks recomputed and logits in chunks. *: with"
        f" `quantized_base.embeddings=host`, `head=int8`."
    )
    return table(["card", *ways], rows) + note(result, result["command"], explained)


def peers_table(result: dict[str, Any]) -> str:
    """Return what each peer takes for the same steps, grouped by the work; a peer that can't run has its reason."""
    rows: list[list[str]] = []
    for work in dict.fromkeys(row["work"] for row in result["rows"]):
        rows.append([f"**{work}**", *[""] * 9])
        for row in (row for row in result["rows"] if row["work"] == work):
            ratios = row.get("processor_ratio")
            rows.append(
                [
                    row["name"],
                    f"{row['processor_s'] * 1e3:.0f} ms" if "processor_s" in row else "",
                    f"{statistics.median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else "",
                    f"{row['peak_bytes'] / MiB:,.1f} MiB" if "peak_bytes" in row else "",
                    f"{row['peak_resident'] / MiB:,.0f} MiB" if "peak_resident" in row else "",
                    f"{row['loss']:.4f}" if "loss" in row else "",
                    _whole(row.get("batch")),
                    f"{row['parameters'] / 1e6:.1f}" if row.get("parameters") else "",
                    _whole(row.get("lines")),
                    (row.get("reason") or row.get("error") or "").replace("|", "\\|"),
                ]
            )
    sizes = result["sizes"]

    def shape(name: str) -> str:
        size = sizes[name]
        return f"{size['DEPTH']} blocks of width {size['WIDTH']}, {size['BATCH']} x {size['CONTEXT']} tokens"

    heads = ["peer", "step", "beside", "tensors", "resident", "loss", "batch", "10⁶ parameters", "lines", "why not"]
    shown = [number for number, column in enumerate(zip(*rows, strict=True)) if any(column)]  # measured so far
    explained = (
        f"Step and loss: {shape('small')}; processor seconds of a step in one thread, median of the rounds. Beside: the"
        f" same divided by that of the preset above, both taking turns, a step each; median of a round's steps, and of"
        f" the rounds (least to most). Loss: mean of the last 10 of"
        f" {result['steps']} steps. Tensors and resident: {shape('large')}; peaks of the bytes that torch's allocator"
        f" handed out, counted, and of the process. The largest batch, and the largest model at a batch of 1, whose"
        f" tensors stay within {sizes['budget'] / MiB:.0f} MiB. Lines that differ from plain Lightning's script."
    )
    cells = [[row[number] for number in shown] for row in rows]
    return table([heads[number] for number in shown], cells) + note(result, "make peers", explained)


def _whole(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def promises_table(result: dict[str, Any]) -> str:
    """Return each promise of the field's guides with its planned and its measured figure, and the measuring command."""
    planned, counted = result["planned"], result["counted"]
    ladder = {row["name"]: row["breakdown"] for row in _stored("ladder_cpu.json")["rows"]}
    kept = {row["name"]: row for row in _stored("activations_cpu.json")["rows"]}
    compact = {row["preset"]: row["in_all"] for row in _stored("compact_cpu.json")["states"]}
    steps = {row["name"]: [step["peak"] for step in row["steps"]] for row in _stored("sequences_cpu.json")["rows"]}
    whole = _stored("whole_ladder.json")
    plain, mixed, recomputed = planned["activations"]
    states_plain, states_mixed = planned["states_mixed"]
    everything, again = kept["everything kept"], kept["blocks recomputed"]
    share = {name: found / planned["parameters"] for name, found in planned["states"].items()}
    seconds = planned["seconds"]
    worst = max(abs(row["everything"] - row["plain"]) for row in whole["losses"])
    spread = max(row["plain"] for row in whole["losses"]) - min(row["plain"] for row in whole["losses"])
    saved = whole["rungs"][0]["peak_bytes"] / whole["rungs"][-1]["peak_bytes"]
    flash, math = (steps[f"`{name}`"][-1] / steps[f"`{name}`"][0] for name in ("flash", "math"))
    rows = [
        [
            "mixed precision halves memory",
            f"`bf16`: activations {mixed / plain:.2f}, states {states_mixed / states_plain:.2f};"
            f" `compact`: states {share['compact'] / share['AdamW']:.2f}",
            f"activations {ladder['bf16']['activations'] / ladder['baseline']['activations']:.2f}, states"
            f" {ladder['bf16']['optimizer_states'] / ladder['baseline']['optimizer_states']:.2f}; `compact`:"
            f" {compact['compact'] / compact['baseline']:.2f}",
            "`make ladder`, `python examples/measure_compact.py --only states`",
        ],
        [
            "checkpointing saves 40 to 80 % of activations for a third more compute",
            f"{1 - recomputed / mixed:.0%} less, {planned['flops'][1] / planned['flops'][0] - 1:.1%} more FLOPs",
            f"{1 - again['device_bytes'] / everything['device_bytes']:.0%} less,"
            f" {again['flops'] / everything['flops'] - 1:.1%} more FLOPs",
            "`python examples/measure_activations.py`",
        ],
        [
            "AdamW in 32 bits needs 16 bytes per parameter, 7 billion 112 GB; SGD half",
            f"{share['AdamW']:.2f} and {share['SGD']:.2f} bytes; {planned['parameters'] / 1e9:.2f} billion:"
            f" {planned['states']['AdamW'] / 1e9:.1f} and {planned['states']['SGD'] / 1e9:.1f} GB",
            f"{counted['states']['AdamW']:.2f} and {counted['states']['SGD']:.2f} bytes",
            "`python examples/plan_promises.py`",
        ],
        [
            "a batch of 16 instead of 128 needs an eighth of the activations",
            f"{planned['batches']['16'] / planned['batches']['128']:.4f}",
            f"{counted['batches']['16'] / counted['batches']['128']:.4f}",
            "`python examples/plan_promises.py`",
        ],
        [
            "attention's memory grows with the tokens, not with their square",
            f"{planned['lengths'][1] / planned['lengths'][0]:.2f} x for 4 x the tokens",
            f"{flash:.2f} x for 4 x the tokens; kernel `math` {math:.1f} x",
            "`python examples/measure_sequences.py`",
        ],
        [
            "all techniques: 4 to 8, up to 20 times less memory, same accuracy",
            f"{saved:.1f} x",
            f"validation losses differ by at most {worst:.3f}, three seeds by {spread:.3f}",
            "`python examples/plan_whole_ladder.py`",
        ],
        [
            "offloading is the last resort and much slower",
            f"a step of 16,384 tokens of an 8B: `compact_host` {seconds['compact_host'] / seconds['compact']:.2f} x the"
            f" time of `compact`, `zero_offload` {seconds['zero_offload'] / seconds['compact']:.2f} x",
            "needs a GPU",
            "`make gpu PART=e`",
        ],
    ]
    explained = f"Planned for the device `{result['device']}`; measured on a CPU."
    return table(["promise", "planned", "measured", "measured by"], rows) + note(result, result["command"], explained)


def _stored(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "examples" / "results" / name).read_text(encoding="utf-8"))
    return found


def longest_sequence_table(result: dict[str, Any]) -> str:
    """Return the longest sequences that fit a device, as planned."""
    plain: dict[str, int] = {}
    rows = []
    for name, case in result["cases"].items():
        plain.setdefault(name[:2], case["tokens"])
        times = case["tokens"] / plain[name[:2]]
        host = f"{case['host_bytes'] / 2**30:.0f} GiB" if case["host_bytes"] else ""
        needed = f"{case['needed_bytes'] / 2**30:.0f} GiB"
        ratio = f"{times:.0f} x" if name.startswith("3b") else ""
        rows.append([name, f"{case['tokens']:,} tokens", ratio, needed, host])
    explained = (
        f"Planned for the device `{result['device']}`, one sequence per micro-batch, full fine-tuning with AdamW."
    )
    return table(["model, presets", "longest", "of plain", "device", "host"], rows) + note(
        result, result["command"], explained
    )


def chunked_loss_table(result: dict[str, Any]) -> str:
    """Return peak, time and gradients of the chunked cross-entropy beside those of the plain one, and the targets."""
    targets, gradients, seconds = result["targets"], result["gradients"], result["seconds"]
    rows = [
        [
            f"peak of loss and head, width {row['width']}, `{row['precision']}`",
            *(f"{row[name] / 2**30:.2f} GiB" for name in ("plain", "chunked")),
            f"{row['chunked'] / row['plain']:.3f} x",
            f"{targets['peak']} x",
        ]
        for row in result["peaks"]
    ]
    ratio = seconds["chunked"] / seconds["plain"]
    times = [f"{seconds[name] * 1000:.0f} ms" for name in ("plain", "chunked")]
    rows.append(["time of a forward and backward, fp32", *times, f"{ratio:.2f} x", f"{targets['time']} x"])
    fp32 = [f"{gradients['fp32']:.1e}", f"{targets['gradients']:.0e}"]
    rows.append(["gradients, off the plain loss's, fp32", "", "", *fp32])
    bf16 = [f"{gradients[name]:.1e}" for name in ("bf16, plain", "bf16")]
    rows.append(["gradients in bf16, off those in fp64", *bf16, "", ""])
    case, small = result["case"], result["small"]
    explained = (
        f"Peaks are counted, of a vocabulary of {case['vocabulary']:,}, {case['tokens']:,} tokens and chunks of "
        f"{case['chunk_tokens']:,}, the gradients of hidden states and weight included; the time is of a vocabulary of "
        f"{small['vocabulary']:,}, {small['tokens']:,} tokens, width {small['width']} and as many chunks."
    )
    heads = ["what", "plain", "chunked", "ratio or difference", "target"]
    return table(heads, rows) + note(result, result["command"], explained)


def host_optimizers_table(result: dict[str, Any]) -> str:
    """Return the milliseconds of AdamW's step on the host."""
    rows = [
        [name, f"{row['median_ms']:.0f} ms", f"{row['fastest_ms']:.0f} to {row['slowest_ms']:.0f} ms"]
        for name, row in result["optimizers"].items()
    ]
    size = f"{result['elements'] / 1e6:.0f} million parameters, {result['steps']} steps."
    return table(["optimizer on the host", "a step, median", "range"], rows) + note(result, result["command"], size)


def kernels_table(result: dict[str, Any]) -> str:
    """Return what the machine code of each kernel takes on sm_90, and the estimate for an H200 made from it."""
    rows = []
    for name, found in result["kernels"].items():
        kernel = found["sm_90"]
        estimate = kernel.get("h200_8b")
        spilled = max(architecture["spilled_bytes"] for architecture in found.values())
        rows.append(
            [
                name,
                *(str(kernel["registers"]), str(spilled)),
                f"{kernel['per_element']['issue']:.0f}" if estimate else "",
                f"{estimate['computing_ms']:.1f} ms" if estimate else "",
                f"{estimate['floor_ms']:.1f} ms" if estimate else "",
            ]
        )
    heads = [
        "kernel",
        "registers",
        "spilled bytes",
        "instructions per element",
        "computing, estimated",
        "memory alone, estimated",
    ]
    explained = (
        f"Compiled for {len(found)} architectures; registers and instructions are those of sm_90. The estimate is of a "
        f"step of {result['parameters'] / 1e9:.1f} billion parameters on an H200 at 1.98 GHz and 4.1 TB/s; nothing of "
        "it has been measured on a GPU."
    )
    return table(heads, rows) + note(result, result["command"], explained)


def gpu_runs_table(result: dict[str, Any]) -> str:
    """Return the planned and measured peaks and steps of runs on a GPU."""
    rows = []
    measured = [row for row in result["rows"] if "micro_batch_s" in row]
    for row in measured:
        peaks = ["", f"{row['peak_allocated_bytes'] / GiB:.2f} GiB", ""]
        steps = ["", f"{row['micro_batch_s']:.3f} s", ""]
        if "planned_s" in row:
            peak, step = row["planned_bytes"], row["planned_s"]
            peaks[::2] = f"{peak / GiB:.2f} GiB", f"{peak / row['peak_allocated_bytes'] - 1:+.2%}"
            steps[::2] = f"{step:.3f} s", f"{step / row['micro_batch_s'] - 1:+.0%}"
        rows.append([row["what"], *peaks, *steps, f"{row['tokens_per_s']:,.0f}"])
    heads = ["run", "planned peak", "peak", "off", "planned step", "step", "off", "tokens/s"]
    count, part = measured[0]["parameters"] / 1e9, "d" if result["part"] == "presets" else "j"
    explained = (
        f"{result['machine']}: a byte GPT of {count:.2f} billion parameters, 4 sequences of 2,048 tokens, unless the"
        " row names another; a step is the median of several, each begun with an idle device. Planned from a"
        " calibration of this machine, without the GPU (`python examples/gpu/replan.py`)."
    )
    return table(heads, rows) + note(result, f"make gpu PART={part}", explained)


def fused_step_table(result: dict[str, Any]) -> str:
    """Return the time of the compact step's kernel beside that of its bytes, and its differences from operators."""
    equal = {row["what"].removeprefix("equal, "): row for row in result["rows"] if row["what"].startswith("equal, ")}
    rows = []
    for row in result["rows"]:
        if "ms" not in row:
            continue
        same = equal.get(row["what"])
        differ = f"{same['numbers_unlike'] / same['of']:.2%}" if same else ""
        floors = [
            f"{row['ms'] / row['floor_ms']:.2f} x",
            f"{row['launching_us']:.0f} us" if "launching_us" in row else "",
        ]
        rows.append([row["what"], f"{row['ms']:.3f} ms", f"{row['floor_ms']:.3f} ms", *floors, differ])
    (bandwidth,) = (row["gb_per_s"] for row in result["rows"] if row["what"] == "copy on the device")
    heads = ["step", "time", "its bytes alone", "ratio", "launch on the host", "unlike torch's operators"]
    explained = (
        f"{result['machine']}: a step of 16.8 million parameters; a copy on the device reaches {bandwidth:,.0f} GB/s."
        " Moving so few bytes takes less time than launching the step, so the times of compact steps are mostly those"
        " of launches. Last column: how many numbers of weights and states differ, by a rounding, after three steps"
        " with the same gradients, as a share of the number of parameters."
    )
    return table(heads, rows) + note(result, "make gpu PART=b", explained)


def zero_host_table(result: dict[str, Any]) -> str:
    """Return the bytes that DeepSpeed's engine takes, beside those predicted."""
    rows = []
    for row in result["rows"]:
        where = "weights on the host" if row["offload_parameters"] else ""
        rows.append(
            [
                f"stage {row['stage']}{', ' if where else ''}{where}",
                *(f"`{row['precision']}`", str(row["accumulation"])),
                *(f"{row[name] / 2**20:.1f} MiB" for name in ("tensors_bytes", "predicted_tensors_bytes")),
                *(f"{row[name] / 2**20:.0f} MiB" for name in ("peak_bytes", "predicted_peak_bytes")),
            ]
        )
    heads = ["layout", "precision", "micro-batches", "tensors", "predicted", "peak in training", "predicted"]
    size = "A model of 42 million parameters; the engine runs on the CPU, so device and host are the same memory."
    return table(heads, rows) + note(result, "python examples/measure_zero_host.py", size)


def presets() -> str:
    """Return the presets with the first line of each file."""
    rows = []
    for path in sorted(PRESETS.glob("*.yaml")):
        purpose, _, device = describe(path).partition(" Runs on: ")
        rows.append([f"`{path.stem}`", purpose, device.rstrip(".")])
    return table(["preset", "what it is for", "runs on"], rows)


def techniques() -> str:
    """Return the techniques, each with a link to its page and what it saves."""
    rows = [[f"[`{name}`]({name}.md)", prose(card.saves), prose(card.costs)] for name, card in built_in_cards().items()]
    return table(["technique", "what it saves", "costs"], rows)


def engines() -> str:
    """Return how each technique runs under each engine for several devices, with its default settings."""
    shown = {EXACT: "to the bit", ROUNDING: "yes"}
    rows, configuration = [], Configuration()
    for name, each in built_in_cards().items():
        if each.group == "callback":
            chosen = Chosen(each, each.check(dict(each.on_cpu or {})), f"callback.{name}")
            answers = [answer_of(chosen, engine, configuration) for engine in ENGINES]
            cells = [shown.get(answer, f"no: {answer.partition('; write ')[0]}") for answer in answers]
            rows.append([f"[`{name}`](../techniques/{name}.md)", *cells])
    return table(["technique", *ENGINES], rows)


def messages(index: list[tuple[str, str, str]]) -> str:
    """Return the beginnings of messages (`messages.py`), each with links to its section and its technique's page."""
    rows = []
    for first, name, technique in index:
        shown = first.replace("`", "'").replace("|", "\\|")
        page = f"[{technique}](techniques/{technique}.md)" if technique else ""
        rows.append([f"`{shown}`", f"[{name}](#{name.lower()})", page])
    return table(["message", "section", "technique"], rows)


def resources() -> str:
    """Return the resources that a card may own, read or free, with their meaning."""
    return table(["resource", "meaning"], [[f"`{name}`", meaning] for name, meaning in RESOURCES.items()])


def card(name: str) -> str:
    """Return the top of a technique's page: what its card says, and its settings."""
    card = built_in_cards()[name]
    how = f"`+callback={name}`" if card.group == "callback" else f"`strategy={name}`"
    rows = [
        ["class", f"`lightning_solo.{card.class_name}`"],
        ["in a preset", f"{how}; presets that have it: {_presets_with(card)}"],
        ["saves", prose(card.saves)],
        ["costs", prose(card.costs)],
        [
            "numerics",
            prose(card.numerics) + (" (exact: checked beside every other technique)" if card.exact else ""),
        ],
        ["can't be combined with", prose(card.conflicts)],
        ["needs", _needs(card)],
        ["rung of the ladder", f"`{card.rung.name}`" if card.rung else "none"],
        ["source", prose(card.reference)],
    ]
    settings = [
        [f"`{field.name}`", f"`{_plain(field.default)}`", prose(field.metadata["text"]) + _allowed(field.metadata)]
        for field in fields(card.settings)
    ]
    return (
        "".join(f"{term}\n: {text}\n\n" for term, text in rows)
        + "**Settings**, in Python, YAML and on the command line:\n\n"
        + markdown(Table("", ("setting", "default", "what it is"), [[Cell(text) for text in row] for row in settings]))
    )


def _plain(default: Any) -> str:
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    return json.dumps(default) if isinstance(default, tuple) else str(default)


def _allowed(metadata: Mapping[str, Any]) -> str:
    values = ", ".join(f"`{_plain(value)}`" for value in metadata["allowed"])
    bound = f"at least {metadata['at_least']}" if metadata["at_least"] is not None else ""
    return f" ({values or bound})" if values or bound else ""


def _presets_with(card: Card) -> str:
    with_it = [preset for preset, names in _techniques_of_presets().items() if card.name in names]
    return ", ".join(f"`{preset}`" for preset in with_it) or "none"


@functools.cache
def _techniques_of_presets() -> dict[str, list[str]]:
    configs = {path.stem: compose(path.stem) for path in sorted(PRESETS.glob("*.yaml")) if path.stem != "auto"}
    return {name: [each.card.name for each in config.techniques] for name, config in configs.items()}


def _needs(card: Card) -> str:
    kinds = {"cuda": "a CUDA device", "compiler": "a C++ compiler", "package": "a package", "check": ""}
    words = ["a CUDA device"] if card.on_cpu is None else []
    if card.on_cpu:
        settings = ", ".join(f"`{name}: {_plain(value)}`" for name, value in card.on_cpu.items())
        words += [f"a CUDA device; to try it on a CPU: {settings}"]
    words += [kinds[need.kind] for need in card.requires if need.kind not in ("cuda", "check")]
    return "; ".join(dict.fromkeys(words)) or "nothing: any device"


def prose(text: str) -> str:
    r"""Return the text of a card as Markdown: what is between double backquotes is code, asterisks are asterisks.

    >>> prose("``a=1``: 2**-17 of `b`; https://example.com")
    '`a=1`: 2\\*\\*-17 of `b`; <https://example.com>'
    """
    parts = text.replace("``", "`").split("`")
    outside = [part.replace("*", "\\*") if n % 2 == 0 else part for n, part in enumerate(parts)]
    return re.sub(r"(https://[^\s;,]+)", r"<\1>", "`".join(outside))


TABLES = {
    "ladder_cpu.json": ladder_table,
    "ladder_gpu.json": ladder_table,
    "gpu/presets.json": gpu_runs_table,
    "gpu/streaming.json": gpu_runs_table,
    "gpu/fused_step.json": fused_step_table,
    "callbacks_cpu.json": callbacks_table,
    "presets_cpu.json": preset_overhead_table,
    "import_cpu.json": import_table,
    "zero_offload_cpu.json": zero_offload_table,
    "zero_host_cpu.json": zero_host_table,
    "compact_cpu.json": compact_table,
    "low_precision_cpu.json": low_precision_table,
    "padding_cpu.json": padding_table,
    "optimizers_cpu.json": optimizers_table,
    "low_rank_cpu.json": low_rank_table,
    "pruning_cpu.json": pruning_table,
    "quantization_cpu.json": quantization_table,
    "quantization_times_cpu.json": quantization_times_table,
    "quantized_loading_cpu.json": quantized_loading_table,
    "distillation_cpu.json": distillation_table,
    "distillation_steps_cpu.json": distillation_steps_table,
    "snapshots_cpu.json": snapshots_table,
    "step_cost.json": step_cost_table,
    "sweep_cpu.json": sweep_table,
    "plan_byte_gpt_1b.json": plan_table,
    "plan_order_cpu.json": plan_order_table,
    "planner_cpu.json": planner_table,
    "architectures_cpu.json": architectures_table,
    "third_party_cpu.json": third_party_table,
    "lightning_suite.json": lightning_suite_table,
    "averaging_cpu.json": averaging_table,
    "moments_cpu.json": moments_table,
    "chunked_cross_entropy_cpu.json": chunked_loss_table,
    "activation_budget_cpu.json": activation_budget_table,
    "activations_cpu.json": activations_table,
    "whole_ladder.json": whole_ladder_table,
    "fine_tuning_plans.json": fine_tuning_plans_table,
    "longest_sequence.json": longest_sequence_table,
    "peers_cpu.json": peers_table,
    "promises.json": promises_table,
    "sequences_cpu.json": sequences_table,
    "host_optimizers_cpu.json": host_optimizers_table,
    "kernels.json": kernels_table,
    "prefetch_cpu.json": prefetch_table,
    "item_cache_cpu.json": item_cache_table,
    "exact_resume_cpu.json": exact_resume_table,
    "finite_guard_cpu.json": finite_guard_table,
    "checkpoints_cpu.json": checkpoints_table,
    "faults_cpu.json": faults_table,
    "loader_advice_cpu.json": loader_advice_table,
    "micro_batching_cpu.json": micro_batching_table,
    "curriculum_cpu.json": curriculum_table,
}


def results(name: str) -> str:
    """Return the table of a file of results, as Markdown, with its command below it."""
    return TABLES[name](json.loads((ROOT / "examples" / "results" / name).read_text(encoding="utf-8")))


def render(text: str) -> str:
    """Return README's text with every marked table made anew."""
    return MARK.sub(lambda match: match[1] + results(match[2]) + match[3], text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = render(before)
    if "--write" in sys.argv:
        readme.write_text(after, encoding="utf-8")
    elif before != after:
        sys.exit("README's tables differ from examples/results; write: python docs/tables.py --write")
