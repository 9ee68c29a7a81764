"""Attention kernels: selects fused ones if a model can use them, and reports the one that ran."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_solo.errors import ConflictError, NothingToDoError
from lightning_solo.nn.attention_kernels import (
    KERNELS,
    AttentionCalls,
    attention_calls,
    enabled_kernel,
    sdpa_in_transformers,
)
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.attention.card import AUTO, CARD, Settings


class Attention(Technique, Settings):
    """Runs attention by a fused kernel, and logs the kernel of a fit's first micro-batch.

    In a fit, Hugging Face models with ``attn_implementation="eager"`` call torch's ``scaled_dot_product_attention``.
    In validation, test and prediction torch chooses the kernel.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._enabled = ExitStack()
        self._kernels: dict[str, int] | None = None  # None: not recorded yet
        self._changed: list[str] = []

    @property
    def kernels(self) -> dict[str, int]:
        """Kernel -> calls in the first micro-batch of the current or last fit."""
        return dict(self._kernels or {})

    def transform(self, ctx: Run) -> None:
        self._kernels = None
        self._changed = ctx.undo.enter_context(sdpa_in_transformers(ctx.module))
        ctx.undo.callback(self._enabled.close)

    # until the end of the batch: recomputation in backward must use the same kernel
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._enabled.close()
        if self.kernel != AUTO:
            self._enabled.enter_context(enabled_kernel(self.kernel))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._enabled.close()

    def training_step(self, ctx: Run, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._kernels is not None:
            return proceed(*args, **kwargs)
        with attention_calls(ctx.module) as calls:
            result = proceed(*args, **kwargs)
        check_kernels(calls, self.kernel)
        self._kernels = dict(calls.kernels)
        ran = ", ".join(f"{name} ({count} calls)" for name, count in self._kernels.items())
        instead = f", in {', '.join(self._changed)} instead of eager" if self._changed else ""
        ctx.info(f"attention: the kernel that runs is {ran}{instead}")
        return result


def check_kernels(calls: AttentionCalls, kernel: str) -> None:
    """Warn if torch chose its ``math`` kernel.

    Raises:
        NothingToDoError: no kernel ran.
        ConflictError: a kernel other than ``kernel`` ran.
    """
    if not calls.kernels:
        raise NothingToDoError(
            "attention: training_step didn't call torch.nn.functional.scaled_dot_product_attention; modules that"
            f" compute a softmax: {', '.join(calls.by_hand) or 'none'}; call it there (torch.nn.MultiheadAttention:"
            ' need_weights=False; Hugging Face: attn_implementation="sdpa"), or write ~callback.attention'
        )
    others = [name for name in calls.kernels if name != kernel]
    if kernel != AUTO and others:
        raise ConflictError(
            f"attention: kernel={kernel}, and {', '.join(others)} ran, as the module itself calls"
            " torch.nn.attention.sdpa_kernel; remove that call, or write callback.attention.kernel=auto"
        )
    refusals = {name: calls.refusals[name] for name in KERNELS if name in calls.refusals}
    if kernel == AUTO and calls.kernels["math"]:
        why = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
        rank_zero_warn(
            "attention: torch chose the kernel math, which keeps the scores of all pairs of tokens, since others can't"
            f" compute this call ({why or 'torch gives no reason'}); callback.attention.kernel=math accepts it without"
            " a warning"
        )
