"""Fits on two processes whose decisions would part if they didn't agree on them."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_solo.errors import ConflictError, RefusedStepError
from lightning_solo.machine import HOST_SHARE, host_memory
from lightning_solo.memory.reading import read
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.techniques.distillation.technique import Distillation
from lightning_solo.techniques.layer_drop.technique import LayerDrop
from tests.engines.processes import ENGINES, AtEnd, rank, trained

DDP = {**ENGINES, "ddp": {"name": "ddp", "find_unused_parameters": True}}


class Breaking(ByteGPT):
    """A byte GPT whose second loss is wrong in one process: infinite with finite gradients, or NaN."""

    def __init__(self, wrong: float, process: int) -> None:
        torch.manual_seed(3)
        super().__init__(width=32, depth=3, heads=2, context=16, warmup_steps=1)
        self.wrong, self.process = wrong, process

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx != 1 or rank() != self.process:
            return loss
        return loss + self.wrong if math.isinf(self.wrong) else loss * self.wrong


class InfiniteGradient(ByteGPT):
    """A byte GPT with an infinite gradient in its second step, of one number in the last process's shard."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(width=32, depth=3, heads=2, context=16, warmup_steps=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx != 1:
            return loss
        number = next(p for p in self.parameters() if p.dim() == 2).flatten()[-1]
        return loss + (number - number.detach()).sqrt()


class Steps(L.Callback):
    """Collects each process's optimizer steps and skipped windows, and the whole weights, when training ends."""

    def __init__(self) -> None:
        self.each: list[Any] = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        (guard,) = (each for each in trainer.callbacks if type(each).__name__ == "FiniteGuard")
        self.each = [[trainer.global_step, guard.skipped_windows]]
        if trainer.world_size > 1:
            self.each = [None] * trainer.world_size
            torch.distributed.all_gather_object(self.each, [trainer.global_step, guard.skipped_windows])


def guarded(folder: Path, engine: str, wrong: float, process: int, policy: str, devices: int = 2) -> dict[str, Any]:
    """Train under the guard, and return losses, steps and weights, or the refusals of both processes."""
    preset: dict[str, Any] = {"callback": {"finite_guard": {"policy": policy}}}
    if engine:
        preset["strategy"] = ENGINES[engine]
    steps, end = Steps(), AtEnd(folder / "end.ckpt")
    try:
        _, losses = trained(
            preset, folder, devices=devices, module=Breaking(wrong, process), callbacks=[steps, end],
            gradient_clip_val=0.5 if policy == "skip_window" else None,
        )  # fmt: skip
    except RefusedStepError as error:
        refusals: list[Any] = [str(error)] * devices
        if devices > 1:
            torch.distributed.all_gather_object(refusals, str(error))
        return {"refusals": refusals}
    return {"losses": losses[:1] + losses[-2:], "steps": steps.each, "weights": end.weights}


def guard(folder: Path) -> dict[str, Any]:
    """Return what comes of a wrong loss in either process."""
    cases = [(engine, "skip_window") for engine in ("ddp", "fsdp")] + [(engine, "stop") for engine in ENGINES]
    return {
        f"{engine} {policy} {wrong} {process}": guarded(folder, engine, wrong, process, policy)
        for engine, policy in cases
        for wrong in (math.inf, math.nan)
        for process in (0, 1)
    }


def shards(folder: Path) -> Any:
    """Return each process's steps and skipped windows. One process alone has the infinite gradient in its shard."""
    steps = Steps()
    callback = {"finite_guard": {"policy": "skip_window"}, "compact_states": {}}
    preset = {"precision": "bf16-true", "strategy": ENGINES["fsdp"], "callback": callback}
    trained(preset, folder, module=InfiniteGradient(), callbacks=[steps])
    return steps.each


class Draws(L.Callback):
    """Collects the blocks that each process skips."""

    def __init__(self) -> None:
        self.own: list[list[str]] = []
        self.each: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        (drop,) = (each for each in trainer.callbacks if isinstance(each, LayerDrop))
        self.own.append([*drop.skipped])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.each = [None, None]
        torch.distributed.all_gather_object(self.each, self.own)


def draws(folder: Path) -> dict[str, list[Any]]:
    """Return the blocks that each process skips under each engine that allows it, although their seeds differ."""
    results = {}
    for engine in ("ddp", "fsdp"):
        seen = Draws()
        module = Breaking(0.0, -1)
        torch.manual_seed(100 + rank())
        trained({"strategy": DDP[engine], "callback": {"layer_drop": {}}}, folder, module=module, callbacks=[seen])
        results[engine] = seen.each
    return results


def projection(folder: Path) -> str:
    """Return the refusal of a projection between features, which each process would train by itself."""
    teacher = ByteGPT(width=16, depth=3, heads=2, context=16)
    technique = Distillation.from_module(teacher, features={"blocks.0": "blocks.0"})
    try:
        trained({"strategy": ENGINES["ddp"]}, folder, module=Breaking(0.0, -1), callbacks=[technique])
    except ConflictError as error:
        return str(error)
    return ""


class Hoards(L.Callback):
    """Takes 200 MiB in the second process, and notes what each process takes and may take of the host."""

    def __init__(self) -> None:
        self.each: list[Any] = [None, None]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and rank() == 1:
            self.kept = torch.ones(50 * 2**20)
        if batch_idx == 2:
            share = int(os.environ[HOST_SHARE])
            torch.distributed.all_gather_object(self.each, [read(torch.device("cpu")).resident, share])


def observed(folder: Path) -> dict[str, Any]:
    """Return the rows that the memory logger writes, and what each process took."""
    seen = Hoards()
    total = host_memory()[0]
    preset = {"strategy": ENGINES["ddp"], "callback": {"memory_logger": {"every_n_steps": 1}}}
    trained(preset, folder, callbacks=[seen])
    text = (folder / "memory.csv").read_text()
    return {"rows": [dict(row) for row in csv.DictReader(text.splitlines())], "each": seen.each, "total": total}
