"""offload_adam in a loop: states on the host, streamed, and updated on the device in backward; needs a GPU."""

import project
import torch
from offload_adam import OffloadAdam


def main() -> None:
    model = project.model().to(project.DEVICE, torch.bfloat16).train()
    optimizer = OffloadAdam(model, **project.ADAMW, mode="stochastic_rounding", decoupled_weight_decay=True)
    for _, batch in zip(range(project.STEPS), project.loader(), strict=False):
        optimizer.ready_for_optimizer_step = True
        loss = model(**{name: tensor.to(project.DEVICE) for name, tensor in batch.items()}).loss
        loss.backward()
        optimizer.step()
