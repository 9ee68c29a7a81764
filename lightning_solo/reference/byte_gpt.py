"""A decoder-only transformer over bytes: little code, and sizes that fill a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from lightning_solo.nn.parameter_groups import parameter_groups
from lightning_solo.optim.schedules import scheduled

BYTES = 256


class Attention(nn.Module):
    """Causal self-attention: (batch, sequence, width) -> (batch, sequence, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return cast(Tensor, self.out(y.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """Two linear layers with a GELU between: (..., width) -> (..., width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    """A pre-norm transformer block: (batch, sequence, width) -> (batch, sequence, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return cast(Tensor, x + self.dropout(self.mlp(self.mlp_norm(x))))


class Perplexity(MeanMetric):
    """Exp of the mean cross entropy, exact over batches of any size if each is weighted by its targets.

    ``torchmetrics.text.Perplexity`` takes the logarithm of a softmax, which is infinite where a probability rounds
    to zero, and needs the logits a second time.
    """

    def compute(self) -> Tensor:
        return super().compute().exp()


class ByteGPT(L.LightningModule):
    """A GPT on bytes; a batch is a tensor (batch, context + 1) of bytes, uint8 or int64.

    Args:
        width: Width of the residual stream.
        depth: Number of blocks.
        heads: Attention heads per block; divides ``width``.
        context: Longest sequence, in bytes.
        dropout: Probability of dropping, in attention and after each half of a block.
        tie_weights: Use the embedding as the output layer as well.
        warmup_steps: Optimizer steps until the learning rate is at its full height.
        optimizer: Makes the optimizer from parameter groups, e.g. ``functools.partial(torch.optim.AdamW, lr=1e-3)``.
    """

    def __init__(
        self,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.0,
        tie_weights: bool = True,
        warmup_steps: int = 50,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} is no multiple of heads={heads}; try width={-(-width // heads) * heads}")
        # an optimizer factory is code, which belongs neither in a checkpoint nor in a logger's table
        self.save_hyperparameters(ignore=["optimizer"])
        self.context = context
        self.warmup_steps = warmup_steps
        self.optimizer: Callable[[Iterable[Any]], Optimizer] = optimizer or partial(
            torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.95)
        )
        self.embedding = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        blocks = [Block(width, heads, dropout) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.apply(init_weights)
        for block in blocks:
            # GPT-2 (Radford et al. 2019, section 2.3): 2 * depth branches add up in the residual stream
            for layer in (block.attention.out, block.mlp.down):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * depth))
        if tie_weights:
            self.head.weight = self.embedding.weight
        # metrics, since self.log sums plain numbers in the default dtype, which is bf16 under "bf16-true"
        self.losses = nn.ModuleDict({stage: MeanMetric() for stage in ("validation", "test")})
        self.perplexities = nn.ModuleDict({stage: Perplexity() for stage in ("validation", "test")})

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each next byte: (batch, sequence) -> (batch, sequence, 256)."""
        places = torch.arange(x.shape[1], device=x.device)
        h = self.dropout(self.embedding(x.long()) + self.positions(places))
        for block in self.blocks:
            h = block(h)
        return cast(Tensor, self.head(self.norm(h)))

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean cross entropy of the last ``context`` bytes, in fp32."""
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten().long())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate("validation", batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the likeliest next byte at each place: (batch, context)."""
        return cast(Tensor, self(batch[:, :-1]).argmax(-1))

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(parameter_groups(self, self.optimizer))
        return scheduled(optimizer, warmup_steps=self.warmup_steps, total_steps=self.trainer.estimated_stepping_batches)

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, seed: int = 0) -> bytes:
        """Return ``length`` bytes sampled one by one after a prompt of at least one byte."""
        training = self.training
        self.eval()
        generator = torch.Generator(self.device).manual_seed(seed)
        text = torch.tensor([list(prompt)], device=self.device)
        for _ in range(length):
            logits = self(text[:, -self.context :])[:, -1].float()
            following = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            text = torch.cat([text, following], dim=1)
        self.train(training)
        return bytes(text[0, len(prompt) :].tolist())

    def _evaluate(self, stage: str, batch: Tensor) -> None:
        loss, targets = self.loss(batch), batch[:, 1:].numel()
        for name, metrics in (("loss", self.losses), ("perplexity", self.perplexities)):
            metric = cast(MeanMetric, metrics[stage])
            metric.set_dtype(torch.float32)  # "bf16-true" converts it with the module
            metric.update(loss, weight=targets)
            self.log(f"{stage}/{name}", metric, batch_size=batch.shape[0], prog_bar=name == "perplexity")


def init_weights(module: nn.Module) -> None:
    """Draw the weights of a linear layer or an embedding as GPT-2 does, and set its bias to zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
