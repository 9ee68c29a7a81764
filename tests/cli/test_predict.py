"""`lightning-solo predict` takes module, data and weights of a run, and writes what its module predicts."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from lightning_solo.build import trainer_arguments
from lightning_solo.cli.application import compose_application
from lightning_solo.cli.command_line import TOP, check_config
from lightning_solo.cli.predict import parse, run
from lightning_solo.cli.run_folder import RunFolder
from lightning_solo.cli.train import build_parts
from lightning_solo.cli.trained_run import open_run
from lightning_solo.errors import CheckpointError, PresetError
from lightning_solo.prediction.streaming import MANIFEST
from tests.cli.commands import signalled
from tests.fine_tuning.conftest import tiny_tokenizer
from tests.messages import mentions
from tests.models import small_model
from tests.test_saved_by_0_2_0 import SAVED

Make = Callable[..., Any]
TINY = ("model.width=16", "model.depth=1", "data.context=16", "data.max_bytes=20000", "data.validation_batches=3")

LABELLED: dict[str, Callable[[int], dict[str, Any]]] = {
    "sequence_classification": lambda n: {"text": f"fox {n}", "label": ["dogs", "foxes"][n % 2]},
    "token_classification": lambda n: {"tokens": ["The", "fox", f"jumps{n}"], "labels": ["O", "animal", "O"]},
}


def finished(folder: Path, make_trainer: Make, overrides: Sequence[str], steps: int = 4) -> Any:
    """Train in the folder of a run; return the trainer."""
    cfg = compose_application([*overrides, f"run={folder.name}", f"root={folder.parent}"])
    checked = check_config(cfg)
    RunFolder(folder).write(OmegaConf.masked_copy(cfg, [*TOP]))
    L.seed_everything(checked.trainer.get("seed", 0), verbose=False)
    module, data = build_parts(checked)
    trainer = make_trainer(L, **trainer_arguments(checked.solo), max_steps=steps, limit_val_batches=0)
    trainer.fit(module, data)
    trainer.save_checkpoint(folder / "checkpoints" / "last.ckpt")
    return trainer


def lines(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]


def test_predictions_are_those_of_the_trained_module(
    make_trainer: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "first"
    trainer = finished(folder, make_trainer, [*TINY, "solo=compact", "data.batch_size=4"])
    expected = torch.cat(trainer.predict(trainer.lightning_module, trainer.datamodule)).cpu()
    assert len(expected) == 12
    assert run([str(folder), "+trainer.enable_progress_bar=false"]) == 0
    out = folder / "predictions"
    assert torch.equal(load_file(out / "predictions-00000.safetensors")["output"], expected)
    manifest = json.loads((out / MANIFEST).read_text())
    assert (manifest["rows"], manifest["batch_size"], manifest["split"]) == (12, 4, "predict")
    assert manifest["checkpoint"].endswith("last.ckpt")
    printed = capsys.readouterr().out
    assert "12 rows" in printed
    assert "batches of 4" in printed
    with pytest.raises(CheckpointError, match=mentions(str(out), "--force")):
        run([str(folder)])
    other = tmp_path / "out"
    options = ["--out", str(other), "--split", "validation", "--batch-size", "5", "--format", "jsonl"]
    assert run([str(folder), "trainer.enable_progress_bar=false", "data.validation_batches=2", *options]) == 0
    assert lines(other) != expected[:8].tolist()  # of other windows
    assert len(lines(other)) == 8
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "predictions",
        "versions.json",
    ]
    best = folder / "checkpoints" / "another.ckpt"
    shutil.copy(folder / "checkpoints" / "last.ckpt", best)
    assert run([str(folder), "--checkpoint", str(best), "--force", "trainer.enable_progress_bar=false"]) == 0
    assert json.loads((out / MANIFEST).read_text())["checkpoint"] == str(best)


@pytest.mark.parametrize(
    "task", ["sequence_classification", pytest.param("token_classification", marks=pytest.mark.long)]
)
def test_classifiers_write_labels_for_rows_without_any(task: str, make_trainer: Make, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    base = tmp_path / "base"
    small_model("Bert", "ForMaskedLM", vocab_size=320).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(LABELLED[task](n)) + "\n" for n in range(24)))
    folder = tmp_path / "runs" / "first"
    finished(
        folder,
        make_trainer,
        [
            "model=hf_auto",
            f"model.path={base}",
            f"model.task={task}",
            "data=labelled",
            f"data.path={rows}",
            f"data.cache={tmp_path}",
        ],
    )
    new = tmp_path / "new.jsonl"
    kept = "tokens" if task == "token_classification" else "text"
    new.write_text("".join(json.dumps({kept: LABELLED[task](n)[kept]}) + "\n" for n in range(5)))
    arguments = [str(folder), f"data.predict_path={new}", "data.batch_size=2", "trainer.enable_progress_bar=false"]
    assert run(arguments) == 0
    predicted = lines(folder / "predictions")
    assert len(predicted) == 5
    if task == "token_classification":
        assert all(len(row["labels"]) == 3 and {*row["labels"]} <= {"O", "animal"} for row in predicted)
        return
    for row in predicted:
        assert list(row["probabilities"]) == ["dogs", "foxes"]
        assert row["label"] == max(row["probabilities"], key=row["probabilities"].__getitem__)
        assert sum(row["probabilities"].values()) == pytest.approx(1)
    assert run([*arguments, "--force", "--split", "validation"]) == 0
    assert len(lines(folder / "predictions")) != 5


def test_paths_of_a_run_begin_where_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    small_model("Bert", "ForMaskedLM", vocab_size=320).save_pretrained(home / "base")
    for place in (home, elsewhere):
        place.mkdir(exist_ok=True)
        (place / "rows.jsonl").write_text("{}")
    monkeypatch.chdir(home)
    task = ["model=hf_auto", "model.path=base", "model.task=sequence_classification"]
    cfg = compose_application([*task, "data=labelled", "data.path=rows.jsonl", "root=runs", "run=first"])
    RunFolder(folder := home / "runs" / "first").write(OmegaConf.masked_copy(cfg, [*TOP]))
    (folder / "checkpoints").mkdir()
    torch.save({}, folder / "checkpoints" / "last.ckpt")
    assert open_run(Path("runs/first")).checked.model["path"] == "base"
    monkeypatch.chdir(elsewhere)
    checked = open_run(Path("../home/runs/first"), overrides=["data.predict_path=rows.jsonl"]).checked
    assert checked.model["path"] == str(home / "base")
    assert checked.data["tokenizer"] == str(home / "base")
    assert checked.data["path"] == str(home / "rows.jsonl")
    assert checked.data["predict_path"] == "rows.jsonl"  # as it is written now
    folder = folder.rename(elsewhere / "first")  # from where it isn't known
    with pytest.raises(CheckpointError, match=mentions("model.path=base", str(elsewhere))):
        build_parts(open_run(folder).checked)


def test_a_run_of_0_2_0_with_code_needs_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run_of_compact"
    shutil.copytree(SAVED / folder.name, folder)
    shutil.copy(SAVED / "small_regression.py", tmp_path / "small_regression.py")
    source = (tmp_path / "small_regression.py").read_text() + (
        "\n    def predict_step(self, batch: Any, batch_idx: int) -> Any:\n        return self.net(batch[0])\n"
        "\n    def val_dataloader(self) -> Any:\n        return Batches()\n"
    )
    (tmp_path / "small_regression.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(
        sys.modules, "small_regression", ModuleType("small_regression")
    )  # restored or removed at the end
    monkeypatch.delitem(sys.modules, "small_regression")
    with pytest.raises(PresetError, match=mentions("small_regression", "--allow small_regression")):
        run([str(folder)])
    assert run([str(folder), "--allow", "small_regression", "+trainer.enable_progress_bar=false"]) == 0
    outputs = load_file(folder / "predictions" / "predictions-00000.safetensors")["output"]
    assert outputs.shape == (32, 1)
    assert outputs.dtype is torch.bfloat16
    assert json.loads((folder / "predictions" / MANIFEST).read_text())["split"] == "validation"


def test_mistakes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=mentions("config.yaml", str(tmp_path))):
        run([str(tmp_path)])
    (tmp_path / "config.yaml").write_text("[")
    with pytest.raises(CheckpointError, match=mentions("config.yaml", "can't be read")):
        run([str(tmp_path)])
    shutil.copy(SAVED / "run_of_compact" / "config.yaml", tmp_path / "config.yaml")
    for override in ("seed=1", "data=text", "~data.batch_size"):
        with pytest.raises(PresetError, match=mentions(override, "data.batch_size=64")):
            run([str(tmp_path), override, "--allow", "small_regression"])
    with pytest.raises(CheckpointError, match=mentions("last.ckpt")):
        run([str(tmp_path), "--allow", "small_regression"])
    with pytest.raises(PresetError, match=mentions("--batch-size many", "64")):
        run([str(tmp_path), "--batch-size", "many"])
    with pytest.raises(PresetError, match=mentions("--splits", "lightning-solo predict")):
        parse(["first", "--splits", "test"])


@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_command_leaves_nothing(sent: signal.Signals, make_trainer: Make, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    finished(folder, make_trainer, [*TINY, "solo=bf16", "data.batch_size=1"])
    arguments = ["predict", "first", "data.max_bytes=null", "data.validation_batches=1000000"]

    def ready() -> bool:
        return any(file.stat().st_size for file in folder.glob(".new-*/predictions.jsonl"))

    code, output = signalled(tmp_path, *arguments, "--format", "jsonl", sent=sent, ready=ready)
    assert code == 128 + sent, output
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "config.yaml", "versions.json"]
    if sent is signal.SIGINT:
        assert "nothing is left" in output
