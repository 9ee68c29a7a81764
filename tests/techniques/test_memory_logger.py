"""MemoryLogger: writes and logs what there was, changes nothing, and never stops a training."""

from __future__ import annotations

import csv
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_solo.errors import NothingToDoError, PresetError
from lightning_solo.memory.events import CATEGORIES, PHASES, Peak
from lightning_solo.memory.ledger import Ledger
from lightning_solo.memory.reading import Reading
from lightning_solo.report.run_folder import read_run
from lightning_solo.techniques.memory_logger import phase_peaks, technique
from lightning_solo.techniques.memory_logger.technique import MemoryLogger, summary_table
from lightning_solo.units import GiB, MiB
from tests.conftest import long
from tests.messages import lines_with, mentions
from tests.modules import Stack, loader, regression
from tests.training import equal, fit

pytestmark = pytest.mark.any_device


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def recording_logger(home: Any, name: str = "seen") -> Any:
    class Logger(home.loggers.logger.DummyLogger):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[int, dict[str, float]]] = []

        def log_metrics(self, metrics: Any = None, step: Any = None) -> None:
            self.seen.append((step, dict(metrics)))

    return Logger()


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An allocator whose peak rises by 1 MiB at each reading whatever is reset; returns the resets."""
    resets: list[int] = []
    readings = iter(range(1, 10_000))

    def read(device: torch.device) -> Reading:
        peak = next(readings) * MiB
        return Reading(allocated=MiB, reserved=2 * GiB, peak_allocated=peak, peak_reserved=peak, alloc_retries=3)

    monkeypatch.setattr(phase_peaks, "read", read)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: resets.append(1))
    return resets


class AsIfCuda(MemoryLogger):
    """A logger that takes the device for a GPU."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(trainer.strategy), "root_device", torch.device("cuda:0"))
            super().setup(trainer, pl_module, stage)


# --- logs, CSV and table ---


@pytest.mark.cpu_only("the memory of a process is read on the CPU; a GPU has counters")
def test_every_logger_the_csv_and_the_table(
    home: Any, make_trainer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loggers = [recording_logger(home), recording_logger(home)]
    trainer = make_trainer(home, logger=loggers, log_every_n_steps=1, callbacks=[MemoryLogger(every_n_steps=4)])
    trainer.fit(regression(home), loader(10))
    for logger in loggers:
        ours = [(step, metrics) for step, metrics in logger.seen if any("memory/" in key for key in metrics)]
        assert [step for step, _ in ours] == [3, 7, 10]  # at steps 4 and 8 of the axis of self.log(), and at the end
        for _, metrics in ours:
            assert set(metrics) - {"memory/swap_gib"} == {"memory/resident_gib", "memory/peak_resident_gib"}
            assert 0 < metrics["memory/resident_gib"] <= metrics["memory/peak_resident_gib"]
    written = rows(tmp_path / "memory.csv")
    assert [row["step"] for row in written] == ["0", "4", "8", "10"]
    assert all(int(row["resident_bytes"]) > MiB and row["allocated_bytes"] == "" for row in written)
    assert "peak resident" in capsys.readouterr().out
    assert trainer.callbacks[0].peak_bytes >= max(int(row["resident_bytes"]) for row in written)


def test_swapped_memory_is_logged_and_warned_of_once(
    home: Any, make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By readings as a host gives them that swaps; this one must not."""
    swapped = iter([100, 105, 110, 120, 900])  # MiB: grown by 20 at the fourth reading
    monkeypatch.setattr(
        phase_peaks, "with_host", lambda reading, device: replace(reading, swap=next(swapped) * MiB, resident=MiB)
    )
    trainer = make_trainer(home, callbacks=[MemoryLogger(every_n_steps=1, table=False)])
    with pytest.warns(UserWarning, match=mentions("swapped", "20.00 MiB")) as caught:
        trainer.fit(regression(home), loader(4))
    assert len([warning for warning in caught if "swapped" in str(warning.message)]) == 1
    assert [int(row["swap_bytes"]) // MiB for row in rows(tmp_path / "memory.csv")] == [100, 105, 110, 120, 900]


@pytest.mark.gpu
def test_host_and_the_whole_device_are_logged_on_cuda(home: Any, make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer(home, accelerator="gpu", callbacks=[MemoryLogger(every_n_steps=1, table=False)])
    trainer.fit(regression(home), loader(2))
    for row in rows(tmp_path / "memory.csv"):
        assert int(row["resident_bytes"]) > MiB
        assert int(row["device_used_bytes"]) >= int(row["reserved_bytes"]) > 0


def test_steps_are_optimizer_steps(home: Any, make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer(home, accumulate_grad_batches=2, callbacks=[MemoryLogger(every_n_steps=2, table=False)])
    trainer.fit(regression(home), loader(10))
    assert [row["step"] for row in rows(tmp_path / "memory.csv")] == ["0", "2", "4", "5"]


def test_cuda_counters_by_their_keys(home: Any, make_trainer: Any, tmp_path: Path, fake_cuda: list[int]) -> None:
    logger = recording_logger(home)
    make_trainer(home, logger=logger, log_every_n_steps=1, callbacks=[AsIfCuda(every_n_steps=5)]).fit(
        regression(home), loader(5)
    )
    assert fake_cuda == []  # without per_phase nobody's counters are reset
    host = {"memory/resident_gib", "memory/peak_resident_gib", "memory/swap_gib"}
    assert host - {"memory/swap_gib"} <= set(logger.seen[-1][1])  # a kernel may have no swap
    assert {
        key: value for key, value in logger.seen[-1][1].items() if key not in host | {"memory/device_used_gib"}
    } == {
        "memory/allocated_gib": 1 / 1024,
        "memory/peak_allocated_gib": 2 / 1024,
        "memory/reserved_gib": 2.0,
        "memory/alloc_retries": 3.0,
    }
    assert rows(tmp_path / "memory.csv")[-1]["alloc_retries"] == "3"


def test_peaks_per_phase(home: Any, make_trainer: Any, tmp_path: Path, fake_cuda: list[int]) -> None:
    logger, callback = recording_logger(home), AsIfCuda(every_n_steps=1, per_phase=True)
    make_trainer(home, logger=logger, log_every_n_steps=1, callbacks=[callback]).fit(regression(home), loader(1))
    # readings: 1 at the start; 2 before forward, 3 ends it, 4 ends backward, 5 before the step, 6 ends it; 7 logs
    assert {key: value * 1024 for key, value in logger.seen[-1][1].items() if "_peak_" in key} == {
        "memory/forward_peak_allocated_gib": 3.0,
        "memory/backward_peak_allocated_gib": 4.0,
        "memory/optimizer_step_peak_allocated_gib": 6.0,
    }
    assert len(fake_cuda) == 5
    row = rows(tmp_path / "memory.csv")[-1]
    assert [int(row[f"{phase}_bytes"]) // MiB for phase in PHASES] == [3, 4, 6]


@pytest.mark.parametrize("per_phase", [False, True])
def test_peaks_that_rise_and_fall(
    home: Any,
    make_trainer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    per_phase: bool,
) -> None:
    """Forwards peak at 9, 3, 5 and 2 GiB, two to an optimizer step; a peak that is reset is 1 GiB."""
    counter, module = {"peak": GiB}, regression(home)
    stock = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        counter["peak"] = (9, 3, 5, 2)[batch_idx] * GiB
        return stock(batch, batch_idx)

    module.training_step = training_step
    monkeypatch.setattr(phase_peaks, "read", lambda device: Reading(GiB, GiB, counter["peak"], GiB, 0))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: counter.update(peak=GiB))
    callback = AsIfCuda(every_n_steps=1, per_phase=per_phase)
    make_trainer(home, accumulate_grad_batches=2, callbacks=[callback]).fit(module, loader(4))
    written = rows(tmp_path / "memory.csv")
    assert [row["step"] for row in written] == ["0", "1", "2"]
    assert [row["forward_bytes"] for row in written] == (["", str(9 * GiB), str(5 * GiB)] if per_phase else [""] * 3)
    # with per_phase a row has the peak of the run so far; without, the counter as it is after the second batch
    peaks = [1, 9, 9] if per_phase else [1, 3, 2]
    assert [int(row["peak_allocated_bytes"]) for row in written] == [peak * GiB for peak in peaks]
    assert callback.peak_bytes == max(peaks) * GiB
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "peak allocated" in line]
    assert f"{sum(peaks) / 3:.2f} GiB" in line
    assert f"{max(peaks)}.00 GiB" in line


def test_table_has_the_mean_and_the_largest() -> None:
    table = summary_table("Memory", {"peak_resident": [GiB, 4 * GiB, GiB]})
    assert [[cell.text for cell in row] for row in table.rows] == [["peak resident", "2.00 GiB", "4.00 GiB"]]


@pytest.mark.cpu_only("the memory of a process is read on the CPU; a GPU has counters")
def test_resident_bytes_per_phase_on_a_cpu(home: Any, make_trainer: Any, tmp_path: Path) -> None:
    make_trainer(home, callbacks=[MemoryLogger(every_n_steps=2, per_phase=True)]).fit(regression(home), loader(2))
    row = rows(tmp_path / "memory.csv")[-1]
    assert all(int(row[f"{phase}_bytes"]) > MiB for phase in PHASES)


# The peak by category: a Stack of 3 blocks, 8 wide.
WEIGHTS = 4 * (3 * (2 * 8 + 8 * 32 + 32 + 32 * 8 + 8) + 8 + 1)
TENSORS = 3 * 6 + 2


@pytest.fixture
def states(device: torch.device) -> int:
    """Bytes of exp_avg, exp_avg_sq and step; on a GPU torch keeps the last on the host."""
    return 2 * WEIGHTS + (4 * TENSORS if device.type == "cpu" else 0)


def counted(path: Path) -> list[dict[str, str]]:
    return [row for row in rows(path) if row["weights_bytes"]]


def peaks_by_ledger(home: Any, make_trainer: Any, batches: Any, device: torch.device) -> list[Peak]:
    """Return the peak of each batch, counted by a new ledger in the module's own hooks."""
    module, peaks, counting = regression(home), [], ExitStack()

    def start(batch: Any, batch_idx: int) -> None:
        kind = None if device.type == "cpu" else device.type
        ledger = counting.enter_context(Ledger(module, module.trainer.optimizers, kind))
        counting.callback(lambda: peaks.append(ledger.peak()))

    module.on_train_batch_start = start
    module.on_train_batch_end = lambda outputs, batch, batch_idx: counting.close()
    make_trainer(home).fit(module, batches)
    return peaks


def test_first_steps_are_logged_by_category_as_a_ledger_counts_them(
    home: Any,
    make_trainer: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    states: int,
    device: torch.device,
) -> None:
    peaks = peaks_by_ledger(home, make_trainer, loader(2, batch_size=64), device)
    logger, callback = recording_logger(home), MemoryLogger(every_n_steps=4, category_steps=2)
    trainer = make_trainer(home, logger=logger, log_every_n_steps=1, callbacks=[callback])
    trainer.fit(regression(home), loader(4, batch_size=64))
    assert [row["step"] for row in rows(tmp_path / "memory.csv")] == ["0", "1", "2", "4"]
    found = counted(tmp_path / "memory.csv")
    assert [row["step"] for row in found] == ["1", "2"]
    assert [(int(row["weights_bytes"]), int(row["optimizer_states_bytes"])) for row in found] == [
        (WEIGHTS, 0),
        (WEIGHTS, states),
    ]
    logged = [metrics for _, metrics in logger.seen if "memory/weights_gib" in metrics]
    for row, metrics, peak in zip(found, logged, peaks, strict=True):
        assert {category: int(row[f"{category}_bytes"]) for category in CATEGORIES} == peak.breakdown
        assert {category: metrics[f"memory/{category}_gib"] * GiB for category in CATEGORIES} == peak.breakdown
    assert callback.category_peak == max(peaks, key=lambda peak: peak.bytes)
    printed = capsys.readouterr().out
    assert f"optimizer step 2: made by {peaks[1].operator} in net.blocks." in printed
    assert lines_with(printed, "counted", "optimizer states")


@pytest.mark.gpu
def test_readings_are_the_allocators(home: Any, make_trainer: Any, tmp_path: Path) -> None:
    cuda, module, expected = torch.cuda, regression(home), []
    readers = (cuda.memory_allocated, cuda.max_memory_allocated, cuda.memory_reserved, cuda.max_memory_reserved)
    module.on_train_batch_end = lambda *_: expected.append([str(reader()) for reader in readers])
    cuda.reset_peak_memory_stats()
    callback = MemoryLogger(every_n_steps=1)
    make_trainer(home, accelerator="gpu", callbacks=[callback]).fit(module, loader(4))
    columns = ("allocated_bytes", "peak_allocated_bytes", "reserved_bytes", "peak_reserved_bytes")
    assert [[row[column] for column in columns] for row in rows(tmp_path / "memory.csv")[1:]] == expected
    assert callback.peak_bytes == cuda.max_memory_allocated() > 0
    phased = MemoryLogger(every_n_steps=2, per_phase=True)
    make_trainer(home, accelerator="gpu", callbacks=[phased]).fit(regression(home), loader(4))
    row = rows(tmp_path / "memory.csv")[-1]
    assert max(int(row[f"{phase}_bytes"]) for phase in PHASES) <= int(row["peak_allocated_bytes"])


def test_more_steps_on_request(home: Any, make_trainer: Any, tmp_path: Path) -> None:
    class Ask(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                callback.log_categories(2)

    callback = MemoryLogger(every_n_steps=50)
    make_trainer(home, callbacks=[callback, Ask()]).fit(regression(home), loader(8))
    assert [row["step"] for row in counted(tmp_path / "memory.csv")] == ["5", "6"]
    with pytest.raises(PresetError, match=mentions("log_categories.steps=0")):
        callback.log_categories(0)


def test_a_step_of_several_batches_is_counted_once_with_its_gradients(
    home: Any, make_trainer: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(home, accumulate_grad_batches=3, callbacks=[MemoryLogger(category_steps=1)])
    trainer.fit(regression(home), loader(6, batch_size=64))
    (row,) = counted(tmp_path / "memory.csv")
    assert row["step"] == "1"
    # the peak is at the end of a forward; only from the second batch on there are gradients beside it
    assert int(row["gradients_bytes"]) == WEIGHTS


def test_manual_optimization_is_counted(home: Any, make_trainer: Any, tmp_path: Path, states: int) -> None:
    module = regression(home)
    module.automatic_optimization = False

    def training_step(batch: Any, batch_idx: int) -> None:
        optimizer = module.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            module.manual_backward(module.step(batch))
            optimizer.step()

    module.training_step = training_step
    make_trainer(home, callbacks=[MemoryLogger(category_steps=2)]).fit(module, loader(3, batch_size=64))
    found = counted(tmp_path / "memory.csv")
    assert [row["step"] for row in found] == ["2", "4"]  # two optimizer steps a batch
    assert all(int(row["optimizer_states_bytes"]) == states for row in found)


@pytest.mark.parametrize("how", ["part", long("wrapper"), long("function")])
def test_compiled_parts_are_named_once_and_stay_compiled(
    home: Any, make_trainer: Any, tmp_path: Path, how: str
) -> None:
    torch._dynamo.reset()
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return aot_eager(graph, inputs)

    make_trainer(home, callbacks=[MemoryLogger(file="plain.csv", category_steps=2)]).fit(
        regression(home, Stack(blocks=2)), loader(5, batch_size=64)
    )
    module, name = regression(home, Stack(blocks=2)), "net.blocks.0"
    if how == "part":
        module.net.blocks[0].compile(backend=backend)
    elif how == "wrapper":
        module.net.blocks[0] = torch.compile(module.net.blocks[0], backend=backend)
    else:
        module.fast, name = torch.compile(module.net.forward, backend=backend), "fast"
        module.step = lambda batch: nn.functional.mse_loss(module.fast(batch[0]), batch[1])
    trainer = make_trainer(home, callbacks=[MemoryLogger(category_steps=2)])
    with pytest.warns(UserWarning, match=rf"compiled: {name}; .*not seen") as caught:
        trainer.fit(module, loader(5, batch_size=64))
    assert len([w for w in caught if "compiled:" in str(w.message)]) == 1
    found, plain = (
        [[row[f"{category}_bytes"] for category in CATEGORIES] for row in counted(tmp_path / name)]
        for name in ("memory.csv", "plain.csv")
    )
    assert found == plain
    assert len(found) == 2
    assert compiled == [1]  # from the third step on
    torch._dynamo.reset()


def test_a_compiled_lightning_module_is_named(home: Any, make_trainer: Any) -> None:
    torch._dynamo.reset()
    module = torch.compile(regression(home), backend="eager")
    trainer = make_trainer(home, callbacks=[MemoryLogger(category_steps=1, table=False)])
    with pytest.warns(UserWarning, match=mentions("compiled: ", "Regression")):
        trainer.fit(module, loader(2))
    torch._dynamo.reset()


def test_the_report_draws_the_categories(home: Any, make_trainer: Any, tmp_path: Path) -> None:
    callback = MemoryLogger(every_n_steps=2, category_steps=3, table=False)
    make_trainer(home, callbacks=[callback]).fit(regression(home), loader(6))
    (figure,) = [one for one in read_run(tmp_path).figures if one.name == "memory_by_category"]
    assert "optimizer states" in str(figure)


# --- parity ---


@pytest.mark.parametrize("per_phase", [False, True])
@pytest.mark.parametrize("category_steps", [0, 3])
def test_training_is_bit_equal(home: Any, make_trainer: Any, per_phase: bool, category_steps: int) -> None:
    logger = MemoryLogger(every_n_steps=2, per_phase=per_phase, category_steps=category_steps)
    plain = fit(make_trainer, home=home)
    assert equal(fit(make_trainer, logger, home=home), plain)
    assert not equal(fit(make_trainer, home=home, max_steps=1), plain)


def test_the_modules_own_keys_are_left_alone(home: Any, make_trainer: Any) -> None:
    module = regression(home)
    stock = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        module.log("memory/resident_gib", 5.0)
        return stock(batch, batch_idx)

    module.training_step = training_step
    trainer = make_trainer(home, callbacks=[MemoryLogger(every_n_steps=1)])
    trainer.fit(module, loader(3))
    assert {key: float(value) for key, value in trainer.callback_metrics.items()} == {"memory/resident_gib": 5.0}


# --- memory and cost ---


def test_one_reading_per_row_and_no_synchronisation(
    home: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch, fake_cuda: list[int]
) -> None:
    calls: list[str] = []
    for name in ("synchronize", "empty_cache", "reset_accumulated_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append(name))
    fake = phase_peaks.read
    monkeypatch.setattr(phase_peaks, "read", lambda device: (calls.append("read"), fake(device))[1])
    make_trainer(home).fit(regression(home), loader(20))
    stock = list(calls)  # Lightning empties the cache when a fit starts
    calls.clear()
    make_trainer(home, callbacks=[AsIfCuda(every_n_steps=5)]).fit(regression(home), loader(20))
    assert sorted(calls) == sorted([*stock, *["read"] * (1 + 20 // 5)])


# --- trace ---


def left() -> bool:
    """Return whether no mode, hook or stance is on."""
    hooks = nn.modules.module
    return not (
        _get_current_dispatch_mode_stack() or hooks._global_forward_hooks or hooks._global_forward_pre_hooks
    ) and (torch._dynamo.eval_frame._stance.stance == "default")


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_start", "on_before_optimizer_step"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_ledger_is_off_after_a_failure(
    home: Any, make_trainer: Any, tmp_path: Path, where: str, error: type[BaseException]
) -> None:
    module, callback = regression(home), MemoryLogger(category_steps=2)

    def fail(*args: Any) -> None:
        assert not left()
        raise error("broken")

    setattr(module, where, fail)
    trainer = make_trainer(home, callbacks=[callback])
    with pytest.raises((error, SystemExit)):
        trainer.fit(module, loader(3))
    assert left()
    (row,) = counted(tmp_path / "memory.csv")  # what there was when it failed
    assert int(row["weights_bytes"]) == WEIGHTS
    callback.on_exception(trainer, module, RuntimeError())
    callback.teardown(trainer, module, "fit")
    assert left()


def test_ledger_is_off_after_a_skipped_epoch(home: Any, make_trainer: Any) -> None:
    module, callback, seen = regression(home), MemoryLogger(category_steps=5), []
    module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 1 else None
    module.on_train_epoch_end = lambda: seen.append(left())
    make_trainer(home, max_epochs=2, callbacks=[callback]).fit(module, loader(3))
    assert seen == [True] * 2
    assert left()


def test_validation_inside_a_fit_is_not_counted(home: Any, make_trainer: Any) -> None:
    module, callback, seen = regression(home), MemoryLogger(category_steps=50), []
    module.on_validation_batch_start = lambda *args: seen.append(left())
    module.on_train_batch_end = lambda outputs, batch, batch_idx: seen.append(left())
    trainer = make_trainer(home, val_check_interval=1, accumulate_grad_batches=2, callbacks=[callback])
    trainer.fit(module, loader(4), loader(1))
    assert seen == [True] * 8
    assert left()


def test_stopped_by_max_steps_and_fitted_again(home: Any, make_trainer: Any, tmp_path: Path) -> None:
    module, callback = regression(home), MemoryLogger(category_steps=5)
    for _ in range(2):
        make_trainer(home, max_epochs=-1, max_steps=3, callbacks=[callback]).fit(module, loader(2))
        assert left()
    assert [row["step"] for row in counted(tmp_path / "memory.csv")] == ["1", "2", "3"] * 2


def test_several_fits_and_other_stages_in_one_file(home: Any, make_trainer: Any, tmp_path: Path) -> None:
    callback, module = MemoryLogger(table=False), regression(home)
    for _ in range(2):
        make_trainer(home, callbacks=[callback]).fit(module, loader(3), loader(2))
    trainer = make_trainer(home, callbacks=[callback])
    trainer.validate(module, loader(2), verbose=False)
    trainer.test(module, loader(2), verbose=False)
    trainer.predict(module, loader(2))
    written = rows(tmp_path / "memory.csv")
    assert [row["stage"] for row in written] == ["fit"] * 4 + ["validate", "test", "predict"]
    assert len({row["fit"] for row in written}) == 5


@pytest.mark.parametrize(
    ("stage", "hook", "tables"),
    [
        ("fit", "on_train_start", 0),
        ("fit", "training_step", 1),
        ("validate", "on_validation_start", 0),
        ("validate", "validation_step", 1),
        ("test", "test_step", 1),
        ("predict", "predict_step", 1),
    ],
)
@pytest.mark.parametrize("error", [NothingToDoError, RuntimeError])
def test_only_a_run_in_which_no_batch_has_begun_shows_no_table(
    home: Any,
    make_trainer: Any,
    capsys: pytest.CaptureFixture[str],
    stage: str,
    hook: str,
    tables: int,
    error: type[Exception],
) -> None:
    module = regression(home)

    def fail(*_: Any) -> None:
        raise error("broken")

    module.test_step = module.predict_step = module.validation_step = lambda batch: None
    setattr(module, hook, fail)
    callback = MemoryLogger()
    trainer = make_trainer(home, callbacks=[callback])
    with pytest.raises(error, match="broken"):
        getattr(trainer, stage)(module, loader(3))
    callback.on_exception(trainer, module, RuntimeError())
    callback.teardown(trainer, module, stage)
    assert capsys.readouterr().out.count(f"{stage} on ") == tables


@pytest.mark.row(91)
def test_a_file_that_cannot_be_written(home: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(technique, "append_row", fail)
    trainer = make_trainer(home, callbacks=[MemoryLogger(every_n_steps=1)])
    with pytest.warns(UserWarning, match=mentions("memory.csv")) as caught:
        trainer.fit(regression(home), loader(5))
    assert len([w for w in caught if "memory.csv" in str(w.message)]) == 1
    assert trainer.global_step == 5


def test_csv_with_other_columns_is_not_changed(home: Any, make_trainer: Any, tmp_path: Path) -> None:
    (tmp_path / "memory.csv").write_text("a,b\n1,2\n")
    with pytest.warns(UserWarning, match="other columns"):
        make_trainer(home, callbacks=[MemoryLogger()]).fit(regression(home), loader(2))
    assert (tmp_path / "memory.csv").read_text() == "a,b\n1,2\n"


def test_file_is_in_the_first_loggers_folder(
    home: Any, make_trainer: Any, tmp_path: Path, device: torch.device
) -> None:
    logger = home.loggers.CSVLogger(str(tmp_path), name="run", version=3)
    trainer = make_trainer(home, logger=logger, log_every_n_steps=1, callbacks=[MemoryLogger(every_n_steps=1)])
    trainer.fit(regression(home), loader(2))
    assert len(rows(tmp_path / "run" / "version_3" / "memory.csv")) == 3
    kind = "allocated" if device.type == "cuda" else "resident"
    assert f"memory/{kind}_gib" in (tmp_path / "run" / "version_3" / "metrics.csv").read_text()
