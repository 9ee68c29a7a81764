"""Matrix products with rounded factors: int8, MXFP8, NVFP4, and fp16 with sums in fp16."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

Multiply = Callable[..., Tensor]
"""(m, k) x (n, k) -> (m, n): ``left @ right.T``, in the type that is the third argument; fp32 without."""
E2M1_MAX, E4M3_MAX = 6.0, 448.0
MX_BLOCK, NVFP4_BLOCK = 32, 16  # numbers along the sum that share a scale
_SUM_OF_FP16 = 32768.0  # half of the largest number of fp16: a sum may reach it
_MMA = 16  # numbers that a tensor core adds up before it rounds the sum to fp16
_SMALLEST = 1e-30  # stands for the largest number of a factor of zeros


class RoundedProduct(torch.autograd.Function):
    """(rows, in) x (out, in) -> (rows, out), with rounded products in forward and backward.

    ``output`` computes the output, ``of_rows`` the rows' gradient, and ``of_weight`` the weight's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, output: Multiply, of_rows: Multiply, of_weight: Multiply
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.backward_products = of_rows, of_weight
        return output(rows, weight, rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight = ctx.backward_products
        for_rows, for_weight, *_ = ctx.needs_input_grad  # a frozen weight has none
        rows_gradient = of_rows(gradient, weight.t(), rows.dtype) if for_rows else None
        weight_gradient = of_weight(gradient.t(), rows.t(), weight.dtype) if for_weight else None
        return rows_gradient, weight_gradient, None, None, None


# --- int8 ---


def int8_product(left: Tensor, right: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``left @ right.T``, (m, k) x (n, k) -> (m, n).

    Each row of a factor is rounded to multiples of 1/127 of its largest number.
    """
    (a, a_scale), (b, b_scale) = _int8_rows(left), _int8_rows(right)
    return (torch._int_mm(a, b.t()) * a_scale * b_scale.t()).to(dtype)


def _int8_rows(factor: Tensor) -> tuple[Tensor, Tensor]:
    scale = factor.abs().amax(1, keepdim=True).float().clamp_min(_SMALLEST) / 127
    return (factor / scale).round().to(torch.int8).contiguous(), scale


# --- MXFP8 ---


def mxfp8_product(
    left: Tensor, right: Tensor, dtype: torch.dtype = torch.float32, *, on_device: bool = False
) -> Tensor:
    """Return ``left @ right.T``, (m, k) x (n, k) -> (m, n), with both factors rounded by `to_mxfp8`.

    ``on_device`` multiplies by the device's arithmetic, in bf16. The emulation multiplies the rounded factors, which
    are exact in bf16, in the type of the left one.
    """
    a, a_scale = to_mxfp8(left)
    b, b_scale = to_mxfp8(right)
    if not on_device:
        kind = _emulated_type(left)
        return (_unscaled(a, a_scale).to(kind) @ _unscaled(b, b_scale).to(kind).t()).to(dtype)
    recipe, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    factors = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    scales = [in_tiles(_e8m0(scale)) for scale in (a_scale, b_scale)]
    product = F.scaled_mm(*factors, scales[0], recipe, scales[1], recipe, swizzle, swizzle, output_dtype=torch.bfloat16)
    return product.to(dtype)


def to_mxfp8(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return float8_e4m3fn numbers, (m, k), and fp32 scales, (m, k / 32), whose product approximates the factor.

    Each block of 32 in a row is divided by the least power of two that leaves its largest number within 448 (Mishra et
    al. 2025, arXiv 2506.08027, section 3). Section 6.3 of the OCP specification of MX formats rounds that power down,
    which cuts off the largest numbers. A block with an inf or a nan becomes nan.
    """
    blocks = _blocks(factor, MX_BLOCK)
    scale = _power_of_two_from(blocks.abs().amax(2) / E4M3_MAX)
    numbers = (blocks / scale.unsqueeze(2)).to(torch.float8_e4m3fn).float()
    return numbers.flatten(1), scale


def _power_of_two_from(bound: Tensor) -> Tensor:
    """Return the least power of two in fp32 that is at least ``bound``, which isn't negative; inf for inf and nan."""
    bits = bound.contiguous().view(torch.int32).long()
    exponent = (bits + 0x7FFFFF) >> 23  # one more, unless the 23 bits of the mantissa are 0
    return (exponent.clamp(1, 255) << 23).int().view(torch.float32)


def _e8m0(scale: Tensor) -> Tensor:
    """Return the exponents of powers of two as float8_e8m0fnu; inf becomes nan."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)


# --- NVFP4 ---


def nvfp4_product(
    left: Tensor,
    right: Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    stochastic: bool = False,
    transform: bool = False,
    on_device: bool = False,
) -> Tensor:
    """Return ``left @ right.T``, (m, k) x (n, k) -> (m, n), with both factors rounded by `to_nvfp4`.

    Args:
        left: (m, k).
        right: (n, k), rounded to the nearest.
        dtype: of the result.
        stochastic: round the left factor stochastically.
        transform: first apply `hadamard`, which leaves the product unchanged.
        on_device: multiply by the device's arithmetic, in bf16, instead of emulating it.
    """
    if transform:
        left, right = hadamard(left, right)
    a, a_scale, a_global = to_nvfp4(left, stochastic)
    b, b_scale, b_global = to_nvfp4(right)
    if not on_device:
        kind = _emulated_type(left)
        product = _unscaled(a, a_scale).to(kind) @ _unscaled(b, b_scale).to(kind).t()
        return (product * (a_global * b_global)).to(dtype)
    recipe = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    swizzle = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    scales = [[in_tiles(s.to(torch.float8_e4m3fn)), g] for s, g in ((a_scale, a_global), (b_scale, b_global))]
    factors = packed_e2m1(a), packed_e2m1(b).t()
    product = F.scaled_mm(*factors, scales[0], recipe, scales[1], recipe, swizzle, swizzle, output_dtype=torch.bfloat16)
    return product.to(dtype)


def nvfp4_products(on_device: bool) -> tuple[Multiply, Multiply, Multiply]:
    """Return the products for the output, the rows' gradient and the weight's, as `RoundedProduct` takes them."""
    output = partial(nvfp4_product, on_device=on_device)
    gradient = partial(output, stochastic=True)
    return output, gradient, partial(gradient, transform=True)


def to_nvfp4(factor: Tensor, stochastic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return e2m1 numbers, block scales and the tensor's scale, in fp32; their product approximates the factor.

    Each block of 16 in a row has a scale in float8_e4m3fn; the tensor has one in fp32 (NVIDIA et al. 2025, arXiv
    2509.25149, appendix B). An inf or a nan in the factor appears in its scales.

    Args:
        factor: (m, k).
        stochastic: round to either neighbour, with the number itself as the mean; else to the nearest.
    """
    blocks = _blocks(factor, NVFP4_BLOCK)
    largest = blocks.abs().amax(2)
    scale_of_all = largest.amax().clamp_min(_SMALLEST) / (E2M1_MAX * E4M3_MAX)
    scale = (largest / E2M1_MAX / scale_of_all).clamp(torch.finfo(torch.float8_e4m3fn).tiny, E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn).float()
    scaled = blocks / (scale * scale_of_all).unsqueeze(2)
    return _to_e2m1(scaled, stochastic).flatten(1), scale, scale_of_all


def _to_e2m1(numbers: Tensor, stochastic: bool) -> Tensor:
    """Round numbers to 0, 0.5, 1, 1.5, 2, 3, 4 or 6; those beyond 6 become 6."""
    size = numbers.abs().clamp_max(E2M1_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    steps = size / step
    steps = (steps + torch.rand_like(steps)).floor() if stochastic else steps.round()
    return torch.copysign((steps * step).clamp_max(E2M1_MAX), numbers)  # 3 steps and almost 1 are 4 in fp32


def packed_e2m1(numbers: Tensor) -> Tensor:
    """Pack e2m1 numbers, (m, k), two to a byte with the first in its low half: (m, k / 2)."""
    size = numbers.abs()
    code = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4)).to(torch.uint8)
    code = code | (torch.signbit(numbers).to(torch.uint8) << 3)
    first, second = code.reshape(len(code), -1, 2).unbind(2)
    return (first | (second << 4)).view(torch.float4_e2m1fn_x2)


# drawn once for all: compiled code may draw numbers of a backward twice, and then turn both factors differently
_SIGNS = (1, -1, -1, 1, 1, 1, -1, -1, 1, -1, 1, 1, -1, 1, -1, -1)
_HADAMARD = [[_SIGNS[i] * (-1) ** (i & j).bit_count() / 4 for j in range(NVFP4_BLOCK)] for i in range(NVFP4_BLOCK)]


def hadamard(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply each block of 16 of both factors, (m, k) and (n, k), by one orthogonal matrix.

    It is the 16 by 16 Hadamard matrix, divided by 4, with random signs. It spreads an outlier over its block and leaves
    ``left @ right.T`` unchanged.
    """
    turn = torch.tensor(_HADAMARD, device=left.device)
    a, b = ((_blocks(factor, NVFP4_BLOCK) @ turn).flatten(1) for factor in (left, right))
    return a.to(left.dtype), b.to(left.dtype)


# --- both block formats ---


def in_tiles(scales: Tensor) -> Tensor:
    """Return scales of blocks, (m, blocks), in the order in which tensor cores read them: tiles of 128 x 4.

    Tiles are filled with zeros. Row ``r`` of a tile is in its line ``r % 32`` (cuBLAS, "1D block scaling factors
    layout").
    """
    rows, columns = scales.shape
    data = F.pad(scales.contiguous().view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = data.reshape(-(-rows // 128), 4, 32, -(-columns // 4), 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales.dtype)


def _blocks(factor: Tensor, size: int) -> Tensor:
    return factor.float().reshape(len(factor), -1, size)


def _unscaled(numbers: Tensor, scales: Tensor) -> Tensor:
    return (numbers.reshape(*scales.shape, -1) * scales.unsqueeze(2)).flatten(1)


def _emulated_type(left: Tensor) -> torch.dtype:
    """Return bf16 for a bf16 product, else fp32, since fp16's range is too small."""
    return torch.bfloat16 if left.dtype is torch.bfloat16 else torch.float32


# --- fp16 with sums in fp16 ---


def fp16_product(left: Tensor, right: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``left @ right.T``, (m, k) x (n, k) -> (m, n), with factors and sums in fp16.

    Each row is divided by a power of two, so that no sum of k products leaves fp16's range. A sum loses numbers below
    1/2048 of it. A kernel of CUDA converts what it reads and writes: each pass here takes one.
    """
    bound = (_SUM_OF_FP16 / left.shape[1]) ** 0.5  # k products of at most bound ** 2
    (a, a_scale), (b, b_scale) = _fp16_rows(left, bound), _fp16_rows(right, bound)
    summed: Tensor = fp16_accumulated(a, b.t())
    if dtype is torch.bfloat16:  # its range is that of fp32: scaling one after the other rounds once
        return torch.mul(summed, a_scale, out=torch.empty_like(summed, dtype=dtype)).mul_(b_scale.t())
    return torch.mul(summed * a_scale, b_scale.t(), out=torch.empty_like(summed, dtype=dtype))


def _fp16_rows(factor: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    largest = torch.linalg.vector_norm(factor, math.inf, dim=1, keepdim=True)
    scale = _power_of_two_from(largest.float() / bound)
    if torch.compiler.is_compiling():  # dynamo takes no out= of a transposed factor, and the passes become one anyway
        return (factor / scale).half(), scale
    return torch.div(factor, scale, out=torch.empty_like(factor, dtype=torch.float16)), scale


@torch.library.custom_op("lightning_solo::fp16_accumulated", mutates_args=())  # opaque: compiled code keeps the switch
def fp16_accumulated(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` of matrices in fp16, summed in fp16.

    A CPU emulates tensor cores: 16 products are added nearly exactly, then the running sum is rounded to fp16.
    """
    if left.is_cuda:
        switches = torch.backends.cuda.matmul
        before = switches.allow_fp16_accumulation
        switches.allow_fp16_accumulation = True
        try:
            return left @ right
        finally:
            switches.allow_fp16_accumulation = before
    total = left.new_zeros(left.shape[0], right.shape[1])
    for start in range(0, left.shape[1], _MMA):
        part = slice(start, start + _MMA)
        total = (total.float() + left[:, part].float() @ right[part].float()).half()
    return total


@fp16_accumulated.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


@register_flop_formula(torch.ops.lightning_solo.fp16_accumulated)
def _flops(left: Any, right: Any, out_shape: Any = None, **_: Any) -> int:
    """Return the FLOPs of a product, from its factors' shapes."""
    return 2 * int(left[0]) * int(left[1]) * int(right[1])
