"""Answers of a language model: generated one by one, and at each validation of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_solo.data.tokenizers import tokenizer_of
from lightning_solo.export.generation_files import end_of_answer
from lightning_solo.nn.forwards import evaluating

FILE = "samples.jsonl"
"""File in the run's folder with a line per sample."""


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Return the tokens of a user's turn by the tokenizer's chat template, or of the plain text if it has none."""
    if not tokenizer.chat_template:
        return list(tokenizer(prompt)["input_ids"])
    turns = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    return list(ids)


def answer(model: Any, tokenizer: Any, ids: Sequence[int], max_tokens: int, streamer: Any = None) -> list[int]:
    """Return the likeliest continuation of a prompt, up to an end token, which is included.

    The model generates in evaluation mode with a cache of keys and values; each part's mode is restored.

    Args:
        model: of transformers, with ``generate``.
        tokenizer: its tokenizer, whose end token and end of an answer in the chat template end the answer, as the
            model's own ends do.
        ids: the prompt's tokens.
        max_tokens: tokens to generate at most.
        streamer: an object of transformers that gets each token at once.
    """
    own = model.generation_config.eos_token_id
    ends = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id, end_of_answer(tokenizer)} - {None}
    devices = [p.device for p in model.parameters()]
    device = next((each for each in devices if each.type != "cpu"), devices[0])  # some weights may be on the host
    prompt = torch.tensor([list(ids)], device=device)
    with evaluating(model), torch.no_grad():
        tokens = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            eos_token_id=sorted(ends) or None,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0),
            streamer=streamer,
        )
    return [int(token) for token in tokens[0, len(ids) :]]


class Samples(Callback):
    """Answers prompts at each validation; writes them to ``samples.jsonl`` and to loggers that take text.

    Args:
        prompts: texts, each the turn of a user; or a number of validation rows, whose prompts end before their first
            label.
        max_tokens: largest number of tokens of an answer.
    """

    def __init__(self, prompts: int | Sequence[str], max_tokens: int) -> None:
        self.prompts = prompts
        self.max_tokens = max_tokens
        self._tokenizer: Any = None
        self._rows: list[list[int]] = []

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Read the tokenizer."""
        if self._tokenizer is None:
            template = getattr(trainer.datamodule, "chat_template", None)
            self._tokenizer = tokenizer_of(pl_module.path, template, pl_module.new_tokens)
        if not isinstance(self.prompts, int):
            self._rows = [prompt_ids(self._tokenizer, prompt) for prompt in self.prompts]

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the prompts of the first rows."""
        if isinstance(self.prompts, int) and len(self._rows) < self.prompts:
            self._rows += prompts_of(batch)[: self.prompts - len(self._rows)]

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Generate, write and log the answers."""
        if trainer.sanity_checking or not self._rows:
            return
        decode = self._tokenizer.decode
        with trainer.precision_plugin.forward_context():
            answers = [answer(pl_module.model, self._tokenizer, ids, self.max_tokens) for ids in self._rows]
        pairs = [(decode(ids), decode(tokens)) for ids, tokens in zip(self._rows, answers, strict=True)]
        step = trainer.global_step
        with (Path(trainer.default_root_dir) / FILE).open("a", encoding="utf-8") as file:
            for prompt, text in pairs:
                file.write(json.dumps({"step": step, "prompt": prompt, "answer": text}, ensure_ascii=False) + "\n")
        for logger in trainer.loggers:
            if hasattr(logger, "log_text"):  # Weights & Biases
                logger.log_text("samples", columns=["prompt", "answer"], data=[list(pair) for pair in pairs])
            elif hasattr(logger.experiment, "add_text"):  # TensorBoard
                for index, (prompt, text) in enumerate(pairs):
                    logger.experiment.add_text(f"samples/{index}", f"{prompt}\n\n**{text}**", step)


def prompts_of(batch: dict[str, Tensor]) -> list[list[int]]:
    """Return the tokens of each row before its first label; none of a row without labels or without a prompt."""
    prompts = []
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        first = next((place for place, label in enumerate(labels) if label >= 0), 0)
        prompts += [ids[:first]] if first else []
    return prompts
