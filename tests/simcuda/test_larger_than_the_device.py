"""A model that is larger than the device trains on it, with the bits of a run on a device that holds it."""

from __future__ import annotations

import gc
import hashlib
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_solo as solo
from lightning_solo.machine import host_memory
from lightning_solo.units import GiB, MiB
from tests.simcuda import device
from tests.simcuda.test_presets import QUIET

pytestmark = [pytest.mark.simcuda, pytest.mark.filterwarnings("ignore:You are using a CUDA device")]


class Block(nn.Module):
    """A residual block of two linear layers: 8 * width ** 2 parameters in bf16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(*shape, bias=False, dtype=torch.bfloat16) for shape in ((width, 4 * width), (4 * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Deep(L.LightningModule):
    """Blocks between two layers."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.stem(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def trained(preset: str, folder: Path, width: int, blocks: int) -> tuple[int, list[float], list[str]]:
    """Return the number of parameters, the losses of two steps, and a hash of each weight after them."""
    torch.manual_seed(0)
    module, losses = Deep(width, blocks), []
    loss_of = L.callbacks.LambdaCallback(
        on_train_batch_end=lambda trainer, module, outputs, *_: losses.append(float(outputs["loss"]))
    )
    kwargs = {"accelerator": "cuda", **solo.trainer_kwargs(preset, callbacks=[loss_of])}
    torch.cuda.reset_peak_memory_stats()
    L.Trainer(**{**kwargs, **QUIET, "default_root_dir": str(folder), "max_epochs": 1}).fit(
        module, DataLoader(torch.randn(4, 8), batch_size=2)
    )
    hashes = [hashlib.blake2b(p.detach().cpu().view(torch.uint8).numpy()).hexdigest() for p in module.parameters()]
    return sum(p.numel() for p in module.parameters()), losses, hashes


@pytest.mark.long
@pytest.mark.parametrize(
    ("width", "blocks", "room", "host"),
    [
        (512, 40, 96 * MiB, GiB),
        pytest.param(2560, 39, 2 * GiB, 24 * GiB, marks=pytest.mark.timeout(3600)),  # minutes
    ],
    ids=["82 million in 96 MiB", "2 billion in 2 GiB"],
)
def test_bits_are_those_of_a_resident_run(width: int, blocks: int, room: int, host: int, tmp_path: Path) -> None:
    if host_memory()[1] < host:
        pytest.skip(f"needs {host / GiB:.0f} GiB of host memory")
    count, losses, hashes = trained("compact_checkpointing", tmp_path, width, blocks)
    resident = torch.cuda.max_memory_allocated()
    assert count > 8 * blocks * width**2
    assert resident > 5 * count > 4 * room, "it needs more than the small device has"
    gc.collect()
    torch.cuda.empty_cache()
    with device.memory_of(room):
        assert trained("stream_checkpointing", tmp_path, width, blocks) == (count, losses, hashes)
        assert torch.cuda.max_memory_allocated() < room
    assert losses[0] != losses[1]
