"""What a folder needs beside weights so that others generate as in training: tokenizer, ends, and an Ollama file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lightning_solo.atomic_files import read_json
from lightning_solo.data.tokenizers import tokenizer_of
from lightning_solo.export.trained_models import Words

TOKENIZER_FILES = (
    "*token*.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template*",
    "*processor_config.json",
)
"""Names of the files of tokenizers and processors."""
GENERATION = "generation_config.json"


def write_tokenizer(words: Words, output: Path) -> list[str]:
    """Copy the files of a tokenizer byte for byte; write them anew only if tokens were added. Return lines about it.

    A chat template that training used in place of the tokenizer's is written where transformers looks for it.
    """
    folder, tokens, template = words
    if folder is not None and tokens:
        tokenizer_of(folder, template, tokens).save_pretrained(output)
        return [f"tokenizer: that of {folder}, written anew with {len(tokens)} more tokens"]
    files = sorted(folder.iterdir()) if folder is not None else []
    chosen = [
        file
        for file in files
        if any(fnmatch(file.name, name) for name in TOKENIZER_FILES) and not file.name.endswith(".index.json")
    ]
    for file in chosen:
        if file.is_dir():
            shutil.copytree(file, output / file.name)
        else:
            shutil.copyfile(file, output / file.name)
    if template is not None and chosen:
        (output / "chat_template.jinja").write_text(template, encoding="utf-8")
        config = read_json(output / "tokenizer_config.json") or {}
        if config.get("chat_template") not in (None, template):
            text = json.dumps({**config, "chat_template": template}, indent=2, ensure_ascii=False)
            (output / "tokenizer_config.json").write_text(f"{text}\n", encoding="utf-8")
    return [] if chosen else [f"tokenizer: none in {folder}, so none was copied"]


def write_generation_files(model: Any, base: Path | None, output: Path, weights: str | None = ".") -> list[str]:
    """Write the checked ``generation_config.json`` and a Modelfile for Ollama; return lines about mended values.

    A token that ends an answer in the chat template, and isn't among the ends, is added to them. A padding token that
    is among them is replaced, since generation would stop at once or be cut.

    Args:
        model: of transformers.
        base: the folder whose generation_config.json is taken; that of ``model`` without one.
        output: the folder, with the tokenizer's files.
        weights: the path of the weights, relative to the Modelfile; None for weights that Ollama can't read.
    """
    if not model.can_generate():
        return []
    tokenizer = _tokenizer(output)
    source = base / GENERATION if base is not None else None
    content = (read_json(source) or {}) if source is not None else {}
    if not content and model.generation_config is not None:
        content = model.generation_config.to_diff_dict()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(model.config.get_text_config(decoder=True), key, None)
        if content.get(key) is None and value is not None:
            content[key] = value
    lines = _mend(content, tokenizer)
    if lines or source is None or not source.is_file():
        text = json.dumps(content, indent=2, sort_keys=True)
        (output / GENERATION).write_text(f"{text}\n", encoding="utf-8")
    else:
        shutil.copyfile(source, output / GENERATION)
    if tokenizer is None or weights is None or model.config.is_encoder_decoder:
        return lines
    text, line = modelfile(tokenizer, _ids(content.get("eos_token_id")), weights)
    (output / "Modelfile").write_text(text, encoding="utf-8")
    return [*lines, line]


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError):  # none, or one that this transformers can't read
        return None


def _ids(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _mend(content: dict[str, Any], tokenizer: Any) -> list[str]:
    """Correct ends and padding; return a line about each change."""
    lines, ends = [], _ids(content.get("eos_token_id"))
    stop = end_of_answer(tokenizer)
    if stop is not None and stop not in ends:
        ends.append(stop)
        content["eos_token_id"] = ends if len(ends) > 1 else stop
        token = tokenizer.convert_ids_to_tokens(stop)
        lines.append(f"{GENERATION}: {token} ({stop}), which ends an answer in the chat template, was added as an end")
    pad = content.get("pad_token_id")
    if pad is not None and pad in ends:
        others = [getattr(tokenizer, name, None) for name in ("pad_token_id", "unk_token_id")]
        content["pad_token_id"] = next((each for each in others if each is not None and each not in ends), None)
        lines.append(
            f"{GENERATION}: pad_token_id {pad} is among eos_token_id {ends}, which would end answers; it is now"
            f" {content['pad_token_id']}"
        )
        if content["pad_token_id"] is None:
            del content["pad_token_id"]
    return lines


# --- the chat template ---

SYSTEM, USER, ANSWER, NEXT = "system-7f3a", "user-7f3a", "answer-7f3a", "next-7f3a"
_CHAT = ({"role": "user", "content": USER}, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": NEXT})


def end_of_answer(tokenizer: Any) -> int | None:
    """Return the token that ends an answer in the chat template; None without a template or such a token."""
    if tokenizer is None or (text := _rendered(tokenizer, _CHAT[:2])) is None or ANSWER not in text:
        return None
    ids = tokenizer(text.rpartition(ANSWER)[2], add_special_tokens=False)["input_ids"]
    special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    return next((each for each in ids if each in special), None)


def _rendered(tokenizer: Any, chat: Any, *, prompt: bool = False) -> str | None:
    """Return the text of a chat; None where the template refuses it, or there is none."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        return None
    try:
        text: str = tokenizer.apply_chat_template(list(chat), tokenize=False, add_generation_prompt=prompt)
    except (TemplateError, TypeError, ValueError, KeyError, IndexError):
        return None
    return text.removeprefix(tokenizer.bos_token or "")  # which Ollama adds itself


def chat_frame(tokenizer: Any) -> dict[str, str] | None:
    """Return the texts around the contents of a chat; None where the template doesn't render each turn alike.

    Keys are "head", without a system message, "before" and "after" each role, such as "user before", and "prompt".
    Those of a system message are missing where the template has none, or none of its own.
    """
    start, question, chat = (_rendered(tokenizer, _CHAT[:count], prompt=count == 3) for count in (1, 2, 3))
    if start is None or question is None or chat is None or not all(word in chat for word in (USER, ANSWER, NEXT)):
        return None
    first, after_user = start.split(USER, 1)
    after_answer = question.rpartition(ANSWER)[2]
    middle, rest = chat.partition(USER)[2].split(ANSWER, 1)
    before_next, end = rest.split(NEXT, 1)
    frame = {
        "user before": before_next.removeprefix(after_answer),
        "user after": after_user,
        "assistant before": middle.removeprefix(after_user),
        "assistant after": after_answer,
        "prompt": end.removeprefix(after_user),
    }
    frame["head"] = first.removesuffix(frame["user before"])
    if not _renders(tokenizer, frame, ()):
        return None
    system = {"role": "system", "content": SYSTEM}
    text = _rendered(tokenizer, [system, _CHAT[0]])
    if text is not None and SYSTEM in text and USER in text.partition(SYSTEM)[2]:
        before, rest = text.split(SYSTEM, 1)
        whole = {
            **frame,
            "system before": before,
            "system after": rest.split(USER, 1)[0].removesuffix(frame["user before"]),
        }
        if _renders(tokenizer, whole, [system]):
            return whole
    return frame


def _renders(tokenizer: Any, frame: Mapping[str, str], system: Any) -> bool:
    """Return whether a frame gives the text of the template for a longer chat."""
    chat = [*_CHAT, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    text = "".join(
        frame[f"{each['role']} before"] + each["content"] + frame[f"{each['role']} after"] for each in [*system, *chat]
    )
    return ("" if system else frame["head"]) + text + frame["prompt"] == _rendered(
        tokenizer, [*system, *chat], prompt=True
    )


def modelfile(tokenizer: Any, ends: list[int], weights: str) -> tuple[str, str]:
    """Return the text of a Modelfile for ``ollama create``, and a line about it."""
    lines, said = [f"FROM {weights}"], "Modelfile: for ollama create NAME -f Modelfile"
    frame = chat_frame(tokenizer) if tokenizer.chat_template else None
    if frame is not None and any("{{" in text or '"""' in text for text in frame.values()):
        frame = None
    if frame is not None:
        turns = "".join(
            f'{{{{ {word} eq .Role "{role}" }}}}{frame[f"{role} before"]}{{{{ .Content }}}}{frame[f"{role} after"]}'
            for word, role in (("if", "user"), ("else if", "assistant"))
        )
        head = frame["head"]
        if "system before" in frame:
            head = f"{frame['system before']}{{{{ .System }}}}{frame['system after']}"
            head = f"{{{{ if .System }}}}{head}{{{{ else }}}}{frame['head']}{{{{ end }}}}"
        else:
            said += "; the chat template has no system message of its own, so TEMPLATE has none"
        lines.append(
            f'TEMPLATE """{head}{{{{ range .Messages }}}}{turns}{{{{ end }}}}{{{{ end }}}}{frame["prompt"]}"""'
        )
    else:
        why = "renders turns in ways that Ollama's can't" if tokenizer.chat_template else "is missing"
        said += f"; without TEMPLATE, since the chat template {why}: write one in it before you chat"
    stops = [tokenizer.convert_ids_to_tokens(each) for each in ends]
    lines += [f"PARAMETER stop {json.dumps(each, ensure_ascii=False)}" for each in stops if each]
    return "\n".join(lines) + "\n", said
