"""An optimizer of torchao in a loop: weights in bf16, rounded stochastically, as its documentation advises."""

from typing import Any

import project
import torch
import torchao.optim


def main(optimizer: Any = "AdamW8bit") -> None:
    model = project.model().to(project.DEVICE, torch.bfloat16).train()
    optimizer = getattr(torchao.optim, optimizer)(model.parameters(), **project.ADAMW, bf16_stochastic_round=True)
    for _, batch in zip(range(project.STEPS), project.loader(), strict=False):
        loss = model(**{name: tensor.to(project.DEVICE) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), project.CLIP)
        optimizer.step()
        optimizer.zero_grad()
