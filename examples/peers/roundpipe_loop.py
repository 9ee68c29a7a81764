"""RoundPipe in a loop: weights and states on the host, one block after another on the device; needs a GPU."""

from typing import Any

import project
import torch
from roundpipe import wrap_model_to_roundpipe
from roundpipe.optim import Adam


def main() -> None:
    model = wrap_model_to_roundpipe(project.model().bfloat16(), use_sequential_preset=True)
    optimizer = Adam(model.optim_parameters(), lr=project.ADAMW["lr"], betas=project.ADAMW["betas"])

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.optim_parameters(), project.CLIP)
        optimizer.step()
        optimizer.zero_grad()

    for _, batch in zip(range(project.STEPS), project.loader(), strict=False):
        loss: Any = model.forward_backward(input_kwargs=batch, loss_fn=lambda outputs, label: outputs.loss)
        project.seen(loss)
        model.step(step, is_async=False)
