"""The step of compact states and the sums of gradients on a GPU, by the kernels of `adamw_triton`, one launch a call.

Nothing in a call waits for the device. Many pieces share a launch: their addresses and scalars are the rows of a table,
which is uploaded from pinned memory, at once. Triton compiles a kernel at its first call for each layout, in some
seconds, and keeps it in its cache on disk.

What differs from torch's operators on a CPU (`adamw_update.update_blocks`, not compiled):

- codes of 8 bits, by one: `adamw_triton` says why. Of ``exp_avg_sq`` once in some 10**11 elements; of ``exp_avg``
  not once in 3 * 10**8;
- a change of a weight below 2**-100, by a unit of its last place; and where ``eps`` and ``exp_avg_sq`` are both 0, it
  is NaN, where theirs is infinite if ``exp_avg`` isn't 0;
- the payload of NaN, and the codes of a block that holds one, whose scale is NaN;
- squares are added up in another order, which is the same every time.

On a GPU, torch's operators themselves round some products differently than on a CPU.
"""

from __future__ import annotations

import functools
import importlib
import operator
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_solo.machine import is_installed
from lightning_solo.optim.compressed_moments import BLOCK
from lightning_solo.optim.kernels import PER_PARTIAL, Control, Kernels, Piece, Sum
from lightning_solo.optim.operator_kernels import greatest

LEAST_CAPABILITY = (8, 0)
"""Of a device: below it there is no arithmetic in bf16."""
ROWS = 16
"""Blocks of 128 elements that a program steps."""
WARPS = 4
"""Of a program: 16 elements per thread. Twice as many for fp32 weights with codes, which spill otherwise on sm_100."""

Layout = tuple[tuple[str, torch.dtype], ...]

_TENSORS = ("weight", "grad", "exp_avg", "exp_avg_sq", "correction", "exp_avg_scale", "exp_avg_sq_scale")
_NUMBERS = ("shrink", "pull", "first", "keep", "second", "correction2", "eps", "rate")
_NUMBERS_OF = operator.attrgetter(*_NUMBERS)
_GRADIENTS = (torch.bfloat16, torch.float16, torch.float32)
_MASTERS = {
    (torch.bfloat16, None): 16,  # rounded stochastically
    (torch.bfloat16, torch.int8): 24,
    (torch.bfloat16, torch.int16): 32,
    (torch.float32, None): 32,
}
"""Types of the weight and of its correction -> bits of the master weight."""


class TritonKernels:
    """`Kernels` in Triton, on one device.

    A kernel that can't be compiled or launched leaves its work to others from then on, with one warning.

    Args:
        device: whose memory the tensors are in; a CPU's where Triton's interpreter is on.
        otherwise: does what these kernels can't.
    """

    grouped_below = 2**20  # a launch costs about what stepping as many elements does: 3 to 5 microseconds
    piece = 2**23  # few enough that many are on their way, and enough that a launch takes no time
    folds = True

    def __init__(self, device: torch.device, otherwise: Kernels) -> None:
        self.device = device
        self.otherwise = otherwise
        self._broken: set[str] = set()

    def serves(self, layout: Layout) -> bool:
        """Return whether pieces of a layout are stepped here: not those with moments of 4 bits."""
        types = dict(layout)
        moments = (types["exp_avg"], types["exp_avg_sq"])
        has_codes = moments == (torch.int8, torch.uint8)
        has_scales = "exp_avg_scale" in types and "exp_avg_sq_scale" in types
        return (
            (types["weight"], types.get("correction")) in _MASTERS
            and types["grad"] in _GRADIENTS
            and (has_codes or moments == (torch.float32, torch.float32))
            and has_codes == has_scales
        )

    def reads_host(self, piece: Piece) -> bool:
        """Return that host tensors have to be brought to the device."""
        return False

    def partials_of(self, numel: int) -> int:
        """Return how many norms are taken of so many elements."""
        return -(-numel // PER_PARTIAL)

    def step(self, pieces: Sequence[Piece], control: Control) -> None:
        """Step pieces, all of one layout, in place."""
        pieces = [piece for piece in pieces if piece.tensors["weight"].numel()]
        if not pieces:
            return
        name = "step_one" if len(pieces) == 1 else "step_many"
        if not self.serves(pieces[0].layout) or not self._runs(name, lambda: _step(pieces, control, self.device)):
            # as the kernels do, where something is stepped
            for piece, worst in zip(pieces, greatest([piece.tensors["grad"] for piece in pieces]), strict=True):
                wrong = worst.isfinite().logical_not() & control.scale.isfinite()
                control.not_finite[piece.index].bitwise_or_(wrong.int())
            self.otherwise.step(pieces, control)

    def add(self, sums: Sequence[Sum], control: Control) -> None:
        """Add gradients of one type to totals of one type, and measure what that makes."""
        alike: dict[tuple[bool, bool], list[Sum]] = {}
        for each in sums:
            if each.gradient.numel():
                alike.setdefault((each.total is None, each.partials is None), []).append(each)
        for chosen in alike.values():
            name = "add_one" if len(chosen) == 1 else "add_many"
            launch = functools.partial(_add, chosen, control, self.device)
            if not _is_served(chosen[0]) or not self._runs(name, launch):
                for each in chosen:
                    if each.partials is not None:
                        each.partials.zero_()  # others write one norm
                self.otherwise.add(chosen, control)

    def _runs(self, name: str, launch: Callable[[], None]) -> bool:
        """Return whether a kernel was launched: not if that failed, now or before. Then no memory was written."""
        if name in self._broken:
            return False
        try:
            launch()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton's, ptxas's, the C compiler's, the driver's: they share no class
            self._broken.add(name)
            words = str(error).strip().splitlines()
            warnings.warn(
                f"the Triton kernel {name} does not run on {_name_of(self.device)}, and torch's operators take several"
                f" times as long: {type(error).__name__}: {words[-1] if words else 'no message'}",
                stacklevel=4,
            )
            return False
        return True


def kernels(device: torch.device, otherwise: Kernels) -> TritonKernels | None:
    """Return the kernels of a device, or None where there are none: no Triton, no CUDA, or too old a device."""
    if device.type != "cuda" or torch.version.hip is not None or not is_installed("triton"):
        return None
    return TritonKernels(device, otherwise) if torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY else None


def _is_served(one: Sum) -> bool:
    """Return whether sums like this are added up here: not those of 64 bits."""
    tensors = (one.gradient, one.total, one.partials)
    return all(tensor is None or tensor.dtype in _GRADIENTS for tensor in tensors)


def _step(pieces: Sequence[Piece], control: Control, device: torch.device) -> None:
    source = _functions()
    types = dict(pieces[0].layout)
    master = (types["weight"], types.get("correction"))
    has_codes = "exp_avg_scale" in types
    per_program = ROWS * BLOCK
    variant: dict[str, Any] = {
        "BITS": _MASTERS[master],
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
    entries, owners = _uploaded(table, programs, 7, device)
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
    """Return the fp32 numbers of steps as the kernels have them, of shape (pieces, 9)."""
    numbers = np.array([_NUMBERS_OF(piece.scalars) for piece in pieces], np.float32)
    after = _NUMBERS.index("correction2") + 1
    return np.insert(numbers, after, 1 / numbers[:, after - 1], axis=1)


def _add(sums: Sequence[Sum], control: Control, device: torch.device) -> None:
    source = _functions()
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
    entries, owners = _uploaded(table, programs, 3, device)
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


def _uploaded(table: Any, programs: Sequence[int], column: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a table on the device, and which of its rows each program belongs to, by one copy.

    Args:
        table: int64, of shape (pieces, columns).
        programs: of each piece.
        column: of the table, which becomes the first program of each piece.
        device: where they are wanted.
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
    """Return the lower 32 bits as an int32 has them."""
    return (number + 2**31) % 2**32 - 2**31


def _triton_type(dtype: torch.dtype | None) -> Any:
    """Return Triton's type of torch's, of the same name but for float16 and the like."""
    if dtype is None:
        return None
    names = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
    names |= {torch.int8: "int8", torch.uint8: "uint8", torch.int16: "int16"}
    return getattr(importlib.import_module("triton.language"), names[dtype])


def _current(device: torch.device) -> Any:
    """Return a context in which a device is CUDA's current one, on which Triton launches."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def _functions() -> ModuleType:
    """Return the module of the kernels; importing it imports Triton."""
    return importlib.import_module("lightning_solo.optim.adamw_triton")


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
