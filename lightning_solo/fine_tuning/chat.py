"""Conversations to fine-tune on, from JSON Lines, Parquet or a saved data set; the loss is on the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lightning_solo.data.tokenizers import chat_template_of, new_tokens_of
from lightning_solo.fine_tuning.conversations import Conversations, Encoded, plain_text
from lightning_solo.fine_tuning.data_report import TOO_LONG, ChatReport
from lightning_solo.fine_tuning.mapped_rows import MappedRows, RowWriter, share_of
from lightning_solo.fine_tuning.rows import EXAMPLES, LeftOutError, RowError, read_rows, refuse_half_characters

KINDS = ("messages", "prompt", "text")
"""Keys of which a row has one."""


@dataclass(eq=False, repr=False, kw_only=True)
class ChatData(MappedRows):
    """Batches of conversations, prompts with completions, or texts, whose answers are trained.

    Args:
        too_long: "drop" leaves out rows of more than ``max_length`` tokens; "cut" keeps their first ones.
        chat_template: file of a chat template, folder of a tokenizer with one, or "plain"; None for the one in
            ``tokenizer``.
        new_tokens: texts that become tokens, or a file with one a line; the model gets rows for them.

    The other arguments are those of `MappedRows`.
    """

    too_long: Literal["drop", "cut"] = "drop"
    chat_template: str | None = None
    new_tokens: str | Sequence[str] | None = None
    report_class: ClassVar[type[ChatReport]] = ChatReport

    def __post_init__(self) -> None:
        self.chat_template, self.new_tokens = chat_template_of(self.chat_template), new_tokens_of(self.new_tokens)
        super().__post_init__()

    def tokenizer_arguments(self) -> tuple[str, str | None, Sequence[str]]:
        return self.tokenizer, self.chat_template, self.new_tokens or ()

    def settings(self) -> list[Any]:
        return [self.too_long]

    def columns(self) -> Sequence[str]:
        return [*KINDS, "completion", "tools"]

    def tokenize(self, tokenizer: Any, writer: RowWriter) -> None:
        """Write the rows that can be used."""
        conversations = Conversations(tokenizer, self.new_tokens or ())
        for row in read_rows(self.path, writer.drop):
            with writer.row(row):
                encoded = self._short(encoded_row(row.value, conversations), writer.report)
                writer.report.keep(encoded)
                tokens = [id_ if on else ~id_ for id_, on in zip(encoded.ids, encoded.trained, strict=True)]
                writer.add(tokens, share_of(row.value, self.columns()))

    def _short(self, row: Encoded, report: ChatReport) -> Encoded:
        """Return a row of at most ``max_length`` tokens."""
        report.longest = max(report.longest, len(row.ids))
        if len(row.ids) <= self.max_length:
            return row
        if self.too_long == "drop":
            raise LeftOutError(TOO_LONG, f"it has {len(row.ids):,} tokens")
        ids, trained = row.ids[: self.max_length], row.trained[: self.max_length]
        if not any(trained[1:]):
            raise LeftOutError("no answer left", "no answer is left of it")
        report.cut += 1
        return row._replace(ids=ids, trained=trained)


def encoded_row(value: Mapping[str, Any], conversations: Conversations) -> Encoded:
    """Return the tokens of a row with ``messages``, ``prompt`` and ``completion``, or ``text``.

    A prompt is the user's turn and its completion the answer, by the chat template. Without a template both are plain
    text. All of a text is trained.

    Raises:
        RowError: the row is of no kind or of several, or ill-formed.
        PresetError: there is no chat template for messages, or no end token for plain text.
    """
    kinds = [kind for kind in KINDS if value.get(kind) is not None]
    if len(kinds) != 1:
        reason = f"several kinds: {', '.join(kinds)}" if kinds else "no kind"
        keys = ", ".join(map(str, value)) or "no keys"
        raise RowError(reason, f"it has {keys}; write one of {', '.join(EXAMPLES.values())}")
    refuse_half_characters(json.dumps(value, ensure_ascii=False, default=str))
    prompt, completion, tools = value.get("prompt"), value.get("completion"), value.get("tools")
    if kinds == ["messages"]:
        return conversations.encode(value["messages"], tools)
    if kinds == ["text"]:
        return plain_text(conversations.tokenizer, "", value["text"])
    if isinstance(prompt, list) and isinstance(completion, list):
        return conversations.encode([*prompt, *completion], tools, len(prompt))
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise RowError("no completion", f"completion is {completion!r}; write {EXAMPLES['prompt']}")
    if conversations.tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return conversations.encode(turns, tools)
    return plain_text(conversations.tokenizer, prompt, completion)
