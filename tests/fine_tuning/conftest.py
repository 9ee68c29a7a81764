"""Folders of tiny models with tokenizers and chat templates, as `save_pretrained` makes them; nothing is downloaded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.models import small_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported, which reads it then

KINDS = ("Llama", "Qwen3", "Gemma2", "GPT2", "Mixtral", "Qwen3Moe")
"""Families of language models."""
TEXT = "The quick brown fox jumps over the lazy dog. What is two plus two? It is four. user assistant system\n" * 4
SPECIAL = ("<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
_START = "{{ '<|im_start|>' + message['role'] + '\\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def _template(assistant: str, other: str = "{{ message['content'] + '<|im_end|>\\n' }}", before: str = "") -> str:
    """Return a template in the manner of ChatML with these contents of turns."""
    turn = f"{{% if message['role'] == 'assistant' %}}{assistant}{{% else %}}{other}{{% endif %}}"
    return f"{before}{{% for message in messages %}}{_START}{turn}{{% endfor %}}{_PROMPT}"


TEMPLATES = {
    "tags": _template("{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"),
    "plain": _template("{{ message['content'] + '<|im_end|>\\n' }}"),
    # The tags leave the end of the turn out, so that the model would never learn to stop
    "open": _template("{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\\n' }}"),
    # The thoughts of all answers but the last are dropped, as Qwen3's template does: prefixes don't hold
    "thinking": _template(
        "{{ (message['content'] if loop.last else message['content'].split('</think>')[-1]) + '<|im_end|>\\n' }}"
    ),
    "system": _template(
        "{{ message['content'] + '<|im_end|>\\n' }}",
        before="{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}",
    ),
    "tools": _template(
        "{{ message['content'] + '<|im_end|>\\n' }}",
        before="{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}",
    ),
    "none": None,
}
"""Name -> chat template; "plain", "system" and "tools" have no generation tags."""


def tiny_tokenizer(template: str = "tags") -> Any:
    """Return a byte-level BPE tokenizer of 320 tokens with the chat template of this name."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[3],
        mask_token=SPECIAL[4],
    )
    fast.chat_template = TEMPLATES[template]
    return fast


def save_model(
    folder: Path, kind: str = "Llama", task: str = "ForCausalLM", template: str = "tags", **options: Any
) -> Path:
    """Save a random model of a kind in several shards, and its tokenizer; return the folder."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer(template)
    dtype = options.pop("dtype", torch.float32)
    options = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, **options}
    model = small_model(kind, task, **options)
    for p in model.parameters():
        p.data.normal_(std=0.1)  # transformers' biases and norms are 0 and 1, by which a wrong tensor isn't seen
    model.to(dtype).save_pretrained(folder, max_shard_size="40KB")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function of `save_model`'s arguments that returns a folder, made once: copy it before changing it."""
    made: dict[str, Path] = {}

    def folder(kind: str = "Llama", task: str = "ForCausalLM", template: str = "tags", **options: Any) -> Path:
        key = json.dumps([kind, task, template, {name: str(value) for name, value in sorted(options.items())}])
        if key not in made:
            made[key] = save_model(tmp_path_factory.mktemp(kind) / "model", kind, task, template, **options)
        return made[key]

    return folder


def conversations(count: int) -> list[dict[str, Any]]:
    """Return rows of chats, of unlike length."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {index} plus {index}?"},
                {"role": "assistant", "content": f"It is {2 * index}." + " The lazy dog." * (index % 3)},
            ]
        }
        for index in range(count)
    ]


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a JSONL file of 24 conversations."""
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in conversations(24)), encoding="utf-8")
    return file


class Rows(L.LightningDataModule):
    """Rows of random tokens of unlike length, padded on the right; a batch is a dict as `data=chat` gives.

    Args:
        rows: number of rows.
        batch_size: rows of a batch.
        max_length: tokens of a row at most.
        tokens: size of the vocabulary.
    """

    def __init__(self, rows: int = 12, batch_size: int = 2, max_length: int = 16, tokens: int = 300) -> None:
        super().__init__()
        self.max_length, self.vocabulary, self.batch_size = max_length, tokens, batch_size
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(6, max_length + 1, (rows,), generator=generator).tolist()
        self.rows = [torch.randint(4, tokens, (length,), generator=generator) for length in lengths]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.rows, self.batch_size, collate_fn=padded)  # type: ignore[arg-type]

    val_dataloader = test_dataloader = train_dataloader


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch of rows, of which the first third of each is a prompt without labels."""
    longest = max(map(len, rows))
    batch = {
        "input_ids": torch.zeros(len(rows), longest, dtype=torch.int64),
        "attention_mask": torch.zeros(len(rows), longest, dtype=torch.int64),
        "labels": torch.full((len(rows), longest), -100),
    }
    for index, row in enumerate(rows):
        batch["input_ids"][index, : len(row)] = row
        batch["attention_mask"][index, : len(row)] = 1
        batch["labels"][index, len(row) // 3 : len(row)] = row[len(row) // 3 :]
    return batch
