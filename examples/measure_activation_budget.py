"""Counts the peak of training steps against the budget asked for, of five kinds of models at five budgets each.

fp32 on the CPU, with AdamW. Budgets are spread evenly between the peak with every block recomputed and that with none.
An independent ledger counts each whole step, and the weights after training are compared with those of plain fits, bit
for bit.

    python examples/measure_activation_budget.py      # to examples/results/activation_budget_cpu.json, about a minute
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from this_machine import machine, versions
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_solo as solo
from lightning_solo.memory.ledger import Ledger
from lightning_solo.reference.byte_gpt import ByteGPT

BUDGETS = 5
STEPS = 4  # recomputed, counted, checked, and one more


class GPT(nn.Module):
    """A byte GPT with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ByteGPT(width=128, depth=12, heads=4, context=128)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


class Bottleneck(nn.Module):
    """A ResNet's block, whose result is what its last operator saves."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        middle = width // 4
        self.body = nn.Sequential(
            nn.Conv2d(inside, middle, 1, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU(),
            nn.Conv2d(middle, middle, 3, stride, 1, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU(),
            nn.Conv2d(middle, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut = nn.Identity() if inside == width else nn.Conv2d(inside, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Four stages of bottlenecks: (batch, 3, height, width) -> a loss."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64, 64, 64, 128, 128, 128, 256, 256, 256, 512, 512]
        self.stem = nn.Conv2d(3, 64, 3, 2, 1)
        pairs = zip([64, *widths], widths, strict=False)
        self.blocks = nn.Sequential(*[Bottleneck(inside, width, 1 + (inside < width)) for inside, width in pairs])
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3))).square().mean()


class Recurrent(nn.Module):
    """An LSTM layer with a residual connection: (batch, time, width), unchanged."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(self.norm(x))[0]


class LSTMs(nn.Module):
    """Eight recurrent layers: (batch, time) of bytes -> a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 96)
        self.layers = nn.ModuleList(Recurrent(96) for _ in range(8))
        self.head = nn.Linear(96, 256)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x[:, :-1])
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), x[:, 1:].flatten())


class Convolutions(nn.Module):
    """A U-Net's block of two convolutions."""

    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, width, 3, 1, 1)
        self.norm = nn.GroupNorm(8, width)
        self.second = nn.Conv2d(width, width, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.silu(self.norm(self.first(x))))


class UNet(nn.Module):
    """Four levels down and up, with skips: (batch, 3, height, width) -> a loss."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16, 32, 64, 128]
        self.down = nn.ModuleList(Convolutions(i, w) for i, w in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(Convolutions(w + n, w) for w, n in zip(widths[-2::-1], widths[:0:-1], strict=True))
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden, skips = x, []
        for level, block in enumerate(self.down):
            hidden = block(F.avg_pool2d(hidden, 2) if level else hidden)
            skips.append(hidden)
        skips.pop()
        for block in self.up:
            hidden = block(torch.cat([F.interpolate(hidden, scale_factor=2), skips.pop()], 1))
        return F.mse_loss(self.head(hidden), x)


class Messages(nn.Module):
    """A layer of a graph network: nodes (nodes, width) and edges (2, edges) -> nodes."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, inner), nn.GELU(), nn.Linear(inner, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        messages = self.message(torch.cat([nodes[edges[0]], nodes[edges[1]]], 1))
        return self.norm(nodes + torch.zeros_like(nodes).index_add(0, edges[1], messages))


class Graph(nn.Module):
    """Six layers of growing width inside: edges (2, edges) of 512 nodes -> a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = nn.Parameter(torch.randn(512, 32))
        self.layers = nn.ModuleList(Messages(32, 32 * (1 + layer)) for layer in range(6))

    def forward(self, edges: Tensor) -> Tensor:
        nodes = self.nodes
        for layer in self.layers:
            nodes = layer(nodes, edges)
        return nodes[edges[0]].mul(nodes[edges[1]]).square().mean()


Batch = Callable[[], Tensor]
MODELS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "GPT, 12 blocks": (GPT, lambda: torch.randint(256, (8, 129))),
    "ResNet, 11 bottlenecks in 4 stages": (ResNet, lambda: torch.randn(8, 3, 64, 64)),
    "LSTM, 8 layers": (LSTMs, lambda: torch.randint(256, (16, 65))),
    "U-Net, 7 blocks of 4 levels": (UNet, lambda: torch.randn(4, 3, 64, 64)),
    "graph network, 6 layers": (Graph, lambda: torch.randint(512, (2, 4096))),
}


class Module(L.LightningModule):
    """Trains a network that returns its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Peaks(L.Callback):
    """Counts each step with a ledger of its own, and what is kept in it."""

    def __init__(self, technique: solo.ActivationCheckpointing | None) -> None:
        self.technique = technique
        self.bytes: list[int] = []
        self.kept = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.ledger = Ledger(pl_module, trainer.optimizers)
        self.ledger.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.ledger.__exit__(None, None, None)
        self.bytes.append(self.ledger.peak_bytes)
        self.kept = len(self.technique.kept) if self.technique is not None else 0


def fit(name: str, technique: solo.ActivationCheckpointing | None) -> tuple[Peaks, list[Tensor]]:
    """Return the counts of a fit, and the weights behind it."""
    make, batch = MODELS[name]
    torch.manual_seed(1)
    module, peaks = Module(make()), Peaks(technique)
    batches: Any = DataLoader([batch() for _ in range(STEPS)], batch_size=None)
    callbacks = [peaks] if technique is None else [peaks, technique]
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, enable_model_summary=False, callbacks=callbacks, **quiet)
    trainer.fit(module, batches)
    return peaks, list(module.parameters())


def measure(name: str) -> list[dict[str, Any]]:
    """Return a row for each budget."""
    plain, weights = fit(name, None)
    least, most = max(fit(name, solo.ActivationCheckpointing())[0].bytes), max(plain.bytes)
    rows = []
    for number in range(BUDGETS):
        budget = least + (most - least) * number // (BUDGETS - 1)
        technique = solo.ActivationCheckpointing(budget=budget)
        peaks, trained = fit(name, technique)
        if not all(map(torch.equal, weights, trained)):
            raise SystemExit(f"{name}: other weights than those of the plain fit")
        row = {"model": name, "budget": budget, "peak": max(peaks.bytes), "kept": peaks.kept}
        rows.append(row)
        print(row, f"{row['peak'] / budget:.4f}", flush=True)
    return rows


def main() -> None:
    """Count and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, default=Path("examples/results/activation_budget_cpu.json"))
    path = parser.parse_args().write
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    result = {
        "command": "python examples/measure_activation_budget.py",
        "machine": machine(),
        "versions": versions(),
        "what": "peaks of training steps in fp32 with AdamW, counted on the CPU; weights equal to the bit in every row",
        "rows": [row for name in MODELS for row in measure(name)],
    }
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
