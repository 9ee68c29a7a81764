"""Files from elsewhere execute nothing, and secrets of the environment reach no file of a run."""

from __future__ import annotations

import json
import os
import pickle
import re
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from omegaconf import OmegaConf

import lightning_solo as solo
from lightning_solo.checkpoint.folders import HASHES, refuse_changed
from lightning_solo.checkpoint.lock import LOCK
from lightning_solo.checkpoint.manifest import MANIFEST, entries
from lightning_solo.cli import main
from lightning_solo.cli.run_folder import RunFolder
from lightning_solo.cpp_builds import build_folder
from lightning_solo.errors import CapabilityError, CheckpointError, PresetError
from lightning_solo.machine import NotPrivateError, open_to_others
from lightning_solo.nn import liger
from lightning_solo.optim import operator_kernels
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.results import VERSION, Row, read
from lightning_solo.techniques.regional_compilation.technique import RegionalCompilation
from lightning_solo.techniques.safe_checkpoint.technique import SafeCheckpoint
from tests.cli.commands import call
from tests.faults.file_faults import save
from tests.messages import mentions
from tests.modules import loader, regression

Make = Callable[..., Any]
SECRET = "s3cret-of-the-environment"


MODULE = """
import lightning as L, torch
from torch.utils.data import DataLoader, TensorDataset
class MyModule(L.LightningModule):
    def __init__(self, token: str, batches: int):
        super().__init__()
        assert token.startswith("s3cret")
        self.save_hyperparameters()
        self.net = torch.nn.Linear(8, 8)
        self.batches = batches
    def training_step(self, batch, batch_idx):
        if not self.batches:
            raise ValueError(f"a failing step with {self.hparams.token}")
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=4)
"""


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (open, (str(self.marker), "w"))


@pytest.mark.row(80)
def test_code_in_a_checkpoint_is_not_run(make_trainer: Make, tmp_path: Path) -> None:
    marker, folder = tmp_path / "marker", tmp_path / "saved"
    trainer = make_trainer(lightning.pytorch, callbacks=[SafeCheckpoint()])
    trainer.fit(regression(lightning.pytorch), loader(2))
    trainer.save_checkpoint(folder / "good.ckpt")
    checkpoint = torch.load(folder / "good.ckpt", weights_only=True)
    torch.save({**checkpoint, "global_step": 99, "x": Payload(marker)}, folder / "bad.ckpt")
    solo.latest_checkpoint(folder)
    with pytest.raises(Exception, match=r"[Ww]eights.?only"):
        make_trainer(lightning.pytorch, callbacks=[SafeCheckpoint()], max_epochs=2).fit(
            regression(lightning.pytorch), loader(2), ckpt_path=folder / "bad.ckpt"
        )
    assert not marker.exists()
    torch.load(folder / "bad.ckpt", weights_only=False)["x"].close()
    assert marker.exists()


@pytest.mark.row(80)
def test_code_in_a_manifest_is_text(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / MANIFEST).write_text(f'!!python/object/apply:os.system ["touch {marker}"]\n')
    (tmp_path / "1.ckpt").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        solo.latest_checkpoint(tmp_path)
    assert not marker.exists()


LINES = {
    "other folder": {"file": "../outside/9.ckpt"},
    "absolute": {"file": "/etc/passwd"},
    "line break": {"file": "9.ckpt\n"},
    "NUL": {"file": "9\0.ckpt"},
    "300 characters": {"file": "9" * 300},
    "number": {"file": 9},
    "no step": {"step": "9"},
    "infinite": {"step": float("inf")},
}


@pytest.mark.row(41)
@pytest.mark.parametrize("name", [*LINES, "nested", "a list", "half"])
def test_hostile_line_of_a_manifest_is_left_out(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    save(folder / "1.ckpt", 1)
    other = {"nested": "[" * 100_000, "a list": "[1]", "half": '{"file": "9.ckpt"'}
    line = {"file": "1.ckpt", "step": 9, "epoch": 0, "size": 1, "sha256": "0" * 64} | LINES.get(name, {})
    before = entries(folder)
    with (folder / MANIFEST).open("a") as file:
        file.write(other.get(name, json.dumps(line)) + "\n")
    assert entries(folder) == before != []
    assert solo.latest_checkpoint(folder) == str(folder / "1.ckpt")


@pytest.mark.row(58, 85)
def test_line_of_a_file_elsewhere_does_not_let_the_last_one_be_removed(make_trainer: Make, tmp_path: Path) -> None:
    """The line has the hash of a real file, outside."""
    outside = tmp_path / "outside"
    outside.mkdir()
    save(outside / "2.ckpt", 2)
    trainer = make_trainer(lightning.pytorch, callbacks=[SafeCheckpoint()])
    trainer.fit(regression(lightning.pytorch), loader(2))
    last = tmp_path / "saved" / "last.ckpt"
    trainer.save_checkpoint(last)
    (entry,) = entries(outside)
    with (last.parent / MANIFEST).open("a") as file:
        file.write(json.dumps({**asdict(entry), "file": "../outside/2.ckpt"}) + "\n")
    with pytest.warns(match="last valid checkpoint"):
        trainer.strategy.remove_checkpoint(last)
    assert last.exists()


@pytest.mark.row(85)
@pytest.mark.parametrize("name", [LOCK, MANIFEST])
def test_link_to_a_file_elsewhere_is_not_written(name: str, make_trainer: Make, tmp_path: Path) -> None:
    target, folder = tmp_path / "keys", tmp_path / "saved"
    target.write_text("ssh-rsa")
    folder.mkdir()
    (folder / name).symlink_to(target)
    trainer = make_trainer(lightning.pytorch, callbacks=[SafeCheckpoint()])
    trainer.fit(regression(lightning.pytorch), loader(2))
    with pytest.raises(CheckpointError, match="it is a link"):
        trainer.save_checkpoint(folder / "last.ckpt")
    assert target.read_text() == "ssh-rsa"


@pytest.mark.row(85)
def test_link_to_a_checkpoint_elsewhere_is_passed_over_and_replaced(make_trainer: Make, tmp_path: Path) -> None:
    folder, target = tmp_path / "saved", tmp_path / "outside" / "9.ckpt"
    folder.mkdir()
    target.parent.mkdir()
    save(folder / "1.ckpt", 1)
    save(target, 9)
    (folder / "last.ckpt").symlink_to("1.ckpt")  # as ModelCheckpoint(save_last="link") makes it
    assert solo.latest_checkpoint(folder) == str(folder / "1.ckpt")
    (folder / "last.ckpt").unlink()
    (folder / "last.ckpt").symlink_to(target)
    with pytest.warns(match=mentions("passed over last.ckpt", str(target))):
        assert solo.latest_checkpoint(folder) == str(folder / "1.ckpt")
    before = target.read_bytes()
    save(folder / "last.ckpt", 2)
    assert target.read_bytes() == before
    assert not (folder / "last.ckpt").is_symlink()


@pytest.mark.row(85)
@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "states/../../x", "x" * 300, "a\0"])
def test_list_of_hashes_names_files_in_its_folder_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / HASHES).write_text(json.dumps({name: [1, "0" * 64]}))
    with pytest.raises(CheckpointError, match=mentions(HASHES, "no file in it")):
        refuse_changed(tmp_path)


@pytest.mark.row(85)
@pytest.mark.parametrize("link", ["", "config.yaml", "checkpoints", "csv/metrics.csv"])
def test_run_with_a_link_out_of_its_folder_is_refused(link: str, tmp_path: Path) -> None:
    folder, outside = tmp_path / "runs" / "first", tmp_path / "outside"
    outside.mkdir()
    (folder / link).parent.mkdir(parents=True, exist_ok=True)
    (folder / link).symlink_to(outside)
    with RunFolder(folder) as run, pytest.raises(PresetError, match=mentions("run=first", str(outside), "root=")):
        run.open(OmegaConf.create({"run": "first", "root": "runs", "resume": "auto"}))
    assert [*outside.iterdir()] == []


@pytest.mark.row(85)
@pytest.mark.parametrize("link", ["", "results.jsonl", "3", ".sweep/jobs/3"])
def test_sweep_with_a_link_out_of_its_folder_is_refused(link: str, tmp_path: Path) -> None:
    folder, outside = tmp_path / "runs" / "first", tmp_path / "outside"
    outside.mkdir()
    (folder / link).parent.mkdir(parents=True, exist_ok=True)
    (folder / link).symlink_to(outside)
    with pytest.raises(CheckpointError, match=mentions(str(outside), "run=")), SweepFolder(folder).lock():
        pass
    assert [*outside.iterdir()] == []


@pytest.mark.row(80)
@pytest.mark.parametrize(
    "content",
    ["!!python/object/apply:os.system ['touch {marker}']", "[1]", "a: [", "a: {{b", "\0", "solo: ${{nowhere"],
)
def test_configuration_of_a_run_is_text(content: str, tmp_path: Path) -> None:
    marker, folder = tmp_path / "marker", tmp_path / "runs" / "first"
    save_folder = folder / "checkpoints"
    save_folder.mkdir(parents=True)
    save(save_folder / "last.ckpt", 1)
    (folder / "config.yaml").write_text(content.format(marker=marker))
    with RunFolder(folder) as run, pytest.raises(CheckpointError, match=mentions("config.yaml", "resume=override")):
        run.open(OmegaConf.create({"run": "first", "root": "runs", "resume": "auto"}))
    with RunFolder(folder) as run:
        assert run.open(OmegaConf.create({"resume": "override"})) == str(save_folder / "last.ckpt")
    assert not marker.exists()


def write_row(folder: Path, values: Any) -> None:
    text = json.dumps(values)
    (folder / "results.jsonl").write_text(f"{zlib.crc32(text.encode()):08x} {text}\n")


@pytest.mark.row(80)
@pytest.mark.parametrize(
    "change", [{"metrics": [1]}, {"overrides": 5}, {"number": "x"}, {"version": None}, {"detail": {}}, None], ids=str
)
def test_hostile_row_of_a_sweep_is_named(change: dict[str, Any] | None, tmp_path: Path) -> None:
    row = {"version": VERSION, **asdict(Row(0, ("a=1",), "finished"))}
    write_row(tmp_path, [1] if change is None else row | change)
    with pytest.raises(CheckpointError, match=mentions("results.jsonl", "line")):
        read(tmp_path / "results.jsonl")


@pytest.mark.row(80)
def test_result_of_a_sweep_is_text(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    row = Row(0, ("a=\x1b]0;x\x07",), "finished", "\x1b[2J<script>", returned={"py/reduce": f"touch {marker}"})
    write_row(tmp_path, {"version": VERSION, **asdict(row)})
    (found,) = read(tmp_path / "results.jsonl")
    assert (found.overrides, found.detail, found.returned) == (("a=?]0;x?",), "?[2J<script>", row.returned)
    (tmp_path / "results.jsonl").write_bytes(pickle.dumps(Payload(marker)))
    assert read(tmp_path / "results.jsonl") == []
    assert not marker.exists()


FOLDERS = ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR"]


@pytest.fixture
def open_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of compiled code into which all users may write."""
    folder = tmp_path / "code"
    folder.mkdir()
    folder.chmod(0o777)
    for variable in FOLDERS:
        monkeypatch.setenv(variable, str(folder))
    return folder


@pytest.mark.row(86)
@pytest.mark.parametrize("variable", FOLDERS)
def test_folder_of_compiled_code_is_of_this_user(
    variable: str, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert re.search(mentions(str(open_folder), "go-w", f"{variable}=<"), open_to_others(variable) or "")
    open_folder.chmod(0o775)  # of a user's own group
    assert open_to_others(*FOLDERS) is None
    owner = open_folder.stat().st_uid
    os.chown(open_folder, 12345, -1) if owner == 0 else monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert open_to_others(variable) is not None


@pytest.mark.row(86)
def test_compiled_code_of_others_is_not_run(
    open_folder: Path, make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each user of compiled code refuses it."""
    module = regression(lightning.pytorch)
    trainer = make_trainer(lightning.pytorch, callbacks=[RegionalCompilation(blocks=["Block"])])
    with pytest.raises(CapabilityError, match=mentions("regional_compilation", str(open_folder), "TORCHINDUCTOR")):
        trainer.fit(module, loader(1))
    eager = make_trainer(lightning.pytorch, callbacks=[RegionalCompilation(blocks=["Block"], backend="aot_eager")])
    eager.fit(module, loader(1))
    operator_kernels._compiled.cache_clear()
    with pytest.raises(CapabilityError, match=mentions("compact", str(open_folder), "TORCHINDUCTOR")):
        operator_kernels._compiled()
    with pytest.raises(NotPrivateError, match=str(open_folder)):
        build_folder("text")
    monkeypatch.setattr(liger, "is_installed", lambda _: True)
    monkeypatch.setattr(liger, "runs_on", lambda _: True)
    assert re.search(mentions(str(open_folder), "TRITON_CACHE_DIR"), liger.missing(torch.device("cuda")) or "")


OWN_MODULE = ["model=custom", "model._target_=with_a_token.MyModule", "data=none", "optimizer=none", "run=first"]
SHORT = ["allow=[with_a_token]", "trainer.val_check_interval=null", "trainer.max_steps=2"]


@pytest.mark.row(83)
@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"])
def test_secret_of_the_environment_is_in_no_error(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, SECRET)
    for argument in (f"trainer.max_steps='${{oc.env:{name}}}'", f"monitor={SECRET}", f"seed={SECRET}x"):
        with pytest.raises(SystemExit):
            main(["train", argument])
        output = "".join(capsys.readouterr())
        assert f"${name}" in output or f"oc.env:{name}" in output
        assert SECRET not in output


@pytest.mark.row(83)
def test_secret_hyperparameter_is_left_out_of_checkpoints(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    module = regression(lightning.pytorch)
    module.save_hyperparameters({"where": {"urls": [f"https://me:{SECRET}@host"]}, "width": 8})
    trainer = make_trainer(lightning.pytorch, callbacks=[SafeCheckpoint()])
    trainer.fit(module, loader(2))
    with pytest.warns(match=mentions("where", "$HF_TOKEN", "load_from_checkpoint")):
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["hyper_parameters"] == {"width": 8}
    assert SECRET.encode() not in (tmp_path / "last.ckpt").read_bytes()


@pytest.mark.long
@pytest.mark.row(83)
@pytest.mark.parametrize("kind", ["a run", "a failing run", "a sweep"])
def test_secret_of_the_environment_is_in_no_file_of_a_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", SECRET)
    (tmp_path / "with_a_token.py").write_text(MODULE)
    batches = {"a run": "64", "a failing run": "0", "a sweep": "64,0"}[kind]
    arguments = [*OWN_MODULE, *SHORT, "+model.token='${oc.env:A_SECRET}'", f"+model.batches={batches}"]
    flags = ["-m"] if kind == "a sweep" else []
    output = call(tmp_path, "train", *flags, *arguments, code=0 if kind == "a run" else 1)
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert any("${oc.env:A_SECRET}" in path.read_text() for path in files if path.name == "config.yaml")
    assert any("$A_SECRET" in path.read_text() for path in files if path.name == "hparams.yaml")
    assert kind == "a run" or "a failing step with $A_SECRET" in output + "".join(
        path.read_text() for path in files if path.name == "output.log"
    )
    assert SECRET not in output
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
