"""The Trainer of Composer."""

from typing import Any

import project
import torch
from composer import Trainer
from composer.algorithms import GradientClipping
from composer.models import ComposerModel


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.model = project.model()

    def forward(self, batch: Any) -> Any:
        return self.model(**batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.loss


def main() -> None:
    model = Model()
    Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), **project.ADAMW, fused=True),
        train_dataloader=project.loader(),
        max_duration=f"{project.STEPS}ba",
        algorithms=[GradientClipping(clipping_type="norm", clipping_threshold=project.CLIP)],
        progress_bar=False,
    ).fit()
