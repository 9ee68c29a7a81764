"""A run that was stopped anywhere continues with the batches that were left, then with the next epochs in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_solo.techniques.curriculum.technique import Curriculum
from lightning_solo.techniques.length_bucketing.technique import LengthBucketing
from lightning_solo.techniques.packing.technique import Packing
from lightning_solo.techniques.prefetch.technique import Prefetch
from tests.conftest import long
from tests.modules import Texts, padded

Make = Callable[..., Any]
ITEMS, BATCH, END = 30, 3, 28

pytestmark = pytest.mark.filterwarnings(
    "ignore:Be aware that when using .ckpt_path.", "ignore:callback.curriculum.duration"
)


class Reader(L.LightningModule):
    """Notes the items of each batch; its loss of a token depends on no other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, Tensor):
            return batch.float().mean() * self.weight
        kept = batch["labels"] != -100
        return (batch["input_ids"] * kept).sum() / kept.sum() * self.weight

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        tokens = batch if isinstance(batch, Tensor) else batch["input_ids"]
        self.seen.append(tokens.tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Estimating(Reader):
    """Has Lightning make the loaders before a checkpoint is loaded."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class Validated(Reader):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def val_dataloader(self) -> Any:
        return DataLoader(Texts(ITEMS), batch_size=ITEMS, collate_fn=padded)


class Ending(L.Callback):
    """Ends a fit behind so many batches, and saves there: behind the fit, the batch, or the epoch."""

    def __init__(self, how: str, after: int, path: Any) -> None:
        self.how, self.after, self.path = how, after, path
        self.count = 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.count += 1
        if self.count == self.after:
            trainer.should_stop = self.how != "max_steps"
            if self.how == "batch":
                trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.how == "epoch" and self.count == self.after:
            trainer.save_checkpoint(self.path)


KINDS: dict[str, Any] = {
    "length_bucketing": LengthBucketing,
    "packing": partial(Packing, capacity=12, rows=1),
    "curriculum": partial(Curriculum, duration=15),
    "tokens": partial(Curriculum, duration=90, pace="tokens"),
}
PER_EPOCH = {kind: 18 if kind == "packing" else 10 for kind in KINDS}


def fit(
    make_trainer: Make, kind: str, workers: int, module: Any, *more: Any, path: Any = None, **arguments: Any
) -> Any:
    technique = KINDS[kind]()
    loader: Any = DataLoader(Texts(ITEMS), BATCH, shuffle=True, collate_fn=padded, num_workers=workers)
    callbacks = [each for each in (technique, *more) if each is not None]
    trainer = make_trainer(L, callbacks=callbacks, **{"max_steps": END, "max_epochs": 9, **arguments})
    trainer.fit(module, loader, ckpt_path=path, weights_only=path and True)
    return trainer


def compared(
    make_trainer: Make, path: Any, kind: str, how: str, after: int, workers: int = 0, ahead: bool = False,
    module: Any = Reader, **arguments: Any,
) -> None:  # fmt: skip
    """Compare two fits, of which one resumes the other, with one that isn't stopped."""
    whole, first, rest = module(), module(), module()
    more = [Prefetch] if ahead else []
    fit(make_trainer, kind, workers, whole, *[each() for each in more], **arguments)
    ending = Ending(how, after, path)
    end = {"max_steps": after} if how == "max_steps" else {}
    trainer = fit(make_trainer, kind, workers, first, ending, *[each() for each in more], **arguments, **end)
    if how in ("max_steps", "should_stop"):
        trainer.save_checkpoint(path)
    fit(make_trainer, kind, workers, rest, *[each() for each in more], path=path, **arguments)
    assert len(first.seen) == after
    assert [*first.seen, *rest.seen] == whole.seen
    assert len(whole.seen) == END


@pytest.mark.parametrize("workers", [0, long(2)])
@pytest.mark.parametrize("after", [6, 13, "epoch"])
@pytest.mark.parametrize("how", ["max_steps", "should_stop", "batch", "epoch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.row(45)
def test_resumed_run_has_the_remaining_batches(
    make_trainer: Make, tmp_path: Path, kind: str, how: str, after: Any, workers: int
) -> None:
    compared(make_trainer, tmp_path / "end.ckpt", kind, how, PER_EPOCH[kind] if after == "epoch" else after, workers)


@pytest.mark.parametrize("after", [2, 4, 6])
@pytest.mark.parametrize("how", ["max_steps", "batch"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"limit_train_batches": 4}, id="limited"),
        pytest.param({"limit_train_batches": 4, "reload_dataloaders_every_n_epochs": 1}, id="reloaded"),
        pytest.param({"limit_train_batches": 4, "ahead": True}, id="prefetch"),
        pytest.param({"limit_train_batches": 4, "module": Estimating}, id="loaders made early"),
        pytest.param({"limit_train_batches": 4, "module": Validated}, id="validated"),
    ],
)
@pytest.mark.parametrize("kind", ["length_bucketing", "tokens"])
def test_resumed_run_of_limited_epochs_has_the_remaining_batches(
    make_trainer: Make, tmp_path: Path, kind: str, how: str, after: int, options: dict[str, Any]
) -> None:
    compared(make_trainer, tmp_path / "end.ckpt", kind, how, after, **options)


def test_run_resumes_after_three_stops(make_trainer: Make, tmp_path: Path) -> None:
    whole, *parts = [Reader() for _ in range(5)]
    fit(make_trainer, "length_bucketing", 0, whole)
    path = None
    for part, end in zip(parts, (6, 9, 24, END), strict=True):
        trainer = fit(make_trainer, "length_bucketing", 0, part, path=path, max_steps=end)
        path = tmp_path / f"{end}.ckpt"
        trainer.save_checkpoint(path)
    assert [batch for part in parts for batch in part.seen] == whole.seen
