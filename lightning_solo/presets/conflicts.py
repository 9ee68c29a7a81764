"""What two techniques must know of each other: rules over the configuration alone, before torch is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_solo.errors import ConflictError
from lightning_solo.optim.back_end_facts import BACK_ENDS
from lightning_solo.presets.schema import SoloConfig

CUDA_PRECISIONS = ("16-mixed", "16-true", "transformer-engine", "transformer-engine-float16")
MULTIPLE_ACCUMULATION = (
    "callback.accumulation_schedule sets the factor itself, and accumulate_grad_batches={factor} sets it too; "
    "write the factor as a milestone, callback.accumulation_schedule.milestones=[[0, {factor}]], "
    "and drop accumulate_grad_batches"
)


def check_conflicts(config: SoloConfig) -> None:
    """Refuse a configuration that holds two choices which cannot be combined.

    Raises:
        ConflictError: names both choices and what to write instead.
    """
    for rule in RULES:
        message = rule(config)
        if message:
            raise ConflictError(message)


def needs_cuda(config: SoloConfig) -> str | None:
    """Return the choice that needs a CUDA device and what to write without one, or None if all of it runs anywhere."""
    if config.precision in CUDA_PRECISIONS:
        return f"precision={config.precision} needs a CUDA device; without one use precision=bf16-mixed (preset 'bf16')"
    if has_callback(config, "memory_snapshot"):
        return (
            "callback.memory_snapshot needs a CUDA device: it reads the CUDA allocator's history; without one write "
            "callback.memory_logger.category_steps=2, which tells what the peak of a step consists of"
        )
    strategy = config.strategy or {}
    back_end = BACK_ENDS.get(strategy.get("back_end", "own")) if strategy.get("name") == "compact" else None
    if back_end is not None and back_end.needs_cuda:
        others = " or ".join(name for name, other in BACK_ENDS.items() if not other.needs_cuda)
        return (
            f"strategy.back_end={strategy['back_end']} needs a CUDA device; without one use strategy.back_end=own, or"
            f" {others}"
        )
    if strategy.get("name") == "zero_offload" and zero_section(config).get("offload_optimizer", {}).get(
        "super_offload"
    ):
        return (
            "SuperOffload (strategy.config.zero_optimization.offload_optimizer.super_offload) needs a CUDA device, "
            "DeepSpeed has it for nothing else; without one use the preset 'checkpointing', or to try the engine out "
            "solo=zero_offload solo.strategy.allow_cpu=true"
        )
    if strategy.get("name") == "zero_offload" and not strategy.get("allow_cpu"):
        return (
            "strategy=zero_offload needs a CUDA device: it moves optimizer states from it to the host; "
            "without one use the preset 'checkpointing', or to try the engine out strategy.allow_cpu=true "
            "(on a command line solo.strategy.allow_cpu=true)"
        )
    return None


def has_callback(config: SoloConfig, name: str) -> bool:
    """Tell whether a registered callback is in the configuration, under whatever key."""
    return any(node.get("name") == name for node in config.callback.values())


def zero_section(config: SoloConfig) -> Mapping[str, Any]:
    """Return what the strategy's ``config`` says below ``zero_optimization``; a file is read later."""
    given = (config.strategy or {}).get("config")
    section = given.get("zero_optimization") if isinstance(given, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def _schedule_and_fixed_factor(config: SoloConfig) -> str | None:
    factor = config.accumulate_grad_batches
    if has_callback(config, "accumulation_schedule") and factor not in (None, 1):
        return MULTIPLE_ACCUMULATION.format(factor=factor)
    return None


def _double_precision_under_deepspeed(config: SoloConfig) -> str | None:
    if config.precision == "64-true" and (config.strategy or {}).get("name") == "zero_offload":
        return "strategy=zero_offload and precision=64-true: DeepSpeed has no 64-bit mode; write precision=32-true"
    return None


def compact_precision(master_bits: object, precision: str, back_end: str = "own") -> str | None:
    """Return why the strategy ``compact`` can't have a precision, and what to write; None where it can."""
    if back_end in BACK_ENDS:
        allowed = BACK_ENDS[back_end].precisions
        why = "" if BACK_ENDS[back_end].bf16_weights else ", whose bf16 weights it would round to the nearest"
        given = f"strategy.back_end={back_end} and precision={precision}"
        return None if precision in allowed else f"{given}{why}: write precision={' or precision='.join(allowed)}"
    if precision in ("bf16-true", "bf16-mixed") or (precision == "32-true" and master_bits == 32):
        return None
    remedy = "write precision=bf16-true"
    if precision == "32-true":
        remedy += ", or strategy.master_bits=32, which keeps fp32 weights"
    return f"strategy=compact, master_bits={master_bits!r}, and precision={precision}: {remedy}"


def _compact_and_precision(config: SoloConfig) -> str | None:
    strategy = config.strategy or {}
    if strategy.get("name") != "compact" or config.precision is None:
        return None
    return compact_precision(strategy.get("master_bits", 24), config.precision, strategy.get("back_end", "own"))


def _zenflow_and_accumulation(config: SoloConfig) -> str | None:
    factor = config.accumulate_grad_batches
    varies = has_callback(config, "accumulation_schedule")
    if "zenflow" in zero_section(config) and (varies or factor not in (None, 1)):
        return (
            "strategy.config.zero_optimization.zenflow and gradient accumulation: ZenFlow accumulates by itself, over "
            "update_interval steps; drop accumulate_grad_batches or ~callback.accumulation_schedule, or write "
            "solo=zero_offload"
        )
    return None


def _zenflow_and_its_directory(config: SoloConfig) -> str | None:
    if "zenflow" in zero_section(config) and (config.strategy or {}).get("save_engine_directory"):
        return (
            "strategy.config.zero_optimization.zenflow and strategy.save_engine_directory=true: DeepSpeed's directory "
            "holds ZenFlow's matrices transposed, and its script reads them as they are; drop save_engine_directory, "
            "the plain file has the weights"
        )
    return None


def _snapshot_and_peaks_per_phase(config: SoloConfig) -> str | None:
    per_phase = any(node.get("name") == "memory_logger" and node.get("per_phase") for node in config.callback.values())
    if per_phase and has_callback(config, "memory_snapshot"):
        return (
            "callback.memory_snapshot and callback.memory_logger.per_phase=true: the one tells a new peak by counters "
            "that the other resets several times a step; write callback.memory_logger.per_phase=false"
        )
    return None


def _one_callback_twice(config: SoloConfig) -> str | None:
    names = [node["name"] for node in config.callback.values() if "name" in node]
    twice = next((name for name in names if names.count(name) > 1), None)
    return f"callback {twice!r} is there twice; remove one with ~callback.<key>" if twice else None


RULES: tuple[Callable[[SoloConfig], str | None], ...] = (
    _schedule_and_fixed_factor,
    _double_precision_under_deepspeed,
    _compact_and_precision,
    _zenflow_and_accumulation,
    _zenflow_and_its_directory,
    _snapshot_and_peaks_per_phase,
    _one_callback_twice,
)
