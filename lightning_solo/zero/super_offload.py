"""SuperOffload: what it can't train, and its worker, a process that steps sub-groups of the weights during backward.

The worker (DeepSpeed 0.19.8) shares the masters and their gradients, and has the moments to itself. It steps a
sub-group once the last of its gradients has come, so what is only known when backward has ended comes too late; with
clipping it is all stepped after backward. It is told each group's options when it starts, and later learning rates.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_solo.errors import ConflictError
from lightning_solo.zero.deepspeed_internals import close_worker, not_submitted
from lightning_solo.zero.deepspeed_patches import run_worker
from lightning_solo.zero.extension import load_extension
from lightning_solo.zero.refusals import is_deepspeeds_adamw

FIXED = ("betas", "eps", "weight_decay")


def require_cpu_adamw(optimizer: Any) -> None:
    """Refuse another optimizer than the worker's own, which it makes without asking.

    Raises:
        ConflictError: names it, and what to write.
    """
    if not (
        is_deepspeeds_adamw(optimizer)
        and optimizer.fp32_optimizer_states
        and all(group["bias_correction"] for group in optimizer.param_groups)
    ):
        raise ConflictError(
            f"SuperOffload and {type(optimizer).__name__}: its worker steps DeepSpeed's CPUAdam in AdamW mode, with"
            " bias correction and fp32 states, whatever it is given; write torch.optim.AdamW and"
            " strategy.host_optimizer=deepspeed, or take the preset zero_offload"
        )


def require_unscaled(dtype: torch.dtype) -> None:
    """Refuse weights that are trained with a scaled loss.

    Raises:
        ConflictError: they are in fp16.
    """
    if dtype == torch.float16:
        raise ConflictError(
            "SuperOffload and fp16: it steps before the loss scale is taken out of the gradients; write"
            " precision=bf16-mixed, or take the preset zero_offload"
        )


@contextmanager
def cores_as_found() -> Iterator[None]:
    """Give the process its cores back, of which SuperOffload takes most, and the threads that it started meanwhile."""
    before = os.sched_getaffinity(os.getpid())
    try:
        yield
    finally:
        pinned = os.sched_getaffinity(os.getpid())
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                if os.sched_getaffinity(int(thread.name)) == pinned:
                    os.sched_setaffinity(int(thread.name), before)


def prepare_and_run_worker(*arguments: Any) -> None:
    """Run the worker, in a process of its own, with CPUAdam as it is kept: loaded without a compiler."""
    # Ctrl-C is sent to every process of a terminal; this one is ended by the other, between two steps.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_other, daemon=True).start()
    load_extension("cpu_adam")
    run_worker(*arguments)


def _end_with_the_other() -> None:
    """End this process when the one that trains was killed: it would keep the host's memory for ever."""
    trains = multiprocessing.parent_process()
    assert trains is not None
    trains.join()
    os._exit(1)


class Worker:
    """The worker of one engine of SuperOffload's, until it is closed; ``names`` are of the parameters."""

    def __init__(self, zero: Any, names: Mapping[Tensor, str]) -> None:
        self.zero = zero
        self.names = names
        self._told = self._options()

    def _options(self) -> list[dict[str, Any]]:
        groups = self.zero.optimizer.param_groups
        return [{**{name: group[name] for name in FIXED}, "betas": tuple(group["betas"])} for group in groups]

    def before_step(self, unused: Collection[Tensor]) -> None:
        """Refuse a step of which the worker got only a part; ``unused`` parameters have no gradient in it.

        Raises:
            ConflictError: names what it doesn't know.
        """
        for told, now in zip(self._told, self._options(), strict=True):
            if changed := [f"{name}={now[name]}, before {told[name]}" for name in FIXED if now[name] != told[name]]:
                raise ConflictError(
                    f"SuperOffload and a schedule or a checkpoint that changed {'; '.join(changed)}: its worker is told"
                    " learning rates only; write OneCycleLR(cycle_momentum=False), or in configure_optimizers the"
                    " checkpoint's values, or take the preset zero_offload"
                )
        if self.zero.clip_grad:
            return
        if waiting := not_submitted(self.zero):
            left_out = set(unused)
            names = [self.names[p] for p in waiting if p in left_out]
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            why = f"{', '.join(names[:5])}{more} got no gradient" if names else "gradients came in several passes"
            raise ConflictError(
                f"SuperOffload would leave {len(waiting)} parameters as they are in this step: {why}, and it steps"
                " parameters of a sub-group together, once each has its gradient; write requires_grad_(False) for"
                " what is never used, use_reentrant=False for activation checkpointing, Trainer(gradient_clip_val=...),"
                " with which it steps after backward, or take the preset zero_offload"
            )

    def close(self) -> None:
        """End the process, after the steps that it was given."""
        close_worker(self.zero)
