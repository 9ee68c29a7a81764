"""Faults under SafeCheckpoint: errors within a step or a save, things in the way of a file, removals in a thread."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch import Callback
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils._pytree import tree_map

import lightning_solo as solo
from lightning_solo.checkpoint.manifest import difference
from lightning_solo.checkpoint.snapshot import Snapshots
from lightning_solo.checkpoint.writing import tensor_bytes, write
from lightning_solo.errors import CheckpointError, ConflictError, PresetError
from lightning_solo.techniques.safe_checkpoint import io
from lightning_solo.techniques.safe_checkpoint.technique import SafeCheckpoint
from tests.messages import mentions
from tests.modules import loader, regression

Make = Callable[..., Any]
HOME = lightning.pytorch
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


def trainer_of(make_trainer: Make, folder: Path, *callbacks: Any, home: ModuleType = HOME, **saves: Any) -> Any:
    """Return a Trainer that saves ``{step}.ckpt`` in a folder after each step."""
    options = {"every_n_train_steps": 1, "save_top_k": -1, "enable_version_counter": False, **saves}
    own = home.callbacks.ModelCheckpoint(folder, "{step}", **options)
    technique = next((each for each in callbacks if isinstance(each, SafeCheckpoint)), None) or SafeCheckpoint()
    others = [each for each in callbacks if each is not technique]
    return make_trainer(home, callbacks=[technique, *others, own], enable_checkpointing=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.ckpt*"))


# --- errors in a fit ---


class StepError(Exception):
    """Of a test's own step."""


def failing_in(place: str, at: int) -> Any:
    """Return a module whose forward, or whose optimizer after its update, fails in a batch."""
    module = regression(HOME)
    training_step, configure = module.training_step, module.configure_optimizers

    def forward(batch: Any, batch_idx: int) -> Any:
        if batch_idx == at and place == "forward":
            raise StepError("of the user")
        return training_step(batch, batch_idx)

    def updated(*_: Any) -> None:
        if module.trainer.global_step == at and place == "update":
            raise StepError("of the user")

    def optimizers() -> Any:
        optimizer = configure()
        optimizer.register_step_post_hook(updated)
        return optimizer

    module.training_step, module.configure_optimizers = forward, optimizers
    return module


@pytest.mark.parametrize(
    ("place", "saved"),
    [
        pytest.param("forward", ["last.ckpt", "step=2.ckpt", "step=3.ckpt"], id="row 54, in forward"),
        pytest.param("update", ["last.ckpt", "step=2.ckpt"], id="row 54, in the update"),
    ],
)
def test_state_within_an_update_is_never_saved(
    place: str, saved: list[str], make_trainer: Make, tmp_path: Path
) -> None:
    trainer = trainer_of(make_trainer, tmp_path, every_n_train_steps=2, save_last=True, save_on_exception=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(StepError):
            trainer.fit(failing_in(place, 3), loader(6))
    refused = [str(each.message) for each in caught if "step=3.ckpt" in str(each.message)]
    assert len(refused) == (place == "update")
    assert all(re.search(mentions("StepError", "checkpoint before"), text) for text in refused)
    assert names(tmp_path) == saved
    newest = torch.load(solo.latest_checkpoint(tmp_path) or "", weights_only=True)
    assert newest["global_step"] == (3 if place == "forward" else 2)


@pytest.mark.parametrize("preset", ["gradient_release", "compact"])
def test_state_within_a_backward_that_updates_weights_is_never_saved(preset: str, tmp_path: Path) -> None:
    module = regression(HOME)
    saves = HOME.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_last=True, save_on_exception=True)
    kwargs = solo.trainer_kwargs([preset, "fault_tolerance"], callbacks=[saves])
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    trainer = HOME.Trainer(**kwargs, **quiet, accelerator="cpu")

    def fail(_: Tensor) -> None:
        if trainer.global_step == 3:
            raise StepError

    module.net.blocks[1].up.bias.register_hook(fail)  # after the head and the last block have stepped
    with pytest.raises(StepError), pytest.warns(UserWarning, match="isn't saved|no checkpoint is saved"):
        trainer.fit(module, loader(6))
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2


@pytest.mark.row(54, 35)
def test_error_of_a_fit_outlives_that_of_the_save_after_it(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise CheckpointError("the disk is full")

    class Filling(Callback):
        def on_exception(self, *_: Any) -> None:
            monkeypatch.setattr(io, "write", full)

    trainer = trainer_of(make_trainer, tmp_path, Filling(), save_on_exception=True, every_n_train_steps=2)
    warned = pytest.warns(UserWarning, match=mentions("StepError", "of the user", "the disk is full"))
    with pytest.raises(StepError), warned:
        trainer.fit(failing_in("forward", 3), loader(6))


@pytest.mark.row(35)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_failed_save_ends_the_run_and_the_files_before_it_stay(
    asynchronous: bool, make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file before is removed only after the new one is whole."""
    stock = io.write

    def fills(checkpoint: Any, path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "step=3.ckpt":
            raise CheckpointError("the disk is full")
        return stock(checkpoint, path, *args, **kwargs)

    monkeypatch.setattr(io, "write", fills)
    technique = SafeCheckpoint(asynchronous=asynchronous)
    trainer = trainer_of(make_trainer, tmp_path, technique, save_top_k=1)
    with pytest.raises(CheckpointError, match="the disk is full"):
        trainer.fit(regression(HOME), loader(6))
    assert names(tmp_path) == ["step=2.ckpt"]
    assert difference(tmp_path / "step=2.ckpt") is None


def test_removal_waits_for_the_thread_and_not_the_run(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ModelCheckpoint removes a file right after the save that replaces it."""
    stock, removed = io.write, threading.Event()
    seen: list[list[str]] = []

    def held(checkpoint: Any, path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "step=2.ckpt":
            assert removed.wait(60)  # a run that waited for this file would never come to it
            seen.append(names(tmp_path))
        return stock(checkpoint, path, *args, **kwargs)

    class Trained(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                removed.set()

    monkeypatch.setattr(io, "write", held)
    trainer = trainer_of(make_trainer, tmp_path, SafeCheckpoint(asynchronous=True), Trained(), save_top_k=1)
    trainer.fit(regression(HOME), loader(4))
    assert seen == [["step=1.ckpt"]]
    assert names(tmp_path) == ["step=4.ckpt"]


@pytest.mark.row(55)
@pytest.mark.filterwarnings(
    "ignore:.*was called without a model", "ignore:.*there is no last checkpoint", "ignore:You.re resuming from"
)
def test_validation_removes_no_checkpoint(make_trainer: Make, tmp_path: Path) -> None:
    """OnExceptionCheckpoint removes its file at the end of any run."""
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    saves = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(StepError):
        trainer_of(make_trainer, tmp_path, saves).fit(failing_in("forward", 2), loader(4))
    file = tmp_path / "on_exception.ckpt"
    assert difference(file) is None
    trainer_of(make_trainer, tmp_path, saves).validate(regression(HOME), loader(1), verbose=False)
    assert file.exists()
    trainer_of(make_trainer, tmp_path, saves).fit(regression(HOME), loader(4))
    assert not file.exists()  # that fit has ended well


# --- things in the way ---


@pytest.mark.row(42)
def test_folder_with_the_name_of_a_file_is_set_aside(make_trainer: Make, tmp_path: Path) -> None:
    partial = tmp_path / "step=1.ckpt"
    partial.mkdir()
    (partial / "shard").write_text("of another program")
    with pytest.warns(UserWarning, match=mentions("step=1.ckpt", "before-1")):
        trainer_of(make_trainer, tmp_path).fit(regression(HOME), loader(1))
    assert difference(partial) is None
    assert (tmp_path / "step=1.ckpt.before-1" / "shard").read_text() == "of another program"


@pytest.mark.row(38)
def test_folder_that_is_deleted_and_made_again_is_locked_again(make_trainer: Make, tmp_path: Path) -> None:
    """A folder of the same name is another one."""
    folder = tmp_path / "checkpoints"

    class Deleting(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                shutil.rmtree(folder)
                folder.mkdir()

    with pytest.warns(UserWarning, match=mentions(str(folder), "deleted")):
        trainer_of(make_trainer, folder, Deleting()).fit(regression(HOME), loader(4))
    assert (folder / ".lock").exists()
    assert names(folder) == ["step=3.ckpt", "step=4.ckpt"]


@pytest.mark.row(37)
def test_read_only_folder_ends_the_run_before_training(make_trainer: Make, tmp_path: Path) -> None:
    """Lightning trains on and saves nothing."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            for parent in [tmp_path, *tmp_path.parents][:-2]:
                with suppress(PermissionError):
                    parent.chmod(0o755)
            (tmp_path / "saved").mkdir()
            (tmp_path / "saved").chmod(0o555)
            os.setuid(65534)
            trainer = trainer_of(make_trainer, tmp_path / "saved")
            with pytest.raises(CheckpointError, match=mentions("saved", "dirpath=")):
                trainer.fit(regression(HOME), loader(2))
            status = int(trainer.global_step != 0)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


@pytest.mark.row(92)
def test_two_of_them_are_refused(make_trainer: Make, tmp_path: Path) -> None:
    trainer = trainer_of(make_trainer, tmp_path, SafeCheckpoint(), SafeCheckpoint())
    with pytest.raises(ConflictError, match=mentions("two SafeCheckpoint", "drop one")):
        trainer.fit(regression(HOME), loader(1))


@pytest.mark.row(34)
@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs another file system")
def test_folder_on_another_file_system(make_trainer: Make, tmp_path: Path) -> None:
    folder = Path("/dev/shm", f"lightning-solo-{os.getpid()}")
    try:
        trainer_of(make_trainer, folder).fit(regression(HOME), loader(2))
        assert os.stat(folder).st_dev != os.stat(tmp_path).st_dev
        assert [difference(folder / name) for name in names(folder)] == [None, None]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.row(43)
def test_file_system_without_locks_is_said(make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_solo.checkpoint import lock

    def none(_: int) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock, "try_lock", none)
    with pytest.warns(UserWarning, match=mentions(str(tmp_path), "No locks")):
        trainer_of(make_trainer, tmp_path).fit(regression(HOME), loader(1))
    assert difference(tmp_path / "step=1.ckpt") is None


# --- what is in a file ---


@pytest.mark.row(57)
@pytest.mark.parametrize("of", ["module", "data module"])
def test_hyperparameters_that_are_a_container_of_omegaconf_load(of: str, make_trainer: Make, tmp_path: Path) -> None:
    """Lightning's own file loads with ``weights_only=False`` alone."""

    class Data(HOME.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(2)

    module, data = regression(HOME), Data()
    given = OmegaConf.create({"width": 3, "model": {"widths": [1, "${width}"]}})
    (module if of == "module" else data).save_hyperparameters(given)
    trainer_of(make_trainer, tmp_path).fit(module, data)
    loaded = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
    key = "hyper_parameters" if of == "module" else "datamodule_hyper_parameters"
    assert loaded[key] == {"width": 3, "model": {"widths": [1, "${width}"]}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(lambda weights: weights.pop("net.head.bias"), "net.head.bias", id="row 56, missing key"),
        pytest.param(lambda weights: weights.update(extra=torch.ones(1)), "extra", id="row 56, extra key"),
        pytest.param(
            lambda weights: weights.update({"net.head.bias": torch.ones(3)}), "net.head.bias", id="row 56, other shape"
        ),
    ],
)
def test_checkpoint_of_another_model_is_refused_by_its_keys(
    change: Callable[[Any], Any], words: str, make_trainer: Make, tmp_path: Path
) -> None:
    trainer_of(make_trainer, tmp_path).fit(regression(HOME), loader(1))
    content = torch.load(tmp_path / "step=1.ckpt", weights_only=True)
    change(content["state_dict"])
    write(content, tmp_path / "other.ckpt", sync=False)
    with pytest.raises(RuntimeError, match=mentions(words)):
        trainer_of(make_trainer, tmp_path).fit(regression(HOME), loader(1), ckpt_path=tmp_path / "other.ckpt")


def test_file_is_checked_though_torch_writes_no_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        write({"weight": torch.ones(10)}, tmp_path / "a.ckpt", sync=False)
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)


class Wrapping(Tensor):
    """A tensor that holds another one and has no memory itself, as quantized weights do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map(lambda each: each.inner if isinstance(each, Wrapping) else each, (args, kwargs or {}))
        result = function(*plain[0], **plain[1])
        return cls(result) if isinstance(result, Tensor) else result


def test_tensor_without_memory_of_its_own_is_counted_and_copied() -> None:
    checkpoint = {"weight": Wrapping(torch.ones(100))}
    assert tensor_bytes(checkpoint) == 400
    copied = Snapshots().copy(checkpoint)
    checkpoint["weight"].inner.zero_()
    assert torch.equal(copied["weight"].inner, torch.ones(100))


# --- by time ---


def test_checkpoint_is_saved_by_time(make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds pass in each batch of a clock that has no date."""
    now = iter(range(0, 10**6, 10))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    steps: list[int] = []

    class Noting(Callback):
        def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
            steps.append(trainer.global_step)

    trainer = trainer_of(make_trainer, tmp_path, SafeCheckpoint(every_minutes=0.5), Noting(), every_n_train_steps=1000)
    trainer.fit(regression(HOME), loader(20))
    assert names(tmp_path) == ["last.ckpt"]
    assert len(steps) >= 3
    assert all(later - earlier > 1 for earlier, later in pairwise(steps))
    with pytest.raises(PresetError, match=mentions("every_minutes=-1", "above 0")):
        SafeCheckpoint(every_minutes=-1)
