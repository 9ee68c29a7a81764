"""The card of the strategy `ddp`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_solo.cards.card import Card
from lightning_solo.cards.engines import several_devices
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Ranks, Tracing


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of DataParallelStrategy."""

    find_unused_parameters: bool = setting(False, "look in each step for parameters that the loss doesn't depend on")
    gradient_as_bucket_view: bool = setting(True, "keep gradients in the buckets that are reduced, not beside them")
    timeout_s: int = setting(1800, "seconds after which a process that waits for others fails", at_least=1)


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan one process as on one device, with buckets of all gradients."""
    buckets = "views" if settings.gradient_as_bucket_view else "copies"
    ranks = Ranks(buckets=buckets, rebuilds=not settings.find_unused_parameters)
    return replace(tracing, attached=None, ranks=ranks)


CARD = Card(
    name="ddp",
    target="lightning_solo.techniques.ddp.technique:DataParallelStrategy",
    group="strategy",
    engine="ddp",
    phase=Phase.STATES,
    settings=Settings,
    saves="time: each device trains on its own batches, and gradients are averaged while backward runs",
    costs="each device has all weights, gradients and states; without ``gradient_as_bucket_view`` the gradients twice",
    numerics="a step on n devices equals a step of one device on the n batches together, within rounding; with one"
    " device bit-exact",
    conflicts="what steps in backward, since gradients are averaged after it; each technique's card says how it runs",
    reference="Li et al. 2020, PyTorch Distributed, https://arxiv.org/abs/2006.15704",
    caveat=several_devices,
    exact=True,
    planned="lightning_solo.techniques.ddp.card:planned",
)
