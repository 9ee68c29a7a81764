"""The card of `weight_averaging`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_solo.cards.card import Card
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import answers
from lightning_solo.cards.footprint import Footprint, Request
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing
from lightning_solo.errors import ConflictError


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of WeightAverage."""

    method: str = setting("ema", "ema: exponential average; swa: equal mean of all updates", allowed=("ema", "swa"))
    decay: float = setting(
        0.999,
        "part of the average that an update of ema keeps",
        check=lambda decay: (
            None if 0 < decay < 1 else "expected a number between 0 and 1, such as 0.999: at 1 the average never moves"
        ),
    )
    start_step: int = setting(0, "optimizer steps before the first update", at_least=0)
    every_n_steps: int = setting(1, "optimizer steps between two updates", at_least=1)
    cycles: bool = setting(
        False, "update only where a cycle of the learning rate ends: after the steps at a rate before it rises again"
    )
    members: int = setting(
        0,
        "how many of the latest updates' weights are also kept one by one, in fp32 on the host and in checkpoints, for"
        " solo.load_members",
        at_least=0,
    )
    device: str = setting(
        "host", "where the average is stored, in fp32: in the host's memory, or beside the module's weights",
        allowed=("host", "module"),
    )  # fmt: skip
    evaluate: str = setting(
        "average",
        "weights that are validated, and those of a checkpoint that validate, test or predict load, or that has"
        " weights alone",
        allowed=("average", "live"),
    )
    at_end: str = setting("average", "weights of the module after the fit", allowed=("average", "live"))

    def _check_together(self) -> None:
        if self.cycles and self.every_n_steps != 1:
            raise ConflictError(
                f"{self.technique}.cycles=true and every_n_steps={self.every_n_steps}: both choose the updates; write"
                f" {self.technique}.every_n_steps=1, or cycles=false"
            )


def _engine(settings: Settings, configuration: Configuration) -> str | None:
    if configuration.has("zero_offload"):
        return (
            "callback.weight_averaging and strategy=zero_offload, whose engine keeps the fp32 weights to itself; write"
            " ~strategy, or ~callback.weight_averaging and average saved checkpoints, which are plain state dicts"
        )
    return None


def _sparse(settings: Settings, configuration: Configuration) -> str | None:
    for chosen in configuration.techniques:
        last = 0 if chosen.card.zeroes_until is None else chosen.card.zeroes_until(chosen.settings)
        if settings.start_step < last:
            return (
                f"callback.weight_averaging.start_step={settings.start_step} and {chosen.option}, which sets weights to"
                f" zero until step {last}: an average with earlier weights isn't zero there; write"
                f" callback.weight_averaging.start_step={last}"
            )
    return None


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan a run that has begun to average."""
    return replace(tracing, attached=replace(settings, start_step=0, every_n_steps=1, cycles=False))


def footprint(settings: Settings, request: Request, before: Footprint) -> Footprint:
    """Return the bytes with the average, its members, and the pinned copy of the weights for one on the host."""
    count = sum(request.sizes.trainable)
    element = {"bf16-true": 2, "16-true": 2, "64-true": 8}.get(request.precision or "", 4)
    average = max(element, 4) * count
    before = replace(before, host=before.host + settings.members * average)
    if settings.device == "module":
        return replace(before, weights=before.weights + average)
    return replace(before, host=before.host + average + element * count)


CARD = Card(
    name="weight_averaging",
    target="lightning_solo.techniques.weight_averaging.technique:WeightAverage",
    phase=Phase.STEP,
    settings=Settings,
    saves="no memory but quality: the average of the weights often has a lower loss than the last ones",
    costs="4 bytes per trained parameter on the host, or with ``device=module`` on the device, and 4 for each of"
    " ``members``; on the host beside a GPU also a pinned copy of the weights, which crosses the bus in each update"
    " during the next step",
    numerics="training isn't changed by a bit; the average is computed in fp32 under every precision, from the fp32"
    " master weights where there are some",
    conflicts="Lightning's own averages, `zero_offload`, strategies for several devices",
    reference="Polyak and Juditsky 1992, SIAM J. Control Optim. 30(4); Izmailov et al. 2018, SWA,"
    " https://arxiv.org/abs/1803.05407",
    owns=frozenset({"averaged_weights"}),
    rules=(_engine, _sparse),
    on_cpu={"decay": 0.5},
    planned="lightning_solo.techniques.weight_averaging.card:planned",
    footprint="lightning_solo.techniques.weight_averaging.card:footprint",
    engines=answers(
        ddp="it wasn't compared with one process",
        fsdp="it wasn't compared on sharded weights",
        zero3="the engine keeps the fp32 weights to itself",
    ),
)
