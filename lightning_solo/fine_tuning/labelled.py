"""Rows with labels, for classifiers, masked language models and encoder-decoders, as batches of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_solo.atomic_files import read_json
from lightning_solo.data.loss_weights import IGNORED
from lightning_solo.data.tokenizers import tokenizer_of
from lightning_solo.errors import PresetError
from lightning_solo.fine_tuning.data_report import LabelReport
from lightning_solo.fine_tuning.mapped_rows import Collate, MappedRows, RowWriter, padded_batch, share_of
from lightning_solo.fine_tuning.rows import Row, RowError, read_rows

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
        predict_path: of the rows that a classifier labels in ``trainer.predict``, in their order and without labels of
            their own; None for those of validation.

    The other arguments are those of `MappedRows`.

    Attributes:
        labels: names of a classifier's labels, after ``setup``: those of the tokenizer's folder if it has all labels of
            the rows, else those of the rows, sorted.
    """

    max_length: int = 256
    batch_size: int = 16
    validation_share: float = 0.1
    task: Literal["sequence_classification", "token_classification", "masked_lm", "seq2seq_lm"]
    mask_share: float = 0.15
    predict_path: str | None = None
    report_class: ClassVar[type[LabelReport]] = LabelReport

    def __post_init__(self) -> None:
        if not 0 < self.mask_share < 1:
            raise PresetError(f"data.mask_share={self.mask_share}: write a number between 0 and 1")
        if self.predict_path is not None and not self.task.endswith("classification"):
            raise PresetError(f"data.predict_path and data.task={self.task}: only classifiers label rows; drop it")
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

    def predict_dataloader(self) -> Any:
        """Return the rows of ``predict_path``, or those of validation.

        Raises:
            PresetError: a row lacks its text or words; names file and line.
        """
        if self.predict_path is None:
            return self.val_dataloader()
        tokenizer = tokenizer_of(*self.tokenizer_arguments())
        rows: Any = [self._unlabelled(row, tokenizer) for row in read_rows(self.predict_path, _refuse)]
        per_row = self.task == "sequence_classification"
        collate = partial(labelled_batch, pad=self.pad_token_id, numbers=[0], per_row=per_row)
        return DataLoader(rows, batch_size=self.batch_size, num_workers=self.num_workers, collate_fn=collate)

    def _unlabelled(self, row: Row, tokenizer: Any) -> dict[str, Tensor]:
        words = row.value.get("tokens")
        value = {**row.value, "label": "", "labels": [""] * len(words if isinstance(words, list) else "")}
        try:
            check(value, self.task)
        except RowError as error:
            _refuse(row.place, error)
        ids, names = self._encoded(value, tokenizer)
        if not ids:
            raise PresetError(f"{row.place}: no token is left of this row; drop it")
        labels = [0 if isinstance(name, str) else name for name in names]
        return {"input_ids": torch.tensor([*ids, *labels]), "labels": torch.tensor([IGNORED] * len(ids) + labels)}

    def collate(self, tokenizer: Any, split: str) -> Collate:
        """Return the function that makes a batch; the masked tokens of a validation row are the same each time."""
        if self.task == "masked_lm":
            if tokenizer.mask_token_id is None:
                raise PresetError(f"data.task=masked_lm: the tokenizer in {self.tokenizer} has no mask token")
            options: dict[str, Any] = {"special": tokenizer.all_special_ids, "mask": tokenizer.mask_token_id}
            options |= {"vocabulary": self.vocabulary, "share": self.mask_share, "fixed": split == "validation"}
            return partial(masked_batch, pad=self.pad_token_id, **options)
        assert isinstance(self.report, LabelReport)
        found = list(self.report.labels)
        saved = (read_json(Path(self.tokenizer) / "config.json") or {}).get("id2label", {})
        names = [str(saved[key]) for key in sorted(saved, key=int)]
        self.labels = names if {*found} <= {*names} else sorted(found)
        numbers, per_row = [self.labels.index(name) for name in found], self.task == "sequence_classification"
        return partial(labelled_batch, pad=self.pad_token_id, numbers=numbers, per_row=per_row)


def _refuse(place: str, error: RowError) -> None:
    raise PresetError(f"{place}: {error}") from error


def labelled_batch(
    rows: Sequence[Mapping[str, Tensor]], pad: int, numbers: Sequence[int] = (), *, per_row: bool = False
) -> dict[str, Tensor]:
    """Return a batch of rows that are stored as the complements of their tokens, and labels.

    Args:
        rows: items of `TokenRows`.
        pad: token of the padding.
        numbers: number of each stored label among the names of labels; none if labels are tokens.
        per_row: whether a row has one label: labels are (rows,) then.
    """
    is_label = [row["labels"] != IGNORED for row in rows]
    labels = [row["labels"][mask] for row, mask in zip(rows, is_label, strict=True)]
    if numbers:
        table = torch.tensor(numbers)
        labels = [torch.where(each == UNLABELLED, IGNORED, table[each % UNLABELLED]) for each in labels]
    ids = [row["input_ids"][~mask] for row, mask in zip(rows, is_label, strict=True)]
    batch = padded_batch([{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)], pad)
    return {**batch, "labels": batch["labels"].flatten()} if per_row else batch


def masked_batch(
    rows: Sequence[Mapping[str, Tensor]],
    pad: int,
    special: Sequence[int],
    mask: int,
    vocabulary: int,
    share: float,
    *,
    fixed: bool,
) -> dict[str, Tensor]:
    """Return a batch of texts in which some tokens are predicted (Devlin et al. 2018).

    Args:
        rows: items of `TokenRows`.
        pad: token of the padding.
        special: tokens that aren't predicted.
        mask: token that replaces 80 % of the predicted ones; others replace 10 %.
        vocabulary: number of tokens.
        share: share of the tokens that are predicted.
        fixed: whether a batch has the same masks each time.
    """
    batch = labelled_batch(rows, pad)
    ids = batch["input_ids"]
    generator = torch.Generator().manual_seed(int(ids.sum())) if fixed else None
    allowed = batch["attention_mask"].bool() & ~torch.isin(ids, torch.tensor(special))
    predicted = (torch.rand(ids.shape, generator=generator) < share) & allowed
    kind = torch.rand(ids.shape, generator=generator)
    others = torch.randint(vocabulary, ids.shape, generator=generator)
    changed = torch.where(kind < 0.8, mask, torch.where(kind < 0.9, others, ids))
    labels = torch.where(predicted, ids, IGNORED)
    return {**batch, "input_ids": torch.where(predicted, changed, ids), "labels": labels}


def check(row: Mapping[str, Any], task: str) -> None:
    """Refuse a row that lacks a key of the task, or has a value of another type."""
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
