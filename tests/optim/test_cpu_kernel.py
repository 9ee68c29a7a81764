"""The step in C++: called where it should be, equal to torch's operators, and built safely or done without."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_solo.machine import cxx_compiler
from lightning_solo.optim import CompactAdamW, cpu_kernel
from lightning_solo.optim.kernels import Control, Piece
from lightning_solo.optim.split_weights import split_parameters

pytestmark = pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler")
KINDS = {"24": (24, False), "32": (32, True), "16-stochastic": ("16-stochastic", False), "fp32": (32, False)}
every_kind = pytest.mark.parametrize("kind", KINDS)
LAST_BIT = {"24": 2**-15, "32": 2**-19, "16-stochastic": 2**-6, "fp32": 2**-19}
"""What the last bits of a master weight between 2 and 4 are worth."""
SIZES = (4096, 5000, 128 * 70 + 1)  # two of them with a short last block
ROUNDS_ONCE = torch.backends.cpu.get_cpu_capability().startswith("AVX")
"""Whether torch's operators add products with one rounding here: without AVX2 some compilers let them, others don't."""


def optimizer_of(parameters: list[nn.Parameter], kind: str, **more: Any) -> CompactAdamW:
    bits, is_split = KINDS[kind]
    corrections = split_parameters(parameters, bits) if is_split else None
    return CompactAdamW(parameters, master_bits=bits, corrections=corrections, **more)


def contents(optimizer: CompactAdamW) -> dict[str, Tensor]:
    """Return weights, master weights and states, each named by the number of its parameter."""
    made = {}
    for number, p in enumerate(optimizer.param_groups[0]["params"]):
        every = {"weight": p.detach(), "master": optimizer.master_weight(p), **optimizer.state[p]}
        made |= {f"{number}.{name}": tensor for name, tensor in every.items()}
    return made


def stepped(
    kind: str, gradients: Callable[[int, int], Tensor], steps: int, sizes: tuple[int, ...] = SIZES, **more: Any
) -> dict[str, Tensor]:
    """Return contents after some steps whose learning rate and betas change."""
    torch.manual_seed(3)
    optimizer = optimizer_of([nn.Parameter(torch.randn(size)) for size in sizes], kind, **more)
    parameters = optimizer.param_groups[0]["params"]
    for step in range(steps):
        optimizer.param_groups[0].update(lr=0.1 / (1 + step), betas=(0.45 + 0.1 * (step % 5), 0.999 - 0.02 * step))
        for p in parameters:
            optimizer.step_one(p, gradients(step, p.numel()), 0.7)
    return contents(optimizer)


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)  # types too


def random_gradient(step: int, size: int) -> Tensor:
    made = torch.randn(size, generator=torch.Generator().manual_seed(1000 * step + size))
    made[:: step + 2] = 0
    if step % 3 == 0:
        made[128:500] = 0  # blocks without any
    return made


@pytest.fixture
def exact_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch round roots as IEEE 754 requires; MKL's roots differ once in five times."""
    monkeypatch.setattr(Tensor, "sqrt", lambda x: torch.from_numpy(np.sqrt(x.numpy())))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the parameters that are stepped in C++."""
    noted: list[int] = []
    real = cpu_kernel.kernel()
    assert real is not None

    def step(piece: Piece, control: Control) -> None:
        noted.append(piece.numel)
        real(piece, control)

    monkeypatch.setattr(cpu_kernel, "kernel", lambda: step)
    return noted


# --- acted ---


@every_kind
@pytest.mark.parametrize("budget", [None, 0])
def test_acted_once_for_each_parameter_with_codes(kind: str, budget: int | None, calls: list[int]):
    stepped(kind, random_gradient, 2, (*SIZES, 100), state_budget=budget)
    assert calls == [*SIZES, *SIZES]


def test_other_moments_and_who_does_not_want_it_are_left_to_torch(calls: list[int]):
    stepped("24", random_gradient, 1, fused=False)
    stepped("24", random_gradient, 1, moment_bits=32)
    assert calls == []


def test_small_parameters_build_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_kernel, "kernel", lambda: pytest.fail("was built"))
    stepped("24", random_gradient, 2, (100, 4095))


def test_a_backward_that_needs_the_weight_knows_that_it_has_changed(calls: list[int]):
    p = nn.Parameter(torch.randn(64, 64))
    optimizer = CompactAdamW([p])
    loss = (p * p).sum()
    optimizer.step_one(p, torch.ones_like(p))
    assert calls
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


# --- parity ---


@pytest.mark.skipif(not ROUNDS_ONCE, reason="torch rounds products otherwise here")
@pytest.mark.usefixtures("exact_root")
@every_kind
@pytest.mark.parametrize("adam", [False, True], ids=["adamw", "adam"])
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16, torch.float64])
def test_with_ieee_roots_it_is_torchs_bit_for_bit(kind: str, adam: bool, grad: torch.dtype):
    def gradients(step: int, size: int) -> Tensor:
        return (random_gradient(step, size) * 10.0 ** (step % 7 - 3)).to(grad)

    both = [
        stepped(kind, gradients, 25, fused=fused, decoupled_weight_decay=not adam, weight_decay=0.1)
        for fused in (None, False)
    ]
    assert_same(*both)


@pytest.mark.skipif(not ROUNDS_ONCE, reason="torch rounds products otherwise here")
@pytest.mark.usefixtures("exact_root")
@every_kind
@pytest.mark.parametrize(
    "scale", [1e-40, 1e-30, 1e-22, 1e-19, 1e10, 1e18, 1e20, 1e30, 3e38, float("inf"), float("nan")]
)
def test_at_any_scale_it_is_torchs_bit_for_bit(kind: str, scale: float):
    def gradients(step: int, size: int) -> Tensor:
        made = random_gradient(step, size)
        made[: size // 2] *= scale  # the other half is ordinary
        return made if np.isfinite(scale) or step == 1 else made.nan_to_num()

    both = [stepped(kind, gradients, 4, fused=fused) for fused in (None, False)]
    assert_same(*both)
    assert both[0]["0.exp_avg"].dtype == torch.int8
    assert both[0]["0.exp_avg"].any()


@every_kind
@pytest.mark.parametrize("adam", [False, True], ids=["adamw", "adam"])
def test_with_torchs_roots_it_is_as_good_as_the_same(kind: str, adam: bool):
    """Of a root that is rounded otherwise the last bit differs, then that of a master weight; codes hardly do."""
    ours, theirs = (
        stepped(kind, random_gradient, 40, fused=fused, decoupled_weight_decay=not adam) for fused in (None, False)
    )
    for name, one in ours.items():
        other = theirs[name]
        if name.endswith("master"):
            torch.testing.assert_close(one, other, rtol=0, atol=LAST_BIT[kind])
        elif name.endswith("scale"):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=0)
        elif not name.endswith("correction") and one.dtype != torch.float32:
            assert (one != other).float().mean() < 1e-3
            assert one.is_floating_point() or (one.int() - other.int()).abs().max() <= 1


def test_threads_and_the_order_of_memory_change_nothing():
    made = []
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(700, 601).t())  # 3,287 blocks: 4 pieces, and a short last block
        optimizer = CompactAdamW([p])
        torch.set_num_threads(threads)
        try:
            for _ in range(3):
                optimizer.step_one(p, torch.randn(601, 700))
        finally:
            torch.set_num_threads(before)
        made.append(contents(optimizer))
    assert_same(*made)


def test_tensors_that_do_not_fit_never_reach_addresses(calls: list[int]):
    p = nn.Parameter(torch.randn(5000))
    optimizer = CompactAdamW([p])
    optimizer.step_one(p, torch.randn(5000))
    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"][:4000]
    with pytest.raises(RuntimeError):
        optimizer.step_one(p, torch.randn(5000))
    assert calls == [5000]


# --- built, or not ---


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that has really been compiled."""
    path = tmp_path_factory.mktemp("built") / "adamw.so"
    subprocess.run(
        [*shlex.split(cxx_compiler() or ""), *cpu_kernel.FLAGS, str(cpu_kernel.SOURCE), "-o", str(path)], check=True
    )
    return path


class Compiler:
    """A script in the compiler's place, which notes its calls, and copies a library or fails."""

    def __init__(self, folder: Path, body: str) -> None:
        self.path, self.log = folder / "cxx", folder / "log"
        self.log.touch()
        version = 'if [ "$1" = --version ]; then echo 1.0; exit; fi'
        lines = ["#!/bin/sh", version, f"echo built >> '{self.log}'", "for to; do :; done", body]
        self.path.write_text("\n".join(lines))
        self.path.chmod(0o755)

    @property
    def builds(self) -> int:
        return len(self.log.read_text().splitlines())


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Compiler]]:
    """Put a compiler in place of this machine's, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(body: str) -> Compiler:
        made = Compiler(tmp_path, body)
        monkeypatch.setenv("CXX", str(made.path))
        cpu_kernel.kernel.cache_clear()
        return made

    yield make
    cpu_kernel.kernel.cache_clear()


def again() -> Any:
    """Return the kernel as a new process would find it."""
    cpu_kernel.kernel.cache_clear()
    return cpu_kernel.kernel()


def test_another_compiler_builds_anew(built: Path, compiler: Any, tmp_path: Path):
    made = compiler(f"cp '{built}' \"$to\"")
    assert again() is not None
    assert again() is not None
    assert made.builds == 1
    made.path.write_text(made.path.read_text().replace("1.0", "2.0"))
    assert again() is not None
    assert made.builds == 2
    assert len([*tmp_path.glob("cache/lightning_solo/extensions/adamw-*/adamw.so")]) == 2


def test_nothing_is_loaded_from_a_folder_that_others_may_write_into(built: Path, compiler: Any, tmp_path: Path):
    made = compiler(f"cp '{built}' \"$to\"")
    again()
    (tmp_path / "cache/lightning_solo/extensions").chmod(0o777)
    with pytest.warns(UserWarning, match="extensions"):
        assert again() is not None
    assert made.builds == 2


def test_without_a_cache_it_is_built_all_the_same(built: Path, compiler: Any, tmp_path: Path):
    made = compiler(f"cp '{built}' \"$to\"")
    (tmp_path / "cache").write_text("a file in the way")
    assert again() is not None
    stepped("24", random_gradient, 1)  # its file is gone by now
    assert made.builds == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo 'adamw.cpp:1: error: no such instruction' >&2; exit 1", "no such instruction"),
        ('echo nonsense > "$to"', "write CXX="),
    ],
    ids=["fails", "makes nonsense"],
)
def test_a_broken_compiler_warns_once_and_torch_steps(body: str, words: str, compiler: Any, tmp_path: Path):
    expected = stepped("24", random_gradient, 2, fused=False)
    made = compiler(body)
    with pytest.warns(UserWarning, match=words) as caught:
        found = [stepped("24", random_gradient, 2) for _ in range(2)]
    assert len(caught) == 1
    assert made.builds == 1
    for states in found:
        assert_same(states, expected)
    assert not any(path.suffix == ".so" and words in "error" for path in tmp_path.rglob("*"))


def test_without_a_compiler_torch_steps(monkeypatch: pytest.MonkeyPatch):
    expected = stepped("24", random_gradient, 2, fused=False)
    monkeypatch.setattr(cpu_kernel, "cxx_compiler", lambda: None)
    cpu_kernel.kernel.cache_clear()
    try:
        assert_same(stepped("24", random_gradient, 2), expected)
    finally:
        cpu_kernel.kernel.cache_clear()


@pytest.mark.long
def test_importing_builds_nothing(built: Path, compiler: Any):
    made = compiler(f"cp '{built}' \"$to\"")
    program = (
        "import torch; from lightning_solo.optim import CompactAdamW, cpu_kernel\n"
        "assert cpu_kernel.kernel.cache_info().currsize == 0, 'built by importing'\n"
        "p = torch.nn.Parameter(torch.ones(5000)); CompactAdamW([p], lr=0.5).step_one(p, torch.ones(5000))\n"
        "assert cpu_kernel.kernel.cache_info().currsize == 1"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
    assert made.builds == 1
