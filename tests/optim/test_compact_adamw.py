"""CompactAdamW against torch's AdamW, against master weights kept by hand, and against the ledger's count of bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_solo.errors import CheckpointError, GradientError, PresetError
from lightning_solo.machine import cxx_compiler, is_installed
from lightning_solo.memory.ledger import Ledger
from lightning_solo.optim import adamw_update, cpu_kernel, operator_kernels
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.compressed_moments import BLOCK, LEAST
from lightning_solo.optim.split_weights import MASTER_BITS, STOCHASTIC, split_parameters
from tests.messages import mentions
from tests.training import backward, contents, equal, train

BITS = [
    pytest.param(
        *both, marks=pytest.mark.skipif(both[1] == 4 and not is_installed("torchao"), reason="4 bits need torchao")
    )
    for both in product(MASTER_BITS, (32, 8, 4))
]
every_bits = pytest.mark.parametrize(("master_bits", "moment_bits"), BITS)
SIZES = (1, 127, 128, 129, 4097, 5000)  # the last two have compressed moments, and a short last block


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 110), nn.Tanh(), nn.Linear(110, 7))  # 4,400 + 110 + 770 + 7 parameters


def tensors(sizes: Iterable[int] = SIZES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(2)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]


def give_gradients(parameters: Iterable[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


# --- equal to torch's ---


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim == 1]
    return [{"params": weights}, {"params": others, "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.99)}]


@pytest.mark.parametrize("adam", [False, True], ids=["adamw", "adam"])
def test_on_fp32_it_is_torchs_under_a_schedule_of_betas(adam: bool):
    plain, ours = net(), net()
    kwargs: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    kind = torch.optim.Adam if adam else torch.optim.AdamW
    theirs = kind(groups_of(plain), foreach=False, fused=False, **kwargs)
    optimizer = CompactAdamW(groups_of(ours), master_bits=32, moment_bits=32, decoupled_weight_decay=not adam, **kwargs)
    before = [p.detach().clone() for p in ours.parameters()]
    for module, each in ((plain, theirs), (ours, optimizer)):
        train(module, each, range(20), torch.optim.lr_scheduler.OneCycleLR(each, 0.1, total_steps=30))
    assert all(not torch.equal(p, was) for p, was in zip(ours.parameters(), before, strict=True))
    assert equal(ours.parameters(), plain.parameters())


# --- equal to a master weight kept by hand ---


def nearest(values: Tensor, dropped: int, away: bool) -> Tensor:
    """Return fp32 numbers without their last bits, rounded by integers: half away from zero, or to even."""
    bits = values.numpy().view(np.uint32).astype(np.int64)
    below, rest, half = bits >> dropped, bits & ((1 << dropped) - 1), 1 << (dropped - 1)
    up = (rest > half) | ((rest == half) & (away | (below % 2 == 1)))
    return torch.from_numpy(((below + up) << dropped).astype(np.uint32).view(np.float32))


@pytest.mark.parametrize("bits", [32, 24])
def test_split_weights_are_a_master_kept_by_hand(bits: int):
    by_hand, ours = net(), net()

    def weight(master: Tensor) -> Tensor:
        return nearest(master.detach(), 16, away=bits == 32)

    def cut(master: Tensor) -> Tensor:
        if bits == 32:
            return master.clone()
        upper = weight(master).numpy().view(np.uint32).astype(np.int64)
        units = (master.numpy().view(np.uint32).astype(np.int64) - upper + 128) // 256
        return torch.from_numpy((upper + 256 * np.clip(units, -127, 127)).astype(np.uint32).view(np.float32))

    masters = [nn.Parameter(cut(p.detach())) for p in by_hand.parameters()]
    reference = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.1, foreach=False, fused=False)
    by_hand.to(torch.bfloat16)
    corrections = split_parameters(ours.parameters(), bits)
    optimizer = CompactAdamW(
        ours.parameters(), lr=1e-3, weight_decay=0.1, master_bits=bits, moment_bits=32, corrections=corrections
    )
    for step in range(20):
        for p, master in zip(by_hand.parameters(), masters, strict=True):
            p.data.copy_(weight(master))
            p.grad = None
        backward(by_hand, step)
        for p, master in zip(by_hand.parameters(), masters, strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        reference.step()
        for master in masters:
            master.data.copy_(cut(master.detach()))
        train(ours, optimizer, [step])
        for p, master in zip(ours.parameters(), masters, strict=True):
            assert p.dtype == torch.bfloat16
            assert torch.equal(p.float(), weight(master))
            assert torch.equal(optimizer.master_weight(p), master.detach())
    # the lower bits are in use: the weights alone are not the master
    assert all(not torch.equal(optimizer.master_weight(p), p.float()) for p in ours.parameters())


def test_small_updates_add_up_in_stochastic_weights_only_in_the_mean():
    # 100 steps of 1e-4 upwards from 1, where the next bf16 is 1 + 2**-7 = 1 + 78e-4: each would be rounded away
    p = nn.Parameter(torch.ones(2**14, dtype=torch.bfloat16))
    optimizer = CompactAdamW([p], lr=1e-4, weight_decay=0, eps=0, master_bits=STOCHASTIC, moment_bits=32)
    for _ in range(100):
        p.grad = -torch.ones_like(p)
        optimizer.step()
    # of 16,384 walks of 100 steps, each up by 2**-7 with probability 0.0128: sigma 8.8e-3 / 128 = 7e-5
    assert abs(p.float().mean().item() - 1.01) < 5 * 7e-5
    assert p.unique().numel() > 1
    # 1.28 times up on average, 13 times once in 1e9 walks; with the same random numbers in each step, 100 times
    assert p.max() < 1 + 13 * 2**-7


@pytest.mark.parametrize("fused", [None, False], ids=["fused", "operators"])
def test_each_second_moment_in_8_bits_decays_as_it_should(fused: bool | None):
    """A step of 0.1 % is less than half a code: rounded to the nearest one, no moment would change."""
    p = nn.Parameter(torch.zeros(LEAST))
    optimizer = CompactAdamW([p], lr=0.0, master_bits=32, moment_bits=8, fused=fused)
    p.grad = torch.ones_like(p)
    optimizer.step()
    start = optimizer.adamw_state_dict()["state"][0]["exp_avg_sq"].view(-1, BLOCK)
    p.grad.view(-1, BLOCK)[:, 1:] = 0
    p.grad.view(-1, BLOCK)[:, 0] = 0.001**0.5  # 0.999 * 0.001 + 0.001 * 0.001: the scale of a block stays
    for _ in range(100):
        optimizer.step()
    ratio = (optimizer.adamw_state_dict()["state"][0]["exp_avg_sq"].view(-1, BLOCK) / start)[:, 1:]
    assert abs(ratio.mean() / 0.999**100 - 1) < 0.01
    # from code 255 down to 242.6 in 12.4 of 100 steps, sigma 3.3 codes, which is 2.7 % of the square; five of them.
    # With the same random numbers in each step some moments would go down in all of them, and others in none
    assert (ratio / 0.999**100 - 1).abs().max() < 5 * 0.027


@every_bits
def test_compact_states_follow_adamw(master_bits: int | str, moment_bits: int):
    parameters, exact = tensors([5000]), tensors([5000])
    start = exact[0].detach().clone()
    optimizer = CompactAdamW(parameters, lr=1e-2, master_bits=master_bits, moment_bits=moment_bits)
    theirs = torch.optim.AdamW(exact, lr=1e-2)
    for step in range(20):
        give_gradients(exact, step)
        parameters[0].grad = exact[0].grad.to(parameters[0].dtype)  # type: ignore[union-attr]
        theirs.step()
        optimizer.step()
    moved = (exact[0] - start).norm()
    off = (optimizer.master_weight(parameters[0]) - exact[0]).norm() / moved
    # bf16 gradients 0.2 %, moments in 8 bits about 1 %, in 4 bits about 25 %; a bf16 of 1 is 2**-9 off, a step is 0.01
    bound = {32: 0.005, 8: 0.03, 4: 0.4}[moment_bits] + (0.3 if master_bits == STOCHASTIC else 0)
    assert off < bound


# --- bytes ---


@every_bits
def test_bytes_per_parameter_are_what_the_ledger_counts(master_bits: int | str, moment_bits: int):
    module = nn.ModuleList([nn.Linear(61, 83), nn.Linear(64, 128), nn.LayerNorm(5), nn.Conv2d(8, 16, 7)])
    count = sum(p.numel() for p in module.parameters())
    optimizer = CompactAdamW(module.parameters(), master_bits=master_bits, moment_bits=moment_bits)
    give_gradients(module.parameters(), 0)
    with Ledger(module, [optimizer]) as ledger:
        optimizer.step()
        live = ledger.live()
    tensors_ = len(list(module.parameters()))
    assert live["weights"] + live["optimizer_states"] - 4 * tensors_ == round(optimizer.bytes_per_parameter * count)
    assert live["weights"] == (4 if master_bits == 32 else 2) * count
    small = {name: 8 * p.numel() for name, p in named(module) if p.numel() < LEAST}
    assert optimizer.uncompressed == ({} if moment_bits == 32 else small)


def named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(f"parameter {i}", p) for i, p in enumerate(module.parameters())]


@pytest.mark.parametrize(
    ("master_bits", "moment_bits", "split", "expected"),
    [
        (32, 32, False, 4 + 4 + 4),
        (32, 32, True, 2 + 2 + 4 + 4),
        (32, 8, True, 2 + 2 + 1 + 1 + 2 * 4 / BLOCK),
        (24, 8, False, 2 + 1 + 1 + 1 + 2 * 4 / BLOCK),
        (STOCHASTIC, 8, False, 2 + 1 + 1 + 2 * 4 / BLOCK),
        pytest.param(
            *(STOCHASTIC, 4, False, 2 + 0.5 + 0.5 + 2 * 4 / BLOCK),
            marks=pytest.mark.skipif(not is_installed("torchao"), reason="4 bits need torchao"),
        ),
    ],
)
def test_bytes_of_large_layers(master_bits: int | str, moment_bits: int, split: bool, expected: float):
    module = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    corrections = split_parameters(module.parameters(), master_bits) if split else None
    optimizer = CompactAdamW(
        module.parameters(), master_bits=master_bits, moment_bits=moment_bits, corrections=corrections
    )
    weights = CompactAdamW([module[0].weight], master_bits=master_bits, moment_bits=moment_bits)
    assert weights.bytes_per_parameter == expected
    assert expected <= optimizer.bytes_per_parameter <= expected + 8 / 257  # a bias in 257 has moments in fp32
    assert optimizer.bytes_per_parameter <= {(24, 8): 5.1, (STOCHASTIC, 4): 3.2}.get((master_bits, moment_bits), 12)
    of_weights = sum(p.nbytes for p in module.parameters()) / sum(p.numel() for p in module.parameters())
    assert f"{optimizer.bytes_per_parameter - of_weights:.2f} bytes" in optimizer.summary()


# --- any size, any order in memory ---


@every_bits
def test_sizes_that_nothing_divides(master_bits: int | str, moment_bits: int):
    sizes = (*SIZES, 0)
    parameters = tensors(sizes)
    optimizer = CompactAdamW(parameters, lr=0.1, master_bits=master_bits, moment_bits=moment_bits)
    before = [optimizer.master_weight(p).clone() for p in parameters]
    for step in range(3):
        give_gradients(parameters, step)
        optimizer.step()
    for p, was in zip(parameters, before, strict=True):
        now = optimizer.master_weight(p)
        assert now.isfinite().all()
        # of steps of 0.1 nearly each number has changed, those of the short last block too
        assert ((now[-1:] != was[-1:]) & (now != was)).float().mean() > 0.8 or not p.numel()
    assert "step" not in optimizer.state.get(parameters[-1], {})


@every_bits
def test_a_short_last_block_is_stepped_as_a_whole_one(master_bits: int | str, moment_bits: int):
    """What pads it has no part in its scale: 5,000 numbers, and the same followed by 120 zeros without a gradient."""
    short, long = tensors([5000])[0], nn.Parameter(torch.zeros(5120))
    long.data[:5000] = short.data
    made = [CompactAdamW([p], lr=0.1, master_bits=master_bits, moment_bits=moment_bits) for p in (short, long)]
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        grad = torch.randn(5000, generator=generator) * 1e-6
        # 0.1 * 1000 = 100, then 0.9 * 100 - 0.1 * 900 = 0: what pads the block would soon be the greatest in it
        grad[-1] = {0: 1000.0, 1: -900.0}.get(step, 0.0)
        short.grad = grad.to(short.dtype)
        long.grad = torch.nn.functional.pad(short.grad, (0, 120))
        for optimizer in made:
            optimizer.step()
    assert torch.equal(short, long[:5000])
    if moment_bits != 32:
        assert torch.equal(made[0].state[short]["exp_avg_scale"], made[1].state[long]["exp_avg_scale"])


@every_bits
@pytest.mark.parametrize("layout", ["channels_last", "transposed"])
def test_any_order_in_memory(layout: str, master_bits: int | str, moment_bits: int):
    torch.manual_seed(3)
    if layout == "channels_last":
        values = torch.randn(16, 8, 7, 7).to(memory_format=torch.channels_last)
        order = (0, 2, 3, 1)
    else:
        values = torch.randn(100, 70).t()
        order = (1, 0)
    p = nn.Parameter(values.clone())
    flat = nn.Parameter(values.permute(order).contiguous().flatten().clone())  # the same numbers as they lie in memory
    assert not p.is_contiguous()
    optimizers = [CompactAdamW([x], lr=0.1, master_bits=master_bits, moment_bits=moment_bits) for x in (p, flat)]
    strides = p.stride()
    for step in range(3):
        grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(p.dtype)  # contiguous
        p.grad, flat.grad = grad, grad.permute(order).contiguous().flatten()
        for optimizer in optimizers:
            optimizer.step()
    assert p.stride() == strides
    assert torch.equal(p.permute(order).flatten(), flat)
    assert torch.equal(optimizers[0].master_weight(p).permute(order).flatten(), optimizers[1].master_weight(flat))
    assert equal(optimizers[0].state[p].values(), optimizers[1].state[flat].values())


def test_tied_weights_are_stepped_once():
    module = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    module[1].weight = module[0].weight
    optimizer = CompactAdamW(module.parameters())
    train(module, optimizer, range(2))
    assert module[1].weight is module[0].weight
    assert optimizer.state[module[0].weight]["step"] == 2
    assert optimizer.bytes_per_parameter == (2 + 1 + 8)  # of 1,600 + 40 + 40 numbers, which are all small


@every_bits
def test_the_size_of_chunks_changes_nothing(master_bits: int | str, moment_bits: int, monkeypatch: pytest.MonkeyPatch):
    found = []
    for chunk in (2**18, 3 * BLOCK, BLOCK):
        monkeypatch.setattr(adamw_update, "CHUNK", {"cpu": chunk, "cuda": chunk})
        parameters = tensors()
        optimizer = CompactAdamW(parameters, lr=0.1, master_bits=master_bits, moment_bits=moment_bits, fused=False)
        for step in range(3):
            give_gradients(parameters, step)
            optimizer.step()
        found.append(contents(optimizer))
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])


@every_bits
def test_small_parameters_stepped_together_are_those_stepped_alone(
    master_bits: int | str, moment_bits: int, monkeypatch: pytest.MonkeyPatch
):
    calls: list[int] = []
    stock = operator_kernels.update_blocks

    def counted(blocks: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(len(blocks.weight))
        stock(blocks, *args, **kwargs)

    monkeypatch.setattr(operator_kernels, "update_blocks", counted)
    found, counts = [], []
    for most in (operator_kernels.JOINED, 300, 1):
        monkeypatch.setattr(operator_kernels, "JOINED", most)
        parameters = tensors(6 * SIZES)
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.2, "betas": (0.8, 0.99)}]
        optimizer = CompactAdamW(groups, lr=0.1, master_bits=master_bits, moment_bits=moment_bits, fused=False)
        calls.clear()
        for step in range(4):
            give_gradients(parameters, step)
            for p in parameters[:7] if step % 2 else ():  # these have taken fewer steps
                p.grad = None
            optimizer.step()
        found.append(contents(optimizer))
        counts.append(len(calls))
    assert equal(found[0], found[2])
    assert equal(found[1], found[2])
    if (master_bits, moment_bits) == (24, 32):  # one for each group, in the third step one for each number of steps
        assert counts[0] == 2 + 2 + 2 * 2 + 2
    draws = master_bits == STOCHASTIC
    assert (counts[0] < counts[1] < counts[2]) != draws


# --- checkpoints ---


def named_module() -> nn.Module:
    module = net()
    module.add_module("unused", nn.Linear(70, 60))
    module.unused.weight.requires_grad_(True)
    module.forward = lambda x: module[1:3](module[0](x))  # type: ignore[method-assign]
    return module


@every_bits
def test_resume_is_bit_exact(master_bits: int | str, moment_bits: int, tmp_path: Path):
    def build() -> tuple[nn.Module, CompactAdamW, Any]:
        module = named_module()
        optimizer = CompactAdamW(module.named_parameters(), lr=1e-2, master_bits=master_bits, moment_bits=moment_bits)
        return module, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)

    module, optimizer, scheduler = build()
    masters = {name: optimizer.master_weight(p) for name, p in module.named_parameters()}
    train(module, optimizer, range(5), scheduler)
    file = tmp_path / "checkpoint.pt"
    torch.save([module.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
    train(module, optimizer, range(5, 10), scheduler)

    again, fresh, fresh_scheduler = build()
    weights, states, schedule = torch.load(file, weights_only=True)
    again.load_state_dict(weights)
    fresh.load_state_dict(states)
    fresh_scheduler.load_state_dict(schedule)
    for name, p in again.named_parameters():
        if "unused" in name:  # never stepped, and yet its lower bits are in the file
            assert torch.equal(fresh.master_weight(p), masters[name])
    train(again, fresh, range(5, 10), fresh_scheduler)
    assert equal(contents(fresh), contents(optimizer))
    assert fresh.state[next(again.parameters())]["step"] == 10


def test_bf16_weights_of_a_new_process_get_their_lower_bits_from_the_file():
    module = named_module()
    optimizer = CompactAdamW(module.parameters())
    train(module, optimizer, range(3))
    states, masters = optimizer.state_dict(), [optimizer.master_weight(p) for p in module.parameters()]
    again = copy.deepcopy(module)
    fresh = CompactAdamW(again.parameters())  # of bf16 parameters, which have no correction of their own
    fresh.load_state_dict(states)
    assert equal([fresh.master_weight(p) for p in again.parameters()], masters)


@pytest.mark.parametrize("bits", [(32, 32), (24, 8)])
def test_states_of_torchs_adamw_are_converted(bits: tuple[int, int]):
    plain, ours = net(), net()
    theirs = torch.optim.AdamW(plain.parameters(), lr=3e-3, foreach=False)
    train(plain, theirs, range(5))
    ours.load_state_dict(plain.state_dict())
    optimizer = CompactAdamW(ours.parameters(), master_bits=bits[0], moment_bits=bits[1])
    masters = [optimizer.master_weight(p) for p in ours.parameters()]
    optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.param_groups[0]["lr"] == 3e-3
    assert equal([optimizer.master_weight(p) for p in ours.parameters()], masters)  # the lower bits stay
    for own, theirs_ in zip(optimizer.adamw_state_dict()["state"].values(), theirs.state.values(), strict=True):
        assert own["step"] == theirs_["step"]
        scale = theirs_["exp_avg"].abs().max(), theirs_["exp_avg_sq"].max()
        assert (own["exp_avg"] - theirs_["exp_avg"]).abs().max() <= scale[0] * (0 if bits[1] == 32 else 4 / 508 * 1.01)
        assert (own["exp_avg_sq"] - theirs_["exp_avg_sq"]).abs().max() <= scale[1] * (0 if bits[1] == 32 else 1 / 255)
    train(plain, theirs, range(5, 8))
    train(ours, optimizer, range(5, 8))
    if bits == (32, 32):
        assert equal(ours.parameters(), plain.parameters())


def test_torchs_states_loaded_into_an_optimizer_that_has_stepped_leave_the_master_weights():
    plain, ours = net(), net()
    theirs = torch.optim.AdamW(plain.parameters())
    train(plain, theirs, range(2))
    optimizer = CompactAdamW(ours.parameters())
    train(ours, optimizer, range(3))
    masters = [optimizer.master_weight(p) for p in ours.parameters()]
    optimizer.load_state_dict(theirs.state_dict())
    assert equal([optimizer.master_weight(p) for p in ours.parameters()], masters)


def test_torchs_adamw_continues_from_our_states():
    ours, plain = net(), net()
    corrections = split_parameters(ours.parameters(), 32)
    optimizer = CompactAdamW(ours.parameters(), master_bits=32, moment_bits=32, corrections=corrections)
    train(ours, optimizer, range(4))
    with torch.no_grad():
        for p, own in zip(plain.parameters(), ours.parameters(), strict=True):
            p.copy_(optimizer.master_weight(own))
    theirs = torch.optim.AdamW(plain.parameters(), foreach=False)
    theirs.load_state_dict(optimizer.adamw_state_dict())
    for p, own in zip(plain.parameters(), ours.parameters(), strict=True):
        own.grad = torch.randn(own.shape).bfloat16()
        p.grad = own.grad.float()
    optimizer.step()
    theirs.step()
    assert equal([optimizer.master_weight(p) for p in ours.parameters()], [p.detach() for p in plain.parameters()])


def test_asking_for_a_master_weight_leaves_no_trace_in_the_states():
    module = net()
    optimizer = CompactAdamW(module.parameters(), master_bits=32)
    for p in module.parameters():
        assert torch.equal(optimizer.master_weight(p), p)
    assert optimizer.state_dict()["state"] == {}
    assert optimizer.adamw_state_dict()["state"] == {}


def _changed(states: dict[str, Any], what: str) -> dict[str, Any]:
    first, group = states["state"][0], states["param_groups"][0]
    if what == "missing tensor":
        del first["exp_avg_sq"]
    elif what == "unknown tensor":
        first["momentum_buffer"] = torch.zeros(3)
    elif what == "size":
        first["exp_avg"] = first["exp_avg"][:-1]
    elif what == "type":
        first["correction"] = first["correction"].to(torch.int16)
    elif what == "names":
        group["param_names"] = ["other", *group["param_names"][1:]]
    elif what == "number":
        group["params"] = group["params"][:-1]
    elif what == "lr":
        del group["lr"]
    elif what in ("amsgrad", "maximize"):
        group[what] = True
    elif what == "groups":
        rest = group["params"][1:]
        group["params"] = group["params"][:1]
        states["param_groups"].append({**group, "params": rest, "param_names": group["param_names"][1:]})
        group["param_names"] = group["param_names"][:1]
    elif what == "last":  # what comes before it must not have been loaded
        states["state"][3]["exp_avg"] = states["state"][3]["exp_avg"][:-1]
    else:
        del states[what]
    return states


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing tensor", ["0.weight: ", "exp_avg_sq uint8"]),
        ("unknown tensor", ["0.weight: ", "momentum_buffer"]),
        ("size", ["exp_avg int8[4399]", "exp_avg int8[4400]"]),
        ("type", ["correction int16[4400]"]),
        ("names", [" other ", "0.weight"]),
        ("number", ["3 parameters", " 4"]),
        ("lr", ["group 0 ", "lr"]),
        ("amsgrad", ["amsgrad=True"]),
        ("maximize", ["maximize=True"]),
        ("groups", ["fewer"]),
        ("last", ["2.bias"]),
        ("state", ["without state"]),
        ("param_groups", ["without param_groups"]),
    ],
)
def test_other_states_are_refused_and_nothing_is_touched(what: str, words: list[str]):
    module, other = net(), net()
    source = CompactAdamW(other.named_parameters(), lr=0.5)
    train(other, source, range(2))
    optimizer = CompactAdamW(module.named_parameters())
    train(module, optimizer, range(3))
    before = contents(optimizer)
    with pytest.raises(CheckpointError, match=mentions(*words)):
        optimizer.load_state_dict(_changed(source.state_dict(), what))
    assert equal(contents(optimizer), before)
    assert optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize(("master_bits", "moment_bits"), [(32, 8), (STOCHASTIC, 8), (24, 32)])
def test_states_of_other_bits_are_refused(master_bits: int | str, moment_bits: int):
    module, other = net(), net()
    source = CompactAdamW(other.parameters())
    train(other, source, [0])
    split = split_parameters(module.parameters(), master_bits)
    optimizer = CompactAdamW(module.parameters(), master_bits=master_bits, moment_bits=moment_bits, corrections=split)
    with pytest.raises(CheckpointError, match=mentions("master_bits", "moment_bits")):
        optimizer.load_state_dict(source.state_dict())


# --- bad input ---


@every_bits
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_gradients_that_are_not_finite_touch_nothing(bad: float, master_bits: int | str, moment_bits: int):
    module = net()
    optimizer = CompactAdamW(module.named_parameters(), master_bits=master_bits, moment_bits=moment_bits)
    train(module, optimizer, range(2))
    before = contents(optimizer)
    give_gradients(module.parameters(), 0)
    module[2].weight.grad[3, 5] = bad
    module[2].bias.grad[0] = bad
    with pytest.raises(GradientError, match=mentions("2.weight", "not finite")):
        optimizer.step()
    assert equal(contents(optimizer), before)
    give_gradients(module.parameters(), 0)
    optimizer.step()
    assert not torch.equal(module[0].weight, before[0])


def test_a_gradient_whose_square_is_too_large_for_fp32():
    p = nn.Parameter(torch.ones(LEAST))
    optimizer = CompactAdamW([p], lr=0.1)
    p.grad = torch.full_like(p, 1.0)
    p.grad[7] = 1e25
    optimizer.step()
    assert p.isfinite().all()
    moved = 1 - optimizer.master_weight(p)
    assert abs(moved[7] - 0.1 * 0.01) < 1e-4  # by infinity it doesn't move; lr * weight decay remains
    assert (moved[BLOCK:] > 0.09).all()
    give_gradients([p], 1)
    optimizer.step()
    assert p.isfinite().all()


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = CompactAdamW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(GradientError, match=mentions("parameter 0", "sparse", "write nn.Embedding")):
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.float16, torch.float64, torch.complex64, torch.int32])
def test_parameters_of_other_types_are_refused(kind: torch.dtype):
    p = nn.Parameter(torch.zeros(3, dtype=kind), requires_grad=kind.is_floating_point or kind.is_complex)
    with pytest.raises(PresetError, match=f"parameter 1 is {str(kind)[6:]}; parameters are float32 or bfloat16"):
        CompactAdamW([nn.Parameter(torch.zeros(2)), p])


@pytest.mark.parametrize("bits", [32, 24])
def test_parameters_with_gaps_in_memory_are_refused(bits: int):
    whole = torch.arange(20.0).view(4, 5)
    for values in (whole[:, :3], torch.ones(1).expand(6), whole[::2]):
        with pytest.raises(PresetError, match="gaps"):
            CompactAdamW([nn.Parameter(values)], master_bits=bits)
    assert torch.equal(whole, torch.arange(20.0).view(4, 5))
    CompactAdamW([nn.Parameter(whole[1:3]), nn.Parameter(whole.t().clone()[:, None].transpose(0, 1))])


def test_split_parameters_of_a_tensor_with_gaps():
    whole = torch.randn(4, 5)
    p = nn.Parameter(whole[:, :3])
    correction = split_parameters([p], 32)[p]
    optimizer = CompactAdamW([p], master_bits=32, corrections={p: correction})
    assert torch.equal(optimizer.master_weight(p), whole[:, :3])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lr": -1.0}, ["lr=-1.0: ", "at least 0"]),
        ({"lr": float("nan")}, ["lr=nan"]),
        ({"eps": -1e-8}, ["eps=-1e-08"]),
        ({"weight_decay": -0.1}, ["weight_decay=-0.1"]),
        ({"betas": (0.9, 1.0)}, ["betas=(0.9, 1.0): ", "from 0"]),
        ({"betas": (0.9,)}, ["betas"]),
        ({"master_bits": 16}, ["master_bits=16: write 32, 24 or '16-stochastic'"]),
        ({"moment_bits": 16}, ["moment_bits=16: write 32, 8 or 4"]),
    ],
)
def test_values_that_are_not_allowed(arguments: dict[str, Any], words: list[str]):
    with pytest.raises(PresetError, match=mentions(*words)):
        CompactAdamW(tensors(), **arguments)


@pytest.mark.parametrize(("split_at", "master_bits"), [(32, 24), (24, 32), (24, STOCHASTIC)])
def test_corrections_of_other_bits_are_refused(split_at: int, master_bits: int | str):
    parameters = tensors()
    corrections = split_parameters(parameters, split_at)
    with pytest.raises(PresetError, match=r"correction of parameter 0 .*[12] bytes"):
        CompactAdamW(parameters, master_bits=master_bits, corrections=corrections)


def test_groups_that_are_added_later():
    first, second = tensors([100, 5000])
    optimizer = CompactAdamW([first])
    was = second.detach().clone()
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    assert second.dtype == torch.bfloat16
    give_gradients([first, second], 0)
    optimizer.step()
    assert 0.4 < (optimizer.master_weight(second) - was).abs().mean() < 0.6  # its own lr: AdamW's first step is +-lr


# --- compiled ---


def graphs() -> int:
    """Return how many graphs have been compiled in this process, by whomever."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.long
@pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler")
def test_compiled_it_does_the_same_and_is_compiled_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # which torch sets, and here is taken back
    monkeypatch.setattr(cpu_kernel, "kernel", lambda: None)
    torch._dynamo.reset()  # another test may have compiled the same
    made = []
    for fused in (False, True):
        parameters = tensors([4096 * 3, 5000])
        optimizer = CompactAdamW(parameters, lr=1e-2, fused=fused)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        before = graphs()
        for step in range(5):
            give_gradients(parameters, step)
            optimizer.step()
            scheduler.step()
            if step == 1:
                frames = graphs()
        assert graphs() == frames
        assert (frames > before) == fused
        made.append((optimizer, parameters))
    (eager, left), (compiled, right) = made
    start = tensors([4096 * 3, 5000])
    for p, q, was in zip(left, right, start, strict=True):
        own, other = eager.master_weight(p), compiled.master_weight(q)
        # a fused multiply and add rounds once, not twice: now and then a code is the next one, 1 / 127 of a number off
        assert (own - other).norm() <= 1e-3 * (own - was).norm()
        codes = eager.state[p]["exp_avg"].int() - compiled.state[q]["exp_avg"].int()
        assert codes.abs().max() <= 1
        assert (codes != 0).float().mean() < 1e-3


@pytest.mark.long
@pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("adam", [False, True], ids=["adamw", "adam"])
def test_hyperparameters_that_change_compile_nothing_anew(adam: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")
    monkeypatch.setattr(cpu_kernel, "kernel", lambda: None)
    torch._dynamo.reset()
    parameters = tensors([4096 * 3])
    optimizer = CompactAdamW(parameters, fused=True, decoupled_weight_decay=not adam)
    before = graphs()
    for step in range(4):
        optimizer.param_groups[0].update(
            lr=1e-3 / (1 + step),
            betas=(0.85 + 0.03 * step, 0.99 + 0.001 * step),
            weight_decay=0.1 + step,
            eps=1e-8 + step,
        )
        give_gradients(parameters, step)
        optimizer.step()
    assert graphs() == before + 1
