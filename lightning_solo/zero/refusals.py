"""Refusals of ZeRO-Offload, before the engine changes the module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_solo.errors import ConflictError, NothingToDoError, listed
from lightning_solo.nn.sharding import sparse_embeddings
from lightning_solo.optim.schedule_free import ScheduleFreeAdamW


def preset_without_zero(strategy: str) -> str:
    """Return the preset that trains without ZeRO on as many devices."""
    return "the preset baseline" if strategy == "zero_offload" else "the preset ddp"


def one_optimizer(strategy: str) -> str:
    """Return what to write in place of several optimizers."""
    instead = (
        "the preset host_states, which keeps fp32 states of AdamW or Adam on the host, or by compact_host, whose states"
        " have 8 bits"
        if strategy == "zero_offload"
        else f"{preset_without_zero(strategy)} with strategy.find_unused_parameters=true"
    )
    return (
        "write one with several parameter groups; several, as of a GAN, are trained with manual optimization by"
        f" {instead}"
    )


def refuse_trainer(trainer: Any, strategy: str) -> None:
    """Refuse Trainer arguments that the engine doesn't support.

    Raises:
        ConflictError: clipping by value, or more than one device under `zero_offload`.
    """
    refuse_clipping_by_value(trainer.gradient_clip_val, trainer.gradient_clip_algorithm, strategy)
    devices = trainer.num_devices * trainer.num_nodes
    if devices != 1 and strategy == "zero_offload":
        raise ConflictError(
            f"strategy=zero_offload is for one device, and the Trainer has {devices}; write devices=1, or choose the"
            " preset zero3 instead"
        )


def refuse_clipping_by_value(clip_val: float | None, algorithm: Any, strategy: str) -> None:
    """Refuse a clipping algorithm that DeepSpeed lacks.

    Raises:
        ConflictError: the algorithm is "value".
    """
    if clip_val and str(getattr(algorithm, "value", algorithm)) == "value":
        raise ConflictError(
            f"strategy={strategy} and gradient_clip_algorithm='value': DeepSpeed clips by the global norm only; write"
            " gradient_clip_algorithm='norm'"
        )


def refuse_module(module: nn.Module, stage: int, strategy: str) -> None:
    """Refuse a module that the engine, or its stage 3, can't run.

    Raises:
        ConflictError: a part has complex weights or sparse gradients, or was wrapped by ``torch.compile``.
    """
    if numbers := [name for name, p in module.named_parameters() if p.is_complex()]:
        raise ConflictError(
            f"strategy={strategy} and {listed(numbers)}: DeepSpeed casts complex weights to real ones; write real ones,"
            f" as torch.view_as_real gives them, or take {preset_without_zero(strategy)}"
        )
    if sparse := sparse_embeddings(module):
        raise ConflictError(
            f"strategy={strategy} and {listed(sparse)}: ZeRO has no sparse gradients; write sparse=False, or take"
            f" {preset_without_zero(strategy)}"
        )
    wrapped = [name for name, part in module.named_modules() if hasattr(part, "_orig_mod")]
    if stage == 3 and wrapped:
        name = wrapped[0]
        raise ConflictError(
            f"strategy={strategy} at stage 3 and torch.compile({name}): DeepSpeed replaces each module's mapping"
            f" of parameters, which torch's wrapper doesn't accept; compile in place: {name}.compile()"
        )


TRAINED_GROUPS = "[g for g in optimizer.param_groups if any(p.requires_grad for p in g['params'])]"
"""Written for the optimizer's own groups: those of a module may have iterators, which `any` would empty."""


def refuse_empty_groups(optimizer: Optimizer, stage: int, strategy: str, *, has_schedule: bool) -> None:
    """Refuse parameter groups that DeepSpeed removes from an optimizer with a schedule, or fails at.

    Raises:
        ConflictError: a group has no parameters, or at stage 2 none that is trained.
    """
    for number, group in enumerate(optimizer.param_groups):
        trained = [p for p in group["params"] if p.requires_grad]
        if not group["params"] and has_schedule:
            what = "no parameters: DeepSpeed removes it, and the schedule has a rate for it"
        elif group["params"] and not trained and stage == 2:
            what = "frozen parameters alone, for which ZeRO's stage 2 has no gradients"
        else:
            continue
        raise ConflictError(
            f"strategy={strategy} and group {number} of {type(optimizer).__name__}, which has {what}; leave such groups"
            " out in configure_optimizers, before a schedule is made: optimizer.param_groups ="
            f" {TRAINED_GROUPS}"
        )


def the_optimizer(optimizers: Sequence[Optimizer], strategy: str) -> Optimizer:
    """Return the only optimizer of a module.

    Raises:
        ConflictError: there are several, or it averages weights.
        NothingToDoError: there is none, or it trains no parameter.
    """
    if len(optimizers) != 1:
        raise ConflictError(
            f"strategy={strategy} steps one optimizer, and configure_optimizers returned {len(optimizers)};"
            f" {one_optimizer(strategy)}"
        )
    optimizer = optimizers[0]
    if isinstance(optimizer, ScheduleFreeAdamW):
        raise ConflictError(
            f"strategy={strategy} and ScheduleFreeAdamW: the engine steps flat copies of the weights, whose averages"
            " aren't put into the module; write another optimizer, such as torch.optim.AdamW, or"
            f" {preset_without_zero(strategy)}"
        )
    # Lightning replaces a missing optimizer by one without groups.
    if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        name = type(optimizer).__name__
        what = "configure_optimizers returned None" if name == "_MockOptimizer" else f"no trained parameter in {name}"
        raise NothingToDoError(
            f"strategy={strategy} and {what}: there is nothing to"
            " offload; return an optimizer of parameters with requires_grad from configure_optimizers, or leave"
            " strategy out"
        )
    return optimizer
