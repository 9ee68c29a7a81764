"""Processes whose forward runs other modules than that of others; threads stand for processes here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from queue import Empty, Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from lightning_solo.errors import ConflictError
from lightning_solo.seams import same_modules
from lightning_solo.seams.same_modules import SameModules
from tests.messages import mentions
from tests.modules import Stack


class Processes:
    """Two processes, whose ends are messages in a queue."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, stack: ExitStack, change: Callable[[Stack], object] = lambda module: None
    ) -> None:
        self.ended: Queue[str] = Queue()
        self.batches = [0, 0]
        store = HashStore()
        monkeypatch.setattr(same_modules, "_get_default_store", lambda: store)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        self.modules, self.each = [], []
        for rank in (0, 1):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            loop = type("Loop", (), {"total_batch_idx": property(lambda _, rank=rank: self.batches[rank])})()
            trainer = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=loop), strategy=SimpleNamespace(timeout_s=20))
            peers: Any = SimpleNamespace(key="run", end=self.ended.put)
            self.modules.append(Stack(blocks=2))
            change(self.modules[-1])
            self.each.append(stack.enter_context(SameModules(self.modules[-1], trainer, "write it", peers)))
        self.pool = stack.enter_context(ThreadPoolExecutor(2))

    def run(self, rank: int, *blocks: int) -> None:
        for number in blocks:
            self.modules[rank].blocks[number](torch.ones(1, 8))

    def compare(self) -> list[BaseException | None]:
        futures = [self.pool.submit(each.compare) for each in self.each]
        return [future.exception(timeout=30) for future in futures]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    with ExitStack() as stack:
        yield Processes(monkeypatch, stack)


def test_other_modules_are_refused_with_their_names(processes: Processes) -> None:
    processes.run(0, 0, 1)
    processes.run(1, 1)
    for error in processes.compare():
        assert isinstance(error, ConflictError)
        with pytest.raises(ConflictError, match=mentions("rank 0 ran blocks.0.", "rank 1 ran no", "write it")):
            raise error


def test_another_order_is_refused_with_the_first_modules_that_differ(processes: Processes) -> None:
    processes.run(0, 0, 1)
    processes.run(1, 1, 0)
    for error in processes.compare():
        assert isinstance(error, ConflictError)
        assert "rank 0 ran blocks.0." in str(error)
        assert "rank 1 ran blocks.1." in str(error)


def test_the_same_modules_pass_in_each_batch_and_recomputed_ones_dont_count(processes: Processes) -> None:
    for batch in range(3):
        processes.batches = [batch, batch]
        for rank in (0, 1):
            processes.run(rank, 0, 1)
        assert processes.compare() == [None, None]
        processes.run(1, 0)  # in backward
        assert processes.compare() == [None, None]  # of a second backward


def test_a_backward_of_another_batch_is_refused(processes: Processes) -> None:
    processes.batches = [0, 1]  # the second process has left out the backward of batch 0
    for rank in (0, 1):
        processes.run(rank, 0)
    for error in processes.compare():
        assert isinstance(error, ConflictError)
        assert "batch 0 on rank 0; batch 1 on rank 1" in str(error)


def test_batches_without_backward_dont_disturb_a_process_that_is_late(processes: Processes) -> None:
    for batch in (0, 2, 4):  # training_step returned None for the others, in both processes
        processes.batches = [batch, batch]
        for rank in (0, 1):
            processes.run(rank, 0)
        waiting = processes.pool.submit(processes.each[0].compare)
        processes.each[1].compare()
        waiting.result(timeout=30)
    slots = {f"run/digest {slot}/0" for slot in (0, 1)}
    assert processes.each[0]._store.check(sorted(slots))  # one for each of two comparisons in a row


def test_parts_of_compiled_modules_arent_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        processes = Processes(monkeypatch, stack, lambda module: module.blocks[0].compile(backend="eager"))
        with torch.compiler.set_stance("force_eager"):  # as in a process that has reached the compiler's limit
            processes.run(0, 0, 1)
        processes.run(1, 1)
        assert processes.compare() == [None, None]


@pytest.mark.parametrize("case", ["another module", "another batch", "slow"])
def test_processes_that_wait_for_one_another_are_ended(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_modules, "STALL_S", 0.3)
    with ExitStack() as stack:
        processes = Processes(monkeypatch, stack)
        processes.run(0, 0)
        waiting = processes.pool.submit(processes.each[0].compare)
        if case == "another module":
            processes.run(1, 1)  # and waits in its forward
            assert "rank 1 ran blocks.1." in processes.ended.get(timeout=30)
        if case == "another batch":
            processes.batches[1] = 1
            processes.run(1, 0)  # and waits there, without the backward of batch 0
            assert "batch 0 on rank 0; batch 1 on rank 1" in processes.ended.get(timeout=30)
        if case == "slow":
            processes.run(1, 0)
            assert waiting.running()
            with pytest.raises(Empty):
                processes.ended.get(timeout=1.0)
        processes.each[0]._store.set("run", "failed")
        assert isinstance(waiting.exception(timeout=30), RuntimeError)


def test_two_pauses_of_a_run_dont_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_modules, "STALL_S", 0.1)
    with ExitStack() as stack:
        processes = Processes(monkeypatch, stack)
        for batch, late in ((0, 1), (1, 0)):  # each process waits once for the other, which loads its batch slowly
            processes.batches = [batch, batch]
            processes.run(1 - late, 0)
            waiting = processes.pool.submit(processes.each[1 - late].compare)
            processes.each[late]._store.wait([f"run/waiting/{1 - late}"], timedelta(seconds=30))
            with pytest.raises(Empty):
                processes.ended.get(timeout=0.3)
            processes.run(late, 0)
            processes.each[late].compare()
            waiting.result(timeout=30)
