"""Activations on a disk: the same bits whatever the disk's pace, few bytes on the host, and no file left."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as package
import pytest
import torch
from torch import Tensor, nn

from lightning_solo.errors import BudgetError, CapabilityError, ConflictError
from lightning_solo.nn.disk_offloading import STAGING_BUFFERS, DiskOffloader
from lightning_solo.nn.recomputation import inputs_kept_in
from lightning_solo.nn.scratch_file import PAGE, ScratchFile
from lightning_solo.planner.device import device as device_of
from lightning_solo.planner.planner import Planner
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.techniques.activation_offloading import technique as technique_module
from lightning_solo.techniques.activation_offloading.technique import ActivationOffloading
from lightning_solo.units import GiB
from tests.messages import mentions
from tests.modules import Stack, loader, regression
from tests.techniques.test_activation_offloading import BLOCKS, INPUT_BYTES, ROWS, WIDTH, inputs, stack
from tests.techniques.test_activation_offloading import gradients as plain_gradients
from tests.training import equal

pytestmark = [
    pytest.mark.any_device,
    pytest.mark.every_change,
    pytest.mark.filterwarnings("ignore:You are using a CUDA device"),
]


class Paced(Executor):
    """Runs calls in order, some of them when they are submitted, all others when one of them is waited for.

    Args:
        ready: returns whether the next call runs at once.
    """

    def __init__(self, ready: Callable[[], bool]) -> None:
        self.ready = ready
        self.calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.waited = 0

    def submit(self, call: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        future = Waited(self)
        self.calls.append((future, lambda: call(*arguments)))
        while self.calls and self.ready():
            self.run()
        return future

    def run(self) -> None:
        future, call = self.calls.popleft()
        try:
            future.set_result(call())
        except OSError as error:
            future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        assert cancel_futures
        self.calls.clear()


class Waited(Future[Any]):
    def __init__(self, worker: Paced) -> None:
        super().__init__()
        self.worker = worker

    def result(self, timeout: float | None = None) -> Any:
        self.worker.waited += not self.done()
        while not self.done():
            self.worker.run()
        return super().result(timeout)


def gradients(net: nn.Module, x: Tensor, offloader: DiskOffloader | None = None, inputs_only: bool = True) -> Any:
    if offloader is None:
        return plain_gradients(net, x)
    return plain_gradients(net, x, inputs_kept_in(offloader.saving) if inputs_only else offloader.saving())


# Acted, and memory


@pytest.mark.parametrize("blocks", [2, 3, 6, 9])
def test_inputs_go_to_the_disk_through_buffers_of_fixed_size(device: torch.device, tmp_path: Path, blocks: int) -> None:
    net, x = stack(device, True, blocks), inputs(device)
    plain = gradients(net, x)
    offloader = DiskOffloader(device, tmp_path, 256)
    for number in (1, 2, 3):
        offloader.leave(net)
        assert equal(plain, gradients(net, x, offloader))
        assert offloader.moved_bytes == number * blocks * INPUT_BYTES
        assert offloader.disk_bytes == blocks * INPUT_BYTES
        assert offloader.host_bytes == min(STAGING_BUFFERS, blocks) * INPUT_BYTES
        assert os.listdir(tmp_path) == []
    assert os.fstat(offloader._file._file.fileno()).st_size == offloader.disk_bytes
    offloader.free_buffers()
    assert (offloader.host_bytes, offloader.disk_bytes) == (0, 0)


def test_offloaded_tensors_are_read_as_written(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: dict[str, int] = {"pwritev": 0, "preadv": 0}

    def counting(name: str) -> Any:
        transfer = getattr(os, name)

        def counted(*arguments: Any) -> int:
            size = transfer(*arguments)
            done[name] += size
            return int(size)

        return counted

    for name in done:
        monkeypatch.setattr(os, name, counting(name))
    offloader = DiskOffloader(device, tmp_path, 256)
    net = stack(device, True)
    offloader.leave(net)
    gradients(net, inputs(device), offloader)
    offloader.free_buffers()
    # all are copied as they are saved; the last one is on the device still when backward comes to it
    assert done == {"pwritev": BLOCKS * INPUT_BYTES, "preadv": (BLOCKS - 1) * INPUT_BYTES}


def test_reading_runs_ahead_of_backward(device: torch.device, tmp_path: Path) -> None:
    worker = Paced(lambda: False)
    offloader = DiskOffloader(device, tmp_path, 256, worker=worker)
    net = stack(device, True, 9)
    offloader.leave(net)
    with inputs_kept_in(offloader.saving):
        loss = net(inputs(device)).square().sum()
    assert [future.done() for future, _ in worker.calls] == [False] * STAGING_BUFFERS  # forward waited for the others
    ahead: list[int] = []
    net.blocks[4].up.weight.register_hook(lambda _: ahead.append(len(offloader._reading)))
    loss.backward()
    assert ahead == [STAGING_BUFFERS - 1]
    offloader.free_buffers()


@pytest.mark.parametrize("rows", [1, 17, 100])
def test_sizes_are_rounded_up_to_pages(device: torch.device, tmp_path: Path, rows: int) -> None:
    pages = -(-rows * WIDTH * 4 // PAGE) * PAGE
    net, x = stack(device, True), inputs(device, rows)
    plain = gradients(net, x)
    offloader = DiskOffloader(device, tmp_path, 16)
    offloader.leave(net)
    assert equal(plain, gradients(net, x, offloader))
    assert (offloader.disk_bytes, offloader.host_bytes) == (BLOCKS * pages, STAGING_BUFFERS * pages)
    offloader.free_buffers()


def test_places_are_used_again() -> None:
    file = ScratchFile("/nowhere")
    with suppress(CapabilityError):  # nothing is written: the places are what is looked at
        file.take(PAGE)
    file._reserve, file._file = lambda size: None, open(os.devnull)  # type: ignore[method-assign]  # noqa: SIM115
    first, second, third = (file.take(size) for size in (PAGE, 2 * PAGE, 1))
    assert (first, second, third, file.bytes) == (0, PAGE, 3 * PAGE, 4 * PAGE)
    file.give_back(second)
    assert [file.take(PAGE), file.take(2 * PAGE), file.take(PAGE)] == [PAGE, 4 * PAGE, 2 * PAGE]
    assert file.bytes == 6 * PAGE
    file.close()


# Parity


@pytest.mark.parametrize("keep_on_device", [None, 0, 3 * INPUT_BYTES, 0.5])
@pytest.mark.parametrize("inputs_only", [True, False])
@pytest.mark.parametrize("pace", ["never", "always", *range(3)])
def test_no_bit_depends_on_the_pace_of_the_disk(
    device: torch.device, tmp_path: Path, pace: str | int, inputs_only: bool, keep_on_device: int | float | None
) -> None:
    numbers = random.Random(pace)
    worker = Paced(lambda: {"never": False, "always": True}.get(str(pace), numbers.random() < 0.6))
    net = stack(device, inputs_only)
    offloader = DiskOffloader(device, tmp_path, 256, keep_on_device=keep_on_device, worker=worker)
    for rows in (ROWS, ROWS, 3 * ROWS, 5, ROWS):
        x = inputs(device, rows) * rows  # other numbers in the same places
        plain = gradients(net, x)
        offloader.leave(net)
        assert equal(plain, gradients(net, x, offloader, inputs_only))
    assert offloader.moved_bytes > offloader.host_bytes > 0
    assert (worker.waited > 0) or pace == "always"
    offloader.free_buffers()


@pytest.mark.parametrize("pace", ["never", "always", *range(4)])
def test_graphs_in_any_order(device: torch.device, tmp_path: Path, pace: str | int) -> None:
    """Several forwards before their backwards, a graph that is dropped, and a second backward."""
    numbers = random.Random(pace)
    worker = Paced(lambda: {"never": False, "always": True}.get(str(pace), numbers.random() < 0.6))
    net, x = stack(device), inputs(device)

    def made(offloader: DiskOffloader | None) -> list[Tensor]:
        net.zero_grad()
        torch.manual_seed(3)
        losses = []
        for factor in (1, 2, 3, 4):
            if offloader is None:
                losses.append(net(x * factor).square().sum())
                continue
            with offloader.saving():
                losses.append(net(x * factor).square().sum())
        losses[0].backward()
        losses[0] = losses[3] = torch.zeros(())
        losses[1].backward(retain_graph=True)
        losses[2].backward()
        losses[1].backward()
        return [p.grad.cpu() for p in net.parameters() if p.grad is not None]

    plain = made(None)
    offloader = DiskOffloader(device, tmp_path, 256, worker=worker)
    offloader.leave(net)
    for _ in range(2):
        assert equal(plain, made(offloader))
    assert not offloader._file.taken
    assert len(offloader._idle) == STAGING_BUFFERS
    offloader.free_buffers()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_same_weights_with_and_without(home: ModuleType, make_trainer: Any, tmp_path: Path, precision: str) -> None:
    def fitted(*callbacks: Any) -> list[Tensor]:
        torch.manual_seed(0)
        module = regression(home, Stack(6, dropout=0.5))
        extra = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
        torch.manual_seed(1)
        make_trainer(home, callbacks=list(callbacks), precision=precision, max_steps=5, **extra).fit(module, loader())
        return [p.detach().cpu() for p in module.parameters()]

    offloading = ActivationOffloading("disk", 32, folder=str(tmp_path), allow_cpu=True)
    plain = fitted(ActivationCheckpointing())
    assert equal(plain, fitted(ActivationCheckpointing(), offloading))
    assert offloading.moved_bytes > 0


# Planned


@pytest.mark.long
@pytest.mark.cpu_only("a plan there takes real steps of small micro-batches")
def test_a_plan_counts_the_buffers_on_the_host_and_the_copies() -> None:
    def planned(**settings: Any) -> Any:
        callbacks = {"activation_checkpointing": {}, "activation_offloading": settings}
        batch = next(iter(loader(1, 2048, WIDTH)))
        make = lambda: regression(package, Stack(BLOCKS, WIDTH))  # noqa: E731
        planner = Planner(make, batch, {}, device_of("h200"), 64 * GiB, micro_batch=8192)
        return planner.plan("tried", compose({"precision": "32-true", "callback": callbacks}))

    block_input = 4 * 8192 * WIDTH
    on_host, on_disk = planned(), planned(mode="disk", folder="/not/there")
    assert (on_host.host_bytes, on_disk.host_bytes) == (BLOCKS * block_input, STAGING_BUFFERS * block_input)
    assert on_disk.peak_bytes == on_host.peak_bytes
    assert {span.stream for span in on_disk.timeline} == {"compute", "to device", "to host"}
    assert any("disk" in line for line in on_disk.assumptions)


# Refused


def test_a_folder_without_its_mode_is_refused() -> None:
    with pytest.raises(ConflictError, match=mentions("folder='/tmp'", "mode=disk", "folder=null")):
        ActivationOffloading(folder="/tmp")


def test_a_folder_that_is_missing_is_refused(make_trainer: Any, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    callbacks = [ActivationCheckpointing(), ActivationOffloading("disk", folder=missing, allow_cpu=True)]
    with pytest.raises(CapabilityError, match=mentions(missing, "callback.activation_offloading.folder=")):
        make_trainer(package, callbacks=callbacks).fit(regression(package), loader())


def test_a_folder_in_memory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(technique_module, "file_system", lambda path: "tmpfs")
    with pytest.raises(CapabilityError, match=mentions(str(tmp_path), "tmpfs", "mode=block_inputs")):
        ActivationOffloading("disk", folder=str(tmp_path))._disk_folder()
    assert ActivationOffloading("disk", folder=str(tmp_path), allow_cpu=True)._disk_folder() == tmp_path


def test_a_disk_that_is_full_ends_forward(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = stack(device, True), inputs(device)
    plain = gradients(net, x)
    offloader = DiskOffloader(device, tmp_path, 256)
    offloader.leave(net)
    reserve = ScratchFile._reserve

    def full(self: ScratchFile, size: int) -> None:
        if size > 3 * INPUT_BYTES:
            raise OSError(errno.ENOSPC, "full")
        reserve(self, size)

    with monkeypatch.context() as patched:
        patched.setattr(ScratchFile, "_reserve", full)
        with pytest.raises(BudgetError, match=mentions("32.00 KiB", str(tmp_path), "folder=")) as error:
            gradients(net, x, offloader)
    assert error.value.needed == 4 * INPUT_BYTES < error.value.available
    assert equal(plain, gradients(net, x))
    assert equal(plain, gradients(net, x, offloader))  # there is room again
    offloader.free_buffers()


def test_more_than_is_free_is_refused_before_it_is_written(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = list(os.statvfs(tmp_path))
    system[1], system[4] = 1000, 10  # the bytes of a fragment, and the free ones
    for name in ("statvfs", "fstatvfs"):
        monkeypatch.setattr(os, name, lambda _: os.statvfs_result(system))
    offloader = DiskOffloader(device, tmp_path, 256)
    net = stack(device, True)
    offloader.leave(net)
    with pytest.raises(BudgetError) as error:
        gradients(net, inputs(device, 2 * ROWS), offloader)
    assert (error.value.needed, error.value.available) == (2 * INPUT_BYTES, 10_000)
    assert offloader.moved_bytes == 0
    offloader.free_buffers()


@pytest.mark.parametrize(("name", "number"), [("pwritev", 0), ("pwritev", BLOCKS - 1), ("preadv", 0), ("preadv", 2)])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_an_error_of_the_disk_ends_the_fit_and_leaves_the_module_as_it_was(
    make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int, code: int
) -> None:
    transfer, calls = getattr(os, name), []

    def failing(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) > number:
            raise OSError(code, "broken")
        return int(transfer(*arguments))

    module = regression(package, Stack(BLOCKS))
    before = [(at, sorted(part.__dict__)) for at, part in module.net.named_modules()]
    offloading = ActivationOffloading("disk", 32, folder=str(tmp_path), allow_cpu=True)
    with monkeypatch.context() as patched:
        patched.setattr(os, name, failing)
        kind = BudgetError if code == errno.ENOSPC else CapabilityError
        with pytest.raises(kind, match=mentions(str(tmp_path), "folder=")):
            make_trainer(package, callbacks=[ActivationCheckpointing(), offloading]).fit(module, loader())
    assert [(at, sorted(part.__dict__)) for at, part in module.net.named_modules()] == before
    assert (offloading.host_bytes, offloading.disk_bytes) == (0, 0)
    assert not [thread for thread in threading.enumerate() if "scratch" in thread.name]
    again = ActivationOffloading("disk", 32, folder=str(tmp_path), allow_cpu=True)
    make_trainer(package, callbacks=[ActivationCheckpointing(), again]).fit(module, loader())


def test_a_failed_write_is_raised_by_its_read(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = os.pwritev, []

    def second_fails(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(errno.EIO, "broken")
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", second_fails)
    offloader = DiskOffloader(device, tmp_path, 256)
    x, losses = inputs(device).requires_grad_(), []
    for _ in range(3):
        with offloader.saving():
            losses.append(x.exp().sum())
    losses[0] = losses[0].detach()  # so its buffer is read to, not that of the second
    with pytest.raises(CapabilityError):
        losses[1].backward()
    offloader.free_buffers()


# Trace


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_of_a_fit(make_trainer: Any, tmp_path: Path, fails: bool) -> None:
    module = regression(package, Stack(BLOCKS))
    offloading = ActivationOffloading("disk", 32, folder=str(tmp_path), allow_cpu=True)
    seen: list[tuple[int, list[str]]] = []

    class Look(package.Callback):
        def on_before_zero_grad(self, *_: Any) -> None:
            seen.append((offloading.disk_bytes, os.listdir(tmp_path)))
            if fails and len(seen) == 3:
                raise ArithmeticError

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    files, threads = open_files(), threading.active_count()
    with suppress(ArithmeticError):
        make_trainer(package, callbacks=[ActivationCheckpointing(), offloading, Look()]).fit(module, loader())
    assert len(seen) >= 3
    assert seen[-1] == (BLOCKS * PAGE, [])  # an input of 128 bytes takes a page
    assert (offloading.disk_bytes, offloading.host_bytes, os.listdir(tmp_path)) == (0, 0, [])
    assert (open_files(), threading.active_count()) <= (files, threads)


def test_a_graph_that_outlives_its_file_is_refused(device: torch.device, tmp_path: Path) -> None:
    net = stack(device, True)
    offloader = DiskOffloader(device, tmp_path, 256)
    offloader.leave(net)
    with inputs_kept_in(offloader.saving):
        loss = net(inputs(device)).square().sum()
    offloader.free_buffers()
    with pytest.raises(ConflictError, match=mentions("fit has ended")):
        loss.backward()
