"""Several documents in each row of a batch, packed, with the boundaries that attention and loss need."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_solo.data.epoch_batches import EpochBatches, epoch_generator
from lightning_solo.data.item_lengths import Length, item_lengths
from lightning_solo.data.loaders import require_own_batches, with_batches
from lightning_solo.data.loss_weights import IGNORED
from lightning_solo.errors import ConflictError, PresetError

TRIED_ROWS = 16
"""Rows that are looked through for two documents with labels."""


def pack_best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows of documents of at most ``capacity`` tokens: best fit decreasing (Ding et al. 2024, section 3.2).

    From the longest document on, each goes into the row that leaves least space, or into a new one. Documents of one
    length are taken in the order that they are given.

    Raises:
        ConflictError: a document is longer than a row.

    >>> pack_best_fit([3, 5, 2, 4], capacity=7)
    [[1, 2], [3, 0]]
    """
    _require_room(lengths, capacity)
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    rows: list[list[int]] = []
    with_space: dict[int, list[int]] = {}  # tokens that are free -> rows
    spaces: list[int] = []  # its keys, sorted
    for index in order:
        place = bisect_left(spaces, lengths[index])
        if place == len(spaces):
            space, row = capacity, len(rows)
            rows.append([])
        else:
            space = spaces[place]
            row = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[place]
        rows[row].append(index)
        left = space - lengths[index]
        if left not in with_space:
            insort(spaces, left)
            with_space[left] = []
        with_space[left].append(row)
    return rows


def _require_room(lengths: Sequence[int], capacity: int) -> None:
    longest = max(lengths, default=0)
    if longest > capacity:
        raise ConflictError(
            f"packing: document {lengths.index(longest)} has {longest} tokens, and capacity={capacity}: cut documents"
            f" before, or write capacity={longest}"
        )


def packed_padding(lengths: Sequence[int], batches: Sequence[Sequence[Sequence[int]]]) -> float:
    """Return the share of padding in batches of packed rows, each row padded to the longest of its batch."""
    tokens = padded = 0
    for batch in batches:
        rows = [sum(lengths[index] for index in row) for row in batch]
        tokens += sum(rows)
        padded += max(rows) * len(rows)
    return 1 - tokens / padded if padded else 0.0


class PackedBatches(EpochBatches):
    """Batches of rows of documents, in another order and with other neighbours in each epoch.

    Documents of one length change places between epochs, so that every epoch has as many rows, and each document once.

    Args:
        lengths: of the documents, as (documents,).
        capacity: the most tokens of a row.
        rows: of a batch; the last batch of an epoch may have fewer.
        drop_last: leave out the last batch where it has fewer.
        seed: of the order.

    Raises:
        ConflictError: a document is longer than ``capacity``.
    """

    def __init__(self, lengths: Tensor, capacity: int, rows: int, drop_last: bool = False, seed: int = 0) -> None:
        super().__init__(seed)
        self.lengths: list[int] = lengths.tolist()
        self.capacity = capacity
        self.rows = rows
        self.drop_last = drop_last
        _require_room(self.lengths, capacity)  # names a document by its own index, not by its place in an epoch
        self._packed = 0, self._pack(0)
        self.count = len(self._packed[1])

    def batches(self, epoch: int) -> list[list[tuple[int, ...]]]:
        """Return the batches of an epoch: lists of rows, each of them the indices of its documents.

        Those of one epoch are kept, as millions of documents take seconds.
        """
        if epoch != self._packed[0]:
            self._packed = epoch, self._pack(epoch)
        return self._packed[1]

    def _pack(self, epoch: int) -> list[list[tuple[int, ...]]]:
        generator = epoch_generator(self.seed, epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        rows = pack_best_fit([self.lengths[index] for index in order], self.capacity)
        shuffled = [rows[row] for row in torch.randperm(len(rows), generator=generator).tolist()]
        packed = [tuple(order[place] for place in row) for row in shuffled]
        kept = len(packed) - len(packed) % self.rows if self.drop_last else len(packed)
        return [packed[begin : begin + self.rows] for begin in range(0, kept, self.rows)]


class Rows:
    """A data set by rows: an index of it is a tuple of documents' indices, and its item a list of documents."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: tuple[int, ...]) -> list[Any]:
        return [self.dataset[index] for index in row]


class PackedCollate:
    """Collates rows of documents to ``input_ids``, ``labels`` and ``position_ids``, each (rows, tokens).

    Each document is collated alone by the loader's own function, and what that pads is cut off. Positions restart with
    every document. The label of its first token is left out, as it is where the document has a row of its own: no token
    before predicts it. What fills a row up is a document by itself, without labels. There is no attention mask, since
    with one Hugging Face's models don't look for documents; nor do they with a cache: write ``config.use_cache=False``.

    Args:
        collate_fn: from a list of one item to a mapping with ``input_ids`` and ``labels`` as (1, tokens); the labels
            are the tokens at the same position or -100, as models of Hugging Face take them, which shift them.
        capacity: the most tokens of a row.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], capacity: int) -> None:
        self.collate_fn = collate_fn
        self.capacity = capacity

    def __call__(self, rows: list[list[Any]]) -> dict[str, Tensor]:
        """Return a batch.

        Raises:
            ConflictError: the collate function makes something else, or documents longer than they were counted.
        """
        packed = [[self._document(item) for item in row] for row in rows]
        length = max(sum(len(tokens) for tokens, _ in row) for row in packed)
        if length > self.capacity:
            raise ConflictError(
                f"packing: a row has {length} tokens, and capacity={self.capacity}: the collate function makes"
                " documents longer than their counted length; write length='collated', or return an attention_mask of"
                " what it pads"
            )
        batch = {
            "input_ids": torch.zeros(len(rows), length, dtype=torch.int64),
            "labels": torch.full((len(rows), length), IGNORED),
            "position_ids": torch.zeros(len(rows), length, dtype=torch.int64),
        }
        for row, documents in enumerate(packed):
            begin = 0
            for tokens, labels in documents:
                end = begin + len(tokens)
                batch["input_ids"][row, begin:end] = tokens
                batch["labels"][row, begin + 1 : end] = labels[1:]
                batch["position_ids"][row, begin:end] = torch.arange(len(tokens))
                begin = end
            batch["position_ids"][row, begin:] = torch.arange(length - begin)
        return batch

    def _document(self, item: Any) -> tuple[Tensor, Tensor]:
        made = self.collate_fn([item])
        missing = [name for name in ("input_ids", "labels") if not isinstance(made, Mapping) or name not in made]
        others = [] if missing else sorted(set(made) - {"input_ids", "labels", "attention_mask", "position_ids"})
        if missing or others:
            raise ConflictError(
                f"packing needs a collate function that makes input_ids and labels (attention_mask is left out); of one"
                f" document it made {sorted(made) if isinstance(made, Mapping) else type(made).__name__}"
            )
        kept = made["attention_mask"][0].bool() if "attention_mask" in made else slice(None)
        tokens, labels = made["input_ids"][0][kept], made["labels"][0][kept]
        wrong = (labels != IGNORED) & (labels != tokens)
        if wrong.any():
            raise ConflictError(
                "packing takes labels that are the token at the same position, or -100: the model shifts them; here"
                f" {int(wrong.sum())} of {len(labels)} labels of a document are others, as of labels shifted before"
            )
        return tokens, labels


def packed_loader(
    loader: DataLoader[Any],
    capacity: int | None = None,
    rows: int | None = None,
    length: Length = "auto",
    seed: int = 0,
    report: Callable[[int, int], None] | None = None,
) -> Any:
    """Return a loader of the user's documents, packed; it keeps workers and all else, and its place by ``state_dict``.

    Args:
        loader: of single documents, with a collate function as `PackedCollate` takes; it isn't changed.
        capacity: tokens of a row; by default those of the longest document.
        rows: of a batch; by default so many that it has about as many documents as the loader's.
        length: of a document, as `lightning_solo.data.item_lengths.item_lengths` takes it.
        seed: of the order.
        report: called with (documents read, all documents) every 10 seconds.

    Raises:
        ConflictError: the loader makes no batches itself, no document has a token, or one more than ``capacity``.
        PresetError: ``capacity`` or ``rows`` is below 1.
    """
    require_own_batches(loader, "packed_loader")
    for name, value in (("capacity", capacity), ("rows", rows)):
        if value is not None and value < 1:
            raise PresetError(f"packing: {name}={value}; write an integer of at least 1")
    lengths = item_lengths(loader.dataset, length, loader.collate_fn, report)
    if not lengths.sum():
        raise ConflictError(
            f"packing: the {len(lengths)} documents of {type(loader.dataset).__name__} have no tokens, by"
            f" length={length!r}; write the name of a column, collated, or a function of an item"
        )
    capacity = int(lengths.max()) if capacity is None else capacity
    if rows is None:
        rows = max(1, round((loader.batch_size or 1) * float(lengths.float().mean()) / capacity))
    batches = PackedBatches(lengths, capacity, rows, loader.drop_last, seed)
    return with_batches(
        loader,
        batches,
        batch_size=rows,
        dataset=Rows(loader.dataset),
        collate_fn=PackedCollate(loader.collate_fn, capacity),
    )


class TwoDocuments(NamedTuple):
    """Batches of two documents, in which the second alone has labels: its loss must be the same in the first three.

    Attributes:
        in_row: both in a row.
        beside_other: the same, with other tokens in the first one.
        by_itself: the second document.
        joined: as ``in_row``, with positions of one document, whose tokens see all before them.
        joined_to_other: as ``beside_other``, likewise.
    """

    in_row: dict[str, Tensor]
    beside_other: dict[str, Tensor]
    by_itself: dict[str, Tensor]
    joined: dict[str, Tensor]
    joined_to_other: dict[str, Tensor]


def two_documents(loader: Any) -> TwoDocuments:
    """Return batches of two documents of a loader of `packed_loader`, to try whether a model keeps them apart.

    Where the loader's batches have several rows, these have two, which are the same: some kernels look for documents in
    batches of one row alone.

    Raises:
        ConflictError: in the first rows no second document has labels, or the collate function makes something else
            than `PackedCollate` takes.
    """
    batches = loader.batch_sampler
    rows = (row for batch in batches.batches(batches.epoch) for row in batch)
    with_tokens = (tuple(index for index in row if batches.lengths[index])[:2] for row in rows)
    pairs = list(islice((pair for pair in with_tokens if len(pair) > 1), TRIED_ROWS))
    for pair in pairs:
        batch: dict[str, Tensor] = loader.collate_fn([loader.dataset[pair]])
        starts = batch["position_ids"][0].eq(0).nonzero().flatten().tolist()  # one where the other was miscounted
        if len(starts) > 1 and batch["labels"][:, (second := starts[1]) :].ne(IGNORED).any():
            return _tried({name: tensor.repeat(min(batches.rows, 2), 1) for name, tensor in batch.items()}, second)
    raise ConflictError(
        f"packing: in {len(pairs)} rows no second document has labels behind its first token, so that there is no loss"
        " to compare; write a collate function whose labels are the tokens to predict"
    )


def _tried(documents: dict[str, Tensor], second: int) -> TwoDocuments:
    labels = documents["labels"].clone()
    labels[:, :second] = IGNORED
    in_row = {**documents, "labels": labels}
    tokens = documents["input_ids"]
    other = (tokens + 1) % (max(int(tokens.max()), 1) + 1)  # each another one, and none that isn't there
    beside_other = {**in_row, "input_ids": torch.cat([other[:, :second], tokens[:, second:]], 1)}
    joined = {"position_ids": torch.arange(tokens.shape[1]).repeat(len(tokens), 1)}
    return TwoDocuments(
        in_row,
        beside_other,
        {name: tensor[:, second:] for name, tensor in in_row.items()},
        {**in_row, **joined},
        {**beside_other, **joined},
    )
