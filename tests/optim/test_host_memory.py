"""States on the host: in one slab of exact size, the same numbers as on the device, and saved as if they lay there."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_solo.errors import BudgetError, PresetError
from lightning_solo.machine import cxx_compiler
from lightning_solo.memory import host_slabs
from lightning_solo.memory.host_slabs import host_tensors
from lightning_solo.optim import (
    CompactAdamW,
    StepInBackward,
    adamw_update,
    state_placement,
)
from lightning_solo.optim.adamw_states import bytes_of, state_layout
from lightning_solo.optim.staging import Staging
from lightning_solo.units import GiB, MiB
from tests.conftest import long
from tests.messages import lines_with, mentions
from tests.training import contents, equal, train

BITS = [(24, 8), (32, 32), (32, 8), ("16-stochastic", 8), ("16-stochastic", 4)]
every_bits = pytest.mark.parametrize("bits", BITS, ids=str)
CPU = torch.device("cpu")


def net() -> nn.Sequential:
    """70 x 67 = 4,690 elements, and twice 128 x 70 = 8,960: above 4,096, and not all whole blocks of 128."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(70, 128), nn.Tanh(), nn.Linear(128, 70), nn.Tanh(), nn.Linear(70, 67))


def batches(count: int, seed: int = 5) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    yield from (torch.randn(6, 70, generator=generator) for _ in range(count))


def optimizer_of(module: nn.Module, bits: Any, budget: Any = None, fused: bool = False) -> CompactAdamW:
    """Not fused by default: the step in C++ does without staging, for on a CPU all memory is the host's."""
    kwargs: dict[str, Any] = {"master_bits": bits[0], "moment_bits": bits[1], "state_budget": budget}
    return CompactAdamW(module.parameters(), lr=1e-2, fused=fused, **kwargs)


# --- acted ---


@every_bits
def test_acted_on_all_states_but_those_of_small_tensors(bits: Any):
    module = net()
    optimizer = optimizer_of(module, bits, budget=0)
    assert optimizer.host_bytes == 0  # before the first step
    train(module, optimizer, 1)
    large = [p for p in module.parameters() if p.numel() >= 4096]
    assert len(large) == 3
    assert set(optimizer.host_states) == set(large)
    assert optimizer.host_bytes == sum(bytes_of(state_layout(p, *bits)) for p in large)
    for p in large:
        for name, tensor in optimizer.host_states[p].items():
            assert optimizer.state[p][name] is tensor
    assert "on the host" in optimizer.summary()


def test_acted_by_way_of_staging(monkeypatch: pytest.MonkeyPatch):
    passed: list[set[str]] = []
    plain = Staging.on_device

    def noted(self: Staging, pieces: Any, **how: Any) -> Any:
        passed.append(set(pieces))
        return plain(self, pieces, **how)

    monkeypatch.setattr(Staging, "on_device", noted)
    module = net()
    train(module, optimizer_of(module, (24, 8), budget=0), 2)
    names = {"correction", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"}
    assert passed == [names] * (2 * 3)  # two steps of three tensors


def test_a_budget_is_what_stays_on_the_device_and_goes_to_the_first():
    module = net()
    first = bytes_of(state_layout(module[0].weight.bfloat16(), 24, 8))
    small = sum(3 * 4 * p.numel() for p in module.parameters() if p.numel() < 4096)  # more than they take
    optimizer = optimizer_of(module, (24, 8), budget=first + small)
    train(module, optimizer, 1)
    assert set(optimizer.host_states) == {module[2].weight, module[4].weight}
    everywhere = sum(bytes_of(state_layout(p, 24, 8)) for p in module.parameters())
    assert everywhere - optimizer.host_bytes <= first + small


def test_states_of_small_tensors_count_first_in_the_budget():
    module = net()  # its biases come after weights that would fill the budget
    large = [bytes_of(state_layout(p.bfloat16(), 24, 8)) for p in module.parameters() if p.numel() >= 4096]
    optimizer = optimizer_of(module, (24, 8), budget=sum(large))
    train(module, optimizer, 1)
    assert optimizer.state_bytes - optimizer.host_bytes <= sum(large)
    assert len(optimizer.host_states) >= 1


def test_on_a_cpu_nothing_is_free_of_a_device():
    module = net()
    optimizer = optimizer_of(module, (24, 8), budget="auto")
    assert "first step" in optimizer.summary()
    train(module, optimizer, 1)
    assert len(optimizer.host_states) == 3
    assert lines_with(optimizer.summary(), "on the host", "return")
    train(module, optimizer, 1)
    assert len(optimizer.host_states) == 3
    assert "return to the device" not in optimizer.summary()


def test_states_return_to_free_device_memory_from_the_first_parameter_on(monkeypatch: pytest.MonkeyPatch):
    ours, plain = net(), net()
    first = bytes_of(state_layout(ours[0].weight.bfloat16(), 24, 8))
    monkeypatch.setattr(state_placement, "free_bytes", lambda device: first + 10)
    optimizers = optimizer_of(ours, (24, 8), budget="auto"), optimizer_of(plain, (24, 8))
    train(ours, optimizers[0], 1)
    assert len(optimizers[0].host_states) == 3
    train(ours, optimizers[0], 3)
    assert set(optimizers[0].host_states) == {ours[2].weight, ours[4].weight}
    train(plain, optimizers[1], 1)
    train(plain, optimizers[1], 3)
    assert equal(contents(optimizers[0]), contents(optimizers[1]))


def test_states_of_a_copied_optimizer_return_too(monkeypatch: pytest.MonkeyPatch):
    module = net()
    optimizer = optimizer_of(module, (24, 8), budget="auto")
    train(module, optimizer, 1)
    monkeypatch.setattr(state_placement, "free_bytes", lambda device: 2**40)
    other, own = copy.deepcopy((module, optimizer))
    for each, its in ((module, optimizer), (other, own)):
        assert its.host_bytes
        train(each, its, 1)
        assert not its.host_bytes
    assert equal(contents(own), contents(optimizer))


def test_states_without_room_on_the_host_stay_on_the_device(monkeypatch: pytest.MonkeyPatch):
    module = net()
    every = sum(bytes_of(state_layout(p.bfloat16(), 24, 8)) for p in module.parameters())
    last = bytes_of(state_layout(module[4].weight.bfloat16(), 24, 8))
    monkeypatch.setattr(host_slabs, "host_memory", lambda: (2**40, -(-(last + 400) * 20 // 19)))
    optimizer = optimizer_of(module, (24, 8), budget="auto")
    optimizer.place_states()
    assert optimizer.host_bytes <= last + 400
    assert optimizer.state_bytes == every
    assert set(optimizer.host_states) <= {module[4].weight}


@pytest.mark.long
@pytest.mark.skipif(cxx_compiler() is None, reason="needs a C++ compiler")
def test_compiled_states_on_the_host_are_those_on_the_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # which torch sets, and here is taken back
    trained = []
    for budget in (None, 0):
        module = net()
        optimizer = optimizer_of(module, (24, 32), budget=budget, fused=True)  # staged in two types
        train(module, optimizer, 2)
        trained.append(contents(optimizer))
    assert equal(*trained)


def test_states_that_a_file_lacks_start_anew():
    ours, plain = net(), net()
    for module, budget in ((ours, 0), (plain, None)):
        optimizer = optimizer_of(module, (24, 8), budget=budget)
        before = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
        train(module, optimizer, 4)
        module.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])
        train(module, optimizer, 2)
    assert equal(list(ours.parameters()), list(plain.parameters()))


def test_placing_twice_or_without_a_budget_does_nothing():
    module = net()
    optimizer = optimizer_of(module, (24, 8), budget=0)
    optimizer.place_states()
    before = optimizer.host_bytes
    optimizer.place_states()
    assert optimizer.host_bytes == before > 0
    plain = optimizer_of(net(), (24, 8))
    plain.place_states()
    assert plain.host_bytes == 0


# --- parity ---


@every_bits
@pytest.mark.parametrize("chunk", [long(2**18), 256])
@pytest.mark.parametrize("budget", [0, 15_000, "auto"])
def test_parity_with_states_on_the_device(bits: Any, chunk: int, budget: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(adamw_update.CHUNK, "cpu", chunk)
    ours, plain = net(), net()
    optimizers = optimizer_of(ours, bits, budget=budget), optimizer_of(plain, bits)
    train(ours, optimizers[0], 4)
    train(plain, optimizers[1], 4)
    assert equal(contents(optimizers[0]), contents(optimizers[1]))
    assert optimizers[0].host_bytes > 0
    assert not torch.equal(ours[0].weight.float(), net()[0].weight)


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(4000, 9000), min_size=1, max_size=5),
    budget=st.integers(0, 80_000),
    bits=st.sampled_from(BITS[:4]),
    released=st.booleans(),
    norm=st.none() | st.just(0.01),
)
def test_parity_for_any_sizes_and_budget(sizes: list[int], budget: int, bits: Any, released: bool, norm: float | None):
    results = []
    for given_budget in (None, budget):
        torch.manual_seed(1)
        parameters = [nn.Parameter(torch.randn(n)) for n in sizes]
        kwargs: dict[str, Any] = {"master_bits": bits[0], "moment_bits": bits[1], "fused": False}
        optimizer = CompactAdamW(parameters, lr=1e-2, state_budget=given_budget, **kwargs)
        release = StepInBackward(optimizer, max_norm=norm, buffer="host") if released else None
        for step in range(3):
            loss = sum(((p.float() - step) ** 2).mean() for p in parameters)
            torch.as_tensor(loss).backward()
            release.step() if release else optimizer.step()
            optimizer.zero_grad()
        results.append([*parameters, *(x for p in parameters for _, x in sorted(optimizer.state[p].items()))])
    assert equal(*results)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("value", [None, 1e-3])
@pytest.mark.parametrize("windows", [[1, 1], [3, 3, 1]])
def test_gradients_in_pieces_are_the_same_but_for_the_order_of_their_norm(
    compact: bool, value: float | None, windows: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(adamw_update.CHUNK, "cpu", 1024)
    trained, norms = [], []
    for buffer in ("device", "host"):
        module = net()
        optimizer: Any = (
            optimizer_of(module, (32, 32))
            if compact
            else torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False)
        )
        release = StepInBackward(optimizer, accumulation=max(windows), max_norm=0.01, max_value=value, buffer=buffer)
        stream = batches(sum(windows))
        for window in windows:
            for _ in range(window):
                (module(next(stream)).square().mean() / window).backward()
            norms.append(release.step())
        trained.append([p.detach() for p in module.parameters()])
        if buffer == "host":
            assert set(release._sums._homes) == set(module.parameters())
    half = len(norms) // 2
    torch.testing.assert_close(norms[:half], norms[half:], rtol=1e-6, atol=0)
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


# --- memory ---


def test_a_slab_is_as_large_as_its_tensors():
    wanted = [(1, torch.int8), (130, torch.float32), (0, torch.float32), (5_000_000, torch.uint8)]
    before = _mapped()
    made = host_tensors(wanted, CPU)
    useful = sum(n * kind.itemsize for n, kind in wanted)
    assert _mapped() - before <= 1.03 * useful + 2 * 4096
    assert [(x.numel(), x.dtype) for x in made] == wanted
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in made)  # each is saved without the others
    assert all(not x.any() for x in made)
    addresses = [x.data_ptr() for x in made if x.numel()]
    assert all((address - addresses[0]) % 128 == 0 for address in addresses)
    made[1].fill_(7)
    assert not made[0].any()
    assert not made[3].any()
    del made
    assert _mapped() - before <= 2 * 4096


def test_packed_tensors_are_parts_of_one_piece_of_memory_with_storages_of_their_own():
    groups = [[(1, torch.int8), (130, torch.float32), (0, torch.uint8)], [(5, torch.float32)]]
    (packed, (a, b, none)), (other, (c,)) = host_slabs.packed_tensors(groups, CPU)
    assert [packed.nbytes, other.nbytes] == [128 + 640, 128]
    for tensor, size in zip((a, b, none, c), [size for group in groups for size in group], strict=True):
        assert (tensor.numel(), tensor.dtype) == size
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # saved without the others
    b.copy_(torch.arange(130))
    assert torch.equal(host_slabs.placed(packed, [a, b, none])[1], b)
    assert not other.any()
    assert not c.any()


def test_tensors_of_one_group_share_a_slab(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_slabs, "SLAB_BYTES", 1024)
    before = _mapped()
    made = host_slabs.packed_tensors([[(2**20, torch.uint8)] * 2] * 2, CPU)
    del made[0]
    assert _mapped() - before <= 2 * 2**20 * 1.03 + 2 * 4096
    assert not made[0][0].any()


def test_tensor_that_replaced_one_on_the_host_is_stepped():
    ours, plain = net(), net()
    optimizers = optimizer_of(ours, (24, 8), budget=0), optimizer_of(plain, (24, 8))
    for module, optimizer in zip((ours, plain), optimizers, strict=True):
        train(module, optimizer, 2)
        weight = module[0].weight
        optimizer.set_correction(weight, torch.full_like(optimizer.state[weight]["correction"], 5))
        train(module, optimizer, 2)
    assert equal(contents(optimizers[0]), contents(optimizers[1]))


def _mapped() -> int:
    """Return the bytes of address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


def test_memory_of_some_is_given_back_before_that_of_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_slabs, "SLAB_BYTES", 2**20)
    before = _mapped()
    made = host_tensors([(2**19, torch.uint8)] * 8, CPU)
    for tensor in made:
        tensor.fill_(1)
    four = _mapped() - before
    assert 4 * 2**20 <= four <= 4 * 2**20 * 1.03
    del made[:4], tensor
    assert _mapped() - before <= four - 2 * 2**20


# --- trace ---


@every_bits
@pytest.mark.parametrize("budgets", [(0, 0), (None, 0), (0, None), ("auto", 20_000)])
def test_trace_resumed_is_undisturbed(bits: Any, budgets: tuple[Any, Any]):
    straight, first, second = net(), net(), net()
    train(straight, whole := optimizer_of(straight, bits), 3)
    train(straight, whole, range(3, 6))
    train(first, begun := optimizer_of(first, bits, budget=budgets[0]), 3)
    file = io.BytesIO()
    torch.save({"module": first.state_dict(), "optimizer": begun.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = optimizer_of(second, bits, budget=budgets[1])
    second.load_state_dict(saved["module"])
    resumed.load_state_dict(saved["optimizer"])
    train(second, resumed, range(3, 6))
    assert equal(contents(resumed), contents(whole))
    assert (resumed.host_bytes > 0) == (budgets[1] is not None)


def test_trace_loaded_again_into_a_place_that_is_there():
    module = net()
    optimizer = optimizer_of(module, (24, 8), budget=0)
    train(module, optimizer, 2)
    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    homes = {p: dict(home) for p, home in optimizer.host_states.items()}
    train(module, optimizer, range(2, 4))
    after = [x.clone() for x in contents(optimizer)]
    module.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for p, home in homes.items():
        assert all(optimizer.state[p][name] is tensor for name, tensor in home.items())
    train(module, optimizer, range(2, 4))
    assert equal(contents(optimizer), after)


def test_trace_master_weights_are_read_and_set():
    ours, plain = net(), net()
    optimizers = optimizer_of(ours, (24, 8), budget=0), optimizer_of(plain, (24, 8))
    for module, optimizer in zip((ours, plain), optimizers, strict=True):
        train(module, optimizer, 2)
    masters = [[o.master_weight(p) for p in m.parameters()] for m, o in zip((ours, plain), optimizers, strict=True)]
    assert equal(*masters)
    optimizers[0].set_master_weight(ours[0].weight, masters[0][0] * 1.001)
    torch.testing.assert_close(optimizers[0].master_weight(ours[0].weight), masters[0][0] * 1.001, rtol=2**-15, atol=0)
    states = [optimizer.adamw_state_dict()["state"] for optimizer in optimizers]
    assert equal(*([x for state in both.values() for x in state.values()] for both in states))


def test_trace_a_copy_steps_by_itself():
    module = net()
    optimizer = optimizer_of(module, (24, 8), budget=0)
    train(module, optimizer, 2)
    other, own = copy.deepcopy((module, optimizer))
    train(module, optimizer, range(2, 4))
    train(other, own, range(2, 4))
    assert equal(contents(own), contents(optimizer))
    assert own.host_bytes == optimizer.host_bytes


def test_a_group_that_is_added_later_finds_its_place():
    module = net().bfloat16()
    optimizer = CompactAdamW(module[0].parameters(), state_budget=0)
    train(module, optimizer, 1)
    optimizer.add_param_group({"params": list(module[2].parameters())})
    train(module, optimizer, 1)
    assert set(optimizer.host_states) == {module[0].weight, module[2].weight}


# --- errors ---


def test_a_host_that_is_too_small_is_told_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_slabs, "host_memory", lambda: (2**30, 1000))
    monkeypatch.setattr(host_slabs, "host_tensors", lambda *arguments: pytest.fail("allocated"))
    module = net()
    with pytest.raises(BudgetError, match=mentions("optimizer states", " KiB", "host", " 950 B")):
        optimizer_of(module, (24, 8), budget=0).place_states()
    module = net()
    StepInBackward(torch.optim.AdamW(module.parameters()), accumulation=2, buffer="host")
    loss = module(next(batches(1))).sum()
    with pytest.raises(BudgetError, match=mentions("gradients", " KiB", "host")):
        loss.backward()


@pytest.mark.parametrize("budget", [-1, 1.5, "8 gigs", True])
def test_budgets_that_are_none(budget: Any):
    with pytest.raises(PresetError, match=f"={budget!r}.*bytes.*auto.*null"):
        optimizer_of(net(), (24, 8), budget=budget)


# --- on a GPU ---


@pytest.mark.parametrize(
    ("total", "free", "rest"),
    [(20 * GiB, 8 * GiB, 7 * GiB), (96 * MiB, 60 * MiB, 28 * MiB), (96 * MiB, 20 * MiB, 0)],
    ids=["5 % of a large device", "a segment of a small one", "none"],
)
def test_room_leaves_a_part_of_the_device_free(
    total: int, free: int, rest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    assert state_placement.free_bytes(torch.device("cuda", 0)) == rest
    assert not state_placement.free_bytes(torch.device("cpu"))


@pytest.mark.gpu
def test_gpu_a_slab_is_pinned_and_exact():
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    made = host_tensors([(3 * 2**20 + 5, torch.uint8), (1000, torch.float32)], torch.device("cuda"))
    assert all(x.is_pinned() for x in made)
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == pinned  # none of torch's
    del made
    torch.zeros(1, device="cuda").add_(1)  # and freed without an error


@pytest.mark.gpu
def test_gpu_a_slab_asks_for_huge_pages_and_stays_with_this_process():
    (tensor,) = host_tensors([(2**23, torch.uint8)], torch.device("cuda"))
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= tensor.data_ptr() < end
        elif inside and first == "VmFlags:":
            assert {"dc", "hg"} <= set(rest)  # not for workers that are forked; huge pages
            return
    pytest.fail("the slab is no mapping of this process")


@pytest.mark.gpu
@pytest.mark.parametrize("released", [True, False])
def test_gpu_parity_with_states_on_the_device(released: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(adamw_update.CHUNK, "cuda", 2**14)
    results = []
    for budget in (None, 0):
        torch.manual_seed(1)
        module = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).cuda()
        optimizer = CompactAdamW(module.parameters(), lr=1e-2, state_budget=budget)
        release = StepInBackward(optimizer, accumulation=2, max_norm=0.1, buffer="host") if released else None
        torch.manual_seed(2)
        for _ in range(5):
            for _ in range(2):
                x = torch.randn(8, 512, device="cuda", dtype=torch.bfloat16)
                module(x).float().square().mean().backward()
            release.step() if release else optimizer.step()
            optimizer.zero_grad()
        optimizer.state_dict()  # waits
        results.append([x.cpu() for x in contents(optimizer)])
        if budget == 0:
            assert optimizer.host_bytes > 0
            assert all(x.device.type == "cpu" for home in optimizer.host_states.values() for x in home.values())
    assert equal(*results)
