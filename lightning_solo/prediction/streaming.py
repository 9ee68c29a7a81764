"""Predictions of a trained module, streamed to a folder by a Trainer, in batches that fit."""

from __future__ import annotations

import copy
import functools
import inspect
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_solo.atomic_files import read_json, write_json
from lightning_solo.attributes import replaced
from lightning_solo.checkpoint.folders import whole_folder
from lightning_solo.data.splitting import samples_of, split_evenly
from lightning_solo.errors import BudgetError, CheckpointError, ConflictError, NothingToDoError, PresetError, nearest
from lightning_solo.memory.attempts import attempt
from lightning_solo.nn.forwards import evaluating
from lightning_solo.prediction.files import FORMATS, SHARD_BYTES, PredictionFiles, writing
from lightning_solo.seams import patches
from lightning_solo.signals import status

SPLITS = {
    "predict": ("predict_dataloader", None),
    "test": ("test_dataloader", "test"),
    "validation": ("val_dataloader", "validate"),
}
"""Name of a split -> the method that returns its loader, and the stage to set the data up for besides "predict"."""
MANIFEST = "manifest.json"
MOST_TIMES = 64
"""Times the loader's batch size that is tried on a device; larger batches are hardly faster, but need host memory."""


def write_predictions(
    trainer: Any,
    module: Any,
    data: Any = None,
    output: str | Path = "predictions",
    *,
    split: str | None = None,
    format: str | None = None,
    batch_size: int | None = None,
    ckpt_path: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write what ``predict_step`` returns for each row into a folder, in the order of the rows; return its manifest.

    Memory doesn't grow with the number of batches. A batch that runs out of memory is split into halves, and so are the
    batches after it. On a CUDA device the loader's batch size is doubled as long as the batch fits, up to 64 times it.

    Args:
        trainer: runs the module, with its callbacks and precision.
        module: with the weights to use, or with ``ckpt_path``.
        data: a ``LightningDataModule``, or one loader; by default the module's own loaders.
        output: a new folder. It appears when all rows are in it.
        split: "predict", "test" or "validation", whose loader is used; by default the first of them that there is.
        format: "jsonl" (a JSON value for each row) or "safetensors" (shards of tensors); by default "safetensors" if
            ``predict_step`` returns only tensors.
        batch_size: rows of a batch; by default the loader's, and on a device the largest that fits.
        ckpt_path: checkpoint whose weights are loaded first.
        shard_bytes: bytes of tensors that are kept on the host before they are written.
        overwrite: whether earlier predictions are replaced.

    Raises:
        PresetError: an unknown argument; a loader that shuffles; or an output without an entry for each row.
        ConflictError: the loader's batches can't have another size.
        BudgetError: a single row doesn't fit into memory.
        CheckpointError: the folder exists or can't be written. After an error or an interruption nothing is left of it.
    """
    for name, value, allowed in (("split", split, SPLITS), ("format", format, FORMATS)):
        if value is not None and value not in allowed:
            raise PresetError(f"{name}={value!r}{nearest(str(value), allowed)}write {' or '.join(allowed)}")
    if batch_size is not None and batch_size < 1:
        raise PresetError(f"batch_size={batch_size}: write at least 1")
    folder = Path(output)
    refuse_others(folder, overwrite=overwrite)
    has_loaders = data is None or hasattr(data, "prepare_data")
    owner = data if data is not None and has_loaders else module
    split = _chosen_split(owner, split) if has_loaders else None
    with ExitStack() as stack:
        with writing(folder):
            new = stack.enter_context(whole_folder(folder, hashes=False))
        files = stack.enter_context(PredictionFiles(new, format, shard_bytes))
        run = _Prediction(trainer, module, files, batch_size)
        make = partial(run.batches, data) if split is None else partial(run.batches_of, owner, *_source(owner, split))
        checkpoint = {} if ckpt_path is None else {"ckpt_path": str(ckpt_path), "weights_only": True}
        with (
            replaced(module, "predict_step", run.step),
            replaced(owner, "predict_dataloader", partial(run.no_batches_on_error, make)),
        ):
            datamodule = None if owner is module else owner
            trainer.predict(module, datamodule=datamodule, return_predictions=False, **checkpoint)
        if run.error is not None:
            raise run.error
        files.finish()
        if not files.rows:
            raise NothingToDoError(f"no row to predict: the loader of {split or 'data'} has no batch")
        manifest = {
            "rows": files.rows,
            "format": files.form,
            "split": split,
            "module": type(module).__name__,
            "checkpoint": None if ckpt_path is None else str(ckpt_path),
            "batch_size": run.batch_size,
            "split_into": run.most,
            "files": files.files,
        }
        with writing(folder):
            write_json(new / MANIFEST, manifest)
            for file in new.glob("*.safetensors"):
                file.chmod((new / MANIFEST).stat().st_mode)  # safetensors lets nobody else read
    return manifest


# --- the run ---


class _Prediction:
    """One run: its batches, and the function that takes the place of ``predict_step``.

    Attributes:
        batch_size: rows of a batch; None if the loader doesn't say.
        most: rows of the parts into which batches are split after an out-of-memory error; None without one.
        error: why there are no batches, or None.
    """

    def __init__(self, trainer: Any, module: Any, files: PredictionFiles, batch_size: int | None) -> None:
        self.trainer, self.files, self.batch_size = trainer, files, batch_size
        self.most: int | None = None
        self.error: Exception | None = None
        self._module, self._original = module, module.predict_step
        # Lightning reads the arguments from the signature, and finds out by the code whether a method is overridden
        self.step = functools.wraps(self._original)(lambda batch, *rest: self._step(batch, *rest))

    def no_batches_on_error(self, make: Callable[[], Any]) -> Any:
        """Return batches, or none and keep the error.

        After an error in ``predict_dataloader`` Lightning's replacement of ``DataLoader.__init__`` would stay, with
        which later predictions of the process fail.
        """
        try:
            return make()
        except Exception as error:
            self.error = error
            return _Batches(iter(()))

    def batches_of(self, owner: Any, make: Callable[[], Any], stage: str | None) -> Any:
        """Return the batches of a data module's or module's split."""
        if stage is not None and owner is not self._module:
            owner.setup(stage)
        return self.batches(make())

    def batches(self, loader: Any) -> Any:
        """Return a loader's batches of all rows in their order, of the given size or the largest that fits."""
        if isinstance(loader, list | tuple | dict) and not isinstance(loader, DataLoader):
            if not loader:  # which stands for no data
                return _Batches(iter(()))
            if len(loader) != 1:
                raise PresetError(
                    f"{len(loader)} loaders: predictions are of one, so that they have one order; give one"
                )
            loader = next(iter(loader.values() if isinstance(loader, dict) else loader))
        batches = getattr(loader, "batch_sampler", None)  # which has the sampler where it was given
        sampler = getattr(batches, "sampler", getattr(loader, "sampler", None))
        if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
            raise PresetError("the loader shuffles, and predictions are in its order; write DataLoader(shuffle=False)")
        if not _has_own_batches(loader):
            if self.batch_size is not None:
                raise ConflictError(
                    f"batch_size={self.batch_size} and a {type(loader).__name__} whose batches are made elsewhere; drop"
                    " batch_size, or give a DataLoader(dataset, batch_size=...) of single items"
                )
            return _Batches(loader)
        sizes = [self.batch_size or loader.batch_size]
        if self.batch_size is None and self.trainer.strategy.root_device.type == "cuda":
            rows = len(loader.sampler)
            sizes += [size for times in range(1, MOST_TIMES.bit_length()) if (size := sizes[0] << times) < 2 * rows]
        self.batch_size = self._largest(loader, sizes)
        return _Batches(_sized(loader, self.batch_size))

    def _largest(self, loader: Any, sizes: list[int]) -> int:
        """Return the last of ascending sizes whose first batch fits; the first size isn't tried."""
        with evaluating(self._module):
            for smaller, size in pairwise(sizes):
                _, failure = attempt(partial(self._try, loader, size))
                if failure is not None:
                    return smaller
        return sizes[-1]

    def _try(self, loader: Any, size: int) -> None:
        one = copy.copy(_sized(loader, size))
        vars(one).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0)
        batch = patches.on_device(self.trainer, next(iter(one)))
        takes_index = len(inspect.signature(self._original).parameters) > 1
        with replaced(self._module, "predict_step", self._original):
            self.trainer.strategy.predict_step(batch, *([0] * takes_index))

    def _step(self, batch: Any, *rest: Any) -> int:
        """Write the outputs of a batch, which runs in smaller parts if it doesn't fit; return the rows so far."""
        if self.trainer.received_sigterm:  # which Lightning only records here
            raise SystemExit(status(signal.SIGTERM))
        parts = [batch] if self.most is None else [part for part, _ in split_evenly(batch, self.most)]
        while parts:
            output, failure = attempt(partial(self._original, parts[0], *rest))
            if failure is None:
                self.files.add(output)
                del parts[0], output
                continue
            samples = _samples(parts[0], failure)
            self.most = samples // 2
            parts = [smaller for part in parts for smaller, _ in split_evenly(part, self.most)]
        return self.files.rows  # Lightning warns of None


def _samples(batch: Any, failure: str) -> int:
    """Return the number of rows of a batch that doesn't fit in memory."""
    try:
        samples = samples_of(batch)
    except ConflictError as error:
        raise BudgetError(
            f"a batch doesn't fit into memory ({failure}), and can't be split, since its tensors have different numbers"
            " of rows; write a smaller --batch-size (in Python batch_size=...)"
        ) from error
    if samples < 2:
        raise BudgetError(f"predict_step of one row doesn't fit into memory ({failure}); shorten the rows")
    return samples


class _Batches:
    """Iterates over a loader. Lightning would wrap a DataLoader so that the indices of all batches are kept."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        if hasattr(loader, "__len__"):
            self.__class__ = _Counted

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class _Counted(_Batches):
    def __len__(self) -> int:
        return len(self._loader)


def _has_own_batches(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and loader.batch_size is not None  # else its batch_sampler was given
        and type(loader.batch_sampler) is BatchSampler
        and not isinstance(loader.dataset, IterableDataset)
    )


def _sized(loader: Any, size: int) -> Any:
    """Return a copy of a loader with batches of ``size`` rows, the last one included if it is smaller."""
    changed = copy.copy(loader)
    # bypass DataLoader.__setattr__, which refuses to replace a sampler
    vars(changed).update(batch_sampler=BatchSampler(loader.sampler, size, drop_last=False), _iterator=None)
    return changed


def _chosen_split(owner: Any, split: str | None) -> str:
    """Return the split whose loader a data module or module has: the given one, or else the first."""
    # Lightning's own methods return nothing
    there = [each for each in SPLITS if not _source(owner, each)[0].__module__.endswith("core.hooks")]
    if split in there or (split is None and there):
        return split or there[0]
    if there:
        raise PresetError(
            f"split={split}: {type(owner).__name__} has no {SPLITS[split or there[0]][0]}; write {' or '.join(there)}"
        )
    raise PresetError(
        f"{type(owner).__name__} has no predict_dataloader, test_dataloader or val_dataloader; define one, or give a"
        " loader"
    )


def _source(owner: Any, split: str) -> tuple[Any, str | None]:
    """Return the method that makes a split's loader, and the stage to set its data module up for."""
    method, stage = SPLITS[split]
    return getattr(owner, method), stage


# --- the folder ---


def refuse_others(folder: Path, *, overwrite: bool) -> None:
    """Refuse to write into a folder that exists."""
    if not folder.exists() and not folder.is_symlink():
        return
    if folder.is_symlink() or read_json(folder / MANIFEST) is None:
        raise CheckpointError(f"{folder} exists, and is no folder of predictions; write --out FOLDER, a new one")
    if not overwrite:
        raise CheckpointError(f"{folder} exists; write --force (in Python overwrite=True) to replace it")
