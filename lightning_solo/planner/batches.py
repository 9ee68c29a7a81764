"""One micro-batch: the first of a loader, its number of examples, and copies with other numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_solo.errors import PresetError
from lightning_solo.planner.fake_modules import empty_parameters


def mapped(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a batch with ``function`` applied to its tensors, found as Lightning finds them to move a batch.

    It descends into sequences, mappings (including a tokenizer's `BatchEncoding`), named tuples and dataclasses.
    """
    return apply_to_collection(batch, Tensor, function)


def first_batch(make: Callable[[], Any]) -> Any:
    """Return the first batch of a module's own ``train_dataloader``; several loaders are combined as in a run.

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
            f"batch: none given, and {type(module).__name__}.train_dataloader() gives none"
            f" ({type(error).__name__}: {error}); give one micro-batch, such as"
            " batch=next(iter(datamodule.train_dataloader()))"
        ) from error


def examples(batch: Any) -> int:
    """Return the number of examples in a batch: the most frequent first dimension of its tensors.

    Raises:
        PresetError: it has no tensor.
    """
    lengths: list[int] = []
    mapped(batch, lambda tensor: lengths.append(int(tensor.shape[0])) if tensor.dim() else None)
    if not lengths:
        raise PresetError(
            f"batch={type(batch).__name__}: no tensor with a first dimension in it; give one micro-batch as"
            " training_step takes it, such as next(iter(dataloader)); tensors are searched in lists, mappings and"
            " dataclasses"
        )
    return max(set(lengths), key=lengths.count)


def storage_bytes(batch: Any, examples: int, size: int) -> list[int]:
    """Return the bytes of each tensor in a batch, scaled to ``size`` examples."""
    sizes: list[int] = []

    def note(tensor: Tensor) -> None:
        scales = tensor.dim() and tensor.shape[0] == examples
        sizes.append(tensor.nbytes // examples * size if scales else tensor.nbytes)

    mapped(batch, note)
    return sizes


def sized(batch: Any, examples: int, size: int) -> Any:
    """Return the batch with ``size`` examples, by repetition."""

    def resize(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != examples:
            return tensor
        return tensor[torch.arange(size) % examples]

    return mapped(batch, resize)
