"""Checks that the Trainer got every argument of the preset."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_solo.errors import BudgetError, CapabilityError, ConflictError
from lightning_solo.optim.adamw_state_dict import require_plain_states
from lightning_solo.optim.window_gradients import warn_of_dropped_window

log = logging.getLogger(__name__)


class PresetGuard(Callback):
    """Compares the Trainer with the preset's arguments when a run starts.

    Python itself refuses ``Trainer(**trainer_kwargs("bf16"), precision="32-true")``: an argument given twice. This
    callback finds what gets past Python: ``Trainer(**{**trainer_kwargs("bf16"), **cfg.trainer})``. Where that mapping
    replaces ``callbacks``, this one is lost with the others, and nothing is checked.

    Args:
        promised: the preset's arguments for the Trainer.
        advise: returns what to add to the message of a BudgetError: the presets that would fit the module.
    """

    def __init__(
        self,
        promised: Mapping[str, Any],
        advise: Callable[[LightningModule], str] | None = None,
    ) -> None:
        self.promised = dict(promised)
        self._advise = advise
        self._window_loaded = False  # whether the checkpoint of this run has released gradients of an open window

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a Trainer whose arguments differ from the preset's.

        Raises:
            ConflictError: the Trainer was given another value; names both and what to write.
            CapabilityError: the preset needs a CUDA device and the Trainer runs on another.
        """
        self._window_loaded = False  # of another run of this Trainer
        for name, value, actual in self._differences(trainer):
            if name == "devices":
                raise ConflictError(f"Trainer(devices={actual}): lightning-solo is for one device, devices=1")
            raise ConflictError(
                f"the preset sets {name}={value!r}, but the Trainer was given {actual!r}; drop {name} from "
                f"the Trainer's arguments, or give it to the preset: overrides=['{name}={actual}']"
            )
        device = trainer.strategy.root_device.type
        if self.promised.get("accelerator") == "cuda" and device != "cuda":
            raise CapabilityError(
                f"the preset needs a CUDA device, but the Trainer runs on {device}; drop accelerator="
            )

    def _differences(self, trainer: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yield each argument that a Trainer doesn't have as promised, with both values."""
        actual: dict[str, Any] = {
            "devices": trainer.num_devices * trainer.num_nodes,
            "precision": trainer.precision,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "strategy": trainer.strategy,
        }
        for name, value in self.promised.items():
            if name in actual and actual[name] is not value and actual[name] != value:
                yield name, value, actual[name]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Record whether the checkpoint has released gradients of an open window; torch's optimizers ignore those."""
        self._window_loaded = any("window" in state for state in checkpoint.get("optimizer_states", []))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse checkpoint states that this run's optimizers can't continue from; warn of a dropped window.

        Raises:
            CheckpointError: the checkpoint was saved under `compact` or a preset like it, and this run is under none.
        """
        for optimizer in trainer.optimizers:
            require_plain_states(optimizer)
        run = getattr(trainer.strategy, "solo_run", None)
        releases = run is not None and run.window.gradients_saved and not run.window.gradients_stay
        if self._window_loaded and not releases:  # gradient release has loaded the window, or has warned
            warn_of_dropped_window()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Add the presets that would fit to a memory error, whose raiser knows only its own bytes."""
        if self._advise is None or not isinstance(exception, BudgetError):
            return
        try:
            advice = self._advise(pl_module)
        except Exception:  # the advice must not take the place of the error
            log.warning("lightning-solo: the presets that would fit could not be found", exc_info=True)
            return
        message = str(exception)
        if advice not in message:
            exception.args = (f"{message}\n{advice}",)
