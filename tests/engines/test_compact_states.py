"""Compact states on two processes: equal ranks under ddp, states of shards under fsdp, checkpoints of one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.compact import COMPACT, compact_preset, wide
from tests.engines.processes import AtEnd, run, trained

TOLERANCE = 5e-4
"""Of losses: two processes round their gradients to bf16 each, and one rounds that of the whole batch."""
SMALL = 4096
WIDTHS = (32, 36)
"""Of 36 the shards of feed-forward weights, 72 x 36, end within a block of 128."""
pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=WIDTHS)
def width(request: Any) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compact")


@pytest.fixture(scope="module")
def results(folder: Path, width: int) -> dict[str, Any]:
    return run("compact:train", folder, str(width), *COMPACT)


@pytest.fixture(scope="module")
def alone(folder: Path, width: int) -> dict[str, Any]:
    results = {}
    for name in COMPACT:
        end = AtEnd(folder / f"{name} one.ckpt")
        trainer, losses = trained(compact_preset(name), folder, devices=1, module=wide(width), callbacks=[end])
        results[name] = {"losses": losses, "weights": end.weights, "optimizer": trainer.optimizers[0]}
    return results


def mean_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(torch.cat([(one[key].float() - other[key].float()).flatten() for key in other]).abs().mean())


@pytest.mark.parametrize("name", COMPACT)
def test_two_processes_train_as_one(name: str, results: dict[str, Any], alone: dict[str, Any], width: int) -> None:
    expected = alone[name]
    for engine in ("ddp", "fsdp"):
        result = results[f"{name} {engine}"]
        assert len(set(result["losses"])) == 4
        assert result["losses"] == pytest.approx(expected["losses"], rel=0, abs=TOLERANCE), engine
        before, one, two = wide(width).state_dict(), expected["weights"], result["weights"]
        assert {key: value.dtype for key, value in two.items()} == {key: value.dtype for key, value in one.items()}
        if name != "stochastic":  # whose rounding is larger than its updates
            assert mean_difference(two, one) < 0.1 * mean_difference(before, one), engine


@pytest.mark.parametrize("name", COMPACT)
def test_ranks_under_ddp_have_the_same_bits(name: str, results: dict[str, Any]) -> None:
    (first, types), (second, _) = results[f"{name} ddp"]["ranks"]
    assert first == second
    assert any("int" in kind for kind in types.values()) == (name != "32 bits" or "int16" in str(types))


def test_files_of_shards_have_the_bits_of_whole_weights_and_states(results: dict[str, Any], folder: Path) -> None:
    ddp, fsdp = (torch.load(folder / f"32 bits {each}.ckpt", weights_only=True) for each in ("ddp", "fsdp"))
    for key, value in ddp["state_dict"].items():
        assert torch.equal(value, fsdp["state_dict"][key]), key
    states, others = (each["optimizer_states"][0]["state"] for each in (ddp, fsdp))
    assert states.keys() == others.keys()
    for number, state in states.items():
        assert state.keys() == others[number].keys()
        assert state["exp_avg"].abs().max() > 0
        assert all(torch.equal(state[key], others[number][key]) for key in state if key != "step"), number


def test_the_size_of_a_whole_weight_decides_the_precision_of_its_shards(results: dict[str, Any], width: int) -> None:
    sizes = {name: p.numel() for name, p in wide(width).named_parameters()}
    assert any(SMALL <= size < 2 * SMALL for size in sizes.values())  # whose shards are small
    for _, types in results["24 bits fsdp"]["ranks"]:
        for name, size in sizes.items():
            expected = "int8" if size >= SMALL else "float32"
            assert types[f"{name}.exp_avg"] == f"{expected} {size // 2}", name


def test_any_run_resumes_the_checkpoint_of_any_other(
    results: dict[str, Any], alone: dict[str, Any], folder: Path, width: int
) -> None:
    names = ("24 bits", "32 bits", "saved in fp32")
    sources, engines = ("one", "ddp", "fsdp"), ("ddp", "fsdp")
    pairs = [f"{name}:{source}:{engine}" for name in names for source in sources for engine in engines]
    resumed = run("compact:resumed", folder, str(width), *pairs)
    for name in names:
        for source in sources:
            path, module = folder / f"{name} {source}.ckpt", wide(width)
            file = torch.load(path, weights_only=True)
            module.load_state_dict(file["state_dict"])
            _, losses = trained(
                compact_preset(name), folder, devices=1, module=wide(width), ckpt_path=path, max_epochs=2
            )
            for engine in engines:
                assert resumed[f"{name}:{source}:{engine}"] == pytest.approx(losses, rel=0, abs=TOLERANCE), source
    same = [resumed[f"32 bits:{source}:{engine}"] for source in ("ddp", "fsdp") for engine in engines]
    assert all(losses == pytest.approx(same[0], rel=0, abs=1e-6) for losses in same)
