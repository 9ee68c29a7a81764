"""Loaders and weights of a fit go on at the place of a checkpoint; `exact_resume`'s tests show the other places."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lightning_solo.seams import resuming
from tests.modules import Resumable, loader, regression

Make = Callable[..., Any]


def test_loaders_are_resumed_where_configure_optimizers_has_them_made(
    home: ModuleType, make_trainer: Make, tmp_path: Path
) -> None:
    class Eager(Resumable):
        def __iter__(self) -> Iterator[Any]:
            iterator = super().__iter__()
            return itertools.chain([next(iterator)], iterator)

    class Half(home.Callback):  # type: ignore[name-defined,misc]
        def __init__(self, resumes: bool) -> None:
            self.resumes, self.seen = resumes, list[float]()

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if self.resumes:
                resuming.loaders_resumed(trainer)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(float(batch[0].sum()))
            if len(self.seen) == 2 and not self.resumes:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    def run(path: Any = None) -> list[float]:
        module, half = regression(home), Half(path is not None)
        stock = module.configure_optimizers
        module.configure_optimizers = lambda: module.trainer.estimated_stepping_batches and stock()
        trainer = make_trainer(home, callbacks=[half])
        trainer.fit(module, Eager(list(loader(5))), ckpt_path=path, weights_only=path and True)
        return half.seen

    whole = run()
    assert run(str(tmp_path / "half.ckpt")) == whole[2:]


def test_a_run_goes_back_to_its_checkpoint(home: ModuleType, make_trainer: Make, tmp_path: Path) -> None:
    weights: list[Any] = []

    class Back(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            weights.append([p.clone() for p in pl_module.parameters()])
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")
            if batch_idx == 5:
                checkpoint = trainer.strategy.load_checkpoint(tmp_path / "saved.ckpt", weights_only=True)
                assert resuming.go_back(trainer, checkpoint) == 2
                weights.append([p.clone() for p in pl_module.parameters()])

    trainer = make_trainer(home, callbacks=[Back()])
    trainer.fit(regression(home), loader(7))
    assert trainer.global_step == 2 + 2
    assert all(torch.equal(*pair) for pair in zip(weights[6], weights[2], strict=True))
    assert not all(torch.equal(*pair) for pair in zip(weights[6], weights[5], strict=True))
