"""LoaderAdvice: exact seconds by a clock under the test's control, bounds that hold, and a loader left as it was."""

from __future__ import annotations

import copy
import gc
import logging
import math
import pickle
import re
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lightning_solo.data.prefetch import Prefetcher
from lightning_solo.errors import PresetError
from lightning_solo.techniques.loader_advice import technique, times
from lightning_solo.techniques.loader_advice.savings import Loading, savings
from lightning_solo.techniques.loader_advice.technique import LoaderAdvice
from lightning_solo.techniques.loader_advice.times import DeviceClock, Times, Watch
from tests.messages import mentions
from tests.modules import loader, regression
from tests.techniques.test_memory_logger import recording_logger

Make = Callable[..., Any]
CORES = 16


class Clock:
    """The host's clock, and when a device will have done its work; both stand still until they are moved."""

    def __init__(self) -> None:
        self.now = self.device_is_done = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def launch(self, seconds: float) -> None:
        """Add work to the device, which runs in parallel to the host and after the device's earlier work."""
        self.device_is_done = max(self.device_is_done, self.now) + seconds

    def event(self, *, enable_timing: bool) -> Any:
        """Return an object that replaces a CUDA event."""
        assert enable_timing
        clock = self

        class Event:
            at = math.inf

            def record(self, stream: Any) -> None:
                self.at = max(clock.now, clock.device_is_done)

            def query(self) -> bool:
                return self.at <= clock.now

            def synchronize(self) -> None:
                clock.now = max(clock.now, self.at)

            def elapsed_time(self, other: Any) -> float:
                assert other.at <= clock.now
                return 1000 * float(other.at - self.at)

        return Event()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(times, "perf_counter", clock)
    monkeypatch.setattr(technique, "usable_cores", lambda: CORES)
    return clock


class Slow(Dataset[Any]):
    """Items that take some seconds each, of a clock."""

    def __init__(self, clock: Clock, seconds: float, items: int = 8) -> None:
        self.clock, self.seconds, self.items = clock, seconds, items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= self.items:
            raise IndexError
        self.clock.advance(self.seconds)
        return torch.full((8,), float(index)), torch.zeros(1)


class WithWorkers:
    """A loader that says it has workers, which take some seconds to start and are waited for."""

    num_workers = 2

    def __init__(self, clock: Clock, start: float, wait: float, *, persistent: bool = False) -> None:
        self.clock, self.start, self.wait, self.persistent_workers = clock, start, wait, persistent

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        self.clock.advance(self.start)
        return self.batches()

    def batches(self) -> Iterator[Any]:
        for batch in loader(4):
            self.clock.advance(self.wait)
            yield batch


def stepping(clock: Clock, seconds: float, home: ModuleType = L) -> Any:
    """Return a module whose steps take some seconds, those of its validation 50."""
    module = regression(home)
    step, validation_step = module.training_step, module.validation_step
    module.training_step = lambda batch, batch_idx: (clock.advance(seconds), step(batch, batch_idx))[1]
    module.validation_step = lambda batch, batch_idx: (clock.advance(50), validation_step(batch, batch_idx))[1]
    return module


def advice(make_trainer: Make, module: Any, data: Any, *more: Any, home: ModuleType = L, **arguments: Any) -> Any:
    """Return what was observed in a fit of two epochs."""
    observer = LoaderAdvice()
    trainer = make_trainer(home, **{"accelerator": "cpu", "max_epochs": 2, "callbacks": [observer], **arguments})
    trainer.fit(module, data, *more)
    return observer


def saved(observer: LoaderAdvice) -> dict[str, float]:
    return {saving.option: saving.seconds for saving in observer.savings}


# --- acted: each piece of advice, where there is reason for it ---


def test_slow_items(home: ModuleType, make_trainer: Make, clock: Clock) -> None:
    def collate(samples: Any) -> Any:
        clock.advance(5)
        return default_collate(samples)

    data = DataLoader(Slow(clock, seconds=10), batch_size=2, collate_fn=collate)
    observer = advice(make_trainer, stepping(clock, 7, home), data, home=home)
    # 2 epochs of 4 batches, the first one left out: 7 x (2 items of 10 + 5), and 7 steps of 7
    assert observer.times == Times(
        batches=7, total_s=7 * 32, wait_s=7 * 25, copy_s=0, load_s=7 * 25, collate_s=7 * 5, is_pageable=False
    )
    assert (observer.times.step_s, observer.times.items_s) == (7 * 7, 7 * 20)
    assert saved(observer) == {"num_workers": 7 * 25, "caching": 7 * 20, "prefetch": 7 * 7}
    assert observer.savings[0].write == "DataLoader(num_workers=4)"  # 25 / 4 is the first that is below 7
    assert observer.savings[0].share == 25 / 32


def test_slow_collation_leaves_nothing_to_cache(make_trainer: Make, clock: Clock) -> None:
    def collate(samples: Any) -> Any:
        clock.advance(20)
        return default_collate(samples)

    observer = advice(make_trainer, stepping(clock, 30), DataLoader(Slow(clock, 0), 2, collate_fn=collate))
    assert saved(observer) == {"num_workers": 7 * 20, "prefetch": 7 * 20}
    assert observer.savings[0].write == "DataLoader(num_workers=1)"


def test_no_more_workers_than_cores(make_trainer: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(technique, "usable_cores", lambda: 2)
    observer = advice(make_trainer, stepping(clock, 1), DataLoader(Slow(clock, 10), 1))
    assert observer.savings[0].option == "caching"
    (workers,) = (saving for saving in observer.savings if saving.option == "num_workers")
    # 15 batches of 11: two workers take at least half of the 10 for each
    assert (workers.write, workers.seconds) == ("DataLoader(num_workers=2)", 15 * (11 - 10 / 2))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_start_with_each_epoch(make_trainer: Make, clock: Clock, persistent: bool) -> None:
    data = WithWorkers(clock, start=30, wait=2, persistent=persistent)
    observer = advice(make_trainer, stepping(clock, 10), data, max_epochs=3)
    # of 3 epochs the first start is left out; 11 batches, of which two are the first of an epoch
    if persistent:
        assert (observer.times.start_s, observer.times.wait_s) == (0, 11 * 2 + 2 * 30)
        assert "persistent_workers" not in saved(observer)
    else:
        assert (observer.times.start_s, observer.times.first_s) == (2 * 30, 2 * 2)
        assert observer.times.wait_s == 9 * 2
        assert saved(observer)["caching"] == 9 * 2 + 2 * 2
        assert saved(observer)["persistent_workers"] == 2 * (30 + 2)
    assert saved(observer)["num_workers"] == observer.times.wait_s
    assert "prefetch" not in saved(observer)  # on a CPU, workers do so


def test_loaders_other_than_map_style_dataloaders(make_trainer: Make, clock: Clock) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([Slow(clock, 3)[index] for index in (0, 1)] + [Slow(clock, 3)[index] for index in range(6)])

    def own() -> Iterator[Any]:
        for batch in loader(4):
            clock.advance(6)
            yield batch

    theirs = advice(make_trainer, stepping(clock, 10), type("Own", (), {"__iter__": lambda self: own()})())
    assert saved(theirs) == {"prefetch": theirs.times.wait_s, "caching": theirs.times.wait_s}
    assert theirs.times.wait_s >= 6 * 6
    streamed = advice(make_trainer, stepping(clock, 10), DataLoader(Stream(), batch_size=2))
    assert "num_workers" in saved(streamed)


def test_several_loaders_count_as_one(make_trainer: Make, clock: Clock) -> None:
    module = regression(L)
    step = module.training_step
    module.training_step = lambda batch, batch_idx: step(batch["a"], batch_idx) + step(batch["b"], batch_idx)
    data = {"a": DataLoader(Slow(clock, 1), 2), "b": DataLoader(Slow(clock, 4), 2)}
    observer = advice(make_trainer, module, CombinedLoader(data, "max_size_cycle"))
    assert observer.times.wait_s == observer.times.items_s == 7 * (2 * 1 + 2 * 4)


def test_validation_is_left_out(make_trainer: Make, clock: Clock) -> None:
    def collate(samples: Any) -> Any:
        clock.advance(4)
        return default_collate(samples)

    shared = DataLoader(Slow(clock, 1), 2, collate_fn=collate)
    observer = advice(make_trainer, stepping(clock, 10), shared, shared, val_check_interval=2)
    assert observer.times.validation_s == 4 * 4 * (6 + 50)
    assert observer.times.wait_s == observer.times.load_s == 7 * 6
    assert observer.times.collate_s == 7 * 4
    assert observer.times.total_s == 7 * (6 + 10)


def test_under_manual_optimization_and_a_window(make_trainer: Make, clock: Clock) -> None:
    module = stepping(clock, 10)
    step = module.training_step

    def by_hand(batch: Any, batch_idx: int) -> None:
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(step(batch, batch_idx))
        optimizer.step()

    module.training_step, module.automatic_optimization = by_hand, False
    assert advice(make_trainer, module, DataLoader(Slow(clock, 3), 2)).times.wait_s == 7 * 6
    window = advice(make_trainer, stepping(clock, 10), DataLoader(Slow(clock, 3), 2), accumulate_grad_batches=2)
    assert (window.times.batches, window.times.wait_s) == (7, 7 * 6)


def test_prefetched_loader_is_timed_in_its_thread(make_trainer: Make, clock: Clock) -> None:
    data = Prefetcher(DataLoader(loader(4).dataset, 4))
    observer = advice(make_trainer, stepping(clock, 10), data)
    assert observer.times.load_s == observer.times.collate_s == 0
    assert type(data.loader.collate_fn) is type(default_collate)
    assert Loading.of(data) == Loading(workers=0, ahead=True, prefetched=True, indexed=True)


# --- what it says ---


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Return the lines of the advice."""
    caplog.set_level(logging.INFO)
    return lambda: "\n".join(m for m in caplog.messages if m.startswith("loader_advice"))


def test_one_sentence_with_the_figures(make_trainer: Make, clock: Clock, said: Callable[[], str]) -> None:
    logger = recording_logger(L)
    advice(make_trainer, stepping(clock, 7), DataLoader(Slow(clock, 10), 2), logger=logger, log_every_n_steps=1)
    words = mentions("num_workers=3", "at most 74%", "solo.Prefetch() at most 26%", "wait for data 20 s", "step 7 s")
    assert re.search(words, said())
    assert logger.seen[-1][1] == {"loader/wait_s": 20.0, "loader/copy_s": 0.0, "loader/step_s": 7.0}


@pytest.mark.parametrize(("min_share", "is_named"), [(0.02, False), (0.005, True)])
def test_savings_below_min_share_are_not_named(
    make_trainer: Make, clock: Clock, said: Callable[[], str], min_share: float, is_named: bool
) -> None:
    observer = LoaderAdvice(min_share)
    make_trainer(L, accelerator="cpu", callbacks=[observer]).fit(stepping(clock, 99), DataLoader(Slow(clock, 1), 1))
    assert ("num_workers" in said()) is is_named
    assert saved(observer)["num_workers"] == 7  # and can be looked at


def test_interrupted_fit_gets_advice(make_trainer: Make, clock: Clock, said: Callable[[], str]) -> None:
    module = stepping(clock, 1)
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        if batch_idx == 5:
            raise KeyboardInterrupt
        return step(batch, batch_idx)

    module.training_step = training_step
    observer, handler = LoaderAdvice(), signal.getsignal(signal.SIGINT)
    trainer = make_trainer(L, accelerator="cpu", callbacks=[observer])
    with pytest.raises(SystemExit):
        trainer.fit(module, DataLoader(Slow(clock, 3), 1))
    signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on
    assert (observer.times.batches, observer.times.wait_s) == (4, 5 * 3)
    assert "num_workers=" in said()


@pytest.mark.parametrize("where", ["validation", "wait", "start of workers"])
def test_fit_interrupted_between_steps_gets_advice(make_trainer: Make, clock: Clock, where: str) -> None:
    def interrupted(*_: Any) -> Any:
        clock.advance(50)
        raise KeyboardInterrupt

    class Ending(WithWorkers):
        epochs = 0

        def __iter__(self) -> Iterator[Any]:
            self.epochs += 1
            return interrupted() if where == "start of workers" and self.epochs == 3 else super().__iter__()

        def batches(self) -> Iterator[Any]:
            for index, batch in enumerate(super().batches()):
                yield interrupted() if where == "wait" and index == 3 else batch

    module, observer, handler = stepping(clock, 10), LoaderAdvice(), signal.getsignal(signal.SIGINT)
    if where == "validation":
        module.validation_step = interrupted
    trainer = make_trainer(L, accelerator="cpu", callbacks=[observer], max_epochs=2)
    with pytest.raises(SystemExit):
        trainer.fit(module, Ending(clock, start=0, wait=3), *([loader(1)] if where == "validation" else []))
    signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on
    steps = 2 if where == "wait" else 3  # behind the first one
    found = observer.times
    assert found.step_s == steps * 10
    assert (found.wait_s, found.start_s + found.first_s, found.validation_s) == {
        "validation": (3 * 3, 0, 50),
        "wait": (2 * 3 + 3 + 50, 0, 0),
        "start of workers": (3 * 3, 50, 0),
    }[where]


@pytest.mark.long
def test_workers_of_a_loader_start_with_each_epoch(make_trainer: Make) -> None:
    observer = LoaderAdvice()
    data = DataLoader(loader(3).dataset, 4, num_workers=1)
    make_trainer(L, accelerator="cpu", callbacks=[observer], max_epochs=3).fit(regression(L), data)
    assert observer.times.start_s > 0
    assert "persistent_workers" in saved(observer)
    assert "prefetch" not in saved(observer)


def test_single_batch_gets_no_advice(make_trainer: Make, clock: Clock, said: Callable[[], str]) -> None:
    observer = advice(make_trainer, stepping(clock, 1), DataLoader(Slow(clock, 1), 8), max_epochs=1)
    assert (observer.times, observer.savings) == (None, ())
    assert "at least two" in said()


@pytest.mark.parametrize("given", [-0.1, 1, "2 %"])
def test_share_out_of_range_is_refused(given: Any) -> None:
    with pytest.raises(PresetError, match=mentions("loader_advice.min_share")):
        LoaderAdvice(given)


# --- the device's clock ---


@pytest.fixture
def on_cuda(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Events that are passed when a device that works beside the host comes to them."""
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return clock


@pytest.mark.parametrize(("load", "step", "idle"), [(3, 10, 0), (10, 3, 7), (5, 5, 0)])
def test_only_an_idle_device_has_waited(on_cuda: Clock, load: float, step: float, idle: float) -> None:
    watch = Watch(torch.device("cuda"), starts_workers=False, loads_here=True)
    pending = []
    for index in range(21):
        if index == 0:
            watch.begin_wait(with_epoch=True)
        watch.begin_wait()
        on_cuda.advance(load)
        watch.end_wait()
        watch.copying(lambda batch: on_cuda.launch(1))(None)  # not awaited, as from pinned memory
        on_cuda.launch(step - 1)
        watch.end_batch()
        pending.append(len(watch._pending))
    measured = watch.finish()
    assert measured.wait_s == pytest.approx(20 * idle, abs=3 + 10)  # the device is ahead in the first ones
    assert measured.load_s == 20 * load  # of the host
    assert measured.copy_s == 20
    assert measured.total_s == pytest.approx(20 * max(load, step), abs=13)
    assert max(pending) <= 40


@pytest.mark.simcuda
@pytest.mark.parametrize("pinned", [False, True])
def test_copies_from_memory_that_is_not_pinned(make_trainer: Make, on_cuda: Clock, pinned: bool) -> None:
    module = regression(L)

    def transfer(batch: Any, device: Any, dataloader_idx: int) -> Any:
        on_cuda.launch(4)
        return type(module).__mro__[1].transfer_batch_to_device(module, batch, device, dataloader_idx)

    module.transfer_batch_to_device = transfer
    step = module.training_step
    module.training_step = lambda batch, batch_idx: (on_cuda.launch(6), step(batch, batch_idx))[1]
    data = DataLoader(loader(4).dataset, 4, pin_memory=pinned)
    observer = advice(make_trainer, module, data, accelerator="gpu")
    assert observer.times.copy_s == 7 * 4
    assert observer.times.step_s == 7 * 6
    assert saved(observer) == {"prefetch": 7 * 4, **({} if pinned else {"pin_memory": 7 * 4})}
    assert isinstance(observer.ctx, type(None))


@pytest.mark.gpu
def test_events_of_the_device_itself() -> None:
    clock = DeviceClock(torch.device("cuda", 0))
    first, last = clock.mark(), clock.mark()
    assert clock.between(first, last) >= 0
    assert clock.has_passed(last)


@pytest.mark.gpu(needs="time")
def test_a_device_at_work_does_not_wait() -> None:
    watch = Watch(torch.device("cuda", 0), starts_workers=False, loads_here=True)
    for _ in range(4):
        watch.begin_wait()
        watch.end_wait()  # on the host: at once
        torch.cuda._sleep(10_000_000)
        watch.end_batch()
    measured = watch.finish()
    assert measured.wait_s < 0.1 * measured.total_s


# --- the bounds hold ---

SECONDS = st.floats(0, 100, allow_subnormal=False)
LOADINGS = st.builds(Loading, st.none() | st.integers(0, 8), st.booleans(), st.booleans(), st.booleans())


@given(*[SECONDS] * 6, st.floats(0, 1), LOADINGS, st.booleans(), st.integers(1, 64))
def test_no_bound_is_negative_or_above_its_cause(
    wait: float, copy: float, start: float, first: float, step: float, validation: float, collating: float,
    how: Loading, cuda: bool, cores: int,
) -> None:  # fmt: skip
    total = wait + copy + start + first + step + 1e-6
    load = 0.0 if how.ahead else wait
    measured = Times(9, total, wait, copy, start, first, validation, load, collating * load, is_pageable=cuda)
    found = {saving.option: saving for saving in savings(measured, how, cores=cores, cuda=cuda)}
    most = {
        "num_workers": wait,
        "pin_memory": copy,
        "persistent_workers": start + first,
        "caching": wait + first,
        "prefetch": min(wait + copy, measured.step_s + validation),
    }
    assert all(0 < saving.seconds <= most[option] for option, saving in found.items())
    assert all(0 < saving.share <= 1 for saving in found.values())
    if how.workers is None:
        assert not {"num_workers", "pin_memory"} & found.keys()


def pipelined(loads: list[float], steps: list[float], workers: int) -> float:
    """Return the seconds of training whose batches are loaded by workers that never pause, each in turn."""
    free, done = [0.0] * workers, 0.0
    for index, (load, step) in enumerate(zip(loads, steps, strict=True)):
        free[index % workers] += load
        done = max(done, free[index % workers]) + step
    return done


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=30), st.integers(1, 8))
def test_simulated_pipeline_saves_no_more_than_the_bound(batches: list[tuple[float, float]], cores: int) -> None:
    loads, steps = map(list, zip(*batches, strict=True))
    wait, total = sum(loads), sum(loads) + sum(steps)
    if total < 1e-3:
        return
    measured = Times(len(batches), total, wait, 0.0, load_s=wait)
    found = {saving.option: saving for saving in savings(measured, Loading(workers=0), cores=cores, cuda=False)}
    for option in found.keys() & {"num_workers", "prefetch"}:
        workers = int(found[option].write.rstrip(")").rpartition("=")[2]) if option == "num_workers" else 1
        assert total - pipelined(loads, steps, workers) <= found[option].seconds + 1e-6
        assert workers <= cores


# --- memory ---


def test_long_run_stores_no_more_figures(clock: Clock) -> None:
    watch = Watch(torch.device("cpu"), starts_workers=False, loads_here=True)
    for _ in range(1000):
        watch.begin_wait()
        watch.end_wait()
        watch.copying(lambda batch: batch)(torch.zeros(1))
        watch.end_batch()
    assert not watch._pending
    assert len(watch._seconds) <= 8


# --- no trace ---


@pytest.mark.parametrize("fails", [False, True])
def test_loader_and_loop_are_restored(make_trainer: Make, fails: bool) -> None:
    def collate(samples: Any) -> Any:
        during.append((data.collate_fn, copy.copy(data.collate_fn), pickle.loads(pickle.dumps(data.collate_fn))))
        if fails and len(during) == 3:
            raise OSError("mine")
        return default_collate(samples)

    during: list[Any] = []
    globals()["collate_for_pickling"] = collate
    collate.__qualname__ = "collate_for_pickling"
    data = DataLoader(loader(4).dataset, 4, collate_fn=collate)
    before = dict(vars(data))
    observer = LoaderAdvice()
    trainer = make_trainer(L, callbacks=[observer])
    loop = dict(vars(trainer.fit_loop.epoch_loop))
    with pytest.raises(OSError, match="mine") if fails else nullcontext():
        trainer.fit(regression(L), data)
    assert trainer.train_dataloader is data  # also during the fit
    assert data.collate_fn is collate
    lightnings = {name for name in vars(data) if name.startswith("__pl")}  # what it notes of loaders that it made
    assert vars(data).keys() - lightnings == before.keys() - lightnings
    assert vars(trainer.fit_loop.epoch_loop).keys() == loop.keys()
    assert "batch_to_device" not in vars(trainer.strategy)
    assert during[0][0] is not collate
    assert during[0][1] is during[0][2] is collate
    assert (observer.times is None) is fails


def test_attributes_of_the_collate_function_are_read_and_set(make_trainer: Make) -> None:
    class Padding:
        pad = 0

        def __call__(self, samples: Any) -> Any:
            return default_collate(samples)

    class Look(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            present = trainer.train_dataloader.collate_fn
            assert present is not collate
            assert (present.pad, hasattr(present, "other"), hasattr(present, "__len__")) == (0, False, False)
            present.pad = 3

    collate = Padding()
    data = DataLoader(loader(4).dataset, 4, collate_fn=collate)
    make_trainer(L, callbacks=[LoaderAdvice(), Look()]).fit(regression(L), data)
    assert data.collate_fn is collate
    assert vars(collate) == {"pad": 3}


def test_loaders_that_are_made_every_epoch_are_freed(make_trainer: Make) -> None:
    alive: list[Any] = []
    module = regression(L)

    def train_dataloader() -> Any:
        gc.collect(0)
        assert sum(known() is not None for known in alive) <= 2  # Lightning's own, until it has the next
        alive.append(weakref.ref(made := loader(3)))
        return made

    module.train_dataloader = train_dataloader
    make_trainer(L, callbacks=[LoaderAdvice()], max_epochs=5, reload_dataloaders_every_n_epochs=1).fit(module)
    assert len(alive) == 5


def test_a_second_fit_measures_anew(make_trainer: Make, clock: Clock) -> None:
    observer, data = LoaderAdvice(), DataLoader(Slow(clock, 3), 2)
    for _ in range(2):
        make_trainer(L, accelerator="cpu", callbacks=[observer]).fit(stepping(clock, 1), data)
        assert observer.times.wait_s == 3 * 6
