"""A curriculum: the easiest items or short sequences first, at its pace, and the same batches after a resume."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import lightning_solo as solo
from lightning_solo.data.curriculum_batches import CurriculumBatches, Pace
from lightning_solo.data.loaders import with_batches
from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError, PresetError
from lightning_solo.memory.ledger import saved_for_backward
from lightning_solo.techniques.curriculum.technique import Curriculum
from tests.conftest import long
from tests.messages import lines_with, mentions
from tests.modules import Resumable, loader
from tests.training import equal

pytestmark = pytest.mark.filterwarnings("ignore:callback.curriculum.duration")  # many fits here are short
Make = Callable[..., Any]
ITEMS, LENGTH, VOCABULARY = 60, 33, 16


class Texts(Dataset[Any]):
    """Items of tokens: of different lengths, or all of one."""

    def __init__(self, count: int = ITEMS, length: int | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        lengths = [length or 4 + 7 * index % (LENGTH - 3) for index in range(count)]
        self.items = [torch.randint(1, VOCABULARY, (size,), generator=generator) for size in lengths]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.items[index], "index": index}


def padded(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    tokens = pad_sequence([item["input_ids"] for item in items], batch_first=True)
    return {"input_ids": tokens, "index": torch.tensor([item["index"] for item in items])}


def texts(count: int = ITEMS, length: int | None = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Texts(count, length), **{"batch_size": 4, "shuffle": True, "collate_fn": padded, **options})


class Language(L.LightningModule):
    """Predicts each next token; with dropout, batch norm and a scheduler over the whole run."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch["input_ids"]
        hidden = self.norm(self.embedding(tokens[:, :-1]).transpose(1, 2)).transpose(1, 2)
        logits = self.head(self.dropout(hidden))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)
        self.log("loss", loss, batch_size=len(tokens))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        end = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, int(end))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Seen(L.Callback):
    """The batches of a fit; a checkpoint after one of them."""

    def __init__(self, save: tuple[int, Any] | None = None) -> None:
        self.batches: list[Any] = []
        self.save = save

    @property
    def items(self) -> list[list[int]]:
        return [batch["index"].tolist() for batch in self.batches]

    @property
    def lengths(self) -> list[int]:
        return [batch["input_ids"].shape[1] for batch in self.batches]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)
        if self.save is not None and len(self.batches) == self.save[0]:
            trainer.save_checkpoint(self.save[1])


def without_dropout() -> Language:
    return Language(0.0)


def fit(
    make_trainer: Make,
    technique: Any,
    data: Any,
    seen: Any = None,
    make: Callable[[], Any] = Language,
    path: Any = None,
    **arguments: Any,
) -> Any:
    """Return Trainer and module after a fit."""
    torch.manual_seed(2)
    module = make()
    techniques = technique if isinstance(technique, list) else [technique]
    callbacks = [each for each in (*techniques, seen) if each is not None]
    trainer = make_trainer(L, callbacks=callbacks, **{"max_epochs": 2, **arguments})
    trainer.fit(module, data, ckpt_path=path, weights_only=path and True)
    return trainer, module


def short(by: Any = "length", **options: Any) -> Curriculum:
    """Return a curriculum over the first 20 of 30 steps."""
    return Curriculum(by, **{"duration": 20, **options})


# --- acted: items ---


def test_share_grows_with_the_optimizer_steps_of_an_epoch() -> None:
    pace = Pace(0.25, 10)
    batches = CurriculumBatches(torch.arange(40), 4, pace, batches_per_step=3)
    list(batches.batches(0))
    assert batches.shares == [pace.share(index // 3) for index in range(10)]
    assert len(set(batches.shares)) == 4
    list(batches.batches(1))
    assert batches.shares[0] == pace.share(4)  # ten batches are four steps


@pytest.mark.parametrize("schedule", ["linear", "root"])
def test_batches_hold_the_easiest_items_alone(make_trainer: Make, schedule: Any) -> None:
    data, seen = texts(), Seen()
    fit(make_trainer, short(schedule=schedule), data, seen)
    lengths = torch.tensor([len(tokens) for tokens in data.dataset.items])  # type: ignore[attr-defined]
    rank = torch.empty(ITEMS, dtype=torch.int64)
    rank[lengths.sort(stable=True).indices] = torch.arange(ITEMS)
    for step, items in enumerate(seen.items):
        share = min(1.0, 0.1 + 0.9 * step / 20 if schedule == "linear" else (0.01 + 0.99 * step / 20) ** 0.5)
        assert int(rank[items].max()) < max(4, round(ITEMS * share))
        assert len(set(items)) == 4
    assert len(seen.items) == 30
    assert max(int(rank[items].max()) for items in seen.items) > 0.9 * ITEMS


@given(
    items=st.integers(1, 40),
    size=st.integers(1, 9),
    drop_last=st.booleans(),
    tokens=st.booleans(),
    used=st.integers(1, 9),
    duration=st.integers(1, 60),
    seed=st.integers(0, 3),
)
@settings(max_examples=60)
def test_any_epoch_is_known_from_its_number_and_ends_in_every_item_once(
    items: int, size: int, drop_last: bool, tokens: bool, used: int, duration: int, seed: int
) -> None:
    difficulty = torch.randperm(items, generator=torch.Generator().manual_seed(seed)).float()
    pace = Pace(0.2, duration)
    counted = 1 + torch.arange(items) % 3 if tokens else None
    batches = CurriculumBatches(difficulty, size, pace, drop_last, seed, counted)
    batches.batches_used = min(used, len(batches))
    position = 0
    for epoch in range(3):
        assert batches.position(epoch) == position or pace.share(position) == pace.share(batches.position(epoch)) == 1
        drawn = list(batches.batches(epoch))
        assert len(drawn) == len(batches) == len(batches.shares) == (items // size if drop_last else -(-items // size))
        assert list(batches.batches(epoch)) == drawn
        for index, batch in enumerate(drawn):
            assert len(set(batch)) == len(batch) <= size
            assert max(difficulty[batch]) < max(size, round(items * batches.shares[index]))
            if index < batches.batches_used:
                assert batches.shares[index] == pace.share(position)
                position += 1 if counted is None else int(counted[batch].sum())
        if drawn and batches.shares[0] == 1:
            kept = list(itertools.chain.from_iterable(drawn))
            assert len(kept) == len(set(kept)) == items - (items % size if drop_last else 0)


def test_sources_of_difficulty(make_trainer: Make) -> None:
    def easiest(by: Any, data: Any, **options: Any) -> list[int]:
        seen = Seen()
        fit(make_trainer, Curriculum(by, duration=10**6, **options), data, seen, max_steps=8)
        return sorted(set(itertools.chain.from_iterable(seen.items)))

    data = texts(40)
    items = data.dataset.items  # type: ignore[attr-defined]
    by_length = sorted(sorted(range(40), key=lambda index: len(items[index]))[:4])
    assert easiest("length", data) == easiest("collated", data) == by_length
    assert easiest("input_ids", data) == by_length
    assert easiest("index", data) == [0, 1, 2, 3]
    assert easiest(lambda item: -0.5 * item["index"], data) == [36, 37, 38, 39]

    torch.manual_seed(2)
    module = Language()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    module.eval()
    losses = torch.stack([module.training_step(padded([data.dataset[index]]), 0) for index in range(40)])
    technique = Curriculum("loss", duration=10**6)
    seen = Seen()
    fit(make_trainer, technique, data, seen, max_steps=8)
    assert torch.equal(technique.state_dict()["losses"], losses.detach())
    assert sorted(set(itertools.chain.from_iterable(seen.items))) == sorted(losses.sort().indices[:4].tolist())


@pytest.mark.parametrize("factor", [1, 3])
def test_steps_are_optimizer_steps_and_tokens_those_of_the_items(make_trainer: Make, factor: int) -> None:
    technique, seen = short(duration=5), Seen()
    fit(make_trainer, technique, texts(48), seen, accumulate_grad_batches=factor, max_epochs=3, limit_train_batches=7)
    steps = -(-7 // factor)  # of an epoch
    assert technique._batches is not None
    assert technique._batches.position(2) == 2 * steps
    technique, seen = Curriculum(duration=800, pace="tokens"), Seen()
    fit(make_trainer, technique, texts(48), seen, accumulate_grad_batches=factor, max_epochs=3, limit_train_batches=7)
    assert technique._batches is not None
    tokens = [int((batch["input_ids"] != 0).sum()) for batch in seen.batches]
    assert technique._batches.position(1) == sum(tokens[:7]) < 800
    assert technique._batches.position(2) == sum(tokens[:14])


def test_losses_are_new_in_each_epoch_that_reloads_the_loader(make_trainer: Make) -> None:
    technique, kept = short("loss"), list[Any]()

    class Look(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                kept.append((technique.state_dict()["begun"], technique.state_dict()["losses"]))

    fit(make_trainer, technique, texts(), Look(), reload_dataloaders_every_n_epochs=1)
    assert [begun for begun, _ in kept] == [(0, 0), (1, 15)]
    assert float(kept[1][1].mean()) < float(kept[0][1].mean())


# --- acted: sequences ---


@pytest.mark.parametrize("schedule", ["linear", "root"])
def test_sequences_grow_to_their_length(make_trainer: Make, schedule: Any) -> None:
    seen = Seen()
    fit(make_trainer, short("sequence_length", schedule=schedule, duration=10), texts(length=LENGTH), seen)
    assert sorted(set(seen.lengths)) == [9, 17, 25, 33]  # 33 less a multiple of 8
    assert seen.lengths == sorted(seen.lengths)
    for step, length in enumerate(seen.lengths):
        share = min(1.0, 0.1 + 0.9 * step / 10 if schedule == "linear" else (0.01 + 0.99 * step / 10) ** 0.5)
        assert share * LENGTH <= length
        assert length < share * LENGTH + 8 or length == 9


def test_sequences_grow_by_tokens_and_with_any_loader(make_trainer: Make) -> None:
    batches = [{"input_ids": torch.ones(4, 33, dtype=torch.int64), "index": torch.zeros(4)} for _ in range(12)]
    seen = Seen()
    fit(
        make_trainer, Curriculum("sequence_length", duration=400, pace="tokens"), Resumable(batches), seen, max_epochs=1
    )
    tokens = 0
    for length in seen.lengths:
        share = min(1.0, 0.1 + 0.9 * tokens / 400)
        assert length == max(9, 33 - 8 * int((1 - share) * 33 / 8))
        tokens += 4 * length
    assert seen.lengths[-1] == 33


def test_a_step_has_batches_of_one_length(make_trainer: Make) -> None:
    seen = Seen()
    schedule = solo.AccumulationSchedule([[0, 3], [2, 2]], by="step")
    technique = short("sequence_length", duration=6, multiple=1)
    make_trainer(L, callbacks=[technique, seen, schedule]).fit(Language(), texts(length=LENGTH))
    assert seen.lengths[:6] == [4, 4, 4, 9, 9, 9]
    assert seen.lengths[6] == seen.lengths[7] == 14


def test_a_step_has_batches_of_one_length_by_tokens_too_and_where_it_is_resumed(
    make_trainer: Make, tmp_path: Any
) -> None:
    path, whole, rest = str(tmp_path / "middle.ckpt"), Seen(), Seen()
    whole.save = 6, path  # in the middle of a step

    def run(seen: Seen, path: Any = None) -> None:
        technique = Curriculum("sequence_length", duration=800, pace="tokens", multiple=1)
        data = Resumable(list(texts(64, LENGTH, shuffle=False)))
        fit(make_trainer, technique, data, seen, path=path, max_epochs=1, accumulate_grad_batches=4)

    run(whole)
    assert [len(set(whole.lengths[first : first + 4])) for first in range(0, 16, 4)] == [1, 1, 1, 1]
    assert len(set(whole.lengths)) == 4
    run(rest, path)
    assert rest.lengths == whole.lengths[6:]


def test_tokens_count_where_the_module_steps_unseen(make_trainer: Make) -> None:
    class Manual(Language):
        automatic_optimization = False

    seen = Seen()
    technique = Curriculum("sequence_length", duration=400, pace="tokens")
    fit(make_trainer, technique, texts(length=LENGTH), seen, Manual, max_epochs=1)
    assert seen.lengths[0] == 9
    assert seen.lengths[-1] == LENGTH


def test_shorter_sequences_are_unchanged(make_trainer: Make) -> None:
    seen = Seen()
    fit(make_trainer, short("sequence_length", duration=60, start=0.5), texts(batch_size=1, shuffle=False), seen)
    whole = [batch["input_ids"].shape[1] for batch in texts(batch_size=1, shuffle=False)] * 2
    assert len({length == there for length, there in zip(seen.lengths[:30], whole, strict=False)}) == 2
    for step, (length, there) in enumerate(zip(seen.lengths, whole, strict=True)):
        longest = max(whole[: step + 1])
        kept = longest - 8 * min(max(0, longest - 8) // 8, int((0.5 - 0.5 * step / 60) * longest / 8))
        assert length == min(there, kept)


def test_changes_are_logged(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    class Logger(L.loggers.logger.DummyLogger):
        def __init__(self) -> None:
            super().__init__()
            self.values: list[dict[str, float]] = []

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            self.values += [metrics] if next(iter(metrics)).startswith("curriculum") else []

    lengths, shares = Logger(), Logger()
    with caplog.at_level(logging.INFO):
        fit(make_trainer, short("sequence_length"), texts(length=LENGTH), logger=lengths, log_every_n_steps=1)
    assert len(lines_with(caplog.text, "curriculum", "10%", "20 steps")) == 1
    assert lengths.values == [{"curriculum/sequence_length": length} for length in (9, 17, 25, 33)]
    fit(make_trainer, short(), texts(), logger=shares, log_every_n_steps=1)
    assert [value["curriculum/share"] for value in shares.values][:3] == [0.1, 0.15, 0.19]  # 0.145 rounded
    assert shares.values[-1] == {"curriculum/share": 1.0}


# --- parity: the same numbers from the same batches ---


@pytest.mark.any_device
def test_weights_are_those_of_the_same_batches_without_it(make_trainer: Make) -> None:
    _, module = fit(make_trainer, short(), texts(), seen := Seen(), without_dropout)
    data = Texts()
    batches = [padded([data[index] for index in items]) for items in seen.items]
    _, reference = fit(make_trainer, None, Resumable(batches), None, without_dropout, max_epochs=1)
    assert equal(module, reference)
    torch.manual_seed(2)
    assert not equal(module.cpu(), without_dropout())


@pytest.mark.any_device
def test_taking_losses_changes_nothing_else(make_trainer: Make) -> None:
    class Noisy(Language):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.count += 1
            return super().training_step(batch, batch_idx) * (1 + torch.rand((), device=self.device) * self.count)

    technique, seen, again = short("loss"), Seen(), Seen()
    _, module = fit(make_trainer, technique, texts(), seen, Noisy)
    losses = technique.state_dict()["losses"]
    _, known = fit(make_trainer, short(lambda item: float(losses[item["index"]])), texts(), again, Noisy)
    assert seen.items == again.items
    assert equal(module, known)
    assert module.count == 30


@pytest.mark.any_device
def test_weights_are_those_of_sequences_cut_by_hand(make_trainer: Make) -> None:
    seen = Seen()
    data = texts(length=LENGTH, shuffle=False)
    _, module = fit(make_trainer, short("sequence_length"), data, seen, without_dropout, max_epochs=1)
    cut = [
        {**batch, "input_ids": batch["input_ids"][:, :length].clone()}
        for batch, length in zip(data, seen.lengths, strict=True)
    ]
    _, reference = fit(make_trainer, None, Resumable(cut), None, without_dropout, max_epochs=1)
    assert equal(module, reference)
    assert len(set(seen.lengths)) > 1


def test_validation_has_whole_sequences(make_trainer: Make) -> None:
    lengths: list[int] = []
    module = Language()
    module.validation_step = lambda batch, batch_idx: lengths.append(batch["input_ids"].shape[1])
    trainer = make_trainer(L, callbacks=[short("sequence_length")], val_check_interval=5, num_sanity_val_steps=1)
    trainer.fit(module, texts(length=LENGTH), texts(8, LENGTH, shuffle=False))
    assert set(lengths) == {LENGTH}


# --- memory ---


def test_bytes_saved_for_backward_are_proportional_to_the_length(make_trainer: Make) -> None:
    saved: dict[int, int] = {}

    class Measured(Language):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            tokens = batch["input_ids"]
            assert tokens.untyped_storage().nbytes() == tokens.numel() * tokens.element_size()  # the whole isn't kept
            hidden, saved[tokens.shape[1]] = saved_for_backward(lambda: self.head(self.embedding(tokens)).relu())
            return hidden.mean()

    fit(make_trainer, short("sequence_length"), texts(length=32), make=Measured, max_epochs=1)
    # fp32: of each token the embedding of 8 and the logits of 16, once as relu's result
    assert {length: each / (4 * length) for length, each in saved.items()} == dict.fromkeys((8, 16, 24), 4 * (8 + 16))


def test_a_checkpoint_has_four_bytes_per_item(make_trainer: Make) -> None:
    technique = short("loss")
    fit(make_trainer, technique, texts(50), max_steps=1)
    losses = technique.state_dict()["losses"]
    assert losses.numel() * losses.element_size() == 4 * 50
    other = short()
    fit(make_trainer, other, texts(), max_steps=1)
    assert other.state_dict() == {"begun": (0, 0), "losses": None}


# --- trace, and resuming ---

KINDS: dict[str, dict[str, Any]] = {
    "length": {"by": "length"},
    "tokens": {"by": "length", "pace": "tokens", "duration": 900},
    "loss": {"by": "loss"},
    "sequences": {"by": "sequence_length"},
    "tokens of sequences": {"by": "sequence_length", "pace": "tokens", "duration": 2500},
}


@pytest.mark.parametrize(
    ("kind", "after", "options"),
    [
        ("length", 7, {}),
        ("tokens", 17, {}),
        ("loss", 7, {}),
        ("sequences", 18, {}),
        ("tokens of sequences", 7, {}),
        ("loss", 18, {"reload_dataloaders_every_n_epochs": 1}),
        ("loss", 15, {"reload_dataloaders_every_n_epochs": 1}),
        ("tokens", 9, {"limit_train_batches": 5, "max_epochs": 4}),
        long("loss", 7, {"num_workers": 2}),
        long("tokens", 17, {"num_workers": 2}),
        long("tokens of sequences", 7, {"num_workers": 2}),
        long("length", 15, {"num_workers": 2, "accumulate_grad_batches": 2}),
    ],
)
def test_a_resumed_run_has_the_batches_and_weights_of_the_undisturbed_one(
    make_trainer: Make, tmp_path: Any, kind: str, after: int, options: dict[str, Any]
) -> None:
    def run(seen: Seen, path: Any = None) -> Any:
        arguments = {"max_epochs": 3, **options}
        data = texts(num_workers=arguments.pop("num_workers", 0))
        techniques: list[Any] = [short(**KINDS[kind])]
        if "sequences" in kind:
            techniques += (
                [solo.LengthBucketing(), solo.Prefetch()] if not data.num_workers else [solo.LengthBucketing()]
            )
        # without dropout: random numbers aren't in a checkpoint
        return fit(make_trainer, techniques, data, seen, without_dropout, path, **arguments)

    path = str(tmp_path / "middle.ckpt")
    whole, rest = Seen((after, path)), Seen()
    _, module = run(whole)
    _, resumed = run(rest, path)
    assert 0 < len(rest.batches) == len(whole.batches) - after
    for one, other in zip(rest.batches, whole.batches[after:], strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
    assert equal(resumed, module)


def test_a_second_fit_of_the_trainer_continues_and_another_trainer_begins(make_trainer: Make) -> None:
    technique, seen = short("sequence_length"), Seen()
    trainer, module = fit(make_trainer, technique, texts(length=LENGTH), seen, max_epochs=1)
    assert seen.lengths[-1] < LENGTH
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, texts(length=LENGTH))
    assert seen.lengths[-1] == LENGTH
    assert seen.lengths[15] > 9
    assert "batch_to_device" not in vars(trainer.strategy)
    again = Seen()
    fit(make_trainer, technique, texts(length=LENGTH), again, max_epochs=1)
    assert again.lengths == seen.lengths[:15]


def test_an_epoch_of_other_batches_is_not_continued_at_its_start_either() -> None:
    first, other = (
        with_batches(texts(), CurriculumBatches(torch.arange(60.0), size, Pace(0.2, 20))) for size in (4, 5)
    )
    with pytest.raises(CheckpointError, match=mentions("batches: 15", "12 here")):
        other.load_state_dict(first.state_dict())


def test_two_seeds_draw_different_items(make_trainer: Make) -> None:
    drawn = []
    for seed in (0, 0, 1):
        seen = Seen()
        fit(make_trainer, short(seed=seed), texts(), seen, max_epochs=1)
        drawn.append(seen.items)
    assert drawn[0] == drawn[1] != drawn[2]


# --- what is refused ---


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"start": 1.0}, ["start", "between 0 and 1"]),
        ({"start": 0}, ["start", "between 0 and 1"]),
        ({"duration": 0}, ["duration", "at least 1"]),
        ({"schedule": "cosine"}, ["schedule", "'root'"]),
        ({"pace": "epochs"}, ["pace", "'tokens'"]),
        ({"by": ""}, ["by", "sequence_length"]),
        ({"multiple": 0}, ["multiple"]),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: Any, words: list[str]) -> None:
    with pytest.raises(PresetError, match=mentions(*words)):
        Curriculum(**settings)


@pytest.mark.parametrize("by", ["length", "loss"])
def test_loaders_that_make_no_batches_of_all_items_are_refused(make_trainer: Make, by: str) -> None:
    with pytest.raises(ConflictError, match=mentions("curriculum", "Resumable", "DataLoader")):
        fit(make_trainer, short(by), Resumable([]))
    with pytest.raises(ConflictError, match=mentions("several", "by=sequence_length")):
        fit(make_trainer, short(by), {"one": texts(), "other": texts()})


def test_a_difficulty_that_fails_is_named_with_its_item(make_trainer: Make) -> None:
    def failing(item: Any) -> float:
        return {7: float("nan")}.get(item["index"], 1 / (9 - item["index"]))

    with pytest.raises(ConflictError, match=mentions("by=failing", "item 7", "nan")):
        fit(make_trainer, short(failing), texts())
    with pytest.raises(ConflictError, match=mentions("item 0", "ZeroDivisionError", "column")) as caught:
        fit(make_trainer, short(lambda item: failing({"index": item["index"] + 9})), texts())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(ConflictError, match=mentions("by=words", "item 0", "KeyError", "column")):
        fit(make_trainer, short("words"), texts())


def test_a_loss_that_fails_is_named_with_its_item_and_nothing_is_left(make_trainer: Make) -> None:
    class Fails(Language):
        raises = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.raises:
                raise KeyError("tokens")
            return {"loss": loss * (float("inf") if 3 in batch["index"] else 1)}

    module = Fails()
    with pytest.raises(ConflictError, match=mentions("by=loss", "item 3", "inf")):
        fit(make_trainer, short("loss"), texts(), make=lambda: module)
    assert module.training
    assert module.norm.num_batches_tracked == 0
    module.raises = True
    with pytest.raises(ConflictError, match=mentions("by=loss", "item 0", "KeyError", "column")) as caught:
        fit(make_trainer, short("loss"), texts(), make=lambda: module)
    assert isinstance(caught.value.__cause__, KeyError)
    module.automatic_optimization = False
    with pytest.raises(ConflictError, match=mentions("by=loss", "automatic_optimization=False", "column")):
        fit(make_trainer, short("loss"), texts(), make=lambda: module)


def test_equal_items_and_short_sequences_are_refused(make_trainer: Make) -> None:
    with pytest.raises(NothingToDoError, match=mentions("by=length", "33", "by=sequence_length")):
        fit(make_trainer, short(), texts(length=LENGTH))
    with pytest.raises(NothingToDoError, match=mentions("batch_size", "4", "3 items")):
        fit(make_trainer, short(), texts(3))
    for batches, limits in [(3, {}), (30, {}), (30, {"max_steps": 2})]:
        with pytest.raises(NothingToDoError, match=mentions("start=0.1", "multiple=8", "7")):
            fit(make_trainer, short("sequence_length", duration=2), texts(4 * batches, length=7), **limits)


def test_batches_without_sequences_are_refused_with_their_shapes(make_trainer: Make) -> None:
    with pytest.raises(ConflictError, match=mentions("(4, 8)", "(4, 1)", "(batch, sequence)", "another by")):
        fit(make_trainer, short("sequence_length"), loader())


class Answers(Texts):
    """Items with prompts, whose labels don't count."""

    def __init__(self, prompt: int) -> None:
        super().__init__(length=LENGTH)
        self.prompt = prompt

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels = self.items[index].clone()
        labels[: self.prompt] = -100
        return {**super().__getitem__(index), "labels": labels}


def test_batches_that_lose_all_labels_are_warned_of_once(make_trainer: Make, recwarn: Any) -> None:
    technique = short("sequence_length", start=0.5)  # 17 places
    fit(make_trainer, technique, DataLoader(Answers(16), batch_size=4), max_epochs=2)
    assert not [each for each in recwarn if "labels" in str(each.message)]
    for _ in range(2):
        with pytest.warns(UserWarning, match=mentions("17", "33", "labels", "-100", "nan", "start")) as warned:
            fit(make_trainer, technique, DataLoader(Answers(26), batch_size=4), max_epochs=2)
        assert len([each for each in warned if "labels" in str(each.message)]) == 1


def test_sequences_padded_on_the_left_are_refused(make_trainer: Make) -> None:
    def collate(left: bool, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = padded(items)
        batch["attention_mask"] = batch["input_ids"].ne(0).long()
        return {key: value.flip(1) if left and value.ndim == 2 else value for key, value in batch.items()}

    technique = short("sequence_length")
    fit(make_trainer, technique, texts(collate_fn=lambda items: collate(False, items)))
    with pytest.raises(ConflictError, match=mentions("attention_mask", "padding_side='right'")):
        fit(make_trainer, technique, texts(collate_fn=lambda items: collate(True, items)))


def test_labels_and_masks_are_read_of_the_first_batches_alone(make_trainer: Make, monkeypatch: Any) -> None:
    from lightning_solo.techniques.curriculum import technique as its

    looks: list[Any] = []
    monkeypatch.setattr(its, "is_left_padded", lambda batch: looks.append(batch))
    fit(make_trainer, short("sequence_length", duration=100), texts(length=LENGTH))
    assert len(looks) == its.LOOKED_AT


def test_lightnings_schedule_of_accumulation_is_refused_where_items_go_by_steps(make_trainer: Make) -> None:
    schedule = L.callbacks.GradientAccumulationScheduler
    for by in ("length", "loss"):
        with pytest.raises(ConflictError, match=mentions("GradientAccumulationScheduler", "pace=tokens")):
            fit(make_trainer, [short(by), schedule({0: 4})], texts())
    fit(make_trainer, [short(pace="tokens", duration=100), schedule({0: 4})], texts())
    seen = Seen()
    technique = short("sequence_length", duration=4)
    fit(make_trainer, [technique, schedule({0: 4})], texts(length=LENGTH), seen, max_epochs=1)
    assert len(set(seen.lengths[:4])) == 1
    assert len(set(seen.lengths)) > 1


def test_steps_that_are_not_known_beforehand_are_refused(make_trainer: Make) -> None:
    both = {"callback": {"curriculum": {}, "accumulation_schedule": {}}}
    words = ("callback.curriculum", "callback.accumulation_schedule", "pace=tokens", "accumulate_grad_batches")
    with pytest.raises(ConflictError, match=mentions(*words)):
        solo.trainer_kwargs(both)
    with pytest.raises(ConflictError, match=mentions(*words)):
        make_trainer(L, callbacks=[short(), solo.AccumulationSchedule()]).fit(Language(), texts())
    for curriculum in ({"by": "sequence_length"}, {"pace": "tokens"}):
        both["callback"]["curriculum"] = curriculum
        assert len(solo.trainer_kwargs(both)["callbacks"]) > 1
    with pytest.raises(ConflictError, match=mentions("callback.length_bucketing", "callback.curriculum", "batches")):
        solo.trainer_kwargs({"callback": {"curriculum": {}, "length_bucketing": {}}})


def test_duration_beyond_training_warns(make_trainer: Make) -> None:
    with pytest.warns(UserWarning, match=mentions("30", "duration=31")):
        fit(make_trainer, short(duration=31), texts())
    with pytest.warns(UserWarning, match=mentions("4", "duration=20")):
        fit(make_trainer, short("sequence_length"), texts(length=LENGTH), max_steps=4)


def test_checkpoint_of_another_curriculum_is_refused(make_trainer: Make, tmp_path: Any) -> None:
    path = str(tmp_path / "other.ckpt")
    fit(make_trainer, short("loss"), texts(), Seen((3, path)))
    for other in (short(), short("sequence_length")):
        with pytest.raises(CheckpointError, match=mentions(f"by={other.by}")):
            fit(make_trainer, other, texts(length=LENGTH), path=path)
    with pytest.raises(CheckpointError, match=mentions("60", "59")):
        fit(make_trainer, short("loss"), texts(59), path=path)


def test_reading_is_reported(make_trainer: Make, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr("lightning_solo.data.item_lengths.REPORT_EVERY_S", -1.0)
    for by in ("length", "loss"):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            fit(make_trainer, short(by), texts(8), max_steps=1)
        assert "8 of 8" in caplog.text
        assert f"by {by}" in caplog.text
