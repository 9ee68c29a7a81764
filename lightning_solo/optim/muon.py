"""Muon for the matrices of a model's blocks and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_solo.errors import NothingToDoError
from lightning_solo.optim.one_by_one import require_range
from lightning_solo.optim.param_groups import require_states

FLAG = "matrices"
"""The key of a group that is stepped by Muon."""


class MuonAdamW(Optimizer):
    """torch's Muon (Jordan et al. 2024) for groups with ``matrices=True``, torch's AdamW for all others.

    `nn.parameter_groups.parameter_groups` makes such groups. Both halves use one learning rate, AdamW's: an update of
    Muon is scaled to the root mean square of one of AdamW (``match_rms_adamw``; Liu et al. 2025, arXiv 2502.16982).
    States in fp32 take 4 bytes per element of a matrix, and 8 per element of any other parameter.

    Args:
        params: groups.
        lr: learning rate.
        weight_decay: decoupled from the gradient.
        momentum: of Muon, with Nesterov's correction.
        ns_steps: of Muon's Newton-Schulz iteration.
        betas: of AdamW.
        eps: of AdamW.

    Attributes:
        takes_matrices: tells those who make groups that it needs the flag.
        steps_alone: tells `StepInBackward` that each parameter steps by itself.

    Raises:
        ValueError: an argument is out of range, or a parameter with the flag isn't a matrix.
    """

    takes_matrices = True
    steps_alone = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        empty = [torch.zeros(1, 1)]
        muon = torch.optim.Muon(empty, momentum=momentum, ns_steps=ns_steps, adjust_lr_fn="match_rms_adamw")
        self._halves: dict[bool, Optimizer] = {True: muon, False: torch.optim.AdamW(empty, betas=betas, eps=eps)}
        for half in self._halves.values():
            half.param_groups = []
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, FLAG: False})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with the options of the half that steps it."""
        own = ("lr", "weight_decay")
        options = self._halves[bool(param_group.get(FLAG))].defaults
        for name, value in options.items():
            if name not in own:
                param_group.setdefault(name, value)
        super().add_param_group(param_group)
        require_range("MuonAdamW", param_group)
        if param_group[FLAG] and (other := [tuple(p.shape) for p in param_group["params"] if p.dim() != 2]):
            raise ValueError(f"MuonAdamW: a parameter of shape {other[0]} is no matrix; put it into a group without it")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Raises:
            NothingToDoError: no group has matrices.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        if not any(group[FLAG] for group in self.param_groups):
            raise NothingToDoError(
                "MuonAdamW has no group with matrices=True; write MuonAdamW(parameter_groups(module, MuonAdamW)), by"
                " lightning_solo.nn.parameter_groups"
            )
        for is_muon, half in self._halves.items():
            half.param_groups = [group for group in self.param_groups if group[FLAG] is is_muon]
            half.state = self.state
            half.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states that were saved by this class.

        Raises:
            CheckpointError: the states are of another optimizer; nothing has been changed.
        """
        matrices = [p for group in self.param_groups if group[FLAG] for p in group["params"]]
        require_states(self, state_dict, ("momentum_buffer",), matrices)
        super().load_state_dict(state_dict)
