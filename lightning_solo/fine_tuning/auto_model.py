"""Encoders, encoder-decoders and classifiers of transformers from a folder, to fine-tune on labelled rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_solo.data.loss_weights import IGNORED
from lightning_solo.errors import PresetError, nearest
from lightning_solo.fine_tuning.from_folder import FromFolder
from lightning_solo.fine_tuning.loading import folder_of, without_numbers

TASKS = {
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
}
"""Task -> class of transformers."""
PLANNED = 256
"""Labels of a planned classifier."""


class HFAuto(FromFolder):
    """A model from a folder for one of `TASKS`; the loss is the mean cross-entropy over the labels of a batch.

    A batch has ``input_ids``, ``attention_mask`` and ``labels``: (batch,) for sequences, else (batch, sequence) with
    -100 where there is none. A classifier's head that the folder lacks, or has for other labels, is initialised; a line
    names its weights.

    Args:
        path: folder with config.json, safetensors and tokenizer.
        task: one of `TASKS`.
        warmup_steps: optimizer steps in which the learning rate rises.
        dtype: type of the weights in memory: auto (as in the files), float32, bfloat16 or float16.
        unused: patterns of names of tensors in the files that the model may lack.
        early_stopping: validations without a lower loss after which the run ends; None for no such end.
        labels: names of a classifier's labels; None for those of the data.
        optimizer: returns the optimizer of parameter groups; by default AdamW at 2e-4, a rate for adapters.

    Raises:
        CheckpointError: the folder isn't one of a model's 16- or 32-bit weights.
        CapabilityError: transformers is missing.
        PresetError: an unknown task.
    """

    def __init__(
        self,
        path: str,
        task: str,
        warmup_steps: int = 20,
        dtype: str = "auto",
        unused: Sequence[str] = (),
        early_stopping: int | None = None,
        labels: Sequence[str] | None = None,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
    ) -> None:
        if task not in TASKS:
            raise PresetError(f"model.task={task!r}{nearest(task, TASKS)}write one of {', '.join(TASKS)}")
        self.task, self.auto = task, TASKS[task]
        self.classifies = task.endswith("classification")
        self._labels = None if labels is None else list(labels)
        path, unused = str(folder_of(path)), list(unused)
        options: dict[str, Any] = {"dtype": dtype, "unused": unused, "new_head": self.classifies}
        super().__init__(path, warmup_steps, early_stopping, optimizer, **options)
        self.save_hyperparameters(ignore=["optimizer"])
        self.metrics = torch.nn.ModuleDict()
        if self._labels:
            self._make_metrics(self._labels)

    def setup(self, stage: str) -> None:
        """Take the labels' names from the data, and check that it suits the model.

        Raises:
            PresetError: the data has other labels, too long rows, or too many tokens.
        """
        super().setup(stage)
        data: Any = getattr(self.trainer, "datamodule", None)
        names = getattr(data, "labels", None)
        if not self.classifies or not names:
            return
        if self._labels is None:
            self._labels = self.hparams["labels"] = list(names)
            self._make_metrics(self._labels)
        if self._labels != list(names):
            raise PresetError(f"the data has the labels {names}, and the model {self._labels}; write model.labels=null")
        if self.config.pad_token_id is None:
            self.config.pad_token_id = data.pad_token_id  # by which a decoder finds a row's last token

    def configure_model(self) -> None:
        """Load the model, once; in a plan, which doesn't know the labels, a classifier has `PLANNED` of them."""
        if self.classifies and self._labels is None and without_numbers():
            self.config.num_labels = PLANNED
        super().configure_model()

    def _make_metrics(self, labels: Sequence[str]) -> None:
        self.config.id2label = dict(enumerate(labels))
        self.config.label2id = {name: index for index, name in enumerate(labels)}
        options: dict[str, Any] = {"num_classes": len(labels), "ignore_index": IGNORED}
        for stage in ("validation", "test"):
            self.metrics[f"{stage}_accuracy"] = MulticlassAccuracy(average="micro", **options)
            self.metrics[f"{stage}_f1"] = MulticlassF1Score(**options)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the logits: of each row, or of each token."""
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        if self.task == "seq2seq_lm":
            inputs["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
            inputs["use_cache"] = cast(Any, False)
        return cast(Tensor, self.model(**inputs).logits)

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the mean cross-entropy over the labels, in fp32, their number, and the logits."""
        logits, labels = self(batch), batch["labels"]
        count = labels.ne(IGNORED).sum()
        flat = logits if labels.dim() == 1 else logits.flatten(0, 1)
        total = F.cross_entropy(flat.float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / count.clamp(min=1), count, logits

    def evaluate(self, stage: str, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Log the loss of a batch, and a classifier's accuracy and F1."""
        loss, count, logits = super().evaluate(stage, batch)
        for name, metric in self.metrics.items():
            if name.startswith(stage):
                cast(Metric, metric).update(logits.argmax(-1), batch["labels"])
                self.log(f"{stage}/{name.removeprefix(f'{stage}_')}", cast(Metric, metric), batch_size=len(logits))
        return loss, count, logits

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        """Return for each row its label and the labels' probabilities, or its words' labels; else the logits."""
        logits = self(batch).float()
        if not self.classifies or self._labels is None:
            return logits
        best, names = logits.argmax(-1).tolist(), self._labels
        if self.task == "token_classification":
            words = batch["labels"].ne(IGNORED).tolist()  # true at the first token of each word
            return [
                {"labels": [names[index] for index, is_first in zip(row, firsts, strict=True) if is_first]}
                for row, firsts in zip(best, words, strict=True)
            ]
        return [
            {"label": names[index], "probabilities": dict(zip(names, row, strict=True))}
            for index, row in zip(best, logits.softmax(-1).tolist(), strict=True)
        ]
