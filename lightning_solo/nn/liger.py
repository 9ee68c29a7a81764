"""Liger's Triton kernels, with the interface of `fused_operators`; the first call imports the package.

The functions below Liger's autograd functions are called. Those are silently wrong if a gradient is differentiated or
backward runs twice: backward of a gated product overwrites the tensors that forward saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_solo.machine import is_installed, open_to_others


def _ops() -> Any:
    import liger_kernel.ops

    return liger_kernel.ops


def _launch(width: int) -> tuple[int, int]:
    """Return Liger's block size and number of warps for rows of a width."""
    from liger_kernel.ops.utils import calculate_settings

    block_size, warps = calculate_settings(width)
    return block_size, warps


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str) -> tuple[Tensor, Tensor]:
    """As `fused_operators.rms_norm_forward`."""
    output, _, rstd, *_ = _ops().rms_norm_forward(x, weight, eps, offset, casting, None)
    return output, rstd


def rms_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, casting: str, for_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """As `fused_operators.rms_norm_backward`."""
    from liger_kernel.ops.rms_norm import _str_to_casting_mode

    rows = x.view(-1, x.shape[-1])
    in_place = False  # the residual connection takes the same gradient
    of_x, of_weight = _ops().rms_norm_backward(
        gradient.contiguous(), rows, weight, rstd, offset, _str_to_casting_mode[casting], *_launch(x.shape[-1]),
        in_place, None, needs_dw=for_weight,
    )  # fmt: skip
    return of_x, of_weight


def layer_norm_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `fused_operators.layer_norm_forward`."""
    output, _, mean, rstd, *_ = _ops().layer_norm_forward(x, weight, bias, eps)
    return output, mean, rstd


def layer_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, needed: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As `fused_operators.layer_norm_backward`."""
    rows = x.view(-1, x.shape[-1])
    of_x, of_weight, of_bias = _ops().layer_norm_backward(
        gradient.contiguous(), rows, weight, bias, mean, rstd, needs_dw=needed[0], needs_db=needed[1]
    )
    return of_x, of_weight, of_bias


def gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """As `fused_operators.gated_forward`."""
    forward = _ops().swiglu_forward if activation == "silu" else _ops().geglu_forward
    output: Tensor = forward(gate, up)[2]
    return output


def gated_backward(
    gradient: Tensor, gate: Tensor, up: Tensor, activation: str, overwrite: bool
) -> tuple[Tensor, Tensor]:
    """As `fused_operators.gated_backward`; with ``overwrite`` the gradients replace gate and up."""
    if not overwrite:
        gate, up = gate.clone(), up.clone()
    backward = _ops().swiglu_backward if activation == "silu" else _ops().geglu_backward
    of_gate, of_up = backward(gate, up, gradient.contiguous())
    return of_gate, of_up


def token_losses(
    logits: Tensor, labels: Tensor, *, label_smoothing: float, softcap: float | None, z_loss: float, gradients: bool
) -> Tensor:
    """Return the losses of tokens, (tokens, vocabulary) -> (tokens,); with ``gradients`` these overwrite the logits."""
    logits = logits.detach().requires_grad_(gradients)  # Liger computes gradients if it is set
    never = -1  # ignored labels have no row here
    losses: Tensor = _ops().cross_entropy_forward(
        logits, labels, None, never, z_loss, label_smoothing, "none", softcap, False
    )[0]
    return losses


def missing(device: torch.device) -> str | None:
    """Return why Liger's kernels can't run on a device, or None."""
    if not is_installed("liger_kernel"):
        return 'liger-kernel is not installed (pip install "liger-kernel>=0.8,<0.9")'
    if not runs_on(device):
        return f"its Triton kernels need a CUDA device, not {device}"
    return open_to_others("TRITON_CACHE_DIR")


def runs_on(device: torch.device) -> bool:
    """Return whether Liger's kernels run on a device: CUDA, or any under Triton's interpreter."""
    return device.type == "cuda" or _is_interpreted()


def _is_interpreted() -> bool:
    if not is_installed("triton") or not is_installed("liger_kernel"):
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)
