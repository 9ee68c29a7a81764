"""Part i of `make gpu`: what each technique for lighter models adds to time and peak of a step, and whether it acts."""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from result import SMALL, Result
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_solo as solo

WIDTH, BLOCKS, CLASSES, ROWS = (32, 2, 32, 8) if SMALL else (2048, 8, 32_000, 4096)
STEPS = 8 if SMALL else 30


class Block(nn.Module):
    """A residual block of two linear layers with a LeakyReLU between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.activation = nn.LeakyReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the input and the layers' output."""
        return x + self.down(self.activation(self.up(self.norm(x))))


class Classifier(L.LightningModule):
    """Equal blocks and a head; notes the time of each step, and the losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.begun: list[float] = []
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.blocks(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy."""
        torch.cuda.synchronize()
        self.begun.append(time.perf_counter())
        if batch_idx == 2:
            torch.cuda.reset_peak_memory_stats()
        loss = nn.functional.cross_entropy(self(batch[0]).float(), batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.1)


def trained(*callbacks: Any) -> tuple[Classifier, dict[str, Any]]:
    """Return a trained module, and the median time of its later steps with their peak."""
    torch.cuda.empty_cache()
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(STEPS * ROWS if SMALL else 4 * ROWS, WIDTH, generator=generator)
    data = TensorDataset(inputs, torch.randint(CLASSES, (len(inputs),), generator=generator))
    trainer = L.Trainer(
        accelerator="gpu",
        precision="bf16-mixed",
        max_steps=STEPS,
        max_epochs=-1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(data, batch_size=ROWS))
    steps = [later - earlier for earlier, later in zip(module.begun[3:-1], module.begun[4:], strict=True)]
    figures = {"step_ms": 1000 * statistics.median(steps), "peak_mib": torch.cuda.max_memory_allocated() / 2**20}
    return module, figures


Check = Callable[[Classifier, Classifier, Any], bool]


def same(module: Classifier, plain: Classifier, technique: Any) -> bool:
    """Return whether all losses are those of a run without the technique."""
    return all(torch.equal(*pair) for pair in zip(module.losses, plain.losses, strict=True))


def differs(module: Classifier, plain: Classifier, technique: Any) -> bool:
    """Return whether a later loss isn't that of a run without the technique, and all are finite."""
    return not torch.equal(module.losses[-1], plain.losses[-1]) and bool(torch.stack(module.losses).isfinite().all())


def half_is_zero(module: Classifier, plain: Classifier, technique: Any) -> bool:
    """Return whether exactly half of a block's weights are zero."""
    weight = module.blocks[0].up.weight
    return int((weight == 0).sum()) == weight.numel() // 2


def averages_agree(module: Classifier, plain: Classifier, technique: Any) -> bool:
    """Return whether the losses equal those without the technique, and the module has the average."""
    average = technique.averaged_weights["head.weight"]
    return same(module, plain, technique) and torch.equal(module.head.weight.detach().cpu(), average)


WAYS: dict[str, tuple[Callable[[], Any], Check]] = {
    "pruning, 50 %": (lambda: solo.Pruning(amount=0.5), half_is_zero),
    "pruning, 2:4": (lambda: solo.Pruning(pattern="2:4"), half_is_zero),
    "quantization, 4 bits": (lambda: solo.Quantization(bits=4), differs),
    "distillation, teacher=start": (lambda: solo.Distillation("start"), differs),
    "distillation with features": (
        lambda: solo.Distillation("start", features={"blocks.0": "blocks.1"}),
        differs,
    ),
    "weight_averaging on the host": (lambda: solo.WeightAverage(decay=0.9), averages_agree),
    "weight_averaging on the device": (lambda: solo.WeightAverage(decay=0.9, device="module"), averages_agree),
    "inplace": (lambda: solo.InPlace(), same),
    "optimizer_replacement, lion": (lambda: solo.OptimizerReplacement(optimizer="lion", lr=1e-5), differs),
    "optimizer_replacement, adamw_8bit": (lambda: solo.OptimizerReplacement(optimizer="adamw_8bit"), differs),
    "optimizer_replacement, schedule-free": (
        lambda: solo.OptimizerReplacement(optimizer="schedule_free_adamw"),
        differs,
    ),
}


def main() -> int:
    """Train without a technique, and with each."""
    result = Result("compression")
    plain, figures = trained()
    result.add("none", **figures, parameters=sum(p.numel() for p in plain.parameters()))
    for what, (make, check) in WAYS.items():
        with result.attempt(what):
            technique = make()
            module, own = trained(technique)
            more = own["peak_mib"] - figures["peak_mib"]
            result.add(what, **own, more_mib=more, acts=check(module, plain, technique))
            del module, technique
    return result.end()


if __name__ == "__main__":
    sys.exit(main())
