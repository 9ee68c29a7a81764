"""Embeddings are not trained for the length of a fit: they take no gradient and no optimizer states."""

from __future__ import annotations

from torch import nn

from frozen_embeddings.card import CARD, Settings
from lightning_solo.errors import NothingToDoError
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique


def large_embeddings(module: nn.Module, min_rows: int) -> dict[str, nn.Embedding]:
    """Return name -> embedding of at least so many rows, of those that are trained."""
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding) and part.num_embeddings >= min_rows and part.weight.requires_grad
    }


class FrozenEmbeddings(Technique, Settings):
    """Freezes embeddings before optimizers are made, and lets them be trained again after the fit.

    Raises:
        PresetError: ``min_rows`` is no integer of at least 1.
    """

    phase = CARD.phase

    def transform(self, ctx: Run) -> None:
        """Freeze them: behind ``configure_model``, before the optimizers; undone after the fit or its failure."""
        embeddings = large_embeddings(ctx.module, self.min_rows)
        if not embeddings:
            rows = [part.num_embeddings for part in ctx.module.modules() if isinstance(part, nn.Embedding)]
            raise NothingToDoError(
                f"frozen_embeddings.min_rows={self.min_rows}: no trained embedding has so many; there are"
                f" {rows or 'none'}"
            )
        for embedding in embeddings.values():
            embedding.weight.requires_grad_(False)
            ctx.undo.callback(embedding.weight.requires_grad_, True)
        ctx.info(f"frozen_embeddings: {', '.join(embeddings)}")
