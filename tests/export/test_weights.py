"""Exported weights are the master weights to the bit, from modules and from files, and other bits are refused."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

import lightning_solo as solo
from lightning_solo.cli import main
from lightning_solo.cli.export import parse
from lightning_solo.errors import CapabilityError, CheckpointError, PresetError
from lightning_solo.export import weights as weights_module
from lightning_solo.export.sources import read
from lightning_solo.optim.split_optimizer import SplitOptimizer
from tests.messages import lines_with, mentions
from tests.modules import loader, regression
from tests.training import equal

pytestmark = pytest.mark.any_device

Make = Callable[..., Any]
WIDTH = 64
FP32 = "checkpoint_weights=fp32"


class Tied(nn.Module):
    """Two tied layers, a convolution in another order of memory, and a buffer of integers: (batch, 64) -> (batch, 1).

    Its second layer comes first in the optimizer, and one layer is never used.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.image = nn.Conv2d(8, 64, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.second(torch.relu(self.first(x))))
        x = x + self.image(x.view(-1, 8, 2, 4)).mean((2, 3))
        return self.head(x)


def tied(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
    module = regression(lightning.pytorch, Tied())
    net, options = module.net, {"lr": 1e-2, **options}
    # in an order of its own, with a second group
    groups = [
        {"params": [p for p in net.parameters() if p.dim() > 1][::-1]},
        {"params": [p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    module.configure_optimizers = lambda: optimizer(groups, **options)
    return module


def fitted(make_trainer: Make, preset: Any, overrides: Any = (), module: Any = None, **arguments: Any) -> Any:
    """Return the Trainer after a fit; its module's batch norm has seen ten batches."""
    trainer = make_trainer(lightning.pytorch, **solo.trainer_kwargs(preset, overrides), **arguments)
    trainer.fit(module or tied(), loader(10, 8, WIDTH))
    return trainer


def masters(trainer: Any) -> dict[str, Tensor]:
    """Return the fp32 master weights and buffers by the optimizer's own function, tied ones by both names."""
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, SplitOptimizer)
    module = trainer.lightning_module
    made = {key: value.detach().cpu() for key, value in module.state_dict().items()}
    made = {key: value.float() if value.is_floating_point() else value for key, value in made.items()}
    for name, p in module.named_parameters(remove_duplicate=False):
        made[name] = optimizer.master_weight(p).cpu()
    return made


def saved(trainer: Any, path: Path, **options: Any) -> Path:
    trainer.save_checkpoint(path, **{"weights_only": False, **options})
    return path


# --- masters to the bit ---


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("compact", []),
        ("compact", ["precision=bf16-mixed", "callback.compact_states.master_bits=32"]),
        ("compact", ["callback.compact_states.checkpoint_weights=fp32"]),
        ("compact_host", []),
        ("split_weights", []),
    ],
    ids=str,
)
def test_fp32_is_the_master_weights_from_module_and_file(
    make_trainer: Make, tmp_path: Path, preset: str, overrides: list[str]
) -> None:
    trainer = fitted(make_trainer, preset, overrides)
    expected = masters(trainer)
    rounded = trainer.lightning_module.state_dict()
    assert sum(not torch.equal(expected[name], rounded[name].cpu().float()) for name in expected) >= 4
    file = saved(trainer, tmp_path / "saved.ckpt")
    for source in (trainer.lightning_module, file, str(file)):
        ours = solo.export_weights(source)
        assert equal(ours, expected)
        assert ours["net.first.weight"] is ours["net.second.weight"]
    module = tied()
    module.load_state_dict(ours)
    assert equal(dict(module.state_dict()), expected)


def test_weights_of_another_optimizer(make_trainer: Make, tmp_path: Path) -> None:
    trainer = fitted(make_trainer, "split_weights", module=tied(torch.optim.SGD, momentum=0.9))
    file = saved(trainer, tmp_path / "saved.ckpt")
    for source in (trainer.lightning_module, file):
        assert equal(solo.export_weights(source), masters(trainer))


def test_bf16_is_the_weights_of_the_forward(make_trainer: Make, tmp_path: Path) -> None:
    trainer = fitted(make_trainer, "compact", ["precision=bf16-mixed", "callback.compact_states.master_bits=32"])
    expected = {name: value.cpu() for name, value in trainer.lightning_module.state_dict().items()}
    floating = {name: value.bfloat16() for name, value in expected.items() if value.is_floating_point()}
    for source in (trainer.lightning_module, saved(trainer, tmp_path / "saved.ckpt")):
        assert equal(solo.export_weights(source, "bf16"), {**expected, **floating})


def test_during_a_fit_a_later_step_leaves_the_export_alone(make_trainer: Make) -> None:
    exports: list[Any] = []

    class Export(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            copies = {name: value.clone() for name, value in masters(trainer).items()}
            exports.append((solo.export_weights(pl_module), copies))

    kwargs = solo.trainer_kwargs("compact", callbacks=[Export()])
    make_trainer(lightning.pytorch, **kwargs).fit(tied(), loader(3, 8, WIDTH))
    assert len(exports) == 3
    for ours, expected in exports:
        assert equal(ours, expected)
    assert not torch.equal(exports[0][0]["net.norm.bias"], exports[2][0]["net.norm.bias"])


def test_plain_modules_and_files(make_trainer: Make, tmp_path: Path) -> None:
    trainer = fitted(make_trainer, "baseline")
    expected = {name: value.cpu() for name, value in trainer.lightning_module.state_dict().items()}
    torch.save(expected, tmp_path / "weights.pt")
    file = saved(trainer, tmp_path / "saved.ckpt")
    for source in (trainer.lightning_module, file, tmp_path / "weights.pt"):
        assert equal(solo.export_weights(source), expected)
    bf16 = solo.export_weights(file, "bf16")
    assert bf16["net.head.weight"].dtype == torch.bfloat16
    assert bf16["net.norm.num_batches_tracked"] == 10
    assert equal(solo.export_weights(Tied()), dict(Tied().state_dict()))


def test_file_with_foreign_objects_is_read_without_their_code(tmp_path: Path) -> None:
    (tmp_path / "here").touch()

    class Loud:
        def __reduce__(self) -> Any:
            return shutil.copyfile, (str(tmp_path / "here"), str(tmp_path / "ran"))

    hyperparameters = {
        "loud": Loud(),
        "folder": Path("x"),
        "layer": nn.Linear(2, 2),
        "config": OmegaConf.create({"a": [1]}),
        "default": defaultdict(list, {"a": [1]}),
    }
    weights = {"weight": torch.ones(2)}
    torch.save({"state_dict": weights, "hyper_parameters": hyperparameters}, tmp_path / "saved.ckpt")
    assert equal(solo.export_weights(tmp_path / "saved.ckpt"), weights)
    assert not (tmp_path / "ran").exists()


# --- files that are written ---


def test_safetensors_and_pt_files(make_trainer: Make, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_model

    trainer = fitted(make_trainer, "compact")
    expected = masters(trainer)
    ours = solo.export_weights(trainer.lightning_module, output=tmp_path / "a" / "weights.safetensors")
    solo.export_weights(trainer.lightning_module, output=str(tmp_path / "weights.pt"))
    assert equal(torch.load(tmp_path / "weights.pt", weights_only=True), ours)
    module = tied()
    load_model(module, tmp_path / "a" / "weights.safetensors")
    assert equal(dict(module.state_dict()), expected)
    modes = [(tmp_path / name).stat().st_mode for name in ("a/weights.safetensors", "weights.pt")]
    assert modes[0] == modes[1]
    with safe_open(tmp_path / "a" / "weights.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "net.second.weight": "net.first.weight"}
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["weights.pt", "weights.safetensors"]


def test_output_is_whole_or_absent_and_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "weights.pt"
    solo.export_weights(nn.Linear(1, 1), output=output)
    before = output.read_bytes()
    with pytest.raises(CheckpointError, match=mentions(str(output), "overwrite=True", "--force")):
        solo.export_weights(nn.Linear(2, 2), output=output)

    def half(weights: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(CheckpointError, match=mentions(str(output), os.strerror(28))):
        solo.export_weights(nn.Linear(2, 2), output=output, overwrite=True)
    assert output.read_bytes() == before
    assert list(tmp_path.iterdir()) == [output]


# --- refusals ---


@pytest.mark.parametrize(
    ("preset", "overrides", "weights_only"),
    [
        ("compact", [], True),  # no corrections in the file
        ("compact", ["callback.compact_states.master_bits=16-stochastic"], False),
        ("compact", [f"callback.compact_states.{each}" for each in ("master_bits=16-stochastic", FP32)], False),
        ("baseline", ["precision=bf16-true"], False),
    ],
    ids=str,
)
def test_fp32_of_sixteen_bits_is_refused(
    make_trainer: Make, tmp_path: Path, preset: str, overrides: list[str], weights_only: bool
) -> None:
    trainer = fitted(make_trainer, preset, overrides)
    file = saved(trainer, tmp_path / "saved.ckpt", weights_only=weights_only)
    for source in [file] if weights_only else [file, trainer.lightning_module]:
        with pytest.raises(CheckpointError, match=mentions("fp32", "net.", "16 bits", "--dtype bf16")):
            solo.export_weights(source)
        assert solo.export_weights(source, "bf16")["net.first.weight"].dtype == torch.bfloat16


def test_frozen_weights_in_bf16_are_widened(make_trainer: Make, tmp_path: Path) -> None:
    module = tied()
    module.net.spare.requires_grad_(False)
    trainer = fitted(make_trainer, "compact", ["precision=bf16-true"], module=module)
    file = saved(trainer, tmp_path / "saved.ckpt")
    for source in (file, trainer.lightning_module):
        spare = solo.export_weights(source)["net.spare.weight"]
        assert equal(spare, module.net.spare.weight.detach().cpu().float())


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "list", "nothing"])
def test_file_that_is_no_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "saved.ckpt"
    torch.save([1] if damage == "list" else {"state_dict": nn.Linear(64, 64).state_dict()}, file)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-200])
    elif damage != "list":
        file.write_bytes({"text": b"hello", "empty": b"", "nothing": b""}[damage])
    if damage == "nothing":
        file.unlink()
    with pytest.raises(CheckpointError, match=mentions(str(file))):
        solo.export_weights(file)


def test_file_with_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "saved.ckpt"
    torch.save({"state_dict": {"weight": torch.full((64, 64), 3.0)}}, file)
    content = bytearray(file.read_bytes())
    content[content.index(torch.full((4,), 3.0).numpy().tobytes())] ^= 1
    file.write_bytes(content)
    assert not torch.equal(torch.load(file)["state_dict"]["weight"], torch.full((64, 64), 3.0))  # torch reads it
    with pytest.raises(CheckpointError, match=mentions(str(file), "checksum")):
        solo.export_weights(file)


def test_options_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PresetError, match=mentions("dtype='fp8'", "fp32 or bf16 or fp16")):
        solo.export_weights(nn.Linear(1, 1), "fp8")
    with pytest.raises(PresetError, match=mentions("output=", ".safetensors")):
        solo.export_weights(nn.Linear(1, 1), output=tmp_path / "weights.onnx")
    with pytest.raises(PresetError, match=mentions("--format weight", "did you mean 'weights'")):
        parse(["x.ckpt", "--format", "weight"])
    with pytest.raises(PresetError, match=mentions("--dtype fp8", "fp32, bf16, fp16")):
        parse(["x.ckpt", "--dtype", "fp8"])
    monkeypatch.setattr(weights_module, "is_installed", lambda package: package != "safetensors")
    remedy = ["pip install lightning-solo[safetensors]", "weights.pt"]
    with pytest.raises(CapabilityError, match=mentions(*remedy)):
        solo.export_weights(nn.Linear(1, 1), output=tmp_path / "weights.safetensors")


# --- the command, and the log at the end of a fit ---


def test_command_writes_the_last_checkpoint_of_a_run(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == code
        return "".join(capsys.readouterr())

    trainer = fitted(make_trainer, "compact")
    (tmp_path / "runs/first/checkpoints").mkdir(parents=True)
    saved(trainer, tmp_path / "runs/first/checkpoints/last.ckpt")
    written = "runs/first/checkpoints/last-fp32.safetensors"
    monkeypatch.chdir(tmp_path)
    assert written in command("export", "runs/first")
    from safetensors.torch import load_file

    expected = {name: value for name, value in masters(trainer).items() if name != "net.second.weight"}
    assert equal(dict(sorted(load_file(tmp_path / written).items())), dict(sorted(expected.items())))
    assert "--force" in command("export", "runs/first", code=2)
    assert written in command("export", "runs/first", "--force", "--dtype", "fp32")
    assert "runs/first/checkpoints/last.ckpt" in command("export", "runs", code=2)


def test_end_of_a_fit_says_which_bits_the_weights_have(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    bits = "callback.compact_states.master_bits"
    for overrides, words in (
        ([], ["11 of the module's 11", "24 bits", "solo.export_weights(module)"]),
        (["precision=bf16-mixed", f"{bits}=32"], ["4 of the module's 11", "32 bits"]),
        ([f"{bits}=16-stochastic"], ["11 of the module's 11", "no master weights"]),
    ):
        caplog.clear()
        with caplog.at_level("INFO"):
            fitted(make_trainer, "compact", overrides)
        assert len(lines_with(caplog.text, "compact_states: ", *words)) == 1


def test_a_damaged_checkpoint_is_refused_with_the_whole_ones_beside_it(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(1000)}, tmp_path / "step=10.ckpt")
    (tmp_path / "last.ckpt").write_bytes((tmp_path / "step=10.ckpt").read_bytes()[:1000])
    (tmp_path / "empty.ckpt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"last.ckpt is damaged.*; other checkpoints here: step=10.ckpt$"):
        read(tmp_path / "last.ckpt")


def test_outputs_inside_a_checkpoint_are_refused(tmp_path: Path) -> None:
    engine = tmp_path / "last.ckpt"
    (engine / "checkpoint").mkdir(parents=True)
    (engine / "latest").write_text("checkpoint", encoding="utf-8")
    (engine / "checkpoint" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match=mentions("inside the checkpoint", str(engine), f"{tmp_path}/net.pt")):
        solo.export_weights(nn.Linear(8, 8), "fp32", engine / "net.pt")
    with pytest.raises(CheckpointError, match=mentions("inside the checkpoint", f"--output {tmp_path}/few")):
        solo.export_quantized(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), engine / "checkpoint" / "few", 4, 8)
    assert sorted(path.name for path in engine.rglob("*")) == ["checkpoint", "latest", "mp_rank_00_model_states.pt"]
