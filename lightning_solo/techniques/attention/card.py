"""The card of `attention`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_solo.cards.card import Card
from lightning_solo.cards.engines import ROUNDING, alike
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing

AUTO = "auto"


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of Attention."""

    kernel: str = setting(
        AUTO,
        "auto: torch's choice, which is logged; or the only kernel that may run in training, recomputation included",
        allowed=(AUTO, "flash", "cudnn", "efficient", "math"),
    )


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan it with the kernel that torch would choose on the planned device."""
    assumption = "attention is planned with the kernel that torch chooses on the planned device"
    return tracing.assuming(*[assumption] * (settings.kernel != AUTO), attached=replace(settings, kernel=AUTO))


CARD = Card(
    name="attention",
    target="lightning_solo.techniques.attention.technique:Attention",
    phase=Phase.REWRITE,
    settings=Settings,
    saves="the scores of all pairs of tokens, tokens^2 x heads, where they were kept: in Hugging Face models with"
    ' ``attn_implementation="eager"``, and where a mask or dropout would silently select torch\'s ``math`` kernel',
    costs="the first micro-batch runs uncompiled, while the kernels are recorded",
    numerics="kernels add in different orders: differences are within the precision's rounding",
    conflicts="a module that itself selects other kernels by `torch.nn.attention.sdpa_kernel`",
    reference="Dao 2023 (FlashAttention-2), arXiv 2307.08691; Rabe and Staats 2021, arXiv 2112.05682",
    planned="lightning_solo.techniques.attention.card:planned",
    engines=alike(ROUNDING),
)
