"""Launch the Triton kernels of `adamw_triton`: one piece by its addresses, many by a table of addresses.

The table has a row of addresses and scalars for each piece, and is uploaded from pinned memory by one copy.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_solo.optim.compressed_moments import BLOCK
from lightning_solo.optim.kernels import PER_PARTIAL, Control, Piece, Sum

ROWS = 16
"""Blocks of 128 elements that a program steps."""
WARPS = 4
"""Warps of a program, for 16 elements per thread; twice as many for fp32 weights with codes, which spill on sm_100."""

MASTERS = {
    (torch.bfloat16, None): 16,  # rounded stochastically
    (torch.bfloat16, torch.int8): 24,
    (torch.bfloat16, torch.int16): 32,
    (torch.float32, None): 32,
}
"""Types of the weight and of its correction -> bits of the master weight."""

_TENSORS = ("weight", "grad", "exp_avg", "exp_avg_sq", "correction", "exp_avg_scale", "exp_avg_sq_scale")
_NUMBERS = ("shrink", "pull", "first", "keep", "second", "correction2", "eps", "rate")
_NUMBERS_OF = operator.attrgetter(*_NUMBERS)


def launch_steps(pieces: Sequence[Piece], control: Control, device: torch.device) -> None:
    """Step pieces, all of one layout, by one launch."""
    source = functions()
    types = dict(pieces[0].layout)
    master = (types["weight"], types.get("correction"))
    has_codes = "exp_avg_scale" in types
    per_program = ROWS * BLOCK
    variant: dict[str, Any] = {
        "BITS": MASTERS[master],
        "HAS_CODES": has_codes,
        "HAS_BOUND": control.bound != float("inf"),
        "HAS_PULL": any(piece.scalars.pull for piece in pieces),
        "IS_NEAR": all(piece.scalars.first < 0.5 for piece in pieces),
        "IS_WHOLE": all(piece.tensors["weight"].numel() % per_program == 0 for piece in pieces),
        "ROWS": ROWS,
        "num_warps": 2 * WARPS if has_codes and types["weight"] == torch.float32 else WARPS,
        "enable_fp_fusion": False,
    }
    programs = [-(-piece.tensors["weight"].numel() // per_program) for piece in pieces]
    bound = float(control.bound)
    if len(pieces) == 1:
        (piece,) = pieces
        numbers = piece.scalars
        with _current(device):
            source.step_one[(programs[0],)](
                *(piece.tensors.get(name) for name in _TENSORS),
                control.scale,
                control.not_finite,
                piece.tensors["weight"].numel(),
                *(_signed(number) for number in (piece.first_row, piece.index, numbers.seed, numbers.seed_of_weights)),
                bound,
                *_numbers(pieces)[0].tolist(),
                **variant,
            )
        return
    table = np.empty((len(pieces), 22), np.int64)  # the columns as `step_many` reads them
    table[:, :7] = [[_address(piece.tensors.get(name)) for name in _TENSORS] for piece in pieces]
    table[:, 8:11] = [(piece.tensors["weight"].numel(), _signed(piece.first_row), piece.index) for piece in pieces]
    table[:, 11:20] = _numbers(pieces).view(np.int32)
    table[:, 20:] = [(_signed(piece.scalars.seed), _signed(piece.scalars.seed_of_weights)) for piece in pieces]
    entries, owners = uploaded(table, programs, 7, device)
    with _current(device):
        source.step_many[(sum(programs),)](
            entries,
            owners,
            control.scale,
            control.not_finite,
            bound,
            *(_triton_type(types.get(name)) for name in ("weight", "grad", "exp_avg", "exp_avg_sq", "correction")),
            bool((table[:, :7] % 16 == 0).all()),
            **variant,
        )


def _numbers(pieces: Sequence[Piece]) -> Any:
    """Return the fp32 coefficients of steps for the kernels, of shape (pieces, 9)."""
    numbers = np.empty((len(pieces), len(_NUMBERS) + 1), np.float32)
    after = _NUMBERS.index("correction2") + 1
    for row, piece in zip(numbers, pieces, strict=True):
        values = _NUMBERS_OF(piece.scalars)
        row[:after], row[after + 1 :] = values[:after], values[after:]
    numbers[:, after] = 1 / numbers[:, after - 1]
    return numbers


def launch_sums(sums: Sequence[Sum], control: Control, device: torch.device) -> None:
    """Add gradients of one type to totals of one type in one launch; all or none are measured."""
    source = functions()
    total = sums[0].total
    variant: dict[str, Any] = {
        "HAS_TOTAL": total is not None,
        "HAS_NORM": sums[0].partials is not None,
        "HAS_BOUND": control.bound != float("inf"),
        "num_warps": WARPS,
        "enable_fp_fusion": False,
    }
    programs = [-(-each.gradient.numel() // PER_PARTIAL) for each in sums]
    if len(sums) == 1:
        (one,) = sums
        size = one.gradient.numel()
        with _current(device):
            source.add_one[(programs[0],)](
                one.gradient, one.total, one.partials, size, int(one.is_first), float(control.bound), **variant
            )
        return
    table = np.array(
        [
            (*map(_address, (each.gradient, each.total, each.partials)), 0, each.gradient.numel(), int(each.is_first))
            for each in sums
        ],
        np.int64,
    )
    entries, owners = uploaded(table, programs, 3, device)
    with _current(device):
        source.add_many[(sum(programs),)](
            entries,
            owners,
            float(control.bound),
            _triton_type(sums[0].gradient.dtype),
            _triton_type(None if total is None else total.dtype),
            bool((table[:, :2] % 16 == 0).all()),
            **variant,
        )


def uploaded(table: Any, programs: Sequence[int], column: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Upload a table and the row of each program in one copy; return both.

    Args:
        table: int64, of shape (pieces, columns).
        programs: number of programs of each piece.
        column: column of the table that is set to the first program of each piece.
        device: target of the copy.
    """
    counts = np.array(programs, np.int64)
    table[:, column] = counts.cumsum() - counts
    owners = np.repeat(np.arange(len(programs), dtype=np.int32), counts)
    owners = np.pad(owners, (0, len(owners) % 2))
    packed = torch.from_numpy(np.concatenate((table.reshape(-1), owners.view(np.int64))))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)  # pinned memory is kept until the copy is done
    return packed[: table.size], packed[table.size :].view(torch.int32)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _signed(number: int) -> int:
    """Return the lower 32 bits as a signed int32."""
    return (number + 2**31) % 2**32 - 2**31


def _triton_type(dtype: torch.dtype | None) -> Any:
    """Return the Triton name of a torch dtype."""
    if dtype is None:
        return None
    names = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
    names |= {torch.int8: "int8", torch.uint8: "uint8", torch.int16: "int16"}
    return getattr(importlib.import_module("triton.language"), names[dtype])


def _current(device: torch.device) -> Any:
    """Return a context that makes a device CUDA's current one, on which Triton launches."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def functions() -> ModuleType:
    """Return the module of the kernels; importing it imports Triton."""
    return importlib.import_module("lightning_solo.optim.adamw_triton")
