"""Lightning with a preset of lightning-solo."""

from typing import Any

import lightning as L
import project
import torch

import lightning_solo as solo


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = project.model()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), **project.ADAMW, fused=True)


def main(preset: Any, overrides: Any = ()) -> None:
    trainer = L.Trainer(
        max_steps=project.STEPS,
        gradient_clip_val=project.CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **solo.trainer_kwargs(preset, overrides),
    )
    trainer.fit(Module(), project.loader())
