"""Bytes that convolutions allocate and free within an operator on a CPU, as oneDNN 3.x and torch 2.13 do.

oneDNN computes in blocks of 16 channels (8 without AVX-512): input, weight and output are copied to that layout unless
they are channels-last (oneDNN's developer guide, "Understanding Memory Formats"). Where oneDNN isn't used, torch
unfolds the input into columns (``ATen/native/ConvolutionMM2d.cpp``). Scratchpads of some kernels, which depend on the
number of threads, are not counted.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
FEW_NUMBERS = 20480  # elements of an example up to which torch's kernels take small filters (use_mkldnn)


def workspaces(func: Any, args: tuple[Any, ...], result: Any) -> list[int]:
    """Return the bytes that one of ``CONVOLUTIONS`` holds at each moment at which it may peak, results included."""
    if func is aten.convolution.default:
        x, weight, y, groups = *args[:2], result, args[8]
        if not _is_served(x, weight, groups):
            return [_columns(x, weight, y) + y.nbytes]
        x_copy, weight_copy, y_copy = _copies(x, weight, y, groups)
        return [x_copy + weight_copy + (y_copy or y.nbytes), y_copy + y.nbytes]
    y, x, weight, stride, groups, (wants_x, wants_weight, _) = *args[:3], args[4], args[9], args[10]
    x_bytes = x.nbytes if wants_x else 0
    if not _is_served(x, weight, groups):
        return [x_bytes + _columns(x, weight, y) + weight.nbytes]
    x_copy, weight_copy, y_copy = _copies(x, weight, y, groups)
    if not y_copy:  # channels-last: the weights' gradient is computed in another layout, and copied twice
        return [weight_copy + x_bytes, x_bytes + 3 * weight_copy if wants_weight else 0]
    moments = []
    if wants_x:
        blocked, copies = _blocked(x), 1 if max(stride) == 1 else 2
        moments += [y_copy + weight_copy + blocked, blocked + copies * x.nbytes]
    if wants_weight:
        is_read_directly = groups == x.shape[1] and max(weight.shape[2:]) > 3  # large filters of each channel
        moments.append(x_bytes + weight_copy + (0 if is_read_directly else x_copy + y_copy))
        moments.append(x_bytes + weight_copy + weight.nbytes)
    return moments


def _copies(x: Tensor, weight: Tensor, y: Tensor, groups: int) -> tuple[int, int, int]:
    """Return the bytes of copies of input, weight and output in oneDNN's layout; 0 where there is none."""
    channels = [-(-size // _block()) * _block() for size in weight.shape[:2]]
    if _is_channels_last(x, weight):
        return 0, weight.nbytes, 0
    # the first layers of images have few channels; their filters read the input without a copy
    plain = groups == 1 and x.shape[1] < _block() and max(weight.shape[2:]) > 1
    inputs = weight.shape[1] if plain or groups > 1 else channels[1]
    weight_copy = weight.nbytes // max(weight.shape[0] * weight.shape[1], 1) * channels[0] * inputs
    return 0 if plain else _blocked(x), weight_copy, _blocked(y)


def _blocked(tensor: Tensor) -> int:
    """Return the bytes of a tensor (batch, channels, ...) with channels padded to whole blocks."""
    channels = tensor.shape[1]
    return tensor.nbytes // max(channels, 1) * (-(-channels // _block()) * _block())


def _columns(x: Tensor, weight: Tensor, y: Tensor) -> int:
    """Return the bytes of the unfolded input: for each output position, the inputs under the filter."""
    if max(weight.shape[2:]) == 1:  # one by one: the input itself
        return 0
    return math.prod(y.shape[2:]) * len(x) * math.prod(weight.shape[1:]) * x.element_size()


def _is_served(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Return whether oneDNN computes the convolution, with several threads."""
    if x.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if x.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    large = groups > 1 or min(weight.shape[-2:]) > 3 or len(x) > 1 or x.numel() > FEW_NUMBERS
    return x.dtype == torch.float32 and large


def _is_channels_last(x: Tensor, weight: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    kind = formats.get(x.dim())
    return kind is not None and any(t.is_contiguous(memory_format=kind) and not t.is_contiguous() for t in (x, weight))


@functools.cache
def _block() -> int:
    return 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8
