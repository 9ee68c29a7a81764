"""Checks that the Trainer got every argument of the preset."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_solo.cards.configuration import Configuration
from lightning_solo.checkpoint.damage import loaded
from lightning_solo.data.batch_size import size_of
from lightning_solo.errors import BudgetError, CapabilityError, ConflictError
from lightning_solo.optim.adamw_state_dict import require_plain_states, unmarked
from lightning_solo.optim.window_gradients import warn_of_dropped_window
from lightning_solo.presets.parse import contradiction
from lightning_solo.seams import patches
from lightning_solo.seams.engines import agreed
from lightning_solo.seams.run import warn_of_short_epoch

log = logging.getLogger(__name__)


class PresetGuard(Callback):
    """Compares the Trainer with the preset's arguments when a run starts.

    Python refuses an argument that is passed twice: ``Trainer(**trainer_kwargs("bf16"), precision="32-true")``. This
    callback refuses an argument that was replaced: ``Trainer(**{**trainer_kwargs("bf16"), **cfg.trainer})``. If that
    mapping replaces ``callbacks``, nothing is checked, because this callback is lost with the preset's others.

    Args:
        promised: the preset's Trainer arguments.
        advise: returns the presets that would fit the module, for the message of a BudgetError.
        configuration: the preset; its summary is logged when a fit starts.
    """

    def __init__(
        self,
        promised: Mapping[str, Any],
        advise: Callable[[LightningModule], str] | None = None,
        configuration: Configuration | None = None,
    ) -> None:
        self.promised = dict(promised)
        self.configuration = configuration
        self._advise = advise
        self._factor = 1  # batches per optimizer step without the preset
        self._samples: int | None = None  # of the first batch
        self._is_first = False  # until the first backward of a fit
        self._undo = ExitStack()
        self._window_loaded = False  # whether the checkpoint of this run has released gradients of an open window

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a Trainer whose arguments differ from the preset's, and, when it is read, a damaged checkpoint.

        Raises:
            ConflictError: the Trainer got another value; names both and the remedy.
            CapabilityError: the preset needs a CUDA device, and the Trainer runs on another one.
        """
        self._window_loaded = False  # of another run of this Trainer
        self._undo.close()
        self._is_first = trainer.state.fn == "fit"
        self._factor = 1 if "accumulate_grad_batches" in self.promised else trainer.accumulate_grad_batches
        for name, value, actual in self._differences(trainer):
            if name == "devices" and not self._has_engine:
                raise ConflictError((self.configuration or Configuration()).one_device(f"Trainer(devices={actual})"))
            accepted = self.configuration is not None and self.configuration.accepts(name, actual)
            raise ConflictError(contradiction(name, actual, value, accepted))
        device = trainer.strategy.root_device.type
        if self.promised.get("accelerator") == "cuda" and device != "cuda":
            raise CapabilityError(
                f"the preset needs a CUDA device, but the Trainer runs on {device}; drop accelerator="
            )
        if self.configuration is not None and self._is_first:
            rank_zero_info(f"lightning-solo: {self.configuration.summary}")
        self._undo.enter_context(patches.checkpoint_reads(trainer.strategy, lambda stock: partial(loaded, stock)))

    @property
    def _has_engine(self) -> bool:
        return self.configuration is not None and bool(self.configuration.engine)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse different numbers of batches in processes."""
        self._require_equal(trainer.num_val_batches, "validation")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse different numbers of batches in processes."""
        self._require_equal(trainer.num_test_batches, "test")

    def _require_equal(self, numbers: Sequence[int | float], of: str) -> None:
        if self._has_engine:
            remedy = "write DataLoader(drop_last=True), or split an iterable data set into equal parts"
            each = [int(min(number, 2**62)) for number in numbers]
            agreed(each[0] if len(each) == 1 else each, f"the number of {of} batches", remedy)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the strategy's method."""
        self._undo.close()

    def _differences(self, trainer: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yield (name, promised value, the Trainer's value) of each argument that differs."""
        actual: dict[str, Any] = {
            "devices": trainer.num_devices if self._has_engine else trainer.num_devices * trainer.num_nodes,
            "precision": trainer.precision,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "strategy": trainer.strategy,
        }
        for name, value in self.promised.items():
            if name in actual and actual[name] is not value and actual[name] != value:
                yield name, value, actual[name]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Prepare the checks of `on_train_start`: torch's optimizers load compact states, and ignore an open window."""
        states = checkpoint.get("optimizer_states", [])
        self._window_loaded = any("window" in state for state in states)
        states[:] = map(unmarked, states)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse checkpoint states that this run's optimizers can't use; warn of a dropped window or a short epoch.

        Raises:
            CheckpointError: the checkpoint was saved with compact states, and this run has none.
            ConflictError: processes have different numbers of batches, and would wait for one another.
        """
        self._require_equal([trainer.num_training_batches], "training")
        for optimizer in trainer.optimizers:
            require_plain_states(optimizer)
        run = getattr(trainer.strategy, "solo_run", None)
        if run is None:  # a run with techniques warns itself, since they may change the factor
            warn_of_short_epoch(trainer)
        releases = run is not None and run.window.gradients_saved and not run.window.gradients_stay
        if self._window_loaded and not releases:  # gradient release has loaded the window, or has warned
            warn_of_dropped_window()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the samples of the first batch."""
        if self._is_first:
            self._samples = size_of(batch)[0]

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Log the effective batch size if the preset changes it; by now techniques have set their factors."""
        factor = trainer.accumulate_grad_batches
        if self._is_first and factor != self._factor:
            samples = "" if self._samples is None else f" of {self._samples} samples: {factor * self._samples} samples"
            rank_zero_info(
                f"lightning-solo: the preset changes the effective batch: an optimizer step takes {factor} batches"
                f"{samples}; without the preset it takes {self._factor} batch{'' if self._factor == 1 else 'es'}"
            )
        self._is_first = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tell other processes of the failure; add the presets that would fit to the message of a BudgetError."""
        if (peers := getattr(trainer.strategy, "peers", None)) is not None:
            peers.failed(exception)
        self._undo.close()
        if self._advise is None or not isinstance(exception, BudgetError):
            return
        try:
            advice = self._advise(pl_module)
        except Exception:  # the advice must not replace the error
            log.warning("lightning-solo: the presets that would fit could not be found", exc_info=True)
            return
        message = str(exception)
        if advice not in message:
            exception.args = (f"{message}\n{advice}",)
