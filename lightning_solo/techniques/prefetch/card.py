"""The card of `prefetch`."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_solo.cards.card import Card
from lightning_solo.cards.engines import EVERYWHERE
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of Prefetch."""

    depth: int = setting(2, "batches that are loaded, and on the device, ahead of the one in training", at_least=1)


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan the batches that wait on the device, without the thread."""
    assumption = "prefetch: batches wait on the device, unless hooks of the module or data module transfer them"
    return tracing.assuming(assumption, attached=None, ahead=settings.depth)


CARD = Card(
    name="prefetch",
    target="lightning_solo.techniques.prefetch.technique:Prefetch",
    phase=Phase.ADAPT,  # after `DATA`: it loads ahead from the loaders that those techniques return
    settings=Settings,
    saves="no memory but time: the wait of a step for its batch, with ``num_workers=0``, and for its copy",
    costs="``depth`` batches in memory, on a GPU the device's, on a CPU the host's; a thread, which shares Python's"
    " lock with training",
    numerics="bit-exact: equal batches in order; batches that draw from global random numbers aren't loaded ahead",
    conflicts="with ``num_workers=0`` a precision that changes torch's default dtype, such as ``bf16-true`` (refused);"
    " loaders with workers on a CPU, which load ahead themselves (refused)",
    reference="https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams;"
    " https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html",
    exact=True,
    planned="lightning_solo.techniques.prefetch.card:planned",
    engines=EVERYWHERE,
)
