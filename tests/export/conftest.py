"""Folders of tiny language models with tokenizers, and a LightningModule that trains one."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.models import small_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
Models = Callable[..., Path]


def save_tokenizer(folder: Path, template: str | None = CHATML, **tokens: str) -> Any:
    """Save a tokenizer of bytes and special tokens; return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    own = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    own.add_special_tokens(list(SPECIAL))
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", **tokens}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, **names)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return a function that returns the folder of a random model of a kind, made once."""
    made: dict[str, Path] = {}

    def folder(kind: str = "Llama", dtype: torch.dtype = torch.float32, **options: Any) -> Path:
        key = json.dumps([kind, str(dtype), options])
        if key not in made:
            torch.manual_seed(0)
            model = small_model(kind, vocab_size=264, **options).to(dtype)
            for p in model.parameters():
                p.data.normal_(std=0.2)  # also biases and norms, so that each matters
            made[key] = tmp_path_factory.mktemp(kind) / "base"
            model.save_pretrained(made[key])
            save_tokenizer(made[key])
        return made[key]

    return folder


class Tuned(L.LightningModule):
    """A language model from a folder."""

    def __init__(self, path: str, lr: float = 1e-2) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        self.save_hyperparameters()
        self.path = path
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(5, 101).view(8, 12), batch_size=2)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.hparams["lr"])


IDS = torch.arange(5, 45).view(2, 20)


@torch.no_grad()
def answers(model: Any) -> Tensor:
    """Return a model's logits in fp32."""
    output: Tensor = model.eval()(input_ids=IDS).logits.float()
    return output


def far(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the largest logit."""
    return float((a - b).abs().max() / b.abs().max())


def noise(model: Any) -> float:
    """Return how far a model's logits in its own type are from those computed in fp32."""
    return far(answers(model), answers(copy.deepcopy(model).float()))
