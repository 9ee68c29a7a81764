"""Exceptions in a fit, and runs that crash again and again: the last good file stays, and the end is the same."""

from __future__ import annotations

import os
import random
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_solo as solo
from lightning_solo.checkpoint.manifest import entries
from lightning_solo.techniques.safe_checkpoint.technique import SafeCheckpoint
from tests.messages import mentions
from tests.modules import loader, regression
from tests.training import equal

Make = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


class Failing(Callback):
    """Raises in a hook at the third step."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def fail(self, hook: str, trainer: Any) -> None:
        if hook == self.hook and trainer.global_step >= 2:
            raise ValueError("the user's own error")

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.fail("callback", trainer)

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self.fail("step", trainer)

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step >= 3:
            self.fail("save", trainer)


@pytest.mark.parametrize(
    ("hook", "steps"),
    [
        pytest.param("callback", 2, id="row 54, in a callback"),
        pytest.param("step", 2, id="row 54, in a step"),
        pytest.param("save", 2, id="row 54, in a save"),
    ],
)
def test_exception_is_the_users_own_and_the_last_good_file_stays(
    hook: str, steps: int, make_trainer: Make, tmp_path: Path
) -> None:
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    technique = SafeCheckpoint()
    trainer = make_trainer(lightning.pytorch, callbacks=[technique, Failing(hook), saves], enable_checkpointing=True)
    with pytest.raises(ValueError, match="the user's own error"):
        trainer.fit(regression(lightning.pytorch), loader(4))
    newest = solo.latest_checkpoint(tmp_path)
    assert newest is not None
    assert torch.load(newest, weights_only=True)["global_step"] == steps
    assert [path.name for path in tmp_path.glob(".new-*")] == []


@pytest.mark.row(55)
def test_validation_after_a_failed_fit_keeps_its_file(make_trainer: Make, tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)

    def made(*callbacks: Any) -> Any:
        return make_trainer(lightning.pytorch, callbacks=[SafeCheckpoint(), *callbacks], enable_checkpointing=True)

    with pytest.raises(ValueError, match="own error"):
        made(Failing("step"), saves).fit(regression(lightning.pytorch), loader(4))
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.ckpt")}
    made(ModelCheckpoint(tmp_path)).validate(regression(lightning.pytorch), loader(2), verbose=False)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.ckpt")} == before != {}


def other_key(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["net.extra"] = torch.ones(1)


def missing_key(checkpoint: dict[str, Any]) -> None:
    del checkpoint["state_dict"]["net.head.weight"]


def other_shape(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["net.head.weight"] = torch.ones(3, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(other_key, ["net.extra"], id="row 56, another key"),
        pytest.param(missing_key, ["net.head.weight"], id="row 56, a missing key"),
        pytest.param(other_shape, ["net.head.weight", "3, 3"], id="row 56, another shape"),
    ],
)
def test_checkpoint_of_another_module_is_refused_with_its_keys(
    change: Callable[[dict[str, Any]], None], words: list[str], make_trainer: Make, tmp_path: Path
) -> None:
    trainer = make_trainer(lightning.pytorch, callbacks=[SafeCheckpoint()])
    trainer.fit(regression(lightning.pytorch), loader(2))
    path = tmp_path / "other" / "saved.ckpt"
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    checkpoint = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    change(checkpoint)
    path.parent.mkdir()
    torch.save(checkpoint, path)
    with pytest.raises(RuntimeError, match=mentions(*words)):
        make_trainer(lightning.pytorch, callbacks=[SafeCheckpoint()], max_epochs=2).fit(
            regression(lightning.pytorch), loader(2), ckpt_path=path, weights_only=True
        )


EPOCHS, BATCHES = 4, 3


class Killed(Callback):
    """Kills the process at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, kill_at: int) -> int:
    """Train in a forked process from the newest checkpoint on; return its status."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            saves = ModelCheckpoint(folder, "{step}", every_n_epochs=1, save_top_k=-1)
            quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
            trainer = lightning.pytorch.Trainer(
                max_epochs=EPOCHS,
                callbacks=[SafeCheckpoint(signals=False), Killed(kill_at), saves],
                accelerator="cpu",
                devices=1,
                **quiet,
            )
            trainer.fit(
                regression(lightning.pytorch),
                loader(BATCHES),
                ckpt_path=solo.latest_checkpoint(folder),
                weights_only=True,
            )
            trainer.save_checkpoint(folder / "end.ckpt")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.row(59)
def test_a_run_that_crashes_three_times_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    crashed, whole = tmp_path / "crashed", tmp_path / "whole"
    for step in sorted(random.Random(0).sample(range(BATCHES + 1, EPOCHS * BATCHES), 3)):
        assert train(crashed, step) == -signal.SIGKILL
        newest = solo.latest_checkpoint(crashed)
        assert newest is not None
        assert torch.load(newest, weights_only=True)["global_step"] == step // BATCHES * BATCHES
    assert train(crashed, -1) == train(whole, -1) == 0
    assert entries(crashed)[-1].step == EPOCHS * BATCHES
    ends = [torch.load(folder / "end.ckpt", weights_only=True) for folder in (crashed, whole)]
    for name in ("state_dict", "optimizer_states"):
        assert equal(ends[0][name], ends[1][name])
