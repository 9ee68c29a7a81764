"""The base of optimizers that step master weights: fp32 parameters, or bf16 parameters with a correction."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.errors import PresetError
from lightning_solo.memory.sharded_tensors import is_sharded, local
from lightning_solo.optim.memory_order import is_dense
from lightning_solo.optim.param_groups import name_in, names_of
from lightning_solo.optim.split_weights import (
    CORRECTIONS,
    MASTER_BITS,
    STOCHASTIC,
    joined,
    split_again,
    split_parameters,
)


class SplitOptimizer(Optimizer):
    """An optimizer that stores the correction of each bf16 parameter among its states.

    A derived class calls `_init_masters` before torch's constructor, which adds the groups.

    Attributes:
        losses: if given, the next step is refused unless they are finite; it is looked at with the gradients.
        weights_aside: parameter -> the weight that its correction belongs to, and the parameter's version while it has
            another weight in its place.
    """

    losses: Tensor | None = None
    weights_aside: Mapping[Tensor, tuple[Tensor, int]] = MappingProxyType({})

    flat_states: ClassVar[tuple[str, ...]] = ("correction",)
    """Names of states that are flat; of sharded parameters those of this process's shard."""
    _KEPT: ClassVar[tuple[str, ...]] = ("master_bits", "_numbers", "_corrections", "_splits")
    """Attributes that a copy has besides those of torch's optimizers."""
    _group_sizes: tuple[int, ...] = ()  # for which `_group_numbers` was computed
    _group_numbers: Mapping[Tensor, int] = {}  # number of each parameter's group

    def _init_masters(self, master_bits: int | str, corrections: Mapping[Tensor, Tensor] | None) -> None:
        if master_bits not in MASTER_BITS:
            raise PresetError(f"{type(self).__name__}: master_bits={master_bits!r}: write 32, 24 or {STOCHASTIC!r}")
        self.master_bits = master_bits
        self._numbers: dict[Tensor, int] = {}  # number of each parameter
        self._corrections = dict(corrections or {})  # of parameters that will be added
        self._splits = corrections is None and master_bits != 32

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its fp32 parameters become bf16 where ``master_bits`` requires it."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name, p in zip(names_of(group, len(self._numbers)), group["params"], strict=True):
            self._add(name, p)

    def _add(self, name: str, p: Tensor) -> None:
        if p.dtype not in (torch.float32, torch.bfloat16) or p.is_sparse:
            kind = "sparse" if p.is_sparse else str(p.dtype).removeprefix("torch.")
            raise PresetError(f"{type(self).__name__}: {name} is {kind}; parameters are float32 or bfloat16")
        if not is_dense(p):
            raise PresetError(
                f"{type(self).__name__}: {name} has gaps in memory, or overlaps itself; write nn.Parameter(x.clone())"
                " for its tensor x"
            )
        self._numbers[p] = len(self._numbers)
        if self._splits and is_sharded(p):
            raise PresetError(
                f"{type(self).__name__}: {name} is sharded, and can't become bf16 any more; write master_bits=32, or"
                " torch.optim.AdamW with +callback=compact_states, which splits weights before they are sharded"
            )
        if self._splits:
            self._corrections |= split_parameters([p], self.master_bits)
        if p in self._corrections:
            self.set_correction(p, self._corrections.pop(p))

    def __getstate__(self) -> dict[str, Any]:  # torch's leaves out unknown attributes
        return {**super().__getstate__(), **{name: vars(self)[name] for name in self._KEPT}}

    def _group_number(self, parameter: Tensor) -> int:
        sizes = tuple(len(group["params"]) for group in self.param_groups)
        if sizes != self._group_sizes:  # groups come and go, as under BaseFinetuning
            self._group_sizes = sizes
            self._group_numbers = {p: n for n, group in enumerate(self.param_groups) for p in group["params"]}
        return self._group_numbers[parameter]

    def _correction_type(self, p: Tensor) -> torch.dtype | None:
        has_correction = p.dtype == torch.bfloat16 and isinstance(self.master_bits, int)
        return CORRECTIONS[int(self.master_bits)] if has_correction else None

    def bits_of(self, p: Tensor) -> int:
        """Return the bits of a parameter's master weight: 16 for a bf16 parameter without a correction."""
        kind = self._correction_type(p)
        return 8 * (p.element_size() + (kind.itemsize if kind is not None else 0))

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(p.numel() for p in self._numbers)

    @property
    def state_bytes(self) -> int:
        """Bytes of all states, without step counts."""
        raise NotImplementedError

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of weights and optimizer states per parameter, without gradients."""
        return (sum(p.nbytes for p in self._numbers) + self.state_bytes) / max(1, self.numel)

    @torch.no_grad()
    def master_weight(self, parameter: Tensor) -> Tensor:
        """Return a parameter's master weight, fp32, in its shape; for an fp32 parameter a view of itself."""
        weight, version = self.weights_aside.get(parameter, (parameter, -1))
        return joined(
            weight if parameter._version == version else parameter, self.state.get(parameter, {}).get("correction")
        )

    @torch.no_grad()
    def set_master_weight(self, parameter: Tensor, master: Tensor) -> None:
        """Set a bf16 parameter and its correction from an fp32 master weight; do nothing if it isn't split."""
        correction = self.state.get(parameter, {}).get("correction")
        if correction is not None:
            split_again(parameter, master, correction)

    def set_correction(self, parameter: Tensor, correction: Tensor) -> None:
        """Set the correction of a bf16 parameter.

        Raises:
            PresetError: it is of other bits or another size.
        """
        if (correction.numel(), correction.dtype) != (local(parameter).numel(), self._correction_type(parameter)):
            raise PresetError(
                f"{type(self).__name__}: the correction of {name_in(self, parameter)} has {correction.numel()} numbers"
                f" of {correction.itemsize} bytes; write"
                f" corrections=split_parameters(parameters, {self.master_bits!r})"
            )
        self.state[parameter]["correction"] = correction

    def replace_parameters(self, new: Mapping[Tensor, Tensor]) -> None:
        """Know parameters that were replaced in the groups; their states are the caller's."""
        self._numbers = {new.get(p, p): number for p, number in self._numbers.items()}
        self._group_sizes = ()
