"""Rows with labels, for classifiers, masked language models and encoder-decoders, as batches of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_solo.atomic_files import read_json
from lightning_solo.data.loss_weights import IGNORED
from lightning_solo.errors import PresetError, nearest
from lightning_solo.fine_tuning.data_report import LabelReport
from lightning_solo.fine_tuning.mapped_rows import Collate, MappedRows, RowWriter, padded, share_of
from lightning_solo.fine_tuning.rows import RowError, read_rows

KEYS = {
    "sequence_classification": ("text", "label"),
    "token_classification": ("tokens", "labels"),
    "masked_lm": ("text",),
    "seq2seq_lm": ("source", "target"),
}
"""Task -> keys of a row."""
UNLABELLED = 2**31 - 1
"""Stored label of a token that has none."""


@dataclass(eq=False, repr=False, kw_only=True)
class LabelledRows(MappedRows):
    """Rows of a file as padded batches of ``input_ids``, ``attention_mask`` and ``labels``.

    Rows are ``{"text": ..., "label": ...}`` (with ``"pair"`` for two texts), ``{"tokens": [...], "labels": [...]}``,
    ``{"text": ...}`` or ``{"source": ..., "target": ...}``, by the task. Longer rows are cut.

    Args:
        task: one of `KEYS`.
        mask_share: share of the tokens that a masked language model predicts.

    The other arguments are those of `MappedRows`.

    Attributes:
        labels: names of a classifier's labels, after ``setup``: those of the tokenizer's folder if it has all labels of
            the rows, else those of the rows, sorted.
    """

    max_length: int = 256
    batch_size: int = 16
    validation_share: float = 0.1
    task: str
    mask_share: float = 0.15
    report_class: ClassVar[type[LabelReport]] = LabelReport

    def __post_init__(self) -> None:
        if self.task not in KEYS:
            raise PresetError(f"data.task={self.task!r}{nearest(self.task, KEYS)}write one of {', '.join(KEYS)}")
        if not 0 < self.mask_share < 1:
            raise PresetError(f"data.mask_share={self.mask_share}: write a number between 0 and 1")
        super().__post_init__()
        self.labels: list[str] = []

    def settings(self) -> list[Any]:
        return [self.task]

    def columns(self) -> Sequence[str]:
        return [*KEYS[self.task], *(["pair"] if self.task == "sequence_classification" else [])]

    def tokenize(self, tokenizer: Any, writer: RowWriter) -> None:
        """Write each row as the complements of its tokens, then its labels."""
        numbers: dict[str, int] = {}  # of labels, in the order of their first occurrence
        for row in read_rows(self.path, writer.drop):
            with writer.row(row):
                check(row.value, self.task)
                ids, labels = self._encoded(row.value, tokenizer)
                if not ids:
                    raise RowError("no token", "no token is left of this row; drop it")
                names = [name for name in labels if isinstance(name, str)]
                writer.report.labels.update(names)
                for name in names:
                    numbers.setdefault(name, len(numbers))
                stored = [numbers[label] if isinstance(label, str) else label for label in labels]
                writer.report.tokens += len(ids)
                writer.add([*(~id_ for id_ in ids), *stored], share_of(row.value, self.columns()))

    def _encoded(self, row: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[int | str]]:
        """Return the tokens of a row, and its labels: names, or numbers of tokens."""
        cut = {"truncation": True, "max_length": self.max_length}
        if self.task == "token_classification":
            encoded = tokenizer(row["tokens"], is_split_into_words=True, **cut)
            words = encoded.word_ids()
            pairs = zip(words, [None, *words], strict=False)
            # a word's first token has its label
            names = [UNLABELLED if word in (None, before) else str(row["labels"][word]) for word, before in pairs]
            return encoded["input_ids"], names
        if self.task == "seq2seq_lm":
            target = tokenizer(text_target=row["target"], **cut)["input_ids"]
            return tokenizer(row["source"], **cut)["input_ids"], target
        ids = tokenizer(row["text"], row.get("pair"), **cut)["input_ids"]
        return ids, [str(row["label"])] if self.task == "sequence_classification" else []

    def collate(self, tokenizer: Any, split: str) -> Collate:
        """Return the function that makes a batch; the masked tokens of a validation row are the same each time."""
        if self.task == "masked_lm":
            if tokenizer.mask_token_id is None:
                raise PresetError(f"data.task=masked_lm: the tokenizer in {self.tokenizer} has no mask token")
            return MaskedBatch(tokenizer, self.pad_token_id, self.mask_share, fixed=split == "validation")
        assert isinstance(self.report, LabelReport)
        found = list(self.report.labels)
        saved = (read_json(Path(self.tokenizer) / "config.json") or {}).get("id2label", {})
        names = [str(saved[key]) for key in sorted(saved, key=int)]
        self.labels = names if {*found} <= {*names} else sorted(found)
        return LabelledBatch(self.pad_token_id, [self.labels.index(name) for name in found], self.task)


class LabelledBatch:
    """Makes a batch of rows that are stored as tokens and labels.

    Args:
        pad: token of the padding.
        numbers: number of each stored label among the names of labels; empty for tokens as labels.
        task: one of `KEYS`.
    """

    def __init__(self, pad: int, numbers: Sequence[int], task: str) -> None:
        self.pad, self.numbers, self.task = pad, torch.tensor(numbers), task

    def __call__(self, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask``, (rows, longest row), and ``labels``, for sequences (rows,)."""
        ids = [row["input_ids"][row["labels"] == IGNORED] for row in rows]
        labels = [self._labels(row["labels"][row["labels"] != IGNORED]) for row in rows]
        return {
            "input_ids": padded(ids, self.pad),
            "attention_mask": padded([torch.ones_like(each) for each in ids], 0),
            "labels": torch.cat(labels) if self.task == "sequence_classification" else padded(labels, IGNORED),
        }

    def _labels(self, stored: Tensor) -> Tensor:
        if not len(self.numbers):
            return stored
        has_label = stored != UNLABELLED
        return torch.where(has_label, self.numbers[stored * has_label], IGNORED)


class MaskedBatch(LabelledBatch):
    """Makes a batch of texts in which some tokens are masked.

    Args:
        tokenizer: of transformers.
        pad: token of the padding.
        share: share of the tokens that are predicted.
        fixed: whether a batch has the same masks each time.
    """

    def __init__(self, tokenizer: Any, pad: int, share: float, *, fixed: bool) -> None:
        super().__init__(pad, [], "masked_lm")
        self.special, self.mask = torch.tensor(tokenizer.all_special_ids), tokenizer.mask_token_id
        self.vocabulary, self.share, self.fixed = len(tokenizer), share, fixed

    def __call__(self, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return a batch: of the predicted tokens 80 % become masks and 10 % random ones (Devlin et al. 2018)."""
        batch = super().__call__(rows)
        ids = batch["input_ids"]
        generator = torch.Generator().manual_seed(int(ids.sum())) if self.fixed else None
        special = torch.isin(ids, self.special) | batch["attention_mask"].eq(0)
        predicted = (torch.rand(ids.shape, generator=generator) < self.share) & ~special
        kind = torch.rand(ids.shape, generator=generator)
        words = torch.randint(self.vocabulary, ids.shape, generator=generator)
        changed = torch.where(kind < 0.8, self.mask, torch.where(kind < 0.9, words, ids))
        return {
            **batch,
            "input_ids": torch.where(predicted, changed, ids),
            "labels": torch.where(predicted, ids, IGNORED),
        }


def check(row: Mapping[str, Any], task: str) -> None:
    """Refuse a row that lacks a key of the task, or has a value of another type.

    Raises:
        RowError: names the key.
    """
    keys = " and ".join(KEYS[task])
    kind = list if task == "token_classification" else str
    for key in KEYS[task]:
        if row.get(key) is None:
            raise RowError(f"no {key}", f"a row of {task} has {keys}; it has {', '.join(row)}")
        if key != "label" and not isinstance(row[key], kind):
            raise RowError(f"type of {key}", f"a row of {task} has {keys}; {key} is a {type(row[key]).__name__}")
    if task == "token_classification" and len(row["tokens"]) != len(row["labels"]):
        count = len(row["tokens"])
        raise RowError("number of labels", f"{count} tokens and {len(row['labels'])} labels; write one for each")
