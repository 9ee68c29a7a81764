"""Random states are plain data, and are put back."""

from __future__ import annotations

import io
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_solo.errors import CheckpointError
from lightning_solo.random_states import OwnSources, get_states, global_sources, put_states, same
from tests.messages import mentions


def through_a_file(states: Any) -> Any:
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_global_generators() -> None:
    before = get_states(global_sources())
    first = draws()
    assert not same(before, get_states(global_sources()))
    put_states(global_sources(), through_a_file(before))
    assert same(before, get_states(global_sources()))
    assert draws() == first


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda g: float(torch.rand((), generator=g))),
        (lambda: random.Random(1), lambda g: g.random()),
        (lambda: np.random.RandomState(1), lambda g: g.rand()),
        *[
            (lambda bits=bits: np.random.Generator(bits(1)), lambda g: g.random())
            for bits in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
        ],
    ],
    ids=["torch", "python", "RandomState", "PCG64", "MT19937", "Philox", "SFC64"],
)
def test_generators_in_attributes(generator: Any, draw: Any) -> None:
    def items(value: Any) -> Any:
        return SimpleNamespace(inner=SimpleNamespace(transforms=[1, SimpleNamespace(rng=value)]))

    saved = items(generator())
    draw(saved.inner.transforms[1].rng)
    states = through_a_file(OwnSources(dataset=saved).get())
    assert [*states] == ["dataset.inner.transforms.1.rng"]
    expected = draw(saved.inner.transforms[1].rng)
    for value in (generator(), None):  # None: made with the first item
        other = items(value)
        OwnSources(dataset=other).put(states, "Items")
        assert draw(other.inner.transforms[1].rng) == expected


def test_generator_that_is_missing_is_named() -> None:
    states = OwnSources(dataset=SimpleNamespace(rng=random.Random(1))).get()
    for other in (SimpleNamespace(), SimpleNamespace(rng=np.random.default_rng(1))):
        with pytest.raises(CheckpointError, match=mentions("dataset.rng", "python", "Items")):
            OwnSources(dataset=other).put({**states}, "Items") if vars(other) else OwnSources().put(states, "Items")
