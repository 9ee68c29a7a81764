"""Merge a module's adapters after its training, take them out, exchange them, or load them from a checkpoint."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_solo.errors import CheckpointError
from lightning_solo.export.sources import checkpoint_of, read
from lightning_solo.export.weights import export_weights
from lightning_solo.nn import adaptation
from lightning_solo.nn.adaptation import AdapterConfig, base_samples, insert, load_adapter_weights, refuse_other_base
from lightning_solo.optim import checkpoint_masters

RECORD = "adapter"
"""The key of a checkpoint that holds an adapter's configuration and its base."""


def merge_adapters(module: nn.Module) -> float:
    """Add the active adapter to the module's weights, and take all adapters out; the module has its own layers again.

    The sum is computed in fp32 and rounded once to the type of the weight. Each layer runs on random inputs before and
    after. The largest difference is logged, and warned of where it is larger than rounding explains.

    Returns:
        The largest difference of a layer's outputs, relative to the largest output.

    Raises:
        NothingToDoError: the module has no adaptation.
        ConflictError: a weight is in 4 or 8 bits, or an adapter isn't finite; nothing is changed then.
    """
    differences = adaptation.merge(module)
    worst = max(differences, key=differences.__getitem__)
    rank_zero_info(adaptation.merge_summary(differences))
    return differences[worst]


def remove_adapters(module: nn.Module) -> None:
    """Take all adapters out of a module: it has its own layers again, with the weights from before the training.

    Raises:
        NothingToDoError: the module has no adaptation.
        ConflictError: an adapter was made by PiSSA, which moves a part of each weight into its factors.
    """
    adaptation.remove_adapters(module)


def use_adapter(module: nn.Module, name: str) -> None:
    """Activate one of a module's adapters; the others stay in it, and do nothing.

    Raises:
        NothingToDoError: the module has no adapter of that name.
    """
    adaptation.use_adapter(module, name)


def load_adapters(module: nn.Module, path: str | Path, name: str | None = None) -> None:
    """Put the adapter of a checkpoint into a module that has the weights it was trained on, and activate it.

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
    config = AdapterConfig.from_record(checkpoint[RECORD]["config"])
    weights = checkpoint["state_dict"]
    if checkpoint_masters.RECORD in checkpoint:  # weights that are split into bf16 and corrections
        with suppress(CheckpointError):  # of weights that are rounded, without corrections
            weights = export_weights(source)
    if name is not None and name != config.name:
        old, config = config.name, config.renamed(name)
        weights = {adaptation.renamed_key(key, old, name): value for key, value in weights.items()}
    if config.name in adaptation.adapter_names(module):
        raise CheckpointError(
            f"the module has an adapter {config.name!r} already; write load_adapters(module, path, name='another')"
        )
    adaptation.require_modules(module, config)
    refuse_other_base(base_samples(module, config), checkpoint[RECORD]["base"])
    insert(module, config)
    load_adapter_weights(module, config, weights)
