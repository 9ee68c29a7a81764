"""A dozen architectures of transformers, of every kind, planned and trained; all of them: `make architectures`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import long

pytest.importorskip("transformers")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def measuring() -> Any:
    sys.path.insert(0, str(EXAMPLES))  # as for a script: it imports its neighbour
    try:
        spec = importlib.util.spec_from_file_location("measure_architectures", EXAMPLES / "measure_architectures.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
    return module


@pytest.mark.parametrize(
    "architecture",
    [
        "text/llama",
        *map(long, ("text/gpt2", "text/mamba", "text/mixtral", "text/gemma", "text/qwen2_moe")),
        *map(long, ("masked/bert", "masked/deberta-v2", "encoder_decoder/t5")),
        *map(long, ("image/vit", "image/resnet", "audio/wav2vec2")),
    ],
)
def test_planned_peak_equals_real_peak(measuring: Any, architecture: str) -> None:
    kind, name = architecture.split("/")
    cls = dict(measuring.KINDS)[kind][name]
    found = measuring.compare(kind, name, cls if isinstance(cls, str) else cls[0])
    assert found["counted"], found
    assert found["cpu"] == found["real"] > 0
    assert found["cuda"] > 0
