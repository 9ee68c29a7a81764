"""`lightning-solo export RUN --format quantized` rounds as the run did, or afterwards, and measures both modules."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

import lightning_solo as solo
from lightning_solo.build import trainer_arguments
from lightning_solo.cli.application import compose_application
from lightning_solo.cli.command_line import TOP, check_config
from lightning_solo.cli.export import run
from lightning_solo.cli.quantized_run import write_quantized
from lightning_solo.cli.run_folder import RunFolder
from lightning_solo.cli.train import build_parts
from lightning_solo.errors import CheckpointError, NothingToDoError, PresetError
from lightning_solo.export.quantized import export_quantized
from lightning_solo.nn.fake_quantization import Rounding, chosen_layers, round_weights
from lightning_solo.nn.packed_weights import load
from tests.messages import mentions

Make = Callable[..., Any]
TINY = ("model.width=16", "model.depth=1", "data.context=16", "data.max_bytes=20000", "data.validation_batches=3")
AWARE = (
    *TINY,
    "+solo/callback=quantization",
    "solo.callback.quantization.bits=3",
    "solo.callback.quantization.group_size=8",
)


def finished(folder: Path, make_trainer: Make, overrides: Sequence[str]) -> Any:
    """Train in the folder of a run; return the module."""
    cfg = compose_application([*overrides, f"run={folder.name}", f"root={folder.parent}"])
    checked = check_config(cfg)
    RunFolder(folder).write(OmegaConf.masked_copy(cfg, [*TOP]))
    L.seed_everything(0, verbose=False)
    module, data = build_parts(checked)
    trainer = make_trainer(L, **trainer_arguments(checked.solo), max_steps=4, limit_val_batches=0)
    trainer.fit(module, data)
    trainer.save_checkpoint(folder / "checkpoints" / "last.ckpt")
    return module


def test_a_run_is_exported_with_the_weights_that_it_was_trained_with(
    make_trainer: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = finished(tmp_path / "run", make_trainer, AWARE)
    assert run([str(tmp_path / "run"), "--format", "quantized"]) == 0
    printed, folder = capsys.readouterr().out, tmp_path / "run" / "checkpoints" / "last-quantized"
    for text in ("4 Linear with 3 bits in groups of 8", "validation/loss: ", "seconds of", "trained with these"):
        assert text in printed
    full, trained, exported = re.search(
        r"loss: (.*) with full weights, (.*) rounded as in training, (.*) after", printed
    ).groups()  # type: ignore[union-attr]
    assert trained == exported
    assert full
    loaded = load(type(module)(**module.hparams), folder)
    rounding, ids = Rounding(3, 8), torch.arange(16)[None]
    round_weights(chosen_layers(module, rounding), rounding)
    with torch.no_grad():
        assert torch.equal(loaded(ids), module.eval()(ids))
    with pytest.raises(CheckpointError, match="--force"):
        write_quantized(tmp_path / "run")


def test_masters_of_a_compact_run_are_rounded_after_training(make_trainer: Make, tmp_path: Path) -> None:
    module = finished(tmp_path / "run", make_trainer, ("solo=compact", *TINY))
    source = tmp_path / "run" / "checkpoints" / "last.ckpt"
    write_quantized(source, tmp_path / "few", group_size=16)
    loaded = load(type(module)(**module.hparams), tmp_path / "few").state_dict()
    masters = {name: w for name, w in solo.export_weights(source).items() if name in loaded}
    assert masters
    assert any(not torch.equal(w, w.bfloat16().float()) for w in masters.values())
    assert all(torch.equal(loaded[name], w) for name, w in masters.items())


def test_an_average_or_the_weights_themselves_are_rounded(make_trainer: Make, tmp_path: Path) -> None:
    overrides = ("+solo/callback=weight_averaging", "solo.callback.weight_averaging.at_end=live", *TINY)
    module = finished(tmp_path / "run", make_trainer, overrides)
    average, live = (solo.export_weights(tmp_path / "run", live=live) for live in (False, True))
    assert not torch.equal(average["embedding.weight"], live["embedding.weight"])
    for weights, flag in ((average, []), (live, ["--live"])):
        output = tmp_path / f"few{len(flag)}"
        run([str(tmp_path / "run"), "--format", "quantized", "--group-size", "16", "--output", str(output), *flag])
        loaded = load(type(module)(**module.hparams), output).state_dict()
        assert torch.equal(loaded["embedding.weight"], weights["embedding.weight"])


def test_factors_of_a_run_are_rounded(make_trainer: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("+solo/callback=low_rank", "solo.callback.low_rank.rank=4", *TINY)
    module = finished(tmp_path / "run", make_trainer, overrides)
    assert run([str(tmp_path / "run"), "--format", "quantized", "--bits", "8", "--group-size", "0"]) == 0
    before, after = re.search(r"validation/loss: (.*) before, (.*) after", capsys.readouterr().out).groups()  # type: ignore[union-attr]
    assert abs(float(before) - float(after)) < 0.01
    fresh = type(module)(**module.hparams)
    loaded = load(fresh, tmp_path / "run" / "checkpoints" / "last-quantized").state_dict()
    assert loaded["blocks.0.mlp.up.0.codes"].shape == (4, 16)


def test_any_run_is_exported_after_training(make_trainer: Make, tmp_path: Path) -> None:
    module = finished(tmp_path / "run", make_trainer, TINY)
    source, output = tmp_path / "run" / "checkpoints" / "last.ckpt", tmp_path / "few"
    with pytest.raises(PresetError, match=mentions("--group-size 32", "--group-size 16")):
        write_quantized(source, output)
    lines = write_quantized(source, output, bits=8, group_size=0, layers=["mlp", "head"])
    assert "quantization after training" in lines
    export_quantized(module, tmp_path / "same", 8, 0, layers=["*.mlp.*", "head"])
    for name in ("model.safetensors", "config.json", "load.py"):
        assert (output / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
    layers = json.loads((output / "config.json").read_text(encoding="utf-8"))["layers"]
    assert sorted(layers) == ["blocks.0.mlp.down", "blocks.0.mlp.up", "embedding", "head"]
    static = ["--format", "quantized", "--output", str(tmp_path / "static"), "--bits", "8", "--group-size", "0"]
    with pytest.raises(PresetError, match=mentions("--calibration-batches 2", "--activations int8_static")):
        run([str(source), *static, "--calibration-batches", "2"])
    assert run([str(source), *static, "--calibration-batches", "2", "--activations", "int8_static"]) == 0
    scales = {name: x for name, x in load_file(tmp_path / "static" / "model.safetensors").items() if "input" in name}
    assert len(scales) == 4
    assert all(float(scale.view(torch.float32)) > 0 for scale in scales.values())


def test_a_checkpoint_without_its_run_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"weight": torch.zeros(2)}}, tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match=mentions("solo.export_quantized(module, 'folder')")):
        run([str(tmp_path / "last.ckpt"), "--format", "quantized"])
    with pytest.raises(PresetError, match="--bits"):
        run([str(tmp_path / "last.ckpt"), "--bits", "4"])


def test_a_missing_run_and_a_folder_without_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=mentions("runs/nope:")):
        write_quantized(tmp_path / "runs" / "nope")
    with pytest.raises(CheckpointError, match=mentions("is no run", "solo.export_quantized(module, 'folder')")):
        write_quantized(tmp_path)


def test_a_run_of_adapters_and_one_of_another_module_are_refused(make_trainer: Make, tmp_path: Path) -> None:
    finished(tmp_path / "run", make_trainer, [*TINY, "solo=adapters"])
    with pytest.raises(NothingToDoError, match=mentions("adapters", "--format hf")):
        write_quantized(tmp_path / "run")
    config = tmp_path / "other" / "config.yaml"
    finished(tmp_path / "other", make_trainer, TINY)
    config.write_text(config.read_text(encoding="utf-8").replace("width: 16", "width: 32"), encoding="utf-8")
    with pytest.raises(CheckpointError, match="of another module") as refused:
        write_quantized(tmp_path / "other")
    assert "size mismatch" in str(refused.value)
    assert len(str(refused.value)) < 700
