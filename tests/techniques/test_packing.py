"""Packing in the user's own loader: rows of documents that don't see one another, with the loss of the documents."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from lightning_solo.data.loaders import with_batches
from lightning_solo.data.loss_weights import IGNORED
from lightning_solo.data.packing import PackedBatches, pack_best_fit
from lightning_solo.errors import ConflictError, NothingToDoError
from lightning_solo.planner.rules import arrange
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.accumulation_schedule.technique import AccumulationSchedule
from lightning_solo.techniques.curriculum.technique import Curriculum
from lightning_solo.techniques.layer_drop.technique import LayerDrop
from lightning_solo.techniques.micro_batching.technique import MicroBatching
from lightning_solo.techniques.packing.technique import Packing
from tests.conftest import long
from tests.messages import mentions
from tests.modules import Documents, collate_documents, documents

transformers = pytest.importorskip("transformers")
Make = Callable[..., Any]
VOCABULARY = 61
LENGTHS = [5, 9, 3, 7, 2, 8, 4, 6, 1, 9, 3, 5, 12, 2, 4, 7]
TOKENS = sum(LENGTHS)


def log_normal(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(count, generator=generator) + 3).exp().clamp(1, 512).long().tolist()


def loader(lengths: list[int] = LENGTHS, **options: Any) -> DataLoader[Any]:
    return documents(lengths, VOCABULARY, **{"shuffle": True, **options})


def llama(**options: Any) -> Any:
    """Return a model with its configuration's default, which is to make a cache in every forward."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2(**options: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64, attn_pdrop=0.0,
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, **options},
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


class Module(L.LightningModule):
    """As users write it: the whole batch goes to the model, which makes the loss."""

    def __init__(self, net: Callable[..., Any] = llama, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = net(**options)
        self.batches: list[tuple[int, dict[str, Tensor]]] = []

    def loss(self, batch: Any) -> Any:
        return self.net(**batch).loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=1)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append((self.current_epoch, batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def rows(self, epoch: int) -> list[tuple[int, ...]]:
        """Return the documents of each row, by their first tokens."""
        found = []
        for batch in (batch for at, batch in self.batches if at == epoch):
            # what fills a row begins with token 0 and has no labels
            lengths = batch["labels"].ne(IGNORED).flip(1).cumsum(1).flip(1).ne(0)
            starts = batch["position_ids"].eq(0)
            for tokens, start, kept in zip(batch["input_ids"], starts, lengths, strict=True):
                found.append(tuple(tokens[start & kept].tolist()))
        return found


def fit(make_trainer: Make, module: Any, data: Any, *callbacks: Any, **arguments: Any) -> Any:
    path = arguments.pop("path", None)
    trainer = make_trainer(L, callbacks=list(callbacks), **arguments)
    options = {"datamodule": data} if isinstance(data, L.LightningDataModule) else {"train_dataloaders": data}
    trainer.fit(module, **options, ckpt_path=path, weights_only=path and True)
    return trainer


# --- acted ---


@pytest.mark.any_device
def test_a_fit_has_the_rows_that_were_reported(make_trainer: Make) -> None:
    module, technique, data = Module(), Packing(capacity=20, rows=2), loader([n + 2 for n in LENGTHS])
    trainer = fit(make_trainer, module, data, technique, max_epochs=2)
    first = [batch for epoch, batch in module.batches if epoch == 0]
    assert set(first[0]) == {"input_ids", "labels", "position_ids"}
    padded = sum(batch["input_ids"].numel() for batch in first)
    assert technique.padding_after == pytest.approx(1 - (TOKENS + 2 * 16) / padded)
    assert technique.padding_after < technique.padding_before / 2
    for epoch in (0, 1):  # every document once, in other rows
        assert sorted(itertools.chain(*module.rows(epoch))) == list(range(16))
    assert set(map(frozenset, module.rows(0))) != set(map(frozenset, module.rows(1)))
    assert all(len(batch["input_ids"]) <= 2 and batch["input_ids"].shape[1] <= 20 for batch in first)
    assert trainer.num_training_batches == len(first) < 16 // 4 + 2


def test_padding_of_a_log_normal_distribution(make_trainer: Make) -> None:
    module, technique = Module(), Packing(capacity=512, rows=4)
    fit(make_trainer, module, loader(log_normal(4000), batch_size=32), technique, limit_train_batches=1)
    assert technique.padding_before > 0.5
    assert technique.padding_after <= 0.01


def test_as_many_documents_are_in_a_batch_as_in_the_loaders(make_trainer: Make) -> None:
    module = Module()
    trainer = fit(make_trainer, module, loader(log_normal(400), batch_size=32), Packing(), limit_train_batches=3)
    mean = sum(map(len, module.rows(0))) / 3
    assert 16 < mean < 64
    assert abs(trainer.num_training_batches - 400 / 32) <= 400 / 32


def test_training_has_no_cache_and_all_else_has_it(make_trainer: Make) -> None:
    class Watching(Module):
        seen: list[tuple[str, bool, bool]]

        def loss(self, batch: Any) -> Any:
            output = self.net(**batch)
            self.seen.append(("train", self.net.config.use_cache, output.past_key_values is not None))
            return output.loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            cache = self.net(input_ids=batch["input_ids"]).past_key_values
            self.seen.append(("validation", self.net.config.use_cache, cache is not None))
            assert set(batch) == {"input_ids", "attention_mask", "labels"}  # the loader's own

    module = Watching()
    module.seen = []
    make_trainer(L, callbacks=[Packing()]).fit(module, loader(), loader(shuffle=False))
    assert {("train", False, False), ("validation", True, True)} == set(module.seen)
    assert module.net.config.use_cache


# --- parity ---


class InDouble(Module):
    """The loss from logits, by the module itself: that of Hugging Face is computed in fp32."""

    def loss(self, batch: Any) -> Any:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits = self.net(**inputs).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


ERROR = {gpt2: 1e-12, llama: 1e-8}  # Llama normalises and turns its keys in fp32, whatever it is in


@pytest.mark.parametrize("net", [llama, gpt2])
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"rows": 99}, []),
        ({"rows": 99}, [MicroBatching(micro_batch=2, weight_by="tokens")]),
        ({"rows": 2}, [AccumulationSchedule([[0, 99]], weight_by="tokens")]),
    ],
    ids=["one batch", "micro-batches", "accumulated"],
)
def test_a_step_is_that_of_the_same_documents_padded(make_trainer: Make, net: Any, options: Any, parts: Any) -> None:
    plain, packed = InDouble(net), InDouble(net)
    initial = [p.detach().clone() for p in packed.parameters()]
    expected = fit(make_trainer, plain, loader(batch_size=16), precision="64-true")
    step = fit(make_trainer, packed, loader(batch_size=16), Packing(**options), *parts, precision="64-true")
    assert step.global_step == expected.global_step == 1
    for before, one, other in zip(initial, packed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=ERROR[net])
        assert not torch.equal(one, before)
    if options["rows"] == 99:
        assert step.callback_metrics["loss"].item() == pytest.approx(expected.callback_metrics["loss"].item())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_comparison_changes_nothing_of_the_fit(
    make_trainer: Make, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, values = [], []
    for compares in (True, False):
        if not compares:
            monkeypatch.setattr("lightning_solo.techniques.packing.technique.require_boundaries", lambda *_: None)
        module = Module(gpt2, resid_pdrop=dropout, embd_pdrop=dropout, use_cache=False)
        trainer = fit(make_trainer, module, loader(), Packing(), LayerDrop(), max_epochs=2)
        weights.append([p.detach().clone() for p in module.parameters()])
        values.append(trainer.callback_metrics["loss"].item())
        assert all(part.training for part in module.modules())
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)
    assert values[0] == values[1]


@pytest.mark.parametrize("first", ["packing", "micro_batching"])
def test_a_global_batch_counts_packed_rows_in_either_order(make_trainer: Make, first: str) -> None:
    callbacks = [Packing(capacity=12, rows=2), MicroBatching(global_batch=4, weight_by="tokens")]
    module = Module()
    trainer = fit(make_trainer, module, loader(), *(callbacks if first == "packing" else callbacks[::-1]))
    assert len(module.batches) == 4
    assert trainer.global_step == 2


# --- what is proved of the module in its first batch ---


class WithoutPositions(Module):
    def loss(self, batch: Any) -> Any:
        return self.net(input_ids=batch["input_ids"], labels=batch["labels"]).loss


class WithMask(Module):
    def loss(self, batch: Any) -> Any:
        return self.net(**batch, attention_mask=torch.ones_like(batch["input_ids"])).loss


class WithCache(Module):
    def loss(self, batch: Any) -> Any:
        return self.net(**batch, use_cache=True).loss


class SumOfRows(Module):
    def loss(self, batch: Any) -> Any:
        return self.net(**batch).loss * batch["input_ids"].numel()


class Bigrams(nn.Module):
    """A model that takes no positions, and whose tokens see themselves alone, or all before."""

    def __init__(self, sees_all: bool = True) -> None:
        super().__init__()
        self.embedding, self.head, self.sees_all = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), sees_all

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        return self.head(hidden.cumsum(1) if self.sees_all else hidden)


class OwnLoss(Module):
    def loss(self, batch: Any) -> Any:
        logits = self.net(batch["input_ids"])
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        return {"loss": loss, "logits": logits.detach()}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


@pytest.mark.parametrize(
    ("kind", "net", "words"),
    [
        (WithoutPositions, llama, ["WithoutPositions", "position_ids", "net (LlamaForCausalLM)", "length_bucketing"]),
        (WithMask, llama, ["WithMask", "attention mask", "length_bucketing"]),
        (WithCache, llama, ["WithCache", "length_bucketing"]),
        (SumOfRows, llama, ["SumOfRows", "mean over all labels"]),
        (OwnLoss, Bigrams, ["OwnLoss", "taking position_ids: none", "length_bucketing"]),
        (Module, Bigrams, ["Module.training_step", "TypeError", "position_ids", "length_bucketing"]),
    ],
)
@pytest.mark.any_device
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_modules_whose_documents_see_one_another_are_refused_before_a_step(
    make_trainer: Make, kind: Any, net: Any, words: list[str], precision: str
) -> None:
    module = kind(net)
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(ConflictError, match=mentions("packing", *words)):
        fit(make_trainer, module, loader(log_normal(200)), Packing(), precision=precision)
    for one, other in zip(module.parameters(), before, strict=True):
        assert torch.equal(one, other)
    assert all(part.training for part in module.modules())
    assert not hasattr(getattr(module.net, "config", None), "use_cache") or module.net.config.use_cache


@pytest.mark.parametrize("kind", ["MambaForCausalLM", "BloomForCausalLM", "OPTForCausalLM"])
def test_models_that_take_position_ids_for_nothing_are_refused(make_trainer: Make, kind: str) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "n_layer": 2, "num_attention_heads": 4, "n_head": 4}
    config = getattr(transformers, kind.replace("ForCausalLM", "Config"))(vocab_size=VOCABULARY, **sizes)
    with pytest.raises(ConflictError, match=mentions("packing", "Module", "length_bucketing")):
        fit(make_trainer, Module(lambda: getattr(transformers, kind)(config)), loader(), Packing())


def test_a_module_whose_tokens_are_alone_needs_no_positions(make_trainer: Make) -> None:
    module = OwnLoss(lambda: Bigrams(sees_all=False))
    fit(make_trainer, module, loader(), Packing())
    assert module.batches


def test_a_batch_that_a_hook_changes_is_compared_as_it_is(make_trainer: Make) -> None:
    class Moved(Module):
        calls = 0

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {"inputs": batch}

        def loss(self, batch: Any) -> Any:
            self.calls += not torch.is_grad_enabled()
            return self.net(**batch["inputs"]).loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch["inputs"], batch_idx)

    module = Moved()
    fit(make_trainer, module, loader(), Packing(rows=2))
    assert module.calls == 3
    assert sorted(itertools.chain(*module.rows(0))) == [index for index in range(16) if LENGTHS[index] > 1]


def test_documents_are_compared_as_batches_come_to_a_step(make_trainer: Make) -> None:
    class Hooked(Module):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            batch["sees"] = torch.ones(len(batch["labels"]), dtype=torch.float64)
            batch["labels"] += 0  # their own, in each batch
            batch["input_ids"].add_(1).remainder_(VOCABULARY)
            return batch

        def loss(self, batch: Any) -> Any:
            assert batch.pop("sees").dtype == torch.float64
            return self.net(**batch).loss

    module = Hooked()
    fit(make_trainer, module, loader(), Packing(), precision="64-true")
    assert module.batches


def test_documents_that_are_compared_are_neither_cut_nor_counted(make_trainer: Make) -> None:
    module, cutting = Module(), Curriculum("sequence_length", start=0.3, duration=4, multiple=1, pace="tokens")
    fit(make_trainer, module, loader(), Packing(), cutting)
    assert cutting.state_dict()["tokens"] == sum(batch["labels"].numel() for _, batch in module.batches)


def test_best_fit_runs_once_for_an_epoch(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return pack_best_fit(*args)

    monkeypatch.setattr("lightning_solo.data.packing.pack_best_fit", counted)
    fit(make_trainer, Module(), loader(), Packing(), max_epochs=2)
    assert len(calls) == 2


def test_compared_documents_have_tokens(make_trainer: Make) -> None:
    module = Module()
    fit(make_trainer, module, loader([16, 40, 0, 40, 17, 40, 40, 0, 29]), Packing())
    assert module.batches


class Silent(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class Manual(Module):
    automatic_optimization = False


class Iterating(Module):
    def training_step(self, dataloader_iter: Any) -> Any:
        return self.loss(next(dataloader_iter)[0])


class Masking(Module):
    def loss(self, batch: Any) -> Any:
        return self.net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).loss


@pytest.mark.filterwarnings("ignore:You are using the .dataloader_iter. step flavor")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Silent, ["Silent.training_step", "~callback.packing"]),
        (Manual, ["Manual.automatic_optimization=False", "packed_loader"]),
        (Iterating, ["Iterating.training_step(dataloader_iter)", "training_step(batch, batch_idx)"]),
        (Masking, ["Masking.training_step", "KeyError", "attention_mask", "input_ids, labels, position_ids"]),
    ],
)
def test_steps_that_cannot_be_compared_are_refused(make_trainer: Make, kind: Any, words: list[str]) -> None:
    with pytest.raises(ConflictError, match=mentions("packing", *words)):
        fit(make_trainer, kind(), loader(), Packing())


def test_error_of_training_step_is_unchanged(make_trainer: Make) -> None:
    class Wrong(Module):
        def loss(self, batch: Any) -> Any:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fit(make_trainer, Wrong(), loader(), Packing())


# --- memory ---


def test_an_epoch_has_the_elements_of_its_documents_and_hardly_more(make_trainer: Make) -> None:
    module, technique = Module(), Packing()
    lengths = log_normal(300)
    fit(make_trainer, module, loader(lengths, batch_size=16), technique)
    elements = sum(batch["input_ids"].numel() for _, batch in module.batches)
    assert round(elements * (1 - technique.padding_after)) == sum(lengths)
    padded = sum(lengths) / (1 - technique.padding_before)
    assert elements < 0.6 * padded


@pytest.mark.parametrize(("overrides", "tokens"), [([], "longest"), (["callback.packing.capacity=512"], "512")])
def test_plan_is_for_the_given_batch(overrides: list[str], tokens: str) -> None:
    arrangement = arrange(compose("packing", overrides), {})
    assert arrangement.arguments()["callbacks"] == []
    (assumption,) = arrangement.assumptions
    assert {"packing", tokens} <= set(assumption.replace("'", " ").replace(":", " ").split())


# --- trace, and resuming ---


@pytest.mark.parametrize("workers", [0, long(2)])
def test_loader_keeps_its_attributes(make_trainer: Make, workers: int) -> None:
    class Mine(DataLoader[Any]):
        pass

    data = Mine(Documents(LENGTHS, VOCABULARY), batch_size=4, collate_fn=collate_documents, num_workers=workers)
    before, seen = dict(vars(data)), []

    class Look(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(trainer.train_dataloader)

    fit(make_trainer, Module(), data, Packing(), Look())
    assert isinstance(seen[0], Mine)
    assert seen[0].num_workers == workers
    assert {key: value for key, value in vars(data).items() if value is not before[key]} == {}
    assert type(data) is Mine


def test_a_fit_that_fails_leaves_the_cache_on_and_the_next_one_compares_again(make_trainer: Make) -> None:
    class Failing(Module):
        fails, compared = True, 0

        def loss(self, batch: Any) -> Any:
            self.compared += not torch.is_grad_enabled()
            if self.fails and self.batches:
                raise ArithmeticError("mine")
            return super().loss(batch)

    module, technique = Failing(), Packing(rows=1)
    with pytest.raises(ArithmeticError, match="mine"):
        fit(make_trainer, module, loader(), technique)
    assert module.net.config.use_cache
    module.fails = False
    fit(make_trainer, module, loader(), technique)
    assert module.compared == 6
    assert module.net.config.use_cache


def test_the_random_state_is_that_of_a_plain_fit(make_trainer: Make) -> None:
    class Augmented(Documents):
        def __getitem__(self, index: int) -> Tensor:
            return super().__getitem__(index).roll(int(torch.randint(3, ())))

    states = []

    class Look(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            states.append(torch.get_rng_state())

    module = Module()
    before = torch.get_rng_state()
    data = DataLoader(Augmented(LENGTHS, VOCABULARY), batch_size=4, collate_fn=collate_documents)
    fit(make_trainer, module, data, Packing(), Look())
    assert torch.equal(states[0], before)


# --- a data module as others write it ---


class Texts(L.LightningDataModule):
    """Texts, a tokenizer and a collator of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = {word: index for index, word in enumerate(["<pad>", "<unk>", *"abcdefghij"])}
        tokenizer = Tokenizer(models.WordLevel(words, "<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
        generator = torch.Generator().manual_seed(1)
        self.texts = [
            " ".join("abcdefghij"[i] for i in torch.randint(10, (length,), generator=generator))
            for length in log_normal(60)
        ]

    def setup(self, stage: str) -> None:
        self.items = [self.tokenizer(text) for text in self.texts]
        self.collate = transformers.DataCollatorForLanguageModeling(self.tokenizer, mlm=False)

    def train_dataloader(self) -> Any:
        return DataLoader(self.items, batch_size=8, shuffle=True, collate_fn=self.collate)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return DataLoader(self.items[:8], batch_size=8, collate_fn=self.collate)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", ["auto", "input_ids", "collated"])
def test_a_data_module_with_a_tokenizer_and_its_collator(make_trainer: Make, length: str) -> None:
    class Validating(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("validation/loss", self.loss(batch))

    data, module, technique = Texts(), Validating(), Packing(length=length)
    trainer = fit(make_trainer, module, data, technique)
    assert technique.padding_after < 0.1 < technique.padding_before
    tokens = sum(len(item["input_ids"]) for item in data.items)
    assert sum(batch["labels"].ne(IGNORED).sum() for _, batch in module.batches) == tokens - len(data.items)
    assert trainer.callback_metrics["validation/loss"] > 0


# --- what is refused ---


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Documents([3, 2], VOCABULARY))


def own_batch_sampler() -> Any:
    sampler = type("Mine", (BatchSampler,), {})(SequentialSampler(LENGTHS), 2, False)
    return DataLoader(Documents(LENGTHS, VOCABULARY), batch_sampler=sampler, collate_fn=collate_documents)


def without_labels(items: list[Tensor]) -> Any:
    return {"input_ids": collate_documents(items)["input_ids"]}


def shifted(items: list[Tensor]) -> Any:
    made = collate_documents(items)
    return {"input_ids": made["input_ids"][:, :-1], "labels": made["input_ids"][:, 1:]}


def failing(item: Tensor) -> int:
    raise KeyError("tokens")


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (lambda: DataLoader(Stream(), batch_size=2), {}, ["Stream", "map-style"]),
        (own_batch_sampler, {}, ["Mine", "DataLoader(batch_size=...)"]),
        (lambda: with_batches(loader(), PackedBatches(torch.tensor(LENGTHS), 12, 2)), {}, ["position"]),
        (lambda: loader(collate_fn=without_labels), {}, ["labels", "input_ids"]),
        (lambda: loader(collate_fn=shifted), {}, ["labels", "shifted"]),
        (lambda: loader(), {"capacity": 11}, ["document", "12", "capacity=12"]),
        (lambda: loader(), {"length": failing}, ["failing", "item 0", "KeyError"]),
        (lambda: loader([0, 0, 0]), {}, ["no tokens", "length=auto"]),
    ],
)
def test_unsuitable_loader_or_module_is_refused_before_training(
    make_trainer: Make, data: Any, options: Any, words: list[str]
) -> None:
    module = Module()
    with pytest.raises(ConflictError, match=mentions(*words)):
        fit(make_trainer, module, data(), Packing(**options))
    assert not module.batches


@pytest.mark.parametrize(
    ("lengths", "options"),
    [([5] * 12, {}), ([9, 8, 7, 9], {"batch_size": 2}), ([5, 3, 2, 2, 3], {"batch_size": 1})],
    ids=["one length", "no two in a row", "single documents"],
)
def test_packing_without_savings_is_refused(make_trainer: Make, lengths: list[int], options: Any) -> None:
    words = ("length=auto", f"capacity={max(lengths)}", "callback.packing.capacity", "~callback.packing")
    with pytest.raises(NothingToDoError, match=mentions("packing", *words)):
        fit(make_trainer, Module(), loader(lengths, **options), Packing())


def test_longer_rows_of_documents_without_padding_are_no_error(make_trainer: Make) -> None:
    module = Module()
    fit(make_trainer, module, loader([5] * 12, batch_size=1), Packing(capacity=20))
    assert {len(row) for row in module.rows(0)} == {4}


@pytest.mark.parametrize("collected", [lambda one: {"a": one}, lambda one: [one, loader()]])
def test_collections_of_loaders_are_refused(make_trainer: Make, collected: Any) -> None:
    class Either(Module):
        def loss(self, batch: Any) -> Any:
            return super().loss(batch["a"] if "a" in batch else batch[0])

    module = Either()
    with pytest.raises(ConflictError, match=mentions("packing", "several", "one loader", "~callback.packing")):
        fit(make_trainer, module, collected(loader()), Packing())
    assert not module.batches


class Dying(Dataset[Any]):
    """Items for the process that made it; a worker that reads one dies."""

    def __init__(self) -> None:
        self.pid, self.items = os.getpid(), Documents(LENGTHS, VOCABULARY)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Tensor:
        if os.getpid() != self.pid:
            os._exit(1)
        return self.items[index]


@pytest.mark.long
def test_a_worker_that_dies_is_named_by_torch_and_nothing_is_left_changed(make_trainer: Make) -> None:
    module = Module()
    data = DataLoader(Dying(), batch_size=4, num_workers=1, collate_fn=collate_documents)
    with pytest.raises(RuntimeError, match="worker"):
        fit(make_trainer, module, data, Packing())
    assert module.net.config.use_cache
    fit(make_trainer, module, loader(), Packing())
    assert module.batches
