"""HFAuto and LabelledRows fine-tune classifiers, masked language models and encoder-decoders on rows of a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import lightning_solo as solo
from lightning_solo.data.tokenizers import tokenizer_of
from lightning_solo.errors import CheckpointError, PresetError
from lightning_solo.fine_tuning.auto_model import HFAuto
from lightning_solo.fine_tuning.labelled import IGNORED, LabelledRows
from lightning_solo.planner.fake_modules import empty_parameters
from tests.messages import mentions, nearest

transformers = pytest.importorskip("transformers")
Folder = Callable[..., Path]
Make = Callable[..., Any]
ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "sequence_classification": lambda n: {
        "text": ["lazy dog", "quick fox"][n % 2] + f" {n}",
        "label": ["dogs", "foxes"][n % 2],
    },
    "token_classification": lambda n: {"tokens": ["The", "fox", f"jumps{n}"], "labels": ["O", "animal", "O"]},
    "masked_lm": lambda n: {"text": f"The quick brown fox {n} jumps over the lazy dog."},
    "seq2seq_lm": lambda n: {"source": f"What is {n}?", "target": f"It is {n}."},
}
CASES = [
    ("Bert", "ForMaskedLM", "sequence_classification"),
    ("Llama", "ForCausalLM", "sequence_classification"),
    ("Bert", "ForMaskedLM", "token_classification"),
    ("Bert", "ForMaskedLM", "masked_lm"),
    ("T5", "ForConditionalGeneration", "seq2seq_lm"),
    ("Bart", "ForConditionalGeneration", "seq2seq_lm"),
]


def rows_of(folder: Path, task: str, count: int = 24) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(ROWS[task](n)) + "\n" for n in range(count)))
    return file


def data_of(folder: Path, file: Path, task: str, **options: Any) -> LabelledRows:
    return LabelledRows(str(file), str(folder), task=task, **{"batch_size": 4, "cache": str(file.parent), **options})


QUICK = CASES[1]


@pytest.mark.parametrize(
    ("kind", "saved", "task"),
    [pytest.param(*case, marks=[pytest.mark.long] * (case != QUICK)) for case in CASES[1:]],
)
def test_loss_falls_and_measures_are_logged(
    kind: str, saved: str, task: str, model_folder: Folder, make_trainer: Make, tmp_path: Path
) -> None:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if kind == "Bert" else {}
    without_padding = {"pad_token_id": None} if kind == "Llama" else {}  # as the folders of many decoders
    folder = model_folder(kind, saved, **still, **without_padding)
    data = data_of(folder, rows_of(tmp_path, task), task)
    module = HFAuto(str(folder), task, optimizer=partial(torch.optim.AdamW, lr=0.03), warmup_steps=2)
    trainer = make_trainer(L, max_epochs=6, limit_val_batches=0)
    before = make_trainer(L).validate(module, data, verbose=False)[0]
    trainer.fit(module, data)
    after = make_trainer(L).validate(module, data, verbose=False)[0]
    assert after["validation/loss"] < 0.9 * before["validation/loss"]
    if task == "sequence_classification":
        assert data.labels == ["dogs", "foxes"]
        assert after["validation/accuracy"] == 1
        assert set(after) == {"validation/loss", "validation/accuracy", "validation/f1"}
    if task.endswith("_lm"):
        assert set(after) == {"validation/loss"}


@pytest.mark.parametrize(("kind", "saved", "task"), CASES)
def test_loss_is_that_of_transformers(kind: str, saved: str, task: str, model_folder: Folder, tmp_path: Path) -> None:
    folder = model_folder(kind, saved)
    data = data_of(folder, rows_of(tmp_path, task), task)
    data.setup("fit")
    module = HFAuto(str(folder), task, labels=data.labels or None)
    module.config.pad_token_id = data.pad_token_id
    module.configure_model()
    module.eval()
    batch = next(iter(data.val_dataloader()))
    loss, count, _ = module.loss(batch)
    assert loss.item() == pytest.approx(module.model(**batch).loss.item(), rel=1e-5)
    assert count == batch["labels"].ne(IGNORED).sum()


def test_only_a_head_is_new_and_named(
    model_folder: Folder, tmp_path: Path, make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    folder = model_folder("Bert", "ForMaskedLM")
    module = HFAuto(str(folder), "sequence_classification", labels=["a", "b", "c"])
    with caplog.at_level("INFO"):
        module.configure_model()
    assert "classifier.weight" in caplog.text
    assert "cls.predictions" in caplog.text
    base = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False)
    for name, p in base.named_parameters():
        assert torch.equal(p, module.model.bert.get_parameter(name)), name
    assert module.model.classifier.weight.shape == (3, 16)
    other = HFAuto(str(model_folder("T5", "EncoderModel")), "seq2seq_lm")
    with pytest.raises(CheckpointError, match=mentions("decoder", "no tensor")):
        other.configure_model()


@pytest.mark.long
def test_adapters_train_a_head_that_is_saved_whole(model_folder: Folder, tmp_path: Path, make_trainer: Make) -> None:
    folder = model_folder("Bert", "ForMaskedLM")
    data = data_of(folder, rows_of(tmp_path, "sequence_classification"), "sequence_classification")
    module = HFAuto(str(folder), "sequence_classification")
    adapters = solo.callbacks.Adapters(r=2, targets=["query", "value"], modules_to_save=["pooler.dense", "classifier"])
    trainer = make_trainer(L, callbacks=[adapters])
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["labels"] == ["dogs", "foxes"]
    for part in ("classifier", "pooler"):
        assert any(part in name for name in checkpoint["state_dict"])
    assert not any("embeddings" in name for name in checkpoint["state_dict"])


def test_new_parts_that_adapters_freeze_are_refused(model_folder: Folder, tmp_path: Path, make_trainer: Make) -> None:
    folder = model_folder("Bert", "ForMaskedLM")
    data = data_of(folder, rows_of(tmp_path, "sequence_classification"), "sequence_classification")
    module = HFAuto(str(folder), "sequence_classification")
    adapters = solo.callbacks.Adapters(r=2, targets=["query"], modules_to_save=["classifier"])
    with pytest.raises(PresetError, match=mentions("bert.pooler.dense", "modules_to_save=[bert.pooler.dense]")):
        make_trainer(L, callbacks=[adapters]).fit(module, data)


def test_plan_has_room_for_any_label(model_folder: Folder) -> None:
    with empty_parameters():
        module = HFAuto(str(model_folder("Bert", "ForMaskedLM")), "sequence_classification")
    assert module.model.classifier.weight.shape == (256, 16)
    assert module.model.classifier.weight.is_meta


# --- data ---


def test_masks_are_the_same_at_each_validation_and_others_in_training(model_folder: Folder, tmp_path: Path) -> None:
    data = data_of(model_folder("Bert", "ForMaskedLM"), rows_of(tmp_path, "masked_lm", 80), "masked_lm")
    data.setup("fit")
    first, second = (next(iter(data.val_dataloader())) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    batches = list(data.train_dataloader())
    share = sum(int(b["labels"].ne(IGNORED).sum()) for b in batches) / sum(
        int(b["attention_mask"].sum()) for b in batches
    )
    assert 0.1 < share < 0.2
    assert any(b["attention_mask"].eq(0).any() for b in batches)
    assert not any(b["labels"][b["attention_mask"].eq(0)].ne(IGNORED).any() for b in batches)
    mask = tokenizer_of(data.tokenizer).mask_token_id
    replaced = [b["input_ids"][b["labels"].ne(IGNORED)].eq(mask).float().mean().item() for b in batches]
    assert 0.6 < sum(replaced) / len(replaced) < 0.95
    again = list(data.train_dataloader())
    assert not all(
        torch.equal(a["labels"], b["labels"])
        for a, b in zip(batches, again, strict=True)
        if a["labels"].shape == b["labels"].shape
    )


def test_a_words_first_token_has_its_label(model_folder: Folder, tmp_path: Path) -> None:
    folder = model_folder("Bert", "ForMaskedLM")
    rows = [{"tokens": ["zyx", "fox"], "labels": labels} for labels in (["animal", "O"], ["animal", "animal"])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = data_of(folder, tmp_path / "rows.jsonl", "token_classification", validation_share=0.0)
    data.setup("fit")
    assert data.labels == ["O", "animal"]
    batch = next(iter(data.train_dataloader()))
    assert batch["labels"].shape == batch["input_ids"].shape
    assert batch["input_ids"].shape[1] > 2
    tokenizer = tokenizer_of(folder)
    for word, labels in (("zyx", {1}), ("fox", {0, 1})):
        first = tokenizer([word], is_split_into_words=True, add_special_tokens=False)["input_ids"][0]
        assert {*batch["labels"][batch["input_ids"].eq(first)].tolist()} - {IGNORED} == labels
    assert batch["labels"].ne(IGNORED).sum() == 4


def test_labels_are_counted_and_rows_come_from_the_cache(model_folder: Folder, tmp_path: Path) -> None:
    folder, task = model_folder("Bert", "ForMaskedLM"), "sequence_classification"
    file, batches = rows_of(tmp_path, task, 9), []
    for _ in range(2):
        data = data_of(folder, file, task)
        data.setup("fit")
        batches.append(next(iter(data.val_dataloader())))
        cells = {row[0].text: row[1].text for row in next(data.report.tables()).rows}  # type: ignore[union-attr]
        assert cells["labels"] == "dogs (5), foxes (4)"
        assert (cells["rows kept"], cells["rows to validate on"]) == ("9", str(len(batches[0]["labels"])))
    assert len(list(tmp_path.glob("*.tokens"))) == 1
    assert all(torch.equal(batches[0][key], batches[1][key]) for key in batches[0])


def test_labels_of_the_folder_keep_their_order(model_folder: Folder, tmp_path: Path) -> None:
    folder = model_folder("Bert", "ForSequenceClassification", id2label={0: "foxes", 1: "dogs", 2: "cats"})
    data = data_of(folder, rows_of(tmp_path, "sequence_classification"), "sequence_classification")
    data.setup("fit")
    assert data.labels == ["foxes", "dogs", "cats"]


def test_bad_rows_and_settings_are_refused(model_folder: Folder, tmp_path: Path) -> None:
    folder, file = model_folder("Bert", "ForMaskedLM"), tmp_path / "rows.jsonl"
    for task, row, words in (
        ("sequence_classification", {"text": "a"}, ["rows.jsonl:2", "label"]),
        ("masked_lm", {"text": 3}, ["rows.jsonl:2", "text", "int"]),
        ("token_classification", {"tokens": ["a"], "labels": []}, ["rows.jsonl:2", "1 tokens", "0 labels"]),
    ):
        file.write_text(json.dumps(ROWS[task](0)) + "\n" + json.dumps(row) + "\n")
        with pytest.raises(PresetError, match=mentions(*words, "data.bad_rows=drop")):
            data_of(folder, file, task).setup("fit")
    file.write_text((json.dumps({"text": "lazy dog"}) + "\n") * 60)
    with pytest.raises(PresetError, match=mentions("all 60 are equal", "data.validation_share=0")):
        data_of(folder, file, "masked_lm").setup("fit")
    with pytest.raises(PresetError, match=mentions("data.task=", "'masked_lm'")):
        data_of(folder, file, "maskedlm")
    with pytest.raises(PresetError, match=mentions("model.task=", nearest("masked_lm"))):
        HFAuto(str(folder), "maskedlm")
    with pytest.raises(PresetError, match=mentions("data.validation_share=1.5")):
        data_of(folder, file, "masked_lm", validation_share=1.5)
