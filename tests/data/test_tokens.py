"""Windows of a file of tokens: each once in an epoch, in an order by seed and epoch, without growing in memory."""

from __future__ import annotations

import pickle
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_solo.data.tokens import DTYPES, Permutation, TokenLoader, TokenWindows
from lightning_solo.errors import CheckpointError
from lightning_solo.techniques.early_zero_grad.technique import EarlyZeroGrad
from lightning_solo.techniques.prefetch.technique import Prefetch
from tests.conftest import long
from tests.messages import mentions


def written(folder: Path, tokens: Tensor, name: str = "tokens.bin") -> Path:
    path = folder / name
    path.write_bytes(tokens.view(torch.uint8).numpy().tobytes())
    return path


def firsts(loader: Any) -> list[int]:
    """Return the first token of each window, which is its place in a file of rising tokens."""
    return [int(token) for batch in loader for token in batch[:, 0]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of the tokens 0 to 102."""
    return written(tmp_path, torch.arange(103).to(torch.uint16))


# --- the order ---


@given(length=st.integers(1, 3000), seed=st.integers(-5, 5), epoch=st.integers(0, 3))
def test_a_permutation_has_each_index_once(length: int, seed: int, epoch: int) -> None:
    order = [Permutation(length, seed, epoch)[index] for index in range(length)]
    assert sorted(order) == list(range(length))
    assert order == [Permutation(length, seed, epoch)[index] for index in range(length)]


def test_orders_of_keys_look_unrelated() -> None:
    length = 10_000
    orders = [torch.tensor([Permutation(length, 0, epoch)[index] for index in range(length)]) for epoch in range(3)]
    rising = torch.arange(length)
    for one, other in [(orders[0], rising), (orders[1], rising), (orders[0], orders[1]), (orders[1], orders[2])]:
        assert (one == other).sum() < 12  # 1 is expected
        assert abs(float(torch.corrcoef(torch.stack([one, other]).double())[0, 1])) < 0.05  # 5 standard deviations
        assert (one.diff() == 1).sum() < 12


def test_an_order_of_very_many_is_not_a_list() -> None:
    order = Permutation(10**15, 3)
    assert len({order[index] for index in range(1000)}) == 1000
    with pytest.raises(IndexError):
        order[10**15]


def test_an_epoch_has_each_window_once_in_an_order_by_seed_and_epoch(path: Path) -> None:
    windows = TokenWindows(path, window=10)
    assert len(windows) == 10  # three tokens are left over
    orders = []
    for seed, epoch in [(0, 0), (0, 1), (1, 0), (0, 0)]:
        loader = TokenLoader(windows, batch_size=3, seed=seed)
        loader.batch_sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        orders.append(firsts(loader))
    assert all(sorted(order) == list(range(0, 100, 10)) for order in orders)
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert firsts(TokenLoader(windows, shuffle=False)) == list(range(0, 100, 10))


def test_nothing_is_drawn_from_global_random_numbers(path: Path) -> None:
    iteration = iter(TokenLoader(TokenWindows(path, window=10)))
    next(iteration)  # the loader's own draw
    before = (torch.get_rng_state(), random.getstate())
    list(iteration)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


# --- what is read ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_each_dtype(tmp_path: Path, dtype: str) -> None:
    high = min(torch.iinfo(DTYPES[dtype]).max, 2**40)
    tokens = torch.tensor([0, 1, high - 1, high, 2, 3])
    windows = TokenWindows(written(tmp_path, tokens.to(DTYPES[dtype])), window=3, dtype=dtype)
    assert torch.equal(torch.cat([windows[0], windows[1]]), tokens)
    assert windows[0].dtype is torch.int64


def test_workers_map_the_file_by_its_path(path: Path) -> None:
    windows = TokenWindows(path, window=10)
    assert windows[0].tolist() == list(range(10))
    copy = pickle.loads(pickle.dumps(windows))
    assert copy[3].tolist() == list(range(30, 40))
    assert len(pickle.dumps(windows)) < 1000
    loaders = [TokenLoader(windows, batch_size=2, num_workers=workers) for workers in (0, 2)]
    assert firsts(loaders[0]) == firsts(loaders[1])


def resident_file_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"RssFile:\s+(\d+) kB", text)[0])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_does_not_grow_with_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(2**26)  # sparse: 64 MiB
    windows = TokenWindows(path, window=2**16)
    windows[0]
    before = resident_file_bytes()
    for index in range(len(windows)):
        windows[index]
    assert len(windows) == 512
    assert resident_file_bytes() - before < 2**23


# --- resuming ---


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_an_epoch_resumes_at_its_batch(path: Path, workers: int) -> None:
    def made() -> TokenLoader:
        loader = TokenLoader(TokenWindows(path, window=10), batch_size=3, seed=2, num_workers=workers)
        loader.batch_sampler.set_epoch(4)  # type: ignore[attr-defined]
        return loader

    whole, first = firsts(made()), made()
    iteration = iter(first)
    for _ in range(2):
        next(iteration)
    state = first.state_dict()
    rest = TokenLoader(TokenWindows(path, window=10), batch_size=3, seed=2)
    rest.load_state_dict(state)
    assert rest.state_dict() == state
    assert firsts(rest) == whole[6:]
    after = firsts(rest)  # of a whole epoch, the next one
    assert sorted(after) == sorted(whole)
    assert after != whole


def test_the_state_of_an_epoch_that_has_ended_starts_the_next_one(path: Path) -> None:
    loader = TokenLoader(TokenWindows(path, window=10), batch_size=3)
    firsts(loader)
    other = TokenLoader(TokenWindows(path, window=10), batch_size=3)
    other.load_state_dict(loader.state_dict())
    other.batch_sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert sorted(firsts(other)) == list(range(0, 100, 10))


def test_a_state_of_another_order_is_refused_within_an_epoch(path: Path) -> None:
    first, other = (TokenLoader(TokenWindows(path, window=10), batch_size=size) for size in (3, 4))
    iteration = iter(first)
    next(iteration)
    with pytest.raises(CheckpointError, match=mentions("batch_size: 3", "4 here", "end of an epoch")):
        other.load_state_dict(first.state_dict())
    assert other.state_dict() == first.state_dict()
    assert sorted(firsts(other)) == list(range(0, 100, 10))
    assert other.state_dict() == {"epoch": 1, "batches": 0, "windows": 10, "batch_size": 4, "seed": 0, "shuffle": True}
    for _ in iteration:
        pass
    other.load_state_dict(first.state_dict())
    assert sorted(firsts(other)) == list(range(0, 100, 10))


@pytest.mark.parametrize(("batches", "left"), [(1, [[4, 7, 9], [3, 2, 8], [0]]), (4, [])])
def test_a_checkpoint_of_the_first_version_has_the_same_order(path: Path, batches: int, left: Any) -> None:
    """Where an epoch may be at its end; the numbers are those that it had."""
    loader = TokenLoader(TokenWindows(path, window=10), batch_size=3, seed=2)
    order = {"windows": 10, "batch_size": 3, "seed": 2, "shuffle": True}
    loader.load_state_dict({"epoch": 4, "batches": batches, **order})
    epochs = [left] if left else []
    for number, expected in enumerate([*epochs, [[2, 1, 4], [7, 9, 8], [5, 3, 0], [6]]]):
        loader.batch_sampler.set_epoch(1 + number)  # type: ignore[union-attr]
        assert [batch[:, 0].div(10).tolist() for batch in loader] == expected
    assert loader.state_dict() == {"epoch": 6, "batches": 0, **order}


class Reader(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += batch[:, 0].tolist()
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_fit_resumes_with_the_windows_it_has_not_seen(
    path: Path, tmp_path: Path, make_trainer: Callable[..., Any]
) -> None:
    def run(steps: int, name: str, checkpoint: Path | None = None) -> list[int]:
        trainer = make_trainer(L, max_epochs=9, max_steps=steps)
        module = Reader()
        loader = TokenLoader(TokenWindows(path, window=10), batch_size=3)
        trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=checkpoint and False)
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        return module.seen

    whole, first = run(18, "whole"), run(6, "first")
    second = run(11, "second", tmp_path / "first.ckpt")
    rest = run(18, "rest", tmp_path / "second.ckpt")
    assert [*first, *second, *rest] == whole


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:Be aware that when using .ckpt_path.")
def test_a_checkpoint_that_is_saved_at_a_refusal_resumes_where_the_one_before_it_does(
    path: Path, tmp_path: Path, make_trainer: Callable[..., Any]
) -> None:
    folder = tmp_path / "saved"

    def run(steps: int, batch_size: int = 3, *techniques: Any) -> list[int]:
        callbacks = [ModelCheckpoint(folder, save_last=True, save_on_exception=True), *techniques]
        trainer = make_trainer(L, max_epochs=9, max_steps=steps, enable_checkpointing=True, callbacks=callbacks)
        module, loader = Reader(), TokenLoader(TokenWindows(path, window=10), batch_size=batch_size)
        trainer.fit(module, loader, ckpt_path="last" if folder.exists() else None, weights_only=True)
        return module.seen

    first = run(2)
    saved = (folder / "last.ckpt").stat().st_mtime_ns
    for techniques in ([], [Prefetch()], []):
        with pytest.raises(CheckpointError, match="batch_size"):
            run(4, 4, *techniques)
    assert (folder / "last.ckpt").stat().st_mtime_ns > saved
    assert sorted([*first, *run(4)]) == list(range(0, 100, 10))


@pytest.mark.parametrize("workers", [0, long(2)])
def test_under_a_technique_the_batch_within_which_a_run_was_stopped_comes_again(
    path: Path, tmp_path: Path, make_trainer: Callable[..., Any], workers: int
) -> None:
    class Within(L.Callback):
        def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{len(module.seen) - (1 if trainer.is_last_batch else 3)}.ckpt")

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{len(module.seen)}-end.ckpt")

    def run(*others: Any, **options: Any) -> list[int]:
        module, loader = Reader(), TokenLoader(TokenWindows(path, window=10), batch_size=3, num_workers=workers)
        make_trainer(L, max_epochs=2, callbacks=[EarlyZeroGrad(), *others]).fit(module, loader, **options)
        return module.seen

    whole = run(Within())
    checkpoints = [*tmp_path.glob("*.ckpt")]
    assert len(checkpoints) == 2 * 4 + 2
    for checkpoint in checkpoints:
        begin = int(checkpoint.stem.partition("-")[0])
        assert run(ckpt_path=checkpoint, weights_only=True) == whole[begin:], checkpoint.stem


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "float32"}, ("dtype", "uint16")),
        ({"window": 0}, ("window", "0")),
        ({"window": None}, ("window",)),
        ({"window": 104}, ("window", "104", "103")),
        ({"vocabulary": 0}, ("vocabulary",)),
        ({"dtype": "uint32"}, ("206", "4", "uint32")),
    ],
)
def test_arguments_that_do_not_fit(path: Path, arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=mentions(*words)):
        TokenWindows(path, **{"window": 10, **arguments})


@pytest.mark.parametrize("options", [{"sampler": [0, 1]}, {"batch_sampler": [[0, 1]]}, {"batch_size": None}])
def test_batches_of_others_are_refused(path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=mentions(f"TokenLoader({next(iter(options))}=", "batch_size=1")):
        TokenLoader(TokenWindows(path, 4), **options)


def test_a_path_without_a_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.bin"):
        with pytest.raises(FileNotFoundError, match=re.escape(str(path))):
            TokenWindows(path, window=10)


def test_tokens_out_of_range_are_named_with_their_place(tmp_path: Path, path: Path) -> None:
    windows = TokenWindows(path, window=10, vocabulary=57)
    windows[4]
    with pytest.raises(ValueError, match=mentions("token 59 is 59", "0 to 56")):
        windows[5]
    negative = TokenWindows(written(tmp_path, torch.tensor([1, -2], dtype=torch.int16), "n.bin"), 2, dtype="int16")
    with pytest.raises(ValueError, match=mentions("token 1 is -2")):
        negative[0]
    with pytest.raises(IndexError):
        windows[10]
