"""Values of secret environment variables, which belong in no file and no message."""

from __future__ import annotations

import copy
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

NAME = re.compile(
    r"((^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWD|PASSPHRASE|CREDENTIALS?)|_PWD|PASSWORD)(_|$)", re.IGNORECASE
)
"""Names of environment variables that hold secrets, such as WANDB_API_KEY, HF_TOKEN and AWS_SECRET_ACCESS_KEY."""
SHORTEST = 8
"""Characters of a secret, at least: shorter values, such as ``1``, occur in other texts."""


def secrets() -> dict[str, str]:
    """Return value -> name of each secret of the environment, the longest values first."""
    found = {value: name for name, value in os.environ.items() if NAME.search(name) and len(value) >= SHORTEST}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def secret_in(value: Any) -> str | None:
    """Return the name of a secret that a text, or a text in a plain container, has; None without one."""
    known = secrets()
    return next((known[secret] for text in _texts(value) for secret in known if secret in text), None)


def without_secrets(value: Any) -> Any:
    """Return a text, or a container of texts, with ``$NAME`` in place of each secret; OmegaConf's become plain."""
    value = _as_plain(value)
    if isinstance(value, str):
        for secret, name in secrets().items():
            value = value.replace(secret, f"${name}")
        return value
    if isinstance(value, dict):
        changed = copy.copy(value)
        changed.update((key, without_secrets(each)) for key, each in value.items())
        return changed
    return type(value)(map(without_secrets, value)) if type(value) in (list, tuple) else value


def print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception with its traceback, as Python does, without secrets."""
    print(without_secrets("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def _as_plain(value: Any) -> Any:
    if type(value).__module__.partition(".")[0] != "omegaconf":
        return value
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value


def _texts(value: Any) -> Iterator[str]:
    value = _as_plain(value)
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
