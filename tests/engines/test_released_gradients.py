"""Gradient release under `fsdp`: each block steps when its gradients are reduced, and they are freed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.compact import RELEASED
from tests.engines.processes import gpt, run, texts, trained
from tests.messages import mentions

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("compact:released", tmp_path_factory.mktemp("released"))


@pytest.mark.parametrize("name", RELEASED)
def test_shards_step_in_backward_to_the_bits_of_a_run_without_it(name: str, results: dict[str, Any]) -> None:
    kept, released = results[f"{name} kept"], results[f"{name} released"]
    every = sum(p.numel() for p in gpt().parameters())
    assert kept["bytes"] == [every * (2 if name == "compact" else 4) // 2] * 4  # of a process's shards
    assert kept["changed"] == [False] * 4
    assert released["bytes"] == [0] * 4
    assert released["changed"] == [True] * 4
    assert released["losses"] == kept["losses"]
    assert len(set(kept["losses"])) == 4
    for key, value in kept["weights"].items():
        assert torch.equal(value, released["weights"][key]), key
    assert len(kept["figures"]) > 3
    assert released["figures"] == pytest.approx(kept["figures"], rel=1e-6)


def test_norms_of_shards_are_those_of_one_process(results: dict[str, Any], tmp_path: Path) -> None:
    assert results["fp32 kept"]["figures"] == pytest.approx(_norms_of_one_process(tmp_path), rel=1e-4)


@pytest.mark.parametrize("argument", ["gradient_clip_val", "accumulate_grad_batches"])
def test_gradients_that_would_be_kept_are_refused(argument: str, results: dict[str, Any]) -> None:
    expected = mentions("callback.gradient_release", argument, "strategy=fsdp", "~callback.gradient_release")
    assert re.search(expected, results[argument])


def _norms_of_one_process(folder: Path) -> dict[str, float]:
    trainer, _ = trained({"callback": {"gradient_norm": {"every_n_steps": 1}}}, folder, devices=1, batches=texts(8))
    (figures,) = [each.figures for each in trainer.callbacks if hasattr(each, "figures")]
    return dict(figures)
