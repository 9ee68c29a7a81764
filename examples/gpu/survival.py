"""Part h of `make gpu`: resuming to the bit under bf16-mixed, what the guard adds to a step, and what saving takes."""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from measure_checkpoints import measure
from result import SMALL, Result
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_solo as solo

WIDTH, BLOCKS, ROWS = (64, 2, 8) if SMALL else (1024, 24, 256)
STEPS = 8 if SMALL else 300
MEBIBYTES = 1 if SMALL else 4096


class Blocks(L.LightningModule):
    """A regression by equal blocks with dropout; counts the waits for the device, and the time, of the later steps.

    Args:
        fused: whether AdamW is fused.
    """

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
                for _ in range(BLOCKS)
            )
        )
        self.fused, self.begun, self.us = fused, 0.0, 0.0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss; the first half of the steps isn't timed."""
        if self.trainer.global_step == STEPS // 2:
            torch.cuda.synchronize()
            self.begun = time.perf_counter()
        return nn.functional.mse_loss(self.blocks(batch[0]), batch[1])

    def on_train_end(self) -> None:
        """Stop the clock."""
        torch.cuda.synchronize()
        self.us = (time.perf_counter() - self.begun) / (STEPS - STEPS // 2) * 1e6

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=self.fused)


def fit(module: Blocks, *, steps: int = STEPS, path: Any = None, **arguments: Any) -> Blocks:
    """Train, quietly, in a shuffled order."""
    torch.manual_seed(2)
    data = TensorDataset(torch.randn(8 * ROWS, WIDTH), torch.randn(8 * ROWS, WIDTH))
    arguments = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, **arguments}
    trainer = L.Trainer(**{"accelerator": "gpu", **arguments}, max_steps=steps, max_epochs=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(data, batch_size=ROWS, shuffle=True), ckpt_path=path)
    return module


def same(one: Blocks, other: Blocks) -> bool:
    """Return whether the weights of two modules are equal to the bit."""
    return all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


def resumed(folder: Path) -> dict[str, Any]:
    """Return whether a run that is resumed within an epoch ends with the bits of the undisturbed one.

    ``two_runs_equal`` is what two undisturbed runs do: without it, kernels aren't deterministic.
    """

    def run(name: str, path: Any = None) -> Blocks:
        saving = ModelCheckpoint(folder / name, every_n_train_steps=5, save_top_k=-1)
        arguments = solo.trainer_kwargs(["bf16", "fault_tolerance"], callbacks=[saving])
        return fit(Blocks(), steps=12, path=path, **arguments)

    once, again = run("once"), run("again")
    path = solo.latest_checkpoint(folder / "again")
    step = torch.load(path, map_location="cpu", weights_only=True)["global_step"]
    return {"equal": same(again, run("resumed", path)), "two_runs_equal": same(once, again), "from_step": step}


@contextmanager
def waits() -> Iterator[list[Any]]:
    """Yield a list of the warnings, one for each wait for the device in this context."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode(before)


class Waits(L.Callback):
    """Counts the waits for the device in one later step."""

    count: int | None = None

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Begin to count."""
        if trainer.global_step == STEPS // 4 and hasattr(torch._C, "_cuda_set_sync_debug_mode"):
            self.counting = waits()
            self.seen = self.counting.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """End it."""
        if trainer.global_step == STEPS // 4 + 1 and hasattr(self, "seen"):
            self.counting.__exit__(None, None, None)
            self.count = sum("synchronizing" in str(each.message) for each in self.seen)


def guard(fused: bool) -> dict[str, Any]:
    """Return what the guard adds to a step, in microseconds and waits for the device."""
    plain, guarded, counted = [], [], []
    for _ in range(1 if SMALL else 3):
        for guards, times in (([], plain), ([solo.FiniteGuard()], guarded)):
            count = Waits()
            module = fit(Blocks(fused), callbacks=[*guards, count], enable_checkpointing=False, precision="bf16-mixed")
            times.append(module.us)
            counted.append(count.count)
    figures = {"plain_us": min(plain), "more_us": min(guarded) - min(plain), "tensors": 4 * BLOCKS}
    return figures if None in counted else {**figures, "plain_waits": counted[0], "waits": counted[1]}


def main() -> int:
    """Resume, guard, save."""
    result = Result("survival")
    with result.attempt("exact resume, bf16-mixed"), tempfile.TemporaryDirectory() as folder:
        result.add("exact resume, bf16-mixed", **resumed(Path(folder)))
    for fused in (False, True):
        what = f"finite_guard, AdamW{' fused' if fused else ''}"
        with result.attempt(what):
            result.add(what, **guard(fused))
    with result.attempt("saving"), tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for row in measure(Path(folder), MEBIBYTES, 3, "cuda"):
            result.add(row.pop("way").replace("`", ""), mebibytes=MEBIBYTES, **row)
    return result.end()


if __name__ == "__main__":
    sys.exit(main())
