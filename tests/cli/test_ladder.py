"""`lightning-solo ladder` as a user would call it: on a module of somebody else's, killed in the middle, repeated."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_solo.cli.ladder import claim, rung
from lightning_solo.cli.ladder_line import (
    LadderOptions,
    compose_base,
    folder_of,
    parse,
    prepare,
    suggested_argument,
)
from lightning_solo.cli.train import build_parts
from lightning_solo.errors import CheckpointError, ConflictError, PresetError, SoloError
from lightning_solo.ladder.rungs import techniques
from lightning_solo.presets.compose import compose
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.units import format_bytes
from tests.cli.commands import call, command, environment
from tests.messages import lines_with, mentions, nearest

PROJECT = """
from pathlib import Path
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Theirs(L.LightningModule):
    def __init__(self, batch_size=8, layers=3, dropout=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(*[Layer(16) for _ in range(layers)], nn.Dropout(dropout), nn.Linear(16, 1))

    def on_fit_start(self):
        with open("starts.txt", "a") as file:
            file.write(Path(self.trainer.default_root_dir).name + "\\n")

    def training_step(self, batch, batch_idx):
        x, y = batch
        return {"loss": nn.functional.mse_loss(self.net(x).float(), y)}

    def train_dataloader(self):
        x = torch.randn(80, 16, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(x, x.sum(1, keepdim=True))
        return DataLoader(data, batch_size=self.hparams.batch_size, shuffle=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

class WithoutLoader(L.LightningModule):
    pass
"""
MODULE = ["model=custom", "model._target_=their_project.Theirs", "allow=[their_project]"]
LADDER = [*MODULE, "+model.batch_size=8", "--steps", "4"]
RUNGS = {"baseline", "bf16", "checkpointing", "accumulation", "bf16+checkpointing", "bf16+checkpointing+accumulation"}


def starts(folder: Path) -> Counter[str]:
    file = folder / "starts.txt"
    return Counter(file.read_text().split() if file.exists() else [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where a ladder was killed in its second rung, and the same command then went on."""
    path = tmp_path_factory.mktemp("theirs")
    (path / "their_project.py").write_text(PROJECT)
    killed = subprocess.Popen(
        command("ladder", *LADDER),
        cwd=path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 500
    while len(starts(path)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    (path / "printed.txt").write_text(call(path, "ladder", *LADDER))
    return path


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("runs/ladder-*/ladder.json")
    return {row["name"].replace(" ", ""): row for row in json.loads(file.read_text())["rows"]}


# --- a real ladder ---


@pytest.mark.long
def test_ladder_killed_in_its_second_rung_continues_with_it(folder: Path, rows: dict[str, Any]) -> None:
    begun = {name: times for name, times in starts(folder).items() if name in RUNGS}
    assert begun == {**dict.fromkeys(RUNGS, 1), "bf16": 2}
    assert {row["status"] for name, row in rows.items() if name in RUNGS} == {"finished"}
    printed = (folder / "printed.txt").read_text()
    assert lines_with(printed, "baseline: finished", "earlier")
    (page,) = folder.glob("runs/ladder-*/report.html")
    assert f"report: {page.relative_to(folder)}" in printed
    assert "resident set" in printed or torch.cuda.is_available()


@pytest.mark.long
def test_each_technique_acted(rows: dict[str, Any], folder: Path) -> None:
    assert rows["bf16"]["loss_difference"] != 0
    assert rows["checkpointing"]["loss_difference"] == 0
    assert rows["checkpointing"]["exact"] is rows["bf16+checkpointing"]["exact"] is True
    for name in ("checkpointing", "bf16+checkpointing"):
        (output,) = folder.glob(f"runs/ladder-*/{name}/output.log")
        assert "backward recomputes 3 Layer" in output.read_text()
    (output,) = folder.glob("runs/ladder-*/accumulation/output.log")
    assert lines_with(output.read_text(), "accumulation_schedule", "1 -> 4")


@pytest.mark.long
def test_accumulation_sees_the_same_batch_in_parts(rows: dict[str, Any]) -> None:
    assert {rows[name]["samples_per_step"] for name in RUNGS} == {8}
    assert rows["accumulation"]["overrides"][-1] == "+model.batch_size=2"
    assert rows["accumulation"]["exact"] is None


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there zero_offload runs")
def test_technique_that_this_machine_lacks_is_a_row(rows: dict[str, Any]) -> None:
    assert rows["zero_offload"]["status"] == "not run here"
    assert rows["zero_offload"]["detail"].startswith("no CUDA device")
    assert not any("+zero_offload" in name for name in rows)


@pytest.mark.long
def test_the_file_is_as_promised(folder: Path) -> None:
    (file,) = folder.glob("runs/ladder-*/ladder.json")
    found = json.loads(file.read_text())
    assert (found["baseline"], found["steps"]) == ("baseline", 4)
    assert found["command"] == shlex.join(["lightning-solo", "ladder", *LADDER])
    assert {"torch", "lightning", "lightning-solo"} <= set(found["versions"])
    assert found["hardware"]


@pytest.mark.long
def test_until_names_the_first_that_fits_and_its_command_trains(folder: Path, rows: dict[str, Any]) -> None:
    before = starts(folder)
    least = min(rows[name]["peak_bytes"] for name in RUNGS)
    limit = f"{rows['baseline']['peak_bytes']}B"
    printed = call(folder, "ladder", *LADDER, "--until", limit)
    assert f"fits in {format_bytes(rows['baseline']['peak_bytes'])}, with" in printed
    assert starts(folder) == before  # all was measured already
    line = next(line for line in printed.splitlines() if line.startswith("lightning-solo train "))
    assert "their_project.Theirs" in line
    call(folder, *shlex.split(line)[1:], "trainer.max_steps=1", "run=trained")
    printed = call(folder, "ladder", *LADDER, "--until", f"{least - 1}B", code=1)
    assert lines_with(printed, f"none fits in {format_bytes(least - 1)}")


@pytest.mark.long
def test_a_module_without_blocks_is_a_row_with_the_reason(folder: Path) -> None:
    options = ["+model.layers=0", "--techniques", "checkpointing", "--steps", "2", "run=flat"]
    printed = call(folder, "ladder", *MODULE, *options)
    assert lines_with(printed, "checkpointing: failed: NothingToDoError", "Theirs", "net")
    found = json.loads((folder / "runs/flat/ladder.json").read_text())["rows"]
    assert [row["status"] for row in found] == ["finished", "failed"]
    assert "output: runs/flat/checkpointing/output.log\n" in printed
    assert printed.count("output: ") == 1


# --- what is refused, and how ---

BAD = {
    "--steps=0": ["--steps 0:", "at least 1", "--steps 25"],
    "--steps=many": ["--steps many:", "at least 1"],
    "--until=16GB": ["--until='16GB':", "B, KiB, MiB, GiB, TiB", "16GiB"],
    "--until=-1GiB": ["--until='-1GiB':", "16GiB"],
    "--techniques=bf61": ["'bf61'", nearest("bf16"), "bf16, checkpointing"],
    "-m": [": -m;", "lightning-solo train", "--steps", "--until"],
    "solo=checkpointing": ["solo=checkpointing:", "baseline", "drop it"],
    "trainer.max_steps=3": ["trainer.max_steps=3:", "write --steps 25"],
    "resume=auto": ["resume=auto:", "ladder"],
    "hydra/launcher=basic": ["hydra/launcher=basic:", "hydra/launcher=solo"],
    "model.width=32,64": ["'model.width=32,64'", "ladder"],
    "nonsense": ["key=value"],
    "model.widht=3": ["model.widht=3:", nearest("width")],
    "model=nope": ["model=nope:", "byte_gpt_124m"],
    "run=../x": ["run='../x':", "1 to 100"],
    "+trainer.precision=16-mixed": ["trainer.precision='16-mixed'", "precision='32-true'"],
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_command_lines(argument: str) -> None:
    with pytest.raises(SoloError, match=mentions(*BAD[argument])):
        compose_base(parse([argument]))


def prepared(name: str, *overrides: str, steps: int = 2) -> Any:
    combination = (techniques()[name],) if name else ()
    return prepare(combination, LadderOptions(overrides, steps, None, tuple(techniques().values())), Path("runs"))


def test_a_choice_of_the_ladders_own_is_refused_with_the_techniques() -> None:
    with pytest.raises(PresetError, match=mentions("solo.precision")):
        prepared("bf16", "solo.precision=16-mixed")
    with pytest.raises(ConflictError, match=r"trainer.precision"):
        prepared("bf16", "+trainer.precision=16-mixed")
    with pytest.raises(PresetError, match=nearest("every_k")):
        prepared("checkpointing", "solo.callback.activation_checkpointing.every_q=2")


def test_the_batch_is_divided_where_it_is_an_argument() -> None:
    assert compose("accumulation").first_factor == 4
    later = ["callback.accumulation_schedule.milestones=[[2,4]]"]
    assert compose("accumulation", later).first_factor == 1
    assert compose("bf16").first_factor == 1
    assert compose("baseline", ["accumulate_grad_batches=2"]).first_factor == 2
    assert prepared("accumulation").overrides[-1] == "data.batch_size=4"  # 16 / 4
    assert prepared("accumulation", "data.batch_size=8").overrides[-1] == "data.batch_size=2"
    assert "data.batch_size=6" in prepared("accumulation", "data.batch_size=6").overrides  # 4 is no part of 6
    eight = "solo.callback.accumulation_schedule.milestones=[[0,8]]"
    assert prepared("accumulation", eight).overrides[-1] == "data.batch_size=2"  # 16 / 8
    assert not any(
        "batch_size" in text for text in prepared("accumulation", *MODULE).overrides
    )  # its loader may set it


def test_batch_size_that_a_module_ignores_is_refused_even_if_it_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_project.py").write_text(PROJECT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_project", raising=False)
    checked = prepared("", *MODULE, "data.batch_size=16").argument.checked
    with pytest.raises(PresetError, match=mentions("data.batch_size=16", "train_dataloader", "+model.batch_size=16")):
        build_parts(checked)
    checked = prepared("", *MODULE).argument.checked
    _, data = build_parts(checked)
    assert suggested_argument(checked, data) == "+model.batch_size"
    assert suggested_argument(prepared("").argument.checked, object()) == "data.batch_size"


def test_config_hash_depends_on_techniques_steps_and_overrides() -> None:
    one = prepared("bf16").config_hash
    assert one == prepared("bf16").config_hash
    others = [prepared("bf16", steps=3), prepared("bf16", "seed=1"), prepared("bf16", "model.width=64"), prepared("")]
    assert len({one, *(other.config_hash for other in others)}) == 5


def test_the_folder_is_found_again_by_what_is_asked(tmp_path: Path) -> None:
    root = f"root={tmp_path}"

    def name(*arguments: str) -> str:
        given = parse([root, *arguments])
        return folder_of(given, compose_base(given)).name

    assert name("seed=1", "model.width=64") == name("model.width=64", "seed=1") == name("seed=1", "model.width=64")
    assert name("seed=1", "model.width=64") == name("seed=1", "model.width=64", "--until", "1GiB", "hydra.verbose=true")
    assert len({name(), name("seed=1"), name("--steps", "3"), name("--techniques", "bf16")}) == 4
    assert name("run=mine") == "mine"


def test_the_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(CheckpointError, match=mentions(str(tmp_path), "run=")):
        claim(SweepFolder(tmp_path), parse([]), "lightning-solo ladder")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.long
def test_a_module_without_data_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    target = "model._target_=their_project.WithoutLoader"
    asked = prepared("", "model=custom", target, "allow=[their_project]", "data=none").argument
    with pytest.raises(PresetError, match=mentions("data", "WithoutLoader", "train_dataloader")):
        rung(asked)
