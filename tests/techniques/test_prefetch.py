"""Prefetch loads ahead within its bound, trains bit for bit as a plain run does, and leaves no thread."""

from __future__ import annotations

import gc
import random
import threading
import traceback
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_solo.data.prefetch import Prefetcher, Upload, prefetched
from lightning_solo.errors import ConflictError, NothingToDoError
from lightning_solo.planner.device import device
from lightning_solo.planner.planner import Planner
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.prefetch.technique import Prefetch
from lightning_solo.units import GiB
from tests.conftest import long
from tests.messages import mentions
from tests.modules import Stack, loader, regression
from tests.training import equal, fit

Make = Callable[..., Any]
WIDTH = 64
WAIT_S = 20  # for what comes at once, or never


class Watched:
    """A loader that counts the batches whose loading has begun, and by which thread."""

    def __init__(self, batches: list[Any], fails_at: int | None = None) -> None:
        self.batches = batches
        self.fails_at = fails_at
        self.begun = 0
        self.threads: list[str] = []
        self.changed = threading.Condition()

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batches):
            self._note()
            if index == self.fails_at:
                raise OSError(f"batch {index}")
            yield batch

    def _note(self) -> None:
        with self.changed:
            self.begun += 1
            self.threads.append(threading.current_thread().name)
            self.changed.notify_all()

    def wait_for(self, count: int) -> None:
        """Wait until the loading of so many batches has begun."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.begun >= count, WAIT_S)


class Stateful(Watched):
    """Continues where it was, by its state."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        self.at %= len(self.batches)
        while self.at < len(self.batches):
            self._note()
            self.at += 1
            yield self.batches[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def batches(count: int = 8) -> list[Any]:
    return list(loader(count))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "prefetch"]


# --- acted ---


@pytest.mark.any_device
@pytest.mark.every_change
def test_batches_are_loaded_during_the_steps_before(home: ModuleType, make_trainer: Make) -> None:
    data = Watched(batches(8))
    module = regression(home)
    step, steps = module.training_step, []

    def training_step(batch: Any, batch_idx: int) -> Any:
        if batch_idx >= 1:
            data.wait_for(min(batch_idx + 1 + 3, 8))  # this one, and three ahead
        steps.append(batch_idx)
        return step(batch, batch_idx)

    module.training_step = training_step
    fit(make_trainer, Prefetch(depth=3), home=home, data=data, module=module)
    assert steps == list(range(8))
    assert data.threads[2:] == ["prefetch"] * 6
    assert not threads()


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_is_loaded_than_the_bound(depth: int) -> None:
    data = Watched(list(range(20)))
    iteration = iter(Prefetcher(data, depth))
    for taken in range(2, 10):
        while data.begun < 2:
            next(iteration)
        data.wait_for(taken + depth)
        assert data.begun == taken + depth
        assert next(iteration) == taken
    iteration.stop()  # type: ignore[attr-defined]
    assert data.begun <= 10 + depth
    assert not threads()


# --- parity ---


@pytest.mark.any_device
@pytest.mark.parametrize("shuffle", [False, True])
def test_weights_are_those_of_a_plain_run(home: ModuleType, make_trainer: Make, shuffle: bool) -> None:
    def made() -> DataLoader[Any]:
        return DataLoader(loader(8).dataset, batch_size=4, shuffle=shuffle)

    arguments = {"max_epochs": 3, "accumulate_grad_batches": 2}
    plain = fit(make_trainer, home=home, data=made(), **arguments)
    ahead = fit(make_trainer, Prefetch(), home=home, data=made(), **arguments)
    assert equal(plain, ahead)
    assert not equal(plain, regression(home, Stack()))


def test_combined_loaders_and_a_second_fit(make_trainer: Make) -> None:
    def trained(*callbacks: Any) -> Any:
        module = regression(L)
        step = module.training_step
        module.training_step = lambda batch, batch_idx: step(batch["a"], batch_idx) + step(batch["b"], batch_idx)
        torch.manual_seed(1)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        data = CombinedLoader({"a": loader(5), "b": loader(3, seed=2)}, "max_size_cycle")
        for _ in range(2):
            fit(make_trainer, *callbacks, data=data, module=module, max_epochs=2)
        assert all(getattr(each, "closed", True) for each in data.flattened)
        return module

    assert equal(trained(), trained(Prefetch()))


def draws_torch() -> float:
    return float(torch.rand(()))


@pytest.mark.parametrize("draw", [draws_torch, random.random, np.random.random])
def test_batches_that_draw_random_numbers_are_not_loaded_ahead(make_trainer: Make, draw: Callable[[], float]) -> None:
    class Noisy(Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            names.add(threading.current_thread().name)
            x = torch.full((8,), index + draw())
            return x, x.sum(0, keepdim=True)

    names: set[str] = set()
    trained = []
    for callbacks in ([], [Prefetch()]):
        random.seed(1)
        np.random.seed(1)
        if callbacks:
            with pytest.warns(UserWarning, match=mentions("prefetch", "num_workers=1")):
                trained.append(fit(make_trainer, *callbacks, data=DataLoader(Noisy(), 2)))
        else:
            trained.append(fit(make_trainer, data=DataLoader(Noisy(), 2)))
    assert equal(*trained)
    assert "prefetch" not in names


def test_limits_end_an_epoch_of_a_loader_that_continues(make_trainer: Make) -> None:
    def noting(step: Any, here: list[Tensor]) -> Any:
        return lambda batch, batch_idx: here.append(batch[0]) or step(batch, batch_idx)

    seen: list[list[Tensor]] = []
    for callbacks in ([], [Prefetch()]):
        stream = iter(batches(12))
        data = type("Stream", (), {"__iter__": lambda self, stream=stream: stream})()
        module = regression(L)
        step, here = module.training_step, list[Tensor]()
        module.training_step = noting(step, here)
        fit(make_trainer, *callbacks, data=data, module=module, max_epochs=2, limit_train_batches=5)
        seen.append(here)
    assert len(seen[0]) == len(seen[1])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_batches_loaded_ahead_are_trained_after_a_resume(make_trainer: Make, tmp_path: Any) -> None:
    def run(steps: int, *callbacks: Any, path: Any = None) -> Any:
        data = Stateful(batches(8))
        torch.manual_seed(1)
        module = regression(L)
        step = module.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            if 1 <= batch_idx < 4 and steps == 4:
                data.wait_for(batch_idx + 3)  # two ahead
            return step(batch, batch_idx)

        module.training_step = training_step
        save = ModelCheckpoint(tmp_path, filename="at{step}", every_n_train_steps=4, save_top_k=-1)
        arguments = {"max_steps": steps, "max_epochs": 2, "enable_checkpointing": True}
        trainer = make_trainer(L, callbacks=[*callbacks, save], **arguments)
        trainer.fit(module, data, ckpt_path=path, weights_only=None if path is None else False)
        return module

    run(4, Prefetch())
    (path,) = tmp_path.glob("at*.ckpt")
    saved = torch.load(path, weights_only=False)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert saved == [{"at": 4}]
    resumed = run(12, Prefetch(), path=path)
    assert equal(run(12), resumed)


# --- memory ---


def plans(batch: Any, on: str, *callbacks: dict[str, Any]) -> list[Any]:
    """Return plans of a `regression` under techniques, on a device without what CUDA and its libraries take."""
    bare = replace(device(on), workspace_bytes=0, context_bytes=0)
    planner = Planner(lambda: regression(L, Stack(blocks=1, width=WIDTH)), batch, {}, bare, 4 * GiB)
    presets = [compose({"precision": "32-true", "callback": callback}) for callback in callbacks]
    return [planner.plan("tried", preset) for preset in presets]


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, long(3)])
def test_plans_count_the_batches_that_wait(depth: int) -> None:
    (batch,) = loader(1, batch_size=6, width=WIDTH)
    tensors = [4 * 6 * WIDTH, 4 * 6]  # bytes of x and y, in fp32
    for on, blocks in (("rtx_4090", sum(-(-size // 512) * 512 for size in tensors)), ("cpu", 0)):
        without, ahead = plans(batch, on, {}, {"prefetch": {"depth": depth}})
        assert ahead.peak_bytes - without.peak_bytes == depth * blocks
        assert (without.host_bytes, ahead.host_bytes) == (0, depth * sum(tensors))
        assert ahead.largest_micro_batch <= without.largest_micro_batch


def test_under_micro_batches_whole_batches_wait() -> None:
    (batch,) = loader(1, batch_size=6, width=WIDTH)
    (plan,) = plans(batch, "rtx_4090", {"prefetch": {}, "micro_batching": {"micro_batch": 2}})
    assert (plan.micro_batch, plan.host_bytes) == (2, 2 * (4 * 6 * WIDTH + 4 * 6))


@pytest.mark.simcuda
@pytest.mark.parametrize("depth", [3, long(1)])
def test_a_run_holds_what_is_planned(make_trainer: Make, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    from tests.simcuda import device as simulated

    send, sent, changed = Upload.send, list[int](), threading.Condition()

    def sending(self: Upload, batch: Any) -> Any:
        copied = send(self, batch)
        with changed:
            sent.append(1)
            changed.notify_all()
        return copied

    def peak(*callbacks: Any) -> int:
        sent.clear()
        module = regression(L, Stack(blocks=1, width=WIDTH))
        step = module.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            with changed:  # two are loaded by the caller; as many as may be wait while this step runs
                expected = min(batch_idx + depth - 1, 6) if callbacks and batch_idx >= 1 else 0
                assert changed.wait_for(lambda: len(sent) >= expected, WAIT_S)
            return step(batch, batch_idx)

        module.training_step = training_step
        data = DataLoader(loader(8, batch_size=64, width=WIDTH).dataset, batch_size=64, pin_memory=True)
        gc.collect()
        held = torch.cuda.memory_allocated()  # by other tests
        with simulated.counted() as counts:
            make_trainer(L, callbacks=list(callbacks), accelerator="gpu").fit(module, data)
        return counts.peak_allocated - held

    monkeypatch.setattr(Upload, "send", sending)
    (batch,) = loader(1, batch_size=64, width=WIDTH)
    without, ahead = plans(batch, "rtx_4090", {}, {"prefetch": {"depth": depth}})
    assert peak(Prefetch(depth)) - peak() == ahead.peak_bytes - without.peak_bytes
    assert peak(Prefetch(depth)) <= ahead.peak_bytes
    gc.collect()
    torch.cuda.empty_cache()
    with simulated.memory_of(ahead.needed_bytes + torch.cuda.memory_reserved()):  # by other tests
        assert peak(Prefetch(depth))


# --- errors ---


def test_an_error_comes_with_its_batch_and_its_traceback(make_trainer: Make) -> None:
    data, trained = Watched(batches(8), fails_at=5), []
    module = regression(L)
    step = module.training_step
    module.training_step = lambda batch, batch_idx: trained.append(batch_idx) or step(batch, batch_idx)
    with pytest.raises(OSError, match="batch 5") as caught:
        fit(make_trainer, Prefetch(), data=data, module=module)
    assert trained == [0, 1, 2, 3, 4]
    assert "__iter__" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not threads()


def test_map_style_loader_continues_after_an_error() -> None:
    class Holed(Dataset[int]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise OSError("hole")
            return index

    iteration = iter(Prefetcher(DataLoader(Holed(), batch_size=None), depth=2))
    got = [next(iteration) for _ in range(3)]
    with pytest.raises(OSError, match="hole"):
        next(iteration)
    assert [*got, *iteration] == [0, 1, 2, 4, 5]


def test_workers_on_a_cpu_are_refused(make_trainer: Make) -> None:
    data = DataLoader(loader(4).dataset, batch_size=4, num_workers=1)
    with pytest.raises(NothingToDoError, match=mentions("prefetch", "prefetch_factor")):
        fit(make_trainer, Prefetch(), data=data)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_a_precision_whose_step_sets_the_default_dtype_is_refused(make_trainer: Make, precision: str) -> None:
    with pytest.raises(ConflictError, match=mentions("num_workers=1", precision)):
        fit(make_trainer, Prefetch(), data=loader(4), precision=precision)


# --- no trace ---


@pytest.mark.parametrize("ends", ["step fails", "stops early", "max_steps"])
def test_no_thread_and_no_batch_is_left(make_trainer: Make, ends: str) -> None:
    class Batch(list[Any]):
        """A batch that can be referred to weakly."""

    def endless() -> Iterator[Any]:
        for batch in batches(40):
            made = Batch(batch)
            alive.append(weakref.ref(made))
            yield made

    alive: list[Any] = []
    module = regression(L)
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4 and ends == "step fails":
            raise RuntimeError("failed")
        trainer.should_stop = batch_idx == 4 and ends == "stops early"
        return step(batch, batch_idx)

    module.training_step = training_step
    data = type("Endless", (), {"__iter__": lambda self: endless()})()
    trainer = make_trainer(L, callbacks=[Prefetch()], max_steps=5 if ends == "max_steps" else -1)
    with pytest.raises(RuntimeError, match="failed") if ends == "step fails" else nullcontext():
        trainer.fit(module, data)
    assert not threads()
    gc.collect()
    assert [ref() for ref in alive[5:]] == [None] * (len(alive) - 5)


def test_an_iteration_that_is_dropped_ends_its_thread() -> None:
    data = Watched(list(range(20)))
    for value in Prefetcher(data, depth=2):
        if value == 5:
            break
    del value
    gc.collect()
    assert not threads()


def test_attributes_are_those_of_the_loader() -> None:
    inner = loader(4)
    outer: Any = prefetched(inner)
    assert len(outer) == 4
    assert outer.dataset is inner.dataset
    outer.worker_init_fn = print
    assert inner.worker_init_fn is print
    assert not hasattr(outer, "state_dict")
    assert hasattr(prefetched(Stateful([])), "state_dict")
    with pytest.raises(TypeError):
        len(Prefetcher(iter([])))


# --- the device ---

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: Tensor
    more: dict[str, list[Tensor]]


class Graph:
    """Moves itself, as the batches of graph libraries do."""

    __slots__ = ("edges",)

    def __init__(self, edges: Tensor) -> None:
        self.edges = edges

    def to(self, device: Any, **kwargs: Any) -> Graph:
        return Graph(self.edges.to(device, **kwargs))


def nested(value: float) -> Any:
    def full() -> Tensor:
        return torch.full((1000,), value).pin_memory()

    return {"pair": Pair(full(), full()), "sample": Sample(full(), {"a": [full()]}), "graph": Graph(full()), "n": 3}


def total(batch: Any) -> Tensor:
    pair, sample = batch["pair"], batch["sample"]
    return pair.x.sum() + pair.y.sum() + sample.x.sum() + sample.more["a"][0].sum() + batch["graph"].edges.sum()


@pytest.mark.simcuda
@pytest.mark.parametrize("held_back", ["none", "copies"])
def test_nested_batches_come_on_a_stream_of_their_own(held_back: str) -> None:
    from lightning.fabric.utilities.apply_func import move_data_to_device

    from tests.simcuda import device

    cuda = torch.device("cuda", 0)
    upload = Upload(cuda, lambda batch: move_data_to_device(batch, cuda))
    data = Watched([nested(float(value)) for value in range(8)])
    sums = []
    with device.delayed(held_back), device.counted() as counts:
        for index, batch in enumerate(Prefetcher(data, depth=2, upload=upload)):
            moved = batch if index >= 2 else move_data_to_device(batch, cuda)
            assert type(moved["pair"]) is Pair
            assert moved["n"] == 3
            sums.append(total(moved))
            del batch, moved
        values = [float(each) for each in sums]
    assert values == [5000.0 * value for value in range(8)]
    ups = [one for one in counts.operations if one.kind == "up"]
    on_its_stream = [one.stream == upload.stream.stream_id for one in ups]  # in any order: two threads launch them
    assert (on_its_stream.count(True), on_its_stream.count(False)) == (30, 10)
    assert all(one.pinned for one in ups)
    assert not device.races()


@pytest.mark.simcuda
def test_a_freed_batch_is_not_overwritten_while_it_is_in_use() -> None:
    from tests.simcuda import device

    cuda = torch.device("cuda", 0)
    upload = Upload(cuda, lambda batch: batch.to(cuda, non_blocking=True))
    batch, event = upload.send(torch.ones(1000).pin_memory())
    upload.receive(batch, event).sum()
    del batch
    upload.send(torch.zeros(1000).pin_memory())
    assert not device.races()


@pytest.mark.simcuda
@pytest.mark.parametrize("hook", [None, "on_before_batch_transfer", "transfer_batch_to_device"])
def test_hooks_of_the_module_see_the_same_batches(make_trainer: Make, hook: str | None) -> None:
    where: set[tuple[str, str]] = set()

    def noting(module: Any, name: str) -> None:
        own = getattr(module, name)

        def called(batch: Any, *args: Any) -> Any:
            where.add((name, batch[0].device.type, threading.current_thread().name))  # type: ignore[arg-type]
            return own(batch, *args)

        setattr(module, name, called)

    weights = []
    for callbacks in ([], [Prefetch()]):
        where.clear()
        torch.manual_seed(1)
        module = regression(L)
        for name in filter(None, (hook, "on_after_batch_transfer")):
            noting(module, name)
        trainer = make_trainer(L, callbacks=callbacks, accelerator="gpu")
        trainer.fit(module, DataLoader(loader(6).dataset, batch_size=4, pin_memory=True))
        weights.append(module)
        expected = {("on_after_batch_transfer", "cuda", "MainThread")}
        assert where == expected | ({(hook, "cpu", "MainThread")} if hook else set())
    assert equal(*weights)
