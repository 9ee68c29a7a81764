"""`data=chat`: batches, split, cut and dropped rows, the report, and the loss of packed rows."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_solo.data.tokenizers import tokenizer_of
from lightning_solo.errors import CheckpointError, PresetError
from lightning_solo.fine_tuning.chat import ChatData
from lightning_solo.fine_tuning.conversations import Conversations
from lightning_solo.tables import markdown
from lightning_solo.techniques.length_bucketing.technique import LengthBucketing
from lightning_solo.techniques.packing.technique import Packing
from tests.fine_tuning.test_conversations import CHATML, tokenizer
from tests.messages import mentions

KEYS = ("input_ids", "attention_mask", "labels")
SPLITS = ("train", "validation")


def chat(number: int, words: int = 1) -> dict[str, Any]:
    """Return a row of some words; each number is another row."""
    return {
        "messages": [
            {"role": "user", "content": f"What is {number}?"},
            {"role": "assistant", "content": "It is" + " two" * words},
        ]
    }


def written(folder: Path, *rows: Any, name: str = "chats.jsonl") -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a tokenizer whose padding is its end of turn."""
    from transformers import PreTrainedTokenizerFast

    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().backend_tokenizer, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    saved.chat_template = CHATML
    saved.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Callable[..., ChatData]:
    """Return a function that writes rows and sets the data up."""

    def made(*rows: Any, **arguments: Any) -> ChatData:
        arguments = {"validation_share": 0.0, "cache": str(tmp_path / "cache"), **arguments}
        data = ChatData(str(written(tmp_path, *rows)), str(folder), **arguments)
        data.setup("fit")
        return data

    return made


def items(data: ChatData, split: str = "train") -> list[Any]:
    return [data._splits[split][index] for index in range(len(data._splits[split]))]


def test_batch_has_each_row_whole_and_padding_by_position(make: Callable[..., ChatData]) -> None:
    data = make(*(chat(number, number) for number in range(1, 9)), batch_size=4)
    expected = {}
    conversations = Conversations(data_tokenizer(data))
    for number in range(1, 9):
        encoded = conversations.encode(chat(number, number)["messages"])
        labels = [id_ if on else -100 for id_, on in zip(encoded.ids, encoded.trained, strict=True)]
        expected[tuple(encoded.ids)] = labels
    end = conversations.tokenizer.eos_token_id
    seen = set()
    for batch in data.train_dataloader():
        assert all(tensor.dtype is torch.int64 for tensor in batch.values())
        for ids, mask, labels in zip(*(batch[key] for key in KEYS), strict=True):
            length = int(mask.sum())
            assert mask.tolist() == [1] * length + [0] * (len(mask) - length)
            assert ids[length:].eq(end).all()  # padding is the end of turn
            assert labels[length:].eq(-100).all()
            row = tuple(ids[:length].tolist())
            assert labels[:length].tolist() == expected[row]
            assert labels[:length].eq(end).sum() == 1
            seen.add(row)
    assert seen == set(expected)


def data_tokenizer(data: ChatData) -> Any:
    return tokenizer_of(data.tokenizer)


def test_order_depends_on_the_seed_and_workers_change_nothing(make: Callable[..., ChatData]) -> None:
    rows = [chat(number) for number in range(20)]

    def order(**arguments: Any) -> list[Any]:
        return [batch["input_ids"].tolist() for batch in make(*rows, **arguments).train_dataloader()]

    assert order(seed=1) == order(seed=1, num_workers=1) != order(seed=2)


def test_split_is_by_content_and_stays_when_rows_are_added(make: Callable[..., ChatData]) -> None:
    rows = [chat(number) for number in range(100)]
    few = make(*rows[:60], validation_share=0.3)
    ids = [{tuple(item["input_ids"].tolist()) for item in items(few, split)} for split in SPLITS]
    many = make(*reversed(rows), rows[0], validation_share=0.3)
    later = [{tuple(item["input_ids"].tolist()) for item in items(many, split)} for split in SPLITS]
    assert 8 <= len(ids[1]) <= 28
    assert ids[0] < later[0]
    assert ids[1] < later[1]
    assert not later[0] & later[1]
    assert len(items(make(chat(1), chat(2), validation_share=1e-9), "validation")) == 1  # one row at least
    assert len(items(make(chat(1), chat(2), validation_share=0.99))) == 1


def test_equal_rows_are_on_one_side_and_counted(make: Callable[..., ChatData]) -> None:
    rows = [{**chat(number // 10), "id": number} for number in range(30)]
    for share in (1e-9, 0.99):
        data = make(*rows, validation_share=share)
        train, held_out = ({tuple(item["input_ids"].tolist()) for item in items(data, s)} for s in SPLITS)
        assert train
        assert held_out
        assert not train & held_out
        assert data.report is not None
        assert (data.report.repeated, data.report.train + data.report.validation) == (27, 30)
    for equal, word in ((rows[:10], "all 10 are equal"), (rows[:1], "only one")):
        with pytest.raises(PresetError, match=mentions(word, "data.validation_share=0 monitor=null")):
            make(*equal, validation_share=0.1)


def test_columns_that_are_not_used_are_named_in_the_report(make: Callable[..., ChatData]) -> None:
    data = make({**chat(1), "source": "web", "tools": None}, {**chat(2), "source": "book", "score": 3, "id": None})
    assert data.report is not None
    assert data.report.unused == {"source": 2, "score": 1}
    cells = {row[0].text: row[1].text for row in next(data.report.tables()).rows}
    assert cells["columns that aren't used"] == "source (2), score (1)"
    assert not make(chat(1)).report.unused  # type: ignore[union-attr]


def test_many_rows_that_are_too_long_are_warned_of_with_the_length_that_keeps_them(
    make: Callable[..., ChatData],
) -> None:
    rows = [chat(number, 40 if number < 3 else 1) for number in range(20)]
    longest = max(len(item["input_ids"]) for item in items(make(*rows)))
    for _ in range(2):  # the second time from the cache
        with pytest.warns(UserWarning, match=mentions("3 of 20", f"data.max_length={longest}", "data.too_long=cut")):
            make(*rows, max_length=longest - 1)
    make(*rows[2:], max_length=longest - 1)  # 1 of 18
    make(*rows, max_length=longest)
    make(*rows, max_length=longest - 1, too_long="cut")


def test_trained_messages_that_are_no_answers_are_warned_of(make: Callable[..., ChatData]) -> None:
    around = "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    template = "{% for message in messages %}{{ message['role'] + ' ' }}" + around + "{% endfor %}"
    for _ in range(2):  # the second time from the cache
        with pytest.warns(UserWarning, match=mentions("user (3)", "data.chat_template")):
            data = make(*map(chat, range(3)), chat_template=template)
    assert data.report is not None
    assert data.report.others == {"user": 3}  # type: ignore[attr-defined]
    assert any(row[0].text.endswith("the role user") for row in next(data.report.tables()).rows)


def test_long_rows_are_dropped_or_cut_and_counted(make: Callable[..., ChatData]) -> None:
    rows = [chat(1), chat(2, 40), {"messages": [*chat(3, 60)["messages"][:1] * 12, *chat(3)["messages"][1:]]}]
    lengths = [len(item["input_ids"]) for item in items(make(*rows))]
    limit = lengths[0] + 5
    with pytest.warns(UserWarning, match=mentions("2 of 3")):
        dropped = make(*rows, max_length=limit)
    assert dropped.report is not None
    assert (dropped.report.kept, dropped.report.dropped) == (1, {"too long": 2})
    assert [place.rpartition(":")[2] for place in dropped.report.places["too long"]] == ["2", "3"]
    cut = make(*rows, max_length=limit, too_long="cut")
    report, end = cut.report, data_tokenizer(cut).eos_token_id
    assert report is not None
    assert (report.kept, report.cut, report.dropped) == (2, 1, {"no answer left": 1})
    whole, shortened = items(cut)
    assert len(shortened["input_ids"]) == limit
    assert shortened["labels"][-1] == shortened["input_ids"][-1] != end  # cut within the answer, without a false end
    assert whole["labels"][-2] == end  # before the newline
    assert (report.answers, report.ends) == (2, 1)
    assert report.trained == sum(int(item["labels"].ne(-100).sum()) for item in items(cut))


BAD = [
    ('{"messages": [', "no JSON object"),
    (json.dumps({"messages": [{"role": "gpt", "content": "a"}]}), "unknown role"),
    (json.dumps({"messages": [{"role": "user", "content": "a"}]}), "no answer"),
    (json.dumps({"messages": [], "text": "a"}), "several kinds: messages, text"),
    (json.dumps({"conversations": []}), "no kind"),
    (json.dumps({"prompt": "a"}), "no completion"),
    (json.dumps({"text": "  "}), "no text"),
    (json.dumps({"text": "a\ud800"}), "half a character"),
]


def test_bad_rows_are_named_by_line_and_counted_if_they_are_dropped(
    make: Callable[..., ChatData], tmp_path: Path
) -> None:
    lines = [line for line, _ in BAD]
    with pytest.raises(PresetError, match=mentions("chats.jsonl:2", "chats.jsonl:3", "data.bad_rows=drop")):
        make(chat(1), *lines[:2], chat(2))
    with pytest.raises(PresetError, match=mentions("chats.jsonl:6")) as caught:
        make(chat(1), *lines, chat(2))
    assert "chats.jsonl:7" not in str(caught.value)  # reading stops after five
    data = make(chat(1), *lines, chat(2), bad_rows="drop")
    assert data.report is not None
    assert data.report.dropped == {reason: 1 for _, reason in BAD}
    assert (data.report.read, data.report.kept) == (len(BAD) + 2, 2)
    assert data.report.places["no kind"] == [f"{tmp_path / 'chats.jsonl'}:6"]
    with pytest.raises(PresetError, match=mentions("chats.jsonl", "no answer")):
        make(lines[2], bad_rows="drop")
    with pytest.raises(PresetError, match=mentions("data.too_long=cut")):
        make(chat(1), max_length=3)


def test_prompts_and_texts_are_rows_too(make: Callable[..., ChatData], folder: Path) -> None:
    prompt = {"prompt": "What is 1?", "completion": "It is two"}
    asked, answered = items(make(prompt, chat(1)))
    assert all(torch.equal(asked[key], answered[key]) for key in asked)
    plain = items(make({"text": "It is two"}))[0]
    encoded = data_tokenizer(make(chat(1)))("It is two", add_special_tokens=False)["input_ids"]
    end = data_tokenizer(make(chat(1))).eos_token_id
    assert plain["input_ids"].tolist() == plain["labels"].tolist() == [*encoded, end]

    (folder / "chat_template.jinja").unlink()
    row = items(make({"prompt": "What is", "completion": " two?"}))[0]
    prompt_ids = data_tokenizer(make({"text": "a"}))("What is", add_special_tokens=False)["input_ids"]
    assert row["input_ids"].tolist()[: len(prompt_ids)] == prompt_ids
    assert row["labels"].tolist() == [-100] * len(prompt_ids) + row["input_ids"].tolist()[len(prompt_ids) :]
    assert row["labels"][-1] == end
    with pytest.raises(PresetError, match=mentions("data.chat_template=plain")):
        make(chat(1))
    assert len(items(make(chat(1), chat_template="plain"))) == 1


def test_second_start_reads_the_cache_and_a_changed_file_or_setting_does_not(
    make: Callable[..., ChatData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [chat(number) for number in range(5)]
    first = make(*rows)
    count = []
    encode = Conversations.encode
    monkeypatch.setattr(Conversations, "encode", lambda *args: count.append(1) or encode(*args))
    again = make(*rows)
    assert not count
    assert again.report == first.report
    assert all(torch.equal(a["labels"], b["labels"]) for a, b in zip(items(first), items(again), strict=True))
    make(*rows, max_length=100)
    assert len(count) == 5
    make(*rows[:4])
    assert len(count) == 9
    for file in (tmp_path / "cache").glob("*.tokens"):
        file.write_bytes(file.read_bytes()[:-4])
    assert len(items(make(*rows))) == 5
    assert len(count) == 14


def test_items_are_read_from_a_mapped_file_whose_pages_are_released(make: Callable[..., ChatData]) -> None:
    data = make(*(chat(number) for number in range(3)))
    rows = data._splits["train"]
    file = Path(rows.file.path)
    assert file.stat().st_size == 4 * int(rows.lengths.sum())
    assert len(pickle.dumps(rows)) < 3000  # a worker gets the file's path, not its content
    assert torch.equal(pickle.loads(pickle.dumps(rows))[1]["input_ids"], rows[1]["input_ids"])


# --- with techniques ---


class Bag(lightning.pytorch.LightningModule):
    """A causal model whose tokens see the mean of the document so far, by ``position_ids``."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(vocabulary, 8)
        self.head = torch.nn.Linear(8, vocabulary)
        self.losses: list[tuple[float, int]] = []
        self.shapes: list[tuple[int, ...]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids, labels = batch["input_ids"], batch["labels"]
        positions = batch.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids))
        document = positions.eq(0).cumsum(1)
        seen = (document[:, :, None] == document[:, None, :]) & torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
        mixed = seen.float() @ self.embedding(ids) / seen.sum(-1, keepdim=True)
        return F.cross_entropy(self.head(mixed)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        raise AssertionError("there are no rows to validate on")

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.losses.append((float(outputs["loss"]), int(batch["labels"][:, 1:].ne(-100).sum())))
        self.shapes.append(tuple(batch["input_ids"].shape))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)  # so that losses of different batches can be compared


@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")  # without rows to validate on
@pytest.mark.parametrize("technique", [Packing, LengthBucketing])
def test_loss_of_packed_and_bucketed_rows_is_that_of_plain_ones(
    technique: type[Any], make: Callable[..., ChatData], make_trainer: Callable[..., Any]
) -> None:
    data = make(*(chat(number, 1 + number * number % 40) for number in range(30)), batch_size=3)
    means, counts, shapes = [], [], []
    for callbacks in ([], [technique(**({"capacity": 120} if technique is Packing else {}))]):
        module = Bag(data.vocabulary or 0)
        make_trainer(lightning.pytorch, callbacks=callbacks).fit(module, data)
        counts.append(sum(count for _, count in module.losses))
        means.append(sum(loss * count for loss, count in module.losses) / counts[-1])
        shapes.append(module.shapes)
    assert shapes[0] != shapes[1]
    assert counts[0] == counts[1] == data.report.trained  # type: ignore[union-attr]
    assert means[0] == pytest.approx(means[1], rel=1e-5)


@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
def test_resume_with_other_rows_warns(
    make: Callable[..., ChatData], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    rows = [chat(number) for number in range(8)]
    data = make(*rows, batch_size=2)
    trainer = make_trainer(lightning.pytorch, max_epochs=1)
    trainer.fit(Bag(data.vocabulary), data)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    resumed = make_trainer(lightning.pytorch, max_epochs=2)
    resumed.fit(Bag(data.vocabulary), make(*rows, batch_size=2), ckpt_path=tmp_path / "saved.ckpt")
    assert resumed.global_step == 8
    other = make(*rows[:-1], chat(99), batch_size=2)
    with pytest.warns(UserWarning, match=mentions("data.path=", "checkpoint", "files")):
        make_trainer(lightning.pytorch, max_epochs=2).fit(
            Bag(data.vocabulary), other, ckpt_path=tmp_path / "saved.ckpt"
        )


# --- report ---


def test_report_counts_tokens_and_shows_a_row_with_its_mask(make: Callable[..., ChatData]) -> None:
    data = make(chat(1, 2), chat(2), "{", bad_rows="drop")
    report = data.report
    assert report is not None
    counts, tokens = report.tables(tokens=5)
    cells = {row[0].text: row[1].text for row in counts.rows}
    rows = items(data)
    trained = sum(int(item["labels"].ne(-100).sum()) for item in rows)
    assert cells["rows read"] == "3"
    assert cells["rows kept"] == "2"
    assert cells["dropped: no JSON object"].startswith("1 (")
    assert cells["tokens trained"] == f"{trained} ({trained / sum(len(item['labels']) for item in rows):.1%})"
    assert cells["answers whose end-of-turn token is trained"] == "2 of 2"
    assert len(tokens.rows) == 5
    assert f"last {len(rows[0]['labels']) - 5}" in tokens.caption
    whole = list(report.tables(tokens=None))[1]
    assert [row[3].text == "yes" for row in whole.rows] == rows[0]["labels"].ne(-100).tolist()
    assert "".join(row[1].text for row in whole.rows if row[3].text) == "It is two two<|im_end|>"
    assert "<\\|im_end\\|>" in markdown(whole)


def test_arguments_are_checked_before_anything_is_read(folder: Path, tmp_path: Path) -> None:
    for arguments, remedy in [
        ({"too_long": "truncate"}, "'drop' or 'cut'"),
        ({"bad_rows": "skip"}, "'refuse' or 'drop'"),
        ({"max_length": 1}, "data.max_length=1"),
        ({"batch_size": 0}, "data.batch_size=0"),
        ({"validation_share": 1.0}, "data.validation_share=1.0"),
    ]:
        with pytest.raises(PresetError, match=mentions(remedy)):
            ChatData("chats.jsonl", str(folder), **arguments)
    path = str(written(tmp_path, chat(1)))
    for tokenizer_folder, remedy in (("owner/name", "hf download"), (str(tmp_path), "tokenizer.json")):
        with pytest.raises(CheckpointError, match=mentions(remedy)):
            ChatData(path, tokenizer_folder).setup("fit")
    with pytest.raises(PresetError, match=mentions("data.chat_template=missing")):
        ChatData(path, str(folder), chat_template="missing")
