"""LeakFinder: finds what grows and names who holds it, and says nothing about steady training."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader

from lightning_solo.memory.census import Census, take_census
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.techniques.leak_finder import technique as leak_finder
from lightning_solo.techniques.leak_finder.technique import LeakFinder
from tests.conftest import long
from tests.messages import mentions
from tests.modules import loader, regression

pytestmark = pytest.mark.any_device


@pytest.fixture(autouse=True)
def only_new_objects() -> None:
    """Leave what other tests made out of what the garbage collector goes through."""
    gc.collect()
    gc.freeze()


def stepping(home: Any, before: Any) -> Any:
    """Return a module that calls ``before(module, batch, batch_idx)`` in each training step."""
    module = regression(home)
    stock = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        loss = stock(batch, batch_idx)
        before(module, loss, batch, batch_idx)
        return loss

    module.training_step = training_step
    return module


def kept_losses(home: Any) -> Any:
    module = stepping(home, lambda module, loss, batch, batch_idx: module.history.append(module.net(batch[0]).sum()))
    module.history = []
    return module


def kept_step_losses(home: Any) -> Any:
    module = stepping(home, lambda module, loss, batch, batch_idx: module.history.append(loss))
    module.history = []
    return module


def growing_closure(home: Any) -> Any:
    outputs: dict[int, Any] = {}

    def keep(module: Any, loss: Any, batch: Any, batch_idx: int) -> None:
        outputs[batch_idx] = batch[0].clone()

    return stepping(home, keep)


def metric_list(home: Any) -> Any:
    def update(module: Any, loss: Any, batch: Any, batch_idx: int) -> None:
        module.predictions.update(torch.ones(2 + batch_idx))

    module = stepping(home, update)
    module.predictions = torchmetrics.CatMetric()
    return module


LEAKS = [
    (kept_losses, "the graph of a tensor in list `history` of Regression"),
    (kept_step_losses, "list `history` of Regression"),
    (growing_closure, "dict `outputs` in the closure of growing_closure.<locals>.keep"),
    (metric_list, "list `value` of CatMetric at predictions"),
]


# --- acted ---


@pytest.mark.parametrize(("make", "holder"), LEAKS)
def test_leaks_are_found_and_their_holders_named_once(home: Any, make_trainer: Any, make: Any, holder: str) -> None:
    callback = LeakFinder(every_n_steps=3)
    trainer = make_trainer(home, callbacks=[callback])
    with pytest.warns(UserWarning, match=mentions("LeakFinder: ", "9 optimizer steps")) as caught:
        trainer.fit(make(home), loader(14))
    assert holder in [leak.holder for leak in callback.leaks]
    told = [str(one.message) for one in caught if "LeakFinder" in str(one.message)]
    assert len(told) == len(callback.leaks) == len({leak.holder for leak in callback.leaks})
    assert any(f"held by {holder}." in words for words in told)


def test_bytes_of_a_leak_are_exact(home: Any, make_trainer: Any) -> None:
    kept: list[Any] = []
    module = stepping(home, lambda module, loss, batch, batch_idx: kept.append(torch.ones(1000)))
    callback = LeakFinder(every_n_steps=2, consecutive=2)
    with pytest.warns(UserWarning, match=mentions("3.91 KiB", "4 float32 (1000,) (other)", "list `kept`")):
        make_trainer(home, callbacks=[callback]).fit(module, loader(10))
    (leak,) = callback.leaks
    assert leak.bytes_per_step == 4 * 1000


def test_growth_below_the_limit_is_not_reported(home: Any, make_trainer: Any) -> None:
    callback = LeakFinder(every_n_steps=3, min_bytes=513)
    make_trainer(home, callbacks=[callback]).fit(growing_closure(home), loader(14))
    assert callback.leaks == ()


def test_several_optimizer_steps_per_batch_are_counted(home: Any, make_trainer: Any) -> None:
    module = growing_closure(home)
    module.automatic_optimization = False
    stock = module.training_step

    def training_step(batch: Any, batch_idx: int) -> None:
        optimizer = module.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            module.manual_backward(stock(batch, batch_idx))
            optimizer.step()

    module.training_step = training_step
    with pytest.warns(UserWarning, match="dict `outputs`"):
        make_trainer(home, callbacks=[LeakFinder(every_n_steps=3, min_bytes=100)]).fit(module, loader(20))


# Steady training: no word.


def plain(home: Any) -> Any:
    return regression(home), {"accumulate_grad_batches": 2}


def with_metrics(home: Any) -> Any:
    def update(module: Any, loss: Any, batch: Any, batch_idx: int) -> None:
        module.error.update(module.net(batch[0]).detach(), batch[1])
        module.mean.update(loss.detach())
        module.log("train/loss", loss, on_step=True, on_epoch=True)
        module.log("train/error", module.error, on_epoch=True)

    module = stepping(home, update)
    module.error, module.mean = torchmetrics.MeanSquaredError(), torchmetrics.MeanMetric()
    return module, {}


def with_checkpointing(home: Any) -> Any:
    return regression(home), {"callbacks": [ActivationCheckpointing()], "precision": "bf16-mixed"}


def longer_batches(home: Any) -> Any:
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    return regression(home, net), {}


def with_cycles(home: Any) -> Any:
    def cycle(module: Any, loss: Any, batch: Any, batch_idx: int) -> None:
        held: list[Any] = [torch.ones(500)]
        held.append(held)

    return stepping(home, cycle), {}


@pytest.mark.parametrize("make", [plain, with_metrics, with_checkpointing, longer_batches, with_cycles])
@pytest.mark.parametrize("every_n_steps", [1, long(3)])
def test_steady_training_has_no_leaks(home: Any, make_trainer: Any, make: Any, every_n_steps: int) -> None:
    module, arguments = make(home)
    sizes = range(64, 76) if make is longer_batches else [16] * 12
    data = [(torch.randn(size, 8), torch.randn(size, 1)) for size in sizes]
    callback = LeakFinder(every_n_steps=every_n_steps)
    callbacks = [*arguments.pop("callbacks", []), callback]
    trainer = make_trainer(home, max_epochs=2, callbacks=callbacks, **arguments)
    gc.collect()
    gc.disable()  # cycles pile up until somebody collects: the hardest case
    try:
        trainer.fit(module, DataLoader(data, batch_size=None), loader(2))
    finally:
        gc.enable()
    assert callback.leaks == ()


# --- memory and cost ---


def test_tensors_are_counted_at_due_steps_only_and_not_kept(
    home: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    collections: list[int] = []

    class Collector:
        @staticmethod
        def collect() -> int:
            collections.append(1)
            return gc.collect()

    monkeypatch.setattr(leak_finder, "take_census", lambda *args: (looks.append(1), take_census(*args))[1])
    monkeypatch.setattr(leak_finder, "gc", Collector)
    module = regression(home)
    make_trainer(home, callbacks=[LeakFinder(every_n_steps=5)]).fit(module, loader(20))
    assert len(looks) == 4  # at steps 1, 6, 11, 16
    assert len(collections) == 1  # at the start
    kind = next(kind for kind in take_census().kinds if kind.shape == (32, 8))
    count = len(take_census().kinds[kind])
    del module
    gc.collect()
    assert len(take_census().kinds.get(kind, {})) < count


# --- trace ---


def test_nothing_is_kept_after_a_fit_or_a_failure(home: Any, make_trainer: Any) -> None:
    callback, module = LeakFinder(every_n_steps=1), regression(home)
    make_trainer(home, callbacks=[callback]).fit(module, loader(6))
    assert not any(type(one) is Census for one in gc.get_objects())
    module.on_after_backward = lambda: 1 / 0
    trainer = make_trainer(home, callbacks=[callback])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, loader(6))
    assert not any(type(one) is Census for one in gc.get_objects())
    callback.on_exception(trainer, module, RuntimeError())
    callback.teardown(trainer, module, "fit")


def test_each_fit_starts_afresh(home: Any, make_trainer: Any) -> None:
    callback = LeakFinder(every_n_steps=3)
    for make in (growing_closure, kept_step_losses):
        with pytest.warns(UserWarning, match="LeakFinder"):
            make_trainer(home, callbacks=[callback]).fit(make(home), loader(20))
    assert [leak.holder for leak in callback.leaks] == ["list `history` of Regression"]
