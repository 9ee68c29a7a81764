"""Plain text to train on: documents are cleaned, each is kept once, and windows of their tokens are rows."""

from __future__ import annotations

import hashlib
import html
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning_solo.cards.arguments import check_arguments, parameters_of
from lightning_solo.data.tokenizers import new_tokens_of
from lightning_solo.errors import PresetError
from lightning_solo.fine_tuning.conversations import plain_text
from lightning_solo.fine_tuning.data_report import TextReport
from lightning_solo.fine_tuning.mapped_rows import MappedRows, RowWriter, share_of
from lightning_solo.fine_tuning.rows import (
    EXAMPLES,
    LeftOutError,
    Row,
    RowError,
    read_rows,
    refuse_half_characters,
    row_files,
)
from lightning_solo.reference.stdlib_text import library_files

STDLIB = "stdlib"
"""The path of the standard library's text."""
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff]")
BINARY = 0.1
"""A document with a larger share of control characters isn't text."""
URL = re.compile(r"\b(?:https?://|www\.)\S+", re.IGNORECASE)
MARKUP = re.compile(r"<(script|style)\b.*?</\1\s*>|<!--.*?-->|</?[a-z][^<>]*>", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Cleaning:
    """Rules for documents. Control characters are always removed, and empty documents dropped."""

    min_chars: int = 1  # documents with fewer characters are dropped
    max_chars: int | None = None  # documents with more characters are dropped; None for no limit
    urls: Literal["keep", "remove"] = "keep"  # "keep" or "remove"
    markup: Literal["keep", "remove"] = "keep"  # "keep", or "remove" tags of HTML and resolve its entities
    # "keep", or "drop" documents by the rules of Rae et al. 2021, arXiv 2112.11446, table A1, for words, symbols and
    # repeated lines. The rules are for prose in languages with spaces between words.
    low_quality: Literal["keep", "drop"] = "keep"
    duplicates: Literal["keep", "drop"] = "drop"  # "drop", or "keep" documents whose cleaned text came before


def cleaning_of(choices: Mapping[str, Any] | None) -> Cleaning:
    """Return the cleaning of these choices.

    Raises:
        PresetError: an unknown name or value.
    """
    settings: Any = Cleaning
    check_arguments(choices or {}, parameters_of(settings), "data.cleaning")
    return Cleaning(**(choices or {}))


def cleaned(text: str, cleaning: Cleaning) -> tuple[str, list[str]]:
    """Return a document's text, and the rules that changed it.

    >>> cleaned("Read <b>this</b>: https://a.org/b now", Cleaning(urls="remove", markup="remove"))
    ('Read this:  now', ['markup', 'URLs'])

    Raises:
        LeftOutError: a rule drops the document; its `reason` is the rule.
    """
    if len(CONTROL.findall(text)) > BINARY * len(text):
        raise LeftOutError("control characters", "it is no text")
    rules: dict[str, Callable[[str], str]] = {"control characters": partial(CONTROL.sub, "")}
    if cleaning.markup == "remove":
        rules["markup"] = lambda text: html.unescape(MARKUP.sub("", text))
    if cleaning.urls == "remove":
        rules["URLs"] = partial(URL.sub, "")
    changed = []
    for rule, change in rules.items():
        if (plain := change(text)) != text:
            text = plain
            changed.append(rule)
    if not text.strip():
        raise LeftOutError("empty", "it has no text")
    if len(text) < cleaning.min_chars:
        raise LeftOutError("too few characters", f"it has {len(text):,} characters")
    if cleaning.max_chars is not None and len(text) > cleaning.max_chars:
        raise LeftOutError("too many characters", f"it has {len(text):,} characters")
    if cleaning.low_quality == "drop" and (reason := low_quality(text)):
        raise LeftOutError(f"low quality: {reason}", "it is no prose")
    return text, changed


def low_quality(text: str) -> str | None:
    """Return why a text looks like no prose, or None.

    >>> low_quality("The law will not be changed."), low_quality("0x3f 77:12 -- 91;0 4411 /// 12")
    (None, 'words without letters')
    """
    words = text.split()
    lines = [line for line in text.splitlines() if line.strip()]
    rules = {
        "words of unusual length": not 3 <= sum(map(len, words)) / len(words) <= 10,
        "words without letters": sum(any(map(str.isalpha, word)) for word in words) < 0.8 * len(words),
        "symbols": (text.count("#") + text.count("...") + text.count("\u2026")) > 0.1 * len(words),
        "lists": sum(line.lstrip()[0] in "-*\u2022" for line in lines) > 0.9 * len(lines),
        "unfinished lines": sum(line.rstrip().endswith(("...", "\u2026")) for line in lines) > 0.3 * len(lines),
        "repeated lines": len(lines) - len(set(lines)) > 0.3 * len(lines),
    }
    return next((reason for reason, broken in rules.items() if broken), None)


@dataclass(eq=False, repr=False, kw_only=True)
class TextData(MappedRows):
    """Batches of windows of text, of which every token is trained, as for continued pretraining.

    Documents are cleaned and tokenized once. Each ends with the end token. Windows have ``max_length`` tokens. A window
    may have several documents, which see one another. Validation gets whole documents, or the last windows where
    these would be none or all.

    Args:
        path: file of rows with ``text``; or a folder of text files, each a document, and of files of such rows; or
            "stdlib": the modules of Python's standard library, each a document, unless a file or folder has this name.
        files: pattern of the text files in a folder, at any depth.
        cleaning: arguments of `Cleaning` by name.
        new_tokens: texts that become tokens, or a file with one a line; the model gets rows for them.

    The other arguments are those of `MappedRows`.
    """

    max_length: int = 1024
    batch_size: int = 8
    files: str = "*.txt"
    cleaning: Mapping[str, Any] | None = None
    new_tokens: str | Sequence[str] | None = None
    report_class: ClassVar[type[TextReport]] = TextReport

    def __post_init__(self) -> None:
        self.new_tokens = new_tokens_of(self.new_tokens)
        self._cleaning = cleaning_of(self.cleaning)
        super().__post_init__()

    def tokenizer_arguments(self) -> tuple[str, str | None, Sequence[str]]:
        return self.tokenizer, "", self.new_tokens or ()  # no chat template: prompts are plain text, too

    def settings(self) -> list[Any]:
        return [self.files, self.validation_share, asdict(self._cleaning)]

    def columns(self) -> Sequence[str]:
        return ["text"]

    def sources(self) -> list[Path]:
        """Return text files and files of rows, in order."""
        path = Path(self.path)
        if self._is_library():
            return [file for _, file in library_files()]
        if not path.is_dir():
            return [path] if path.match(self.files) and path.is_file() else row_files(path)
        texts = [file for file in sorted(path.rglob(self.files)) if file.is_file()]
        try:
            return [*texts, *(file for file in row_files(path) if file not in texts)]
        except PresetError as error:
            if texts:
                return texts
            raise PresetError(f"{error}; write data.files=<a pattern of text files>") from None

    def _is_library(self) -> bool:
        return self.path == STDLIB and not Path(self.path).exists()

    def tokenize(self, tokenizer: Any, writer: RowWriter) -> None:
        """Write windows of all documents that are kept."""
        report, seen = writer.report, set[bytes]()
        streams: dict[bool, list[int]] = {False: [], True: []}  # whether they are for validation -> tokens
        for row in self._documents(writer):
            with writer.row(row):
                text, changed = cleaned(_text(row.value), self._cleaning)
                digest = hashlib.blake2b(text.strip().encode(), digest_size=16).digest()
                if self._cleaning.duplicates == "drop" and digest in seen:
                    raise LeftOutError("duplicate", "it is equal to an earlier one")
                seen.add(digest)
                report.changed.update(changed)
                held_out = share_of({"text": text}, ["text"]) < self.validation_share
                tokens = streams[held_out] + plain_text(tokenizer, "", text).ids
                whole = len(tokens) - len(tokens) % self.max_length
                for begin in range(0, whole, self.max_length):
                    self._add(writer, tokens[begin : begin + self.max_length], held_out)
                streams[held_out] = tokens[whole:]
        for held_out, tokens in streams.items():
            if len(tokens) > 1:
                self._add(writer, tokens, held_out)
        if min(writer.shares, default=0) > 0 or max(writer.shares, default=0) < 0:
            count = len(writer.shares)
            writer.shares = array("d", (1 - n / count for n in range(1, count + 1)))

    def _add(self, writer: RowWriter, ids: list[int], held_out: bool) -> None:
        number = len(writer.shares) + 1
        writer.report.tokens += len(ids)
        writer.add(ids, -number if held_out else number)

    def _documents(self, writer: RowWriter) -> Iterator[Row]:
        for file in self.sources():
            if self._is_library() or file.match(self.files):
                yield Row(str(file), {"text": file.read_bytes().decode("utf-8-sig", "replace")})
            else:
                yield from read_rows(file, writer.drop)


def _text(value: Mapping[str, Any]) -> str:
    text = value.get("text")
    if not isinstance(text, str):
        raise RowError("no text", f"its text is {text!r}; write {EXAMPLES['text']}")
    refuse_half_characters(text)
    return text
