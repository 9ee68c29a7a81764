"""Steps of compact states and sums of gradients on a GPU, by the kernels of `adamw_triton`, one launch per call.

No call waits for the device. Many pieces share a launch: their addresses and scalars are the rows of a table, which is
uploaded from pinned memory in one copy. Triton compiles a kernel at its first call for each layout, in some seconds,
and stores it in its cache on disk.

Differences from torch's operators on a CPU (`adamw_update.update_blocks`, not compiled):

- 8-bit codes may differ by one, as `adamw_triton` explains: of ``exp_avg_sq`` once in some 10**11 elements, of
  ``exp_avg`` not once in 3 * 10**8.
- A change of a weight below 2**-100 may differ by a unit of its last place. If ``eps`` and ``exp_avg_sq`` are both 0,
  the change is NaN; torch's is infinite if ``exp_avg`` isn't 0.
- The payload of NaN differs, and so do the codes of a block with a NaN, whose scale is NaN.
- Squares are added up in another order, which is the same every time.

torch's own operators round some products differently on a GPU than on a CPU.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence

import torch

from lightning_solo.errors import CapabilityError
from lightning_solo.machine import is_installed, open_to_others
from lightning_solo.optim import triton_launches
from lightning_solo.optim.kernels import PER_PARTIAL, Control, Kernels, Piece, Sum
from lightning_solo.optim.operator_kernels import greatest

LEAST_CAPABILITY = (8, 0)
"""Compute capability of the oldest devices with bf16 arithmetic."""

Layout = tuple[tuple[str, torch.dtype], ...]

_GRADIENTS = (torch.bfloat16, torch.float16, torch.float32)


class TritonKernels:
    """`Kernels` in Triton, on one device.

    If a kernel can't be compiled or launched, ``otherwise`` does its work from then on, after one warning.

    Args:
        device: of the tensors; the CPU under Triton's interpreter.
        otherwise: kernels for pieces that these don't support.
    """

    grouped_below = 2**20  # a launch takes as long as stepping as many elements: 3 to 5 microseconds
    grouped_bytes = 2**25
    piece = 2**23  # few enough that many are in transit, enough that the time of a launch is negligible
    folds = True

    def __init__(self, device: torch.device, otherwise: Kernels) -> None:
        self.device = device
        self.otherwise = otherwise
        self._broken: set[str] = set()

    def serves(self, layout: Layout) -> bool:
        """Return whether these kernels step pieces of a layout; they don't support 4-bit moments."""
        types = dict(layout)
        moments = (types["exp_avg"], types["exp_avg_sq"])
        has_codes = moments == (torch.int8, torch.uint8)
        has_scales = "exp_avg_scale" in types and "exp_avg_sq_scale" in types
        return (
            (types["weight"], types.get("correction")) in triton_launches.MASTERS
            and types["grad"] in _GRADIENTS
            and (has_codes or moments == (torch.float32, torch.float32))
            and has_codes == has_scales
        )

    def reads_host(self, piece: Piece) -> bool:
        """Return False: host tensors must be copied to the device."""
        return False

    def partials_of(self, numel: int) -> int:
        """Return how many partial norms ``numel`` elements have."""
        return -(-numel // PER_PARTIAL)

    def step(self, pieces: Sequence[Piece], control: Control) -> None:
        """Step pieces, all of one layout, in place."""
        pieces = [piece for piece in pieces if piece.tensors["weight"].numel()]
        if not pieces:
            return
        name = "step_one" if len(pieces) == 1 else "step_many"
        if not self.serves(pieces[0].layout) or not self._runs(
            name, lambda: triton_launches.launch_steps(pieces, control, self.device)
        ):
            # as the kernels do, where something is stepped
            for piece, worst in zip(pieces, greatest([piece.tensors["grad"] for piece in pieces]), strict=True):
                wrong = worst.isfinite().logical_not() & control.scale.isfinite()
                control.not_finite[piece.index].bitwise_or_(wrong.int())
            self.otherwise.step(pieces, control)

    def add(self, sums: Sequence[Sum], control: Control) -> None:
        """Add gradients of one type to totals of one type, and measure the sums."""
        alike: dict[tuple[bool, bool], list[Sum]] = {}
        for each in sums:
            if each.gradient.numel():
                alike.setdefault((each.total is None, each.partials is None), []).append(each)
        for chosen in alike.values():
            name = "add_one" if len(chosen) == 1 else "add_many"
            launch = functools.partial(triton_launches.launch_sums, chosen, control, self.device)
            if not _is_served(chosen[0]) or not self._runs(name, launch):
                for each in chosen:
                    if each.partials is not None:
                        each.partials.zero_()  # others write one norm
                self.otherwise.add(chosen, control)

    def _runs(self, name: str, launch: Callable[[], None]) -> bool:
        """Launch a kernel and return whether it ran. A failed launch writes no memory, and isn't tried again."""
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
    """Return the kernels of a device; None without Triton, without CUDA, or if the device is too old.

    Raises:
        CapabilityError: other users may write into the folder of compiled kernels.
    """
    if device.type != "cuda" or torch.version.hip is not None or not is_installed("triton"):
        return None
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return None
    if reason := open_to_others("TRITON_CACHE_DIR"):
        raise CapabilityError(f"compact states need Triton's compiled kernels: {reason}")
    return TritonKernels(device, otherwise)


def _is_served(one: Sum) -> bool:
    """Return whether these kernels support a sum; they don't support 64 bits."""
    tensors = (one.gradient, one.total, one.partials)
    return all(tensor is None or tensor.dtype in _GRADIENTS for tensor in tensors)


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
