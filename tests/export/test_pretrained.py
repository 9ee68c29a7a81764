"""Exported folders answer as the trained model, loaded by transformers and peft alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

import lightning_solo as solo
from lightning_solo.cli.export import parse
from lightning_solo.cli.export import run as export
from lightning_solo.errors import (
    BudgetError,
    CapabilityError,
    CheckpointError,
    ConflictError,
    NothingToDoError,
    PresetError,
)
from lightning_solo.export.few_bits import exact_on_cpus
from lightning_solo.export.pretrained import export_pretrained
from lightning_solo.export.trained_models import ARCHITECTURE, architecture_of
from lightning_solo.nn import adaptation
from lightning_solo.nn.adaptation import adapter_parameters
from lightning_solo.nn.quantized import quantized
from lightning_solo.techniques.adapters.technique import Adapters
from lightning_solo.techniques.compact_states.technique import CompactStates
from lightning_solo.techniques.quantized_base.technique import QuantizedBase
from tests.export.conftest import Models, Tuned, answers, far, noise, save_tokenizer
from tests.messages import mentions
from tests.models import small_model
from tests.modules import regression

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("safetensors")
Make = Callable[..., Any]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # of peft 0.21
]
FAMILIES = {
    "Llama": {"tie_word_embeddings": False},
    "tied Llama": {"tie_word_embeddings": True},
    "Qwen3": {},
    "Gemma2": {},
    "GPT2": {},
    "Mixtral": {"num_local_experts": 4},
}


def randomised(module: nn.Module, std: float = 0.05) -> None:
    """Give adapters values of which each matters; that of lora_B is 0 before training."""
    generator = torch.Generator().manual_seed(3)
    for p in adapter_parameters(module).values():
        p.data += std * torch.randn(p.shape, generator=generator)


def adapted(module: Any, method: str = "lora", **options: Any) -> Any:
    """Put random adapters into a module as the technique does."""
    technique = Adapters(r=4, method=method, **options)
    config = technique._config_for(module)
    adaptation.insert(module, config)
    adaptation.freeze(module, config)
    randomised(module)
    return module


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)


def fitted(make_trainer: Make, path: Path, *callbacks: Any, **arguments: Any) -> tuple[Any, Path]:
    """Return a module after two steps, with random adapters, and its checkpoint."""
    module = Tuned(str(path))
    trainer = make_trainer(L, callbacks=list(callbacks), max_steps=2, **arguments)
    trainer.fit(module)
    randomised(module)
    file = Path(trainer.default_root_dir) / "trained.ckpt"
    trainer.save_checkpoint(file)
    return module, file


# --- merged ---


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_folder_answers_as_the_module(family: str, models: Models, tmp_path: Path) -> None:
    base = models(family.split()[-1], **FAMILIES[family])
    module = adapted(Tuned(str(base)))
    trained = answers(module.model)
    assert far(trained, answers(load(base))) > 0.05  # the adapters matter
    lines = export_pretrained(module, tmp_path / "out")
    merged = load(tmp_path / "out")
    assert far(answers(merged), trained) <= 1e-5
    assert torch.equal(answers(module.model), trained)  # the module is as before
    assert any("logits" in line and "100%" in line for line in lines)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [type(merged).__name__]
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert len(modes) == 1  # whoever reads one file reads all


@pytest.mark.parametrize("method", ["dora", "pissa", "ia3", pytest.param("rslora", marks=pytest.mark.long)])
def test_each_method_is_merged(method: str, models: Models, tmp_path: Path) -> None:
    module = adapted(Tuned(str(models())), method)
    export_pretrained(module, tmp_path / "out")
    assert far(answers(load(tmp_path / "out")), answers(module.model)) <= 1e-5


def test_checkpoint_of_adapters_is_merged_into_shards(make_trainer: Make, models: Models, tmp_path: Path) -> None:
    module, file = fitted(
        make_trainer, models(), Adapters(r=4, modules_to_save=["lm_head"], trainable_token_indices=[7])
    )
    export_pretrained(file, tmp_path / "out", shard_size="20KB")
    assert far(answers(load(tmp_path / "out")), answers(module.model)) <= 1e-5
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2


def test_bf16_base_is_merged_in_bf16_or_wider(make_trainer: Make, models: Models, tmp_path: Path) -> None:
    module, file = fitted(make_trainer, models(dtype=torch.bfloat16), Adapters(r=4))
    export_pretrained(file, tmp_path / "out")
    narrow = load(tmp_path / "out")
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    assert far(answers(narrow), answers(module.model)) <= 1e-2 + noise(module.model)
    export_pretrained(file, tmp_path / "wide", dtype="fp32")
    wide = load(tmp_path / "wide")
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    assert far(answers(wide), answers(module.float().model)) <= 1e-5


def test_adapter_is_added_to_the_dequantized_base(make_trainer: Make, models: Models, tmp_path: Path) -> None:
    module, file = fitted(make_trainer, models(), Adapters(r=4), QuantizedBase(format="int8"))
    for source in (module, file):
        export_pretrained(source, tmp_path / "out", overwrite=True)
        assert far(answers(load(tmp_path / "out")), answers(module.model)) <= 1e-5
    with pytest.raises(ConflictError, match=mentions("base='original'", "checkpoint")):
        export_pretrained(module, tmp_path / "other", base="original")
    lines = export_pretrained(file, tmp_path / "other", base="original")
    original = adapted(Tuned(str(models())))
    original.load_state_dict({k: v for k, v in module.state_dict().items() if "lora" in k}, strict=False)
    other = answers(load(tmp_path / "other"))
    assert far(other, answers(original.model)) <= 1e-5
    assert far(other, answers(module.model)) > 1e-4
    printed = float(lines[-1].split("difference ")[1].split()[0])
    assert printed == pytest.approx(far(other, answers(module.model)), rel=2)
    assert "int8" in lines[-1]


@pytest.mark.parametrize("compact", [False, True])
def test_full_fine_tuning_is_exported_from_its_checkpoint(
    compact: bool, make_trainer: Make, models: Models, tmp_path: Path
) -> None:
    options: Any = {"precision": "bf16-true"} if compact else {}
    module, file = fitted(make_trainer, models(), *([CompactStates()] if compact else []), **options)
    weights = solo.export_weights(file)
    for source, name in ((file, "file"), (module, "module")):
        export_pretrained(source, tmp_path / name)
        out = load(tmp_path / name)
        assert all(torch.equal(p, weights[f"model.{key}"]) for key, p in out.named_parameters())
    assert not torch.equal(out.lm_head.weight, load(models()).lm_head.weight)
    export_pretrained(module, tmp_path / "half", dtype="fp16")
    assert {p.dtype for p in load(tmp_path / "half").parameters()} == {torch.float16}


def test_head_that_was_untied_is_untied_in_the_configuration(models: Models, tmp_path: Path) -> None:
    module = Tuned(str(models("Llama", tie_word_embeddings=True)))
    module.model.lm_head.weight = nn.Parameter(torch.randn_like(module.model.lm_head.weight))
    export_pretrained(module, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert far(answers(load(tmp_path / "out")), answers(module.model)) <= 1e-5


def test_trained_tied_head_stays_tied(models: Models, tmp_path: Path) -> None:
    module = adapted(Tuned(str(models("Llama", tie_word_embeddings=True))), modules_to_save=["lm_head"])
    module.model.lm_head.weight.data *= 2
    export_pretrained(module, tmp_path / "out")
    out = load(tmp_path / "out")
    assert out.lm_head.weight is out.model.embed_tokens.weight
    assert far(answers(out), answers(module.model)) <= 1e-5


class Two(L.LightningModule):
    """A student and a teacher, deep in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleDict({name: small_model("Llama") for name in ("student", "teacher")})
        self.extra = nn.Linear(2, 2)


def test_model_is_found_at_any_attribute_or_chosen(tmp_path: Path) -> None:
    module = Two()
    with pytest.raises(ConflictError, match=mentions("nets.student", "nets.teacher", "model='nets.student'")):
        export_pretrained(module, tmp_path / "out")
    lines = export_pretrained(module, tmp_path / "out", model="nets.teacher")
    weights = load(tmp_path / "out").state_dict()
    assert torch.equal(weights["lm_head.weight"], module.nets["teacher"].lm_head.weight)
    assert any("left out" in line and "nets.student" in line for line in lines)


# --- in 4 or 8 bits ---

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}  # sizes that bitsandbytes computes on CPUs


def numbers_of(layer: Any) -> Tensor:
    """Return the numbers of a layer of bitsandbytes."""
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    return dequantize_bnb_weight(layer.weight, getattr(layer, "state", None)).float()


def expected_numbers(weight: Tensor, bits: int) -> Tensor:
    """Return the numbers of a merged weight, (out, in), in 4 or 8 bits."""
    if bits == 4:
        return quantized(weight.detach().contiguous()).dequantized().float()
    weight = weight.detach().half().float()  # as bitsandbytes rounds
    largest = weight.abs().amax(1, keepdim=True)
    return (weight * (127 / largest)).round() * largest / 127


def layers_in_few_bits(model: Any) -> dict[str, Any]:
    return {name: part for name, part in model.named_modules() if type(part).__module__ == "bitsandbytes.nn.modules"}


@pytest.mark.parametrize("bits", [4, 8])
def test_folder_in_few_bits_has_the_merged_weights_rounded(bits: int, models: Models, tmp_path: Path) -> None:
    base = models("Llama", torch.bfloat16, **WIDE)
    module = adapted(Tuned(str(base)))
    export_pretrained(module, tmp_path / "merged")
    lines = export_pretrained(module, tmp_path / "out", bits=bits)
    merged, loaded = load(tmp_path / "merged"), load(tmp_path / "out")
    layers = layers_in_few_bits(loaded)
    assert len(layers) == 3 * 7  # all linear layers of three blocks, not the head
    for name, layer in layers.items():
        expected = expected_numbers(weight := merged.get_submodule(name).weight, bits)
        assert far(numbers_of(layer), expected) <= (0 if bits == 4 else 1e-6)
        weight.data = expected.to(weight.dtype)
    with exact_on_cpus(loaded):
        # a layer of 8 bits rounds its inputs too
        assert far(answers(loaded), answers(merged)) <= (0 if bits == 4 else 0.05)
    printed = float(lines[-1].split("difference ")[1].split()[0])
    assert "the merged model" in lines[-1]
    assert 0.001 < printed < 0.5
    assert any(line.startswith(f"{bits} bits: 21 Linear{bits}bit") and "lm_head" in line for line in lines)
    assert not (tmp_path / "out" / "Modelfile").exists()  # Ollama doesn't read it
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert size < (0.62 if bits == 4 else 0.75) * (tmp_path / "merged" / "model.safetensors").stat().st_size


@pytest.mark.long
def test_layers_that_bitsandbytes_computes_wrongly_stay(models: Models, tmp_path: Path) -> None:
    module = adapted(Tuned(str(models("Llama", **{**WIDE, "intermediate_size": 96}))))
    lines = export_pretrained(module, tmp_path / "out", bits=4)
    layers = layers_in_few_bits(load(tmp_path / "out"))
    assert {name.rpartition(".")[2] for name in layers} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
    }
    assert any("down_proj (96 inputs" in line for line in lines)
    narrow = adapted(Tuned(str(models())))
    with pytest.raises(NothingToDoError, match=mentions("16 inputs", "--bits")):
        export_pretrained(narrow, tmp_path / "none", bits=4)
    export_pretrained(narrow, tmp_path / "eight", bits=8)
    assert len(layers_in_few_bits(load(tmp_path / "eight"))) == 3 * 7
    for options in ({"bits": 3}, {"bits": 4, "format": "adapter"}):
        with pytest.raises(PresetError, match=mentions("4 or 8 with hf")):
            export_pretrained(narrow, tmp_path / "none", **options)


@pytest.mark.long
def test_difference_to_training_is_printed_beside_that_to_the_merged_model(
    make_trainer: Make, models: Models, tmp_path: Path
) -> None:
    module, file = fitted(make_trainer, models("Llama", **WIDE), Adapters(r=4), QuantizedBase())
    assert export([str(file), "--format", "hf", "--bits", "4", "--output", str(tmp_path / "out")]) == 0
    lines = export_pretrained(file, tmp_path / "out", bits=4, overwrite=True)
    with exact_on_cpus(loaded := load(tmp_path / "out")):
        exported = answers(loaded)
    export_pretrained(file, tmp_path / "merged")
    for line, of, other in (
        (lines[-2], "merged model", load(tmp_path / "merged")),
        (lines[-1], "trained model", module.model),
    ):
        assert of in line
        printed = float(line.split("difference ")[1].split()[0])
        assert printed == pytest.approx(far(exported, answers(other)), rel=1)
    assert "nf4" in lines[-1]


# --- the adapter alone ---


def with_peft(base: Path, folder: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(load(base), folder)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_the_adapter(family: str, models: Models, tmp_path: Path) -> None:
    base = models(family.split()[-1], **FAMILIES[family])
    module = adapted(Tuned(str(base)), trainable_token_indices=[7, 9])
    trained = answers(module.model)
    lines = export_pretrained(module, tmp_path / "out", "adapter")
    assert "--format hf" not in lines[-1]
    assert str(base) in lines[-1]
    assert far(answers(with_peft(base, tmp_path / "out")), trained) <= 1e-5
    assert far(answers(load(tmp_path / "out")), trained) <= 1e-5


@pytest.mark.parametrize("method", ["dora", "pissa", "ia3", "rslora"])
@pytest.mark.parametrize("kind", ["Llama", pytest.param("GPT2", marks=pytest.mark.long)])
def test_peft_loads_each_method(method: str, kind: str, make_trainer: Make, models: Models, tmp_path: Path) -> None:
    module, file = fitted(make_trainer, models(kind), Adapters(r=4, method=method))
    for source in (file, module) if method == "pissa" else (file,):
        export_pretrained(source, tmp_path / "out", "adapter", overwrite=True)
        for loaded in (with_peft(models(kind), tmp_path / "out"), load(tmp_path / "out")):
            assert far(answers(loaded), answers(module.model)) <= 1e-5


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_peft_loads_whole_modules_also_tied_ones(models: Models, tmp_path: Path) -> None:
    base = models("Llama", tie_word_embeddings=True)
    module = adapted(Tuned(str(base)), targets=["q_proj"], modules_to_save=["lm_head", "model.norm"])
    module.model.lm_head.weight.data *= 2
    module.model.model.norm.weight.data *= 3
    export_pretrained(module, tmp_path / "out", "adapter")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert config["target_modules"] == ["q_proj"]
    assert far(answers(with_peft(base, tmp_path / "out")), answers(module.model)) <= 1e-5


def test_adapter_that_peft_cannot_load_is_not_written(models: Models, tmp_path: Path) -> None:
    module = Tuned(str(models()))
    module.model.resize_token_embeddings(272, mean_resizing=False)  # of which the base's folder has 264
    adapted(module, trainable_token_indices=[270])
    with pytest.raises(CapabilityError, match=mentions("peft", "can't load", "--format hf")):
        export_pretrained(module, tmp_path / "out", "adapter")
    assert not any(tmp_path.iterdir())


def test_adapter_file_is_as_large_as_its_weights(make_trainer: Make, models: Models, tmp_path: Path) -> None:
    base = models("Llama", hidden_size=256, intermediate_size=512)
    module, file = fitted(make_trainer, base, Adapters(r=8), QuantizedBase(format="int8"))
    lines = export_pretrained(file, tmp_path / "out", "adapter")
    size = sum(p.nbytes for p in adapter_parameters(module).values())
    assert size <= (tmp_path / "out" / "adapter_model.safetensors").stat().st_size <= 1.02 * size
    assert any("int8" in line for line in lines)
    with pytest.raises(NothingToDoError, match=mentions("--format hf")):
        export_pretrained(Tuned(str(base)), tmp_path / "none", "adapter")


MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:The following .*_pattern keys:RuntimeWarning", "ignore:Found missing adapter keys:UserWarning"
)
def test_adapter_that_peft_loads_elsewhere_is_named(models: Models, tmp_path: Path) -> None:
    # peft 0.21 takes the adapters of dense layers for those of experts, which have the same names
    experts = {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
    base = models("DeepseekV3", moe_intermediate_size=16, num_key_value_heads=2, **experts, **MLA)
    module = adapted(Tuned(str(base)))
    lines = export_pretrained(module, tmp_path / "out", "adapter")
    difference = far(answers(with_peft(base, tmp_path / "out")), answers(module.model))
    assert (difference > 0.05) == ("--format hf" in lines[-1])
    export_pretrained(module, tmp_path / "hf")
    assert far(answers(load(tmp_path / "hf")), answers(module.model)) <= 1e-5


# --- other heads ---


class Classified(L.LightningModule):
    """A classifier on a folder that has another head, as `model=hf_auto` trains one."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForSequenceClassification

        super().__init__()
        self.save_hyperparameters()
        self.path = path
        self.net = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3).train()
        self.net.config.id2label = {0: "bad", 1: "good", 2: "fair"}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[ARCHITECTURE] = architecture_of(self.net)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch[:, 0] % 3).loss
        return loss

    train_dataloader = Tuned.train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize("adapters", [True, pytest.param(False, marks=pytest.mark.long)])
def test_classifier_is_exported_with_its_head_and_labels(adapters: bool, make_trainer: Make, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    small_model("Bert", "ForMaskedLM", vocab_size=128).save_pretrained(tmp_path / "base")
    callbacks = [Adapters(r=4, modules_to_save=["classifier", "pooler"])] if adapters else []
    trainer = make_trainer(L, callbacks=callbacks, max_steps=2)
    trainer.fit(module := Classified(str(tmp_path / "base")))
    randomised(module)
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    for source in (tmp_path / "trained.ckpt", module):
        export_pretrained(source, tmp_path / "out", overwrite=True)
        out = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
        assert far(answers(out), answers(module.net)) <= 1e-5
        assert out.config.id2label == module.net.config.id2label
        assert not (tmp_path / "out" / "Modelfile").exists()


@pytest.mark.filterwarnings("ignore:Found missing adapter keys:UserWarning")
def test_adapter_of_a_classifier_is_loaded_with_its_labels(make_trainer: Make, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    small_model("Bert", "ForMaskedLM", vocab_size=128).save_pretrained(tmp_path / "base")
    callbacks = [Adapters(r=4, modules_to_save=["classifier", "pooler"])]
    trainer = make_trainer(L, callbacks=callbacks, max_steps=2)
    trainer.fit(module := Classified(str(tmp_path / "base")))
    randomised(module)
    lines = export_pretrained(module, out := tmp_path / "out", "adapter")
    assert any("fair" in line and "base_config.json" in line for line in lines)
    assert str(tmp_path / "base") in lines[-1]
    assert float(lines[-1].split("difference ")[1].split()[0]) <= 1e-5
    config = AutoConfig.from_pretrained(out / "base_config.json")
    loaded = AutoModelForSequenceClassification.from_pretrained(out, config=config)
    assert loaded.config.id2label == module.net.config.id2label
    assert far(answers(loaded), answers(module.net)) <= 1e-5


# --- ends of generation ---


def test_ends_are_checked_and_modelfile_is_written(models: Models, tmp_path: Path) -> None:
    shutil.copytree(models(), base := tmp_path / "base")
    (base / "generation_config.json").write_text('{"eos_token_id": [2, 0], "pad_token_id": 0, "temperature": 0.5}')
    save_tokenizer(base, pad_token="</s>", unk_token="<s>")
    lines = export_pretrained(Tuned(str(base)), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert config == {"bos_token_id": 1, "eos_token_id": [2, 0, 4], "pad_token_id": 1, "temperature": 0.5}
    assert any("<|im_end|>" in line for line in lines)
    assert any("pad_token_id" in line for line in lines)
    text = (tmp_path / "out" / "Modelfile").read_text()
    assert text.startswith("FROM .\n")
    assert (
        "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n"
        "{{ else }}<|im_start|>system\nBe brief.<|im_end|>\n{{ end }}"
        '{{ range .Messages }}{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n{{ end }}{{ end }}'
        '<|im_start|>assistant\n"""'
    ) in text
    assert 'PARAMETER stop "<|im_end|>"' in text


def test_right_generation_config_is_copied(models: Models, tmp_path: Path) -> None:
    shutil.copytree(models(), base := tmp_path / "base")
    (base / "generation_config.json").write_text('{"eos_token_id": [2, 4],  "pad_token_id": 0, "bos_token_id": 1}')
    export_pretrained(Tuned(str(base)), tmp_path / "out")
    assert (tmp_path / "out" / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()


def test_template_that_turns_cannot_frame_is_left_out(models: Models, tmp_path: Path) -> None:
    shutil.copytree(models(), base := tmp_path / "base")
    save_tokenizer(base, "{% for m in messages %}{{ loop.index }}: {{ m['content'] }}</s>{% endfor %}")
    lines = export_pretrained(Tuned(str(base)), tmp_path / "out")
    text = (tmp_path / "out" / "Modelfile").read_text()
    assert "TEMPLATE" not in text and 'stop "</s>"' in text  # noqa: PT018
    assert any("TEMPLATE" in line for line in lines)


# --- llama.cpp ---

# Stands for the user's llama.cpp: it reads what the real converter reads, and writes what it was told
CONVERTER = """
import json, struct, sys
from pathlib import Path
folder = Path(sys.argv[1])
with (folder / "model.safetensors").open("rb") as file:
    tensors = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
config = json.loads((folder / "config.json").read_text())
told = {"architectures": config["architectures"], "tokenizer": (folder / "tokenizer.json").is_file(),
        "tensors": sorted(set(tensors) - {"__metadata__"}), "arguments": sys.argv[2:]}
if "fail" in sys.argv[1]:
    sys.exit("BPE pre-tokenizer was not recognized")
Path(sys.argv[3]).write_text(json.dumps(told))
"""
# As the real one: its usage lists types, and exits with 1
QUANTIZER = """#!/bin/sh
if [ "$1" = --help ]; then
    echo "usage: llama-quantize [--help] model-f32.gguf [model-quant.gguf] type [nthreads]"
    echo "          WARNING: this can severely reduce quality"
    echo " allowed quantization types"
    echo "  15  or  Q4_K_M  :  4.58G, +0.1754 ppl @ Llama-3-8B"
    echo "   7  or  Q8_0    :  7.96G, +0.0026 ppl @ Llama-3-8B"
    echo "          COPY    : only copy tensors, no quantizing"
    exit 1
fi
cp "$1" "$2" && echo "$3" >> "$2"
"""


def test_gguf_is_written_by_the_users_llama_cpp(models: Models, tmp_path: Path, monkeypatch: Any) -> None:
    module, llama_cpp = adapted(Tuned(str(models()))), tmp_path / "llama.cpp"
    with pytest.raises(CapabilityError, match=mentions("git clone", "--llama-cpp llama.cpp", "convert_hf_to_gguf.py")):
        export_pretrained(module, tmp_path / "out", "gguf")
    llama_cpp.mkdir()
    (llama_cpp / "convert_hf_to_gguf.py").write_text(CONVERTER)
    export_pretrained(module, tmp_path / "out", "gguf", llama_cpp=llama_cpp, dtype="fp16")
    told = json.loads((tmp_path / "out" / "model.gguf").read_text())
    assert told["architectures"] == ["LlamaForCausalLM"] and told["tokenizer"]  # noqa: PT018
    assert told["tensors"] == sorted(load(models()).state_dict())
    assert told["arguments"][2:] == ["--outtype", "f16"]
    assert (tmp_path / "out" / "Modelfile").read_text().startswith("FROM ./model.gguf\n")
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"model.gguf", "Modelfile"}
    with pytest.raises(CapabilityError, match=mentions("--quantize q4_k_m", "cmake")):
        export_pretrained(module, tmp_path / "quantized", "gguf", llama_cpp=llama_cpp, quantize="q4_k_m")
    (llama_cpp / "build" / "bin").mkdir(parents=True)
    program = llama_cpp / "build" / "bin" / "llama-quantize"
    program.write_text(QUANTIZER)
    with pytest.raises(CapabilityError, match=mentions("can't be run", "llama-quantize")):  # not executable
        export_pretrained(module, tmp_path / "quantized", "gguf", llama_cpp=llama_cpp, quantize="q4_k_m")
    program.chmod(0o755)
    with pytest.raises(
        PresetError, match=mentions("--quantize q4km", "did you mean 'Q4_K_M'", "takes Q4_K_M, Q8_0, COPY")
    ):
        export_pretrained(module, tmp_path / "quantized", "gguf", llama_cpp=llama_cpp, quantize="q4km")
    monkeypatch.setenv("LLAMA_CPP", str(llama_cpp))
    export_pretrained(module, tmp_path / "quantized", "gguf", quantize="q4_k_m")
    assert (tmp_path / "quantized" / "model-Q4_K_M.gguf").read_text().endswith("Q4_K_M\n")
    assert "FROM ./model-Q4_K_M.gguf\n" in (tmp_path / "quantized" / "Modelfile").read_text()
    (failing := tmp_path / "fail").mkdir()
    with pytest.raises(CapabilityError, match=mentions("status 1", "not recognized", "--tokenizer")):
        export_pretrained(module, failing / "out", "gguf")
    assert not any(failing.iterdir())


# --- refused ---


def test_what_cannot_be_right_is_refused(make_trainer: Make, models: Models, tmp_path: Path) -> None:
    _, file = fitted(make_trainer, models(), Adapters(r=4))
    shutil.copytree(models("Llama", tie_word_embeddings=True), other := tmp_path / "other")
    torch.save(
        {"state_dict": nn.Linear(2, 2).state_dict(), "hyper_parameters": {}}, strange := tmp_path / "strange.ckpt"
    )
    for call, kind, words in (
        (lambda: export_pretrained(regression(L), tmp_path / "out"), NothingToDoError, ["export_weights"]),
        (
            lambda: export_pretrained(file, tmp_path / "out", base_folder=tmp_path),
            CheckpointError,
            ["--base-folder"],
        ),
        (lambda: export_pretrained(file, tmp_path / "out", base_folder=other), CheckpointError, ["other"]),
        (lambda: export_pretrained(file, models(), overwrite=True), CheckpointError, ["which is read"]),
        (lambda: export_pretrained(strange), CheckpointError, ["--format weights", "--base-folder", "module"]),
        (lambda: export_pretrained(strange, base_folder=models()), CheckpointError, ["LlamaForCausalLM", "weights"]),
        (lambda: export_pretrained(file, file), CheckpointError, ["--output"]),
        (lambda: export_pretrained(Tuned(str(models()))), PresetError, ["output"]),
        (lambda: export_pretrained(file, dtype="fp8"), PresetError, ["fp32", "bf16"]),
        (lambda: parse(["run", "--format", "weights", "--base", "original"]), PresetError, ["--base", "hf"]),
        (lambda: parse(["run", "--format", "hff"]), PresetError, ["did you mean 'hf'"]),
    ):
        with pytest.raises(kind, match=mentions(*words)):
            call()  # type: ignore[no-untyped-call]
    assert not (tmp_path / "out").exists()
    assert sorted(each.name for each in tmp_path.iterdir() if each.name.startswith(".new")) == []


def test_full_disk_leaves_the_earlier_export(models: Models, tmp_path: Path, monkeypatch: Any) -> None:
    export_pretrained(Tuned(str(models())), tmp_path / "out")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    with pytest.raises(CheckpointError, match=mentions("--force")):
        export_pretrained(Tuned(str(models())), tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10))
    with pytest.raises(BudgetError, match=mentions("10 B")):
        export_pretrained(Tuned(str(models())), tmp_path / "out", overwrite=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


# --- elsewhere ---

ELSEWHERE = """
import sys
sys.modules["lightning_solo"] = None  # importing it fails
import torch
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
    with torch.no_grad():
        torch.save(model(input_ids=torch.arange(5, 45).view(2, 20)).logits.float(), folder + "/logits.pt")
"""


@pytest.mark.long
def test_folders_load_without_this_package(make_trainer: Make, models: Models, tmp_path: Path) -> None:
    expected: dict[Path, tuple[Tensor, float]] = {}
    for family, options in FAMILIES.items():
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            module = adapted(Tuned(str(models(family.split()[-1], dtype, **options))))
            folder = tmp_path / f"{family}-{dtype}"
            export_pretrained(module, folder)
            expected[folder] = answers(module.model), bound + (noise(module.model) if bound > 1e-5 else 0.0)
    _, file = fitted(make_trainer, models(), Adapters(r=4))
    assert export([str(file), "--format", "hf", "--output", str(tmp_path / "command"), "--dtype", "fp32"]) == 0
    subprocess.run([sys.executable, "-c", ELSEWHERE, *map(str, expected)], cwd=tmp_path, check=True)
    for folder, (trained, bound) in expected.items():
        assert far(torch.load(folder / "logits.pt"), trained) <= bound, folder


FEW_BITS_ELSEWHERE = """
import sys
sys.modules["lightning_solo"] = None  # importing it fails
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.bitsandbytes import dequantize_bnb_weight

@torch.no_grad()
def logits(model):
    return model(input_ids=torch.arange(5, 45).view(2, 20)).logits.float()

for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    layers = {name: part for name, part in model.named_modules() if "bitsandbytes" in type(part).__module__}
    weights = {name: dequantize_bnb_weight(part.weight, getattr(part, "state", None)) for name, part in layers.items()}
    for layer in layers.values():
        layer.support_avx512bf16_for_cpu = False  # a kernel that computes in bf16
    exact = logits(model)
    for layer in layers.values():
        layer.support_avx512bf16_for_cpu = True
    torch.save({"weights": weights, "exact": exact, "plain": logits(model)}, folder + "/found.pt")
"""


@pytest.mark.long
def test_folders_in_few_bits_load_without_this_package(models: Models, tmp_path: Path) -> None:
    folders = []
    for family, options in FAMILIES.items():
        for dtype in (torch.float32, torch.bfloat16):
            module = adapted(Tuned(str(models(family.split()[-1], dtype, **{**options, **WIDE}))))
            export_pretrained(module, merged := tmp_path / f"{family}-{dtype}")
            for bits in (4, 8):
                folders.append((merged, tmp_path / f"{merged.name}-{bits}", bits))
                export_pretrained(module, folders[-1][1], bits=bits, shard_size="50KB")
    written = [str(folder) for _, folder, _ in folders]
    subprocess.run([sys.executable, "-c", FEW_BITS_ELSEWHERE, *written], cwd=tmp_path, check=True)
    for merged, folder, bits in folders:
        found, model = torch.load(folder / "found.pt"), load(merged)
        assert len(found["weights"]) >= 12, folder
        for name, weight in found["weights"].items():
            own = model.get_submodule(name)
            transposed = type(own).__name__ == "Conv1D"
            expected = expected_numbers(own.weight.T if transposed else own.weight, bits)
            assert far(weight.float(), expected) <= (0 if bits == 4 else 1e-6), (folder, name)
            own.weight.data = (expected.T if transposed else expected).to(own.weight.dtype)
        expected = answers(model)
        assert far(found["exact"], expected) <= (1e-6 if bits == 4 else 0.05) + noise(model) * (bits == 4), folder
        assert far(found["plain"], expected) <= 0.05, folder
