"""MemorySnapshot: keeps the history of the highest peak and of an OOM, and leaves the allocator as it was."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_solo.errors import CapabilityError, ConflictError
from lightning_solo.memory import snapshot
from lightning_solo.memory.snapshot import Counters, moment_of_peak
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.memory_snapshot import technique as memory_snapshot
from lightning_solo.techniques.memory_snapshot.technique import MemorySnapshot
from lightning_solo.units import format_bytes
from tests.memory.test_snapshot import EVENTS, active, recorded
from tests.messages import lines_with, mentions
from tests.modules import loader, regression
from tests.training import equal, fit

pytestmark = pytest.mark.any_device


class Cuda:
    """An allocator under the test's control, in place of CUDA's: its recorder, its counters and its snapshots."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recording: Any = None
        self.calls: list[Any] = []
        self.peak = self.ooms = 0
        self.taken = 0
        self.events: list[dict[str, Any]] = list(EVENTS)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self.snapshot)
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.recording is not None, raising=False)
        monkeypatch.setattr(memory_snapshot, "read_counters", lambda device: Counters(self.peak, self.ooms))
        setup = MemorySnapshot.setup

        def as_if_cuda(callback: Any, trainer: Any, pl_module: Any, stage: str) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(trainer.strategy), "root_device", torch.device("cuda:0"))
                setup(callback, trainer, pl_module, stage)

        monkeypatch.setattr(MemorySnapshot, "setup", as_if_cuda)

    def record(self, enabled: Any, **kwargs: Any) -> None:
        self.recording = enabled
        self.calls.append(enabled)

    def snapshot(self) -> Any:
        assert self.recording
        self.taken += 1
        return recorded(self.events, [active(10, self.peak), active(30, 300, line=9)])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def with_peaks(home: Any, cuda: Cuda, peaks: list[int]) -> Any:
    """Return a module at whose steps the allocator's peak rises to these bytes."""
    module, left = regression(home), list(peaks)
    stock = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        cuda.peak = max(cuda.peak, left.pop(0))
        return stock(batch, batch_idx)

    module.training_step = training_step
    return module


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("**/*") if path.is_file())


# --- acted ---


def test_highest_peak_is_written_and_described(
    home: Any, make_trainer: Any, tmp_path: Path, cuda: Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    callback = MemorySnapshot()
    trainer = make_trainer(home, callbacks=[callback])
    # a first peak, a higher one, one as high, one notably not higher
    trainer.fit(with_peaks(home, cuda, [1000, 5000, 5000, 5010, 900]), loader(5))
    assert cuda.taken == 2
    assert names(tmp_path / "memory_snapshots") == ["step-2-peak.pickle", "step-2-peak.txt"]
    written = pickle.loads((tmp_path / "memory_snapshots" / "step-2-peak.pickle").read_bytes())
    assert written["device_traces"][0] == EVENTS
    words = (tmp_path / "memory_snapshots" / "step-2-peak.txt").read_text()
    assert lines_with(words, "peak", "optimizer step 2", "5.37 KiB")  # 5000 + 200 + 300
    assert lines_with(words, "300 B", "model.py:9")
    assert callback.words.startswith(words.strip())


def test_peaks_outside_batches_are_ignored(home: Any, make_trainer: Any, tmp_path: Path, cuda: Cuda) -> None:
    module = with_peaks(home, cuda, [1000, 1000, 1000])
    module.on_validation_end = lambda: setattr(cuda, "peak", 9000)
    trainer = make_trainer(home, val_check_interval=2, callbacks=[MemorySnapshot()])
    trainer.fit(module, loader(3), loader(1))
    assert names(tmp_path / "memory_snapshots") == ["step-1-peak.pickle", "step-1-peak.txt"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUBLAS_ALLOC_FAILED")])
def test_an_oom_is_kept_and_the_history_stopped(
    home: Any, make_trainer: Any, tmp_path: Path, cuda: Cuda, error: Exception
) -> None:
    module = regression(home)

    def fail(batch: Any, batch_idx: int) -> None:
        cuda.ooms += 1
        cuda.events.append({"action": "oom", "size": 2**20, "device_free": 2**10, "frames": []})
        raise error

    module.training_step = fail
    callback = MemorySnapshot()
    trainer = make_trainer(home, callbacks=[callback])
    with pytest.raises(type(error)):
        trainer.fit(module, loader(2))
    assert names(tmp_path / "memory_snapshots") == ["step-0-oom.pickle", "step-0-oom.txt"]
    assert lines_with(callback.words, "out of memory", "optimizer step 0", "1.00 MiB", "1.00 KiB of the device")
    assert cuda.recording is None


def test_handled_oom_is_written_next_to_the_peak(home: Any, make_trainer: Any, tmp_path: Path, cuda: Cuda) -> None:
    module = with_peaks(home, cuda, [1000, 1000, 2000])
    module.on_after_backward = lambda: setattr(cuda, "ooms", cuda.ooms + (module.trainer.global_step == 1))
    make_trainer(home, callbacks=[MemorySnapshot()]).fit(module, loader(3))
    kept = ["step-2-oom.pickle", "step-2-oom.txt", "step-3-peak.pickle", "step-3-peak.txt"]
    assert names(tmp_path / "memory_snapshots") == kept


def test_each_batch_starts_a_new_history(home: Any, make_trainer: Any, cuda: Cuda) -> None:
    make_trainer(home, callbacks=[MemorySnapshot()]).fit(with_peaks(home, cuda, [1] * 3), loader(3))
    assert cuda.calls == ["all", "all", "all", "all", None]


@pytest.mark.cpu_only("it refuses a run on a CPU")
def test_run_without_cuda_is_refused_with_the_cpus_alternative(home: Any, make_trainer: Any) -> None:
    trainer = make_trainer(home, callbacks=[MemorySnapshot()])
    with pytest.raises(CapabilityError, match=mentions("cpu", "memory_logger.category_steps=2")):
        trainer.fit(regression(home), loader(2))
    trainer.validate(regression(home), loader(2), verbose=False)


def test_preset_is_refused_before_the_run() -> None:
    import lightning_solo as solo

    if not torch.cuda.is_available():
        with pytest.raises(CapabilityError, match=mentions("memory_snapshot", "CUDA", "category_steps=2")):
            solo.trainer_kwargs("baseline", ["+callback=memory_snapshot"])
    with pytest.raises(ConflictError, match=r"per_phase=false"):
        compose("baseline", ["+callback=[memory_snapshot,memory_logger]", "callback.memory_logger.per_phase=true"])


# --- parity, memory and cost ---


def test_training_is_bit_equal(home: Any, make_trainer: Any, cuda: Cuda) -> None:
    after = []
    for callback in (None, MemorySnapshot()):
        torch.manual_seed(0)
        cuda.peak = 0
        after.append(
            fit(make_trainer, callback, module=with_peaks(home, cuda, [1, 2, 3, 4, 5]), home=home, data=loader(5))
        )
    assert cuda.taken == 5
    assert equal(*after)


def test_it_reads_counters_twice_a_batch_and_the_history_at_new_peaks_only(
    home: Any, make_trainer: Any, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("synchronize", "reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append(name))
    read = memory_snapshot.read_counters
    monkeypatch.setattr(memory_snapshot, "read_counters", lambda device: (calls.append("read"), read(device))[1])
    make_trainer(home, callbacks=[MemorySnapshot()]).fit(with_peaks(home, cuda, [7] * 20), loader(20))
    assert calls == ["read"] * 40
    assert cuda.taken == 1


@pytest.mark.gpu
def test_real_peak_is_the_allocators_and_names_lines(home: Any, make_trainer: Any, tmp_path: Path) -> None:
    callback = MemorySnapshot()
    gc.collect()  # what earlier tests left on the device would make room
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    make_trainer(home, accelerator="gpu", callbacks=[callback]).fit(regression(home), loader(1, batch_size=4096))
    assert not snapshot.records()
    text, pickled = sorted((tmp_path / "memory_snapshots").iterdir(), key=lambda path: path.suffix != ".txt")
    moment = moment_of_peak(pickle.loads(pickled.read_bytes()), torch.cuda.current_device())
    # each block is rounded up to 512 bytes by the allocator
    assert sum(-(-block.bytes // 512) * 512 for block in moment.blocks.values()) == torch.cuda.max_memory_allocated()
    assert f"{format_bytes(moment.bytes)} allocated" in text.read_text()
    assert "optimizer states" in callback.words or "weights" in callback.words
    assert "at modules.py:" in callback.words


@pytest.mark.gpu
def test_a_real_oom_is_kept(home: Any, make_trainer: Any, tmp_path: Path) -> None:
    module = regression(home)
    module.training_step = lambda batch, batch_idx: torch.empty(2**50, dtype=torch.uint8, device="cuda").sum()
    callback = MemorySnapshot()
    with pytest.raises(torch.OutOfMemoryError):
        make_trainer(home, accelerator="gpu", callbacks=[callback]).fit(module, loader(2))
    assert not snapshot.records()
    assert "out of memory" in callback.words
    assert names(tmp_path / "memory_snapshots") == ["step-0-oom.pickle", "step-0-oom.txt"]


# --- trace ---


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_start", "setup"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_on_where_training_fails(
    home: Any, make_trainer: Any, cuda: Cuda, where: str, error: type[BaseException]
) -> None:
    module, callback, seen = regression(home), MemorySnapshot(), []

    def fail(*args: Any, **kwargs: Any) -> None:
        seen.append(cuda.recording)
        raise error("broken")

    setattr(module, where, fail)
    trainer = make_trainer(home, callbacks=[callback])
    with pytest.raises((error, SystemExit)):
        trainer.fit(module, loader(3))
    assert (seen, cuda.recording, cuda.taken) == (["all"], None, 0)
    stopped = len(cuda.calls)
    callback.on_exception(trainer, module, RuntimeError())
    callback.teardown(trainer, module, "fit")
    assert len(cuda.calls) == stopped


def test_recording_of_the_user_continues(home: Any, make_trainer: Any, tmp_path: Path, cuda: Cuda) -> None:
    cuda.record("state")
    make_trainer(home, callbacks=[MemorySnapshot()]).fit(with_peaks(home, cuda, [1000, 1]), loader(2))
    assert cuda.calls == ["state"]
    assert names(tmp_path / "memory_snapshots") == ["step-1-peak.pickle", "step-1-peak.txt"]


def test_several_fits_and_other_stages(home: Any, make_trainer: Any, cuda: Cuda) -> None:
    callback, module = MemorySnapshot(), regression(home)
    for _ in range(2):
        make_trainer(home, callbacks=[callback]).fit(module, loader(2))
        assert cuda.recording is None
    calls = len(cuda.calls)
    trainer = make_trainer(home, callbacks=[callback])
    trainer.validate(module, loader(2), verbose=False)
    trainer.predict(module, loader(2))
    assert len(cuda.calls) == calls


def test_training_continues_on_a_full_disk(
    home: Any, make_trainer: Any, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(memory_snapshot, "write_snapshot", fail)
    trainer = make_trainer(home, callbacks=[MemorySnapshot()])
    with pytest.warns(UserWarning, match="snapshot"):
        trainer.fit(with_peaks(home, cuda, [5, 5, 5]), loader(3))
    assert trainer.global_step == 3


def test_a_snapshot_that_fails_does_not_hide_the_failure(
    home: Any, make_trainer: Any, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = regression(home)

    def fail(batch: Any, batch_idx: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    module.training_step = fail
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {}["segments"])
    with pytest.raises(torch.OutOfMemoryError), pytest.warns(UserWarning, match="no snapshot"):
        make_trainer(home, callbacks=[MemorySnapshot()]).fit(module, loader(2))
    assert cuda.recording is None
