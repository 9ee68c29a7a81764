"""Freeze a module's parts by depth or by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


class Depths:
    """The depth of each part of a module: 0 and up for its blocks in order.

    What comes before the first block has depth -1, what comes after the last one ``count``, and what stands between two
    blocks the depth of the former. A parameter of several parts has the smallest of their depths.

    Attributes:
        count: number of blocks.
        parameters: qualified name of each parameter -> depth.
        norms: qualified name of each normalisation with running statistics -> depth.
    """

    def __init__(self, module: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        self.count = len(blocks)
        numbers = {id(block): number for number, block in enumerate(blocks.values())}
        inside = {id(part): numbers[id(block)] for block in blocks.values() for part in block.modules()}
        depth, of_tensor = -1, dict[int, int]()
        names: dict[int, str] = {}
        self.norms: dict[str, int] = {}
        for name, part in module.named_modules():
            # lists of blocks and other parents come before their blocks, with parameters of their own as well
            depth = inside.get(id(part), self.count if depth == self.count - 1 and numbers else depth)
            if isinstance(part, _NormBase) and part.running_mean is not None:
                self.norms[name] = depth
            for own, p in part._parameters.items():
                if p is not None:
                    names.setdefault(id(p), f"{name}.{own}" if name else own)
                    of_tensor[id(p)] = min(depth, of_tensor.get(id(p), depth))
        self.parameters = {name: of_tensor[key] for key, name in names.items()}

    def trained(self, blocks: int) -> Callable[[int], bool]:
        """Return whether a depth is trained if the last ``blocks`` blocks are; with all blocks everything is."""
        return lambda depth: blocks >= self.count or depth >= self.count - blocks


def frozen_parts(module: nn.Module) -> list[str]:
    """Return the qualified names of the outermost parts without a trained parameter."""
    frozen: list[str] = []
    for name, part in module.named_modules():
        flags = [p.requires_grad for p in part.parameters()]
        if flags and not any(flags) and not (frozen and name.startswith(f"{frozen[-1]}.")):
            frozen.append(name)
    return frozen
