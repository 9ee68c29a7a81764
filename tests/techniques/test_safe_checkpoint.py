"""SafeCheckpoint writes whole files under every strategy, finds damaged ones, and saves when the process is to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from omegaconf import OmegaConf

import lightning_solo as solo
from lightning_solo.checkpoint import writing
from lightning_solo.checkpoint.lock import lock
from lightning_solo.checkpoint.manifest import MANIFEST, difference, entries
from lightning_solo.errors import CheckpointError
from lightning_solo.techniques.safe_checkpoint import io
from lightning_solo.techniques.safe_checkpoint.technique import SafeCheckpoint
from tests.messages import mentions
from tests.modules import loader, regression

Make = Callable[..., Any]
BATCHES = 4
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


def fit(home: ModuleType, make_trainer: Make, folder: Path, *callbacks: Any, module: Any = None, **options: Any) -> Any:
    """Train with a checkpoint after each step in ``folder``, and return the Trainer."""
    arguments = {key: options.pop(key) for key in ("ckpt_path", "weights_only") if key in options}
    saves = home.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, save_last=True)
    technique = next((each for each in callbacks if isinstance(each, SafeCheckpoint)), None) or SafeCheckpoint()
    others = [each for each in callbacks if each is not technique]
    trainer = make_trainer(home, callbacks=[technique, *others, saves], **{"enable_checkpointing": True, **options})
    trainer.fit(module or regression(home), loader(BATCHES), **arguments)
    return trainer


def test_each_file_is_listed_and_as_it_was_written(home: ModuleType, make_trainer: Make, tmp_path: Path) -> None:
    trainer = fit(home, make_trainer, tmp_path)
    listed = entries(tmp_path)
    assert [entry.step for entry in listed if entry.file != "last.ckpt"] == [1, 2, 3, 4]
    assert len({entry.configuration for entry in listed}) == 1
    assert all(difference(path) is None for path in tmp_path.glob("*.ckpt"))
    assert {entry.file for entry in listed} == {path.name for path in tmp_path.glob("*.ckpt")}
    assert torch.__version__.startswith((listed[0].versions or {})["torch"].partition("+")[0])
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert entries(tmp_path)[-1].file == "after.ckpt"
    assert Path(solo.latest_checkpoint(tmp_path) or "").name == "after.ckpt"
    again = fit(
        home, make_trainer, tmp_path, max_epochs=2, ckpt_path=solo.latest_checkpoint(tmp_path), weights_only=True
    )
    assert again.global_step == 2 * BATCHES


@pytest.mark.parametrize("preset", ["compact", "gradient_release", "accumulation", "checkpointing"])
def test_presets_save_through_it(preset: str, home: ModuleType, tmp_path: Path) -> None:
    saves = home.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1)
    kwargs = solo.trainer_kwargs([preset, "fault_tolerance"], lightning=home.__name__, callbacks=[saves])
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    trainer = home.Trainer(**kwargs, **quiet, accelerator="cpu")
    trainer.fit(regression(home), loader(BATCHES))
    assert len(entries(tmp_path)) >= 1
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert entries(tmp_path)[-1].file == "after.ckpt"


def test_changed_bit_is_refused_with_the_valid_files(home: ModuleType, make_trainer: Make, tmp_path: Path) -> None:
    fit(home, make_trainer, tmp_path)
    path = tmp_path / "step=4.ckpt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=mentions("step=4.ckpt", ["SHA-256", "checksum"][0][:3], "last.ckpt")):
        fit(home, make_trainer, tmp_path, max_epochs=2, ckpt_path=path, weights_only=True)


@pytest.mark.row(58)
def test_last_valid_file_is_never_pruned(home: ModuleType, make_trainer: Make, tmp_path: Path) -> None:

    class Damaging(Callback):
        """Damages each file after it was written: the next save then removes the only valid one."""

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            for path in tmp_path.glob("step=2*.ckpt"):
                os.truncate(path, 100)

    saves = home.callbacks.ModelCheckpoint(
        tmp_path, "{step}", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max"
    )
    trainer = make_trainer(
        home, callbacks=[SafeCheckpoint(), Damaging(), saves], enable_checkpointing=True, max_steps=2
    )
    trainer.fit(regression(home), loader(BATCHES))
    technique_io = trainer.strategy.checkpoint_io
    only = tmp_path / "step=2.ckpt"
    assert [path.name for path in tmp_path.glob("*.ckpt")] == [only.name]
    os.truncate(only, 100)
    trainer.save_checkpoint(tmp_path / "step=3.ckpt")
    technique_io.remove_checkpoint(only)
    assert not only.exists()
    with pytest.warns(UserWarning, match=mentions("step=3.ckpt", "last valid")):
        technique_io.remove_checkpoint(tmp_path / "step=3.ckpt")
    assert difference(tmp_path / "step=3.ckpt") is None


@pytest.mark.row(43)
def test_second_run_in_a_folder_is_refused_with_the_process(
    home: ModuleType, make_trainer: Make, tmp_path: Path
) -> None:
    code = "import sys; from pathlib import Path; from lightning_solo.checkpoint.lock import lock; "
    code += f"file = lock(Path({str(tmp_path)!r})); print('locked', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=mentions("in use by", f"process {other.pid}", "dirpath=")):
            fit(home, make_trainer, tmp_path)
        other.kill()
    fit(home, make_trainer, tmp_path)
    lock(tmp_path).close()  # the fit has released it


@pytest.mark.row(42)
def test_unfinished_files_of_a_killed_run_are_removed(home: ModuleType, make_trainer: Make, tmp_path: Path) -> None:
    """Row 42; a file with the name that this run would take, too."""
    (tmp_path / ".new-1-2").write_bytes(b"half")
    (tmp_path / f".new-{os.getpid()}-{threading.get_ident()}").write_bytes(b"half")
    (tmp_path / "theirs.tmp").write_bytes(b"of somebody else")
    fit(home, make_trainer, tmp_path)
    assert list(tmp_path.glob(".new-*")) == []
    assert (tmp_path / "theirs.tmp").exists()
    assert all(difference(path) is None for path in tmp_path.glob("*.ckpt"))


@pytest.mark.row(38)
def test_folder_that_is_deleted_in_the_run_is_made_anew_with_a_warning(
    home: ModuleType, make_trainer: Make, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"

    class Deleting(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                for path in folder.iterdir():
                    path.unlink()
                folder.rmdir()

    with pytest.warns(UserWarning, match=mentions(str(folder), "deleted")):
        fit(home, make_trainer, folder, Deleting())
    assert difference(folder / "last.ckpt") is None


@pytest.mark.row(85)
def test_folder_on_another_machine_is_refused_before_training(home: ModuleType, make_trainer: Make) -> None:
    place = "memory://runs"
    saves = home.callbacks.ModelCheckpoint(place)
    trainer = make_trainer(home, callbacks=[SafeCheckpoint(), saves], enable_checkpointing=True)
    with pytest.raises(CheckpointError, match=mentions(place, "local folder", "upload")):
        trainer.fit(regression(home), loader(1))
    assert trainer.global_step == 0
    for place in ("s3://bucket/last.ckpt", "gs://bucket", "https://host/last.ckpt"):
        with pytest.raises(CheckpointError, match=mentions(place, "upload")):
            io.local(place)


def test_writer_of_another_package_is_refused(make_trainer: Make, tmp_path: Path) -> None:
    home = lightning.pytorch
    trainer = make_trainer(home, callbacks=[SafeCheckpoint()], plugins=[AsyncCheckpointIO(TorchCheckpointIO())])
    with pytest.raises(CheckpointError, match=mentions("AsyncCheckpointIO", "asynchronous=true", "~callback")):
        trainer.fit(regression(home), loader(1))


@pytest.mark.row(57)
def test_hyperparameters_of_omegaconf_are_plain_data_in_the_file(
    home: ModuleType, make_trainer: Make, tmp_path: Path
) -> None:
    module = regression(home)
    module.save_hyperparameters({"model": OmegaConf.create({"widths": [1, 2]})})
    fit(home, make_trainer, tmp_path, module=module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert loaded["hyper_parameters"] == {"model": {"widths": [1, 2]}}
    assert module.hparams["model"].widths == [1, 2]


def test_hyperparameter_that_can_not_be_loaded_is_left_out_with_a_warning(
    home: ModuleType, make_trainer: Make, tmp_path: Path
) -> None:
    """Such as the constructor of an optimizer, with which a run could not be resumed."""
    module = regression(home)
    module.save_hyperparameters({"optimizer": partial(torch.optim.AdamW, lr=0.1), "width": 3})
    with pytest.warns(UserWarning, match=mentions("optimizer (partial)", "save_hyperparameters(ignore=['optimizer'])")):
        fit(home, make_trainer, tmp_path, module=module)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["hyper_parameters"] == {"width": 3}
    assert set(module.hparams) == {"optimizer", "width"}
    fit(home, make_trainer, tmp_path, max_epochs=2, ckpt_path=tmp_path / "last.ckpt", weights_only=True)


# --- in a thread ---


def test_asynchronous_save_has_the_weights_of_its_step(
    home: ModuleType, make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training changes the weights while the file waits to be written."""
    written: list[str] = []
    stock, stepped = io.write, threading.Event()

    def slowly(checkpoint: Any, path: Path, *args: Any, **kwargs: Any) -> Any:
        written.append(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            stepped.wait(20)
        return stock(checkpoint, path, *args, **kwargs)

    class Recording(Callback):
        weights: list[Any] = []  # noqa: RUF012

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.weights.append({name: value.clone() for name, value in module.state_dict().items()})
            stepped.set() if len(self.weights) > 1 else None

    monkeypatch.setattr(io, "write", slowly)
    saves = home.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    first = home.callbacks.ModelCheckpoint(tmp_path, "first-{step}", every_n_train_steps=3, save_top_k=-1)
    recording = Recording()
    Recording.weights = []
    trainer = make_trainer(
        home, callbacks=[SafeCheckpoint(asynchronous=True), recording, saves, first], enable_checkpointing=True
    )
    trainer.fit(regression(home), loader(BATCHES))
    assert set(written) == {"checkpoint"}
    for name, step in (("step=2.ckpt", 2), ("first-step=3.ckpt", 3), ("step=4.ckpt", 4)):
        loaded = torch.load(tmp_path / name, weights_only=True)["state_dict"]
        assert all(torch.equal(value, recording.weights[step - 1][key]) for key, value in loaded.items())


def test_error_of_the_thread_is_raised_by_the_next_save(
    home: ModuleType, make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(io, "write", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        fit(home, make_trainer, tmp_path, SafeCheckpoint(asynchronous=True))


def test_copy_that_the_host_has_no_room_for_is_not_made(
    home: ModuleType, make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io, "host_room", lambda: 10)
    monkeypatch.setattr(io.Snapshots, "copy", lambda *_: pytest.fail("copied"))
    with pytest.warns(UserWarning, match=mentions("asynchronous", "10 B")):
        fit(home, make_trainer, tmp_path, SafeCheckpoint(asynchronous=True))
    assert difference(tmp_path / "last.ckpt") is None


# --- signals ---


class Signalling(Callback):
    """Sends this process a signal at a moment of a fit, and writes down the batches that were trained."""

    def __init__(self, folder: Path, name: str, moment: str) -> None:
        self.printed, self.number, self.moment = folder / "printed", getattr(signal, name), moment

    def send(self, at: str) -> None:
        if at == self.moment:
            os.kill(os.getpid(), self.number)

    def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
        self.send("sanity")

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.send("training")
            self.send("twice")
            self.send("twice")

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking and trainer.global_step == 2:
            self.send("validation")

    def on_train_batch_end(self, *_: Any) -> None:
        with self.printed.open("a") as file:
            file.write("x")


def run(folder: Path, name: str, moment: str) -> tuple[int, int]:
    """Train in a forked process that gets a signal; return its exit status and the number of trained batches."""
    process = os.fork()
    if process == 0:
        code: Any = 1
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            saves = lightning.pytorch.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=1000)
            callbacks = [SafeCheckpoint(), Signalling(folder, name, moment), saves]
            quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
            trainer = lightning.pytorch.Trainer(
                max_epochs=2, callbacks=callbacks, val_check_interval=2, accelerator="cpu", devices=1, **quiet
            )
            trainer.fit(regression(lightning.pytorch), loader(4), loader(3))
            code = 0
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    printed = folder / "printed"
    return status, len(printed.read_text()) if printed.exists() else 0


@pytest.mark.parametrize(
    ("name", "moment", "status", "steps"),
    [
        pytest.param("SIGTERM", "training", 143, 3, id="row 52, in training"),
        pytest.param("SIGTERM", "validation", 143, 2, id="row 52, in validation"),
        pytest.param("SIGTERM", "sanity", 143, None, id="row 52, in the sanity check"),
        pytest.param("SIGTERM", "twice", 143, None, id="row 52, twice"),
        pytest.param("SIGINT", "training", 130, 3, id="row 53, SIGINT"),
        pytest.param("SIGUSR1", "training", 0, 3, id="row 53, SIGUSR1"),
        pytest.param("SIGHUP", "training", 0, None, id="row 53, SIGHUP"),
    ],
)
def test_signal_saves_before_the_next_batch(
    name: str, moment: str, status: int, steps: int | None, tmp_path: Path
) -> None:
    code, batches = run(tmp_path, name, moment)
    assert code == status
    assert batches == ({"training": 3, "validation": 2, "sanity": 0, "twice": 2}[moment] if status else 8)
    saved = [entry.step for entry in entries(tmp_path) if entry.file == "last.ckpt"]
    assert saved == ([] if steps is None else [steps])
    assert steps is None or difference(tmp_path / "last.ckpt") is None


def test_command_that_announces_the_end_of_the_machine_saves(
    home: ModuleType, make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_solo.techniques.safe_checkpoint import technique

    monkeypatch.setattr(technique, "NOTICE_S", 0.01)
    folder, notice = tmp_path / "checkpoints", tmp_path / "preempted"

    class Waiting(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                notice.touch()
                before = signal.getsignal(signal.SIGTERM)
                assert callable(before)
                arrived = threading.Event()
                for _ in range(2000):
                    if caller._signals:
                        break
                    arrived.wait(0.01)

    caller = SafeCheckpoint(notice=f"test -e {notice}")
    with pytest.raises(SystemExit) as ended:
        fit(home, make_trainer, folder, caller, Waiting())
    assert ended.value.code == 143
    assert entries(folder)[-1].step == 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_manifest_is_a_line_per_save(home: ModuleType, make_trainer: Make, tmp_path: Path) -> None:
    fit(home, make_trainer, tmp_path)
    lines = [line for line in (tmp_path / MANIFEST).read_text().splitlines() if line]
    assert len(lines) == 2 * BATCHES


def test_nothing_is_left_of_the_technique_but_the_writer(home: ModuleType, make_trainer: Make, tmp_path: Path) -> None:
    trainer = fit(home, make_trainer, tmp_path)
    assert "fit_loop" in vars(trainer)
    assert writing.damage(tmp_path / "last.ckpt") is None
    assert not hasattr(trainer.strategy, "solo_run") or trainer.strategy.solo_run.ended
