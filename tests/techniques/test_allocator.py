"""Allocator: logs what is reserved and free, lets segments grow for one run, and advises in bytes."""

from __future__ import annotations

import csv
import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as package
import pytest
import torch

import lightning_solo as solo
from lightning_solo.cards.tracing import Tracing
from lightning_solo.errors import CapabilityError, ConflictError
from lightning_solo.memory.reading import Reading
from lightning_solo.memory.segments import FreeMemory, are_expandable
from lightning_solo.planner.device import device
from lightning_solo.planner.planner import Planner
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.allocator.card import Settings, planned
from lightning_solo.techniques.allocator.technique import Allocator, advice
from lightning_solo.units import GiB, MiB
from tests.messages import mentions
from tests.modules import Stack, loader, regression
from tests.simcuda import device as simulated
from tests.training import equal, fit, workspaces

GPU = {"accelerator": "gpu"}


@pytest.fixture(autouse=True)
def empty_device() -> Iterator[None]:
    """Start each test without memory on the device."""
    if torch.cuda.is_available():
        gc.collect()
        workspaces()  # that earlier tests left
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if torch.cuda.memory_allocated():
            pytest.skip("an earlier test keeps memory on the device")
    yield
    assert not are_expandable()


def allocate(mib: int) -> torch.Tensor:
    return torch.empty(mib * MiB, dtype=torch.uint8, device="cuda")


def fragmenting(home: Any) -> Any:
    """Return a module each of whose steps keeps 2 MiB where 60 were free, and then needs 60 again."""
    module, kept = regression(home), []
    stock = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        allocate(60)
        kept.append(allocate(2))
        allocate(60)
        return stock(batch, batch_idx)

    module.training_step, module.on_train_end = training_step, kept.clear
    return module


# --- acted ---


@pytest.mark.gpu
def test_free_and_reserved_bytes_are_logged(home: Any, make_trainer: Any, tmp_path: Any) -> None:
    logger = home.loggers.CSVLogger(str(tmp_path), name="", version="")
    trainer = make_trainer(home, **GPU, logger=logger, log_every_n_steps=1, callbacks=[Allocator(every_n_steps=2)])
    module, seen = fragmenting(home), []
    module.on_train_batch_end = lambda *_: seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    trainer.fit(module, loader(5))
    with (tmp_path / "metrics.csv").open(newline="") as file:
        logged = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    assert [row["step"] for row in logged] == [1, 3, 5]  # as `self.log` counts, which begins at 0
    for row, step in zip(logged[:2], (2, 4), strict=True):  # the last one is read after the batch is gone
        assert (row["memory/allocated_gib"] * GiB, row["memory/reserved_gib"] * GiB) == seen[step - 1]
        assert row["memory/alloc_retries"] == 0
        assert row["memory/largest_free_block_gib"] * GiB >= 58 * MiB


@pytest.mark.gpu
def test_segments_grow_instead_of_fragmenting(home: Any, make_trainer: Any) -> None:
    peaks, advices, kept = [], [], list[int]()
    for expandable in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        module, seen, callback = fragmenting(home), [], Allocator(expandable_segments=expandable)
        module.on_train_start = lambda seen=seen: seen.append(are_expandable())
        end = module.on_train_end
        module.on_train_end = lambda end=end: (end(), kept.append(workspaces()))
        make_trainer(home, **GPU, callbacks=[callback]).fit(module, loader(8))
        assert seen == [expandable]
        peaks.append(torch.cuda.max_memory_reserved())
        advices.append(callback.advice)
        assert torch.cuda.max_memory_allocated() - kept[-1] < 80 * MiB
    # the first segment of 60 MiB keeps the blocks of 2, so a second one is added; else pages of 20 for 8 * 2 + 60
    expected = [(60 + 60 + 2) * MiB, (4 * 20 + 2) * MiB]
    assert peaks == expected if not any(kept) else peaks[1] < peaks[0]
    assert "callback.allocator.expandable_segments=true" in advices[0]
    assert "Nothing to gain" in advices[1]


@pytest.mark.simcuda
def test_retries_are_counted(home: Any, make_trainer: Any) -> None:
    callback = Allocator(every_n_steps=1)
    module = regression(home)
    stock = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        allocate(40 + 20 * batch_idx)  # longer batches: no cached segment is large enough
        return stock(batch, batch_idx)

    module.training_step = training_step
    with simulated.memory_of(torch.cuda.memory_reserved() + 130 * MiB):
        make_trainer(home, **GPU, callbacks=[callback]).fit(module, loader(4))
    assert "callback.allocator.expandable_segments=true" in callback.advice
    assert "2 requests found no room" in callback.advice  # that of 80 beside 40 and 60, and that of 100 beside 80


def test_advice_is_in_bytes() -> None:
    free = FreeMemory(3 * MiB, 2 * MiB)

    def said(reserved: int, retries: int = 0, expandable: bool = False) -> str:
        return advice(Reading(peak_allocated=90 * MiB, peak_reserved=reserved * MiB), free, retries, expandable)

    assert all(size in said(95) for size in ("90.00 MiB", "95.00 MiB", "3.00 MiB", "2.00 MiB", "Nothing to gain"))
    for text in (said(110), said(95, retries=1)):
        assert "expandable_segments=true" in text
    assert "at most 20.00 MiB" in said(110)
    assert "expandable_segments=true" not in said(110, expandable=True)


def test_it_is_planned_with_its_segments() -> None:
    for expandable in (False, True):
        tracing = planned(Settings(expandable_segments=expandable), Tracing("32-true", attached="it"))
        assert (tracing.attached, tracing.expandable_segments) == (None, expandable)


def test_plan_with_expandable_segments_needs_other_memory() -> None:
    (batch,) = loader(1, batch_size=8192, width=256)
    planner = Planner(lambda: regression(package, Stack(width=256)), batch, {}, device("rtx-4090"), 20 * GiB)
    plain, grown = (
        planner.plan("it", compose("baseline", ["+callback=allocator", f"callback.allocator.expandable_segments={on}"]))
        for on in ("false", "true")
    )
    assert plain.peak_bytes == grown.peak_bytes
    assert plain.reserved_bytes != grown.reserved_bytes


# --- refused ---


def test_run_without_cuda_is_refused(home: Any, make_trainer: Any) -> None:
    trainer = make_trainer(home, accelerator="cpu", callbacks=[Allocator()])
    with pytest.raises(CapabilityError, match=mentions("cpu", "memory_logger")):
        trainer.fit(regression(home), loader(2))
    if not torch.cuda.is_available():
        with pytest.raises(CapabilityError, match=mentions("callback.allocator", "CUDA", "callback=memory_logger")):
            solo.trainer_kwargs("baseline", ["+callback=allocator"])


def test_peaks_that_are_reset_are_refused() -> None:
    with pytest.raises(ConflictError, match=r"per_phase=false"):
        compose("baseline", ["+callback=[allocator,memory_logger]", "callback.memory_logger.per_phase=true"])


@pytest.mark.gpu
def test_memory_on_the_device_is_refused_by_name(home: Any, make_trainer: Any) -> None:
    kept = allocate(4)
    words = mentions("callback.allocator.expandable_segments=true", "4.00 MiB", "PYTORCH_ALLOC_CONF=")
    with pytest.raises(CapabilityError, match=words):
        solo.trainer_kwargs("baseline", ["+callback=allocator", "callback.allocator.expandable_segments=true"])
    trainer = make_trainer(home, **GPU, callbacks=[Allocator(expandable_segments=True)])
    with pytest.raises(CapabilityError, match=words):
        trainer.fit(regression(home), loader(2))
    make_trainer(home, **GPU, callbacks=[Allocator()]).fit(regression(home), loader(2))
    del kept


@pytest.mark.gpu
def test_allocator_without_segments_is_refused(home: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(CapabilityError, match=mentions("cudaMallocAsync", "PYTORCH_ALLOC_CONF")):
        make_trainer(home, **GPU, callbacks=[Allocator()]).fit(regression(home), loader(2))


def test_environment_variable_does_the_same() -> None:
    """The remedy of the refusal: nothing is left to switch."""
    script = "from lightning_solo.memory.segments import are_expandable; raise SystemExit(not are_expandable())"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environment = {"PATH": "", name: "expandable_segments:True"}
        assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == 0


# --- parity ---


@pytest.mark.gpu
@pytest.mark.parametrize("expandable", [False, True])
def test_training_is_bit_equal(home: Any, make_trainer: Any, expandable: bool) -> None:
    callback = Allocator(every_n_steps=1, expandable_segments=expandable)
    plain = fit(make_trainer, home=home, **GPU)
    assert equal(fit(make_trainer, callback, home=home, **GPU), plain)
    assert not equal(fit(make_trainer, home=home, max_steps=1, **GPU), plain)


# --- cost and trace ---


@pytest.mark.gpu
def test_it_neither_synchronises_nor_empties_the_cache(
    home: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    module = regression(home)
    module.on_train_start = lambda: [  # after Lightning, which empties the cache when a fit starts
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append(name))
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats")
    ]
    module.on_train_end = monkeypatch.undo
    make_trainer(home, **GPU, callbacks=[Allocator(every_n_steps=1)]).fit(module, loader(4))
    assert calls == []


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["setup", "training_step"])
def test_nothing_is_left_on_where_training_fails(home: Any, make_trainer: Any, where: str) -> None:
    module, seen = regression(home), []

    def fail(*args: Any, **kwargs: Any) -> None:
        seen.append(are_expandable())
        raise RuntimeError("broken")

    setattr(module, where, fail)
    callback = Allocator(expandable_segments=True)
    trainer = make_trainer(home, **GPU, callbacks=[callback])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(module, loader(2))
    assert (seen, are_expandable()) == ([True], False)
    callback.on_exception(trainer, module, RuntimeError())
    callback.teardown(trainer, module, "fit")
    assert not are_expandable()


@pytest.mark.gpu
def test_several_fits_and_other_stages(home: Any, make_trainer: Any) -> None:
    callback, module = Allocator(expandable_segments=True), regression(home)
    for _ in range(2):
        make_trainer(home, **GPU, callbacks=[callback]).fit(module, loader(3), loader(2))
        assert callback.advice
        assert not are_expandable()
    trainer = make_trainer(home, **GPU, callbacks=[callback])
    trainer.validate(module, loader(2), verbose=False)
    trainer.predict(module, loader(2))
