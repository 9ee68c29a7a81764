"""Check that a model keeps the documents of a row apart: compare a document's loss with and without another one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.attributes import replaced
from lightning_solo.errors import ConflictError
from lightning_solo.nn.rollback import Rollback


class BoundaryError(ConflictError):
    """A model mixes the documents of a row, or its loss isn't the mean over their labels."""


def require_boundaries(
    module: nn.Module, loss: Callable[[dict[str, Tensor]], Tensor], batches: Sequence[Any], rounding: float = 1e-3
) -> None:
    """Check that a document's loss doesn't depend on the document before it, nor on whether there is one.

    It runs forward without gradients and dropout, and restores random numbers, buffers and metrics.

    Args:
        module: the module that ``loss`` runs.
        loss: returns the mean over a batch's labels, such as ``lambda batch: model(**batch).loss``.
        batches: as `lightning_solo.data.packing.two_documents` returns them.
        rounding: allowed relative difference between the losses in rows of one and of two documents, for which
            different kernels run.

    Raises:
        BoundaryError: documents see one another, or the loss differs in a row of two.
    """
    name = type(module).__name__
    with _without_trace(module) as put_back:

        def loss_of(batch: dict[str, Tensor]) -> float:
            try:
                return float(loss(batch))
            finally:
                put_back()

        in_row, beside_other, by_itself = map(loss_of, batches[:3])
        difference, most = abs(in_row - beside_other), 1e-6 * abs(in_row)
        if not difference <= most:
            # In a mixture of experts, other tokens change each expert's share, and so the rounding. This is allowed
            # if it is small compared with the effect of attention to the first document.
            joined, joined_to_other = map(loss_of, batches[3:])
            most += 1e-2 * abs(joined - joined_to_other)
    if not difference <= most:
        raise BoundaryError(
            f"{name}: documents of a row see one another. With other tokens in the first document the loss"
            f" of the second changes from {in_row:.7g} to {beside_other:.7g}. Only position_ids show where documents"
            " begin: pass them, as in self.net(**batch), without an attention mask, to a model that finds documents by"
            f" them (taking position_ids: {', '.join(_taking_positions(module)) or 'none'}; Hugging Face's"
            " flash_attention_2 does so for batches of rows=1), or use batches of similar length"
        )
    if not abs(in_row - by_itself) <= rounding * abs(in_row):
        raise BoundaryError(
            f"{name}: the loss of a document is {in_row:.7g} in a row after another one, and"
            f" {by_itself:.7g} alone in a row; return the mean over all labels but -100, and pass position_ids"
            " to the module that adds positions, or use batches of similar length"
        )


@contextmanager
def _without_trace(module: nn.Module) -> Iterator[Callable[[], None]]:
    """Disable gradients and dropout, and yield a function that restores the state that forwards change."""
    rollback = Rollback(module, next((p.device for p in module.parameters()), torch.device("cpu")))
    with ExitStack() as stack:
        for part in module.modules():
            stack.enter_context(replaced(part, "training", False))
        stack.enter_context(torch.no_grad())
        rollback.save()
        yield rollback.restore


def _taking_positions(module: nn.Module) -> list[str]:
    """Return the names and classes of the outermost parts whose forward takes ``position_ids``."""
    taking: dict[str, str] = {}
    for name, part in module.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in taking)
        if not inside and "position_ids" in inspect.signature(part.forward).parameters:
            taking[name] = f"{name} ({type(part).__name__})".strip()
    return list(taking.values())


def caching_configs(module: nn.Module) -> list[Any]:
    """Return the Hugging Face configurations in a module that make each forward build a key-value cache.

    With a cache, which training steps don't read, the models ignore document boundaries.
    """
    configs = {id(config): config for part in module.modules() if (config := getattr(part, "config", None)) is not None}
    return [config for config in configs.values() if getattr(config, "use_cache", None) is True]
