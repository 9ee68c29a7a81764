"""The card of `distillation`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_solo.cards.card import Card
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import ROUNDING, alike
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing
from lightning_solo.errors import ConflictError
from lightning_solo.export.formats import START, TEACHER_DTYPES
from lightning_solo.units import format_bytes

TEACHER = "callback.distillation.teacher=<a run's folder, a checkpoint, a folder of Hugging Face's, or start>"


def _wrong_features(features: Mapping[str, str] | None) -> str | None:
    if features is None or (features and all(isinstance(each, str) and each for each in features.values())):
        return None
    return "expected names of layers, student's: teacher's, such as {blocks.1: blocks.3}"


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of Distillation."""

    teacher: str | None = setting(
        None,
        "a run's folder, a checkpoint, a folder of a model of Hugging Face's, or start: the module as the fit begins",
    )
    labels: str | None = setting(
        None, "instead of a teacher: a file that lightning-solo soft-labels wrote, with draws of a teacher"
    )
    alpha: float = setting(
        0.5,
        "share of the divergence in the loss; the module's own loss has the rest",
        check=lambda alpha: None if 0 < alpha <= 1 else "expected a number above 0, and at most 1",
    )
    temperature: float = setting(
        1.0,
        "divides the logits of both models; with labels it is 1",
        check=lambda temperature: None if temperature > 0 else "expected a number above 0, such as 1 or 2",
    )
    part: str = setting("auto", "the part whose output are the logits, as net; auto: the one that training_step calls")
    dtype: str = setting("auto", "type of the teacher's weights; auto: as they are stored", allowed=TEACHER_DTYPES)
    streamed: bool = setting(
        False, "keep the teacher's repeated blocks on the host, and load each as it runs; two are on the device"
    )
    features: Mapping[str, str] | None = setting(
        None,
        "layers of the student whose outputs are also to be near those of the teacher's, by their names, as"
        " {blocks.1: blocks.3}; where the widths differ, a matrix in between is trained",
        check=_wrong_features,
    )
    feature_loss: str = setting(
        "mse",
        "distance of features: mean squared error; normalized: of vectors of mean square 1, so that their scale"
        " doesn't matter",
        allowed=("mse", "normalized"),
    )
    feature_weight: float = setting(
        1.0,
        "factor of the mean of the features' distances in the loss",
        check=lambda weight: None if weight > 0 else "expected a number above 0",
    )

    def _check_together(self) -> None:
        if self.teacher is not None and self.labels is not None:
            raise ConflictError(
                f"{self.technique}.teacher={self.teacher} and labels={self.labels}, which take the place of a teacher;"
                " write one of the two"
            )
        if self.labels is not None and self.features is not None:
            raise ConflictError(
                f"{self.technique}.features and labels, which have a teacher's predictions alone; write teacher="
                " instead of labels=, or drop features"
            )
        if self.labels is not None and self.temperature != 1:
            raise ConflictError(
                f"{self.technique}.temperature={self.temperature} and labels, which were drawn at temperature 1; write"
                " temperature=1, or teacher= instead of labels="
            )


def _no_teacher(settings: Settings, configuration: Configuration) -> str | None:
    if settings.teacher is None and settings.labels is None:
        return (
            f"callback.distillation has no teacher; write {TEACHER}, or labels=<a file of lightning-solo soft-labels>"
        )
    return None


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan a teacher that is a copy; for others add an assumption with their bytes."""
    if settings.teacher == START:
        return tracing
    assumption = "distillation isn't planned: labels take a few bytes per position and draw"
    if settings.teacher is not None:
        size = format_bytes(_bytes(Path(settings.teacher).expanduser()))
        assumption = (
            f"distillation isn't planned: the teacher takes its weights, at most the {size} of its files, and the"
            " activations of one layer, its logits and their gradient"
        )
    return tracing.assuming(assumption, attached=None)


def _bytes(path: Path) -> int:
    """Return the bytes of a file, or of the weights in a folder."""
    if path.is_file():
        return os.path.getsize(path)
    files = list(path.glob("*.safetensors")) or list(path.glob("checkpoints/last.ckpt"))
    return sum(map(os.path.getsize, files))


CARD = Card(
    name="distillation",
    target="lightning_solo.techniques.distillation.technique:Distillation",
    phase=Phase.DATA,  # before adapters and what else changes the module of which it may take a copy
    settings=Settings,
    saves="no memory: a small module learns from the predictions of a larger one, or of itself uncompressed",
    costs="the teacher's weights and forward, its logits and one gradient of their size; with ``labels`` none of these",
    numerics="another loss: ``(1 - alpha)`` of the module's own, ``alpha`` of the divergence from the teacher, and with"
    " ``features`` their distances",
    conflicts="manual optimization (refused)",
    reference="Hinton et al. 2015, https://arxiv.org/abs/1503.02531; Romero et al. 2015, FitNets,"
    " https://arxiv.org/abs/1412.6550; Anshumann et al. 2025, Sparse Logit Sampling,"
    " https://arxiv.org/abs/2503.16870",
    rules=(_no_teacher,),
    caveat=lambda settings: "trains towards the outputs of another model",
    on_cpu={"teacher": START, "alpha": 0.1},
    planned="lightning_solo.techniques.distillation.card:planned",
    engines=alike(ROUNDING),
)
