"""Rows of tokens that are written once to a mapped file in a cache, and batches of them."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_solo.atomic_files import whole_file
from lightning_solo.checkpoint.writing import digest
from lightning_solo.data.item_lengths import REPORT_EVERY_S
from lightning_solo.data.loss_weights import IGNORED
from lightning_solo.data.tokenizers import tokenizer_of
from lightning_solo.data.tokens import TokenFile
from lightning_solo.errors import PresetError
from lightning_solo.fine_tuning.data_report import DataReport
from lightning_solo.fine_tuning.rows import RowError
from lightning_solo.machine import user_cache, versions

LAYOUT = 2
"""Number of the cache's layout; a change makes new files."""
SHOWN = 5
"""Bad rows that a refusal names."""


class MappedRows(L.LightningDataModule):
    """Batches of rows of tokens.

    A batch has ``input_ids``, ``attention_mask`` and ``labels``, (batch, sequence) in int64, padded on the right.
    A label is the token at its own position, and -100 for all that isn't trained.

    Attributes:
        report: counts of rows and tokens, after ``setup``.
        vocabulary: tokens of the tokenizer, after ``setup``.
    """

    chat_template: str | None = None
    new_tokens: Sequence[str] = ()
    max_length: int

    def __init__(
        self,
        path: str,
        tokenizer: str,
        batch_size: int,
        bad_rows: str,
        validation_share: float,
        cache: str | None,
        num_workers: int,
        seed: int,
    ) -> None:
        super().__init__()
        at_least("batch_size", batch_size, 1)
        one_of("bad_rows", bad_rows, ("refuse", "drop"))
        if not 0 <= validation_share < 1:
            raise PresetError(f"data.validation_share={validation_share}; write a number from 0 to 1, such as 0.05")
        self.path, self.tokenizer, self.cache = path, tokenizer, cache
        self.batch_size, self.num_workers, self.seed = batch_size, num_workers, seed
        self.bad_rows, self.validation_share = bad_rows, validation_share
        self.report: DataReport | None = None
        self.vocabulary: int | None = None
        self._splits: dict[str, TokenRows] = {}
        self._collate = Padded(0)

    def setup(self, stage: str) -> None:
        """Read and tokenize the rows, unless the cache has them.

        Raises:
            PresetError: rows can't be used, or none is left; names file and line.
            CapabilityError: transformers or pyarrow is missing.
        """
        if self._splits:
            return
        tokenizer = tokenizer_of(self.tokenizer, self.chat_template, self.new_tokens)
        self.vocabulary = len(tokenizer)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self._collate = Padded(pad or 0)
        file = self._cache_file(tokenizer)
        index = _cached(file) or self._write(file, tokenizer)
        self.report = type(self.new_report())(**index["report"])
        self._split(TokenFile(file, "int32"), index["lengths"], index["shares"])
        self.report.show(tokenizer, self._splits["train"])

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        return self._loader("train", shuffle=True, generator=generator)

    def val_dataloader(self) -> Any:
        return self._loader("validation") if len(self._splits["validation"]) else []

    def test_dataloader(self) -> Any:
        return self.val_dataloader()

    def new_report(self) -> DataReport:
        """Return a report without rows."""
        raise NotImplementedError

    def files(self) -> list[Path]:
        """Return the files whose content the rows depend on."""
        raise NotImplementedError

    def settings(self) -> list[Any]:
        """Return the arguments that the rows depend on, beside files and tokenizer."""
        raise NotImplementedError

    def tokenize(self, tokenizer: Any, written: Written) -> None:
        """Add all rows, in order."""
        raise NotImplementedError

    def _loader(self, split: str, **arguments: Any) -> DataLoader[Any]:
        return DataLoader(
            self._splits[split],
            self.batch_size,
            num_workers=self.num_workers,
            collate_fn=self._collate,
            **arguments,
        )

    def _split(self, file: TokenFile, lengths: Tensor, shares: Tensor) -> None:
        begins = lengths.cumsum(0) - lengths
        chosen = shares < self.validation_share
        if self.validation_share and not chosen.any() and len(shares) > 1:
            chosen[shares.argmin()] = True
        if chosen.all():
            chosen[shares.argmax()] = False
        for name, rows in (("train", ~chosen), ("validation", chosen)):
            self._splits[name] = TokenRows(file, begins[rows], lengths[rows])
        assert self.report is not None
        self.report.train, self.report.validation = int((~chosen).sum()), int(chosen.sum())

    def _cache_file(self, tokenizer: Any) -> Path:
        """Return the path of the tokenized rows, which is named by all that they depend on."""
        folder = self.cache or ((home := user_cache()) and home / "lightning_solo" / "tokens")
        folder = Path(folder) if folder else Path(tempfile.gettempdir()) / "lightning_solo" / "tokens"
        words = (
            tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else str(sorted(tokenizer.get_vocab().items()))
        )
        parts = [
            [LAYOUT, type(self).__name__, versions().get("transformers")],
            [digest(file).sha256 for file in self.files()],
            hashlib.sha256(words.encode("utf-8", "surrogatepass")).hexdigest(),
            [str(tokenizer.chat_template), str(tokenizer.special_tokens_map)],
            [self.max_length, self.bad_rows, *self.settings()],
        ]
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        return folder / f"{Path(self.path).stem}-{key}.tokens"

    def _write(self, file: Path, tokenizer: Any) -> dict[str, Any]:
        """Write tokens and index to the cache; return the index."""
        try:
            with whole_file(file) as new, new.open("wb") as tokens:
                written = Written(tokens, self.new_report(), refuse=self.bad_rows == "refuse")
                self.tokenize(tokenizer, written)
                index = written.index(self.path)
            with whole_file(file.with_suffix(".index")) as new, new.open("wb") as place:
                torch.save(index, place)
        except OSError as error:
            raise PresetError(
                f"data.cache: {file} can't be written ({error.strerror}); write data.cache=<a folder with room>"
            ) from error
        return index


def at_least(name: str, value: int, least: int) -> None:
    """Refuse a smaller value of an argument."""
    if value < least:
        raise PresetError(f"data.{name}={value}; write {least} or more")


def one_of(name: str, word: str, words: Sequence[str]) -> None:
    """Refuse another word than these."""
    if word not in words:
        raise PresetError(f"data.{name}={word!r}; write {' or '.join(words)}")


def _cached(file: Path) -> dict[str, Any] | None:
    """Return the index of a whole file in the cache."""
    try:
        index: dict[str, Any] = torch.load(file.with_suffix(".index"), weights_only=True)
        return index if file.stat().st_size == 4 * int(index["lengths"].sum()) else None
    except (OSError, RuntimeError, EOFError, UnpicklingError):
        return None


class Written:
    """Rows that are written to a file, with their lengths, hashes and counts.

    Args:
        file: gets the tokens; one that isn't trained is stored as its complement, which is negative.
        report: counts rows.
        refuse: raise at bad rows, after `SHOWN` of them or all rows.
    """

    def __init__(self, file: IO[bytes], report: Any, *, refuse: bool) -> None:
        self.report = report
        self._file, self._refuse = file, refuse
        self._refused: list[str] = []
        self._lengths, self._shares = array("q"), array("d")
        self._said = time.monotonic()

    def bad(self, error: RowError) -> None:
        """Count a row that can't be used; the message begins with its place.

        Raises:
            PresetError: bad rows are refused, and this is the last one to be named.
        """
        self.report.read += 1
        self.report.drop(error.reason, str(error).partition(": ")[0])
        if self._refuse:
            self._refused.append(str(error))
        if len(self._refused) == SHOWN:
            self._raise()

    def add(self, ids: Sequence[int], trained: Sequence[bool], share: float) -> None:
        """Write a row; ``share`` is its place between 0 and 1, by which it is trained or validated on."""
        stored = [id_ if on else ~id_ for id_, on in zip(ids, trained, strict=True)]
        array("i", stored).tofile(self._file)
        self._lengths.append(len(stored))
        self._shares.append(share)
        self.report.tokens += len(stored)
        self.report.trained += sum(trained)
        if time.monotonic() - self._said > REPORT_EVERY_S:
            self._said = time.monotonic()
            rank_zero_info(f"data: {self.report.read:,} rows are read, with {self.report.tokens:,} tokens")

    def index(self, path: str) -> dict[str, Any]:
        """Return the lengths and hashes of the rows, and the report.

        Raises:
            PresetError: there are bad rows to refuse, or no rows.
        """
        if self._refused:
            self._raise()
        if not self._lengths:
            raise PresetError(self.report.nothing(path))
        shares = torch.tensor(self._shares, dtype=torch.float64)
        return {"lengths": torch.tensor(self._lengths), "shares": shares, "report": vars(self.report)}

    def _raise(self) -> None:
        raise PresetError(
            "\n".join(self._refused)
            + "\nchange these rows, or write data.bad_rows=drop to leave such rows out; the report counts them"
        )


class TokenRows(Dataset[Any]):
    """Rows of a file in which a token that isn't trained is stored as its complement.

    An item is a dict of ``input_ids`` and ``labels``; the item "length" is the lengths of all rows.
    """

    column_names = ("length",)

    def __init__(self, file: TokenFile, begins: Tensor, lengths: Tensor) -> None:
        self.file, self.begins, self.lengths = file, begins, lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        if index == "length":
            return self.lengths
        stored = self.file.read(int(self.begins[index]), int(self.lengths[index]))
        trained = stored >= 0
        return {"input_ids": torch.where(trained, stored, ~stored), "labels": stored.masked_fill(~trained, IGNORED)}


class Padded:
    """Collates rows to a batch, padded on the right. The mask follows positions, whichever token the padding is."""

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(self, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return ``input_ids``, ``attention_mask`` and ``labels``, each (rows, longest row)."""
        shape = len(rows), max(len(row["input_ids"]) for row in rows)
        batch = {
            "input_ids": torch.full(shape, self.pad),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
            "labels": torch.full(shape, IGNORED),
        }
        for n, row in enumerate(rows):
            length = len(row["input_ids"])
            batch["input_ids"][n, :length], batch["labels"][n, :length] = row["input_ids"], row["labels"]
            batch["attention_mask"][n, :length] = 1
        return batch


def share_of(value: Mapping[str, Any]) -> float:
    """Return a number from 0 to 1 by a row's content, the same on every machine and beside any other rows.

    >>> round(share_of({"text": "a"}), 3) == round(share_of({"text": "a"}), 3) != round(share_of({"text": "b"}), 3)
    True
    """
    content = json.dumps(value, sort_keys=True, default=str).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big") / 2**56
