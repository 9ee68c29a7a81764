"""What a sweep asks of a job and what a job may do to it: folders, values, threads, leftovers, the environment."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from lightning_solo.atomic_files import read_json, try_lock, write_json
from lightning_solo.errors import PresetError
from lightning_solo.sweeps import job_process
from lightning_solo.sweeps.display import Display, failures
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.jobs import Job, Try, check_folders
from lightning_solo.sweeps.observer import figures
from lightning_solo.sweeps.results import Row, append, read, read_all
from tests.conftest import long
from tests.messages import mentions
from tests.sweeps.applications import (
    THREAD,
    TRAIN,
    begun,
    environment,
    plain_jobs,
    plain_sweep,
    rows_of,
    run,
    starts,
    sweep,
    sweep_folder,
    training,
)


def job(folder: Path, number: int = 0) -> Job:
    return Job(number, (), folder, "hash", lambda: b"")


@pytest.mark.parametrize(
    ("folders", "said"),
    [
        (["a", "a"], ["job 1 ", "/a", " job 0"]),
        (["a", "a/b"], ["job 1 ", "a/b", " job 0"]),
        (["a/b", "a"], ["job 0 ", "a/b", " job 1"]),
        ([".sweep/jobs"], [".sweep", "the sweep's own"]),
        (["../a"], ["/a, ", "below"]),
        ([""], ["below"]),
    ],
)
def test_folders_outside_the_sweep_or_inside_one_another_are_refused(
    tmp_path: Path, folders: list[str], said: list[str]
) -> None:
    with pytest.raises(PresetError, match=mentions(*said)):
        check_folders(tmp_path, [job(tmp_path / folder, number) for number, folder in enumerate(folders)])
    check_folders(tmp_path, [job(tmp_path / "a" / "b"), job(tmp_path / "a" / "c", 1)])


class Odd:
    ndim = 0

    def item(self) -> Any:
        raise OSError("no")


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (None, {"returned": None}),
        ((1, 2.5, "a", [True]), {"returned": [1, 2.5, "a", [True]]}),
        ({1: torch.tensor(2.0)}, {"returned": {"1": 2.0}}),
        (np.float32(0.5), {"returned": 0.5}),
        (np.complex64(1j), {"not_kept": "complex64"}),
        (torch.ones(2), {"not_kept": "Tensor"}),
        (Odd(), {"not_kept": "Odd"}),
    ],
)
def test_plain_values_are_kept_and_others_named(value: object, kept: dict[str, Any]) -> None:
    assert job_process.returned(value) == kept


def test_brackets_are_not_read_as_markup(tmp_path: Path) -> None:
    row = Row(0, ("paths=[/data/a,b]",), "failed", "ValueError: expected [batch, width] in [/data/a]", str(tmp_path))
    told = failures([row], tmp_path)
    assert "paths=[/data/a,b]" in told
    assert "expected [batch, width] in [/data/a]" in told
    display = Display(SweepFolder(tmp_path), {0: "paths=[/data/a,b]"}, 1)
    display.tell("ended", 0, "failed in [/data/a]")
    with display.console.capture() as captured:
        display.console.print(display.render([]))
    assert "paths=[/data/a,b]" in captured.get()


# --- the observer ---


@pytest.mark.long
def test_observer_can_be_pickled_with_its_trainer(home: ModuleType, tmp_path: Path) -> None:
    """In a process that has either home alone, a job of which another process observes too."""
    code = f"""import sys, pickle, pathlib, {home.__name__}
from lightning_solo.sweeps.observer import JobObserver
observer = pickle.loads(pickle.dumps(JobObserver(pathlib.Path({str(tmp_path / "1")!r}))))
assert isinstance(observer, {home.__name__}.Callback), type(observer).__mro__
assert not {{"pytorch_lightning", "lightning.pytorch"}} <= set(sys.modules)"""
    run(tmp_path, [sys.executable, "-c", code])


def test_callback_without_figures_is_skipped() -> None:
    class Throughput:
        pass

    trainer = type("Trainer", (), {"callbacks": [Throughput()]})()
    assert figures(trainer) == {}


def test_figures_are_numbers_of_all_callbacks() -> None:
    callbacks = [type("Callback", (), {"figures": value})() for value in ({"a/b": 2}, {"plot": object()}, [3.0])]
    assert figures(type("Trainer", (), {"callbacks": callbacks})()) == {"a/b": 2.0}


@pytest.mark.long
def test_lost_device_does_not_hide_the_error(tmp_path: Path) -> None:
    """After an error of CUDA's each further call to it raises too, that of the one who asks for the peak as well."""
    script = training(CUDA_ERROR)
    sweep(tmp_path, "n=1", script=script, code=1)
    (row,) = rows_of(tmp_path)
    assert (row.status, row.detail) == ("failed", "RuntimeError: CUDA error: device-side assert triggered")
    assert (row.steps, row.peak_device_bytes) == (1, None)
    told = (sweep_folder(tmp_path) / "0" / "output.log").read_text()
    assert told.endswith("RuntimeError: CUDA error: device-side assert triggered\n")
    assert "illegal memory access" not in told


CUDA_ERROR = """
    import torch, lightning.pytorch as L
    from tests.modules import loader, regression

    def gone(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    class Fails(type(regression(L))):
        def training_step(self, batch, index):
            if index == 1:
                torch.cuda.is_initialized = lambda: True
                torch.cuda.device_count = lambda: 1
                torch.cuda.max_memory_allocated = torch.cuda.get_device_name = gone
                raise RuntimeError("CUDA error: device-side assert triggered")
            return super().training_step(batch, index)

    L.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False).fit(Fails(), loader())
"""


# --- what a job does ---


@pytest.mark.long
def test_import_that_starts_native_threads_gets_fresh_interpreters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork has none of them, and would wait for them in its first parallel operation."""
    threads = "import torch\ntorch.set_num_threads(2)\ntorch.randn(10**6).exp().sum()"
    script = training("return float(torch.ones(10**6).exp().sum())", threads)
    done = sweep(tmp_path, "n=1", "hydra.launcher.timeout_s=60", script=script)
    assert "fresh interpreter" in done.stdout
    assert "native" in done.stdout
    (row,) = rows_of(tmp_path)
    assert row.returned == pytest.approx(2.718281828 * 10**6, rel=1e-3)


@pytest.mark.long
def test_application_that_imports_torch_and_lightning_is_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are imported with all cores, threads of numpy's included."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    value = "return [os.getppid(), float(torch.ones(10**6).exp().sum())]"
    script = training(value, "import torch, lightning.pytorch")
    done = sweep(tmp_path, "n=1,2", "hydra.launcher.timeout_s=60", script=script, threads=None)
    assert "fresh interpreter" not in done.stdout
    rows = rows_of(tmp_path)
    assert len({row.returned[0] for row in rows}) == 1
    assert [row.returned[1] for row in rows] == [pytest.approx(2.718281828 * 10**6, rel=1e-3)] * 2


FORK = "pid = os.fork()\n    if not pid:\n        os.setsid(); time.sleep(200); os._exit(0)\n    return pid"
START = "import subprocess\n    return subprocess.Popen(['sleep', '200'], close_fds=False, start_new_session=True).pid"


@pytest.mark.parametrize(("leave", "fresh"), [(FORK, False), long(FORK, True), long(START, True)])
def test_process_left_by_a_job_does_not_hold_the_lock(tmp_path: Path, leave: str, fresh: bool) -> None:
    sweep(tmp_path, "n=1", script=training(leave, THREAD if fresh else ""))
    (row,) = rows_of(tmp_path)
    assert Path(f"/proc/{row.returned}").exists()  # a session of its own: nobody here may end it
    with (sweep_folder(tmp_path) / ".sweep" / "lock").open("a") as file:
        assert try_lock(file.fileno())
    os.kill(row.returned, 9)


def test_job_has_the_environment_of_the_command(tmp_path: Path) -> None:
    """And what lies in the folder one stands in shadows nothing."""
    (tmp_path / "random.py").write_text("raise OSError('shadowed')")
    value = "[os.environ['PYTHONPATH'], sys.path[0], sys.argv[0], sys.modules['__main__'] is sys.modules[__name__]]"
    script = training(f"return {value}")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(script)
    command = [sys.executable, "src/train.py", "-m", "hydra/launcher=solo", "n=1"]
    run(tmp_path, command)
    (row,) = rows_of(tmp_path)
    assert row.returned == [environment()["PYTHONPATH"], str(tmp_path / "src"), "src/train.py", True]


def test_failing_instantiate_keeps_its_trace(tmp_path: Path) -> None:
    script = training("from hydra.utils import instantiate\n    instantiate({'_target_': 'json.loads', 's': 'x'})")
    sweep(tmp_path, "n=1", script=script, code=1)
    told = (sweep_folder(tmp_path) / "0" / "output.log").read_text()
    assert "JSONDecodeError" in told
    assert "train.py" in told


# --- interrupts ---


@pytest.mark.parametrize("number", [long(signal.SIGINT), signal.SIGTERM])
def test_interrupt_between_two_jobs_starts_no_other(
    tmp_path: Path, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    def between(event: str, job: int | None, _: str) -> None:
        if (event, job) == ("ended", 0):
            os.kill(os.getpid(), number)

    if number == signal.SIGINT:  # which a shell has its background jobs ignore
        inherited = signal.signal(number, signal.default_int_handler)
        request.addfinalizer(lambda: signal.signal(number, inherited))
    handler = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        plain_sweep(tmp_path, tell=between).run(plain_jobs(tmp_path, 3))
    assert signal.getsignal(number) is handler
    assert begun(tmp_path) == [0]
    assert [row.status for row in read_all(SweepFolder(tmp_path))] == ["finished", "not started", "not started"]
    rows = plain_sweep(tmp_path).run(plain_jobs(tmp_path, 3))
    assert [(row.attempt, row.returned) for row in rows] == [(1, 0), (1, 1), (1, 2)]
    assert begun(tmp_path) == [0, 1, 2]


def test_jobs_are_listed_before_they_start(tmp_path: Path) -> None:
    sweep = plain_sweep(tmp_path)
    sweep.wanted = lambda _: False
    with sweep.opened():
        for number in (0, 1):  # as a search runs one after the other
            assert sweep.run([job(tmp_path / str(number), number)]) == []
        assert read_json(sweep.folder.listed) == {"0": [], "1": []}
    sweep.folder.listed.unlink()
    sweep.folder.listed.mkdir()
    assert sweep.run([job(tmp_path / "0")]) == []


# --- tries ---


def test_time_of_a_resumed_job_includes_the_interrupted_attempt(tmp_path: Path) -> None:
    [row] = plain_sweep(tmp_path).run(plain_jobs(tmp_path, 1))
    append(SweepFolder(tmp_path).results, replace(row, status="interrupted", seconds=100.0))
    told: list[tuple[str, int | None, str]] = []
    [row] = plain_sweep(tmp_path, tell=lambda *event: told.append(event)).run(plain_jobs(tmp_path, 1))
    assert (row.attempt, row.status) == (2, "finished")
    assert (row.seconds or 0) > 100
    assert ["attempt 2" in detail for event, _, detail in told if event == "started"] == [True]


def test_job_that_ended_after_its_command_has_the_time_of_all_its_attempts(tmp_path: Path) -> None:
    (one,) = plain_jobs(tmp_path, 1)
    sweep = plain_sweep(tmp_path)
    [row] = sweep.run([one])
    files = sweep.folder.job(0)
    assert (read_json(files.end) or {})["seconds"] == row.seconds
    end = {"attempt": 1, "exit_code": 0, "seconds": 40.0, "peak_host_bytes": 5, "interrupted": True}
    write_json(files.start, {**(read_json(files.start) or {}), "seconds": 60.0})
    sweep.folder.results.unlink()
    write_json(files.end, end)
    kept = sweep._row_or_try(one, None)
    assert isinstance(kept, Row)
    assert (kept.status, kept.seconds, kept.peak_host_bytes) == ("finished", 100.0, 5)
    files.result.unlink()
    assert sweep._row_or_try(one, None) == Try(one, 2, seconds=100.0)
    assert [row.status for row in read(sweep.folder.results)] == ["finished"]


def test_failure_counts_if_the_command_ended_before_its_row(tmp_path: Path) -> None:
    sweep(tmp_path, "n=1", "kind=raise", code=1)
    state = SweepFolder(sweep_folder(tmp_path))
    state.results.unlink()
    sweep(tmp_path, "n=1", "kind=raise", code=1)
    assert starts(tmp_path) == {1: 1}
    assert [(row.status, row.detail) for row in read(state.results)] == [("failed", "ValueError: bad luck")]


@pytest.mark.long
def test_result_of_an_earlier_attempt_is_not_taken(tmp_path: Path) -> None:
    """The machine went down between the note that a try starts and the removal of what the one before has left."""
    sweep(tmp_path, "n=1")
    state = SweepFolder(sweep_folder(tmp_path))
    write_json(state.job(0).start, {**(read_json(state.job(0).start) or {}), "attempt": 2})
    sweep(tmp_path, "n=1")
    assert starts(tmp_path) == {1: 2}


@pytest.mark.long
def test_result_of_the_last_attempt_is_taken_without_its_row(tmp_path: Path) -> None:
    """The command was killed before it wrote the row of the second try, which had said how it ended."""
    sweep(tmp_path, "n=1")
    state = SweepFolder(sweep_folder(tmp_path))
    files = state.job(0)
    write_json(files.start, {**(read_json(files.start) or {}), "attempt": 2})
    write_json(files.result, {"attempt": 2, "returned": 2.5, "peak_device_bytes": 2**30})
    sweep(tmp_path, "n=1")
    assert starts(tmp_path) == {1: 1}
    (row,) = read(state.results)
    assert (row.attempt, row.status, row.returned, row.peak_device_bytes) == (2, "finished", 2.5, 2**30)


@pytest.mark.long
def test_progress_of_an_earlier_attempt_is_not_taken(tmp_path: Path) -> None:
    measure = """open(os.path.join(os.environ["LIGHTNING_SOLO_JOB"], "progress.json"), "w").write('{"step": 7}')"""
    script = TRAIN.replace('raise ValueError("the first time")', f'{measure}; raise ValueError("the first time")')
    sweep(tmp_path, "n=1", "kind=once", script=script, code=1)
    assert [row.steps for row in rows_of(tmp_path)] == [7]
    sweep(tmp_path, "n=1", "kind=once", "hydra.launcher.retries=1", script=script)
    assert [(row.attempt, row.steps) for row in rows_of(tmp_path)] == [(2, None)]


@pytest.mark.long
def test_lost_attempt_does_not_count_as_a_retry(tmp_path: Path) -> None:
    sweep(tmp_path, "n=1", "kind=raise", code=1)
    state = SweepFolder(sweep_folder(tmp_path))
    for file in (state.job(0).result, state.job(0).end):
        write_json(file, {})  # as if they had been cut off
    state.results.unlink()
    sweep(tmp_path, "n=1", "kind=raise", "hydra.launcher.retries=1", code=1)
    assert starts(tmp_path) == {1: 3}  # lost, failed, tried again


@pytest.mark.parametrize(
    ("start", "attempt", "why"),
    [
        ({}, 2, "its configuration has changed"),
        long({"config_hash": "hash"}, 2, "another version of lightning-solo"),
        ({"config_hash": "hash", "code": "0123"}, 2, "another version of lightning-solo"),
        ({"config_hash": "hash", "code": {}}, 1, ""),
        long({"config_hash": "hash", "code": {"a": "1", "b": "1"}}, 2, "a, b changed"),
        ({"config_hash": "hash", "code": dict.fromkeys("abcde", "1")}, 2, "a, b, c and 2 more changed"),
    ],
    ids=["number alone", "no code", "one hash", "same code", "two files", "five files"],
)
def test_job_runs_again_if_its_configuration_or_code_has_changed(
    tmp_path: Path, start: dict[str, Any], attempt: int, why: str
) -> None:
    """Also if an older version wrote what it started with."""
    told: list[tuple[str, str]] = []
    sweep = plain_sweep(tmp_path, tell=lambda event, _, detail: told.append((event, detail)))
    jobs = plain_jobs(tmp_path, 1)
    jobs[0].folder.mkdir()
    write_json(sweep.folder.job(0).start, {"attempt": 1, **start})
    (begun,) = read_all(sweep.folder)
    assert (begun.status, begun.overrides, begun.folder) == ("begun, no result yet", (), "")
    append(sweep.folder.results, Row(0, (), "finished"))
    (row,) = sweep.run(jobs)
    assert row.attempt == attempt
    assert [detail.startswith(why) for event, detail in told if event == "anew"] == [True][: bool(why)]


def test_rerun_all_starts_in_a_new_folder(tmp_path: Path) -> None:
    sweep(tmp_path, "n=1")
    SweepFolder(sweep_folder(tmp_path)).results.unlink()  # the command was killed before the row
    sweep(tmp_path, "n=1", "hydra.launcher.rerun=all")
    assert (sweep_folder(tmp_path) / "0.attempt-1" / "output.log").is_file()
    assert starts(tmp_path) == {1: 2}
