"""A tokenizer from a folder, as it is or with new tokens and another chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_solo.errors import CheckpointError, PresetError

PLAIN_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}{{- '### ' + message['role'].capitalize() + ':\n' }}"
    "{%- if message['role'] == 'assistant' %}{%- generation %}{{- message['content'] + eos_token }}"
    "{%- endgeneration %}{{- '\n' }}{%- else %}{{- message['content'] + '\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '### Assistant:\n' }}{%- endif %}"
)
"""Template for a tokenizer without one: roles are headings, and the end token ends each answer."""
CONTROL = re.compile(r"<\|.*\|>|</?s>|\[/?[A-Z_]+\]")
"""New tokens that mark turns, and aren't text."""


def tokenizer_of(folder: str | Path, chat_template: str | None = None, new_tokens: Sequence[str] = ()) -> Any:
    """Return the tokenizer in a folder.

    Args:
        folder: of a model.
        chat_template: text of a template in place of the tokenizer's own.
        new_tokens: texts that become tokens, as `new_tokens_of` returns them.

    Raises:
        CheckpointError: there is no tokenizer.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise CheckpointError(
            f"data.tokenizer={folder}: no such folder; download the model first: hf download <owner>/<name> --local-dir"
            f" {folder}"
        )
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder}: no tokenizer ({str(error).strip().partition(chr(10))[0]}); copy tokenizer.json and"
            " tokenizer_config.json of the model into it"
        ) from error
    add_tokens(tokenizer, new_tokens)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def add_tokens(tokenizer: Any, new_tokens: Sequence[str]) -> dict[int, list[int]]:
    """Add tokens to a tokenizer; return a mapping from the id of each to the tokens that its text had before.

    A text that is a token already is left out.
    """
    known = tokenizer.get_vocab()
    before = {
        text: list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in new_tokens if text not in known
    }
    if before:
        from tokenizers import AddedToken

        tokens = [AddedToken(text, normalized=False, special=bool(CONTROL.fullmatch(text))) for text in before]
        tokenizer.add_tokens(tokens)
    return {tokenizer.convert_tokens_to_ids(text): pieces for text, pieces in before.items()}


def new_tokens_of(choice: str | Sequence[str] | None, option: str = "data.new_tokens") -> list[str]:
    """Return new tokens from a file with one a line, or as they are.

    Raises:
        PresetError: there is no such file, or it has no tokens.
    """
    if not isinstance(choice, str):
        return list(choice or ())
    path = Path(choice)
    if not path.is_file():
        raise PresetError(f"{option}={choice}: no such file; write the path of a text file with one token a line")
    terms = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    if not any(terms):
        raise PresetError(f"{option}={choice}: the file is empty; write one token a line")
    return list(dict.fromkeys(term for term in terms if term))


def chat_template_of(choice: str | None, option: str = "data.chat_template") -> str | None:
    """Return the text of a chat template.

    Args:
        choice: a file of Jinja, the folder of a tokenizer that has a template, "plain" for `PLAIN_TEMPLATE`, or the
            text itself.
        option: the user's option, for messages.

    Raises:
        PresetError: there is no such file, or no template in the folder.
    """
    if choice is None or "{" in choice:
        return choice
    if choice == "plain":
        return PLAIN_TEMPLATE
    path, config = Path(choice), Path(choice) / "tokenizer_config.json"
    if (path / "chat_template.jinja").is_file():
        path = path / "chat_template.jinja"
    elif config.is_file():
        template = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(template, str):
            return template
    if not path.is_file():
        raise PresetError(
            f"{option}={choice}: no template there; write the path of a file of Jinja, the folder of a tokenizer that"
            f" has a template, or {option}=plain"
        )
    return path.read_text(encoding="utf-8")
