"""An 8-bit optimizer of bitsandbytes in a loop, with weights in bf16."""

import bitsandbytes
import project
import torch


def main() -> None:
    model = project.model().to(project.DEVICE, torch.bfloat16).train()
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), **project.ADAMW)
    for _, batch in zip(range(project.STEPS), project.loader(), strict=False):
        loss = model(**{name: tensor.to(project.DEVICE) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), project.CLIP)
        optimizer.step()
        optimizer.zero_grad()
