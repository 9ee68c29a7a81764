"""Rows that are tokenized once into a mapped file in a cache, and batches of them."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, ClassVar, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_solo.atomic_files import whole_file
from lightning_solo.cards.arguments import check_arguments, parameters_of
from lightning_solo.checkpoint.writing import digest
from lightning_solo.data.item_lengths import REPORT_EVERY_S
from lightning_solo.data.loss_weights import IGNORED
from lightning_solo.data.tokenizers import tokenizer_of
from lightning_solo.data.tokens import TokenFile
from lightning_solo.errors import PresetError
from lightning_solo.fine_tuning.data_report import DataReport
from lightning_solo.fine_tuning.rows import LeftOutError, Row, RowError, row_files
from lightning_solo.machine import user_cache, versions

LAYOUT = 4
"""Number of the cache's layout; a change makes new files."""
SHOWN = 5
"""Number of bad rows that a refusal names."""
Collate = Callable[[Sequence[Mapping[str, Tensor]]], dict[str, Tensor]]


@dataclass(eq=False, repr=False)
class MappedRows(L.LightningDataModule):
    """Batches of rows of tokens, which are tokenized once into a mapped file in a cache.

    A batch has ``input_ids``, ``attention_mask`` and ``labels``, (batch, sequence) in int64, padded on the right.
    A label is the token at its own position, or -100 where none is trained.

    Args:
        path: file of JSON Lines, Parquet or Arrow; a folder of such files; or a folder of `datasets.save_to_disk`.
        tokenizer: folder of the model, which has the tokenizer.
        max_length: largest number of tokens of a row.
        batch_size: rows in a batch.
        bad_rows: "refuse" stops at rows that can't be used; "drop" leaves them out and counts them.
        validation_share: share of the rows that validation gets, by a hash of each row's content.
        cache: folder of the tokenized rows, by default ``lightning_solo/tokens`` in the user's cache folder.
        num_workers: processes that load batches.
        seed: seed of the order.

    Attributes:
        report: counts of rows and tokens, after ``setup``.
        vocabulary: number of tokens of the tokenizer, after ``setup``.
        pad_token_id: token of the padding, after ``setup``.

    Raises:
        PresetError: an argument is out of range.
    """

    path: str
    tokenizer: str
    _: KW_ONLY
    max_length: int = 2048
    batch_size: int = 4
    bad_rows: Literal["refuse", "drop"] = "refuse"
    validation_share: float = 0.05
    cache: str | None = None
    num_workers: int = 0
    seed: int = 0
    report_class: ClassVar[type[DataReport]] = DataReport

    def __post_init__(self) -> None:
        super().__init__()
        cls: Any = type(self)
        arguments = {field.name: getattr(self, field.name) for field in fields(self)}
        check_arguments(arguments, parameters_of(cls), "data")
        for name, least in (("batch_size", 1), ("max_length", 2)):
            if arguments[name] < least:
                raise PresetError(f"data.{name}={arguments[name]}: write {least} or more")
        if not 0 <= self.validation_share < 1:
            raise PresetError(
                f"data.validation_share={self.validation_share}: write a number from 0 to 1, such as 0.05"
            )
        # what another process needs for the same tokenizer; `path` would be taken for the model's
        names = ("tokenizer", "chat_template", "new_tokens")
        folder, *others = self.tokenizer_arguments()
        absolute = str(Path(folder).expanduser().absolute())  # commands may be called from another folder
        self.save_hyperparameters(dict(zip(names, (absolute, *others), strict=True)), logger=False)
        self.report: DataReport | None = None
        self.vocabulary = self.pad_token_id = 0
        self._splits: dict[str, TokenRows] = {}
        self._collate: dict[str, Collate] = {}
        self._key = ""  # of the tokenized rows

    def setup(self, stage: str) -> None:
        """Read and tokenize the rows, unless the cache has them.

        Raises:
            PresetError: rows can't be used, or none is left; names file and line.
            CapabilityError: transformers or pyarrow is missing.
        """
        if self._splits:
            return
        tokenizer = tokenizer_of(*self.tokenizer_arguments())
        self.vocabulary = len(tokenizer)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self.pad_token_id = pad or 0
        file = self._cache_file(tokenizer)
        self._key = file.stem.rpartition("-")[2]
        index = _cached(file) or self._write(file, tokenizer)
        self.report = report = self.report_class(**index["report"])
        splits = self._split(TokenFile(file, "int32"), index["lengths"], index["shares"])
        report.train, report.validation = (len(rows) for rows in splits.values())
        self._collate = {split: self.collate(tokenizer, split) for split in splits}
        batch = self._collate["train"]([splits["train"][0]])
        report.show(tokenizer, batch["input_ids"][0], batch["labels"].flatten())
        if warning := report.warning():
            rank_zero_warn(warning)
        self._splits = splits

    def state_dict(self) -> dict[str, Any]:
        """Return the key of the rows, which others don't have."""
        return {"rows": self._key}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Warn of a run that continues with other rows than those of the checkpoint."""
        fits = self.trainer is not None and self.trainer.state.fn == "fit"
        if fits and state_dict["rows"] != self._key:
            rank_zero_warn(
                f"data.path={self.path}: these rows aren't those of the checkpoint; files, tokenizer, settings or the"
                " version of transformers have changed. The run goes on at the same position among the new rows"
            )

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        return self._loader("train", shuffle=True, generator=generator)

    def val_dataloader(self) -> Any:
        return self._loader("validation") if len(self._splits["validation"]) else []

    test_dataloader = val_dataloader

    def tokenizer_arguments(self) -> tuple[str, str | None, Sequence[str]]:
        """Return the arguments of `tokenizer_of`: folder, chat template and new tokens."""
        return self.tokenizer, None, ()

    def sources(self) -> list[Path]:
        """Return the files whose content the rows depend on."""
        return row_files(self.path)

    def settings(self) -> list[Any]:
        """Return the arguments of a subclass that the rows depend on, beside the tokenizer's."""
        return []

    def columns(self) -> Sequence[str]:
        """Return the keys of a row that are used."""
        raise NotImplementedError

    def tokenize(self, tokenizer: Any, writer: RowWriter) -> None:
        """Write all rows, in order."""
        raise NotImplementedError

    def collate(self, tokenizer: Any, split: str) -> Collate:
        """Return the function that makes a batch of rows of "train" or "validation"."""
        return partial(padded_batch, pad=self.pad_token_id)

    def _loader(self, split: str, **arguments: Any) -> DataLoader[Any]:
        rows, collate = self._splits[split], self._collate[split]
        return DataLoader(rows, self.batch_size, num_workers=self.num_workers, collate_fn=collate, **arguments)

    def _split(self, file: TokenFile, lengths: Tensor, shares: Tensor) -> dict[str, TokenRows]:
        """Return the rows to train and to validate on, of which both have one at least; equal rows stay together."""
        held_out = shares < self.validation_share
        if self.validation_share:
            if shares.min() == shares.max():
                reason = "there is only one" if len(shares) == 1 else f"all {len(shares):,} are equal"
                raise PresetError(
                    f"{self.path}: no row can be held out for validation, since {reason}; write other rows, or"
                    " data.validation_share=0 monitor=null model.early_stopping=null"
                )
            held_out = (held_out | (shares == shares.min())) & (shares != shares.max())
        begins = lengths.cumsum(0) - lengths
        splits = {"train": ~held_out, "validation": held_out}
        return {name: TokenRows(file, begins[rows], lengths[rows]) for name, rows in splits.items()}

    def _cache_file(self, tokenizer: Any) -> Path:
        """Return the path of the tokenized rows, which is named by all that they depend on."""
        cache = user_cache() or Path(tempfile.gettempdir())
        folder = Path(self.cache) if self.cache else cache / "lightning_solo" / "tokens"
        fast = tokenizer.is_fast
        words = tokenizer.backend_tokenizer.to_str() if fast else str(sorted(tokenizer.get_vocab().items()))
        parts = [
            [LAYOUT, type(self).__name__, versions().get("transformers")],
            [digest(file).sha256 for file in self.sources()],
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
                report = self.report_class(max_length=self.max_length)
                writer = RowWriter(tokens, report, self.columns(), refuse=self.bad_rows == "refuse")
                self.tokenize(tokenizer, writer)
                index = writer.index(self.path)
            with whole_file(file.with_suffix(".index")) as new, new.open("wb") as place:
                torch.save(index, place)
        except OSError as error:
            raise PresetError(
                f"data.cache: {file} can't be written ({error.strerror}); write data.cache=<a folder with room>"
            ) from error
        return index


def _cached(file: Path) -> dict[str, Any] | None:
    """Return the index of a whole file in the cache, or None."""
    try:
        index: dict[str, Any] = torch.load(file.with_suffix(".index"), weights_only=True)
        return index if file.stat().st_size == 4 * int(index["lengths"].sum()) else None
    except (OSError, RuntimeError, EOFError, UnpicklingError):
        return None


class RowWriter:
    """Writes rows to a file, and keeps their lengths, hashes and counts.

    Args:
        file: gets the tokens.
        report: counts rows.
        columns: keys of a row that are used.
        refuse: whether bad rows raise, after `SHOWN` of them or all rows.
    """

    def __init__(self, file: IO[bytes], report: Any, columns: Sequence[str], *, refuse: bool) -> None:
        self.report = report
        self.shares = array("d")
        self._file, self._columns, self._refuse = file, columns, refuse
        self._refused: list[str] = []
        self._lengths = array("q")
        self._reported = time.monotonic()

    @contextmanager
    def row(self, row: Row) -> Iterator[None]:
        """Count a row as kept, or as dropped if a `RowError` is raised in the block."""
        try:
            yield
        except RowError as error:
            self.drop(row.place, error)
            return
        self.report.read += 1
        self.report.kept += 1
        self.report.unused.update(key for key in row.value.keys() - self._columns if row.value[key] is not None)

    def drop(self, place: str, error: RowError) -> None:
        """Count a row that isn't kept.

        Raises:
            PresetError: bad rows are refused, and this is the last one to be named.
        """
        self.report.drop(error.reason, place)
        if self._refuse and not isinstance(error, LeftOutError):
            self._refused.append(f"{place}: {error}")
            if len(self._refused) == SHOWN:
                self._raise()

    def add(self, tokens: Sequence[int], share: float) -> None:
        """Write the tokens of a row.

        Args:
            tokens: of the row; a negative number is the complement of a token that isn't trained.
            share: the row is validated on if this is below ``validation_share``; equal rows have the same.
        """
        array("i", tokens).tofile(self._file)
        self._lengths.append(len(tokens))
        self.shares.append(share)
        if time.monotonic() - self._reported > REPORT_EVERY_S:
            self._reported = time.monotonic()
            rank_zero_info(f"data: {self.report.read:,} rows are read, with {self.report.tokens:,} tokens")

    def index(self, path: str) -> dict[str, Any]:
        """Return the lengths and shares of the rows, and the report.

        Raises:
            PresetError: there are bad rows to refuse, or no rows.
        """
        if self._refused:
            self._raise()
        if not self._lengths:
            raise PresetError(self.report.nothing(path))
        shares = torch.tensor(self.shares, dtype=torch.float64)
        self.report.repeated = int(shares.sort().values.diff().eq(0).sum())
        return {"lengths": torch.tensor(self._lengths), "shares": shares, "report": vars(self.report)}

    def _raise(self) -> None:
        remedy = "change these rows, or write data.bad_rows=drop to leave such rows out; the report counts them"
        raise PresetError("\n".join([*self._refused, remedy]))


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
        return {
            "input_ids": torch.where(stored < 0, ~stored, stored),
            "labels": stored.masked_fill(stored < 0, IGNORED),
        }


def padded_batch(rows: Sequence[Mapping[str, Tensor]], pad: int) -> dict[str, Tensor]:
    """Return ``input_ids``, ``attention_mask`` and ``labels`` of rows, padded on the right: (rows, longest row).

    The mask follows positions, whichever token the padding is.
    """
    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": _padded(ids, pad),
        "attention_mask": _padded([torch.ones_like(each) for each in ids], 0),
        "labels": _padded([row["labels"] for row in rows], IGNORED),
    }


def share_of(value: Mapping[str, Any], columns: Sequence[str]) -> float:
    """Return a number from 0 to 1 by a row's columns, the same on every machine and beside any other rows.

    >>> share_of({"text": "a", "id": 1}, ["text"]) == share_of({"id": 2, "text": "a"}, ["text"])
    True
    """
    content = json.dumps({key: value.get(key) for key in columns}, sort_keys=True, default=str).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big") / 2**56


def _padded(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
