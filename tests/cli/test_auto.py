"""`lightning-solo train solo=auto`: the run has what checks its plan, also where it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_solo.planner.plan import Plan
from tests.cli.commands import call

PROJECT = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Theirs(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(16, 1)

    def on_train_start(self):
        found = [c for c in self.trainer.callbacks if type(c).__name__ == "PlanCheck"]
        print("checks:", [(c.plan.preset, c.plan.device, c.plan.peak_bytes) for c in found])

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).float().square().mean()

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(8, 16)), batch_size=2)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
"""
ASKED = ["model=custom", "model._target_=their_project.Theirs", "allow=[their_project]", "monitor=null", "run=first"]
AUTO = ["solo=auto", "solo.auto.device=rtx-4090", "solo.auto.presets=[bf16]", "+trainer.accelerator=cpu"]


@pytest.mark.long
def test_a_run_and_the_one_that_continues_check_the_plan(tmp_path: Path) -> None:
    (tmp_path / "their_project.py").write_text(PROJECT)
    out = call(tmp_path, "train", *ASKED, *AUTO, "trainer.max_steps=2")
    plan = Plan.from_dict(json.loads((tmp_path / "runs" / "first" / "auto.json").read_text()))
    said = f"checks: [('bf16', 'rtx_4090', {plan.peak_bytes})]"
    assert said in out
    assert said in call(tmp_path, "train", *ASKED, *AUTO, "trainer.max_steps=4", "resume=auto")
