"""The card of `chunked_cross_entropy`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_solo.cards.card import Card, Requirement, Rung
from lightning_solo.cards.engines import ROUNDING, answers
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of ChunkedCrossEntropy."""

    head: str = setting(
        "auto",
        "auto: the output layer of a language model; or its name, as net.head",
        check=lambda head: None if head.strip() else "write 'auto' or the name of a layer, as net.head",
    )
    chunk_tokens: int = setting(1024, "tokens whose logits exist at a time", at_least=1)
    backend: str = setting(
        "torch",
        "computes a chunk's losses and gradients: torch's operators, or on a GPU Liger's fused kernel",
        allowed=("torch", "liger"),
    )


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan it with torch's operators."""
    if settings.backend == "torch":
        return tracing
    assumption = "chunked_cross_entropy: backend=liger is planned as torch; it takes no more bytes, and less time"
    attached = replace(settings, backend="torch")
    return tracing.assuming(assumption, attached=attached)


def _by_liger(settings: Settings) -> bool:
    return settings.backend == "liger"


CARD = Card(
    name="chunked_cross_entropy",
    target="lightning_solo.techniques.chunked_cross_entropy.technique:ChunkedCrossEntropy",
    phase=Phase.REWRITE,
    settings=Settings,
    saves="logits, their fp32 copy and their gradients, 10 to 16 bytes per token and word of the vocabulary, except for"
    " ``chunk_tokens`` tokens",
    costs="no more products with the weight; 2 more bytes per weight of a 16-bit head while the loss is computed",
    numerics="loss and gradients of torch's cross-entropy, added in another order: to 1e-6 in fp32, and within bf16's"
    " rounding in bf16",
    conflicts="weights that are gathered only for a forward (ZeRO stage 3); heads that aren't linear layers; losses"
    " other than `torch.nn.functional.cross_entropy`, which still get their logits",
    reference="Wijmans et al. 2024, arXiv 2411.09009; Hsu et al. 2024 (Liger), arXiv 2410.10989",
    owns=frozenset({"logits"}),
    reads=frozenset({"weights"}),
    requires=(
        Requirement(
            "package",
            "callback.chunked_cross_entropy.backend=liger runs Liger's kernel; write"
            " callback.chunked_cross_entropy.backend=torch, or install it",
            "liger-kernel>=0.8,<0.9",
            when=_by_liger,
        ),
        Requirement(
            "cuda",
            "callback.chunked_cross_entropy.backend=liger runs a Triton kernel; write"
            " callback.chunked_cross_entropy.backend=torch",
            when=_by_liger,
        ),
    ),
    rung=Rung("chunked loss", order=35),
    planned="lightning_solo.techniques.chunked_cross_entropy.card:planned",
    engines=answers(
        ddp=ROUNDING,
        fsdp=ROUNDING,
        zero3="the head's weight is used after the head's forward, when stage 3 has freed it",
    ),
)
