"""Conversations to fine-tune on, from JSON Lines, Parquet or a saved data set; the loss is on the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_solo.data.tokenizers import chat_template_of, new_tokens_of
from lightning_solo.fine_tuning.conversations import Conversations, Encoded, plain_text
from lightning_solo.fine_tuning.data_report import ChatReport
from lightning_solo.fine_tuning.mapped_rows import MappedRows, Written, at_least, one_of, share_of
from lightning_solo.fine_tuning.rows import RowError, example, read_rows, row_files


class ChatData(MappedRows):
    """Batches of conversations, prompts with completions, or texts, whose answers are trained.

    Rows are tokenized once, into a mapped file in the cache.

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
        cache: folder of the tokenized rows, by default ``lightning_solo/tokens`` in the user's cache folder.
        num_workers: processes that load batches.
        seed: of the order.

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
        super().__init__(path, tokenizer, batch_size, bad_rows, validation_share, cache, num_workers, seed)
        at_least("max_length", max_length, 2)
        one_of("too_long", too_long, ("drop", "cut"))
        chat_template, new_tokens = chat_template_of(chat_template), new_tokens_of(new_tokens)
        # what a tokenizer is made of again; the path would be taken for the model's
        self.save_hyperparameters("tokenizer", "chat_template", "new_tokens", logger=False)
        self.chat_template, self.new_tokens = chat_template, new_tokens
        self.max_length, self.too_long = max_length, too_long

    def new_report(self) -> ChatReport:
        return ChatReport(max_length=self.max_length)

    def files(self) -> list[Path]:
        return row_files(self.path)

    def settings(self) -> list[Any]:
        return [self.too_long]

    def tokenize(self, tokenizer: Any, written: Written) -> None:
        """Add the rows that can be used, and count the others."""
        conversations, report = Conversations(tokenizer, self.new_tokens), written.report
        for row in read_rows(self.path, written.bad):
            try:
                encoded = encoded_row(row.value, conversations)
            except RowError as error:
                written.bad(RowError(error.reason, f"{row.place}: {error}"))
                continue
            report.read += 1
            if len(encoded.ids) > self.max_length:
                if self.too_long == "drop":
                    report.drop("too long", row.place)
                    continue
                ids, trained = encoded.ids[: self.max_length], encoded.trained[: self.max_length]
                if not any(trained[1:]):
                    report.drop("no answer left", row.place)
                    continue
                encoded = encoded._replace(ids=ids, trained=trained)
                report.cut += 1
            report.keep(encoded)
            written.add(encoded.ids, encoded.trained, share_of(row.value))


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
        return plain_text(conversations.tokenizer, "", value["text"])
    prompt, completion = value["prompt"], value.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return conversations.encode([*prompt, *completion], value.get("tools"), len(prompt))
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise RowError("no completion", f"completion is {completion!r}; write {example('prompt')}")
    if conversations.has_template:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return conversations.encode(turns, value.get("tools"))
    return plain_text(conversations.tokenizer, prompt, completion)


def _kinds() -> str:
    return f"write one of {example('messages')}, {example('prompt')} and {example('text')}"
