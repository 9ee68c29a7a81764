"""Samples are generated greedily, in evaluation mode with a cache, and leave the module as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import lightning_solo as solo
from lightning_solo.data.tokenizers import tokenizer_of
from lightning_solo.errors import CheckpointError
from lightning_solo.fine_tuning.causal_lm import HFCausalLM
from lightning_solo.fine_tuning.samples import answer, prompt_ids, prompts_of
from tests.fine_tuning.conftest import KINDS, Rows, padded
from tests.messages import mentions

pytest.importorskip("transformers")
Folder = Callable[..., Path]
Make = Callable[..., Any]


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.long] * (k != "Llama")) for k in KINDS])
def test_answer_is_the_likeliest_token_each_time(kind: str, model_folder: Folder) -> None:
    dropout = {} if kind == "GPT2" else {"attention_dropout": 0.5}
    module = HFCausalLM(str(model_folder(kind, **dropout)))
    module.configure_model()
    tokenizer = tokenizer_of(module.path)
    ids = prompt_ids(tokenizer, "What is two plus two?")
    assert tokenizer.decode(ids).endswith("<|im_end|>\n<|im_start|>assistant\n")
    module.model.lm_head.eval()
    modes = [part.training for part in module.modules()]
    tokens = answer(module.model, tokenizer, ids, 8)
    assert [part.training for part in module.modules()] == modes
    assert True in modes
    assert False in modes
    module.eval()
    text = list(ids)
    for token in tokens:
        logits = module({"input_ids": torch.tensor([text])})
        assert logits[0, -1].argmax() == token
        text.append(token)
    assert len(tokens) == 8 or tokens[-1] == tokenizer.eos_token_id


def test_answer_ends_at_the_end_of_the_turn(model_folder: Folder) -> None:
    module = HFCausalLM(str(model_folder("Llama")))
    module.configure_model()
    tokenizer = tokenizer_of(module.path)
    free = answer(module.model, tokenizer, [5, 6, 7], 6)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(free[2])
    assert answer(module.model, tokenizer, [5, 6, 7], 6) == free[: free.index(free[2]) + 1]


def test_answer_ends_where_the_chat_template_ends_one(model_folder: Folder) -> None:
    module = HFCausalLM(str(model_folder("Llama")))
    module.configure_model()
    tokenizer = tokenizer_of(module.path)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    module.model.generation_config.eos_token_id = None
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(9)  # as base models have another one than the template
    head = torch.zeros_like(module.model.lm_head.weight)
    head[end] = module.model.model(torch.tensor([[5, 6, 7]])).last_hidden_state[0, -1].detach()  # its likeliest token
    module.model.lm_head.weight = torch.nn.Parameter(head)
    assert answer(module.model, tokenizer, [5, 6, 7], 6) == [end]


def test_prompts_of_rows_end_before_their_first_label() -> None:
    rows = Rows().rows[:2]
    batch = padded(rows)
    assert prompts_of(batch) == [row[: len(row) // 3].tolist() for row in rows]
    batch["labels"][0] = -100
    batch["labels"][1, 0] = 5
    assert prompts_of(batch) == []


class Texts(L.pytorch.loggers.Logger):
    """Keeps texts as TensorBoard's logger gets them."""

    name, version = "texts", 0

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[Any] = []

    @property
    def experiment(self) -> Any:
        return self

    def add_text(self, *args: Any) -> None:
        self.texts.append(args)

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


@pytest.mark.any_device
@pytest.mark.parametrize("prompts", [2, pytest.param(["2 + 2?"], marks=pytest.mark.long)])
def test_samples_are_written_and_logged_and_change_nothing(
    prompts: Any, model_folder: Folder, make_trainer: Make, tmp_path: Path
) -> None:
    states, folder = [], model_folder("Llama")  # made here, since that draws random numbers
    for samples in (prompts, 0):
        torch.manual_seed(0)
        module = HFCausalLM(str(folder), samples=samples, sample_tokens=4)
        logger = Texts()
        techniques = [
            solo.callbacks.Adapters(r=2),
            solo.callbacks.QuantizedBase(format="int8"),
            solo.callbacks.ChunkedCrossEntropy(),
        ]
        trainer = make_trainer(
            L, callbacks=techniques, logger=logger, log_every_n_steps=1, val_check_interval=3, num_sanity_val_steps=1
        )
        trainer.fit(module, Rows())
        states.append({name: p for name, p in module.named_parameters() if p.requires_grad})
        lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
        count = 1 if isinstance(prompts, list) else 2
        assert [line["step"] for line in lines] == [3] * count + [6] * count
        assert all(line["prompt"] and isinstance(line["answer"], str) for line in lines)
        assert len(logger.texts) == (len(lines) if samples else 0)
    for name, p in states[0].items():
        assert torch.equal(p, states[1][name]), name


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=mentions(str(tmp_path), "tokenizer")):
        tokenizer_of(tmp_path)
