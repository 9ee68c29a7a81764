"""A pruned export has fewer bytes, and loads bit for bit in a process without this package."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

import lightning_solo as solo
from lightning_solo.cli import export as command
from lightning_solo.cli import train
from lightning_solo.cli.pruned_run import write_pruned
from lightning_solo.errors import CheckpointError, NothingToDoError, PresetError
from lightning_solo.export.pruned import export_pruned
from lightning_solo.export.sparse_weights import compressed, expanded, load, weights
from tests.messages import mentions
from tests.modules import Stack, loader, regression
from tests.training import equal


def sparse(share: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    return weight.masked_fill(torch.rand(shape, generator=generator) < share, 0).to(dtype)


@pytest.mark.parametrize(
    ("weight", "form"),
    [
        (sparse(0.0, 64, 64), "dense"),
        (sparse(0.5, 63, 65), "bits"),
        (sparse(0.95, 63, 65), "gaps"),
        (sparse(0.999, 512, 64), "gaps"),  # gaps above 255
        (sparse(0.9, 64, 64, dtype=torch.bfloat16), "gaps"),
        (sparse(0.5, 64, 64, dtype=torch.float64).T, "bits"),
        (torch.zeros(1000), "gaps"),
        (torch.zeros(0, 3), "dense"),
        (torch.tensor(3), "dense"),
        (torch.arange(600).eq(599).long(), "gaps"),
        (torch.tensor([0.0] * 40 + [-1e-45, float("nan"), float("inf")]), "gaps"),
        (torch.arange(64) > 70, "gaps"),
    ],
    ids=str,
)
def test_each_form_is_the_shortest_and_expands_to_the_same_bits(weight: Tensor, form: str) -> None:
    chosen, parts = compressed(weight)
    assert chosen == form
    kept = int((weight != 0).sum())
    size = weight.element_size()
    assert sum(part.nbytes for part in parts.values()) <= min(weight.nbytes, -(-weight.numel() // 8) + kept * size + 3)
    again = expanded(chosen, parts, list(weight.shape))
    assert (again.dtype, again.shape) == (weight.dtype, weight.shape)
    assert again.contiguous().view(-1).view(torch.uint8).equal(weight.contiguous().view(-1).view(torch.uint8))


class Tied(nn.Module):
    """An embedding with a tied head, and a wide layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 64)
        self.body = nn.Linear(64, 1024)
        self.back = nn.Linear(1024, 64)
        self.head = nn.Linear(64, 8, bias=False)
        self.head.weight = self.embed.weight


def pruned_module() -> nn.Module:
    torch.manual_seed(0)
    module = Tied()
    for layer in (module.body, module.back):
        weight = layer.weight.data
        weight.masked_fill_(weight.abs() <= weight.abs().flatten().kthvalue(round(0.9 * weight.numel())).values, 0)
    return module


def test_export_of_nine_tenths_zeros_is_small_and_loads_without_the_package(tmp_path: Path) -> None:
    module = pruned_module()
    lines = solo.export_pruned(module, tmp_path / "small")
    assert "bytes: " in lines[1]
    assert "2 of 5 tensors" in lines[0]
    files = {file.name: file.stat().st_size for file in (tmp_path / "small").iterdir()}
    assert set(files) == {"model.safetensors", "config.json", "load.py"}
    dense = sum(p.nbytes for p in module.parameters())
    assert sum(files.values()) < 0.2 * dense  # 0.1 x (4 + 1) / 4, and biases, embedding and names
    torch.save(module.state_dict(), tmp_path / "expected.pt")
    code = """
        import sys, torch
        class Absent:
            def find_spec(self, name, *_):
                if name.split(".")[0] in ("lightning_solo", "torchao", "lightning"):
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Absent())
        from load import weights
        state, expected = weights("."), torch.load("../expected.pt")
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        assert state["head.weight"] is state["embed.weight"]
        print("equal")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path / "small",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "equal", done.stderr
    again = load(Tied(), tmp_path / "small")
    assert equal(again.state_dict(), module.state_dict())
    assert again.head.weight is again.embed.weight


def test_a_checkpoint_of_split_weights_is_exported_with_its_masters(tmp_path: Path, make_trainer: object) -> None:
    preset = {"precision": "bf16-true", "callback": {"compact_states": {}, "pruning": {"amount": 0.9}}}
    module = regression(L, Stack(width=32))
    trainer = make_trainer(L, **solo.trainer_kwargs(preset))  # type: ignore[operator]
    trainer.fit(module, loader(2, width=32))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert command.run([str(tmp_path / "last.ckpt"), "--format", "pruned", "--output", str(tmp_path / "small")]) == 0
    assert equal(weights(tmp_path / "small"), solo.export_weights(module))
    zeros = int((weights(tmp_path / "small")["net.blocks.0.up.weight"] == 0).sum())
    assert zeros == round(0.9 * 32 * 128)


def test_exports_that_save_nothing_or_replace_something_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NothingToDoError, match=mentions("callback.pruning.amount=0.9", "--format weights")):
        export_pruned(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(64)), tmp_path / "dense")  # the norm's bias is 0
    assert not (tmp_path / "dense").exists()
    with pytest.raises(PresetError, match=mentions("output")):
        export_pruned(pruned_module())
    export_pruned(pruned_module(), tmp_path / "small")
    with pytest.raises(CheckpointError, match=mentions("small", "exists", "--force")):
        export_pruned(pruned_module(), tmp_path / "small")
    export_pruned(pruned_module(), tmp_path / "small", "bf16", overwrite=True)
    assert weights(tmp_path / "small")["body.weight"].dtype == torch.bfloat16


@pytest.mark.long
def test_the_command_measures_a_run_without_half_of_its_channels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["+solo/callback=pruning", "solo.callback.pruning.amount=0.5", "solo.callback.pruning.pattern=channels"]
    sizes = ["model.width=32", "model.depth=1", "trainer.max_steps=2"]
    train.run(["model=byte_gpt_tiny", "solo=baseline", f"root={tmp_path}", "run=first", *sizes, *settings])
    capsys.readouterr()
    assert command.run([str(tmp_path / "first"), "--format", "pruned", "--output", str(tmp_path / "small")]) == 0
    lines = capsys.readouterr().out.splitlines()
    losses = [line.split() for line in lines if line.startswith("validation/loss:")]
    assert losses[0][1] == losses[0][3]
    assert len([line for line in lines if line.startswith("seconds of")]) == 2
    alone = tmp_path / "alone.ckpt"
    shutil.copy(tmp_path / "first" / "checkpoints" / "last.ckpt", alone)
    assert not [line for line in write_pruned(alone, tmp_path / "of_file") if line.startswith("seconds of")]
    assert weights(tmp_path / "small")["blocks.0.mlp.up.weight"].shape == (64, 32)
