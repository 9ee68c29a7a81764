"""FlashAdamW in a loop: bf16 weights, a 24-bit master and 8-bit states, its defaults."""

import project
import torch
from flashoptim import FlashAdamW, cast_model


def main() -> None:
    model = project.model().to(project.DEVICE).train()
    cast_model(model, dtype=torch.bfloat16)
    optimizer = FlashAdamW(model.parameters(), **project.ADAMW)
    for _, batch in zip(range(project.STEPS), project.loader(), strict=False):
        loss = model(**{name: tensor.to(project.DEVICE) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), project.CLIP)
        optimizer.step()
        optimizer.zero_grad()
