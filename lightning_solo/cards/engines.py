"""The engines that train on several devices, and what a card says of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_solo.cards.configuration import Chosen, Configuration

ENGINES = ("ddp", "fsdp", "zero3")
"""torch's DistributedDataParallel and FSDP2, and DeepSpeed's ZeRO. The last two shard weights, gradients and states."""

EXACT = "exact"
ROUNDING = "rounding"

Answer = str | Callable[[Any, "Configuration"], str]
"""`EXACT`: under the engine the technique changes no bit. `ROUNDING`: it changes what it changes on one device.
Otherwise the reason why it is refused, with a remedy after "; write ", if there is another one than its removal. Or a
function from its settings and the configuration to one of these."""


def answers(ddp: Answer, fsdp: Answer, zero3: Answer) -> Mapping[str, Answer]:
    """Return what a card says of each engine."""
    return {"ddp": ddp, "fsdp": fsdp, "zero3": zero3}


def alike(answer: Answer) -> Mapping[str, Answer]:
    """Return the same answer for each engine."""
    return dict.fromkeys(ENGINES, answer)


EVERYWHERE = alike(EXACT)


def several_devices(settings: object) -> str:
    """Return the caveat of a strategy that is an engine."""
    return "is for several devices"


def answer_of(chosen: Chosen, engine: str, configuration: Configuration) -> str:
    """Return `EXACT`, `ROUNDING` or the reason of a refusal, for a technique with its settings."""
    answer = chosen.card.engines.get(engine)
    if answer is None:
        return (
            f"its card says nothing of it; add engines={{{engine!r}: 'exact'}} to the Card once it was compared with a"
            f" run without it, on two processes; write {chosen.removal}"
        )
    return answer if isinstance(answer, str) else answer(chosen.settings, configuration)


def refusal_under(chosen: Chosen, engine: str, configuration: Configuration) -> str | None:
    """Return the message that refuses a technique under an engine, with a remedy; None if it runs."""
    answer = answer_of(chosen, engine, configuration)
    if answer in (EXACT, ROUNDING):
        return None
    removal = f"{chosen.removal} (removes {chosen.card.name})"
    remedy = "" if chosen.removal in answer else f" or {removal}" if "; write " in answer else f"; write {removal}"
    return f"{chosen.choice} and strategy={engine} can't be combined: {answer}{remedy}"
