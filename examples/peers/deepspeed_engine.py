"""DeepSpeed's engine in a loop, without Lightning."""

import os
from typing import Any

import deepspeed
import project
import torch


def main(**options: Any) -> None:
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    config = {"train_micro_batch_size_per_gpu": project.BATCH, "gradient_clipping": project.CLIP, **options}
    model = project.model()
    if "optimizer" in options:
        config["optimizer"] = {"type": "AdamW", "params": project.ADAMW | options["optimizer"]}
        optimizer = None
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **project.ADAMW, fused=True)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=optimizer, config=config
    )
    for _, batch in zip(range(project.STEPS), project.loader(), strict=False):
        loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
        engine.backward(loss)
        engine.step()
