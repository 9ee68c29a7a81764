"""Item cache loads each item once, within its budget, trains bit for bit as a plain run does, and leaves no file."""

from __future__ import annotations

import os
import pickle
from collections import Counter, namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_solo import trainer_kwargs
from lightning_solo.data.item_cache import CachedItems, ItemStore, packed
from lightning_solo.errors import ConflictError
from lightning_solo.techniques.curriculum.technique import Curriculum
from lightning_solo.techniques.item_cache.technique import ItemCache
from lightning_solo.techniques.length_bucketing.technique import LengthBucketing
from lightning_solo.techniques.loader_advice.savings import Loading, savings
from lightning_solo.techniques.loader_advice.times import Times
from lightning_solo.techniques.packing.technique import Packing
from lightning_solo.techniques.prefetch.technique import Prefetch
from lightning_solo.units import KiB, MiB
from tests.messages import mentions
from tests.modules import Documents, classification, documents, loader, regression
from tests.training import equal, fit

Make = Callable[..., Any]
Pair = namedtuple("Pair", "x y")


class Rows(Dataset[Any]):
    """Rows of a file-like source, whose loads are counted in a folder, also those in workers."""

    def __init__(self, log: Path) -> None:
        self.rows = list(loader(6).dataset)
        self.log = log

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        with self.log.open("a") as file:
            file.write(f"{index}\n")
        return self.rows[index]

    def loads(self) -> Counter[str]:
        return Counter(self.log.read_text().split())


def stored_files() -> list[str]:
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if os.path.islink(link) and "item_cache" in os.readlink(link)]


# --- acted, parity and no trace ---


def test_workers_that_store_at_the_same_time_lose_nothing() -> None:
    store = ItemStore(count := 4000, MiB)
    cached = CachedItems(range(count), store)
    list(DataLoader(cached, batch_size=20, num_workers=2))
    stored = [store.get(index) for index in range(count)]
    assert store.items == count
    assert store.bytes_used == sum(len(each) for each in stored if each is not None)
    assert [pickle.loads(each) for each in stored if each is not None] == list(range(count))


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_items_are_loaded_once(
    home: ModuleType, make_trainer: Make, tmp_path: Path, place: str, options: dict[str, Any]
) -> None:
    def trained(name: str, *callbacks: Any) -> tuple[Any, Counter[str]]:
        data = Rows(tmp_path / name)
        batches = DataLoader(data, 4, shuffle=True, **options)
        module = fit(make_trainer, *callbacks, home=home, data=batches, max_epochs=3)
        assert batches.dataset is data
        return module, data.loads()

    folder = str(tmp_path) if place == "disk" else None
    plain, each = trained("plain")
    cached, once = trained("cached", ItemCache(place=place, folder=folder))
    assert set(each.values()) == {3}
    probes = sum(once.values()) - 24
    assert probes == 2 * 8
    assert set(once.values()) == {1, 3}
    assert equal(plain, cached)
    assert not stored_files()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cached", "plain"]


def test_a_failed_fit_leaves_no_file(make_trainer: Make, tmp_path: Path) -> None:
    module = regression(L)

    def failing(batch: Any, batch_idx: int) -> Any:
        assert stored_files()
        raise RuntimeError("failed")

    module.training_step = failing
    with pytest.raises(RuntimeError, match="failed"):
        fit(make_trainer, ItemCache(place="disk", folder=str(tmp_path)), module=module)
    assert not stored_files()
    assert not list(tmp_path.iterdir())


class LoggedDocuments(Documents):
    """Documents whose loads are counted in a file."""

    log: Path

    def __getitem__(self, index: int) -> Any:
        with self.log.open("a") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)


OTHERS = {
    "prefetch": Prefetch,
    "length_bucketing": LengthBucketing,
    "packing": Packing,
    "curriculum": partial(Curriculum, by="length", duration=4, start=0.5),
}


@pytest.mark.filterwarnings("ignore:callback.curriculum.duration")
@pytest.mark.parametrize("name", OTHERS)
def test_parity_with_other_techniques_of_the_loader(make_trainer: Make, name: str, tmp_path: Path) -> None:
    def trained(which: str, *callbacks: Any) -> tuple[Any, list[int]]:
        torch.manual_seed(3)
        batches = documents()
        batches.dataset.__class__ = LoggedDocuments
        batches.dataset.log = tmp_path / which
        counts: list[int] = []

        class Loads(L.Callback):
            def on_train_epoch_end(self, *_: Any) -> None:
                counts.append(len(batches.dataset.log.read_text().split()))

        every = [OTHERS[name](), *callbacks, Loads()]
        return fit(make_trainer, *every, module=classification(L), data=batches, max_epochs=3), counts

    plain, each = trained("plain")
    cached, once = trained("cached", ItemCache())
    assert each[2] > each[1] > each[0]
    assert once[2] == once[1] if name != "curriculum" else once[2] - once[1] < each[2] - each[1]
    assert equal(plain, cached)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_run_that_resumes_within_an_epoch_is_the_same(make_trainer: Make, tmp_path: Path) -> None:
    """Its cache is empty again."""

    def trained(path: Path | None, *callbacks: Any, **arguments: Any) -> Any:
        torch.manual_seed(1)
        module = classification(L)
        trainer = make_trainer(L, callbacks=[LengthBucketing(), ItemCache(), *callbacks], **arguments)
        trainer.fit(module, documents(), ckpt_path=path, weights_only=True)
        return module

    whole = trained(None, max_epochs=2)
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    trained(None, saves, max_steps=2, enable_checkpointing=True)
    (path,) = tmp_path.glob("*.ckpt")
    assert equal(whole, trained(path, max_epochs=2))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`")
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_are_spawned_share_the_cache(make_trainer: Make, tmp_path: Path, persistent: bool) -> None:
    data = Rows(tmp_path / "log")
    options = {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": persistent}
    fit(make_trainer, ItemCache(), data=DataLoader(data, 4, **options), max_epochs=3)
    assert set(data.loads().values()) == {1, 3}  # items that are loaded twice for the check


def test_what_is_cached_is_said(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(make_trainer, ItemCache(), max_epochs=2)
    lines = [line for line in caplog.messages if line.startswith("item_cache")]
    assert len(lines) == 1
    assert "40 of 40 items (100.0%)" in lines[0]


# --- memory ---


def test_bytes_stay_within_the_budget() -> None:
    data = [torch.full((KiB,), index, dtype=torch.uint8) for index in range(10)]
    each = len(packed(data[0]))
    store = ItemStore(10, 4 * each + 1)
    items = CachedItems(data, store)
    for _ in range(2):
        assert equal([items[index] for index in range(10)], data)
    assert (store.items, store.bytes_used, store.is_full) == (4, 4 * each, True)
    store.close()
    assert equal([items[index] for index in range(10)], data)


def test_a_view_takes_its_own_bytes_only() -> None:
    assert len(packed(torch.zeros(MiB)[:8])) < KiB


# --- items ---


def test_items_come_back_equal_in_memory_of_their_own() -> None:
    item = {
        "pair": Pair(torch.randn(3, 4).t(), torch.randn(2).bfloat16()),
        "array": np.arange(6).reshape(2, 3),
        "rest": [1, 2.5, "text", None, torch.empty(0, 3), torch.tensor(float("nan"))],
        "image": torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
    }
    store = ItemStore(1, MiB)
    items = CachedItems([item], store)
    assert items[0] is item
    one, other = items[0], items[-1]
    assert one is not item
    assert packed(one) == packed(item)
    assert one["pair"].x.stride() == item["pair"].x.stride()
    one["pair"].x.zero_()
    assert equal(other["pair"].x, item["pair"].x)
    copy = pickle.loads(pickle.dumps(items))  # as spawned workers get it
    assert packed(copy[0]) == packed(item)
    assert copy.store.items == 1


def test_an_item_that_cannot_be_stored_is_named_and_loaded_each_time() -> None:
    store = ItemStore(2, MiB)
    item = torch.zeros(2, requires_grad=True)
    items = CachedItems([item, 1], store)
    assert items.__getitems__([0, 1, 0]) == [item, 1, item]
    assert store.items == 1
    assert "item 0" in store.unstored


# --- advice ---


def test_advice_to_cache_works_when_it_is_pasted() -> None:
    times, data = Times(batches=10, total_s=6.0, wait_s=4.0, copy_s=0.0, load_s=4.0), loader(2)
    advised = {each.option: each.write for each in savings(times, Loading.of(data), cores=1, cuda=False)}
    override = advised["caching"].split()[0]
    (cache,) = (each for each in trainer_kwargs("bf16", [override])["callbacks"] if isinstance(each, ItemCache))
    assert cache.budget == "4GiB"
    cached = DataLoader(CachedItems(data.dataset, ItemStore(8, MiB)))
    assert "caching" not in {each.option for each in savings(times, Loading.of(cached), cores=1, cuda=False)}
    streamed = savings(times, Loading.of(DataLoader(Stream())), cores=1, cuda=False)
    assert not any("item_cache" in each.write for each in streamed)


# --- refused ---


class Noisy(Rows):
    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        return x + torch.rand(()), y


class Counting(Rows):
    count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        x, y = self.rows[index]
        return x + self.count, y


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(loader(2).dataset)  # type: ignore[call-overload]


@pytest.mark.parametrize(("kind", "word"), [(Noisy, "draws"), (Counting, "differs")])
def test_changing_items_are_refused(make_trainer: Make, tmp_path: Path, kind: Any, word: str) -> None:
    with pytest.raises(ConflictError, match=mentions("item_cache", kind.__name__, word, "~callback.item_cache")):
        fit(make_trainer, ItemCache(), data=DataLoader(kind(tmp_path / "log"), 4))


def test_loaders_without_indexed_items_are_refused(make_trainer: Make) -> None:
    for data in (DataLoader(Stream(), 4), [(torch.zeros(4, 8), torch.zeros(4, 1))]):
        with pytest.raises(ConflictError, match=mentions("item_cache", "~callback.item_cache")):
            fit(make_trainer, ItemCache(), data=data)
