"""Whether the code of a hook uses gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_solo.seams.hooks import uses_gradients


def halves(module: Any) -> None:
    for p in module.parameters():
        p.grad.mul_(0.5)


def clips(module: Any) -> None:
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def within(module: Any) -> Any:
    return sorted(module.parameters(), key=lambda p: p.grad.norm())


def differentiates(loss: Any) -> None:
    with torch.no_grad(), torch.autograd.graph.save_on_cpu():
        loss.backward(retain_graph=loss.requires_grad)


@pytest.mark.parametrize(
    ("hook", "uses"), [(halves, True), (clips, True), (within, True), (differentiates, False), (print, False)]
)
def test_names_of_gradients_are_found_in_code(hook: Any, uses: bool) -> None:
    assert uses_gradients(hook) == uses
