"""Profile: writes a trace that names modules and techniques, times phases, and changes nothing."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from lightning_solo.errors import ConflictError, PresetError
from lightning_solo.memory.events import PHASES
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.techniques.leak_finder.technique import LeakFinder
from lightning_solo.techniques.micro_batching.technique import MicroBatching
from lightning_solo.techniques.profile import phase_times, technique
from lightning_solo.techniques.profile.breakdown import REST, Breakdown, idle_share
from lightning_solo.techniques.profile.labels import MODULE, RECOMPUTED, TECHNIQUE, labelled
from lightning_solo.techniques.profile.phase_times import PhaseTimes
from lightning_solo.techniques.profile.technique import Profile
from tests.messages import mentions
from tests.modules import Stack, loader, regression
from tests.training import equal, fit

pytestmark = pytest.mark.any_device


def names(path: Path) -> list[str]:
    """Return the names of the ranges of a trace on the host; a GPU's stream has those of its kernels once more."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return [one["name"] for one in events if one.get("ph") == "X" and one.get("cat") != "gpu_user_annotation"]


def logged(tmp_path: Path) -> list[dict[str, float]]:
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if "profile/forward_s" in row]


# --- acted ---


def test_trace_names_modules_and_techniques_of_the_traced_steps(home: Any, make_trainer: Any, tmp_path: Path) -> None:
    profile = Profile(skip_steps=2, steps=3)
    callbacks = [ActivationCheckpointing(), LeakFinder(every_n_steps=1), profile]
    make_trainer(home, callbacks=callbacks).fit(regression(home, Stack(blocks=2)), loader(8))
    assert profile.path == tmp_path / "profiles" / "steps-3-5.json.gz"
    found = names(profile.path)
    for name in ("net", "net.head"):
        assert found.count(f"{MODULE}{name}") == 3, name
    assert found.count(f"{MODULE}net.blocks.1.up") == found.count(f"{RECOMPUTED}net.blocks.1.up") == 3
    assert found.count(f"{TECHNIQUE}LeakFinder") == 3
    assert sum(name.startswith("Optimizer.step#") for name in found) == 3


def test_table_has_forward_backward_and_recomputation(
    home: Any, make_trainer: Any, tmp_path: Path, device: torch.device
) -> None:
    profile = Profile(skip_steps=1, steps=2)
    callbacks = [ActivationCheckpointing(), LeakFinder(every_n_steps=1), profile]
    make_trainer(home, callbacks=callbacks).fit(regression(home, Stack(blocks=2)), loader(4))
    assert profile.breakdown is not None
    host = profile.breakdown.host
    for part in ("net.head", "net.blocks.0.up", "net.blocks.1.norm"):
        assert host[MODULE, part, "forward"] > 0
        assert host[MODULE, part, "backward"] > 0
    assert host[RECOMPUTED, "net.blocks.0.up", "backward"] > 0
    assert host[TECHNIQUE, "LeakFinder", "forward"] > 0
    # the simulated device has no kernels that a profiler sees
    is_traced = device.type == "cuda" and ProfilerActivity.CUDA in torch.profiler.supported_activities()
    assert (profile.breakdown.idle is not None) is bool(profile.breakdown.device) is is_traced
    text = (tmp_path / "profiles" / "steps-2-3.txt").read_text()
    for row in ("net.blocks.0", "recomputed modules", "optimizer", "LeakFinder", REST):
        assert row in text
    assert ("device" in text) is is_traced


def test_seams_count_for_their_technique_without_what_they_call(home: Any, make_trainer: Any) -> None:
    profile = Profile(skip_steps=1, steps=1)
    make_trainer(home, callbacks=[MicroBatching(micro_batch=4), profile]).fit(regression(home), loader(3, batch_size=8))
    assert profile.path is not None
    found = names(profile.path)
    assert f"{TECHNIQUE}MicroBatching" in found
    assert found.count(f"{MODULE}net.head") == 2  # the parts of a batch
    assert found.count("within MicroBatching") >= 2
    assert profile.breakdown is not None
    host = profile.breakdown.host
    assert host[MODULE, "net.head", "forward"] > 0


class Clock:
    """A clock that a module moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(phase_times, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def add(self, seconds: float) -> None:
        self.now += seconds


def timed(home: Any, clock: Clock) -> Any:
    """Return a module with 3 s of forward, 5 of backward, 2 of the optimizer's step, and 7 between batches."""
    module = regression(home)
    stock = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        clock.add(3)
        loss = stock(batch, batch_idx)
        loss.register_hook(lambda gradient: clock.add(5))
        return loss

    class Sgd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = None if closure is None else closure()
            clock.add(2)
            super().step()  # after which torch runs the hooks, if the process has made an SGD before
            return loss

    module.training_step = training_step
    module.configure_optimizers = lambda: Sgd(module.parameters(), lr=0.1)
    module.on_train_batch_start = lambda batch, batch_idx: clock.add(7)
    return module


@pytest.mark.cpu_only("by the host's clock")
@pytest.mark.parametrize(("accumulated", "expected"), [(1, (3, 5, 2)), (3, (9, 15, 2))])
def test_seconds_of_phases_are_logged(
    home: Any,
    make_trainer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    accumulated: int,
    expected: tuple[int, ...],
) -> None:
    logger = home.loggers.CSVLogger(str(tmp_path), name="", version="")
    make_trainer(
        home,
        logger=logger,
        log_every_n_steps=1,
        accumulate_grad_batches=accumulated,
        callbacks=[Profile(steps=0, every_n_steps=2)],
    ).fit(timed(home, Clock(monkeypatch)), loader(3 * accumulated))
    rows = logged(tmp_path)
    assert [tuple(row[f"profile/{phase}_s"] for phase in PHASES) for row in rows] == [expected] * 2
    assert len(rows) == 2


@pytest.mark.cpu_only("by the host's clock")
def test_manual_optimization_is_timed_by_phase(
    home: Any, make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    module = timed(home, clock)
    forward = module.training_step

    def training_step(batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            loss = forward(batch, batch_idx)
            module.optimizers().zero_grad()
            module.manual_backward(loss)
            module.optimizers().step()

    module.automatic_optimization, module.training_step = False, training_step
    logger = home.loggers.CSVLogger(str(tmp_path), name="", version="")
    profile = Profile(steps=0, every_n_steps=1)
    make_trainer(home, logger=logger, log_every_n_steps=1, callbacks=[profile]).fit(module, loader(3))
    assert [tuple(row[f"profile/{phase}_s"] for phase in PHASES) for row in logged(tmp_path)] == [(3, 5, 2)] * 3


def test_phases_are_timed_on_the_device(home: Any, make_trainer: Any, tmp_path: Path) -> None:
    logger = home.loggers.CSVLogger(str(tmp_path), name="", version="")
    profile = Profile(skip_steps=2, steps=1, every_n_steps=1)
    make_trainer(home, logger=logger, log_every_n_steps=1, callbacks=[profile]).fit(regression(home), loader(6))
    rows = logged(tmp_path)
    assert len(rows) == 4  # not of the step in which the profiler warms up, and of the traced one
    assert all(row[f"profile/{phase}_s"] > 0 for row in rows for phase in PHASES)


def test_inner_phases_do_not_count_in_outer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, times = Clock(monkeypatch), PhaseTimes(torch.device("cpu"))
    for _ in range(2):
        with times.phase("forward"):
            clock.add(1)
            with times.phase("backward"):
                clock.add(10)
            clock.add(2)
            times.begin("optimizer_step")
            clock.add(100)
            times.end("backward")  # not the innermost
            times.end("optimizer_step")
            clock.add(4)
        times.end("optimizer_step")
        clock.add(1000)
        times.end_batch(steps=1)
    assert times.take() == {"forward": 7, "backward": 10, "optimizer_step": 100}
    assert times.take() == {}


@pytest.mark.parametrize(
    ("busy", "share"),
    [
        ([], None),
        ([(3, 3)], 0.0),
        ([(0, 10)], 0.0),
        ([(0, 1), (3, 4)], 0.5),
        ([(6, 8), (0, 5), (1, 2), (4, 6)], 0.0),  # of several streams, in any order
        ([(0, 5), (1, 2), (9, 10)], 0.4),
    ],
)
def test_device_waits_where_nothing_runs(busy: list[tuple[float, float]], share: float | None) -> None:
    assert idle_share(busy) == (None if share is None else pytest.approx(share))


def test_breakdown_of_a_device_counts_kernels_and_gaps() -> None:
    """By events as the profiler gives them, since there is no GPU here."""

    def event(name: str, parent: Any = None, host: float = 0, device: float = 0, **fields: Any) -> Any:
        default = {"sequence_nr": -1, "fwd_thread": 0, "thread": 1, "device_type": DeviceType.CPU}
        return SimpleNamespace(
            name=name,
            cpu_parent=parent,
            self_cpu_time_total=host,
            self_device_time_total=device,
            is_user_annotation=False,
            **{**default, **fields},
        )

    def kernel(begin: float, end: float, *, annotation: bool = False) -> Any:
        return SimpleNamespace(
            name="kernel",
            device_type=DeviceType.CUDA,
            is_user_annotation=annotation,
            time_range=SimpleNamespace(start=begin, end=end),
        )

    head = event("module head", host=1)
    mm = event("aten::mm", head, host=2, device=30, sequence_nr=7)
    node = event("autograd::engine::evaluate_function: MmBackward0", thread=2, sequence_nr=7, fwd_thread=1)
    grad = event("aten::mm", node, host=4, device=60, thread=2)
    step = event("Optimizer.step#AdamW.step", host=8, device=10)
    made = Breakdown.of([head, mm, node, grad, step, kernel(0, 30), kernel(50, 100), kernel(0, 100, annotation=True)])
    assert made.device == pytest.approx(
        {
            (MODULE, "head", "forward"): 30e-6,
            (MODULE, "head", "backward"): 60e-6,
            ("Optimizer.", "Optimizer.step#AdamW.step", ""): 10e-6,
        }
    )
    assert made.host[MODULE, "head", "forward"] == pytest.approx(3e-6)
    assert made.idle == pytest.approx(0.2)
    modules, techniques = made.tables()
    assert [[cell.text for cell in row] for row in modules.rows] == [["head", "0.03 ms", "0.06 ms", "90.0%"]]
    assert [cell.text for cell in techniques.rows[0]] == ["optimizer", "0.008 ms", "0.01 ms", "10.0%"]


def test_compiled_parts_get_no_ranges() -> None:
    stack = Stack(blocks=2)
    stack.blocks[0].compile(backend="eager")
    with labelled(stack, []):
        hooked = [name for name, part in stack.named_modules() if part._forward_pre_hooks]
    assert hooked == [
        "",
        "blocks",
        "blocks.1",
        *(f"blocks.1.{name}" for name in ("norm", "up", "drop", "down")),
        "head",
    ]


def test_fit_that_ends_early_writes_what_there_is(home: Any, make_trainer: Any, caplog: Any) -> None:
    profile = Profile(skip_steps=2, steps=9)
    make_trainer(home, callbacks=[profile]).fit(regression(home), loader(5))
    assert profile.path is not None
    assert profile.path.name == "steps-3-5.json.gz"
    assert names(profile.path).count(f"{MODULE}net.head") == 3
    profile = Profile(skip_steps=9, steps=2)
    make_trainer(home, callbacks=[profile]).fit(regression(home), loader(5))
    assert profile.path is None


def test_steps_of_manual_optimization_are_counted_by_batch(home: Any, make_trainer: Any) -> None:
    module = regression(home)
    stock = module.training_step

    def training_step(batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            module.optimizers().zero_grad()
            module.manual_backward(stock(batch, batch_idx))
            module.optimizers().step()

    module.automatic_optimization, module.training_step = False, training_step
    profile = Profile(skip_steps=4, steps=2)
    make_trainer(home, callbacks=[profile]).fit(module, loader(6))
    assert profile.path is not None
    assert profile.path.name == "steps-7-10.json.gz"  # two batches, after two and one to warm up
    assert names(profile.path).count(f"{MODULE}net.head") == 4


# --- refused ---


def test_wrong_settings_are_refused() -> None:
    for settings, option in (({"skip_steps": 0}, "skip_steps"), ({"steps": -1}, "steps"), ({"folder": "/a"}, "folder")):
        with pytest.raises(PresetError, match=mentions(f"profile.{option}")):
            Profile(**settings)


def test_a_second_profiler_is_refused(home: Any, make_trainer: Any) -> None:
    other = home.profilers.PyTorchProfiler()
    trainer = make_trainer(home, profiler=other, callbacks=[Profile()])
    with pytest.raises(ConflictError, match=mentions("PyTorchProfiler", "callback.profile.steps=0")):
        trainer.fit(regression(home), loader(2))
    other.profiler = None  # which can't be deleted before it has run


def test_fit_within_another_profiler_has_no_trace(home: Any, make_trainer: Any) -> None:
    profile = Profile(skip_steps=1)
    trainer = make_trainer(home, callbacks=[profile])
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.warns(UserWarning, match="another torch profiler"),
    ):
        trainer.fit(regression(home), loader(4))
    assert profile.path is None
    assert trainer.global_step == 4


# --- parity ---


def test_training_is_bit_equal(home: Any, make_trainer: Any) -> None:
    profile = Profile(skip_steps=2, steps=2, every_n_steps=1)
    plain = fit(make_trainer, home=home)
    assert equal(fit(make_trainer, profile, home=home), plain)
    assert profile.path is not None
    assert not equal(fit(make_trainer, home=home, max_steps=1), plain)


# --- trace ---


def hooks_of(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_start", "on_before_optimizer_step"])
def test_nothing_is_left_on_where_training_fails(home: Any, make_trainer: Any, where: str) -> None:
    module, callback, profile, seen = regression(home), LeakFinder(), Profile(skip_steps=1, steps=5), []
    stock = getattr(module, where)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if module.trainer.global_step < 3:
            return stock(*args, **kwargs)
        seen.append((hooks_of(module) > 0, "on_train_batch_end" in vars(callback)))
        raise RuntimeError("broken")

    setattr(module, where, fail)
    trainer = make_trainer(home, callbacks=[callback, profile])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(module, loader(8))
    assert seen == [(True, True)]
    assert hooks_of(module) == 0
    assert not [hook for hook in vars(callback) if hook.startswith("on_")]
    assert not torch.autograd._profiler_enabled()
    assert profile.path is not None  # the steps before the failure
    assert names(profile.path).count(f"{MODULE}net.head") >= 2


def test_several_fits_and_other_stages(home: Any, make_trainer: Any) -> None:
    profile, module, paths = Profile(skip_steps=1, steps=1), regression(home), []
    for _ in range(2):
        trainer = make_trainer(home, callbacks=[profile])
        trainer.fit(module, loader(4), loader(2))
        assert hooks_of(module) == 0
        assert not any(optimizer._optimizer_step_post_hooks for optimizer in trainer.optimizers)
        paths.append(profile.path)
    assert paths[0] is not None
    trainer = make_trainer(home, callbacks=[profile])
    trainer.validate(module, loader(2), verbose=False)
    trainer.predict(module, loader(2))
    assert profile.path == paths[1]


def test_training_continues_on_a_full_disk(home: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(technique, "write_whole", fail)
    trainer = make_trainer(home, callbacks=[Profile(skip_steps=1, steps=1)])
    with pytest.warns(UserWarning, match="cannot be written"):
        trainer.fit(regression(home), loader(4))
    assert trainer.global_step == 4
