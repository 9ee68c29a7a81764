"""Fits of two processes with compact states, and with released gradients."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_solo.errors import ConflictError
from lightning_solo.memory.sharded_tensors import local
from lightning_solo.optim.operator_kernels import OperatorKernels
from lightning_solo.reference.byte_gpt import ByteGPT
from tests.engines.processes import AtEnd, trained

COMPACT: dict[str, dict[str, Any]] = {
    "24 bits": {},
    "32 bits": {"master_bits": 32, "moment_bits": 32},
    "stochastic": {"master_bits": "16-stochastic"},
    "saved in fp32": {"checkpoint_weights": "fp32"},
}
"""Settings of `compact_states`, by a name."""


def compact_preset(name: str, engine: str = "") -> dict[str, Any]:
    """Return a preset of compact states, under an engine or without one."""
    preset: dict[str, Any] = {"precision": "bf16-true", "callback": {"compact_states": COMPACT[name]}}
    return {**preset, "strategy": {"name": engine}} if engine else preset


def wide(width: int = 36) -> ByteGPT:
    """Return a byte GPT; of a width of 36 the shards of some weights end within a block of moments."""
    torch.manual_seed(3)
    return ByteGPT(width=width, depth=2, heads=2, context=16, warmup_steps=1)


class Bits(L.Callback):
    """Collects each process's bytes of weights and states, and the types of its states, when training ends."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        optimizer = trainer.optimizers[0]
        weights = [local(p).detach().cpu() for p in pl_module.parameters()]
        digest = hashlib.sha256(b"".join(w.contiguous().view(torch.uint8).numpy().tobytes() for w in weights))
        names: dict[Tensor, str] = {p: name for name, p in pl_module.named_parameters()}
        types = {
            f"{names[p]}.{key}": f"{str(value.dtype).removeprefix('torch.')} {value.numel()}"
            for p, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }
        self.each: list[Any] = [None, None]
        torch.distributed.all_gather_object(self.each, (digest.hexdigest(), types))


def train(folder: Path, width: str, *names: str) -> dict[str, Any]:
    """Train with compact states under ddp and fsdp, and save checkpoints."""
    results = {}
    for name in names:
        for engine in ("ddp", "fsdp"):
            end, bits = AtEnd(folder / f"{name} {engine}.ckpt"), Bits()
            preset = compact_preset(name, engine)
            _, values = trained(preset, folder, module=wide(int(width)), callbacks=[end, bits])
            results[f"{name} {engine}"] = {"losses": values, "weights": end.weights, "ranks": bits.each}
    return results


def resumed(folder: Path, width: str, *pairs: str) -> dict[str, Any]:
    """Resume compact states of each checkpoint under each engine, given as ``name:source:engine``."""
    results = {}
    for pair in pairs:
        name, source, engine = pair.split(":")
        path, module = folder / f"{name} {source}.ckpt", wide(int(width))
        _, values = trained(compact_preset(name, engine), folder, module=module, ckpt_path=path, max_epochs=2)
        results[pair] = values
    return results


class Gradients(L.Callback):
    """Collects the bytes of gradients after each backward, and whether weights have changed before the step."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.changed: list[bool] = []
        self.figures: dict[str, float] = {}
        self._before = list[Tensor]()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._before = [local(p).detach().clone() for p in pl_module.parameters()]

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        parameters = list(pl_module.parameters())
        self.bytes.append(sum(local(p.grad).nbytes for p in parameters if p.grad is not None))
        after = [local(p) for p in parameters]
        self.changed.append(not all(map(torch.equal, self._before, after)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for each in trainer.callbacks:
            self.figures |= getattr(each, "figures", {})


RELEASED: dict[str, dict[str, Any]] = {
    "fp32": {"callback": {}},
    "compact": compact_preset("24 bits"),
}
"""Presets with which gradients are kept and released, by a name."""


def released(folder: Path) -> dict[str, Any]:
    """Train under `fsdp` with gradients kept and released, and return the refusals of those that would be kept."""
    results: dict[str, Any] = {}
    OperatorKernels.grouped_below = 0  # else all of so small a module's weights are stepped together, at the end
    for name, preset in RELEASED.items():
        for how, release in {"kept": {}, "released": {"gradient_release": {}}}.items():
            end, gradients = AtEnd(folder / f"{name} {how}.ckpt"), Gradients()
            callbacks = {**preset["callback"], **release, "gradient_norm": {"every_n_steps": 1}}
            sharded = {**preset, "strategy": {"name": "fsdp"}, "callback": callbacks}
            _, values = trained(sharded, folder, callbacks=[end, gradients])
            counted = {"bytes": gradients.bytes, "changed": gradients.changed, "figures": gradients.figures}
            results[f"{name} {how}"] = {"losses": values, "weights": end.weights, **counted}
    for arguments in ({"gradient_clip_val": 0.5}, {"accumulate_grad_batches": 2}):
        try:
            trained({"strategy": {"name": "fsdp"}, "callback": {"gradient_release": {}}}, folder, **arguments)
            results[next(iter(arguments))] = "trained"
        except ConflictError as error:
            results[next(iter(arguments))] = str(error)
    return results
