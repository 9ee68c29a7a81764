"""Master weights in two parts for any optimizer of torch that steps each parameter by itself: SGD, NAdam, Adafactor...

A parameter is bf16, 2 bytes, and its correction 1 or 2 more. To step it the two are joined to the fp32 master, which
torch's own optimizer steps with an fp32 gradient, alone; the result is split again. So there is never more than one
parameter in fp32. The optimizer's states stay what they are to it, in fp32: SGD with momentum takes 2 + 1 + 4 = 7 bytes
per parameter instead of 4 + 4 = 8 and a gradient of 4, NAdam 2 + 1 + 8 = 11 instead of 12 and 4.

With ``master_bits=32`` it is the optimizer in fp32 with a forward in bf16, bit for bit.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.errors import CheckpointError, ConflictError, PresetError
from lightning_solo.optim import memory_order
from lightning_solo.optim.adamw_state_dict import WEIGHTS_ALONE
from lightning_solo.optim.adamw_update import CHUNK
from lightning_solo.optim.back_end_facts import SETTINGS
from lightning_solo.optim.compressed_moments import BLOCK, blocks
from lightning_solo.optim.gradient_checks import require_finite
from lightning_solo.optim.memory_order import in_memory_order, is_dense
from lightning_solo.optim.param_groups import load_groups, name_in, names_of, saved_states, with_hooks
from lightning_solo.optim.random_numbers import seed_of, uniform
from lightning_solo.optim.split_weights import (
    CORRECTIONS,
    MASTER_BITS,
    STOCHASTIC,
    bits_of,
    join,
    round_stochastically,
    split,
    split_parameters,
)
from lightning_solo.optim.torch_optimizers import ONE_BY_ONE, SERVED, state_bytes
from lightning_solo.units import format_bytes

_OURS = ("correction", "updates")  # beside the optimizer's own states, which must not see them
_KEPT = ("master_bits", "_inner", "_numbers", "_corrections", "_splits")


class MasterWeights(Optimizer):
    """A torch optimizer on split master weights; ``param_groups``, schedulers and checkpoints work as before.

    It takes over the groups of the optimizer, which is not to be stepped any more.

    Args:
        optimizer: one of torch's that step each parameter by itself; over bf16 and fp32 parameters.
        master_bits: 32, 24 or "16-stochastic". fp32 parameters become bf16 here, in place, but with 32; to split them
            into 2 + 2 bytes, call `split_parameters` first.
        corrections: of bf16 parameters that were split, as `split_parameters` returns them; with them, fp32
            parameters stay as they are.

    Raises:
        ConflictError: another optimizer, or one that is to be differentiated.
        PresetError: a value that is none of those allowed; a correction of other bits; parameters that are not fp32 or
            bf16, or have gaps in memory.

    >>> layer = nn.Linear(512, 512)
    >>> optimizer = MasterWeights(torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9))
    >>> layer.weight.dtype, optimizer.bytes_per_parameter  # 2 + 1, and a momentum of 4
    (torch.bfloat16, 7.0)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        master_bits: int | str = 24,
        corrections: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        kind = type(optimizer)
        if kind not in SERVED:
            raise ConflictError(
                f"MasterWeights of {kind.__module__}.{kind.__name__}: known to step each parameter by itself are"
                f" torch's {', '.join(ONE_BY_ONE)}; write one of those"
            )
        if master_bits not in MASTER_BITS:
            raise PresetError(f"MasterWeights: master_bits={master_bits!r}: write 32, 24 or {STOCHASTIC!r}")
        self.master_bits = master_bits
        self._numbers: dict[Tensor, int] = {}  # number of each parameter
        self._corrections = dict(corrections or {})  # of parameters that are yet to be added
        self._splits = corrections is None and master_bits != 32
        self._inner = copy.copy(optimizer)  # without hooks of the step, which are for a whole one
        self._inner.param_groups, self._inner.state = [], defaultdict(dict)
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        for p, state in optimizer.state.items():
            if float(state.get("step", 1)) > 0:  # Adagrad has states before its first step, in bf16
                self.state[p] |= {name: _kept(value) for name, value in state.items()}
        optimizer.state.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose parameters are made bf16 where ``master_bits`` says so."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group.get("differentiable"):
            kind = type(self._inner).__name__
            raise ConflictError(f"MasterWeights of {kind}(differentiable=True): write differentiable=False")
        for name, p in zip(names_of(group, len(self._numbers)), group["params"], strict=True):
            if p.dtype not in (torch.float32, torch.bfloat16) or not is_dense(p):
                kind = str(p.dtype).removeprefix("torch.") + ("" if is_dense(p) else ", with gaps in memory")
                raise PresetError(f"MasterWeights: {name} is {kind}; parameters are float32 or bfloat16, and dense")
            self._numbers[p] = len(self._numbers)
            if self._splits:
                self._corrections |= split_parameters([p], self.master_bits)
            if p in self._corrections:
                self.set_correction(p, self._corrections.pop(p))

    def __getstate__(self) -> dict[str, Any]:  # torch's leaves out what it doesn't know
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in _KEPT}}

    # --- stepping ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Raises:
            GradientError: a gradient is sparse, infinite or NaN; no parameter has been touched.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        require_finite(self, ((p, p.grad) for _, p in stepped))
        for group, p in stepped:
            self._step_in(group, p, p.grad, 1.0)
        return loss

    @torch.no_grad()
    def step_one(self, parameter: Tensor, gradient: Tensor, scale: float = 1.0) -> None:
        """Step one parameter with a gradient of its shape, of any floating type, times a factor."""
        group = next(group for group in self.param_groups if any(p is parameter for p in group["params"]))
        self._step_in(group, parameter, gradient, scale)

    def _step_in(self, group: dict[str, Any], p: Tensor, gradient: Tensor, scale: float) -> None:
        state = self._started(p)
        ours = {name: state.pop(name) for name in _OURS if name in state}  # else the optimizer wouldn't start its own
        master = nn.Parameter(_joined(p, ours.get("correction")))
        wide = gradient.to(torch.float32)
        master.grad = wide * scale if wide is gradient else wide.mul_(scale)  # by 1, too: a plan doesn't know the norm
        inner = self._inner
        if type(inner) is torch.optim.Adagrad and not state:  # the one whose constructor starts its states
            state |= torch.optim.Adagrad([master], **{name: group[name] for name in self.defaults}).state[master]
        # Adafactor has no "capturable", which torch asks each group for on a GPU
        own = {"capturable": False, **group, "params": [master]}
        inner.param_groups, inner.state = [own], defaultdict(dict, {master: state})
        try:
            inner.step()
        finally:
            inner.param_groups, inner.state = [], defaultdict(dict)
            state |= ours
        self._split(p, master.detach())

    def _started(self, p: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        kind = self._correction_type(p)
        if kind is not None and "correction" not in state:
            state["correction"] = torch.zeros(p.numel(), dtype=kind, device=p.device)
        if p.dtype == torch.bfloat16 and isinstance(self.master_bits, str):
            state["updates"] = state.get("updates", 0) + 1  # which random numbers are next
        return state

    def _split(self, p: Tensor, master: Tensor) -> None:
        if p.dtype == torch.float32 or not p.numel():  # stepped in place
            return
        state, flat = self.state[p], in_memory_order(master, p.detach())
        # detached, not .data: a backward that still needs the weight then knows that it has changed
        weight, seed = in_memory_order(p.detach()), seed_of(state.get("updates", 0), self._numbers[p], purpose=1)
        for part in _chunks(p):
            if "correction" in state:
                upper, lower = split(flat[part], bits_of(state["correction"]))
                state["correction"][part].copy_(lower)
            else:
                size = flat[part].numel()
                random = uniform(blocks(size), BLOCK, part.start // BLOCK, seed, p.device)
                upper = round_stochastically(flat[part], random.view(-1)[:size])
            weight[part].copy_(upper)

    # --- states ---

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of weights and optimizer states per parameter, without gradients."""
        total = sum(p.nbytes for p in self._numbers) + self._corrections_bytes() + state_bytes(self)
        return total / max(1, sum(p.numel() for p in self._numbers))

    def _corrections_bytes(self) -> int:
        kinds = ((p, self._correction_type(p)) for p in self._numbers)
        return sum(p.numel() * kind.itemsize for p, kind in kinds if kind is not None)

    def summary(self) -> str:
        """Describe in one line the bytes of the corrections and the optimizer's own states."""
        states, kind = state_bytes(self), type(self._inner).__name__
        total = states + self._corrections_bytes()
        each = total / max(1, sum(p.numel() for p in self._numbers))
        of_them = f"{kind}'s own, in fp32, {format_bytes(states)}" if states else f"{kind} keeps none"
        return f"{each:.2f} bytes per parameter: {format_bytes(total)} on the device; {of_them}"

    @torch.no_grad()
    def master_weight(self, parameter: Tensor) -> Tensor:
        """Return a parameter's master weight, fp32, of its shape."""
        correction = self.state[parameter].get("correction") if parameter in self.state else None
        master = _joined(parameter, correction)
        return master.clone() if master.data_ptr() == parameter.data_ptr() else master

    @torch.no_grad()
    def set_master_weight(self, parameter: Tensor, master: Tensor) -> None:
        """Set a bf16 parameter and its correction from an fp32 master weight; do nothing if it isn't split."""
        if "correction" in self.state.get(parameter, {}):
            self._split(parameter, master.to(parameter.device))

    def set_correction(self, parameter: Tensor, correction: Tensor) -> None:
        """Set the correction of a bf16 parameter.

        Raises:
            PresetError: it is of other bits or another size.
        """
        if (correction.numel(), correction.dtype) != (parameter.numel(), self._correction_type(parameter)):
            raise PresetError(
                f"MasterWeights: the correction of {name_in(self, parameter)} is of {correction.numel()} numbers of"
                f" {correction.itemsize} bytes; write corrections=split_parameters(parameters, {self.master_bits!r})"
            )
        self.state[parameter]["correction"] = correction

    # --- checkpoints ---

    @with_hooks
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of this optimizer, or of torch's own of the same class, bit for bit: none is cast to bf16.

        A correction that the file lacks, since it has fp32 weights, stays.

        Raises:
            CheckpointError: other groups or bits, or another optimizer's; nothing has been touched.
        """
        switches = ("foreach", "maximize", "capturable", "differentiable", "fused")
        for number, group in enumerate(state_dict["param_groups"]):
            if missing := [name for name in self.defaults if name not in group and name not in switches]:
                raise CheckpointError(
                    f"group {number} in the file has no {missing[0]}: it is not of {type(self._inner).__name__}"
                )
        states = saved_states(self, state_dict)
        loaded = {p: self._loaded(p, group, states[p]) for group in self.param_groups for p in group["params"]}
        load_groups(self, state_dict)
        self.state.clear()
        self.state.update({p: state for p, state in loaded.items() if state})

    def _loaded(self, p: Tensor, group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        state = {name: _kept(value) for name, value in saved.items()}
        stays = () if group.get("capturable") or group.get("fused") else ("step",)  # on the host, where torch has it
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.clone() if name in stays else value.to(p.device, copy=True)
        kept = {} if "correction" in state else {n: v for n, v in self.state.get(p, {}).items() if n == "correction"}
        correction = state.get("correction")
        if correction is not None and (correction.numel(), correction.dtype) != (p.numel(), self._correction_type(p)):
            raise CheckpointError(
                f"the states of {name_in(self, p)}: a correction of {correction.numel()} numbers of"
                f" {correction.itemsize} bytes in the file; resume with the {SETTINGS}.master_bits of the run that"
                f" saved it, or {WEIGHTS_ALONE}"
            )
        return {**state, **kept}

    def _correction_type(self, p: Tensor) -> torch.dtype | None:
        is_split = p.dtype == torch.bfloat16 and isinstance(self.master_bits, int)
        return CORRECTIONS[int(self.master_bits)] if is_split else None


def _joined(p: Tensor, correction: Tensor | None) -> Tensor:
    """Return the fp32 master of a parameter; an fp32 parameter is returned itself."""
    if p.dtype == torch.float32 or correction is None:
        return p.detach().to(torch.float32)
    master = torch.empty_like(p, dtype=torch.float32, requires_grad=False)
    flat, weight = in_memory_order(master), in_memory_order(p.detach())
    for part in _chunks(p):
        flat[part].copy_(join(weight[part], correction[part]))
    return master


def _chunks(p: Tensor) -> Iterator[slice]:
    """Return parts of a flat parameter, each of whole blocks: joining and splitting take some 20 bytes per element."""
    return memory_order.chunks(p.numel(), CHUNK.get(p.device.type, CHUNK["cuda"]))


def _kept(value: Any) -> Any:
    """Return a state as it is stored: bf16 numbers become fp32."""
    return value.to(torch.float32) if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
