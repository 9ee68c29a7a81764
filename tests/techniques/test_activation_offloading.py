"""Activation offloading acts, changes no bit, frees the device of the bytes it claims and leaves no trace."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import lightning.pytorch as package
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import lightning_solo as solo
from lightning_solo.errors import BudgetError, CapabilityError, ConflictError, NothingToDoError, PresetError
from lightning_solo.memory import host_slabs
from lightning_solo.memory.ledger import Ledger
from lightning_solo.nn.blocks import repeated_blocks
from lightning_solo.nn.offloading import Offloader
from lightning_solo.nn.recomputation import checkpoint_blocks, inputs_kept_in
from lightning_solo.planner.device import device as device_of
from lightning_solo.planner.planner import Planner
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.techniques.activation_offloading.technique import ActivationOffloading
from lightning_solo.units import GiB
from tests.messages import mentions
from tests.modules import Held, Stack, loader, regression
from tests.training import equal

pytestmark = [
    pytest.mark.any_device,
    pytest.mark.every_change,
    pytest.mark.filterwarnings("ignore:activation offloading. mode=all moves"),
    pytest.mark.filterwarnings("ignore:You are using a CUDA device"),
]
ROWS, WIDTH, BLOCKS = 32, 64, 6
INPUT_BYTES = 4 * ROWS * WIDTH  # of a block, in fp32


def stack(device: torch.device, checkpointed: bool = False, blocks: int = BLOCKS) -> Stack:
    torch.manual_seed(1)
    net = Stack(blocks, WIDTH, dropout=0.5).to(device)
    if checkpointed:
        checkpoint_blocks(repeated_blocks(net), verify=False)
    return net


def inputs(device: torch.device, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(2)).to(device)


def gradients(net: nn.Module, x: Tensor, context: AbstractContextManager[Any] | None = None) -> list[Tensor]:
    """Return the gradients of parameters and input of a sum of the output, with the same random numbers each time."""
    net.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(3)
    with context or nullcontext():
        loss = net(x).square().sum()
    loss.backward()
    return [p.grad.cpu() for p in (*net.parameters(), x) if p.grad is not None]


def offloader_for(
    net: nn.Module, min_bytes: int = 256, in_flight: int = 1, keep_on_device: int | float | None = None
) -> Offloader:
    offloader = Offloader(next(net.parameters()).device, min_bytes, in_flight, keep_on_device)
    offloader.leave(net)
    return offloader


class Fused(nn.Module):
    """Attention whose projections of query, key and value are views of one storage, at three offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return x + self.out((query @ key.T / WIDTH**0.5).softmax(-1) @ value)


# Acted


def test_a_storage_is_moved_once_and_weights_and_small_ones_stay(device: torch.device) -> None:
    class Saves(nn.Module):
        """Saves two views and the whole of one storage, its weight, a view of that, and a small tensor."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()  # saves y
            first, second = y.chunk(2)
            return (first * second).sum() + (y @ self.weight.t()).sum() * x.mean()

    net = Saves().to(device)
    x = inputs(device).requires_grad_()
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        net(x)
    storages = {tensor.untyped_storage().data_ptr() for tensor in packed}
    assert len(packed) > len(storages)  # several tensors of one storage
    plain = gradients(net, x)
    offloader = offloader_for(net)
    assert equal(plain, gradients(net, x, offloader.saving()))
    assert offloader.moved_bytes == offloader.host_bytes == INPUT_BYTES  # y alone


def test_views_of_a_fused_projection_come_back_from_their_places(device: torch.device) -> None:
    torch.manual_seed(1)
    net, x = Fused().to(device), inputs(device)
    plain = gradients(net, x)
    offloader = offloader_for(net)
    assert equal(plain, gradients(net, x, offloader.saving()))
    assert offloader.moved_bytes >= 3 * INPUT_BYTES


@pytest.mark.parametrize("in_flight", [1, 4])
def test_all_that_is_saved_is_moved_and_the_buffers_are_used_again(device: torch.device, in_flight: int) -> None:
    net, x = stack(device), inputs(device)
    plain = gradients(net, x)
    offloader = offloader_for(net, in_flight=in_flight)
    assert equal(plain, gradients(net, x, offloader.saving()))
    moved, taken = offloader.moved_bytes, offloader.host_bytes
    # Of each block in fp32: its input, the norm's output, relu's output before dropout and behind it, and the mask of
    # dropout, of 1 byte on a GPU, in fp32 on a CPU; the norm's 2 x 32 numbers stay. Then the head's input.
    assert moved >= BLOCKS * (2 * INPUT_BYTES + 2 * 4 * INPUT_BYTES) + INPUT_BYTES
    assert taken == moved
    for number in (2, 3):
        assert equal(plain, gradients(net, x, offloader.saving()))
        assert (offloader.moved_bytes, offloader.host_bytes) == (number * moved, taken)


def test_of_recomputed_blocks_the_inputs_alone_are_moved(device: torch.device) -> None:
    net, x = stack(device, checkpointed=True), inputs(device)
    plain = gradients(net, x)
    offloader = offloader_for(net)
    assert equal(plain, gradients(net, x, inputs_kept_in(offloader.saving)))
    assert offloader.moved_bytes == offloader.host_bytes == BLOCKS * INPUT_BYTES


class Attending(nn.Module):
    """A block whose attention takes the same tensor several times, and asks for that by `is`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


def test_a_tensor_that_a_block_takes_several_times_comes_back_as_one(device: torch.device) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(*[Attending() for _ in range(3)]).to(device)
    x = inputs(device)[None]
    plain = gradients(net, x)
    checkpoint_blocks({f"{number}": block.attention for number, block in enumerate(net)})
    offloader = offloader_for(net)
    assert equal(gradients(net, x, inputs_kept_in(offloader.saving)), plain)
    assert offloader.moved_bytes == 3 * INPUT_BYTES


@pytest.mark.parametrize("keep_on_device", [0, 3 * INPUT_BYTES, 3 * INPUT_BYTES + 1, 0.5, 10 * INPUT_BYTES, 1.0])
def test_under_a_limit_the_first_inputs_are_moved_and_the_last_stay(
    device: torch.device, keep_on_device: int | float
) -> None:
    net, x = stack(device, checkpointed=True), inputs(device).requires_grad_()
    plain = gradients(net, x)
    offloader = offloader_for(net, keep_on_device=keep_on_device)
    share = keep_on_device if isinstance(keep_on_device, float) else keep_on_device / (BLOCKS * INPUT_BYTES)
    staying = max(1, min(BLOCKS, int(share * BLOCKS)))  # the last one, whatever the limit
    for number in (1, 2, 3):
        torch.manual_seed(3)
        net.zero_grad()
        x.grad = None
        with inputs_kept_in(offloader.saving):
            loss = net(x).square().sum()
        here = [moved.whole is not None for _, moved in sorted(offloader._moved.items())]
        assert here == [False] * (BLOCKS - staying) + [True] * staying
        loss.backward()
        assert equal(plain, [each.grad.cpu() for each in (*net.parameters(), x)])
        assert offloader.saved_bytes == BLOCKS * INPUT_BYTES
        moved = BLOCKS - staying if number == 1 or keep_on_device != 0 else BLOCKS  # 0: the last is expected to leave
        assert offloader.host_bytes == moved * INPUT_BYTES
        assert offloader.moved_bytes <= number * moved * INPUT_BYTES


def test_tensors_dropped_in_forward_free_the_window(device: torch.device) -> None:
    x = inputs(device).requires_grad_()
    offloader = Offloader(device, 256, keep_on_device=2 * INPUT_BYTES)
    with offloader.saving():
        loss = (x * 1).exp().sum()
        for number in range(5):
            (x * number).exp()
    assert (offloader.saved_bytes, offloader.moved_bytes) == (6 * INPUT_BYTES, 0)
    loss.backward()


def test_storages_are_copied_when_saved_from_the_second_micro_batch_on(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = stack(device, checkpointed=True), inputs(device)
    offloader = offloader_for(net, keep_on_device=4 * INPUT_BYTES)
    copied: list[tuple[int, int]] = []  # number of the storage, and of the last one saved when it was copied
    copy = offloader._copy_to_host

    def noted(moved: Any) -> None:
        copied.append((moved.number, offloader._count - 1))
        copy(moved)

    monkeypatch.setattr(offloader, "_copy_to_host", noted)
    gradients(net, x, inputs_kept_in(offloader.saving))
    assert copied == [(0, 4), (1, 5)]  # at the fifth and the sixth
    copied.clear()
    gradients(net, x, inputs_kept_in(offloader.saving))
    assert copied == [(6, 6), (7, 7)]


def test_the_callbacks_move_in_either_home(home: ModuleType, make_trainer: Any) -> None:
    callbacks = [ActivationCheckpointing(), ActivationOffloading(min_offload_bytes=64, allow_cpu=True)]
    make_trainer(home, callbacks=callbacks).fit(regression(home), loader(batches=5, batch_size=4, width=8))
    assert callbacks[1].moved_bytes == 5 * 3 * (4 * 4 * 8)  # batches x blocks x an input of 4 rows
    assert callbacks[1].host_bytes == 0  # freed with the fit


def test_mode_all_warns_of_the_bytes_moved_per_micro_batch(home: ModuleType, make_trainer: Any) -> None:
    callback = ActivationOffloading(mode="all", min_offload_bytes=64, allow_cpu=True)
    with pytest.warns(UserWarning, match=r"mode=all moves .* in every micro-batch.*mode=block_inputs"):
        make_trainer(home, callbacks=[callback]).fit(regression(home), loader())


# Refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep_on_device": 4096}, "keep_on_device=4096.*1.00 MiB.*from 0 to 1"),
        ({"keep_on_device": "2GB"}, "keep_on_device='2GB'.*GiB"),
    ],
)
def test_wrong_arguments_are_refused_when_constructed(arguments: Any, message: str) -> None:
    with pytest.raises(PresetError, match=message):
        ActivationOffloading(**arguments)


@pytest.mark.cpu_only("on a GPU nothing is refused")
def test_a_cpu_is_refused_by_its_remedy(home: ModuleType, make_trainer: Any) -> None:
    with pytest.raises(CapabilityError, match=r"needs a CUDA device.*allow_cpu=true"):
        make_trainer(home, callbacks=[ActivationOffloading()]).fit(regression(home), loader())


def test_a_preset_in_which_nothing_is_recomputed_is_refused() -> None:
    with pytest.raises(ConflictError, match=r"mode=block_inputs.*write \+callback=activation_checkpointing.*mode=all"):
        solo.trainer_kwargs("bf16", ["+callback=activation_offloading"])


def test_two_limits_in_bytes_are_refused() -> None:
    budget = "callback.activation_checkpointing.budget"
    keep = "callback.activation_offloading.keep_on_device"
    with pytest.raises(ConflictError, match=rf"{keep}=0.5 .*{budget}=6GiB.*write {keep}=null"):
        solo.trainer_kwargs("offloading", [f"{budget}=6GiB", f"{keep}=0.5"])
    allowed = solo.trainer_kwargs(
        "offloading", [f"{budget}=0.5", f"{keep}=2GiB", "callback.activation_offloading.allow_cpu=true"]
    )
    assert [one.keep_on_device for one in allowed["callbacks"] if isinstance(one, ActivationOffloading)] == ["2GiB"]


def test_a_fit_in_which_no_block_is_recomputed_is_refused(home: ModuleType, make_trainer: Any) -> None:
    with pytest.raises(
        NothingToDoError, match=r"write \+callback=activation_checkpointing, or callback.activation_offloading.mode=all"
    ):
        make_trainer(home, callbacks=[ActivationOffloading(allow_cpu=True)]).fit(regression(home), loader())


@pytest.mark.parametrize("mode", ["block_inputs", "all"])
def test_a_fit_in_which_all_is_too_small_is_reported(home: ModuleType, make_trainer: Any, mode: str) -> None:
    callbacks = [ActivationCheckpointing(), ActivationOffloading(mode, allow_cpu=True)]
    with pytest.warns(UserWarning, match=r"largest saved tensor has 128 bytes.*min_offload_bytes=1048576; write a sm"):
        make_trainer(home, callbacks=callbacks).fit(regression(home), loader())


@pytest.mark.row(68)
def test_a_host_that_is_too_small_is_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = stack(device), inputs(device)
    offloader = offloader_for(net)
    with monkeypatch.context() as patched:
        patched.setattr(host_slabs, "host_memory", lambda: (2**30, INPUT_BYTES))  # of which a twentieth is left
        with pytest.raises(BudgetError, match=mentions("activations", "host memory", "smaller micro-batches")) as error:
            gradients(net, x, offloader.saving())
    assert (error.value.needed, error.value.available) == (INPUT_BYTES, INPUT_BYTES * 19 // 20)
    assert equal(gradients(net, x), gradients(net, x, offloader.saving()))


@pytest.mark.parametrize("min_bytes", [256, 2**20])  # moved, and left
@pytest.mark.row(78)
def test_a_change_in_place_of_what_is_saved_is_refused(device: torch.device, min_bytes: int) -> None:
    offloader = Offloader(device, min_bytes)
    x = inputs(device).requires_grad_()
    with offloader.saving():
        y = x.exp()
        z = x.sigmoid()
        later = [torch.ones_like(x) * 2 for _ in range(3)]  # others are saved behind it
        loss = y.sum() + z.sum() + sum((x * one).sum() for one in later)
        y.add_(1)
    with pytest.raises(ConflictError, match=r"changed in place afterwards.*Write x = x \+ y"):
        loss.backward()
    with offloader.saving():
        loss = x.exp().sum()
    loss.backward()


def test_a_storage_changed_between_two_uses_is_moved_twice(device: torch.device) -> None:
    def loss(x: Tensor) -> Tensor:
        scale = torch.full((ROWS, WIDTH), 2.0, device=device)
        first = (x * scale.clone()).sum()
        with torch.no_grad():
            scale += 1
        return first + (x * scale).square().sum()

    x = inputs(device).requires_grad_()
    (plain,) = torch.autograd.grad(loss(x), [x])
    offloader = Offloader(device, 256)
    with offloader.saving():
        made = loss(x)
    (moved,) = torch.autograd.grad(made, [x])
    assert torch.equal(plain.cpu(), moved.cpu())


# Parity


@pytest.mark.parametrize(("mode", "keep"), [("block_inputs", None), ("all", None), ("block_inputs", 0.4), ("all", 0.6)])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.row(78)
def test_the_same_weights_with_and_without(
    home: ModuleType, make_trainer: Any, precision: str, mode: str, keep: float | None
) -> None:
    def fitted(*callbacks: Any) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        module = regression(home, Stack(dropout=0.5))
        start = [p.detach().clone() for p in module.parameters()]
        extra = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
        trainer = make_trainer(home, callbacks=list(callbacks), precision=precision, max_steps=5, **extra)
        torch.manual_seed(1)
        trainer.fit(module, loader())
        return start, [p.detach().cpu().float() for p in module.parameters()]

    offloading = ActivationOffloading(mode, min_offload_bytes=32, keep_on_device=keep, allow_cpu=True)
    start, plain = fitted(ActivationCheckpointing())
    _, moved = fitted(ActivationCheckpointing(), offloading)
    assert offloading.moved_bytes > 0
    assert equal(plain, moved)
    assert not all(map(torch.equal, start, plain))


class Complicated(nn.Module):
    """Saves views, transposed and expanded tensors, integers, complex numbers, and results of its own function."""

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, power: int) -> Tensor:
            ctx.save_for_backward(x)
            ctx.power, ctx.kept = power, x * 2  # a number, and a tensor that autograd knows nothing of
            return x**power

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            (x,) = ctx.saved_tensors
            return gradient * ctx.power * x ** (ctx.power - 1) + 0 * ctx.kept, None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.table = nn.Embedding(50, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(ROWS, device=x.device) % 50
        h = self.norm(self.layer(x)) * self.table(ids)
        h = h.t().reshape(WIDTH, 4, -1).transpose(0, 2).relu()
        h = h * h[:1].expand_as(h) * h.new_ones(1).expand_as(h)
        spectrum = torch.fft.rfft(h, dim=-1)
        index = h.argmax(-1, keepdim=True)
        return Complicated.Cube.apply(h, 3).sum() + spectrum.abs().sum() + h.gather(-1, index).sum()


@pytest.mark.parametrize("keep_on_device", [None, 0.5])
@pytest.mark.row(78)
def test_saved_tensors_of_any_kind_are_restored(device: torch.device, keep_on_device: float | None) -> None:
    torch.manual_seed(1)
    net, x = Complicated().to(device).train(), inputs(device)
    plain = gradients(net, x)
    offloader = offloader_for(net, min_bytes=1, keep_on_device=keep_on_device)
    net.norm.reset_running_stats()
    assert equal(plain, gradients(net, x, offloader.saving()))
    assert offloader.moved_bytes > 0


@pytest.mark.row(78)
def test_a_second_backward_and_a_derivative_of_the_gradient(device: torch.device) -> None:
    x = inputs(device).requires_grad_()

    def derivatives(context: AbstractContextManager[Any]) -> list[Tensor]:
        with context:
            loss = x.exp().sin().sum()
        (first,) = torch.autograd.grad(loss, [x], retain_graph=True)
        (again,) = torch.autograd.grad(loss, [x], create_graph=True)
        (second,) = torch.autograd.grad(again.square().sum(), [x])
        return [each.detach().cpu() for each in (first, again, second)]

    offloader = Offloader(device, 256)
    assert equal(derivatives(nullcontext()), derivatives(offloader.saving()))
    assert offloader.moved_bytes


@pytest.mark.parametrize("keep_on_device", [None, 0, 20 * INPUT_BYTES, 0.3])
def test_two_forwards_before_their_backwards_and_one_without(
    device: torch.device, keep_on_device: int | float | None
) -> None:
    net, x = stack(device), inputs(device)

    def made(offloader: Offloader | None) -> list[Tensor]:
        net.zero_grad()
        torch.manual_seed(3)
        with offloader.saving() if offloader else nullcontext():
            losses = [net(x * n).square().sum() for n in (1, 2, 3)]
        losses[2].backward()
        losses[0].backward()
        return [p.grad.cpu() for p in net.parameters()]

    offloader = offloader_for(net, keep_on_device=keep_on_device)
    plain = made(None)
    assert equal(plain, made(offloader))
    gc.collect()
    if keep_on_device is not None:  # the next micro-batch moves no less than the first
        assert equal(plain, made(offloader))
    taken = offloader.host_bytes
    assert taken > 0
    assert equal(plain, made(offloader))
    assert offloader.host_bytes == taken


def test_published_race_an_address_that_is_used_again(device: torch.device) -> None:
    """As TRL 6241: a storage is freed, and the next one of its address is taken for it."""
    x = inputs(device).requires_grad_()

    def loss() -> Tensor:
        return sum(((x * float(n)).exp() * 1e-3).square().sum() for n in range(1, 6))  # type: ignore[return-value]

    (plain,) = torch.autograd.grad(loss(), [x])
    offloader = Offloader(device, 256)
    for _ in range(3):
        with offloader.saving():
            made = loss()
        (moved,) = torch.autograd.grad(made, [x])
        assert torch.equal(plain.cpu(), moved.cpu())
        del made, moved


# Memory


def test_bytes_on_the_device_between_forward_and_backward(device: torch.device) -> None:
    def between(net: nn.Module, context: AbstractContextManager[Any]) -> int:
        with Ledger(net, device=device.type if device.type == "cuda" else None) as ledger, context:
            loss = net(x).square().sum()
            return ledger.live()["activations"] - 4 * loss.numel()

    x = inputs(device)
    plain, recomputed = stack(device), stack(device, checkpointed=True)
    head = INPUT_BYTES + 4 * ROWS  # the input of the head, and the output, which is squared
    assert between(recomputed, nullcontext()) == (BLOCKS - 1) * INPUT_BYTES + head  # the first's is the batch
    assert between(recomputed, inputs_kept_in(offloader_for(recomputed).saving)) == INPUT_BYTES + head
    # all: one as large as relu's output, and what is too small to be moved
    small = BLOCKS * 2 * 4 * ROWS + 4 * ROWS
    assert between(plain, offloader_for(plain).saving()) <= 4 * INPUT_BYTES + small
    assert between(plain, nullcontext()) > BLOCKS * 10 * INPUT_BYTES


@pytest.mark.parametrize("keep_on_device", [10 * INPUT_BYTES, 25 * INPUT_BYTES, 0.3, 0.7])
def test_kept_bytes_are_within_the_limit_in_batches_of_any_size(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, keep_on_device: int | float
) -> None:
    net, x = stack(device), torch.cat([inputs(device)] * 2)
    offloader = offloader_for(net, keep_on_device=keep_on_device)
    pack, unpack = offloader._pack, offloader._unpack
    staying: list[tuple[int, int]] = []

    def look(result: Any) -> Any:
        here = sum(moved.bytes for moved in offloader._moved.values() if moved.whole is not None)
        limit = keep_on_device if isinstance(keep_on_device, int) else int(keep_on_device * offloader.saved_bytes)
        staying.append((here, limit))
        return result

    monkeypatch.setattr(offloader, "_pack", lambda tensor: look(pack(tensor)))
    for rows in (ROWS, 2 * ROWS, ROWS // 2, ROWS, 5, 2 * ROWS):
        part = x[:rows].clone()
        plain, saved = gradients(net, part), len(staying)
        offloader.leave(net)
        assert equal(plain, gradients(net, part, offloader.saving()))
        largest = 4 * 4 * rows * WIDTH  # relu's output
        assert len(staying) > saved
        assert all(here <= max(limit, largest) for here, limit in staying[saved:])
        here, limit = staying[-1]
        assert here > limit - largest or here == offloader.saved_bytes  # and no more than needed leaves
    monkeypatch.setattr(offloader, "_pack", pack)
    monkeypatch.setattr(offloader, "_unpack", lambda packed: look(unpack(packed)))
    staying.clear()
    gradients(net, x, offloader.saving())
    # a node of the graph has at most three tensors that it reads, as large as relu's output
    assert all(here <= limit + 3 * 4 * 4 * len(x) * WIDTH for here, limit in staying)


def test_in_backward_one_input_comes_back_ahead(device: torch.device) -> None:
    net, x = stack(device, checkpointed=True), inputs(device)
    offloader = offloader_for(net)
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(moved.whole is not None for moved in offloader._moved.values()))

    for block in net.blocks:
        block.up.weight.register_hook(look)
    gradients(net, x, inputs_kept_in(offloader.saving))
    assert most == 2  # the one that backward is at, and the next


@pytest.mark.long
@pytest.mark.cpu_only("the ledger counts page-locked buffers as well")
def test_a_fit_takes_as_much_more_as_stays(home: ModuleType, make_trainer: Any) -> None:
    rows, width, blocks = 8192, 8, 12
    block_input = 4 * rows * width  # 256 KiB

    def counted(keep_on_device: int | float | None) -> tuple[int, int]:
        torch.manual_seed(0)
        watch = Held()
        offloading = ActivationOffloading("block_inputs", 1024, keep_on_device, allow_cpu=True)
        trainer = make_trainer(home, callbacks=[watch, ActivationCheckpointing(), offloading], max_steps=3)
        trainer.fit(regression(home, Stack(blocks, width)), loader(batches=3, batch_size=rows, width=width))
        return watch.peak_bytes, offloading.moved_bytes

    gradient_bytes = sum(p.nbytes for p in Stack(blocks, width).parameters())
    assert gradient_bytes < block_input / 4
    least, moved = counted(None)
    assert moved == 3 * blocks * block_input
    for keep_on_device, staying in ((4 * block_input, 4), ("1.5MiB", 6), (0.75, 9)):
        more, moved = counted(keep_on_device)
        assert moved == 3 * (blocks - staying) * block_input
        expected = (staying - 1) * block_input  # one is there on its way to the host
        # the peak is at the start of backward, and later by some gradients where one input stays
        assert expected - gradient_bytes <= more - least <= expected
    assert counted(1.0)[1] == 0


@pytest.mark.long
@pytest.mark.cpu_only(
    "a plan there takes real steps of small micro-batches, in which nothing is large enough to be moved"
)
def test_a_plan_counts_the_host_and_what_the_copies_cost() -> None:
    def planned(**offloading: Any) -> Any:
        fields = {"precision": "32-true", "callback": {"activation_checkpointing": {}, **offloading}}
        batch = next(iter(loader(1, 2048, WIDTH)))
        make = lambda: regression(package, Stack(BLOCKS, WIDTH))  # noqa: E731
        planner = Planner(make, batch, {}, device_of("h200"), 64 * GiB, micro_batch=8192)
        return planner.plan("tried", compose(fields))

    block_input = 4 * 8192 * WIDTH
    kept, moved = planned(), planned(activation_offloading={})
    assert (kept.host_bytes, moved.host_bytes) == (0, BLOCKS * block_input)
    # the first input is the batch, and two are on the device at once; gradients and rounding take a little
    assert kept.peak_bytes - moved.peak_bytes >= (BLOCKS - 4) * block_input
    assert {span.stream for span in moved.timeline} == {"compute", "to device", "to host"}
    assert not kept.timeline
    assert kept.seconds_per_step < moved.seconds_per_step < 2 * kept.seconds_per_step
    for keep_on_device in (0.5, "6MiB"):  # three inputs of 2 MiB
        some = planned(activation_offloading={"keep_on_device": keep_on_device})
        assert some.host_bytes == (BLOCKS - 3) * block_input
        assert 1.8 * block_input <= some.peak_bytes - moved.peak_bytes <= 2 * block_input
        assert kept.seconds_per_step < some.seconds_per_step < moved.seconds_per_step


# Trace


@pytest.mark.row(66)
def test_after_an_exception_everything_is_as_before(device: torch.device) -> None:
    net, x = stack(device), inputs(device)
    plain = gradients(net, x)
    offloader = offloader_for(net)
    gradients(net, x, offloader.saving())
    taken = offloader.host_bytes

    def fails(*_: Any) -> None:
        raise ArithmeticError("mine")

    for register in (net.blocks[4].register_forward_hook, net.blocks[2].up.weight.register_hook):
        handle = register(fails)
        with pytest.raises(ArithmeticError, match="mine"):
            gradients(net, x, offloader.saving())
        handle.remove()
        torch.ones(1, device=device, requires_grad=True).sum().backward()  # torch keeps a graph that failed until then
        gc.collect()
        assert len(offloader._moved) == 0
        assert sum(buffer.nbytes for buffer in offloader._free) == offloader.host_bytes == taken
        assert equal(plain, gradients(net, x, offloader.saving()))
    offloader.free_buffers()
    assert offloader.host_bytes == 0


def test_batches_of_other_sizes_take_the_buffers_that_are_free(device: torch.device) -> None:
    net, x = stack(device, checkpointed=True), inputs(device)
    offloader = offloader_for(net)
    sizes = []
    for rows in (ROWS, ROWS // 2, ROWS, 2 * ROWS, ROWS):
        part = torch.cat([x, x])[:rows].clone()
        plain = gradients(net, part)
        assert equal(plain, gradients(net, part, inputs_kept_in(offloader.saving)))
        sizes.append(offloader.host_bytes // INPUT_BYTES)
    assert sizes == [BLOCKS, BLOCKS, BLOCKS, 2 * BLOCKS, 2 * BLOCKS]


def test_tensor_that_all_blocks_share_brings_back_no_more_than_the_window() -> None:
    offloader = Offloader(torch.device("cpu"), 256, in_flight=4)
    shared, most = torch.rand(64), 0

    def count(_: torch.Tensor) -> None:
        nonlocal most
        most = max(most, sum(moved.bytes for moved in offloader._moved.values() if moved.whole is not None))

    x = torch.ones(64, requires_grad=True)
    y, results = x, []
    with offloader.saving():
        for _ in range(24):
            y = (y * shared).sigmoid()  # saves the shared tensor and its own result, 256 bytes each
            y.register_hook(count)
            results.append(y.detach())
        loss = y.sum()
    (gradient,) = torch.autograd.grad(loss, x)
    assert offloader.moved_bytes == (1 + 24) * 256
    expected = torch.ones(64)
    for result in reversed(results):
        expected = expected * result * (1 - result) * shared
    assert torch.allclose(gradient, expected)
    assert most <= (4 + 2) * 256, "the window, the one in use, and the shared one"
