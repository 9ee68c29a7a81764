"""A factorized export has the bytes of its factors, and computes the same in a process without this package."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn

import lightning_solo as solo
from lightning_solo.errors import CheckpointError, NothingToDoError
from lightning_solo.export.factorized import export_factorized
from lightning_solo.nn import packed_weights
from lightning_solo.nn.factorized_layers import load
from lightning_solo.nn.factorizing import factorize_embedding, factorize_linear, merge_factors
from tests.conftest import long
from tests.messages import mentions
from tests.modules import Stack, loader, regression
from tests.training import equal

MODULE = '''
from torch import nn

class Tied(nn.Module):
    """A language model with a tied head, and a layer with two names."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.back = nn.Embedding(40, 16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.again, self.head = self.back, nn.Linear(16, 40)
        self.other = nn.Linear(16, 64)
        self.other.weight = self.body.weight
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(self.again(self.back(self.body(x).relu() + self.other(x)).repeat(1, 1, 4).relu()))
'''


@pytest.fixture
def model() -> Any:
    names: dict[str, Any] = {}
    exec(MODULE, names)
    torch.manual_seed(0)
    return names["Tied"]


@pytest.mark.parametrize("dtype", [long(torch.float32), long(torch.bfloat16)])
def test_it_loads_without_this_package_and_computes_the_same(model: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    module = model().to(dtype)
    factorize_linear(module, 5)
    factorize_embedding(module, 6)
    lines = solo.export_factorized(module, tmp_path / "small")
    assert "6 layers of rank 5 to 6" in lines[0]
    dense = sum(p.nbytes for p in model().to(dtype).parameters())
    assert lines[1].startswith(f"bytes: {dense / 1024:.2f} KiB before")
    files = {file.name: file.stat().st_size for file in (tmp_path / "small").iterdir()}
    assert set(files) == {"model.safetensors", "config.json", "load.py"}
    assert files["model.safetensors"] < sum(p.nbytes for p in module.parameters()) + 2500  # names and shapes
    ids = torch.arange(12).view(2, 6)
    torch.save((ids, module(ids)), tmp_path / "expected.pt")
    (tmp_path / "small" / "model.py").write_text(MODULE)
    code = f"""
        import sys, torch
        class Absent:
            def find_spec(self, name, *_):
                if name.split(".")[0] in ("lightning_solo", "torchao", "lightning"):
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Absent())
        from load import load
        from model import Tied
        ids, expected = torch.load("../expected.pt")
        module = load(Tied().to({dtype}), ".")
        assert torch.equal(module(ids), expected)
        assert module.head[1].weight is module.embedding[0].weight
        assert module.head[0].weight is module.embedding[1].weight
        assert module.other[0].weight is module.body[0].weight
        assert module.again is module.back
        assert sum(p.numel() for p in module.parameters()) == {sum(p.numel() for p in module.parameters())}
        module(ids).sum().backward()
        print("equal")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path / "small", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.parametrize("preset", [{}, {"precision": "bf16-true", "callback": {"compact_states": {}}}])
def test_checkpoints_have_products_as_weights_and_factors_in_the_folder(
    make_trainer: Callable[..., Any], tmp_path: Path, preset: dict[str, Any]
) -> None:
    preset = {**preset, "callback": {"low_rank": {"rank": 4}, **preset.get("callback", {})}}
    module = regression(L, Stack(width=16))
    trainer = make_trainer(L, **solo.trainer_kwargs(preset))
    trainer.fit(module, loader(4, width=16))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    fresh = regression(L, Stack(width=16))
    plain = solo.export_weights(tmp_path / "last.ckpt")
    fresh.load_state_dict(plain)
    assert equal(plain, solo.export_weights(module))
    export_factorized(tmp_path / "last.ckpt", tmp_path / "small")
    loaded = load(regression(L, Stack(width=16)), tmp_path / "small")
    x = torch.randn(3, 16)
    assert torch.allclose(loaded.net(x), fresh.net(x), atol=1e-6)  # fp32 masters in both
    again = load(Stack(width=16), _of_net(module, tmp_path / "net"))
    assert isinstance(again.blocks[0].up, nn.Sequential)
    narrow = solo.export_weights(tmp_path / "last.ckpt", "bf16")
    assert all(value.dtype == torch.bfloat16 for value in narrow.values())


def _of_net(module: Any, folder: Path) -> Path:
    export_factorized(module.net, folder)
    return folder


def test_what_has_no_factors_is_refused(model: Any, tmp_path: Path) -> None:
    module = model()
    with pytest.raises(NothingToDoError, match=mentions("Tied", "+callback=low_rank", "--rank 64", "factorize_linear")):
        export_factorized(module, tmp_path / "small")
    factorize_linear(module, 4)
    export_factorized(module, tmp_path / "small")
    with pytest.raises(CheckpointError, match=mentions("overwrite=True")):
        export_factorized(module, tmp_path / "small")
    with pytest.raises(AttributeError, match="body"):
        load(Stack(width=16), tmp_path / "small")
    merge_factors(module)
    with pytest.raises(NothingToDoError, match=mentions("+callback=low_rank")):
        export_factorized(module, tmp_path / "other")


def test_factors_that_layers_share_are_rounded_and_those_of_embeddings_refused(model: Any, tmp_path: Path) -> None:
    module = model()
    factorize_linear(module, 4)
    solo.export_quantized(module, tmp_path / "few", bits=8, group_size=0)
    loaded, ids = packed_weights.load(model(), tmp_path / "few"), torch.arange(12).view(2, 6)
    assert loaded.again is loaded.back
    expected = module(ids).detach()
    torch.testing.assert_close(loaded(ids), expected, rtol=0, atol=0.03 * float(expected.abs().max()))
    assert not torch.equal(loaded(ids), expected)
    factorize_embedding(module, 4)
    with pytest.raises(solo.ConflictError, match=mentions("factorized", "solo.merge_factors(module)")):
        solo.export_quantized(module, tmp_path / "other", bits=8, group_size=0)
    merge_factors(module)
    solo.export_quantized(module, tmp_path / "other", bits=8, group_size=0)
