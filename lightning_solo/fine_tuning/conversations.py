"""Conversations as tokens by a tokenizer's chat template, and which of the tokens are an answer's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from lightning_solo.errors import PresetError
from lightning_solo.fine_tuning.messages import ROLES, checked_messages, checked_tools
from lightning_solo.fine_tuning.rows import RowError

TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = "Question7", "Answer8"
TAIL = 32
"""Number of characters at the end of a message that must be in the template's text."""


class Encoded(NamedTuple):
    """Tokens of a row."""

    ids: list[int]  # the tokens
    trained: list[bool]  # whether each token is trained
    ends: list[int]  # places of the trained end-of-turn tokens
    answers: int = 1  # number of answers
    prefixes: bool = True  # whether each answer's text begins where the template ends a prompt for it
    # roles other than the assistant's, of which the template's tags train a message
    others: frozenset[str] = frozenset()


class Chat(NamedTuple):
    """A conversation as text and tokens; ``answers`` are the numbers of the messages that are trained."""

    messages: list[dict[str, Any]]
    tools: Any
    answers: list[int]
    text: str
    ids: list[int]


class Conversations:
    """Encodes conversations by a chat template, with the tokens of answers marked.

    Where the template has generation tags, they mark the answers. Otherwise an answer begins where the prompt for it
    ends, and the tokens of that prompt must be the first tokens of the whole conversation. In both cases the
    end-of-turn token after an answer is marked.

    Args:
        tokenizer: of transformers.
        new_tokens: the user's own tokens, which conversations may have.
    """

    def __init__(self, tokenizer: Any, new_tokens: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        added = {id_: token for id_, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        self._added = {id_: token.content for id_, token in added.items()}
        self._special = {*tokenizer.all_special_tokens, *(token.content for token in added.values() if token.special)}
        self._special -= {*new_tokens}
        self._templates: dict[bool, str] = {}

    @cached_property
    def ends(self) -> frozenset[int]:
        """The end-of-turn token, as a set of at most one.

        Raises:
            PresetError: the template writes none after an answer.
        """
        eos = self.tokenizer.eos_token_id
        question, answer = ({"role": "user", "content": PROBE[0]}, {"role": "assistant", "content": PROBE[1]})
        for turns in ([question, answer], [{"role": "system", "content": "System"}, question, answer]):
            try:
                text = self._rendered(turns)[0]
            except RowError:
                continue
            if PROBE[1] not in text:
                break
            tail = text.rpartition(PROBE[1])[2]
            for id_ in self._tokens(tail):
                if id_ in self._added or id_ == eos:
                    return frozenset({id_})
            raise PresetError(
                f"the chat template writes {tail!r} after an answer, which has no token that ends a turn, so the model"
                " would not learn to stop; write data.chat_template=<a file whose answers end with {{ eos_token }}>,"
                " data.chat_template=plain, or data.new_tokens=<a file with that token>"
            )
        return frozenset() if eos is None else frozenset({eos})

    def encode(self, messages: Any, tools: Any = None, first: int = 0) -> Encoded:
        """Return the tokens of a conversation; answers from message ``first`` on are marked.

        Raises:
            RowError: the messages are ill-formed, or it is unclear which tokens are an answer's; names the message.
            PresetError: there is no chat template, or one without an end of turn.
        """
        messages, tools = checked_messages(messages, self._roles, self._control), checked_tools(tools, self._control)
        answers = [n for n, each in enumerate(messages) if each["role"] == "assistant" and n >= first]
        if not answers:
            raise RowError("no answer", "messages: no turn of the role assistant, so there is nothing to learn")
        tags = self.tokenizer.is_fast and bool(TAGS.search(self._template(tools)))
        text, spans = self._rendered(messages, tools, tags=tags)
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=tags)
        chat = Chat(messages, tools, answers, text, list(encoding["input_ids"]))
        self._require_all(chat)
        return self._by_tags(chat, spans, encoding["offset_mapping"], first) if tags else self._by_prefixes(chat)

    def _start(self, chat: Chat, n: int, *, needed: bool = True) -> tuple[int, int]:
        """Return where answer ``n`` begins, in characters and in tokens: where the prompt for it ends.

        It is (-1, -1) if the conversation doesn't begin with this prompt, unless it is needed.
        """
        prompt = self._prompt(chat.messages[:n], chat.tools)
        if prompt is None or not chat.text.startswith(prompt):
            if not needed:
                return -1, -1
            raise RowError(
                "no prefix",
                f"messages[{n}]: with this answer the template writes the messages before it otherwise, so it is"
                " unclear which tokens are the answer's; write data.chat_template=<a file with generation tags>",
            )
        prefix = self._tokens(prompt)
        if chat.ids[: len(prefix)] != prefix:
            raise RowError(
                "joined tokens",
                f"messages[{n}]: one token has the end of the prompt and the start of this answer, so the model"
                " couldn't write it after the prompt; remove white space at the start of the answer, or write"
                " data.chat_template=<a file whose prompt for an answer doesn't end with white space>",
            )
        return len(prompt), len(prefix)

    def _by_tags(
        self, chat: Chat, spans: Sequence[tuple[int, int]], places: Sequence[tuple[int, int]], first: int
    ) -> Encoded:
        starts = [self._start(chat, n, needed=first > 0 and n == chat.answers[0]) for n in chat.answers]
        if first:
            spans = [span for span in spans if span[0] >= starts[0][0]]
        marked = "\0".join(chat.text[begin:end] for begin, end in spans)
        for n in chat.answers:
            if (tail := _tail(chat.messages[n])) in chat.text and tail not in marked:
                raise RowError(
                    "outside the tags",
                    f"messages[{n}]: the template writes this answer outside its generation tags; write"
                    " data.chat_template=<a file with the tags around each answer, or without tags>",
                )
        trained, ends = self._marked(chat, spans, places)
        if not ends:
            raise self._no_end(chat.answers[-1])
        prefixes = all(n >= 0 and any(trained[n : n + 1]) and not any(trained[n - 1 : n]) for _, n in starts)
        others = {
            each["role"]
            for each in chat.messages
            if each["role"] != "assistant" and _tail(each) and _tail(each) in marked and self._is_marked(chat, each)
        }
        return Encoded(chat.ids, trained, ends, len(chat.answers), prefixes, frozenset(others))

    def _is_marked(self, chat: Chat, message: Mapping[str, Any]) -> bool:
        """Return whether a message is in the spans of the tags, and not just an answer with the same text."""
        messages = [{**each, "content": PROBE[0]} if each is message else each for each in chat.messages]
        try:
            text, spans = self._rendered(messages, chat.tools, tags=True)
        except RowError:
            return False
        return any(PROBE[0] in text[begin:end] for begin, end in spans)

    def _marked(
        self, chat: Chat, spans: Sequence[tuple[int, int]], places: Sequence[tuple[int, int]]
    ) -> tuple[list[bool], list[int]]:
        """Return whether each token is in a span or ends its turn, and the places of these ends."""
        blank = [not chat.text[begin:end].strip() for begin, end in places]
        trained, ends = [False] * len(chat.ids), []
        for begin, end in spans:
            inside = [n for n, (a, b) in enumerate(places) if a < end and b > begin]
            if not inside:
                continue
            stop = inside[-1] + 1
            last = next((n for n in reversed(inside) if not blank[n]), inside[-1])
            if chat.ids[last] not in self.ends:  # then it follows the span, perhaps after white space
                last = next((n for n in range(stop, len(blank)) if not blank[n] or chat.ids[n] in self.ends), last)
            if chat.ids[last] in self.ends:
                ends.append(last)
                stop = max(stop, last + 1)
            trained[inside[0] : stop] = [True] * (stop - inside[0])
        return trained, ends

    def _by_prefixes(self, chat: Chat) -> Encoded:
        starts = [self._start(chat, n) for n in chat.answers]
        trained, ends = [False] * len(chat.ids), []
        following = [*starts[1:], (len(chat.text), len(chat.ids))]
        for n, (begin, start), (until, limit) in zip(chat.answers, starts, following, strict=True):
            answer = chat.text[begin:until]
            if not self._writes_prompts and not _begins(chat.messages[n], answer):
                raise RowError(
                    "no prompt",
                    f"messages[{n}]: the template ignores add_generation_prompt and begins the answer with"
                    f" {answer[:20]!r}; add {{% if add_generation_prompt %}}, or generation tags, and write"
                    " data.chat_template=<the file>",
                )
            end = next((place for place in range(start, limit) if chat.ids[place] in self.ends), None)
            if end is None or not self._is_whole(chat, n, answer, chat.ids[end]):
                raise self._no_end(n)
            trained[start : end + 1] = [True] * (end + 1 - start)
            ends.append(end)
        return Encoded(chat.ids, trained, ends, len(chat.answers))

    def _no_end(self, n: int) -> RowError:
        ends = " or ".join(map(self._word, self.ends))
        return RowError(
            "no end of turn",
            f"messages[{n}]: the template doesn't write {ends} after this answer, so the model would not learn to stop"
            " there; write data.chat_template=<a file that writes it after each answer>",
        )

    def _word(self, id_: int) -> str:
        return str(self._added.get(id_, self.tokenizer.eos_token))

    def _require_all(self, chat: Chat) -> None:
        """Check that the template writes all questions, tools and calls: many leave out what they don't know."""
        for n, message in enumerate(chat.messages):
            calls = message.get("tool_calls") or []
            names = [call.get("function", call).get("name") for call in calls if isinstance(call, Mapping)]
            left_out = message["role"] in ("system", "developer", "user") and _tail(message) not in chat.text
            if left_out or not all(isinstance(name, str) and name in chat.text for name in names):
                raise RowError(
                    "left out by the template",
                    f"messages[{n}]: the chat template doesn't write this {'message' if left_out else 'call'};"
                    f" write data.chat_template=<a file that does>, or drop it",
                )
        if chat.tools and self._rendered(chat.messages)[0] == chat.text:
            raise RowError("left out by the template", "tools: the chat template doesn't write them; leave them out")

    def _is_whole(self, chat: Chat, n: int, answer: str, end: int) -> bool:
        """Return whether the first end-of-turn token after a prompt is that of answer ``n``."""
        tail = _tail(chat.messages[n])
        if tail and answer.partition(self._word(end))[0].rstrip().endswith(tail):
            return True
        return chat.text.startswith(self._rendered(chat.messages[: n + 1], chat.tools)[0].rstrip())

    @cached_property
    def _writes_prompts(self) -> bool:
        """Whether the template writes a prompt for an answer, such as the head of its turn."""
        turns = [{"role": "user", "content": PROBE[0]}]
        try:
            return self._prompt(turns, None) != self._rendered(turns)[0]
        except RowError:  # it wants other turns
            return False

    @cached_property
    def _roles(self) -> frozenset[str]:
        """The usual roles, and those with which the template compares."""
        compared = re.findall(r"""role['"\]]*\s*(?:==|!=|in)([^%}]*)""", self._template(None))
        return frozenset({*ROLES, *re.findall(r"""['"](\w+)['"]""", " ".join(compared))})

    @cached_property
    def _control(self) -> re.Pattern[str]:
        """Texts that are encoded as control tokens."""
        texts = {*self._special, *(self._added[id_] for id_ in self.ends & self._added.keys())}
        return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")

    def _prompt(self, messages: list[dict[str, Any]], tools: Any) -> str | None:
        """Return the text before an answer to ``messages``; None if the template can't write it."""
        try:
            return self._rendered(messages, tools, prompt=True)[0]
        except RowError:
            return None

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # the template has written BOS

    def _template(self, tools: Any) -> str:
        if bool(tools) not in self._templates:
            try:
                self._templates[bool(tools)] = self.tokenizer.get_chat_template(None, tools)
            except ValueError as error:
                raise PresetError(
                    f"data.tokenizer: {self.tokenizer.name_or_path} has no chat template; write"
                    " data.chat_template=<a file of Jinja>, data.chat_template=<the folder of a tokenizer that has"
                    " one>, or data.chat_template=plain"
                ) from error
        return self._templates[bool(tools)]

    def _rendered(
        self, messages: list[dict[str, Any]], tools: Any = None, *, tags: bool = False, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the places between its generation tags."""
        from jinja2 import TemplateError, TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                [messages],
                tools,
                chat_template=self._template(tools),
                return_assistant_tokens_mask=tags,
                add_generation_prompt=prompt,
                **self.tokenizer.special_tokens_map,
            )
        except TemplateSyntaxError as error:
            reason = str(error.message).rstrip(".")
            raise PresetError(
                f"the chat template is no Jinja, line {error.lineno}: {reason}; correct it, or write"
                " data.chat_template=<another file>"
            ) from error
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            message = f"messages: the chat template raised {type(error).__name__}: {error}"
            raise RowError("refused by the template", message) from error
        return rendered[0][0], rendered[1][0] if tags else []


def plain_text(tokenizer: Any, prompt: str, text: Any) -> Encoded:
    """Return the tokens of a prompt, a text and an end token; all after the prompt are trained.

    Raises:
        RowError: there is no text.
        PresetError: the tokenizer has no end token.
    """
    if not isinstance(text, str) or not text.strip():
        raise RowError("no text", f"its text is {text!r}; write text")
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if eos is None:
        raise PresetError("data.tokenizer: it has no eos_token, which ends a text; set it in its tokenizer_config.json")
    before, ids = (list(tokenizer(each, add_special_tokens=False)["input_ids"]) for each in (prompt, prompt + text))
    same = [a == b for a, b in zip(before, ids, strict=False)]
    begin = same.index(False) if False in same else len(same)
    if bos is not None and ids[0] != bos and tokenizer("a")["input_ids"][0] == bos:
        ids, begin = [bos, *ids], begin + 1
    if ids[-1] != eos:
        ids.append(eos)
    return Encoded(ids, [n >= begin for n in range(len(ids))], [len(ids) - 1])


def _tail(message: Mapping[str, Any]) -> str:
    """Return the end of a message's last line, without thoughts, which templates may leave out."""
    return str(message["content"]).rpartition("</think>")[2].strip().rpartition("\n")[2][-TAIL:]


def _begins(message: Mapping[str, Any], answer: str) -> bool:
    text = str(message["content"]).strip()
    return not text or answer.lstrip().startswith(text[:TAIL])
