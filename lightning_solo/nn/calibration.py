"""The scales of layers' inputs, from batches that a module is run on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.errors import ConflictError
from lightning_solo.nn.fake_quantization import unfused_attention

LARGEST = 127
"""The largest integer to which inputs are rounded."""


def input_scales(layers: Mapping[str, nn.Module], run: Callable[[], Any]) -> dict[int, float]:
    """Return id of a layer -> largest magnitude of its inputs while a function runs the module / 127.

    A layer that isn't called, or with zeros alone, is missing. Inputs may have any number of dimensions.

    Raises:
        ConflictError: inputs of a layer aren't finite.
    """
    largest: dict[int, Tensor] = {}

    def watch(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = (args[0] if args else kwargs["input"]).detach()
        if not x.numel():
            return
        magnitude = x.float().abs().amax()
        if not magnitude.isfinite():
            raise ConflictError(
                f"calibration: inputs of {name} aren't finite, and their scale would mean nothing; leave such batches"
                f" out, leave {name} out of layers, or write activations=unchanged"
            )
        largest[id(layer)] = torch.maximum(magnitude, largest.get(id(layer), magnitude))

    with ExitStack() as stack:
        stack.enter_context(unfused_attention())
        stack.enter_context(torch.no_grad())
        for name, layer in layers.items():

            def hook(layer: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                watch(name, layer, args, kwargs)

            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        run()
    return {layer: float(each) / LARGEST for layer, each in largest.items() if float(each) > 0}
