"""The card of `optimizer_replacement`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_solo.cards.blocks import blocks_setting
from lightning_solo.cards.card import Card
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import ROUNDING, answers
from lightning_solo.cards.footprint import Footprint, Request
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.errors import ConflictError, PresetError

OPTION = "callback.optimizer_replacement"
"""The path of the settings, as messages name it."""
STATE_BYTES = {
    "adamw": 8.0,
    "sgd": 4.0,
    "adafactor": 0.0,
    "lion": 4.0,
    "muon": 4.0,
    "adamw_8bit": 2.0625,
    "adamw_4bit": 1.0625,
    "schedule_free_adamw": 8.0,
}
"""Name -> bytes of states per parameter of a large matrix in fp32."""
DECAY_SHARE = 0.2
LOW_BIT = ("adamw_8bit", "adamw_4bit")
OWN_STATES = (*LOW_BIT, "muon", "schedule_free_adamw")
"""Optimizers whose states and weights no other technique can store."""
OF_WHOLE_WEIGHTS = {
    "adafactor": "averages squared gradients over whole rows and columns",
    "schedule_free_adamw": "saves averages of whole weights",
}


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of OptimizerReplacement."""

    optimizer: str | None = setting(
        "adamw", "takes the place of the module's own; null: the module's own", allowed=(*STATE_BYTES, None)
    )
    lr: float | None = setting(
        None, "learning rate; groups keep their ratios to it. null: the module's, if the optimizer is of its kind",
        check=lambda lr: None if lr is None or lr > 0 else "expected a number above 0",
    )  # fmt: skip
    weight_decay: float | None = setting(
        None, "of all parameters but vectors, biases and norms; null: each group's own", at_least=0
    )
    decay_embeddings: bool = setting(True, "whether weight_decay acts on embeddings, and heads tied to them")
    options: Mapping[str, Any] | None = setting(
        None, "further arguments of the optimizer, as {betas: [0.9, 0.95]}; null: its defaults"
    )
    schedule: str | None = setting(
        None,
        "of the learning rate, in optimizer steps to the end of the run; wsd is constant and falls at the end. It"
        " replaces the module's schedulers; null: keeps them",
        allowed=("constant", "linear", "cosine", "wsd", None),
    )
    warmup_steps: int = setting(0, "optimizer steps in which the schedule rises to lr", at_least=0)
    decay_share: float = setting(
        DECAY_SHARE,
        "share of the run in which wsd falls",
        check=lambda share: None if 0 < share <= 1 else "expected a number above 0, and at most 1",
    )
    blocks: str | Sequence[str] = blocks_setting("the repeated blocks of any model, whose matrices Muon steps")

    def _check_together(self) -> None:
        if self.optimizer is None and self.options:
            raise PresetError(f"{self.technique}.options={dict(self.options)}: write the optimizer that they are for")
        for name in sorted({"lr", "weight_decay"} & {*(self.options or ())}):
            raise PresetError(
                f"{self.technique}.options has {name}, which is a setting of its own; write"
                f" {self.technique}.{name}={dict(self.options or {})[name]}"
            )
        if self.schedule != "wsd" and self.decay_share != DECAY_SHARE:
            raise PresetError(
                f"{self.technique}.decay_share={self.decay_share} is of wsd; write {self.technique}.schedule=wsd, or"
                f" drop {self.technique}.decay_share"
            )
        if self.schedule is None and self.warmup_steps:
            raise PresetError(
                f"{self.technique}.warmup_steps={self.warmup_steps} is of a schedule; write"
                f" {self.technique}.schedule=constant, linear, cosine or wsd"
            )
        if self.optimizer == "schedule_free_adamw" and self.schedule not in (None, "constant"):
            raise ConflictError(
                f"{self.technique}.optimizer=schedule_free_adamw and schedule={self.schedule}: its average takes the"
                f" place of a falling rate; write {self.technique}.schedule=constant"
            )


def _states(settings: Settings, configuration: Configuration) -> str | None:
    """Return why another technique can't store these states; None if there is none or it can."""
    for chosen in configuration.techniques:
        if "optimizer_states" not in chosen.owned():
            continue
        if chosen.card.group == "strategy":
            return (
                f"{OPTION} and {chosen.choice}, whose engine makes the optimizer of configure_optimizers itself; write"
                f" ~{chosen.option}, or ~{OPTION} and return the optimizer from configure_optimizers"
            )
        if settings.optimizer in OWN_STATES:
            return (
                f"{OPTION}.optimizer={settings.optimizer} and {chosen.choice}, which stores states of its own; write"
                f" {OPTION}.optimizer=adamw or ~{chosen.option}"
            )
    return None


def _precision(settings: Settings, configuration: Configuration) -> str | None:
    if settings.optimizer == "schedule_free_adamw" and configuration.precision in ("bf16-true", "16-true"):
        return (
            f"{OPTION}.optimizer=schedule_free_adamw and precision={configuration.precision}, which rounds the small"
            " changes of its average away; write precision=bf16-mixed"
        )
    return None


def _under_fsdp(settings: Settings, configuration: Configuration) -> str:
    if settings.optimizer in OF_WHOLE_WEIGHTS:
        return (
            f"{settings.optimizer} {OF_WHOLE_WEIGHTS[settings.optimizer]}, and each process has shards of them; write"
            f" {OPTION}.optimizer=adamw"
        )
    return ROUNDING


def _owned(settings: Settings) -> frozenset[str]:
    return frozenset({"optimizer"} | ({"averaged_weights"} if settings.optimizer == "schedule_free_adamw" else set()))


def footprint(settings: Settings, request: Request, before: Footprint) -> Footprint:
    """Return the bytes with the states of the optimizer, as if all parameters were large matrices."""
    if settings.optimizer is None:
        return before
    share = STATE_BYTES[settings.optimizer] / STATE_BYTES["adamw"]
    return replace(before, optimizer_states=round(before.optimizer_states * share))


CARD = Card(
    name="optimizer_replacement",
    target="lightning_solo.techniques.optimizer_replacement.technique:OptimizerReplacement",
    phase=Phase.OPTIMIZER,
    settings=Settings,
    saves="optimizer states: AdamW has 8 bytes per parameter in fp32, Lion and SGD with momentum 4, Muon 4 per element"
    " of a matrix, 8-bit AdamW 2.06, 4-bit AdamW 1.06, Adafactor a row and a column per matrix",
    costs="Muon: five products of each matrix with itself in every step. Schedule-free: a copy of the weights to the"
    " host and back around each validation",
    numerics="those of the chosen optimizer; `adamw` with `lr: null` is the module's own AdamW",
    conflicts="manual optimization, several optimizers, strategies with an engine of their own; `muon`, `adamw_8bit`,"
    " `adamw_4bit` and `schedule_free_adamw` with `compact_states`",
    reference="Chen et al. 2023 (Lion), arXiv 2302.06675; Liu et al. 2025 (Muon), arXiv 2502.16982; Defazio et al. 2024"
    " (schedule-free), arXiv 2405.15682; Hägele et al. 2024 (wsd), arXiv 2405.18392",
    owns=_owned,
    frees=lambda settings: frozenset({"optimizer_states"} if settings.optimizer in LOW_BIT else ()),
    rules=(_states, _precision),
    caveat=lambda settings: "trains by another optimizer or schedule than the module's",
    on_cpu={"weight_decay": 0.05, "schedule": "constant"},  # near the AdamW of other runs, for comparisons
    footprint="lightning_solo.techniques.optimizer_replacement.card:footprint",
    engines=answers(
        ddp=ROUNDING, fsdp=_under_fsdp, zero3="the engine makes the optimizer of configure_optimizers itself"
    ),
)
