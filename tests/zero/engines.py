"""The real engine of a module on the CPU, its places, and steps of it and of a plain run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.processes import environment
from lightning_solo.zero.config import zero_config
from lightning_solo.zero.deepspeed_internals import destroy
from lightning_solo.zero.engine import make_engine, weights_of
from lightning_solo.zero.extension import load_extension, what_is_missing
from lightning_solo.zero.process import (
    ONE_PROCESS,
    close_process_group,
    open_process_group,
    without_deprecations,
)
from lightning_solo.zero.states import read

PLACES = ["stage 2", "stage 3", pytest.param("nvme", marks=pytest.mark.long)]  # builds async_io


def arguments(place: str, folder: Path) -> dict[str, Any]:
    """Return stage and folder of a place; skips visibly where the disk's extension can't be had."""
    if place != "nvme":
        return {"stage": int(place[-1])}
    if missing := what_is_missing("async_io"):
        pytest.skip(f"no NVMe: {missing}")
    load_extension("async_io")
    return {"stage": 3, "nvme_path": str(folder)}


@contextmanager
def engine_of(
    module: nn.Module,
    optimizer: Optimizer,
    *,
    accumulates: bool = False,
    bf16: bool = False,
    more: Mapping[str, Any] | None = None,
    **given: Any,
) -> Iterator[Any]:
    """The real engine of a module on the CPU, in a process group of its own; ``given`` is for `zero_config`."""
    config = {**zero_config(**given), **(more or {}), "managed_gradient_accumulation": not accumulates}
    config["gradient_clipping"] = 0.0  # DeepSpeed's default is 1
    if bf16:
        config["bf16"] = {"enabled": True}
    with environment(ONE_PROCESS), without_deprecations():
        open_process_group("gloo")
        try:
            dtype = torch.bfloat16 if bf16 else torch.float32
            engine = make_engine(module, config, optimizer, dtype, torch.device("cpu", 0))
            yield engine
            destroy(engine, module)
        finally:
            close_process_group()


def net() -> nn.Sequential:
    """A small layer, a frozen one, and a large one: DeepSpeed swaps from 1 MiB on, 512 x 520 x 4 bytes are 1.02."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(7, 6), nn.Linear(6, 6), nn.Linear(6, 512), nn.Linear(512, 520), nn.Linear(520, 3))
    made[1].requires_grad_(False)
    return made


def batch(seed: int, width: int = 7) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(seed))


def step_plain(module: nn.Module, optimizer: Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    module(batch(seed)).square().mean().backward()
    optimizer.step()


def step_engine(engine: Any, seed: int) -> None:
    engine.backward(engine(batch(seed)).square().mean())
    engine.step()


def trained(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.requires_grad]


def weights_now(engine: Any, module: nn.Module, known: Mapping[Tensor, Tensor] | None = None) -> dict[Tensor, Tensor]:
    """Return parameter -> its value in full precision, where the parameter itself doesn't hold it."""
    masters = {p: states.master for p, states in read(engine.optimizer, masters_only=True).items()}
    return weights_of(engine, module, {**(known or {}), **masters})
