"""Micro-batch sizes of solved plans: modules and batches that are divided, and traces of sizes that weren't traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_solo.planner.bases import with_modes
from lightning_solo.planner.block_tables import block_table
from lightning_solo.planner.device import device
from lightning_solo.planner.micro_batch_sizes import ScaledTraces, divided, is_divisible
from lightning_solo.planner.planner import Planner
from lightning_solo.planner.rules import arrange
from lightning_solo.presets.compose import compose
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.units import GiB
from tests.planner.modules import TwoOptimizers, attending, convolutional, dense, images, sequences, vectors

LABELS = torch.zeros(4, 6, dtype=torch.int64)


def padded(rows: Any) -> dict[str, torch.Tensor]:
    labels = LABELS.clone()
    labels[rows] = -100
    return {"x": torch.zeros(4, 6), "labels": labels}


@pytest.mark.parametrize(
    ("make", "batch", "expected"),
    [
        (dense, vectors(), True),
        (attending, sequences(), True),
        (dense, padded((slice(None), slice(2))), True),
        (dense, padded((slice(2), slice(4, 6))), False),
        (dense, padded((0, slice(6))), False),
        (dense, {"x": torch.zeros(4, 6), "y": torch.zeros(3, 6)}, False),
        (convolutional, images(), False),
        (TwoOptimizers, vectors(), False),
    ],
    ids=["vectors", "sequences", "equal labels", "padding", "no label", "unequal", "BatchNorm", "manual optimization"],
)
def test_batches_are_divided_if_parts_train_as_the_whole(make: Callable[[], Any], batch: Any, expected: bool) -> None:
    planner = Planner(make, batch, {}, device("cpu"), GiB)
    assert is_divisible(planner, compose("baseline")) == expected


def test_one_label_of_a_row_less_is_seen_for_labels_without_a_second_dimension() -> None:
    x, y = vectors()
    y[1] = -100
    assert not is_divisible(Planner(dense, (x, y), {}, device("cpu"), GiB), compose("baseline"))


def test_spectral_norm_and_a_preset_with_micro_batches_are_not_divided() -> None:
    def normed() -> Any:
        module = dense()
        nn.utils.parametrizations.spectral_norm(module.network[0])
        return module

    assert not is_divisible(Planner(normed, vectors(), {}, device("cpu"), GiB), compose("baseline"))
    assert not is_divisible(Planner(dense, vectors(), {}, device("cpu"), GiB), compose("micro_batching"))
    weights_on_host = compose("stream")  # refuses several micro-batches in a step
    assert not is_divisible(Planner(dense, vectors(), {}, device("cpu"), GiB), weights_on_host)


@pytest.mark.long
@pytest.mark.parametrize(("on", "preset"), [("cpu", "baseline"), ("rtx_4090", "baseline"), ("rtx_4090", "compact")])
def test_scaled_traces_have_the_bytes_and_seconds_of_a_traced_size(on: str, preset: str) -> None:
    base = replace(compose(preset), precision="32-true" if on == "cpu" else compose(preset).precision)
    batch = torch.randint(256, (12, 65), dtype=torch.uint8)
    planner = Planner(lambda: ByteGPT(width=32, depth=3, heads=2, context=64), batch, {}, device(on), GiB)
    config = with_modes(divided(base, 6), {"recompute": ["blocks.0"], "keep": ["blocks.1", "blocks.2"]})
    traces = ScaledTraces(planner)
    scaled = traces.at({"some": config}, 6)["some"]
    real = planner.captured(arrange(config, {}), 6)
    assert scaled.log.peak() == real.log.peak()
    assert scaled.marks == real.marks
    assert block_table(scaled, planner.device) == block_table(real, planner.device)
    half = block_table(traces.at({"some": config}, 3)["some"], planner.device)
    real_half = block_table(planner.captured(arrange(config, {}), 3), planner.device)
    assert [call.kept for call in half.options] == [call.kept for call in real_half.options]
