"""A model that is larger than the device trains on it, with the bits of a run on a device that holds it.

Each run is a process of its own, so that the host holds one model at a time.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_solo as solo
from lightning_solo.machine import host_memory
from lightning_solo.units import GiB, MiB
from tests.simcuda import device
from tests.simcuda.conftest import ROOT
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


def train(preset: str, folder: Path, width: int, blocks: int) -> dict[str, Any]:
    """Train for two steps; return the number of parameters, the losses, a hash of each weight, and the peak."""
    torch.manual_seed(0)
    module, losses = Deep(width, blocks), []
    loss_of = L.callbacks.LambdaCallback(
        on_train_batch_end=lambda trainer, module, outputs, *_: losses.append(float(outputs["loss"]))
    )
    kwargs = {"accelerator": "cuda", **solo.trainer_kwargs(preset, callbacks=[loss_of])}
    L.Trainer(**{**kwargs, **QUIET, "default_root_dir": str(folder), "max_epochs": 1}).fit(
        module, DataLoader(torch.randn(4, 8), batch_size=2)
    )
    peak = torch.cuda.max_memory_allocated()
    hashes = [hashlib.blake2b(p.detach().cpu().view(torch.uint8).numpy()).hexdigest() for p in module.parameters()]
    return {"count": sum(p.numel() for p in module.parameters()), "losses": losses, "hashes": hashes, "peak": peak}


def trained(preset: str, folder: Path, width: int, blocks: int, room: int = 0) -> dict[str, Any]:
    """Return what `train` returns in a process of its own, on a device of ``room`` bytes, or of its usual memory."""
    file = folder / f"{preset}.json"
    arguments = [preset, str(file), *map(str, (width, blocks, room))]
    command = [sys.executable, "-m", "tests.simcuda", "-m", "tests.simcuda.test_larger_than_the_device", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    assert not done.returncode, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


@pytest.mark.long
@pytest.mark.timeout(3600)  # minutes
@pytest.mark.parametrize(
    ("width", "blocks", "room", "host"),
    [
        (512, 40, 96 * MiB, GiB),
        (2560, 39, 2 * GiB, 14 * GiB),
    ],
    ids=["82 million in 96 MiB", "2 billion in 2 GiB"],
)
def test_bits_are_those_of_a_resident_run(width: int, blocks: int, room: int, host: int, tmp_path: Path) -> None:
    if host_memory()[1] < host:
        pytest.skip(f"needs {host / GiB:.0f} GiB of free host memory")
    resident = trained("compact_checkpointing", tmp_path, width, blocks)
    assert resident["count"] > 8 * blocks * width**2
    assert resident["peak"] > 5 * resident["count"] > 4 * room, "it needs more than the small device has"
    streamed = trained("stream_checkpointing", tmp_path, width, blocks, room)
    assert streamed["peak"] < room
    for what in ("count", "losses", "hashes"):
        assert streamed[what] == resident[what]
    assert resident["losses"][0] != resident["losses"][1]


if __name__ == "__main__":
    name, file, *numbers = sys.argv[1:]
    width, blocks, room = map(int, numbers)
    with device.memory_of(room) if room else nullcontext():
        found = train(name, Path(file).parent, width, blocks)
    Path(file).write_text(json.dumps(found), encoding="utf-8")
