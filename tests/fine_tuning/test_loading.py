"""A folder's model has every weight from its files, mapped; whatever is missing or wrong is an error."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_solo.errors import CheckpointError, PresetError
from lightning_solo.fine_tuning.loading import config_of, folder_of, load
from lightning_solo.planner.fake_modules import empty_parameters
from tests.fine_tuning.conftest import KINDS
from tests.messages import mentions

transformers = pytest.importorskip("transformers")
Folder = Callable[..., Path]


def model_in(folder: Path, **options: Any) -> Any:
    return load("AutoModelForCausalLM", folder, config_of(folder), **options)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.long] * (k not in ("Llama", "Mixtral"))) for k in KINDS]
)
def test_logits_equal_those_of_from_pretrained(kind: str, model_folder: Folder) -> None:
    folder = model_folder(kind)
    model, expected = model_in(folder), transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(12).view(2, 6)
    assert model.training
    assert not expected.training
    assert torch.equal(model.eval()(ids).logits, expected(ids).logits)
    assert all(p.requires_grad for p in model.parameters())


def test_tied_weights_are_one_and_frequencies_are_computed(model_folder: Folder) -> None:
    folder = model_folder("Llama", tie_word_embeddings=True)
    model = model_in(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    fresh = transformers.AutoModelForCausalLM.from_config(config_of(folder)).model.rotary_emb
    assert torch.equal(model.model.rotary_emb.inv_freq, fresh.inv_freq)


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_type_is_that_of_the_files_or_the_chosen_one(dtype: str, expected: torch.dtype, model_folder: Folder) -> None:
    model = model_in(model_folder("Llama", dtype=torch.bfloat16), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {expected}
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32


def test_in_a_plan_nothing_is_read(model_folder: Folder, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(model_folder("Qwen3") / "config.json", folder)
    with empty_parameters():
        model = model_in(folder)
    assert all(p.is_meta for p in model.parameters())
    assert not model.model.rotary_emb.inv_freq.is_meta


CODE = """
import sys, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from lightning_solo.fine_tuning.loading import config_of, folder_of, load

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024

folder, small = Path(sys.argv[1]), Path(sys.argv[2])
load("AutoModelForCausalLM", small, config_of(small))  # what the first use imports
before = anonymous()
model = load("AutoModelForCausalLM", folder, config_of(folder))
assert all(p.flatten()[-1].isfinite() for p in model.parameters())
print(anonymous() - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.long
def test_weights_stay_mapped(model_folder: Folder, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=8, vocab_size=4096, num_attention_heads=8
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "big", max_shard_size="20MB")
    small = model_folder("Llama", dtype=torch.bfloat16)
    line = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "big"), str(small)], check=True, capture_output=True, text=True
    ).stdout
    grown, weights = map(int, line.split())
    assert weights > 60 * 2**20
    assert grown < weights / 8


# --- bad input ---


@pytest.fixture
def folder(model_folder: Folder, tmp_path: Path) -> Path:
    """A copy of a folder, to damage."""
    return shutil.copytree(model_folder("Llama"), tmp_path / "model")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def change(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> str:
    """Change the tensors of the last shard; return its name."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(shards(folder)[-1])
    edit(tensors)
    save_file(tensors, shards(folder)[-1], {"format": "pt"})
    return shards(folder)[-1].name


def test_missing_tensor(folder: Path) -> None:
    file = change(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=mentions("model.norm.weight", str(folder))):
        model_in(folder)
    assert file


def test_tensor_of_another_shape(folder: Path) -> None:
    file = change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(CheckpointError, match=mentions("model.norm.weight", file, "(7,)", "(16,)")):
        model_in(folder)


def test_unexpected_tensor_is_refused_unless_it_is_named(folder: Path) -> None:
    file = change(folder, lambda tensors: tensors.update({"model.extra.weight": torch.ones(7)}))
    with pytest.raises(
        CheckpointError, match=mentions("model.extra.weight", file, "model.unused=[model.extra.weight]")
    ):
        model_in(folder)
    model_in(folder, unused=["model.extra.*"])


def test_truncated_shard(folder: Path) -> None:
    file = shards(folder)[1]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=mentions(str(file))):
        model_in(folder)


def test_missing_shard(folder: Path) -> None:
    file = shards(folder)[1]
    file.unlink()
    with pytest.raises(CheckpointError, match=mentions(str(folder), file.name)):
        model_in(folder)


def test_no_weights(folder: Path) -> None:
    for file in shards(folder):
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=mentions(str(folder), "save_pretrained")):
        model_in(folder)


def test_no_folder() -> None:
    command = "hf download meta/Llama-3 --local-dir Llama-3"
    with pytest.raises(CheckpointError, match=mentions("model.path=meta/Llama-3", command, "write model.path=Llama-3")):
        folder_of("meta/Llama-3")
    with pytest.raises(CheckpointError, match=mentions("hf download <owner>/<name> --local-dir ./Llama-3")):
        folder_of("./Llama-3")


def test_folder_without_configuration_or_with_an_unknown_one(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(CheckpointError, match=mentions("config.json", "unheard_of")):
        config_of(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=mentions("config.json")):
        config_of(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=mentions(str(folder), "no config.json")):
        config_of(folder)


def test_adapter_folder_and_quantized_folder_are_refused_by_name(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    quantized = {**config, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (folder / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(CheckpointError, match=mentions("quantized", "bitsandbytes", "16-bit")):
        config_of(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=mentions("adapter_config.json", "base")):
        config_of(folder)


def test_unknown_type(folder: Path) -> None:
    with pytest.raises(PresetError, match=mentions("model.dtype='fp8'", "bfloat16")):
        model_in(folder, dtype="fp8")
