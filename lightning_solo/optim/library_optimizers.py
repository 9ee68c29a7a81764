"""Subclasses of other libraries' optimizers that fix lost precision and the loading of states."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.bitsandbytes_operators import bitsandbytes
from lightning_solo.errors import CheckpointError
from lightning_solo.optim.back_end_facts import BACK_ENDS, OPTION
from lightning_solo.optim.param_groups import name_in, saved_states


@functools.cache
def optimizer_class(back_end: str, decoupled: bool) -> Any:
    """Return the optimizer class of one of `BACK_ENDS`, with or without decoupled weight decay."""
    if back_end == "flashoptim":
        import flashoptim

        return flashoptim.FlashAdamW if decoupled else flashoptim.FlashAdam
    if back_end.startswith("bitsandbytes"):
        paged = BACK_ENDS[back_end].paged_from is not None
        return _bitsandbytes_class(getattr(bitsandbytes().optim, "PagedAdamW8bit" if paged else "AdamW8bit"))
    import torchao.optim

    bits = BACK_ENDS[back_end].moment_bits
    return _torchao_class(getattr(torchao.optim, f"{'AdamW' if decoupled else 'Adam'}{bits}bit"))


def _torchao_class(base: Any) -> Any:
    """Return torchao's class with fixes: uncompressed states in fp32, also when loaded, and any kind of lr."""
    base_step = inspect.unwrap(base.step)  # torch wraps it in hooks of the step, which would run twice

    class OfTorchao(base):  # type: ignore[misc]
        def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
            buffer: Tensor = super()._new_buffer(p, signed)
            return buffer.float() if type(buffer) in (Tensor, torch.nn.Parameter) else buffer

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:  # a number, set by a user or from a file, would be refused
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
            return base_step(self, closure)

        def state_dict(self) -> dict[str, Any]:
            """Return plain tensors, since Lightning can't load a file with torchao's tensor class."""
            state_dict: dict[str, Any] = super().state_dict()
            states = state_dict["state"].items()
            parts = {key: {name: _parts(value) for name, value in state.items()} for key, state in states}
            return {**state_dict, "state": parts}

        @torch.no_grad()
        def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
            """Load states without torch's cast to the weights' type; compress the moments of torch's own AdamW."""
            loaded = {p: self._loaded(p, state) for p, state in saved_states(self, state_dict).items() if state}
            super().load_state_dict({**state_dict, "state": {}})
            self.state.clear()
            self.state.update(loaded)

        def _loaded(self, p: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
            _require_state(self, p, state, {"step", "exp_avg", "exp_avg_sq"})
            loaded = {"step": torch.as_tensor(state["step"], dtype=torch.float32).cpu().clone()}
            for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                loaded[name], saved = self._new_buffer(p, signed), state[name]
                if isinstance(saved, Tensor) and saved.shape == p.shape:
                    loaded[name].copy_(saved.to(p.device))
                    continue
                parts = _parts(loaded[name])
                if not (isinstance(parts, dict) and _sizes(parts) == _sizes(saved)):
                    raise CheckpointError(
                        f"the states of {name_in(self, p)}: {name} of {_sizes(saved)} in the file, of {_sizes(parts)}"
                        f" here; resume with the {OPTION} of the run that saved them"
                    )
                for part, tensor in parts.items():
                    tensor.copy_(saved[part])
            return loaded

    OfTorchao.__name__ = OfTorchao.__qualname__ = base.__name__
    return OfTorchao


def _parts(value: Any) -> Any:
    """Return the codes and scales of a torchao state; another state unchanged."""
    return {"codes": value.codes, "scale": value.scale} if hasattr(value, "codes") else value


def _sizes(value: Any) -> Any:
    parts = value.items() if isinstance(value, dict) else (("numbers", value),)
    return {name: list(tensor.shape) for name, tensor in parts}


def _bitsandbytes_class(base: Any) -> Any:
    """Return bitsandbytes' class, with a check that refuses the states of another optimizer by name."""

    class OfBitsandbytes(base):  # type: ignore[misc]
        def load_state_dict(self, state_dict: Mapping[str, Any], move_to_device: bool = True) -> None:
            for p, state in saved_states(self, state_dict).items():
                if state:
                    wrapped = state.get(base._FSDP_WRAPPED_QUANT_STATE_KEY, {})
                    _require_state(self, p, {**state, **wrapped}, {"step", "state1", "state2"})
            super().load_state_dict(state_dict, move_to_device)

    OfBitsandbytes.__name__ = OfBitsandbytes.__qualname__ = base.__name__
    return OfBitsandbytes


def _require_state(optimizer: Optimizer, p: Tensor, state: Mapping[str, Any], names: set[str]) -> None:
    if missing := names - set(state):
        raise CheckpointError(
            f"the states of {name_in(optimizer, p)} in the file have {', '.join(sorted(state))}, and no"
            f" {', '.join(sorted(missing))}: they are of another optimizer; resume with the {OPTION} of the"
            " run that saved them"
        )
