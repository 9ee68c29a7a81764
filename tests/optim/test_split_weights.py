"""fp32 in two parts, bit for bit, over all 65,536 upper halves; expected bits are made with integers, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_solo.optim.split_weights import join, round_stochastically, split

UPPERS = np.arange(2**16, dtype=np.uint32) << 16  # each sign, exponent (subnormals, infinities) and bf16 mantissa
LOWERS = [
    0x0000,
    0x0001,
    0x007F,
    0x0080,
    0x0081,
    0x0180,
    0x7F7F,
    0x7F80,
    0x7FFF,
    0x8000,
    0x8001,
    0x8080,
    0xFF80,
    0xFFFF,
]


def floats(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.int32).copy()).view(torch.float32)


def bits_of(values: Tensor) -> np.ndarray:
    return values.view(torch.int32).numpy().view(np.uint32)


def every_upper(lower: int) -> tuple[np.ndarray, Tensor]:
    """Return the bits of 65,536 fp32 numbers that aren't NaN, and the numbers."""
    bits = UPPERS | np.uint32(lower)
    bits = bits[(bits & 0x7FFFFFFF) <= 0x7F800000]
    return bits, floats(bits)


def rounded(bits: np.ndarray, dropped: int, ties: str) -> np.ndarray:
    """Return bits without the last ``dropped`` ones, to the nearest, in Python-sized integers."""
    wide = bits.astype(np.int64)
    sign, magnitude = wide & 0x80000000, wide & 0x7FFFFFFF
    half, unit = 1 << (dropped - 1), 1 << dropped
    below = magnitude // unit
    rest = magnitude - below * unit
    up = (rest > half) | ((rest == half) & ((ties == "away") | (below % 2 == 1)))
    return sign | ((below + up) * unit)


def kept_of_24(bits: np.ndarray) -> np.ndarray:
    """Return bits rounded to a bf16 and 127 steps of 2**8 up or down from it."""
    upper = rounded(bits, 16, "even")
    return upper + 256 * np.clip((bits.astype(np.int64) - upper + 128) // 256, -127, 127)


@pytest.mark.parametrize("lower", LOWERS)
def test_32_bits_come_back_bit_for_bit(lower: int):
    bits, master = every_upper(lower)
    weight, correction = split(master, 32)
    assert (weight.dtype, correction.dtype) == (torch.bfloat16, torch.int16)
    assert (bits_of(join(weight, correction)) == bits).all()
    assert (bits_of(weight.float()) == rounded(bits, 16, "away")).all()
    # it acted: the weight alone differs wherever lower bits are set
    assert (bits_of(weight.float()) != bits).all() == (lower != 0)


@given(st.integers(0, 0xFFFF))
def test_any_lower_half(lower: int):
    bits, master = every_upper(lower)
    assert (bits_of(join(*split(master, 32))) == bits).all()
    assert (bits_of(join(*split(master, 24))) == kept_of_24(bits)).all()


@pytest.mark.parametrize("lower", LOWERS)
def test_24_bits_are_the_nearest(lower: int):
    bits, master = every_upper(lower)
    weight, correction = split(master, 24)
    kept = kept_of_24(bits)
    assert (weight.dtype, correction.dtype) == (torch.bfloat16, torch.int8)
    assert torch.equal(weight, master.to(torch.bfloat16))
    assert (bits_of(join(weight, correction)) == kept).all()
    off = np.abs(kept - bits.astype(np.int64))
    assert (off <= (0x100 if abs(lower - 0x8000) <= 0x80 else 0x80)).all()  # to half of a unit, near a tie to one
    again = split(join(weight, correction), 24)
    assert torch.equal(again[0].view(torch.int16), weight.view(torch.int16))
    assert torch.equal(again[1], correction)


@pytest.mark.parametrize("lower", LOWERS)
def test_the_weight_is_torchs_bf16_but_at_ties(lower: int):
    bits, master = every_upper(lower)
    ours, torchs = bits_of(split(master)[0].float()), bits_of(master.to(torch.bfloat16).float())
    if lower != 0x8000:
        assert (ours == torchs).all()
        return
    assert (torchs == rounded(bits, 16, "even")).all()
    # half of the ties have an even number below: torch goes down, and the correction would be +32,768
    assert (ours != torchs).sum() == len(bits) // 2
    assert split(master)[1].eq(-32768).all()


@pytest.mark.parametrize("bits", [32, 24])
def test_nan_stays_nan(bits: int):
    nans = floats(np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7F80FFFF], np.uint32))
    assert nans.isnan().all()
    weight, correction = split(nans, bits)
    assert weight.isnan().all()
    assert join(weight, correction).isnan().all()


@pytest.mark.parametrize("bits", [32, 24])
def test_weight_that_is_set_to_zero_later_stays_a_number(bits: int):
    """Below 0 the bits are those of NaN."""
    weight, correction = split(torch.full((3,), 1 - 2.0**-12), bits)  # below the weight of 1
    assert (correction < 0).all()
    assert (join(torch.zeros_like(weight), correction) == 0).all()


def test_shapes_are_kept():
    weight, correction = split(torch.randn(3, 0, 5), 24)
    assert weight.shape == correction.shape == join(weight, correction).shape == (3, 0, 5)


# --- stochastic rounding ---


def test_only_the_two_neighbours_and_their_mean_is_the_number():
    part = 0.3  # of the way from 1 to the next bf16, 1 + 2**-7
    draws = 40_000
    for sign in (1.0, -1.0):
        master = torch.full((draws,), sign * (1 + part * 2**-7))
        got = round_stochastically(master, torch.rand(draws))
        away = got.float() == sign * (1 + 2**-7)
        assert (away | (got.float() == sign)).all()
        # binomial: sigma = sqrt(0.3 * 0.7 / 40,000) = 0.0023; five of them, and 2**-16 by which uniform is cut
        assert abs(away.float().mean().item() - part) < 5 * 0.0023 + 2**-16


@given(st.integers(1, 0xFFFF), st.floats(0, 1, exclude_max=True, width=32))
def test_up_or_down_as_the_random_number_says(lower: int, uniform: float):
    bits, master = every_upper(lower)
    got = bits_of(round_stochastically(master, torch.full_like(master, uniform)).float()).astype(np.int64)
    down = bits.astype(np.int64) - lower
    up = int(uniform * 0x10000) + lower >= 0x10000
    assert (got == down + up * 0x10000).all()


def test_exact_infinite_and_nan_values_are_unchanged():
    bits, master = every_upper(0)
    most = torch.full_like(master, 1 - 2**-24)
    assert (bits_of(round_stochastically(master, most).float()) == bits).all()
    nans = floats(np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32))
    assert round_stochastically(nans, most[:3]).isnan().all()
