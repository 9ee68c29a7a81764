"""The folder of a run, of killed runs and of living ones; and steps with gradients that come from the disk."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from torch import nn

from lightning_solo.errors import CapabilityError, SoloError
from lightning_solo.processes import environment
from lightning_solo.seams.homes import for_home
from lightning_solo.techniques.zero_offload.technique import ZeroOffloadStrategy
from lightning_solo.zero.deepspeed_patches import align_gradients
from lightning_solo.zero.disk import PREFIX, run_folder
from lightning_solo.zero.process import ONE_PROCESS, close_process_group
from lightning_solo.zero.states import read
from tests.messages import lines_with, mentions
from tests.modules import loader, regression
from tests.zero.engines import arguments, engine_of, step_engine, step_plain

pytest.importorskip("deepspeed", reason="listed on Linux only")
pytestmark = [
    pytest.mark.timeout(600),  # the first test of a machine's life builds async_io
    pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU"),
]
ROOT = Path(__file__).parents[2]
RUN = """
import sys
from lightning_solo.zero.disk import run_folder
with run_folder(sys.argv[1]) as folder:
    (folder / "optimizer").mkdir()
    (folder / "optimizer" / "states.swp").write_bytes(b"of a run")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def start() -> Iterator[Callable[[Path], tuple[subprocess.Popen[str], Path]]]:
    """Return a function that starts a run in another process: (the process, the run's folder)."""
    started = []

    def run(parent: Path) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(parent)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    yield run
    for process in started:
        process.kill()
        process.communicate()


# --- the folder ---


def test_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    with run_folder(tmp_path) as first, run_folder(tmp_path) as second:
        assert first != second
        assert {first, second} == set(tmp_path.iterdir())
        assert first.name.startswith(PREFIX)
        assert first.stat().st_mode & 0o077 == 0  # it holds weights of a model
        (first / "optimizer").mkdir()
        (first / "optimizer" / "0.tensor.swp").write_bytes(b"state")
    assert list(tmp_path.iterdir()) == []


def test_it_is_removed_after_an_exception(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    (run.__enter__() / "file").write_text("")
    error = ArithmeticError("on purpose")
    assert not run.__exit__(type(error), error, None)
    assert list(tmp_path.iterdir()) == []


def test_the_parent_is_removed_only_if_it_was_made(tmp_path: Path) -> None:
    with run_folder(tmp_path / "made" / "below"):
        pass
    assert not (tmp_path / "made").exists()
    (tmp_path / "mine").mkdir()
    with run_folder(str(tmp_path / "mine")):
        pass
    assert (tmp_path / "mine").is_dir()
    with run_folder(tmp_path / "made"):
        (tmp_path / "made" / "notes").write_text("of somebody who found the folder useful")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["notes"]


def test_a_parent_that_another_run_uses_stays(tmp_path: Path) -> None:
    with run_folder(tmp_path / "made"):
        other = run_folder(tmp_path / "made")
        second = other.__enter__()
    assert second.is_dir()
    other.__exit__(None, None, None)
    assert list((tmp_path / "made").iterdir()) == []


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with run_folder("~/swap") as folder:
        assert folder.parent == tmp_path / "swap"


def test_folder_of_a_killed_run_is_removed(tmp_path: Path, start: Any, caplog: pytest.LogCaptureFixture) -> None:
    process, left = start(tmp_path)
    process.kill()
    process.wait()
    assert (left / "optimizer" / "states.swp").read_bytes() == b"of a run"
    with caplog.at_level(logging.WARNING), run_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert lines_with(caplog.text, "removed", str(left))


def test_folder_of_a_running_run_is_kept(tmp_path: Path, start: Any, caplog: pytest.LogCaptureFixture) -> None:
    process, living = start(tmp_path)
    with caplog.at_level(logging.WARNING), run_folder(tmp_path) as folder:
        assert set(tmp_path.iterdir()) == {living, folder}
        assert (living / "optimizer" / "states.swp").read_bytes() == b"of a run"
    assert caplog.text == ""
    process.communicate("")  # the end of its input ends it
    assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}notes").write_text("a file")
    (tmp_path / f"{PREFIX}mine").mkdir()
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "lock").write_text("")
    before = set(tmp_path.iterdir())
    with run_folder(tmp_path):
        pass
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("below", ["", "further"])
def test_a_file_in_the_way_is_named(tmp_path: Path, below: str) -> None:
    """What root meets too, who may write wherever it is not a file."""
    (tmp_path / "file").write_text("mine")
    path = tmp_path / "file" / below
    with (
        pytest.raises(CapabilityError, match=mentions("nvme_path='", "file", "write strategy.nvme_path=")) as raised,
        run_folder(path),
    ):
        pass
    assert isinstance(raised.value, SoloError)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_place_in_which_nothing_can_be_made_is_named() -> None:
    """Not even by root: the kernel makes these folders."""
    with pytest.raises(CapabilityError, match=r"nvme_path='/proc/self/fd/swap'"), run_folder("/proc/self/fd/swap"):
        pass


def test_a_run_that_is_just_starting_counts_as_living(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run starts, and ends, between the making of this one's folder and its locking."""
    lock = fcntl.flock
    others: list[Path] = []

    def slowly(file: Any, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        with run_folder(tmp_path) as other:
            others.append(other)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", slowly)
    with run_folder(tmp_path) as folder:
        assert len(others) == 1
        assert list(tmp_path.iterdir()) == [folder]
        assert (folder / "lock").is_file()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(CapabilityError, match=mentions("No locks available", "write strategy.nvme_path=")),
        run_folder(tmp_path),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


# --- gradients at aligned places ---


class Biased(nn.Sequential):
    """A bias and an odd matrix before two matrices whose gradients are large enough for files of their own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(7, 5), nn.Linear(5, 521), nn.Linear(521, 523), nn.Linear(523, 509))


@pytest.mark.long  # builds async_io
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_bias_before_matrices_trains_as_plain(tmp_path: Path, accumulates: bool) -> None:
    given, module, plain = arguments("nvme", tmp_path), Biased(), Biased()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    engine_optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    with engine_of(module, engine_optimizer, accumulates=accumulates, **given) as engine:
        for seed in range(4):
            step_plain(plain, optimizer, seed)
            step_engine(engine, seed)
        swapper = engine.optimizer.optimizer_swapper
        (info,) = swapper.swap_params_info.values()
        files = [(gradient.offset, gradient.length) for gradient in info.swapped_gradients.values()]
        masters = read(engine.optimizer)
        for p, q in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(masters[p].master, q)
        # Two matrices, 35 + 5 + 2605 + 521 = 3166 and 3166 + 272483 + 523 = 276172 elements from the start; 1024 bytes
        # are 256 elements, the next multiples 13 x 256 and 1079 x 256.
        assert swapper.numel_alignment == 256
        assert [offset for offset, _ in files] == [13 * 256, 1079 * 256]
        assert all(offset % 256 == length % 256 == 0 for offset, length in files)
        del masters


def test_gradients_are_split_and_none_is_lost() -> None:
    class Swapper:
        numel_alignment = 8

    swapper: Any = Swapper()
    align_gradients(swapper)
    given = [torch.arange(40.0), torch.arange(3.0), torch.arange(16.0)]
    parts, starts = swapper._adjust_for_misaligned_lengths(tensors=given, offsets=[5, 45, 48])
    # 5..8..40..45, 45..48, 48..64
    assert starts == [5, 8, 40, 45, 48]
    assert [len(part) for part in parts] == [3, 32, 5, 3, 16]
    assert torch.equal(torch.cat(parts), torch.cat(given))


# --- failures in a step ---


@pytest.fixture
def contained() -> Iterator[None]:
    """Undo what a fit leaves behind, so that it is one test that fails and not all that follow."""
    with environment(dict.fromkeys(ONE_PROCESS, "")):
        for name in ONE_PROCESS:
            del os.environ[name]
        yield
    close_process_group()


def fit(make_trainer: Any, optimizer: Callable[[Any], torch.optim.Optimizer], given: dict[str, Any]) -> nn.Module:
    module = regression(lightning.pytorch, nn.Sequential(Biased(), nn.Linear(509, 1)))
    module.configure_optimizers = lambda: optimizer(module.parameters())
    strategy = for_home(ZeroOffloadStrategy)(allow_cpu=True, host_optimizer="torch", **given)
    make_trainer(lightning.pytorch, strategy=strategy).fit(module, loader(3, width=7))
    return module


@pytest.mark.long  # builds async_io
@pytest.mark.usefixtures("contained")
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {"amsgrad": True}), (torch.optim.RMSprop, {"centered": True, "momentum": 0.9})],
)
def test_an_optimizer_with_three_states_trains_from_the_disk(
    make_trainer: Any, tmp_path: Path, kind: Any, options: dict[str, Any]
) -> None:
    given = arguments("nvme", tmp_path)
    fit(make_trainer, lambda parameters: kind(parameters, lr=1e-3, **options), given)


class Interrupted(torch.optim.AdamW):
    """Fails in its second step over the module's weights; the small tensors of a trial it steps."""

    def step(self, closure: Any = None) -> Any:
        if any(parameter.numel() > 1000 for parameter in self.state):
            raise ArithmeticError("on purpose")
        return super().step(closure)


@pytest.mark.usefixtures("contained")
@pytest.mark.parametrize(
    "place",
    [
        "stage 2",
        "stage 3",
        pytest.param("nvme", marks=pytest.mark.long),
    ],
)
def test_a_step_that_fails_leaves_nothing_behind(make_trainer: Any, tmp_path: Path, place: str) -> None:
    """The longest part of a step on disk is the step: that is where an interrupt hits."""
    given = arguments(place, tmp_path / "swap")
    before = dict(os.environ)
    with pytest.raises(ArithmeticError, match="on purpose"):
        fit(make_trainer, lambda parameters: Interrupted(parameters, lr=1e-3), given)
    assert not torch.distributed.is_initialized()
    assert {**os.environ, "PYTEST_CURRENT_TEST": ""} == {**before, "PYTEST_CURRENT_TEST": ""}
    assert not (tmp_path / "swap").exists()
