"""Layers whose weight is divided by its spectral norm, estimated by a step of power iteration in each forward."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm


def spectral_norms(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that have ``spectral_norm``, of either form in torch, by name."""
    layers = {}
    for name, part in module.named_modules():
        if any(isinstance(hook, SpectralNorm) for hook in part._forward_pre_hooks.values()):
            layers[name] = part
        elif isinstance(part, _SpectralNorm):
            layer = name.rpartition("parametrizations.")[0].removesuffix(".")
            layers[layer] = module.get_submodule(layer)
    return layers
