"""A loop of plain PyTorch."""

import project
import torch


def main(dtype: str = "float32", checkpointing: bool = False) -> None:
    model = project.model().to(project.DEVICE, getattr(torch, dtype)).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), **project.ADAMW, fused=True)
    for _, batch in zip(range(project.STEPS), project.loader(), strict=False):
        loss = model(**{name: tensor.to(project.DEVICE) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), project.CLIP)
        optimizer.step()
        optimizer.zero_grad()
