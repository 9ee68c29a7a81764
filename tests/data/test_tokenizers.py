"""`data.tokenizers`: a folder's tokenizer with new tokens and another template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_solo.data.tokenizers import (
    PLAIN_TEMPLATE,
    add_tokens,
    chat_template_of,
    new_tokens_of,
    tokenizer_of,
)
from lightning_solo.errors import CheckpointError, PresetError
from tests.fine_tuning.conftest import TEMPLATES, tiny_tokenizer
from tests.messages import mentions


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_new_tokens_are_one_token_and_turn_marks_are_special(folder: Path) -> None:
    plain, terms = tokenizer_of(folder), ["zygote", "<|call|>", "fox"]
    pieces = {text: plain(text, add_special_tokens=False)["input_ids"] for text in terms}
    tokenizer = tokenizer_of(folder, new_tokens=terms)
    assert tokenizer("a zygote<|call|>", add_special_tokens=False)["input_ids"][-2:] == [len(plain), len(plain) + 1]
    assert tokenizer.decode([len(plain), len(plain) + 1], skip_special_tokens=True) == "zygote"
    again = tokenizer_of(folder)
    assert add_tokens(again, [*terms, "<|im_end|>"]) == {len(plain) + n: pieces[t] for n, t in enumerate(terms)}
    assert add_tokens(again, terms) == {}  # they are tokens now
    assert all(len(tokens) > 1 for tokens in pieces.values())


def test_file_of_new_tokens_has_one_a_line(tmp_path: Path) -> None:
    (tmp_path / "terms.txt").write_text("\ufeffzygote\r\n\n meiosis \nzygote\n", encoding="utf-8")
    assert new_tokens_of(str(tmp_path / "terms.txt")) == ["zygote", "meiosis"]
    assert new_tokens_of(["a"]) == ["a"]
    assert new_tokens_of(None) == []
    (tmp_path / "empty.txt").write_text("\n")
    for name in ("empty.txt", "missing.txt"):
        with pytest.raises(PresetError, match=mentions("data.new_tokens", name)):
            new_tokens_of(str(tmp_path / name))


def test_chat_template_comes_from_a_file_a_folder_or_is_plain(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    assert chat_template_of(str(tmp_path / "own.jinja")) == "{{ messages }}"
    assert chat_template_of(str(folder)) == TEMPLATES["tags"]
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ 1 }}"}))
    assert chat_template_of(str(folder)) == "{{ 1 }}"
    assert chat_template_of("plain") == chat_template_of(PLAIN_TEMPLATE) == PLAIN_TEMPLATE
    assert tokenizer_of(folder, "{{ 2 }}").chat_template == "{{ 2 }}"
    for choice in ("missing.jinja", str(tmp_path)):
        with pytest.raises(PresetError, match=mentions("data.chat_template=plain", choice)):
            chat_template_of(choice)


def test_folder_without_a_tokenizer_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for path, remedy in (("owner/name", "hf download"), (str(tmp_path), "tokenizer.json")):
        with pytest.raises(CheckpointError, match=mentions(path, remedy)):
            tokenizer_of(path)
