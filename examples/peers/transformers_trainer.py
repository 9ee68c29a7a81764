"""The Trainer of transformers, which runs on accelerate."""

import tempfile
from typing import Any

import project
from transformers import Trainer, TrainingArguments


def main(**options: Any) -> None:
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=project.STEPS,
        per_device_train_batch_size=project.BATCH,
        learning_rate=project.ADAMW["lr"],
        adam_beta1=project.ADAMW["betas"][0],
        adam_beta2=project.ADAMW["betas"][1],
        adam_epsilon=project.ADAMW["eps"],
        weight_decay=project.ADAMW["weight_decay"],
        max_grad_norm=project.CLIP,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    Trainer(project.model(), arguments, train_dataset=project.Windows()).train()
