"""AdamW whose model states take 5 bytes per parameter instead of 12: split master weights, moments in 8 or 4 bits.

```
master_bits      moment_bits   weight + correction + exp_avg + exp_avg_sq + scales   bytes per parameter
32               32            2 + 2 + 4 + 4                                         12        fp32 AdamW, bit for bit
24 (default)     8 (default)   2 + 1 + 1 + 1 + 0.0625                                 5.0625
16-stochastic    8             2 + 0 + 1 + 1 + 0.0625                                 4.0625
16-stochastic    4             2 + 0 + 0.5 + 0.5 + 0.0625                             3.0625
```

Gradients come on top, 2 bytes in bf16, unless `GradientRelease` frees each as it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.errors import BudgetError, CheckpointError, PresetError
from lightning_solo.optim import compressed_moments as moments
from lightning_solo.optim import host_memory, kernels
from lightning_solo.optim.adamw_states import (
    bytes_of,
    compress,
    correction_of,
    described,
    is_alike,
    is_plain,
    new_state,
    plain,
    state_layout,
)
from lightning_solo.optim.adamw_update import Hyperparameters
from lightning_solo.optim.compressed_moments import BLOCK
from lightning_solo.optim.gradient_checks import not_finite, require_dense
from lightning_solo.optim.host_memory import Staging
from lightning_solo.optim.kernels import Control, Kernels, Piece
from lightning_solo.optim.memory_order import in_memory_order, is_dense
from lightning_solo.optim.names import name_in, names_of
from lightning_solo.optim.operator_kernels import greatest
from lightning_solo.optim.split_weights import (
    MASTER_BITS,
    STOCHASTIC,
    bits_of,
    join_into,
    split_into,
    split_parameters,
)
from lightning_solo.units import format_bytes

TOGETHER = 2**26
"""Elements of parameters that are stepped by one launch."""

UNSUPPORTED = ("amsgrad", "maximize", "differentiable")
"""Rules of torch's AdamW and Adam that have no compact form."""
_OWN = (
    *("master_bits", "moment_bits", "fused", "_index", "_sizes", "_numbers", "_given", "_splits", "_numel"),
    *("state_budget", "_unplaced", "_budget_left", "is_settled", "_first", "_on_host"),
)


class CompactAdamW(Optimizer):
    """AdamW, or Adam, with compact model states; ``param_groups``, schedulers and checkpoints as with torch's own.

    bf16 parameters are rounded from a master weight: what rounding took off is kept apart, or, with
    ``master_bits="16-stochastic"``, rounding is such that the mean is right. fp32 parameters stay what they are with
    ``master_bits=32``; otherwise they become bf16 here, in place, which is what was asked for. To split fp32
    parameters into 2 + 2 bytes instead, call `split_parameters` first.

    Args:
        params: parameters, (name, parameter) pairs, or groups, as for any optimizer of torch.
        lr: learning rate.
        betas: of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient.
        master_bits: 32, 24 or "16-stochastic".
        moment_bits: 32, 8 or 4, which needs torchao. Of parameters below 4,096 elements they stay in fp32: see
            `uncompressed`.
        decoupled_weight_decay: False for Adam, whose weight decay is a part of the gradient.
        corrections: of bf16 parameters that were split, as `split_parameters` returns them; where it is given, fp32
            parameters stay what they are.
        fused: step in one pass: on a GPU by a Triton kernel; a parameter on a CPU with moments in 8 bits by a kernel
            in C++; both round as torch's operators do. Others by torch.compile. None: where there is a compiler, and
            by torch.compile from 16 million elements on; False: by torch's operators.
        state_budget: bytes of states that stay on the device; the others lie in host memory, and pass through the
            device when they are stepped. "auto": what the first step has left free; in it as much lies on the host as
            goes there. None: all stay. The first parameters' states do, for in backward their gradients come last,
            when there is little left to compute meanwhile.

    Raises:
        PresetError: a value that is none of those allowed; parameters that are not fp32 or bf16, or have gaps in
            memory; a correction of other bits.

    >>> layer = torch.nn.Linear(512, 512)
    >>> optimizer = CompactAdamW(layer.parameters(), lr=1e-3)
    >>> layer.weight.dtype, round(optimizer.bytes_per_parameter, 2)  # the bias, of 512, keeps its moments in fp32
    (torch.bfloat16, 5.07)
    """

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
        _check(lr, betas, eps, weight_decay, master_bits, moment_bits)
        require_state_budget(state_budget, "CompactAdamW: state_budget")
        self.state_budget = state_budget
        self._unplaced: list[Tensor] = []  # parameters of which it isn't decided where their states lie
        self._budget_left: int | None = None  # once states have been placed
        self.is_settled = state_budget != "auto"  # else it isn't known yet what is free
        self._first: Tensor | None = None  # that was stepped here: when it comes again, the first step is through
        self._on_host: dict[Tensor, dict[str, Tensor]] = {}
        self._staging: Staging | None = None
        self._kernels: Kernels | None = None
        self._device: torch.device | None = None  # for which those are
        self._controls: dict[float, Control] = {}  # of steps that nothing scales, by the bound of gradients
        self.master_bits, self.moment_bits, self.fused = master_bits, moment_bits, fused
        self._index: dict[Tensor, int] = {}  # number of each parameter
        self._sizes: list[int] = []  # of the groups when `_numbers` was made
        self._numbers: dict[Tensor, int] = {}  # of each parameter's group
        self._given = dict(corrections or {})  # of parameters that are yet to be added
        self._splits = corrections is None
        self._numel = 0
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)
        if moment_bits == 4:
            moments.codebooks(torch.device("cpu"))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose parameters are made bf16 where ``master_bits`` says so."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name, p in zip(names_of(group, len(self._index)), group["params"], strict=True):
            if p.dtype not in (torch.float32, torch.bfloat16) or p.is_sparse:
                kind = "sparse" if p.is_sparse else str(p.dtype).removeprefix("torch.")
                raise PresetError(f"CompactAdamW: {name} is {kind}; parameters are float32 or bfloat16")
            if not is_dense(p):
                raise PresetError(f"CompactAdamW: {name} has gaps in memory, or overlaps itself; write {name}.clone()")
            self._index[p] = len(self._index)
            self._numel += p.numel()
            self._kernels = None  # others may pay
            if self.state_budget is not None:
                self._unplaced.append(p)
            if p.dtype == torch.float32 and self.master_bits != 32 and self._splits:
                self._given |= split_parameters([p], self.master_bits)
            if p in self._given:
                self._states[p]["correction"] = self._checked(name, p, self._given.pop(p))

    def _checked(self, name: str, p: Tensor, correction: Tensor) -> Tensor:
        if self._layout(p).get("correction") != (correction.numel(), correction.dtype):
            raise PresetError(
                f"CompactAdamW: the correction of {name} is of {correction.numel()} numbers of {correction.itemsize}"
                f" bytes; write corrections=split_parameters(parameters, {self.master_bits!r})"
            )
        return correction

    def __getstate__(self) -> dict[str, Any]:  # torch's leaves out what it doesn't know
        made = {**super().__getstate__(), **{key: self.__dict__[key] for key in _OWN}}
        return {**made, "_staging": None, "_kernels": None, "_device": None, "_controls": {}}

    # --- stepping ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Raises:
            BudgetError: the host has too little memory for states; before the first step.
            GradientError: a gradient is sparse, infinite or NaN; no parameter has been touched.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = [(p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        require_dense(self, pairs)
        full = [grad for _, grad in pairs if grad.numel()]
        if not full:
            return loss
        worst = torch.stack([each.float() for each in greatest(full)]).amax()
        self.step_many(pairs, self.control(torch.where(worst.isfinite(), 1.0, torch.nan).float()))
        if bool(worst.isfinite().logical_not()):  # the first time that the host waits for the device
            self.uncount(p for p, _ in pairs)
            first = next(p for p, grad in pairs if not bool(grad.isfinite().all()))
            raise not_finite(self, first)
        return loss

    @torch.no_grad()
    def step_one(self, parameter: Tensor, gradient: Tensor, scale: float = 1.0) -> None:
        """Step one parameter, with a gradient times a factor.

        Args:
            parameter: one of this optimizer's.
            gradient: of its shape, or flat in the order of its memory; of any floating type; on its device or the host.
            scale: the factor.
        """
        same = torch.full((), scale, dtype=torch.float32, device=parameter.device) if scale != 1 else None
        self.step_many([(parameter, gradient)], self.control(same))

    @torch.no_grad()
    def step_many(self, pairs: Iterable[tuple[Tensor, Tensor]], control: Control) -> None:
        """Step parameters with their gradients, as few launches as they allow; on a GPU without waiting for it.

        Args:
            pairs: parameters of this optimizer, and gradients as for `step_one`.
            control: by `control`. Where its scale is NaN nothing is stepped, but steps are counted: see `uncount`.
        """
        together: dict[Any, list[Piece]] = {}
        counted: list[Tensor] = []  # whose step isn't launched yet
        try:
            for p, grad in pairs:
                if not p.numel():
                    continue
                piece, on_host = self._piece(p, grad)
                counted.append(p)
                if on_host and not self.kernels.reads_host(piece):
                    self._step_staged(piece, on_host, control)
                    counted.pop()
                else:
                    together.setdefault((p.device, piece.layout), []).append(piece)
                if not p.is_inference():
                    torch.autograd.graph.increment_version(p)  # a backward that still needs it then knows
            for pieces in together.values():
                for part in _launches(pieces):
                    self.kernels.step(part, control)
                    stepped = {piece.index for piece in part}
                    counted = [p for p in counted if self._index[p] not in stepped]
        except BaseException:
            self.uncount(counted)
            raise

    def control(self, scale: Tensor | None = None, bound: float = math.inf) -> Control:
        """Return what steps on the device are to share.

        Args:
            scale: factor of the gradients, fp32, on the device. None: 1.
            bound: to which gradients are clamped.
        """
        self._follow_device()
        first = next(iter(self._controls.values()), None)
        if first is None or first.not_finite.numel() != len(self._index):
            flags = torch.zeros(len(self._index), dtype=torch.int32, device=self._device)
            first = Control(torch.ones((), dtype=torch.float32, device=self._device), flags)
            self._controls = {first.bound: first}
        plain = self._controls.setdefault(bound, Control(first.scale, first.not_finite, bound))
        return plain if scale is None else Control(scale, plain.not_finite, bound)

    def uncount(self, parameters: Iterable[Tensor]) -> None:
        """Take back that steps were counted which were not taken."""
        for p in parameters:
            if "step" in self._states.get(p, ()):
                self._states[p]["step"].sub_(1)

    @property
    def kernels(self) -> Kernels:
        """What runs the steps."""
        device = self._follow_device()
        if self._kernels is None:
            self._kernels = kernels.kernels_on(device, fused=self.fused, numel=self._numel)
        return self._kernels

    @property
    def staging(self) -> Staging:
        """How tensors of the host pass through the device."""
        device = self._follow_device()
        if self._staging is None:
            self._staging = Staging(device)
            self._staging.serve(self.host_bytes)
        return self._staging

    def _follow_device(self) -> torch.device:
        """Return the device of the parameters; forget what was for another one."""
        device: torch.device = next(iter(self._index)).device
        if device != self._device:
            self._wait()
            self._device, self._kernels, self._staging = device, None, None
            self._controls.clear()
        return device

    def first_not_finite(self) -> Tensor | None:
        """Return a parameter that was stepped with a gradient that isn't finite, if there is one; waits for the device.

        Steps tell of it where ``kernels.folds``; what they have told is forgotten.
        """
        control = next(iter(self._controls.values()), None)  # they share the flags
        if control is None or not bool(control.not_finite.any()):
            return None
        first = int(control.not_finite.nonzero()[0])
        self.forget_not_finite()
        return list(self._index)[first]

    def forget_not_finite(self) -> None:
        """Forget what steps have told of gradients that aren't finite."""
        for control in [*self._controls.values()][:1]:  # they share the flags
            control.not_finite.zero_()

    def _piece(self, p: Tensor, grad: Tensor) -> tuple[Piece, list[str]]:
        """Return a whole parameter to be stepped, with the names of its tensors that are on the host."""
        group, state = self._group_of(p), self._state_of(p)
        by = Hyperparameters(
            lr=float(group["lr"]),
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )
        state["step"].add_(1)
        weight = p.detach()
        flat_grad = grad.contiguous() if grad.dim() == 1 else in_memory_order(grad, weight)
        flat = {"weight": in_memory_order(weight), "grad": flat_grad}
        flat |= {name: value for name, value in state.items() if name != "step"}
        index = self._index[p]
        on_host = [*self._on_host.get(p, ()), *(["grad"] if grad.device != p.device else [])]
        return Piece(flat, by.scalars(int(state["step"].item()), index), index=index), on_host

    def _step_staged(self, whole: Piece, on_host: Collection[str], control: Control) -> None:
        """Step a parameter piece by piece, each of which passes through the device."""
        size = self.kernels.piece // BLOCK
        for first in range(0, moments.blocks(whole.numel), size):
            part = whole.blocks(first, first + size)
            pieces = {name: part.tensors[name] for name in on_host}
            with self.staging.on_device(pieces, unchanged=("grad",)) as staged:
                self.kernels.step([replace(part, tensors={**part.tensors, **staged})], control)

    def _group_of(self, parameter: Tensor) -> dict[str, Any]:
        sizes = [len(group["params"]) for group in self.param_groups]
        if sizes != self._sizes:  # groups come and go, as under BaseFinetuning
            self._sizes = sizes
            self._numbers = {p: n for n, group in enumerate(self.param_groups) for p in group["params"]}
        return self.param_groups[self._numbers[parameter]]

    # --- states ---

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        if self._unplaced:
            self.place_states()
        state = self._states[p]
        if "step" not in state:
            state.update(new_state(self._layout(p), p.device, {**self._empty_home(p, state), **state}))
        if not self.is_settled:
            if self._first is p:  # memory has had its peak
                self._settle()
            self._first = p if self._first is None else self._first
        return cast("dict[str, Tensor]", self._states[p])

    def _layout(self, p: Tensor) -> dict[str, tuple[int, torch.dtype]]:
        return state_layout(p, self.master_bits, self.moment_bits)

    def _empty_home(self, p: Tensor, kept: Collection[str]) -> dict[str, Tensor]:
        """Return a parameter's host tensors, zero but for those that are kept."""
        home = self._on_host.get(p, {})
        return {name: tensor if name in kept else tensor.zero_() for name, tensor in home.items()}

    @torch.no_grad()
    def place_states(self) -> None:
        """Allocate what lies on the host: called by itself before the first step, and before states are loaded.

        Raises:
            BudgetError: the host has too little memory; none has been allocated.
        """
        if not self._unplaced:
            return
        parameters, self._unplaced = self._unplaced, []
        layouts = {p: self._layout(p) for p in parameters}
        if self._budget_left is None and self.state_budget == "auto":  # for now what the host has no room for
            self._budget_left = max(0, sum(map(bytes_of, layouts.values())) - host_memory.host_room())
        elif self._budget_left is None:
            self._budget_left = int(self.state_budget or 0)
        away = {}
        for p, layout in layouts.items():
            if bytes_of(layout) <= self._budget_left or p.numel() < moments.LEAST:
                self._budget_left -= bytes_of(layout)
            else:
                away[p] = layout
        tensors = [tensor for layout in away.values() for tensor in layout.values()]
        remedy = "give a larger state_budget, write moment_bits=4 or master_bits='16-stochastic'"
        try:
            host_memory.require_host_room("optimizer states", tensors, remedy)
        except BudgetError:
            self._unplaced = parameters
            raise
        made = iter(host_memory.host_tensors(tensors, parameters[0].device) if tensors else ())
        if self._staging is not None:  # gradients on the host came first
            self._staging.serve(sum(map(bytes_of, away.values())))
        for p in parameters:
            if p in away:
                self._on_host[p] = {name: next(made) for name in away[p]}
            if p in self._states:
                self._states[p] = self._put(p, self._states[p])

    def _settle(self) -> None:
        """Bring states back to the device, from the first parameter on, as long as it has room."""
        self.is_settled = True
        self._wait()
        left = _free_bytes(next(iter(self._index)).device)
        for p in [p for p in self._index if p in self._on_host]:
            left -= bytes_of(self._layout(p))
            if left < 0:
                break
            if self._staging is not None:
                self._staging.serve(-bytes_of(self._layout(p)))
            del self._on_host[p]
            self._states[p] = self._put(p, self._states[p])

    def _put(self, p: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a parameter's state in its place."""
        home = self._on_host.get(p, {})
        return {
            name: home[name].copy_(value) if name in home else value if name == "step" else value.to(p.device)
            for name, value in state.items()
        }

    @property
    def state(self) -> Any:
        """States by parameter, as of torch's optimizers; those on the host have arrived there."""
        self._wait()
        return self._states

    @state.setter
    def state(self, states: Any) -> None:
        self._states = states

    def __setstate__(self, state: dict[str, Any]) -> None:  # torch's puts it where the property can't see it
        given = dict(state)
        if "state" in given:
            self._states = given.pop("state")
        super().__setstate__(given)

    def _wait(self) -> None:
        """Let what is on its way to the host arrive, before it is read there."""
        if self._staging is not None:
            self._staging.wait()

    @property
    def state_bytes(self) -> int:
        """Bytes of all states, wherever they lie."""
        return sum(bytes_of(self._layout(p)) for p in self._index)

    @property
    def host_bytes(self) -> int:
        """Bytes of the states that lie on the host, of what has been placed."""
        return sum(tensor.nbytes for home in self._on_host.values() for tensor in home.values())

    @property
    def bytes_per_parameter(self) -> float:
        """Weights and optimizer states over the number of parameters, without gradients."""
        return (sum(p.nbytes for p in self._index) + self.state_bytes) / max(1, self._numel)

    @property
    def uncompressed(self) -> dict[str, int]:
        """Names of the parameters whose moments stay in fp32, for they are small, with the bytes of those."""
        if self.moment_bits == 32:
            return {}
        return {name_in(self, p): 8 * p.numel() for p in self._index if p.numel() < moments.LEAST}

    def summary(self) -> str:
        """Return what the states take and where they lie, and what was left uncompressed, in a line."""
        total, numel = self.state_bytes, max(1, self._numel)
        where = f"{format_bytes(total - self.host_bytes)} on the device"
        if self._unplaced:
            where = f"{format_bytes(total)}, which are placed at the first step"
        elif self.host_bytes:
            where += f", {format_bytes(self.host_bytes)} on the host"
        if not self.is_settled:
            where += ", from where comes back what is free behind the first step"
        left = self.uncompressed
        named = ", ".join(list(left)[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        small = f"; moments of {len(left)} small parameters in fp32, {format_bytes(sum(left.values()))}: {named}"
        return f"{total / numel:.2f} bytes per parameter: {where}{small if left else ''}"

    @torch.no_grad()
    def master_weight(self, parameter: Tensor) -> Tensor:
        """Return a parameter's master weight, fp32, of its shape."""
        correction = self.state[parameter].get("correction") if parameter in self.state else None
        if correction is None:
            return parameter.detach().to(torch.float32)
        made = torch.empty_like(parameter, dtype=torch.float32)
        join_into(in_memory_order(made), in_memory_order(parameter.detach()), correction.to(parameter.device))
        return made

    @torch.no_grad()
    def set_master_weight(self, parameter: Tensor, master: Tensor) -> None:
        """Set a bf16 parameter and its correction from an fp32 master weight; nothing where it isn't split."""
        state = self.state.get(parameter, {})
        if "correction" in state:
            flat = in_memory_order(master.to(parameter.device), parameter.detach())
            weight, bits = in_memory_order(parameter.detach()), bits_of(state["correction"])
            state["correction"].copy_(split_into(weight, flat, bits))

    # --- checkpoints ---

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of this optimizer, bit for bit, or of torch's AdamW and Adam, which are compressed.

        What the file has no state of starts anew. A correction that it lacks, since it has fp32 weights, stays.

        Raises:
            CheckpointError: other groups, names, sizes or bits, tensors that are missing, or a rule of AdamW's that
                this one hasn't; nothing has been touched.
        """
        _require_known(state_dict)
        saved = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        ours = list(chain.from_iterable(group["params"] for group in self.param_groups))
        _same_names(state_dict["param_groups"], self.param_groups)
        if len(saved) != len(ours):
            raise CheckpointError(f"states of {len(saved)} parameters; this optimizer has {len(ours)}")
        states = {p: state_dict["state"].get(key, {}) for key, p in zip(saved, ours, strict=True)}
        for p, state in states.items():
            self._require_loadable(p, state)
        if self._unplaced:
            self.place_states()
        corrections = {p: correction_of(state) for p, state in self.state.items()}
        try:
            super().load_state_dict({**state_dict, "state": {}})
        except ValueError as error:
            raise CheckpointError(f"states of other parameter groups: {error}") from error
        for group in self.param_groups:
            group.setdefault("decoupled_weight_decay", self.defaults["decoupled_weight_decay"])
        for p, state in states.items():
            whole = {**corrections.pop(p, {}), **state}  # a file with fp32 weights, which have been split, has none
            if whole:
                self._states[p] = self._loaded(p, whole)

    def _require_loadable(self, p: Tensor, saved: Mapping[str, Any]) -> None:
        layout = self._layout(p)
        without = {name: tensor for name, tensor in layout.items() if name != "correction"}
        only = {name: tensor for name, tensor in layout.items() if name == "correction"}
        if not any(is_alike(saved, each) for each in ({}, only, without, layout)) and not is_plain(saved, p):
            raise CheckpointError(
                f"the states of {name_in(self, p)}: {described(saved)} in the file, {described(layout)} here; build the"
                " optimizer with the master_bits and moment_bits of the file"
            )

    def _loaded(self, p: Tensor, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a copy of a saved state in its place."""
        home = self._empty_home(p, saved)
        if not set(saved) - {"correction"}:  # before its first step
            return {name: home[name].copy_(x) if home else x.to(p.device, copy=True) for name, x in saved.items()}
        made = new_state(self._layout(p), p.device, home)
        moments_of = {name: x for name, x in saved.items() if name != "correction"}
        if is_plain(moments_of, p):
            compress(made, p, moments_of)
            saved = correction_of(saved)
        for name, value in saved.items():
            made[name].copy_(value)
        return made

    @torch.no_grad()
    def adamw_state_dict(self) -> dict[str, Any]:
        """Return the states as torch's AdamW keeps them, in fp32; load them beside `master_weight`."""
        made = self.state_dict()
        every = list(chain.from_iterable(group["params"] for group in self.param_groups))
        stepped = {key: state for key, state in made["state"].items() if "step" in state}
        made["state"] = {key: plain(every[key], state) for key, state in stepped.items()}
        return made


def require_state_budget(budget: int | str | None, name: str) -> None:
    """Check where states may lie.

    Raises:
        PresetError: it is neither a number of bytes, nor "auto", nor None.
    """
    if budget is not None and budget != "auto" and (type(budget) is not int or budget < 0):
        raise PresetError(f"{name}={budget!r}: write bytes that stay on the device, 'auto' or None")


def _launches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces, as many at a time as are stepped by one launch."""
    part: list[Piece] = []
    size = 0
    for piece in pieces:
        if part and size + piece.numel > TOGETHER:
            yield part
            part, size = [], 0
        part.append(piece)
        size += piece.numel
    yield part


def _free_bytes(device: torch.device) -> int:
    """Return what of a GPU nobody has used so far, but for a twentieth of it that is left; of a CPU nothing."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - total // 20)


# --- checks ---


def _check(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, master_bits: int | str, moment_bits: int
) -> None:
    given = {"lr": float(lr), "eps": eps, "weight_decay": weight_decay}
    for name, value in given.items():
        if not value >= 0:
            raise PresetError(f"CompactAdamW: {name}={value}: write a number of at least 0")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise PresetError(f"CompactAdamW: betas={betas}: write two numbers from 0 up to, not including, 1")
    if master_bits not in MASTER_BITS:
        raise PresetError(f"CompactAdamW: master_bits={master_bits!r}: write 32, 24 or {STOCHASTIC!r}")
    if moment_bits not in moments.MOMENT_BITS:
        raise PresetError(f"CompactAdamW: moment_bits={moment_bits!r}: write 32, 8 or 4")


def _require_known(state_dict: Mapping[str, Any]) -> None:
    for name in ("state", "param_groups"):
        if name not in state_dict:
            raise CheckpointError(f"states of an optimizer without {name}: there are {', '.join(state_dict) or 'none'}")
    for number, group in enumerate(state_dict["param_groups"]):
        for name in ("params", "lr", "betas", "eps", "weight_decay"):
            if name not in group:
                raise CheckpointError(f"group {number} in the file has no {name}: it is not of AdamW or Adam")
        for name in UNSUPPORTED:
            if group.get(name):
                raise CheckpointError(f"group {number} in the file has {name}=True, which CompactAdamW has not")


def _same_names(saved: Iterable[Mapping[str, Any]], ours: Iterable[Mapping[str, Any]]) -> None:
    for theirs, own in zip(saved, ours, strict=False):
        named, here = theirs.get("param_names"), own.get("param_names")
        if named and here and list(named) != list(here):
            other = next(((a, b) for a, b in zip(named, here, strict=False) if a != b), ("more or fewer", "parameters"))
            raise CheckpointError(f"states of {other[0]} in the file where this optimizer has {other[1]}")
