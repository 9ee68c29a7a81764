"""Outputs of any nesting become lines or shards, row by row, and others are refused by name."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from lightning_solo.errors import CheckpointError, PresetError
from lightning_solo.prediction.files import PredictionFiles, lines_of
from tests.messages import mentions


class Pair(NamedTuple):
    logits: Any
    hidden: Any


def written(folder: Path, *outputs: Any, **options: Any) -> PredictionFiles:
    with PredictionFiles(folder, **options) as files:
        for output in outputs:
            files.add(output)
        files.finish()
    return files


@pytest.mark.parametrize(
    ("output", "rows"),
    [
        (["a", "b"], ["a", "b"]),
        (("a", "b"), ["a", "b"]),
        ([{"label": "é", "p": torch.tensor(0.5)}], [{"label": "é", "p": 0.5}]),
        ({"label": ["a", "b"], "p": np.array([1, 2])}, [{"label": "a", "p": 1}, {"label": "b", "p": 2}]),
        ({"in": {"x": torch.ones(1, 2)}}, [{"in.x": [1.0, 1.0]}]),
        (Pair(torch.ones(2), torch.zeros(2, 1)), [{"0": 1.0, "1": [0.0]}] * 2),
        (torch.ones(2, dtype=torch.bfloat16), [1.0, 1.0]),
        ((torch.ones(2), ["a", "b"]), [{"0": 1.0, "1": "a"}, {"0": 1.0, "1": "b"}]),
    ],
)
def test_lines_hold_a_value_for_each_row(output: Any, rows: list[Any], tmp_path: Path) -> None:
    files = written(tmp_path, output, output, form="jsonl")
    lines = (tmp_path / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows * 2
    assert files.rows == len(rows) * 2
    assert files.files == [{"file": "predictions.jsonl", "first_row": 0, "rows": len(rows) * 2}]


def test_shards_hold_rows_of_one_shape(tmp_path: Path) -> None:
    outputs = [{"x": torch.rand(3, width), "n": torch.arange(3)} for width in (4, 4, 5, 4)]
    files = written(tmp_path, *outputs)
    assert files.form == "safetensors"
    assert [(each["first_row"], each["rows"]) for each in files.files] == [(0, 6), (6, 3), (9, 3)]
    first, second, third = (load_file(tmp_path / each["file"]) for each in files.files)
    assert torch.equal(first["x"], torch.cat([outputs[0]["x"], outputs[1]["x"]]))
    assert torch.equal(second["x"], outputs[2]["x"])
    assert torch.equal(third["x"], outputs[3]["x"])
    assert torch.equal(first["n"], torch.tensor([0, 1, 2, 0, 1, 2]))
    with safe_open(tmp_path / files.files[1]["file"], "pt") as file:
        assert file.metadata()["first_row"] == "6"


def test_shards_have_the_asked_size(tmp_path: Path) -> None:
    files = written(tmp_path, *[torch.full((2, 4), float(number)) for number in range(10)], shard_bytes=64)
    assert [each["rows"] for each in files.files] == [4] * 5  # a row of 4 numbers takes 16 bytes
    values = torch.cat([load_file(tmp_path / each["file"])["output"] for each in files.files])
    assert torch.equal(values[:, 0], torch.arange(10).repeat_interleave(2).float())


def test_a_view_does_not_keep_its_tensor(tmp_path: Path) -> None:
    whole = torch.rand(4, 1000)
    with PredictionFiles(tmp_path) as files:
        files.add(whole[:, :2])
        (waiting,) = files._waiting["output"]
        assert waiting.untyped_storage().nbytes() == 4 * 2 * 4
        expected = whole[:, :2].clone()
        whole.zero_()  # a module may reuse its buffers
        files.finish()
    assert torch.equal(load_file(tmp_path / files.files[0]["file"])["output"], expected)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (torch.tensor(1.0), ("output: none",)),
        ({"x": torch.ones(2), "y": torch.ones(3)}, ("x: 2", "y: 3")),
        ({"x": torch.ones(2), "loss": torch.tensor(1.0)}, ("loss: none",)),
        (None, ("None",)),
        ([object()], ("list", "plain data")),
        ({"cache": object(), "x": torch.ones(2)}, ("object at cache",)),
        ("text", ("output: none",)),
    ],
)
def test_outputs_without_rows_are_refused(output: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(PresetError, match=mentions("predict_step returned", "for each row", *words)):
        written(tmp_path, output)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([torch.ones(2), ["a"]], ("a list", "jsonl")),
        ([torch.ones(2), {"x": torch.ones(2), "label": ["a", "b"]}], ("a list at label", "jsonl")),
        ([{"x": torch.ones(2)}, {"y": torch.ones(2)}], ("returned y", "before x")),
    ],
)
def test_outputs_of_another_kind_are_refused(outputs: list[Any], words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(PresetError, match=mentions(*words)):
        written(tmp_path, *outputs)


@pytest.mark.parametrize("output", [torch.ones(4000), ["a" * 4000]], ids=["safetensors", "jsonl"])
def test_a_disk_without_space_is_named(output: Tensor | list[str], tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CheckpointError, match=mentions("can't be written", str(tmp_path.parent))):
            written(tmp_path, output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_of_half_precision_are_exact() -> None:
    values = torch.rand(3).to(torch.float16)
    assert torch.equal(torch.tensor([json.loads(line) for line in lines_of(values)], dtype=torch.float16), values)
