"""Other libraries' AdamW act, step as torch's does where they don't compress, resume, and take the bytes they claim."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_solo.errors import CapabilityError, CheckpointError, ConflictError
from lightning_solo.machine import is_installed
from lightning_solo.memory.ledger import Ledger
from lightning_solo.optim import StepInBackward, back_ends
from lightning_solo.optim.back_end_facts import BACK_ENDS
from lightning_solo.optim.back_ends import converted, state_sizes, summary, uncompressed
from lightning_solo.optim.library_optimizers import optimizer_class
from tests.messages import mentions
from tests.training import backward, contents, equal, train

needs_torchao = pytest.mark.skipif(not is_installed("torchao"), reason="needs torchao")
needs_bitsandbytes = pytest.mark.skipif(not is_installed("bitsandbytes"), reason="needs bitsandbytes")
TORCHAO = [pytest.param(name, marks=needs_torchao) for name in ("torchao_8bit", "torchao_4bit")]
ON_CPU = [*TORCHAO, pytest.param("bitsandbytes_8bit", marks=needs_bitsandbytes)]


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Leave torchao's step uncompiled: the same operators, without seconds of compiling for each shape."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Matrices of 64 x 128, which is compressed, and of 65 x 64 = 4,160, which 256 and 128 do not divide."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 65)).to(dtype)


def adamw(module: nn.Module, kind: Any = torch.optim.AdamW, **kwargs: Any) -> Any:
    first, *others = module.parameters()
    return kind([{"params": [first], "weight_decay": 0.3}, {"params": others}], lr=1e-2, eps=1e-6, **kwargs)


def train_windows(module: nn.Module, steps: range, step: Any, zero: Any, windows: int = 1) -> None:
    for number in steps:
        for part in range(windows):
            backward(module, 10 * number + part)
        step()
        zero()


# --- acted ---


@pytest.mark.parametrize("back_end", ON_CPU)
def test_acted_with_the_librarys_states_and_the_users_groups(back_end: str) -> None:
    module = net()
    users = adamw(module)
    start = [p.detach().clone() for p in module.parameters()]
    optimizer = converted(users, back_end=back_end)
    assert all(ours is theirs for ours, theirs in zip(optimizer.param_groups, users.param_groups, strict=True))
    train(module, optimizer)
    kinds = {type(value).__name__ for value in optimizer.state[module[0].weight].values()}
    codes = {"torchao_8bit": "OptimState8bit", "torchao_4bit": "OptimState4bit", "bitsandbytes_8bit": "Tensor"}
    assert codes[back_end] in kinds
    names = {value.dtype for value in contents(optimizer)}
    assert torch.uint8 in names
    assert not any(torch.equal(p, before) for p, before in zip(module.parameters(), start, strict=True))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.01]


@pytest.mark.long
@needs_torchao
def test_acted_compiled_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # which torch sets, and here is taken back
    torch.compiler.set_stance("default")
    one, other = net(torch.bfloat16), net(torch.bfloat16)
    optimizer = converted(torch.optim.AdamW([one[0].weight], eps=1e-6), back_end="torchao_8bit")
    train(one, optimizer, range(2))
    assert (one[0].weight != other[0].weight).float().mean() > 0.9


# --- parity ---


@pytest.mark.parametrize("back_end", ON_CPU)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_parity_with_torch(back_end: str, kind: Any) -> None:
    """After five steps, a part of the way gone: what the codes lose."""
    plain, ours = net(), net()
    start = net()
    decay = {"weight_decay": 0.0} if kind is torch.optim.Adam and back_end.startswith("bits") else {}
    users = [adamw(plain, kind), adamw(ours, kind)]
    for optimizer in users:
        for group in optimizer.param_groups:
            group.update(decay)
    theirs = converted(users[1], back_end=back_end)
    train(plain, users[0])
    train(ours, theirs)
    for p, q, before in zip(plain.parameters(), ours.parameters(), start.parameters(), strict=True):
        off = (q - p).norm() / (p - before).norm()
        assert off < (0.3 if back_end == "torchao_4bit" else 0.2)


@pytest.mark.parametrize("back_end", ON_CPU)
def test_parity_of_a_small_parameter_is_exact_to_rounding(back_end: str) -> None:
    one, other = (nn.Parameter(torch.linspace(-1, 1, 100)) for _ in range(2))
    plain = torch.optim.AdamW([one], lr=1e-2, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.5)
    ours = converted(
        torch.optim.AdamW([other], lr=1e-2, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.5), back_end=back_end
    )
    for step in range(10):
        for p, optimizer in ((one, plain), (other, ours)):
            p.grad = torch.randn(100, generator=torch.Generator().manual_seed(step))
            optimizer.step()
    # bitsandbytes may decay behind the update: lr * weight decay = 0.005 of an update of 0.01, ten times
    torch.testing.assert_close(other, one, rtol=1e-5, atol=10 * 0.005 * 0.01 if back_end.startswith("bits") else 1e-6)


@pytest.mark.parametrize("back_end", ON_CPU)
def test_schedulers_and_hooks_go_over(back_end: str) -> None:
    module, by_hand = net(), net()
    users, seen = adamw(module), []
    users.register_step_post_hook(lambda *args: seen.append(1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(users, lambda step: 1 / (1 + step))
    optimizer = converted(users, [scheduler], back_end=back_end)
    own = converted(adamw(by_hand), back_end=back_end)
    for step in range(5):
        assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([1e-2 / (1 + step)] * 2)
        assert isinstance(optimizer.param_groups[0]["lr"], Tensor) == back_end.startswith("torchao")
        for group in own.param_groups:
            group["lr"] = 1e-2 / (1 + step)  # a number, as people write it: torchao alone would refuse it
        train(module, optimizer, range(step, step + 1))
        train(by_hand, own, range(step, step + 1))
        scheduler.step()
    assert equal(contents(optimizer), contents(own))
    assert seen == [1] * 5


@pytest.mark.parametrize("back_end", ON_CPU)
@pytest.mark.parametrize(
    "arguments", [{}, {"accumulation": 3}, {"max_norm": 0.01}, {"accumulation": 3, "max_norm": 0.01}]
)
def test_released_is_unreleased(back_end: str, arguments: dict[str, Any]) -> None:
    one, other = net(), net()
    plain, released = (converted(adamw(module), back_end=back_end) for module in (one, other))

    def clip_and_step() -> None:
        if "max_norm" in arguments:
            torch.nn.utils.clip_grad_norm_(one.parameters(), arguments["max_norm"])
        plain.step()

    windows = arguments.get("accumulation", 1)
    train_windows(one, range(4), clip_and_step, plain.zero_grad, windows)
    release = StepInBackward(released, **arguments)
    train_windows(other, range(4), release.step, lambda: None, windows)
    assert all(p.grad is None for p in other.parameters())
    assert equal(contents(plain), contents(released))
    assert not torch.equal(one[0].weight, net()[0].weight)


@pytest.mark.parametrize("back_end", ON_CPU)
def test_kept_gradients_are_scaled_in_place_and_stepped_together(
    back_end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 512))  # both above the size that is stepped alone
    optimizer = converted(adamw(module), back_end=back_end)
    seen: list[list[int]] = []
    step = type(optimizer).step

    def watched(self: Any, closure: Any = None) -> Any:
        seen.append([p.grad.data_ptr() for p in module.parameters() if p.grad is not None])
        return step(self, closure)

    monkeypatch.setattr(type(optimizer), "step", watched)
    with StepInBackward(optimizer, max_norm=1e-3) as release:
        module(torch.randn(4, 512)).square().sum().backward()
        kept = [release._sums[p].data_ptr() for p in module.parameters()]
        release.step()
    assert seen == [kept]


@needs_torchao
def test_released_is_unreleased_in_bf16_but_for_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchao.optim.adam

    monkeypatch.setattr(torchao.optim.adam, "_fp32_to_bf16_sr", lambda x: x.to(torch.bfloat16))
    one, other = net(torch.bfloat16), net(torch.bfloat16)
    plain, released = (converted(adamw(module), back_end="torchao_8bit") for module in (one, other))
    train_windows(one, range(5), plain.step, plain.zero_grad)
    release = StepInBackward(released)
    train_windows(other, range(5), release.step, lambda: None)
    assert equal(contents(plain), contents(released))


@needs_torchao
def test_bf16_weights_are_rounded_stochastically() -> None:
    """Updates of a 2,000th of a weight, a quarter of what bf16 can tell: the mean moves as fp32 would."""
    p = nn.Parameter(torch.ones(2**14, dtype=torch.bfloat16))
    optimizer = converted(torch.optim.AdamW([p], lr=2**-11, eps=1e-6, weight_decay=0.0), back_end="torchao_8bit")
    for _ in range(8):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert float(p.detach().float().mean()) == pytest.approx(1 - 8 * 2**-11, abs=2e-4)


@needs_torchao
def test_small_parameters_have_fp32_moments() -> None:
    """In bf16 a second moment of equal gradients ends at a part of their square."""
    p = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = converted(torch.optim.AdamW([p], lr=0.0, eps=1e-6), back_end="torchao_8bit")
    for _ in range(1500):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert float(optimizer.state[p]["exp_avg_sq"].mean()) == pytest.approx(1 - 0.999**1500, rel=1e-4)


# --- memory ---


@pytest.mark.parametrize("back_end", ON_CPU)
def test_memory_is_what_is_said(back_end: str) -> None:
    module = net(torch.bfloat16 if BACK_ENDS[back_end].bf16_weights else torch.float32)
    optimizer = converted(adamw(module), back_end=back_end)
    said = sum(sum(state_sizes(p, back_end).values()) for p in module.parameters())
    train(module, optimizer, range(1))
    live = Ledger(module, [optimizer]).live()["optimizer_states"]
    large = sum(
        "parameter" in name for name in (f"parameter {i}" for i in range(4)) if name not in uncompressed(optimizer)
    )
    # tables of 256 or 16 codes, of each state or of all; and counts of steps
    tables = {"torchao_8bit": 2 * 1024 * large, "torchao_4bit": 2 * 64 * large, "bitsandbytes_8bit": 2 * 1024}[back_end]
    counts = 0 if back_end.startswith("bits") else 4 * 4
    assert live == said + tables + counts


def test_bytes_per_parameter() -> None:
    each = {
        "torchao_8bit": 1 + 1 + 2 * 4 / 256,
        "torchao_4bit": 0.5 + 0.5 + 2 * 4 / 128,
        "bitsandbytes_8bit": 1 + 1 + 2 * 4 / 256,
        "bitsandbytes_paged_8bit": 1 + 1 + 2 * 4 / 256,
        "flashoptim": 1 + 1 + 1 + 2 * 2 / 32,
    }
    assert {name: library.state_bytes for name, library in BACK_ENDS.items()} == each
    for name, library in BACK_ENDS.items():
        p = torch.empty(2**20, dtype=torch.bfloat16 if library.bf16_weights else torch.float32, device="meta")
        assert sum(state_sizes(p, name).values()) == each[name] * 2**20
    large = torch.empty(2**20, device="meta")
    assert back_ends.device_bytes(large, "bitsandbytes_paged_8bit") == 2 * 4 * 2**20 // 256  # scales aren't paged


@pytest.mark.parametrize("back_end", ON_CPU)
def test_uncompressed_parameters_are_reported(back_end: str) -> None:
    optimizer = converted(adamw(net()), back_end=back_end)
    odd = {"parameter 2": 8 * 4160} if back_end.startswith("torchao") else {}
    assert uncompressed(optimizer) == {"parameter 1": 8 * 64, **odd, "parameter 3": 8 * 65}
    words = "parameters, small or no multiple of" if odd else "small parameters in fp32"
    assert f"moments of {2 + len(odd)} {words}" in summary(optimizer)
    assert "parameter 1" in summary(optimizer)


# --- trace ---


@pytest.mark.parametrize("back_end", ON_CPU)
def test_trace_resumes_bit_for_bit(back_end: str, tmp_path: Path) -> None:
    kind = torch.bfloat16 if BACK_ENDS[back_end].bf16_weights else torch.float32
    whole, half, resumed = net(kind), net(kind), net(kind)
    torch.manual_seed(0)
    one = converted(adamw(whole), back_end=back_end)
    train(whole, one, range(6))
    torch.manual_seed(0)
    two = converted(adamw(half), back_end=back_end)
    train(half, two, range(3))
    random = torch.get_rng_state()
    torch.save({"module": half.state_dict(), "optimizer": two.state_dict()}, tmp_path / "half.pt")
    # a function for map_location, as Lightning has: torch refuses torchao's class then
    file = torch.load(tmp_path / "half.pt", map_location=lambda storage, _: storage, weights_only=True)
    resumed.load_state_dict(file["module"])
    three = converted(adamw(resumed), back_end=back_end)
    three.load_state_dict(file["optimizer"])
    torch.set_rng_state(random)
    train(resumed, three, range(3, 6))
    assert equal(contents(three), contents(one))


def test_states_of_torchs_own_are_compressed_or_refused() -> None:
    module = net()
    plain = adamw(module)
    train(module, plain)
    if is_installed("torchao"):
        ours = converted(adamw(module), back_end="torchao_8bit")
        ours.load_state_dict(plain.state_dict())
        state = ours.state[module[0].weight]
        assert type(state["exp_avg"]).__name__ == "OptimState8bit"
        off = (state["exp_avg"].dequantize() - plain.state[module[0].weight]["exp_avg"]).abs().max()
        assert 0 < off < 0.05 * plain.state[module[0].weight]["exp_avg"].abs().max()
        train(module, ours, range(1))
        other = converted(adamw(module), back_end="torchao_4bit")
        with pytest.raises(CheckpointError, match=mentions("'scale': [32]", "'scale': [64]")):
            other.load_state_dict(ours.state_dict())
    if is_installed("bitsandbytes"):
        theirs = converted(adamw(module), back_end="bitsandbytes_8bit")
        with pytest.raises(CheckpointError, match=mentions("state1, state2")):
            theirs.load_state_dict(plain.state_dict())


# --- refusals ---


def test_refusals_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    module = net()
    monkeypatch.setattr(back_ends, "is_installed", lambda package: True)
    for name in ("flashoptim", "bitsandbytes_paged_8bit"):
        with pytest.raises(CapabilityError, match=mentions(f"back_end={name}", "CUDA", "write")):
            converted(adamw(module), back_end=name)
    with pytest.raises(ConflictError, match=mentions("SGD", "back_end=own")):
        converted(torch.optim.SGD(module.parameters()), back_end="torchao_8bit")
    with pytest.raises(ConflictError, match="write amsgrad=False"):
        converted(adamw(module, amsgrad=True), back_end="torchao_8bit")
    with pytest.raises(ConflictError, match=mentions("AdamW", "write weight_decay=0")):
        converted(adamw(module, torch.optim.Adam), back_end="bitsandbytes_8bit")
    with pytest.raises(ConflictError, match=mentions("parameter 0 is bfloat16", "precision=bf16-mixed")):
        converted(adamw(net(torch.bfloat16)), back_end="bitsandbytes_8bit")
    monkeypatch.setattr(back_ends, "can_compile", lambda device: False)
    with pytest.raises(CapabilityError, match=mentions("C++ compiler")):
        converted(adamw(module), back_end="torchao_4bit")
    monkeypatch.setattr(back_ends, "is_installed", lambda package: False)
    with pytest.raises(CapabilityError, match=mentions("pip install lightning-solo[compact]")):
        converted(adamw(module), back_end="torchao_8bit")
    stepped = adamw(module)
    train(module, stepped)
    with pytest.raises(ConflictError, match="stepped already"):
        converted(stepped, back_end="torchao_8bit")


@needs_torchao
def test_an_eps_that_torchao_diverges_with_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=mentions("eps=1e-08: torchao rounds", " to 0", "write AdamW(..., eps=1e-6)")):
        converted(torch.optim.AdamW(net().parameters()), back_end="torchao_8bit")


@pytest.mark.skipif(
    not (is_installed("flashoptim") and is_installed("triton")), reason="needs flashoptim and Triton, which it imports"
)
def test_flashoptim_takes_what_it_is_given() -> None:
    for decoupled in (True, False):
        accepted = inspect.signature(optimizer_class("flashoptim", decoupled).__init__).parameters
        assert {"lr", "betas", "eps", "weight_decay"} <= set(accepted)
        assert accepted["master_weight_bits"].default == 24


@pytest.mark.gpu(needs="kernels")
@pytest.mark.parametrize("back_end", ["flashoptim", "bitsandbytes_paged_8bit"])
def test_on_a_gpu(back_end: str) -> None:
    pytest.importorskip(BACK_ENDS[back_end].package)
    module = net(torch.bfloat16 if BACK_ENDS[back_end].bf16_weights else torch.float32).cuda()
    start = module[0].weight.detach().clone()
    optimizer = converted(adamw(module), back_end=back_end)
    release = StepInBackward(optimizer)
    module(torch.randn(8, 128, device="cuda", dtype=start.dtype)).float().square().mean().backward()
    release.step()
    assert not torch.equal(module[0].weight, start)
