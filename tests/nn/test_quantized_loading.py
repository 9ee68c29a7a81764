"""load_quantized gives the weights of a folder in few bits, mapped, and finds them again at the next start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_solo as solo
from lightning_solo.errors import CheckpointError, NothingToDoError, PresetError
from lightning_solo.nn import quantized_loading
from lightning_solo.nn.quantized import QuantizedEmbedding, QuantizedLinear, quantized, quantized_weights_of
from tests.messages import mentions

pytest.importorskip("safetensors")
WIDTH = 48


class Language(nn.Module):
    """A small language model with a tied head, buffers of both kinds, and experts."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(40, WIDTH), nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)) for _ in range(2))
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 40, bias=False)
        self.register_buffer("frequencies", torch.arange(WIDTH) / WIDTH, persistent=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids) + self.frequencies.to(self.embedding.weight.dtype)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(self.norm(hidden))


def saved(folder: Path, shards: int = 2, dtype: torch.dtype = torch.bfloat16) -> Language:
    """Save a model in shards, and return it."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = Language().to(dtype).eval()
    model.norm.running_mean.normal_()
    folder.mkdir(parents=True, exist_ok=True)
    states = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    names = [f"model-{number}.safetensors" for number in range(shards)] if shards > 1 else ["model.safetensors"]
    index = {name: names[number % shards] for number, name in enumerate(states)}
    for file in names:
        save_file({name: value for name, value in states.items() if index[name] == file}, folder / file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return model


def load(folder: Path, **options: Any) -> Any:
    return solo.load_quantized(Language, folder, cache=folder.parent / "cache", **options).eval()


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_weights_are_those_of_the_folder_quantized_and_mapped(tmp_path: Path, format: str, shards: int) -> None:
    model = saved(tmp_path / "model", shards)
    loaded = load(tmp_path / "model", format=format)
    assert not any(p.requires_grad for p in loaded.parameters())
    assert loaded.head.weight is loaded.embedding.weight
    for index in range(2):
        for number in range(2):
            mine, plain = loaded.layers[index][number], model.layers[index][number]
            assert type(mine) is QuantizedLinear
            assert torch.equal(mine.weight, quantized(plain.weight, format).dequantized())
            assert mine.weight.dtype is torch.bfloat16
            assert torch.equal(mine.bias, plain.bias)
            plain.weight.data = mine.weight
    ids = torch.arange(6)
    assert torch.equal(loaded(ids), model(ids))
    assert torch.equal(loaded.frequencies, Language().frequencies)


def test_second_start_quantizes_nothing_and_a_changed_file_or_setting_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[Any]()
    monkeypatch.setattr(quantized_loading, "quantized", lambda *args: calls.append(args) or quantized(*args))
    folder = tmp_path / "model"
    saved(folder)
    first = load(folder)
    assert len(calls) == 4
    second = load(folder)
    assert len(calls) == 4
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    load(folder, format="int8")
    assert len(calls) == 8
    shutil.copytree(folder, tmp_path / "copies" / "model")
    solo.load_quantized(Language, tmp_path / "copies" / "model", cache=tmp_path / "cache")  # the same files
    assert len(calls) == 8
    file = min((tmp_path / "cache").rglob("*.pt"))
    file.write_bytes(file.read_bytes()[:100])  # cut off
    load(folder)
    load(folder, format="int8")
    assert len(calls) == 9
    content = bytearray((folder / "model-0.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model-0.safetensors").write_bytes(content)
    load(folder)
    assert len(calls) == 13
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=mentions("cache=<a folder with room>")):
        solo.load_quantized(Language, folder, cache=tmp_path / "file")


def test_embeddings_and_patterns(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    loaded = load(tmp_path / "model", embeddings="int8", layers=["layers.*.0"])
    assert isinstance(loaded.positions, QuantizedEmbedding)
    assert type(loaded.embedding) is nn.Embedding  # tied to the head
    assert [type(layer) for layer in loaded.layers[0]] == [QuantizedLinear, nn.Linear]
    loaded = load(tmp_path / "model", embeddings="host", head="host")
    weight = loaded.head.quantized_weights["weight"]
    assert weight.format == "host"
    assert weight is loaded.embedding.quantized_weights["weight"]
    plain = load(tmp_path / "model", layers=["layers.*"])
    assert torch.equal(loaded(torch.arange(6)), plain(torch.arange(6)))
    loaded = load(tmp_path / "model", embeddings="int8", head="int8")
    assert loaded.head.quantized_weights["weight"] is loaded.embedding.quantized_weights["weight"]
    with pytest.raises(NothingToDoError, match="head=int8"):
        load(tmp_path / "model", head="int8")
    with pytest.raises(PresetError, match="nf5"):
        load(tmp_path / "model", format="nf5")


def config(folder: Path, **values: Any) -> None:
    (folder / "config.json").write_text(json.dumps(values))


def without(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        states = load_file(folder / "model.safetensors")
        del states[name]
        save_file({**states, "another": torch.zeros(2)}, folder / "model.safetensors")

    return change


def reshaped(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    states = load_file(folder / "model.safetensors")
    save_file({**states, "positions.weight": torch.zeros(9, WIDTH)}, folder / "model.safetensors")


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def float8(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    states = load_file(folder / "model.safetensors")
    name = "layers.0.0.weight"
    save_file({**states, name: states[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors")


def only_adapters(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text("{}")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


BROKEN: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no folder": (shutil.rmtree, ("hf download",)),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ("no weights", "save_pretrained")),
    "pickled": (pickled, ("pytorch_model.bin", "save_pretrained")),
    "missing tensor": (without("layers.1.0.weight"), ("layers.1.0.weight", "another")),
    "missing buffer": (without("norm.running_mean"), ("norm.running_mean",)),
    "wrong shape": (reshaped, ("positions.weight", "(9, 48)", "(8, 48)")),
    "cut off": (cut, ("model.safetensors", "download")),
    "float8": (float8, ("layers.0.0.weight", "float8", "16-bit")),
    "quantized": (lambda folder: config(folder, quantization_config={"quant_method": "gptq"}), ("gptq", "16-bit")),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), ("config.json",)),
    "adapters": (only_adapters, ("adapter_config.json", "base")),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_folders_are_named(tmp_path: Path, kind: str) -> None:
    change, words = BROKEN[kind]
    saved(tmp_path / "model", shards=1)
    change(tmp_path / "model")
    with pytest.raises(CheckpointError, match=mentions(*words)):
        load(tmp_path / "model")


def test_tensors_that_the_module_lacks_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved(tmp_path / "model", shards=1)
    path = tmp_path / "model" / "model.safetensors"
    save_file({**load_file(path), "layers.2.0.weight": torch.zeros(2)}, path)
    with pytest.warns(UserWarning, match=r"layers\.2\.0\.weight"):
        load(tmp_path / "model")


def test_missing_shard_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    (tmp_path / "model" / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=mentions("model-1.safetensors", "download")):
        load(tmp_path / "model")


def test_models_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 2, "num_hidden_layers": 2}
    of_experts = {"moe_intermediate_size": 48, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 16}
    configs = [transformers.LlamaConfig(**small), transformers.Qwen3MoeConfig(**small, **of_experts)]
    for settings, count in zip(configs, (2 * 7, 2 * (4 + 2)), strict=True):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(settings)
        model.save_pretrained(tmp_path / "model")
        build = lambda settings=settings: transformers.AutoModelForCausalLM.from_config(settings)  # noqa: E731
        loaded = solo.load_quantized(build, tmp_path / "model", cache=tmp_path / "cache")
        weights = quantized_weights_of(loaded)
        assert len(weights) == count
        for name in weights:
            plain, mine = model.get_parameter(name), weights[name].dequantized()
            assert 0.05 < (mine - plain).norm() / plain.norm() < 0.12
            plain.data = mine
        ids = torch.arange(12)[None]
        assert not any(tensor.is_meta for tensor in [*loaded.parameters(), *loaded.buffers()])
        assert torch.equal(model(ids).logits, loaded(ids).logits)
        shutil.rmtree(tmp_path / "model")
