"""A Hydra application of one's own that uses the presets: `python train.py solo=checkpointing model.width=64`.

Nothing here registers anything: once lightning-solo is installed, the group `solo` is there.
"""

import hydra
import lightning as L
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_solo as solo


class Regression(L.LightningModule):
    """An ordinary module, which knows nothing of lightning-solo."""

    def __init__(self, width: int, depth: int, lr: float) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(depth)
        ]
        self.net = nn.Sequential(*blocks, nn.Linear(width, 1))
        self.lr = lr

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


@hydra.main(config_path="conf", config_name="train", version_base="1.3")
def main(cfg: DictConfig) -> None:
    L.seed_everything(cfg.seed)
    x = torch.randn(256, cfg.model.width)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
    trainer = L.Trainer(**solo.trainer_kwargs(cfg.solo), **cfg.trainer)
    trainer.fit(Regression(**cfg.model), loader)
    print(f"loss {float(trainer.callback_metrics['train/loss']):.3f} with precision {trainer.precision}")


if __name__ == "__main__":
    main()
