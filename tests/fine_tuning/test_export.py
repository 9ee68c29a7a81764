"""A fine-tuned run is exported with its tokenizer, template and new tokens, and answers as in training."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import lightning_solo as solo
from lightning_solo.cli.export import run as export
from lightning_solo.export.pretrained import export_pretrained
from lightning_solo.fine_tuning.auto_model import TASKS, HFAuto
from lightning_solo.fine_tuning.causal_lm import HFCausalLM
from lightning_solo.fine_tuning.chat import ChatData
from lightning_solo.nn.adaptation import adapter_parameters
from tests.cli.commands import call
from tests.conftest import long
from tests.export.conftest import answers, far
from tests.export.test_pretrained import ELSEWHERE
from tests.fine_tuning.test_auto_model import data_of, rows_of

pytest.importorskip("transformers")
pytest.importorskip("peft")
Folder = Callable[..., Path]
Make = Callable[..., Any]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def fitted(
    folder: Path, chats: Path, tmp_path: Path, make_trainer: Make, *callbacks: Any, **options: Any
) -> tuple[Any, Path]:
    """Return a module after two steps with larger adapters, and its checkpoint."""
    torch.manual_seed(0)
    tokens = {"new_tokens": options["new_tokens"]} if "new_tokens" in options else {}
    module = HFCausalLM(str(folder), optimizer=partial(torch.optim.AdamW, lr=0.02), **options)
    data = ChatData(
        str(chats), str(folder), batch_size=4, chat_template=TEMPLATE, cache=str(tmp_path / "cache"), **tokens
    )
    trainer = make_trainer(L, callbacks=list(callbacks), max_steps=2)
    trainer.fit(module, data)
    for p in adapter_parameters(module).values():
        p.data += 0.05 * torch.randn_like(p)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    return module, tmp_path / "last.ckpt"


@pytest.mark.parametrize("adapted", [True, pytest.param(False, marks=pytest.mark.long)])
def test_new_tokens_and_template_are_exported(
    adapted: bool, model_folder: Folder, chats: Path, make_trainer: Make, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    callbacks = [solo.callbacks.Adapters(r=4)] if adapted else []
    new = ["<|call|>", "lazy dog"]
    module, file = fitted(model_folder("Llama"), chats, tmp_path, make_trainer, *callbacks, new_tokens=new)
    for source, name in ((file, "file"), (module, "module")):
        export_pretrained(source, tmp_path / name)
        out, tokenizer = tmp_path / name, AutoTokenizer.from_pretrained(tmp_path / name)
        loaded = AutoModelForCausalLM.from_pretrained(out)
        assert far(answers(loaded), answers(module.model)) <= 1e-5
        assert loaded.config.vocab_size == len(tokenizer) == 322
        assert tokenizer("a lazy dog", add_special_tokens=False)["input_ids"][-1] == 321
        assert tokenizer.chat_template == TEMPLATE
    with torch.no_grad():
        rows = [loaded(torch.tensor([[320, 321]])).logits, module.model(torch.tensor([[320, 321]])).logits]
    assert far(*rows) <= 1e-5


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (320, {"method": "pissa"}),
        (400, {"modules_to_save": ["lm_head"]}),
        long(400, {"method": "pissa"}),
        long(320, {"modules_to_save": ["lm_head"]}),
    ],
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
def test_adapter_with_new_tokens_is_compared_as_peft_loads_it(
    rows: int, options: Any, model_folder: Folder, chats: Path, make_trainer: Make, tmp_path: Path
) -> None:
    adapters = solo.callbacks.Adapters(r=4, **options)
    base = model_folder("Llama", vocab_size=rows)
    module, file = fitted(base, chats, tmp_path, make_trainer, adapters, new_tokens=["<|call|>", "lazy dog"])
    lines = export_pretrained(file, tmp_path / "adapter", "adapter")
    assert any("resize_token_embeddings(322)" in line for line in lines) == (rows == 320)
    assert float(lines[-1].partition("largest difference ")[2].split()[0]) <= 1e-5
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(max(rows, 322), mean_resizing=False)
    ids = torch.tensor([[320, 321]])
    with torch.no_grad():
        logits = PeftModel.from_pretrained(model, tmp_path / "adapter")(ids).logits
        assert far(logits, module.eval().model(ids).logits) <= 1e-5


@pytest.mark.parametrize("quantized", ["technique", *map(long, ("loaded", "streamed", "tables", "tied"))])
def test_adapter_on_four_bits_is_added_to_the_rounded_weights(
    quantized: str, model_folder: Folder, chats: Path, make_trainer: Make, tmp_path: Path, monkeypatch: Any
) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user_cache"))
    tables = {"tables": {"embeddings": "host", "head": "int8"}, "tied": {"embeddings": "int8", "head": "int8"}}
    tables = tables.get(quantized, {})
    technique: list[Any] = [] if quantized == "loaded" else [solo.callbacks.QuantizedBase(**tables)]
    technique += [solo.callbacks.FrozenStreaming()] if quantized == "streamed" or tables else []
    technique += [solo.callbacks.ChunkedCrossEntropy()] if tables else []
    options: Any = {"quantized": "nf4"} if quantized == "loaded" else {}
    adapters = solo.callbacks.Adapters(r=4)
    base = model_folder("Llama", tie_word_embeddings=quantized == "tied")
    module, file = fitted(base, chats, tmp_path, make_trainer, adapters, *technique, **options)
    for source in (file, module):
        lines = export_pretrained(source, tmp_path / "out", overwrite=True)
        out = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert far(answers(out), answers(module.model)) <= 1e-5
    lines = export_pretrained(file, tmp_path / "out", base="original", overwrite=True)
    assert "nf4" in lines[-1]
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert far(answers(other), answers(module.model)) > 1e-2


HEADS = [
    ("Llama", "ForCausalLM", "sequence_classification", ["score"]),
    ("Bert", "ForMaskedLM", "token_classification", ["classifier"]),
    ("Bert", "ForMaskedLM", "masked_lm", []),
    ("T5", "ForConditionalGeneration", "seq2seq_lm", []),
    ("Bart", "ForConditionalGeneration", "seq2seq_lm", []),
]


@pytest.mark.parametrize(
    ("kind", "saved", "task", "head"),
    [pytest.param(*case, marks=[pytest.mark.long] * (case != HEADS[0])) for case in HEADS],
)
def test_other_heads_are_exported(
    kind: str, saved: str, task: str, head: list[str], model_folder: Folder, make_trainer: Make, tmp_path: Path
) -> None:
    import transformers

    folder = model_folder(kind, saved)
    data = data_of(folder, rows_of(tmp_path, task), task)
    module = HFAuto(str(folder), task)
    trainer = make_trainer(L, callbacks=[solo.callbacks.Adapters(r=4, modules_to_save=head)], max_steps=2)
    trainer.fit(module, data)
    for p in adapter_parameters(module).values():
        p.data += 0.05 * torch.randn_like(p)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    batch = next(iter(data.val_dataloader()))
    for source in (tmp_path / "last.ckpt", module):
        export_pretrained(source, tmp_path / "out", overwrite=True)
        model = getattr(transformers, TASKS[task]).from_pretrained(tmp_path / "out")
        assert model.config.id2label == module.model.config.id2label
        with torch.no_grad():
            trained = module.eval()(batch)
            module.model, kept = model.eval(), module.model
            assert far(module(batch), trained) <= 1e-5
        module.model = kept


@pytest.mark.long
def test_run_of_the_command_line_is_exported(model_folder: Folder, chats: Path, tmp_path: Path) -> None:
    base = model_folder("Llama")
    call(
        tmp_path,
        *("train", "model=hf_causal_lm", f"model.path={base}", "data=chat", f"data.path={chats}", "solo=adapters"),
        *("run=first", "trainer.max_steps=3", f"data.cache={tmp_path / 'cache'}"),
    )
    run = next(tmp_path.rglob("config.yaml")).parent
    printed = call(tmp_path, "export", str(run), "--format", "hf")
    assert "logits of 4 rows" in printed
    out = run / "checkpoints" / "last-hf"
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    call(tmp_path, "export", str(run), "--format", "adapter", "--output", "adapter")
    subprocess.run([sys.executable, "-c", ELSEWHERE, out, tmp_path / "adapter"], check=True)
    logits = [torch.load(folder / "logits.pt") for folder in (out, tmp_path / "adapter")]
    assert far(*logits) <= 1e-5
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert export([str(run), "--format", "hf", "--force"]) == 0
