"""Sees to it that what a preset promised is what the Trainer does: nothing of a preset is lost in silence."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_solo.errors import BudgetError, CapabilityError, ConflictError

log = logging.getLogger(__name__)


class PresetGuard(Callback):
    """Compares the Trainer with the preset's arguments when a run starts.

    Python itself refuses ``Trainer(**trainer_kwargs("bf16"), precision="32-true")``: an argument given twice. This
    callback finds what gets past Python: ``Trainer(**{**trainer_kwargs("bf16"), **cfg.trainer})``. Where that mapping
    replaces ``callbacks``, this one is lost with the others; then it says so in the log when it is thrown away.

    Args:
        promised: the arguments that the preset made for the Trainer.
        advise: returns what to add to the message of a BudgetError: the presets that would fit the module.
    """

    def __init__(self, promised: Mapping[str, Any], advise: Callable[[LightningModule], str] | None = None) -> None:
        self.promised = {key: value for key, value in promised.items() if key != "callbacks"}
        self._advise = advise
        self._attached = [False]  # shared with the finalizer, which must not hold the guard itself
        names = [type(callback).__name__ for callback in promised.get("callbacks", ())]
        if names:
            weakref.finalize(self, _say_if_lost, self._attached, names)

    @property
    def state_key(self) -> str:
        """The key of our (empty) state; a Trainer asks for it when it takes its callbacks over."""
        self._attached[0] = True
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Nothing; overridden, because a Trainer asks only callbacks with a state of their own for their key."""
        return {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a Trainer that is not as the preset promised.

        Raises:
            ConflictError: the Trainer was given another value; names both and what to write.
            CapabilityError: the preset needs a CUDA device and the Trainer runs on another.
        """
        actual: dict[str, Any] = {
            "devices": trainer.num_devices * trainer.num_nodes,
            "precision": trainer.precision,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "strategy": trainer.strategy,
        }
        for name, value in self.promised.items():
            if name in actual and actual[name] is not value and actual[name] != value:
                if name == "devices":
                    raise ConflictError(f"Trainer(devices={actual[name]}): lightning-solo is for one device, devices=1")
                raise ConflictError(
                    f"the preset sets {name}={value!r}, but the Trainer was given {actual[name]!r}; drop {name} from "
                    f"the Trainer's arguments, or give it to the preset: overrides=['{name}={actual[name]}']"
                )
        device = trainer.strategy.root_device.type
        if self.promised.get("accelerator") == "cuda" and device != "cuda":
            raise CapabilityError(
                f"the preset needs a CUDA device, but the Trainer runs on {device}; drop accelerator="
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Add to an error about memory the presets that would fit; whoever raised it knows only its own bytes."""
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


def _say_if_lost(attached: list[bool], names: list[str]) -> None:
    if not attached[0]:
        log.warning(
            "lightning-solo: the callbacks of a preset (%s) never reached a Trainer; if `callbacks` was replaced in a "
            "merged mapping, give yours to the preset instead: trainer_kwargs(..., callbacks=[...])",
            ", ".join(names),
        )
