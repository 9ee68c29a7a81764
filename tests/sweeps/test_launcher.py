"""`hydra/launcher=solo` in a Hydra application of somebody else's: a process per job, whatever becomes of it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from lightning_solo.atomic_files import read_json
from lightning_solo.processes import is_running
from lightning_solo.sweeps.files import SweepFolder
from tests.conftest import long
from tests.messages import lines_with
from tests.sweeps.applications import (
    THREAD,
    TRAIN,
    popen,
    returned,
    rows_of,
    run,
    starts,
    sweep,
    sweep_folder,
    training,
)

KINDS = ["fine", "raise", "segfault", "killed", "exit_3", "exit_0", "memory", "cuda", "object"]
EXPECTED = {
    "fine": "finished",
    "raise": "failed",
    "segfault": "crashed",
    "killed": "killed",
    "exit_3": "exited",
    "exit_0": "exited",
    "memory": "out of host memory",
    "cuda": "out of device memory",
    "object": "finished",
}


def until(condition: object, seconds: float = 500.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- acted ---


@pytest.mark.row(88)
def test_status_of_each_job_and_table_of_failures(tmp_path: Path) -> None:
    done = sweep(tmp_path, f"kind={','.join(KINDS)}", "n=1", code=1)
    rows = rows_of(tmp_path)
    assert [row.number for row in rows] == list(range(9))
    assert {row.overrides[0].removeprefix("kind="): row.status for row in rows} == EXPECTED
    assert starts(tmp_path) == {1: 9}
    assert [row.returned for row in rows if row.overrides[0] == "kind=fine"] == [1.5]
    assert {"Model" in row.detail for row in rows if row.overrides[0] == "kind=object"} == {True}
    assert "7 of 9 jobs" in done.stderr
    failed = [str(row.number) for row in rows if row.status != "finished"]
    for number in failed:  # all failures are named, not the first
        assert f"{number}/output.log" in done.stderr
    folder = sweep_folder(tmp_path).relative_to(tmp_path)
    assert lines_with(done.stderr, ", ".join(failed), f"lightning-solo results {folder}")
    assert "n=1'" not in done.stderr  # as in Hydra's own line about the first of them
    assert "ValueError: bad luck" in done.stderr
    assert '    raise ValueError("bad luck")' in done.stderr  # the end of its output
    assert "hydra.launcher.rerun=failed" in done.stderr
    crashed = next(row for row in rows if row.status == "crashed")
    assert " in do" in (tmp_path / crashed.folder / "output.log").read_text()  # where it was


JOB = """
    import numpy, random
    from hydra.core.hydra_config import HydraConfig
    state.append(cfg.n)
    hydra = HydraConfig.get()
    return {
        "process": os.getpid(), "parent": os.getppid(), "modules": [Model.__module__, do.__module__],
        "drawn": [random.random(), float(numpy.random.rand())], "jobs in this memory": len(state),
        "number": [hydra.job.num, hydra.job.id], "folders": [hydra.sweep.dir, hydra.runtime.output_dir],
        "configuration is stored": "config.yaml" in ConfigStore.instance().repo,
    }
"""


def test_jobs_share_the_import_and_nothing_else(tmp_path: Path) -> None:
    begun = time.time()
    sweep(tmp_path, "n=1,2,3", "sleep=0.1", script=training(JOB, "import numpy.random\nstate = []"))
    values = {name: [job[name] for job in returned(tmp_path)] for name in returned(tmp_path)[0]}
    assert len(set(values["process"])) == 3
    assert len(set(values["parent"])) == 1  # which has imported the application once
    assert values["modules"] == [["train", "train"]] * 3
    assert values["jobs in this memory"] == [1] * 3
    assert len({number for numbers in values["drawn"] for number in numbers}) == 6
    assert values["number"] == [[0, "0"], [1, "1"], [2, "2"]]
    folder = sweep_folder(tmp_path)
    assert values["folders"] == [[str(folder.relative_to(tmp_path)), str(folder / str(n))] for n in range(3)]
    assert values["configuration is stored"] == [True] * 3
    assert "job 1 of train" in (folder / "0" / "output.log").read_text()
    row = rows_of(tmp_path)[0]
    assert row.started is not None
    assert row.seconds is not None
    assert begun < row.started < row.started + 0.1 < row.started + row.seconds < time.time()
    assert row.versions["torch"] == version("torch")
    assert row.hardware.startswith(f"{os.cpu_count()} CPU cores")


MEET = """
    begun = time.time()
    open(f"begun-{cfg.n}", "w").close()
    while cfg.kind == "meet" and not os.path.exists(f"begun-{3 - cfg.n}"):
        time.sleep(0.02)
    return [begun, time.time()]
"""


@pytest.mark.parametrize(("parallel", "kind"), [long(1, "fine"), (2, "meet")])
def test_parallel_jobs_run_at_the_same_time(tmp_path: Path, parallel: int, kind: str) -> None:
    """Each of two that meet ends only when the other has begun."""
    script = training(MEET)
    sweep(tmp_path, "n=1,2", f"kind={kind}", f"hydra.launcher.parallel={parallel}", script=script)
    (first, second) = returned(tmp_path)
    assert (second[0] < first[1]) is (parallel == 2)


@pytest.mark.long
def test_application_that_starts_threads_gets_fresh_interpreters(tmp_path: Path) -> None:
    script = training("return os.getppid()", THREAD)
    done = sweep(tmp_path, "n=1,2", "kind=fine,raise", script=script, code=1)
    assert "fresh interpreter" in done.stdout
    assert "threads" in done.stdout
    rows = rows_of(tmp_path)
    assert [row.status for row in rows] == ["finished", "failed"] * 2


@pytest.mark.row(89)
def test_failed_job_is_retried_at_once_in_the_same_folder(tmp_path: Path) -> None:
    script = training("return os.environ.get('LIGHTNING_SOLO_RESUMES')")
    sweep(tmp_path, "n=1,2", "kind=once", "hydra.launcher.retries=1", script=script)
    assert [(row.status, row.attempt, row.returned) for row in rows_of(tmp_path)] == [("finished", 2, "1")] * 2
    assert (tmp_path / "starts.txt").read_text().split() == ["1", "1", "2", "2"]
    assert sorted(path.name for path in sweep_folder(tmp_path).iterdir() if path.name[0].isdigit()) == ["0", "1"]


@pytest.mark.long
def test_retries_are_counted_over_commands(tmp_path: Path) -> None:
    for retries, tries in ((1, 2), (1, 2), (2, 3)):
        sweep(tmp_path, "n=1", "kind=raise", f"hydra.launcher.retries={retries}", code=1)
        assert starts(tmp_path) == {1: tries}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "by"), [("hang", "SIGTERM"), long("deaf", "SIGKILL")])
@pytest.mark.row(89)
def test_job_past_its_time_limit_is_ended(tmp_path: Path, kind: str, by: str) -> None:
    sweep(tmp_path, "n=1", f"kind={kind}", "hydra.launcher.timeout_s=20", "hydra.launcher.grace_s=0.5", code=1)
    (row,) = rows_of(tmp_path)
    assert (row.status, row.detail) == ("timed out", f"after 20 s (hydra.launcher.timeout_s), ended by {by}")
    told = (sweep_folder(tmp_path) / "0" / "output.log").read_text()
    assert "train.py" in told  # where it hung
    assert " in do" in told


@pytest.mark.long
def test_output_of_a_job_is_cut_while_it_runs(tmp_path: Path) -> None:
    """30 MB of output, of which 2 MiB may stay: it is cut while the job runs, and again when it has ended."""
    wait = """sys.stdout.flush()
    output = os.path.join(hydra.core.hydra_config.HydraConfig.get().runtime.output_dir, "output.log")
    begun = time.time()
    while os.path.getsize(output) > 2 * 2**20 and time.time() < begun + 120:
        time.sleep(0.05)
    size = os.path.getsize(output)
    print("y" * 3 * 10**6 + " the last word")
    return size"""
    script = training(wait)
    sweep(tmp_path, "n=1", "kind=loud", "hydra.launcher.output_mib=2", script=script)
    (row,) = rows_of(tmp_path)
    assert row.returned <= 2 * 2**20
    output = sweep_folder(tmp_path) / "0" / "output.log"
    assert output.stat().st_size <= 2 * 2**20
    assert "its end" in output.read_text()[:200]
    assert output.read_text().endswith("yyy the last word\n")


def test_processes_of_a_job_end_with_it(tmp_path: Path) -> None:
    script = training("import subprocess; return subprocess.Popen(['sleep', '1000']).pid")
    sweep(tmp_path, "n=1", script=script)
    (row,) = rows_of(tmp_path)
    until(lambda: not is_running(row.returned))


# --- the same command goes on ---


def test_override_with_an_interpolation_is_one_of_each_job(tmp_path: Path) -> None:
    sweep(tmp_path, "n=1,2", "kind=fine", "+twice=${n}")
    assert [(row.status, f"n={n}" in row.overrides) for n, row in enumerate(rows_of(tmp_path), 1)] == 2 * [
        ("finished", True)
    ]


def test_the_same_command_runs_nothing_twice(tmp_path: Path) -> None:
    for _ in range(2):
        sweep(tmp_path, "n=1,2", "kind=fine,raise", code=1)
    assert starts(tmp_path) == {1: 2, 2: 2}


@pytest.mark.long
def test_failed_jobs_run_again_and_another_sweep_has_a_folder_of_its_own(tmp_path: Path) -> None:
    for rerun in ("never", "failed"):
        sweep(tmp_path, "n=1,2", "kind=fine,raise", f"hydra.launcher.rerun={rerun}", code=1)
    assert starts(tmp_path) == {1: 3, 2: 3}
    sweep(tmp_path, "n=1,2,3", "kind=fine")  # another sweep, in a folder of its own
    assert len(list((tmp_path / "multirun").iterdir())) == 2


@pytest.mark.long
def test_changed_configuration_runs_again(tmp_path: Path) -> None:
    sweep(tmp_path, "n=1,2")
    done = sweep(tmp_path, "n=1,2", script=TRAIN.replace("sleep: float = 0.0", "sleep: float = 0.01"))
    assert len(lines_with(done.stdout, "configuration", ".attempt-1")) == 2
    assert starts(tmp_path) == {1: 2, 2: 2}
    assert sorted(path.name for path in sweep_folder(tmp_path).iterdir() if path.name[0].isdigit()) == [
        "0",
        "0.attempt-1",
        "1",
        "1.attempt-1",
    ]


@pytest.mark.long
def test_changed_script_runs_again_except_with_rerun_failed(tmp_path: Path) -> None:
    sweep(tmp_path, "n=1,2", "kind=raise,fine", code=1)
    edited = TRAIN.replace('raise ValueError("bad luck")', "return 7")
    sweep(tmp_path, "n=1,2", "kind=raise,fine", "hydra.launcher.rerun=failed", script=edited)
    assert starts(tmp_path) == {1: 3, 2: 3}
    assert returned(tmp_path) == [7, 1.5, 7, 3.0]
    sweep(tmp_path, "n=1,2", "kind=raise,fine", script=edited)
    assert starts(tmp_path) == {1: 4, 2: 4}  # those that ran under the former script


def test_changed_module_of_the_application_runs_again(tmp_path: Path) -> None:
    script = training("return cfg.n * times", "from mine import times")
    for times in (2, 3):
        # of another length, since Python tells a file of bytecode that is out of date by length and second
        (tmp_path / "mine.py").write_text("times = " + "1 + " * (times - 1) + "1\n")
        done = sweep(tmp_path, "n=1", script=script)
    assert starts(tmp_path) == {1: 2}
    assert lines_with(done.stdout, " mine.py ", "0.attempt-1")
    assert not lines_with(done.stdout, "train.py")
    assert returned(tmp_path) == [3]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.row(90)
def test_command_killed_at_random_moments_loses_and_repeats_no_job(tmp_path: Path, seed: int) -> None:
    """20 kills in all; the last command is left to end."""
    moments = random.Random(seed)
    overrides = ["n=range(20)", "sleep=0.1", "hydra.launcher.parallel=2"]
    kills = 0
    while kills < 5:
        process = popen(tmp_path, *overrides)
        with process:
            try:
                process.wait(timeout=moments.uniform(0.3, 2.5))
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
            else:
                break
    sweep(tmp_path, *overrides)
    lines = (sweep_folder(tmp_path) / "results.jsonl").read_text().splitlines()
    rows = rows_of(tmp_path)
    assert len(lines) == len(rows) == 20
    assert [row.returned for row in rows] == [1.5 * n for n in range(20)]
    assert sum(row.attempt for row in rows) <= 20 + 2 * kills  # a kill ends two jobs at most
    assert all(starts(tmp_path)[row.number] <= row.attempt for row in rows)


WAIT = """
    open(f"pid-{os.getpid()}", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.02)
    return os.environ.get("LIGHTNING_SOLO_RESUMES")
"""
forked_or_fresh = pytest.mark.parametrize("fresh", [False, long(True)], ids=["forked", "fresh"])
DEAF = "\n    signal.signal(signal.SIGINT, signal.SIG_IGN)" + WAIT


def pids(folder: Path) -> list[int]:
    """Return the processes of the jobs that have begun to wait."""
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


@forked_or_fresh
@pytest.mark.parametrize("wait", [WAIT, long(DEAF)], ids=["hears", "deaf"])
@pytest.mark.row(90)
def test_job_of_a_killed_command_ends_and_is_resumed(tmp_path: Path, wait: str, fresh: bool) -> None:
    script = training(wait, THREAD if fresh else "")
    with popen(tmp_path, "n=1", "hydra.launcher.grace_s=1", script=script) as process:
        until(lambda: pids(tmp_path))
        process.kill()
    (tmp_path / "go").touch() if wait == WAIT else None
    (job,) = pids(tmp_path)
    with popen(tmp_path, "n=1", "hydra.launcher.grace_s=1", script=script) as process:  # waits for its end
        until(lambda: starts(tmp_path) == {1: 2})
        assert not is_running(job)
        (tmp_path / "go").touch()
        assert process.wait(timeout=500) == 0
    (row,) = rows_of(tmp_path)
    assert (row.status, row.attempt, row.returned) == ("finished", 2, "1")
    second = read_json(SweepFolder(sweep_folder(tmp_path)).job(0).end) or {}
    assert row.seconds > second["seconds"] > 0  # the first attempt counts too


@forked_or_fresh
def test_jobs_of_a_killed_server_end_and_are_resumed(tmp_path: Path, fresh: bool) -> None:
    script = training(WAIT, THREAD if fresh else "")
    with popen(tmp_path, "n=1,2", script=script) as process:
        until(lambda: pids(tmp_path))
        (job,) = pids(tmp_path)
        server = int(Path(f"/proc/{job}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(server, signal.SIGKILL)
        _, said = process.communicate(timeout=500)
    assert process.returncode == 1
    assert "died" in said
    assert "Traceback" not in said
    until(lambda: not is_running(job))
    (tmp_path / "go").touch()
    sweep(tmp_path, "n=1,2", script=script)
    rows = rows_of(tmp_path)
    assert [(row.status, row.attempt, row.returned) for row in rows] == [("finished", 2, "1"), ("finished", 1, None)]


def test_ctrl_c_interrupts_jobs_which_the_same_command_runs_again(tmp_path: Path) -> None:
    """A terminal sends it to all processes of the command's group."""
    restore = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
    arguments: dict[str, Any] = {"preexec_fn": restore, "start_new_session": True}
    script = training(WAIT)
    same = ["n=1,2,3", "hydra.launcher.grace_s=100"]
    with popen(tmp_path, *same, script=script, **arguments) as process:
        until(lambda: pids(tmp_path))
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=500)
    assert process.returncode == 130
    assert lines_with(said, "interrupted", "0 of 3 jobs", "same command")
    assert "Traceback" not in said
    (row,) = rows_of(tmp_path)
    assert row.status == "interrupted"
    (tmp_path / "go").touch()
    sweep(tmp_path, *same, "hydra.launcher.parallel=3", script=script)
    assert starts(tmp_path) == {1: 2, 2: 1, 3: 1}


@pytest.mark.long
def test_second_ctrl_c_kills_a_job_that_ignores_the_first(tmp_path: Path) -> None:
    deaf = "signal.signal(signal.SIGINT, lambda *_: open('asked', 'w').close()); time.sleep(60)"
    script = training(deaf)
    with popen(tmp_path, "n=1", "hydra.launcher.grace_s=1000", script=script) as process:
        until(lambda: starts(tmp_path) == {1: 1})
        process.send_signal(signal.SIGTERM)
        until(lambda: (tmp_path / "asked").exists())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=500) == 130
    assert [row.status for row in rows_of(tmp_path)] == ["interrupted"]


@pytest.mark.long
@forked_or_fresh
def test_command_in_the_background_interrupts_its_jobs(tmp_path: Path, fresh: bool) -> None:
    """Its shell lets it ignore Ctrl-C; its jobs end one after the other, and none is started in between."""
    end = "try: time.sleep(60)\n    except KeyboardInterrupt:\n        time.sleep(cfg.n - 1); raise"
    script = training(end, THREAD if fresh else "")
    ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    settings = ["hydra.launcher.parallel=2", "hydra.launcher.grace_s=1000"]
    with popen(tmp_path, "n=1,2,3", *settings, script=script, preexec_fn=ignore) as process:
        until(lambda: starts(tmp_path) == {1: 1, 2: 1})
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=500) == 130
    assert starts(tmp_path) == {1: 1, 2: 1}
    assert [row.status for row in rows_of(tmp_path)] == ["interrupted"] * 2


def test_second_command_on_a_sweep_is_refused(tmp_path: Path) -> None:
    script = training(WAIT)
    with popen(tmp_path, "n=1", script=script) as first:
        until(lambda: pids(tmp_path))
        second = sweep(tmp_path, "n=1", script=script, code=1)
        assert f"process {first.pid} works on this sweep" in second.stderr
        assert "Traceback" not in second.stderr
        (tmp_path / "go").touch()
        assert first.wait(timeout=500) == 0
    assert starts(tmp_path) == {1: 1}


# --- refusals ---


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["n=range(1000)", "sleep=range(1000)"], "1,000,000 jobs (1000 x 1000), and hydra.launcher.max_jobs=1,000"),
        (["n=1", "hydra.launcher.parallel=0"], "hydra.launcher.parallel=0: must be 1 or more"),
        (["n=1", "hydra.sweep.subdir=../outside"], "/outside"),
        (["m=1,2"], "m"),
    ],
)
def test_sweep_is_refused_before_a_job_runs(tmp_path: Path, overrides: list[str], said: str) -> None:
    done = sweep(tmp_path, *overrides, code=1)  # within its limit: a million jobs are counted, not composed
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert starts(tmp_path) == {}
    assert not list(tmp_path.glob("multirun/*"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "outputs"),
    [
        (
            [r"""hydra.sweep.dir="it's [one], back\slash and {two}\\" """.strip()],
            ["it's [one], back\\slash and {two}\\/0"],
        ),
        (
            ["kind=a/b,c", "hydra.sweep.subdir=${hydra.job.override_dirname}"],
            ["multirun/*/kind=a/b", "multirun/*/kind=c"],
        ),
        (["n=1,2", "hydra.sweep.subdir='job-${hydra:job.num}'"], ["multirun/*/job-0", "multirun/*/job-1"]),
    ],
    ids=["odd characters", "slashes", "resolver of Hydra"],
)
def test_hydra_and_the_launcher_mean_the_same_folder(tmp_path: Path, overrides: list[str], outputs: list[str]) -> None:
    sweep(tmp_path, *overrides)
    for output in outputs:
        (folder,) = tmp_path.glob(output.replace("[", "[[]"))
        assert (folder / "output.log").is_file()
        assert (folder / ".hydra" / "overrides.yaml").is_file()


@pytest.mark.parametrize(
    ("statement", "said"),
    [long("raise OSError('not here')", "not here"), ("os._exit(5)", "died of exit status 5")],
    ids=["import fails", "import ends the process"],
)
def test_application_that_another_process_cannot_import_is_refused(tmp_path: Path, statement: str, said: str) -> None:
    script = training(before=f"if __name__ != '__main__':\n    {statement}")
    done = sweep(tmp_path, "n=1,2", script=script, code=1)
    assert said in done.stderr
    assert starts(tmp_path) == {}


# --- what it costs ---


def test_launcher_plugin_loads_without_torch(tmp_path: Path) -> None:
    code = "import sys; from hydra.core.plugins import Plugins; Plugins.instance(); print('torch' in sys.modules)"
    assert run(tmp_path, [sys.executable, "-c", code]).stdout.strip() == "False"


def test_state_files_are_json(tmp_path: Path) -> None:
    sweep(tmp_path, "n=1")
    for file in (sweep_folder(tmp_path) / ".sweep" / "jobs" / "0").iterdir():
        assert json.loads(file.read_text())
