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
# torch's marks of hooks, by the hook's number -> the dictionary of the hooks
HOOK_MARKS = {
    "_forward_hooks_with_kwargs": "_forward_hooks",
    "_forward_hooks_always_called": "_forward_hooks",
    "_forward_pre_hooks_with_kwargs": "_forward_pre_hooks",
}


class OriginalModule:
    """The state of a module before the engine, which can be restored.

    The engine casts and moves the weights, registers hooks, and leaves methods on each parameter through which pickling
    would reach the engine. Stage 3 empties the parameters and replaces the mapping that holds them.

    ``weights`` are the original values, on the host, of parameters that the engine casts to ``dtype``. The fp32 masters
    start from them, where DeepSpeed's would start from the 16-bit roundings; frozen parameters get them back.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module = module
        parts: list[Any] = [*module.parameters(), *module.modules()]
        self.attributes = {part: set(vars(part)) for part in parts}
        self.dtypes: dict[Tensor, torch.dtype] = {
            tensor: tensor.dtype for tensor in (*module.parameters(), *module.buffers())
        }
        self.weights: dict[Tensor, Tensor] = {p: p.detach().cpu() for p in module.parameters() if p.dtype != dtype}

    def restore(self, weights: dict[Tensor, Tensor]) -> None:
        """Restore hooks, attributes, dtypes and weights.

        Args:
            weights: parameter -> its value, read from the engine before it was destroyed. Other parameters keep theirs.
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
                # On the host, as after each run of Lightning. Stage 3 leaves empty tensors on the device.
                tensor.data = value.detach().to("cpu", dtype, copy=True)
        for part, names in self.attributes.items():
            for name in set(vars(part)) - names:
                if is_left_behind(name, vars(part)[name]):
                    delattr(part, name)
