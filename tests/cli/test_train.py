"""`lightning-solo train` as a user would call it: real runs in processes of their own."""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
import torch
from hydra._internal import utils as hydra_utils
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import DictConfig, OmegaConf

from lightning_solo.cli import predict
from lightning_solo.cli import train as train_command
from lightning_solo.cli.application import compose_application
from lightning_solo.cli.command_line import CheckedConfig, check_config
from lightning_solo.cli.ladder import rung
from lightning_solo.cli.ladder_line import RungConfig
from lightning_solo.cli.run_folder import RunFolder
from lightning_solo.cli.train import as_given, build_parts, csv_logger, first_batch
from lightning_solo.errors import CheckpointError, ConflictError, PresetError
from lightning_solo.presets.compose import compose
from lightning_solo.sweeps.launch import JobsFailed
from tests.cli.commands import call, environment, signalled
from tests.messages import lines_with, mentions, nearest

QUICK = ["experiment=quick", "model.width=32", "model.heads=2", "model.depth=2"]


def train(folder: Path, *arguments: str, code: int = 0) -> str:
    return call(folder, "train", *arguments, code=code)


def steps_of(folder: Path) -> int:
    return int(torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"])


def test_a_run_prints_its_result_and_folder(tmp_path: Path) -> None:
    output = train(tmp_path, *QUICK, "run=first", "solo=checkpointing")
    assert lines_with(output, "safe_checkpoint", "costs", "hash")
    for words in (
        "fault_tolerance=false",
        "validation/perplexity",
        "byte frequencies alone",
        "peak memory",
        "tokens_per_s",
        "10 optimizer steps",
    ):
        assert words in output
    folder = tmp_path / "runs" / "first"
    assert json.loads((folder / "versions.json").read_text())["torch"] == torch.__version__
    for name in ("config.yaml", "csv/metrics.csv", "checkpoints/last.ckpt", "csv/memory.csv"):
        assert (folder / name).is_file(), name
        assert name == "config.yaml" or str(folder / name) in output
    assert list((folder / "tensorboard").glob("events*"))
    with (folder / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert any(row["validation/perplexity"] for row in rows)
    assert sum(bool(row["throughput/step_s"]) for row in rows) == 9  # each of the ten that is logged, but the first
    assert OmegaConf.load(folder / "config.yaml").solo.precision == "bf16-mixed"


DATA = """
import lightning as L
import torch
from torch.utils.data import DataLoader


class Plain(L.LightningModule):
    pass


class MyData(L.LightningDataModule):
    def train_dataloader(self):
        return loader(2)


class Loading(Plain):
    def __init__(self, images_per_batch=2):
        super().__init__()

    def train_dataloader(self):
        return loader(2)


def loader(batch_size: int = 4):
    return DataLoader(torch.arange(8.0), batch_size=batch_size)
"""


def test_data_is_what_was_chosen_and_the_embedded_text_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "their_data.py").write_text(DATA)
    monkeypatch.syspath_prepend(str(tmp_path))

    def checked(data: dict[str, object], module: str = "Plain") -> CheckedConfig:
        return CheckedConfig(compose("bf16"), {"_target_": f"their_data.{module}"}, data, {}, {}, ["their_data"])

    for name, size in (("MyData", 2), ("loader", 4)):
        assert len(first_batch(checked({"_target_": f"their_data.{name}"}))) == size
    assert capsys.readouterr().out == ""
    _, text = build_parts(checked({"name": "stdlib_text", "context": 8}))
    assert type(text).__name__ == "StdlibText"
    assert "data=custom" in capsys.readouterr().out
    build_parts(checked({"name": "stdlib_text", "context": 8}), announces=False)
    assert capsys.readouterr().out == ""
    with pytest.raises(PresetError, match=mentions("Plain", "train_dataloader", "data=custom")):
        build_parts(checked({}))

    embedded = {"name": "stdlib_text", "context": 8}
    default = {**embedded, "batch_size": 16}  # of `data/stdlib_text.yaml`
    assert build_parts(checked(default, "Loading"))[1] is None
    remedies = mentions(
        "data.batch_size=8", "Loading", "train_dataloader", "drop data.batch_size", "+model.images_per_batch=8"
    )
    with pytest.raises(PresetError, match=remedies):
        build_parts(checked({**embedded, "batch_size": 8}, "Loading"))
    with pytest.raises(PresetError, match=remedies):  # as a plan asks
        first_batch(checked({**embedded, "batch_size": 8}, "Loading"))
    _, text = build_parts(checked({**embedded, "batch_size": 8}))
    assert text.batch_size == 8


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [(["model=custom", "model._target_=m.X"], {}), (["model=custom", "model._target_=m.X", "~optimizer"], None)],
)
def test_an_optimizer_that_the_model_does_not_take_is_no_part_of_the_runs_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], kept: object
) -> None:
    def opened(_: RunFolder, cfg: DictConfig) -> None:
        assert cfg.get("optimizer") == kept
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "open", opened)
    with pytest.raises(KeyboardInterrupt):
        train_command.train(compose_application([*overrides, "allow=[m]"]), tmp_path)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.lr=-1", ["optimizer", "-1"]),
        ("data.batch_size=0", ["data", "batch_size=0", "at least 1"]),
        ("data.context=0", ["data", "context=0", "at least 1"]),
        ("data.validation_batches=0", ["data", "validation_batches=0", "at least 1"]),
        ("data.num_workers=-1", ["data", "num_workers=-1", "at least 0"]),
        ("data.max_bytes=-1", ["data", "max_bytes=-1", "at least 1"]),
        ("data.max_bytes=100", ["data", "context=128", "129 bytes", "max_bytes=100", "smaller context"]),
        ("data.batch_size=100000000", ["data", "batch_size=100000000", "windows of context=128"]),
        ("model.heads=3", ["model", "width=32", "heads=3", "try width=33"]),
        ("+trainer.accelerator=tpu", ["trainer", "torch_xla"]),
        ("monitor=val_loss", ["monitor=val_loss", nearest("validation/loss")]),
    ],
)
def test_refused_values_end_without_a_trace(tmp_path: Path, override: str, words: list[str]) -> None:
    small = [
        "experiment=quick",
        "model.width=32",
        "model.depth=1",
        "trainer.max_steps=1",
        "trainer.val_check_interval=1",
    ]
    cfg = compose_application([*small, override])
    with pytest.raises(PresetError, match=mentions(*words)):
        train_command.train(cfg, tmp_path)


def test_the_metrics_of_a_resumed_run_continue_its_file(tmp_path: Path) -> None:
    file = tmp_path / "csv" / "metrics.csv"

    def log(resumes: bool, step: int, **metrics: float) -> list[dict[str, str]]:
        logger = csv_logger(tmp_path, resumes=resumes)
        logger.log_metrics(metrics, step)
        logger.save()
        return list(csv.DictReader(file.read_text().splitlines()))

    assert [row["step"] for row in log(False, 1, loss=3.0)] == ["1"]
    with file.open("a") as half:
        half.write("2.0,")  # what a killed run leaves
    rows = log(True, 2, loss=1.0, accuracy=0.5)
    assert [(row["step"], row["loss"], row["accuracy"]) for row in rows] == [("1", "3.0", ""), ("2", "1.0", "0.5")]
    assert [path.name for path in file.parent.iterdir()] == ["metrics.csv"]


@pytest.mark.row(43)
def test_second_command_in_a_run_is_refused_before_it_writes(tmp_path: Path) -> None:
    cfg = compose_application(["run=first"])
    with RunFolder(tmp_path) as first:
        assert first.open(cfg) is None
        written = {path: path.read_bytes() for path in tmp_path.iterdir()}
        assert tmp_path / "config.yaml" in written
        cfg.seed = 5
        with pytest.raises(CheckpointError, match=mentions("in use by", str(os.getpid()), "run=")):
            RunFolder(tmp_path).open(cfg)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == written
    with RunFolder(tmp_path) as second:
        second.open(cfg)
    assert OmegaConf.load(tmp_path / "config.yaml").seed == 5


def test_other_ranks_of_a_run_neither_lock_nor_write_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = compose_application(["run=first"])
    with RunFolder(tmp_path) as first:
        first.open(cfg)
        written = {path: path.read_bytes() for path in tmp_path.iterdir()}
        cfg.seed = 5
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, "1")
            assert RunFolder(tmp_path).open(cfg) is None
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == written
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, "0")
        with pytest.raises(CheckpointError, match=mentions("in use by")):
            RunFolder(tmp_path).open(cfg)


def test_a_further_process_gets_the_users_arguments_and_the_folder_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_lightning = ['hydra.run.dir="runs/noon"', "hydra.job.name=train_ddp_process_1", "hydra.output_subdir=null"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert as_given(["solo=ddp", *of_lightning]) == ["solo=ddp", "run=noon"]
    assert as_given(["run=noon", *of_lightning]) == ["run=noon"]
    assert as_given(["solo=ddp"]) == ["solo=ddp"]
    monkeypatch.delenv("LOCAL_RANK")
    assert as_given(of_lightning) == of_lightning  # refused as any user's


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"TORCHELASTIC_RUN_ID": "ab/c", "WORLD_SIZE": "2"}, "run=torchrun-ab_c"),
        ({"TORCHELASTIC_RUN_ID": "ab/c", "WORLD_SIZE": "1"}, None),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}, "run=slurm-12.3"),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_ID": "12"}, None),
    ],
)
def test_processes_of_a_launcher_have_one_name_for_their_run(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str | None
) -> None:
    for each in os.environ:
        if each.startswith(("SLURM_", "TORCHELASTIC_")) or each in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            monkeypatch.delenv(each)
    for each, value in variables.items():
        monkeypatch.setenv(each, value)
    assert as_given(["solo=ddp"]) == ["solo=ddp", *filter(None, [name])]
    assert as_given(["run=noon"]) == ["run=noon"]


def test_processes_of_torchrun_without_a_name_take_the_time_at_which_it_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for each, value in variables.items():
        monkeypatch.setenv(each, value)
    child = "from lightning_solo.cli.run_folder import name_by_launcher; print(name_by_launcher())"
    names = {subprocess.check_output([sys.executable, "-c", child], text=True).strip() for _ in range(2)}
    (name,) = names
    started = time.mktime(time.strptime(name, "%Y-%m-%d_%H-%M-%S"))
    assert 0 <= time.time() - started < 86400
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(PresetError, match=mentions("write run=")):
        as_given(["solo=ddp"])


@pytest.mark.long
def test_a_run_on_two_devices_has_one_folder_and_all_techniques_of_fault_tolerance(tmp_path: Path) -> None:
    arguments = ["solo=ddp", "solo.devices=2", "+trainer.accelerator=cpu", "trainer.max_steps=3"]
    output = train(tmp_path, *QUICK, *arguments)
    (folder,) = (tmp_path / "runs").iterdir()
    assert steps_of(folder) == 3
    for name in ("safe_checkpoint", "exact_resume"):
        assert len(lines_with(output, name, "costs")) == 1
    assert len(lines_with(output, "3 optimizer steps")) == 1


@pytest.mark.long
def test_a_run_on_two_devices_is_resumed_on_one_without_fault_tolerance(tmp_path: Path) -> None:
    arguments = [*QUICK, "solo=ddp", "+trainer.accelerator=cpu", "run=first"]
    train(tmp_path, *arguments, "solo.devices=2", "trainer.max_steps=2")
    arguments += ["solo.devices=1", "resume=override", "trainer.max_steps=4"]
    refused = train(tmp_path, *arguments, code=2)
    assert lines_with(refused, "saved by 2 processes", "solo.devices=2, or fault_tolerance=false")
    assert "~" not in refused
    train(tmp_path, *arguments, "fault_tolerance=false")
    assert steps_of(tmp_path / "runs" / "first") == 4


def test_a_refused_sweep_exits_with_2_and_without_hydras_hint(tmp_path: Path) -> None:
    output = train(tmp_path, *QUICK, "-m", "seed=1,2", "hydra.launcher.gpus=[0,0]", code=2)
    (line,) = [line for line in output.splitlines() if line]
    assert line.startswith("lightning-solo: hydra.launcher.gpus=[0,0]: ")
    assert not (tmp_path / "runs").exists()


def test_a_sweep_with_failed_jobs_exits_with_1_and_without_hydras_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sweep(**_: Any) -> None:
        raise JobsFailed("2 of 3 jobs failed")

    def main(**_: Any) -> Any:  # Hydra's, in a process of which other tests don't see its configuration
        its = SimpleNamespace(multirun=sweep)
        return lambda job: partial(hydra_utils._run_app, False, True, RunMode.MULTIRUN, its, "train", job, [])

    monkeypatch.setattr(hydra, "main", main)
    monkeypatch.setattr(sys, "argv", sys.argv)
    assert train_command.run([*QUICK, "-m", "seed=1,2"]) == 1
    assert capsys.readouterr().err == "2 of 3 jobs failed\n"


def test_a_resumed_run_names_a_setting_that_was_not_set(tmp_path: Path) -> None:
    cfg = compose_application([*QUICK, "run=first"])
    folder = tmp_path / "first"
    RunFolder(folder).write(cfg)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "last.ckpt").touch()
    changed = compose_application([*QUICK, "run=first", "resume=auto", "+trainer.deterministic=true"])
    refused = pytest.raises(ConflictError, match=r"trainer\.deterministic: not set before, True now")
    with RunFolder(folder) as again, refused:
        again.open(changed)


@pytest.mark.long
def test_a_run_resumes_by_name_and_only_with_its_configuration(tmp_path: Path) -> None:
    train(tmp_path, *QUICK, "run=first", "trainer.max_steps=4", "trainer.val_check_interval=2")
    folder = tmp_path / "runs" / "first"
    assert steps_of(folder) == 4

    again = train(tmp_path, *QUICK, "run=first", code=2)
    assert lines_with(again, "first", "resume=auto")

    same = [*QUICK, "run=first", "resume=auto", "trainer.val_check_interval=2"]
    changed = train(tmp_path, *same, "optimizer.lr=1e-5", "trainer.max_steps=6", code=2)  # row 29
    assert "optimizer.lr: 0.001 before, 1e-05 now" in changed
    assert "resume=override" in changed
    assert steps_of(folder) == 4

    before = (folder / "csv" / "metrics.csv").read_text().splitlines()
    assert lines_with(train(tmp_path, *same, "trainer.max_steps=4"), "finished", "4 steps")
    assert not lines_with(train(tmp_path, *same, "trainer.max_steps=6"), "had finished")
    assert steps_of(folder) == 6
    after = (folder / "csv" / "metrics.csv").read_text().splitlines()
    assert after[: len(before)] == before
    assert len(after) > len(before) > 1
    rows = list(csv.DictReader(after))
    assert [int(row["step"]) for row in rows if row["validation/loss"]] == [1, 3, 5]

    with (folder / "checkpoints" / "last.ckpt").open("r+b") as file:
        file.truncate(1000)
    assert lines_with(train(tmp_path, *same, "trainer.max_steps=8"), "passed over last.ckpt", "step=6.ckpt")
    assert steps_of(folder) == 8

    wider = ["model.width=64" if each.startswith("model.width=") else each for each in same]
    other = train(tmp_path, *[each.replace("=auto", "=override") for each in wider], "trainer.max_steps=10", code=2)
    assert lines_with(other, "last.ckpt", "another model")
    assert lines_with(other, "embedding.weight", "[256, 32]", "[256, 64]")
    assert "Traceback" not in other

    for path in (folder / "checkpoints").glob("*.ckpt"):
        path.write_bytes(path.read_bytes()[:1000])
    damaged = train(tmp_path, *same, "trainer.max_steps=10", code=2)
    assert "no valid checkpoint" in damaged
    assert "Traceback" not in damaged


@pytest.mark.long
@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)]
)
def test_ctrl_c_saves_and_the_run_continues(sent: signal.Signals, status: int, tmp_path: Path) -> None:
    presets = "solo=[bf16,accumulation]"
    arguments = [*QUICK, "run=first", "trainer.max_steps=100000", "trainer.val_check_interval=50000", presets]
    metrics = tmp_path / "runs" / "first" / "csv" / "metrics.csv"
    ended, output = signalled(tmp_path, "train", *arguments, sent=sent, ready=metrics.exists)
    assert ended == status, output
    assert "Traceback" not in output
    saved = steps_of(tmp_path / "runs" / "first")
    assert saved > 0
    said = re.search(r"^resume with: lightning-solo train (.*)$", output, re.MULTILINE)
    assert said is not None, output
    again = [text for text in shlex.split(said[1]) if not text.startswith("trainer.max_steps=")]
    assert {"run=first", "resume=auto", presets} <= set(again)
    train(tmp_path, *again, f"trainer.max_steps={saved + 2}")
    assert steps_of(tmp_path / "runs" / "first") == saved + 2


@pytest.mark.long
def test_a_sweep(tmp_path: Path) -> None:
    small = ["experiment=quick", "model.heads=2", "model.depth=2", "trainer.max_steps=2"]
    output = train(tmp_path, *small, "-m", "run=sweep", "solo=baseline,bf16", "model.width=32,64")
    assert sorted(path.name for path in (tmp_path / "runs" / "sweep").glob("[0-9]")) == ["0", "1", "2", "3"]
    widths = [OmegaConf.load(tmp_path / "runs" / "sweep" / str(n) / "config.yaml").model.width for n in range(4)]
    assert widths == [32, 64, 32, 64]
    outputs = [(tmp_path / "runs" / "sweep" / str(n) / "output.log").read_text() for n in range(4)]
    assert ["2 optimizer steps" in text for text in outputs] == [True] * 4
    assert output.count(": finished") == 4
    again = train(tmp_path, *small, "-m", "run=sweep", "solo=baseline,bf16", "model.width=32,64")
    assert len(lines_with(again, "finished", "earlier")) == 4
    shown = call(tmp_path, "results", "runs/sweep", "--csv", "-")
    rows = list(csv.DictReader(shown.splitlines()))
    assert [(row["job"], row["status"], row["steps"]) for row in rows] == [(str(n), "finished", "2") for n in range(4)]
    assert all(float(row["loss"]) == float(row["train/loss"]) for row in rows)
    assert "loss/memory" in call(tmp_path, "results", "runs/sweep", "--sort", "loss")
    assert "there are runs/sweep" in call(tmp_path, "results", "runs", code=2)
    assert nearest("loss") in call(tmp_path, "results", "runs/sweep", "--sort", "los", code=2)


@pytest.mark.long
def test_an_interrupted_job_of_a_sweep_continues_from_its_checkpoint(tmp_path: Path) -> None:
    arguments = [*QUICK, "-m", "run=sweep", "trainer.max_steps=800", "trainer.val_check_interval=800", "solo=bf16"]
    folder = tmp_path / "runs" / "sweep" / "0"
    metrics = folder / "csv" / "metrics.csv"
    ended, output = signalled(tmp_path, "train", *arguments, sent=signal.SIGTERM, ready=metrics.exists)
    assert ended == 130, output
    saved = steps_of(folder)
    assert 0 < saved < 800
    train(tmp_path, *arguments)
    assert steps_of(folder) == 800
    said = (folder / "output.log").read_text()
    assert lines_with(said, "Restoring", "last.ckpt")


MINE = """
import torch, lightning as L
from torch.utils.data import DataLoader, TensorDataset

class MyModule(L.LightningModule):
    def __init__(self, width: int = 8):
        super().__init__()
        self.net = torch.nn.Sequential(*[
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
            for _ in range(3)])
        self.width = width
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(64, self.width)), batch_size=4)
"""


def test_hyperparameters_of_module_and_data_that_differ_are_refused_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Net(LightningModule):
        def __init__(self, batch_size: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class Rows(LightningDataModule):
        def __init__(self, batch_size: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.zeros(8, 2), batch_size=8)

    monkeypatch.setattr(train_command, "build_parts", lambda checked: (Net(), Rows()))
    with pytest.raises(PresetError, match=mentions("Net and Rows", "batch_size", "save_hyperparameters(logger=False)")):
        train_command.train(compose_application(["experiment=quick", "trainer.val_check_interval=null"]), tmp_path)


OF_THE_OTHER_PACKAGE = """
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def predict_step(self, batch, batch_idx):
        return self.net(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def rows():
    return DataLoader(torch.ones(8, 2), batch_size=4)
"""


UNVALIDATED = """
import lightning as L
import torch
from torch.utils.data import DataLoader

saved, file = [], None


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        saved.append(torch.load(file, weights_only=True)["global_step"] if file.exists() else 0)
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.ones(12, 2), batch_size=4)
"""


@pytest.fixture
def unvalidated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module above, and ``train(*overrides)`` in the folder ``run``."""
    (tmp_path / "unvalidated.py").write_text(UNVALIDATED)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("unvalidated")
    module.saved, module.file = [], tmp_path / "run" / "checkpoints" / "last.ckpt"

    def train(*overrides: str) -> None:
        own = ["model=custom", "model._target_=unvalidated.Net", "allow=[unvalidated]", "+trainer.accelerator=cpu"]
        cfg = compose_application([*own, "trainer.log_every_n_steps=1", "run=run", *overrides])
        monkeypatch.setattr(HydraConfig.instance(), "cfg", cfg)
        train_command.train(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]), tmp_path / "run")

    module.train = train
    return module


@pytest.mark.parametrize(
    ("interval", "epochs", "expected"),
    [
        ("2", "null", [0, 0, 2, 2, 4, 4, 6]),
        ("1.0", "5", [0, 0, 0, 3, 3, 3, 6]),
        ("'00:00:05:00'", "null", [0, 0, 0, 3, 3, 3, 6]),
    ],
)
def test_a_run_without_validation_saves_as_often_as_it_would_validate(
    unvalidated: Any, tmp_path: Path, interval: str, epochs: str, expected: list[int]
) -> None:
    often = [f"trainer.val_check_interval={interval}", f"trainer.check_val_every_n_epoch={epochs}"]
    unvalidated.train(*often, "trainer.max_steps=7")
    assert unvalidated.saved == expected
    assert steps_of(tmp_path / "run") == 7


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_run_without_validation_is_resumed_with_the_state_of_its_checkpoints(
    unvalidated: Any, tmp_path: Path
) -> None:
    for steps in (5, 9):
        unvalidated.train("trainer.val_check_interval=2", f"trainer.max_steps={steps}", "resume=auto")
    files = sorted(file.name for file in (tmp_path / "run" / "checkpoints").glob("*.ckpt"))
    assert files == ["last.ckpt", "step=8.ckpt"]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_module_of_pytorch_lightning_trains_resumes_predicts_and_climbs_the_ladder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_net.py").write_text(OF_THE_OTHER_PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "net"
    own = ["model=custom", "model._target_=their_net.Net", "data=custom", "data._target_=their_net.rows"]
    own += [
        "allow=[their_net]",
        "trainer.val_check_interval=null",
        "trainer.log_every_n_steps=1",
        "+trainer.accelerator=cpu",
        f"root={tmp_path}",
    ]
    for steps in (2, 4):
        cfg = compose_application([*own, "run=net", f"trainer.max_steps={steps}", "resume=auto"])
        monkeypatch.setattr(HydraConfig.instance(), "cfg", cfg)
        train_command.train(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]), folder)
        assert steps_of(folder) == steps
    assert (folder / "csv" / "metrics.csv").exists()
    assert not [path for path in folder.rglob("*.ckpt") if path.parent.name != "checkpoints"]  # of another callback
    monkeypatch.chdir(tmp_path)
    assert predict.run([str(folder), "--allow", "their_net", "--format", "jsonl"]) == 0
    assert len((folder / "predictions" / "predictions.jsonl").read_text().splitlines()) == 8
    checked = check_config(compose_application(own))
    assert rung(RungConfig(checked, seed=0, steps=2, folder=str(tmp_path)))["steps"] == 2


@pytest.mark.long
def test_a_module_of_ones_own_from_the_folder_one_stands_in(tmp_path: Path) -> None:
    (tmp_path / "my_module_here.py").write_text(MINE)
    (tmp_path / "conf" / "solo").mkdir(parents=True)
    (tmp_path / "conf" / "solo" / "mine.yaml").write_text(
        "# mine. Runs on: any device.\ndefaults:\n  - callback: activation_checkpointing\nprecision: bf16-true\n"
    )
    own = ["model=custom", "model._target_=my_module_here.MyModule", "+model.width=16", "data=none", "optimizer=none"]
    rest = ["run=own", "trainer.max_steps=3", "trainer.val_check_interval=null", "solo=mine"]
    output = train(tmp_path, *own, *rest, "allow=[my_module_here]")
    assert "backward recomputes 3 Sequential" in output
    state = torch.load(tmp_path / "runs" / "own" / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["global_step"] == 3
    assert state["state_dict"]["net.0.0.weight"].shape == (16, 16)
    assert state["state_dict"]["net.0.0.weight"].dtype == torch.bfloat16
    refused = train(tmp_path, *own, *rest[1:], "run=other", code=2)
    assert "allow=[my_module_here]" in refused


@pytest.mark.long
def test_a_module_of_ones_own_as_in_help(tmp_path: Path) -> None:
    (tmp_path / "my_module_here.py").write_text(MINE)
    own = ["model=custom", "model._target_=my_module_here.MyModule", "allow=[my_module_here]"]
    output = train(tmp_path, *own, "run=plain", "trainer.max_steps=2")
    assert "data: MyModule's train_dataloader" in output


def test_hydra_composes_once_for_a_run(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from hydra._internal.config_loader_impl import ConfigLoaderImpl\n"
        "from lightning_solo.cli.train import run\n"
        "stock, runs = ConfigLoaderImpl.load_configuration, []\n"
        "ConfigLoaderImpl.load_configuration = lambda *args, **kwargs: runs.append(1) or stock(*args, **kwargs)\n"
        "run(sys.argv[1:])\n"
        "print('composed', len(runs))\n"
    )
    settings = [*QUICK, "solo=checkpointing", "trainer.max_steps=1"]
    done = subprocess.run(
        [sys.executable, "-c", code, *settings], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "composed 1", done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpu_preset_is_refused_without_a_gpu(tmp_path: Path) -> None:
    output = train(tmp_path, *QUICK, "solo=fp16", code=2)
    assert lines_with(output, "precision=16-mixed", "CUDA", "'bf16'")
    assert "Traceback" not in output


@pytest.mark.long
def test_a_refused_resume_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    compact = [*QUICK, "run=first", "solo=compact"]
    train(tmp_path, *compact)
    folder = tmp_path / "runs" / "first"
    saved = {path: path.read_bytes() for path in (folder / "config.yaml", *(folder / "checkpoints").glob("[!.]*"))}
    assert folder / "checkpoints" / "last.ckpt" in saved
    other = ["solo.callback.compact_states.moment_bits=32", "resume=override", "trainer.max_steps=9"]
    refused = train(tmp_path, *[text for text in compact if "max_steps" not in text], *other, code=2)
    assert lines_with(refused, "master_bits", "moment_bits")
    assert {path: path.read_bytes() for path in saved} == saved
