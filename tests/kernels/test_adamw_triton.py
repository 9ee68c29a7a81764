"""The Triton kernels, run by Triton's interpreter on a CPU: equal to torch's operators, and wrong ones are caught."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_solo.machine import is_installed
from lightning_solo.optim import gpu_kernel, triton_launches
from lightning_solo.optim.adamw_update import Blocks, update_blocks
from lightning_solo.optim.compressed_moments import BLOCK, blocks
from lightning_solo.optim.gpu_kernel import TritonKernels
from lightning_solo.optim.kernels import PER_PARTIAL, Control, Piece, Scalars, Sum
from tests.messages import mentions

if not is_installed("triton") or os.environ.get("TRITON_INTERPRET") != "1":
    reason = "needs Triton, and TRITON_INTERPRET=1 from the start: run by `make kernels`"
    pytest.skip(reason, allow_module_level=True)

CPU = torch.device("cpu")
MASTERS = {"24": torch.int8, "32": torch.int16, "stochastic": None, "fp32": None}
"""Kind of the master weight -> type of its correction."""
MOMENT_BITS = (8, 32)
GRADIENTS = (torch.bfloat16, torch.float16, torch.float32)
PER_PROGRAM = triton_launches.ROWS * BLOCK
SIZES = (2 * PER_PROGRAM, PER_PROGRAM + 5 * BLOCK, 3 * BLOCK + 1, 17)
"""Whole programs; whole blocks; a short last block; nothing but one."""
SCALARS = Scalars(
    shrink=1 - 1e-3 * 0.1,
    pull=0.0,
    first=1 - 0.9,
    keep=0.99,
    second=1 - 0.99,
    correction2=(1 - 0.99**3) ** 0.5,
    eps=1e-8,
    rate=1e-2 / (1 - 0.9**3),
    seed=3_000_000_000,
    seed_of_weights=123_456_789,
)
every_master = pytest.mark.parametrize("master", MASTERS)
every_moment = pytest.mark.parametrize("moment_bits", MOMENT_BITS)


class Counting:
    """Kernels that note their calls."""

    grouped_below = grouped_bytes = piece = 0
    folds = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def note(self, name: str) -> None:
        self.calls.append(name)

    def reads_host(self, piece: Piece) -> bool:
        return False

    def step(self, pieces: Sequence[Piece], control: Control) -> None:
        self.note("step")

    def add(self, sums: Sequence[Sum], control: Control) -> None:
        self.note("add")


class Never(Counting):
    """Kernels that must not be called."""

    def note(self, name: str) -> None:
        pytest.fail("was left to others")


@pytest.fixture(autouse=True)
def exact_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch round roots as IEEE 754 requires; MKL's roots differ once in five times."""
    monkeypatch.setattr(Tensor, "sqrt", lambda x: torch.from_numpy(np.sqrt(x.numpy())))


@pytest.fixture(autouse=True)
def no_complaints() -> Iterator[None]:
    """Allow infinities and NaN in the interpreter, which computes by NumPy."""
    with np.errstate(all="ignore"):
        yield


def tensors_of(
    master: str, moment_bits: int, size: int, seed: int = 0, gradient: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Return a parameter with all codes, its state and a gradient, flat; part of them are 0."""
    torch.manual_seed(seed)
    made = {"weight": torch.randn(size), "grad": torch.randn(size) * 0.05}
    made["grad"][::7] = 0
    made["weight"][::11] = 0
    made["grad"] = made["grad"].to(gradient)
    correction = MASTERS[master]
    if master != "fp32":
        made["weight"] = made["weight"].to(torch.bfloat16)
    if correction is not None:
        most = torch.iinfo(correction).max
        made["correction"] = torch.randint(-most, most + 1, (size,)).to(correction)
    if moment_bits == 8:
        made["exp_avg"] = torch.randint(-127, 128, (size,)).to(torch.int8)
        made["exp_avg_sq"] = torch.randint(0, 256, (size,)).to(torch.uint8)
        made["exp_avg_scale"] = torch.rand(blocks(size)) * 0.02
        made["exp_avg_sq_scale"] = torch.rand(blocks(size)) * 0.002
        made["exp_avg_scale"][:2] = made["exp_avg_sq_scale"][:2] = 0  # as before a first step
    else:
        made["exp_avg"], made["exp_avg_sq"] = torch.randn(size) * 0.02, torch.rand(size) * 0.002
    return made


def control_of(scale: float = 0.7, bound: float = float("inf"), entries: int = 1) -> Control:
    return Control(torch.tensor(scale), torch.zeros(entries, dtype=torch.int32), bound)


def by_operators(piece: Piece, control: Control) -> dict[str, Tensor]:
    """Return a piece's tensors after a step with torch's operators."""
    size = piece.tensors["weight"].numel()
    short = {
        name: value.clone() if name.endswith("_scale") else F.pad(value, (0, -size % BLOCK)).view(-1, BLOCK)
        for name, value in piece.tensors.items()
    }
    short["grad"] = short["grad"].float().clamp(-control.bound, control.bound)
    update_blocks(Blocks(**short), piece.scalars, first_row=piece.first_row, scale=control.scale.item())
    made = {name: value.flatten()[: piece.tensors[name].numel()] for name, value in short.items()}
    return made | {"grad": piece.tensors["grad"].clone()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)  # types too


def assert_steps_alike(pieces: Sequence[Piece], control: Control) -> None:
    """Step pieces by the kernels, and compare each with a step by operators, which must change what it steps."""
    expected = [by_operators(piece, control) for piece in pieces]
    before = [piece.tensors["exp_avg"].clone() for piece in pieces]
    TritonKernels(CPU, Never()).step(pieces, control)
    for piece, same, old in zip(pieces, expected, before, strict=True):
        assert_same(dict(piece.tensors), same)
        assert not torch.equal(piece.tensors["exp_avg"], old)


# --- equal to the operators ---


@every_master
@every_moment
@pytest.mark.parametrize("gradient", GRADIENTS, ids=str)
def test_a_step_is_that_of_the_operators(master: str, moment_bits: int, gradient: torch.dtype):
    for seed, size in enumerate(SIZES):
        tensors = tensors_of(master, moment_bits, size, seed, gradient)
        assert_steps_alike([Piece(tensors, SCALARS, first_row=5 * seed)], control_of())


@every_master
@every_moment
@pytest.mark.parametrize("sizes", [SIZES, (PER_PROGRAM, 3 * PER_PROGRAM)], ids=["short", "whole"])
def test_many_in_one_launch_are_each_as_alone(master: str, moment_bits: int, sizes: tuple[int, ...]):
    pieces = [
        Piece(
            tensors_of(master, moment_bits, size, seed),
            SCALARS._replace(
                rate=0.01 * (seed + 1), seed=2**32 - 1 - seed, seed_of_weights=seed, eps=1e-6 * (seed + 1)
            ),
            first_row=1000 * seed,
            index=seed,
        )
        for seed, size in enumerate(sizes)
    ]
    assert_steps_alike(pieces, control_of(entries=len(sizes)))


@every_master
def test_addresses_in_the_middle_of_memory(master: str):
    whole = tensors_of(master, 8, 40 * BLOCK)
    width = {name: 1 if name.endswith("_scale") else BLOCK for name in whole}
    parts = [(1, 5), (7, 40)]
    pieces = [
        Piece({name: value[a * width[name] : b * width[name]] for name, value in whole.items()}, SCALARS, first_row=a)
        for a, b in parts
    ]
    before = {name: value.clone() for name, value in whole.items()}
    assert_steps_alike(pieces, control_of())
    for name, value in whole.items():
        for a, b in ((0, 1), (5, 7)):
            assert torch.equal(
                value[a * width[name] : b * width[name]], before[name][a * width[name] : b * width[name]]
            )


@every_master
@pytest.mark.parametrize(
    "changes",
    [{"pull": 0.1, "shrink": 1.0}, {"first": 0.75}, {"first": 0.5}, {"eps": 1e-30}],
    ids=["adam", "far", "half", "little eps"],
)
def test_scalars_of_every_kind(master: str, changes: dict[str, float]):
    scalars = SCALARS._replace(**changes)
    alone = Piece(tensors_of(master, 8, SIZES[1]), scalars)
    assert_steps_alike([alone], control_of())
    mixed = [Piece(tensors_of(master, 8, SIZES[2], seed), by) for seed, by in enumerate((SCALARS, scalars))]
    assert_steps_alike(mixed, control_of())


def extremes(master: str, moment_bits: int) -> Piece:
    """Return a piece with gradients whose squares fp32 hardly holds, or doesn't hold, and what is no number."""
    tensors = tensors_of(master, moment_bits, 8 * BLOCK, gradient=torch.float32)
    grad = tensors["grad"].view(8, BLOCK)
    grad[0] = 0
    grad[1] *= 1e-19
    grad[2, 3] = 1e30  # a square above the greatest
    grad[3, 5], grad[4, 6], grad[5, 7] = float("inf"), -float("inf"), float("nan")
    grad[6] = 3e-42
    if moment_bits == 32:
        tensors["exp_avg"][128:256] *= 1e-19
        tensors["exp_avg_sq"][128:256] = 0
        tensors["weight"][128:256] = 0
    return Piece(tensors, SCALARS._replace(eps=1e-30))


@every_master
@every_moment
def test_extremes(master: str, moment_bits: int):
    assert_steps_alike([extremes(master, moment_bits)], control_of())


# --- what decides on the device, and what is found there ---


@every_moment
@pytest.mark.parametrize("count", [1, 3])
def test_a_scale_of_nan_changes_nothing(moment_bits: int, count: int):
    pieces = [Piece(tensors_of("24", moment_bits, SIZES[1], seed), SCALARS, index=seed) for seed in range(count)]
    pieces[0].tensors["grad"][3] = float("nan")
    before = [{name: value.clone() for name, value in piece.tensors.items()} for piece in pieces]
    control = control_of(float("nan"), entries=count)
    TritonKernels(CPU, Never()).step(pieces, control)
    for piece, old in zip(pieces, before, strict=True):
        assert_same(dict(piece.tensors), old)
    assert control.not_finite.sum() == 0


@every_moment
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bound", [float("inf"), 1e-3])
def test_elements_that_are_not_finite_are_told_by_parameter(moment_bits: int, wrong: float, bound: float):
    for chosen in ([0], [0, 2]):
        pieces = [Piece(tensors_of("24", moment_bits, SIZES[1], seed), SCALARS, index=seed) for seed in range(3)]
        for index in chosen:
            pieces[index].tensors["grad"][-1] = wrong
        together, alone = control_of(entries=3, bound=bound), control_of(entries=3, bound=bound)
        TritonKernels(CPU, Never()).step(pieces, together)
        assert together.not_finite.tolist() == [int(index in chosen) for index in range(3)]
        if not chosen[1:]:
            TritonKernels(CPU, Never()).step(pieces[:1], alone)
            assert alone.not_finite.tolist() == [1, 0, 0]


def test_large_finite_gradients_are_not_told():
    tensors = tensors_of("24", 8, SIZES[0], gradient=torch.float32)
    tensors["grad"][5] = torch.finfo(torch.float32).max
    control = control_of()
    TritonKernels(CPU, Never()).step([Piece(tensors, SCALARS)], control)
    assert control.not_finite.item() == 0


@every_master
@pytest.mark.parametrize("count", [1, 2])
def test_gradients_are_clamped_to_the_bound_before_they_are_scaled(master: str, count: int):
    pieces = [Piece(tensors_of(master, 8, SIZES[1], seed), SCALARS) for seed in range(count)]
    pieces[0].tensors["grad"][9], pieces[0].tensors["grad"][10] = float("inf"), float("nan")
    without = by_operators(pieces[0], control_of())
    assert_steps_alike(pieces, control_of(bound=0.01))
    assert not torch.equal(pieces[0].tensors["exp_avg"], without["exp_avg"])


# --- sums ---


def sums_of(
    gradient: torch.dtype, total: torch.dtype | None, sizes: Sequence[int], firsts: Sequence[bool]
) -> list[Sum]:
    torch.manual_seed(1)
    return [
        Sum(
            torch.randn(size).to(gradient),
            None if total is None else torch.randn(size).to(total),
            is_first,
            torch.full((-(-size // PER_PARTIAL),), -1.0),
        )
        for size, is_first in zip(sizes, firsts, strict=True)
    ]


def expected_of(each: Sum, bound: float) -> tuple[Tensor, list[float]]:
    """Return the total after a sum by operators, and its partial sums in fp64."""
    made = each.gradient
    if each.total is not None:
        made = each.gradient.to(each.total.dtype) if each.is_first else each.total.clone().add_(each.gradient)
    parts = made.double().clamp(-bound, bound).split(PER_PARTIAL)
    finite = [bool(part.isfinite().all()) for part in made.split(PER_PARTIAL)]
    return made, [part.norm().item() if ok else float("nan") for part, ok in zip(parts, finite, strict=True)]


@pytest.mark.parametrize("total", [None, "same", torch.float32], ids=str)
@pytest.mark.parametrize("gradient", GRADIENTS, ids=str)
@pytest.mark.parametrize("sizes", [(PER_PARTIAL + 3000,), (5, PER_PARTIAL, 2 * PER_PARTIAL + 1)], ids=["one", "many"])
@pytest.mark.parametrize("bound", [float("inf"), 0.3])
def test_sums_are_those_of_the_operators(gradient: torch.dtype, total: Any, sizes: tuple[int, ...], bound: float):
    total = gradient if total == "same" else total
    for first in (False, True):
        sums = sums_of(gradient, total, sizes, [first, True, False][: len(sizes)])
        sums[0].gradient[2] = -0.0
        if len(sizes) == 3:
            sums[1].gradient[7] = float("inf")
            sums[2].gradient[-1] = float("nan")
        expected = [expected_of(each, bound) for each in sums]
        TritonKernels(CPU, Never()).add(sums, control_of(bound=bound))
        for each, (made, parts) in zip(sums, expected, strict=True):
            if each.total is not None:
                torch.testing.assert_close(each.total, made, rtol=0, atol=0, equal_nan=True)
                assert torch.equal(each.total.signbit(), made.signbit())
            # 2**14 squares, added 8 at a time to 2**11 sums: far below 2**14 roundings of 2**-24 each
            torch.testing.assert_close(each.partials, torch.tensor(parts), rtol=1e-5, atol=0, equal_nan=True)


def test_sums_with_and_without_a_total_and_norms_may_be_mixed():
    sums = [
        *sums_of(torch.bfloat16, None, (100, 200), (True, True)),
        *sums_of(torch.bfloat16, torch.float32, (5, 6, 7), (True, False, False)),
    ]
    sums[3:] = [replace(each, partials=None) for each in sums[3:]]
    expected = [expected_of(each, float("inf")) for each in sums]
    TritonKernels(CPU, Never()).add(sums, control_of())
    for each, (made, parts) in zip(sums, expected, strict=True):
        if each.partials is not None:
            torch.testing.assert_close(each.partials, torch.tensor(parts), rtol=1e-5, atol=0)
        if each.total is not None:
            assert torch.equal(each.total, made)


def test_sums_of_64_bits_are_left_to_others():
    others = Counting()
    wide = Sum(torch.ones(3), torch.ones(3, dtype=torch.float64), False, torch.zeros(1, dtype=torch.float64))
    TritonKernels(CPU, others).add([wide], control_of())
    assert others.calls == ["add"]


# --- wrong kernels are caught ---

MUTATIONS = {
    "weights rounded to zero": ("(raw + 0x7FFF + ((raw >> 16) & 1)) & UPPER", "raw & UPPER"),
    "ties away from even": ("0x7FFF + ((raw >> 16) & 1)", "0x8000"),
    "32 bits cut": ("upper = (raw + 0x8000) & UPPER", "upper = raw & UPPER"),
    "correction cut": ("(raw - upper + 0x80) >> 8", "(raw - upper) >> 8"),
    "correction beyond its ends": ("0x80) >> 8, -127)", "0x80) >> 8, -128)"),
    "correction not shifted": ("(units << (32 - BITS))", "units"),
    "correction below 0": ("tl.where(weight == 0.0, tl.maximum(units, 0), units)", "units"),
    "scale forgotten": ("grad = grad * scale\n", "grad = grad * 1.0\n"),
    "bound after the scale": ("tl.clamp(grad, -bound, bound, ", "tl.clamp(grad, -bound / scale, bound / scale, "),
    "weight decay forgotten": ("master = master * shrink", "master = master * 1.0"),
    "first scale of the next block": ("_scale_of(m)", "_scale_of(m * 2.0)"),
    "second scale": ("_scale_of(v)", "_scale_of(v * 2.0)"),
    "scale not of the block": ("tl.max(_bits(values) & MAGNITUDE, 1)", "(tl.max(_bits(values) & MAGNITUDE, 1) | 1)"),
    "first rounded down": ("_bits(curve + ROUNDER).to(tl.int8)", "_bits(tl.floor(curve) + ROUNDER).to(tl.int8)"),
    "second to nearest": ("> uniform * tl.fma", "> 0.5 * tl.fma"),
    "second may become 0": ("tl.where(values > 0.0, 1.0, 0.0)", "0.0"),
    "curve of the first": ("least = 2.0 - tl.abs(curve)", "least = 2.0 + tl.abs(curve)"),
    "curve of the second": ("return root * root * scale", "return root * scale"),
    "two roundings": ("tl.fma(part, grad - m, m)", "(part * (grad - m) + m)"),
    "two roundings of the second": ("tl.fma(second * grad, grad, v * keep)", "(second * grad * grad + v * keep)"),
    "second correction": ("_quotient(_root(v), correction2, inverse2)", "_root(v)"),
    "quotient by a reciprocal": ("_quotient(_root(v), correction2, inverse2)", "_root(v) * inverse2"),
    "root that isn't refined": ("root = tl.fma(tl.fma(-guess, guess, x), 0.5 * near, guess)", "root = guess"),
    "root of small numbers": ("is_small = x < 5.421010862427522e-20", "is_small = x < 0.0"),
    "quotient that isn't refined": ("return tl.fma(tl.fma(-b, guess, a), near, guess)", "return guess"),
    "a square above the greatest": ("change * 0.0, quotient", "quotient, quotient"),
    "eps forgotten": ("inverse2) + eps", "inverse2)"),
    "random numbers of the piece": ("first_row + program * ROWS + row", "program * ROWS + row"),
    "random numbers of the program": ("first_row + program * ROWS + row", "first_row + row"),
    "seeds confused": ("_uniform(number, column, seed))", "_uniform(number, column, seed_of_weights))"),
    "random numbers too coarse": (">> 8) & 0xFFFFFF", ">> 8) & 0xFF0000"),
    "not rounded stochastically": ("raw + (uniform * 65536.0).to(tl.int32)", "raw + 0x8000"),
    "last element left out": ("ok = at < numel", "ok = at < numel - 1"),
    "steps with a scale of NaN": ("    if scale == scale:", "    if True:"),
    "not finite isn't told": ("largest >= INFINITE)", "largest > INFINITE)"),
    "wrong parameter is told": ("not_finite + tl.load(entry + 10)", "not_finite"),
}  # fmt: skip
"""What a wrong kernel has -> (what stands in the source, what is written in its place)."""


SUM_MUTATIONS = {
    "total forgotten": ("MASKED).to(tl.float32) + value", "MASKED).to(tl.float32)"),
    "first isn't heeded": ("if is_first == 0:", "if is_first <= 1:"),
    "rounded to zero": ("(raw + 0x7FFF + ((raw >> 16) & 1)) & UPPER", "raw & UPPER"),
    "squares, not norms": ("tl.sqrt_rn(tl.sum(squares, 0))", "tl.sum(squares, 0)"),
    "gradient's norm": ("wrong = value", "value = _load(gradient, at, ok, MASKED).to(tl.float32)\n    wrong = value"),
    "bound forgotten": ("tl.clamp(value, -bound, bound)", "value"),
    "infinities are clamped": ("wrong = value - value", "wrong = 0.0"),
    "end left out": ("if whole < left:", "if whole > left:"),
    "partials in one place": ("tl.store(partials + program", "tl.store(partials"),
    "first part again": ("at = first + tl.arange(0, PER_SUM)", "at = tl.arange(0, PER_SUM)"),
}  # fmt: skip


def mutant(source: str, folder: Path) -> ModuleType:
    """Return the kernels of a source, which Triton reads from a file."""
    path = folder / "mutant.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ties() -> Piece:
    """Return a piece whose step ends halfway between two bf16, above even ones and odd ones: 2**-8 away from 1 to 2."""
    tensors = tensors_of("24", 32, 2 * BLOCK)
    tensors["weight"].copy_(1 + torch.arange(2 * BLOCK) % 128 * 2.0**-7)
    tensors["correction"].zero_()
    tensors["exp_avg"].zero_()
    tensors["grad"].copy_(torch.where(torch.arange(2 * BLOCK) < BLOCK, 1.0, -1.0))
    exact = {"first": 0.25, "keep": 0.0, "second": 1.0, "correction2": 1.0, "eps": 0.0, "rate": 2.0**-6}
    return Piece(tensors, SCALARS._replace(shrink=1.0, **exact))


def assert_equal_everywhere() -> None:
    """Compare the kernels with the operators on every master, one and many, bound, ties, extremes and NaN."""
    large = 5.0  # a gradient that makes a block's scale, and updates that are far from 0
    for seed, master in enumerate(MASTERS):
        one = tensors_of(master, 8, 33 * BLOCK + 50, seed)
        one["grad"][5] = large
        assert_steps_alike([Piece(one, SCALARS, first_row=3)], control_of(bound=1.0))
        many = [Piece(tensors_of(master, 8, 300, 9 + at), SCALARS, first_row=at, index=at) for at in range(2)]
        assert_steps_alike(many, control_of(entries=2))
    assert_steps_alike([ties()], control_of(1.0))
    assert_steps_alike([extremes("fp32", 32)], control_of())
    for count in (1, 2):
        pieces = [Piece(tensors_of("24", 8, 256, at), SCALARS, index=at) for at in range(2)][-count:]
        pieces[-1].tensors["grad"][3] = float("inf")
        control = control_of(entries=2)
        TritonKernels(CPU, Never()).step(pieces, control)
        assert control.not_finite.tolist() == [0, 1]
        before = pieces[0].tensors["weight"].clone()
        TritonKernels(CPU, Never()).step(pieces, control_of(float("nan"), entries=2))
        assert torch.equal(before.view(torch.int16), pieces[0].tensors["weight"].view(torch.int16))


def test_what_the_mutations_are_caught_by_passes_without_one():
    assert_equal_everywhere()
    assert_sums_equal_everywhere()


@pytest.mark.parametrize("factor", [1 - 2.0**-23, 1 + 2.0**-23])
def test_the_least_exact_approximations_of_a_device_give_the_same(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = Path(triton_launches.functions().__file__ or "").read_text()
    for exact in ("return 1.0 / x", "return 1.0 / tl.sqrt_rn(x)", "return tl.sqrt_rn(x)"):
        assert source.count(exact) == 1
        source = source.replace(exact, f"{exact} * {factor}")
    module = mutant(source, tmp_path)
    monkeypatch.setattr(triton_launches, "functions", lambda: module)
    assert_equal_everywhere()


def assert_sums_equal_everywhere() -> None:
    """Compare sums with the operators' on whole parts and short ones, one and many, both types, bound, infinities."""
    for bound in (0.3, float("inf")):
        for total, sizes in ((torch.bfloat16, (PER_PARTIAL + 3000,)), (torch.float32, (5, PER_PARTIAL + 1))):
            sums = sums_of(torch.bfloat16, total, sizes, (False, True)[: len(sizes)])
            sums[-1].gradient[-1] = float("inf")
            expected = [expected_of(each, bound) for each in sums]
            TritonKernels(CPU, Never()).add(sums, control_of(bound=bound))
            for each, (made, parts) in zip(sums, expected, strict=True):
                assert torch.equal(each.total, made)
                torch.testing.assert_close(each.partials, torch.tensor(parts), rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [*MUTATIONS, *SUM_MUTATIONS])
def test_a_wrong_kernel_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right, wrong = (MUTATIONS | SUM_MUTATIONS)[name]
    source = Path(triton_launches.functions().__file__ or "").read_text()
    assert right in source
    module = mutant(source.replace(right, wrong), tmp_path)
    monkeypatch.setattr(triton_launches, "functions", lambda: module)
    with pytest.raises(AssertionError):
        (assert_equal_everywhere if name in MUTATIONS else assert_sums_equal_everywhere)()


# --- a kernel that does not run ---


def test_kernel_that_does_not_compile_is_replaced_with_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = Path(triton_launches.functions().__file__ or "").read_text()
    module = mutant(source.replace("_root(v)", "_no_such_function(v)"), tmp_path)
    monkeypatch.setattr(triton_launches, "functions", lambda: module)
    others = Counting()
    kernels = TritonKernels(CPU, others)
    piece = Piece(tensors_of("24", 8, 256), SCALARS)
    with pytest.warns(UserWarning, match=mentions("step_one", "_no_such_function")):
        kernels.step([piece], control_of())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.step([piece], control_of())
        kernels.add(sums_of(torch.bfloat16, None, (10,), (True,)), control_of())  # has another kernel, which runs
    assert others.calls == ["step", "step"]


def test_memory_that_is_out_is_no_defect_of_a_kernel(monkeypatch: pytest.MonkeyPatch):
    def out(*_: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(triton_launches, "launch_steps", out)
    with pytest.raises(torch.OutOfMemoryError):
        TritonKernels(CPU, Never()).step([Piece(tensors_of("24", 8, 256), SCALARS)], control_of())


def test_moments_of_4_bits_are_left_to_others():
    tensors = tensors_of("24", 8, 256)
    tensors["exp_avg"] = tensors["exp_avg_sq"] = torch.zeros(128, dtype=torch.uint8)
    others = Counting()
    kernels = TritonKernels(CPU, others)
    piece = Piece(tensors, SCALARS)
    assert not kernels.serves(piece.layout)
    kernels.step([piece], control_of())
    assert others.calls == ["step"]


def test_there_are_none_for_a_cpu():
    assert gpu_kernel.kernels(CPU, Never()) is None
