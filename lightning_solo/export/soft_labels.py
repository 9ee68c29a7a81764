"""Writes a file of soft labels: draws of a teacher for each row of the training data."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_solo.cards.phase import Phase
from lightning_solo.data.soft_labels import Origin, SoftLabelWriter, rows_of
from lightning_solo.errors import CheckpointError, ConflictError, PresetError
from lightning_solo.export.formats import TEACHER_DTYPES
from lightning_solo.export.sources import refuse_existing
from lightning_solo.export.teachers import make_teacher
from lightning_solo.nn.teacher import Call, Calls, Teacher, candidates, of_one_part, of_same_shape
from lightning_solo.seams.homes import home_of
from lightning_solo.seams.homes import part as part_of
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.units import format_bytes


def write_soft_labels(
    module: Any,
    data: Any,
    teacher: str | Path | nn.Module,
    path: str | Path,
    *,
    draws: int = 16,
    batches: int | None = None,
    part: str = "auto",
    dtype: str = "auto",
    streamed: bool = False,
    seed: int = 0,
    overwrite: bool = False,
    **trainer: Any,
) -> str:
    """Write words that are drawn at random from a teacher for each position of the training data; return a line.

    ``training_step`` runs without gradients. So the teacher gets the same inputs as in training. The
    file appears when it is complete. After a failure the same call continues: rows that are in ``PATH.partial`` aren't
    computed again.

    Args:
        module: the LightningModule that is to be trained; its weights stay as they are, but BatchNorm's running
            statistics change.
        data: a LightningDataModule or a loader; None for the module's own.
        teacher: a run's folder, a checkpoint, a folder of Hugging Face's, or a module.
        path: of the file.
        draws: words per position.
        batches: the first so many batches of the loader, in its order; None for each row of the data set once.
        part: the part of the module whose output are the logits; auto for the one that ``training_step`` calls.
        dtype: of the teacher's weights, one of `TEACHER_DTYPES`.
        streamed: whether the teacher's repeated blocks stay on the host, with two on the device at a time.
        seed: of the draws.
        overwrite: whether an existing file is replaced.
        trainer: arguments of the Trainer, such as ``accelerator`` and ``precision``.

    Raises:
        CheckpointError: the file exists, can't be written, or its partial one is of another teacher; or the teacher
            can't be loaded.
        PresetError: an argument is out of range.
        ConflictError: the module optimizes manually.
    """
    if not module.automatic_optimization:
        raise ConflictError(
            f"soft labels and {type(module).__name__}.automatic_optimization=False: training from them changes the loss"
            " that training_step returns; write automatic_optimization=True"
        )
    for name, value in (("draws", draws), ("batches", batches)):
        is_whole = isinstance(value, int) and value >= 1
        if not is_whole and (name, value) != ("batches", None):
            raise PresetError(f"{name}={value!r}; write a whole number of 1 or more, such as {name}=16")
    teacher = str(teacher) if isinstance(teacher, Path) else teacher
    if not isinstance(teacher, str | nn.Module):
        raise PresetError(
            f"teacher={teacher!r}: write the path of a run, a checkpoint or a folder of Hugging Face's, or a module"
        )
    if dtype not in TEACHER_DTYPES:
        raise PresetError(f"dtype={dtype!r}: write one of {', '.join(TEACHER_DTYPES)}")
    path = Path(path)
    refuse_existing(path, overwrite=overwrite)
    technique = _Writing(teacher, part, dtype, streamed, path, draws, seed, in_order=batches is not None)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    limits = {"max_epochs": 1, "limit_val_batches": 0, "limit_train_batches": batches or 1.0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*training_step` returned `None`")
        warnings.filterwarnings("ignore", ".*lr_scheduler.step.* before .*optimizer.step")
        made = part_of(home_of(module), "trainer").Trainer(**{**quiet, **trainer, **limits}, callbacks=[technique])
        try:
            made.fit(module, data)
            return technique.finish()
        finally:
            technique.close()


_ROWS = 1024
"""Positions whose probabilities exist at a time."""


class _Writing(Technique):
    """Writes draws of the teacher instead of training; nothing steps."""

    phase = Phase.DATA

    def __init__(
        self,
        teacher: str | nn.Module,
        part: str,
        dtype: str,
        streamed: bool,
        path: Path,
        draws: int,
        seed: int,
        *,
        in_order: bool,
    ) -> None:
        self._source, self._part, self._dtype, self._streamed = teacher, part, dtype, streamed
        self._path, self._draws, self._seed, self._in_order = path, draws, seed, in_order
        self._writer: SoftLabelWriter | None = None
        self._teacher: Teacher
        self._calls: Calls | None = None
        self._digest = ""

    def transform(self, ctx: Run) -> None:
        """Make the teacher."""
        self._teacher = make_teacher(self._source, ctx.module, ctx.device, self._dtype, streamed=self._streamed)
        ctx.undo.callback(self._teacher.close)
        self._digest = digest_of(self._teacher.module)

    def loader(self, ctx: Run, loader: Any) -> Any:
        """Return a loader of each item once, the last ones too, where the data set has an order."""
        plain = type(loader) is DataLoader and loader.batch_size is not None
        if self._in_order or not plain or isinstance(loader.dataset, IterableDataset):
            return loader
        return DataLoader(
            loader.dataset,
            loader.batch_size,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
        )

    def training_step(self, ctx: Run, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Draw for the rows that the file lacks; return no loss, so that nothing steps."""
        if self._calls is None:
            self._calls = Calls(candidates(ctx.module, self._part, self._teacher))
            ctx.undo.callback(self._calls.remove)
        with torch.no_grad(), self._calls.recording() as recorded:
            proceed(*args, **kwargs)
            for call in of_one_part(ctx.module, recorded, self._part):
                self._write(call)

    def _write(self, call: Call) -> None:
        rows = rows_of((call.args, call.kwargs), call.logits.shape[:-1])
        try:
            if self._writer is None:
                name = self._source if isinstance(self._source, str) else type(self._source).__name__
                width = call.logits.shape[-1]
                origin = Origin(self._digest, name, call.name, width, self._draws, self._seed)
                self._writer = SoftLabelWriter(self._path, origin)
            if numbers := self._writer.missing(rows):
                logits = of_same_shape(call, self._teacher.logits(call))
                seed = (self._seed + int(rows.keys[numbers[0]])) % 2**63
                self._writer.add(rows, numbers, *drawn(logits, self._draws, seed))
        except OSError as error:
            raise CheckpointError(
                f"{self._path}: it can't be written ({error.strerror}); the same command continues after the rows that"
                " are written"
            ) from error

    def finish(self) -> str:
        """Complete the file; return a line about its contents."""
        writer = self._writer
        if writer is None:
            raise CheckpointError(f"{self._path}: the training data has no batch, so there is nothing to write")
        writer.finish()
        size, origin = format_bytes(self._path.stat().st_size), writer.origin
        before = f", {writer.kept:,} of them before" if writer.kept else ""
        return (
            f"{self._path}: {len(writer.seen):,} rows{before}, {origin.draws} of {origin.vocabulary:,} words per"
            f" position drawn from {origin.name}, {size}"
        )

    def close(self) -> None:
        """Close the file, complete or not."""
        if self._writer is not None:
            self._writer.close()


def drawn(logits: Tensor, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return words drawn from logits at temperature 1, and the entropies in nats, on the host.

    Args:
        logits: (rows, ..., vocabulary).
        draws: words per position.
        seed: of the draws.

    Returns:
        (rows, positions, draws) and (rows, positions).
    """
    generator = torch.Generator(logits.device).manual_seed(seed)
    words, entropies = [], []
    for chunk in torch.split(logits.flatten(0, -2), _ROWS):
        p = chunk.float().softmax(-1)
        words.append(torch.multinomial(p, draws, replacement=True, generator=generator))
        entropies.append(torch.special.entr(p).sum(-1))
    rows = len(logits)
    return torch.cat(words).view(rows, -1, draws).cpu(), torch.cat(entropies).view(rows, -1).cpu()


def digest_of(module: nn.Module) -> str:
    """Return a digest of a module's weights and buffers."""
    digest = blake2b(digest_size=16)
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
