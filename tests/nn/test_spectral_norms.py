"""Layers with spectral norms, of either form in torch."""

from __future__ import annotations

from torch import nn

from lightning_solo.nn.spectral_norms import spectral_norms


def test_layers_of_both_forms_are_found() -> None:
    first = nn.utils.spectral_norm(nn.Linear(2, 2))
    second = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    other = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert spectral_norms(nn.ModuleDict({"a": first, "b": nn.Sequential(second), "c": other})) == {
        "a": first,
        "b.0": second,
    }
    assert spectral_norms(second) == {"": second}
