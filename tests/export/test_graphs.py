"""Exported graphs give the module's outputs, also where this package is missing, and others are refused by reason."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_solo as solo
from lightning_solo.build import trainer_arguments
from lightning_solo.cli.application import compose_application
from lightning_solo.cli.command_line import TOP, check_config
from lightning_solo.cli.export import parse, run
from lightning_solo.cli.export_graph import write_graph
from lightning_solo.cli.run_folder import RunFolder
from lightning_solo.cli.train import build_parts
from lightning_solo.errors import CapabilityError, CheckpointError, ConflictError, NothingToDoError, PresetError
from lightning_solo.export import graphs
from lightning_solo.export.graphs import SUFFIXES, export_graph
from lightning_solo.export.trained_weights import load_trained_weights
from lightning_solo.machine import is_installed
from tests.messages import mentions

Make = Callable[..., Any]
X = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))


class Net(L.LightningModule):
    """A module of dictionaries: its forward has an input that it doesn't use, and two outputs."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.norm, self.drop = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5)

    def forward(self, batch: Any, scale: float = 2.0) -> Any:
        return {"y": self.drop(self.norm(self.net(batch["x"]))) * scale, "sum": batch["x"].sum(1), "name": "net"}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch, scale=3.0)["y"].sum()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader([{"x": row, "labels": row.sum()} for row in X], batch_size=3)  # type: ignore[arg-type]


class Plain(Net):
    """A module of one tensor."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch["x"]).sum()


BATCH = {"x": X, "labels": X.sum(1)}
FORMATS = pytest.mark.parametrize("format", [*SUFFIXES])


@pytest.mark.long
@FORMATS
def test_outputs_are_those_of_the_module_without_this_package(format: str, tmp_path: Path) -> None:
    if format == "onnx":
        pytest.importorskip("onnxscript")
    module = Net()
    path = tmp_path / f"net{SUFFIXES[format]}"
    lines = export_graph(module, BATCH, path, format, batch_range=(1, 64))
    assert module.training
    assert lines[0].startswith(f"{format}: {path}")
    assert lines[1] == "inputs: x float32 (batch, 4); batch from 1 to 64"
    assert lines[2].startswith("outputs: y, sum; at 3 batch sizes")
    assert any("unpickles" in line for line in lines) == (format == "torch_export")
    code = (
        "import sys, torch\nsys.modules['lightning_solo'] = sys.modules['lightning'] = None\nx = torch.load('x.pt')\n"
    )
    if format == "onnx":
        code += (
            "from onnx.reference import ReferenceEvaluator\nnet = ReferenceEvaluator('net.onnx')\n"
            "assert net.input_names == ['x'], net.input_names\n"
            "dims = net.proto_.graph.input[0].type.tensor_type.shape.dim\nassert dims[0].dim_param == 'batch', dims\n"
            "y, s = map(torch.from_numpy, net.run(['y', 'sum'], {'x': x.numpy()}))\n"
        )
    else:
        code += "y, s = torch.export.load('net.pt2').module()(x)\n"
    rows = torch.rand(11, 4)
    torch.save(rows, tmp_path / "x.pt")
    command = [sys.executable, "-W", "ignore", "-c", f"{code}torch.save([y, s], 'out.pt')"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    y, total = torch.load(tmp_path / "out.pt")
    expected = module.eval()({"x": rows}, scale=3.0)  # as the step calls it
    assert torch.allclose(y, expected["y"], rtol=0, atol=1e-6)
    assert torch.allclose(total, rows.sum(1), rtol=0, atol=1e-6)


def test_lengths_have_a_range(tmp_path: Path) -> None:
    class Words(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 5)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.head(self.table(ids).cumsum(1) * mask[..., None])

        def validation_step(self, batch: Any) -> None:
            self(*batch)

    batch = (torch.randint(50, (1, 12)), torch.ones(1, 12))  # one row, which a graph would fix
    module = Words()
    lines = export_graph(module, batch, tmp_path / "a.pt2", "torch_export", length_range=(2, 64))
    assert lines[1] == (
        "inputs: ids int64 (batch, length), mask float32 (batch, length); batch from 1 to 1024; length from 2 to 64"
    )
    graph = torch.export.load(tmp_path / "a.pt2").module()
    ids, mask = torch.randint(50, (7, 33)), torch.ones(7, 33)
    assert torch.allclose(graph(ids, mask)[0], module(ids, mask), rtol=0, atol=1e-6)
    lines = export_graph(module, batch, tmp_path / "b.pt2", "torch_export", batch_range=(4, 4))
    assert lines[1] == "inputs: ids int64 (4, 12), mask float32 (4, 12)"


def test_any_module_takes_a_tuple_of_arguments(tmp_path: Path) -> None:
    lines = export_graph(nn.Linear(4, 2), (X,), tmp_path / "a.pt2", "torch_export")
    assert lines[1].startswith("inputs: input float32 (batch, 4)")


# --- modules that can't be exported ---


class NeedsTrainer(Plain):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.net(x) * (1 + self.trainer.current_epoch)


class Branches(Plain):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.net(x) if x.sum() > 0 else x


class Fixes(Plain):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.net(x) + torch.zeros(6, 3)


class Random(Plain):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.net(x) + torch.rand(3)


class Masked(Random):
    """Its largest output is infinite, which says nothing about the others."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cat([super().forward(x), torch.full_like(x[:, :1], -torch.inf)], 1)


class Hidden(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch["x"]).sum()

    predict_step = validation_step = test_step = training_step


class Fails(Plain):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        raise KeyError("a key of mine")


@pytest.mark.parametrize(
    ("module", "error", "words"),
    [
        (NeedsTrainer, CapabilityError, ("self.trainer", "--format weights")),
        (Branches, CapabilityError, ("values", "torch.where", "--format weights")),
        (Fixes, CapabilityError, ("batch", "constant (6)", "--batch 6")),
        (Random, CheckpointError, ("random", "other outputs")),
        (Masked, CheckpointError, ("random", "other outputs")),
        (Hidden, NothingToDoError, ("forward", "predict_step")),
        (Fails, CapabilityError, ("KeyError", "a key of mine")),
    ],
)
def test_modules_that_have_no_graph_are_refused(
    module: type[Any], error: type[Exception], words: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(error, match=mentions(module.__name__, *words)):
        export_graph(module(), BATCH, tmp_path / "a.pt2", "torch_export")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(is_installed("onnxruntime"), reason="ONNX's own evaluator isn't used")
def test_a_graph_that_the_evaluator_cannot_run_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")

    class Gathers(Plain):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            wide = self.net(x).repeat(1, 30)  # it gathers from 64 columns at most
            return wide.gather(1, torch.arange(3).expand(wide.shape[0], 3))

    with pytest.raises(CapabilityError, match=mentions("can't be checked", "pip install onnxruntime", "torch_export")):
        export_graph(Gathers(), BATCH, tmp_path / "net.onnx", "onnx")
    assert not (tmp_path / "net.onnx").exists()


def test_a_forward_that_needs_the_trainer_is_refused_after_a_fit_too(make_trainer: Make, tmp_path: Path) -> None:
    module = NeedsTrainer()
    trainer = make_trainer(L)
    trainer.fit(module)
    with pytest.raises(CapabilityError, match=mentions("self.trainer")):
        export_graph(module, BATCH, tmp_path / "a.pt2", "torch_export")
    assert module.trainer is trainer


def test_wrong_arguments_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, words in (
        ({"format": "onnx", "output": "a.pt2"}, ("a.pt2", ".onnx")),
        ({"format": "script", "output": "a.pt"}, ("script", "torch_export")),
        ({"format": "torch_export", "output": "a.pt2", "batch_range": (8, 2)}, ("--batch 8:2", "1:1024")),
        ({"format": "torch_export", "output": "a.pt2", "length_range": (0, 2)}, ("--length 0:2",)),
        ({"format": "torch_export", "output": "a.pt2", "batch_range": None}, ("=None", "batch_range=(1, 1024)")),
        ({"format": "torch_export", "output": "a.pt2", "length_range": 64}, ("=64", "length_range=(1, 1024)")),
    ):
        with pytest.raises(PresetError, match=mentions(*words)):
            export_graph(Plain(), BATCH, **options)  # type: ignore[arg-type]
    with pytest.raises(ConflictError, match=mentions("net.weight", "module.float()")):
        export_graph(Plain().bfloat16(), BATCH, tmp_path / "a.pt2", "torch_export")
    (tmp_path / "a.pt2").touch()
    with pytest.raises(CheckpointError, match=mentions("a.pt2", "--force")):
        export_graph(Plain(), BATCH, tmp_path / "a.pt2", "torch_export")
    monkeypatch.setattr(graphs, "is_installed", lambda package: package != "onnxscript")
    with pytest.raises(CapabilityError, match=mentions("onnxscript", "pip install lightning-solo[onnx]")):
        export_graph(Plain(), BATCH, tmp_path / "a.onnx")
    with pytest.raises(PresetError, match=mentions("--batch", "--format onnx or torch_export")):
        parse(["first", "--format", "weights", "--batch", "1:2"])


# --- of a run ---


@pytest.mark.long
def test_a_run_is_exported_with_its_master_weights(
    make_trainer: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "first"
    small = ["model.width=16", "model.depth=1", "data.context=16", "data.max_bytes=20000", "data.batch_size=4"]
    cfg = compose_application([*small, "solo=compact", f"run={folder.name}", f"root={tmp_path}"])
    RunFolder(folder).write(OmegaConf.masked_copy(cfg, [*TOP]))
    checked = check_config(cfg)
    module, data = build_parts(checked)
    trainer = make_trainer(L, **trainer_arguments(checked.solo), max_steps=3, limit_val_batches=0)
    trainer.fit(module, data)
    last = folder / "checkpoints" / "last.ckpt"
    trainer.save_checkpoint(last)
    for source in (folder, last):
        assert run([str(source), "--format", "torch_export", "--batch", "1:8", "--force"]) == 0
    assert "batch from 1 to 8" in capsys.readouterr().out
    plain = build_parts(checked)[0].eval()
    plain.load_state_dict(solo.export_weights(last, "fp32"))
    text = torch.randint(256, (5, 16), dtype=torch.uint8)
    (logits,) = torch.export.load(last.with_suffix(".pt2")).module()(text)
    assert torch.allclose(logits, plain(text), rtol=0, atol=1e-6)


def test_ranges_of_the_command_line_are_checked(tmp_path: Path) -> None:
    for option, text in (("batch", "many"), ("length", "2:")):
        with pytest.raises(PresetError, match=mentions(f"--{option} {text}", "1:64")):
            write_graph(tmp_path, **{option: text})  # type: ignore[arg-type]
    (tmp_path / "a" / "checkpoints").mkdir(parents=True)
    (tmp_path / "a" / "checkpoints" / "last.ckpt").touch()
    with pytest.raises(CheckpointError, match=mentions("last.ckpt", "solo.export_graph(")):
        write_graph(tmp_path / "a" / "checkpoints" / "last.ckpt")


def test_weights_of_another_module_are_refused(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(L)
    trainer.fit(Plain())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match=mentions("Plain", "net.weight", "--format weights")):
        load_trained_weights(Plain(width=5), tmp_path / "last.ckpt")


@pytest.mark.long
@pytest.mark.parametrize("quantized", [False, True])
def test_adapters_are_merged_into_the_base_as_it_was_in_training(
    quantized: bool, make_trainer: Make, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    techniques: list[Any] = [solo.callbacks.Adapters(r=2, targets=["net"])]
    if quantized:
        techniques.append(solo.callbacks.QuantizedBase(format="int8"))
    base, module = Plain(width=64), Plain(width=64)
    trainer = make_trainer(L, callbacks=techniques)
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    before = base.eval()(X)
    load_trained_weights(base, tmp_path / "last.ckpt")
    assert torch.allclose(base(X), module.eval()(X), rtol=0, atol=1e-5)
    assert not torch.allclose(base(X), before, rtol=0, atol=1e-3)
    export_graph(base, BATCH, tmp_path / "a.pt2", "torch_export")


@pytest.mark.long
@FORMATS
def test_models_of_transformers_are_exported_without_labels(format: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    if format == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")  # ONNX's own evaluator can't run it
    from lightning_solo.fine_tuning.auto_model import HFAuto
    from tests.fine_tuning.conftest import tiny_tokenizer
    from tests.models import small_model

    small_model("Bert", "ForSequenceClassification", vocab_size=320).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    module = HFAuto(str(tmp_path / "base"), "sequence_classification", labels=["a", "b"])
    module.configure_model()
    batch = {"input_ids": torch.randint(5, 300, (3, 9)), "attention_mask": torch.ones(3, 9, dtype=torch.long)}
    batch["labels"] = torch.zeros(3, dtype=torch.long)
    lines = export_graph(module, batch, tmp_path / f"a{SUFFIXES[format]}", format, length_range=(2, 32))
    assert lines[1].startswith("inputs: input_ids int64 (batch, length), attention_mask int64 (batch, length);")


def test_labels_are_kept_by_modules_that_use_them(tmp_path: Path) -> None:
    class Uses(Net):
        def forward(self, batch: Any, scale: float = 1.0) -> Any:
            return self.net(batch["x"]) + batch["labels"][:, None]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self(batch).sum()
            return loss

    lines = export_graph(Uses(), BATCH, tmp_path / "a.pt2", "torch_export")
    assert lines[1].startswith("inputs: x float32 (batch, 4), labels float32 (batch);")
    assert len(DataLoader(TensorDataset(X))) == 6
