"""Rows with labels, for classifiers, masked language models and encoder-decoders, as batches of tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_solo.data.loss_weights import IGNORED
from lightning_solo.data.tokenizers import tokenizer_of
from lightning_solo.errors import PresetError, nearest
from lightning_solo.fine_tuning.mapped_rows import share_of
from lightning_solo.fine_tuning.rows import read_rows

KEYS = {
    "sequence_classification": ("text", "label"),
    "token_classification": ("tokens", "labels"),
    "masked_lm": ("text",),
    "seq2seq_lm": ("source", "target"),
}
"""Task -> keys of a row."""


class LabelledRows(L.LightningDataModule):
    """Rows of a file as padded batches of ``input_ids``, ``attention_mask`` and ``labels``.

    Rows are ``{"text": ..., "label": ...}`` (with ``"pair"`` for two texts), ``{"tokens": [...], "labels": [...]}``,
    ``{"text": ...}`` or ``{"source": ..., "target": ...}``, by the task. Longer rows are cut.

    Attributes:
        labels: names of a classifier's labels: those of the tokenizer's folder if it has all that occur, else those
            that occur, sorted.

    Args:
        path: of the rows, as `read_rows` takes them.
        tokenizer: folder of the tokenizer.
        task: one of `KEYS`.
        max_length: tokens of a row at most.
        batch_size: rows of a batch.
        validation_share: share of the rows to validate on, by a hash of each row's content.
        mask_share: share of the tokens that a masked language model predicts.
        seed: of the order.
        num_workers: processes that load batches.

    Raises:
        PresetError: an argument is out of range.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str,
        task: str,
        max_length: int = 256,
        batch_size: int = 16,
        validation_share: float = 0.1,
        mask_share: float = 0.15,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if task not in KEYS:
            raise PresetError(f"data.task={task!r}{nearest(task, KEYS)}write one of {', '.join(KEYS)}")
        for name, share in (("validation_share", validation_share), ("mask_share", mask_share)):
            if not 0 < share < 1:
                raise PresetError(f"data.{name}={share}: write a number between 0 and 1")
        if min(max_length, batch_size) < 1:
            raise PresetError(f"data.max_length={max_length}, data.batch_size={batch_size}: write at least 1")
        self.save_hyperparameters("tokenizer", logger=False)
        self.path, self.tokenizer, self.task = path, tokenizer, task
        self.max_length, self.batch_size, self.num_workers = max_length, batch_size, num_workers
        self.validation_share, self.mask_share, self.seed = validation_share, mask_share, seed
        self.labels: list[str] = []
        self.vocabulary = 0
        self.pad_token_id: int | None = None
        self._tokenizer: Any = None
        self._rows: dict[str, list[dict[str, list[int] | int]]] = {}

    def setup(self, stage: str) -> None:
        """Read and tokenize the rows.

        Raises:
            PresetError: a row lacks a key or is of another kind; names file and line.
        """
        if self._rows:
            return
        self._tokenizer = tokenizer = tokenizer_of(self.tokenizer)
        self.vocabulary, self.pad_token_id = len(tokenizer), tokenizer.pad_token_id
        if self.task == "masked_lm" and tokenizer.mask_token_id is None:
            raise PresetError(f"data.task=masked_lm: the tokenizer in {self.tokenizer} has no mask token")
        rows = list(read_rows(self.path))
        for place, row in rows:
            _check(place, row, self.task)
        if self.task.endswith("classification"):
            self.labels = self._names(rows)
        items = [self._item(place, row) for place, row in rows]
        shares = [share_of(row) for _, row in rows]
        most = max(sorted(shares)[0], self.validation_share)  # at least one row
        held = [share <= most for share in shares]
        if all(held):
            raise PresetError(f"{self.path}: none of {len(items)} rows is left to train on; write more rows")
        self._rows = {
            "validation": [item for item, out in zip(items, held, strict=True) if out],
            "train": [item for item, out in zip(items, held, strict=True) if not out],
        }

    def _names(self, rows: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        found = {name for _, row in rows for name in _labels(row)}
        file = Path(self.tokenizer) / "config.json"
        saved = json.loads(file.read_text(encoding="utf-8")).get("id2label", {}) if file.is_file() else {}
        names = [str(saved[key]) for key in sorted(saved, key=int)]
        return names if found <= {*names} else sorted(found)

    def _item(self, place: str, row: dict[str, Any]) -> dict[str, Any]:
        labels: list[int] | int
        cut = {"truncation": True, "max_length": self.max_length}
        if self.task == "token_classification":
            encoded = self._tokenizer(row["tokens"], is_split_into_words=True, **cut)
            words = encoded.word_ids()
            # a word's first token has its label
            first = [word is not None and (not index or words[index - 1] != word) for index, word in enumerate(words)]
            names = _labels(row)
            labels = [self.labels.index(names[w]) if f else IGNORED for w, f in zip(words, first, strict=True)]
        elif self.task == "seq2seq_lm":
            encoded = self._tokenizer(row["source"], **cut)
            labels = self._tokenizer(text_target=row["target"], **cut)["input_ids"]
        else:
            encoded = self._tokenizer(row["text"], row.get("pair"), **cut)
            labels = self.labels.index(str(row["label"])) if self.task == "sequence_classification" else []
        if not encoded["input_ids"]:
            raise PresetError(f"{place}: no token is left of this row; drop it")
        return {"input_ids": encoded["input_ids"], "labels": labels}

    def train_dataloader(self) -> DataLoader[Any]:
        """Return shuffled batches."""
        return self._loader("train", shuffle=True, generator=torch.Generator().manual_seed(self.seed))

    def val_dataloader(self) -> DataLoader[Any]:
        """Return batches whose masked tokens are the same each time."""
        return self._loader("validation")

    test_dataloader = val_dataloader

    def _loader(self, split: str, **options: Any) -> DataLoader[Any]:
        collate = partial(self._batch, fixed=split == "validation")
        rows: Any = self._rows[split]
        return DataLoader(rows, self.batch_size, collate_fn=collate, num_workers=self.num_workers, **options)

    def _batch(self, items: list[dict[str, Any]], *, fixed: bool) -> dict[str, Tensor]:
        pad = self.pad_token_id or 0
        ids = _padded([item["input_ids"] for item in items], pad)
        lengths = torch.tensor([len(item["input_ids"]) for item in items])
        batch = {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}
        if self.task == "sequence_classification":
            return {**batch, "labels": torch.tensor([item["labels"] for item in items])}
        if self.task != "masked_lm":
            return {**batch, "labels": _padded([item["labels"] for item in items], IGNORED)}
        generator = torch.Generator().manual_seed(int(ids.sum())) if fixed else None
        return {**batch, **self._masked(batch, generator)}

    def _masked(self, batch: dict[str, Tensor], generator: torch.Generator | None) -> dict[str, Tensor]:
        """Return ids and labels with masked tokens: of those chosen 80 % become masks, 10 % random (Devlin 2018)."""
        ids = batch["input_ids"]
        special = torch.isin(ids, torch.tensor(self._tokenizer.all_special_ids)) | batch["attention_mask"].eq(0)
        chosen = (torch.rand(ids.shape, generator=generator) < self.mask_share) & ~special
        kind = torch.rand(ids.shape, generator=generator)
        words = torch.randint(self.vocabulary, ids.shape, generator=generator)
        changed = torch.where(kind < 0.8, self._tokenizer.mask_token_id, torch.where(kind < 0.9, words, ids))
        return {"input_ids": torch.where(chosen, changed, ids), "labels": torch.where(chosen, ids, IGNORED)}


def _labels(row: dict[str, Any]) -> list[str]:
    return [str(name) for name in (row["labels"] if "labels" in row else [row["label"]])]


def _check(place: str, row: dict[str, Any], task: str) -> None:
    missing = [key for key in KEYS[task] if key not in row]
    kind = list if task == "token_classification" else str
    wrong = [key for key in KEYS[task] if key in row and key != "label" and not isinstance(row[key], kind)]
    if missing or wrong:
        there = f"it has {', '.join(row)}" if missing else f"{wrong[0]} is a {type(row[wrong[0]]).__name__}"
        raise PresetError(f"{place}: a row of {task} has {' and '.join(KEYS[task])}; {there}")
    if task == "token_classification" and len(row["tokens"]) != len(row["labels"]):
        raise PresetError(f"{place}: {len(row['tokens'])} tokens and {len(row['labels'])} labels; write one for each")


def _padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    result = torch.full((len(rows), max(map(len, rows))), value)
    for index, row in enumerate(rows):
        result[index, : len(row)] = torch.tensor(row)
    return result
