"""Master weights in two parts for any optimizer of torch that steps each parameter by itself: SGD, NAdam, Adafactor...

A parameter is bf16, 2 bytes, and its correction takes 1 or 2 more. In a step the two are joined to the fp32 master,
torch's own optimizer steps the master with an fp32 gradient, and the result is split again. So at most one parameter
exists in fp32. The optimizer's own states stay in fp32. SGD with momentum takes 2 + 1 + 4 = 7 bytes per parameter
instead of 4 + 4 = 8, and NAdam 2 + 1 + 8 = 11 instead of 12; the gradient takes 2 instead of 4.

With ``master_bits=32`` training equals the optimizer in fp32 with a forward in bf16, bit for bit.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.errors import CheckpointError, ConflictError
from lightning_solo.memory.sharded_tensors import local, span
from lightning_solo.optim import memory_order
from lightning_solo.optim.adamw_state_dict import WEIGHTS_ALONE
from lightning_solo.optim.adamw_update import CHUNK
from lightning_solo.optim.back_end_facts import SETTINGS
from lightning_solo.optim.compressed_moments import BLOCK, blocks
from lightning_solo.optim.gradient_checks import require_finite
from lightning_solo.optim.memory_order import in_memory_order
from lightning_solo.optim.param_groups import load_groups, name_in, parameters_of, saved_states, with_hooks
from lightning_solo.optim.random_numbers import seed_of, uniform
from lightning_solo.optim.split_optimizer import SplitOptimizer
from lightning_solo.optim.split_weights import joined, round_stochastically, split_again
from lightning_solo.optim.torch_optimizers import ONE_BY_ONE, SERVED, state_bytes
from lightning_solo.units import format_bytes

_OURS = ("correction", "updates")  # states that the optimizer itself must not see


class MasterWeights(SplitOptimizer):
    """A torch optimizer on split master weights; ``param_groups``, schedulers and checkpoints work as before.

    It takes over the groups of the optimizer, which must not be stepped any more.

    Args:
        optimizer: a torch optimizer that steps each parameter by itself, of bf16 and fp32 parameters.
        master_bits: 32, 24 or "16-stochastic". fp32 parameters stay fp32 with 32; otherwise they become bf16 in place.
            To split them into 2 + 2 bytes, call `split_parameters` first.
        corrections: of split bf16 parameters, as `split_parameters` returns them. If given, fp32 parameters stay fp32.

    Raises:
        ConflictError: the optimizer isn't known to step each parameter by itself, or is differentiable.
        PresetError: a value isn't allowed; a parameter isn't fp32 or bf16, or has gaps in memory; a correction is of
            other bits.

    >>> layer = nn.Linear(512, 512)
    >>> optimizer = MasterWeights(torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9))
    >>> layer.weight.dtype, optimizer.bytes_per_parameter  # 2 + 1, and a momentum of 4
    (torch.bfloat16, 7.0)
    """

    _KEPT = (*SplitOptimizer._KEPT, "_inner")

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
        self._init_masters(master_bits, corrections)
        self._inner = copy.copy(optimizer)  # without hooks of the step, which are for a whole one
        self._inner.param_groups, self._inner.state = [], defaultdict(dict)
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        for p, state in optimizer.state.items():
            if float(state.get("step", 1)) > 0:  # Adagrad has states before its first step, in bf16
                self.state[p] |= {name: _kept(value) for name, value in state.items()}
        optimizer.state.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its fp32 parameters become bf16 where ``master_bits`` requires it."""
        if param_group.get("differentiable", self.defaults.get("differentiable")):
            kind = type(self._inner).__name__
            raise ConflictError(f"MasterWeights of {kind}(differentiable=True): write differentiable=False")
        super().add_param_group(param_group)

    # --- stepping ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Raises:
            GradientError: a gradient is sparse, infinite or NaN; no parameter has been touched.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        stepped = [(p, p.grad) for p in parameters_of(self) if p.grad is not None]
        require_finite(self, stepped, self.losses)
        for p, grad in stepped:
            self.step_one(p, grad)
        return loss

    @torch.no_grad()
    def step_one(self, parameter: Tensor, gradient: Tensor, scale: float = 1.0) -> None:
        """Step one parameter with a gradient of its shape, of any floating type, times a factor."""
        group, state = self.param_groups[self._group_number(parameter)], self._started(parameter)
        ours = {name: state.pop(name) for name in _OURS if name in state}  # else the optimizer wouldn't start its own
        master = nn.Parameter(joined(parameter, ours.get("correction")))
        wide = gradient.to(torch.float32)
        master.grad = wide * scale if wide is gradient else wide.mul_(scale)  # by 1, too: a plan doesn't know the norm
        inner = self._inner
        if type(inner) is torch.optim.Adagrad and not state:  # only its constructor creates its states
            state |= torch.optim.Adagrad([master], **{name: group[name] for name in self.defaults}).state[master]
        # Adafactor has no "capturable", which torch asks each group for on a GPU
        own = {"capturable": False, **group, "params": [master]}
        inner.param_groups, inner.state = [own], defaultdict(dict, {master: state})
        try:
            inner.step()
        finally:
            inner.param_groups, inner.state = [], defaultdict(dict)
            state |= ours
        if parameter.dtype == torch.bfloat16 and parameter.numel():  # else stepped in place
            self._set(parameter, master.detach())

    def _started(self, p: Tensor) -> dict[str, Any]:
        state = self._with_correction(p)
        if p.dtype == torch.bfloat16 and isinstance(self.master_bits, str):
            state["updates"] = state.get("updates", 0) + 1  # selects the random numbers
        return state

    def _set(self, p: Tensor, master: Tensor) -> None:
        state = self.state[p]
        if "correction" in state:
            split_again(p, master, state["correction"])
            return
        # detached, not .data: a backward that still needs the weight then knows that it has changed
        weight, flat = in_memory_order(p.detach()), in_memory_order(master, p.detach())
        seed = seed_of(state["updates"], self._numbers[p], purpose=1)
        first_row = span(p)[0] // BLOCK
        for part in memory_order.chunks(flat.numel(), CHUNK.get(p.device.type, CHUNK["cuda"])):  # each of whole blocks
            size = flat[part].numel()
            random = uniform(blocks(size), BLOCK, first_row + part.start // BLOCK, seed, p.device)
            weight[part].copy_(round_stochastically(flat[part], random.view(-1)[:size]))

    # --- states ---

    def _with_correction(self, p: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        kind = self._correction_type(p)
        if kind is not None and "correction" not in state:
            state["correction"] = torch.zeros(local(p).numel(), dtype=kind, device=p.device)
        return state

    @torch.no_grad()
    def set_master_weight(self, parameter: Tensor, master: Tensor) -> None:
        """Set a bf16 parameter and its correction from an fp32 master weight; do nothing for others."""
        if parameter in self._numbers and self._correction_type(parameter) is not None:
            split_again(parameter, master, self._with_correction(parameter)["correction"])

    @property
    def state_bytes(self) -> int:
        """Bytes of the corrections and of the optimizer's own states, without step counts."""
        kinds = ((p, self._correction_type(p)) for p in self._numbers)
        return state_bytes(self) + sum(local(p).numel() * kind.itemsize for p, kind in kinds if kind is not None)

    def summary(self) -> str:
        """Describe in one line the bytes of the corrections and the optimizer's own states."""
        states, kind, total = state_bytes(self), type(self._inner).__name__, self.state_bytes
        each = total / max(1, sum(local(p).numel() for p in self._numbers))
        of_them = f"{kind}'s own, in fp32, {format_bytes(states)}" if states else f"{kind} keeps none"
        return f"{each:.2f} bytes per parameter: {format_bytes(total)} on the device; {of_them}"

    # --- checkpoints ---

    @with_hooks
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of this optimizer, or of torch's own of the same class, bit for bit.

        A file with fp32 weights has no corrections; the optimizer then keeps its own.

        Raises:
            CheckpointError: groups, bits or the optimizer's class differ; nothing has been changed.
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
        if correction is not None and (correction.numel(), correction.dtype) != (
            local(p).numel(),
            self._correction_type(p),
        ):
            raise CheckpointError(
                f"the states of {name_in(self, p)}: a correction of {correction.numel()} numbers of"
                f" {correction.itemsize} bytes in the file; resume with the {SETTINGS}.master_bits of the run that"
                f" saved it, or {WEIGHTS_ALONE}"
            )
        return {**state, **kept}


def _kept(value: Any) -> Any:
    """Return a state as it is stored: bf16 numbers become fp32."""
    return value.to(torch.float32) if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
