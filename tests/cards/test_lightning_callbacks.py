"""The table of Lightning's callbacks that rival a technique: its names, and who is refused for what."""

from __future__ import annotations

from types import ModuleType

import pytest

from lightning_solo.cards.card import RESOURCES
from lightning_solo.cards.lightning_callbacks import CALLBACKS, refuse_callbacks
from lightning_solo.errors import ConflictError


def test_lightning_has_every_callback_and_every_resource_is_known(home: ModuleType) -> None:
    for name, remedies in CALLBACKS.items():
        assert issubclass(getattr(home.callbacks, name), home.Callback)
        assert remedies.keys() <= RESOURCES.keys()
        assert all(remedies.values())


@pytest.mark.parametrize(
    ("name", "resource"), [(name, one) for name, remedies in CALLBACKS.items() for one in remedies]
)
def test_one_derived_from_it_is_refused_where_its_resource_is_owned(home: ModuleType, name: str, resource: str) -> None:
    derived = type("Derived", (getattr(home.callbacks, name),), {"__init__": lambda self: None})()
    with pytest.raises(ConflictError) as refused:
        refuse_callbacks("strategy=theirs", frozenset({resource}), [object(), derived])
    for word in ("strategy=theirs", "Derived", resource, CALLBACKS[name][resource]):
        assert word in str(refused.value)
    refuse_callbacks("strategy=theirs", frozenset(RESOURCES) - CALLBACKS[name].keys(), [derived])
