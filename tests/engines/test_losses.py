"""Engines with two processes train as one process with the whole batch, and read one another's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.processes import CLIPPED, ENGINES, gpt, run, trained

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return run("losses", folder)


def alone(folder: Path, **arguments: Any) -> tuple[Any, list[float]]:
    return trained("baseline", folder, devices=1, **CLIPPED, **arguments)


def test_ddp_and_fsdp_by_name_train_as_one_process(tmp_path: Path) -> None:
    two = run("losses", tmp_path, "ddp", "fsdp")
    _, losses = alone(tmp_path)
    assert len(set(losses)) == len(losses) == 4
    for engine in ("ddp", "fsdp"):
        assert two[engine]["losses"] == pytest.approx(losses, rel=0, abs=TOLERANCE)
        module = gpt()
        module.load_state_dict(torch.load(tmp_path / f"{engine}.ckpt", weights_only=True)["state_dict"])


@pytest.mark.long
def test_all_engines_train_as_one_process(results: dict[str, Any], folder: Path) -> None:
    trainer, losses = alone(folder)
    plain = trainer.lightning_module.state_dict()
    assert list(results) == list(ENGINES)
    for engine, result in results.items():
        assert result["steps"] == trainer.global_step == 2
        assert result["losses"] == pytest.approx(losses, rel=0, abs=TOLERANCE), engine
        assert result["weights"].keys() >= dict(gpt().named_parameters()).keys()
        for name, value in result["weights"].items():
            torch.testing.assert_close(value, plain[name], rtol=0, atol=1e-4, msg=f"{engine} {name}")


@pytest.mark.long
def test_a_checkpoint_of_any_engine_is_read_by_any_other_and_by_a_plain_module(
    results: dict[str, Any], folder: Path
) -> None:
    trainer, _ = alone(folder)
    trainer.save_checkpoint(folder / "plain.ckpt")
    _, expected = alone(folder, ckpt_path=folder / "plain.ckpt", max_epochs=2)
    assert len(expected) == 4
    for engine in ENGINES:
        module = gpt()
        module.load_state_dict(torch.load(folder / f"{engine}.ckpt", weights_only=True)["state_dict"])
        _, values = alone(folder, ckpt_path=folder / f"{engine}.ckpt", max_epochs=2)
        assert values == pytest.approx(expected, rel=0, abs=TOLERANCE), engine
    for pair, values in run("resumed", folder, "plain", *ENGINES).items():
        assert values == pytest.approx(expected, rel=0, abs=TOLERANCE), pair


@pytest.mark.long
def test_processes_have_the_same_buffers_although_each_made_its_own(tmp_path: Path) -> None:
    for engine, ((first, first_made), (second, second_made)) in run("buffers", tmp_path).items():
        assert not torch.equal(first_made["noise"], second_made["noise"])
        assert not torch.equal(first_made["mask"], second_made["mask"])
        for name, buffer in first.items():
            assert torch.equal(buffer, second[name]), (engine, name)
            assert torch.equal(buffer, first_made[name]), (engine, name)
