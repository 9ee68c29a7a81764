"""HFCausalLM trains a folder's model on batches of tokens with labels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import lightning_solo as solo
from lightning_solo.errors import CheckpointError, PresetError
from lightning_solo.fine_tuning.causal_lm import HFCausalLM
from lightning_solo.nn import cross_entropy, quantized_loading
from lightning_solo.nn.adaptation import adapter_parameters
from lightning_solo.nn.deferred_logits import _Layer
from lightning_solo.nn.quantized import quantized_weights_of
from tests.fine_tuning.conftest import KINDS, Rows, padded
from tests.messages import mentions

transformers = pytest.importorskip("transformers")
Folder = Callable[..., Path]
Make = Callable[..., Any]
sgd = partial(torch.optim.SGD, lr=0.1)


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def trained(folder: Path, make_trainer: Make, data: Any = None, **options: Any) -> Any:
    """Return a module after a fit; its Trainer is its `trainer`."""
    module = HFCausalLM(str(folder), optimizer=options.pop("optimizer", sgd), **options.pop("module", {}))
    make_trainer(L, **options).fit(module, data or Rows())
    return module


# --- acted ---


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.long] * (k not in ("Llama", "GPT2"))) for k in KINDS]
)
def test_every_weight_is_trained_and_checkpoints_have_transformers_names(
    kind: str, model_folder: Folder, make_trainer: Make, tmp_path: Path
) -> None:
    folder = model_folder(kind)
    before = transformers.AutoModelForCausalLM.from_pretrained(folder)
    module = trained(folder, make_trainer, max_steps=4)
    same = [name for name, p in before.named_parameters() if torch.equal(p, module.model.get_parameter(name))]
    assert not [name for name in same if "router" not in name and ".experts" not in name]
    module.trainer.save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert {f"model.{name}" for name in before.state_dict()} == set(checkpoint["state_dict"])
    assert checkpoint["hyper_parameters"]["path"] == str(folder)


def test_learning_rate_rises_and_falls_and_vectors_do_not_decay(model_folder: Folder, make_trainer: Make) -> None:
    rates: list[float] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    optimizer = partial(torch.optim.AdamW, lr=1.0, weight_decay=0.5)
    module = trained(
        model_folder("Llama"), make_trainer, optimizer=optimizer, module={"warmup_steps": 2}, callbacks=[Watch()]
    )
    assert rates[:2] == pytest.approx([2 / 3, 1.0])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(0)
    matrices, vectors = module.trainer.optimizers[0].param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.5, 0.0)
    assert all(p.dim() == 1 for p in vectors["params"])


def test_warm_up_that_is_longer_than_the_run_is_warned_of(model_folder: Folder, make_trainer: Make) -> None:
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    with pytest.warns(UserWarning, match=mentions("model.warmup_steps=1000", "never", "write model.warmup_steps=")):
        trained(model_folder("Llama"), make_trainer, optimizer=optimizer, module={"warmup_steps": 1000})


class Logged(L.pytorch.loggers.Logger):
    """Keeps logged metrics."""

    name, version = "logged", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_learning_rate_is_logged_and_follows_the_schedule_to_the_new_end_after_a_resume(
    model_folder: Folder, make_trainer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "last.ckpt"

    def rates(max_steps: int, checkpoint: Path | None = None) -> list[float]:
        module = HFCausalLM(str(model_folder("Llama")), warmup_steps=2)
        trainer = make_trainer(L, logger=(logger := Logged()), log_every_n_steps=1, max_steps=max_steps, max_epochs=-1)
        trainer.fit(module, Rows(), ckpt_path=checkpoint, weights_only=True)
        trainer.save_checkpoint(file)
        return [row["train/learning_rate"] for row in logger.rows if "train/loss" in row]

    whole = rates(12)
    assert len(whole) == 12
    assert whole[2] == max(whole) == pytest.approx(2e-4)
    assert rates(6)[-1] < whole[5]
    with caplog.at_level("INFO"):
        assert rates(12, file) == whole[6:]
    assert "step 12 " in caplog.text


# --- parity ---


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_loss_is_that_of_transformers(kind: str, model_folder: Folder) -> None:
    module = HFCausalLM(str(model_folder(kind)))
    module.configure_model()
    module.eval()  # without dropout
    batch = padded(Rows().rows[:3])
    expected = module.model(**batch).loss
    loss, count = module.loss(batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert count == sum(len(row) - len(row) // 3 for row in Rows().rows[:3])
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    assert module.loss(empty) == (0, 0)


def test_chunked_loss_is_the_same_in_training_and_validation_without_logits(
    model_folder: Folder, make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(model_folder("Llama"), make_trainer)
    technique = solo.callbacks.ChunkedCrossEntropy(chunk_tokens=5)
    chunks: list[int] = []
    logits = cross_entropy._logits

    def counted(hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        chunks.append(len(hidden))
        return logits(hidden, *args)

    class Watch(L.Callback):
        def on_train_end(self, *args: Any) -> None:
            assert not [name for use in technique._uses.values() for name in use.computed_for]

    monkeypatch.setattr(cross_entropy, "_logits", counted)
    monkeypatch.setattr(_Layer, "logits", lambda self: pytest.fail("all logits were computed"))
    chunked = trained(model_folder("Llama"), make_trainer, callbacks=[technique, Watch()])
    assert max(chunks) == 5
    tokens = sum(len(row) - len(row) // 3 for row in Rows().rows)
    assert sum(chunks) == 2 * tokens  # of an epoch, and of a validation
    for name, p in weights(plain).items():
        assert torch.allclose(p, weights(chunked)[name], atol=1e-6), name
    losses = [module.trainer.callback_metrics["validation/loss"].item() for module in (plain, chunked)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_validation_loss_is_the_mean_over_all_tokens(model_folder: Folder, make_trainer: Make) -> None:
    data = Rows(rows=5, batch_size=2)
    module = HFCausalLM(str(model_folder("Llama")))
    trainer = make_trainer(L)
    trainer.validate(module, data, verbose=False)
    expected, _ = module.loss(padded(data.rows))
    assert trainer.callback_metrics["validation/loss"].item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_accumulated_rows_of_unlike_length_equal_one_batch(
    micro_batch: int | None, model_folder: Folder, make_trainer: Make
) -> None:
    by = "shifted_tokens"
    if micro_batch is None:
        techniques = [solo.callbacks.AccumulationSchedule(milestones=[[0, 8]], weight_by=by)]
    else:  # batches of two rows, each in two parts
        divided = solo.callbacks.MicroBatching(micro_batch=micro_batch, weight_by=by)
        techniques = [solo.callbacks.AccumulationSchedule(milestones=[[0, 4]]), divided]
    data = Rows(8, 2 if micro_batch else 1)
    parts = trained(model_folder("Llama"), make_trainer, data, callbacks=techniques, max_steps=1)
    whole = trained(model_folder("Llama"), make_trainer, Rows(8, 8), max_steps=1)
    before = HFCausalLM(str(model_folder("Llama")))
    before.configure_model()
    for name, p in weights(whole).items():
        assert torch.allclose(p, weights(parts)[name], atol=1e-6), name
    assert not torch.equal(weights(whole)["model.lm_head.weight"], weights(before)["model.lm_head.weight"])


@pytest.mark.any_device
def test_frequencies_keep_their_type_in_16_bits(model_folder: Folder, make_trainer: Make) -> None:
    module = trained(model_folder("Llama"), make_trainer, precision="bf16-true", max_steps=1)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    rotary = module.model.model.rotary_emb
    assert rotary.inv_freq.dtype is torch.float32
    assert torch.equal(rotary.inv_freq, type(rotary)(module.config).inv_freq)


# --- adapters and quantized weights ---


def test_quantized_weights_with_adapters_and_a_second_start_from_the_cache(
    model_folder: Folder, make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    plain = quantized_loading.quantized
    monkeypatch.setattr(quantized_loading, "quantized", lambda *args: calls.append(args) or plain(*args))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    techniques = lambda: [solo.callbacks.Adapters(r=2), solo.callbacks.QuantizedBase()]  # noqa: E731
    losses = []
    for quantized in ("nf4", "nf4", None):
        torch.manual_seed(0)
        module = trained(model_folder("Llama"), make_trainer, module={"quantized": quantized}, callbacks=techniques())
        losses.append(module.trainer.callback_metrics["validation/loss"].item())
        assert adapter_parameters(module)
        if quantized is not None:
            assert len(calls) == 3 * 7
            assert len(quantized_weights_of(module)) == 3 * 7
    assert losses[0] == losses[1] == losses[2]


def test_frozen_weights_without_adapters_are_refused(
    model_folder: Folder, make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(PresetError, match=mentions("frozen", "solo=qlora")):
        trained(model_folder("Llama"), make_trainer, module={"quantized": "int8"})


# --- bad input ---


def test_too_long_rows_and_too_many_tokens_are_refused_before_the_start(
    model_folder: Folder, make_trainer: Make
) -> None:
    folder = model_folder("Llama", max_position_embeddings=12)
    with pytest.raises(PresetError, match=mentions("data.max_length=16", "12 positions", "data.max_length=12")):
        trained(folder, make_trainer)
    with pytest.raises(PresetError, match=mentions("data.tokenizer", "400", "320")):
        trained(model_folder("Llama"), make_trainer, Rows(tokens=400))


def test_adapters_alone_are_no_whole_checkpoint(model_folder: Folder, make_trainer: Make, tmp_path: Path) -> None:
    folder, file = model_folder("Llama"), tmp_path / "last.ckpt"
    module = trained(folder, make_trainer, callbacks=[solo.callbacks.Adapters(r=4)], max_steps=1)
    module.trainer.save_checkpoint(file)
    with pytest.raises(CheckpointError, match=mentions("solo.load_adapters", f"HFCausalLM({str(folder)!r})")):
        HFCausalLM.load_from_checkpoint(file, weights_only=True)
    module = HFCausalLM(str(folder))
    module.configure_model()
    solo.load_adapters(module, file)
    assert adapter_parameters(module)


def test_unknown_format_is_refused(model_folder: Folder) -> None:
    with pytest.raises(PresetError, match=mentions("model.quantized='nf3'", "nf4", "int8")):
        HFCausalLM(str(model_folder("Llama")), quantized="nf3")


# --- the end of a run ---


def test_run_stops_when_the_loss_no_longer_falls(model_folder: Folder, make_trainer: Make) -> None:
    still = partial(torch.optim.SGD, lr=0.0)
    module = trained(model_folder("Llama"), make_trainer, optimizer=still, module={"early_stopping": 2}, max_epochs=9)
    assert module.trainer.current_epoch == 3
