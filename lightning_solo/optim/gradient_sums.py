"""Keep gradients, or their fp32 sums, with their norms until a window of micro-batches ends.

They are stored on the device or in pinned memory of the host. A sum on the host passes through the device once for each
gradient that is added. Its norm is measured then, so that the end of the window needs no further pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from lightning_solo.memory import host_slabs
from lightning_solo.optim.kernels import Control, Kernels, Sum
from lightning_solo.optim.memory_order import in_memory_order
from lightning_solo.optim.operator_kernels import norm
from lightning_solo.optim.staging import Staging


class GradientSums:
    """The gradients of a window, by parameter; with ``staging`` they are flat host tensors in memory order."""

    def __init__(self, kernels: Kernels, staging: Staging | None, remedy: str) -> None:
        self._kernels, self._staging, self._remedy = kernels, staging, remedy
        self._kept: dict[Tensor, Tensor] = {}
        self._partials: dict[Tensor, Tensor] = {}  # norms of parts of what is kept
        self._bound: float | None = None  # to which it was clamped for them
        self._homes: dict[Tensor, Tensor] = {}  # on the host, from window to window

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._kept

    def __bool__(self) -> bool:
        return bool(self._kept)

    def __getitem__(self, parameter: Tensor) -> Tensor:
        return self._kept[parameter]

    def add(self, parameter: Tensor, gradient: Tensor, kind: torch.dtype, control: Control) -> None:
        """Add a gradient to the kept one, of type ``kind``. On the device a first one of this type isn't copied."""
        kept, is_first = self._kept.get(parameter), parameter not in self._kept
        if kept is None and self._staging is None and gradient.dtype == kind:
            self._kept[parameter] = gradient
            return
        if kept is None:
            kept = self._homes[parameter] if self._staging else torch.empty_like(gradient, dtype=kind)
            self._kept[parameter] = kept
        flat = in_memory_order(gradient, parameter if self._staging else kept)
        # where a gradient's norm is one number it is that of the whole one, as torch computes it, and not of its parts
        whole = self._staging is not None and not self._kernels.folds and is_first and gradient.dtype == kind
        measures = self._kernels.folds or (self._staging is not None and not whole)
        self._forget_other_bounds(control)
        self._partials.pop(parameter, None)
        for part, total, partials in self._parts(parameter, is_first=is_first):
            self._kernels.add([Sum(flat[part], total, is_first, partials if measures else None)], control)
        if whole:
            self._partials[parameter] = norm(gradient, control.bound).view(1)
        elif not measures:
            del self._partials[parameter]

    def norm(self, parameters: Iterable[Tensor], control: Control) -> Tensor:
        """Return the norm of the kept gradients, clamped to the bound; not finite if an element isn't. Doesn't wait."""
        norm: Tensor = torch.linalg.vector_norm(torch.cat(self._measured(parameters, control)))
        return norm

    def norms(self, parameters: Iterable[Tensor], control: Control) -> Tensor:
        """Return the norm of each kept gradient, in fp32, as `norm`."""
        partials = self._measured(parameters, control)
        return torch.stack([torch.linalg.vector_norm(parts).float() for parts in partials])

    def _measured(self, parameters: Iterable[Tensor], control: Control) -> list[Tensor]:
        """Return the norms of the parts of each kept gradient; measure those that are missing."""
        chosen = list(parameters)
        self._forget_other_bounds(control)
        by_type: dict[torch.dtype, list[Sum]] = {}
        for p in [p for p in chosen if p not in self._partials]:
            for _, total, partials in self._parts(p, unchanged=True):
                if self._staging is None:
                    by_type.setdefault(total.dtype, []).append(Sum(total, partials=partials))
                else:
                    self._kernels.add([Sum(total, partials=partials)], control)
        for sums in by_type.values():
            self._kernels.add(sums, control)
        return [self._partials[p] for p in chosen]

    def saved(self, parameter: Tensor) -> Tensor:
        """Return a parameter's kept gradient, in its shape, without a copy."""
        kept = self._kept[parameter]
        if self._staging is None:
            return kept
        self._staging.wait()
        return kept.as_strided(parameter.shape, parameter.stride())

    def restore(self, parameter: Tensor, saved: Tensor) -> None:
        """Keep a gradient that `saved` returned; for the host, call `allocate` first."""
        self._partials.pop(parameter, None)
        if self._staging is None:
            self._kept[parameter] = torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False).copy_(saved)
        else:
            self._kept[parameter] = self._homes[parameter].copy_(in_memory_order(saved, parameter))

    def taken(self) -> dict[Tensor, Tensor]:
        """Return the kept gradients by parameter, and forget them; on the host they stay until the next are kept."""
        taken = dict(self._kept)
        self.clear()
        return taken

    def clear(self) -> None:
        """Drop all kept gradients."""
        self._kept.clear()
        self._partials.clear()

    def allocate(self, wanted: Mapping[Tensor, torch.dtype]) -> None:
        """Allocate host memory for the sums of parameters, by their types.

        Raises:
            BudgetError: the host has too little memory.
        """
        if self._staging is None or not wanted:
            return
        self._staging.wait()
        before = sum(self._homes.pop(p).nbytes for p in wanted if p in self._homes)  # freed before others are taken
        sizes = [(p.numel(), kind) for p, kind in wanted.items()]
        host_slabs.require_host_room("gradients", sizes, self._remedy)
        homes = host_slabs.host_tensors(sizes, next(iter(wanted)).device)
        self._homes |= dict(zip(wanted, homes, strict=True))
        self._staging.serve(sum(home.nbytes for home in homes) - before)

    def has_room(self, parameter: Tensor, kind: torch.dtype) -> bool:
        """Return whether memory is allocated for a parameter's sum of this type."""
        return self._staging is None or (parameter in self._homes and self._homes[parameter].dtype == kind)

    def remove(self) -> None:
        """Drop all kept gradients, and free their memory."""
        self.clear()
        if self._staging is not None:  # it may still write what is freed
            self._staging.wait()
        self._homes.clear()

    def on_device(self, parameter: Tensor, kept: Tensor) -> Tensor:
        """Return a gradient that is or was kept on the device, in its parameter's shape; one on the host is copied."""
        if self._staging is None:
            return kept
        copy = torch.empty_like(
            parameter, dtype=torch.promote_types(kept.dtype, parameter.dtype), requires_grad=False
        )  # bf16 of an fp32 parameter is widened before it is scaled
        flat = in_memory_order(copy)
        for part in self._slices(kept):
            with self._staging.on_device({"grad": kept[part]}, unchanged=("grad",)) as staged:
                flat[part].copy_(staged["grad"])
        return copy

    def _slices(self, kept: Tensor) -> list[slice]:
        numel = kept.numel()
        size = self._kernels.piece if self._staging else max(1, numel)
        return [slice(first, min(first + size, numel)) for first in range(0, numel, size)]

    def _parts(
        self, parameter: Tensor, *, is_first: bool = False, unchanged: bool = False
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield parts of a parameter's kept gradient, flat and on the device, each with the position of its norms.

        Parts on the host are copied one at a time, and copied back before the next one.
        """
        kept = self._kept[parameter]
        parts = self._slices(kept)
        counts = [self._kernels.partials_of(part.stop - part.start) for part in parts]
        partials = self._partials.get(parameter)
        if partials is None:
            wide = torch.promote_types(kept.dtype, torch.float32)
            partials = torch.empty(sum(counts), dtype=wide, device=parameter.device)
            self._partials[parameter] = partials
        flat = kept if kept.dim() == 1 else in_memory_order(kept)
        for part, place in zip(parts, torch.split(partials, counts), strict=True):
            if self._staging is None:
                yield part, flat, place
                continue
            with self._staging.on_device(
                {"grad": flat[part]}, unread=is_first, unchanged=("grad",) if unchanged else ()
            ) as staged:
                yield part, staged["grad"], place  # as in a step, whose buffer it shares

    def _forget_other_bounds(self, control: Control) -> None:
        if self._bound != control.bound:
            self._partials.clear()
        self._bound = control.bound
