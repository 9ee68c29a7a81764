"""Eight lines: the embedded byte GPT under the preset `checkpointing`, fifty steps, on whatever device is here."""

import lightning as L

import lightning_solo as solo
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.reference.stdlib_text import StdlibText

L.seed_everything(0, verbose=False)
data = StdlibText(context=128, batch_size=16, validation_batches=8)
trainer = L.Trainer(**solo.trainer_kwargs("checkpointing"), max_steps=50, enable_checkpointing=False, logger=False)
trainer.fit(ByteGPT(context=128), data)
print(f"validation perplexity {trainer.callback_metrics['validation/perplexity']:.1f}")
