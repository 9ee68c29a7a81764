"""Replace the user's AdamW by that of torchao, bitsandbytes or FlashOptim.

How each library treats the weights:

- torchao steps in fp32 and rounds bf16 weights stochastically, by torch's random numbers. It has no master weights, and
  a resumed run equals an uninterrupted one only if the state of the random numbers is restored. fp32 weights stay fp32.
  It compiles a kernel for each shape of a parameter, and again if betas change, as they do under OneCycleLR.
  In 8 bits a small exp_avg_sq becomes 0, and the update divides by its root plus eps: AdamW's eps of 1e-8 can diverge,
  1e-6 doesn't.
- bitsandbytes has no master weights and rounds to the nearest: a bf16 weight loses updates below 1/512 of it. So
  weights must be fp32, and bf16 comes from autocast. Paged states of 100,000 elements or more are in CUDA's unified
  memory, which moves to the host when the device is full. States loaded from a checkpoint are on the device.
- flashoptim stores a correction of 8 bits, as `CompactAdamW` does with 24 bits, from the first step on; the initial
  weights are rounded to bf16. It needs CUDA.

Parameters below 4,096 elements keep their moments in fp32. So do parameters of torchao that aren't a multiple of its
block of 256 (8 bits) or 128 (4 bits); torchao itself uses bf16, in which exp_avg_sq stops growing. `uncompressed` names
them.

Each library steps each parameter by itself, so `StepInBackward` is exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.errors import CapabilityError, ConflictError
from lightning_solo.machine import is_installed
from lightning_solo.optim.adamw_state_dict import UNSUPPORTED
from lightning_solo.optim.back_end_facts import BACK_ENDS, OPTION
from lightning_solo.optim.library_optimizers import optimizer_class
from lightning_solo.optim.operator_kernels import can_compile
from lightning_solo.optim.param_groups import name_in, parameters_of
from lightning_solo.optim.replacement import replace_optimizer
from lightning_solo.units import format_bytes


def converted(optimizer: Optimizer, schedulers: Iterable[Any] = (), *, back_end: str) -> Optimizer:
    """Return a library's optimizer that shares the groups of a user's AdamW or Adam; schedulers then act on it.

    Its attribute ``back_end`` tells `StepInBackward` that it steps each parameter by itself.

    Raises:
        CapabilityError: the package, a CUDA device or a compiler is missing.
        ConflictError: the library doesn't support the optimizer, one of its options or the type of the weights.
    """
    kind = type(optimizer)
    if kind not in (torch.optim.AdamW, torch.optim.Adam):
        raise ConflictError(
            f"{OPTION}={back_end} takes torch's AdamW and Adam, not {kind.__module__}.{kind.__name__}: return"
            f" torch.optim.AdamW from configure_optimizers, or write {OPTION}=own"
        )
    _require_served(optimizer, back_end)
    first = next(p for group in optimizer.param_groups for p in group["params"])
    require_capable(back_end, first.device)
    eps = min(group["eps"] for group in optimizer.param_groups)
    if back_end == "torchao_8bit" and eps < 1e-6:
        warnings.warn(
            f"{OPTION}=torchao_8bit and eps={eps}: torchao rounds a small exp_avg_sq to 0, and divides by"
            f" its root plus eps, which can diverge; write AdamW(..., eps=1e-6), or {OPTION}=own",
            stacklevel=2,
        )
    for group in optimizer.param_groups:
        if back_end.startswith("torchao"):
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)  # which schedulers then fill
        else:
            group["lr"] = float(group["lr"])
    names = ("betas", "eps", "weight_decay")
    replacement: Optimizer = optimizer_class(back_end, kind is torch.optim.AdamW)(
        optimizer.param_groups,
        lr=float(optimizer.defaults["lr"]),
        **{name: optimizer.defaults[name] for name in names},
        **({"bf16_stochastic_round": True} if back_end.startswith("torchao") else {}),
    )
    vars(replacement)["back_end"] = back_end
    replace_optimizer(optimizer, replacement, schedulers)
    return replacement


def _require_served(optimizer: Optimizer, back_end: str) -> None:
    kind = type(optimizer).__name__
    if optimizer.state:
        raise ConflictError(
            f"{OPTION}={back_end} can't take over the states of an {kind} that has stepped already: return a new one"
            f" from configure_optimizers, or write {OPTION}=own"
        )
    for group in optimizer.param_groups:
        for name in UNSUPPORTED:
            if group.get(name):
                raise ConflictError(f"{OPTION}={back_end} and {kind}({name}=True): write {name}=False")
        if back_end.startswith("bitsandbytes") and kind == "Adam" and group["weight_decay"]:
            raise ConflictError(
                f"{OPTION}={back_end} and Adam(weight_decay={group['weight_decay']}): bitsandbytes decouples"
                " it from the gradient, as AdamW does; return AdamW, or write weight_decay=0"
            )
    for name, p in ((name_in(optimizer, p), p) for p in parameters_of(optimizer)):
        if p.dtype == torch.float32 or (p.dtype == torch.bfloat16 and BACK_ENDS[back_end].bf16_weights):
            continue
        raise ConflictError(
            f"{OPTION}={back_end}: {name} is {str(p.dtype).removeprefix('torch.')}, and rounding to the nearest"
            " loses small updates; keep fp32 weights: write precision=bf16-mixed or precision=32-true"
        )


def require_capable(back_end: str, device: torch.device) -> None:
    """Refuse a machine that can't run a back end."""
    library = BACK_ENDS[back_end]
    if not is_installed(library.package):
        raise CapabilityError(
            f"{OPTION}={back_end}: {library.package} is not installed; write pip install {library.install}, or"
            f" {OPTION}=own"
        )
    if library.needs_cuda and device.type != "cuda":
        other = "bitsandbytes_8bit" if library.package == "bitsandbytes" else "own"
        raise CapabilityError(f"{OPTION}={back_end} needs a CUDA device; without one write {OPTION}={other}")
    if library.package == "torchao" and not can_compile(device):
        tool = "Triton" if device.type == "cuda" else "C++ compiler"
        raise CapabilityError(
            f"{OPTION}={back_end}: torchao compiles its step, and there is no {tool}; install one, or write"
            f" {OPTION}=own"
        )


def state_sizes(p: Tensor, back_end: str) -> dict[str, int]:
    """Return the bytes of each optimizer state that a back end keeps for a parameter; they depend on its dtype."""
    return BACK_ENDS[back_end].state_sizes(p.numel(), is_bf16=p.dtype == torch.bfloat16)


def device_bytes(p: Tensor, back_end: str) -> int:
    """Return the bytes of a parameter's states that are always on the device, not paged."""
    paged_from = BACK_ENDS[back_end].paged_from
    sizes = state_sizes(p, back_end)
    if paged_from is not None and p.numel() >= paged_from:
        sizes.pop("moments")
    return sum(sizes.values())


def uncompressed(optimizer: Optimizer) -> dict[str, int]:
    """Return name -> bytes of the moments that a `converted` optimizer keeps in fp32."""
    back_end = vars(optimizer)["back_end"]
    plain = [p for p in parameters_of(optimizer) if not BACK_ENDS[back_end].compresses(p.numel())]
    return {name_in(optimizer, p): state_sizes(p, back_end)["moments"] for p in plain}


def summary(optimizer: Optimizer) -> str:
    """Describe in one line the bytes of a `converted` optimizer's states, and the uncompressed parameters."""
    back_end, plain = vars(optimizer)["back_end"], uncompressed(optimizer)
    parameters = parameters_of(optimizer)
    total = sum(sum(state_sizes(p, back_end).values()) for p in parameters)
    each = total / max(1, sum(p.numel() for p in parameters))
    words = f"{back_end}: {each:.2f} bytes per parameter: {format_bytes(total)}"
    if not plain:
        return words
    block = BACK_ENDS[back_end].block
    kind = f"parameters, small or no multiple of {block}," if BACK_ENDS[back_end].whole_blocks else "small parameters"
    names = ", ".join(list(plain)[:3]) + (", ..." if len(plain) > 3 else "")
    return f"{words}; moments of {len(plain)} {kind} in fp32, {format_bytes(sum(plain.values()))}: {names}"
