"""Constructor arguments read from the source agree with those of the imported class."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest

from lightning_solo.cards.arguments import REQUIRED, accepts, check_arguments, describe, parameters_of
from lightning_solo.cards.catalogue import built_in_cards
from lightning_solo.errors import PresetError
from lightning_solo.presets.registry import NAMES
from lightning_solo.presets.signature import parameters, parameters_of_class
from tests.messages import mentions, nearest

TARGETS = sorted({target for names in NAMES.values() for target in names.values()})


@pytest.mark.parametrize("target", TARGETS)
def test_read_without_import_equals_inspect(target: str) -> None:
    module, _, name = target.partition(":")
    init = inspect.signature(getattr(importlib.import_module(module), name).__init__)
    expected = {key: p.default for key, p in list(init.parameters.items())[1:]}
    assert {key: p.default for key, p in parameters(target).items()} == expected


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (int, [0, -3], [True, 1.0, "1", None]),
        (float, [0, 1.5, float("nan")], [True, "1.0", None]),
        (bool, [True], [1, "true"]),
        (str, [""], [1, None]),
        (int | None, [None, 2], [2.5]),
        (Literal["epoch", "step"], ["step"], ["steps", None, 1]),
        (Sequence[Sequence[int]], [[[0, 1]], []], [[0, 1], "ab", [[0.5]]]),
        (str | Sequence[str], ["a", ["a"]], [["a", 1], 3]),
        (Mapping[str, int], [{"a": 1}], [{"a": "b"}, []]),
        (Any, [None, object()], []),
    ],
)
def test_accepts(kind: Any, good: list[Any], bad: list[Any]) -> None:
    assert all(accepts(kind, value) for value in good)
    assert not any(accepts(kind, value) for value in bad)
    assert describe(kind)


def test_missing_and_unknown_arguments_are_named() -> None:
    accepted = parameters_of(built_in_cards()["memory_logger"].settings)
    with pytest.raises(PresetError, match=mentions("callback.m.tabel=1: ", nearest("table"))):
        check_arguments({"tabel": 1}, accepted, "callback.m")
    adam = parameters("torch.optim.adamw:AdamW")
    assert adam["params"].default is REQUIRED
    with pytest.raises(PresetError, match=mentions("optimizer: ", "params")):
        check_arguments({"lr": 1.0}, adam, "optimizer")
    with pytest.raises(PresetError, match=mentions("model: ", "write '+model.optimizer=${optimizer}'")):
        check_arguments({}, {"optimizer": adam["params"]}, "model")


def test_class_takes_what_a_decorator_of_its_constructor_takes() -> None:
    class Config:
        def __init__(self, width: int = 1) -> None:
            self.width = width

    assert list(parameters_of_class(Config) or {}) == ["width"]
    inner = Config.__init__

    @functools.wraps(inner)
    def outer(self: Config, *arguments: Any, labels: int = 0, **others: Any) -> None:
        inner(self, *arguments, **others)

    Config.__init__ = outer  # type: ignore[method-assign]
    assert parameters_of_class(Config) is None  # configurations of transformers 5 are made so
