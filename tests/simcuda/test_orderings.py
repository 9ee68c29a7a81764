"""Each ordering of streams and the host in the package is needed: without it one of these fails.

`examples/measure_orderings.py` removes them one by one.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

from lightning_solo.ladder.measurement import Clock
from lightning_solo.memory import host_slabs
from lightning_solo.memory.host_slabs import host_tensors
from lightning_solo.memory.weight_ring import WeightRing
from lightning_solo.nn.blocks import repeated_blocks
from lightning_solo.nn.disk_offloading import DiskOffloader
from lightning_solo.nn.host_weights import store, weights_of_blocks
from lightning_solo.nn.offloading import Offloader
from lightning_solo.nn.recomputation import checkpoint_blocks, inputs_kept_in
from lightning_solo.nn.streaming import stream_blocks, taken_out
from lightning_solo.optim import CompactAdamW, StepInBackward, adamw_update, state_placement
from lightning_solo.optim.staging import Staging
from tests.modules import Stack, loader, regression
from tests.simcuda import device
from tests.training import equal

pytestmark = [pytest.mark.simcuda, pytest.mark.filterwarnings("ignore:You are using a CUDA device")]
CUDA = torch.device("cuda")
COUNT = 5000
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


@pytest.fixture(params=["copies", "all"])
def held_back(request: pytest.FixtureRequest) -> Any:
    """Hold back copies, and then kernels as well."""
    with device.delayed(request.param):
        yield


def pieces(number: int, count: int = COUNT) -> list[Tensor]:
    return host_tensors([(count, torch.float32)] * number, CUDA)


# --- staging ---


@pytest.mark.usefixtures("held_back")
@pytest.mark.parametrize("number", [1, 4, 7])
def test_pieces_pass_through_the_device_again_and_again(number: int) -> None:
    staging, made = Staging(CUDA), pieces(number)
    for _ in range(4):
        for n, piece in enumerate(made):
            with staging.on_device({"x": piece}) as staged:
                staged["x"].mul_(2).add_(n + 1)
    staging.wait()
    assert [piece.unique().tolist() for piece in made] == [[15.0 * (n + 1)] for n in range(number)]


@pytest.mark.usefixtures("held_back")
def test_a_slot_is_used_again_after_an_error_within_it() -> None:
    staging, made = Staging(CUDA), pieces(1)
    for _ in range(8):
        with suppress(ArithmeticError), staging.on_device({"x": made[0]}) as staged:
            staged["x"].add_(1)
            raise ArithmeticError
    staging.wait()


@pytest.mark.usefixtures("held_back")
def test_slots_are_given_up_while_copies_are_under_way() -> None:
    staging, small, large = Staging(CUDA), pieces(8, 1000), pieces(1, 30_000)
    staging.serve(16 * 8 * 4000)  # eight slots of 4,000 bytes, and three of 120,000
    for piece in (*small, *large):
        with staging.on_device({"x": piece}, unread=True) as staged:
            staged["x"].fill_(7)
    others = [torch.full((1000,), 3.0, device=CUDA) for _ in range(8)]  # in what buffers were
    staging.wait()
    assert len(others) == 8
    assert all(piece.unique().tolist() == [7.0] for piece in (*small, *large))


@pytest.mark.usefixtures("held_back")
def test_a_buffer_in_memory_that_others_have_just_left() -> None:
    staging, (piece,) = Staging(CUDA), pieces(1, 3000)
    piece.fill_(5)
    left = torch.ones(3000, device=CUDA)
    left.mul_(2)
    del left
    with staging.on_device({"x": piece}) as staged:
        total = staged["x"].sum()
    assert total.item() == 15_000


@pytest.mark.usefixtures("held_back")
def test_pinned_memory_is_freed_while_copies_are_under_way() -> None:
    made = pieces(2)
    target = torch.zeros(COUNT, device=CUDA)
    target.copy_(made[0].fill_(3), non_blocking=True)
    made[1].copy_(target, non_blocking=True)
    del made
    assert target.sum().item() == 3 * COUNT


# --- states and gradients on the host ---


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(70, 128), nn.Tanh(), nn.Linear(128, 70), nn.Tanh(), nn.Linear(70, 67)).to(CUDA)


def step(module: nn.Module, optimizer: Any, times: int = 2) -> None:
    kind = next(module.parameters()).dtype
    for _ in range(times):
        optimizer.zero_grad()
        module(torch.ones(6, 70, device=CUDA, dtype=kind)).float().square().mean().backward()
        optimizer.step()


def after_steps(budget: Any = 0) -> tuple[nn.Module, CompactAdamW]:
    module = net()
    optimizer = CompactAdamW(module.parameters(), lr=1e-2, state_budget=budget)
    step(module, optimizer)
    return module, optimizer


READS: dict[str, Callable[[nn.Module, CompactAdamW], Any]] = {
    "state_dict": lambda module, optimizer: [
        value.clone() for state in optimizer.state_dict()["state"].values() for value in state.values()
        if isinstance(value, Tensor)
    ],
    "state": lambda module, optimizer: [
        value.clone() for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    ],
    "load_state_dict": lambda module, optimizer: optimizer.load_state_dict(SAVED),
    "copy": lambda module, optimizer: copy.deepcopy(optimizer),
    "master_weight": lambda module, optimizer: [optimizer.master_weight(p) for p in module.parameters()],
    "set_master_weight": lambda module, optimizer: [
        optimizer.set_master_weight(p, torch.ones_like(p, dtype=torch.float32)) for p in module.parameters()
    ],
    "adamw_state_dict": lambda module, optimizer: optimizer.adamw_state_dict(),
}  # fmt: skip
SAVED: dict[str, Any] = {}


@pytest.mark.parametrize("read", READS)
def test_the_host_reads_states_right_after_a_step(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(adamw_update.CHUNK, "cuda", 4096)
    module, optimizer = after_steps()
    assert optimizer.host_bytes
    if read == "load_state_dict":
        SAVED.update(copy.deepcopy(optimizer.state_dict()))
        step(module, optimizer)
    READS[read](module, optimizer)
    step(module, optimizer)
    optimizer.state_dict()


def test_states_are_read_of_parameters_that_have_left_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(adamw_update.CHUNK, "cuda", 4096)
    module, optimizer = after_steps()
    module.cpu()
    assert optimizer.control().scale.device.type == "cpu"  # what was for the device is dropped, the way back too
    READS["state"](module, optimizer)


def test_states_return_to_the_device_after_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_placement, "free_bytes", lambda device: 2**30)
    monkeypatch.setattr(host_slabs, "host_room", lambda: 2**40)
    module, optimizer = after_steps(budget="auto")
    step(module, optimizer)
    assert optimizer.host_bytes == 0


def pinned_tensors(but: Sequence[Tensor] = ()) -> list[Tensor]:
    """Return all pinned tensors of the process, without those of earlier tests, which may be anything."""
    found = [one for one in gc.get_objects() if type(one) is Tensor and one.device.type == "cpu" and one.numel()]
    return [one for one in found if one.is_pinned() and not any(one is other for other in but)]


@pytest.mark.parametrize("compact", [True, False])
def test_gradients_on_the_host_are_dropped_while_they_are_under_way(compact: bool) -> None:
    others = pinned_tensors()
    module = net()
    optimizer: Any = (
        CompactAdamW(module.parameters(), lr=1e-2) if compact else torch.optim.AdamW(module.parameters(), foreach=False)
    )
    release = StepInBackward(optimizer, accumulation=2, max_norm=0.1, buffer="host")
    kind = next(module.parameters()).dtype
    for window in range(3):
        for _ in range(2):
            module(torch.ones(6, 70, device=CUDA, dtype=kind)).float().square().mean().backward()
        if window < 2:
            release.step()
    sums = pinned_tensors(others)
    assert sums
    release.remove()
    assert all(torch.isfinite(one).all() for one in sums)


def test_gradients_get_other_room_while_they_are_under_way() -> None:
    others = pinned_tensors()
    module = net()
    release = StepInBackward(CompactAdamW(module.parameters()), accumulation=2, buffer="host")
    kind = next(module.parameters()).dtype
    module(torch.ones(6, 70, device=CUDA, dtype=kind)).float().square().mean().backward()
    sums = pinned_tensors(others)
    assert sums
    release.forget()
    release.allocate()
    assert all(torch.isfinite(one).all() for one in sums)


# --- saved tensors on the host ---

SHAPE = (32, 64)


def saved_gradients(
    net: nn.Module, offloader: Offloader | None, checkpointed: bool, scale: float = 1.0
) -> list[Tensor]:
    """Return the gradients of a stack of blocks, on the device; copies may be under way still."""
    net.zero_grad()
    torch.manual_seed(3)
    x = torch.linspace(-1, 1, 32 * 64, device=CUDA).reshape(SHAPE) * scale
    saving = nullcontext if offloader is None else offloader.saving
    with inputs_kept_in(saving) if checkpointed else saving():
        loss = net(x).square().sum()
    loss.backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def assert_gradients_are_plain(net: nn.Module, offloader: Offloader, checkpointed: bool) -> None:
    for scale in (1.0, 2.0, 3.0):  # other numbers in the same buffers
        made = [gradient.clone() for gradient in saved_gradients(net, offloader, checkpointed, scale)]
        assert equal(made, saved_gradients(net, None, checkpointed, scale))
    assert offloader.moved_bytes > offloader.host_bytes > 0


def offloaded(
    checkpointed: bool, in_flight: int = 1, keep_on_device: int | float | None = None
) -> tuple[nn.Module, Offloader]:
    torch.manual_seed(1)
    net = Stack(6, 64, dropout=0.5).to(CUDA)
    if checkpointed:
        checkpoint_blocks(repeated_blocks(net), verify=False)
    offloader = Offloader(CUDA, 256, in_flight, keep_on_device)
    offloader.leave(net)
    return net, offloader


@pytest.mark.parametrize(("in_flight", "keep_on_device"), [(1, None), (4, None), (1, 3 * 8192), (1, 0.5)])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_published_races_of_saved_tensors_on_the_host(
    checkpointed: bool, in_flight: int, keep_on_device: int | float | None, held_back: Any
) -> None:
    """As torchtitan 2581: a host buffer is filled while the step before is still reading it.

    And as DeepSpeed 8181 and 8186: memory of the device is used again while it is copied from; what comes back is read
    before it is there, or into memory that is in use.
    """
    net, offloader = offloaded(checkpointed, in_flight, keep_on_device)
    assert_gradients_are_plain(net, offloader, checkpointed)


@pytest.mark.parametrize("keep_on_device", [None, 3 * 8192])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_buffers_between_device_and_disk(
    checkpointed: bool, keep_on_device: int | None, held_back: Any, tmp_path: Path
) -> None:
    """A buffer is written to the disk before it is filled, or filled from the disk while it is copied from."""
    net, _ = offloaded(checkpointed)
    offloader = DiskOffloader(CUDA, tmp_path, 256, keep_on_device=keep_on_device)
    offloader.leave(net)
    assert_gradients_are_plain(net, offloader, checkpointed)
    offloader.free_buffers()


@pytest.mark.usefixtures("held_back")
@pytest.mark.parametrize("keep_on_device", [None, 0.5])
def test_a_graph_is_dropped_while_its_tensors_are_under_way(keep_on_device: float | None) -> None:
    net, offloader = offloaded(checkpointed=False, in_flight=4, keep_on_device=keep_on_device)
    for _ in range(3):
        with offloader.saving():
            loss = net(torch.ones(SHAPE, device=CUDA)).sum()
        del loss
        others = [torch.full(SHAPE, 3.0, device=CUDA) for _ in range(40)]  # in what it leaves
        assert all(other.sum().item() == 3 * 32 * 64 for other in others)


@pytest.mark.usefixtures("held_back")
def test_a_backward_fails_while_tensors_come_back() -> None:
    net, offloader = offloaded(checkpointed=True)

    def fail(*_: Any) -> None:
        raise ArithmeticError

    net.blocks[3].up.weight.register_hook(fail)
    with suppress(ArithmeticError):
        saved_gradients(net, offloader, checkpointed=True)
    torch.ones(1, device=CUDA, requires_grad=True).sum().backward()  # torch keeps a graph that failed until then
    gc.collect()
    others = [torch.full(SHAPE, 3.0, device=CUDA) for _ in range(40)]
    assert all(other.sum().item() == 3 * 32 * 64 for other in others)


# --- weights on the host ---


def stored(net: nn.Module, window: int) -> WeightRing:
    """Move a stack's blocks to the host, and the rest to the device."""
    blocks = repeated_blocks(net)
    records, places = stream_blocks(blocks), weights_of_blocks(net, blocks)
    ring = store(places, records, CUDA, window)
    with taken_out([place for each in places.values() for place in each]):
        net.to(CUDA)
    return ring


def trained(
    window: int | None,
    states: str = "device",
    checkpointed: bool = False,
    frozen: bool = False,
    clips: bool = False,
    kept_on: str = "host",
) -> list[list[Tensor]]:
    """Return the weights after each of four steps, read by the host at once; with the blocks' on the host.

    Under clipping by norm blocks are updated in the next forward, and weights are read after each second step.
    """
    torch.manual_seed(1)
    net = Stack(6, 32)
    for block in net.blocks if frozen else ():
        block.up.requires_grad_(False)
    ring = None if window is None else stored(net, window)
    if ring is None:
        net.to(CUDA)
    if checkpointed:
        checkpoint_blocks(repeated_blocks(net), verify=False)
    made: list[list[Tensor]] = []
    if ring is not None:
        ring.leave_host()
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer: Any = (
        CompactAdamW(parameters, lr=1e-2, master_bits=32, state_budget=0)
        if states == "host"
        else torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
    )
    if states == "host":
        optimizer.place_states()
    with StepInBackward(optimizer, max_norm=0.5 if clips else None, buffer=kept_on) as release:
        if ring is not None:
            ring.rest()
            release.arriving, ring.flush = ring.arrive if clips else ring.update, release.flush
        if ring is not None and clips:
            release.postpone = ring.postpone
        for step in range(4):
            if ring is not None and not ring.waits:
                ring.begin()
            x = torch.linspace(-1, 1, 8 * 32, device=CUDA).reshape(8, 32) * (step + 1)
            net(x).square().sum().backward()
            release.step()
            if clips and step % 2 == 0:
                assert ring is None or ring.waits
                continue
            if ring is not None:
                ring.rest()
            made.append([p.detach().cpu().clone() for p in net.parameters()])
            with torch.no_grad():
                net(x)  # as a validation does
    if ring is not None:
        assert ring.stores == 6 * (2 if clips and window == 6 else 4)
        ring.close()
    return made


@pytest.mark.usefixtures("held_back")
@pytest.mark.parametrize(
    ("window", "states", "checkpointed", "frozen"),
    [(2, "device", False, False), (3, "host", True, False), (2, "device", True, True), (6, "host", False, False)],
)
def test_blocks_come_are_updated_and_go_back(window: int, states: str, checkpointed: bool, frozen: bool) -> None:
    assert equal(trained(window, states, checkpointed, frozen), trained(None, states, checkpointed, frozen))


@pytest.mark.usefixtures("held_back")
@pytest.mark.parametrize(
    ("window", "states", "kept_on"),
    [(2, "device", "host"), (3, "host", "host"), (3, "host", "device"), (6, "host", "device")],
)
def test_blocks_are_updated_beside_the_next_forward_by_kept_gradients(window: int, states: str, kept_on: str) -> None:
    resident = trained(None, states, True, clips=True)
    assert equal(trained(window, states, True, clips=True, kept_on=kept_on), resident)


@pytest.mark.usefixtures("held_back")
def test_blocks_that_were_updated_ahead_go_back_though_no_forward_used_them() -> None:
    net = Stack(3, 32)
    ring = stored(net, 3)
    weights = [block.up.weight for block in net.blocks]
    before = [weight.detach().clone() for weight in weights]

    def step(parameters: list[Tensor]) -> None:
        for p in parameters:
            p.add_(1)

    ring.begin()
    with torch.no_grad():
        ring.postpone(weights, step)
        ring.load(0)
    assert not ring.waits
    ring.rest()
    for weight, other in zip(weights, before, strict=True):
        assert torch.allclose(weight - 1, other, atol=1e-6)
    ring.close()


@pytest.mark.usefixtures("held_back")
def test_a_block_is_updated_again_while_it_goes_back_and_is_changed_on_the_host() -> None:
    net = Stack(4, 32)
    ring = stored(net, 3)
    weight = net.blocks[0].up.weight
    before = weight.detach().clone()
    for _ in range(3):
        ring.begin()
        with torch.no_grad():
            for number in (0, 1, 0, 2, 3):
                ring.load(number)
                ring.update(weight)  # from 1 and 2 on it comes late
                weight.add_(1)
        ring.rest()
        before += 5
        assert torch.allclose(weight, before)
        before -= 1
        net.blocks[0].up.load_state_dict({"weight": weight.detach() - 1, "bias": net.blocks[0].up.bias.detach()})


@pytest.mark.usefixtures("held_back")
def test_the_host_reads_at_once_what_a_block_changed_outside_a_step() -> None:
    net = Stack(2, 32)
    ring, weight = stored(net, 2), net.blocks[0].up.weight
    before = weight.detach().clone()
    with ring.using(0), torch.no_grad():
        weight.add_(1)
    assert torch.equal(weight, before + 1)


# --- fits ---


def test_the_clock_stops_when_the_device_is_done(tmp_path: Path) -> None:
    clock = Clock()
    quiet = {**QUIET, "accelerator": "cuda", "max_steps": 2, "default_root_dir": str(tmp_path)}
    trainer = L.Trainer(**quiet, callbacks=[clock])
    with device.counted() as counts:
        trainer.fit(regression(L), loader(2))
    waits = [one for one in counts.operations if (one.kind, one.name) == ("synchronise", "device")]
    assert sum("measurement.py" in one.line for one in waits) == 2
