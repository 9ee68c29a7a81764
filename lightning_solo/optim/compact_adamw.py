"""AdamW whose model states take 5 bytes per parameter instead of 12: split master weights, moments in 8 or 4 bits.

```
master_bits      moment_bits   weight + correction + exp_avg + exp_avg_sq + scales   bytes per parameter
32               32            2 + 2 + 4 + 4                                         12        fp32 AdamW, bit for bit
24 (default)     8 (default)   2 + 1 + 1 + 1 + 0.0625                                 5.0625
16-stochastic    8             2 + 0 + 1 + 1 + 0.0625                                 4.0625
16-stochastic    4             2 + 0 + 0.5 + 0.5 + 0.0625                             3.0625
```

Gradients come on top, 2 bytes in bf16, unless `StepInBackward` frees each as it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from lightning_solo.errors import PresetError, listed
from lightning_solo.memory.sharded_tensors import local, span
from lightning_solo.optim import compressed_moments as moments
from lightning_solo.optim.adamw_state_dict import loadable_states, loaded_state, plain_state_dict
from lightning_solo.optim.adamw_states import bytes_of, correction_of, new_state, state_layout
from lightning_solo.optim.adamw_update import Hyperparameters
from lightning_solo.optim.back_end_facts import parse_state_budget
from lightning_solo.optim.compressed_moments import BLOCK
from lightning_solo.optim.device_steps import DeviceSteps, launches
from lightning_solo.optim.gradient_checks import first_not_finite, require_dense
from lightning_solo.optim.kernels import Control, Kernels, Piece, Scalars
from lightning_solo.optim.memory_order import in_memory_order
from lightning_solo.optim.operator_kernels import all_finite
from lightning_solo.optim.param_groups import load_groups, name_in, with_hooks
from lightning_solo.optim.split_optimizer import SplitOptimizer
from lightning_solo.optim.staging import Staging
from lightning_solo.optim.state_placement import StatePlacement
from lightning_solo.units import format_bytes


class CompactAdamW(SplitOptimizer):
    """AdamW, or Adam, with compact model states; ``param_groups``, schedulers and checkpoints as with torch's own.

    bf16 parameters are rounded from a master weight. The rounding error is stored as a correction; with
    ``master_bits="16-stochastic"`` rounding is random instead, with the right mean. fp32 parameters stay fp32 with
    ``master_bits=32``; otherwise they become bf16 in place. To split fp32 parameters into 2 + 2 bytes, call
    `split_parameters` first.

    Args:
        params: parameters, (name, parameter) pairs, or groups, as for any optimizer of torch.
        lr: learning rate.
        betas: of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient.
        master_bits: 32, 24 or "16-stochastic".
        moment_bits: 32, 8 or 4, which needs torchao. Parameters below 4,096 elements keep moments in fp32: see
            `uncompressed`.
        decoupled_weight_decay: False for Adam, whose weight decay is a part of the gradient.
        corrections: of split bf16 parameters, as `split_parameters` returns them. If given, fp32 parameters stay fp32.
        fused: step in one pass. On a GPU a Triton kernel does; on a CPU a C++ kernel does for moments in 8 bits; both
            round as torch's operators do. torch.compile does the rest. None: where there is a compiler, and by
            torch.compile from 16 million elements on. False: by torch's operators.
        state_budget: bytes of states that stay on the device, such as "8GiB". The others are stored in host memory and
            pass through the device in a step. "auto": the first step runs with as many states as possible on the
            host; then as many as fit into the device's free memory stay there. None: all stay. States of the first
            parameters stay first: their gradients come last in backward, when little computation is left to overlap
            with.

    Raises:
        PresetError: a value isn't allowed; a parameter isn't fp32 or bf16, or has gaps in memory; a correction is of
            other bits.

    >>> layer = torch.nn.Linear(512, 512)
    >>> optimizer = CompactAdamW(layer.parameters(), lr=1e-3)
    >>> layer.weight.dtype, round(optimizer.bytes_per_parameter, 2)  # the bias, of 512, keeps its moments in fp32
    (torch.bfloat16, 5.07)
    """

    flat_states = ("correction", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
    _KEPT = (*SplitOptimizer._KEPT, "moment_bits", "fused", "state_budget", "_layout", "_placement")
    _device_steps: DeviceSteps | None = None

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        master_bits: int | str = 24,
        moment_bits: int = 8,
        decoupled_weight_decay: bool = True,
        corrections: Mapping[Tensor, Tensor] | None = None,
        fused: bool | None = None,
        state_budget: int | str | None = None,
    ) -> None:
        hyperparameters = Hyperparameters(lr, betas, eps, weight_decay, decoupled_weight_decay)
        hyperparameters.require_valid("CompactAdamW")
        self._init_masters(master_bits, corrections)
        if moment_bits not in moments.MOMENT_BITS:
            raise PresetError(f"CompactAdamW: moment_bits={moment_bits!r}: write 32, 8 or 4")
        self.moment_bits, self.fused = moment_bits, fused
        try:
            self.state_budget = parse_state_budget(state_budget)
        except ValueError as error:
            raise PresetError(f"CompactAdamW: state_budget={error}") from None
        self._layout = partial(state_layout, master_bits=master_bits, moment_bits=moment_bits)
        self._placement = StatePlacement(self._layout, self.state_budget)
        super().__init__(params, {**vars(hyperparameters), "betas": tuple(betas)})
        if moment_bits == 4:
            moments.codebooks(torch.device("cpu"))

    def _add(self, name: str, p: Tensor) -> None:
        self._device_steps = None  # other kernels may be faster now
        self._placement.add(p)
        super()._add(name, p)

    # --- stepping ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Raises:
            BudgetError: the host has too little memory for states; before the first step.
            GradientError: a gradient is sparse, infinite or NaN; no parameter has been touched.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        pairs = [(p, local(p.grad)) for group in self.param_groups for p in group["params"] if p.grad is not None]
        require_dense(self, pairs)
        full = [grad for _, grad in pairs if grad.numel()]
        if not full:
            return loss
        finite = all_finite(full) if self.losses is None else all_finite([*full, self.losses])
        self.step_many(pairs, self.control(torch.where(finite, 1.0, torch.nan).float()))
        if bool(finite.logical_not()):  # the first time that the host waits for the device
            self.uncount(p for p, _ in pairs)
            raise first_not_finite(self, pairs)
        return loss

    @torch.no_grad()
    def step_one(self, parameter: Tensor, gradient: Tensor, scale: float = 1.0) -> None:
        """Step one parameter, with a gradient times a factor.

        Args:
            parameter: one of this optimizer's.
            gradient: of its shape, or flat in the order of its memory; of any floating type; on its device or the host.
            scale: the factor.
        """
        factor = torch.full((), scale, dtype=torch.float32, device=parameter.device) if scale != 1 else None
        self.step_many([(parameter, gradient)], self.control(factor))

    @torch.no_grad()
    def step_many(self, pairs: Iterable[tuple[Tensor, Tensor]], control: Control) -> None:
        """Step parameters with their gradients, in as few launches as possible; on a GPU without waiting for it.

        Args:
            pairs: parameters of this optimizer, and gradients as for `step_one`.
            control: by `control`. If its scale is NaN nothing is stepped, but steps are counted: see `uncount`.
        """
        groups: dict[Any, list[Piece]] = {}  # of pieces that may share a launch
        counted: list[Tensor] = []  # parameters whose step isn't launched yet
        scalars: dict[tuple[int, int], Scalars] = {}  # of groups at a step
        try:
            for p, grad in pairs:
                if not p.numel():
                    continue
                piece, on_host = self._piece(p, grad, scalars)
                counted.append(p)
                if not piece.numel:  # a process without a part of a sharded parameter
                    counted.pop()
                    continue
                if on_host and not self.kernels.reads_host(piece):
                    packed = self._placement.packed(p, piece.tensors)
                    self._steps.step_staged(piece, on_host, control, self.staging, packed)
                    counted.pop()
                else:
                    groups.setdefault((p.device, piece.layout), []).append(piece)
                if not p.is_inference():
                    torch.autograd.graph.increment_version(p)  # a backward that still needs it then knows
            for pieces in groups.values():
                for launch in launches(pieces):
                    self.kernels.step(launch, control)
                    stepped = {piece.index for piece in launch}
                    counted = [p for p in counted if self._numbers[p] not in stepped]
        except BaseException:
            self.uncount(counted)
            raise

    def _piece(self, p: Tensor, grad: Tensor, scalars: dict[tuple[int, int], Scalars]) -> tuple[Piece, list[str]]:
        """Count a parameter's step; return the whole parameter as a piece, and the names of its host tensors."""
        state, number = self._state_of(p), self._numbers[p]
        step = int(state["step"].add_(1).item())
        key = self._group_number(p), step
        if key not in scalars:
            scalars[key] = Hyperparameters.of_group(self.param_groups[key[0]]).scalars(step)
        weight = p.detach()
        flat_grad = local(grad).contiguous() if grad.dim() == 1 else in_memory_order(grad, weight)
        tensors = {"weight": in_memory_order(weight), "grad": flat_grad}
        tensors |= {name: value for name, value in state.items() if name != "step"}
        on_host = [*self.host_states.get(p, ()), *(["grad"] if self._is_away(grad, p) else [])]
        first_row = span(p)[0] // BLOCK
        return Piece(tensors, scalars[key].seeded(step, number), first_row, number), on_host

    @staticmethod
    def _is_away(gradient: Tensor, parameter: Tensor) -> bool:
        """Return whether a gradient is on the host and its parameter isn't."""
        return gradient.device != parameter.device

    def control(self, scale: Tensor | None = None, bound: float = math.inf) -> Control:
        """Return the values that steps on the device share; see `DeviceSteps.control`."""
        return self._steps.control(scale, bound)

    def uncount(self, parameters: Iterable[Tensor]) -> None:
        """Undo the count of steps that were not taken."""
        for p in parameters:
            if "step" in self._states.get(p, ()):
                self._states[p]["step"].sub_(1)

    def first_not_finite(self) -> Tensor | None:
        """Return a parameter that was stepped with a non-finite gradient, or None; waits for the device.

        Steps record this where ``kernels.folds``; the record is cleared.
        """
        number = self._device_steps.pop_not_finite() if self._device_steps is not None else None
        return None if number is None else list(self._numbers)[number]

    def forget_not_finite(self) -> None:
        """Clear the record of non-finite gradients."""
        if self._device_steps is not None:
            self._device_steps.forget_not_finite()

    @property
    def kernels(self) -> Kernels:
        """The kernels that run the steps."""
        return self._steps.kernels

    @property
    def staging(self) -> Staging:
        """The buffers through which host tensors pass the device."""
        return self._placement.staging(self._steps.device)

    @property
    def _steps(self) -> DeviceSteps:
        device = next(iter(self._numbers)).device
        if self._device_steps is None or self._device_steps.device != device:
            self._placement.follow(device)
            self._device_steps = DeviceSteps(device, len(self._numbers), self.numel, self.fused)
        return self._device_steps

    # --- states ---

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter that is being stepped."""
        self._placement.place(self._states)
        state = self._states[p]
        if "step" not in state:
            state.update(new_state(self._layout(p), p.device, {**self._placement.empty(p, state), **state}))
        self._placement.note_step(p, self._states)
        return cast("dict[str, Tensor]", self._states[p])

    @torch.no_grad()
    def place_states(self) -> None:
        """Allocate host memory for states; the first step and `load_state_dict` call it.

        Raises:
            BudgetError: the host has too little memory; none has been allocated.
        """
        self._placement.place(self._states)

    @property
    def state(self) -> Any:
        """States by parameter, as in torch's optimizers; waits for copies to the host."""
        self._placement.wait()
        return self._states

    @state.setter
    def state(self, states: Any) -> None:
        self._states = states

    def __setstate__(self, state: dict[str, Any]) -> None:  # torch's writes `state` past the property
        attributes = dict(state)
        if "state" in attributes:
            self._states = attributes.pop("state")
        super().__setstate__(attributes)

    @property
    def is_settled(self) -> bool:
        """Whether the placement of states is final; with ``state_budget="auto"`` the first step decides it."""
        return self._placement.is_settled

    @property
    def host_states(self) -> Mapping[Tensor, Mapping[str, Tensor]]:
        """Host tensors of the placed states, by parameter and name."""
        return self._placement.host

    @property
    def host_bytes(self) -> int:
        """Bytes of the placed states on the host."""
        return self._placement.host_bytes

    def replace_parameters(self, new: Mapping[Tensor, Tensor]) -> None:
        """Know parameters that were replaced in the groups; all states are then on their device."""
        super().replace_parameters(new)
        self._placement, self._device_steps = StatePlacement(self._layout, None), None

    @property
    def state_bytes(self) -> int:
        """Bytes of all states, on device and host; frozen parameters have none."""
        return sum(bytes_of(self._layout(p)) for p in self._trained)

    @property
    def _trained(self) -> list[Tensor]:
        return [p for p in self._numbers if p.requires_grad or p in self._states]

    @property
    def uncompressed(self) -> dict[str, int]:
        """Name -> bytes of the moments of small parameters, which stay in fp32."""
        if self.moment_bits == 32:
            return {}
        return {name_in(self, p): 8 * local(p).numel() for p in self._trained if p.numel() < moments.LEAST}

    def summary(self) -> str:
        """Describe in one line the bytes of the states, where they are stored, and the uncompressed parameters."""
        small, count = self.uncompressed, sum(local(p).numel() for p in self._trained)
        each = self.state_bytes / max(1, count)
        words = f"{each:.2f} bytes per parameter: {self._placement.summary(self.state_bytes)}"
        if not small:
            return words
        total = format_bytes(sum(small.values()))
        return f"{words}; moments of {len(small)} small parameters in fp32, {total}: {listed(small)}"

    # --- checkpoints ---

    @with_hooks
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of this optimizer, bit for bit, or of torch's AdamW and Adam, which are compressed.

        A parameter without a state in the file starts with a new one. A file with fp32 weights has no corrections; the
        optimizer then keeps its own.

        Raises:
            CheckpointError: groups, names, sizes or bits differ, tensors are missing, or an option of AdamW is not
                supported; nothing has been changed.
        """
        states = loadable_states(self, state_dict, self._layout)
        self.place_states()
        corrections = {p: correction_of(state) for p, state in self.state.items()}
        load_groups(self, state_dict)
        for p, saved in states.items():
            if whole := {**corrections.pop(p, {}), **saved}:
                home = self._placement.empty(p, whole)
                self._states[p] = loaded_state(p, whole, self._layout(p), home)

    @torch.no_grad()
    def adamw_state_dict(self) -> dict[str, Any]:
        """Return fp32 states in the form of torch's AdamW; load them together with `master_weight`."""
        return plain_state_dict(self)
