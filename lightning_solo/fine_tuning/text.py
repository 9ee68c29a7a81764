"""Plain text to train on: documents are cleaned, each is kept once, and windows of their tokens are rows."""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lightning_solo.data.tokenizers import new_tokens_of
from lightning_solo.errors import PresetError, nearest
from lightning_solo.fine_tuning.conversations import plain_text
from lightning_solo.fine_tuning.data_report import TextReport
from lightning_solo.fine_tuning.mapped_rows import MappedRows, Written, at_least, one_of, share_of
from lightning_solo.fine_tuning.rows import Row, RowError, example, read_rows, row_files

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff]")
BINARY = 0.1
"""Share of control characters from which a document isn't text."""
URL = re.compile(r"\b(?:https?://|www\.)\S+", re.IGNORECASE)
MARKUP = re.compile(r"<(script|style)\b.*?</\1\s*>|<!--.*?-->|</?[a-z][^<>]*>", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Cleaning:
    """What is done to documents. Control characters are always removed, and empty documents dropped.

    Attributes:
        min_chars: documents with fewer characters are dropped.
        max_chars: documents with more characters are dropped; None for no limit.
        urls: "keep" or "remove".
        markup: "keep", or "remove" tags of HTML and resolve its entities.
        low_quality: "keep", or "drop" documents by the rules of Rae et al. 2021, arXiv 2112.11446, table A1, for words,
            symbols and repeated lines. The rules are for prose in languages with spaces between words.
        duplicates: "drop", or "keep" documents whose cleaned text came before.
    """

    min_chars: int = 1
    max_chars: int | None = None
    urls: str = "keep"
    markup: str = "keep"
    low_quality: str = "keep"
    duplicates: str = "drop"

    @classmethod
    def of(cls, choices: Mapping[str, Any] | None) -> Cleaning:
        """Return the cleaning of these choices.

        Raises:
            PresetError: an unknown name or value.
        """
        names = [field.name for field in fields(cls)]
        for name in choices or ():
            if name not in names:
                raise PresetError(f"data.cleaning.{name}{nearest(name, names)}there are {', '.join(names)}")
        cleaning = cls(**(choices or {}))
        for name in ("urls", "markup"):
            one_of(f"cleaning.{name}", getattr(cleaning, name), ("keep", "remove"))
        for name in ("low_quality", "duplicates"):
            one_of(f"cleaning.{name}", getattr(cleaning, name), ("keep", "drop"))
        return cleaning


def cleaned(text: str, cleaning: Cleaning) -> tuple[str, list[str]]:
    """Return a document's text, and the rules that changed it.

    >>> cleaned("Read <b>this</b>: https://a.org/b now", Cleaning(urls="remove", markup="remove"))
    ('Read this:  now', ['markup', 'URLs'])

    Raises:
        RowError: a rule drops the document; its `reason` is the rule.
    """
    changed = []
    count = len(CONTROL.findall(text))
    if count > BINARY * len(text):
        raise RowError("control characters", f"{count:,} of {len(text):,} characters are control characters")
    if count:
        text = CONTROL.sub("", text)
        changed.append("control characters")
    if cleaning.markup == "remove" and (plain := html.unescape(MARKUP.sub("", text))) != text:
        text = plain
        changed.append("markup")
    if cleaning.urls == "remove" and (plain := URL.sub("", text)) != text:
        text = plain
        changed.append("URLs")
    if not text.strip():
        raise RowError("empty", "it has no text")
    if len(text) < cleaning.min_chars:
        raise RowError("too few characters", f"it has {len(text):,} characters")
    if cleaning.max_chars is not None and len(text) > cleaning.max_chars:
        raise RowError("too many characters", f"it has {len(text):,} characters")
    if cleaning.low_quality == "drop" and (reason := low_quality(text)):
        raise RowError(f"low quality: {reason}", f"{reason}, as in no prose")
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


class TextData(MappedRows):
    """Batches of windows of text, of which every token is trained, as for continued pretraining.

    Documents are cleaned and tokenized once. Each ends with the end token. A window may have several documents, which
    see one another.

    Args:
        path: file of rows with ``text``; or a folder of text files, each a document, and of files of such rows.
        tokenizer: the model's folder, which has the tokenizer.
        max_length: tokens of a window.
        batch_size: windows in a batch.
        files: pattern of the text files in a folder, at any depth.
        cleaning: arguments of `Cleaning` by name.
        bad_rows: "refuse" or "drop" rows that can't be read.
        validation_share: share of the documents that validation gets, by a hash of each one's content.
        new_tokens: texts that become tokens, or a file with one a line; the model gets rows for them.
        cache: folder of the tokens, by default ``lightning_solo/tokens`` in the user's cache folder.
        num_workers: processes that load batches.
        seed: of the order.

    Raises:
        PresetError: an argument is out of range.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str,
        max_length: int = 1024,
        batch_size: int = 8,
        files: str = "*.txt",
        cleaning: Mapping[str, Any] | None = None,
        bad_rows: str = "refuse",
        validation_share: float = 0.05,
        new_tokens: str | list[str] | None = None,
        cache: str | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(path, tokenizer, batch_size, bad_rows, validation_share, cache, num_workers, seed)
        at_least("max_length", max_length, 2)
        new_tokens = new_tokens_of(new_tokens)
        self.save_hyperparameters("tokenizer", "new_tokens", logger=False)
        self.max_length, self.pattern, self.new_tokens = max_length, files, new_tokens
        self.cleaning = Cleaning.of(cleaning)

    def new_report(self) -> TextReport:
        return TextReport()

    def files(self) -> list[Path]:
        """Return text files and files of rows, in order."""
        path = Path(self.path)
        if not path.is_dir():
            return [path] if path.match(self.pattern) and path.is_file() else row_files(path)
        texts = [file for file in sorted(path.rglob(self.pattern)) if file.is_file()]
        try:
            return [*texts, *(file for file in row_files(path) if file not in texts)]
        except PresetError as error:
            if texts:
                return texts
            raise PresetError(f"{error}; write data.files=<a pattern of text files>") from None

    def settings(self) -> list[Any]:
        return [self.pattern, self.validation_share, asdict(self.cleaning)]

    def tokenize(self, tokenizer: Any, written: Written) -> None:
        """Add windows of all documents that are kept, and count the others."""
        report, seen = written.report, set()
        waiting: dict[float, list[int]] = {0.0: [], 1.0: []}  # by what the windows are for
        for row in self._documents(written):
            try:
                text = _text(row.value)
            except RowError as error:
                written.bad(RowError(error.reason, f"{row.place}: {error}"))
                continue
            report.read += 1
            try:
                text, changed = cleaned(text, self.cleaning)
            except RowError as error:
                report.drop(error.reason, row.place)
                continue
            digest = hashlib.blake2b(text.strip().encode(), digest_size=16).digest()
            if self.cleaning.duplicates == "drop" and digest in seen:
                report.drop("duplicate", row.place)
                continue
            seen.add(digest)
            report.kept += 1
            for rule in changed:
                report.changed[rule] = report.changed.get(rule, 0) + 1
            share = 0.0 if share_of({"text": text}) < self.validation_share else 1.0
            tokens = waiting[share] + plain_text(tokenizer, "", text).ids
            whole = len(tokens) - len(tokens) % self.max_length
            for begin in range(0, whole, self.max_length):
                self._add(written, tokens[begin : begin + self.max_length], share)
            waiting[share] = tokens[whole:]
        for share, tokens in waiting.items():
            if len(tokens) > 1:
                self._add(written, tokens, share)

    def _add(self, written: Written, ids: list[int], share: float) -> None:
        written.add(ids, [True] * len(ids), share)

    def _documents(self, written: Written) -> Iterator[Row]:
        for file in self.files():
            if file.match(self.pattern):
                yield Row(str(file), {"text": file.read_bytes().decode("utf-8-sig", "replace")})
            else:
                yield from read_rows(file, written.bad)


def _text(value: Mapping[str, Any]) -> str:
    text = value.get("text")
    if not isinstance(text, str):
        raise RowError("no text", f"its text is {text!r}; write {example('text')}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError("half a character", f"it has half of a surrogate pair ({error.reason}); write UTF-8") from error
    return text
