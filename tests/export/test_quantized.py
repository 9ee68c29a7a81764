"""Exports in few bits have exactly so many bytes, load with torch alone, and compute what training has computed."""

from __future__ import annotations

import copy
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_solo.errors import CheckpointError, ConflictError, PresetError
from lightning_solo.export.quantized import export_quantized
from lightning_solo.nn.factorizing import factorize_linear
from lightning_solo.nn.fake_quantization import (
    Rounding,
    chosen_layers,
    levels_and_scales,
    round_weights,
    unfused_attention,
)
from lightning_solo.nn.packed_weights import PackedLinear, load, pack, unpack
from tests.messages import lines_with, mentions
from tests.models import small_model
from tests.modules import Mixture

MODEL = '''
import torch
from torch import nn


class Model(nn.Module):
    """A language model of bytes whose head has the weight of its embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(48, 32), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 96), nn.Linear(96, 32, bias=False)
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(3))

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(self.norm(x + self.down(torch.relu(self.up(x)))))
'''
LOADS = """
import sys

for name in ("lightning_solo", "torchao", "lightning"):
    sys.modules[name] = None  # importing it raises ImportError
sys.path[:0] = [{folder!r}, {models!r}]
import torch
from load import load
from plain_model import Model

with torch.no_grad():
    torch.save(load(Model(), {folder!r})(torch.arange(48)), {outputs!r})
"""
IDS = torch.arange(48)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a user's module, which knows torch alone."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "plain_model.py").write_text(MODEL, encoding="utf-8")
    return folder


@pytest.fixture
def model(models: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(models))
    from plain_model import Model  # type: ignore[import-not-found]

    trained = Model()
    for p in trained.parameters():
        p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) / 4
    return trained


def trained_outputs(model: nn.Module, rounding: Rounding, layers: Any) -> Tensor:
    """Return what the model computes in training."""
    round_weights(chosen_layers(model, rounding, layers), rounding)
    with torch.no_grad():
        output: Tensor = model.eval()(IDS)
    return output


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (16, 24)])
def test_packed_integers_are_unpacked_again(bits: int, shape: tuple[int, int]) -> None:
    levels = torch.randint(2**bits, shape, generator=torch.Generator().manual_seed(bits)) - 2 ** (bits - 1)
    levels = (levels * 2 + 1 if bits == 2 else levels).to(torch.int8)
    packed = pack(levels, bits)
    assert torch.equal(unpack(packed, bits, shape), levels)
    whole_parts = [-(-shape[0] * shape[1] * width // 8) for width in (8, 4, 2, 1) if bits & width]
    assert packed.nbytes == sum(whole_parts)


# a weight of 96 x 32 and one of 32 x 96: codes, and 2 bytes for the scale of each group or row
@pytest.mark.parametrize(
    ("bits", "group_size", "expected"),
    [(4, 32, 0.5 + 2 / 32), (3, 32, 3 / 8 + 2 / 32), (2, 32, 2 / 8 + 2 / 32), (8, 0, 1 + (96 + 32) * 2 / 6144)],
)
def test_a_weight_takes_so_many_bytes(model: Any, tmp_path: Path, bits: int, group_size: int, expected: float) -> None:
    export_quantized(model, tmp_path / "few", bits, group_size)
    stored = load_file(tmp_path / "few" / "model.safetensors")
    numbers = sum(stored[f"{layer}.{key}"].nbytes for layer in ("up", "down") for key in ("codes", "scales"))
    assert numbers / (2 * 32 * 96) == expected
    assert stored["embedding.weight"].dtype is torch.float32
    assert "head.weight" not in stored  # tied, and stored once
    layer = PackedLinear(64, 128, bits, group_size)
    assert layer.codes.nbytes + layer.scales.nbytes == 64 * 128 * bits // 8 + 2 * 64 * (128 // (group_size or 128))


@pytest.mark.parametrize(
    ("bits", "group_size", "activations", "layers", "tolerance"),
    [
        pytest.param(4, 32, "unchanged", "linear", 0.0, marks=pytest.mark.long),
        (3, 16, "unchanged", ["up", "head"], 0.0),
        pytest.param("fp8", 0, "unchanged", "*", 0.0, marks=pytest.mark.long),
        pytest.param(2, 0, "unchanged", "*", 0.0, marks=pytest.mark.long),
        pytest.param(8, 0, "unchanged", "linear", 0.0, marks=pytest.mark.long),
        pytest.param(8, 0, "int8", "*", 2e-6, marks=pytest.mark.long),
        pytest.param(2, 0, "int8", "linear", 2e-6, marks=pytest.mark.long),
        pytest.param(4, 32, "int8", "linear", 2e-6, marks=pytest.mark.long),
    ],
)
def test_it_loads_without_this_package_and_computes_the_same(
    model: Any,
    models: Path,
    tmp_path: Path,
    bits: Any,
    group_size: int,
    activations: str,
    layers: Any,
    tolerance: float,
) -> None:
    folder, outputs = tmp_path / "few", tmp_path / "outputs.pt"
    before = model(IDS)
    export_quantized(model, folder, bits, group_size, activations, layers)
    assert torch.equal(model(IDS), before)  # it stays as it is
    code = LOADS.format(folder=str(folder), models=str(models), outputs=str(outputs))
    subprocess.run([sys.executable, "-I", "-c", code], check=True, cwd=tmp_path)
    expected, loaded = trained_outputs(model, Rounding(bits, group_size, activations), layers), torch.load(outputs)
    assert float((loaded - expected).abs().max() / expected.abs().max()) <= tolerance
    assert not torch.equal(loaded, before)


def test_a_tied_head_has_the_codes_of_its_embedding(model: Any, tmp_path: Path) -> None:
    export_quantized(model, tmp_path / "few", layers=["head"])
    stored = load_file(tmp_path / "few" / "model.safetensors")
    assert {name for name in stored if "codes" in name} == {"head.codes"}
    loaded = load(type(model)(), tmp_path / "few")
    assert loaded.embedding.codes is loaded.head.codes
    assert torch.equal(loaded.embedding(IDS), loaded.head.weight)
    assert loaded.half().embedding(IDS).dtype is torch.float16
    assert torch.equal(loaded.head.in_fp32(), load(type(model)(), tmp_path / "few").head.weight)  # scales are bits


class Shared(nn.Module):
    """A layer, and a block of one, that have two names each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.second, self.again = self.first, self.block

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.second(self.block(self.first(x))))


def test_a_layer_with_two_names_is_rounded_under_both(tmp_path: Path) -> None:
    model, x, rounding = Shared(), torch.randn(4, 16), Rounding(3, 0)
    export_quantized(model, tmp_path / "few", 3, 0, layers=["first", "block.0"])
    loaded = load(Shared(), tmp_path / "few")
    assert type(loaded.second) is type(loaded.again[0]) is PackedLinear
    stored = load_file(tmp_path / "few" / "model.safetensors")
    assert {name for name in stored if "codes" in name} == {"first.codes", "block.0.codes"}
    with torch.no_grad():
        assert torch.equal(loaded(x), trained_outputs_of(model, x, rounding))


def trained_outputs_of(model: nn.Module, x: Tensor, rounding: Rounding) -> Tensor:
    round_weights(chosen_layers(model, rounding, ["first", "block.0"]), rounding)
    result: Tensor = model(x)
    return result


@pytest.mark.long
def test_transposed_layers_of_transformers_load(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, rounding, ids = small_model("GPT2").eval(), Rounding(4, 8), torch.arange(3, 20)[None]
    export_quantized(model, tmp_path / "few", 4, 8)
    loaded = load(small_model("GPT2"), tmp_path / "few")
    assert isinstance(loaded.transformer.h[0].mlp.c_fc, PackedLinear)
    round_weights(chosen_layers(model, rounding), rounding)
    with torch.no_grad():
        one, other = model(ids).logits, loaded(ids).logits
    assert torch.allclose(one, other, atol=1e-6)


def test_int8_inputs_are_multiplied_in_integers() -> None:
    torch.manual_seed(0)
    layer, weight, x = PackedLinear(16, 64, 8, 0, activations="int8"), torch.randn(16, 64), torch.randn(2, 5, 64)
    levels, scales = levels_and_scales(weight, 8, 0)
    layer.codes, layer.scales = levels.to(torch.int8), scales.view(torch.int16)
    step = x.abs().amax(-1, keepdim=True) / 127
    sums = (x / step).round().double() @ levels.double().t()  # whole numbers, exact in float64
    assert torch.allclose(layer(x).double(), sums * step.double() * scales[:, 0].double(), rtol=1e-6, atol=1e-9)
    assert layer(x).shape == (2, 5, 16)
    assert layer(x[0, 0]).shape == (16,)


def calibrated(module: nn.Module, folder: Path, *batches: Tensor, **options: Any) -> list[str]:
    """Export with fixed scales from batches; return the lines about it."""
    options = {"bits": 8, "group_size": 0, "activations": "int8_static", **options}
    return export_quantized(module, folder, calibrate=lambda module: [module(each) for each in batches], **options)


class Reached(nn.Module):
    """A layer for inputs of two and of three dimensions, and one that inputs of two dimensions don't reach."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.head(y if x.ndim == 2 else self.second(y))


def test_calibration_gives_each_layer_a_fixed_scale(tmp_path: Path) -> None:
    model, flat, deep = Reached(), torch.randn(6, 16), 2 * torch.randn(3, 5, 16)
    lines = calibrated(model, tmp_path / "few", flat, deep, layers=["first", "second"])
    assert "fixed scales" in lines[0]
    loaded, expected = load(Reached(), tmp_path / "few"), max(flat.abs().max(), deep.abs().max()) / 127
    scale = loaded.first.input_scale.view(torch.float32)
    assert float(scale) == pytest.approx(float(expected), rel=1e-6)
    for x in (flat, deep, 10 * flat):  # what is larger than in calibration is cut
        numbers = (x / scale).round().clamp(-128, 127)
        weight = loaded.first.weight.double()
        sums = numbers.double() @ weight.t() * scale.double() + model.first.bias.double()
        assert torch.allclose(loaded.first(x).double(), sums, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert float((loaded(deep) - model(deep)).norm() / model(deep).norm()) < 0.03
    assert loaded.bfloat16()(deep.bfloat16()).dtype is torch.bfloat16
    assert torch.equal(loaded.first.input_scale.view(torch.float32), scale)


def test_a_layer_that_calibration_does_not_reach_stays(tmp_path: Path) -> None:
    model = Reached()
    lines = calibrated(model, tmp_path / "few", torch.randn(6, 16), layers="*")
    assert lines_with(lines[0], "second.weight", "no calibration batch")
    assert type(load(Reached(), tmp_path / "few").second) is nn.Linear
    for number, (batches, words, error) in enumerate(
        [
            ((), ("ran none of first, second", "int8_static", "calibrate="), PresetError),
            ((torch.zeros(2, 16),), ("first", "zero"), PresetError),
            ((torch.full((2, 16), torch.inf),), ("inputs of first", "finite"), ConflictError),
        ]
    ):
        with pytest.raises(error, match=mentions(*words)):
            calibrated(model, tmp_path / str(number), *batches, layers=["first", "second"])
        assert not (tmp_path / str(number)).exists()
    with pytest.raises(PresetError, match=mentions("int8_static", "calibrate=lambda")):
        export_quantized(model, tmp_path / "none", 8, 0, "int8_static")
    with pytest.raises(PresetError, match="doesn't use"):
        calibrated(model, tmp_path / "none", torch.randn(6, 16), activations="int8")
    loader: Any = torch.utils.data.DataLoader(torch.randn(6, 16))  # type: ignore[arg-type]
    with pytest.raises(PresetError, match=mentions("DataLoader", "calibrate=lambda module:")):
        export_quantized(model, tmp_path / "none", 8, 0, "int8_static", calibrate=loader)
    assert not any(part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize("bits", [4, "fp8"])
def test_attention_and_experts_load_and_compute_the_same(tmp_path: Path, bits: Any) -> None:
    model, x, rounding = Mixture(), torch.randn(2, 5, 16), Rounding(bits, 8)
    calibrated(model, tmp_path / "static", x, bits=bits, group_size=8)
    export_quantized(model, tmp_path / "few", bits, 8)
    loaded, choice = load(Mixture(), tmp_path / "few"), chosen_layers(model, rounding)
    stored = load_file(tmp_path / "few" / "model.safetensors")
    numbers = sum(value.nbytes for name, value in stored.items() if name.endswith((".codes", ".scales")))
    count = sum(weight.parameter.numel() for weight in choice.weights.values())
    assert numbers == count * ((8 if bits == "fp8" else bits) / 8 + 2 / 8)
    round_weights(choice, rounding)
    with torch.no_grad(), unfused_attention():
        expected = model.eval()(x)
        for way in (loaded, copy.deepcopy(loaded)):
            assert torch.allclose(way(x), expected, atol=1e-6)
        mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])  # torch would make a nested tensor of it
        assert loaded.encoder(x, src_key_padding_mask=mask).shape == x.shape
        difference = load(Mixture(), tmp_path / "static")(x) - expected
    assert 0 < float(difference.norm() / expected.norm()) < 0.03  # of rounded inputs
    assert loaded.experts.up.shape == (2, 24, 16)
    assert "Packed" in type(loaded.encoder.layers[0].self_attn).__name__


def test_factors_are_rounded_each_and_load(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))
    fresh = copy.deepcopy(module)
    factorize_linear(module, 4, ["0", "2"])
    export_quantized(module, tmp_path / "few", 8, 0)
    stored = load_file(tmp_path / "few" / "model.safetensors")
    assert {name for name in stored if "codes" in name} >= {"0.0.codes", "0.1.codes", "2.0.codes", "2.1.codes"}
    file = tmp_path / "few" / "load.py"
    assert "from lightning_solo" not in file.read_text()
    loaded, x = runpy.run_path(str(file))["load"](fresh, file.parent), torch.randn(5, 16)
    expected = module(x).detach()
    torch.testing.assert_close(loaded(x), expected, rtol=0, atol=0.03 * float(expected.abs().max()))
    assert not torch.equal(loaded(x), expected)


def test_what_cannot_be_exported_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(PresetError, match=mentions("last.ckpt", "takes a module", "--format quantized")):
        export_quantized("last.ckpt", tmp_path / "few")  # type: ignore[arg-type]
    with pytest.raises(PresetError, match=mentions("bits=1", "bits=2 to 8")):
        export_quantized(model, tmp_path / "few", 1)
    sizes: tuple[Any, ...] = ("32", 32.0, -1)
    for size in sizes:
        with pytest.raises(PresetError, match=mentions(f"group_size={size!r}", "group_size=0 or more")):
            export_quantized(model, tmp_path / "few", 4, size)
    with pytest.raises(PresetError, match=mentions("group_size=64", "up (32)", "group_size=32")):
        export_quantized(model, tmp_path / "few", 4, 64)
    export_quantized(model, tmp_path / "few")
    with pytest.raises(CheckpointError, match="overwrite=True"):
        export_quantized(model, tmp_path / "few")
    again = load(copy.deepcopy(model), tmp_path / "few")
    with pytest.raises(ConflictError, match=mentions("up, down", "already", "load(module, folder)")):
        export_quantized(again, tmp_path / "again")
    before = json.loads((tmp_path / "few" / "config.json").read_text(encoding="utf-8"))
    model.down.weight.data[0] = torch.inf
    with pytest.raises(ConflictError, match=mentions("down", "finite")):
        export_quantized(model, tmp_path / "few", 8, overwrite=True)
    assert json.loads((tmp_path / "few" / "config.json").read_text(encoding="utf-8")) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["few"]
    with pytest.raises(RuntimeError, match=r"embedding\.weight"):
        load(nn.ModuleDict({"up": nn.Linear(8, 8), "down": nn.Linear(8, 8)}), tmp_path / "few")
