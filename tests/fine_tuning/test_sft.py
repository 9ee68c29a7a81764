"""`experiment=sft`: from a folder and a file of conversations to an answer, on the command line."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from lightning_solo.cli.application import compose_application
from lightning_solo.cli.command_line import CheckedConfig, check_command_line, check_config
from lightning_solo.errors import ConflictError, PresetError
from lightning_solo.fine_tuning.trained import load_trained
from tests.cli.commands import call, command, environment
from tests.fine_tuning.conftest import KINDS
from tests.messages import lines_with, mentions

transformers = pytest.importorskip("transformers")
Folder = Callable[..., Path]
PATHS = ["experiment=sft", "model.path=./model", "data.path=chats.jsonl"]


def checked(*overrides: str) -> CheckedConfig:
    return check_config(compose_application([*PATHS, *overrides]))


@pytest.mark.parametrize("preset", ["adapters", "qlora", "checkpointing", "[qlora,packing]"])
def test_the_loss_is_chunked_and_weighted_by_tokens_under_every_preset(preset: str) -> None:
    config = checked(f"solo={preset}")
    settings = {part.card.name: part.settings for part in config.solo.techniques}
    assert {"chunked_cross_entropy", "accumulation_schedule"} < set(settings)
    assert settings["accumulation_schedule"].weight_by == "shifted_tokens"
    assert ("quantized_base" in settings) == ("qlora" in preset)
    assert config.data["tokenizer"] == "./model"
    assert 1e-4 <= config.optimizer["lr"] <= 2e-4


def test_compact_and_accumulation_are_refused_with_what_to_write() -> None:
    with pytest.raises(ConflictError, match=mentions("gradient_release", "~callback.accumulation_schedule")):
        checked("solo=compact")
    checked("solo=compact", "~solo.callback.accumulation_schedule")
    remedy = ("weight_by=batches", "weight_by=shifted_tokens")
    with pytest.raises(ConflictError, match=mentions(*remedy)):
        checked("solo=[adapters,micro_batching]")
    both = [
        f"solo.callback.{n}.{word}" for n, word in zip(("accumulation_schedule", "micro_batching"), remedy, strict=True)
    ]
    checked("solo=[adapters,micro_batching]", *both)
    with pytest.raises(ConflictError, match=mentions("callback.accumulation_schedule.milestones=[[0,4]]")):
        checked("solo.accumulate_grad_batches=4")


def test_missing_folder_is_asked_for_by_its_own_name() -> None:
    with pytest.raises(PresetError, match=mentions("model.path: ", "write model.path=...")):
        check_command_line(["experiment=sft", "data.path=chats.jsonl"])
    with pytest.raises(PresetError, match=mentions("data.path: ", "write data.path=...")):
        check_command_line(["experiment=sft", "model.path=./model"])


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_path(kind: str, model_folder: Folder, chats: Path, tmp_path: Path) -> None:
    """Train, resume, generate; compared with a run that wasn't interrupted."""
    model = model_folder(kind, dtype=torch.bfloat16)
    words = ["experiment=sft", f"model.path={model}", f"data.path={chats}", "data.max_length=64", "data.cache=cache"]
    words += ["solo=qlora", "solo.callback.accumulation_schedule.milestones=[[0,2]]", "trainer.max_epochs=10"]
    words += ["model.sample_tokens=8", "trainer.log_every_n_steps=1"]
    if kind == "Llama":
        words += ["solo.callback.quantized_base.embeddings=host", "solo.callback.quantized_base.head=int8"]
    if kind in ("Mixtral", "Qwen3Moe"):  # experts of three dimensions
        words += ["solo.callback.adapters.targets=[q_proj,v_proj]"]
    output = call(tmp_path, "train", *words, "run=first", "trainer.max_steps=4")
    assert lines_with(output, "4 optimizer steps")
    assert lines_with(output, "end-of-turn", "24 of 24")
    folder = tmp_path / "runs" / "first"
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(rows) >= 2
    assert all(row["prompt"].endswith("<|im_start|>assistant\n") for row in rows)
    with (folder / "csv" / "metrics.csv").open() as file:
        logged = list(csv.DictReader(file))
    assert any(row.get("validation/loss") for row in logged)
    assert len(list((folder / "checkpoints").glob("step=*.ckpt"))) == 1
    assert OmegaConf.load(folder / "config.yaml").monitor == "validation/loss"
    call(tmp_path, "train", *words, "run=second", "trainer.max_steps=2")
    call(tmp_path, "train", *words, "run=second", "trainer.max_steps=4", "resume=override")
    first, second = (
        torch.load(tmp_path / "runs" / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for name in ("first", "second")
    )
    assert first.keys() == second.keys()
    assert all(".lora_" in name for name in first)
    if kind == "Llama":
        call(tmp_path, "export", "runs/first", "--format", "hf", "--output", "exported")
        exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
        module, _ = load_trained(tmp_path / "runs" / "first" / "checkpoints" / "last.ckpt", torch.device("cpu"))
        ids = torch.arange(4, 24).view(2, 10)
        assert torch.allclose(exported(ids).logits.float(), module.model(ids).logits.float(), atol=2e-2)
    answers = [answer(tmp_path, "runs/first"), answer(tmp_path, "runs/first"), answer(tmp_path, "runs/first", "--best")]
    assert answers[0] == answers[1]
    assert all(answers)


def answer(folder: Path, *arguments: str) -> str:
    """Return what `lightning-solo generate` prints, without other packages' warnings."""
    line = command("generate", *arguments, "What is 3 plus 3?", "--max-tokens", "8")
    done = subprocess.run(line, cwd=folder, env=environment(), capture_output=True, text=True, timeout=500, check=True)
    return done.stdout
