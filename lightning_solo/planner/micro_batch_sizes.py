"""Micro-batch sizes of solved plans: which are tried, for which modules, and the traces of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from lightning_solo.cards.configuration import Configuration
from lightning_solo.data.loss_weights import IGNORED, labels_of
from lightning_solo.data.micro_batches import Splitter
from lightning_solo.errors import SoloError
from lightning_solo.nn.spectral_norms import spectral_norms
from lightning_solo.planner.bases import MICRO_BATCH, settings_of, technique_for
from lightning_solo.planner.batch_scaling import AffineTrace
from lightning_solo.planner.capture import Trace
from lightning_solo.planner.fake_modules import empty_parameters
from lightning_solo.planner.forks import run_in_forks
from lightning_solo.planner.planner import Planner
from lightning_solo.planner.rules import arrange


def sizes_below(batch: int) -> list[int]:
    """Return the divisors of a batch below it, largest first.

    >>> sizes_below(12), sizes_below(7), sizes_below(1)
    ([6, 4, 3, 2, 1], [1], [])
    """
    return [size for size in range(batch // 2, 0, -1) if batch % size == 0]


def is_divisible(planner: Planner, base: Configuration) -> bool:
    """Return whether micro-batches train the module as a whole batch does, as far as the module and the batch show.

    They don't if a layer's output depends on the whole batch, or if rows of the batch have different numbers of labels:
    a loss may then be the mean over tokens. A base that has micro-batches already isn't divided again.
    """
    if settings_of(base, MICRO_BATCH) is not None or _rows_differ(planner.batch):
        return False
    with empty_parameters():
        module = planner.make()
    depends = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training for layer in module.modules())
    if depends or not module.automatic_optimization or spectral_norms(module):
        return False
    try:
        Splitter().require_parts(planner.batch)
        divided(base, 1).check()
    except SoloError:  # the batch can't be divided, or a technique can't be combined with micro-batches
        return False
    return True


def _rows_differ(batch: Any) -> bool:
    """Return whether rows of a batch have different numbers of labels."""
    labels = labels_of(batch)
    if labels is None or not len(labels):
        return False
    counted = labels.ne(IGNORED).reshape(len(labels), -1)
    return bool((counted.sum(1) != counted[0].sum()).any() or (counted[:, 0] != counted[0, 0]).any())


def divided(base: Configuration, size: int) -> Configuration:
    """Return a preset that runs each batch in micro-batches of at most ``size`` examples."""
    return replace(base, techniques=(*base.techniques, technique_for(MICRO_BATCH, micro_batch=size)))


class ScaledTraces:
    """Traces of presets for micro-batches of any size, each derived from two small ones."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._known: dict[str, AffineTrace | None] = {}

    def at(self, configs: Mapping[str, Configuration], size: int) -> dict[str, Trace]:
        """Return the traces of presets that differ by a mode, by its name; of those that can be traced."""
        missing = {name: config for name, config in configs.items() if name not in self._known}
        if missing:
            traces = run_in_forks(*(partial(self._scaled, config) for config in missing.values()))
            self._known |= dict(zip(missing, traces, strict=True))
        return {
            name: self._planner.at(size, arrange(config, self._planner.trainer), affine)
            for name, config in configs.items()
            if (affine := self._known[name]) is not None
        }

    def _scaled(self, config: Configuration) -> AffineTrace | None:
        try:
            config.check()
            return self._planner.scaled(arrange(config, self._planner.trainer))
        except Exception:  # of a technique that refuses the module, or can't be combined with the base
            return None
