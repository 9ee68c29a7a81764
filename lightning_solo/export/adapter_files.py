"""Merge the adapters of a trained module, or load those of a checkpoint."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_solo.errors import CheckpointError
from lightning_solo.export.sources import checkpoint_of, read
from lightning_solo.export.weights import export_weights
from lightning_solo.nn import adapter_merging
from lightning_solo.nn.adaptation import AdapterConfig, adapter_names, insert, renamed_key
from lightning_solo.nn.adapter_weights import (
    RECORD,
    base_record,
    load_adapter_weights,
    refuse_other_base,
    require_modules,
    round_base,
)
from lightning_solo.optim import checkpoint_masters


def merge_adapters(module: nn.Module) -> float:
    """Add the active adapter to the module's weights, and take all adapters out; the module has its own layers again.

    The sum is computed in fp32 and rounded once to the type of the weight.

    Returns:
        The largest relative difference of a layer's outputs for random inputs, before and after; it is logged, too.

    Raises:
        NothingToDoError: the module has no adapters.
        ConflictError: a weight is in 4 or 8 bits, an adapter isn't finite, or a layer would compute other outputs;
            nothing is changed then.
    """
    differences = adapter_merging.merge(module)
    worst = max(differences, key=differences.__getitem__)
    rank_zero_info(adapter_merging.merge_summary(differences))
    return differences[worst]


def load_adapters(module: nn.Module, path: str | Path, name: str | None = None) -> None:
    """Put the adapter of a checkpoint into a module that has the weights it was trained on, and activate it.

    If it was trained on weights in 4 or 8 bits, the module's weights are rounded in the same way.

    Args:
        module: with the weights of the base.
        path: of a checkpoint of adapters, or the folder of a run.
        name: of the adapter in the module; by default as in the checkpoint.

    Raises:
        CheckpointError: the file has no adapter, or that of another base; nothing is changed then.
    """
    source = checkpoint_of(Path(path))
    checkpoint = read(source, inert=True)
    if RECORD not in checkpoint:
        raise CheckpointError(f"{source} has no adapters; load its weights by module.load_state_dict")
    config = AdapterConfig(**checkpoint[RECORD]["config"])
    weights = checkpoint["state_dict"]
    if checkpoint_masters.RECORD in checkpoint:  # weights that are split into bf16 and corrections
        with suppress(CheckpointError):  # of weights that are rounded, without corrections
            weights = export_weights(source, live=True)
    if name is not None and name != config.name:
        weights = {renamed_key(key, config.name, name): value for key, value in weights.items()}
        config = replace(config, name=name)
    if config.name in adapter_names(module):
        raise CheckpointError(
            f"the module has an adapter {config.name!r} already; write load_adapters(module, path, name='another')"
        )
    require_modules(module, config)
    refuse_other_base(base_record(module, config), checkpoint[RECORD]["base"])
    insert(module, config)
    load_adapter_weights(module, config, weights)
    if line := round_base(module, checkpoint[RECORD]["base"]):
        rank_zero_info(line)
