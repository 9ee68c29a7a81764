"""Replacement of an attribute: what was there is there again, unless somebody has replaced it since."""

from __future__ import annotations

import pytest

from lightning_solo.attributes import replaced


def test_a_replacement_of_what_is_gone_raises_and_of_what_is_there_is_undone() -> None:
    class Thing:
        name = "class"

    thing = Thing()
    with pytest.raises(AttributeError, match="gone"), replaced(thing, "gone", 1):
        pass
    with replaced(thing, "name", "ours") as before:
        assert (thing.name, before) == ("ours", "class")
    assert vars(thing) == {}
    thing.name = None  # type: ignore[assignment]
    with replaced(thing, "name", "ours"):
        pass
    assert vars(thing) == {"name": None}
    with replaced(thing, "name", "ours"):
        thing.name = "somebody's"
    assert thing.name == "somebody's"
