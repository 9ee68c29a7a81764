"""ChunkedCrossEntropy trains a language model without its logits, with the plain run's numbers, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_solo as solo
from lightning_solo.errors import ConflictError, NothingToDoError, PresetError
from lightning_solo.memory.ledger import Ledger
from lightning_solo.nn import chunked_cross_entropy
from lightning_solo.nn.deferred_logits import DeferredLogits
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from tests.models import small_model
from tests.modules import Stack, loader, regression

Make = Callable[..., Any]
WORDS, WIDTH, TOKENS = 512, 8, 16


def texts(batches: int = 4, batch_size: int = 4, words: int = WORDS) -> DataLoader[Any]:
    tokens = torch.randint(0, words, (batches * batch_size, TOKENS), generator=torch.Generator().manual_seed(2))
    tokens[:, :3] = 0
    return DataLoader(tokens, batch_size=batch_size)  # type: ignore[arg-type]


class Net(nn.Module):
    """A language model with another head than its name says."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.classifier = nn.Linear(WIDTH, WORDS)
        if tied:
            self.classifier.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classifier(self.mix(self.words(tokens))[0])


def language_model(home: ModuleType, net: nn.Module | None = None, step: Callable[..., Any] | None = None) -> Any:
    """Return a LightningModule as people write it; ``step(module, batch)`` in place of its own."""

    class LanguageModel(home.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = net or Net()
            self.seen: list[Any] = []

        def loss(self, batch: Tensor) -> Tensor:
            logits = self.net(batch[:, :-1])
            self.seen.append(type(logits))
            labels = batch[:, 1:].masked_fill(batch[:, 1:] == 0, -100)
            return F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.loss(batch) if step is None else step(self, batch)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("validation/loss", self.loss(batch))

        def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    return LanguageModel()


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().float().cpu().clone() for p in module.parameters()]


def assert_close(ours: nn.Module, plain: nn.Module, start: nn.Module, tolerance: float) -> None:
    """Compare the way that weights have gone, which is not nothing."""
    for one, other, before in zip(weights(ours), weights(plain), weights(start), strict=True):
        moved = (other - before).norm()
        assert (one - other).norm() <= tolerance * moved + 1e-7
    assert any((p - q).norm() > 1e-3 for p, q in zip(weights(plain), weights(start), strict=True))


def hugging_face(kind: str) -> Any:
    """Return a small causal language model without dropout."""
    torch.manual_seed(1)
    without = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if kind == "GPT2" else {}
    capped = {"final_logit_softcapping": 3.0} if kind == "Gemma2" else {}
    return small_model(kind, vocab_size=WORDS, **without, **capped)


def by_transformers(module: Any, batch: Tensor) -> Tensor:
    output = module.net(input_ids=batch, labels=batch.masked_fill(batch == 0, -100))
    module.seen.append(type(output.logits))
    return output.loss


# --- acted ---


def test_acted(home: ModuleType, make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    module = language_model(home)
    technique = ChunkedCrossEntropy(chunk_tokens=8)
    heads = []

    class Watch(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, *args: Any) -> None:
            heads.append(technique.heads)

    with caplog.at_level("INFO"):
        make_trainer(home, callbacks=[technique, Watch()]).fit(module, texts())
    assert module.seen == [DeferredLogits] * 4
    assert heads == [("net.classifier",)] * 4
    assert technique.heads == ()
    assert "the loss of net.classifier is computed by 8 tokens" in caplog.text


def test_validation_within_a_fit_has_no_logits_either(home: ModuleType, make_trainer: Make) -> None:
    module = language_model(home)
    trainer = make_trainer(home, callbacks=[ChunkedCrossEntropy()])
    trainer.fit(module, texts(), texts(2))
    assert module.seen == [DeferredLogits] * 6
    loss = trainer.callback_metrics["validation/loss"]
    (outside,) = trainer.validate(module, texts(2), verbose=False)
    assert module.seen[-2:] == [Tensor] * 2
    assert loss == pytest.approx(outside["validation/loss"], rel=1e-6)
    assert all(type(logits) is Tensor for logits in trainer.predict(module, texts(2)))


# --- parity ---


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_parity_with_a_plain_run(home: ModuleType, make_trainer: Make, precision: str, tied: bool) -> None:
    runs = []
    for callbacks in ([], [ChunkedCrossEntropy(chunk_tokens=16)]):
        torch.manual_seed(1)
        module = language_model(home, Net(tied))
        make_trainer(home, callbacks=callbacks, precision=precision, accumulate_grad_batches=2).fit(module, texts())
        runs.append(module)
    torch.manual_seed(1)
    start = language_model(home, Net(tied))
    assert_close(runs[1], runs[0], start, tolerance={"32-true": 1e-5, "bf16-mixed": 2e-2, "bf16-true": 5e-2}[precision])


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Gemma2"])
def test_parity_for_hugging_faces_models(home: ModuleType, make_trainer: Make, name: str) -> None:
    runs = []
    for callbacks in ([], [ChunkedCrossEntropy(chunk_tokens=16)]):
        module = language_model(home, hugging_face(name), by_transformers)
        make_trainer(home, callbacks=callbacks).fit(module, texts(2))
        runs.append(module)
    assert set(runs[1].seen) == {DeferredLogits}
    assert_close(runs[1], runs[0], language_model(home, hugging_face(name)), tolerance=1e-5)


def test_a_module_may_return_its_logits_and_log_its_accuracy(home: ModuleType, make_trainer: Make) -> None:
    accuracies: dict[bool, list[Tensor]] = {}

    def step(module: Any, batch: Tensor) -> dict[str, Tensor]:
        logits, labels = module.net(batch[:, :-1]), batch[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        hits = (logits.argmax(-1) == labels).float().mean()
        accuracies.setdefault(isinstance(logits, DeferredLogits), []).append(hits)
        return {"loss": loss, "logits": logits.detach()}

    for callbacks in ([], [ChunkedCrossEntropy()]):  # a warning, of logits computed all the same, would be an error
        make_trainer(home, callbacks=callbacks).fit(language_model(home, step=step), texts())
    assert torch.allclose(torch.stack(accuracies[True]), torch.stack(accuracies[False]), atol=1e-6)


# --- memory ---


def test_logits_are_gone_from_the_peak(home: ModuleType, make_trainer: Make) -> None:
    peaks = []
    for callbacks in ([], [ChunkedCrossEntropy(chunk_tokens=4)]):
        module = language_model(home)

        class Count(home.Callback):  # type: ignore[name-defined,misc]
            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                self.ledger = Ledger(pl_module, trainer.optimizers)
                self.ledger.__enter__()

            def on_before_optimizer_step(self, *args: Any) -> None:
                peaks.append(self.ledger.peak_bytes)
                self.ledger.__exit__(None, None, None)

        make_trainer(home, callbacks=[*callbacks, Count()], max_steps=1).fit(module, texts(batch_size=16))
    logits = 4 * 16 * (TOKENS - 1) * WORDS
    chunk = 4 * 4 * WORDS
    # log-probabilities, their gradient and that of the logits are live at once; what else the peak has is as before
    assert peaks[0] - peaks[1] >= 3 * logits - chunk - 8 * WORDS * WIDTH - 64 * 16 * TOKENS
    assert peaks[1] < logits


@pytest.mark.parametrize("preset", ["compact", "checkpointing", "gradient_release", "accumulation"])
def test_it_combines(home: ModuleType, preset: str, tmp_path: Any) -> None:
    module = language_model(home, hugging_face("Llama"), by_transformers)
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=1e-2)
    start = weights(module)
    kwargs = solo.trainer_kwargs(preset, ["+callback=chunked_cross_entropy"], lightning=home.__name__)
    home.Trainer(
        **kwargs, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(tmp_path), accelerator="cpu",
    ).fit(module, texts())  # fmt: skip
    assert set(module.seen) == {DeferredLogits}
    assert any(not torch.equal(p, q) for p, q in zip(weights(module), start, strict=True))


def test_weights_that_are_gathered_for_a_forward_only_are_refused() -> None:
    with pytest.raises(ConflictError, match=r"chunked_cross_entropy.*zero_offload.*weights"):
        compose(["chunked_cross_entropy", "zero_offload_parameters"])


# --- refused ---


def assert_refused(
    home: ModuleType, make_trainer: Make, module: Any, error: type[Exception], match: str, **kw: Any
) -> None:
    head = next(part for part in module.modules() if isinstance(part, nn.Linear))
    before = set(vars(head))
    with pytest.raises(error, match=match):
        make_trainer(home, callbacks=[ChunkedCrossEntropy(**kw)]).fit(
            module, texts() if "seen" in vars(module) else loader()
        )
    assert set(vars(head)) == before


def test_a_module_without_a_head_is_refused(home: ModuleType, make_trainer: Make) -> None:
    module = regression(home, Stack(blocks=1))
    assert_refused(
        home, make_trainer, module, NothingToDoError, r"write callback.chunked_cross_entropy.head=.*net.head \(8 -> 1\)"
    )
    assert_refused(
        home,
        make_trainer,
        module,
        NothingToDoError,
        "'lm_head'.*write callback.chunked_cross_entropy.head=",
        head="lm_head",
    )


@pytest.mark.filterwarnings("ignore:.*returned `None`")
@pytest.mark.parametrize(
    ("step", "went"),
    [
        (lambda module, batch: None, "nothing"),
        (lambda module, batch: module.net(batch).square().mean(), "square"),
        (lambda module, batch: F.nll_loss(module.net(batch).log_softmax(-1).mT, batch), "log_softmax"),
        (lambda module, batch: chunked_loss_by_hand(module.net, batch), "nothing"),
        (
            lambda module, batch: F.cross_entropy(module.net(batch).transpose(1, 2), batch, weight=torch.ones(WORDS)),
            r"cross_entropy with weight=\)",
        ),
        (
            lambda module, batch: F.cross_entropy(
                module.net(batch).flatten(0, 1), F.one_hot(batch, WORDS).flatten(0, 1).float()
            ),
            "cross_entropy.*probabilities",
        ),
    ],
    ids=["no loss", "another loss", "log-probabilities", "by hand", "class weights", "probabilities"],
)
def test_a_module_without_such_a_loss_is_refused(
    home: ModuleType, make_trainer: Make, step: Callable[..., Any], went: str
) -> None:
    module = language_model(home, step=step)
    assert_refused(
        home,
        make_trainer,
        module,
        NothingToDoError,
        rf"they went to: {went}.*write callback.chunked_cross_entropy.head=",
    )


def chunked_loss_by_hand(net: Any, batch: Tensor) -> Tensor:
    hidden = net.mix(net.words(batch))[0]
    return chunked_cross_entropy(hidden, net.classifier.weight, batch, bias=net.classifier.bias)


def test_logits_computed_all_the_same_are_named(home: ModuleType, make_trainer: Make) -> None:
    def step(module: Any, batch: Tensor) -> Tensor:
        logits = module.net(batch[:, :-1])
        return (
            F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) + 1e-4 * logits.logsumexp(-1).square().mean()
        )

    with pytest.warns(UserWarning, match="computed for logsumexp"):
        make_trainer(home, callbacks=[ChunkedCrossEntropy()]).fit(language_model(home, step=step), texts())


def test_an_empty_name_of_a_head_is_refused() -> None:
    with pytest.raises(PresetError):
        ChunkedCrossEntropy(head=" ")
