"""New tokens: their rows start at the mean of their pieces' rows, are trained, and are there again afterwards."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

import lightning_solo as solo
from lightning_solo.data.tokenizers import add_tokens, tokenizer_of
from lightning_solo.errors import ConflictError, PresetError
from lightning_solo.fine_tuning.causal_lm import HFCausalLM
from lightning_solo.fine_tuning.chat import ChatData
from lightning_solo.fine_tuning.trained import load_trained
from lightning_solo.nn.quantized import quantized_weights_of
from lightning_solo.techniques.adapters.technique import Adapters
from lightning_solo.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_solo.techniques.layer_freezing.technique import LayerFreezing
from lightning_solo.techniques.quantized_base.technique import QuantizedBase
from tests.conftest import long
from tests.messages import mentions

TERMS = ["zygote", "meiosis"]
sgd = partial(torch.optim.SGD, lr=0.5)


@pytest.fixture
def terms(tmp_path: Path) -> str:
    (tmp_path / "terms.txt").write_text("\n".join(TERMS), encoding="utf-8")
    return str(tmp_path / "terms.txt")


def data_of(folder: Path, tmp_path: Path, terms: Any) -> ChatData:
    rows = [
        [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"A zygote is {n}."}]
        for n in range(8)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    cache = str(tmp_path / "cache")
    return ChatData(str(file), str(folder), max_length=40, batch_size=2, new_tokens=terms, cache=cache)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_start_at_the_mean_of_their_pieces_and_only_they_and_adapters_are_trained(
    tied: bool, model_folder: Callable[..., Path], make_trainer: Callable[..., Any], tmp_path: Path, terms: str
) -> None:
    folder = model_folder("Llama", tie_word_embeddings=tied)
    plain = HFCausalLM(str(folder))
    plain.configure_model()
    pieces = add_tokens(tokenizer_of(folder), TERMS)
    module = HFCausalLM(str(folder), new_tokens=terms, optimizer=sgd)
    module.configure_model()
    old, new = ([m.get_input_embeddings().weight, m.lm_head.weight] for m in (plain.model, module.model))
    for before, after in zip(old, new, strict=True):
        assert torch.equal(after[: len(before)], before)
        for row, others in pieces.items():
            torch.testing.assert_close(after[row], before[others].mean(0))
    start = [weight.detach().clone() for weight in new]

    data = data_of(folder, tmp_path, terms)
    trainer = make_trainer(L, callbacks=[Adapters(r=2)], enable_checkpointing=False)
    trainer.fit(module, data)
    assert data.vocabulary == len(tokenizer_of(folder)) + 2 == len(new[0])
    ids = torch.cat([batch["input_ids"].flatten() for batch in data.train_dataloader()])
    assert int(ids.eq(min(pieces)).sum()) == len(data._splits["train"])  # each answer has the new token once
    trainer.save_checkpoint(tmp_path / "last.ckpt")

    again, tokenizer = load_trained(tmp_path / "last.ckpt", torch.device("cpu"))
    prompt = torch.tensor([tokenizer("A zygote is")["input_ids"]])
    assert min(pieces) in prompt
    with torch.no_grad():
        expected = module.eval().model(prompt).logits
        assert torch.equal(again.model(prompt).logits, expected)
    solo.merge_adapters(module)
    with torch.no_grad():
        torch.testing.assert_close(module.model(prompt).logits, expected, atol=1e-4, rtol=1e-4)
    for weight, before in zip(
        [module.model.get_input_embeddings().weight, module.model.lm_head.weight], start, strict=True
    ):
        changed = (weight != before).any(1).nonzero().flatten().tolist()
        assert min(pieces) in changed
        assert set(changed) <= set(pieces)


def test_rows_of_the_settings_are_trained_beside_those_of_new_tokens(
    model_folder: Callable[..., Path], terms: str
) -> None:
    module = HFCausalLM(str(model_folder("Llama", tie_word_embeddings=False)), new_tokens=terms)
    module.configure_model()
    new = module.trainable_token_indices["model.model.embed_tokens"]
    assert len(new) == 2
    tokens = Adapters(r=2, trainable_token_indices=[5, new[0]])._config_for(module).tokens
    assert tokens == {"model.model.embed_tokens": (5, *new), "model.lm_head": (*new,)}


def test_weights_of_which_rows_are_trained_are_not_quantized(
    model_folder: Callable[..., Path], make_trainer: Callable[..., Any], tmp_path: Path, terms: str
) -> None:
    folder = model_folder("Llama")
    module = HFCausalLM(str(folder), new_tokens=terms, optimizer=sgd)
    names: list[str] = []
    watch = LambdaCallback(on_train_start=lambda *_: names.extend(quantized_weights_of(module)))
    techniques = [Adapters(r=2), QuantizedBase(), ChunkedCrossEntropy(), watch]
    make_trainer(L, callbacks=techniques, max_steps=2).fit(module, data_of(folder, tmp_path, terms))
    assert names
    assert not [name for name in names if "lm_head" in name or "embed_tokens" in name]


@pytest.mark.parametrize("tied", [False, long(True)])
def test_loss_without_logits_is_the_same(
    tied: bool, model_folder: Callable[..., Path], make_trainer: Callable[..., Any], tmp_path: Path, terms: str
) -> None:
    folder = model_folder("Llama", tie_word_embeddings=tied)
    rows = []
    for techniques in ([], [ChunkedCrossEntropy(chunk_tokens=8)]):
        module = HFCausalLM(str(folder), new_tokens=terms, optimizer=sgd)
        torch.manual_seed(0)
        make_trainer(L, callbacks=[Adapters(r=2), *techniques]).fit(module, data_of(folder, tmp_path, terms))
        solo.merge_adapters(module)
        rows.append(module.model.lm_head.weight[-2:].detach())
    assert not torch.equal(rows[0][0], rows[0][1])
    torch.testing.assert_close(*rows)


def test_model_with_rows_to_spare_keeps_its_size(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("Llama", vocab_size=330)
    module = HFCausalLM(str(folder), new_tokens=TERMS)
    module.configure_model()
    assert module.model.config.vocab_size == 330
    pieces = add_tokens(tokenizer_of(folder), TERMS)
    weight = module.model.get_input_embeddings().weight
    for row, others in pieces.items():
        torch.testing.assert_close(weight[row], weight[others].mean(0))


def test_model_and_data_with_other_tokens_and_a_method_without_rows_are_refused(
    model_folder: Callable[..., Path], make_trainer: Callable[..., Any], tmp_path: Path, terms: str
) -> None:
    folder = model_folder("Llama")
    with pytest.raises(PresetError, match=mentions("data.new_tokens", "model.new_tokens")):
        make_trainer(L).fit(HFCausalLM(str(folder), optimizer=sgd), data_of(folder, tmp_path, terms))
    module = HFCausalLM(str(folder), new_tokens=terms, optimizer=sgd)
    with pytest.raises(ConflictError, match=mentions("method=lora")):
        make_trainer(L, callbacks=[Adapters(method="ia3")]).fit(module, data_of(folder, tmp_path, TERMS))


@pytest.mark.parametrize("trained", [[], [Adapters(r=2)]])
def test_frozen_rows_are_warned_of(
    trained: Any, model_folder: Callable[..., Path], make_trainer: Callable[..., Any], tmp_path: Path, terms: str
) -> None:
    module = HFCausalLM(str(model_folder("Llama")), new_tokens=terms, optimizer=sgd)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callbacks = trained or [LayerFreezing(trained_blocks=1)]
        make_trainer(L, callbacks=callbacks).fit(module, data_of(model_folder("Llama"), tmp_path, terms))
    assert any("new_tokens" in str(each.message) for each in caught) is not bool(trained)
