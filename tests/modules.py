"""Small LightningModules that tests share, made for either home of Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from types import ModuleType
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_solo.data.loss_weights import IGNORED
from lightning_solo.memory.ledger import Ledger
from lightning_solo.presets.compose import compose

CLASSES = 32
OF_DOCUMENTS = {"packing"}
"""Techniques that take batches of documents alone."""
PRESETS_OF_DOCUMENTS = {*OF_DOCUMENTS, "curriculum"}
"""Presets that do: that of the curriculum cuts sequences, which its technique does not by default."""


composed = cache(compose)
"""A preset composed once for all files of tests that ask for it while they are collected; to be read alone."""


class Block(nn.Module):
    """A residual block of two linear layers: (batch, width) -> (batch, width)."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.relu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """A head and ``blocks`` equal blocks."""

    def __init__(self, blocks: int = 3, width: int = 8, dropout: float = 0.0, outputs: int = 1) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width, dropout) for _ in range(blocks)])
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class Classifier(Stack):
    """A stack whose head makes the logits of classes, and is known by Hugging Face's method."""

    def __init__(self, blocks: int = 3, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__(blocks, width, dropout, outputs=CLASSES)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error."""
    return nn.functional.mse_loss(outputs.float(), targets.float())


def regression(
    home: ModuleType,
    net: nn.Module | None = None,
    lr: float = 1e-2,
    loss: Callable[[Tensor, Tensor], Tensor] = squares,
    **attributes: Any,
) -> Any:
    """Return a LightningModule of ``home`` that fits ``net`` to targets by a loss, of mean squares, with AdamW.

    Of a batch of documents it takes each token, and as its target the next one.
    """

    class Regression(home.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Stack() if net is None else net

        def step(self, batch: Any) -> Tensor:
            x, y = tokens_of(batch, self.net.head) if isinstance(batch, Mapping) else batch
            return loss(self.net(x), y)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.step(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("validation/loss", self.step(batch))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test/loss", self.step(batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=lr)

    module = Regression()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def class_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy with targets (batch, 1) around 0, cut into classes."""
    half = CLASSES // 2
    return nn.functional.cross_entropy(outputs.float(), targets[:, 0].long().clamp(-half, half - 1) + half)


def classification(home: ModuleType, net: nn.Module | None = None, lr: float = 1e-2) -> Any:
    """Return a LightningModule as `regression`, of a `Classifier` with its cross-entropy."""
    return regression(home, net or Classifier(), lr, class_loss)


class Rows(TensorDataset):
    """Rows of tensors, and a column that gives them different lengths."""

    column_names = ("length",)

    def __getitem__(self, index: Any) -> Any:
        return (
            [7 * row % len(self) + 1 for row in range(len(self))] if index == "length" else super().__getitem__(index)
        )


def loader(batches: int = 10, batch_size: int = 4, width: int = 8, seed: int = 1) -> DataLoader[Any]:
    """Return an unshuffled loader of ``batches`` batches of x: (batch, width), y: (batch, 1)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batches * batch_size, width, generator=generator)
    return DataLoader(Rows(x, x.sum(1, keepdim=True)), batch_size=batch_size)


LENGTHS = [1 + 7 * row % 20 for row in range(24)]


class Documents(Dataset[Any]):
    """Tokens by index, the first of which is the index."""

    def __init__(self, lengths: Sequence[int], vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]
        for index, tokens in enumerate(self.tokens):
            tokens[:1] = index % vocabulary

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


def collate_documents(items: list[Tensor]) -> dict[str, Tensor]:
    """Collate as Hugging Face does: padded on the right, to a multiple of 4."""
    width = -(-max(map(len, items)) // 4) * 4
    padding = [torch.zeros(width - len(item), dtype=torch.int64) for item in items]
    tokens = pad_sequence([torch.cat(pair) for pair in zip(items, padding, strict=True)], batch_first=True)
    mask = (torch.arange(width)[None] < torch.tensor([len(item) for item in items])[:, None]).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, IGNORED)}


def documents(lengths: Sequence[int] = LENGTHS, vocabulary: int = CLASSES // 2, **options: Any) -> DataLoader[Any]:
    """Return a loader of documents of these lengths, 4 to a batch."""
    options = {"batch_size": 4, "collate_fn": collate_documents, **options}
    return DataLoader(Documents(lengths, vocabulary), **options)


class Texts(Dataset[Any]):
    """Items of different lengths, whose tokens are their numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2 + index * 7 % 11,), index + 1)


def padded(items: list[Tensor]) -> dict[str, Tensor]:
    """Collate `Texts`: padded on the right with 0."""
    tokens = pad_sequence(items, batch_first=True)
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == 0, IGNORED)}


def tokens_of(batch: Mapping[str, Tensor], head: nn.Linear) -> tuple[Tensor, Tensor]:
    """Return the tokens of documents that have a next one, as a model's inputs (tokens, width), and the next ones."""
    has_next = batch["labels"][:, 1:] != IGNORED
    tokens = batch["input_ids"][:, :-1][has_next]
    x = torch.sin(tokens[:, None] * torch.arange(1, head.in_features + 1, device=tokens.device))
    return x.to(head.weight.dtype), batch["labels"][:, 1:][has_next][:, None]


class Held(Callback):
    """The most that a fit holds, from its first batch on."""

    peak_bytes = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.ledger = Ledger(pl_module, trainer.optimizers)
        self.on = ExitStack()
        self.on.enter_context(
            torch.compiler.set_stance("force_eager")
        )  # else dynamo would never compile these functions
        self.on.enter_context(self.ledger)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.peak_bytes = self.ledger.peak_bytes
        self.on.close()


class Resumable:
    """A loader that continues where it was; after its last batch it begins again."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.start = batches, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for index in range(start, len(self.batches)):
            self.next = index
            yield self.batches[index]

    def state_dict(self) -> dict[str, int]:
        return {"next": (self.next + 1) % len(self.batches)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["next"]


class Experts(nn.Module):
    """Two experts, in parameters of three dimensions, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(2, 24, 16) / 8)
        self.down = nn.Parameter(torch.randn(2, 16, 24) / 8)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + (x @ up.t()).relu() @ down.t()
        return x


class Mixture(nn.Module):
    """A transformer's layer of torch, which reads its parts' weights, and experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder, self.experts = nn.TransformerEncoder(layer, 1), Experts()
        self.cross = nn.MultiheadAttention(16, 2, kdim=8, vdim=24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        return self.experts(x) + self.cross(x, x[..., :8], torch.cat([x, x[..., :8]], -1))[0]
