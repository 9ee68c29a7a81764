"""Predictions are those of one row after another, in order, in flat memory, and whole or absent."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import lightning_solo as solo
from lightning_solo.errors import BudgetError, CheckpointError, ConflictError, NothingToDoError, PresetError
from lightning_solo.prediction.streaming import MANIFEST
from tests.messages import mentions
from tests.modules import Stack, loader, regression

Make = Callable[..., Any]
ROWS = 23
X = torch.rand(ROWS, 8, generator=torch.Generator().manual_seed(0))


class Predicts(L.LightningModule):
    """Runs out of memory above ``fits`` rows, and calls ``during`` in each batch."""

    def __init__(self, fits: int | None = None, during: Callable[[int], Any] = lambda index: None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.fits, self.during = nn.Linear(8, 3), fits, during
        self.sizes: list[int] = []

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        (x,) = batch
        self.sizes.append(len(x))
        self.during(batch_idx)
        if self.fits is not None and len(x) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return {"y": self.net(x), "sum": x.sum(1)}


def rows(batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X), batch_size=batch_size, **options)


def of_batches(sampler: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X), batch_sampler=BatchSampler(sampler, 4, drop_last=False))


class Empty(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class Splits(L.LightningDataModule):
    """A loader for each split; that of validation exists once the stage is set up."""

    def setup(self, stage: str) -> None:
        self.stages = [*getattr(self, "stages", ()), stage]

    def test_dataloader(self) -> Any:
        return DataLoader(TensorDataset(X[:5]), batch_size=2)

    def val_dataloader(self) -> Any:
        assert "validate" in self.stages
        return DataLoader(TensorDataset(X[:3]), batch_size=2)


def read(folder: Path) -> dict[str, Tensor]:
    """Return the rows of all shards."""
    manifest = json.loads((folder / MANIFEST).read_text())
    shards = [load_file(folder / each["file"]) for each in manifest["files"]]
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}


@torch.no_grad()
def one_by_one(module: Any) -> Tensor:
    return torch.cat([module.net.cpu()(row[None]) for row in X])


@pytest.mark.any_device
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"num_workers": 1, "persistent_workers": True}])
def test_rows_are_those_of_one_by_one(options: dict[str, Any], make_trainer: Make, tmp_path: Path) -> None:
    module = Predicts(fits=4)
    manifest = solo.write_predictions(make_trainer(L), module, rows(**options), tmp_path / "out", shard_bytes=100)
    assert manifest["rows"] == ROWS
    assert manifest["batch_size"] == 4
    assert module.sizes[-1] == ROWS % 4
    assert [each["rows"] for each in manifest["files"]] == [8, 8, 7]  # a row takes 16 bytes
    written = read(tmp_path / "out")
    assert torch.allclose(written["y"], one_by_one(module), rtol=0, atol=1e-6)
    assert torch.allclose(written["sum"], X.sum(1), atol=1e-6)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {MANIFEST, *(f["file"] for f in manifest["files"])}
    assert (
        not (tmp_path / "out" / MANIFEST).stat().st_mode
        ^ (tmp_path / "out" / "predictions-00000.safetensors").stat().st_mode
    )


@pytest.mark.long
def test_memory_is_flat_over_1000_batches(make_trainer: Make, tmp_path: Path) -> None:
    counts: list[int] = []

    def count(index: int) -> None:
        if index in (110, 910):  # ten batches after a shard was written
            gc.collect()
            counts.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))

    module = Predicts(during=count)
    many = DataLoader(TensorDataset(torch.rand(2000, 8)), batch_size=2)
    trainer = make_trainer(L)
    manifest = solo.write_predictions(trainer, module, many, tmp_path / "out", shard_bytes=100 * 2 * 4 * 4)
    assert manifest["rows"] == 2000
    assert len(module.sizes) == 1000
    assert [each["rows"] for each in manifest["files"]] == [200] * 10
    assert counts[0] == counts[1]
    assert not trainer.predict_loop.epoch_batch_indices  # Lightning's own record of all rows
    assert not isinstance(trainer.predict_loop._combined_loader.flattened[0], DataLoader)


@pytest.mark.any_device
def test_batches_that_do_not_fit_are_halved(make_trainer: Make, tmp_path: Path) -> None:
    module = Predicts(fits=3)
    manifest = solo.write_predictions(make_trainer(L), module, rows(batch_size=10), tmp_path / "out", batch_size=16)
    assert module.sizes == [16, 8, 4, *[2] * 8, 2, 2, 2, 1]  # 16 rows in twos, then the other 7
    assert (manifest["batch_size"], manifest["split_into"]) == (16, 2)
    assert torch.allclose(read(tmp_path / "out")["y"], one_by_one(module), rtol=0, atol=1e-6)


@pytest.mark.any_device
def test_largest_batch_that_fits_is_found_on_a_device(make_trainer: Make, accelerator: str, tmp_path: Path) -> None:
    module = Predicts(fits=9)
    manifest = solo.write_predictions(make_trainer(L), module, rows(batch_size=2), tmp_path / "out")
    on_device = accelerator == "gpu"
    assert manifest["batch_size"] == (8 if on_device else 2)
    assert manifest["split_into"] is None
    tried = [4, 8, 16] if on_device else []
    assert module.sizes == [*tried, *([8, 8, 7] if on_device else [2] * 11 + [1])]
    assert torch.allclose(read(tmp_path / "out")["y"], one_by_one(module), rtol=0, atol=1e-6)
    assert module.training


def test_a_row_that_does_not_fit_is_refused(make_trainer: Make, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=mentions("one row", "2.00 GiB")):
        solo.write_predictions(make_trainer(L), Predicts(fits=0), rows(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_batch_that_cannot_be_split_is_refused(make_trainer: Make, tmp_path: Path) -> None:
    class Uneven(Predicts):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            raise MemoryError("no memory")

    batches = DataLoader([[torch.rand(4, 8), torch.rand(3, 8)]], batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(BudgetError, match=mentions("no memory", "--batch-size")):
        solo.write_predictions(make_trainer(L), Uneven(), batches, tmp_path / "out")


@pytest.mark.parametrize("split", [None, "test", "validation"])
def test_splits_have_their_loaders(split: str | None, make_trainer: Make, tmp_path: Path) -> None:
    data = Splits()
    manifest = solo.write_predictions(make_trainer(L), Predicts(), data, tmp_path / "out", split=split)
    assert manifest["split"] == (split or "test")  # the first that there is
    assert manifest["rows"] == {"test": 5, "validation": 3}[manifest["split"]]
    assert "predict_dataloader" not in vars(data)


def test_own_loaders_of_a_module_are_used(make_trainer: Make, tmp_path: Path) -> None:
    class Own(Predicts):
        def predict_dataloader(self) -> Any:
            return [rows()]

    module = Own()
    assert solo.write_predictions(make_trainer(L), module, output=tmp_path / "out")["rows"] == ROWS
    assert {"predict_step", "predict_dataloader"}.isdisjoint(vars(module))


def test_iterable_data_keeps_its_batches(make_trainer: Make, tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter((row,) for row in X)

    manifest = solo.write_predictions(make_trainer(L), Predicts(), DataLoader(Stream(), batch_size=5), tmp_path / "out")
    assert (manifest["rows"], manifest["batch_size"]) == (ROWS, None)
    assert len(read(tmp_path / "out")["y"]) == ROWS


def test_batches_that_were_given_keep_their_rows(make_trainer: Make, tmp_path: Path) -> None:
    loader = of_batches(SequentialSampler(range(9)))  # type: ignore[arg-type]
    manifest = solo.write_predictions(make_trainer(L), Predicts(), loader, tmp_path / "out")
    assert (manifest["rows"], manifest["batch_size"]) == (9, None)
    assert torch.equal(read(tmp_path / "out")["sum"], X[:9].sum(1))


# --- whole or absent ---


def fail(index: int) -> None:
    if index == 3:
        raise FileNotFoundError("the data's own file")


def interrupt(index: int) -> None:
    if index == 3:
        os.kill(os.getpid(), signal.SIGINT)


def terminate(index: int) -> None:
    if index == 3:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("during", "error"), [(fail, FileNotFoundError), (interrupt, SystemExit), (terminate, SystemExit)]
)
def test_an_interrupted_run_leaves_nothing_and_keeps_what_was_there(
    during: Callable[[int], Any], error: type[BaseException], make_trainer: Make, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    solo.write_predictions(make_trainer(L), Predicts(), rows(), out)
    before = read(out)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    seen = []

    def watched(index: int) -> None:
        seen.extend(path.name for path in tmp_path.iterdir() if path.name.startswith(".new-"))
        during(index)

    module = Predicts(during=watched)
    with pytest.raises(error) as caught:
        solo.write_predictions(make_trainer(L), module, rows(), out, overwrite=True, shard_bytes=10)
    assert seen  # it was written there
    assert len(module.sizes) <= 5
    if during is terminate:
        assert caught.value.code == 143  # type: ignore[attr-defined]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert torch.equal(read(out)["y"], before["y"])
    assert "predict_step" not in vars(module)


def test_folders_of_others_are_kept(make_trainer: Make, tmp_path: Path) -> None:
    arguments = (make_trainer(L), Predicts(), rows())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match=mentions("no folder of predictions", "--out")):
            solo.write_predictions(*arguments, tmp_path / "mine", overwrite=overwrite)
    solo.write_predictions(*arguments, tmp_path / "ours")
    with pytest.raises(CheckpointError, match=mentions("exists", "--force")):
        solo.write_predictions(*arguments, tmp_path / "ours")
    solo.write_predictions(*arguments, tmp_path / "ours", overwrite=True, format="jsonl")
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == [MANIFEST, "predictions.jsonl"]
    with pytest.raises(CheckpointError, match=mentions("can't be written")):
        solo.write_predictions(*arguments, tmp_path / "mine" / "file" / "out")


def test_a_split_without_a_loader_is_refused(make_trainer: Make, tmp_path: Path) -> None:
    class Validates(Predicts):
        def val_dataloader(self) -> Any:
            return rows()

    with pytest.raises(PresetError, match=mentions("split=test", "test_dataloader", "write validation")):
        solo.write_predictions(make_trainer(L), Validates(), None, tmp_path / "out", split="test")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("data", "options", "error", "words"),
    [
        (rows(shuffle=True), {}, PresetError, ("shuffles", "shuffle=False")),
        (rows(sampler=SubsetRandomSampler(range(ROWS))), {}, PresetError, ("shuffles", "shuffle=False")),
        (of_batches(RandomSampler(X)), {}, PresetError, ("shuffles", "shuffle=False")),  # type: ignore[arg-type]
        (of_batches(range(9)), {"batch_size": 2}, ConflictError, ("batch_size=2", "DataLoader")),
        ([rows(), rows()], {}, PresetError, ("2 loaders",)),
        (rows(), {"split": "val"}, PresetError, ("val", "validation")),
        (rows(), {"format": "csv"}, PresetError, ("csv", "jsonl or safetensors")),
        (rows(), {"batch_size": 0}, PresetError, ("batch_size=0",)),
        ([[X]], {"batch_size": 2}, ConflictError, ("batch_size=2", "list")),
        ([], {}, NothingToDoError, ("no batch",)),
        (DataLoader(Empty()), {}, NothingToDoError, ("no batch",)),
        (None, {}, PresetError, ("Predicts", "predict_dataloader")),
    ],
)
def test_wrong_arguments_are_refused(
    data: Any,
    options: dict[str, Any],
    error: type[Exception],
    words: tuple[str, ...],
    make_trainer: Make,
    tmp_path: Path,
) -> None:
    made = DataLoader.__init__
    with pytest.raises(error, match=mentions(*words)):
        solo.write_predictions(make_trainer(L), Predicts(), data, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    assert DataLoader.__init__ is made, "Lightning's replacement is undone"


# --- weights of presets ---


@pytest.mark.any_device
@pytest.mark.parametrize("preset", ["compact", pytest.param("bf16", marks=pytest.mark.long)])
def test_trained_weights_of_a_checkpoint_are_used(preset: str, make_trainer: Make, tmp_path: Path) -> None:
    module = regression(L)
    trainer = make_trainer(L, **solo.trainer_kwargs(preset))
    trainer.fit(module, loader(10))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    expected = torch.cat(trainer.predict(module, loader(3))).cpu()
    other = regression(L, Stack())
    fresh = torch.cat(make_trainer(L, **solo.trainer_kwargs(preset)).predict(other, loader(3))).cpu()
    assert not torch.allclose(expected, fresh)
    trainer = make_trainer(L, **solo.trainer_kwargs(preset))
    solo.write_predictions(trainer, other, loader(3), tmp_path / "out", batch_size=4, ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(read(tmp_path / "out")["output"], expected)


@pytest.mark.long
def test_adapters_on_quantized_weights_predict_as_trained(make_trainer: Make, tmp_path: Path) -> None:
    pytest.importorskip("peft")

    def techniques() -> list[Any]:
        return [solo.callbacks.Adapters(r=2, targets=["up", "down"]), solo.callbacks.QuantizedBase(format="int8")]

    torch.manual_seed(0)
    net = Stack(width=64)
    module = regression(L, net)
    base = {name: value.clone() for name, value in net.state_dict().items()}
    expected: list[Tensor] = []

    class Last(L.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            with torch.no_grad():
                expected.extend(pl_module.eval()(batch) for batch in loader(3, width=64))

    module.forward = lambda batch: module.net(batch[0])
    trainer = make_trainer(L, callbacks=[*techniques(), Last()])
    trainer.fit(module, loader(10, width=64))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    other = regression(L, Stack(width=64))
    other.net.load_state_dict(base)
    trainer = make_trainer(L, callbacks=techniques())
    solo.write_predictions(trainer, other, loader(3, width=64), tmp_path / "out", ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(read(tmp_path / "out")["output"], torch.cat(expected))
