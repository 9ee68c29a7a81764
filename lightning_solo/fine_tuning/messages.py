"""Messages and tools of a conversation, as chat templates take them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from lightning_solo.fine_tuning.rows import RowError

ROLES = ("system", "developer", "user", "assistant", "tool")
RENAMED = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Roles of other formats -> the usual role."""


def checked_messages(messages: Any, roles: frozenset[str], control: re.Pattern[str]) -> list[dict[str, Any]]:
    """Return messages with text in ``content`` and mappings as arguments of tools.

    Args:
        messages: a row's messages.
        roles: allowed roles.
        control: matches texts that would be encoded as control tokens.

    Raises:
        RowError: a message is ill-formed; names it and says what to write.
    """
    if not isinstance(messages, list) or not messages:
        raise RowError("no messages", f"messages is {messages!r}; write a list of messages with role and content")
    return [_checked(f"messages[{n}]", message, roles, control) for n, message in enumerate(messages)]


def checked_tools(tools: Any, control: re.Pattern[str]) -> list[Mapping[str, Any]] | None:
    """Return tools as a list of mappings, or None if there are none.

    Raises:
        RowError: they are ill-formed.
    """
    if isinstance(tools, str):
        tools = _loaded(tools, "tools")
    if tools and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise RowError("tools", f"tools={str(tools)[:40]!r}; write a list of JSON schemas")
    _refuse_control_tokens("tools", tools, control)
    return tools or None


def _checked(place: str, value: Any, roles: frozenset[str], control: re.Pattern[str]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RowError("no message", f"{place} is {value!r}; write an object with role and content")
    message = {key: each for key, each in value.items() if each is not None}
    role, calls = message.get("role"), message.get("tool_calls")
    if role not in roles:
        hint = f"; write {RENAMED[role]!r}" if role in RENAMED else ""
        raise RowError("unknown role", f"{place}.role={role!r}{hint}; allowed are {', '.join(sorted(roles))}")
    if message.get("weight", 1) not in (0, 1) or (message.get("weight") == 0 and role == "assistant"):
        raise RowError("weights", f"{place}.weight={message['weight']}: answers have no weights here; leave weight out")
    message["content"] = content = _text(place, message.get("content", "" if calls else None))
    if role == "assistant" and not content.strip() and not calls:
        raise RowError("empty answer", f"{place}.content is {content!r}: an empty answer; write one, or drop the row")
    if calls is not None:
        message["tool_calls"] = _parsed(calls)
    _refuse_control_tokens(place, message, control)
    return message


def _text(place: str, content: Any) -> str:
    """Return a content's text; that of several parts is joined."""
    if isinstance(content, list):
        content = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(part, str) for part in content):
            raise RowError("other than text", f"{place}.content has parts other than text; write text alone")
        return "".join(content)
    if not isinstance(content, str):
        raise RowError("no content", f"{place}.content is {content!r}; write text")
    return content


def _parsed(calls: Any) -> Any:
    """Return calls of tools with arguments as mappings; APIs give them as JSON, which templates would quote again."""
    if isinstance(calls, list):
        return [_parsed(call) for call in calls]
    if not isinstance(calls, Mapping):
        return calls
    calls = {key: _parsed(value) if key == "function" else value for key, value in calls.items()}
    if isinstance(calls.get("arguments"), str):
        calls["arguments"] = _loaded(calls["arguments"], "tool_calls: arguments")
    return calls


def _loaded(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RowError("no JSON", f"{name}={text[:40]!r} is no JSON; write JSON or an object") from error


def _refuse_control_tokens(place: str, value: Any, control: re.Pattern[str]) -> None:
    if isinstance(value, str) and (match := control.search(value)):
        raise RowError(
            "control tokens",
            f"{place} has {match[0]!r}, a control token, by which a turn would begin or end within the text; write it"
            " in another way, or drop the row",
        )
    if isinstance(value, Mapping):
        for key, part in value.items():
            _refuse_control_tokens(f"{place}.{key}", part, control)
    if isinstance(value, list):
        for n, part in enumerate(value):
            _refuse_control_tokens(f"{place}[{n}]", part, control)
