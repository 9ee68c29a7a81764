"""Rows of several packed documents, whose boundaries attention and loss can read."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_solo.data.epoch_batches import EpochBatches, epoch_generator
from lightning_solo.data.item_lengths import Length, Report, item_lengths, name_of
from lightning_solo.data.loaders import processes_of, require_own_batches, with_batches
from lightning_solo.data.loss_weights import IGNORED
from lightning_solo.errors import ConflictError, PresetError

TRIED_ROWS = 16
"""Rows that are searched for two documents with labels, at most."""


def pack_best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows of documents of at most ``capacity`` tokens: best fit decreasing (Ding et al. 2024, section 3.2).

    Longest first, each document goes into the fullest row that has room for it, or into a new one. Documents of equal
    length keep their order.

    Raises:
        ConflictError: a document is longer than a row.

    >>> pack_best_fit([3, 5, 2, 4], capacity=7)
    [[1, 2], [3, 0]]
    """
    _require_room(lengths, capacity)
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    rows: list[list[int]] = []
    with_space: dict[int, list[int]] = {}  # free tokens -> rows
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
            f"callback.packing.capacity={capacity}: document {lengths.index(longest)} has {longest} tokens; cut the"
            f" documents, or write callback.packing.capacity={longest}"
        )


class PackedBatches(EpochBatches):
    """Batches of rows of documents, in a new order in each epoch.

    Only documents of equal length change places between epochs, so all epochs have equally many rows. Each document
    comes once per epoch.

    Args:
        lengths: of the documents, as (documents,).
        capacity: largest number of tokens in a row.
        rows: rows in a process's batch; the last batch of an epoch may have fewer.
        drop_last: leave out a last batch with fewer rows.
        seed: of the order.
        rank: this process, which gets its share of each batch.
        processes: number of processes; a batch has as many rows for each.

    Raises:
        ConflictError: a document is longer than ``capacity``.
    """

    def __init__(
        self,
        lengths: Tensor,
        capacity: int,
        rows: int,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        super().__init__(seed, rank, processes)
        self.lengths: list[int] = lengths.tolist()
        self.capacity = capacity
        self.rows = rows * processes
        self.drop_last = drop_last
        _require_room(self.lengths, capacity)  # before shuffling, so that the error names the data set's index
        self._packed = 0, self._pack(0)
        self.count = len(self._packed[1])

    def batches(self, epoch: int) -> list[list[tuple[int, ...]]]:
        """Return the batches of an epoch: lists of rows, each row the indices of its documents.

        The last epoch is cached, since packing millions of documents takes seconds.
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
    """A data set of rows: an index is a tuple of document indices, an item the list of these documents."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: tuple[int, ...]) -> list[Any]:
        return [self.dataset[index] for index in row]


class PackedCollate:
    """Collates rows of documents to ``input_ids``, ``labels`` and ``position_ids``, each (rows, tokens).

    Each document is collated alone by the loader's own function, and its padding is cut off. Positions restart with
    every document. A document's first label is removed, since no earlier token of the document predicts it. Padding
    at the end of a row is a document without labels. There is no attention mask: Hugging Face's models look for
    documents only without a mask, and only without a cache (``config.use_cache=False``).

    Args:
        collate_fn: returns, for a list of one item, a mapping with ``input_ids`` and ``labels`` as (1, tokens). A label
            is the token at the same position or -100, as for Hugging Face's models, which shift labels themselves.
        capacity: largest number of tokens in a row.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], capacity: int) -> None:
        self.collate_fn = collate_fn
        self.capacity = capacity

    def __call__(self, rows: list[list[Any]]) -> dict[str, Tensor]:
        """Return a batch.

        Raises:
            ConflictError: the collate function returns other items, or longer documents than were counted.
        """
        packed = [[self._document(item) for item in row] for row in rows]
        length = max(sum(len(tokens) for tokens, _ in row) for row in packed)
        if length > self.capacity:
            raise ConflictError(
                f"callback.packing.capacity={self.capacity}: a row has {length} tokens, since the collate function"
                " makes documents longer than their counted length; write callback.packing.length=collated, or return"
                " an attention_mask that is 0 for padding"
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
        batch = self.collate_fn([item])
        missing = [name for name in ("input_ids", "labels") if not isinstance(batch, Mapping) or name not in batch]
        others = [] if missing else sorted(set(batch) - {"input_ids", "labels", "attention_mask", "position_ids"})
        if missing or others:
            raise ConflictError(
                "callback.packing needs a collate function that returns input_ids and labels, and an attention_mask at"
                " most; for one document it returned"
                f" {', '.join(sorted(batch)) if isinstance(batch, Mapping) else type(batch).__name__}"
            )
        kept = batch["attention_mask"][0].bool() if "attention_mask" in batch else slice(None)
        tokens, labels = batch["input_ids"][0][kept], batch["labels"][0][kept]
        wrong = (labels != IGNORED) & (labels != tokens)
        if wrong.any():
            raise ConflictError(
                "callback.packing needs labels that equal the token at their position, or are -100, since the model"
                f" shifts them; {int(wrong.sum())} of {len(labels)} labels of a document differ, as if they were"
                " already shifted; return unshifted labels"
            )
        return tokens, labels


def packed_loader(
    loader: DataLoader[Any],
    capacity: int | None = None,
    rows: int | None = None,
    length: Length = "auto",
    seed: int = 0,
    report: Report | None = None,
    agree: Callable[[Tensor], Tensor] = lambda lengths: lengths,
) -> Any:
    """Return a copy of a loader that packs its documents into rows, and that can resume within an epoch.

    Args:
        loader: a loader of single documents, with a collate function for `PackedCollate`; it isn't changed.
        capacity: tokens in a row; by default the length of the longest document.
        rows: rows in a batch; by default the number that holds about as many documents as the loader's batches.
        length: how to read a document's length, as in `lightning_solo.data.item_lengths.item_lengths`.
        seed: seed of the order.
        report: called with (documents read, all documents) every 10 seconds.
        agree: returns the same lengths in all processes.

    Raises:
        ConflictError: the loader's batches can't be replaced, all documents are empty, or one exceeds ``capacity``.
        PresetError: ``capacity`` or ``rows`` is below 1.
    """
    require_own_batches(loader, "packed_loader")
    for name, value in (("capacity", capacity), ("rows", rows)):
        if value is not None and value < 1:
            raise PresetError(f"callback.packing.{name}={value}; write an integer of at least 1")
    lengths = agree(item_lengths(loader.dataset, length, loader.collate_fn, report, "callback.packing.length"))
    if not lengths.sum():
        raise ConflictError(
            f"callback.packing.length={name_of(length)}: the {len(lengths)} documents of"
            f" {type(loader.dataset).__name__} have no tokens; write the name of a column, collated, or a function"
            " of an item"
        )
    capacity = int(lengths.max()) if capacity is None else capacity
    if rows is None:
        rows = max(1, round((loader.batch_size or 1) * float(lengths.float().mean()) / capacity))
    batches = PackedBatches(lengths, capacity, rows, loader.drop_last, seed, *processes_of(loader))
    return with_batches(
        loader,
        batches,
        batch_size=rows,
        dataset=Rows(loader.dataset),
        collate_fn=PackedCollate(loader.collate_fn, capacity),
    )


class TwoDocuments(NamedTuple):
    """Batches of two documents, of which only the second has labels.

    The loss is equal in the first three batches if the documents don't see one another.
    """

    in_row: dict[str, Tensor]  # both documents in one row
    beside_other: dict[str, Tensor]  # the same with other tokens in the first document
    by_itself: dict[str, Tensor]  # the second document alone
    joined: dict[str, Tensor]  # ``in_row`` with positions of a single document, so that tokens see both documents
    joined_to_other: dict[str, Tensor]  # ``beside_other`` with such positions


def two_documents(loader: Any) -> TwoDocuments:
    """Return batches of two documents, to test whether a model keeps documents apart.

    Each has two equal rows if the loader's batches have several rows, since some kernels look for documents only in
    batches of one row.

    Raises:
        ConflictError: the first rows have no second document with labels, or the collate function doesn't suit
            `PackedCollate`.
    """
    batches = loader.batch_sampler
    rows = (row for batch in batches.batches(batches.epoch) for row in batch)
    with_tokens = (tuple(index for index in row if batches.lengths[index])[:2] for row in rows)
    pairs = list(islice((pair for pair in with_tokens if len(pair) > 1), TRIED_ROWS))
    for pair in pairs:
        batch: dict[str, Tensor] = loader.collate_fn([loader.dataset[pair]])
        starts = batch["position_ids"][0].eq(0).nonzero().flatten().tolist()  # one where a length was miscounted
        if len(starts) > 1 and batch["labels"][:, (second := starts[1]) :].ne(IGNORED).any():
            return _tried({name: tensor.repeat(min(batches.rows, 2), 1) for name, tensor in batch.items()}, second)
    raise ConflictError(
        f"callback.packing: in {len(pairs)} rows no second document has labels after its first token, so there is no"
        " loss to compare; return labels that are the tokens to predict from the collate function"
    )


def _tried(documents: dict[str, Tensor], second: int) -> TwoDocuments:
    labels = documents["labels"].clone()
    labels[:, :second] = IGNORED
    in_row = {**documents, "labels": labels}
    tokens = documents["input_ids"]
    other = (tokens + 1) % (max(int(tokens.max()), 1) + 1)  # every token differs and is in the vocabulary
    beside_other = {**in_row, "input_ids": torch.cat([other[:, :second], tokens[:, second:]], 1)}
    joined = {"position_ids": torch.arange(tokens.shape[1]).repeat(len(tokens), 1)}
    return TwoDocuments(
        in_row,
        beside_other,
        {name: tensor[:, second:] for name, tensor in in_row.items()},
        {**in_row, **joined},
        {**beside_other, **joined},
    )
