"""The stored states of a `CompactAdamW`: flat tensors, in the order of the parameter's memory.

They convert from and to the fp32 states of torch's AdamW and Adam.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_solo.memory.sharded_tensors import local
from lightning_solo.optim import compressed_moments as moments
from lightning_solo.optim.memory_order import in_memory_order
from lightning_solo.optim.split_weights import CORRECTIONS

Layout = Mapping[str, tuple[int, torch.dtype]]
"""Name of a tensor -> its elements and type."""


def state_layout(p: Tensor, master_bits: int | str, moment_bits: int) -> dict[str, tuple[int, torch.dtype]]:
    """Return (elements, dtype) of each tensor of a parameter's state, without its step count.

    The state is of this process's shard; the elements of the whole parameter decide whether it is compressed.
    """
    n = local(p).numel()
    layout = {}
    if p.dtype == torch.bfloat16 and not isinstance(master_bits, str):
        layout["correction"] = (n, CORRECTIONS[master_bits])
    if moment_bits == 32 or p.numel() < moments.LEAST:
        return {**layout, "exp_avg": (n, torch.float32), "exp_avg_sq": (n, torch.float32)}
    codes, scales = -(-n * moment_bits // 8), (moments.blocks(n), torch.float32)
    return {
        **layout,
        "exp_avg": (codes, torch.int8 if moment_bits == 8 else torch.uint8),
        "exp_avg_scale": scales,
        "exp_avg_sq": (codes, torch.uint8),
        "exp_avg_sq_scale": scales,
    }


def bytes_of(layout: Layout) -> int:
    """Return the bytes of the tensors of a layout."""
    return sum(count * kind.itemsize for count, kind in layout.values())


def new_state(layout: Layout, device: torch.device, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a parameter's state before its first step: the tensors in ``kept``, and new ones on the device."""
    missing = {name: size for name, size in layout.items() if name not in kept}
    zeros = {name: torch.zeros(count, dtype=kind, device=device) for name, (count, kind) in missing.items()}
    return {"step": torch.zeros((), dtype=torch.float32), **kept, **zeros}


def correction_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a state that is its correction; an empty dict if it has none."""
    return {"correction": state["correction"]} if "correction" in state else {}


def is_alike(saved: Mapping[str, Any], layout: Layout) -> bool:
    """Return whether a saved state has the tensors of a layout, and a step count if it has moments."""
    expected: dict[str, Any] = {"step": ((), torch.float32)} if "exp_avg" in layout else {}
    expected |= {name: ((count,), kind) for name, (count, kind) in layout.items()}
    return set(saved) == set(expected) and all(
        isinstance(value, Tensor) and (value.shape, value.dtype) == expected[name] for name, value in saved.items()
    )


def is_plain(saved: Mapping[str, Any], p: Tensor) -> bool:
    """Return whether a state is one of torch's AdamW or Adam."""
    return set(saved) == {"step", "exp_avg", "exp_avg_sq"} and all(
        local(saved[name]).shape == local(p).shape and saved[name].is_floating_point()
        for name in ("exp_avg", "exp_avg_sq")
    )


def compress(state: Mapping[str, Tensor], p: Tensor, saved: Mapping[str, Tensor]) -> None:
    """Fill a parameter's state from one of torch's AdamW or Adam."""
    state["step"].fill_(float(saved["step"]))
    for name, quantize, which in (("exp_avg", moments.quantize_first, 0), ("exp_avg_sq", moments.quantize_second, 1)):
        flat = in_memory_order(local(saved[name]).to(p.device, torch.float32), p)
        if f"{name}_scale" not in state:
            state[name].copy_(flat)
            continue
        book = moments.codebooks(p.device)[which] if state["exp_avg"].dtype == torch.uint8 else None
        codes, scales = quantize(pad(flat, (0, -flat.numel() % moments.BLOCK)).view(-1, moments.BLOCK), book)
        state[name].copy_(codes.view(-1)[: state[name].numel()])
        state[f"{name}_scale"].copy_(scales)


def plain(p: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a parameter's state in the form of torch's AdamW."""
    plain_state = {"step": state["step"].clone()}
    bits = moments.BITS[state["exp_avg"].dtype]
    for name, dequantize, which in (
        ("exp_avg", moments.dequantize_first, 0),
        ("exp_avg_sq", moments.dequantize_second, 1),
    ):
        flat = state[name].to(p.device)
        if bits != 32:
            width = moments.BLOCK * bits // 8
            rows = pad(flat, (0, -flat.numel() % width)).view(-1, width)
            book = moments.codebooks(p.device)[which] if bits == 4 else None
            flat = dequantize(rows, state[f"{name}_scale"].to(p.device), book).view(-1)[: local(p).numel()]
        plain_state[name] = torch.empty_like(p, dtype=torch.float32, requires_grad=False)
        in_memory_order(plain_state[name]).copy_(flat)
    return plain_state


def described(tensors: Mapping[str, Any]) -> str:
    """Return a state, or a layout, in words."""
    words = []
    for name, value in sorted(tensors.items()):
        kind, shape = (value.dtype, list(value.shape)) if isinstance(value, Tensor) else (value[1], [value[0]])
        words.append(f"{name} {str(kind).removeprefix('torch.')}{shape}")
    return ", ".join(words)
