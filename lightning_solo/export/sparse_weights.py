"""Weights with many zeros in fewer bytes, and smaller modules. It needs torch and safetensors alone.

`lightning-solo export --format pruned` writes a copy of this file beside the weights, as ``load.py``:

    from load import load
    model = load(MyModel(), "folder")

A weight is stored in the shortest of three forms, and read back bit for bit, but for the sign of zeros:

    dense   all numbers: their size in bytes each
    bits    a bit for each number, and the numbers that aren't 0: 1 / 8 + size x share
    gaps    the numbers that aren't 0, each with the count of zeros before it in one byte: (1 + size) x share
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_solo.nn.pruned_layers import shrink

Module = TypeVar("Module", bound=nn.Module)
_MOST = 255  # zeros in a gap; longer ones have numbers of 0 in between


def compressed(weight: Tensor) -> tuple[str, dict[str, Tensor]]:
    """Return the shortest form of a tensor on the host, and its parts."""
    flat = weight.contiguous().flatten()
    is_kept = flat != 0
    places = is_kept.nonzero()[:, 0]
    gaps = places.diff(prepend=torch.tensor([-1])) - 1
    numbers = 1 + gaps // (_MOST + 1)  # that the gap and its number take
    sizes = {
        "dense": flat.nbytes,
        "bits": -(-flat.numel() // 8) + len(places) * flat.element_size(),
        "gaps": int(numbers.sum()) * (1 + flat.element_size()),
    }
    form = min(sizes, key=lambda name: sizes[name])
    if form == "dense":
        return form, {"values": weight.contiguous()}
    if form == "bits":
        powers = 2 ** torch.arange(8, dtype=torch.uint8)
        bits = (pad(is_kept, (0, -flat.numel() % 8)).view(-1, 8) * powers).sum(1, dtype=torch.uint8)
        return form, {"values": flat[places], "bits": bits}
    ends = numbers.cumsum(0) - 1
    values = torch.zeros(int(numbers.sum()), dtype=flat.dtype)
    counts = torch.full((len(values),), _MOST, dtype=torch.uint8)
    values[ends], counts[ends] = flat[places], (gaps % (_MOST + 1)).to(torch.uint8)
    return form, {"values": values, "gaps": counts}


def expanded(form: str, parts: dict[str, Tensor], shape: list[int]) -> Tensor:
    """Return the tensor of a form and its parts."""
    values = parts["values"]
    if form == "dense":
        return values
    weight = torch.zeros(shape, dtype=values.dtype)
    flat = weight.view(-1)
    if form == "bits":
        bits = parts["bits"][:, None] >> torch.arange(8, dtype=torch.uint8) & 1
        flat[bits.view(-1)[: flat.numel()].bool()] = values
    else:
        flat[(parts["gaps"].long() + 1).cumsum(0) - 1] = values
    return weight


def weights(folder: str | Path) -> dict[str, Tensor]:
    """Return the state dict in a folder; tied weights are one tensor."""
    from safetensors.torch import load_file

    folder = Path(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored = load_file(folder / "model.safetensors")
    state: dict[str, Tensor] = {}
    for name, (form, shape) in config["weights"].items():
        parts = {part: stored.pop(key) for part in ("values", "bits", "gaps") if (key := f"{name}:{part}") in stored}
        state[name] = expanded(form, parts, shape)
    return {name: state[first] for name, first in config["names"].items()}


def load(module: Module, folder: str | Path) -> Module:
    """Return a module with the weights in a folder; where channels or heads were removed, it becomes smaller."""
    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    shrink(module, config.get("structure") or {})
    module.load_state_dict(weights(folder))
    return module
