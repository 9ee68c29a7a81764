"""The process that plans: whatever a module does in it, here it is an answer or an error, and no process is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_solo import requirements
from lightning_solo.cards.configuration import Configuration
from lightning_solo.errors import CapabilityError, PlanError, PresetError
from lightning_solo.planner import forks, worker
from lightning_solo.planner.device import device
from lightning_solo.planner.plan import Plan
from lightning_solo.planner.planner import Planner
from lightning_solo.planner.preset_plans import plan
from lightning_solo.planner.worker import PlanRequest, Worker
from lightning_solo.presets.compose import compose
from lightning_solo.units import GiB
from tests.conftest import long
from tests.messages import mentions
from tests.planner.modules import Classifier, dense, vectors
from tests.planner.test_forks import children

ROOT = Path(__file__).parents[2]
ANSWER_S = 120.0  # much more than any of these takes


class Does(Classifier):
    """Calls a function in its forward."""

    def __init__(self, what: Callable[[], Any]) -> None:
        super().__init__(nn.Linear(16, 5))
        self.what = what

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.what()
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])


def asked(module: Any, batch: Any = None, timeout_s: float = ANSWER_S) -> Plan:
    found = plan(module, batch, preset="baseline", device="cpu", timeout_s=timeout_s)
    assert isinstance(found, Plan)
    return found


def assert_works() -> None:
    # 16 x 40 + 40 + 40 x 5 + 5
    assert asked(dense, vectors()).breakdown["weights"] == 4 * 885


def living(group: int) -> list[int]:
    """Return the processes of a group, those that are over but not yet waited for left out."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(folder.name))
    return found


def assert_gone(group: int) -> None:
    end = time.monotonic() + 500
    while living(group) and time.monotonic() < end:
        threading.Event().wait(0.01)  # a killed process takes a moment
    assert not living(group)


def hangs(fifo: Path) -> Callable[[], Any]:
    """Return a factory of a module that tells its group of processes, and then waits for ever."""

    def what() -> None:
        with fifo.open("w") as pipe:
            pipe.write(f"{os.getpgrp()}\n")
        while True:
            signal.pause()

    return lambda: Does(what)


# --- an answer whatever it does ---


def test_module_is_planned_and_left_unchanged() -> None:
    module = dense()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    found = asked(module, vectors())
    assert found.breakdown["weights"] == 4 * 885
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert module._trainer is None


def test_output_of_a_module_is_not_read_as_an_answer(capfd: pytest.CaptureFixture[str]) -> None:
    def what() -> None:
        print("printed", flush=True)
        os.write(1, b"\x00\xff" * 1000)
        subprocess.run(["echo", "by another process"], check=True)

    asked(lambda: Does(what), vectors())
    assert "printed" not in capfd.readouterr().out


def test_standard_input_of_a_module_is_empty() -> None:
    def what() -> None:
        assert sys.stdin.read() == ""

    asked(lambda: Does(what), vectors())


# --- an error whatever it does ---


def aborts() -> None:
    os.write(2, b"out of luck\n")
    os.abort()


@pytest.mark.parametrize(
    ("dies", "how"),
    [
        (aborts, r"SIGABRT.*\nout of luck"),
        long(partial(os._exit, 3), "exit status 3"),
        (sys.exit, "exit status 1"),
    ],
    ids=["abort", "exit", "sys.exit"],
)
def test_death_of_the_process_is_an_error_and_the_next_plan_works(dies: Callable[[], Any], how: str) -> None:
    with pytest.raises(PlanError, match=how):
        asked(Does(dies), vectors())
    assert_works()


@pytest.mark.long  # the module has to come to where it waits, on a busy machine too
def test_plan_that_never_ends_is_killed_after_its_time_limit(tmp_path: Path) -> None:
    assert_works()  # the process has imported all it needs
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    groups: list[int] = []
    reader = threading.Thread(target=lambda: groups.append(int(fifo.read_text().split()[0])), daemon=True)
    reader.start()
    with pytest.raises(PlanError, match=" 60 s"):
        asked(hangs(fifo), vectors(), timeout_s=60)
    reader.join(60)
    assert_gone(groups[0])
    assert_works()


def test_exception_of_the_module_names_its_line() -> None:
    def what() -> None:
        raise ZeroDivisionError("by nothing")

    with pytest.raises(PlanError, match=r"ZeroDivisionError: by nothing.*test_worker.py:\d+"):
        asked(lambda: Does(what), vectors())


def test_batch_of_the_wrong_shape_names_the_line() -> None:
    with pytest.raises(PlanError, match=r"RuntimeError: .*modules.py:\d+"):
        asked(dense, (torch.randn(4, 17), torch.randint(5, (4,))))


def test_module_that_fails_under_every_preset_is_one_error() -> None:
    told: dict[str, Any] = {}
    asked_for: dict[str, Any] = {"presets": ["checkpointing", "baseline"], "device": "cpu", "tell": told.__setitem__}
    with pytest.raises(PlanError, match=r"RuntimeError: .*modules.py:\d+"):
        plan(dense, (torch.randn(4, 17), torch.randint(5, (4,))), **asked_for)
    assert told == {}
    plan(dense, vectors(), **asked_for)
    assert [type(answer) for answer in told.values()] == [PlanError, Plan], "it has no repeated blocks"


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(planner: Planner, name: str, config: Configuration) -> Plan:
        raise PlanError("no module") from ModuleNotFoundError(name="peft")

    monkeypatch.setattr(Planner, "plan", fails)
    monkeypatch.setattr(Planner, "check_module", lambda *_: None)
    monkeypatch.setattr(requirements, "installed", {"bitsandbytes": "0.50"}.get)
    presets = {name: compose(name) for name in ("qlora", "bf16")}
    request = PlanRequest(dense, vectors(), {}, device("rtx-4090"), 24 * GiB, None, presets)
    answers = dict(worker.plans(request))
    assert isinstance(answers["qlora"], CapabilityError)
    assert re.search("^peft is not installed: .*; write: pip install .peft.*$", str(answers["qlora"]))
    assert str(answers["bf16"]) == "no module"


def test_object_that_is_no_module_is_refused() -> None:
    with pytest.raises(PresetError, match=mentions("LightningModule", "write plan(lambda")):
        asked(3, vectors())


# --- a batch of its own ---


class OfItsOwn(Classifier):
    """Has its own data."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(14, 16), torch.randint(5, (14,))), batch_size=7)


@pytest.mark.long
def test_batch_defaults_to_the_first_of_the_train_dataloader() -> None:
    found = asked(OfItsOwn(nn.Linear(16, 5)))
    assert found.micro_batch == 7
    assert found.peak_bytes == asked(OfItsOwn(nn.Linear(16, 5)), vectors(7)).peak_bytes


def test_module_without_a_dataloader_needs_a_batch() -> None:
    with pytest.raises(PresetError, match=mentions("batch: ", "Classifier.train_dataloader()")):
        asked(dense)


def test_function_may_return_the_batch() -> None:
    assert asked(dense, lambda: vectors(6)).micro_batch == 6


# --- from a script ---

SCRIPT = """
import sys
import lightning as L, torch
from lightning_solo.planner.preset_plans import plan
from lightning_solo.planner.device import device
from lightning_solo.planner.worker import PlanRequest, Worker
from lightning_solo.presets.compose import compose
from lightning_solo.units import GiB

class Mine(L.LightningModule):
    def __init__(self, width=24):
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, width), torch.nn.Linear(width, 5)
    def training_step(self, batch, batch_idx):
        {body}
        return torch.nn.functional.cross_entropy(self.second(self.first(batch[0])), batch[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

batch = torch.randn(4, 16), torch.randint(5, (4,))
print("once")
for module in (Mine(), lambda: Mine(48), Mine):
    print(plan(module, batch, preset="baseline", device="cpu").breakdown["weights"])

print(open("/proc/thread-self/children").read())
"""
CELL = "exec({script!r}, {{'__name__': '__main__'}})"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.long
@pytest.mark.parametrize("as_cell", [False, long(True)], ids=["script", "cell"])
def test_script_without_a_guard_plans_and_leaves_no_process(tmp_path: Path, as_cell: bool) -> None:
    script = SCRIPT.format(body="pass")
    (tmp_path / "mine.py").write_text(CELL.format(script=script) if as_cell else script)
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    # 16 x width + width + width x 5 + 5 of 4 bytes; and the script ran once
    *said, worker = done.stdout.split()
    assert said == ["once", *(str(4 * (22 * width + 5)) for width in (24, 48, 24))]
    assert_gone(int(worker))


@pytest.mark.long
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    body = f"print(__import__('os').getpgrp(), file=open({str(fifo)!r}, 'w')); __import__('signal').pause()"
    (tmp_path / "mine.py").write_text(SCRIPT.format(body=body))
    process = subprocess.Popen(
        [sys.executable, "mine.py"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    with fifo.open() as pipe:
        group = int(pipe.readline())
    assert living(group)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=500)
    assert b"KeyboardInterrupt" in said
    assert_gone(group)


# --- started before there is a request ---


def refuse_devices() -> None:
    raise RuntimeError(f"devices={os.environ.get('CUDA_VISIBLE_DEVICES')!r}")


def test_process_that_plans_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    worker.WORKER.close()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(PlanError, match=mentions("devices=''")):
        asked(Does(refuse_devices), vectors())


def test_process_that_is_started_early_answers_and_is_closed() -> None:
    before = children()
    worker = Worker()
    try:
        worker.start()
        (process,) = children() - before
        worker.start()
        request = PlanRequest(dense, vectors(), {}, device("cpu"), GiB, None, {"baseline": compose("baseline")})
        (answer,) = worker.answers(request, ANSWER_S)
        assert isinstance(answer[1], Plan)
        assert children() - before == {process}
        os.kill(int(process), signal.SIGKILL)
        assert_gone(int(process))
        worker.start()  # another, since that one has died
        assert len(children() - before - {process}) == 1
    finally:
        worker.close()
    assert_gone(int(process))


EARLY = """
import signal
from lightning_solo.planner.worker import WORKER

WORKER.start()
print(open("/proc/thread-self/children").read(), flush=True)
{then}
"""


@pytest.mark.parametrize(
    "then",
    [
        "",
        *(
            long(then)
            for then in (
                "__import__('os')._exit(0)",
                "raise ValueError",
                "raise SystemExit(2)",
                "signal.raise_signal(2)",
            )
        ),
    ],
    ids=["end", "kill", "error", "refusal", "interrupt"],
)
def test_process_that_is_started_early_ends_with_its_parent(tmp_path: Path, then: str) -> None:
    (tmp_path / "early.py").write_text(EARLY.format(then=then))
    done = subprocess.run(
        [sys.executable, "early.py"], cwd=tmp_path, capture_output=True, env=environment(), check=False
    )
    assert_gone(int(done.stdout))


def test_lightning_of_either_home_is_a_module() -> None:
    import pytorch_lightning

    class Other(pytorch_lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 5)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    assert not isinstance(Other(), L.LightningModule)
    assert asked(Other(), vectors()).breakdown["weights"] == 4 * 85


@pytest.mark.parametrize("cores", [1, 3])
def test_plans_are_in_order_and_the_same_on_any_number_of_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    presets = {name: compose(name) for name in ("bf16", "checkpointing", "baseline", "prefetch", "curriculum")}
    request = PlanRequest(dense, vectors(), {}, device("cpu"), GiB, None, presets)
    monkeypatch.setattr(worker, "usable_cores", lambda: cores)
    monkeypatch.setattr(forks, "has_threads", lambda: False)  # which other tests may have left
    before = os.times()
    found = dict(worker.plans(request))
    assert (os.times().children_user > before.children_user) == (cores > 1)
    assert list(found) == list(presets)
    planner = Planner(dense, vectors(), {}, device("cpu"), GiB)
    for name, config in presets.items():
        if name == "checkpointing":
            assert "repeated blocks" in str(found[name])
        else:
            assert found[name] == planner.plan(name, config)


def test_module_with_a_pool_of_threads_is_planned_under_each_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "usable_cores", lambda: 3)
    presets = {name: compose(name) for name in ("bf16", "baseline", "accumulation")}
    with ThreadPoolExecutor(1) as pool:
        made = Does(lambda: pool.submit(len, "").result(timeout=5))  # a fork lacks the pool's thread
        request = PlanRequest(lambda: made, vectors(), {}, device("cpu"), GiB, None, presets)
        assert [type(answer) for _, answer in worker.plans(request)] == 3 * [Plan]


class DiesInWindows(Classifier):
    """Takes the process with it where there is more than one micro-batch to a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.accumulate_grad_batches > 1:
            os.abort()
        return super().training_step(batch, batch_idx)


def test_other_presets_are_planned_after_a_death() -> None:
    told: dict[str, Any] = {}
    names = ["bf16", "accumulation", "baseline"]
    made = DiesInWindows(nn.Linear(16, 5))
    plans = plan(made, vectors(), presets=names, device="cpu", timeout_s=ANSWER_S, tell=told.__setitem__)
    assert {p.preset for p in plans} == {"bf16", "baseline"}  # type: ignore[union-attr]
    assert list(told) == names
    assert "process" in str(told["accumulation"])
