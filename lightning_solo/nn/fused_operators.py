"""The fused kernels' computations, written in torch's operators, with the same results and saved tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str) -> tuple[Tensor, Tensor]:
    """Return the normalised input, (..., width), and the reciprocal of each row's root mean square, (rows,)."""
    exact = x.float()
    rstd = torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    if casting == "llama":
        output = (exact * rstd).to(x.dtype) * (offset + weight)
    else:
        output = (exact * rstd * (offset + weight.float())).to(x.dtype)
    return output, rstd.flatten()


def rms_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, casting: str, for_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the input and, where needed, of the weight."""
    exact, rstd = x.float(), rstd.view(*x.shape[:-1], 1)
    normed = exact * rstd
    scale = offset + weight
    scaled = (gradient * scale).float() if casting == "llama" else gradient.float() * scale.float()
    of_x = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    of_weight = None
    if for_weight:
        rounded = normed.to(x.dtype).float() if casting == "llama" else normed
        of_weight = (gradient.float() * rounded).flatten(0, -2).sum(0).to(weight.dtype)
    return of_x.to(x.dtype), of_weight


def layer_norm_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised input, (..., width), and each row's mean and reciprocal standard deviation."""
    output, mean, rstd = aten.native_layer_norm(x, [x.shape[-1]], weight, bias, eps)
    return output, mean, rstd


def layer_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, needed: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the input and, where needed, of weight and bias."""
    shape = [x.shape[-1]]
    of_x, of_weight, of_bias = aten.native_layer_norm_backward(
        gradient, x, shape, mean, rstd, weight, bias, [True, *needed]
    )
    return of_x, of_weight if needed[0] else None, of_bias if needed[1] else None


def gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return ``activation(gate) * up``."""
    return activated(gate, activation) * up


def gated_backward(
    gradient: Tensor, gate: Tensor, up: Tensor, activation: str, overwrite: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up; ``overwrite`` is ignored."""
    above = gradient * up
    of_up = gradient * activated(gate, activation)
    if activation == "silu":
        return aten.silu_backward(above, gate), of_up
    return aten.gelu_backward(above, gate, approximate="tanh"), of_up


def activated(gate: Tensor, activation: str) -> Tensor:
    """Apply an activation, ``silu`` or ``gelu_tanh``."""
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
