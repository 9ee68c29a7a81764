"""`data=text`: documents are cleaned, counted by rule and kept once; every token is in one window."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_solo.data.tokenizers import tokenizer_of
from lightning_solo.errors import PresetError
from lightning_solo.fine_tuning import text as text_file
from lightning_solo.fine_tuning.rows import RowError
from lightning_solo.fine_tuning.text import Cleaning, TextData, cleaned
from lightning_solo.reference.stdlib_text import library_files
from tests.fine_tuning.conftest import tiny_tokenizer
from tests.messages import mentions

PROSE = "The quick brown fox jumps over the lazy dog."


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Callable[..., TextData]:
    """Return a function that writes documents, to text files or rows, and sets the data up."""

    def made(*texts: Any, rows: bool = False, **arguments: Any) -> TextData:
        folder = tmp_path / f"texts{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for index, text in enumerate(texts):
            (folder / f"sub{index % 2}").mkdir(exist_ok=True)
            if not rows:
                (folder / f"sub{index % 2}" / f"{index}.txt").write_bytes(
                    text if isinstance(text, bytes) else text.encode()
                )
        if rows:
            (folder / "rows.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
        arguments = {"max_length": 8, "validation_share": 0.0, "cache": str(tmp_path / "cache"), **arguments}
        data = TextData(str(folder), str(model), **arguments)
        data.setup("fit")
        return data

    return made


def tokens_of(data: TextData, split: str = "train") -> list[int]:
    rows = data._splits[split]
    return [int(id_) for index in range(len(rows)) for id_ in rows[index]["input_ids"]]


@pytest.mark.parametrize("rows", [False, True])
def test_windows_have_every_token_once_and_documents_end(rows: bool, make: Callable[..., TextData]) -> None:
    texts = [f"What is {n}? " * (n + 1) for n in range(4)]
    documents = [{"text": text} for text in texts] if rows else texts
    data = make(*documents, rows=rows)
    tokenizer = tokenizer_of(data.tokenizer)
    ids = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in texts]
    start = [tokenizer.bos_token_id] if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id else []
    order = range(4) if rows else (0, 2, 1, 3)  # by folder
    expected = [id_ for index in order for id_ in (*start, *ids[index])]
    assert tokens_of(data) == expected
    lengths = data._splits["train"].lengths.tolist()
    assert lengths[:-1] == [8] * (len(expected) // 8)
    batch = next(iter(data.train_dataloader()))
    assert torch.equal(batch["labels"].clamp(min=0), batch["input_ids"] * batch["attention_mask"])


def test_documents_are_dropped_and_changed_by_rule_and_counted(make: Callable[..., TextData]) -> None:
    texts = [
        *(PROSE, PROSE + "\n", "", " \n", "\0" * 50 + "ab", PROSE + "\0", "It is \ufeffgood."),
        *(f"See https://a.org/b {PROSE}", f"<p>Tom &amp; {PROSE}</p><script>x()</script>", "a" * 5000, "short"),
    ]
    cleaning = {"urls": "remove", "markup": "remove", "max_chars": 1000, "min_chars": 6}
    report = make(*texts, cleaning=cleaning).report
    assert report is not None
    assert report.dropped == {
        "duplicate": 2,  # one with a newline at its end, and one with a control character
        "empty": 2,
        "control characters": 1,
        "too many characters": 1,
        "too few characters": 1,
    }
    assert report.changed == {"control characters": 1, "URLs": 1, "markup": 1}  # type: ignore[attr-defined]
    assert (report.read, report.kept) == (11, 4)
    assert report.places["too few characters"][0].endswith("10.txt")
    cells = {row[0].text: row[1].text for row in next(report.tables()).rows}
    assert cells["dropped: duplicate"].startswith("2 (")
    assert cells["changed: URLs"] == "1"
    assert make(*texts[:2], cleaning={"duplicates": "keep"}).report.kept == 2  # type: ignore[union-attr]


NO_PROSE = {
    "words without letters": "0x3f 77:12 -- 91;0 4411 /// 12",
    "words of unusual length": "a b c d e f g",
    "symbols": "title# another# words here",
    "lists": "- one thing and another thing\n* two things and one more\n- three things and others too",
    "unfinished lines": "one more thing...\nand another thing\nthat is not cut off here",
    "repeated lines": "same line here\n" * 5,
}


@pytest.mark.parametrize("reason", NO_PROSE)
def test_rules_for_prose_drop_what_is_none(reason: str) -> None:
    text, strict = NO_PROSE[reason], Cleaning(low_quality="drop")
    assert cleaned(text, Cleaning()) == (text, [])
    assert cleaned(PROSE, strict) == (PROSE, [])
    with pytest.raises(RowError) as caught:
        cleaned(text, strict)
    assert caught.value.reason == f"low quality: {reason}"


def test_documents_are_split_by_content(make: Callable[..., TextData]) -> None:
    texts = [f"{PROSE} {n}" for n in range(40)]
    few, many = make(*texts[:20], validation_share=0.3), make(*texts, validation_share=0.3)
    tokenizer = tokenizer_of(few.tokenizer)

    def documents(data: TextData, split: str) -> set[str]:
        return {text.strip() for text in tokenizer.decode(tokens_of(data, split)).split(tokenizer.eos_token)} - {""}

    for split in ("train", "validation"):
        assert documents(few, split) < documents(many, split)
    assert documents(many, "train") | documents(many, "validation") == set(texts)


def test_last_windows_of_a_single_document_are_held_out(make: Callable[..., TextData]) -> None:
    text = "".join(f"{PROSE} {n}. " for n in range(20))
    whole, data = tokens_of(make(text, max_length=16)), make(text, max_length=16, validation_share=0.2)
    train, held_out = tokens_of(data), tokens_of(data, "validation")
    assert train + held_out == whole
    windows = -(-len(whole) // 16)
    assert len(data._splits["validation"]) == -(-windows // 5)
    with pytest.raises(PresetError, match=mentions("only one", "data.validation_share=0")):
        make("a b", validation_share=0.1)


def test_bad_rows_and_choices_are_named(make: Callable[..., TextData], model: Path, tmp_path: Path) -> None:
    with pytest.raises(PresetError, match=mentions("rows.jsonl:2", "data.bad_rows=drop")):
        make({"text": "a b"}, {"messages": []}, rows=True)
    report = make(
        {"text": "a b"}, {"text": 7}, {"text": "\ud800"}, {"text": "c d", "url": "a"}, rows=True, bad_rows="drop"
    ).report
    assert report is not None
    assert report.dropped == {"no text": 1, "half a character": 1}
    assert report.unused == {"url": 1}
    for cleaning, words in [
        ({"url": "remove"}, ("data.cleaning.url", "urls")),
        ({"markup": "drop"}, ("data.cleaning.markup", "'keep' or 'remove'")),
        ({"low_quality": "remove"}, ("data.cleaning.low_quality", "'keep' or 'drop'")),
    ]:
        with pytest.raises(PresetError, match=mentions(*words)):
            TextData("texts", str(model), cleaning=cleaning)
    (tmp_path / "empty").mkdir()
    with pytest.raises(PresetError, match=mentions("data.files")):
        TextData(str(tmp_path / "empty"), str(model)).setup("fit")
    with pytest.raises(PresetError, match=mentions("missing.txt")):
        TextData(str(tmp_path / "missing.txt"), str(model)).setup("fit")


def test_the_standard_library_is_read_by_its_name(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = TextData("stdlib", str(model))
    files = dict(library_files())
    assert data.sources() == list(files.values())
    # a few modules, since a slow tokenizer would take minutes for all
    few = [(name, files[name]) for name in ("this.py", "antigravity.py", "__future__.py")]
    monkeypatch.setattr(text_file, "library_files", lambda: [*few, ("copy/this.py", files["this.py"])])
    data = TextData("stdlib", str(model), max_length=64, validation_share=0.0, cache="cache")
    data.setup("fit")
    assert data.report is not None
    assert (data.report.kept, data.report.dropped["duplicate"]) == (3, 1)
    Path("stdlib").mkdir()
    (tmp_path / "stdlib" / "a.txt").write_text(PROSE)
    assert data.sources() == [Path("stdlib/a.txt")]


@pytest.mark.long
def test_the_whole_standard_library_is_tokenized_once(model: Path, tmp_path: Path) -> None:
    for _ in range(2):
        data = TextData("stdlib", str(model), max_length=512, cache=str(tmp_path / "cache"))
        data.setup("fit")
        assert data.report is not None
        assert data.report.kept > 400
        assert min(data.report.train, data.report.validation) > 0
    (file,) = (tmp_path / "cache").glob("stdlib-*.tokens")
    assert file.stat().st_size == 4 * data.report.tokens
