"""Low rank: linear layers become two smaller ones, and are trained as such."""

from __future__ import annotations

from lightning_solo.nn.factorizing import Change, factorize_linear
from lightning_solo.seams.factors import Factorizing
from lightning_solo.seams.run import Run
from lightning_solo.techniques.low_rank.card import CARD, OPTION, Settings


class LowRank(Factorizing, Settings):
    """Replaces linear layers by two factors of a lower rank, from a singular value decomposition of their weights.

    A layer ``up`` becomes a sequence of two linear layers, with the parameters ``up.0.weight``, ``up.1.weight`` and
    ``up.1.bias``. Layers that wouldn't get smaller stay. After the fit the module keeps its factors;
    ``solo.merge_factors(module)`` puts products in their place, and ``lightning-solo export --format factorized``
    writes them for plain torch.
    """

    phase = CARD.phase
    kinds = ("linear",)
    option = OPTION

    def factorize(self, ctx: Run, rank: int | float) -> Change:
        """Replace the layers."""
        return factorize_linear(ctx.module, rank, self.layers, self.start, ctx.device, OPTION)
