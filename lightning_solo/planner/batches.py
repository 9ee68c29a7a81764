"""A micro-batch to plan: the first of a loader, its number of examples, and copies with more or fewer examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from lightning_solo.data.nested import leaves, map_tensors
from lightning_solo.errors import PresetError
from lightning_solo.planner.fake_modules import empty_parameters


def first_batch(make: Callable[[], Any]) -> Any:
    """Return the first batch of a module or data module; several loaders are combined as in a run.

    Raises:
        PresetError: there is none.
    """
    with empty_parameters():
        module = make()
    try:
        module.prepare_data()
        module.setup("fit")
        loaders = module.train_dataloader()
        if type(loaders).__name__ != "CombinedLoader":  # of either package of Lightning
            loaders = CombinedLoader(loaders, "max_size_cycle")
        batch, _, _ = next(iter(loaders))
        return batch
    except Exception as error:
        raise PresetError(
            f"batch: {type(module).__name__}.train_dataloader() gives none ({type(error).__name__}: {error}); write"
            " batch=datamodule, or give one micro-batch"
        ) from error


def examples(batch: Any) -> int:
    """Return the number of examples in a batch: the most frequent first dimension of its tensors.

    Raises:
        PresetError: it has no tensor.
    """
    lengths = [int(leaf.shape[0]) for _, leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    if not lengths:
        raise PresetError(
            f"batch={type(batch).__name__}: no tensor with a first dimension in it; give one micro-batch as"
            " training_step takes it, such as next(iter(dataloader)); tensors are searched in lists, mappings and"
            " dataclasses"
        )
    return max(set(lengths), key=lengths.count)


def storage_bytes(batch: Any, examples: int, size: int) -> list[int]:
    """Return the bytes of each tensor in a batch, scaled to ``size`` examples."""
    tensors = (leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor))
    return [
        tensor.nbytes // examples * size if tensor.dim() and tensor.shape[0] == examples else tensor.nbytes
        for tensor in tensors
    ]


def sized(batch: Any, examples: int, size: int) -> Any:
    """Return the batch with ``size`` examples, by repetition."""

    def resize(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != examples:
            return tensor
        return tensor[torch.arange(size) % examples]

    return map_tensors(batch, resize)
