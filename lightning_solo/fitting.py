"""Which presets would fit where one did not: their model states against what device and host have now.

A rule of thumb for an error message: bytes per parameter, AdamW assumed, activations left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_solo.errors import SoloError
from lightning_solo.machine import host_memory
from lightning_solo.memory.reading import free_device_bytes
from lightning_solo.optim.back_end_facts import BACK_ENDS
from lightning_solo.optim.compressed_moments import BLOCK
from lightning_solo.presets.compose import compose
from lightning_solo.presets.files import preset_files
from lightning_solo.presets.schema import SoloConfig
from lightning_solo.units import format_bytes, parse_bytes
from lightning_solo.zero.budget import MARGIN
from lightning_solo.zero.layout import WEIGHT_BYTES, ZeroSettings, zero_layout

# Weight and gradient in the precision, two states of AdamW in it: 2 + 2 + 4, 8 + 8 + 16. The others keep fp32 weights:
# 4 + 4 + 8.
TRUE_PRECISIONS = {"bf16-true": 2, "16-true": 2, "64-true": 8}


@dataclass(frozen=True)
class Sizes:
    """Elements of each trainable and each frozen parameter of a module, and the bytes of its buffers."""

    trainable: tuple[int, ...]
    frozen: tuple[int, ...]
    buffer_bytes: int


@dataclass(frozen=True)
class Room:
    """Bytes on device and host, needed or free. ``device`` of a run on the CPU is 0: all lies on the host."""

    device: int
    host: int

    def missing(self, free: Room) -> int:
        """Return how many bytes of this are not in ``free``."""
        return max(self.device - free.device, 0) + max(self.host - free.host, 0)

    def __str__(self) -> str:
        device = f"{format_bytes(self.device)} on the device" if self.device else ""
        return " and ".join(
            part for part in (device, f"{format_bytes(self.host)} on the host" if self.host else "") if part
        )


def presets_that_fit(module: torch.nn.Module, check: Callable[[SoloConfig], None], free: Room | None = None) -> str:
    """Return a sentence that names the presets whose model states would fit, or the smallest need if none does.

    Args:
        module: what is to be trained.
        check: raises a SoloError for a preset that this machine can't run.
        free: what there is; measured if not given.
    """
    sizes = sizes_of(module)
    free = free or free_room(module)
    needs = {}
    for name in preset_files():
        try:
            config = compose(name)
            if config.auto is not None:  # one of the others
                continue
            check(config)
            need = model_states(config, sizes, cuda=torch.cuda.is_available())
        except (SoloError, ValueError):  # not for this machine, or a file of the user's with a mistake in it
            continue
        if need is not None:
            needs[name] = need
    fitting = [f"{name} ({need})" for name, need in needs.items() if not need.missing(free)]
    if fitting:
        return f"presets that would fit, before activations, with AdamW: {', '.join(fitting)}"
    if not needs:
        return "no preset runs on this machine"
    name, need = min(needs.items(), key=lambda item: item[1].missing(free))
    return f"no preset would fit: the nearest, {name}, needs {need} before activations, with AdamW; use a smaller model"


def sizes_of(module: torch.nn.Module) -> Sizes:
    """Return the sizes of a module's parameters and buffers."""
    parameters = list(module.parameters())
    return Sizes(
        tuple(p.numel() for p in parameters if p.requires_grad),
        tuple(p.numel() for p in parameters if not p.requires_grad),
        sum(b.numel() * b.element_size() for b in module.buffers()),
    )


def model_states(config: SoloConfig, sizes: Sizes, *, cuda: bool) -> Room | None:
    """Return what a preset's model states need with AdamW and a margin; None for a strategy that is not ours."""
    if config.strategy is None:
        element = TRUE_PRECISIONS.get(config.precision or "", 4)
        # weight, gradient and two states per trained parameter; the weight of a frozen one
        states = element * (4 * sum(sizes.trainable) + sum(sizes.frozen)) + sizes.buffer_bytes
        return _with_margin(states if cuda else 0, 0 if cuda else states)
    if config.strategy.get("name") == "compact":
        kept, states = (
            round(each * sum(sizes.trainable))
            for each in compact_bytes(config.strategy, config.precision or "bf16-true")
        )
        kept += (2 if config.precision == "bf16-true" else 4) * sum(sizes.frozen) + sizes.buffer_bytes
        on_host = _on_host(config.strategy.get("state_budget"), states)
        on_device = kept + states - on_host
        return _with_margin(on_device, on_host) if cuda else _with_margin(0, on_device + on_host)
    precision = config.precision or "32-true"
    if config.strategy.get("name") != "zero_offload" or precision not in WEIGHT_BYTES or not sizes.trainable:
        return None
    settings = zero_settings(
        config.strategy, precision, config.accumulate_grad_batches or 1, max(sizes.trainable), cuda=cuda
    )
    layout = zero_layout([sizes.trainable], settings, frozen=sizes.frozen, buffer_bytes=sizes.buffer_bytes)
    return _with_margin(layout.device_bytes, layout.host_bytes) if cuda else _with_margin(0, layout.one_memory_bytes)


def compact_bytes(node: dict[str, Any], precision: str = "bf16-true") -> tuple[float, float]:
    """Return what the strategy ``compact`` keeps per trained parameter, one micro-batch per step.

    Weights and gradients, which stay on the device; optimizer states, which may lie on the host.

    >>> compact_bytes({"master_bits": 24, "moment_bits": 8, "release_gradients": True})  # 2, and 1 + 2 x (1 + 1 / 32)
    (2, 3.0625)
    """
    gradient = 0 if node.get("release_gradients", True) else 4 if precision == "32-true" else 2
    if (back_end := node.get("back_end", "own")) != "own":
        library = BACK_ENDS[back_end]
        weight = 2 if precision != "32-true" and library.bf16_weights else 4
        return weight + (weight if gradient else 0), library.state_bytes
    weight = 4 if precision == "32-true" else 2
    correction = {32: 4 - weight, 24: 1}.get(node.get("master_bits", 24), 0)
    moment = {32: 4.0, 8: 1.0, 4: 0.5}[node.get("moment_bits", 8)]
    scales = 0 if moment == 4 else 8 / BLOCK
    return weight + gradient, correction + 2 * moment + scales


def _on_host(budget: int | str | None, states: int) -> int:
    """Return the bytes of compact states that lie on the host at the most."""
    if budget is None:
        return 0
    if budget == "auto":
        return states
    return max(0, states - (parse_bytes(budget) if isinstance(budget, str) else budget))


def zero_settings(node: dict[str, Any], precision: str, accumulation: int, largest: int, *, cuda: bool) -> ZeroSettings:
    """Return the layout's settings for the strategy node of a preset, by the strategy's own defaults.

    Args:
        node: of a preset.
        precision: Lightning's name for it.
        accumulation: micro-batches per optimizer step.
        largest: elements of the largest parameter.
        cuda: Whether the device is one.
    """
    stage, offload = node.get("stage", 2), node.get("offload_parameters", False)
    on_disk = stage == 3 and node.get("nvme_path") is not None
    return ZeroSettings(
        stage=stage,
        precision=precision,
        accumulates=accumulation > 1,
        offload_parameters=offload,
        nvme_optimizer=on_disk,
        nvme_parameters=on_disk and offload,
        pin_memory=node.get("pin_memory", True),
        cuda=cuda,
        step_temporaries=0,  # DeepSpeed's AdamW, or torch's fused one
        keeps_weights=True,
        parameter_buffer=largest,
    )


def free_room(module: torch.nn.Module) -> Room:
    """Return what a new run could have: what is free, and what this process and the module hold and would give back."""
    on_host = sum(t.untyped_storage().nbytes() for t in (*module.parameters(), *module.buffers()) if t.is_cpu)
    host = host_memory()[1] + on_host
    if not torch.cuda.is_available():
        return Room(0, host)
    return Room(free_device_bytes(module), host)


def _with_margin(device: int, host: int) -> Room:
    return Room(int(device * (1 + MARGIN)), int(host * (1 + MARGIN)))
