"""DataParallelStrategy: on one device to the bit as a plain run; several are in tests/engines."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.distributed import DistStoreError, HashStore, TCPStore

import lightning_solo as solo
from lightning_solo.errors import ConflictError
from lightning_solo.seams import engines
from lightning_solo.seams.engines import Peers, engine_of
from lightning_solo.techniques.ddp.technique import DataParallelStrategy
from tests.messages import lines_with, mentions
from tests.modules import Stack, loader, regression
from tests.training import equal

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
    "gradient_clip_val": 0.1,
    "accumulate_grad_batches": 2,
}


def fitted(preset: Any, folder: Path, module: Any = None, overrides: Sequence[str] = (), **arguments: Any) -> Any:
    """Return a module and the Trainer that trained it under a preset."""
    torch.manual_seed(1)
    module = module or regression(L, Stack(blocks=2))
    ours = solo.trainer_kwargs(preset, overrides)
    trainer = L.Trainer(**{**QUIET, "default_root_dir": str(folder), **ours, **arguments})
    trainer.fit(module, loader(4))
    return module, trainer


@pytest.mark.parametrize("fails", [1, 2])
def test_a_process_that_failed_alone_ends_although_its_cleaning_up_waits_in_the_store(
    fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True)
    ended = threading.Event()
    for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 0}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setattr(engines, "_get_default_store", lambda: store)
    monkeypatch.setattr(engines, "GRACE_S", 0.2)
    monkeypatch.setattr(Peers, "end", lambda self, reason: ended.set())
    with Peers() as peers:
        for _ in range(fails):  # 2: of both processes
            peers.failed(ValueError("a failure"))
        if fails == 2:
            assert not ended.wait(1.0)
            return
        waiting = threading.Thread(target=_wait_in, args=[store])
        waiting.start()
        assert ended.wait(10.0)
        assert waiting.is_alive()
        TCPStore("127.0.0.1", store.port, is_master=False).set("never", "now")
        waiting.join()


def test_a_save_after_the_failure_of_another_process_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store, strategy = HashStore(), DataParallelStrategy()
    for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 0, "get_backend": "gloo"}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setattr(engines, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "barrier", _reset)
    with Peers() as peers:
        strategy.peers = peers
        with pytest.raises(RuntimeError, match=r"^reset$"):
            strategy.barrier()
        store.set(peers.key, "rank 1 failed first")
        peers.failed(RuntimeError("reset"))
        with pytest.raises(RuntimeError, match=r"^rank 1 failed first\nreset$"):
            strategy.barrier("Trainer.save_checkpoint")


def test_the_process_that_left_is_named_where_others_fail_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    store, rank, error = HashStore(), [0], RuntimeError("connection closed")
    for name, value in {
        "is_initialized": lambda: True,
        "get_world_size": lambda: 3,
        "get_rank": lambda: rank[0],
    }.items():
        monkeypatch.setattr(torch.distributed, name, value)
    monkeypatch.setattr(engines, "_get_default_store", lambda: store)
    failing, leaving = SimpleNamespace(), SimpleNamespace(poll=lambda: 3)
    with Peers(SimpleNamespace(procs=[failing, leaving])) as first, Peers() as second:
        second.key = first.key

        def fail() -> int:
            rank[0] = 1
            second.failed(ValueError())
            return 1

        failing.poll = fail
        first.failed(error)
    assert lines_with(str(error), "process 2", "exit status 3")


def _reset() -> None:
    raise RuntimeError("reset")


def _wait_in(store: TCPStore) -> None:
    with suppress(DistStoreError):
        store.wait(["never"], timedelta(seconds=20))


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_one_device_trains_as_without_it(engine: str, tmp_path: Path) -> None:
    plain, _ = fitted("baseline", tmp_path)
    module, trainer = fitted([engine, "baseline"], tmp_path, devices=1)
    assert trainer.strategy.world_size == 1
    assert engine_of(trainer.strategy) == engine
    assert engine_of(DataParallelStrategy()) == "ddp"
    assert engine_of(L.strategies.SingleDeviceStrategy()) == ""
    assert not torch.distributed.is_initialized()  # the group of one process ends with the run
    assert equal(plain, module)


def test_devices_of_preset_and_trainer_must_agree(tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match=mentions("trainer.devices=3", "devices=2")):
        solo.trainer({"devices": 3, **QUIET}, "ddp", ["devices=2"])
    assert solo.trainer({"devices": 2, **QUIET}, "ddp").num_devices == 2
    assert solo.trainer({"devices": "2", **QUIET}, "ddp", ["devices=2"]).num_devices == 2
    with pytest.raises(ConflictError, match=mentions("trainer.devices=2", "['ddp', 'bf16']")):
        solo.trainer({"devices": 2, **QUIET}, "bf16")


def test_a_parameter_without_a_gradient_is_named(tmp_path: Path) -> None:
    module = regression(L, Stack(blocks=2))
    module.spare = torch.nn.Linear(3, 3)
    with pytest.raises(
        RuntimeError, match=mentions("spare.weight, spare.bias", "strategy.find_unused_parameters=true")
    ):
        fitted("ddp", tmp_path, module, devices=1, accumulate_grad_batches=1)
    module = regression(L, Stack(blocks=2))
    module.spare = torch.nn.Linear(3, 3)
    fitted("ddp", tmp_path, module, ["strategy.find_unused_parameters=true"], devices=1, accumulate_grad_batches=1)


def test_a_parameter_that_is_frozen_during_the_fit_is_named(tmp_path: Path) -> None:
    module = regression(L, Stack(blocks=2))
    last = module.net.blocks[1]
    freeze = L.callbacks.LambdaCallback(on_train_batch_start=lambda *_: last.requires_grad_(False))
    names = [f"net.blocks.1.{name}" for name, _ in last.named_parameters()]
    with pytest.raises(RuntimeError, match=mentions(names[0], "strategy.find_unused_parameters=true")):
        fitted("ddp", tmp_path, module, devices=1, accumulate_grad_batches=1, callbacks=[freeze])
