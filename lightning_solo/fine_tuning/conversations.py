"""Conversations as tokens by a tokenizer's chat template, and which of the tokens are an answer's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from lightning_solo.errors import PresetError
from lightning_solo.fine_tuning.rows import RowError

ROLES = ("system", "developer", "user", "assistant", "tool")
TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = "Question7", "Answer8"
TAIL = 32
"""Characters at the end of an answer that must be in its marked text."""


class Encoded(NamedTuple):
    """Tokens of a row.

    Attributes:
        ids: the tokens.
        trained: whether each token is one that the model learns to write.
        ends: places of the trained end-of-turn tokens.
        answers: number of answers.
        prefixes: whether each answer's text begins where the template ends a prompt for it.
    """

    ids: list[int]
    trained: list[bool]
    ends: list[int]
    answers: int = 1
    prefixes: bool = True


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
        self._special = {token.content for token in added.values() if token.special} | {*tokenizer.all_special_tokens}
        self._special -= {*new_tokens}
        self._added = {id_: token.content for id_, token in added.items()}
        self._chosen: dict[bool, str] = {}

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template at all."""
        return bool(self.tokenizer.chat_template)

    def has_tags(self, tools: Any = None) -> bool:
        """Return whether the template marks answers by generation tags that can be used."""
        return self.tokenizer.is_fast and bool(TAGS.search(self._template(tools)))

    @cached_property
    def ends(self) -> frozenset[int]:
        """The end-of-turn token, as a set of at most one.

        Raises:
            PresetError: the template writes none after an answer.
        """
        question, answer = ({"role": "user", "content": PROBE[0]}, {"role": "assistant", "content": PROBE[1]})
        for turns in ([question, answer], [{"role": "system", "content": "System"}, question, answer]):
            try:
                text = self._rendered(turns)[0]
            except RowError:
                continue
            if PROBE[1] not in text:
                break
            tail = text.rpartition(PROBE[1])[2]
            ids = self.tokenizer(tail, add_special_tokens=False)["input_ids"]
            found = next((id_ for id_ in ids if id_ in self._added or id_ == self.tokenizer.eos_token_id), None)
            if found is None:
                raise PresetError(
                    f"the chat template writes {tail!r} after an answer, in which no token of the tokenizer ends a"
                    " turn, so the model would not learn to stop; write data.chat_template=<a file whose answers end"
                    " with {{ eos_token }}>, data.chat_template=plain, or data.new_tokens=<a file with that token>"
                )
            return frozenset({found})
        eos = self.tokenizer.eos_token_id
        return frozenset() if eos is None else frozenset({eos})

    def encode(self, messages: Any, tools: Any = None, first: int = 0) -> Encoded:
        """Return the tokens of a conversation; answers from message ``first`` on are marked.

        Raises:
            RowError: the messages are ill-formed, or it is unclear which tokens are an answer's; names the message.
            PresetError: there is no chat template, or one without an end of turn.
        """
        messages = checked_messages(messages, self._roles, self._control)
        answers = [n for n, each in enumerate(messages) if each["role"] == "assistant" and n >= first]
        if not answers:
            raise RowError("no answer", "messages: no turn of the role assistant, so there is nothing to learn")
        tools = self._checked_tools(messages, tools)
        tags = self.has_tags(tools)
        text, spans = self._rendered(messages, tools, tags=tags)
        self._require_all(messages, tools, text)
        if tags:
            return self._by_tags(messages, tools, answers, text, spans, first)
        return self._by_prefixes(messages, tools, answers, text)

    def _by_tags(
        self,
        messages: list[dict[str, Any]],
        tools: Any,
        answers: list[int],
        text: str,
        spans: list[tuple[int, int]],
        first: int,
    ) -> Encoded:
        prompts = [self._prompt(messages[:n], tools) for n in answers]
        if first:
            if prompts[0] is None or not text.startswith(prompts[0]):
                raise _no_prefix(answers[0])
            spans = [span for span in spans if span[0] >= len(prompts[0])]
        marked = "\0".join(text[begin:end] for begin, end in spans)
        for n in answers:
            tail = _tail(messages[n])
            if tail in text and tail not in marked:
                raise RowError(
                    "outside the tags",
                    f"messages[{n}]: the template writes this answer outside its generation tags; write a template"
                    " with the tags around each answer, or without tags",
                )
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = list(encoding["input_ids"]), encoding["offset_mapping"]
        trained, ends = [False] * len(ids), []
        for begin, end in spans:
            inside = [n for n, (a, b) in enumerate(places) if a < end and b > begin]
            if not inside:
                continue
            for n in inside:
                trained[n] = True
            last = next((n for n in reversed(inside) if text[slice(*places[n])].strip()), inside[-1])
            if ids[last] not in self.ends:
                last = inside[-1] + 1
                while last < len(ids) and not text[slice(*places[last])].strip() and ids[last] not in self.ends:
                    last += 1
                if last == len(ids) or ids[last] not in self.ends:
                    continue
                trained[inside[-1] + 1 : last + 1] = [True] * (last - inside[-1])
            ends.append(last)
        if not ends:
            raise self._no_end(answers[-1])
        prefixes = True  # whether each answer begins where the prompt for it ends
        for n, prompt in zip(answers, prompts, strict=True):
            holds = prompt is not None and text.startswith(prompt)
            length = len(prefix := self._tokens(prompt or ""))
            if holds and ids[:length] != prefix:
                raise _joined(n)
            prefixes &= holds and length < len(ids) and trained[length] and not (length and trained[length - 1])
        return Encoded(ids, trained, ends, len(answers), prefixes)

    def _by_prefixes(self, messages: list[dict[str, Any]], tools: Any, answers: list[int], text: str) -> Encoded:
        ids = self._tokens(text)
        trained, ends = [False] * len(ids), []
        starts = []  # of each answer, in the text and in the tokens
        for n in answers:
            prompt = self._prompt(messages[:n], tools)
            prefix = self._tokens(prompt or "")
            if prompt is None or not text.startswith(prompt):
                raise _no_prefix(n)
            if ids[: len(prefix)] != prefix:
                raise _joined(n)
            starts.append((len(prompt), len(prefix)))
        following = [*starts[1:], (len(text), len(ids))]
        for n, (begin, first), (until, limit) in zip(answers, starts, following, strict=True):
            answer = text[begin:until]
            if not self._prompts and not _begins(messages[n], answer):
                raise RowError(
                    "no prompt",
                    f"messages[{n}]: the template ignores add_generation_prompt and begins the answer with"
                    f" {answer[:20]!r}; add {{% if add_generation_prompt %}}, or generation tags, and write"
                    " data.chat_template=<the file>",
                )
            end = next((place for place in range(first, limit) if ids[place] in self.ends), None)
            if end is None or not self._is_whole(messages, tools, n, text, answer, ids[end]):
                raise self._no_end(n)
            trained[first : end + 1] = [True] * (end + 1 - first)
            ends.append(end)
        return Encoded(ids, trained, ends, len(answers))

    def _no_end(self, n: int) -> RowError:
        ends = " or ".join(repr(self._added.get(id_, self.tokenizer.eos_token)) for id_ in self.ends)
        return RowError(
            "no end of turn",
            f"messages[{n}]: the template doesn't write its end of turn {ends} after this answer, so the model would"
            " not learn to stop there; write data.chat_template=<a file that writes it after each answer>",
        )

    def _checked_tools(self, messages: list[dict[str, Any]], tools: Any) -> Any:
        """Return the tools as a list of mappings, or None."""
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except ValueError as error:
                raise RowError("no JSON", f"tools={tools[:40]!r} is no JSON; write a list of objects") from error
        if tools and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
            raise RowError("tools", f"tools={str(tools)[:40]!r}; write a list of JSON schemas")
        _refuse_control_tokens("tools", tools, self._control)
        return tools or None

    def _require_all(self, messages: list[dict[str, Any]], tools: Any, text: str) -> None:
        """Check that the template writes all questions, tools and calls: many leave out what they don't know."""
        for n, message in enumerate(messages):
            calls = message.get("tool_calls") or []
            names = [call.get("function", call).get("name") for call in calls if isinstance(call, Mapping)]
            left_out = message["role"] in ("system", "developer", "user") and _tail(message) not in text
            if left_out or not all(isinstance(name, str) and name in text for name in names):
                raise RowError(
                    "left out by the template",
                    f"messages[{n}]: the chat template doesn't write this {'message' if left_out else 'call'}; write"
                    " data.chat_template=<a file that does>, or drop it",
                )
        if tools and self._rendered(messages)[0] == text:
            raise RowError("left out by the template", "tools: the chat template doesn't write them; leave them out")

    def _is_whole(self, messages: list[dict[str, Any]], tools: Any, n: int, text: str, answer: str, end: int) -> bool:
        """Return whether the first end-of-turn token after a prompt is that of answer ``n``."""
        before = answer.partition(self._added.get(end, self.tokenizer.eos_token))[0].rstrip()
        tail = _tail(messages[n])
        return (bool(tail) and before.endswith(tail)) or text.startswith(
            self._rendered(messages[: n + 1], tools)[0].rstrip()
        )

    @cached_property
    def _prompts(self) -> bool:
        """Whether the template writes something where an answer is asked for."""
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
        has_tools = bool(tools)
        if has_tools not in self._chosen:
            try:
                self._chosen[has_tools] = self.tokenizer.get_chat_template(None, tools)
            except ValueError as error:
                raise PresetError(
                    f"data.tokenizer: {self.tokenizer.name_or_path} has no chat template; write"
                    " data.chat_template=<a file of Jinja>, data.chat_template=<the folder of a tokenizer that has"
                    " one>, or data.chat_template=plain"
                ) from error
        return self._chosen[has_tools]

    def _rendered(
        self, messages: list[dict[str, Any]], tools: Any = None, *, tags: bool = False, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation and the places between its generation tags."""
        from jinja2 import TemplateError
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
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RowError(
                "refused by the template", f"messages: the chat template raised {type(error).__name__}: {error}"
            ) from error
        return rendered[0][0], rendered[1][0] if tags else []


def plain_text(tokenizer: Any, prompt: str, text: Any) -> Encoded:
    """Return the tokens of a text and an end token, trained from the first one that isn't the prompt's on.

    Raises:
        RowError: there is no text.
        PresetError: the tokenizer has no end token.
    """
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


def checked_messages(messages: Any, roles: frozenset[str], control: re.Pattern[str]) -> list[dict[str, Any]]:
    """Return messages as templates take them: text in ``content``, and arguments of tools as mappings.

    Raises:
        RowError: a message is ill-formed; names it and says what to write.
    """
    if not isinstance(messages, list) or not messages:
        raise RowError("no messages", f"messages is {messages!r}; write a list of messages with role and content")
    return [_checked(f"messages[{n}]", message, roles, control) for n, message in enumerate(messages)]


def _checked(place: str, given: Any, roles: frozenset[str], control: re.Pattern[str]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise RowError("no message", f"{place} is {given!r}; write an object with role and content")
    message = {key: value for key, value in given.items() if value is not None}
    role, content = message.get("role"), message.get("content")
    if role not in roles:
        instead = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}.get(str(role))
        hint = f"; write {instead!r}" if instead else ""
        raise RowError("unknown role", f"{place}.role={role!r}{hint}; allowed are {', '.join(sorted(roles))}")
    if message.get("weight", 1) not in (0, 1) or (message.get("weight") == 0 and role == "assistant"):
        raise RowError("weights", f"{place}.weight={message['weight']}: answers have no weights here; leave weight out")
    if isinstance(content, list):
        parts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise RowError(
                "other than text", f"{place}.content has parts other than text, which no text model reads; write text"
            )
        content = "".join(parts)
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise RowError("no content", f"{place}.content is {content!r}; write text")
    if role == "assistant" and not content.strip() and not message.get("tool_calls"):
        raise RowError("empty answer", f"{place}.content is {content!r}: an empty answer; write one, or drop the row")
    message["content"] = content
    if "tool_calls" in message:
        message["tool_calls"] = _parsed(message["tool_calls"])
    _refuse_control_tokens(place, message, control)
    return message


def _parsed(calls: Any) -> Any:
    """Return calls of tools with arguments as mappings; APIs give them as JSON, which templates would quote again."""
    if isinstance(calls, list):
        return [_parsed(call) for call in calls]
    if not isinstance(calls, Mapping):
        return calls
    calls = {key: _parsed(value) if key == "function" else value for key, value in calls.items()}
    if isinstance(calls.get("arguments"), str):
        try:
            calls["arguments"] = json.loads(calls["arguments"])
        except ValueError as error:
            raise RowError("no JSON", f"tool_calls: arguments={calls['arguments']!r} is no JSON") from error
    return calls


def _refuse_control_tokens(place: str, value: Any, control: re.Pattern[str]) -> None:
    if isinstance(value, str) and (match := control.search(value)):
        raise RowError(
            "control tokens",
            f"{place} has the text {match[0]!r}, which is a control token of the tokenizer, as if a turn began or ended"
            " there; write it in another way, or drop the row",
        )
    if isinstance(value, Mapping | list):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            _refuse_control_tokens(f"{place}.{key}" if isinstance(value, Mapping) else f"{place}[{key}]", part, control)


def _tail(message: Mapping[str, Any]) -> str:
    """Return the end of a message's last line, without thoughts, which templates may leave out."""
    return str(message["content"]).rpartition("</think>")[2].strip().rpartition("\n")[2][-TAIL:]


def _begins(message: Mapping[str, Any], answer: str) -> bool:
    text = str(message["content"]).strip()
    return not text or answer.lstrip().startswith(text[:TAIL])


def _joined(n: int) -> RowError:
    return RowError(
        "joined tokens",
        f"messages[{n}]: a token has the end of the prompt and the start of this answer, which would begin otherwise in"
        " generation; remove white space at the start of the answer, or write data.chat_template=<a file whose prompt"
        " for an answer doesn't end with white space>",
    )


def _no_prefix(n: int) -> RowError:
    return RowError(
        "no prefix",
        f"messages[{n}]: the template writes the messages before this answer differently once it is there, so it is"
        " unclear which tokens are the answer's; write data.chat_template=<a file with generation tags>",
    )
