"""Moments in 8 and 4 bits: how far off a number may be, what stays zero, and what rounding does to a slow average."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_solo.optim import compressed_moments as moments
from lightning_solo.optim.random_numbers import seed_of, uniform

CPU = torch.device("cpu")


def first_and_back(values: Tensor) -> Tensor:
    return moments.dequantize_first(*moments.quantize_first(values))


def second_and_back(values: Tensor, random: Tensor | None = None) -> Tensor:
    return moments.dequantize_second(*moments.quantize_second(values, None, random))


def spread(seed: int, rows: int = 16) -> Tensor:
    """Return blocks of numbers over six orders of magnitude, of both signs, some of them 0."""
    torch.manual_seed(seed)
    values = torch.randn(rows, 128) * 10 ** torch.empty(rows, 128).uniform_(-6, 0)
    return values * (torch.rand(rows, 128) > 0.1)


# --- 8 bits ---


@given(st.integers(0, 2**31), st.integers(-24, 16))
def test_first_is_within_half_a_code(seed: int, exponent: int):
    values = spread(seed) * 10.0**exponent
    codes, scales = moments.quantize_first(values)
    back = moments.dequantize_first(codes, scales)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.int8, (16, 128), (16,))
    assert torch.equal(scales, values.abs().amax(1))
    # c = 127 * 2x / (1 + x), so dx/dc = (1 + x)**2 / 254; half a code, at its steeper end
    x = torch.maximum(values.abs(), back.abs()) / scales[:, None]
    assert ((values - back).abs() <= scales[:, None] * ((1 + x) ** 2 / 508 + 1e-6)).all()
    assert (back[values == 0] == 0).all()
    assert (back != 0).float().mean() > 0.2


@given(st.integers(0, 2**31), st.integers(-24, 16))
def test_second_is_within_a_code_and_never_becomes_zero(seed: int, exponent: int):
    values = spread(seed).square() * 10.0**exponent
    back = second_and_back(values, uniform(16, 128, 0, seed_of(seed, 0), CPU))
    scales = values.amax(1)[:, None]
    # x = (c / 255)**2: from c to c + 1 it is (2c + 1) / 65,025, where c <= 255 * sqrt(x)
    step = scales * (2 * 255 * (values / scales).sqrt() + 1) / 65025
    assert ((values - back).abs() <= step * (1 + 1e-4)).all()
    assert ((back == 0) == (values == 0)).all()
    nearest = second_and_back(values)
    above = values >= scales / 65025
    assert ((values - nearest).abs() <= 0.5 * step * (1 + 1e-4))[above].all()
    assert ((nearest == 0) == (values == 0)).all()


def test_the_greatest_and_the_codes_themselves_come_back():
    codes = torch.arange(-127, 128, dtype=torch.float32)
    curve = codes / 127
    values = torch.nn.functional.pad(curve / (2 - curve.abs()), (0, 1)).view(2, 128)
    values[0, 127], values[1, 0] = 1.0, 1.0  # both blocks' scale is 1
    back = first_and_back(values)
    assert torch.equal(first_and_back(back), back)
    torch.testing.assert_close(back, values, rtol=1e-6, atol=0)
    squares = (torch.arange(256) / 255).square().view(2, 128)
    squares[0, 127] = 1.0
    torch.testing.assert_close(second_and_back(squares), squares, rtol=1e-6, atol=0)


def test_stochastic_rounding_is_right_in_the_mean():
    values = torch.rand(1, 128).clamp_min(1e-3)
    values[0, 0] = 1
    n = 4000
    seeds = [seed_of(step, 0) for step in range(n)]
    total = sum(second_and_back(values, uniform(1, 128, 0, seed, CPU)).double() for seed in seeds)
    step = (2 * 255 * values.sqrt() + 1) / 65025
    # a coin between two codes: sigma <= step / 2, of the mean step / 2 / sqrt(4,000); five of them
    assert (((total / n) - values).abs() <= 5 * step / 2 / math.sqrt(n) + 1e-6).all()
    off = (second_and_back(values).double() - values).abs()
    assert (off > 5 * step / 2 / math.sqrt(n) + 1e-6).float().mean() > 0.5  # the nearest code isn't


@pytest.mark.parametrize("stochastic", [True, False])
def test_a_slow_average_decays_or_stands_still(stochastic: bool):
    values = torch.rand(64, 128) * 0.8 + 0.1
    values[:, 0] = 1
    codes, scales = moments.quantize_second(values)
    start = moments.dequantize_second(codes, scales)
    for step in range(1000):
        v = moments.dequantize_second(codes, scales) * 0.999
        v[:, 0] = 1  # whose gradient stays: else the scale alone decays, and all with it
        random = uniform(64, 128, 0, seed_of(step, 0), CPU) if stochastic else None
        codes, scales = moments.quantize_second(v, None, random)
    end = moments.dequantize_second(codes, scales)[:, 1:]
    ratio = (end.mean() / start[:, 1:].mean()).item()
    if stochastic:
        assert abs(ratio / 0.999**1000 - 1) < 0.01  # 0.368
    else:
        # a step of 0.1 % is less than half a code wherever 0.001 * c**2 < c, for c < 1,000: all of them
        assert torch.equal(end, start[:, 1:])


@given(st.integers(0, 2**31), st.integers(-60, 60))
def test_the_scale_of_a_block_changes_nothing_else(seed: int, exponent: int):
    values = spread(seed, rows=4)
    for quantize, positive in ((moments.quantize_first, values), (moments.quantize_second, values.abs())):
        codes, scales = quantize(positive)
        others, scaled = quantize(positive * 2.0**exponent)
        assert torch.equal(codes, others)
        assert torch.equal(scales * 2.0**exponent, scaled)


def test_a_block_of_zeros_and_one_beyond_fp32():
    zeros = torch.zeros(1, 128)
    assert torch.equal(first_and_back(zeros), zeros)
    assert torch.equal(second_and_back(zeros, torch.full_like(zeros, 0.99)), zeros)
    values = torch.full((1, 128), 1e30)
    values[0, 5] = float("inf")  # the square of a gradient above 1.8e19
    back = second_and_back(values)
    assert back.isfinite().all()
    assert back[0, 5] == torch.finfo(torch.float32).max


# --- 4 bits ---


@pytest.mark.parametrize("signed", [True, False])
def test_four_bits_are_torchaos(signed: bool):
    pytest.importorskip("torchao", reason="the codes of 4 bits are torchao's")
    from torchao.optim.subclass_4bit import OptimState4bit

    values = torch.randn(32, 128) * torch.rand(32, 1) * 10
    values = values if signed else values.square()
    theirs = OptimState4bit.zeros((32, 128), signed, 128)
    theirs.copy_(values)
    book = moments.codebooks(CPU)[0 if signed else 1]
    quantize = moments.quantize_first if signed else moments.quantize_second
    dequantize = moments.dequantize_first if signed else moments.dequantize_second
    codes, scales = quantize(values, book)
    assert (codes.dtype, codes.shape) == (torch.uint8, (32, 64))
    assert torch.equal(scales, theirs.scale)
    assert torch.equal(codes.flatten(), theirs.codes)
    assert torch.equal(dequantize(codes, scales, book), theirs.dequantize())
    assert not torch.equal(theirs.dequantize(), values)


def test_two_codes_of_zero_are_0x77():
    pytest.importorskip("torchao", reason="the codes of 4 bits are torchao's")
    codes, _ = moments.quantize_first(torch.zeros(1, 128), moments.codebooks(CPU)[0])
    assert (codes == 0x77).all()


# --- bytes ---
