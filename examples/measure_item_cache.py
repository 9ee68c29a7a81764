"""Measure an epoch over JPEG images with `item_cache`, without it, and with a dictionary in the data set.

The dictionary is what one writes by hand: each worker process keeps the items that it has loaded, so workers have to
stay, and an item is in memory once per worker. Each image is decoded to 224 x 224 points; a step does nothing, so that
only loading is measured. Ways alternate; the figures are medians.
`python examples/measure_item_cache.py --write examples/results/item_cache_cpu.json`
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from PIL import Image
from this_machine import machine, versions
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_solo as solo

WAYS = ("loaded each time", "a dictionary", "item_cache", "item_cache, place=disk")
WORKERS, EPOCHS = (0, 2), 5


class Images(Dataset[Tensor]):
    """JPEG images in memory, of smooth random colours, decoded at each access."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.files: list[bytes] = []
        for _ in range(count):
            coarse = torch.randint(256, (1, 3, 28, 28), generator=generator).float()
            points = nn.functional.interpolate(coarse, scale_factor=8, mode="bilinear")[0].byte().permute(1, 2, 0)
            file = io.BytesIO()
            Image.fromarray(points.numpy()).save(file, "JPEG", quality=90)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(io.BytesIO(self.files[index])) as image:
            width, height = image.size
            points = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return points.view(height, width, 3).permute(2, 0, 1)


class Remembered(Images):
    """The same with a dictionary of the items that this process has loaded."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.items: dict[int, Tensor] = {}

    def __getitem__(self, index: int) -> Tensor:
        if index not in self.items:
            self.items[index] = super().__getitem__(index).contiguous()
        return self.items[index]


class Nothing(L.LightningModule):
    """Trains on nothing; notes when each epoch starts, and at the last start the memory of workers and their parent."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.starts: list[float] = []
        self.mebibytes = 0.0

    def on_train_epoch_start(self) -> None:
        self.starts.append(time.perf_counter())

    def on_train_batch_end(self, *_: Any) -> None:
        if self.current_epoch == EPOCHS - 1:
            self.mebibytes = max(self.mebibytes, resident())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weight * 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def resident() -> float:
    """Return the MiB of this process, its children and its files in memory; a shared page is counted in parts (PSS)."""
    own = os.getpid()
    children = Path(f"/proc/{own}/task/{own}/children").read_text(encoding="ascii").split()
    kilobytes = 0
    for process in [str(own), *children]:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines():
            kilobytes += int(line.split()[1]) if line.startswith("Pss:") else 0
    files = [file for file in Path("/proc/self/fd").iterdir() if os.path.islink(file)]
    in_memory = sum(file.stat().st_blocks * 512 for file in files if os.readlink(file).startswith("/memfd:"))
    return kilobytes / 1024 + in_memory / 2**20


def measure(way: str, workers: int, count: int) -> tuple[float, float]:
    """Return the milliseconds per item of epochs after the first, and the most MiB that it takes more."""
    data = (Remembered if way == "a dictionary" else Images)(count)
    loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    place = "disk" if way.endswith("disk") else "memory"
    callbacks = [solo.ItemCache(budget="2GiB", place=place)] if way.startswith("item_cache") else []
    torch.manual_seed(0)
    module, before = Nothing(), resident()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, callbacks=callbacks, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    ends = [*module.starts[2:], time.perf_counter()]
    epochs = [after - start for start, after in zip(module.starts[1:], ends, strict=True)]
    return 1e3 * statistics.median(epochs) / count, module.mebibytes - before


def main() -> None:
    """Measure, and write the JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for workers in WORKERS:
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(arguments.repeats):
            for way in WAYS:
                found[way].append(measure(way, workers, arguments.items))
        for way, pairs in found.items():
            times, mebibytes = zip(*pairs, strict=True)
            row = {"workers": workers, "way": way, "item_ms": round(statistics.median(times), 3)}
            rows.append({**row, "mebibytes": round(statistics.median(mebibytes))})
            print(rows[-1])
    result = {"machine": machine(), "versions": versions(), "items": arguments.items, "repeats": arguments.repeats}
    if arguments.write is not None:
        arguments.write.write_text(json.dumps({**result, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
