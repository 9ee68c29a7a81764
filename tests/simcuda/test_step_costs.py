"""What a step of compact states asks of a GPU: launches, waits and bytes, counted exactly; and its numbers are right.

`examples/measure_step_cost.py` has the same for every preset and GPT-2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_solo.errors import GradientError
from lightning_solo.optim import CompactAdamW, StepInBackward, staging
from lightning_solo.optim.adamw_states import bytes_of, state_layout
from lightning_solo.optim.gpu_kernel import TritonKernels
from tests.messages import mentions
from tests.simcuda import device
from tests.training import equal

pytestmark = pytest.mark.simcuda

CUDA = torch.device("cuda")
LARGE, SMALL = 4, 6  # parameters of a net: 128 x 96 = 12,288 elements, which have codes, and 96 to 128, which haven't


@pytest.fixture(autouse=True)
def launched_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch the large parameters of a small net one by one, as those of a large net are."""
    monkeypatch.setattr(TritonKernels, "grouped_below", 4096)


def net(where: torch.device = CUDA) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(
        *(nn.Linear(96, 128), nn.LayerNorm(128), nn.Linear(128, 96), nn.Linear(96, 128), nn.Linear(128, 96))
    )
    return made.to(where)


def batches(count: int, where: torch.device = CUDA) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(4, 96, generator=generator).to(torch.bfloat16).to(where)


def trained(
    windows: int, accumulation: int = 1, where: torch.device = CUDA, budget: int | None = None, **release: Any
) -> tuple[nn.Module, CompactAdamW, list[Tensor | None], Any]:
    """Return a net trained for some windows, its optimizer, the norms, and the counts of the last window's step."""
    module = net(where)
    fused = None if where == CUDA else False  # to C++ a root is another than to torch's operators
    optimizer = CompactAdamW(module.named_parameters(), lr=1e-2, state_budget=budget, fused=fused)
    norms: list[Tensor | None] = []
    counts: Any = None
    with StepInBackward(optimizer, accumulation=accumulation, **release) as releasing:
        given = batches(windows * accumulation, where)
        for _ in range(windows):
            for _ in range(accumulation):
                (module(next(given)).float().square().mean() / accumulation).backward()
            if where == CUDA:
                with device.counted() as counts:
                    norms.append(releasing.step())
            else:
                norms.append(releasing.step())
    return module, optimizer, norms, counts


def everything(module: nn.Module, optimizer: CompactAdamW) -> list[Tensor]:
    optimizer.state_dict()  # waits
    states = [optimizer.state[p] for p in module.parameters()]
    return [x.detach().cpu() for x in [*module.parameters(), *(s[name] for s in states for name in sorted(s))]]


def numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# --- launches and waits ---


def test_released_gradients_take_a_launch_for_each_large_parameter_and_one_wait() -> None:
    module = net()
    optimizer = CompactAdamW(module.named_parameters(), lr=1e-2)
    release = StepInBackward(optimizer)
    for x in batches(2):
        loss = module(x).float().square().mean()
        with device.counted() as counts:
            loss.backward()
            release.step()
    release.remove()
    assert counts.kernels_by_name["step_one"] == LARGE
    assert counts.kernels_by_name["step_many"] == 1
    assert counts.synchronisations == 1
    assert counts.copies("up") == 1  # the table of the small ones
    assert counts.copied_bytes("up", pinned=False) == 0


@pytest.mark.parametrize("arguments", [{"max_norm": 0.1}, {"max_norm": 0.1, "max_value": 0.01}], ids=str)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_kept_gradients_are_stepped_by_two_launches_and_one_wait(
    arguments: dict[str, float], accumulation: int
) -> None:
    counts = trained(2, accumulation, **arguments)[3]
    assert counts.kernels_by_name["step_many"] == 2  # those with codes and those without
    assert counts.kernels_by_name["step_one"] == 0
    assert counts.kernels_by_name["add_many"] == (1 if accumulation == 1 else 0)  # sums were measured as they were made
    assert counts.synchronisations == 1


def test_plain_step_takes_two_launches_and_one_wait() -> None:
    module = net()
    optimizer = CompactAdamW(module.named_parameters(), lr=1e-2)
    for x in batches(2):
        optimizer.zero_grad()
        module(x).float().square().mean().backward()
        with device.counted() as counts:
            optimizer.step()
    assert counts.kernels_by_name["step_many"] == 2
    assert counts.synchronisations == 1


# --- bytes ---


@pytest.mark.parametrize(
    ("piece", "copies"),
    [(12_288, LARGE), (4096, LARGE * 3 * 5)],
    ids=["all tensors of a state at once", "each tensor of three pieces"],
)
def test_states_on_the_host_pass_once_each_way(piece: int, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonKernels, "piece", piece)
    module, optimizer, _, _ = trained(1, budget=0)
    release = StepInBackward(optimizer)
    states = sum(bytes_of(state_layout(p, 24, 8)) for p in module.parameters() if p.numel() >= 4096)
    assert optimizer.host_bytes == states
    (x,) = batches(1)
    with device.counted() as counts:
        module(x).float().square().mean().backward()
        release.step()
    release.remove()
    table = counts.copied_bytes("up") - states
    assert 0 < table < 2000
    assert counts.copied_bytes("down") == states + 1  # and whether all was finite
    assert counts.copied_bytes("up", pinned=False) == 0
    assert counts.copies("up") == counts.copies("down") == copies + 1
    assert counts.synchronisations == 1


@pytest.mark.parametrize("value", [None, 0.01])
def test_gradients_on_the_host_are_brought_once_to_be_stepped(value: float | None) -> None:
    module, optimizer, _, counts = trained(2, 2, budget=0, max_norm=0.1, max_value=value, buffer="host")
    gradients = 4 * numel(module)
    up = counts.copied_bytes("up") - optimizer.host_bytes
    assert gradients <= up < gradients + 2000  # and the table of small ones
    assert counts.copied_bytes("up", pinned=False) == counts.copied_bytes("down", pinned=False) == 0
    assert counts.synchronisations == 1


def test_number_of_buffers_follows_the_bytes_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonKernels, "piece", 1024)
    monkeypatch.setattr(staging, "SERVED_PART", 4)
    _, optimizer, _, _ = trained(2, budget=0)
    slots = optimizer.staging._slots
    of_one = max(slot.buffer.nbytes for slot in slots)
    assert len(slots) == optimizer.host_bytes // 4 // of_one > staging.SLOTS["cuda"]
    monkeypatch.setattr(staging, "STAGING_BYTES", 1)
    with optimizer.staging.on_device({"exp_avg": next(iter(optimizer.host_states.values()))["exp_avg"][:1024]}):
        assert len(optimizer.staging._slots) == staging.SLOTS["cuda"]


# --- numbers ---

WAYS: dict[str, dict[str, Any]] = {
    "immediate": {},
    "immediate, clamped": {"max_value": 0.01},
    "accumulated": {"accumulation": 3},
    "accumulated on the host": {"accumulation": 3, "buffer": "host"},
    "states on the host": {"budget": 0},
    "all on the host": {"budget": 0, "accumulation": 2, "buffer": "host", "max_value": 0.01},
}


@pytest.mark.parametrize("delay", ["none", "copies", "all"])
@pytest.mark.parametrize("way", list(WAYS))
def test_numbers_are_those_of_a_cpu(way: str, delay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonKernels, "piece", 2048)
    expected = everything(
        *trained(3, where=torch.device("cpu"), **{**WAYS[way], "budget": None, "buffer": "device"})[:2]
    )
    with device.delayed(delay):
        made = everything(*trained(3, **WAYS[way])[:2])
    assert equal(made, expected)


@pytest.mark.parametrize("buffer", ["device", "host"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_clipping_by_norm_is_that_of_a_cpu(accumulation: int, buffer: str) -> None:
    clip = {"max_norm": 0.1, "max_value": 0.05, "accumulation": accumulation}
    made = trained(3, buffer=buffer, budget=0, **clip)
    expected = trained(3, where=torch.device("cpu"), **clip)
    for one, other in zip(made[2], expected[2], strict=True):
        assert one is not None
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=0)
    for one, other in zip(made[0].parameters(), expected[0].parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=2**-7, atol=1e-5)


# --- gradients that are not finite ---


def poisoned(module: nn.Module, bad: float) -> Callable[[], None]:
    """Make the gradient of a weight not finite."""
    handle = module.get_parameter("2.weight").register_hook(lambda grad: torch.full_like(grad, bad))
    return handle.remove  # type: ignore[no-any-return]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("way", ["all at once", "clipped", "accumulated on the host"])
def test_gradients_that_are_not_finite_change_nothing(way: str, bad: float) -> None:
    module = net()
    optimizer = CompactAdamW(module.named_parameters(), lr=1e-2, state_budget=0)
    release = None
    if way != "all at once":
        on_host = {"accumulation": 2, "buffer": "host", "max_value": 0.1} if "host" in way else {}
        release = StepInBackward(optimizer, max_norm=0.1, **on_host)  # type: ignore[arg-type]

    def window() -> None:
        optimizer.zero_grad()
        module(next(batches(1))).float().square().mean().backward()
        release.step() if release is not None else optimizer.step()

    window()
    before = [x.clone() for x in everything(module, optimizer)]
    cure = poisoned(module, bad)
    with pytest.raises(GradientError, match=mentions("2.weight", "not finite", "no weight")):
        window()
    assert equal(everything(module, optimizer), before)  # counts of steps too
    cure()
    window()
    assert not torch.equal(everything(module, optimizer)[0], before[0])
    if release is not None:
        release.remove()


def test_a_gradient_used_in_backward_is_named_at_the_end_of_the_window() -> None:
    module = net()
    release = StepInBackward(CompactAdamW(module.named_parameters(), lr=1e-2))
    cure = poisoned(module, float("nan"))
    module(next(batches(1))).float().square().mean().backward()
    with pytest.raises(GradientError, match=mentions("2.weight", "not finite", "stepped")):
        release.step()
    cure()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.nan_to_num(p))
    release.remove()


# --- a kernel that fails ---


def test_a_kernel_that_does_not_compile_leaves_its_work_to_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_solo.optim import triton_launches

    def fails(*_: Any) -> None:
        raise RuntimeError("ptxas: no such architecture")

    expected = everything(*trained(2)[:2])
    monkeypatch.setattr(triton_launches, "launch_steps", fails)
    with pytest.warns(UserWarning, match="no such architecture") as warned:
        made = trained(2)
    names = [str(one.message).split(" does not run on ")[0] for one in warned]
    assert names == ["the Triton kernel step_one", "the Triton kernel step_many"]  # each once
    assert equal(everything(*made[:2]), expected)


def test_abandoned_window_leaves_no_flag() -> None:
    module = net()
    optimizer = CompactAdamW(module.named_parameters(), lr=1e-2)
    release = StepInBackward(optimizer)
    before = [p.detach().clone() for p in module.parameters()]
    cure = poisoned(module, float("inf"))
    module(next(batches(1))).float().square().mean().backward()
    cure()
    optimizer.zero_grad()
    with torch.no_grad():
        for p, was in zip(module.parameters(), before, strict=True):
            p.copy_(was)
    module(next(batches(1))).float().square().mean().backward()
    release.step()
    release.remove()


def test_a_fall_back_flags_nothing_where_nothing_was_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonKernels, "serves", lambda self, layout: False)
    module = net()
    optimizer = CompactAdamW(module.named_parameters(), lr=1e-2)
    cure = poisoned(module, float("nan"))
    module(next(batches(1))).float().square().mean().backward()
    with pytest.raises(GradientError, match="not finite"):
        optimizer.step()
    cure()
    optimizer.zero_grad()
    release = StepInBackward(optimizer)
    module(next(batches(1))).float().square().mean().backward()
    release.step()
    release.remove()


def test_a_launch_that_fails_counts_no_step_that_was_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    module = net()
    optimizer = CompactAdamW(module.named_parameters(), lr=1e-2)
    launch, launched = TritonKernels.step, []

    def once(self: Any, pieces: Any, control: Any) -> None:
        if launched:
            raise torch.OutOfMemoryError("out of memory")
        launched.extend(pieces)
        launch(self, pieces, control)

    monkeypatch.setattr(TritonKernels, "step", once)
    module(next(batches(1))).float().square().mean().backward()
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    steps = [int(state["step"]) for state in optimizer.state.values()]
    assert sum(steps) == len(launched) == LARGE < len(steps)


def test_kernels_follow_parameters_to_another_device() -> None:
    module = net(torch.device("cpu"))
    optimizer = CompactAdamW(module.named_parameters(), lr=1e-2)
    release = StepInBackward(optimizer)
    optimizer.zero_grad()
    assert not isinstance(optimizer.kernels, TritonKernels)
    module.cuda()
    module(next(batches(1))).float().square().mean().backward()
    release.step()
    release.remove()
    assert isinstance(optimizer.kernels, TritonKernels)


@pytest.mark.parametrize("value", [None, 0.01])
def test_torchs_optimizers_wait_once_for_the_norm(value: float | None) -> None:
    module = net()
    release = StepInBackward(torch.optim.SGD(module.parameters(), lr=0.1), max_norm=0.1, max_value=value)
    module(next(batches(1)).float()).square().mean().backward()
    with device.counted() as counts:
        release.step()
    release.remove()
    assert counts.synchronisations == 1
