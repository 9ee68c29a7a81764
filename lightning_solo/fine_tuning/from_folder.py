"""Training of a model of transformers from a folder: optimizer, schedule, logs, and checks of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric

from lightning_solo.data.tokenizers import add_tokens, tokenizer_of
from lightning_solo.errors import CheckpointError, PresetError
from lightning_solo.export.trained_models import ARCHITECTURE, architecture_of
from lightning_solo.fine_tuning.loading import config_of, folder_of, load, without_numbers
from lightning_solo.nn.adapter_weights import RECORD
from lightning_solo.nn.embedding_rows import add_rows, names_of_tables
from lightning_solo.nn.parameter_groups import parameter_groups
from lightning_solo.nn.quantized import QuantizedWeight
from lightning_solo.optim.schedules import continued_rates, scheduled


class FromFolder(L.LightningModule):
    """A model of transformers, loaded from a folder when the fit begins.

    Args:
        options: arguments of `load`; the others are those of `causal_lm.HFCausalLM`.

    Attributes:
        config: transformers' configuration.
        model: transformers' model; None before ``configure_model``.
        trainable_token_indices: name of the embedding, and of a head with its own weight -> rows of new tokens, which
            adapters train.
    """

    auto = ""
    model: Any

    def __init__(
        self,
        path: str,
        warmup_steps: int,
        early_stopping: int | None,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None,
        new_tokens: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__()
        self.path = str(folder_of(path))
        self.config = config_of(Path(self.path))
        self.optimizer = optimizer or partial(torch.optim.AdamW, lr=2e-4, weight_decay=0.0)
        self.warmup_steps, self.early_stopping = warmup_steps, early_stopping
        self.new_tokens = list(new_tokens)
        self.trainable_token_indices: dict[str, list[int]] = {}
        self.model = None
        self._options = options
        self._computed: list[tuple[torch.nn.Module, str]] = []
        # metrics, since self.log sums plain numbers in the default dtype, which is bf16 under "bf16-true"
        self.losses = torch.nn.ModuleDict({stage: MeanMetric() for stage in ("validation", "test")})
        if without_numbers():  # a plan, whose configure_model would run too late
            self.configure_model()

    def setup(self, stage: str) -> None:
        """Check that the data suits the model."""
        data, config = getattr(self.trainer, "datamodule", None), self.config.get_text_config()
        length, positions = getattr(data, "max_length", None), getattr(config, "max_position_embeddings", None)
        if length and positions and length > positions:
            raise PresetError(
                f"data.max_length={length}: the model in {self.path} has {positions} positions; write"
                f" data.max_length={positions} or less"
            )
        if (others := list(getattr(data, "new_tokens", self.new_tokens))) != self.new_tokens:
            raise PresetError(
                f"data.new_tokens has {len(others)} tokens, and model.new_tokens {len(self.new_tokens)}; write the same"
                " file for both"
            )
        words, rows = getattr(data, "vocabulary", None), getattr(config, "vocab_size", None)
        if words and rows and words - len(self.new_tokens) > rows:
            raise PresetError(
                f"data.tokenizer has {words} tokens, and the model in {self.path} embeddings of {rows}; write"
                " data.tokenizer=<the model's own folder>"
            )

    def configure_model(self) -> None:
        """Load the model, once.

        Raises:
            CheckpointError: a file or tensor is missing, damaged or of another shape.
        """
        if self.model is not None:
            return
        self.model = load(self.auto, Path(self.path), self.config, **self._options)
        if self.new_tokens:
            pieces = add_tokens(tokenizer_of(self.path), self.new_tokens)
            add_rows(self.model, pieces)
            tables = names_of_tables(self, self.model)
            self.trainable_token_indices = dict.fromkeys(tables, sorted(pieces)) if pieces else {}
        self._computed = [
            (part, name)
            for part in self.model.modules()
            if not isinstance(part, QuantizedWeight)
            for name, buffer in part._buffers.items()
            if name in part._non_persistent_buffers_set and buffer is not None and buffer.is_floating_point()
        ]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keep the type of buffers that aren't in the files, such as frequencies, which 16 bits would spoil."""
        before = [(part, name, part._buffers[name]) for part, name in self._computed]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for part, name, buffer in before:
            now = part._buffers[name]
            if buffer is not None and now is not None and now.dtype is not buffer.dtype:
                part._buffers[name] = buffer.to(now.device)
        return self

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record class and configuration."""
        checkpoint[ARCHITECTURE] = architecture_of(self.model)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse adapters alone, unless a Trainer loads them."""
        if RECORD in checkpoint and self._trainer is None:
            raise CheckpointError(
                "the checkpoint has adapters alone, which load_from_checkpoint can't load; write module ="
                f" {type(self).__name__}({self.path!r}), then module.configure_model(), and then"
                " solo.load_adapters(module, <the checkpoint>)"
            )

    def configure_callbacks(self) -> list[Callback]:
        """Return the callback that stops a run whose validation loss no longer falls."""
        if self.early_stopping is None:
            return []
        return [EarlyStopping("validation/loss", patience=self.early_stopping, check_on_train_epoch_end=False)]

    def configure_optimizers(self) -> Any:
        """Return the optimizer of all parameters that are trained; biases and norms don't decay.

        Raises:
            PresetError: all weights are frozen, or adapters freeze a part that the folder lacks.
        """
        if not any(p.requires_grad for p in self.parameters()):
            raise PresetError(
                f"the weights of {self.path} are frozen, so nothing is trained; write solo=qlora, or another preset"
                " with adapters"
            )
        self._check_new_parts()
        self._check_new_rows()
        optimizer = self.optimizer(parameter_groups(self, self.optimizer))
        steps = self.trainer.estimated_stepping_batches
        if steps <= self.warmup_steps:
            rank_zero_warn(
                f"model.warmup_steps={self.warmup_steps}: the run has {steps:.0f} steps, so the learning rate never"
                f" reaches its peak; write model.warmup_steps={round(steps) // 10}"
            )
        return scheduled(optimizer, warmup_steps=self.warmup_steps, total_steps=steps)

    def _check_new_parts(self) -> None:
        """Refuse to freeze parts that the folder lacks: they would stay random, and be in no checkpoint."""
        new = {id(p) for p in getattr(self.model, "newly_initialised", ())}
        frozen = {
            name.rpartition(".")[0] for name, p in self.model.named_parameters() if id(p) in new and not p.requires_grad
        }
        if parts := sorted(name.removesuffix(".base_layer") for name in frozen if not name.endswith("original_module")):
            raise PresetError(
                f"{self.path} has no weights for {', '.join(parts)}, which adapters freeze; write"
                f" solo.callback.adapters.modules_to_save=[{','.join(parts)}], so that they are trained"
            )

    def _check_new_rows(self) -> None:
        """Warn of new tokens whose rows are frozen."""
        table = self.model.get_input_embeddings()  # under adapters with the rows that they train
        if self.trainable_token_indices and not any(p.requires_grad for p in table.parameters()):
            rank_zero_warn(
                f"model.new_tokens: the rows of {len(self.new_tokens)} new tokens in the embedding are frozen, and stay"
                " at the mean of their pieces; write solo=adapters, which trains these rows, or unfreeze the embedding"
            )

    def on_train_start(self) -> None:
        """Set the learning rate of a resumed run by the schedule to the run's new end."""
        scheduler = self.lr_schedulers()
        if isinstance(scheduler, LambdaLR) and self.trainer.global_step and (rates := continued_rates(scheduler)):
            rank_zero_info(
                f"learning rate: the schedule ends at step {self.trainer.estimated_stepping_batches:.0f} now, so"
                f" that the rate continues at {rates[0]:.2g}"
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Log the learning rate."""
        rate = float(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("train/learning_rate", torch.tensor(rate, dtype=torch.float32))

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the mean cross-entropy over the labels, in fp32, and their number."""
        raise NotImplementedError

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)[0]
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch["input_ids"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.evaluate("validation", batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.evaluate("test", batch)

    def evaluate(self, stage: str, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Log the loss of a batch as ``validation/loss`` or ``test/loss``; return the results of `loss`."""
        loss, count, *others = self.loss(batch)
        metric = cast(MeanMetric, self.losses[stage])
        metric.set_dtype(torch.float32)  # "bf16-true" converts it with the module
        metric.update(loss, weight=count)
        self.log(f"{stage}/loss", metric, batch_size=len(batch["input_ids"]), prog_bar=True)
        return loss, count, *others
