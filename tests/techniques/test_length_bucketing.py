"""Batches of similar lengths: every item once per epoch, little padding, the same order after a resume."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_solo.data.item_lengths import item_lengths
from lightning_solo.data.length_batches import LengthBatches, padding_share
from lightning_solo.data.loaders import with_batches
from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError, PresetError
from lightning_solo.planner.rules import arrange
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.length_bucketing.technique import LengthBucketing
from lightning_solo.techniques.prefetch.technique import Prefetch
from tests.messages import mentions
from tests.modules import regression

Make = Callable[..., Any]


def log_normal(count: int, sigma: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(count, generator=generator) * sigma + 4).exp().clamp(1, 2048).long()


class Texts(Dataset[Any]):
    """Items of (tokens, index), whose tokens are as many as ``lengths`` says."""

    def __init__(self, lengths: Any) -> None:
        self.lengths = [int(length) for length in lengths]
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        return torch.full((self.lengths[index],), float(index)), index


def padded(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return pad_sequence([tokens for tokens, _ in items], batch_first=True), torch.tensor([index for _, index in items])


def texts(lengths: Any = None, **options: Any) -> DataLoader[Any]:
    lengths = log_normal(60) if lengths is None else lengths
    return DataLoader(Texts(lengths), **{"batch_size": 4, "shuffle": True, "collate_fn": padded, **options})


class Indices(L.Callback):
    """The items of each batch, by epoch; a checkpoint after one of the batches."""

    def __init__(self, save: tuple[int, int, Any] | None = None) -> None:
        self.seen: list[tuple[int, list[int]]] = []
        self.shapes: list[tuple[int, ...]] = []
        self.save = save

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((trainer.current_epoch, batch[1].tolist()))
        self.shapes.append(tuple(batch[0].shape))
        if self.save and (trainer.current_epoch, batch_idx) == self.save[:2]:
            trainer.save_checkpoint(self.save[2])

    def of(self, epoch: int) -> list[list[int]]:
        return [batch for at, batch in self.seen if at == epoch]


def fit(make_trainer: Make, technique: Any, loader: Any, note: Any = None, path: Any = None, **arguments: Any) -> Any:
    module = regression(L, nn.Linear(1, 1))
    module.training_step = lambda batch, batch_idx: module.net(batch[0].mean(1, keepdim=True)).pow(2).mean()
    notes = note if isinstance(note, list) else [note] if note else []
    trainer = make_trainer(L, callbacks=[technique, *notes], **{"max_epochs": 2, **arguments})
    trainer.fit(module, loader, ckpt_path=path, weights_only=path and True)
    return trainer


def flat(batches: Any) -> list[int]:
    return sorted(itertools.chain.from_iterable(batches))


# --- acted ---


@pytest.mark.parametrize("options", [{"batch_size": 32}, {"max_tokens": 4096}], ids=["count", "tokens"])
def test_padding_of_a_log_normal_distribution(options: dict[str, int]) -> None:
    lengths = log_normal(10_000)
    plain = [batch.tolist() for batch in torch.randperm(len(lengths)).split(32)]
    batches = LengthBatches(lengths, **options)
    assert padding_share(lengths[batch].tolist() for batch in plain) > 0.5
    for epoch in range(3):
        assert padding_share(lengths[batch].tolist() for batch in batches.batches(epoch)) <= 0.05


def test_a_fit_has_the_shapes_that_were_reported(make_trainer: Make) -> None:
    note, technique, loader = Indices(), LengthBucketing(), texts()
    fit(make_trainer, technique, loader, note)
    lengths = torch.tensor(loader.dataset.lengths)
    first = note.shapes[: len(note.of(0))]
    tokens = sum(rows * length for rows, length in first)
    assert technique.padding_after == pytest.approx(1 - int(lengths.sum()) / tokens)
    assert technique.padding_after < technique.padding_before / 2
    # the longest item comes first, and items keep company with others in the second epoch
    assert first[0][1] == int(lengths.max())
    assert [set(batch) for batch in note.of(0)] != [set(batch) for batch in note.of(1)]
    assert note.of(0)[1:] != sorted(note.of(0)[1:], key=lambda batch: -loader.dataset.lengths[batch[0]])


def test_a_budget_of_tokens_holds_in_every_batch(make_trainer: Make) -> None:
    note, technique = Indices(), LengthBucketing(max_tokens=2048)
    trainer = fit(make_trainer, technique, texts(log_normal(200)), note)
    assert max(rows * length for rows, length in note.shapes) <= 2048
    assert len({rows for rows, _ in note.shapes}) > 3
    assert len(note.of(0)) == len(note.of(1)) == trainer.num_training_batches


# --- parity: every item once, whatever the lengths ---


@given(
    lengths=st.lists(st.integers(0, 40), max_size=60),
    size=st.integers(1, 9),
    budget=st.integers(40, 200),
    drop_last=st.booleans(),
    seed=st.integers(0, 5),
)
@settings(max_examples=60)
def test_every_item_comes_once_per_epoch(lengths: Any, size: int, budget: int, drop_last: bool, seed: int) -> None:
    items = torch.tensor(lengths, dtype=torch.int64)
    by_count = LengthBatches(items, size, drop_last=drop_last, seed=seed)
    by_tokens = LengthBatches(items, max_tokens=budget, seed=seed)
    for epoch in (0, 1, 7):
        batches = by_count.batches(epoch)
        kept = flat(batches)
        assert len(kept) == len(set(kept)) == len(items) - (len(items) % size if drop_last else 0)
        assert sorted(map(len, batches), reverse=True)[: len(kept) // size] == [size] * (len(kept) // size)
        assert len(batches) == len(by_count) == -(-len(kept) // size)
        batches = by_tokens.batches(epoch)
        assert flat(batches) == list(range(len(items)))
        assert len(batches) == len(by_tokens)
        assert all(len(batch) * int(items[batch].max()) <= budget for batch in batches)
        assert by_tokens.batches(epoch) == batches


def test_other_items_are_dropped_in_each_epoch(make_trainer: Make) -> None:
    note = Indices()
    fit(make_trainer, LengthBucketing(), texts(log_normal(15), drop_last=True), note)
    left = [set(range(15)) - set(flat(note.of(epoch))) for epoch in (0, 1)]
    assert [len(items) for items in left] == [3, 3]
    assert left[0] != left[1]


@pytest.mark.parametrize(
    "length", [lambda item: len(item[0]), "collated", "auto"], ids=["function", "collated", "auto"]
)
def test_sources_of_lengths(length: Any) -> None:
    loader = texts([3, 1, 2])
    assert item_lengths(loader.dataset, length, loader.collate_fn).tolist() == [3, 1, 2]
    assert loader.dataset.read == [0, 1, 2]


def test_a_column_is_read_without_the_others() -> None:
    class Table:
        """As a data set of Hugging Face: whole columns by name."""

        column_names = ("text", "words", "length")
        text, words, length = ["a b c", "d", "e f"], torch.tensor([3, 1, 2]), [30, 10, 20]

        def __len__(self) -> int:
            return 3

        def __getitem__(self, name: str) -> Any:
            return getattr(self, name)

    dataset = Table()
    assert item_lengths(dataset, "words").tolist() == [3, 1, 2]
    assert item_lengths(dataset, "text").tolist() == [5, 1, 3]
    assert item_lengths(dataset).tolist() == [30, 10, 20]
    items: Any = [{"text": "a b", "words": 2}, {"text": "c", "words": 1}]
    assert item_lengths(items, "words").tolist() == [2, 1]


def test_the_random_state_is_that_of_a_plain_fit(make_trainer: Make) -> None:
    class Augmented(Texts):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            tokens, index = super().__getitem__(index)
            return tokens + torch.randn(()), index

    state = torch.get_rng_state()
    loader = DataLoader(Augmented(log_normal(8)), batch_size=2, collate_fn=padded)
    technique = LengthBucketing()

    class After(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            assert len(loader.dataset.read) == 8  # type: ignore[attr-defined]
            self.state = torch.get_rng_state()

    regression(L, nn.Linear(1, 1))  # as `fit` does
    plain = torch.get_rng_state()
    torch.set_rng_state(state)
    after = After()
    fit(make_trainer, technique, loader, after, max_epochs=1)
    assert torch.equal(after.state, plain)


# --- memory: what a batch has at most ---


def test_the_bytes_of_an_epoch_are_those_of_its_items_and_of_the_padding_reported(make_trainer: Make) -> None:
    note, technique = Indices(), LengthBucketing()
    fit(make_trainer, technique, texts(log_normal(500), batch_size=16), note, max_epochs=1)
    elements = sum(rows * length for rows, length in note.shapes)
    assert round(elements * (1 - technique.padding_after)) == int(log_normal(500).sum())
    assert elements < 0.5 * elements * (1 - technique.padding_after) / (1 - technique.padding_before)


def test_plan_is_for_the_given_batch() -> None:
    arrangement = arrange(compose("length_bucketing"), {})
    assert arrangement.arguments()["callbacks"] == []
    (assumption,) = arrangement.assumptions
    assert {"length_bucketing", "given", "longest"} <= set(assumption.replace(":", " ").replace(";", " ").split())


# --- trace, and resuming ---


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_loader_keeps_its_attributes(make_trainer: Make, workers: int) -> None:
    class Mine(DataLoader[Any]):
        def __init__(self, dataset: Any, extra: str, **options: Any) -> None:
            super().__init__(dataset, **options)
            self.extra = extra

    generator = torch.Generator()
    loader = Mine(Texts(log_normal(20)), "kept", batch_size=4, collate_fn=padded, generator=generator,
                  num_workers=workers, persistent_workers=bool(workers))  # fmt: skip
    before, seen = dict(vars(loader)), []

    class Look(Indices):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(trainer.train_dataloader)

    note = Look()
    fit(make_trainer, LengthBucketing(), loader, note)
    (used,) = seen
    assert isinstance(used, Mine)
    assert (used.extra, used.generator, used.num_workers, used.batch_size) == ("kept", generator, workers, 4)
    assert used.collate_fn is padded
    assert used.dataset is loader.dataset
    assert flat(note.of(0)) == flat(note.of(1)) == list(range(20))
    assert {key: value for key, value in vars(loader).items() if value is not before[key]} == {}
    assert type(loader) is Mine
    assert type(loader.batch_sampler) is BatchSampler


@pytest.mark.parametrize("ahead", [[], [Prefetch()]], ids=["plain", "prefetched"])
@pytest.mark.parametrize(("epoch", "batch"), [(0, 0), (1, 3), (1, 14)], ids=["first batch", "middle", "last batch"])
def test_a_batch_within_which_a_run_was_stopped_comes_again(
    make_trainer: Make, tmp_path: Any, epoch: int, batch: int, ahead: list[Any]
) -> None:
    """As Lightning counts it: the last window of the epoch steps, too."""
    path = str(tmp_path / "within.ckpt")

    class Within(Indices):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            if (trainer.current_epoch, trainer.fit_loop.batch_idx) == (epoch, batch):
                trainer.save_checkpoint(path)

    whole, rest = Within(), Indices()
    options = {"accumulate_grad_batches": 4, "max_epochs": 3}
    one = fit(make_trainer, LengthBucketing(), texts(), [whole, *ahead], **options)
    other = fit(make_trainer, LengthBucketing(), texts(), [rest, *ahead], path, **options)
    begin = [at for at, _ in whole.seen].index(epoch) + batch
    assert rest.seen == whole.seen[begin:]
    assert one.global_step == other.global_step == 3 * 4


def test_the_state_is_plain_and_of_these_batches() -> None:
    def made(seed: int = 0, count: int = 12) -> Any:
        loader = texts(log_normal(count))
        return with_batches(loader, LengthBatches(item_lengths(loader.dataset), 4, seed=seed))

    loader = made()
    first = [batch[1].tolist() for batch in loader]
    second = iter(loader)
    begun = [next(second)[1].tolist()]
    state = loader.state_dict()
    assert state == {"epoch": 1, "batches_done": 1, "kind": "LengthBatches", "seed": 0, "batches": 3}
    other = made()
    other.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert other.state_dict() == state
    assert [batch[1].tolist() for batch in other] == [batch[1].tolist() for batch in second]
    assert other.state_dict() == {**state, "epoch": 2, "batches_done": 0}
    assert first != [*begun, *[batch[1].tolist() for batch in other]]
    with pytest.raises(CheckpointError, match=mentions("kind: 'Others'", "'LengthBatches' here")):
        made().load_state_dict({**state, "kind": "Others"})
    with pytest.raises(CheckpointError, match=mentions("seed: 0", "3 here")):
        made(3).load_state_dict(state)
    with pytest.raises(CheckpointError, match=mentions("batches: 3", "2 here")):
        made(0, 8).load_state_dict(state)
    made(0, 8).load_state_dict({**state, "batches_done": 0})
    with pytest.raises(CheckpointError, match="batches_done"):
        other.load_state_dict({"epoch": 1})


def test_batch_with_the_longest_item_comes_first_in_every_epoch() -> None:
    lengths = log_normal(64)
    longest = int(lengths.argmax())
    for seed in range(3):
        batches = LengthBatches(lengths, batch_size=4, seed=seed)
        for epoch in range(4):
            assert longest in batches.batches(epoch)[0]


def test_items_of_a_bucket_are_mixed_anew_in_each_epoch() -> None:
    batches = LengthBatches(torch.arange(1000, 1012), batch_size=4)  # within 3 %: one bucket
    assert len({frozenset(map(frozenset, batches.batches(epoch))) for epoch in range(5)}) > 1


def test_two_seeds_have_two_orders() -> None:
    lengths = log_normal(40)
    assert LengthBatches(lengths, 4, seed=0).batches(1) != LengthBatches(lengths, 4, seed=1).batches(0)


# --- what is refused ---


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Texts([1, 2]))


class Endless(Texts):
    __len__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: DataLoader(Stream(), batch_size=2), ["Stream", "map-style"]),
        (lambda: Texts([1, 2]), ["Texts", "DataLoader"]),
        (lambda: DataLoader(Texts([1, 2]), batch_size=None), ["batch_size=None"]),
        (
            lambda: DataLoader(
                Texts([1, 2]),
                batch_sampler=type("Mine", (BatchSampler,), {})(SequentialSampler(Texts([1, 2])), 2, False),
            ),
            ["Mine", "DataLoader(batch_size=...)"],
        ),
        (lambda: texts(shuffle=False, sampler=WeightedRandomSampler([1.0] * 60, 60)), ["WeightedRandomSampler"]),
        (lambda: with_batches(texts(), LengthBatches(log_normal(60), 4)), ["position"]),
    ],
    ids=["iterable", "no loader", "batches", "batch sampler", "sampler", "stateful"],
)
def test_loaders_that_make_no_batches_of_all_items_are_refused(make_trainer: Make, loader: Any, words: Any) -> None:
    with pytest.raises(ConflictError, match=mentions("length_bucketing", *words)):
        fit(make_trainer, LengthBucketing(), loader())


@pytest.mark.parametrize("options", [{"lengths": [5] * 12}, {"batch_size": 1}])
def test_batches_without_padding_are_refused(make_trainer: Make, options: dict[str, Any]) -> None:
    with pytest.raises(NothingToDoError, match=mentions("length=auto", "batch_size", "~callback.length_bucketing")):
        fit(make_trainer, LengthBucketing(), texts(**options))


@pytest.mark.parametrize("technique", [LengthBucketing(), LengthBucketing(max_tokens=8)], ids=["count", "tokens"])
def test_an_empty_data_set_is_refused(make_trainer: Make, technique: LengthBucketing) -> None:
    with pytest.raises(ConflictError, match=mentions("Texts", "items", "~callback.length_bucketing")):
        fit(make_trainer, technique, texts([], shuffle=False))


def test_a_budget_of_tokens_takes_the_place_of_single_items(make_trainer: Make) -> None:
    technique = LengthBucketing(max_tokens=1000)
    fit(make_trainer, technique, texts(batch_size=1))
    assert technique.padding_before == 0.0
    assert technique.padding_after is not None


def test_a_length_that_fails_is_named_with_its_item(make_trainer: Make) -> None:
    def failing(item: Any) -> int:
        if item[1] == 7:
            raise KeyError("tokens")
        return len(item[0])

    with pytest.raises(ConflictError, match=mentions("failing", "item 7", "KeyError", "tokens")) as caught:
        fit(make_trainer, LengthBucketing(failing), texts())
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(ConflictError, match=mentions("item 0", "None", "length=collated")):
        fit(make_trainer, LengthBucketing(lambda item: None), texts())  # type: ignore[arg-type, return-value]


def test_a_budget_that_an_item_exceeds_or_that_drops_is_refused(make_trainer: Make) -> None:
    with pytest.raises(ConflictError, match=mentions("max_tokens=10", "item 2", "11")):
        fit(make_trainer, LengthBucketing(max_tokens=10), texts([3, 4, 11, 5]))
    with pytest.raises(ConflictError, match=mentions("drop_last=True", "max_tokens")):
        fit(make_trainer, LengthBucketing(max_tokens=10), texts([3, 4, 5], drop_last=True, batch_size=2))
    with pytest.raises(PresetError, match="max_tokens"):
        LengthBucketing(max_tokens=0)


def test_long_work_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_solo.data.item_lengths.REPORT_EVERY_S", -1.0)
    seen: list[tuple[int, int]] = []
    item_lengths(Texts([3, 1]), report=lambda done, count: seen.append((done, count)))
    assert seen == [(1, 2), (2, 2)]


def test_an_empty_name_of_a_length_is_refused() -> None:
    with pytest.raises(PresetError, match=mentions("length_bucketing.length", "auto", "collated")):
        LengthBucketing(length="")
