"""Language models of transformers from a folder, to fine-tune on batches of tokens with labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.data.loss_weights import IGNORED
from lightning_solo.data.tokenizers import new_tokens_of
from lightning_solo.errors import PresetError
from lightning_solo.fine_tuning.from_folder import FromFolder
from lightning_solo.fine_tuning.loading import folder_of
from lightning_solo.fine_tuning.samples import Samples
from lightning_solo.nn.quantized import FORMATS


class HFCausalLM(FromFolder):
    """A causal language model from a folder; the loss is the mean over the labels of a batch.

    A batch has ``input_ids`` and ``labels``, (batch, sequence), and where needed ``attention_mask`` and
    ``position_ids``. A label is the token at its own position, or -100 where none is trained.

    Args:
        path: folder with config.json, safetensors and tokenizer.
        warmup_steps: optimizer steps in which the learning rate rises.
        dtype: type of the weights in memory: auto (as in the files), float32, bfloat16 or float16.
        quantized: "nf4" or "int8" loads the weights of linear layers in 4 or 8 bits, frozen, from a cache of mapped
            files; None loads them as they are.
        unused: patterns of names of tensors in the files that the model may lack.
        early_stopping: validations without a lower loss after which the run ends; None for no such end.
        samples: prompts that are answered at each validation, or the number of validation rows whose prompts are.
        sample_tokens: largest number of tokens of such an answer.
        new_tokens: texts that become tokens, or a file with one a line. Their rows in embedding and head start at the
            mean of the rows of the tokens that the text had before.
        optimizer: returns the optimizer of parameter groups; by default AdamW at 2e-4, a rate for adapters.

    Raises:
        CheckpointError: the folder isn't one of a model's 16- or 32-bit weights.
        CapabilityError: transformers is missing.
        PresetError: an argument is out of range.
    """

    auto = "AutoModelForCausalLM"

    def __init__(
        self,
        path: str,
        warmup_steps: int = 20,
        dtype: str = "auto",
        quantized: str | None = None,
        unused: Sequence[str] = (),
        early_stopping: int | None = None,
        samples: int | Sequence[str] = 0,
        sample_tokens: int = 64,
        new_tokens: str | Sequence[str] | None = None,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
    ) -> None:
        if quantized is not None and quantized not in FORMATS:
            raise PresetError(f"model.quantized={quantized!r}: write null or {' or '.join(FORMATS)}")
        path, unused = str(folder_of(path)), list(unused)
        new_tokens = new_tokens_of(new_tokens, "model.new_tokens")
        options: dict[str, Any] = {"dtype": dtype, "quantized": quantized, "unused": unused}
        super().__init__(path, warmup_steps, early_stopping, optimizer, new_tokens, **options)
        # an optimizer factory is code, which belongs neither in a checkpoint nor in a logger's table
        self.save_hyperparameters(ignore=["optimizer"])
        self.samples = samples if isinstance(samples, int) else list(samples)
        self.sample_tokens = sample_tokens

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the logits of each next token: (batch, sequence, vocabulary)."""
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids") if key in batch}
        return cast(Tensor, self.model(**inputs, use_cache=False).logits)

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the mean cross-entropy over the labels, in fp32, and their number; (0, 0) without labels."""
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)  # shifted; the logits aren't, and so not copied
        count = labels.ne(IGNORED).sum()
        logits = self(batch).float().flatten(0, 1)
        total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / count.clamp(min=1), count

    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks that stop the run early and write samples."""
        return [*super().configure_callbacks(), *([Samples(self.samples, self.sample_tokens)] if self.samples else [])]
