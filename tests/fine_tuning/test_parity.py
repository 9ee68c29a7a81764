"""Losses of a fit equal those of transformers' Trainer with peft, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_solo.fine_tuning.causal_lm import HFCausalLM
from lightning_solo.techniques.adapters.technique import Adapters
from tests.fine_tuning.conftest import KINDS, Rows, padded

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")


class Randomised(Adapters):
    """Adapters whose second factors aren't zero."""

    def transform(self, ctx: Any) -> None:
        super().transform(ctx)
        randomise(ctx.module)


def randomise(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(9)
    for name, p in module.named_parameters():
        if ".lora_B." in name:
            p.data = 0.05 * torch.randn(p.shape, generator=generator)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("Mixtral", "Qwen3Moe")])
def test_sixty_losses_of_padded_rows_equal_those_of_transformers_trainer(
    kind: str, model_folder: Callable[..., Path], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if kind == "GPT2" else {}
    folder, data, ours = model_folder(kind, **without_dropout), Rows(rows=240, batch_size=4), list[float]()

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
            ours.append(outputs["loss"].item())

    class Constant(HFCausalLM):
        def configure_optimizers(self) -> Any:
            return super().configure_optimizers()["optimizer"]

    module = Constant(str(folder), warmup_steps=0, optimizer=partial(torch.optim.AdamW, lr=5e-3, weight_decay=0.0))
    module.configure_model()
    torch.manual_seed(1)
    trainer = make_trainer(L, callbacks=[Randomised(r=4, alpha=8), Watch()], gradient_clip_val=1.0, limit_val_batches=0)
    trainer.fit(module, data)
    theirs: list[float] = []
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    randomise(model)

    class InOrder(transformers.Trainer):  # type: ignore[misc,name-defined]
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(data.rows)  # type: ignore[arg-type]

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            theirs.append(loss.item())
            return loss

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_train_epochs=1, max_grad_norm=1.0, use_cpu=True,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, lr_scheduler_type="constant",
        remove_unused_columns=False,
    )  # fmt: skip
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)
    InOrder(
        model=model, args=arguments, train_dataset=data.rows, data_collator=padded, optimizers=(optimizer, None)
    ).train()
    assert len(ours) == 60
    assert ours == theirs
