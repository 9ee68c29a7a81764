"""A module's hooks, attributes, dtypes and weights, recorded before DeepSpeed changes them and restored after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.zero.deepspeed_internals import is_deepspeeds, is_left_behind

MODULE_HOOKS = (
    "_backward_hooks",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)
# What torch notes about a hook beside it, by the hook's number -> where the hook is
HOOK_MARKS = {
    "_forward_hooks_with_kwargs": "_forward_hooks",
    "_forward_hooks_always_called": "_forward_hooks",
    "_forward_pre_hooks_with_kwargs": "_forward_pre_hooks",
}


class OriginalModule:
    """A module as it was before the engine, which can be restored.

    The engine casts the weights, moves them, registers hooks and leaves methods on each parameter, which pickling
    would follow into the engine; stage 3 empties the parameters and swaps the mapping that holds them.

    ``weights`` are the original values, on the host, of parameters whose dtype the engine changes. The fp32 masters
    start from them (DeepSpeed's own start from the 16-bit roundings), and frozen parameters get them back.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        parts: list[Any] = [*module.parameters(), *module.modules()]
        self.attributes = {part: set(vars(part)) for part in parts}
        self.dtypes: dict[Tensor, torch.dtype] = {
            tensor: tensor.dtype for tensor in (*module.parameters(), *module.buffers())
        }
        self.weights: dict[Tensor, Tensor] = {}

    def keep_weights(self, dtype: torch.dtype) -> None:
        """Keep a host copy of each parameter that the engine will cast to ``dtype``."""
        self.weights = {p: p.detach().cpu() for p in self.module.parameters() if p.dtype != dtype}

    def restore(self, weights: dict[Tensor, Tensor]) -> None:
        """Restore hooks, attributes, dtypes and weights.

        Args:
            weights: parameter -> its value, of its shape, taken from the engine before it was destroyed. Parameters
                that are missing here keep their values.
        """
        for part in self.module.modules():
            for name in MODULE_HOOKS:
                hooks = vars(part)[name]
                for key in [key for key, hook in hooks.items() if is_deepspeeds(hook)]:
                    del hooks[key]
            for marks, name in HOOK_MARKS.items():
                for key in [key for key in vars(part)[marks] if key not in vars(part)[name]]:
                    del vars(part)[marks][key]
            parameters = vars(part)["_parameters"]
            if is_deepspeeds(parameters):
                vars(part)["_parameters"] = dict(parameters)
        for tensor, dtype in self.dtypes.items():
            value = weights.get(tensor, tensor)
            with torch.no_grad():
                # On the host, as after every run of Lightning's: stage 3 leaves empty tensors on the device.
                tensor.data = value.detach().to("cpu", dtype, copy=True)
        for part, names in self.attributes.items():
            for name in set(vars(part)) - names:
                if is_left_behind(name, vars(part)[name]):
                    delattr(part, name)
