"""Factorized embedding: a table of narrow rows, and a linear layer to the model's width."""

from __future__ import annotations

from lightning_solo.nn.factorizing import Change, factorize_embedding
from lightning_solo.seams.factors import Factorizing
from lightning_solo.seams.run import Run
from lightning_solo.techniques.factorized_embedding.card import CARD, OPTION, Settings


class FactorizedEmbedding(Factorizing, Settings):
    """Replaces the largest embedding by a table (V, E) and a linear layer from E to its width, and a tied head with it.

    An embedding ``tokens`` becomes a sequence with the parameters ``tokens.0.weight`` and ``tokens.1.weight``, which a
    tied head shares. After the fit the module keeps its factors; ``solo.merge_factors(module)`` puts their product in
    their place, and ``lightning-solo export --format factorized`` writes them for plain torch.
    """

    phase = CARD.phase
    kinds = ("embedding", "head")
    option = OPTION

    def factorize(self, ctx: Run, rank: int | float) -> Change:
        """Replace the embedding."""
        return factorize_embedding(ctx.module, rank, self.embedding, self.start, ctx.device, OPTION)
