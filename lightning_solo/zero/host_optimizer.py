"""The optimizer that ZeRO's engine steps on the host, and the conversion between its states and the user's optimizer's.

torch's fused AdamW is as fast as DeepSpeed's C++ version, and needs no compiler. The kind ``deepspeed`` replaces
torch's optimizer by DeepSpeed's if both compute the same, within rounding. Adam, AdamW and Adagrad do. Lion does not:
torch's sign of 0 is 0 and DeepSpeed's is 1, which would move weights without a gradient by lr in each step.

A step of AdamW over 50 million fp32 parameters in one tensor, 2 threads of an AMD EPYC with AVX-512, torch 2.13.0,
deepspeed 0.19.8 (``OMP_NUM_THREADS=2 python examples/measure_host_optimizers.py``, medians of 15 steps)::

    DeepSpeedCPUAdam     31 ms     after 16 steps within 4e-6 of torch's default
    torch, default      337 ms
    torch, foreach      225 ms     bit-equal to torch's default
    torch, fused         33 ms     after 16 steps within 5e-7 of torch's default
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_solo.errors import ConflictError, PresetError, nearest
from lightning_solo.optim.replacement import replace_optimizer
from lightning_solo.zero.extension import load_extension
from lightning_solo.zero.flat import require_flat

KINDS = ("auto", "deepspeed", "torch")
ON_HOST = ("DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion")
ADAM_STATES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@dataclass(frozen=True)
class HostOptimizer:
    """An optimizer for the host, and the user's optimizer. Both share the dictionaries of their groups.

    Args:
        optimizer: DeepSpeed's version, or the user's own, which the engine steps.
        original: The user's.
        names: Name of a state in `optimizer` -> its name in `original`. Empty where both are one object.
    """

    optimizer: Optimizer
    original: Optimizer
    names: Mapping[str, str]


@dataclass(frozen=True)
class Counterpart:
    """DeepSpeed's version of an optimizer: its extension, ``module:Class``, arguments and names of states."""

    extension: str
    path: str
    arguments: Mapping[str, Any]
    names: Mapping[str, str]


def host_optimizer(optimizer: Optimizer, schedulers: Iterable[Any] = (), kind: str = "auto") -> HostOptimizer:
    """Return the optimizer that ZeRO's engine steps on the host, and attach the user's schedulers to it.

    Both optimizers share the dictionaries of their groups, so a new learning rate reaches both.

    Args:
        optimizer: The user's.
        schedulers: Its learning-rate schedulers, which may contain others, as SequentialLR does.
        kind: ``torch``: the optimizer itself. ``deepspeed``: DeepSpeed's C++ version, built once. ``auto``: DeepSpeed's
            version for Adagrad and DeepSpeed's optimizers for CUDA, which can't step on the host; otherwise the
            optimizer itself, where Adam and AdamW use torch's fused loop unless the user chose another.

    Raises:
        PresetError: There is no such kind.
        ConflictError: The optimizer can't step flat partitions on the host, or DeepSpeed has no version of it.
        CapabilityError: DeepSpeed's version is needed, and can't be built here.
    """
    if kind not in KINDS:
        raise PresetError(f"no kind of optimizer {kind!r}{nearest(kind, KINDS)}there are {', '.join(KINDS)}")
    if _is_deepspeeds(optimizer, *ON_HOST):
        return HostOptimizer(optimizer, optimizer, {})
    for_cuda = _is_deepspeeds(optimizer, "FusedAdam", "FusedLion")
    if not for_cuda:  # its kernels can't be tried on the host
        require_flat(optimizer)
    if kind == "auto":
        prefers_deepspeed = for_cuda or isinstance(optimizer, torch.optim.Adagrad)
        kind = "deepspeed" if prefers_deepspeed and isinstance(counterpart(optimizer), Counterpart) else "auto"
    if kind == "deepspeed":
        replacement = _deepspeeds_version(optimizer)
        _take_over(replacement, schedulers)
        return replacement
    _require_own_on_host(optimizer, kind)
    if kind == "auto" and isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        for group in optimizer.param_groups:
            if group["fused"] is None and group["foreach"] is None:
                group["fused"] = True
    return HostOptimizer(optimizer, optimizer, {})


def to_original_state(host: HostOptimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a parameter's state from the engine's optimizer to the original's form; tensors are shared."""
    if host.optimizer is host.original:
        return dict(state)
    original = {theirs: state[ours] for ours, theirs in host.names.items() if ours in state}
    if "step" in state:
        as_tensor = not _is_deepspeeds(host.original, "FusedAdam", "FusedLion")
        original["step"] = torch.tensor(float(state["step"]), dtype=torch.float32) if as_tensor else state["step"]
    return original


def from_original_state(host: HostOptimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a parameter's state from the original's form to the engine's optimizer's; tensors are shared."""
    if host.optimizer is host.original:
        return dict(state)
    step = {"step": int(state["step"])} if "step" in state else {}
    return {ours: state[theirs] for ours, theirs in host.names.items() if theirs in state} | step


def _is_deepspeeds(optimizer: Optimizer, *names: str) -> bool:
    """Return whether an optimizer is of a DeepSpeed class with one of these names; DeepSpeed isn't imported."""
    return type(optimizer).__module__.startswith("deepspeed.") and type(optimizer).__name__ in names


def counterpart(optimizer: Optimizer) -> Counterpart | str:
    """Return DeepSpeed's version that computes the same as an optimizer, or the reason why there is none."""
    kind, defaults, groups = type(optimizer), optimizer.defaults, optimizer.param_groups
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return "its step was replaced"
    for flag in ("amsgrad", "maximize", "differentiable"):
        if any(group.get(flag) for group in groups):
            return f"DeepSpeed's has no {flag}"
    arguments: dict[str, Any] = {
        name: _plain(defaults[name]) for name in ("lr", "betas", "eps", "weight_decay") if name in defaults
    }
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        modes = {group.get("decoupled_weight_decay", kind is torch.optim.AdamW) for group in groups}
        if len(modes) > 1:
            return "its groups differ in decoupled_weight_decay, of which DeepSpeed's has one for all"
        return Counterpart("cpu_adam", "adam:DeepSpeedCPUAdam", {**arguments, "adamw_mode": modes.pop()}, ADAM_STATES)
    if _is_deepspeeds(optimizer, "FusedAdam"):
        arguments |= {
            "adamw_mode": bool(vars(optimizer)["adam_w_mode"]),
            "bias_correction": defaults["bias_correction"],
        }
        return Counterpart("cpu_adam", "adam:DeepSpeedCPUAdam", arguments, ADAM_STATES)
    if kind is torch.optim.Adagrad:
        if any(group["lr_decay"] or group["initial_accumulator_value"] for group in groups):
            return "DeepSpeed's has neither lr_decay nor initial_accumulator_value"
        return Counterpart("cpu_adagrad", "adagrad:DeepSpeedCPUAdagrad", arguments, {"exp_avg_sq": "sum"})
    if _is_deepspeeds(optimizer, "FusedLion"):
        return Counterpart("cpu_lion", "lion:DeepSpeedCPULion", arguments, {"exp_avg": "exp_avg"})
    if kind.__name__ == "Lion":
        return "DeepSpeed's moves weights that have no gradient"
    return "DeepSpeed has none"


def _plain(value: Any) -> Any:
    """Return a hyper-parameter as a plain number for the C++ constructor; steps read the values in the groups."""
    if isinstance(value, tuple):
        return tuple(float(part) for part in value)
    return float(value)


def _deepspeeds_version(optimizer: Optimizer) -> HostOptimizer:
    """Return DeepSpeed's replacement of an optimizer, over the same groups, together with the original."""
    version = counterpart(optimizer)
    if isinstance(version, str):
        name = type(optimizer).__name__
        raise ConflictError(
            f"DeepSpeed has no version that computes the same as this {name} ({version}); write 'auto' or"
            " 'torch' in place of 'deepspeed', or give torch.optim.AdamW"
        )
    load_extension(version.extension)
    deepspeeds = resolve_name(f"deepspeed.ops.{version.path}")
    return HostOptimizer(deepspeeds(optimizer.param_groups, **version.arguments), optimizer, version.names)


def _require_own_on_host(optimizer: Optimizer, kind: str) -> None:
    """Raise if the user's own optimizer can't step on the host."""
    name = type(optimizer).__name__
    if _is_deepspeeds(optimizer, "FusedAdam", "FusedLion"):
        raise ConflictError(f"DeepSpeed's {name} runs on CUDA devices only; write 'auto' in place of {kind!r}")
    if isinstance(optimizer, torch.optim.Adagrad):
        raise ConflictError(
            "ZeRO builds torch's Adagrad again from its defaults, which loses groups and schedules. DeepSpeed's version"
            " is another class: write 'auto' or 'deepspeed', with lr_decay and"
            " initial_accumulator_value 0, or give torch.optim.AdamW"
        )
    if any(group.get("capturable") for group in optimizer.param_groups):
        raise ConflictError(f"{name} with capturable=True steps on CUDA devices only; write capturable=False")


def _take_over(host: HostOptimizer, schedulers: Iterable[Any]) -> None:
    """Move state, hooks and schedulers from the original to its replacement."""
    old, new = host.original, host.optimizer
    for parameter, state in old.state.items():
        new.state[parameter] = from_original_state(host, state)
    old.state.clear()  # Adagrad has states from the start: as many bytes as the parameters, on their device
    replace_optimizer(old, new, schedulers)
