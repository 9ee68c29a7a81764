"""Files of predictions: JSON lines of rows, or safetensors shards of tensors, in the order of the rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lightning_solo.data.nested import leaves, map_leaves
from lightning_solo.errors import CapabilityError, CheckpointError, PresetError, listed
from lightning_solo.machine import is_installed

FORMATS = ("jsonl", "safetensors")
"""Formats of predictions."""
SHARD_BYTES = 2**28
"""Bytes of tensors that are kept on the host before they are written as one shard."""
LINES = "predictions.jsonl"
BARE = "output"
"""Name in a shard of a tensor that is the whole output."""
_ALLOWED = (
    "return a tensor (rows, ...), a dictionary or tuple of tensors and lists with an entry for each row, or a list with"
    " a string, number or dictionary for each row"
)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise a CheckpointError where the disk or the writing library raises another error."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "SafetensorError" and not isinstance(error, OSError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"predictions can't be written to {folder.parent}: {reason}") from error


class PredictionFiles:
    """Writes the outputs of batches one after another.

    Tensors go to shards of at most about ``shard_bytes``, each with rows of one shape. Anything else goes to a file
    with one JSON value per row.

    Attributes:
        form: one of `FORMATS`; None until the first output, if none is given.
        rows: rows written so far.
        files: name, first row and number of rows of each file.

    Args:
        folder: an existing folder.
        form: one of `FORMATS`, or None: shards if the first output has only tensors.
        shard_bytes: size of a shard.
    """

    def __init__(self, folder: Path, form: str | None = None, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.form, self.shard_bytes = folder, form, shard_bytes
        self.rows = 0
        self.files: list[dict[str, Any]] = []
        self._lines: IO[str] | None = None
        self._waiting: dict[str, list[Tensor]] = {}
        self._kinds: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._waiting_rows = self._waiting_bytes = 0

    def __enter__(self) -> PredictionFiles:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lines is not None:
            with suppress(OSError):  # of a full disk, which an earlier error names
                self._lines.close()

    def add(self, output: Any) -> None:
        """Write the output of the next rows.

        Raises:
            CheckpointError: nothing can be written, for example because the disk is full.
            PresetError: it has no entry for each row, or it is of another kind than the outputs before.
            CapabilityError: safetensors is missing.
        """
        only_tensors = not isinstance(output, list) and all(isinstance(leaf, Tensor) for _, leaf in leaves(output))
        if self.form is None:
            self.form = "safetensors" if only_tensors else "jsonl"
        if self.form == "jsonl":
            self._add_lines(lines_of(output))
        elif only_tensors:
            self._add_tensors({path or BARE: tensor for path, tensor in leaves(output)})
        else:
            others = [
                f"a {type(leaf).__name__} at {path}"
                for path, leaf in leaves(output)
                if path and not isinstance(leaf, Tensor)
            ]
            kind = listed(others) or f"a {type(output).__name__}"
            raise PresetError(
                f"predict_step returned {kind}, which a file of tensors can't hold; write --format jsonl (in Python"
                " format='jsonl')"
            )

    def finish(self) -> None:
        """Write what waits, and close the files."""
        self._write_shard()
        if self._lines is not None:
            with writing(self.folder):
                self._lines.close()

    def _add_lines(self, lines: Sequence[str]) -> None:
        if self._lines is None:
            self._lines = (self.folder / LINES).open("w", encoding="utf-8")
            self.files.append({"file": LINES, "first_row": 0, "rows": 0})
        with writing(self.folder):
            self._lines.writelines(f"{line}\n" for line in lines)
        self.rows += len(lines)
        self.files[-1]["rows"] = self.rows

    def _add_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if not is_installed("safetensors"):
            raise CapabilityError(
                "the package safetensors is not installed; write pip install lightning-solo[safetensors], or --format"
                " jsonl"
            )
        count = row_count({path: len(tensor) if tensor.dim() else None for path, tensor in tensors.items()})
        kinds = {path: (tensor.dtype, tensor.shape[1:]) for path, tensor in tensors.items()}
        if self._kinds and kinds.keys() != self._kinds.keys():
            raise PresetError(
                f"predict_step returned {listed(kinds)}, and before {listed(self._kinds)}; {_ALLOWED}, the same for all"
                " batches"
            )
        if kinds != self._kinds:
            self._write_shard()
            self._kinds = kinds
        for path, tensor in tensors.items():
            # a copy, since a view would keep the whole tensor that it is a part of
            self._waiting.setdefault(path, []).append(tensor.detach().to("cpu", copy=True))
            self._waiting_bytes += tensor.nbytes
        self._waiting_rows += count
        self.rows += count
        if self._waiting_bytes >= self.shard_bytes:
            self._write_shard()

    def _write_shard(self) -> None:
        if not self._waiting_rows:
            return
        from safetensors.torch import save_file

        name, first = f"predictions-{len(self.files):05}.safetensors", self.rows - self._waiting_rows
        whole = {path: torch.cat(parts).contiguous() for path, parts in self._waiting.items()}
        with writing(self.folder):
            save_file(whole, self.folder / name, metadata={"format": "pt", "first_row": str(first)})
        self.files.append({"file": name, "first_row": first, "rows": self._waiting_rows})
        self._waiting, self._waiting_rows, self._waiting_bytes = {}, 0, 0


def lines_of(output: Any) -> list[str]:
    """Return a JSON value for each row of an output.

    >>> lines_of({"label": ["a", "b"], "p": torch.tensor([0.5, 0.25])})
    ['{"label": "a", "p": 0.5}', '{"label": "b", "p": 0.25}']
    >>> lines_of(torch.tensor([[1, 2], [3, 4]]))
    ['[1, 2]', '[3, 4]']

    Raises:
        PresetError: it has no entry for each row, or one that is no plain data.
    """
    if output is None:
        raise PresetError(f"predict_step returned None; {_ALLOWED}")
    columns = {path: _plain(path, leaf) for path, leaf in leaves(output)}
    if isinstance(output, list) or (isinstance(output, tuple) and "" in columns):
        rows: Any = map_leaves(output, _plain)
    else:
        count = row_count(
            {path or BARE: len(each) if isinstance(each, list | tuple) else None for path, each in columns.items()}
        )
        rows = [{path: column[row] for path, column in columns.items()} for row in range(count)]
        rows = [row[""] for row in rows] if "" in columns else rows
    return [json.dumps(row, ensure_ascii=False) for row in rows]


def _plain(path: str, leaf: Any) -> Any:
    if hasattr(leaf, "tolist"):  # of tensors, and of NumPy's arrays and numbers
        return leaf.tolist()
    try:
        json.dumps(leaf)
    except (TypeError, ValueError):
        where = f" at {path}" if path else ""
        kind = type(leaf).__name__
        raise PresetError(f"predict_step returned a {kind}{where}, which is no plain data; {_ALLOWED}") from None
    return leaf


def row_count(lengths: Mapping[Any, int | None]) -> int:
    """Return the number of rows, which all entries of an output have.

    Raises:
        PresetError: they differ, or an entry (None) isn't one of rows; names them.
    """
    counts = set(lengths.values())
    if len(counts) != 1 or None in counts:
        named = [f"{key}: {'none' if count is None else count}" for key, count in lengths.items()]
        raise PresetError(f"predict_step returned entries with these numbers of rows: {listed(named)}; {_ALLOWED}")
    return next(count for count in counts if count is not None)
