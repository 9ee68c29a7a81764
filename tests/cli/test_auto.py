"""`lightning-solo train solo=auto`: the run has what checks its plan, also where it goes on."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch

from lightning_solo.planner.plan import Plan
from lightning_solo.units import MiB
from tests.cli.commands import call, signalled
from tests.messages import lines_with
from tests.training import equal

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


def planned(folder: Path, *arguments: str) -> dict[str, dict[str, int]]:
    """Return the plans of the command `plan`, by preset."""
    out = call(folder, "plan", *arguments, "--json")
    return {plan["preset"]: plan for plan in json.loads(out[out.index("{") : out.rindex("}") + 1])["plans"]}


@pytest.mark.long
def test_killed_run_of_a_solved_preset_resumes_to_the_bit(tmp_path: Path) -> None:
    module = ["model=byte_gpt_tiny", "data.batch_size=32", "data.max_bytes=300000"]
    named = [
        *module,
        "--device",
        "cpu",
        "--presets",
        "baseline,checkpointing,solved",
        "--save-preset",
        "mine",
        "--whole-batch",
    ]
    sizes = [
        plan["needed_bytes"]
        for plan in planned(tmp_path, *module, "--device", "cpu", "--presets", "baseline,checkpointing").values()
    ]
    solved = planned(tmp_path, *named, "--budget", f"{int(sum(sizes) / 2 * 1.05) // 1024}KiB")["solved"]
    assert min(sizes) < solved["needed_bytes"] < max(sizes)
    assert len(re.findall(r"(keep|products|recompute): ", (tmp_path / "conf/solo/mine.yaml").read_text())) > 1
    every = ["trainer.val_check_interval=2", "data.validation_batches=1"]
    train = ["train", *module, *every, "solo=mine", "trainer.max_steps=40"]
    call(tmp_path, *train, "run=whole")
    saved = tmp_path / "runs/killed/checkpoints/last.ckpt"
    ended, output = signalled(tmp_path, *train, "run=killed", sent=signal.SIGKILL, ready=saved.exists)
    assert ended == -signal.SIGKILL, output
    assert torch.load(saved, weights_only=True)["global_step"] < 40
    call(tmp_path, *train, "run=killed", "resume=auto")
    whole, resumed = (
        torch.load(tmp_path / f"runs/{run}/checkpoints/last.ckpt", weights_only=True) for run in ("whole", "killed")
    )
    assert whole["global_step"] == resumed["global_step"] == 40
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert equal(whole[part], resumed[part]), part


@pytest.mark.long
def test_killed_run_of_auto_is_planned_anew_for_another_budget(tmp_path: Path) -> None:
    module = ["model=byte_gpt_tiny", "data.batch_size=32", "data.max_bytes=300000", "run=first"]
    every = ["trainer.val_check_interval=2", "data.validation_batches=1", "solo.auto.device=cpu"]
    train = ["train", *module, *every, "solo=auto"]
    former = ["solo.auto.presets=[baseline,checkpointing]", "solo.auto.budget=1GiB"]
    folder = tmp_path / "runs/first"
    saved = folder / "checkpoints/last.ckpt"
    ended, output = signalled(
        tmp_path, *train, *former, "trainer.max_steps=1000", sent=signal.SIGKILL, ready=saved.exists
    )
    assert ended == -signal.SIGKILL, output
    files = [folder / "auto.json", folder / "config.yaml", *folder.glob("checkpoints/[!.]*")]
    before = {file: file.read_bytes() for file in files}
    plan = Plan.from_dict(json.loads(before[files[0]]))
    assert plan.preset == "baseline"
    last = f"trainer.max_steps={torch.load(saved, weights_only=True)['global_step'] + 2}"

    said = call(tmp_path, *train, former[0], "solo.auto.budget=60MiB", last, "resume=auto", code=2)
    assert lines_with(said, "solo.auto.budget", "'1GiB' before", "'60MiB' now")
    assert lines_with(said, "resume=override")
    said = call(tmp_path, *train, former[0], "solo.auto.budget=1MiB", last, "resume=override", code=2)
    assert lines_with(said, "no preset fits in 1.00 MiB", "checkpointing, needs")
    wider = [former[0], "solo.auto.budget=2GiB", "model.width=256"]
    said = call(tmp_path, *train, *wider, last, "resume=override", code=2)
    assert lines_with(said, "last.ckpt", "another model")
    assert {file: file.read_bytes() for file in files} == before

    said = call(tmp_path, *train, former[0], "solo.auto.budget=60MiB", last, "resume=override")
    assert lines_with(said, "auto: checkpointing: planned peak"), said
    plan = Plan.from_dict(json.loads(files[0].read_bytes()))
    assert (plan.preset, plan.budget_bytes) == ("checkpointing", 60 * MiB)
    assert f"trainer.max_steps={torch.load(saved, weights_only=True)['global_step']}" == last
