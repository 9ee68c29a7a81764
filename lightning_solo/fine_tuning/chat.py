"""Conversations to fine-tune on, from JSON Lines, Parquet or a saved data set; the loss is on the answers."""

from __future__ import annotations

import hashlib
import json
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_solo.atomic_files import whole_file
from lightning_solo.checkpoint.writing import digest
from lightning_solo.data.loss_weights import IGNORED
from lightning_solo.data.tokenizers import chat_template_of, new_tokens_of, tokenizer_of
from lightning_solo.data.tokens import TokenFile
from lightning_solo.errors import PresetError
from lightning_solo.fine_tuning.chat_report import ChatReport
from lightning_solo.fine_tuning.conversations import Conversations, Encoded
from lightning_solo.fine_tuning.rows import RowError, example, read_rows, row_files
from lightning_solo.machine import user_cache, versions

LAYOUT = 1
"""Number of the cache's layout; a change makes new files."""
SHOWN = 5
"""Bad rows that a refusal names."""


class ChatData(L.LightningDataModule):
    """Batches of conversations, prompts with completions, or texts, whose answers are trained.

    A batch has ``input_ids``, ``attention_mask`` and ``labels``, (batch, sequence) in int64, padded on the right.
    A label is the token at its own position, and -100 for all that isn't an answer. Rows are tokenized once, into a
    mapped file in the cache.

    Args:
        path: file of JSON Lines, Parquet or Arrow; or a folder of such files, or one by `datasets.save_to_disk`.
        tokenizer: the model's folder, which has the tokenizer.
        max_length: most tokens of a row.
        batch_size: rows in a batch.
        too_long: "drop" leaves out rows of more tokens; "cut" keeps their first ones.
        bad_rows: "refuse" or "drop" rows that can't be used; those dropped are counted.
        validation_share: share of the rows that validation gets, by a hash of each row's content.
        chat_template: file of a chat template, folder of a tokenizer with one, or "plain"; None for the one in
            ``tokenizer``.
        new_tokens: texts that become tokens, or a file with one a line; the model gets rows for them.
        cache: folder of the tokenized rows, by default ``lightning_solo/chat`` in the user's cache folder.
        num_workers: processes that load batches.
        seed: of the order.

    Attributes:
        report: counts of rows and tokens, after ``setup``.
        vocabulary: tokens of the tokenizer, after ``setup``.

    Raises:
        PresetError: an argument is out of range.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str,
        max_length: int = 2048,
        batch_size: int = 4,
        too_long: str = "drop",
        bad_rows: str = "refuse",
        validation_share: float = 0.05,
        chat_template: str | None = None,
        new_tokens: str | Sequence[str] | None = None,
        cache: str | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (("max_length", max_length, 2), ("batch_size", batch_size, 1)):
            if value < least:
                raise PresetError(f"data.{name}={value}; write {least} or more")
        for name, word, words in (
            ("too_long", too_long, ("drop", "cut")),
            ("bad_rows", bad_rows, ("refuse", "drop")),
        ):
            if word not in words:
                raise PresetError(f"data.{name}={word!r}; write {' or '.join(words)}")
        if not 0 <= validation_share < 1:
            raise PresetError(f"data.validation_share={validation_share}; write a number from 0 to 1, such as 0.05")
        chat_template, new_tokens = chat_template_of(chat_template), new_tokens_of(new_tokens)
        # what a tokenizer is made of again; the path would be taken for the model's
        self.save_hyperparameters("tokenizer", "chat_template", "new_tokens", logger=False)
        self.path, self.tokenizer, self.cache = path, tokenizer, cache
        self.chat_template, self.new_tokens = chat_template, new_tokens
        self.max_length, self.batch_size, self.num_workers, self.seed = max_length, batch_size, num_workers, seed
        self.too_long, self.bad_rows, self.validation_share = too_long, bad_rows, validation_share
        self.report: ChatReport | None = None
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
        index = self._cached(file) or self._write(file, tokenizer)
        self.report = ChatReport(**index["report"])
        self._split(TokenFile(file, "int32"), index["lengths"], index["shares"])
        self.report.show(tokenizer, self._splits["train"])

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        return self._loader("train", shuffle=True, generator=generator)

    def val_dataloader(self) -> Any:
        return self._loader("validation") if len(self._splits["validation"]) else []

    def test_dataloader(self) -> Any:
        return self.val_dataloader()

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

    # --- the cache ---

    def _cache_file(self, tokenizer: Any) -> Path:
        """Return the path of the tokenized rows, which is named by all that they depend on."""
        folder = self.cache or ((home := user_cache()) and home / "lightning_solo" / "chat")
        folder = Path(folder) if folder else Path(tempfile.gettempdir()) / "lightning_solo" / "chat"
        words = (
            tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else str(sorted(tokenizer.get_vocab().items()))
        )
        parts = [
            LAYOUT,
            [digest(file).sha256 for file in row_files(self.path)],
            hashlib.sha256(words.encode("utf-8", "surrogatepass")).hexdigest(),
            [str(tokenizer.chat_template), str(tokenizer.special_tokens_map)],
            [self.max_length, self.too_long, self.bad_rows],
            versions().get("transformers"),
        ]
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        return folder / f"{Path(self.path).stem}-{key}.tokens"

    def _cached(self, file: Path) -> dict[str, Any] | None:
        """Return the index of a whole file in the cache."""
        try:
            index: dict[str, Any] = torch.load(file.with_suffix(".index"), weights_only=True)
            return index if file.stat().st_size == 4 * int(index["lengths"].sum()) else None
        except (OSError, RuntimeError, EOFError, UnpicklingError):
            return None

    def _write(self, file: Path, tokenizer: Any) -> dict[str, Any]:
        """Write tokens and index to the cache; return the index."""
        try:
            with whole_file(file) as new, new.open("wb") as tokens:
                index = self._tokenize(Conversations(tokenizer), tokens)
            with whole_file(file.with_suffix(".index")) as new, new.open("wb") as written:
                torch.save(index, written)
        except OSError as error:
            raise PresetError(
                f"data.cache: {file} can't be written ({error.strerror}); write data.cache=<a folder with room>"
            ) from error
        return index

    def _tokenize(self, conversations: Conversations, tokens: IO[bytes]) -> dict[str, Any]:
        """Write the tokens of all rows that are kept; return their lengths and hashes, and the report."""
        report, refused = ChatReport(self.max_length), []
        lengths, shares = array("q"), array("d")

        def bad(error: RowError) -> None:
            report.read += 1
            report.drop(error.reason, str(error).partition(": ")[0])
            if self.bad_rows == "refuse":
                refused.append(str(error))
            if len(refused) == SHOWN:
                raise _refusal(refused)

        for row in read_rows(self.path, bad):
            try:
                encoded = encoded_row(row.value, conversations)
            except RowError as error:
                bad(RowError(error.reason, f"{row.place}: {error}"))
                continue
            report.read += 1
            if len(encoded.ids) > self.max_length:
                if self.too_long == "drop":
                    report.drop("too long", row.place)
                    continue
                encoded = encoded._replace(ids=encoded.ids[: self.max_length])
                if not any(encoded.trained[1 : self.max_length]):
                    report.drop("no answer left", row.place)
                    continue
                report.cut += 1
            report.keep(encoded)
            # a token that isn't trained is stored as its complement, which is negative
            stored = [id_ if on else ~id_ for id_, on in zip(encoded.ids, encoded.trained, strict=False)]
            array("i", stored).tofile(tokens)
            lengths.append(len(stored))
            shares.append(share_of(row.value))
        if refused:
            raise _refusal(refused)
        if not lengths:
            raise PresetError(report.nothing(self.path) if report.read else f"{self.path}: no rows; {_kinds()}")
        as_tensors = {"lengths": torch.tensor(lengths), "shares": torch.tensor(shares, dtype=torch.float64)}
        return {**as_tensors, "report": vars(report)}


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


def encoded_row(value: Mapping[str, Any], conversations: Conversations) -> Encoded:
    """Return the tokens of a row with ``messages``, ``prompt`` and ``completion``, or ``text``.

    A prompt is the user's turn and its completion the answer, by the chat template. Without a template both are plain
    text. All of a text is trained.

    Raises:
        RowError: the row is of no kind or of several, or ill-formed.
        PresetError: there is no chat template for messages, or no end token for plain text.
    """
    kinds = [kind for kind in ("messages", "prompt", "text") if value.get(kind) is not None]
    if len(kinds) != 1:
        keys = ", ".join(map(str, value)) or "no keys"
        raise RowError(f"several kinds: {', '.join(kinds)}" if kinds else "no kind", f"it has {keys}; {_kinds()}")
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise RowError("half a character", f"it has half of a surrogate pair ({error.reason}); write UTF-8") from error
    if kinds == ["messages"]:
        return conversations.encode(value["messages"], value.get("tools"))
    if kinds == ["text"]:
        return _plain(conversations.tokenizer, "", value["text"])
    prompt, completion = value["prompt"], value.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return conversations.encode([*prompt, *completion], value.get("tools"), len(prompt))
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise RowError("no completion", f"completion is {completion!r}; write {example('prompt')}")
    if conversations.has_template:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return conversations.encode(turns, value.get("tools"))
    return _plain(conversations.tokenizer, prompt, completion)


def _plain(tokenizer: Any, prompt: str, text: Any) -> Encoded:
    """Return the tokens of a text and an end token, trained from the first one that isn't the prompt's on."""
    if not isinstance(text, str) or not text.strip():
        raise RowError("no text", f"its text is {text!r}; write text")
    if tokenizer.eos_token_id is None:
        raise PresetError(
            "data.tokenizer: it has no eos_token, so no end would be learnt; set it in its folder's files"
        )
    bare, ids = (list(tokenizer(each, add_special_tokens=False)["input_ids"]) for each in (prompt, prompt + text))
    begin = next((n for n, (a, b) in enumerate(zip(bare, ids, strict=False)) if a != b), min(len(bare), len(ids)))
    bos = tokenizer.bos_token_id
    if bos is not None and ids[0] != bos and tokenizer("a")["input_ids"][0] == bos:
        ids, begin = [bos, *ids], begin + 1
    if ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
    return Encoded(ids, [n >= begin for n in range(len(ids))], [len(ids) - 1])


def share_of(value: Mapping[str, Any]) -> float:
    """Return a number from 0 to 1 by a row's content, the same on every machine and beside any other rows.

    >>> round(share_of({"text": "a"}), 3) == round(share_of({"text": "a"}), 3) != round(share_of({"text": "b"}), 3)
    True
    """
    content = json.dumps(value, sort_keys=True, default=str).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big") / 2**56


def _refusal(refused: Sequence[str]) -> PresetError:
    return PresetError(
        "\n".join(refused)
        + "\nchange these rows, or write data.bad_rows=drop to leave such rows out; the report counts them"
    )


def _kinds() -> str:
    return f"write one of {example('messages')}, {example('prompt')} and {example('text')}"
