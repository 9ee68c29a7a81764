"""Gradient release under `fsdp`: each block steps when its gradients are reduced, and they are freed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.engines.processes import gpt, run, texts, trained
from tests.messages import mentions

pytestmark = pytest.mark.long


def test_shards_step_in_backward_to_the_bits_of_a_run_without_it(tmp_path: Path) -> None:
    results = run("compact:released", tmp_path)
    kept, released = results["kept"], results["released"]
    every = sum(p.nbytes for p in gpt().parameters())
    assert kept["bytes"] == [every // 2] * 4  # of a process's shards
    assert kept["changed"] == [False] * 4
    assert released["bytes"] == [0] * 4
    assert released["changed"] == [True] * 4
    assert released["losses"] == kept["losses"]
    assert len(set(kept["losses"])) == 4
    for name, value in kept["weights"].items():
        assert torch.equal(value, released["weights"][name]), name
    assert len(kept["figures"]) > 3
    assert released["figures"] == pytest.approx(kept["figures"], rel=1e-6)
    alone = _norms_of_one_process(tmp_path)
    assert kept["figures"] == pytest.approx(alone, rel=1e-4)
    for argument in ("gradient_clip_val", "accumulate_grad_batches"):
        expected = mentions("callback.gradient_release", argument, "sharded weights", "~callback.gradient_release")
        assert re.search(expected, results[argument]), argument


def _norms_of_one_process(folder: Path) -> dict[str, float]:
    trainer, _ = trained({"callback": {"gradient_norm": {"every_n_steps": 1}}}, folder, devices=1, batches=texts(8))
    (figures,) = [each.figures for each in trainer.callbacks if hasattr(each, "figures")]
    return dict(figures)
