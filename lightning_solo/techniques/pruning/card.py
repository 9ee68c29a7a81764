"""The card of `pruning`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_solo.cards.card import Card, resources
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import alike
from lightning_solo.cards.footprint import Footprint, Request
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing
from lightning_solo.errors import ConflictError, PresetError

OPTION = "callback.pruning"
FOURS = "2:4"
STRUCTURED = ("channels", "heads")
"""Patterns of which whole parts are removed."""


def _wrong_share(value: float | None) -> str | None:
    return None if value is None or 0 < value < 1 else "expected a share above 0 and below 1"


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of Pruning."""

    amount: float | None = setting(None, "share of the weights that are pruned, as 0.5", check=_wrong_share)
    threshold: float | None = setting(
        None,
        "instead of amount: weights of smaller magnitude are pruned",
        check=lambda value: None if value is None or value > 0 else "expected a number above 0",
    )
    pattern: str = setting(
        "unstructured",
        "2:4 prunes two of each four inputs of a linear layer; channels and heads are removed from the module",
        allowed=("unstructured", FOURS, *STRUCTURED),
    )
    scope: str = setting(
        "layer", "amount is the share of each parameter, or of all weights together", allowed=("layer", "global")
    )
    schedule: str = setting(
        "once",
        "once at step begin; cubic: more and more from begin to end; regrow: once at begin, then until end the smallest"
        " are pruned and as many grow again at random",
        allowed=("once", "cubic", "regrow"),
    )
    begin: int = setting(0, "optimizer step before which weights are first pruned", at_least=0)
    end: int | None = setting(None, "optimizer step before which the mask changes last; null where it changes once")
    every_n_steps: int = setting(100, "optimizer steps between changes of the mask", at_least=1)
    regrown: float = setting(
        0.3, "of schedule=regrow: share of the kept weights that change places with pruned ones", check=_wrong_share
    )
    seed: int = setting(0, "of the random choice of regrown weights", at_least=0)
    layers: Sequence[str] | None = setting(
        None, "patterns of names of parts or parameters to prune, as [mlp]; null: all linear, convolution, recurrent"
        " and attention layers, and experts",
    )  # fmt: skip
    kept: Sequence[str] = setting((), "patterns of names of parts or parameters that aren't pruned, as [head]")

    def _check_together(self) -> None:
        if self.amount is not None and self.threshold is not None:
            raise ConflictError(
                f"{self.technique}.amount={self.amount} and {self.technique}.threshold={self.threshold}: each says how"
                f" many weights are pruned; drop one of them"
            )
        if self.pattern == FOURS and (self.threshold is not None or self.amount not in (None, 0.5)):
            raise ConflictError(
                f"{self.technique}.pattern=2:4 prunes half of the weights, whatever their magnitude; drop"
                f" {self.technique}.amount and threshold"
            )
        patterns = {"once": (self.pattern,), "cubic": ("unstructured", *STRUCTURED)}
        if self.schedule != "once" and (
            self.amount is None or self.pattern not in patterns.get(self.schedule, ("unstructured",))
        ):
            raise ConflictError(
                f"{self.technique}.schedule={self.schedule} needs {self.technique}.amount and no other pattern than"
                f" {' or '.join(patterns.get(self.schedule, ('unstructured',)))}; write {self.technique}.schedule=once,"
                f" or {self.technique}.amount=0.5 alone"
            )
        if self.schedule == "once" and self.end not in (None, self.begin):
            raise ConflictError(
                f"{self.technique}.end={self.end} and {self.technique}.schedule=once, which prunes at begin; write"
                f" {self.technique}.schedule=cubic or regrow, or drop end"
            )
        if self.schedule != "once" and (self.end is None or self.end <= self.begin):
            raise PresetError(
                f"{self.technique}.end={self.end} with {self.technique}.schedule={self.schedule} and"
                f" {self.technique}.begin={self.begin}: write {self.technique}.end=<a later optimizer step>"
            )

    @property
    def structured(self) -> bool:
        """Whether whole channels or heads are removed."""
        return self.pattern in STRUCTURED

    @property
    def removes_later(self) -> bool:
        """Whether channels or heads are removed while the run trains, and not before."""
        return self.structured and self.last_step > 0

    @property
    def last_step(self) -> int:
        """The optimizer step before which the mask changes last."""
        return self.begin if self.end is None else self.end

    def change_at(self, step: int) -> int | None:
        """Return the latest optimizer step at which the mask changes, up to a step; None before the first one.

        >>> settings = Settings(amount=0.5, schedule="cubic", begin=10, end=45, every_n_steps=20)
        >>> [settings.change_at(step) for step in (9, 10, 29, 30, 44, 45, 99)]
        [None, 10, 10, 30, 30, 45, 45]
        """
        if step < self.begin:
            return None
        if step >= self.last_step:
            return self.last_step
        return step - (step - self.begin) % self.every_n_steps

    def share_at(self, step: int) -> float:
        """Return the share of pruned weights at a step of the schedule.

        It is ``amount * (1 - (1 - t)**3)`` with t from 0 at begin to 1 at end (Zhu and Gupta 2017, equation 1).

        >>> settings = Settings(amount=0.8, schedule="cubic", begin=10, end=30)
        >>> [round(settings.share_at(step), 3) for step in (10, 20, 30)]
        [0.0, 0.7, 0.8]
        """
        amount = self.amount or 0.0
        if self.schedule != "cubic":
            return amount
        return amount * (1 - (1 - (step - self.begin) / (self.last_step - self.begin)) ** 3)


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan masks from the first step on, and a module with all its channels and heads."""
    if settings.structured:
        assumption = f"pruning: planned with all {settings.pattern}; the run takes less"
        return tracing.assuming(assumption, attached=None)
    return replace(tracing, attached=replace(settings, schedule="once", begin=0, end=None))


def footprint(settings: Settings, request: Request, before: Footprint) -> Footprint:
    """Return the bytes with a bit for each trained weight."""
    if settings.structured:
        return before
    return replace(before, weights=before.weights + -(-sum(request.sizes.trainable) // 8))


_OF_SHAPES = frozenset({"weights", "optimizer_states", "gradients", "products"})
"""Resources whose owners keep tensors as large as parameters."""


def _others(settings: Settings, configuration: Configuration) -> str | None:
    for chosen in configuration.techniques:
        name, others = chosen.card.name, vars(chosen.settings)
        if chosen.card.group == "strategy":
            return (
                f"{OPTION} and strategy={name}, whose engine steps weights of its own, which no mask reaches; write"
                f" ~strategy, or ~{OPTION}"
            )
        if name == "adapters":
            return (
                f"{OPTION} and {chosen.choice}: adapters freeze the weights that would be pruned; write"
                f" {chosen.removal}, which trains them, or ~{OPTION}"
            )
        if settings.structured and name in ("low_rank", "factorized_embedding", "shared_blocks"):
            return (
                f"{OPTION}.pattern={settings.pattern} and {chosen.choice}: both make layers smaller, and a resumed run"
                f" couldn't tell their sizes apart; write ~{OPTION} in this run and {chosen.removal} in a second fit of"
                " the module, or the other way round"
            )
        taken = chosen.owned() | resources(chosen.card.frees, chosen.settings)
        rewinds = "rewind" in vars(chosen.settings).values()
        if settings.removes_later and (rewinds or taken & _OF_SHAPES):
            return (
                f"{OPTION}.pattern={settings.pattern} at step {settings.last_step} and {chosen.choice}, which keeps"
                f" tensors of the larger shapes; write {OPTION}.begin=0 with {OPTION}.schedule=once, or"
                f" {chosen.removal}"
            )
        if settings.structured:
            continue
        for key, value in (("back_end", "own"), ("moment_bits", 8), ("state_budget", None)):
            if name == "compact_states" and (others[key] != value and others[key] != 32):
                return (
                    f"{OPTION} and {chosen.option}.{key}={others[key]}, whose optimizer states can't be set to zero"
                    f" weight by weight; write {chosen.option}.{key}={'null' if value is None else value}, or ~{OPTION}"
                )
    return None


CARD = Card(
    name="pruning",
    target="lightning_solo.techniques.pruning.technique:Pruning",
    phase=Phase.STATES,  # outside STEP: masks act after whatever steps
    settings=Settings,
    saves="masks nothing in training; removed channels and heads their weights, states and time; `lightning-solo export"
    " --format pruned` writes 90 % sparse weights in about half the bytes or less",
    costs="masks a bit per weight, and a pass over weights and moments after each step",
    numerics="the pruned weights and their moments are exactly zero after each step; the others are trained as before."
    " Without channels or heads the module computes as if the next layer's inputs from them were zero",
    conflicts="adapters, whose base is frozen; strategies with an engine of their own; states of ``compact_states`` in"
    " 4 bits, on the host or of another library",
    reference="Zhu and Gupta 2017, arXiv 1710.01878 (cubic); Mocanu et al. 2018, SET, arXiv 1707.04780 (regrow);"
    " Mishra et al. 2021, arXiv 2104.08378 (2:4)",
    zeroes_until=lambda settings: int(settings.last_step),
    rules=(_others,),
    caveat=lambda settings: "sets weights to zero",
    on_cpu={"amount": 0.5},
    planned="lightning_solo.techniques.pruning.card:planned",
    footprint="lightning_solo.techniques.pruning.card:footprint",
    engines=alike("it wasn't compared with one process"),
)
