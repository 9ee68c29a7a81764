"""The ladder: what is measured, which combinations are tried, and what becomes of them; jobs are real processes."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rich.console import Console

from lightning_solo.build import trainer_arguments
from lightning_solo.cards.configuration import Configuration
from lightning_solo.errors import ConflictError, PresetError
from lightning_solo.ladder import measurement
from lightning_solo.ladder.display import COLUMNS, details, memory_in_words, noise_in_words, table
from lightning_solo.ladder.figures import Figures, change, remarks
from lightning_solo.ladder.ladder import Ladder, Prepared
from lightning_solo.ladder.measurement import Clock, fingerprint, measure
from lightning_solo.ladder.rungs import LadderTechnique, chosen, name_of, overrides_of, techniques
from lightning_solo.memory.reading import Reading
from lightning_solo.presets.compose import compose
from lightning_solo.sweeps.application import Application
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.jobs import Settings
from lightning_solo.techniques.accumulation_schedule.technique import AccumulationSchedule
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from lightning_solo.techniques.memory_logger.technique import MemoryLogger
from lightning_solo.units import GiB
from tests.messages import lines_with, mentions, nearest
from tests.modules import Stack, loader, regression

STUB = """
import os, signal
import lightning_solo.errors

with open(os.path.join(os.path.dirname(__file__), "imports.txt"), "a") as file:
    file.write("imported\\n")

def task(argument):
    with open(os.path.join(argument["folder"], "starts.txt"), "a") as file:
        file.write(argument["name"] + "\\n")
    do = argument["do"]
    if "kill" in do:
        os.kill(os.getpid(), signal.SIGKILL)
    if "raise" in do:
        raise getattr(lightning_solo.errors, do["raise"], RuntimeError)(do["message"])
    return do
"""
FIGURES = {
    "device": "cpu",
    "steps": 5,
    "peak_bytes": 2000,
    "counted_bytes": 1000,
    "step_s": 2.0,
    "loss": 3.0,
    "fingerprint": "a",
}
A, B, C = LadderTechnique("a", (), exact=True), LadderTechnique("b", ()), LadderTechnique("c", ())


def stub(folder: Path, does: Mapping[str, Any], **arguments: Any) -> Ladder:
    """Return a ladder of a, b and c whose processes do as told: figures, an exception or a kill; by default FIGURES."""
    (folder / "stub.py").write_text(STUB)
    application = Application("stub", str(folder / "stub.py"), "task", 0, tuple(sys.path), ("stub",))

    def prepare(techniques: tuple[LadderTechnique, ...]) -> Prepared:
        name = name_of(techniques)
        do = {**FIGURES, **does.get(name, {})}
        if "conflict" in do:
            raise ConflictError(do["conflict"])
        return Prepared((f"name={name}",), {"folder": str(folder), "name": name, "do": do}, json.dumps([name, steps]))

    steps = arguments.pop("steps", 5)
    settings = Settings(**arguments.pop("settings", {}))
    sweep = SweepFolder(folder / "ladder")
    return Ladder(sweep, application, settings, [A, B, C], prepare, steps=steps, **arguments)


def starts(folder: Path) -> Counter[str]:
    file = folder / "starts.txt"
    return Counter(file.read_text().splitlines() if file.exists() else [])


def by_name(rows: list[Figures]) -> dict[str, Figures]:
    return {row.name: row for row in rows}


def test_one_process_imports_the_application_for_all_rungs(tmp_path: Path) -> None:
    assert len(stub(tmp_path, {}).run()) == 6
    assert (tmp_path / "imports.txt").read_text().split() == ["imported"]


# --- which combinations, and what becomes of them ---


def test_ladder_tries_baseline_each_alone_and_combinations(tmp_path: Path) -> None:
    does = {"a": {"counted_bytes": 750, "step_s": 3.0}, "a + b": {"fingerprint": "b", "loss": 3.5}}
    rows = stub(tmp_path, does).run()
    assert [row.name for row in rows] == ["baseline", "a", "b", "c", "a + b", "a + b + c"]
    assert {row.status for row in rows} == {"finished"}
    alone, both = by_name(rows)["a"], by_name(rows)["a + b"]
    assert (alone.counted_change, alone.step_change, alone.loss_difference) == (-0.25, 0.5, 0.0)  # 750/1000, 3/2, 3 - 3
    assert both.loss_difference == 0.5
    assert (alone.exact, by_name(rows)["b"].exact, both.exact) == (True, None, None)  # only `a` claims to be
    assert alone.overrides == ("name=a",)
    assert len(starts(tmp_path)) == 6


def test_exactness_is_against_the_combination_without_the_technique(tmp_path: Path) -> None:
    ladder = stub(tmp_path, {"b": {"fingerprint": "b"}, "b + a": {"fingerprint": "b"}, "a": {"fingerprint": "other"}})
    ladder.techniques = (B, A)
    rows = by_name(ladder.run())
    assert rows["b + a"].exact is True  # as b is, though not as baseline is
    assert rows["a"].exact is False
    assert "baseline" in rows["a"].detail


def test_a_technique_that_fails_alone_is_a_row_and_in_no_combination(tmp_path: Path) -> None:
    does = {
        "a": {"raise": "NothingToDoError", "message": "one line\nanother"},
        "b": {"raise": "CapabilityError", "message": "no CUDA device"},
    }
    rows = stub(tmp_path, does).run()
    assert [row.name for row in rows] == ["baseline", "a", "b", "c"]
    found = by_name(rows)
    assert (found["a"].status, found["a"].peak_bytes) == ("failed", None)
    assert found["a"].detail == "NothingToDoError: one line another"  # all lines of it
    assert (found["b"].status, found["b"].detail) == ("not run here", "no CUDA device")
    assert found["c"].status == "finished"


@pytest.mark.parametrize(
    ("do", "status"),
    [
        ({"kill": True}, "killed"),
        ({"raise": "RuntimeError", "message": "CUDA out of memory. Tried"}, "out of device memory"),
        ({"raise": "BudgetError", "message": "2 GiB are missing"}, "failed"),
    ],
)
def test_technique_without_enough_memory_is_tried_with_others(tmp_path: Path, do: dict[str, Any], status: str) -> None:
    rows = by_name(stub(tmp_path, {"baseline": do, "b": do}).run())
    assert rows["baseline"].status == rows["b"].status == status
    assert rows["a + b"].status == rows["a + b + c"].status == "finished"
    assert rows["a"].counted_change is None  # there is nothing to compare with


def test_refused_combination_is_a_row_and_left_out_of_later_ones(tmp_path: Path) -> None:
    ladder = stub(tmp_path, {"a + b": {"conflict": "a, b: both"}})
    ladder.plan()
    (refused,) = ladder.figures()
    assert (refused.name, refused.status, refused.detail) == ("a + b", "refused", "a, b: both")
    assert starts(tmp_path) == {}
    rows = ladder.run()
    assert [row.name for row in rows] == ["baseline", "a", "b", "c", "a + b", "a + c"]
    assert by_name(rows)["a + b"] == refused
    assert "a + b" not in starts(tmp_path)


def test_rung_keeps_its_number_in_a_later_command(tmp_path: Path) -> None:
    does: dict[str, Any] = {"b": {"raise": "RuntimeError", "message": "bad luck"}}
    assert [row.name for row in stub(tmp_path, does).run()] == ["baseline", "a", "b", "c", "a + c"]
    assert starts(tmp_path)["a + c"] == 1
    does["b"]["raise"] = "NothingToDoError"
    assert len(stub(tmp_path, does, settings={"rerun": "failed"}).run()) == 5
    assert starts(tmp_path) == {"baseline": 1, "a": 1, "b": 2, "c": 1, "a + c": 1}


def test_until_stops_at_the_first_fit_and_resumes(tmp_path: Path) -> None:
    does = {"b": {"peak_bytes": 600}, "a + b": {"peak_bytes": 500}}
    ladder = stub(tmp_path, does, until=600)
    assert [row.name for row in ladder.run()] == ["baseline", "a", "b"]
    fits = ladder.fitting()
    assert fits is not None
    assert fits.name == "b"
    ladder = stub(tmp_path, does, until=599)
    assert [row.name for row in ladder.run()] == ["baseline", "a", "b", "c", "a + b"]
    ladder = stub(tmp_path, does, until=10)
    assert len(ladder.run()) == 6
    assert ladder.fitting() is None
    assert set(starts(tmp_path).values()) == {1}  # nothing was measured twice


def test_refused_module_is_tried_once_per_command(tmp_path: Path) -> None:
    refused = {"baseline": {"raise": "PresetError", "message": "no module 'mine'"}}
    for _ in range(2):  # the second time it could have been mended
        with pytest.raises(PresetError, match=r"^no module 'mine'$"):
            stub(tmp_path, refused).run()
    assert starts(tmp_path) == {"baseline": 2}


def test_other_steps_are_measured_anew_in_the_same_folder(tmp_path: Path) -> None:
    for steps in (5, 6):
        ladder = stub(tmp_path, {}, steps=steps)
        ladder.techniques = (A,)
        assert len(ladder.run()) == 2
    assert set(starts(tmp_path).values()) == {2}


def test_rungs_side_by_side_are_refused(tmp_path: Path) -> None:
    for name, value in {"parallel": 2, "gpus": "auto"}.items():
        with pytest.raises(ConflictError, match=f"{name}={value}"):
            stub(tmp_path, {}, settings={name: value})


# --- the overrides ---


def test_argument_of_a_technique_is_used_only_with_it() -> None:
    given = ["seed=1", "solo.callback.activation_checkpointing.every_k=2", "+solo/callback=throughput"]
    checkpointing, accumulation = techniques()["checkpointing"], techniques()["accumulation"]
    assert overrides_of([], given) == ["seed=1", "solo=baseline", "+solo/callback=[throughput]"]
    assert overrides_of([accumulation, checkpointing], given) == [
        "seed=1",
        "solo=baseline",
        "+solo/callback=[throughput,accumulation_schedule,activation_checkpointing]",
        "solo.callback.activation_checkpointing.every_k=2",
    ]
    assert given[1] in overrides_of([], given, ladder=[accumulation])  # where Hydra refuses it


def test_techniques_that_set_one_field_conflict() -> None:
    with pytest.raises(ConflictError, match=mentions("zero_offload and mine", "solo/strategy")):
        overrides_of([techniques()["zero_offload"], LadderTechnique("mine", ("+solo/strategy=another",))], [])


def test_techniques_by_name_of_the_rung_or_of_the_technique() -> None:
    assert [t.name for t in chosen("zero_offload, bf16")] == ["bf16", "zero_offload"]  # in the ladder's order
    assert chosen("activation_checkpointing,bf16") == chosen("bf16,checkpointing") == chosen("checkpointing,bf16")
    assert chosen(None) == tuple(techniques().values())
    assert [t.name for t in chosen("quantized_base,adapters,bf16")] == ["bf16", "quantized_base", "adapters"]
    assert chosen("adapters")[0].overrides == ("+solo/callback=adapters",)
    both = r"bf16, checkpointing \(activation_checkpointing\), accumulation \(accumulation_schedule\), chunked"
    for wrong in ("bf61", ""):
        with pytest.raises(PresetError, match=both):
            chosen(wrong)
    with pytest.raises(PresetError, match=nearest("activation_checkpointing")):
        chosen("activation_checkpoint")


def test_rungs_have_the_configuration_of_their_names() -> None:
    """In the order in which they are added to one another: the strategy, precision and callbacks of each alone."""
    rungs = {}
    for technique in chosen(None):
        own = [text.replace("solo/", "").replace("solo.", "") for text in overrides_of([technique], [])[1:]]
        config = compose("baseline", own)
        names = {each.card.name for each in config.techniques if each is not config.strategy}
        rungs[technique.name] = (config.strategy and config.strategy.card.name, config.precision, names)
    added: set[str] = set()
    assert rungs == {
        "bf16": (None, "bf16-mixed", added),
        "checkpointing": (None, "32-true", added | {"activation_checkpointing"}),
        "accumulation": (None, "32-true", added | {"accumulation_schedule"}),
        "chunked loss": (None, "32-true", added | {"chunked_cross_entropy"}),
        "compact": (None, "bf16-true", added | {"compact_states", "gradient_release"}),
        "zero_offload": ("zero_offload", "32-true", added),
    }
    assert list(rungs) == ["bf16", "checkpointing", "accumulation", "chunked loss", "compact", "zero_offload"]


def configured(*names: str) -> Configuration:
    by_name = {technique.name: technique for technique in chosen(None)}
    overrides = overrides_of([by_name[name] for name in names], [])[1:]
    return compose("baseline", [text.replace("solo/", "").replace("solo.", "") for text in overrides])


def test_rung_of_a_presets_name_is_that_preset() -> None:
    assert configured("compact") == compose("compact")
    assert configured("bf16") == compose("bf16")


def test_precision_of_the_last_technique_counts() -> None:
    together = configured("bf16", "checkpointing", "compact")
    assert together.precision == "bf16-true"
    assert {each.card.name for each in together.techniques} > {"activation_checkpointing", "gradient_release"}
    assert configured("bf16", "checkpointing").precision == "bf16-mixed"


# --- what is measured ---


def measured(
    callbacks: list[Any], steps: int, folder: Path, counted: int = 0, width: int = 8, **trainer: Any
) -> tuple[dict[str, Any], Clock, Any]:
    torch.manual_seed(0)
    clock, module = Clock(counted), regression(L.pytorch, Stack(width=width))
    module.train_dataloader = lambda: loader(batches=12, width=width)
    arguments = trainer_arguments(compose("baseline"), callbacks=[*callbacks, clock])
    quiet = {"logger": False, "accelerator": "cpu", "default_root_dir": str(folder), "log_every_n_steps": 1, **trainer}
    return measure(module, None, {**quiet, **arguments}, clock, steps), clock, module


def test_step_includes_all_its_micro_batches(tmp_path: Path) -> None:
    one, clock, module = measured([], 12, tmp_path)
    assert (one["steps"], one["samples_per_step"], one["device"]) == (12, 4, "cpu")
    assert len(clock.seconds) == len(clock.losses) == 12
    assert one["loss"] == pytest.approx(sum(clock.losses[-5:]) / 5)
    assert 0 < one["before_bytes"] <= one["peak_bytes"]
    four, window, _ = measured([AccumulationSchedule([[0, 4]])], 3, tmp_path)
    assert (four["steps"], four["samples_per_step"]) == (3, 16)
    # the first window: the mean of four batches' losses under the first weights, not a quarter of it
    torch.manual_seed(0)
    fresh = regression(L.pytorch)
    first = [fresh.step(batch).item() for batch, _ in zip(loader(batches=12), range(4), strict=False)]
    assert window.losses[0] == pytest.approx(sum(first) / 4)
    assert clock.losses[0] == pytest.approx(first[0])
    assert not any(torch.equal(p, q) for p, q in zip(module.parameters(), fresh.parameters(), strict=True))


def test_the_bytes_of_training_are_counted_in_the_first_steps_alone(tmp_path: Path) -> None:
    plain, _, module = measured([], 6, tmp_path)
    parameters = sum(p.numel() for p in module.parameters())
    assert plain["counted_bytes"] is None
    measured([logger := MemoryLogger(category_steps=2)], 6, tmp_path)
    assert logger.category_peak is not None
    found, clock, _ = measured([], 6, tmp_path, counted=2)
    assert sum(found["breakdown"].values()) == found["counted_bytes"]
    assert found["counted_bytes"] == logger.category_peak.bytes > 16 * parameters  # AdamW: weight, gradient, 2 states
    assert clock.counts.steps_left == 0
    assert found["fingerprint"] == plain["fingerprint"]


def test_bytes_of_released_gradients_are_not_counted(tmp_path: Path) -> None:
    found, _, module = measured([], 3, tmp_path, counted=2, width=256)  # layers that are stepped one by one
    released, _, _ = measured([GradientRelease()], 3, tmp_path, counted=2, width=256)
    parameters = sum(p.numel() for p in module.parameters())
    assert released["counted_bytes"] <= found["counted_bytes"] - parameters  # of 4 bytes; the peak moves elsewhere then
    assert found["fingerprint"] == released["fingerprint"]


def test_a_rung_of_one_step_is_timed_and_not_counted(tmp_path: Path) -> None:
    assert [measurement.counted_of(steps) for steps in (1, 2, 3)] == [0, 1, 2]
    found, _, _ = measured([], 1, tmp_path, counted=measurement.counted_of(1))
    assert found["counted_bytes"] is None
    assert found["step_s"] > 0


def test_a_run_that_ends_within_the_counted_steps_has_no_step_time(tmp_path: Path) -> None:
    found, clock, _ = measured([], 25, tmp_path, counted=2, limit_train_batches=2, max_epochs=1)
    assert len(clock.seconds) == found["steps"] == 2
    assert found["counted_bytes"] > 0
    assert found["step_s"] is None
    assert measured([], 25, tmp_path, counted=2, limit_train_batches=3, max_epochs=1)[0]["step_s"] is not None


@pytest.mark.parametrize("kind", ["allocated", "resident"])
def test_peak_is_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """On a GPU of the allocator, elsewhere of the process: 3 GiB at the start, 2 at the end, 7 between."""
    now = iter([3 * GiB, 2 * GiB])
    monkeypatch.setattr(measurement, "read", lambda device: Reading(**{kind: next(now), f"peak_{kind}": 7 * GiB}))
    found, _, _ = measured([], 2, tmp_path)
    assert (found["peak_bytes"], found["before_bytes"]) == (7 * GiB, 3 * GiB)


class ByHand(L.LightningModule):
    """Two optimizers a batch, and a normalization with running means; training_step returns no loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.automatic_optimization = name, False
        self.first, self.norm, self.second = torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        assert isinstance(optimizers, list)
        loss = self.second(self.norm(self.first(batch[0]))).pow(2).mean()
        self.log(self.name, loss)
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.first, self.second)]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(80, 8)), batch_size=4)


def by_hand(name: str, folder: Path, steps: int) -> tuple[dict[str, Any], ByHand, Clock]:
    module, clock = ByHand(name), Clock()
    trainer = {"logger": False, "accelerator": "cpu", "default_root_dir": str(folder), "log_every_n_steps": 1}
    return measure(module, None, {**trainer, "callbacks": [clock]}, clock, steps), module, clock


def test_under_manual_optimization_the_logged_loss_is_taken(tmp_path: Path) -> None:
    found, _, clock = by_hand("train/loss", tmp_path, 12)
    assert len(clock.losses) == 6  # 12 / 2 optimizers
    assert found["loss"] == pytest.approx(sum(clock.losses[-5:]) / 5)
    assert remarks(found, found, 12, None, "baseline") == []  # it took its 12 steps
    without, _, _ = by_hand("error", tmp_path, 12)
    (remark,) = remarks(without, without, 12, None, "baseline")
    assert lines_with(remark, "loss", "training_step")


def test_spread_is_of_the_timed_steps(tmp_path: Path) -> None:
    found, clock, _ = measured([], 12, tmp_path)
    first, third = found["step_quartiles_s"]
    assert min(clock.seconds[5:]) <= first <= found["step_s"] <= third <= max(clock.seconds[5:])
    assert measured([], 6, tmp_path)[0]["step_quartiles_s"] is None  # 6 - 3 of warm-up: too few


def test_a_loader_without_a_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PresetError, match=mentions("train_dataloader", "Regression")):
        measured([], 2, tmp_path, limit_train_batches=0)


def test_fingerprint_sees_one_bit_running_means_and_losses() -> None:
    module = ByHand("train/loss")
    assert module.norm.running_mean is not None
    prints = [fingerprint(module, [1.0]), fingerprint(module, [1.5])]
    module.first.weight.detach().view(-1).view(torch.int32)[0] ^= 1
    prints.append(fingerprint(module, [1.0]))
    module.norm.running_mean.add_(1.0)
    prints.append(fingerprint(module, [1.0]))
    assert len({*prints, None}) == 5
    assert fingerprint(torch.nn.LazyLinear(1), []) is None


# --- what is said ---


def test_a_change_within_the_noise_is_marked(tmp_path: Path) -> None:
    does = {
        "baseline": {"step_quartiles_s": [1.8, 2.2]},
        "a": {"step_s": 2.2, "step_quartiles_s": [2.1, 2.3]},
        "b": {"step_s": 2.4, "step_quartiles_s": [2.3, 2.5]},
        "c": {"step_s": 2.4},
    }
    rows = by_name(stub(tmp_path, does).run())
    assert [rows[name].step_within_noise for name in ("baseline", "a", "b", "c")] == [None, True, False, True]
    assert [[column.cell(rows[name]).text for column in COLUMNS[3:5]] for name in ("baseline", "a", "b", "c")] == [
        ["2 s ±10%", "+0%"], ["2.2 s ±5%", "~ +10%"], ["2.4 s ±4%", "+20%"], ["2.4 s", "~ +20%"],
    ]  # fmt: skip
    found = json.loads(json.dumps(asdict(rows["a"])))
    assert (found["step_quartiles_s"], found["step_within_noise"]) == ([2.1, 2.3], True)
    said = [noise_in_words(found) for found in ([rows["baseline"], rows["b"]], [rows["baseline"], rows["a"]])]
    assert [re.findall("[±~](?=:)", text) for text in said] == [["±"], ["±", "~"]]
    too_few = noise_in_words([rows["c"]])
    assert too_few.startswith(said[1])
    assert len(too_few) > len(said[1])
    assert noise_in_words([Figures("a", "failed")]) == ""


def test_remark_says_why_a_row_is_not_comparable() -> None:
    base = {"steps": 5, "samples_per_step": 8, "loss": 1.0}
    for other, claims_to_be_exact, words in (
        ({"samples_per_step": 32, "batch_argument": "+model.batch_size"}, None, ("32 ", " 8", "+model.batch_size=8")),
        ({"samples_per_step": 32}, None, ("32 ", " 8", "an argument batch_size")),
        ({"samples_per_step": 24}, None, ("24 ", "batch of 8", "by 3")),
        ({"steps": 3}, None, ("3 of 5",)),
        ({"loss": float("nan")}, True, ("loss", "nan")),
    ):
        (remark,) = remarks({**base, **other}, base, 5, claims_to_be_exact, "baseline")
        assert lines_with(remark, *words)
    assert change(1, 0) is None


def test_rows_are_strict_json(tmp_path: Path) -> None:
    rows = stub(tmp_path, {"b": {"loss": float("nan")}}).run()
    text = json.dumps([asdict(row) for row in rows], allow_nan=False)
    keys = {"name", "status", "detail", "peak_bytes", "counted_change", "step_s", "step_change", "loss", "exact"}
    assert keys | {"loss_difference"} <= set(json.loads(text)[0])
    assert by_name(rows)["b"].loss is None
    assert lines_with(by_name(rows)["b"].detail, "loss", "nan")


def test_the_table() -> None:
    rows = [Figures("baseline", "finished", peak_bytes=2**34, step_s=0.5, loss=2.0, device="cpu", before_bytes=2**29)]
    rows += [Figures("a", "out of device memory", "RuntimeError: CUDA out of memory")]
    numbers = {
        "counted_bytes": 77 * 2**20,
        "peak_bytes": 399 * 2**20,
        "step_s": 0.123,
        "step_quartiles_s": (0.1, 0.14),
        "loss": 12.0,
    }
    changes = {"counted_change": -0.5, "step_change": 1.2, "step_within_noise": True, "loss_difference": -1e-4}
    rows += [Figures("bf16 + checkpointing + accumulation", "finished", exact=False, **numbers, **changes)]
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table(rows, 5))
    printed = captured.get()
    assert "…" not in printed
    for cell in (
        "checkpointing",
        "77.0 MiB",
        "-50%",
        "399 MiB",
        "123 ms",
        "±16%",
        "~ +120%",
        "12",
        "-1.0e-04",
        "no",
    ):
        assert cell in printed
    (detail,) = details(rows)
    assert lines_with(detail, "a: ", "out of device memory", "RuntimeError")
    assert lines_with(memory_in_words(rows), "resident set", "512.00 MiB")
