"""Numbers that depend on where and when alone, and are as uniform as what rounds by them needs."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_solo.optim import random_numbers
from lightning_solo.optim.random_numbers import seed_of, uniform

CPU = torch.device("cpu")


def by_hand(row: int, column: int, seed: int) -> float:
    p = 1.32471795724474602596  # p**3 = p + 1
    return (seed / 2**32 + row / p + column / p**2) % 1


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**24), st.integers(0, 127))
def test_the_sequence_is_that_of_the_source(seed: int, row: int, column: int):
    got = uniform(1, 128, row, seed, CPU)[0, column].item()
    off = abs(got - by_hand(row, column, seed))
    # cut to 24 bits; fp32 up to 74 has an ulp of 2**-17; the step of a row, 2**-32 / 2 too large or small, x 2**24 rows
    assert min(off, 1 - off) < 2**-24 + 2 * 2**-17 + 2**-9


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**40))
def test_all_factors_are_of_32_bits_with_a_sign_and_give_the_bits_of_the_source(seed: int, row: int):
    assert -(2**31) <= random_numbers._PER_ROW < 2**31  # Triton refuses an int32 that is multiplied by another
    assert uniform(1, 1, row, seed, CPU).item() == ((row * 3242174889 + seed) >> 8 & 0xFFFFFF) / 2**24


@given(st.integers(0, 2**32 - 1), st.integers(0, 50), st.integers(1, 50))
def test_a_part_is_a_part_of_the_whole(seed: int, first: int, rows: int):
    whole = uniform(100, 128, 0, seed, CPU)
    assert torch.equal(uniform(rows, 128, first, seed, CPU), whole[first : first + rows])
    assert whole.min() >= 0
    assert whole.max() < 1


def test_uniform_over_elements_and_over_steps():
    numbers = uniform(256, 128, 0, seed_of(1, 0), CPU)
    assert abs(numbers.mean() - 0.5) < 1e-3  # independent ones: 0.289 / sqrt(32,768) = 1.6e-3
    share = torch.histc(numbers, bins=16, min=0, max=1) / numbers.numel()
    assert (share - 1 / 16).abs().max() < 2e-3
    over_steps = torch.stack([uniform(1, 128, 7, seed_of(step, 3), CPU)[0] for step in range(4000)])
    # of 128 columns' means each has sigma 0.289 / sqrt(4,000) = 0.0046
    assert (over_steps.mean(0) - 0.5).abs().max() < 5 * 0.0046
    centred = over_steps[:, 0] - 0.5
    neighbours = (centred[1:] * centred[:-1]).mean() / centred.square().mean()
    assert abs(neighbours) < 5 / 4000**0.5  # one step says nothing of the next


def test_seeds_differ_by_step_parameter_and_purpose():
    seeds = {seed_of(step, index, purpose) for step in range(50) for index in range(50) for purpose in range(2)}
    assert len(seeds) >= 50 * 50 * 2 - 2  # of 5,000 of 2**32, two are alike once in 344 times
    assert all(0 <= seed < 2**32 for seed in seeds)
