"""Modules that nobody prepared for a plan: small, of several kinds, with the habits that trip a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_solo.planner.plan import Plan
from lightning_solo.units import GiB


def plan_with(**fields: Any) -> Plan:
    """Return a plan with these fields, and any values in the others."""
    return Plan(
        **{
            "preset": "zero_offload",
            "device": "rtx_4090",
            "micro_batch": 4,
            "peak_bytes": GiB,
            "breakdown": {"weights": GiB},
            "phases": {"forward": 2, "optimizer_step": 3},
            "needed_bytes": 2 * GiB,
            "reserved_bytes": 3 * GiB,
            "budget_bytes": 20 * GiB,
            "verdict": "fits",
            "host_bytes": 10 * GiB,
            "seconds_per_step": 1.0,
            "flops": 1,
            "bytes_moved": 1,
            "largest_micro_batch": 3,
            **fields,
        }
    )


class Classifier(L.LightningModule):
    """Any network of (batch, ...) -> (batch, classes)."""

    def __init__(self, network: nn.Module, optimizer: Callable[[Any], Any] = torch.optim.AdamW) -> None:
        super().__init__()
        self.network = network
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.network(x).float(), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Recurrent(nn.Module):
    """The last state of an LSTM or a GRU, classified."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.layers = kind(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])


class WithMetrics(Classifier):
    """Logs a metric of torchmetrics, reads numbers, leaves out batches that are not finite."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.accuracy = MulticlassAccuracy(5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self.network(x)
        loss = F.cross_entropy(scores, y)
        self.accuracy(scores, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        if torch.isnan(loss):
            return None
        self.log("number", float(loss.detach()))
        return {"loss": loss, "kept": scores.detach()}


class Masked(Classifier):
    """Takes the loss over the elements of a mask."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        scores = self.network(x)
        keep = y >= 0
        return F.cross_entropy(scores[keep], y[keep])


class TwoOptimizers(L.LightningModule):
    """A generator and a discriminator, optimized by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(16, 16), nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()  # type: ignore[misc]
        for optimizer, sign in ((first, 1), (second, -1)):
            self.toggle_optimizer(optimizer)
            loss = sign * self.discriminator(self.generator(x)).mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters()) for part in (self.generator, self.discriminator)]


def dense() -> Classifier:
    return Classifier(nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40, 5)))


def convolutional() -> Classifier:
    block = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())  # noqa: E731
    return Classifier(nn.Sequential(block(3, 8), nn.MaxPool2d(2), block(8, 8), nn.Flatten(), nn.Linear(8 * 64, 5)))


def recurrent() -> Classifier:
    return Classifier(Recurrent())


def gated() -> Classifier:
    return Classifier(Recurrent(nn.GRU))


class Encoder(nn.Module):
    """Two layers of torch's own transformer, pooled."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout, batch_first=True)
        self.layers = nn.ModuleList([layer, nn.TransformerEncoderLayer(16, 4, 32, dropout, batch_first=True)])
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def attending() -> Classifier:
    return Classifier(Encoder())


def tied() -> Classifier:
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.weight = first.weight
    return Classifier(nn.Sequential(first, nn.Tanh(), second, nn.Linear(16, 5)))


def with_metrics() -> Classifier:
    return WithMetrics(nn.Linear(16, 5))


def masked() -> Classifier:
    return Masked(nn.Linear(16, 5))


def vectors(size: int = 4) -> Any:
    return torch.randn(size, 16), torch.randint(5, (size,))


def sequences(size: int = 4) -> Any:
    return torch.randn(size, 7, 16), torch.randint(5, (size,))


def images(size: int = 4) -> Any:
    return torch.randn(size, 3, 16, 16), torch.randint(5, (size,))


MODULES: dict[str, tuple[Callable[[], L.LightningModule], Callable[..., Any]]] = {
    "dense": (dense, vectors),
    "convolutional": (convolutional, images),
    "recurrent": (recurrent, sequences),
    "gated": (gated, sequences),
    "attending": (attending, sequences),
    "tied": (tied, vectors),
    "with_metrics": (with_metrics, vectors),
    "masked": (masked, vectors),
    "two_optimizers": (TwoOptimizers, vectors),
}
