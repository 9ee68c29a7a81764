"""GPUs shared out between the jobs of a sweep; they are pretended ones, entries of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_solo.atomic_files import write_json
from lightning_solo.errors import CapabilityError, PresetError
from lightning_solo.machine import HOST_SHARE, Gpu
from lightning_solo.processes import fork
from lightning_solo.sweeps import ranks, server
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.gpus import check_devices, devices_of, gpus_of, place, variables_of, with_parallel
from lightning_solo.sweeps.job_process import JobRequest
from lightning_solo.sweeps.jobs import Job, Settings, Try
from lightning_solo.sweeps.outcome import End
from lightning_solo.sweeps.results import Row, read
from tests.messages import lines_with, mentions
from tests.sweeps.applications import (
    THREAD,
    plain_jobs,
    plain_sweep,
    popen,
    returned,
    rows_of,
    sweep,
    sweep_folder,
    training,
)

A, B, C = "GPU-aaaa1111-0", "GPU-bbbb2222-0", "GPU-cccc3333-0"
MIG = "MIG-dddd4444-0"
THREE = [Gpu("0", "H100", A, 70, 80), Gpu("1", "H100", B, 80, 80), Gpu("2", "H100", C, 10, 80)]
DIVIDED = [THREE[0], Gpu("1", "H100", B, 80, 80), Gpu("", "MIG 3g.40gb", MIG), Gpu("", "MIG 3g.40gb", f"{MIG}1")]


# --- which GPUs there are ---


@pytest.mark.parametrize(
    ("gpus", "variable", "present", "entries"),
    [
        (None, "0,1", THREE, []),
        ("auto", None, THREE, ["0", "1", "2"]),
        ("auto", "2, 0", THREE, ["2", "0"]),
        ("auto", f"{B},{A[:8]}", THREE, [B, A[:8]]),
        ("auto", "3,5", [], ["3", "5"]),
        ("auto", None, DIVIDED, ["0", MIG, f"{MIG}1"]),
        ([0, 2], None, THREE, ["0", "2"]),
        ([2], f"{C},{A}", THREE, ["2"]),
        ([5], "3,5", [], ["5"]),
        (["MIG-GPU-aaaa/1/0"], "MIG-GPU-aaaa/1/0,MIG-GPU-aaaa/2/0", [], ["MIG-GPU-aaaa/1/0"]),
    ],
)
def test_entries_are_those_of_the_user(gpus: Any, variable: str | None, present: list[Gpu], entries: list[str]) -> None:
    assert list(gpus_of(Settings(gpus=gpus), variable, present)) == entries


@pytest.mark.parametrize(
    ("gpus", "variable", "present", "said"),
    [
        ("auto", None, [], ["no GPU", "gpus=null"]),
        ([0], None, [], ["no GPU", "gpus=null"]),
        ("auto", "", THREE, ["CUDA_VISIBLE_DEVICES is empty", "unset"]),
        ("auto", "0,0", [], ["CUDA_VISIBLE_DEVICES=0,0", "twice"]),
        ("auto", f"0,{A}", THREE, ["twice"]),
        ("auto", "0,-1,2", [], ["'-1' is no GPU"]),
        ("auto", "0,,2", [], ["'' is no GPU"]),
        ("auto", "0,7", THREE, ["7 is none of", "0 (H100)"]),
        ("auto", "MIG-dddd", DIVIDED, ["several"]),
        ([0, 0], None, THREE, ["hydra.launcher.gpus=[0,0]", "twice"]),
        ([7], None, THREE, ["7 is none of", "0 (H100)"]),
        ([True], "0", [], ["'True' is no GPU"]),
        ([0], "1,2", THREE, ["0 isn't one of CUDA_VISIBLE_DEVICES=1,2", "gpus=[1]"]),
        ([0], "1,2", [], ["0 isn't one of CUDA_VISIBLE_DEVICES=1,2", "gpus=[1]"]),
    ],
)
def test_gpus_that_are_not_there_are_refused(
    gpus: Any, variable: str | None, present: list[Gpu], said: list[str]
) -> None:
    with pytest.raises((PresetError, CapabilityError), match=mentions(*said)):
        gpus_of(Settings(gpus=gpus), variable, present)


def test_packing_needs_the_memory_of_each_gpu() -> None:
    packed = Settings(gpus="auto", jobs_per_gpu="auto")
    assert gpus_of(packed, "2,0", THREE) == {"2": 10, "0": 70}
    with pytest.raises(CapabilityError, match=mentions("jobs_per_gpu=auto", "memory of GPU 0, 1", "a number")):
        gpus_of(packed, "0,1", [])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gpus": 2}, ["gpus=2", "[0]"]),
        ({"gpus": []}, ["gpus=[]", "null"]),
        ({"gpus": "all"}, ["gpus=all", "auto"]),
        ({"jobs_per_gpu": 2}, ["jobs_per_gpu=2", "gpus=auto"]),
        ({"gpus": "auto", "jobs_per_gpu": 0}, ["jobs_per_gpu=0", "1 or more"]),
        ({"gpus": "auto", "jobs_per_gpu": "many"}, ["jobs_per_gpu=many", "auto"]),
    ],
)
def test_settings_of_gpus_out_of_range_are_refused(settings: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(PresetError, match=mentions(*said)):
        Settings(**settings)


def test_parallel_follows_the_gpus() -> None:
    def parallel(gpus: list[str], **settings: Any) -> int | None:
        return with_parallel(Settings(gpus=gpus or None, **settings), gpus).parallel

    assert parallel([]) == 1
    assert parallel([], parallel=3) == 3
    assert parallel(["0", "1"]) == 2
    assert parallel(["0", "1"], jobs_per_gpu=3) == 6
    assert parallel(["0", "1"], jobs_per_gpu=3, parallel=4) == 4
    assert parallel(["0", "1"], jobs_per_gpu="auto") == 8
    assert parallel(["0", "1"], jobs_per_gpu="auto", parallel=20) == 20
    with pytest.raises(PresetError, match=mentions("parallel=5", "2 jobs at a time", "jobs_per_gpu=3")):
        parallel(["0", "1"], parallel=5)


# --- how many a job takes ---


@pytest.mark.parametrize(
    ("fields", "devices"),
    [
        ({}, 1),
        ({"solo": "bf16"}, 1),
        ({"solo": {"devices": 2}}, 2),
        ({"solo": {"devices": None}, "trainer": {"devices": "3"}}, 3),
        ({"trainer": {"devices": [0, 1]}}, 2),
        ({"trainer": {"devices": "0,1"}}, 2),
        ({"trainer": {"devices": "auto"}}, 1),
        ({"trainer": {"devices": -1}}, 1),
        ({"n": 2, "trainer": {"devices": "${n}"}}, 2),
        ({"trainer": {"devices": "${missing}"}}, 1),
    ],
)
def test_devices_of_a_job(fields: dict[str, Any], devices: int) -> None:
    assert [devices_of(OmegaConf.create(fields), shared_out) for shared_out in (True, False)] == [devices] * 2


@pytest.mark.parametrize(("value", "devices"), [([1], 1), ("1,", 1), ("0,2", 2), ([], 1), (0, 1), (True, 1)])
def test_devices_by_name_are_refused_only_where_gpus_are_shared_out(value: Any, devices: int) -> None:
    config = OmegaConf.create({"trainer": {"devices": value}})
    with pytest.raises(PresetError, match=mentions("trainer.devices=", "hydra.launcher.gpus", "trainer.devices=1")):
        devices_of(config, shared_out=True)
    assert devices_of(config, shared_out=False) == devices


def job(number: int, devices: int = 1, planned: int | None = None) -> Job:
    return Job(number, (), Path(), "", bytes, devices, lambda: planned)


def test_job_that_asks_for_more_gpus_than_there_are_is_refused() -> None:
    check_devices([job(0, 3)], [])
    check_devices([job(0, 2)], ["0", "1"])
    with pytest.raises(PresetError, match=mentions("job 4 asks for 3 devices", "has 2", "at most 2")):
        check_devices([job(0), job(4, 3)], ["0", "1"])


# --- where it starts ---


def test_job_starts_where_the_fewest_jobs_run() -> None:
    gpus: dict[str, int | None] = dict.fromkeys("ab")
    settings = Settings(gpus=[*gpus], jobs_per_gpu=2)

    def on(*names: str) -> list[Try]:
        return [Try(job(number), 1, gpus=tuple(name)) for number, name in enumerate(names)]

    def started(running: list[Try], devices: int = 1, alone: bool = False) -> Any:
        return place(Try(job(9, devices), 1, alone=alone), running, gpus, settings)

    assert [started(on()), started(on("a")), started(on("a", "b")), started(on("a", "b", "b"))] == [
        *(("a",), ("b",), ("a",), ("a",))
    ]
    assert started(on("a", "a", "b", "b")) is None
    assert started(on("b"), devices=2) == ("a", "b")
    assert started(on("b", "b"), devices=2) is None
    assert [started(on("a"), alone=True), started(on("a", "b"), alone=True)] == [("b",), None]
    lonely = [on("a")[0]._replace(alone=True)]
    assert [started(lonely), started([*lonely, *on("b", "b")])] == [("b",), None]
    assert place(Try(job(9), 1), [], {}, Settings()) == ()


def test_jobs_are_packed_by_their_plans() -> None:
    gpus = {"a": 10, "b": 5}
    settings = Settings(gpus=[*gpus], jobs_per_gpu="auto")

    def started(planned: int | None, *running: tuple[str, int | None]) -> Any:
        tries = [Try(job(n, planned=size), 1, gpus=(gpu,)) for n, (gpu, size) in enumerate(running)]
        return place(Try(job(9, planned=planned), 1), tries, gpus, settings)

    assert started(4, ("a", 6), ("b", 1)) == ("a",)
    assert started(5, ("a", 6), ("b", 1)) is None
    assert started(4, ("a", 6), ("b", 0)) == ("a",)
    assert started(None, ("a", 1), ("b", 1)) is None  # unplanned jobs run alone
    assert started(None, ("a", 1)) == ("b",)
    assert started(1, ("a", None), ("b", None)) is None
    assert started(20) == ("a",)  # it may fit after all


def test_order_of_the_numbers_is_that_of_nvidia_smi_unless_the_user_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert variables_of([]) == {}
    assert variables_of(["0", "2"]) == {"CUDA_VISIBLE_DEVICES": "0,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert variables_of(["2"]) == {"CUDA_VISIBLE_DEVICES": "2"}


# --- sweeps ---

ON = """
    import fcntl
    gpu = os.environ["CUDA_VISIBLE_DEVICES"]
    before = open(f"gpu-{gpu}", "a")  # held until this process ends
    try:
        fcntl.flock(before, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        open("two-on-one", "w").close()
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    print("pid", os.getpid(), os.getppid(), flush=True)
    open(f"pid-{os.getpid()}", "w").close()
    time.sleep(0.3)
    os.unlink(f"pid-{os.getpid()}")
    return [gpu, os.environ.get("OMP_NUM_THREADS"), os.environ.get("LIGHTNING_SOLO_HOST_SHARE")]
"""


PACKED = """
    with open("running.txt", "a") as file:
        file.write(f"+{cfg.n}\\n")
    time.sleep(1)
    with open("running.txt", "a") as file:
        file.write(f"-{cfg.n}\\n")
"""
SMI = """#!/bin/sh
case "$1" in
    -L) echo "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa1111-0)" ;;
    *) echo "GPU-aaaa1111-0, 10, 20" ;;
esac
"""


def visible(monkeypatch: pytest.MonkeyPatch, entries: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", entries)


def test_each_job_has_one_gpu_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    visible(monkeypatch, "4,GPU-8932f937,6,7")
    cores = len(os.sched_getaffinity(0))
    done = sweep(tmp_path, "n=range(7)", "hydra.launcher.gpus=[4,GPU-8932f937,6]", script=training(ON), threads=None)
    rows = rows_of(tmp_path)
    assert [row.gpu for row in rows] == [row.returned[0] for row in rows]
    assert {row.gpu for row in rows} == {"4", "GPU-8932f937", "6"}
    assert not (tmp_path / "two-on-one").exists()
    assert {row.returned[1] for row in rows} == {os.environ.get("OMP_NUM_THREADS", str(max(cores // 3, 1)))}
    (share,) = {int(row.returned[2]) for row in rows}
    assert share > 0
    assert "started on GPU GPU-8932f937" in done.stdout


def test_job_that_ran_out_of_memory_beside_another_is_retried_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    visible(monkeypatch, "3")
    until = """for _ in range(6000):
        if os.path.exists("two-on-one"):
            break
        time.sleep(0.02)"""
    script = training(ON.replace("time.sleep(0.3)", until))
    done = sweep(tmp_path, "n=range(3)", "hydra.launcher.gpus=auto", "hydra.launcher.jobs_per_gpu=2", script=script)
    rows = rows_of(tmp_path)
    assert [row.status for row in rows] == ["finished"] * 3
    assert {row.attempt for row in rows} == {1, 2}
    assert lines_with(done.stdout, "out of device memory", "beside other jobs", "GPU 3")


def test_job_that_ran_out_of_memory_beside_another_when_its_command_ended_runs_alone(tmp_path: Path) -> None:
    """Its command ended before it wrote the row: the record of the start and the job's result are there."""
    sweep = plain_sweep(tmp_path)
    (one,) = plain_jobs(tmp_path, 1)
    files, error = sweep.folder.job(0), {"type": "OutOfMemoryError", "message": "CUDA out of memory"}
    write_json(files.result, {"attempt": 2, "error": error})
    write_json(files.end, {"attempt": 2, "exit_code": 1, "seconds": 4.0})
    for shared in (True, False):
        start = {"attempt": 2, "failures": 1, "config_hash": "hash", "code": {}, "gpu": "3", "shared": shared}
        write_json(files.start, {**start, "seconds": 3.0})
        again = sweep._row_or_try(one, None)
        if shared:
            assert again == Try(one, 3, 1, seconds=7.0, alone=True)
        else:
            assert isinstance(again, Row)
            assert (again.status, again.gpu) == ("out of device memory", "3")


@pytest.mark.parametrize("shared", [True, False])
def test_job_that_ran_out_of_memory_beside_another_before_ctrl_c_has_no_row(tmp_path: Path, shared: bool) -> None:
    """The next command runs it alone."""
    sweep = plain_sweep(tmp_path, gpus=["3"], jobs_per_gpu=2)
    (one,) = plain_jobs(tmp_path, 1)
    error = {"type": "OutOfMemoryError", "message": "CUDA out of memory"}
    write_json(sweep.folder.job(0).result, {"attempt": 1, "error": error})
    sweep._signals = [signal.SIGINT]
    waiting: deque[Try] = deque()
    sweep._ended(waiting, Try(one, 1, shared=shared), End(1, 2.0))
    assert not waiting
    assert [row.status for row in read(sweep.folder.results)] == ([] if shared else ["out of device memory"])


@pytest.mark.long
def test_job_that_runs_out_of_memory_alone_is_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    visible(monkeypatch, "3,4")
    sweep(tmp_path, "n=1,2", "kind=cuda", "sleep=0.3", "hydra.launcher.gpus=auto", code=1)
    assert [(row.status, row.attempt) for row in rows_of(tmp_path)] == [("out of device memory", 1)] * 2


@pytest.mark.long
def test_application_that_sets_the_variable_on_import_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork runs after the import; a fresh interpreter would run all jobs on the application's GPU."""
    visible(monkeypatch, "0,1")
    script = training(ON, "os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'")
    sweep(tmp_path, "n=1,2", "hydra.launcher.gpus=auto", script=script)
    assert sorted(gpu for gpu, *_ in returned(tmp_path)) == ["0", "1"]
    done = sweep(
        tmp_path,
        "n=1,2",
        "hydra.launcher.gpus=auto",
        "hydra.launcher.rerun=all",
        script=script.replace("class Model:", f"{THREAD}\n\nclass Model:"),
        code=1,
    )
    assert "sets CUDA_VISIBLE_DEVICES while it is imported" in done.stderr


@pytest.fixture
def one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program `nvidia-smi` that lists a GPU with 10 MiB of free memory."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.long
def test_packed_jobs_take_no_more_than_the_memory_of_the_gpu(tmp_path: Path, one_gpu: None) -> None:
    planned = {1: 4, 2: 5, 3: 3, 4: 10, 5: 2}
    before = f"def planned_bytes(config):\n    return {planned}[config.n] * 2**20"
    packed = ["hydra.launcher.gpus=auto", "hydra.launcher.jobs_per_gpu=auto"]
    sweep(tmp_path, "n=1,2,3,4,5", *packed, script=training(PACKED, before))
    running, most = set(), 0
    for line in (tmp_path / "running.txt").read_text().split():
        (running.add if line[0] == "+" else running.remove)(int(line[1:]))
        assert sum(planned[n] for n in running) <= 10
        most = max(most, len(running))
    assert most >= 2
    assert {row.gpu for row in rows_of(tmp_path)} == {"0"}
    unplanned = tmp_path / "unplanned"
    unplanned.mkdir()
    done = sweep(unplanned, "n=1,2,6", *packed, script=training(PACKED, before), code=1)
    assert [row.status for row in rows_of(unplanned)] == ["finished", "finished", "failed"]
    assert lines_with(done.stdout, "could not be started", "planned_bytes raised KeyError: 6")
    done = sweep(tmp_path, "n=1,2,3", *packed, code=1)
    assert "no function planned_bytes(config)" in done.stderr


DDP = """
    import lightning.pytorch as L
    from tests.modules import loader, regression
    module = regression(L)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", strategy="ddp", devices=2, max_steps=3, **quiet)
    trainer.fit(module, loader())
    if trainer.global_rank == 1 and cfg.n == 2:
        raise ValueError("of rank 1")
    if trainer.global_rank == 1 and cfg.n == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    trainer.strategy.barrier()
    return [trainer.world_size, os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"]]
"""


def test_the_port_of_ranks_is_taken_but_for_their_store() -> None:
    from torch.distributed import TCPStore

    with ranks.reserved_port() as port, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = TCPStore("127.0.0.1", port, 1, is_master=True)
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_ranks_have_the_environment_of_torchrun_and_the_first_failure_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.5)
    monkeypatch.setenv(HOST_SHARE, "100")

    def ended(work: Callable[[int], int]) -> int:
        return fork(lambda _: abs(ranks.run_ranks(2, work))).wait()

    def note(rank: int) -> int:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", HOST_SHARE, "MASTER_PORT")
        (tmp_path / str(rank)).write_text(" ".join(os.environ[name] for name in names))
        return 0

    def fail(rank: int) -> int:
        if rank == 1:
            return 7
        time.sleep(1000)  # killed
        return 0

    def killed(rank: int) -> int:
        os.kill(os.getpid(), signal.SIGUSR1)
        return 0

    assert ended(note) == 0
    one, two = ((tmp_path / rank).read_text().split() for rank in "01")
    assert (one[:5], two[:5]) == (["0", "0", "2", "127.0.0.1", "50"], ["1", "1", "2", "127.0.0.1", "50"])
    assert one[5] == two[5]
    assert ended(fail) == 7
    assert ended(killed) == signal.SIGUSR1


@pytest.mark.parametrize("first", [0, 1])
def test_error_of_one_rank_is_the_result_of_its_job_in_any_order(tmp_path: Path, first: int) -> None:
    """Rank 1 fails, before or after rank 0 has returned."""
    files = SweepFolder(tmp_path).job(0)
    files.path.mkdir(parents=True)

    def task(_: object) -> int:
        rank = int(os.environ["RANK"])
        while rank != first and not files.result.exists():
            time.sleep(0.01)
        if rank == 1:
            raise ValueError("of rank 1")
        return 3

    request = JobRequest(0, 1, False, str(tmp_path), pickle.dumps(None), Settings(), {}, 2)
    assert fork(lambda _: server._run(lambda: task, request, files)).wait() == 1
    result = files.result_of(1)
    assert result is not None
    assert result["error"] == {"type": "ValueError", "message": "of rank 1"}


@pytest.mark.long
def test_job_on_two_devices_has_a_process_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's DDP, on the CPU; rank 1 of the second job fails, that of the third is killed."""
    visible(monkeypatch, "0,1,2")
    script = training(DDP).replace("    n: int = 0", "    n: int = 0\n    trainer: dict = field(default_factory=dict)")
    script = script.replace("import dataclass", "import dataclass, field")
    sweep(tmp_path, "n=1,2,3", "+trainer.devices=2", "hydra.launcher.gpus=auto", script=script, code=1)
    one, failed, killed = rows_of(tmp_path)
    assert (one.status, one.returned, one.gpu, one.steps) == ("finished", [2, "0,1", "0"], "0,1", 3)
    assert (failed.status, failed.detail) == ("failed", "ValueError: of rank 1")
    assert (killed.status, killed.returned) == ("killed", None)
    many = ["+trainer.devices=4", "hydra.launcher.gpus=auto"]
    assert "asks for 4 devices" in sweep(tmp_path, "n=1", *many, script=script, code=1).stderr


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_kills_lose_no_job_repeat_none_and_put_no_two_on_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Twelve jobs over three GPUs; jobs, the command and the process that starts the jobs are killed at random."""
    visible(monkeypatch, "0,1,2")
    moments, kills = random.Random(seed), 0
    overrides = ["n=range(12)", "hydra.launcher.gpus=[0,1,2]", "hydra.launcher.retries=20", "hydra.launcher.grace_s=1"]
    script = training(ON.replace("0.3", "1.0"))
    while kills < 8:
        with popen(tmp_path, *overrides, script=script) as process:
            while kills < 8 and process.poll() is None:
                try:
                    process.wait(timeout=moments.uniform(0.5, 3.0))
                except subprocess.TimeoutExpired:
                    kill(tmp_path, process, moments)
                    kills += 1
            if process.poll() is None:
                process.kill()
        if not list((tmp_path / "multirun").rglob("results.jsonl")):
            continue
        if len(rows_of(tmp_path)) == 12:
            break
    assert kills >= 3
    sweep(tmp_path, *overrides, script=script)
    rows = rows_of(tmp_path)
    lines = (sweep_folder(tmp_path) / "results.jsonl").read_text().splitlines()
    assert len(lines) == len(rows) == 12
    assert [row.status for row in rows] == ["finished"] * 12
    assert {row.gpu for row in rows} <= {"0", "1", "2"}
    assert sum(row.attempt for row in rows) <= 12 + 3 * (kills + 1)  # a kill ends three jobs at most
    assert not (tmp_path / "two-on-one").exists()


def kill(folder: Path, command: subprocess.Popen[str], moments: random.Random) -> None:
    """Kill a running job, the process that starts the jobs, or the command."""
    jobs = [int(file.name.removeprefix("pid-")) for file in folder.glob("pid-*")]
    jobs = [pid for pid in jobs if Path(f"/proc/{pid}").exists()]
    kind = moments.choice(["job", "job", "server", "command"])
    target = command.pid
    if jobs and kind != "command":
        target = moments.choice(jobs)
        if kind == "server":
            target = int(Path(f"/proc/{target}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(target, signal.SIGKILL)
