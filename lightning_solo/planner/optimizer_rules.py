"""Optimizers of a planned run: CUDA's defaults, rules for fake tensors that torch lacks, LBFGS' history."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_solo.attributes import replaced


def register_fused_steps(library: Any) -> None:
    """Register the fused steps that torch lacks for fake tensors; they work in place and allocate nothing."""
    for name in ("_fused_sgd_", "_fused_adagrad_"):
        library.impl(name, lambda *args, **kwargs: None, "Meta", allow_override=True)


@contextmanager
def capturable_on_cpu() -> Iterator[None]:
    """Allow ``capturable`` optimizers on the CPU, which refuses them since it can't replay a graph."""
    name = "_get_capturable_supported_devices"
    with ExitStack() as stack:
        for key, module in list(sys.modules.items()):
            if key.startswith("torch.optim.") and (original := getattr(module, name, None)) is not None:
                stack.enter_context(replaced(module, name, partial(_with_cpu, original)))
        yield


def _with_cpu(original: Callable[..., list[str]], *args: Any, **kwargs: Any) -> list[str]:
    return [*original(*args, **kwargs), "cpu"]


def choose_foreach(optimizer: Optimizer) -> None:
    """Set ``foreach`` to CUDA's default if the user didn't choose it."""
    for group in optimizer.param_groups:
        other = group.get("fused") or group.get("differentiable")
        if "foreach" in group and group["foreach"] is None and not other:
            group["foreach"] = True


def fill_history(optimizer: Optimizer) -> bool:
    """Give LBFGS the full history that it has after some steps; return whether the optimizer is LBFGS.

    The number of directions after a step depends on the loss, and tensors without data would never add one.
    """
    if not isinstance(optimizer, torch.optim.LBFGS):
        return False
    group = optimizer.param_groups[0]
    flat = [torch.cat([p.detach().flatten() for p in group["params"]]) for _ in range(2 * group["history_size"] + 2)]
    size = group["history_size"]
    one = flat[0].new_ones(())
    optimizer.state[group["params"][0]].update(
        func_evals=1,
        n_iter=1,
        d=flat[-1],
        prev_flat_grad=flat[-2],
        t=group["lr"],
        old_dirs=flat[:size],
        old_stps=flat[size:-2],
        ro=[one.clone() for _ in range(size)],
        H_diag=one,
        prev_loss=1.0,
    )
    return True
