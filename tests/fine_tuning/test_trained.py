"""A checkpoint's model answers as the module did at the end of training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import lightning_solo as solo
from lightning_solo.cli.generate import best_of, parse, run
from lightning_solo.data.tokenizers import tokenizer_of
from lightning_solo.errors import CheckpointError, PresetError
from lightning_solo.fine_tuning.causal_lm import HFCausalLM
from lightning_solo.fine_tuning.samples import answer, prompt_ids
from lightning_solo.fine_tuning.text import TextData
from lightning_solo.fine_tuning.trained import load_trained
from tests.fine_tuning.conftest import TEXT, Rows
from tests.messages import mentions
from tests.modules import loader, regression

pytest.importorskip("transformers")
Folder = Callable[..., Path]
Make = Callable[..., Any]
CPU = torch.device("cpu")


def fitted(folder: Path, make_trainer: Make, run: Path, techniques: Any = (), data: Any = None, **options: Any) -> Any:
    """Return a module after a fit that left a best and a last checkpoint in the folder of a run."""
    torch.manual_seed(0)
    best = L.pytorch.callbacks.ModelCheckpoint(run / "checkpoints", monitor="validation/loss", save_last=True)
    module = HFCausalLM(str(folder), optimizer=partial(torch.optim.AdamW, lr=0.02), **options)
    trainer = make_trainer(L, callbacks=[*techniques, best], enable_checkpointing=True, max_epochs=2)
    trainer.fit(module, data or Rows())
    return module


@pytest.mark.parametrize(
    ("kind", "technique"),
    [
        ("Llama", "none"),
        pytest.param("Llama", "adapters", marks=pytest.mark.long),
        ("Llama", "nf4"),
        pytest.param("Mixtral", "nf4", marks=pytest.mark.long),
        pytest.param("Llama", "int8", marks=pytest.mark.long),
    ],
)
def test_logits_are_those_at_the_end_of_training(
    kind: str, technique: str, model_folder: Folder, make_trainer: Make, tmp_path: Path
) -> None:
    techniques: list[Any] = [] if technique == "none" else [solo.callbacks.Adapters(r=4)]
    expected: list[torch.Tensor] = []
    batch = {"input_ids": torch.arange(4, 24).view(2, 10)}

    class Last(L.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            with torch.no_grad():
                expected.append(pl_module.eval()(batch))

    if technique in ("nf4", "int8"):
        techniques.append(solo.callbacks.QuantizedBase(format=technique))
    fitted(model_folder(kind), make_trainer, tmp_path, [*techniques, Last()])
    module, tokenizer = load_trained(tmp_path / "checkpoints" / "last.ckpt", CPU)
    plain = HFCausalLM(str(model_folder(kind)))
    plain.configure_model()
    with torch.no_grad():
        assert torch.equal(module(batch), expected[0])
        assert not torch.allclose(plain(batch), expected[0], atol=1e-2)
    assert not module.training
    assert len(tokenizer) == 320


def test_command_prints_the_answer(
    model_folder: Folder, make_trainer: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted(model_folder("Llama"), make_trainer, tmp_path, [solo.callbacks.Adapters(r=4)])
    last = tmp_path / "checkpoints" / "last.ckpt"
    module, tokenizer = load_trained(last, CPU)
    tokens = answer(module.model, tokenizer, prompt_ids(tokenizer, "What is two?"), 12)
    capsys.readouterr()
    assert run([str(tmp_path), "What is two?", "--max-tokens", "12"]) == 0
    assert capsys.readouterr().out.strip() == tokenizer.decode(tokens, skip_special_tokens=True).strip()
    best = best_of(last)
    assert best.name.startswith("epoch")
    assert run([str(tmp_path), "What is two?", "--max-tokens", "2", "--best"]) == 0
    moved = model_folder("Llama").rename(tmp_path / "moved")
    try:
        with pytest.raises(CheckpointError, match=mentions("--base-folder", str(model_folder("Llama")))):
            run([str(tmp_path), "What is two?"])
        capsys.readouterr()
        assert run([str(tmp_path), "What is two?", "--max-tokens", "12", "--base-folder", str(moved)]) == 0
        assert capsys.readouterr().out.strip() == tokenizer.decode(tokens, skip_special_tokens=True).strip()
    finally:
        moved.rename(model_folder("Llama"))
    best.unlink()
    with pytest.raises(CheckpointError, match=mentions("drop --best")):
        run([str(tmp_path), "What is two?", "--best"])


def test_prompt_is_continued_as_plain_text_after_a_training_on_text_or_if_it_is_raw(
    model_folder: Folder,
    make_trainer: Make,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    folder = model_folder("Llama")
    data = TextData(str(text), str(folder), max_length=16, cache=str(tmp_path / "cache"))
    monkeypatch.chdir(folder.parent)
    data.tokenizer = folder.name
    data.__post_init__()
    fitted(folder, make_trainer, tmp_path / "text", data=data)
    monkeypatch.chdir(tmp_path)  # from where relative paths of the training lead nowhere
    fitted(folder, make_trainer, tmp_path / "chat")
    for run_folder, options in (("text", []), ("chat", ["--raw"])):
        module, tokenizer = load_trained(tmp_path / run_folder / "checkpoints" / "last.ckpt", CPU)
        plain, turn = tokenizer_of(folder)("The quick")["input_ids"], prompt_ids(tokenizer_of(folder), "The quick")
        assert plain != turn
        tokens = answer(module.model, tokenizer, plain, 6)
        capsys.readouterr()
        assert run([str(tmp_path / run_folder), "The quick", "--max-tokens", "6", *options]) == 0
        assert capsys.readouterr().out.strip() == tokenizer.decode(tokens, skip_special_tokens=True).strip()
        assert (prompt_ids(tokenizer, "The quick") == plain) == (run_folder == "text")


def test_help_names_the_default_length(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    assert "default 256" in capsys.readouterr().out


def test_other_checkpoints_and_options_are_refused(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(L, max_steps=1)
    trainer.fit(regression(L), loader(2))
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match=mentions("other.ckpt", "model=hf_causal_lm", "experiment=sft")):
        load_trained(tmp_path / "other.ckpt", CPU)
    with pytest.raises(PresetError, match=mentions("prompt", "lightning-solo generate")):
        parse(["runs/first"])
    with pytest.raises(PresetError, match=mentions("--max-tokens 0", "at least 1")):
        run(["runs/first", "Hello", "--max-tokens", "0"])
