"""A run that is resumed from a checkpoint of any place ends with the bits of the undisturbed run."""

from __future__ import annotations

import os
import random
import signal
from collections import UserList
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

import lightning_solo as solo
from lightning_solo.errors import CheckpointError, ConflictError
from lightning_solo.seams import patches, resuming
from lightning_solo.techniques.exact_resume.technique import ExactResume
from lightning_solo.techniques.safe_checkpoint.technique import SafeCheckpoint
from tests.conftest import long
from tests.messages import mentions

Make = Callable[..., Any]
ITEMS, BATCH, EPOCHS = 22, 4, 2
PER_EPOCH = 6  # 5 batches of 4 and one of 2

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path."),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Items(Dataset[Any]):
    """Rows of 4 numbers, to which generators add noise."""

    def __init__(self, draws: tuple[str, ...] = ()) -> None:
        self.x = torch.randn(ITEMS, 4, generator=torch.Generator().manual_seed(1))
        self.draws = draws
        self.own = np.random.default_rng(7) if "own" in draws else None

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> Tensor:
        noise = 0.0
        noise += random.random() if "python" in self.draws else 0.0
        noise += float(np.random.rand()) if "numpy" in self.draws else 0.0
        noise += float(torch.rand(())) if "torch" in self.draws else 0.0
        noise += self.own.random() if self.own is not None else 0.0
        return self.x[index] + noise


class Module(L.LightningModule):
    """Dropout, batch norm, and a log of its losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
        self.losses: list[float] = []
        self.means: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss, on_epoch=True, on_step=True, batch_size=len(batch))
        return loss

    def on_train_epoch_end(self) -> None:
        self.means.append(float(self.trainer.callback_metrics.get("loss_epoch", -1)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation/loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Saves(L.Callback):
    """Saves a checkpoint at each call of some hooks, with the number of losses in its name."""

    def __init__(self, folder: Path, *hooks: str, only: Container[int] = range(99)) -> None:
        self.folder, self.only = folder, only
        self.saved: list[tuple[Path, int, int]] = []
        for hook in hooks:
            setattr(self, hook, self._saving(hook))

    def _saving(self, hook: str) -> Any:
        def save(trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            if len(module.losses) not in self.only:
                return
            path = self.folder / f"{len(self.saved)}-{hook}-{len(module.losses)}.ckpt"
            trainer.save_checkpoint(path)
            repeats = hook in ("on_before_zero_grad", "on_before_backward", "on_after_backward")
            self.saved.append((path, len(module.losses) - repeats, len(module.means)))

        return save


def fit(make_trainer: Make, data: Callable[[], Any], *callbacks: Any, path: Any = None, **arguments: Any) -> Any:
    module = arguments.pop("module", Module)()
    validation = arguments.pop("validation", None)
    trainer = make_trainer(L, callbacks=[*callbacks], **{"max_epochs": EPOCHS, **arguments})
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    if path is not None:
        torch.manual_seed(99)  # the generators' states come from the checkpoint
        random.seed(99)
        np.random.seed(99)
    trainer.fit(module, data(), validation() if validation else None, ckpt_path=path, weights_only=path and True)
    return module, trainer


def assert_equal(one: Any, other: Any) -> None:
    (module, trainer), (rest, resumed) = one, other
    for name, value in module.state_dict().items():
        assert torch.equal(value, rest.state_dict()[name]), name
    states, again = (each.optimizers[0].state_dict() for each in (trainer, resumed))
    for number, state in states["state"].items():
        for name, value in state.items():
            assert torch.equal(value, again["state"][number][name]), name
    assert trainer.global_step == resumed.global_step
    assert trainer.current_epoch == resumed.current_epoch


class SavesBeforeFetch(Saves):
    """Saves before a batch is fetched, as `SafeCheckpoint` does after a signal."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        save = self._saving("fetch")

        def begin(with_epoch: bool = False) -> None:
            if not with_epoch and not resuming.fetches_first(trainer):
                save(trainer, module)

        self.fetches = patches.fetches(trainer, begin, lambda: None)
        self.fetches.__enter__()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.fetches.__exit__(None, None, None)


def check(
    make_trainer: Make,
    folder: Path,
    data: Callable[[], Any],
    *hooks: str,
    only: Container[int] = range(99),
    saves: Saves | None = None,
    fast_forward: bool = False,
    **arguments: Any,
) -> None:
    """Compare a run that is resumed from each checkpoint with the run that saved them and with one without it."""
    plain = fit(make_trainer, data, **arguments)
    saves = saves or Saves(folder, *hooks, only=only)
    whole = fit(make_trainer, data, ExactResume(fast_forward=fast_forward), saves, **arguments)
    assert plain[0].losses == whole[0].losses
    assert_equal(plain, whole)
    assert saves.saved
    for path, losses, means in saves.saved:
        rest = fit(make_trainer, data, ExactResume(fast_forward=fast_forward), path=path, **arguments)
        assert rest[0].losses == whole[0].losses[losses:], path.name
        assert rest[0].means == whole[0].means[means:], path.name
        assert_equal(whole, rest)


def shuffled(*draws: str, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Items(draws), BATCH, shuffle=True, **options)


def test_stock_run_differs_after_a_resume(make_trainer: Make, tmp_path: Path) -> None:
    saves = Saves(tmp_path, "on_train_batch_end")
    whole, _ = fit(make_trainer, shuffled(), saves)
    with pytest.warns(match="dataloader is not resumable"):
        rest, _ = fit(make_trainer, shuffled(), path=saves.saved[3][0])
    assert rest.losses != whole.losses[4:]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("draws", [(), ("python", "numpy", "torch", "own")], ids=str)
@pytest.mark.row(47, 48)
def test_each_batch(make_trainer: Make, tmp_path: Path, draws: tuple[str, ...], accumulate: int) -> None:
    check(make_trainer, tmp_path, shuffled(*draws), "on_train_batch_end", accumulate_grad_batches=accumulate)


EVERY = range(99)


@pytest.mark.parametrize(("workers", "only"), [(2, [3]), long(1, EVERY), long(2, EVERY), long(3, EVERY)])
@pytest.mark.row(48)
def test_workers_that_draw(make_trainer: Make, tmp_path: Path, workers: int, only: Container[int]) -> None:
    data = shuffled("python", "numpy", "torch", "own", num_workers=workers)
    check(make_trainer, tmp_path, data, "on_train_batch_end", only=only)


@pytest.mark.parametrize("only", [[9], long(EVERY)], ids=["one", "every"])
@pytest.mark.row(48)
def test_persistent_workers_that_draw(make_trainer: Make, tmp_path: Path, only: Container[int]) -> None:
    data = shuffled("python", "numpy", "torch", "own", num_workers=2, persistent_workers=True)
    check(make_trainer, tmp_path, data, "on_train_batch_end", max_epochs=3, only=only)


class Backwards(Sampler[int]):
    """Draws an order from the global numbers of torch, Python and NumPy, index by index."""

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        left = list(range(ITEMS))[::-1]
        while left:
            number = int(torch.randint(len(left), ())) + random.randrange(len(left)) + np.random.randint(len(left))
            yield left.pop(number % len(left))


class ByEpoch(Sampler[int]):
    """An order that depends on the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(ITEMS, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class Batches(Sampler[list[int]]):
    """Batches of different sizes."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(ITEMS).tolist()
        for size in (2, 6, 4, 4, 2, 4):
            yield [order.pop() for _ in range(size)]


class Kept(Sampler[int]):
    """A sampler that saves its position itself, and would go on wrongly from another one."""

    def __init__(self) -> None:
        self.position, self.generator = 0, torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        while self.position < ITEMS:
            self.position += 1
            yield (self.position * 5) % ITEMS
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Counting(Sampler[int]):
    """Orders that depend on a count of its own, and on the order before."""

    def __init__(self) -> None:
        self.epoch, self.order, self.weights = 0, [*range(ITEMS)], torch.ones(3)

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        self.weights = self.weights * self.epoch
        random.Random(self.epoch + int(self.weights.sum())).shuffle(self.order)
        yield from self.order


class CountingKept(Kept):
    """Saves its position and the number of the epoch."""

    epoch = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.epoch = state["position"], state["epoch"]

    def __iter__(self) -> Iterator[int]:
        if not self.position:
            self.epoch += 1
        for index in super().__iter__():
            yield (index + self.epoch) % ITEMS


class Forgetful(Counting):
    """Saves the number of the epoch, but not the position in it."""

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": lambda: {"batch_size": BATCH},
    "shuffled by a generator": lambda: {"batch_size": BATCH, "shuffle": True, "generator": generator()},
    "weighted": lambda: {"batch_size": BATCH, "sampler": WeightedRandomSampler([1.0] * 11 + [3.0] * 11, ITEMS)},
    "replacement": lambda: {
        "batch_size": BATCH,
        "sampler": RandomSampler(range(ITEMS), replacement=True, generator=generator()),
    },
    "index by index": lambda: {"batch_size": BATCH, "sampler": Backwards()},
    "by epoch": lambda: {"batch_size": BATCH, "sampler": ByEpoch()},
    "batches": lambda: {"batch_sampler": Batches()},
    "items": lambda: {"batch_size": None, "sampler": [[3, 4, 1], [5, 2], [1, 0, 9], [8, 7], [2, 4], [6, 5]]},
    "stateful": lambda: {"batch_size": BATCH, "sampler": Kept()},
    "counting": lambda: {"batch_size": BATCH, "sampler": Counting()},
    "counting and stateful": lambda: {"batch_size": BATCH, "sampler": CountingKept()},
}


@pytest.mark.parametrize("workers", [0, long(2)])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers(make_trainer: Make, tmp_path: Path, sampler: str, workers: int) -> None:
    only = [1, 4, 6, 7, 11] if workers == 0 else EVERY

    def data() -> Any:
        return DataLoader(Items(("torch",)), num_workers=workers, **SAMPLERS[sampler]())

    check(make_trainer, tmp_path, data, "on_train_batch_end", only=only)


def validation() -> Any:
    return DataLoader(Items(), 8)


class Stream(IterableDataset[Any]):
    """Rows in the order of the worker, with noise."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, ITEMS, step):
            yield Items(("torch", "numpy"))[index]


class KeptStream(Stream):
    """Saves its position itself."""

    position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < ITEMS:
            self.position += 1
            yield Items(("torch",))[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Doubled(DataLoader[Any]):
    """Returns each batch twice."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield batch
            yield batch

    def __len__(self) -> int:
        return 2 * super().__len__()


def batches() -> list[Tensor]:
    return [*DataLoader(Items(), BATCH)]


UNORDERED: dict[str, tuple[str, Callable[[], Any]]] = {
    "iterable": ("Stream", lambda: DataLoader(Stream(), BATCH)),
    "iterable in workers": ("Stream", lambda: DataLoader(Stream(), BATCH, num_workers=2)),
    "own iteration": ("Doubled", lambda: Doubled(Items(("torch",)), BATCH, shuffle=True)),
    "no loader": ("dict_values", lambda: dict(enumerate(batches())).values()),
}


@pytest.mark.parametrize("kind", [long(kind) if "workers" in kind else kind for kind in UNORDERED])
@pytest.mark.row(51)
def test_data_that_determine_the_order_themselves(make_trainer: Make, tmp_path: Path, kind: str) -> None:
    name, data = UNORDERED[kind]
    saves = Saves(tmp_path, "on_train_batch_end")
    whole = fit(make_trainer, data, ExactResume(), saves)
    assert fit(make_trainer, data)[0].losses == whole[0].losses
    for path, losses, _ in saves.saved:
        if losses == 2:
            with pytest.raises(CheckpointError, match=mentions(name, "fast_forward=True", "state_dict")):
                fit(make_trainer, data, ExactResume(), path=path)
        rest = fit(make_trainer, data, ExactResume(fast_forward=True), path=path)
        assert rest[0].losses == whole[0].losses[losses:], path.name
        assert_equal(whole, rest)


@pytest.mark.parametrize(
    "data", [lambda: UserList(batches()), lambda: DataLoader(KeptStream(), BATCH)], ids=["sequence", "stateful"]
)
@pytest.mark.row(51)
def test_positions_that_are_known(make_trainer: Make, tmp_path: Path, data: Callable[[], Any]) -> None:
    check(make_trainer, tmp_path, data, "on_train_batch_end")


WITHOUT_LENGTH: dict[str, Callable[[], Any]] = {
    "stateful": lambda: DataLoader(KeptStream(), BATCH),
    "fast forward": lambda: DataLoader(Stream(), BATCH),
    "no loader": lambda: dict(enumerate(batches())).values(),
}


@pytest.mark.parametrize("kind", WITHOUT_LENGTH)
def test_batches_that_are_fetched_ahead(make_trainer: Make, tmp_path: Path, kind: str) -> None:
    data, only = WITHOUT_LENGTH[kind], [0, 3, 5, 6, 8]
    more: dict[str, Any] = {"fast_forward": kind != "stateful"}
    check(make_trainer, tmp_path, data, saves=SavesBeforeFetch(tmp_path, only=only), **more)
    check(make_trainer, tmp_path, data, "on_before_backward", only=[1, 4, 6, 7], **more)


@pytest.mark.parametrize("at", [2, PER_EPOCH])
def test_a_signal_where_batches_are_fetched_ahead(make_trainer: Make, tmp_path: Path, at: int) -> None:
    class Kills(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if len(module.losses) == at:
                os.kill(os.getpid(), signal.SIGTERM)

    data, saves = WITHOUT_LENGTH["stateful"], ModelCheckpoint(tmp_path, every_n_epochs=9)
    whole = fit(make_trainer, data, ExactResume())
    with pytest.raises(SystemExit):
        fit(make_trainer, data, ExactResume(), SafeCheckpoint(), Kills(), saves, enable_checkpointing=True)
    rest = fit(make_trainer, data, ExactResume(), path=tmp_path / "last.ckpt")
    assert rest[0].losses == whole[0].losses[-len(rest[0].losses) :]
    assert len(rest[0].losses) in (2 * PER_EPOCH - at, 2 * PER_EPOCH - at - 1)  # it may train one batch more
    assert_equal(whole, rest)


class StopError(Exception):
    """Of a test's own hook."""


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"]
)
def test_within_a_batch(make_trainer: Make, tmp_path: Path, hook: str, accumulate: int) -> None:
    if accumulate == 3 and hook == "on_after_backward":
        with pytest.raises(CheckpointError, match=mentions("backward", "earlier", "~callback.exact_resume")):
            check(make_trainer, tmp_path, shuffled("torch"), hook, accumulate_grad_batches=3)
        return
    check(make_trainer, tmp_path, shuffled("torch"), hook, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize(
    "hook", ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]
)
def test_an_error_within_a_step(make_trainer: Make, tmp_path: Path, hook: str) -> None:
    class Fails(L.Callback):
        pass

    def fail(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            raise StopError

    fails = Fails()
    setattr(fails, hook, fail)
    whole = fit(make_trainer, shuffled("torch"), ExactResume())
    saves = ModelCheckpoint(tmp_path / "x", save_on_exception=True, every_n_epochs=9)
    with pytest.raises(StopError):
        fit(make_trainer, shuffled("torch"), ExactResume(), fails, saves, enable_checkpointing=True)
    (path,) = (tmp_path / "x").glob("*.ckpt")
    rest = fit(make_trainer, shuffled("torch"), ExactResume(), path=path)
    assert rest[0].losses == whole[0].losses[4:]
    assert rest[0].means == whole[0].means
    assert_equal(whole, rest)


HOOKS = {
    "train_start": "on_train_start",
    "epoch_start": "on_train_epoch_start",
    "batch_start": "on_train_batch_start",
    "batch_end": "on_train_batch_end",
    "validation_start": "on_validation_start",
    "validation_batch": "on_validation_batch_end",
    "validation_end": "on_validation_end",
    "epoch_end": "on_train_epoch_end",
    "train_end": "on_train_end",
}


@pytest.mark.parametrize(
    "every",
    [long({}), {"val_check_interval": 2}, long({"check_val_every_n_epoch": None, "val_check_interval": 4})],
    ids=str,
)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.row(47, 49)
def test_places(make_trainer: Make, tmp_path: Path, hook: str, every: dict[str, Any]) -> None:
    check(make_trainer, tmp_path, shuffled("torch"), HOOKS[hook], validation=validation, only=[0, 2, 6, 9, 12], **every)


def test_other_number_of_workers_is_refused_where_items_draw(make_trainer: Make, tmp_path: Path) -> None:
    saves = Saves(tmp_path, "on_train_batch_end", only=[2, 6])
    whole = fit(make_trainer, shuffled("torch"), ExactResume(), saves)
    with pytest.raises(CheckpointError, match=mentions("num_workers=0", "here it is 1", "end of an epoch")):
        fit(make_trainer, shuffled("torch", num_workers=1), ExactResume(), path=saves.saved[0][0])
    fit(make_trainer, shuffled("torch", num_workers=1), ExactResume(), path=saves.saved[1][0])
    saves = Saves(tmp_path, "on_train_batch_end", only=[2])
    whole = fit(make_trainer, shuffled(), ExactResume(), saves)
    assert_equal(whole, fit(make_trainer, shuffled(num_workers=1), ExactResume(), path=saves.saved[0][0]))


@pytest.mark.parametrize("only", [[1], [4]], ids=["one batch", "several"])
def test_a_state_without_a_position_is_refused(make_trainer: Make, tmp_path: Path, only: list[int]) -> None:
    def data() -> Any:
        return DataLoader(Items(), BATCH, sampler=Forgetful())

    saves = Saves(tmp_path, "on_train_batch_end", only=only)
    with pytest.warns(UserWarning, match=mentions("state_dict of Forgetful", "position", "skip as many")):
        fit(make_trainer, data, ExactResume(), saves)
    resumed = Saves(tmp_path, "on_train_batch_end")
    with pytest.raises(CheckpointError, match=mentions("state_dict of Forgetful", "~callback.exact_resume")):
        fit(make_trainer, data, ExactResume(), resumed, path=saves.saved[0][0])
    assert len(resumed.saved) == (only == [1])  # known only at the second batch


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_batch_end"])
def test_a_count_of_epochs_at_an_end(make_trainer: Make, tmp_path: Path, hook: str) -> None:
    def data() -> Any:
        return DataLoader(Items(("torch",)), BATCH, sampler=Counting())

    check(make_trainer, tmp_path, data, hook, validation=validation, max_epochs=3)


def test_a_count_of_epochs_with_workers(make_trainer: Make, tmp_path: Path) -> None:
    def data() -> Any:
        return DataLoader(Items(("torch",)), BATCH, sampler=Counting(), num_workers=2)

    check(make_trainer, tmp_path, data, "on_train_batch_end", only=[8])


def test_a_changed_argument_of_a_sampler_is_kept(make_trainer: Make, tmp_path: Path) -> None:
    class Sized(Counting):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size

    saves = Saves(tmp_path, "on_train_epoch_end", only=[6])
    fit(make_trainer, lambda: DataLoader(Items(), BATCH, sampler=Sized(4)), ExactResume(), saves)
    sampler = Sized(5)
    fit(make_trainer, lambda: DataLoader(Items(), BATCH, sampler=sampler), ExactResume(), path=saves.saved[0][0])
    assert (sampler.size, sampler.epoch) == (5, 2)


def test_other_data_are_refused(make_trainer: Make, tmp_path: Path) -> None:
    saves = Saves(tmp_path, "on_train_batch_end", only=[2])
    fit(make_trainer, shuffled(), ExactResume(), saves)
    with pytest.raises(CheckpointError, match=mentions("RandomSampler", "2 batches", "~callback.exact_resume")):
        fit(make_trainer, lambda: DataLoader(Items(), 3, shuffle=True), ExactResume(), path=saves.saved[0][0])


@pytest.mark.parametrize("several", [False, True], ids=["one process", "several"])
def test_each_loader_gets_its_own_state_also_if_that_is_empty(several: bool) -> None:
    technique, trainer, own = ExactResume(), SimpleNamespace(world_size=1, global_rank=0), {"ahead": 0}
    states: list[Any] = [{"position": 3}, {}]
    loops = {"fit_loop": {"state_dict": {"combined_loader": states}}}
    checkpoint = {"callbacks": {technique.state_key: own}, "loops": loops}
    technique._keep_loaders(checkpoint, states, own, of_others=several)
    technique.on_load_checkpoint(trainer, None, checkpoint)
    assert resuming.loader_states(checkpoint) == states


def test_another_number_of_processes_is_refused(make_trainer: Make, tmp_path: Path) -> None:
    saves = Saves(tmp_path, "on_train_batch_end", only=[2])
    fit(make_trainer, shuffled(), ExactResume(), saves)
    path = saves.saved[0][0]
    checkpoint = torch.load(path, weights_only=True)
    callbacks = checkpoint["callbacks"]
    (key,) = (key for key in callbacks if key.startswith("ExactResume"))
    callbacks[key] = {"ranks": [callbacks[key]] * 3}
    torch.save(checkpoint, path)
    with pytest.raises(CheckpointError, match=mentions("3 processes", "has 1", "devices=3", "~callback.exact_resume")):
        fit(make_trainer, shuffled(), ExactResume(), path=path)


@pytest.mark.row(51)
def test_batches_in_no_order_are_refused(make_trainer: Make) -> None:
    with pytest.raises(ConflictError, match=mentions("in_order=False", "~callback.exact_resume")):
        fit(make_trainer, shuffled(num_workers=2, in_order=False), ExactResume())


@pytest.mark.row(47)
def test_resumed_twice_and_beyond_the_end(make_trainer: Make, tmp_path: Path) -> None:
    whole = fit(make_trainer, shuffled("torch", "own"), ExactResume(), max_epochs=3)
    path, losses = None, []
    for number, steps in enumerate((3, 6, 8, 13, 18)):  # within and at the end of an epoch
        module, trainer = fit(
            make_trainer, shuffled("torch", "own"), ExactResume(), path=path, max_steps=steps, max_epochs=3
        )
        path = tmp_path / f"{number}.ckpt"
        losses += module.losses
        if steps < 18:
            trainer.save_checkpoint(path)  # after the fit
    assert losses == whole[0].losses
    assert_equal(whole, (module, trainer))


def test_several_loaders(make_trainer: Make, tmp_path: Path) -> None:
    class Both(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(torch.cat([each for each in batch if each is not None]), batch_idx)

    def data() -> Any:
        return [shuffled("torch")(), DataLoader(Items(("numpy",)), 8, sampler=Backwards())]

    check(make_trainer, tmp_path, data, "on_train_batch_end", "on_train_epoch_end", module=Both)


def test_plateau_and_step_schedulers(make_trainer: Make, tmp_path: Path) -> None:
    class Scheduled(Module):
        interval = "epoch"

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            scheduler = {"scheduler": plateau, "monitor": "validation/loss", "interval": self.interval}
            assert self.trainer.estimated_stepping_batches  # makes the loaders before the checkpoint is read
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    check(
        make_trainer, tmp_path, shuffled("torch"), "on_train_batch_end", "on_validation_end", "on_train_epoch_end",
        validation=validation, module=Scheduled, max_epochs=3, only=[2, 5, 6, 9, 12],
    )  # fmt: skip


TECHNIQUES: dict[str, Callable[[], list[Any]]] = {
    "plain": list,
    "gradient_release": lambda: [solo.GradientRelease()],
    "compact_states": lambda: [solo.CompactStates(master_bits=32)],
    "micro_batching": lambda: [solo.MicroBatching(micro_batch=2, batch_norm="ghost")],
    "prefetch": lambda: [solo.Prefetch()],
    "item_cache": lambda: [solo.ItemCache()],
    "finite_guard": lambda: [solo.FiniteGuard()],
}


DRAWS = ("python", "numpy", "torch", "own")
REFUSED = [("prefetch", "index by index")]


def combination(number: int) -> dict[str, Any]:
    """Return the parts of a run and of its interruption, drawn by a number."""
    draw = random.Random(number)
    technique = draw.choice([*TECHNIQUES])
    workers = draw.choice([0, 0, 0, 1, 2]) if technique != "prefetch" else 0
    return {
        "technique": technique,
        "draws": () if technique in ("item_cache", "prefetch") else tuple(draw.sample(DRAWS, draw.randrange(5))),
        "sampler": draw.choice([name for name in SAMPLERS if name != "items" and (technique, name) not in REFUSED]),
        "loading": {"num_workers": workers, **({"persistent_workers": draw.random() < 0.3} if workers else {})},
        "accumulate_grad_batches": draw.choice([1, 2, 3, 4]),
        "precision": draw.choice(["32-true", "bf16-mixed"]),
        "hook": draw.choice([*HOOKS.values(), "on_train_batch_end", "on_train_batch_end", "on_before_zero_grad"]),
        "at": draw.randrange(1, 18),
        "validation": {"validation": validation, "val_check_interval": draw.choice([2, 3, 1.0])},
        "max_epochs": 3,
    }


@pytest.mark.long
@pytest.mark.parametrize("number", range(200))
def test_combinations(make_trainer: Make, tmp_path: Path, number: int) -> None:
    parts = combination(number)
    technique, at, hook = TECHNIQUES[parts["technique"]], parts["at"], parts["hook"]
    options = {name: parts[name] for name in ("accumulate_grad_batches", "precision", "max_epochs")}

    def data() -> Any:
        return DataLoader(Items(parts["draws"]), **parts["loading"], **SAMPLERS[parts["sampler"]]())

    def run(*more: Any, **arguments: Any) -> Any:
        callbacks = [*technique(), ExactResume(), *more]
        return fit(make_trainer, data, *callbacks, **options, **parts["validation"], **arguments)

    saves = Saves(tmp_path, hook, only=[*range(at, at + 6)])
    whole = run(saves)
    if not saves.saved:
        saves.only = range(99)
        whole = run(saves)
    path, losses, means = saves.saved[0]
    rest = run(path=path)
    assert rest[0].losses == whole[0].losses[losses:], parts
    assert rest[0].means == whole[0].means[means:], parts
    assert_equal(whole, rest)
