"""Soft labels are written once per row, also after a failure, and train as the live teacher does without it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

import lightning_solo as solo
from lightning_solo.cli import soft_labels as command
from lightning_solo.data.soft_labels import SoftLabels, partial_of
from lightning_solo.errors import CheckpointError, ConflictError, PresetError
from lightning_solo.export.soft_labels import drawn
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.techniques.distillation.technique import Distillation
from tests.messages import mentions
from tests.modules import Classifier, classification, loader
from tests.training import fit

Make = Callable[..., Any]
QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False}


def gpt(width: int = 16, seed: int = 1) -> ByteGPT:
    torch.manual_seed(seed)
    return ByteGPT(width=width, depth=1, heads=2, context=8)


def confident(width: int = 24, seed: int = 2) -> ByteGPT:
    """A teacher whose probabilities are far from equal."""
    teacher = gpt(width, seed)
    for p in teacher.parameters():
        p.data *= 4
    return teacher


def texts(rows: int = 22, *, shuffle: bool = False) -> Any:
    generator = torch.Generator().manual_seed(5)
    bytes_ = torch.randint(256, (rows, 9), generator=generator, dtype=torch.uint8)
    bytes_[:, 1] = torch.arange(rows)  # all rows differ
    return torch.utils.data.DataLoader(bytes_, batch_size=4, shuffle=shuffle, drop_last=shuffle)  # type: ignore[arg-type]


class Losses(L.Callback):
    def __init__(self) -> None:
        self.parts: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        logged = trainer.callback_metrics
        self.parts.append((float(logged["distillation/divergence"]), float(logged["distillation/own_loss"])))


def write(path: Path, teacher: Any = None, data: Any = None, **options: Any) -> str:
    return solo.write_soft_labels(
        gpt(), texts() if data is None else data, teacher or confident(), path, **QUIET, **options
    )


def test_training_from_many_draws_is_that_of_the_live_teacher(make_trainer: Make, tmp_path: Path) -> None:
    line = write(tmp_path / "labels", draws=4000)
    assert "22 rows" in line
    live, stored = Losses(), Losses()
    of_teacher = fit(make_trainer, Distillation.from_module(confident(), alpha=1.0), live, module=gpt(), data=texts())
    technique = Distillation(labels=str(tmp_path / "labels"), alpha=1.0)
    of_labels = fit(make_trainer, technique, stored, module=gpt(), data=texts())
    assert live.parts[0][0] > 0.1
    for one, other in zip(live.parts, stored.parts, strict=True):
        assert other == pytest.approx(one, rel=0.01)
    start = gpt()
    for name, p in of_teacher.named_parameters():
        moved = (p - start.get_parameter(name)).abs().mean()
        assert (p - of_labels.get_parameter(name)).abs().mean() < 0.1 * moved


def test_no_teacher_is_made_from_labels(make_trainer: Make, tmp_path: Path) -> None:
    write(tmp_path / "labels")
    held: list[Any] = []

    class Watch(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            held.append((technique._teacher, technique._labels))

    technique = Distillation(labels=str(tmp_path / "labels"))
    fit(make_trainer, technique, Watch(), module=gpt(), data=texts())
    assert held[0][0] is None
    assert held[0][1].origin.draws == 16
    assert technique._labels is None


@pytest.mark.long
def test_every_row_is_written_once_whatever_the_loader_s_order(make_trainer: Make, tmp_path: Path) -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = confident()
            self.batches: list[int] = []

        def forward(self, x: Tensor) -> Any:
            self.batches.append(len(x))
            return self.net(x)

    teacher = Teacher()
    write(tmp_path / "labels", teacher, texts(shuffle=True))
    assert teacher.batches == [4, 4, 4, 4, 4, 2]
    assert len(SoftLabels(tmp_path / "labels")) == 22
    fit(
        make_trainer,
        Distillation(labels=str(tmp_path / "labels")),
        module=gpt(),
        data=texts(shuffle=True),
        max_epochs=3,
    )
    write(tmp_path / "few", teacher, batches=2)
    assert len(SoftLabels(tmp_path / "few")) == 8


@pytest.mark.long
def test_failed_writing_continues_and_gives_the_same_file(tmp_path: Path) -> None:
    class Fails(nn.Module):
        def __init__(self, at: int) -> None:
            super().__init__()
            self.net, self.calls, self.at = confident(), 0, at

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == self.at:
                raise RuntimeError("the power is gone")
            return self.net(x)  # type: ignore[no-any-return]

    write(tmp_path / "whole", Fails(0))
    with pytest.raises(RuntimeError, match="the power"):
        write(tmp_path / "labels", Fails(4))
    assert not (tmp_path / "labels").exists()
    assert partial_of(tmp_path / "labels").exists()
    again = Fails(0)
    assert "12 of them before" in write(tmp_path / "labels", again)
    assert again.calls == 3
    assert (tmp_path / "labels").read_bytes() == (tmp_path / "whole").read_bytes()
    with pytest.raises(CheckpointError, match=mentions("labels", "overwrite=True")):
        write(tmp_path / "labels")
    write(tmp_path / "labels", overwrite=True)


@pytest.mark.long
def test_other_teacher_does_not_continue_a_file(tmp_path: Path) -> None:
    class Once(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError

    write(tmp_path / "other", confident())
    (tmp_path / "other").rename(partial_of(tmp_path / "labels"))
    with pytest.raises(CheckpointError, match=mentions("labels.partial", "teacher", "remove")):
        write(tmp_path / "labels", confident(seed=3))


def test_the_module_is_not_trained(tmp_path: Path) -> None:
    module = gpt()
    before = copy.deepcopy(module.state_dict())
    solo.write_soft_labels(module, texts(), confident(), tmp_path / "labels", **QUIET)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert not any(part._forward_hooks for part in module.modules())


def test_modules_of_both_homes_are_taken(home: Any, make_trainer: Make, tmp_path: Path) -> None:
    line = solo.write_soft_labels(classification(home), loader(3), Classifier(), tmp_path / "labels", **QUIET)
    assert "12 rows" in line
    trainer = make_trainer(home, callbacks=[Distillation(labels=str(tmp_path / "labels"))])
    trainer.fit(classification(home), loader(3))
    assert trainer.callback_metrics["distillation/divergence"].isfinite()


def test_draws_follow_the_probabilities() -> None:
    torch.manual_seed(1)
    logits = 2 * torch.randn(2, 3, 7)
    words, entropies = drawn(logits, 20000, 0)
    p = logits.softmax(-1)
    counts = torch.nn.functional.one_hot(words, 7).float().mean(2)
    assert torch.allclose(counts, p, atol=0.015)
    assert torch.allclose(entropies, -(p * p.log()).sum(-1), atol=1e-5)
    assert words.shape == (2, 3, 20000)
    assert torch.equal(words, drawn(logits, 20000, 0)[0])
    assert not torch.equal(words, drawn(logits, 20000, 1)[0])
    assert drawn(logits[:, 0], 5, 0)[0].shape == (2, 1, 5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Total length of")  # which is zero
def test_wrong_files_are_refused_in_training(make_trainer: Make, tmp_path: Path) -> None:
    write(tmp_path / "labels")
    labels = Distillation(labels=str(tmp_path / "labels"))
    with pytest.raises(ConflictError, match=mentions("lacks a row", "soft-labels")):
        fit(make_trainer, labels, module=gpt(), data=texts(30))

    class Wider(ByteGPT):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.pad(super().forward(x), (0, 3))

    with pytest.raises(ConflictError, match=mentions("256 words", "259")):
        fit(make_trainer, labels, module=Wider(width=16, depth=1, heads=2, context=8), data=texts())
    content = (tmp_path / "labels").read_bytes()
    (tmp_path / "labels").write_bytes(content[:-30])
    with pytest.raises(CheckpointError, match=mentions("cut off", "soft-labels")):
        fit(make_trainer, labels, module=gpt(), data=texts())
    with pytest.raises(CheckpointError, match=mentions("nowhere")):
        fit(make_trainer, Distillation(labels=str(tmp_path / "nowhere")), module=gpt(), data=texts())
    for options in ({"draws": 0}, {"batches": 0}, {"dtype": "int8"}):
        with pytest.raises(PresetError, match=mentions(*options)):
            write(tmp_path / "other", **options)
    with pytest.raises(CheckpointError, match=mentions("no batch")):
        write(tmp_path / "other", data=texts(0))


@pytest.mark.long
@pytest.mark.parametrize("of_labels", [False, True])
@pytest.mark.filterwarnings("ignore:Total length of")  # which is zero
def test_chats_learn_from_a_larger_folder(make_trainer: Make, tmp_path: Path, of_labels: bool) -> None:
    pytest.importorskip("transformers")
    from lightning_solo.fine_tuning.causal_lm import HFCausalLM
    from lightning_solo.fine_tuning.chat import ChatData
    from tests.fine_tuning.conftest import conversations, save_model

    student, teacher = save_model(tmp_path / "student"), save_model(tmp_path / "teacher", hidden_size=32)
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in conversations(14)))

    def data() -> ChatData:  # batches of 3 rows, padded to the longest
        return ChatData(
            str(chats), str(student), batch_size=3, max_length=128, validation_share=0.0, cache=str(tmp_path / "cache")
        )

    settings: dict[str, Any] = {"teacher": str(teacher)}
    if of_labels:
        line = solo.write_soft_labels(HFCausalLM(str(student)), data(), str(teacher), tmp_path / "labels", **QUIET)
        assert "14 rows" in line
        settings = {"labels": str(tmp_path / "labels")}
    runs = []
    for chunks in (None, solo.ChunkedCrossEntropy(chunk_tokens=16)):
        losses = Losses()
        torch.manual_seed(1)
        trainer = make_trainer(L, callbacks=[Distillation(**settings, alpha=0.7), losses], max_epochs=2)
        trainer.callbacks += [chunks] if chunks else []
        trainer.fit(HFCausalLM(str(student), warmup_steps=1), data())
        runs.append(losses.parts)
    assert len(runs[0]) == 10
    assert runs[0][0][0] > 1e-3
    assert runs[1] == [pytest.approx(each, rel=1e-3) for each in runs[0]]


@pytest.mark.long
def test_command_writes_labels_for_a_run(
    make_trainer: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(2)
    teacher = ByteGPT(width=64, depth=1, context=16)
    trainer = make_trainer(L, max_steps=1)
    data = ["data.context=16", "data.max_bytes=200000", "data.batch_size=4"]
    from lightning_solo.reference.stdlib_text import StdlibText

    trainer.fit(teacher, StdlibText(16, 4, 200000, 1))
    trainer.save_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")
    model = ["model=byte_gpt_tiny", "model.depth=1", "model.width=32", "model.context=16"]
    trained = ["+trainer.accelerator=cpu", "+trainer.enable_progress_bar=false"]
    file = tmp_path / "labels.soft"
    assert (
        command.run([str(file), str(tmp_path / "run"), "--batches", "3", "--draws", "2", *model, *data, *trained]) == 0
    )
    assert "12 rows" in capsys.readouterr().out
    labels = SoftLabels(file)
    assert (len(labels), labels.positions, labels.origin.draws) == (12, 12 * 16, 2)
    student = ByteGPT(width=32, depth=1, context=16)
    losses = Losses()
    fit(
        make_trainer, Distillation(labels=str(file)), losses, module=student, data=StdlibText(16, 4, 200000, 1),
        max_steps=3, limit_val_batches=0,
    )  # fmt: skip
    assert len(losses.parts) == 3


def test_arguments_are_checked(tmp_path: Path) -> None:
    wrong: list[tuple[Any, str, dict[str, Any]]] = [
        (Classifier(), "draws='16'", {"draws": "16"}),
        (Classifier(), "draws=None", {"draws": None}),
        (Classifier(), "batches=0", {"batches": 0}),
        (None, "teacher=None", {}),
    ]
    for teacher, words, options in wrong:
        with pytest.raises(PresetError, match=mentions(words, "write")):
            solo.write_soft_labels(
                classification(L, Classifier()), loader(), teacher, tmp_path / "labels", accelerator="cpu", **options
            )
    manual = classification(L, Classifier())
    manual.automatic_optimization = False
    with pytest.raises(ConflictError, match=mentions("write automatic_optimization=True")):
        solo.write_soft_labels(manual, loader(), Classifier(), tmp_path / "labels", accelerator="cpu")
    assert not any(tmp_path.iterdir())


def test_command_line_is_checked() -> None:
    for arguments, words in {
        (): ("soft-labels FILE TEACHER",),
        ("a", "model=byte_gpt_tiny"): ("is an override", "FILE TEACHER"),
        ("a", "b", "--draws", "none"): ("--draws",),
        ("a", "b", "--batches", "0"): ("--batches",),
        ("a", "b", "model=nothing"): ("nothing", "byte_gpt_tiny"),
    }.items():
        with pytest.raises(PresetError, match=mentions(*words)):
            command.run(list(arguments))
