"""Files from elsewhere execute nothing, and secrets of the environment reach no file of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch

import lightning_solo as solo
from lightning_solo.checkpoint.manifest import MANIFEST
from lightning_solo.errors import CheckpointError
from lightning_solo.techniques.safe_checkpoint.technique import SafeCheckpoint
from tests.cli.commands import call
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
        self.net = torch.nn.Linear(8, 8)
        self.batches = batches
    def training_step(self, batch, batch_idx):
        if not self.batches:
            raise ValueError("a failing step")
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


@pytest.mark.long
@pytest.mark.row(83)
@pytest.mark.parametrize("batches", [64, 0], ids=["a run", "a failing run"])
def test_secret_of_the_environment_is_in_no_file_of_a_run(
    batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", SECRET)
    (tmp_path / "with_a_token.py").write_text(MODULE)
    own = ["model=custom", "model._target_=with_a_token.MyModule", "+model.token='${oc.env:A_SECRET}'"]
    rest = [f"+model.batches={batches}", "data=none", "optimizer=none", "trainer.val_check_interval=null"]
    arguments = [*own, *rest, "allow=[with_a_token]", "run=first", "trainer.max_steps=2"]
    output = call(tmp_path, "train", *arguments, code=0 if batches else 1)
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert "${oc.env:A_SECRET}" in (tmp_path / "runs" / "first" / "config.yaml").read_text()
    assert SECRET not in output
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
